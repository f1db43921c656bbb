"""Graph passes: how one is named, called and checked, and those that are known by a name.

A pass takes a ``GraphModule`` of ATen operators, and if it wants to its example inputs (fake tensors). It changes the
graph in place, or returns another. What else is to be known of it stands on the function, as attributes:

``brings_in``
    a dtype that is narrower than the model's, bfloat16 or float16 as a rule: rounding is measured in it from this pass
    on.
``needs_device``
    the type of device that it is for, ``cuda`` say.
``returns_runner``
    it returns what runs a forward or a backward graph, whatever the capture is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from pytest_torchcompile.backends.bf16_islands import bf16_islands
from pytest_torchcompile.backends.collective_buckets import bucket_collectives
from pytest_torchcompile.backends.constant_nodes import NO_VALUES, constant_folding, lift_constants
from pytest_torchcompile.backends.cuda_graphs import cuda_graphs
from pytest_torchcompile.backends.graph_halves import forward_nodes, tag_halves
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.loading import kind_of, one_line, resolve
from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["PASSES", "GraphPass", "PassFunction", "apply_pass", "example_inputs", "read_passes"]

PassFunction: TypeAlias = "Callable[..., Any]"
"""``pass(graph_module)`` or ``pass(graph_module, example_inputs)``; returns a GraphModule, torch's ``PassResult`` with
one, or None: changed in place.
"""
# Characters of an error that a sentence has room for.
_LONGEST: Final = 200
_GRAPHS: Final = ("joint", "forward", "backward")
# Of what is narrower the noise would hide every error.
_BROUGHT_IN: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class GraphPass:
    """One pass, with the name that it is told by."""

    name: str
    function: PassFunction
    graph: str = ""
    """``joint``, ``forward`` or ``backward``: the one graph that it is for; empty: as the capture says."""

    def __post_init__(self) -> None:
        declared = self.declared_attribute("brings_in")
        if declared is not None and self.brings_in is None:
            raise UsageError(f"brings_in of the pass {self.name} is {declared!r}; expected a dtype: "
                             f"{', '.join(_BROUGHT_IN)}. In the rounding noise of a narrower one no error would be "
                             "seen: hold such a pass against a tolerance of your own")

    def declared_attribute(self, attribute: str) -> Any:
        """What stands on the function, or on the one that functools.partial has wrapped; None: nothing."""
        function: Any = self.function
        while isinstance(function, functools.partial) and not hasattr(function, attribute):
            function = function.func
        return getattr(function, attribute, None)

    @property
    def brings_in(self) -> torch.dtype | None:
        """The dtype, narrower than the model's, that it computes in."""
        return _BROUGHT_IN.get(str(self.declared_attribute("brings_in")).removeprefix("torch."))

    @property
    def needs_device(self) -> str:
        """The type of device that it is for; empty: any."""
        return str(self.declared_attribute("needs_device") or "")

    def is_for(self, graph: str, capture: str) -> bool:
        """Whether it changes a graph of this kind."""
        if self.graph:
            return self.graph == graph
        if self.declared_attribute("returns_runner"):
            return graph != "joint"
        return (graph == "joint") == (capture != "forward_backward")


def read_passes(choice: Any, root: Path | None = None) -> tuple[GraphPass, ...]:
    """The passes of a list, or a lone one; of a text, those with commas between them; ``none``: no pass.

    Each is a function, a :class:`GraphPass`, a name of :data:`PASSES` or ``module:function``, and may begin with the
    graph that it is for: ``backward=module:function``. Raises :class:`UsageError` for what names no pass.
    """
    entries: list[Any] = []
    alone = callable(choice) or isinstance(choice, (str, GraphPass)) or not isinstance(choice, Iterable)
    for entry in [choice] if alone else choice:
        if isinstance(entry, str):
            entries += [word.strip() for word in entry.split(",")]
        else:
            entries.append(entry)
    if entries == ["none"]:
        entries = []
    return tuple(_read_pass(entry, root or Path.cwd()) for entry in entries)


def _read_pass(entry: Any, root: Path) -> GraphPass:
    if isinstance(entry, GraphPass):
        return entry
    if callable(entry):
        return GraphPass(_name_of(entry), entry)
    if not isinstance(entry, str):
        raise UsageError(f"a pass is {entry!r}; expected a function, module:function, or a name of {', '.join(PASSES)}")
    graph, equals, name = entry.rpartition("=")
    if equals and graph not in _GRAPHS:
        raise UsageError(f"pass {entry!r} is for a graph {graph!r}; {nearest(graph, _GRAPHS)}")
    if name in PASSES:
        return GraphPass(name, PASSES[name], graph)
    if ":" not in name:
        raise UsageError(f"no pass is called {name!r}; expected module:function, or {nearest(name, PASSES)}")
    return GraphPass(name, resolve(name, root, "passes"), graph)


def _name_of(function: PassFunction) -> str:
    """Of functools.partial with the arguments, so that two of one function are told apart."""
    if isinstance(function, functools.partial):
        given = [repr(value) for value in function.args]
        given += [f"{name}={value!r}" for name, value in function.keywords.items()]
        return f"{_name_of(function.func)}({', '.join(given)})"
    return getattr(function, "__qualname__", type(function).__name__)


def example_inputs(module: fx.GraphModule) -> list[Any]:
    """What a graph takes: fake tensors and symbolic sizes, as torch noted them on its placeholders."""
    return [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]


def apply_pass(each: GraphPass, told: str, module: fx.GraphModule, *, last: bool = False) -> Any:
    """Run a pass on a graph, and check what it has left.

    Args:
        each: The pass.
        told: How it is spoken of: ``pass 2 of 3 (fold:fold)``.
        module: The graph, which may be changed in place.
        last: It may return a function that runs the graph.

    Returns:
        The GraphModule that it returned or changed; a function, if it may return one.

    Raises:
        UsageError: it raised, left a broken graph, or changed how many inputs or results the graph has.
    """
    shape = _shape_of(module)
    notes = _Notes(module)
    wants_inputs = _parameters(each.function) > 1
    arguments = (module, example_inputs(module)) if wants_inputs else (module,)
    try:
        returned = each.function(*arguments)
    except UsageError as refusal:
        raise UsageError(f"{told}: {refusal}") from refusal
    except Exception as error:
        hint = f"; {NO_VALUES}" if _is_of_fake_mode(error) else ""
        raise UsageError(f"{told} raised {one_line(error)}{hint}") from error
    if last and callable(returned) and not isinstance(returned, fx.GraphModule):
        return returned
    # What torch's own passes return (``torch.fx.passes.infra.pass_base.PassBase``).
    if isinstance(returned, PassResult):
        returned = returned.graph_module
    if returned is None:
        returned = module
    if not isinstance(returned, fx.GraphModule):
        raise UsageError(f"{told} returned {kind_of(returned)}; expected the GraphModule, or None if it was changed in "
                         "place; a function that runs the graph only from the last pass, with `compiler: none`")
    left = _shape_of(returned)
    if left != shape:
        raise UsageError(f"{told} left a graph with {left[0]} inputs and {left[1]} results, where there were "
                         f"{shape[0]} and {shape[1]}: torch hands over and takes back just those")
    try:
        notes.put_on(returned)
        lift_constants(returned, notes.constants, torch._guards.detect_fake_mode(example_inputs(returned)), told)
        returned.graph.lint()
        returned.recompile()
        _note_values(returned)
    except UsageError:
        raise
    except Exception as error:
        # Torch's text goes on with the whole graph.
        why = str(error).partition("! ")[0].splitlines()[0][:_LONGEST]
        raise UsageError(f"{told} left a broken graph: {type(error).__name__}: {why}") from error
    return returned


class _Notes:
    """Names and notes of a graph's inputs and results, by which torch tells parameters from gradients.

    A graph that was made anew (``make_fx(module)(*inputs)``, ``fx.Transformer(module).transform()``) lacks them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._inputs = [(node.name, node.target, dict(node.meta)) for node in _placeholders(module)]
        self._results = dict(_output(module).meta)
        self.constants = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}

    def put_on(self, module: fx.GraphModule) -> None:
        """Write those that are missing onto a graph with as many inputs and results."""
        for node, (name, target, meta) in zip(_placeholders(module), self._inputs, strict=True):
            if node.target != target:
                node.target = target
                # Private (torch 2.8 to 2.15): the name, or another one where an operator has it now.
                node._rename(name)
            for key, value in meta.items():
                node.meta.setdefault(key, value)
        for key, value in self._results.items():
            _output(module).meta.setdefault(key, value)
        tag_halves(module)


def _is_of_fake_mode(error: Exception) -> bool:
    """Whether a pass has met a tensor without values.

    Private: ``DataDependentOutputException`` and its kin in torch/_subclasses/fake_tensor.py, and
    ``GuardOnDataDependentSymNode`` in torch/fx/experimental/symbolic_shapes.py (torch 2.8 to 2.15; 2.13 tried).
    """
    kind = type(error).__name__
    return kind.endswith("OutputException") or kind == "GuardOnDataDependentSymNode" or "FakeTensor" in str(error)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _output(module: fx.GraphModule) -> fx.Node:
    output: fx.Node = next(iter(module.graph.find_nodes(op="output")))
    return output


def _parameters(function: Callable[..., Any]) -> int:
    """How many arguments a pass takes by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # One with a default is an option of the pass.
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)


def _shape_of(module: fx.GraphModule) -> tuple[int, int]:
    """How many inputs and results a graph has."""
    return len(_placeholders(module)), len(torch.utils._pytree.tree_leaves(_output(module).args))


def _note_values(module: fx.GraphModule) -> None:
    """Note on new nodes what they give (``meta["val"]``, a fake tensor): partitioner and Inductor read it."""
    changed = [node for node in module.graph.nodes if node.op == "call_function" and "val" not in node.meta]
    if not changed:
        return
    mode = torch._guards.detect_fake_mode(example_inputs(module))
    for node in changed:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _value_of(argument, module))
        if mode is None:
            node.meta["val"] = node.target(*args, **kwargs)
            continue
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)


def _value_of(node: fx.Node, module: fx.GraphModule) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    if node.op != "get_attr":
        raise UsageError(f"node {node.name} has no meta['val']; copy that of the node that it stands for, or delete it "
                         "on operators, which are then run on fake tensors")
    # A graph of its own, of torch.cond say: it has no value.
    return getattr(module, str(node.target))


# The passes with a name. Each is right: it changes no value beyond the last bit.


def dead_code(module: fx.GraphModule) -> None:
    """Drop what nobody uses."""
    module.graph.eliminate_dead_code()


def common_subexpressions(module: fx.GraphModule) -> fx.GraphModule:
    """Compute once what is computed several times over from the same arguments.

    Private: ``torch._functorch.compile_utils.fx_graph_cse`` (torch 2.8 to 2.15); it leaves random operators alone.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    output = _output(module)
    graph = fx_graph_cse(module.graph)
    # Copies of nodes take their notes along; that of the output has the descriptors of all results.
    next(iter(graph.find_nodes(op="output"))).meta.update(output.meta)
    return fx.GraphModule(module, graph)


def no_op_views(module: fx.GraphModule) -> None:
    """Leave out views and copies that give what they take: same sizes, strides and dtype."""
    aten = torch.ops.aten
    views = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default,
             aten.alias.default, aten._to_copy.default}
    results = set(_output(module).all_input_nodes)
    for node in list(module.graph.nodes):
        # What is returned stays: which memory it shares is part of what the graph promises.
        if node.target not in views or node in results:
            continue
        source = node.args[0]
        if _same_layout(source.meta.get("val"), node.meta.get("val")):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)


def _same_layout(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.dtype != other.dtype or one.device != other.device or one.ndim != other.ndim:
        return False
    # Symbolic sizes that print alike are the same expression; to compare them could add a guard.
    return str(tuple(one.shape)) == str(tuple(other.shape)) and str(one.stride()) == str(other.stride())


def recompute_pointwise(module: fx.GraphModule) -> None:
    """Compute pointwise results anew in the backward pass instead of keeping them, in a joint graph.

    Not what draws random numbers, nor what reads an input that the forward writes to: the backward would read its new
    value.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    written = _inputs_written_to(module)
    for node in forward_nodes(module):
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise not in tags or node_draws(node):
            continue
        if not written.intersection(node.all_input_nodes):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", 0)


def save_products(module: fx.GraphModule) -> None:
    """Keep what is dear to compute anew, in a joint graph: matrix products, convolutions, attention."""
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
    for node in forward_nodes(module):
        if node.target in products or "scaled_dot_product" in str(node.target):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            node.meta.setdefault("ac_graph_id", 0)


def _inputs_written_to(module: fx.GraphModule) -> set[fx.Node]:
    """The inputs that get a new value: buffers, as a rule. All of them, if the graph does not say."""
    placeholders = module.graph.find_nodes(op="placeholder")
    descriptors = _output(module).meta.get("desc")
    if descriptors is None:
        return set(placeholders)
    written = [each.mutated_input for each in descriptors if hasattr(each, "mutated_input")]
    return {node for node in placeholders if node.meta.get("desc") in written}


PASSES: Final[dict[str, PassFunction]] = {
    "dead_code": dead_code,
    "common_subexpressions": common_subexpressions,
    "no_op_views": no_op_views,
    "recompute_pointwise": recompute_pointwise,
    "save_products": save_products,
    "constant_folding": constant_folding,
    "bucket_collectives": bucket_collectives,
    "bf16_islands": bf16_islands,
    "cuda_graphs": cuda_graphs,
}
"""The passes that are known by a name."""
