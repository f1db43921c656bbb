"""Triton numbers: what Inductor's kernels draw on a GPU, by Triton's own generator, in one kernel of ours.

Philox written out in torch's operators is some hundred kernels for each dropout, and whole numbers of 64 bits between
them. Imported where a GPU is given numbers: a build of torch for the CPU brings no Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["fill_uniformly"]

_AT_A_TIME: Final = 1024


def fill_uniformly(numbers: torch.Tensor, seed: torch.Tensor, fourfold: bool) -> None:
    """Fill a tensor (float32, one dimension) with what is drawn for its elements, uniform from 0 up to 1.

    ``seed``: one whole number of 64 bits, on the tensor's device. ``fourfold``: as for
    :class:`~pytest_torchcompile.oracle.inductor_numbers.Way`.
    """
    count = numbers.numel()
    with torch.cuda.device_of(numbers):  # type: ignore[no-untyped-call]
        _fill[triton.cdiv(count, _AT_A_TIME),](numbers, seed, count, fourfold, _AT_A_TIME)


# Compiled once, whatever the count and wherever in memory the seed is.
@triton.jit(do_not_specialize=["seed", "count"])  # type: ignore[untyped-decorator, unused-ignore]
def _fill(numbers, seed, count, FOURFOLD: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    if FOURFOLD:
        first, second, third, fourth = tl.rand4x(tl.load(seed), (place // 4).to(tl.uint32))
        lane = place % 4
        drawn = tl.where(lane < 2, tl.where(lane == 0, first, second), tl.where(lane == 2, third, fourth))
    else:
        drawn = tl.rand(tl.load(seed), place.to(tl.uint32))
    tl.store(numbers + place, drawn, mask=place < count)
