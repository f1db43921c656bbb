"""Group: the rank processes of a cell, which begin and end it together, and what they recorded. No torch, no pytest.

One rank that fails ends the cell on all of them: the others wait for it in a collective, where they would stay until
the time-out. They are given a few seconds to notice by themselves, because what they then say (and their stacks, if
they say nothing) tells where they were.

Who began a failure is asked then. After a Python error on one rank a peer that waits for it gets an error from the
network, or dies of it (gloo may end in a segmentation fault). Such a peer was only taken along: what it says must not
hide what the first one said.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import NoRank
from pytest_torchcompile.observation import Failure, Job, Observation, RankOutcome, rank_failed
from pytest_torchcompile.ranks.message_frames import Channel
from pytest_torchcompile.ranks.rank import WAITS_FOR_PEERS, Rank
from pytest_torchcompile.ranks.starting import wait_for_any

__all__ = ["GRACE", "Group", "cell_observation", "ended_after"]

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
            waiting: dict[Channel, int] = {}
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


def _collect_outcomes(ranks: list[Rank], waiting: dict[Channel, int], timeout: float) -> list[RankOutcome]:
    """Wait for all; once one has failed, no longer than the grace."""
    outcomes: dict[int, RankOutcome] = {}
    deadline = time.monotonic() + timeout
    first: int | None = None
    while waiting and (seconds_left := deadline - time.monotonic()) > 0:
        for ready in wait_for_any(list(waiting), seconds_left):
            r = waiting.pop(ready)
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


_TAKEN_ALONG: Final = (
    "Connection closed by peer", "Connection reset by peer", "connectFullMesh", "Broken pipe", "Socket closed",
    "NCCL communicator was aborted", "remote process has failed", "Application timeout caused pair closure",
)
"""What gloo and NCCL say when the other side is gone."""
_IN_A_COLLECTIVE: Final = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py",
                           "torch/autograd/graph.py", WAITS_FOR_PEERS)
"""Where a rank is that waits for others. ``graph.py`` calls backward, in which DDP and FSDP reduce gradients."""


_KEPT: Final = ("sections", "failure", "seconds", "leaks")
"""What rank 0's observation keeps of the others'."""


def cell_observation(cell: str, outcomes: Sequence[RankOutcome]) -> Observation:
    """The observation of a cell: that of rank 0, with what the others recorded, and the failure of the one to blame."""
    ranks = [_rank_observation(cell, outcome) for outcome in outcomes]
    if len(ranks) == 1:
        ranks[0].failed_at = None
        return ranks[0]
    guilty = _guilty_rank(outcomes, ranks)
    if guilty is not None:
        _mark_followers(ranks, guilty)
    for rank in ranks:
        rank.failed_at = None
    seen = ranks[0]
    failures: dict[int, Failure] = {}
    for r, rank in enumerate(ranks):
        if rank.failure and rank.failure.kind != "aborted":
            failures[r] = rank.failure
    # Before rank 0 gets the cell's failure: each rank keeps its own.
    seen.ranks = list(map(_kept_of_rank, ranks[1:]))
    if failures:
        seen.failure = _cell_failure(failures, guilty, ranks)
    divergences = [rank.sections.get("rank_divergence") for rank in ranks]
    measured = [section for section in divergences if section]
    if measured:
        seen.sections["rank_divergence"] = {"ranks": divergences, "alike": measured[0]["alike"]}
    return seen


def _rank_observation(cell: str, outcome: RankOutcome) -> Observation:
    if outcome.status == "done":
        return Observation.from_dict(outcome.value)
    return Observation(cell, failure=Failure(outcome.status, outcome.message, evidence=outcome.evidence))


def _compile_error(rank: Observation) -> Mapping[str, Any]:
    """The error that compiled code raised; empty if there is none."""
    return (rank.sections.get("compiles") or {}).get("error") or {}


def _guilty_rank(outcomes: Sequence[RankOutcome], ranks: Sequence[Observation]) -> int | None:
    """The rank that failed first by its own doing; None if none failed."""
    failed = [r for r, rank in enumerate(ranks) if rank.failure or _compile_error(rank)]
    return min(failed, key=lambda r: _blame_order(outcomes[r], ranks[r]), default=None)


def _blame_order(outcome: RankOutcome, rank: Observation) -> tuple[int, bool, float]:
    """Own failures by time, then skips (which must hide none), hangs (one outside of a collective first), and those
    that were taken along.
    """
    failure = rank.failure
    if failure is None:
        text = f"{_compile_error(rank).get('text', '')}"
    else:
        text = f"{failure.message} {failure.evidence}"
    if (failure and failure.kind == "aborted") or _was_taken_along(text):
        # The lowest is to blame, so who was only taken along by another rank comes last.
        return 3, False, outcome.at
    if failure and failure.kind == "timeout":
        return 2, _waits_in_collective(failure.evidence), 0.0
    if failure and failure.kind == "skip":
        return 1, False, outcome.at
    # When the failure happened, if the rank could still say so; else when its end was noticed.
    if rank.failed_at is None:
        return 0, False, outcome.at
    return 0, False, rank.failed_at


def _was_taken_along(text: str) -> bool:
    return any(known in text for known in _TAKEN_ALONG)


def _waits_in_collective(stacks: str) -> bool:
    """Whether the innermost frames of the main thread, whose stack comes last, are those of a collective."""
    main_thread = stacks.partition("Current thread")[2]
    frames = [line for line in main_thread.splitlines() if line.startswith("  File ")]
    # A collective is entered by a few frames of torch; further out the same files stand in every stack.
    innermost = "\n".join(frames[:4])
    return any(file in innermost for file in _IN_A_COLLECTIVE)


def _mark_followers(ranks: Sequence[Observation], guilty: int) -> None:
    """Call the failures of other ranks ``aborted`` that only follow from the guilty one's."""
    first = ranks[guilty].failure
    cell_is_skip = first is not None and first.kind == "skip"
    for r, rank in enumerate(ranks):
        if r == guilty:
            continue
        if rank.failure and rank.failure.kind == "skip" and not cell_is_skip:
            # A rank that skips later hides no failure: else the cell would be a skip.
            rank.failure = replace(rank.failure, kind="aborted", message=f"skipped: {rank.failure.message}")
        else:
            _mark_follower(rank, guilty)


def _mark_follower(rank: Observation, guilty: int) -> None:
    """Call the failure of one rank ``aborted`` if it only follows from the guilty one's."""
    failure, error = rank.failure, _compile_error(rank)
    if failure is not None:
        if failure.kind not in ("crash", "internal", "user"):
            return
        text, evidence = failure.message, failure.evidence
        # gloo may end in a segmentation fault when its peer is gone.
        follows = failure.kind == "crash" or _was_taken_along(f"{text} {evidence}")
    elif error:
        text, evidence = f"{error.get('type')}: {error.get('text')}", str(error.get("traceback", ""))
        follows = _was_taken_along(f"{text} {evidence}")
    else:
        return
    if follows:
        rank.failure = Failure("aborted", f"after rank {guilty} had failed: {text}", evidence=evidence)


def _kept_of_rank(rank: Observation) -> dict[str, Any]:
    return {key: value for key, value in rank.to_dict().items() if key in _KEPT}


def _cell_failure(failures: Mapping[int, Failure], guilty: int | None, ranks: Sequence[Observation]) -> Failure:
    """The cell's failure, with the rank's number and what there is of the others."""
    # The guilty rank may have an error of the compiler only, which is no failure of the cell's run.
    blamed = guilty if guilty in failures else min(failures)
    failure = failures[blamed]  # type: ignore[index]
    messages = {each.message for each in failures.values()}
    all_alike = messages == {failure.message} and len(failures) == len(ranks)
    if all_alike and failure.kind in ("skip", "usage", "user"):
        return failure
    evidence: list[str] = []
    if failure.evidence:
        evidence.append(f"rank {blamed}:\n{failure.evidence}")
    for r, rank in enumerate(ranks):
        if r != blamed and rank.failure is not None:
            evidence.append(f"rank {r}: {rank.failure.message}\n{rank.failure.evidence}".rstrip())
    return Failure(failure.kind, f"rank {blamed}: {failure.message}", failure.phase, "\n".join(evidence))
