"""Which rank began a failure, and what is told of the others. No process is started here."""

from __future__ import annotations

import pytest

from pytest_torchcompile.observation import Failure, Observation, RankOutcome
from pytest_torchcompile.ranks.rank_group import cell_observation
from pytest_torchcompile.run.verdicts import judge_observation

CLOSED = "[pair.cc:553] Connection closed by peer [127.0.0.1]:18842"
WAITING = 'Current thread 0x1 (most recent call first):\n  File "torch/autograd/graph.py", line 979 in run'
ASLEEP = 'Current thread 0x1 (most recent call first):\n  File "mine.py", line 3 in forward'


def compiles(error=None, runs=1):
    """A section of the check ``compiles``."""
    return {"compiles": [], "graphs": [{"runs": runs}], "eager_frames": [], "lost": [], "error": error, "coverage": [],
            "all_zero": [False], "eager_all_zero": [False], "seconds": 1.0}


def done(error="", at=None, kind="", message=""):
    """A rank that came to an end: well, with an error of its compiled run, or with a failure."""
    found = {"type": "RuntimeError", "text": error, "phase": "forward", "traceback": ""} if error else None
    seen = Observation("cell", {"compiles": compiles(found)}, failure=Failure(kind, message) if kind else None,
                       failed_at=at)
    return RankOutcome("done", seen.to_dict(), seconds=1.0)


def told(*outcomes):
    """The observation, and what the check ``compiles`` says."""
    seen = cell_observation("cell", outcomes)
    judged = judge_observation(seen, ["compiles"], {})["compiles"]
    return seen, judged.verdict, [problem.message for problem in judged.problems]


def test_ranks_that_are_well():
    """Rank 0's sections are the cell's; the others' are kept."""
    seen, verdict, _ = told(done(), done(), done())
    assert (verdict, len(seen.ranks), seen.failure) == ("pass", 2, None)
    assert seen.ranks[1]["sections"]["compiles"]["graphs"] == [{"runs": 1}]


def test_one_rank_is_itself():
    """A cell of one rank is told as before."""
    seen, verdict, found = told(done("broken", at=5.0))
    assert (verdict, seen.ranks, seen.failed_at) == ("fail", [], None)
    assert found == ["the compiled run raised RuntimeError in forward; eager did not: broken"]


def test_the_same_problem_of_all_ranks_is_told_once():
    """And one of some ranks with their numbers."""
    assert told(done("broken", 5.0), done("broken", 6.0))[2] == [
        "every rank: the compiled run raised RuntimeError in forward; eager did not: broken"]
    assert told(done(), done("broken", 5.0), done("broken", 6.0))[2] == [
        "ranks 1, 2: the compiled run raised RuntimeError in forward; eager did not: broken"]


@pytest.mark.parametrize("other", [
    done(CLOSED, at=4.0), RankOutcome("aborted", message="was ended after rank 1 had failed"),
    RankOutcome("crash", message="segmentation fault (SIGSEGV)", at=5.5),
])
def test_who_is_taken_along_is_no_finding(other):
    """Whatever comes of the peer of a rank that raised first, the rank that raised is told."""
    seen, verdict, found = told(other, done("broken", at=5.0))
    assert (verdict, found) == ("fail", [
        "rank 1: the compiled run raised RuntimeError in forward; eager did not: broken"])
    assert seen.failure.kind == "aborted"


def test_a_crash_before_an_error_is_to_blame():
    """The error of the peer is what the network says of it."""
    seen, verdict, _ = told(RankOutcome("crash", message="killed", at=3.0), done(CLOSED, at=2.0))
    assert (verdict, seen.failure.message) == ("crash", "rank 0: killed")
    assert seen.ranks[0]["failure"]["kind"] == "aborted"
    assert CLOSED in seen.failure.evidence


def test_of_two_that_fail_by_themselves_the_first_is_to_blame():
    """A crash before an error is told, and an error before a crash."""
    first, then = RankOutcome("crash", message="killed", at=4.0), RankOutcome("crash", message="killed", at=6.0)
    assert told(done("broken", at=5.0), first)[:2][1] == "crash"
    assert told(done("broken", at=5.0), then)[2] == [
        "rank 0: the compiled run raised RuntimeError in forward; eager did not: broken"]


def test_of_ranks_that_hang_the_one_outside_of_a_collective_is_told():
    """Both have no result; both stacks are kept."""
    late = [RankOutcome("timeout", message="no result after 5 s", evidence=stack) for stack in (WAITING, ASLEEP)]
    seen, verdict, _ = told(*late)
    assert (verdict, seen.failure.message) == ("timeout", "rank 1: no result after 5 s")
    assert ASLEEP in seen.failure.evidence
    assert WAITING in seen.failure.evidence


def test_a_skip_of_all_ranks_is_the_cells():
    """Without a rank's number: it is the machine."""
    seen, verdict, _ = told(done(kind="skip", message="no GPU", at=1.0), done(kind="skip", message="no GPU", at=1.0))
    assert (verdict, seen.failure.message) == ("skip", "no GPU")


def test_a_skip_of_one_rank_hides_no_failure():
    """The cell is no skip where another rank had failed by itself; what a skip takes along comes of it."""
    skip = done(kind="skip", message="no GPU", at=6.0)
    assert told(done("broken", at=5.0), skip)[1] == "fail"
    assert told(skip, done("broken", at=5.0))[1] == "fail"
    assert told(done(kind="user", message="eager fails", at=5.0), skip)[1] == "error"
    assert told(skip, RankOutcome("aborted", message="was ended after rank 0 had failed"))[1] == "skip"
    assert told(skip, done(CLOSED, at=7.0))[1] == "skip"


def test_a_skip_that_comes_first_hides_no_failure_either():
    """Another rank that failed by itself is to blame, whenever it did."""
    skip = done(kind="skip", message="no GPU", at=4.0)
    assert told(skip, done("broken", at=5.0))[1] == "fail"
    seen, verdict, _ = told(skip, done(kind="user", message="eager fails", at=5.0))
    assert (verdict, seen.failure.message) == ("error", "rank 1: eager fails")
    assert told(skip, RankOutcome("timeout", message="no result after 5 s", evidence=ASLEEP))[1] == "skip"


def test_ranks_ended_with_nobody_to_blame_are_no_pass():
    """An observation whose every rank was taken along proves nothing."""
    seen = cell_observation("cell", [RankOutcome("aborted", message="x"), RankOutcome("aborted", message="y")])
    assert judge_observation(seen, ["compiles"], {})["compiles"].verdict == "error"


def test_a_rank_that_waits_before_a_profiler_is_left_has_not_hung():
    """It waits for a collective that its peer has not begun; so the peer is told, though both have timed out."""
    waits = RankOutcome("timeout", message="no result", evidence=(
        'Current thread 0x1 (most recent call first):\n  File "/venv/gauges/settled_collectives.py", line 43 in _wait\n'
        '  File "/usr/lib/python3.11/contextlib.py", line 144 in __exit__'))
    hangs = RankOutcome("timeout", message="no result", evidence=(
        'Current thread 0x1 (most recent call first):\n  File "/home/me/models.py", line 9 in forward'))
    seen, verdict, _ = told(waits, hangs)
    assert (verdict, seen.failure.message) == ("timeout", "rank 1: no result")
