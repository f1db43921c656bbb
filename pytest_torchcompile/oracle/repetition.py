"""Repetition: does eager repeat itself? Where it does not, a value is held against what eager's own runs differ by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.estimate import as_real, finite
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.recording import Recording

__all__ = ["FAR", "RUNS", "Repeated", "distance"]

RUNS: Final = 4
"""Further eager runs that are made where one differs from the first."""
FAR: Final = 16.0
"""So many times what eager's runs differ by is no chance: of six runs of any even spread, once in a million."""


def distance(value: Any, runs: Sequence[Any]) -> float:
    """How far a value is from the nearest of some eager runs, over the largest distance of those from the first.

    Infinite where they are all equal and the value is another one, or where it alone is not finite. Zero for what has
    no distance: objects, whole numbers, tensors of several shapes.
    """
    tensors = [_real(each) for each in (value, *runs)]
    if any(each is None for each in tensors) or len({each.shape for each in tensors if each is not None}) != 1:
        return 0.0
    found, *mine = (each for each in tensors if each is not None)
    if not found.numel():
        return 0.0
    settled = torch.stack([each.isfinite() for each in mine]).all(0)
    if bool((settled & ~found.isfinite()).any()):
        return float("inf")
    near = min(_apart(found, each, settled) for each in mine)
    width = max(_apart(mine[0], each, settled) for each in mine)
    if width == 0.0:
        return float("inf") if near else 0.0
    return near / width


def _real(value: Any) -> torch.Tensor | None:
    if isinstance(value, (float, complex)):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    return as_real(value.detach()).double()


def _apart(one: torch.Tensor, other: torch.Tensor, where: torch.Tensor) -> float:
    return float((finite(one) - finite(other)).abs().where(where, 0.0).amax())


class Repeated(Reference):
    """A reference that is eager itself, run again when somebody asks whether it repeats itself."""

    def __init__(self, recording: Recording, again: Callable[[], Recording]) -> None:
        super().__init__(recording)
        self._again, self._runs = again, list[Recording]()

    def twin(self) -> Recording:
        """The second eager run."""
        return self.twins()[0]

    def twins(self) -> list[Recording]:
        """All further runs."""
        if not self._runs:
            self._runs = [self._again() for _ in range(1 + RUNS)]
        return self._runs

    def distance(self, name: str, found: Recording) -> float:
        """:func:`distance` of a value of another recording from the eager runs."""
        value, *runs = (_value(each, name) for each in (found, self._recording, *self.twins()))
        return distance(value, runs)


def _value(recording: Recording, name: str) -> Any:
    return next((value for other, _, value in recording.values() if other == name), None)
