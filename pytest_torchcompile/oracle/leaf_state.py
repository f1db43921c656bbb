"""LeafState: the two values of a leaf, and what is known of them while they are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_torchcompile.oracle.judging import new_leaf
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.properties import equal_objects, plain_value
from pytest_torchcompile.state.tensor_forms import same_bits

__all__ = ["LeafState", "LeafValues", "leaf_without_reference"]


@dataclass(frozen=True)
class LeafValues:
    """The two values of a leaf."""

    name: str
    kind: str
    eager: Any
    compiled: Any


@dataclass(eq=False)
class LeafState:
    """What is known so far of a leaf that is not equal bit for bit."""

    values: LeafValues
    judged: Leaf | None = None
    """What an earlier comparison has found."""
    is_settled: bool = False
    """Does its first measure settle it?"""
    is_waiting: bool = False
    """Can no measure settle it without a draw? It is measured once there is one."""
    is_apart: bool = False
    """Is it far off for other random numbers?"""
    is_alike: bool = False
    """Are eager and compiled too near to be told apart?"""
    is_calm: bool | None = None
    """Do draws hardly move it? None where that is not known."""
    typical: float | None = None
    """The typical size of its values, where it was measured in one go."""


def leaf_without_reference(values: LeafValues, is_equal: bool | None) -> Leaf | None:
    """The leaf of what is equal, or different and no number; None for what has to be measured.

    ``is_equal``: whether two tensors have the same bits, if that is known.
    """
    name, kind, eager, compiled = values.name, values.kind, values.eager, values.compiled
    if isinstance(eager, torch.Tensor):
        if is_equal is None:
            is_equal = same_bits(eager, compiled.to(eager.dtype))
        if is_equal:
            return replace(new_leaf(name, kind, eager), bitwise=True)
        return None
    if equal_objects(eager, compiled):
        return Leaf(name, kind, numel=0 if eager is None else 1, bitwise=True)
    if isinstance(eager, (float, complex)):
        return None
    one, other = plain_value(eager), plain_value(compiled)
    return Leaf(name, kind, eager=one, compiled=other, message=f"is {one} in eager, {other} compiled")
