"""Other values: what shows that compiled code computes from what it is given, not from what it has seen before.

A call repeated with the very same numbers can't tell a result from one that was kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.state.whole import put, whole

__all__ = ["rolled", "varied", "vary"]

_SHARE = 2.0**-4
"""By how much a value shrinks at most: far more than rounding, and a probability or a mask stays one."""
_REFUSED = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""Expanded memory, sparse, nested and distributed tensors may refuse: they stay as they are."""


def vary(module: torch.nn.Module, seed: int) -> None:
    """Shrink each floating parameter and buffer element by up to 1/16, in place; ``seed`` decides.

    A parameter that is zero everywhere, as the last layer of a model often begins, gets values within 1/32 of zero:
    else nothing that it takes part in could be compared.
    """
    parameters = list(module.parameters())
    _shrink([*parameters, *module.buffers()], seed, filled={id(p) for p in parameters})


def varied(batch: Batch, seed: int) -> Batch:
    """A copy of a batch with its floating tensors shrunk; ids, masks of whole numbers and zeros stay."""
    other = batch.clone()
    _shrink(other.tensors(), seed, filled=set())
    return other


def rolled(batch: Batch) -> Batch:
    """A copy of a batch whose samples have changed places, each value being as valid as before.

    Tensors are rolled by one, along the first dimension or else the second: the one that is longer than 1 and equally
    long in all of them. A batch without such a dimension stays, and so do tensors of one dimension beside others:
    they may be sorted lengths.
    """
    other = batch.clone()
    tensors = list({id(t): t for t in other.tensors() if t.ndim}.values())
    for dim in (0, 1):
        sizes = {t.shape[dim] for t in tensors if t.ndim > dim}
        if len(sizes) == 1 and sizes != {1}:
            _roll([t for t in tensors if t.ndim > 1] or tensors, dim)
            break
        if sizes != {1}:  # no samples: nobody knows what the next dimension is
            break
    return other


def _roll(tensors: Iterable[torch.Tensor], dim: int) -> None:
    with torch.no_grad():
        for tensor in tensors:
            with contextlib.suppress(*_REFUSED):
                tensor.copy_(tensor.roll(1, dim))


def _shrink(tensors: Iterable[torch.Tensor], seed: int, filled: set[int]) -> None:
    with torch.no_grad():
        for index, tensor in enumerate({id(t): t for t in tensors}.values()):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            with contextlib.suppress(*_REFUSED):
                generator = torch.Generator(tensor.device).manual_seed(seed + 7919 * index)
                dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
                share = torch.rand(tensor.shape, generator=generator, device=tensor.device).to(dtype)
                value = whole(tensor)
                if id(tensor) in filled and not bool(value.any()):
                    put(tensor, value + (share - 0.5) * _SHARE)
                else:
                    put(tensor, value * (1 - share * _SHARE))
