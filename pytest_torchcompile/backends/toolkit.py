"""Toolkit: a backend of one's own in one line. Dynamo and AOTAutograd capture, passes change the graph, torch runs it.

>>> compiled = torch.compile(model, backend=Toolkit(forward=replace("relu", torch.tanh)))     # doctest: +SKIP
>>> compiled = torch.compile(model, backend=Toolkit(backward=results(lambda found, _: [-r for r in found])))
...                                                                                            # doctest: +SKIP

``toolkit`` is the one without any pass, which computes what eager computes, as ``aot_eager`` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.errors import InstrumentError, UsageError, nearest

__all__ = [
    "Pass",
    "Runner",
    "Toolkit",
    "both",
    "calls",
    "drop",
    "edit",
    "operator_of",
    "replace",
    "results",
    "toolkit",
]

Runner = Callable[..., Any]
"""What runs a graph: takes its inputs, returns the list of its results."""
Pass = Callable[[fx.GraphModule], "Runner | None"]
"""Changes a graph in place; may return a function that is run instead of it."""


@dataclass(eq=False)  # not frozen: torch writes its tags onto a backend
class Toolkit:
    """A backend for ``torch.compile`` that captures forward and backward whole and hands them to passes.

    Attributes:
        dynamo: Works on Dynamo's graph, which has torch's functions and methods, writes in place included, and no
            backward yet: AOTAutograd derives the backward from what this pass leaves.
        forward: Works on AOTAutograd's forward graph, which has ATen operators and writes nothing in place. Its
            results are: new values of inputs that are written to, the outputs, what the backward needs.
        backward: Works on the backward graph. Its inputs are what the forward has kept, then the gradients of its
            outputs; its results are the gradients of the forward's inputs.
        decompositions: Operators that are written in terms of others before the passes see them.
        recompute: Whether the backward computes cheap values anew instead of keeping them (torch's min-cut
            partitioner, the one of Inductor) or keeps all (``aot_eager``).

    A pass that raises :class:`UsageError` reaches the caller as torch's ``BackendCompilerFailed``.
    """

    dynamo: Pass | None = None
    forward: Pass | None = None
    backward: Pass | None = None
    decompositions: Mapping[Any, Callable[..., Any]] | None = None
    recompute: bool = False

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile one graph of Dynamo's."""
        if self.dynamo is not None:
            runner = self.dynamo(graph)
            if runner is not None:
                raise UsageError("the pass over Dynamo's graph returned a function; AOTAutograd derives the backward "
                                 "from the graph itself, so that pass can only change it in place")
            graph.recompile()
        compiled: Runner = _aot_autograd(
            fw_compiler=lambda module, _: _boxed(module, self.forward),
            bw_compiler=lambda module, _: _boxed(module, self.backward),
            decompositions=dict(self.decompositions or {}),
            recompute=self.recompute,
        )(graph, inputs)
        return compiled


def _aot_autograd(*, recompute: bool, **compilers: Any) -> Callable[..., Any]:
    """AOTAutograd around two compilers.

    Private: ``torch._dynamo.backends.common.aot_autograd`` and ``torch._functorch.partitioners`` (torch 2.8 to 2.15).
    """
    try:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
    except ImportError as error:
        raise InstrumentError(f"torch {torch.__version__} has no AOTAutograd where the toolkit looks for it ({error}); "
                              "please report it with this version") from None
    partition = min_cut_rematerialization_partition if recompute else default_partition
    return aot_autograd(partition_fn=partition, **compilers)


def _boxed(module: fx.GraphModule, change: Pass | None) -> Runner:
    """The function that runs a graph, as AOTAutograd calls it: all inputs in one list."""
    runner = change(module) if change is not None else None
    module.recompile()
    run: Runner = runner or module.forward

    def boxed(arguments: list[Any]) -> Any:
        return run(*arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # the mark AOTAutograd looks for, torch 2.8 to 2.15
    return boxed


def calls(module: fx.GraphModule, operator: str) -> list[fx.Node]:
    """The calls of one operator in a graph, in order: ``mm`` finds ``aten.mm.default``, ``torch.mm`` and ``x.mm``.

    Raises :class:`UsageError`, with the nearest operator that is there, if there is none.
    """
    named = [(node, operator_of(node)) for node in module.graph.nodes]
    found = [node for node, name in named if name == operator]
    if not found:
        known = {name for _, name in named if name}
        raise UsageError(f"the graph has no call of {operator!r}; {nearest(operator, known)}")
    return found


def operator_of(node: fx.Node) -> str:
    """The plain name of what a node calls, without overload: ``mm``; empty where it calls nothing."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "_overloadpacket", node.target)  # an OpOverload's packet has the plain name
    return str(getattr(packet, "__name__", packet))


def edit(operator: str, change: Callable[[fx.Node], object], *, nth: int | None = None) -> Pass:
    """A pass that hands the calls of one operator, or the nth of them (from 0), to ``change``.

    Raises :class:`UsageError` when it runs, if the graph has no such call.
    """

    def run(module: fx.GraphModule) -> None:
        found = calls(module, operator)
        if nth is not None and nth >= len(found):
            raise UsageError(f"the graph calls {operator!r} {len(found)} times; there is no call number {nth}")
        for node in found if nth is None else [found[nth]]:
            change(node)

    return run


def replace(operator: str, function: Callable[..., Any], *, nth: int | None = None) -> Pass:
    """A pass that calls ``function`` with the same arguments instead of an operator."""

    def change(node: fx.Node) -> None:
        node.op, node.target = "call_function", function

    return edit(operator, change, nth=nth)


def drop(operator: str, *, nth: int | None = None) -> Pass:
    """A pass that leaves an operator out: its first argument takes the place of its result."""

    def change(node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    return edit(operator, change, nth=nth)


def results(change: Callable[[list[Any], tuple[Any, ...]], Sequence[Any]]) -> Pass:
    """A pass that changes what the graph returns each time it runs: ``change(results, inputs) -> results``."""

    def run(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward
        return lambda *inputs: list(change(list(forward(*inputs)), inputs))

    return run


def both(*passes: Pass) -> Pass:
    """One pass after the other; at most the last may return a function."""

    def run(module: fx.GraphModule) -> Runner | None:
        for first, rest in itertools.pairwise((*passes, None)):
            if first is not None and (runner := first(module)) is not None:
                if rest is not None:
                    raise UsageError("only the last of several passes may return a function")
                return runner
        return None

    return run


toolkit = Toolkit()
