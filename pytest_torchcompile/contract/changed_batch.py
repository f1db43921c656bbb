"""The batch of a call, as its mutations change it: inputs first, then arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.mutation import Kind, Mutation, in_order

__all__ = ["changed_batch", "of_kind"]


def of_kind(kind: Kind, changes: Mapping[str, str]) -> list[Mutation]:
    """The mutations of one kind among those of a call, in their order."""
    return [each for each, _ in in_order(changes) if each.kind == kind]


def changed_batch(batch: Batch, changes: Mapping[str, str]) -> Batch | None:
    """A batch with the mutations that change inputs and arguments; None where they do not go with it."""
    batch = batch.clone()
    leaves, spec = pytree.tree_flatten(batch.value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    try:
        for each in of_kind("inputs", changes):
            each.act(tensors, changes[each.name])
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        batch = Batch.of(pytree.tree_unflatten(leaves, spec))
        for each in of_kind("arguments", changes):
            batch = _with_arguments(*each.act(batch.args, batch.kwargs, changes[each.name]))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
        # An empty batch has no first row, another size no such view.
        return None
    return batch


def _with_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """A batch in the form that a loss knows it in."""
    if not args:
        return Batch.of(kwargs)
    if not kwargs:
        return Batch.of(args)
    return Batch.of((args, kwargs))
