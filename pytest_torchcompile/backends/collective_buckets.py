"""The pass ``bucket_collectives``: collectives of one kind that do not wait for each other become one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from pytest_torchcompile.backends.graph_halves import nodes_from_gradients
from pytest_torchcompile.state.random_operators import node_draws

__all__ = ["bucket_collectives"]

_Kind: TypeAlias = "tuple[Any, ...]"
"""What collectives have to share to become one: operator, reduction, group, dtype, device, half of a joint graph."""
_Call: TypeAlias = "Callable[..., fx.Node]"
"""Calls an operator where the new nodes stand."""
_aten: Final = torch.ops.aten


@dataclass(frozen=True)
class _Packing:
    """How one tensor of several is made for a collective, and how each part of the result is cut out again."""

    pack: Callable[[_Call, list[fx.Node], int], fx.Node]
    """``pack(call, inputs, ranks)``: one tensor of one dimension."""
    width: Callable[[int, int], int]
    """``width(elements, ranks)``: elements of an input's part in a row of the result."""
    rows: Callable[[int], int]
    """``rows(ranks)``: rows of the result, of which each has a part of every input."""


def _pack_flat(call: _Call, inputs: list[fx.Node], ranks: int) -> fx.Node:
    flat = [call(_aten.reshape.default, node, [-1]) for node in inputs]
    return call(_aten.cat.default, flat)


def _pack_for_ranks(call: _Call, inputs: list[fx.Node], ranks: int) -> fx.Node:
    """What goes to rank 0 of all inputs, then what goes to rank 1."""
    rows = [call(_aten.reshape.default, node, [ranks, -1]) for node in inputs]
    return call(_aten.reshape.default, call(_aten.cat.default, rows, 1), [-1])


# Names of torch/distributed/_functional_collectives.py, torch 2.8 to 2.15.
_PACKINGS: Final = {
    "_c10d_functional.all_reduce.default": _Packing(_pack_flat, lambda elements, _: elements, lambda _: 1),
    # Of each rank a row.
    "_c10d_functional.all_gather_into_tensor.default": _Packing(
        _pack_flat, lambda elements, _: elements, lambda ranks: ranks),
    # This rank's part of each input.
    "_c10d_functional.reduce_scatter_tensor.default": _Packing(
        _pack_for_ranks, lambda elements, ranks: elements // ranks, lambda _: 1),
}


def bucket_collectives(module: fx.GraphModule) -> None:
    """Do in one collective what independent ones of one kind and group do: one flat tensor, cut into its parts after.

    All-reduces, all-gathers and reduce-scatters. Each element is reduced as before, over the same ranks. Random numbers
    are drawn in the same order. In a joint graph those of the forward stay apart from those of the backward.
    """
    backward = nodes_from_gradients(module)
    kinds: dict[fx.Node, _Kind] = {}
    for node in module.graph.nodes:
        kind = _kind_of(node)
        if kind is not None:
            kinds[node] = (*kind, node in backward)
    while bucket := _first_bucket(module.graph, kinds):
        _join(module.graph, bucket)
        _sort(module.graph)
        for node in bucket:
            del kinds[node]


def _kind_of(node: fx.Node) -> _Kind | None:
    """The kind of a collective that can be joined; None for other nodes."""
    if str(node.target) not in _PACKINGS:
        return None
    users = list(node.users)
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    waited_for = len(users) == 1 and str(users[0].target) == "_c10d_functional.wait_tensor.default"
    # The parts have to be cut at numbers, and come back in the layout that they had.
    if not waited_for or value is None or type(value.numel()) is not int or not value.is_contiguous():
        return None
    return (node.target, *node.args[1:], value.dtype, value.device)


def _first_bucket(graph: fx.Graph, kinds: dict[fx.Node, _Kind]) -> list[fx.Node]:
    """The first collectives of one kind that do not depend on each other; empty if there are no two."""
    before = _joinable_before(graph, kinds)
    single = list(kinds)
    for index, first in enumerate(single):
        bucket = [first]
        for other in single[index + 1:]:
            if kinds[other] == kinds[first] and not before[other].intersection(bucket):
                bucket.append(other)
        if len(bucket) > 1:
            return bucket
    return []


def _joinable_before(graph: fx.Graph, wanted: Iterable[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Of each node those of the wanted ones that it has to wait for."""
    wanted = set(wanted)
    before: dict[fx.Node, set[fx.Node]] = {}
    for node, inputs in _needs(graph).items():
        before[node] = set()
        for each in inputs:
            before[node] |= before[each]
            if each in wanted:
                before[node].add(each)
    return before


def _needs(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What has to come before each node: its inputs, and of what draws or writes the one before that does."""
    needs: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in graph.nodes:
        needs[node] = list(node.all_input_nodes)
        if not _keeps_its_place(node):
            continue
        if last is not None:
            needs[node].append(last)
        last = node
    return needs


def _keeps_its_place(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        # Of another function nobody knows what it does beside.
        return node.op in ("call_module", "call_method")
    return node_draws(node) or bool(node.target._schema.is_mutable)


def _join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    """Put one collective in place of several, where the last of them was; the order may be wrong then."""
    returned = set(graph.find_nodes(op="output")[0].all_input_nodes)
    last = bucket[-1]
    packing = _PACKINGS[str(last.target)]
    ranks = _ranks_of(last)
    rows = packing.rows(ranks)

    def call(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(last):
            return graph.call_function(target, args)

    inputs: list[fx.Node] = [node.args[0] for node in bucket]  # type: ignore[misc]
    joined = call(last.target, packing.pack(call, inputs, ranks), *last.args[1:])
    joined = call(torch.ops._c10d_functional.wait_tensor.default, joined)
    by_rows = call(_aten.view.default, joined, [rows, -1])
    begin = 0
    for node, given in zip(bucket, inputs, strict=True):
        waited = next(iter(node.users))
        end = begin + packing.width(given.meta["val"].numel(), ranks)
        part = call(_aten.slice.Tensor, by_rows, 1, begin, end)
        part = call(_aten.reshape.default, part, _result_shape(node, ranks))
        # What the caller gets must not hang on the memory of the others.
        if waited in returned:
            part = call(_aten.clone.default, part)
        # A collective of a later bucket may take it.
        part.meta["val"] = waited.meta["val"]
        waited.replace_all_uses_with(part)
        begin = end
    for node in bucket:
        graph.erase_node(next(iter(node.users)))
        graph.erase_node(node)


def _ranks_of(node: fx.Node) -> int:
    """The ranks of a collective whose result has another size than its input; 1 of an all-reduce."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "group_size" not in names:
        return 1
    return int(node.args[names.index("group_size")])  # type: ignore[arg-type]


def _result_shape(node: fx.Node, ranks: int) -> list[int]:
    """The shape of a collective's result: ranks are put together, or taken apart, along the first dimension."""
    shape = list(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    if "all_gather" in str(node.target):
        shape[0] *= ranks
    elif "reduce_scatter" in str(node.target):
        shape[0] //= ranks
    return shape


def _sort(graph: fx.Graph) -> None:
    """Put each node behind what it needs, and else leave the order."""
    needs = {node: list(node.all_input_nodes) for node in graph.nodes}
    keeping: list[fx.Node] = [node for node in graph.nodes if _keeps_its_place(node)]
    for one, other in itertools.pairwise(keeping):
        needs[other].append(one)
    order: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        _place(node, needs, order)
    _relink(order)


def _place(node: fx.Node, needs: dict[fx.Node, list[fx.Node]], order: dict[fx.Node, None]) -> None:
    """Append a node to an order, after what it needs; without recursion, for graphs are deeper than Python's stack."""
    waiting = [node]
    while waiting:
        top = waiting[-1]
        missing = [each for each in needs[top] if each not in order]
        if missing:
            waiting += missing
        else:
            order.setdefault(top)
            waiting.pop()


def _relink(order: Iterable[fx.Node]) -> None:
    before: fx.Node | None = None
    for node in order:
        if before is not None:
            before.append(node)
        before = node
