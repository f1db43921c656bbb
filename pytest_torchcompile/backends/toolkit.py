"""Toolkit: a backend of one's own in one line. Dynamo and AOTAutograd capture, passes change the graph, torch runs it.

>>> compiled = torch.compile(model, backend=Toolkit(forward=replace("relu", torch.tanh)))     # doctest: +SKIP
>>> compiled = torch.compile(model, backend=Toolkit(backward=results(lambda found, _: [-r for r in found])))
...                                                                                            # doctest: +SKIP

``toolkit`` is the one without any pass, which computes what eager computes, as ``aot_eager`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.errors import InstrumentError, UsageError, nearest

__all__ = [
    "Pass", "Runner", "Toolkit", "both", "calls", "drop", "edit", "operator_of", "replace", "results", "toolkit",
]

Runner = Callable[..., Any]
"""What runs a graph: takes its inputs, returns the list of its results."""
Pass = Callable[[fx.GraphModule], "Runner | None"]
"""Changes a graph in place; may return a function that is run instead of it."""


# Not frozen: torch writes its tags onto a backend.
@dataclass(eq=False)
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

        def compile_forward(module: fx.GraphModule, _: object) -> Runner:
            return _compile_boxed(module, self.forward)

        def compile_backward(module: fx.GraphModule, _: object) -> Runner:
            return _compile_boxed(module, self.backward)

        compiled: Runner = _aot_autograd(
            fw_compiler=compile_forward,
            bw_compiler=compile_backward,
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
    if recompute:
        return aot_autograd(partition_fn=min_cut_rematerialization_partition, **compilers)
    return aot_autograd(partition_fn=default_partition, **compilers)


def _compile_boxed(module: fx.GraphModule, change: Pass | None) -> Runner:
    """The function that runs a graph, as AOTAutograd calls it: all inputs in one list."""
    runner = None
    if change is not None:
        runner = change(module)
    module.recompile()
    run: Runner = runner or module.forward

    def run_boxed(arguments: list[Any]) -> Any:
        return run(*arguments)

    # The mark that AOTAutograd looks for, torch 2.8 to 2.15; without it all inputs live as long as the call.
    run_boxed._boxed_call = True  # type: ignore[attr-defined]
    return run_boxed


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
    # An OpOverload's packet has the plain name.
    packet = getattr(node.target, "_overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def edit(operator: str, change: Callable[[fx.Node], object], *, nth: int | None = None) -> Pass:
    """A pass that hands the calls of one operator, or the nth of them (from 0), to ``change``.

    Raises :class:`UsageError` when it runs, if the graph has no such call.
    """

    def edit_calls(module: fx.GraphModule) -> None:
        nodes = calls(module, operator)
        if nth is not None:
            if nth >= len(nodes):
                raise UsageError(f"the graph calls {operator!r} {len(nodes)} times; there is no call number {nth}")
            nodes = [nodes[nth]]
        for node in nodes:
            change(node)

    return edit_calls


def replace(operator: str, function: Callable[..., Any], *, nth: int | None = None) -> Pass:
    """A pass that calls ``function`` with the same arguments instead of an operator."""

    def call_function(node: fx.Node) -> None:
        # The operator may have been a method, as x.relu().
        node.op, node.target = "call_function", function

    return edit(operator, call_function, nth=nth)


def drop(operator: str, *, nth: int | None = None) -> Pass:
    """A pass that leaves an operator out: its first argument takes the place of its result."""

    def erase_node(node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)

    return edit(operator, erase_node, nth=nth)


def results(change: Callable[[list[Any], tuple[Any, ...]], Sequence[Any]]) -> Pass:
    """A pass that changes what the graph returns each time it runs: ``change(results, inputs) -> results``."""

    def wrap_forward(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run_and_change(*inputs: Any) -> list[Any]:
            return list(change(list(forward(*inputs)), inputs))

        return run_and_change

    return wrap_forward


def both(*passes: Pass) -> Pass:
    """One pass after the other; at most the last may return a function."""

    def run_passes(module: fx.GraphModule) -> Runner | None:
        runner = None
        for each in passes:
            # A function that runs the graph would not see what a later pass makes of it.
            if runner is not None:
                raise UsageError("only the last of several passes may return a function")
            runner = each(module)
        return runner

    return run_passes


toolkit = Toolkit()
