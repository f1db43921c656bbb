"""Cells of several ranks, without pytest around them: what is right passes, and each planted fault is found."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.ranks import serving
from pytest_torchcompile.ranks.rank_group import Group, cell_observation
from pytest_torchcompile.ranks.zygotes import Zygote
from pytest_torchcompile.run.verdicts import judge_observation
from pytest_torchcompile.wrappers.process_group import all_well
from pytest_torchcompile.wrappers.wrapping import Wrapping

pytestmark = pytest.mark.needs_torch
HERE = Path(__file__).parent
NET = {"name": "net", "factory": "rank_faults:Net", "inputs": "rank_faults:rows", "loss": None, "where": "here:1:1"}
ASKED = ("compiles", "equivalence", "gradients", "training_steps", "aliasing", "recompiles", "rank_divergence")


@pytest.fixture(scope="module")
def group():
    """Rank processes that all tests of this file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(serving.WARM, "0")
        started = Zygote(300.0)
    made = Group(started.folder)
    yield made
    made.close()
    started.close()


# Under a load of 11 on two cores one took 40 s; a test that waits for a time-out names a short one.
def run(group, wrapper, *, timeout=300.0, backend="aot_eager", **entry):
    """Run one cell and return its observation, as a report would hold it, with the verdicts."""
    from pytest_torchcompile.dims import Dim
    from pytest_torchcompile.plan.models import ModelEntry

    cell = Cell(model="net", backend=backend, wrapper=wrapper)
    model = ModelEntry(**{**NET, **entry}, dims={"B": Dim(choices=(4, 6, 9))})
    job = Job(cell=cell.to_dict(), entry=model.to_dict(), root=str(HERE), checks=ASKED, threads=1)
    outcomes = group.run(job, Wrapping.read(wrapper).ranks, sys.path, timeout)
    seen = Observation.from_dict(cell_observation(cell.id, outcomes).to_dict())
    return seen, judge_observation(seen, ASKED, {"coverage": 0.0})


def failing(judgements):
    """The checks that do not pass, and the first text of each."""
    return {name: judged.problems[0].message for name, judged in judgements.items() if judged.verdict != "pass"}


@pytest.mark.parametrize("wrapper", ["ddp", "rank_faults:right*2", "rank_faults:overlapped*2", "tp"])
@pytest.mark.parametrize("model", ["Net", "Normed"])
def test_what_is_right_passes(group, wrapper, model):
    """Two ranks compute what one process does: averaged gradients, statistics of batch norm, dropout."""
    if (wrapper, model) == ("tp", "Normed"):
        seen, judged = run(group, wrapper, factory="rank_faults:Normed")
        assert seen.failure.kind == "usage"
        assert "the model's attribute tp_plan names, and model 'net' has none" in seen.failure.message
        return
    seen, judged = run(group, wrapper, factory=f"rank_faults:{model}")
    assert failing(judged) == {}, seen.failure
    assert len(seen.ranks) == 1
    assert seen.sections["gradients"]["compared"] > 20
    assert seen.sections["training_steps"]["steps"] == 3
    one, other = seen.sections["rank_divergence"]["ranks"]
    assert len(one["compiles"]) == len(other["compiles"]) > 0
    assert one["collectives"] == other["collectives"] != {}


@pytest.mark.parametrize("wrapper", ["ddp*3", "fsdp2*3"])
def test_any_number_of_ranks(group, wrapper):
    """What has one dimension needs no even number."""
    seen, judged = run(group, wrapper, factory="rank_faults:Stack")
    assert failing(judged) == {}, seen.failure
    assert len(seen.ranks) == 2
    assert seen.sections["gradients"]["compared"] > 20


@pytest.mark.parametrize(("wrapper", "model", "text"), [
    ("tp", "Sequenced", "model 'net': tp_plan['down'] is 'rowwise_sequence', which splits the sequence that down gives "
     "over 2 ranks, and they do not divide its length 9 (input of shape (9, 8)); have the matrix make lengths that are "
     "multiples of 2, by multiple_of: 2 or"),
    ("tp*3", "Net", "model 'net': tp_plan['up'] is 'colwise', which splits out_features=16 of up over 3 ranks, and "
     "they do not divide it; run the model on ranks that do (2, 4, 8, 16), give"),
])
def test_sizes_that_the_ranks_do_not_divide(group, wrapper, model, text):
    """One sentence, the same from every rank, in place of the transport's abort or an operator's puzzle."""
    seen, judged = run(group, wrapper, factory=f"rank_faults:{model}", backend="eager")
    assert (seen.failure.kind, seen.failure.message[:len(text)]) == ("usage", text)
    assert {judgement.verdict for judgement in judged.values()} == {"error"}
    assert seen.failure.evidence == ""


def test_an_embedding_is_split_by_rows(group):
    """Its ids are whole on each rank, and its rows may be any number."""
    seen, judged = run(group, "tp", factory="rank_faults:Embedded", inputs="rank_faults:tokens")
    assert failing(judged) == {}, seen.failure


def test_each_rank_keeps_its_own_compiled_code(group):
    """AOTAutograd's cache does not tell process groups apart: ranks that share a folder get each other's code."""
    seen, judged = run(group, "rank_faults:alone*2", backend="eager")
    assert failing(judged) == {}, seen.failure


@pytest.mark.parametrize("fault", ["forgets", "adds", "overlapped_undivided"])
def test_wrong_gradients_are_found(group, fault):
    """A wrapper that is wrong without torch.compile too is found by what one process computes."""
    _, judged = run(group, f"rank_faults:{fault}*2")
    found = failing(judged)
    assert set(found) == {"gradients", "training_steps"}
    told = [problem.message for problem in judged["gradients"].problems]
    assert any(text.startswith("rank 0: gradient of down.") for text in told)
    assert any(text.startswith("rank 1: gradient of down.") for text in told)
    problem = judged["gradients"].problems[0]
    assert "the ranks' eager run beside one process" in problem.evidence
    assert re.search(r": one process \S+, ranks \S+, expected \S+", problem.message)


def test_a_fault_of_the_compiled_side_alone_is_found(group):
    """The eager ranks are right."""
    _, judged = run(group, "rank_faults:forgets_compiled*2")
    assert set(failing(judged)) == {"gradients", "training_steps"}
    assert "beside one process" not in judged["gradients"].problems[0].evidence
    assert re.search(r": eager \S+, compiled \S+, expected \S+", judged["gradients"].problems[0].message)


def test_a_rank_that_drifts_is_named(group):
    """Of two ranks that work on one batch, rank 1 is off."""
    _, judged = run(group, "rank_faults:drifts*2")
    assert set(failing(judged)) == {"equivalence", "gradients", "training_steps"}
    assert failing(judged)["equivalence"].startswith("rank 1: output")


def test_a_rank_that_compiles_otherwise_is_found(group):
    """Every number is right, and rank 1 compiles when rank 0 does not."""
    _, judged = run(group, "rank_faults:diverges*2")
    assert set(failing(judged)) == {"rank_divergence"} or set(failing(judged)) == {"rank_divergence", "recompiles"}
    problem = judged["rank_divergence"].problems[0]
    assert "rank 1 compiled otherwise than rank 0 in call" in problem.message
    assert "rank 0: " in problem.evidence
    assert "rank 1: " in problem.evidence


@pytest.mark.parametrize(("fault", "kind", "text"), [
    ("dies", "crash", r"rank 1: killed, perhaps for want of memory \(SIGKILL\)"),
    ("faults", "crash", r"rank 1: segmentation fault \(SIGSEGV\) in <lambda> \(ranks/rank_faults\.py:\d+\)"),
    ("leaves", "crash", "rank 1: the process ended itself with exit code 3"),
])
def test_a_rank_that_dies_ends_the_cell_at_once(group, fault, kind, text):
    """Its peer, which waits for it in a collective, is taken along; the next cell is run as if nothing had been."""
    began = time.monotonic()
    seen, judged = run(group, f"rank_faults:{fault}*2", backend="eager")
    assert seen.failure.kind == kind
    assert re.fullmatch(text, seen.failure.message), seen.failure.message
    assert time.monotonic() - began < 50
    assert {judgement.verdict for judgement in judged.values()} == {"crash"}
    assert all(rank.pid == 0 or rank._connection is None for rank in group.ranks[:2])


@pytest.mark.parametrize(("fault", "text"), [
    ("raises", "the compiled run raised ValueError in forward; eager did not: rank 1 has had enough"),
    ("hogs", "the compiled run raised RuntimeError in forward; eager did not: "),
])
def test_a_rank_that_raises_is_blamed_and_not_its_peer(group, fault, text):
    """The peer's error from the network is no finding of its own."""
    seen, judged = run(group, f"rank_faults:{fault}*2", backend="eager")
    assert seen.failure is None or seen.failure.kind == "aborted"
    assert failing(judged)["compiles"].startswith(f"rank 1: {text}")
    assert len(judged["compiles"].problems) == 1


@pytest.mark.parametrize(("fault", "verdict", "text"), [
    ("sharded_raises", "fail", "the compiled run raised ValueError in forward; eager did not: a block has had enough"),
    ("whole_raises", "fail", "the compiled run raised ValueError in forward; eager did not: a block has had enough"),
    ("split_raises", "error", "the model raises without torch.compile too, at call 3 (B=9): ValueError: a block has "
                              "had enough (rank_faults.py:"),
])
def test_a_rank_that_raises_between_the_models_collectives(group, fault, verdict, text):
    """What it has to tell is told, and nothing that it still reads is taken by its peers for a collective of theirs."""
    began = time.monotonic()
    seen, judged = run(group, f"rank_faults:{fault}*2", backend="eager", factory="rank_faults:Stack")
    assert judged["compiles"].verdict == verdict, seen.failure
    assert failing(judged)["compiles"].startswith(f"rank 1: {text}")
    assert time.monotonic() - began < 50  # far less than the time-out of a collective


def test_a_rank_that_hangs_is_told_by_its_stack(group):
    """The time-out ends both; rank 1, which is in no collective, is to blame, and the stacks of both are shown."""
    # What a first cell imports takes a busy machine long, so another cell goes first; then the third call comes soon.
    run(group, "ddp", backend="eager")
    seen, judged = run(group, "rank_faults:hangs*2", timeout=25.0, backend="eager")
    assert (seen.failure.kind, seen.failure.message) == ("timeout", "rank 1: no result after 25 s")
    first, _, second = seen.failure.evidence.partition("rank 0: ")
    assert re.search(r"rank_faults.py., line \d+ in _hang$", first, re.MULTILINE)
    assert "torch/autograd/graph.py" in second
    for evidence in (first, second):
        assert "listeners.py" not in evidence
        assert "threading.py" not in evidence
    # Rank 0 waits in a collective that rank 1 has not begun.
    mine, its = (re.findall(r"^  #(\d+) (gloo:\w+) in default_pg, \[\d+\] \w+: (\w+)$", each, re.MULTILINE)
                 for each in (first, second))
    assert len(mine) == len(its) == 10
    assert {state for _, _, state in mine} == {state for _, _, state in its[:-1]} == {"ended"}
    assert mine[1:] == its[:-1]
    assert its[-1] == (str(int(mine[-1][0]) + 1), "gloo:all_reduce", "scheduled")
    assert {judgement.verdict for judgement in judged.values()} == {"timeout"}


def test_processes_are_used_again(group):
    """Two cells one after the other run in the same processes."""
    run(group, "ddp", backend="eager")
    pids = [rank.pid for rank in group.ranks]
    run(group, "ddp", backend="eager")
    assert [rank.pid for rank in group.ranks] == pids


def test_checks_know_which_cells_they_judge():
    """A check of several ranks has no item in a cell of one, and the gates of one process none in a cell of several."""
    assert not CHECKS["rank_divergence"].applies({"phase": "training", "wrapper": "none"})
    assert CHECKS["rank_divergence"].applies({"phase": "training", "wrapper": "mypkg.parallel:wrap*2"})
    assert CHECKS["smoketest"].applies({"phase": "training", "wrapper": "none"})
    assert not CHECKS["smoketest"].applies({"phase": "training", "wrapper": "ddp"})
    assert CHECKS["gradients"].applies({"phase": "training", "wrapper": "ddp"})
    assert not CHECKS["gradients"].applies({"phase": "inference", "wrapper": "ddp"})


@pytest.mark.parametrize(("told", "answers"), [
    ((True, True, True), [True, True, True]), ((True, False, True), [False, False, False]),
    ((None, False, True), [False, False])])  # fmt: skip
def test_a_group_ends_where_all_went_well(tmp_path, told, answers):
    """Every rank hears the same; one that never says anything is not waited for once another has failed."""
    import torch.distributed as dist

    def ends(rank):
        job = Job(cell={}, entry={}, root="", checks=(), rank=rank, world=3)
        return all_well(dist.FileStore(str(tmp_path / "store"), 3), job, told[rank])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ends, [rank for rank in range(3) if told[rank] is not None])) == answers
