"""The flight recorder's tail: what is told of each recorder that torch has, and how it is asked for."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pytest_torchcompile.gauges import flight_recorder
from pytest_torchcompile.gauges.flight_recorder import count_under_way, keep_entries, last_collectives
from pytest_torchcompile.ranks import listeners

pytestmark = pytest.mark.needs_torch
NCCL, GENERIC = "_dump_nccl_trace_json", "_dump_fr_trace_json"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Answering sets the variable where it is not set."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")


def entry(number, name="nccl:all_reduce", **more):
    """An entry as torch 2.8 to 2.13 write it, of NCCL that has none of it completed; made at second ``number``."""
    return {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": name,
            "process_group": ["0", "default_pg"], "input_sizes": [[4, 8]], "input_dtypes": ["Float"],
            "state": "scheduled", "retired": False, "time_created_ns": number * 10**9} | more


@pytest.fixture
def recorders(monkeypatch):
    """Plant what torch's functions return, by their names; one that is not named is missing."""
    def plant(**entries):
        for name in (NCCL, GENERIC):
            monkeypatch.delattr(c10d, name, raising=False)
            if name in entries:
                dump = json.dumps({"version": "2.10", "entries": entries[name]}).encode()
                monkeypatch.setattr(c10d, name, lambda collectives, active, dump=dump: dump, raising=False)
    return plant


def test_gloo_is_under_way_until_it_has_retired_a_collective(recorders):
    """NCCL's communicators write no events of the profiler, and what began before is nobody's."""
    recorders(**{NCCL: [entry(4)], GENERIC: [
        entry(1, "gloo:all_reduce"), entry(2, "gloo:all_reduce", retired=True), entry(3, "gloo:all_gather"),
        entry(4, "gloo:barrier", state="completed"),
    ]})
    assert count_under_way(0) == 2
    assert count_under_way(2 * 10**9) == 1
    assert count_under_way(4 * 10**9) == 0


def test_an_entry_is_a_line(recorders):
    """Its number, name, process group, sizes, and how far it has come."""
    recorders(**{NCCL: [
        entry(1, state="completed", retired=True),
        entry(2, process_group=["7", "mesh_tensor"], state="started"),
        entry(3, retired=True),
        entry(0, "nccl:send", is_p2p=True, p2p_seq_id=5, time_created_ns=4 * 10**9),
        entry(5, "nccl:all_gather", process_group=["7", ""], input_sizes=[[2], []], input_dtypes=["Float", "Long"]),
        entry(6, "nccl:barrier", input_sizes=[], input_dtypes=[]),
    ]})
    assert last_collectives(0).splitlines() == [
        "flight recorder, the last 6 of 6 collectives:",
        "  #1 nccl:all_reduce in default_pg, [4, 8] Float: completed",
        "  #2 nccl:all_reduce in mesh_tensor, [4, 8] Float: started",
        "  #3 nccl:all_reduce in default_pg, [4, 8] Float: given up",
        "  p2p #5 nccl:send in default_pg, [4, 8] Float: scheduled",
        "  #5 nccl:all_gather in 7, [2] Float, [] Long: scheduled",
        "  #6 nccl:barrier in default_pg, no tensor: scheduled",
    ]


def test_what_waits_for_its_communicator_is_not_called_completed(recorders):
    """NCCL says completed of it, as its events have not been recorded; so it does of what was retired since."""
    recorders(**{NCCL: [entry(1, state="completed", retired=True), entry(2, state="completed")]})
    states = [line.rpartition(": ")[2] for line in last_collectives(0).splitlines()[1:]]
    assert states == ["completed", "completed, or not begun"]


def test_both_recorders_are_read_and_nothing_twice(recorders):
    """gloo's entries are in one alone; a torch that gives the same entries by both names tells them once."""
    recorders(**{NCCL: [entry(1), entry(3)],
                 GENERIC: [entry(2, "gloo:broadcast", retired=True), entry(3)]})
    assert [line.split()[:2] for line in last_collectives(0).splitlines()[1:]] == [
        ["#1", "nccl:all_reduce"], ["#2", "gloo:broadcast"], ["#3", "nccl:all_reduce"]]
    assert "#2 gloo:broadcast in default_pg, [4, 8] Float: ended" in last_collectives(0)


def test_only_the_cells_own_and_the_last_of_them(recorders):
    """A warm process has entries of earlier cells."""
    recorders(**{GENERIC: [entry(number) for number in range(1, 31)]})
    told = last_collectives(12 * 10**9).splitlines()
    assert told[0] == "flight recorder, the last 10 of 19 collectives:"
    assert [line.split()[0] for line in told[1:]] == [f"#{number}" for number in range(21, 31)]


def test_nothing_recorded(recorders, monkeypatch):
    """The text names the variable by which the user may have turned it off."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    recorders(**{NCCL: [], GENERIC: [entry(1)]})
    said = "flight recorder: no collective was begun, or none recorded (TORCH_FR_BUFFER_SIZE=0)"
    assert last_collectives(2 * 10**9) == said


def test_a_torch_without_a_recorder(recorders):
    """One clear sentence."""
    recorders()
    assert last_collectives(0) == f"flight recorder: torch {torch.__version__} has none that can be read here"


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_the_user_has_set_stays(name, monkeypatch):
    """By either name."""
    for known in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(known, raising=False)
    monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    keep_entries()
    assert dict(os.environ) == before
    monkeypatch.delenv(name)
    keep_entries()
    assert os.environ.pop("TORCH_FR_BUFFER_SIZE") == "2000"


def test_asked_and_told(recorders, tmp_path):
    """Only while somebody answers; nothing is left of it but the answer, which the next cell removes."""
    recorders(**{NCCL: [entry(1 << 40)]})
    file = tmp_path / "1.flight"
    assert not listeners.ask_recorder(file)
    with listeners.answer_questions(file):
        assert listeners.ask_recorder(file)
        assert "#1099511627776 nccl:all_reduce" in listeners.read_answer(file)
    assert not listeners.ask_recorder(file)
    assert list(tmp_path.iterdir()) == [file]
    with listeners.answer_questions(file):
        assert not file.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_that_fails_is_told(monkeypatch, tmp_path):
    """The stacks must not be lost with it."""
    def fails(since):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(flight_recorder, "last_collectives", fails)
    with listeners.answer_questions(tmp_path / "it"):
        assert listeners.ask_recorder(tmp_path / "it")
        answer = listeners.read_answer(tmp_path / "it")
        assert answer == "flight recorder: it could not be read: RuntimeError: no such thing"


def test_no_answer_is_told(monkeypatch, tmp_path):
    """Of a process whose main thread keeps the interpreter to itself."""
    monkeypatch.setattr(listeners, "PATIENCE", 0.05)
    assert listeners.read_answer(tmp_path / "it") == (
        "flight recorder: not read within 0.05 s, because the main thread does not let go of the interpreter")
