"""What `init` says comes next: a time-out that the first cells make likely to be needed, and no other."""

from __future__ import annotations

import json
from datetime import date

import pytest

from pytest_torchcompile.adoption.next_steps import (
    excuse_text,
    needed_timeout,
    next_lines,
    seconds_of_first_cells,
    text_after_accept,
)
from pytest_torchcompile.gate.policyfile import parse_policy


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


def test_the_way_to_a_green_gate(tmp_path, monkeypatch):
    """The matrix by its name, unless pytest takes it by itself, and the policy that is there."""
    monkeypatch.chdir(tmp_path)
    assert text_after_accept("matrix/default.yaml") == ("\nNext:\n  pytest --compile-matrix\n"
                                                        "  pytest-torchcompile gate")
    (tmp_path / "release.yaml").touch()
    assert text_after_accept("m.yaml") == ("\nNext:\n  pytest --compile-matrix=m.yaml\n"
                                           "  pytest-torchcompile gate --policy release.yaml")


def test_what_a_policy_needs_can_be_pasted():
    """It is read as a policy; the issue is for the user to name where the rule has none."""
    rule = {"xfail": "{model: net, backend: inductor}", "reason": '"compiles: it: raised"'}
    text = excuse_text([rule, {**rule, "issue": "pytorch/pytorch#1"}], date(2026, 11, 1))
    first, second = parse_policy(f"version: 1\n{text[2:]}".encode(), "release.yaml").allowed_failures
    assert (first.reason, first.until, second.issue) == ("compiles: it: raised", date(2027, 1, 30),
                                                         "pytorch/pytorch#1")
    assert first.issue == "WHERE IT IS LOOKED AFTER"
