"""Blame: what the ranks of a cell recorded, put together, and which of them began a failure. Pure, no torch.

After a Python error on one rank a peer that waits for it gets an error from the network, or dies of it (gloo may end
in a segmentation fault). Such a peer was only taken along: what it says must not hide what the first one said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pytest_torchcompile.observation import Failure, Observation, RankOutcome

__all__ = ["cell_observation"]

_TAKEN_ALONG: Final = (
    "Connection closed by peer", "Connection reset by peer", "connectFullMesh", "Broken pipe", "Socket closed",
    "NCCL communicator was aborted", "remote process has failed", "Application timeout caused pair closure",
)
"""What gloo and NCCL say when the other side is gone."""
_IN_A_COLLECTIVE: Final = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py",
                           "torch/autograd/graph.py")
"""Where a rank is that waits for others; the last one calls backward, in which DDP and FSDP reduce gradients."""


def cell_observation(cell: str, outcomes: Sequence[RankOutcome]) -> Observation:
    """The observation of a cell: that of rank 0, with what the others recorded, and the failure of the one to blame."""
    ranks = [_observation(cell, outcome) for outcome in outcomes]
    if len(ranks) == 1:
        ranks[0].failed_at = None
        return ranks[0]
    if (guilty := _guilty(outcomes, ranks)) is not None:
        first = ranks[guilty].failure
        skipped = first is not None and first.kind == "skip"
        for r, rank in enumerate(ranks):
            if r != guilty and not skipped and rank.failure and rank.failure.kind == "skip":
                # A rank that skips later hides no failure: else the cell would be a skip.
                rank.failure = replace(rank.failure, kind="aborted", message=f"skipped: {rank.failure.message}")
            elif r != guilty:
                ranks[r] = _taken_along(rank, guilty)
    for rank in ranks:
        rank.failed_at = None
    seen = ranks[0]
    failures = {r: rank.failure for r, rank in enumerate(ranks) if rank.failure and rank.failure.kind != "aborted"}
    seen.ranks = [{key: value for key, value in rank.to_dict().items() if key in _KEPT} for rank in ranks[1:]]
    if failures:
        seen.failure = _told(failures, guilty, ranks)
    compiled = [rank.sections.get("rank_divergence") for rank in ranks]
    if measured := [section for section in compiled if section]:
        seen.sections["rank_divergence"] = {"ranks": compiled, "alike": measured[0]["alike"]}
    return seen


_KEPT: Final = ("sections", "failure", "seconds", "leaks")


def _observation(cell: str, outcome: RankOutcome) -> Observation:
    if outcome.status == "done":
        return Observation.from_dict(outcome.value)
    return Observation(cell, failure=Failure(outcome.status, outcome.message, evidence=outcome.evidence))


def _error(rank: Observation) -> Mapping[str, Any]:
    return (rank.sections.get("compiles") or {}).get("error") or {}


def _guilty(outcomes: Sequence[RankOutcome], ranks: Sequence[Observation]) -> int | None:
    """The rank that failed first by its own doing; None if none failed."""
    bad = [r for r, rank in enumerate(ranks) if rank.failure or _error(rank)]
    return min(bad, key=lambda r: _order(outcomes[r], ranks[r]), default=None)


def _order(outcome: RankOutcome, rank: Observation) -> tuple[int, bool, float]:
    """Own failures by time, then skips (which must hide none), hangs (one outside of a collective first), and those
    that were taken along.
    """
    failure, error = rank.failure, _error(rank)
    text = f"{failure.message} {failure.evidence}" if failure else f"{error.get('text', '')}"
    if (failure and failure.kind == "aborted") or any(known in text for known in _TAKEN_ALONG):
        return 3, False, outcome.at
    if failure and failure.kind == "timeout":
        return 2, _waits(failure.evidence), 0.0
    if failure and failure.kind == "skip":
        return 1, False, outcome.at
    return 0, False, outcome.at if rank.failed_at is None else rank.failed_at


def _waits(stacks: str) -> bool:
    """Whether the innermost frames of the main thread, whose stack comes last, are those of a collective."""
    frames = [line for line in stacks.partition("Current thread")[2].splitlines() if line.startswith("  File ")]
    return any(file in frame for frame in frames[:4] for file in _IN_A_COLLECTIVE)


def _taken_along(rank: Observation, guilty: int) -> Observation:
    """The rank's observation; a failure that only follows from the guilty one's is called ``aborted``."""
    failure, error = rank.failure, _error(rank)
    if (failure and failure.kind in ("crash", "internal", "user")) or (not failure and error):
        text = failure.message if failure else f"{error.get('type')}: {error.get('text')}"
        evidence = failure.evidence if failure else str(error.get("traceback", ""))
        if (failure and failure.kind == "crash") or any(known in f"{text} {evidence}" for known in _TAKEN_ALONG):
            rank.failure = Failure("aborted", f"after rank {guilty} had failed: {text}", evidence=evidence)
    return rank


def _told(failures: Mapping[int, Failure], guilty: int | None, ranks: Sequence[Observation]) -> Failure:
    """The cell's failure, with the rank's number and what there is of the others."""
    r = guilty if guilty in failures else min(failures)
    failure = failures[r]  # type: ignore[index]
    alike = {f.message for f in failures.values()} == {failure.message} and len(failures) == len(ranks)
    if alike and failure.kind in ("skip", "usage", "user"):
        return failure
    evidence = [f"rank {r}:\n{failure.evidence}"] if failure.evidence else []
    for other, rank in enumerate(ranks):
        if other != r and rank.failure is not None:
            evidence.append(f"rank {other}: {rank.failure.message}\n{rank.failure.evidence}".rstrip())
    return Failure(failure.kind, f"rank {r}: {failure.message}", failure.phase, "\n".join(evidence))
