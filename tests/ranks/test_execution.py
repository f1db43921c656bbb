"""Which GPUs a cell runs on: leases around its run, told to its process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import ClassVar

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import NoRank, TorchcompileError
from pytest_torchcompile.observation import Job, Observation, RankOutcome
from pytest_torchcompile.ranks import gpus, leases
from pytest_torchcompile.ranks import rank_group as group
from pytest_torchcompile.ranks.execution import Execution, gpus_of, threads_to_compile, threads_to_run
from pytest_torchcompile.ranks.leases import Leases
from pytest_torchcompile.ranks.rank_group import cell_observation
from pytest_torchcompile.run.settings import Settings
from pytest_torchcompile.run.verdicts import judge_observation

SETTINGS = Settings.read(lambda option: option.default if option.metavar else False)


class FakeRank:
    """Keeps what it was asked, and whether it was ended."""

    log: ClassVar[list] = []

    def __init__(self, folder):
        self.log.append("start")

    def begin(self, job):
        self.log.append(job["gpus"])
        ready, other = Pipe()
        other.close()
        return ready

    def finish(self):
        return RankOutcome("done", Observation("c").to_dict())

    def close(self):
        self.log.append("close")


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Runs cells of a host with so many GPUs, of which others may hold some."""
    monkeypatch.setattr(group, "Rank", FakeRank)
    monkeypatch.setattr(FakeRank, "log", [])
    monkeypatch.setattr(leases, "host_leases", lambda gpus, sharing: Leases(tmp_path, gpus, sharing))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(count, **settings):
        monkeypatch.setattr(gpus, "gpu_device_files", lambda: ["/dev/nvidia"] * count)
        mine = Execution(None, replace(SETTINGS, **settings), folder=Path("."))

        def run(device, checks=()):
            cell = Cell(model="m", device=device)
            return mine._on_gpus(cell, Job(cell.to_dict(), {}, ".", checks))

        return run

    return make


@pytest.mark.parametrize(("device", "ranks_of", "count"), [
    ("cpu", 1, 0), ("cpu", 4, 0), ("cuda", 1, 1), ("cuda", 4, 4), ("cuda:2", 1, 3), ("cuda:0", 2, 2), ("xpu", 1, 0)])
def test_how_many_a_cell_needs(device, ranks_of, count):
    """One a rank, and the device's own number among them."""
    wrapper = "none" if ranks_of == 1 else f"ddp*{ranks_of}"
    assert gpus_of(Cell(model="m", device=device, wrapper=wrapper)) == count


@pytest.mark.parametrize(("cores", "workers", "ranks", "device", "threads"), [
    (16, 1, 1, "cuda", 16), (16, 2, 1, "cuda", 8), (16, 10, 1, "cuda", 8), (16, 10, 1, "cuda:1", 8),
    (16, 10, 4, "cuda", 2),
    (4, 4, 1, "cuda", 2), (2, 2, 1, "cuda", 1), (1, 1, 1, "cuda", 1), (16, 10, 1, "cpu", 1), (16, 4, 2, "cpu", 2),
])
def test_threads_that_compile(cores, workers, ranks, device, threads):
    """The last cells of a run have the machine to themselves; on a CPU its cores are what the cells run on, too."""
    assert threads_to_compile(cores, workers, ranks, device) == threads


@pytest.mark.parametrize(("cores", "ranks", "device", "threads"), [
    (16, 1, "cpu", 4), (16, 2, "cpu", 2), (16, 8, "cpu", 1), (2, 1, "cpu", 2), (16, 1, "cuda", 1), (16, 4, "cuda:1", 1),
])
def test_threads_that_run_operators(cores, ranks, device, threads):
    assert threads_to_run(cores, ranks, device) == threads


def test_a_process_keeps_the_gpus_that_it_saw_first(on, tmp_path):
    """A cell on other GPUs needs another process; CPU cells and cells of the same GPUs do not."""
    run = on(2)
    run("cpu"), run("cuda")
    with Leases(tmp_path, ("0", "1")).hold_gpus(1) as elsewhere:
        assert elsewhere == ("0",)
        run("cuda")
    run("cuda"), run("cpu")
    assert FakeRank.log == ["start", (), ("0",), "close", ("1",), ("1",), ()]


def test_a_timed_cell_has_its_gpu_alone(on, tmp_path, monkeypatch):
    """Though others may share it."""
    seen = []
    on(1, workers_per_gpu=3)  # sets the fakes
    shares = Leases(tmp_path, ("0",), 3)

    def finish(self):
        try:
            with shares.hold_gpus(1, timeout=0.05):
                seen.append("shared")
        except TorchcompileError:
            seen.append("alone")
        return RankOutcome("done", Observation("c").to_dict())

    monkeypatch.setattr(FakeRank, "finish", finish)
    cells = on(1, workers_per_gpu=3)
    cells("cuda"), cells("cuda", ("compiles", "worth"))
    assert seen == ["shared", "alone"]


def test_a_cell_that_waits_is_named(on, tmp_path):
    """The progress line looks for it."""
    run, mine = on(1), Leases(tmp_path, ("0",))
    with ThreadPoolExecutor() as pool:
        with mine.hold_gpus(1):
            waiting = pool.submit(run, "cuda")
            deadline = time.monotonic() + 10
            while not (names := mine.waiting_names()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        waiting.result()
    assert names == {Cell(model="m", device="cuda").id}


def test_more_than_there_are_is_a_skip(on):
    """No lease is waited for that can't come."""
    (found,) = on(2)("cuda:3")
    assert (found.status, found.message) == ("skip", "it needs 4 GPUs, and this machine has 2 to use")
    assert FakeRank.log == []


def test_without_gpus_nothing_is_leased(on, tmp_path):
    """The rank itself says that the device is not here."""
    on(0)("cuda")
    assert FakeRank.log == ["start", ()]
    assert not (tmp_path / "queue").exists()




@pytest.mark.parametrize(("error", "message", "once"), [
    (NoRank("torch cannot be imported", "a traceback"), "torch cannot be imported", True),
    (TorchcompileError("leases is a symbolic link"), "leases is a symbolic link", False),
    (OSError(28, "No space left on device"), "the run's own files in . can't be used: [Errno 28] No space", False),
])
def test_a_fault_of_our_own_is_an_error_of_the_cell(on, monkeypatch, error, message, once):
    """Where there are no processes any more, none is asked for again, and the evidence is told once."""
    def fails(self, job):
        FakeRank.log.append("asked")
        raise error

    on(0)  # sets the fakes
    monkeypatch.setattr(FakeRank, "begin", fails)
    mine = Execution(None, SETTINGS, folder=Path("."))
    cell = Cell(model="m")
    found = [mine._cell_outcomes(cell, Job(cell.to_dict(), {}, ".", ()))[0] for _ in range(2)]
    assert [outcome.status for outcome in found] == ["no_rank", "no_rank"]
    assert all(outcome.message.startswith(message) for outcome in found)
    assert [outcome.evidence for outcome in found] == [getattr(error, "evidence", ""), ""]
    assert FakeRank.log.count("asked") == (1 if once else 2)
    judged = judge_observation(cell_observation(cell.id, found[:1]), ["compiles", "gradients"], {})
    assert {judgement.verdict for judgement in judged.values()} == {"error"}
    assert "see that python -c 'import torch' works here" in judged["compiles"].problems[0].hint
