"""The history of a cell: when it turned, with what, and flakes; over reports in a folder, with planted turns."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from runs import ENVIRONMENT, Run

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.flakes import find_flakes, key_of_cell
from pytest_torchcompile.report.merging import merge_reports
from pytest_torchcompile.report.provenance import head_fingerprint
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.upgrade import cell_history
from pytest_torchcompile.upgrade.matrix_runs import MatrixRun

CELL = "net-inductor-default-auto-none"


def put_run(folder: Path, day: int, *, broken: bool = False, torch: str = "2.13.0", commit: int | None = None,
            skipped: bool = False, **more: Any) -> Path:
    """The report of a run of one cell on a day of November."""
    run = Run(model=["net"], backend=["inductor"])
    if broken:
        run.breaks(CELL)
    if skipped:
        run.skips(CELL)
    run.environment["torch"] = torch
    block = copy.deepcopy(run.blocks()[0])
    git = {"commit": f"{commit or day:02}" * 20, "changed": False, "prefix": ""}
    block["run"] |= {"started": f"2026-11-{day:02}T10:00:00+00:00", "git": git,
                     "packages": {"transformers": "5.20"}, **more}
    block["environment"] = ENVIRONMENT | {"torch": torch}
    path = folder / str(day) / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"compile_matrix": block | {"head_sha256": head_fingerprint(block)}}))
    return path


def test_when_it_turned_and_with_what(tmp_path, capsys):
    """Runs that did not judge it are no turn; a new torch is named at the turn."""
    put_run(tmp_path, 1)
    put_run(tmp_path, 2, skipped=True)
    put_run(tmp_path, 3, broken=True, torch="2.14.0")
    put_run(tmp_path, 4, broken=True, torch="2.14.0")
    assert main(["history", CELL, str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{CELL}: fails now; it turned 1 time in 3 runs"
    assert lines[1] == "  fails since 03030303, 2026-11-03 (graph_breaks), with torch 2.13.0 to 2.14.0; " \
                       "before it 01010101, 2026-11-01"
    assert lines[3:] == [
        "  01010101, 2026-11-01   torch 2.13.0         pass", "  02020202, 2026-11-02   torch 2.13.0         skip",
        "  03030303, 2026-11-03   torch 2.14.0         fail  graph_breaks",
        "  04040404, 2026-11-04   torch 2.14.0         fail  graph_breaks"]
    put_run(tmp_path, 5)
    assert main(["history", CELL, str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["fails"], told["turns"], told["flakes"]) == (False, [2, 4], [])


def test_a_flake_is_two_verdicts_on_one_key(tmp_path, capsys):
    """The same commit twice; another commit, or other contents of a file, is another key."""
    put_run(tmp_path, 1, commit=7)
    put_run(tmp_path, 2, broken=True, commit=8)
    assert main(["history", CELL, str(tmp_path)]) == 1
    assert "flake" not in capsys.readouterr().out
    put_run(tmp_path, 3, commit=8)
    assert main(["history", CELL, str(tmp_path)]) == 1
    told = "flake: graph_breaks has 2 verdicts with the same code, matrix, packages and environment ("
    assert told in capsys.readouterr().out
    put_run(tmp_path, 3, commit=8, torch="2.14.0")
    assert main(["history", CELL, str(tmp_path)]) == 0
    put_run(tmp_path, 2, broken=True, sources={"net.py": "aa"})
    put_run(tmp_path, 3, sources={"net.py": "bb"})
    assert main(["history", CELL, str(tmp_path)]) == 0
    put_run(tmp_path, 3, sources={"net.py": "aa"})
    assert main(["history", CELL, str(tmp_path)]) == 1


def test_an_upgrade_of_a_package_is_no_flake(tmp_path, capsys):
    """It is told at the turn; of many packages only the first, and their number."""
    put_run(tmp_path, 1, commit=7, packages={"transformers": "5.20", "timm": "1.0"})
    put_run(tmp_path, 2, commit=7, packages={"transformers": "5.23", "timm": "1.0"}, broken=True)
    assert main(["history", CELL, str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "flake" not in told
    assert "fails since 07070707, 2026-11-02 (graph_breaks), with transformers 5.20 to 5.23; before it" in told
    put_run(tmp_path, 2, commit=7, packages={f"a{number}": "1" for number in range(9)}, broken=True)
    assert main(["history", CELL, str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "with a0 none to 1, a1 none to 1, a2 none to 1, a3 none to 1, a4 none to 1, a5 none to 1, 5 packages more;" \
           in told


def test_a_report_without_packages_tells_of_no_flake(tmp_path, capsys):
    """Older versions of this package did not write them, so a package may have been upgraded between two of them."""
    for day in (1, 2):
        path = put_run(tmp_path, day, commit=7, broken=day == 2)
        content = json.loads(path.read_text())
        block = content["compile_matrix"]
        del block["run"]["packages"], block["head_sha256"]
        path.write_text(json.dumps({"compile_matrix": block | {"head_sha256": head_fingerprint(block)}}))
    assert main(["history", CELL, str(tmp_path)]) == 1
    assert "flake" not in capsys.readouterr().out


def test_what_is_not_known_is_no_flake():
    """Nor is a result that another run has, nor a skip."""
    assert key_of_cell({"observation": None}, None, {}) == ""
    run, cell = {"packages": {}}, {"observation": {"sources": {"a": "b"}}}
    assert key_of_cell(cell | {"reused": {}}, run, {}) == ""
    assert key_of_cell(cell, run | {"sources_edited": ["a"]}, {}) == ""
    assert key_of_cell(cell, {}, {}) == ""
    assert key_of_cell(cell, run, {}) != ""
    assert find_flakes([("", {"c": "pass"}), ("", {"c": "fail"}), ("k", {"c": "pass"}), ("k", {"c": "skip"})]) == []
    (flake,) = find_flakes([("k", {"c": "pass", "d": "pass"}), ("k", {"c": "fail", "d": "pass"})])
    assert (flake.check, flake.verdicts) == ("c", ("pass", "fail"))


def test_it_is_run_again_only_when_asked(tmp_path, monkeypatch, capsys):
    """Twice here; what comes of it is compared with the kept runs."""
    put_run(tmp_path / "runs", 1, commit=7)
    asked = []

    def run_matrix(python, matrix, report, *, cells):
        asked.append((matrix, cells))
        path = put_run(tmp_path / "again", 1 + len(asked), commit=7, broken=len(asked) == 2)
        return MatrixRun(path, merge_reports([read_report(str(path))]), 1.0)

    monkeypatch.setattr(cell_history, "run_matrix", run_matrix)
    assert main(["history", CELL, str(tmp_path / "runs")]) == 0
    assert asked == []
    assert main(["history", CELL, str(tmp_path / "runs"), "--rerun", "2"]) == 1
    assert asked == [("matrix/smoke.yaml", [CELL])] * 2
    assert "pass, pass, fail" in capsys.readouterr().out


@pytest.mark.parametrize(("cell", "text"), [
    ("net-inductor-default-auto-non", f"history: none of 1 run has a cell .*; did you mean '{CELL}'"),
])
def test_a_wrong_name_is_told(tmp_path, cell, text, capsys):
    """With the nearest one."""
    import re

    put_run(tmp_path, 1)
    assert main(["history", cell, str(tmp_path)]) == 4
    assert re.search(text, capsys.readouterr().err)
