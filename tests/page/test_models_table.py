"""`pytest-torchcompile table`: a row for each model and backend, with what its cells came to."""

from __future__ import annotations

import pytest
from sample_report import sample_report, written

from pytest_torchcompile.cli import main


@pytest.fixture
def rows(tmp_path, capsys):
    """The lines that the command prints for a report."""
    def tell(content):
        assert main(["table", str(written(content, tmp_path / "r.json"))]) == 0
        return capsys.readouterr().out.splitlines()

    return tell


def test_a_row_for_each_model_and_backend(rows):
    """Its verdicts by phase, with the checks that failed; its graph breaks with their place; its recompiles."""
    told = rows(sample_report({"model": ["scorer", "moe_lite"], "backend": ["aot_eager"],
                               "phase": ["inference", "training"]}))
    assert told[0] == "4 of 4 cells of matrix/default.yaml; torch 2.13.0+cpu, python 3.11.7."
    assert told[2] == "| model | backend | verdicts | graph breaks | recompiles | seconds |"
    scorer, moe = told[4:]
    assert scorer.startswith(r"| scorer | aot\_eager | inference: pass<br>training: pass | 0 | 1 |")
    assert moe.startswith(r"| moe\_lite | aot\_eager | inference: fail \(compiles fail, graph\_breaks fail\)<br>")
    assert "| 1: `models.py:41` |" in moe


def test_the_table_of_a_thousand_cells_fits_into_a_comment(rows):
    """What is the same in many cells of a row stands once, with their number; GitHub takes 65,536 characters."""
    told = rows(sample_report(kernels=False))
    assert len("\n".join(told)) < 10_000
    assert any("| training: pass, 36 times<br>inference: pass, 36 times |" in line for line in told)
    # Of encoder a third is expected to fail.
    assert any("pass, 24 times" in line and r"xfail \(equivalence xfail\), 12 times" in line for line in told)


def test_a_path_begins_at_its_package(rows):
    """Wherever the package is installed."""
    content = sample_report({"model": ["moe_lite"], "backend": ["aot_eager"]})
    for each in content["compile_matrix"]["cells"]:
        for found in each["observation"]["sections"]["graph_breaks"]["graph_breaks"]:
            found["file"] = "/home/me/.venv/lib/python3.11/site-packages/library/models/modeling.py"
    assert "| 1: `models/modeling.py:41` |" in rows(content)[-1]


def test_why_cells_are_skipped_stands_below(rows):
    """Each reason once, with its models."""
    told = rows(sample_report({"model": ["conv_net"], "backend": ["inductor", "eager"], "wrapper": ["autocast"]}))
    assert told[-1] == "- conv\\_net: no autocast for this device"
    assert ": skip |" in told[4]


def test_sections_of_another_version_are_not_measured(rows):
    """No number rather than a traceback."""
    content = sample_report({"model": ["scorer"], "backend": ["eager"]})
    for each in content["compile_matrix"]["cells"]:
        each["observation"]["sections"] = {"recompiles": {"recompiles": "3"}, "graph_breaks": {"graph_breaks": None}}
    assert "| 0 |  |" in rows(content)[4]


def test_what_was_not_judged_has_no_row(rows):
    """A model of a chunk that is still to come is only named."""
    content = sample_report({"model": ["scorer", "encoder"], "backend": ["eager"]})
    last = content["compile_matrix"]["cells"][-1]
    last |= {"selected": False, "checks": {}, "status": "not_run", "seconds": None, "observation": None}
    told = rows(content)
    assert told[0].startswith("1 of 2 cells of ")
    assert [line for line in told if line.startswith("| encoder")] == []
    assert told[-1] == "Not judged in this run: encoder."


def test_a_model_of_which_a_part_was_not_judged(rows):
    """It has a row, so what is missing of it is told by backend and phase."""
    content = sample_report({"model": ["scorer", "encoder"], "backend": ["eager"], "phase": ["inference", "training"]})
    for each in content["compile_matrix"]["cells"]:
        if each["axes"]["phase"] == "training":
            each |= {"selected": False, "checks": {}, "status": "not_run", "seconds": None, "observation": None}
    told = rows(content)
    assert told[0].startswith("2 of 4 cells of ")
    assert told[-1] == "- Not judged in this run, eager training: scorer, encoder."


def test_a_model_on_two_devices_has_two_rows(rows):
    """What one device did not judge is not told of the other."""
    content = sample_report({"model": ["scorer"], "backend": ["eager"], "device": ["cpu", "cuda"]})
    last = content["compile_matrix"]["cells"][-1]
    assert last["axes"]["device"] == "cuda"
    told = rows(content)
    assert [line.split(" | ")[1] for line in told[4:6]] == ["eager on cpu", "eager on cuda"]
    last |= {"selected": False, "checks": {}, "status": "not_run", "seconds": None, "observation": None}
    told = rows(content)
    assert told[4].startswith("| scorer | eager on cpu |")
    assert told[-1] == "- Not judged in this run, eager on cuda: scorer."


def test_a_speedup_has_a_column_where_it_was_measured(rows):
    """Cells that were not timed leave it empty."""
    content = sample_report({"model": ["scorer", "encoder"], "backend": ["eager"]})
    timed, _ = content["compile_matrix"]["cells"]
    timed["observation"]["sections"]["worth"] = {"speedup": 1.25}
    told = rows(content)
    assert told[2].endswith("| seconds | speed-up |")
    assert told[4].endswith("| 1.25 |")
    assert told[5].endswith("|  |")
