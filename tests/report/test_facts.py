"""What is read of a report whose sections are odd: each value by itself, and records of a list of objects."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from pytest_torchcompile.observation import Problem
from pytest_torchcompile.report.facts import Facts, as_number, as_text, read_objects, read_record

INF, NAN = float("inf"), float("nan")


@dataclass
class Sample:
    """A field of each type that records have."""

    name: str
    line: int
    flag: bool = False
    share: float | None = None
    parts: tuple[str, ...] = ("none",)
    seconds: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(("value", "text"), [
    ("a", "a"), ("", ""), (None, ""), (True, "true"), (False, "false"), (3, "3"), (0.5, "0.5"), ([1], "[1]"),
])
def test_texts(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize(("value", "number"), [
    (0, 0), (-3, -3), (0.5, 0.5), (10**300, 10**300), (True, None), (False, None), (None, None), ("3", None),
    ([], None), (INF, None), (-INF, None), (NAN, None), (10**400, None), (-10**400, None),
])
def test_numbers(value, number):
    """A finite number, or none: ``true`` is none, nor is a whole number that no float can hold."""
    assert as_number(value) == number
    assert type(as_number(value)) is type(number)


@pytest.mark.parametrize(("given", "expected"), [
    ({"name": "a", "line": 3}, Sample("a", 3)),
    ({"name": "a", "line": 3, "unknown": 1}, Sample("a", 3)),
    ({}, Sample("", 0)),
    ({"name": 7, "line": "x"}, Sample("7", 0)),
    ({"name": None, "line": None, "share": None}, Sample("", 0)),
    ({"name": "a", "line": True, "flag": 1}, Sample("a", 0)),
    ({"name": "a", "line": 1, "flag": True, "share": 0.5}, Sample("a", 1, True, 0.5)),
    ({"name": "a", "line": 1, "share": "much"}, Sample("a", 1)),
    ({"name": "a", "line": 1, "share": "inf"}, Sample("a", 1, share=INF)),
    ({"name": "a", "line": 1, "share": "-inf"}, Sample("a", 1, share=-INF)),
    ({"name": "a", "line": 1, "parts": ["x", 1, None]}, Sample("a", 1, parts=("x", "1", ""))),
    ({"name": "a", "line": 1, "parts": "xy"}, Sample("a", 1, parts=())),
    ({"name": "a", "line": 1, "seconds": {"x": 1, "y": "2", "z": NAN, "w": True}}, Sample("a", 1, seconds={"x": 1})),
    ({"name": "a", "line": 1, "seconds": [1]}, Sample("a", 1)),
])
def test_a_record(given, expected):
    """A field of another type has its type's empty value; a default is kept where nothing is given."""
    assert read_record(Sample, given) == expected


def test_nan_is_a_number_of_a_record():
    """A report has it as a text, because JSON has no number for it."""
    share = read_record(Sample, {"name": "a", "line": 1, "share": "nan"}).share
    assert share is not None
    assert math.isnan(share)


@pytest.mark.parametrize(("given", "messages"), [
    (None, []), ({}, []), ("ab", []), (3, []), ([], []), ([None, "x", 3, ["message"]], []),
    ([{"message": "a"}, 7, {"message": "b"}, {}], ["a", "b", ""]),
])
def test_records_of_a_list(given, messages):
    """What is no object is left out."""
    assert [problem.message for problem in read_objects(Problem, given)] == messages


@pytest.mark.parametrize(("problem", "place"), [
    (Problem("m"), ""), (Problem("m", line=3), ""), (Problem("m", file="a.py", line=3), "a.py:3"),
])
def test_the_place_of_a_problem(problem, place):
    assert problem.place == place


@pytest.mark.parametrize(("checks", "note"), [
    ({}, ""), ({"a": {"verdict": "pass", "note": "fine"}}, ""), ({"a": {"verdict": "skip"}}, ""), ({"a": 3}, ""),
    ({"a": {"verdict": "pass", "note": "fine"}, "b": {"verdict": "skip", "note": "no GPU"},
      "c": {"verdict": "xfail", "note": "known"}}, "no GPU"),
])
def test_why_a_cell_without_problems_has_its_status(checks, note):
    """The first note of a check that did not pass."""
    assert Facts({"checks": checks}).note == note


@pytest.mark.parametrize(("calls", "coverage"), [
    (None, None), ([], None), ([{}], None), ([{"share": "x"}, 3], None), ([{"share": 0.0}, {"share": 1.0}], 0.0),
    ([{"share": 1.0}, {"share": None}, {"share": 0.25}, {"share": 0.5}], 0.25),
])
def test_coverage_is_the_smallest_share(calls, coverage):
    """None of it is known where no call tells any; nothing of a call is not the same."""
    facts = Facts({"observation": {"sections": {"compiles": {"coverage": calls}}}})
    assert facts.coverage == coverage


def test_each_value_is_told_in_the_call_where_it_is_worst():
    """A section has its worst leaves first, and the same value may stand in the sections of two checks."""
    sections = {"equivalence": {"leaves": [{"name": "out", "call": "call 2"}, {"name": "out", "call": "call 1"}]},
                "gradients": {"leaves": [{"name": "w.grad", "call": "call 1"}, {"name": "out", "call": "call 3"}]},
                "compiles": {"compiles": []}}
    facts = Facts({"observation": {"sections": sections}})
    assert [(leaf.name, leaf.call) for leaf in facts.leaves] == [("out", "call 2"), ("w.grad", "call 1")]
    assert sorted(facts.compared) == ["equivalence", "gradients"]
