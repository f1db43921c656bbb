"""The pass ``bucket_collectives``: all-reduces that do not wait for each other become one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import fx

__all__ = ["bucket_collectives"]

_Kind: TypeAlias = "tuple[Any, ...]"
"""What all-reduces have to share to become one: reduction, group, dtype, device."""


def bucket_collectives(module: fx.GraphModule) -> None:
    """Reduce together what independent all-reduces of one group reduce: one flat tensor, cut into its parts after.

    Each element is reduced as before, over the same ranks. Random numbers are drawn in the same order.
    """
    single = [node for node in module.graph.nodes if _kind_of(node) is not None]
    while bucket := _first_bucket(module.graph, single):
        _join(module.graph, bucket)
        _sort(module.graph)
        single = [node for node in single if node not in bucket]


def _kind_of(node: fx.Node) -> _Kind | None:
    """The kind of an all-reduce that can be joined; None for other nodes."""
    # torch/distributed/_functional_collectives.py, torch 2.8 to 2.15.
    if str(node.target) != "_c10d_functional.all_reduce.default":
        return None
    users = list(node.users)
    value = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    waited_for = len(users) == 1 and str(users[0].target) == "_c10d_functional.wait_tensor.default"
    # The parts have to be cut at numbers, and come back in the layout that they had.
    if not waited_for or value is None or type(value.numel()) is not int or not value.is_contiguous():
        return None
    return (node.target, *node.args[1:], value.dtype, value.device)


def _first_bucket(graph: fx.Graph, single: list[fx.Node]) -> list[fx.Node]:
    """The first all-reduces of one kind that do not depend on each other; empty if there are no two."""
    before = _reduced_before(graph, single)
    for first in single:
        bucket = [first]
        for other in single[single.index(first) + 1:]:
            if _kind_of(other) == _kind_of(first) and not before[other].intersection(bucket):
                bucket.append(other)
        if len(bucket) > 1:
            return bucket
    return []


def _reduced_before(graph: fx.Graph, single: list[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Of each node the all-reduces that it has to wait for."""
    wanted = set(single)
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
    return torch.Tag.nondeterministic_seeded in node.target.tags or bool(node.target._schema.is_mutable)


def _join(graph: fx.Graph, bucket: list[fx.Node]) -> None:
    """Put one all-reduce in place of several, where the last of them was; the order may be wrong then."""
    aten, functional = torch.ops.aten, torch.ops._c10d_functional
    returned = set(graph.find_nodes(op="output")[0].all_input_nodes)
    last = bucket[-1]
    with graph.inserting_before(last):
        flat = [graph.call_function(aten.reshape.default, (node.args[0], [-1])) for node in bucket]
        joined = graph.call_function(aten.cat.default, (flat,))
        reduced = graph.call_function(functional.all_reduce.default, (joined, *last.args[1:]))
        reduced = graph.call_function(functional.wait_tensor.default, (reduced,))
    begin = 0
    for node in bucket:
        waited = next(iter(node.users))
        value = node.meta["val"]
        end = begin + value.numel()
        with graph.inserting_before(last):
            part = graph.call_function(aten.slice.Tensor, (reduced, 0, begin, end))
            part = graph.call_function(aten.view.default, (part, list(value.shape)))
            # What the caller gets must not hang on the memory of the others.
            if waited in returned:
                part = graph.call_function(aten.clone.default, (part,))
        waited.replace_all_uses_with(part)
        begin = end
    for node in bucket:
        graph.erase_node(next(iter(node.users)))
        graph.erase_node(node)


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
