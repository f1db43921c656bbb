"""JudgedCalls: what was found of a call, taken again where later values are the same on both sides, bit by bit.

The third pass over the calls is the first once more, and a training begins with one of them. Of every pair of tensors
64 bits are kept each, and no tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from pytest_torchcompile.oracle.estimate import as_real, split_pieces
from pytest_torchcompile.oracle.leaf_limits import Leaf, problem
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.training import first_step

__all__ = ["JudgedCalls"]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers, as in the mixing step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), without their uppermost bits.
_FACTORS: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)


@dataclass(frozen=True)
class _JudgedLeaf:
    leaf: Leaf
    digests: tuple[int, ...]


class JudgedCalls:
    """What was found of the calls of a trial."""

    def __init__(self) -> None:
        # By number of the call and seed of other values, as ``Trial`` has its keys.
        self._found: dict[Hashable, dict[str, _JudgedLeaf]] = {}

    def knows(self, key: Hashable) -> bool:
        """Whether something was kept of a call."""
        return key in self._found

    def keep(self, key: Hashable, eager: Recording, compiled: Recording, leaves: Iterable[Leaf]) -> None:
        """Keep the ``leaves`` that came of comparing two recordings of the call ``key``.

        Of each tensor one may be about something else than its values, or say that eager does not repeat itself: such
        a one is not kept.
        """
        kinds = {name: kind for name, kind, _ in eager.values()}
        measured = {}
        for leaf in leaves:
            if leaf.draws and leaf.numerical and not leaf.message and leaf.kind == kinds.get(leaf.name):
                measured[leaf.name] = leaf
        found = self._found[key] = {}
        for name, digests in _digests_of(measured, eager, compiled).items():
            found[name] = _JudgedLeaf(measured[name], digests)

    def leaves_of(self, key: Hashable, eager: Recording, compiled: Recording) -> dict[str, Leaf]:
        """What is known of two recordings of the call ``key``, by name."""
        return _known_leaves(self._found.get(key, {}), eager, compiled)

    def leaves_of_first_step(self, index: int, eager: Recording, compiled: Recording) -> dict[str, Leaf]:
        """What is known of two recordings of a training that begins with the call number ``index``, by name.

        A training has the seed of call 0; another call has other random numbers, and nothing is known. Nor is what is a
        problem alone: it may be none among the leaves of a whole training.
        """
        if index != 0:
            return {}
        found = {}
        for judged in self._found.get((0, None), {}).values():
            if problem(judged.leaf) is None:
                leaf = replace(judged.leaf, name=first_step(judged.leaf.name))
                found[leaf.name] = replace(judged, leaf=leaf)
        return _known_leaves(found, eager, compiled)


def _known_leaves(found: Mapping[str, _JudgedLeaf], eager: Recording, compiled: Recording) -> dict[str, Leaf]:
    digests = _digests_of(found, eager, compiled)
    return {name: found[name].leaf for name, each in digests.items() if each == found[name].digests}


def _digests_of(names: Iterable[str], eager: Recording, compiled: Recording) -> dict[str, tuple[int, ...]]:
    """Of pairs of tensors, by name. All numbers are read at once: a GPU is waited for once."""
    mine, theirs = eager.values_by_name(), compiled.values_by_name()
    paired, sums = [], []
    for name in names:
        one, other = mine.get(name), theirs.get(name)
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            continue
        if one.shape == other.shape and one.dtype == other.dtype and one.device == other.device:
            paired.append(name)
            sums += _sums_of_bits(one, other)
    if not paired:
        return {}
    # Gradients come last, and are on the GPU if there is one.
    read: list[int] = torch.stack([each.to(sums[-1].device) for each in sums]).tolist()
    return dict(zip(paired, zip(read[::2], read[1::2], strict=True), strict=True))


def _sums_of_bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Of each tensor the bits of its elements, each mixed with its place to 64 bits, summed modulo 2**64.

    No product of bits and a number of the place: in the uppermost bit, the sign of float64, that would be the same for
    each place.
    """
    flat = [as_real(tensor.detach()).reshape(-1) for tensor in tensors]
    bits = [each.view(_INTEGERS[each.itemsize]) for each in flat]
    sums = [torch.zeros((), dtype=torch.int64, device=each.device) for each in bits]
    start = 0
    for pieces in split_pieces(*bits):
        places = _mix(torch.arange(start, start + pieces[0].numel(), device=pieces[0].device))
        for total, piece in zip(sums, pieces, strict=True):
            total += _mix(piece.long() ^ places).sum()
        start += pieces[0].numel()
    return sums


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Spread each bit of some numbers (int64) over all 64, in place."""
    for factor in _FACTORS:
        numbers.bitwise_xor_(numbers >> 32).mul_(factor)
    return numbers.bitwise_xor_(numbers >> 29)
