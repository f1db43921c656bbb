"""The command `benchmark`: a model or a cell, each mode beside eager, as text, JSON and Markdown."""

from __future__ import annotations

import json
import os
from typing import ClassVar

import pytest

from pytest_torchcompile.adoption import benchmark_command
from pytest_torchcompile.adoption.benchmark_command import ModeReport, report_lines, report_markdown
from pytest_torchcompile.cli import main
from pytest_torchcompile.observation import Judgement, Observation, Problem
from pytest_torchcompile.ranks.execution import CellResult

SIDES = {"eager": {"low": 0.002, "median": 0.0022, "kernels": 30, "items_per_second": 900.0},
         "compiled": {"low": 0.001, "median": 0.0011, "kernels": 12, "items_per_second": 1800.0}}
WORTH = {"raised": None, "wrong": "", "verdict": "faster", "speedup": 2.0, "interval": [1.9, 2.1], "sides": SIDES,
         "unit": "tokens", "memory_delta_mib": -1.5, "compiling_seconds": 3.0, "compiles": 2, "cached": 0,
         "pays_after": 3000}
SLOW = {**WORTH, "verdict": "slower", "speedup": 0.5, "interval": [0.4, 0.6], "pays_after": None, "cached": 1}
NOISY = {**SLOW, "verdict": "could not be told", "interval": [0.4, 1.6]}
SAME = {**SLOW, "verdict": "no difference"}
EAGER = {**SLOW, "verdict": "nothing was compiled"}


def mode(name, section, *problems):
    judged = Judgement("fail" if problems else "pass", tuple(map(Problem, problems)))
    result = CellResult({"worth": judged}, Observation("c", sections={"worth": section}), 1.0)
    return ModeReport.of(name, "c", result)


@pytest.mark.parametrize(("sections", "advice"), [
    ((WORTH, SLOW), "Use mode a: 2.00 times as fast as eager."),
    ((WORTH, {**WORTH, "speedup": 2.1, "interval": [2.0, 2.2]}), "Use mode a: 2.00 times as fast as eager."),
    ((WORTH, {**WORTH, "speedup": 3, "interval": [2.8, 3.2]}), "Use mode b: 3.00 times as fast as eager."),
    ((SLOW, SLOW), "Do not compile this: eager is faster in every mode."),
    ((NOISY, NOISY), "Nothing can be told: this machine is too busy to time anything; run it again when it is quiet."),
    ((SLOW, NOISY), "Do not compile this by a: eager is faster. Nothing can be told of b: this machine was too busy; "
                    "run it again when it is quiet."),
    ((NOISY, SLOW, SAME), "Not faster than eager: b and c. Nothing can be told of a: this machine was too busy; run it "
                          "again when it is quiet."),
    ((EAGER, EAGER), "Nothing is to be won like this: what was timed did not run compiled."),
    ((SLOW, EAGER), "Do not compile this by a: eager is faster. Nothing that was timed of b ran compiled."),
    ((NOISY, EAGER), "Nothing can be told of a: this machine was too busy; run it again when it is quiet. Nothing that "
                     "was timed of b ran compiled."),
    ((WORTH, NOISY), "Use mode a: 2.00 times as fast as eager."),
    ((SLOW, SAME), "No mode is faster than eager."),
])
def test_the_advice(sections, advice):
    reports = [mode(name, section) for name, section in zip("abc", sections, strict=False)]
    assert list(report_lines("net", reports))[-1] == advice


def test_the_report_in_text_and_in_markdown():
    reports = [mode("default", WORTH), mode("max-autotune", SLOW)]
    _, head, first, second, _ = report_lines("net", reports)
    assert head.split("  ")[0] == "mode"
    assert "faster   2.00 (1.90 to 2.10)  2.000 ms  1.000 ms  1980 tokens  30 to 12  -1.5 MiB  3.0 s" in first
    assert first.endswith("3000 steps")
    assert "3.0 s (1 of 2 from a cache)" in second
    assert second.endswith("never")
    assert "| default | faster | 2.00 (1.90 to 2.10) |" in "\n".join(report_markdown("net", reports))


@pytest.mark.parametrize(("section", "answer"), [
    (WORTH, "3000 steps"), (SLOW, "never"), (NOISY, "not told"), ({**SAME, "interval": [0.99, 1.01]}, "not told"),
    ({**SAME, "interval": [0.97, 0.99]}, "never"), (EAGER, "-"),
])
def test_when_it_pays_has_three_answers(section, answer):
    """Where the interval holds 1 it may pay, and nobody can tell when; what did not run compiled has none."""
    assert mode("default", section).row()[-1] == answer


def test_what_others_did_meanwhile_is_told():
    loaded = {**WORTH, "others_load": "other processes kept 1.5 of 2 processors busy"}
    *_, told, _ = report_lines("net", [mode("default", loaded)])
    assert told == ("default: while it was timed other processes kept 1.5 of 2 processors busy, so its seconds are too "
                    "long")


def test_why_a_mode_is_not_faster_stands_above_the_advice():
    parts = {"seconds": 1.0, "library": 0.1, "generated": 0.2, "operators": 0.0, "guards": 0.6, "python": 0.1}
    reports = [mode("default", {**SLOW, "profile": parts, "coverage": 1.0, "breaks": []})]
    *_, cause, _ = report_lines("net", reports)
    assert cause.startswith("default: Dynamo's guards take 60% of a compiled step")
    assert "- default: Dynamo's guards take 60%" in "\n".join(report_markdown("net", reports))
    assert reports[0].to_dict()["cause"].startswith("Dynamo's guards")


def test_a_compiler_that_was_cold_is_told():
    sections = {"worth": WORTH, "compiles": {"cold_compiler": "CppCompileError: no g++"}}
    result = CellResult({"worth": Judgement("pass", ())}, Observation("c", sections=sections), 1.0)
    report = ModeReport.of("default", "c", result)
    *_, told, _ = report_lines("net", [report])
    assert told == ("default: its compiler could not be warmed up before (CppCompileError: no g++), so what is paid "
                    "once on a machine is in its seconds of compiling")
    assert report.to_dict()["cold_compiler"] == "CppCompileError: no g++"
    assert mode("default", WORTH).cold_compiler == ""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_optimises_nothing(backend):
    """Its time says nothing of what compiling brings, so nobody is told not to compile."""
    lines = list(report_lines("net", [mode("default", SLOW)], backend))
    assert lines[-1] == (f"Backend {backend} is no optimiser: its time says nothing of what compiling brings. Time a "
                         "cell of inductor instead.")
    assert "Do not compile" not in "\n".join(report_markdown("net", [mode("default", SLOW)], backend))


def test_a_mode_with_wrong_numbers_has_no_timing():
    report = mode("default", {"raised": None, "wrong": "output"}, "it computes wrong numbers")
    assert report.verdict == "no timing: worth: it computes wrong numbers"
    *_, row, advice = report_lines("net", [report])
    assert "wrong numbers" in row
    assert advice == "No mode could be timed."


@pytest.mark.parametrize(("arguments", "message"), [
    (["net-eagr", "--matrix", "m.yaml"], "'net-eagr' is neither a cell of"),
    (["net-eager", "--matrix", "m.yaml", "--inputs", "models:batch"], "--inputs: the inputs of a cell are those of"),
])
def test_what_is_no_cell(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text("def net(): ...\ndef batch(): ...\n")
    (tmp_path / "m.yaml").write_text("version: 1\nmodels: {net: {factory: 'models:net', inputs: 'models:batch'}}\n"
                                     "axes: {backend: [eager]}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["benchmark", *arguments]) == 4
    assert message in capsys.readouterr().err


class _Recorded(benchmark_command.Execution):
    """An execution that runs nothing, and notes where the caches are."""

    seen: ClassVar[list[tuple[str, bool, str, list[str]]]] = []

    def cell_result(self, planned, selected, applicable):
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        self.seen.append((planned.cell.mode, self.warm_toolchain, folder, os.listdir(folder)))
        judged = Judgement("pass", ())
        return CellResult({"worth": judged}, Observation("c", sections={"worth": WORTH}), 1.0)


def test_each_mode_has_empty_caches_of_its_own_and_a_warm_compiler(tmp_path, monkeypatch, capsys):
    """What one mode has compiled, a header too, would serve the next, which then pays sooner."""
    (tmp_path / "m.yaml").write_text("version: 1\nmodels: {net: {factory: 'models:net', inputs: 'models:batch'}}\n"
                                     "axes: {backend: [inductor], phase: [inference]}\n")
    (tmp_path / "models.py").write_text("def net(): ...\ndef batch(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_WARM", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setattr(benchmark_command, "Execution", _Recorded)
    assert main(["benchmark", "net-inductor-default-auto-none-inference", "--matrix", "m.yaml", "--json"]) == 0
    capsys.readouterr()
    modes, warm, folders, found = zip(*_Recorded.seen, strict=True)
    assert modes == ("default", "reduce-overhead", "max-autotune")
    assert set(warm) == {True}
    assert len({*folders, "mine"}) == 4
    assert list(found) == [[], [], []]
    assert not any(map(os.path.exists, folders))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


@pytest.mark.needs_torch
def test_a_cell_is_timed(tmp_path, monkeypatch, capsys):
    """A model that sleeps where Dynamo traces nothing of it; the backend `eager` has one mode."""
    (tmp_path / "models.py").write_text(
        "import time, torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if not torch.compiler.is_compiling():\n"
        "            time.sleep(0.01)\n"
        "        return super().forward(x)\n"
        "def net():\n    return Net(4, 4)\n"
        "def batch(B=3):\n    return torch.randn(B, 4)\n")
    (tmp_path / "m.yaml").write_text("version: 1\nmodels: {net: {factory: 'models:net', inputs: 'models:batch'}}\n"
                                     "axes: {backend: [eager], phase: [inference]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_TORCHCOMPILE_WARM", "0")
    assert main(["benchmark", "net-eager-default-auto-none-inference", "--matrix", "m.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(each["mode"], each["verdict"]) for each in report["modes"]] == [("default", "faster")]
