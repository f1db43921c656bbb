"""What `init` says comes next: a time-out that the first cells make likely to be needed, and no other."""

from __future__ import annotations

import json

import pytest

from pytest_torchcompile.adoption.next_steps import needed_timeout, next_lines, seconds_of_first_cells


@pytest.mark.parametrize(("seconds", "timeout"), [(0.0, 0), (15.0, 0), (15.1, 600), (40.0, 900), (75.0, 1500)])
def test_the_time_that_a_cell_may_need(seconds, timeout):
    """Twice what Inductor may take, by what the cells before it took; the default where that is enough."""
    assert needed_timeout(seconds) == timeout


def test_what_is_printed():
    assert list(next_lines(2.0)) == [
        "Next:",
        "  pytest --compile-matrix     all cells of matrix/default.yaml, inductor too",
        "  pytest-torchcompile accept  allows what that finds, each with its reason, and prints it as a diff",
        "  pytest --compile-matrix     again, where accept wrote something: the gate judges the last run",
        "  pytest-torchcompile gate    the verdict on the report, for CI",
    ]
    lines = list(next_lines(40.0))
    assert [line for line in lines if "--compile-timeout=900 " in line] == [lines[1], lines[3]]
    assert lines[-1] == ("A first cell took 40 s; with Inductor it may take 10 times as long, and by default a cell "
                         "has 300 s.\nFor CI too: `compile_timeout = 900` in pytest's ini file.")


@pytest.mark.parametrize(("text", "seconds"), [
    (json.dumps({"compile_matrix": {"cells": [
        {"axes": {"backend": "eager"}, "seconds": 3.5}, {"axes": {"backend": "aot_eager"}, "seconds": 40.0},
        {"axes": {"backend": "inductor"}, "seconds": 200.0}, {"axes": {"backend": "eager"}}]}}), 40.0),
    ('{"compile_matrix": {"cells": []}}', 0.0),
    ("[]", 0.0),
    ("{", 0.0),
])
def test_seconds_of_a_report(tmp_path, text, seconds):
    """The dearest cell without Inductor; of a file that is no report nothing."""
    (tmp_path / "report.json").write_text(text)
    assert seconds_of_first_cells(tmp_path / "report.json") == seconds
    assert seconds_of_first_cells(tmp_path / "none.json") == 0.0
