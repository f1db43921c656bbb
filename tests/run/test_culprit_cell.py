"""The culprit of a cell: the process that is asked, and where its answer is told. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks.numerics import located_stage
from pytest_torchcompile.culprit.culprit_record import Culprit
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.observation import Job
from pytest_torchcompile.oracle.diagnosis import blamed_backend, first_stage
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.report.reproduction import reproduction_text
from pytest_torchcompile.run.culprit_cell import culprit_of, one_sentence
from pytest_torchcompile.run.job_process import ask_process
from pytest_torchcompile.run.options import OPTIONS
from pytest_torchcompile.run.settings import Settings

JOB = Job({"model": "net"}, {}, ".", ("equivalence",))


def ask(tmp_path, text, **options):
    (tmp_path / "asked_module.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    return ask_process("asked_module", JOB, {"seconds": 3}, environment=environment, **options)


def test_a_process_gets_the_job_and_answers(tmp_path):
    text = ("from pytest_torchcompile.run.job_process import answer_with, read_job\n"
            "job, asked = read_job()\n"
            "answer_with({'model': job.cell['model'], 'checks': job.checks, **asked})\n")
    answer, why = ask(tmp_path, text)
    assert (answer["model"], answer["checks"], answer["seconds"], why) == ("net", ["equivalence"], 3, "")


@pytest.mark.parametrize(("text", "told"), [
    ("raise SystemExit('no graph\\nat all')", "its process ended with 1: at all"),
    ("import os; os.kill(os.getpid(), 11)", "its process ended with SIGSEGV"),
    ("import time; time.sleep(60)", "its process had no answer after 5 s"),
], ids=["raises", "crashes", "hangs"])
def test_a_process_without_an_answer_is_told_in_one_sentence(tmp_path, text, told):
    answer, why = ask(tmp_path, text, seconds=5)
    assert answer is None
    assert one_sentence(why) == told


def located(**more):
    return {"located": {"backend": "inductor", "stages": [["eager", "agrees"], ["aot_eager", "differs"]], **more}}


def test_the_first_stage():
    assert first_stage(located()["located"]) == "aot_eager"
    assert first_stage({"backend": "inductor", "stages": [["eager", "agrees"]]}) == "inductor"
    assert first_stage({"backend": "inductor", "stages": [["eager", "could not be tried (OSError)"]]}) == "inductor"


@pytest.mark.needs_torch
def test_a_part_of_the_toolkit_that_no_bisector_knows():
    """Passes: it says who tells which. Of Inductor behind them the search is asked as of Inductor alone."""
    parts = {"backend": "with compiler inductor", "blamed": {"with passes": "", "with compiler inductor": "inductor"},
             "adds": {"with passes": "the graph passes"}, "stages": [["eager", "agrees"], ["with passes", "differs"]]}
    assert culprit_of(SimpleNamespace(), parts)["why_not"] == "no compiler has a part in it, look at the graph passes"
    assert blamed_backend(parts | {"stages": [["eager", "agrees"], ["with passes", "agrees"]]}) == "inductor"
    assert blamed_backend(parts | {"stages": [["eager", "differs"]]}) == "eager"


def test_the_evidence_names_the_operator():
    assert "operator" not in located_stage(located())
    told = located_stage(located(culprit=Culprit("aot_eager", operator="aten.relu.default", place="m.py:3").to_dict()))
    assert told.endswith("\noperator: aten.relu.default at m.py:3")


@pytest.mark.parametrize(("script", "has"), [("import torch\nassert False\n", True), ("", False)])
def test_the_emitted_test_has_the_script(tmp_path, script, has):
    culprit = Culprit("inductor", operator="aten.relu.default", place="m.py:3", script=script)
    entry = ModelEntry("net", "models:net", "models:batch", dims={})
    text = reproduction_text(Cell(model="net"), entry, tmp_path, tmp_path / "test_it.py", {"equivalence": "wrong"}, {},
                             culprit)
    compile(text, "test_it.py", "exec")
    assert "operator: aten.relu.default at m.py:3" in text
    assert ("def test_smallest_graph():\n    import torch\n    assert False\n" in text) == has


def settings(**given):
    return Settings.read(lambda option: given.get(option.name, option.default))


def test_the_option_is_off_and_takes_seconds():
    assert settings().culprit == 0
    assert settings(culprit="90").culprit == 90
    assert next(option for option in OPTIONS if option.name == "culprit").bare == "120"
    with pytest.raises(UsageError, match="--compile-culprit: 'soon' is no number of seconds; expected one above 0"):
        settings(culprit="soon")
