"""Dice: random relative errors, cheap enough to be thrown at every operator; and how many draws are made with them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import torch

from pytest_torchcompile.state.tensor_forms import stored_numbers

__all__ = ["DRAWS", "FEW", "LAUNCHED", "Dice", "FixedDice", "noise_of_draw"]

DRAWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 36)
"""Noise draws of a leaf, each time that it is still suspicious: all of them before a suspicion becomes a verdict."""
LAUNCHED: Final = (1, 4, 12, 36)
"""The same where draws are launches of a graph, which take less time than to measure the leaves once more."""
FEW: Final = 4
"""Draws that a leaf gets before it is left undecided. Of the further ones every other is loud: a loud one among few
would let pass by luck what is off by the limit and half of it."""
# Times the usual noise of a loud draw: decisions that noise flips once in a hundred draws flip there in every third.
# A relu of a unit that is off for the whole batch decides about a row of a gradient, and each program has its own few.
_LOUD: Final = 4.0
# What a loud draw counts for. Where noise moves elements evenly, it is then as a draw of twice the noise.
_SHARE_OF_LOUD: Final = 0.5

# Numbers in a pool: on a CPU as many as its cache holds.
_POOLS = {"cpu": 1 << 17}
_POOL = 1 << 20
# Between the seeds of two sequences.
_APART = 7919
# Pools of factors that are kept, those of the units used last.
_KEPT = 16
# Tensors with no more elements take their factors from a short pool. It costs little, so that many units can have one.
_SMALL = 1 << 12
_SHORT_POOL = 1 << 16
_SHORT_KEPT = 64


class _FactorPools:
    """Pools of factors ``1 - unit * xi``, made of a pool of numbers, for each unit."""

    def __init__(self, length: int | None, kept: int) -> None:
        """``length``: how many of the pool's numbers are taken, None: all. ``kept``: for how many units."""
        self._length, self._kept = length, kept
        self._made: OrderedDict[tuple[torch.device, torch.dtype, float], torch.Tensor] = OrderedDict()

    def made_of(self, pool: torch.Tensor, unit: float) -> torch.Tensor:
        """The one for a unit. There is one pool of numbers for each device and dtype."""
        key = (pool.device, pool.dtype, unit)
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        self._made[key] = torch.rsub(pool[: self._length], 1.0, alpha=unit)
        if len(self._made) > self._kept:
            self._made.popitem(last=False)
        return self._made[key]


class Dice:
    """Uniform numbers in (-1, 1): slices of one pool per device, at random offsets.

    Slices of two throws are shifted against each other, so that they are as good as independent; large
    tensors are served in stretches of half a pool, each from an offset of its own.
    """

    def __init__(self, seed: int) -> None:
        self._offsets = random.Random(seed)
        self._seed = seed
        self._pools: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._factors = _FactorPools(None, _KEPT)
        self._short_factors = _FactorPools(_SHORT_POOL, _SHORT_KEPT)

    def begin_sequence(self, number: int) -> None:
        """Begin the sequence of this number: it is the same one whenever it is begun."""
        self._offsets.seed(self._seed + _APART * number)

    def next_seed(self) -> int:
        """A seed that the sequence decides."""
        return self._offsets.getrandbits(62)

    def disturb(self, tensor: torch.Tensor, unit: float) -> None:
        """Multiply every element by a factor within ``unit`` of 1, in place; zeros and infinities stay."""
        tensor = stored_numbers(tensor)
        flat = _flat_memory(tensor)
        if flat is None:
            disturbed = tensor.contiguous()
            self.disturb(disturbed, unit)
            tensor.copy_(disturbed)
            return
        for part in self._stretches(flat):
            part.mul_(self._next_factors(part, unit))

    def disturbed_copy(self, tensor: torch.Tensor, unit: float) -> torch.Tensor:
        """A disturbed copy, of the same strides where the tensor fills its memory; of a sparse one what it holds."""
        flat = None
        if tensor.layout is torch.strided:
            flat = _flat_memory(tensor)
        if flat is None:
            copy = tensor.clone()
            self.disturb(copy, unit)
            return copy
        # One kernel a stretch: to copy first would be another, and takes a GPU as long.
        copy = torch.empty_like(flat)
        for part, disturbed in zip(self._stretches(flat), self._stretches(copy), strict=True):
            torch.mul(part, self._next_factors(part, unit), out=disturbed)
        return copy.as_strided(tensor.shape, tensor.stride())

    def add_drift(self, tensor: torch.Tensor, size: float, below: float) -> None:
        """Add up to ``size`` to the elements that are smaller than ``below`` and not zero, in place."""
        small = (tensor.abs() < below) & (tensor != 0)
        # To ask would be to wait for a GPU.
        if tensor.device.type == "cpu" and not bool(small.any()):
            return
        noise = torch.ones_like(tensor)
        self.disturb(noise, size)
        tensor.add_(noise.sub_(1).mul_(small))

    def _stretches(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        half = _POOLS.get(flat.device.type, _POOL) // 2
        if flat.numel() <= half:
            yield flat
        else:
            yield from torch.split(flat, half)

    def _next_factors(self, like: torch.Tensor, unit: float) -> torch.Tensor:
        """Factors ``1 - unit * xi``, real or complex: infinity plus a part of infinity can be NaN."""
        count = like.numel()
        pools = self._short_factors if count <= _SMALL else self._factors
        factors = pools.made_of(self._pool(like.device, like.dtype), unit)
        return factors.narrow(0, self._offsets.randrange(factors.numel() - count), count)

    def _pool(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (device, dtype) not in self._pools:
            self._pools[device, dtype] = self._new_pool(device, dtype)
        return self._pools[device, dtype]

    def _new_pool(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Uniform numbers in (-1, 1); of complex ones both parts."""
        generator = torch.Generator(device=device).manual_seed(self._seed)
        real_dtype = dtype.to_real() if dtype.is_complex else dtype
        real = torch.empty(_POOLS.get(device.type, _POOL) + 1, 2, dtype=real_dtype, device=device)
        real.uniform_(-1, 1, generator=generator)
        if dtype.is_complex:
            return torch.view_as_complex(real)
        return real[:, 0].clone()


class FixedDice(Dice):
    """Dice with one pool of real numbers, which stays where it is in memory: a CUDA graph reads it again and again.

    Offsets are the same in each launch, so what :meth:`fill` puts there makes the noise.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(0)
        self._pool_read = torch.zeros(_POOLS.get(device.type, _POOL) + 1, dtype=dtype, device=device)
        self._generator = torch.Generator(device=device)

    def fill(self, seed: int, factor: float) -> None:
        """Put uniform numbers there, in (-factor, factor): so many times the usual noise."""
        self._pool_read.uniform_(-factor, factor, generator=self._generator.manual_seed(seed))

    def _pool(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if (device, dtype) != (self._pool_read.device, self._pool_read.dtype):
            raise ValueError(f"noise is asked for in {dtype} on {device}, and there is only "
                             f"{self._pool_read.dtype} on {self._pool_read.device}")
        return self._pool_read


def _flat_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a tensor that fills it without gaps, as one axis; ``None`` for others."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    straight = tensor.permute(order)
    if not straight.is_contiguous():
        return None
    return straight.view(-1)


def noise_of_draw(number: int) -> tuple[float, float]:
    """How many times its usual noise a program has in a draw, counted from 0, and what the draw counts for."""
    if number >= FEW and number % 2:
        return _LOUD, _SHARE_OF_LOUD
    return 1.0, 1.0
