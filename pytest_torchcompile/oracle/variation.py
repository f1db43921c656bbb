"""Other values: what shows that compiled code computes from what it is given, not from what it has seen before.

A call repeated with the very same numbers can't tell a result from one that was kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from pytest_torchcompile.batch import Batch

__all__ = ["varied", "vary"]

_SHARE = 2.0**-4
"""By how much a value shrinks at most: far more than rounding, and a probability or a mask stays one."""


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


def _shrink(tensors: Iterable[torch.Tensor], seed: int, filled: set[int]) -> None:
    with torch.no_grad():
        for index, tensor in enumerate({id(t): t for t in tensors}.values()):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            # expanded memory, sparse, nested and distributed tensors may refuse: they stay as they are
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
                generator = torch.Generator(tensor.device).manual_seed(seed + 7919 * index)
                dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
                share = torch.rand(tensor.shape, generator=generator, device=tensor.device).to(dtype)
                if id(tensor) in filled and not bool(tensor.any()):
                    tensor.add_((share - 0.5) * _SHARE)
                else:
                    tensor.mul_(1 - share * _SHARE)
