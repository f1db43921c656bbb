"""The hunt: its library, where it goes on, one finding a cause, what it leaves for people."""

from __future__ import annotations

import ast
import json
import platform
import sys
from importlib.metadata import version
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.contract import contract_search, hunt, hunt_report
from pytest_torchcompile.contract.hunt import (
    ZOO,
    HuntFinding,
    HuntProgress,
    cause_of,
    hunted_programs,
    parts_of,
)
from pytest_torchcompile.contract.layer_library import LAYERS, chain_source, layer_source
from pytest_torchcompile.contract.operator_library import OPERATORS, operator_source
from pytest_torchcompile.contract.worker import OwnFailure
from pytest_torchcompile.errors import UsageError

PLANTED = '''
import torch


def off_where_sliced(module, example_inputs):
    def run(*arguments):
        first, *others = module(*arguments)
        if any(isinstance(each, torch.Tensor) and each.numel() and each.stride()[-1:] == (2,) for each in arguments):
            first = first + 1
        return first, *others

    return run


if "off_where_sliced" not in torch._dynamo.list_backends(None):
    torch._dynamo.register_backend(off_where_sliced, "off_where_sliced")


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def model():
    return Mixed()


def inputs(B):
    return (torch.randn(B, 6),)
'''


def record(**changes):
    """A finding as plain data."""
    return {"kind": "value", "where": "output", "message": "output: off", "at": 0, "history": [], "code": "[call(B=2)]",
            "drawn": "[call(B=2)]", "cut": "", "without": [], "stage": "aot_eager", "search": "wrong result",
            "script": "print(1)"} | changes


def test_programs_follow_from_the_seed():
    """All layers, operators and models of the zoo, each between two chains; a later run goes on where it is told to."""
    sizes = {"layer": len(LAYERS), "operator": len(OPERATORS), "zoo": len(ZOO)}
    count = 2 * sum(sizes.values())
    first = list(islice(hunted_programs(0), count))
    known = [(kind, number) for _, kind, number in first if kind != "chain"]
    assert sorted(known) == sorted((kind, number) for kind, size in sizes.items() for number in range(size))
    assert len({number for _, kind, number in first if kind == "chain"}) == count // 2
    assert list(islice(hunted_programs(0, 7), 5)) == first[7:12]
    other = list(islice(hunted_programs(1), count))
    assert not {each[1:] for each in first if each[1] == "chain"} & {each[1:] for each in other}


def test_files_are_python():
    assert chain_source(3) == chain_source(3) != chain_source(4)
    texts = [layer_source(number) for number in range(len(LAYERS))] + [chain_source(seed) for seed in range(50)]
    for text in texts + [operator_source(number) for number in range(len(OPERATORS))]:
        names = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        assert names == ["model", "inputs"]


@pytest.mark.needs_torch
def test_every_operator_runs_in_eager():
    """On the batch that stands beside it, and without a warning."""
    for number in range(len(OPERATORS)):
        made: dict[str, Any] = {}
        exec(operator_source(number), made)
        assert made["model"]()(*made["inputs"](2)) is not None


def test_one_finding_a_cause():
    """Numbers and options of a layer are no cause of their own; stage, kind and mutation are."""
    conv = [number for number, (layer, _) in enumerate(LAYERS) if layer.startswith("Conv2d(")]
    one, other = f"layer_{conv[0]}", f"layer_{conv[1]}"
    assert cause_of(record(), one) == cause_of(record(message="output: 3 off"), other)
    assert cause_of(record(), one) != cause_of(record(stage="inductor"), one)
    assert cause_of(record(), one) != cause_of(record(kind="stride"), one)
    assert cause_of(record(), one) != cause_of(record(history=[{"mutations": {"strides": "sliced 0"}}]), one)
    progress = HuntProgress()
    assert progress.add(HuntFinding("a", one, record())).number == 1
    assert progress.add(HuntFinding("a", other, record())) is None
    assert progress.add(HuntFinding("b", one, record())).number == 2
    assert [each.times for each in progress.findings] == [2, 1]


def test_what_is_kept(tmp_path):
    progress = HuntProgress(places={"eager 0": 3})
    progress.counts["calls"] += 5
    progress.add(HuntFinding("a", "layer_0", record()))
    progress.write(tmp_path)
    read = HuntProgress.read(tmp_path)
    assert (read.places, read.counts, read.findings) == (progress.places, progress.counts, progress.findings)
    (tmp_path / "hunt.json").write_text("{}")
    assert main(["hunt", "-o", str(tmp_path)]) == 4


@pytest.mark.parametrize(("arguments", "says"), [
    (["--seconds", "0"], "--seconds 0: expected more than 0"), (["--seed", "-1"], "--seed -1: expected 0 or more"),
])
def test_mistakes(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["hunt", *arguments]) == 4
    assert capsys.readouterr().err == f"{says}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_torch
def test_a_device_that_is_not_here(tmp_path, capsys):
    """Said once at the start: every program would else be left out, one after the other."""
    assert main(["hunt", "--device", "nowhere", "-o", str(tmp_path)]) == 4
    said = capsys.readouterr().err
    assert said.startswith("--device nowhere: torch can't put a tensor there (")
    assert said.endswith("); expected cpu, or cuda on a machine with a GPU\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_torch
def test_a_program_is_on_the_hunted_device(tmp_path):
    """The meta device holds no numbers, but it is another one than the CPU."""
    import torch

    from pytest_torchcompile.contract import history_run

    path = tmp_path / "program.py"
    path.write_text(layer_source(0))
    program = hunt.program_of({"file": str(path), "backend": "eager", "device": "meta"})
    assert {each.device.type for each in program.make_model().parameters()} == {"meta"}
    assert [each.device.type for each in program.batch({"B": 2}, 0).args] == ["meta"]
    assert history_run._device_type(torch.nn.Identity(), program.batch({"B": 2}, 0)) == "meta"


def test_a_state_that_is_none(tmp_path, capsys):
    (tmp_path / "hunt.json").write_text("[]")
    assert main(["hunt", "-o", str(tmp_path)]) == 4
    assert "hunt.json: not the state of a hunt" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "says"), [
    ("print('apart by 1')", "apart by 1"), ("import os; os.abort()", "ended by signal SIGABRT"),
    ("raise SystemExit(3)", "exit code 3"), ("", ""),
])
def test_what_a_script_shows(code, says, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(code)
    assert hunt_report.script_outcome(path).splitlines()[-1:] == [says][:bool(says)]


def test_a_script_without_an_end(tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text("while True: pass")
    monkeypatch.setattr(hunt_report, "SCRIPT_SECONDS", 0.2)
    assert hunt_report.script_outcome(path) == "no end in 0.2 s"


@pytest.mark.needs_torch
def test_drafts():
    """A person reads whether the script shows it, and whose it is."""
    told = HuntFinding("a", "layer_0", record(), 1)
    assert "comes in with the backend `aot_eager`" in hunt_report.issue_draft(told, "apart")
    assert "the script does not show it" in hunt_report.issue_draft(told, "")
    crash = HuntFinding("a", "layer_0", record(kind="crash", where="eager", stage=""), 1)
    assert "Eager itself shows it" in hunt_report.issue_draft(crash, "ended by signal SIGSEGV")


@pytest.mark.needs_torch
def test_a_draft_says_which_other_versions_show_it():
    told = HuntFinding("a", "layer_0", record(moved="compiled"), 1)
    elsewhere = {"torch 2.11.0 of /old/python": "", "torch 2.14.0 of /new/python": "a\n4 off"}
    draft = hunt_report.issue_draft(told, "3 off", elsewhere)
    assert "- torch 2.11.0 of /old/python: it does not show it\n" in draft
    assert "- torch 2.14.0 of /new/python: it shows it too: `4 off`\n" in draft
    assert "The compiled side is further from what is expected.\n" in draft


@pytest.mark.needs_torch
def test_a_torch_without_the_device_shows_nothing(tmp_path):
    """A script for a GPU fails on every torch without one, whatever is wrong."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    assert hunt_report.outcome_elsewhere(script, sys.executable, "cpu") == "exit code 3"
    not_tried = hunt_report.outcome_elsewhere(script, sys.executable, "nowhere")
    told = HuntFinding("a", "layer_0", record(), 1)
    draft = hunt_report.issue_draft(told, "3 off", {"torch 2.13.0 of /a/python": not_tried}, "NVIDIA H100")
    assert "- torch 2.13.0 of /a/python: not tried: it has no such device\n" in draft
    assert f"{platform.machine()}, NVIDIA H100\n" in draft


@pytest.mark.needs_torch
def test_the_torch_of_another_python(tmp_path):
    assert hunt_report.torch_version_of(sys.executable) == version("torch")
    with pytest.raises(UsageError, match=r"it does not run \(FileNotFoundError\); expected a Python that has torch"):
        hunt_report.torch_version_of(str(tmp_path / "python"))
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    bare.chmod(0o755)
    with pytest.raises(UsageError, match="it has no torch; install one there, or leave it out"):
        hunt_report.torch_version_of(str(bare))


def test_a_script_is_run_by_another_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.executable)", encoding="utf-8")
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert hunt_report.script_outcome(script, str(other)) == str(other)


def test_the_summary_without_a_finding(tmp_path):
    progress = HuntProgress(skipped={"layer_3": "no such layer"})
    lines = list(hunt_report.summary(SimpleNamespace(progress=progress, folder=tmp_path, new=[])))
    assert lines[0].startswith("0 programs, 0 histories")
    assert "1 programs could not be searched: layer_3" in lines[1]
    assert lines[-1] == "nothing found"


@pytest.mark.needs_torch
@pytest.mark.filterwarnings("ignore")
def test_every_layer_runs(tmp_path):
    """Eagerly; of the chains most do: the others have shapes that do not fit."""
    path, ran = tmp_path / "program.py", 0
    for number in range(len(LAYERS)):
        path.write_text(layer_source(number))
        model, inputs = parts_of({"file": str(path)})
        model()(*inputs(2))
    for seed in range(60):
        path.write_text(chain_source(seed))
        model, inputs = parts_of({"file": str(path)})
        try:
            model()(*inputs(2))
        except (RuntimeError, IndexError, ValueError):
            continue
        ran += 1
    assert ran >= 30


@pytest.mark.needs_torch
def test_a_hunt(tmp_path, monkeypatch, capsys, warm_spawn):
    """A planted backend is found and told once; the next run goes on behind it."""
    monkeypatch.setattr(hunt, "NAMES", ("strides",))
    monkeypatch.setattr(hunt, "LAYERS", LAYERS[:1])
    monkeypatch.setattr(hunt, "ZOO", {})
    monkeypatch.setattr(hunt, "_DRAWN", 0)
    monkeypatch.setattr(contract_search, "STAGES", ("eager",))
    monkeypatch.setitem(hunt._SOURCES, "layer", lambda number: PLANTED)
    monkeypatch.setattr(hunt, "hunted_programs", lambda seed, start: islice(hunted_programs(seed, start), 1))
    command = ["hunt", "--backend", "off_where_sliced", "-o", str(tmp_path), "--seconds", "600",
               "--python", sys.executable]
    assert main(command) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "finding 1: layer_0: value after [call(B=2, strides='transposed 0')]"
    assert told[-1] == f"1 causes, 1 of them new; scripts and drafts are in {tmp_path}"
    assert "module = Mixed()" in (tmp_path / "finding-001.py").read_text()
    assert "No backend of torch alone has it." in (tmp_path / "finding-001.md").read_text()
    assert f"- torch {version('torch')} of {sys.executable}: " in (tmp_path / "finding-001.md").read_text()
    state = json.loads((tmp_path / "hunt.json").read_text())
    assert state["places"] == {"off_where_sliced 0": 1}
    # Transposed, then with gaps: two histories of one cause, of which the first was left out in the second search.
    assert [each["times"] for each in state["findings"]] == [2]
    assert state["counts"]["programs"] == 1
    assert state["counts"]["calls"] > state["counts"]["histories"] > 6


@pytest.mark.parametrize(("error", "code", "says"), [
    (OwnFailure("comparing a call, the process for histories ended by SIGSEGV"), 70, "please report"),
    (UsageError("no such layer"), 0, "could not be searched"),
])
def test_our_own_failure_is_loud(tmp_path, monkeypatch, capsys, error, code, says):
    """It is no layer that this torch lacks: the run tells it at once, keeps it, and ends with a code of its own."""
    class Fails:
        def __init__(self, source):
            self.source = source
            self.closed = False

        def close(self):
            self.closed = True

    def fail(*_):
        raise error

    monkeypatch.setattr(hunt, "Worker", Fails)
    monkeypatch.setattr(hunt.Hunt, "_search_rounds", fail)
    monkeypatch.setattr(hunt, "hunted_programs", lambda seed, start: islice(hunted_programs(seed, start), 1))
    assert main(["hunt", "-o", str(tmp_path), "--seconds", "60"]) == code
    told = capsys.readouterr().out
    assert says in told
    assert ("layer_0: pytest-torchcompile itself failed here" in told) is (code == 70)
    state = json.loads((tmp_path / "hunt.json").read_text())
    assert (list(state["failed"]), list(state["skipped"])) == ((["layer_0"], []) if code else ([], ["layer_0"]))
