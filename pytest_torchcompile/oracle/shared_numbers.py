"""Shared numbers: random numbers that compiled calls of a trial draw by themselves, and its eager calls are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_torchcompile.gauges.random_seeds import noted_seeds
from pytest_torchcompile.oracle.inductor_numbers import GivenNumbers, SeedGroup, Way, given_numbers
from pytest_torchcompile.state.torch_state import own_random_draws

__all__ = ["SharedNumbers"]


class SharedNumbers:
    """What the graphs of a call draw, and the runs that draw the same eagerly."""

    def __init__(self, ways: tuple[Way, ...]) -> None:
        """``ways``: those of ``WAYS`` for the device of the model."""
        self.groups: tuple[SeedGroup, ...] = ()
        """Taken of the first compiled call; empty before."""
        self.ways = ways
        self.way = ways[0]
        self._noted: list[torch.Tensor] = []
        self._given: GivenNumbers | None = None

    @property
    def key(self) -> tuple[SeedGroup | Way, ...]:
        """What tells an eager run with these numbers from one with others, of the same seed."""
        return (self.way, *self.groups)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Have compiled code draw its own numbers while the block runs, and note the seeds."""
        with own_random_draws(), noted_seeds() as noted:
            yield
        self._noted = noted

    @contextmanager
    def given(self, changed: int | None = None) -> Iterator[None]:
        """Give the same numbers to an eager run, where it is known what graphs draw. ``changed``: as there."""
        if not self.groups:
            yield
            return
        with given_numbers(self.groups, self.way, changed) as given:
            yield
        self._given = given

    @property
    def count(self) -> int:
        """How many random operators of the last eager run were given numbers."""
        return 0 if self._given is None else self._given.count

    def take_groups(self) -> None:
        """Take what the compiled call has drawn for what each call draws."""
        self.groups = tuple((seeds.device.type, seeds.numel()) for seeds in self._noted)

    def agree(self) -> bool:
        """Whether the last eager run has drawn the seeds of the last compiled one, and all of them served it."""
        if self._given is None or not self._given.is_complete:
            return False
        eager, compiled = self._given.seeds, self._noted
        return len(eager) == len(compiled) and all(map(torch.equal, eager, compiled))
