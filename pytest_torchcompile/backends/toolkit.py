"""Toolkit: a backend of one's own in one line. Dynamo and AOTAutograd capture, passes change the graph, a compiler
runs it.

>>> compiled = torch.compile(model, fullgraph=True, backend=Toolkit(passes=["my_passes:fold"], compiler="inductor",
...                                                                 decompositions="inductor"))  # doctest: +SKIP

The whole model as one graph, passes over it and Inductor last: see ``whole_graph.py``. Or edits of one operator, with
which faults are planted too:

>>> compiled = torch.compile(model, backend=Toolkit(forward=replace("relu", torch.tanh)))     # doctest: +SKIP
>>> compiled = torch.compile(model, backend=Toolkit(backward=results(lambda found, _: [-r for r in found])))
...                                                                                            # doctest: +SKIP

``toolkit`` is the one without any pass, which computes what eager computes, as ``aot_eager`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.backends.decomposition_tables import decomposition_table, refuse_unknown_table
from pytest_torchcompile.backends.graph_passes import GraphPass, read_passes
from pytest_torchcompile.backends.partitioner import partition_function
from pytest_torchcompile.backends.whole_graph import GraphNote, WholeGraph
from pytest_torchcompile.errors import InstrumentError, UsageError, nearest

__all__ = [
    "Pass", "Runner", "Toolkit", "both", "calls", "drop", "edit", "operator_of", "replace", "results", "toolkit",
]

Runner = Callable[..., Any]
"""What runs a graph: takes its inputs, returns the list of its results."""
Pass = Callable[[fx.GraphModule], "Runner | None"]
"""Changes a graph in place; may return a function that is run instead of it."""


# Not frozen: torch writes its tags onto a backend.
@dataclass(eq=False, repr=False)
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
            A name is for whole graphs: ``inductor``, ``core_aten``, ``none`` or ``module:table``.
        recompute: Whether the backward computes cheap values anew instead of keeping them (torch's min-cut
            partitioner, the one of Inductor) or keeps all (``aot_eager``).
        passes: Passes over whole graphs, in their order: functions ``pass(graph_module)`` or ``pass(graph_module,
            example_inputs)``, ``"module:function"``, or names of ``graph_passes.PASSES``; a text has commas between.
        capture: ``joint``: the passes have forward and backward in one graph; ``forward_backward``: each by itself.
        compiler: What runs the graphs in the end: ``inductor``, ``regional_inductor``, ``eager``, or ``none``: the last
            pass returns what runs them.
        dump: A folder for the code of each graph before and after each pass.
        root: The folder in which modules of passes and tables are looked for first.

    With any of the last five, or decompositions by name, a model has to be one graph: a graph break is an error with
    its line. Needs torch 2.9. A pass that raises reaches the caller as torch's ``BackendCompilerFailed``.
    """

    dynamo: Pass | None = None
    forward: Pass | None = None
    backward: Pass | None = None
    decompositions: str | Mapping[Any, Callable[..., Any]] | None = None
    recompute: bool = False
    passes: str | Sequence[Any] = ()
    capture: str | None = None
    compiler: str | None = None
    dump: Path | str | None = None
    root: Path | None = None

    def __post_init__(self) -> None:
        # Mistakes are told where they are made, not by torch's compile error.
        folder = None if self.dump is None else Path(self.dump)
        self.dump = folder
        refuse_unknown_table(self.decompositions, self.root)
        self._whole = self._whole_graph(folder)

    def __repr__(self) -> str:
        # It stands at the head of each compile error: what was chosen, and no more.
        chosen = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value and field.name not in ("passes", "root"):
                chosen.append(f"{field.name}={value!r}")
        if self.graph_passes:
            chosen.append(f"passes={[each.name for each in self.graph_passes]}")
        return f"Toolkit({', '.join(chosen)})"

    @property
    def notes(self) -> list[GraphNote]:
        """What became of each whole graph so far."""
        return self._whole.notes if self._whole is not None else []

    @property
    def operators(self) -> dict[str, int]:
        """How often the captured graphs call each operator, before any pass."""
        counts: dict[str, int] = {}
        # The joint graph has all; inference has a forward alone.
        whole = [note for note in self.notes if note.graph == "joint"] or self.notes
        for note in whole:
            for name, count in note.operators.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def with_passes(self, count: int, **changes: Any) -> Toolkit:
        """The same toolkit with the first so many passes alone."""
        first = replace_fields(self, passes=self.graph_passes[:count], **changes)
        if first._whole is not None:
            first._whole = replace_fields(first._whole, of=len(self.graph_passes))
        return first

    @property
    def is_whole(self) -> bool:
        """Whether it takes whole graphs, and not edits of single operators."""
        return self._whole is not None

    @property
    def graph_passes(self) -> tuple[GraphPass, ...]:
        """The passes over whole graphs."""
        return self._whole.passes if self._whole is not None else ()

    @property
    def brings_in(self) -> torch.dtype | None:
        """The narrowest dtype that a pass computes in, where one brings it in."""
        brought = [each.brings_in for each in self.graph_passes if each.brings_in is not None]
        return max(brought, key=lambda dtype: torch.finfo(dtype).eps, default=None)

    def _whole_graph(self, dump: Path | None) -> WholeGraph | None:
        asked = self.passes or self.capture or self.compiler or dump or isinstance(self.decompositions, str)
        if not asked:
            return None
        if self.dynamo or self.forward or self.backward:
            raise UsageError("dynamo, forward and backward edit single operators, passes work on whole graphs: a "
                             "Toolkit takes one or the other; a pass for one graph is written forward=module:function")
        return WholeGraph(
            read_passes(self.passes, self.root), self.capture or "joint", self.compiler or "eager",
            self.decompositions, self.recompute, dump, self.root)

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
        """Compile one graph of Dynamo's."""
        if self._whole is not None:
            return self._whole(graph, inputs)
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
            decompositions=decomposition_table(self.decompositions),
            recompute=self.recompute,
        )(graph, inputs)
        return compiled


def _aot_autograd(*, recompute: bool, **compilers: Any) -> Callable[..., Any]:
    """AOTAutograd around two compilers.

    Private: ``torch._dynamo.backends.common.aot_autograd`` (torch 2.8 to 2.15).
    """
    try:
        from torch._dynamo.backends.common import aot_autograd
    except ImportError as error:
        raise InstrumentError(f"torch {torch.__version__} has no AOTAutograd where the toolkit looks for it ({error}); "
                              "please report it with this version") from None
    return aot_autograd(partition_fn=partition_function(recompute), **compilers)


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
