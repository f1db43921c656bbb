"""Group: the rank processes of a cell, which begin and end it together. No torch, no pytest.

One rank that fails ends the cell on all of them: the others wait for it in a collective, where they would stay until
the time-out. They are given a few seconds to notice by themselves, because what they then say (and their stacks, if
they say nothing) tells where they were.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pytest_torchcompile.observation import Job, RankOutcome, rank_failed
from pytest_torchcompile.ranks.rank import NoRank, Rank

__all__ = ["GRACE", "Group", "ended_after"]

GRACE = 3.0
"""Seconds that the other ranks have once one has failed."""


class Group:
    """Warm rank processes: rank 0 of every cell, rank 1 of those that have two, and so on."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the run's."""
        self.folder = folder
        self.ranks: list[Rank] = []
        self._gpus: tuple[str, ...] = ()
        """What the processes see of the GPUs; () where no cell of theirs needed any yet."""

    def run(
        self, job: Job, world: int, path: list[str], timeout: float, gpus: tuple[str, ...] = ()
    ) -> list[RankOutcome]:
        """Run a cell on ``world`` ranks; one outcome for each. ``path`` is pytest's ``sys.path``.

        ``timeout`` in seconds holds for all of them together. ``gpus`` are those that the cell holds, which every rank
        sees; () where it needs none.
        """
        if gpus and self._gpus not in ((), gpus):
            # CUDA reads only once what a process may see.
            self.close()
        self._gpus = gpus or self._gpus
        self.ranks += [Rank(self.folder) for _ in range(len(self.ranks), world)]
        ranks = self.ranks[:world]
        with tempfile.TemporaryDirectory(prefix="meet-", dir=self.folder) as meeting:
            job = replace(job, world=world, rendezvous=os.path.join(meeting, "store"), timeout=timeout)
            waiting: dict[Connection, int] = {}
            try:
                for r, rank in enumerate(ranks):
                    own_job = replace(job, rank=r)
                    connection = rank.begin({"do": "cell", "job": own_job, "path": path, "gpus": gpus})
                    waiting[connection] = r
            except (NoRank, OSError):
                # Those that have begun wait for one that never will.
                for rank in ranks:
                    rank.close()
                raise
            outcomes = _collect_outcomes(ranks, waiting, timeout)
        if world > 1 and any(rank_failed(outcome) for outcome in outcomes):
            # A process that has lost its peers in a collective is not fit for another cell.
            for rank in ranks:
                rank.close()
        return outcomes

    def close(self) -> None:
        """End every process, whatever it is doing."""
        for rank in self.ranks:
            rank.close()


def ended_after(first: int, outcome: RankOutcome) -> RankOutcome:
    """The outcome of a rank that had none yet, some seconds after the rank ``first`` had failed."""
    return replace(outcome, status="aborted", message=f"was ended after rank {first} had failed")


def _collect_outcomes(ranks: list[Rank], waiting: dict[Connection, int], timeout: float) -> list[RankOutcome]:
    """Wait for all; once one has failed, no longer than the grace."""
    outcomes: dict[int, RankOutcome] = {}
    deadline = time.monotonic() + timeout
    first: int | None = None
    while waiting and (seconds_left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), seconds_left):
            r = waiting.pop(ready)  # type: ignore[call-overload]
            outcomes[r] = ranks[r].finish()
            if rank_failed(outcomes[r]):
                # Its connections close too, so that who waits for it notices.
                ranks[r].close()
                if first is None:
                    first, deadline = r, min(deadline, time.monotonic() + GRACE)
    late = sorted(waiting.values())
    # All are asked before one is killed: else the others' stacks would show what its end did to them.
    for r in late:
        ranks[r].ask_for_stacks()
    for r in late:
        outcome = ranks[r].kill_with_stacks(f"no result after {timeout:g} s")
        if first is not None:
            outcome = ended_after(first, outcome)
        outcomes[r] = outcome
    return [outcomes[r] for r in range(len(ranks))]
