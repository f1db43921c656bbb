"""Progress: how far a run has come, in one line. Plain data and pure functions; whoever has a clock tells the time."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_torchcompile.observation import BAD
from pytest_torchcompile.quantity import count, first_names

__all__ = ["RunProgress"]

_RUNNING_SHOWN: Final = 2
"""Cells that are running and named."""
_WAITING_SHOWN: Final = 1
_FAILING_SHOWN: Final = 1
# Seconds.
_MINUTE: Final = 60


@dataclass
class RunProgress:
    """What a run has to do, what is done, and what is being run."""

    seconds: Mapping[str, float]
    """How long cells took in earlier runs."""
    workers: int = 1
    left: dict[str, set[str]] = field(default_factory=dict)
    """Cell to the checks that have no verdict yet; only cells that are not done."""
    total: int = 0
    """Cells that the run is to judge."""
    running: dict[str, float] = field(default_factory=dict)
    """Cell to when it was begun, of those that have no verdict yet."""
    waiting: frozenset[str] = frozenset()
    """Those of them that have no GPU yet."""
    failing: list[str] = field(default_factory=list)
    done: list[tuple[str, float]] = field(default_factory=list)
    """Cells that are done, and how long each took here."""

    def expect(self, items: Iterable[tuple[str, str]]) -> None:
        """Take note of what is to be judged: pairs of cell and check. Each worker of xdist tells the same ones."""
        if self.total:
            return
        for cell, check in items:
            self.left.setdefault(cell, set()).add(check)
        self.total = len(self.left)

    def begin(self, cell: str, now: float) -> None:
        """An item of the cell is about to be run: the first one runs the cell."""
        if cell in self.left:
            self.running.setdefault(cell, now)

    def note_waiting(self, names: Collection[str], now: float) -> None:
        """Take note of who waits for a GPU; other names than those of cells that run here do not matter."""
        for cell in self.waiting.difference(names) & self.running.keys():
            # From now on it runs.
            self.running[cell] = now
        self.waiting = frozenset(self.running.keys() & set(names))

    def judge(self, cell: str, check: str, verdict: str, now: float) -> None:
        """A verdict came."""
        if cell not in self.left:
            return
        if verdict in BAD and cell not in self.failing:
            self.failing.append(cell)
        self.left[cell].discard(check)
        if self.left[cell]:
            return
        del self.left[cell]
        began = self.running.pop(cell, now)
        self.done.append((cell, now - began))

    def seconds_left(self, now: float) -> float | None:
        """Seconds until all is done, as far as earlier runs and this one tell; None where nothing is known."""
        # The last cells of a first run: that others took so long says little of what each of these still has to do.
        if all(cell in self.running and cell not in self.seconds for cell in self.left):
            return None
        known = [self.seconds[cell] for cell in self.left if cell in self.seconds]
        measured = [seconds for _, seconds in self.done]
        typical = known or measured
        if not typical:
            return None
        mean = _mean(typical)
        # One that runs for longer than that says more of those to come: the first cells are often the cheap ones.
        elapsed = [now - began for cell, began in self.running.items() if cell not in self.seconds]
        mean = _mean([*typical, *(seconds for seconds in elapsed if seconds > mean)])
        total = 0.0
        for cell in self.left:
            expected = self.seconds.get(cell, mean)
            # What is running has done a part of it, and may take longer than it did.
            if cell in self.running:
                expected = max(0.0, expected - (now - self.running[cell]))
            total += expected
        return total / max(1, self.workers)

    def line(self, now: float, width: int = 0) -> str:
        """How far it has come: done of all cells, what fails, what runs since when, the time left.

        ``width``: the most characters; 0: no bound.
        """
        parts = [f"{len(self.done)}/{count(self.total, 'cell')}"]
        if self.failing:
            parts.append(f"{count(len(self.failing), 'fails', 'fail')}: {first_names(self.failing, _FAILING_SHOWN)}")
        left = self.seconds_left(now)
        if left is not None and self.left:
            if left >= 1:
                parts.append(f"about {_short_time(left)} left")
            # What runs has taken longer than it did, and nobody knows how much longer. Of a cell that never ran
            # nothing was expected: the others of this run may be of another backend.
            elif self.seconds.keys() & self.running.keys():
                parts.append("longer than expected")
        runs: list[str] = []
        waits: list[str] = []
        for cell, began in self.running.items():
            listed = waits if cell in self.waiting else runs
            listed.append(f"{cell} ({_short_time(now - began)})")
        if runs:
            parts.append(f"runs {first_names(runs, _RUNNING_SHOWN)}")
        if waits:
            parts.append(f"waits for a GPU: {first_names(waits, _WAITING_SHOWN)}")
        text = f"compile matrix: {', '.join(parts)}"
        return textwrap.shorten(text, width, placeholder=" ...") if width else text

    def interrupted_lines(self, resume: str) -> list[str]:
        """What an interrupted run has done, what is left, and how to go on. ``resume``: the command for that."""
        if not self.left:
            return []
        text = f"interrupted: {len(self.done)} of {count(self.total, 'cell')} judged"
        if self.running:
            text += f", in the middle of {first_names(self.running)}"
        return [f"{text}, {len(self.left)} left", f"  go on  {resume}"]


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _short_time(seconds: float) -> str:
    """``34 s``, ``12 min``, ``2 h 5 min``."""
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    minutes = round(seconds / _MINUTE)
    if minutes < 2 * _MINUTE:
        return f"{minutes} min"
    return f"{minutes // _MINUTE} h {minutes % _MINUTE} min"
