"""Findings by themselves: exit codes, their order, contradictions, and which of a long list are shown."""

from __future__ import annotations

import itertools

import pytest

from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.report.causes import Cause
from pytest_torchcompile.report.finding import (
    EXIT_CODES,
    Finding,
    contradiction_finding,
    exit_code,
    foremost_findings,
    headline,
    shorten_to_headline,
)


def cause(*models, severity=Severity.SLOW, **more):
    """A cause in the only cell of each model."""
    effect = Effect(severity, "recompiles too often", "recompile too often")
    made = Cause(Problem("m"), effect, checks=["recompiles"], cells=list(models), models=list(models))
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("weights", "code"), [
    ((), 0), (("note",), 0), (("note", "nothing"), 3), (("unusable", "nothing"), 2), (("fail", "fail"), 1),
    (("nothing", "unusable", "fail"), 1), (("note", "unusable"), 2),
])
def test_exit_codes(weights, code):
    """What certainly failed outweighs what is missing, in whatever order it is told."""
    for order in itertools.permutations(weights):
        assert exit_code(Finding("k", weight, "t") for weight in order) == code


def test_findings_are_told_in_the_order_of_the_exit_codes():
    """Of one weight causes come first, the worst of them first; then the worst of what is no cause."""
    told = [
        Finding("c", "fail", "worst", cause=cause("a", severity=Severity.WRONG_NUMBERS)),
        Finding("c", "fail", "new", cause=cause("a", new=True)),
        Finding("c", "fail", "in two cells", cause=cause("a", "b")),
        Finding("c", "fail", "in one cell", cause=cause("a")),
    ]
    shuffled = told[::-1]
    assert [each.text for each in sorted(shuffled, key=lambda finding: finding.order)] == [
        "worst", "new", "in two cells", "in one cell"]
    others = [Finding("k", weight, weight) for weight in EXIT_CODES]
    shuffled = others[::-1]
    assert [each.text for each in sorted(shuffled, key=lambda finding: finding.order)] == list(EXIT_CODES)
    assert Finding("k", "fail", "t", severity=3).order < Finding("k", "fail", "t", severity=2).order


@pytest.mark.parametrize(("finding", "new", "lines"), [
    (Finding("k", "fail", "t"), False, []),
    (Finding("k", "fail", "t", cause=cause("a")), False, []),
    (Finding("k", "fail", "t", cause=cause("a", new=True)), True, ["new since the baseline"]),
    (Finding("k", "fail", "t", cause=cause("a", new=True, also={"x": "y"}, consequences=["z"], gates=["g"])), True,
     ["new since the baseline", "also x: y", "z follows from recompiles", "so the gate g does not pass"]),
])
def test_what_else_is_told(finding, new, lines):
    assert (finding.new, finding.lines) == (new, lines)


@pytest.mark.parametrize(("contradictions", "origin", "text", "evidence"), [
    ({"a": ["x"]}, "", "cell a: x", ""),
    ({"a": ["x", "y", "z"]}, "r.json", "cell a of r.json: x", "y\nz"),
    ({"a": ["x"], "b": ["y"]}, "r.json", "cell a of r.json: x (2 cells contradict themselves)", ""),
])
def test_contradictions(contradictions, origin, text, evidence):
    """The first is told in full; of all the names are there, and the report cannot be used."""
    found = contradiction_finding("cell", contradictions, origin)
    assert (found.weight, found.text, found.evidence) == ("unusable", text, evidence)
    assert found.cells == tuple(contradictions)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
def test_wrong_numbers_are_never_cut_off(most):
    """Whichever place they have in the list."""
    severities = [Severity.SLOW, Severity.WRONG_NUMBERS, Severity.CRASH, Severity.WRONG_NUMBERS, 0]
    findings = [Finding("k", "fail", str(place), severity=severity) for place, severity in enumerate(severities)]
    shown = [int(finding.text) for finding in foremost_findings(findings, most)]
    assert shown == sorted({*range(min(most, 5)), 1, 3})


@pytest.mark.parametrize(("causes", "before", "others", "text"), [
    ([], "FAIL: ", 3, ""),
    ([cause("a")], "", 0, "1 model recompiles too often (a)"),
    ([cause("a", new=True)], "FAIL: ", 0, "FAIL: 1 model recompiles too often (a, new)"),
    ([cause("a", "b"), cause("c", new=True)], "", 0, "3 models recompile too often (a, b, c, 1 new)"),
    ([cause("a"), cause("a")], "", 1, "1 model recompiles too often (a); and 1 more finding"),
    ([cause("a", problem=Problem("m", file="n.py", line=3))], "", 0, "1 model recompiles too often (a, n.py:3)"),
    ([cause("t", noun="test", problem=Problem("m", file="n.py", line=3))], "", 0, "1 test recompiles too often (t)"),
    ([cause("a"), cause("t", noun="test")], "", 0, "1 model recompiles too often (a); 1 test recompiles too often"),
])
def test_the_headline(causes, before, others, text):
    assert headline(causes, before, others) == text


@pytest.mark.parametrize(("words", "less", "left"), [
    (0, 0, 0), (1, 0, 1), (25, 0, 25), (26, 0, 25), (90, 0, 25), (22, 3, 22), (23, 3, 22),
])
def test_a_long_text_is_shortened(words, less, left):
    """What comes after it has its room, and three dots tell that words are missing."""
    text = " ".join(["word"] * words)
    short = shorten_to_headline(text, less)
    assert len(short.split()) == left
    assert short.endswith("...") == (words > left)
