"""``pytest --compile-selftest``: its verdicts can be bad ones, its table says so, and its exit code too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_torchcompile.backends.toolkit import toolkit
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.faults import CASES, judged_case, selftest
from pytest_torchcompile.faults.fault_parts import Case, Program, change_output, settings_are_of_one_thread
from pytest_torchcompile.faults.judged_case import Checked, JudgedCase, ReportedProblem, run_case
from pytest_torchcompile.faults.programs import Perceptron, rows
from pytest_torchcompile.faults.selftest import table

pytestmark = pytest.mark.needs_torch
PROGRAM = Program(Perceptron, rows)
FAULT = Case("off", "1 % off", PROGRAM, "value", change_output(lambda y: y * 1.01))


@pytest.fixture
def says(monkeypatch):
    """Replaces the check by one that reports what the test wants, and an error of 1 in units of noise."""

    def install(*reported, noise=1.0):
        monkeypatch.setitem(judged_case._CHECKS, "compare", lambda case: Checked(list(reported), noise))

    return install


WRONG = ReportedProblem("value", "output", "")
ELSEWHERE = ReportedProblem("value", "loss", "")
OTHER = ReportedProblem("dtype", "output", "")


def test_a_fault_is_caught_only_as_what_it_is_and_where_it_is(says):
    """Another kind, another place or silence is a miss."""
    case = replace(FAULT, where="output")
    verdicts = []
    for reported in ([WRONG], [ELSEWHERE], [OTHER], []):
        says(*reported)
        verdicts.append(run_case(case).verdict)
    assert verdicts == ["caught", "missed", "missed", "missed"]


def test_a_fault_that_is_not_there_is_no_miss(says):
    """A record that plants nothing is told as such, by plain comparison and by the pass that found no place."""
    says()
    assert run_case(replace(FAULT, backend=lambda: toolkit)).verdict == "not planted"
    says(ReportedProblem("value", "output", "UsageError: the graph has no call of 'mm'"))
    assert run_case(FAULT).verdict == "not planted"


def test_only_what_is_proven_to_be_below_rounding_is_excused(says):
    """The record's word is not enough: 1 % is far from the float64 run, one step of float32 is not."""
    says()
    assert run_case(replace(FAULT, below="nobody would see it")).verdict == "missed"
    step = change_output(lambda y: torch.nextafter(y, y + 1))
    assert run_case(replace(FAULT, backend=step, below="the next number")).verdict == "below noise"


def test_a_fault_of_torch_may_have_been_mended(says):
    """Where torch computes it right there is nothing to catch; where it is still wrong that is a miss."""
    says()
    assert run_case(replace(FAULT, backend=lambda: toolkit, upstream="an issue")).verdict == "mended"
    assert run_case(replace(FAULT, backend=change_output(lambda y: y * 2), upstream="an issue")).verdict == "missed"


def test_a_fault_of_torch_that_no_tensor_shows(says):
    """The case asks this torch whether it has the fault; where it has, it is judged like any other."""
    says(WRONG)
    absent = run_case(replace(FAULT, upstream="an issue", has_fault=lambda: False))
    assert (absent.verdict, absent.text) == ("mended", "this torch does not have it (an issue)")
    assert run_case(replace(FAULT, upstream="an issue", has_fault=lambda: True)).verdict == "caught"


def test_settings_of_threads():
    """What the planted setting rests on: torch 2.12 keeps it from other threads, 2.11 does not."""
    since = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    assert settings_are_of_one_thread() is since


def test_a_correct_backend_must_be_silent_and_must_differ(says):
    """A report is a false alarm; bitwise equality proves nothing, except of a control."""
    correct = replace(FAULT, kind="")
    verdicts = []
    for reported, noise in (([], 1.0), ([WRONG], 9.0), ([], 0.0)):
        says(*reported, noise=noise)
        verdicts.append(run_case(correct).verdict)
    assert verdicts == ["silent", "false alarm", "not planted"]
    assert run_case(replace(correct, control=True)).verdict == "silent"


def test_a_check_that_raises_is_no_catch(monkeypatch):
    """Nor does it end the run."""
    monkeypatch.setitem(judged_case._CHECKS, "compare", lambda case: {}["not there"])
    found = run_case(FAULT)
    assert (found.verdict, found.ok) == ("failed", False)
    assert found.text == "the check itself raised KeyError: 'not there'"


def made(*verdicts):
    """Outcomes with these verdicts: faults of kind value, then correct ones."""
    wrong = {"false alarm", "silent"}
    return [JudgedCase(replace(FAULT, kind="" if verdict in wrong else "value"), verdict,
                    (WRONG,) if verdict == "false alarm" else (), "why") for verdict in verdicts]


def test_the_table_counts_by_kind():
    """Caught, missed, excused, and false alarms under the kind that they were reported as."""
    lines = table(made("caught", "caught", "missed", "below noise", "false alarm", "silent")).splitlines()
    assert lines[0] == "| kind  | planted | caught | missed | below rounding | false alarms |"
    assert lines[2] == "| value |       4 |      2 |      1 |              1 |            1 |"
    assert lines[3] == "| all   |       4 |      2 |      1 |              1 |            1 |"
    assert lines[5].startswith("False alarms are counted over 2 correct backends")
    assert "1 below rounding: off (why)." in lines


@pytest.mark.parametrize(("verdicts", "code", "last"), [
    (("caught", "silent", "below noise", "mended"), 0, "passed in"),
    (("caught", "missed"), 1, "FAILED in"), (("silent", "false alarm"), 1, "FAILED in"),
    (("not planted",), 1, "FAILED in"), (("failed",), 1, "FAILED in"),
])
def test_the_exit_code(monkeypatch, verdicts, code, last):
    """1 for a miss, a false alarm, or a record that plants nothing; each is named."""
    monkeypatch.setattr(selftest, "_run_all", lambda cases, workers, device: iter(made(*verdicts)))
    said = []
    assert selftest.selftest("", said.append) == code
    assert said[-1].startswith(last)
    assert [line for line in said if ": off (" in line.split("\n")[0]] == [
        str(o) for o in made(*verdicts) if not o.ok] or code == 0


def test_cases_are_selected_by_kind_or_name():
    """Separated by commas; a word for nothing is a mistake of the user's."""
    assert {case.kind for case in selftest.selected_cases("rng, structure")} == {"rng", "structure"}
    assert [case.name for case in selftest.selected_cases("operands swapped")] == ["operands swapped"]
    assert selftest.selected_cases("") == list(CASES)
    assert all(not case.kind and not case.control for case in selftest.selected_cases("correct"))
    with pytest.raises(UsageError, match="'strcture' is no kind, and in the name of no case; did you mean 'structure'"):
        selftest.selected_cases("strcture")


@pytest.mark.slow
def test_the_command(pytester, monkeypatch):
    """Runs no tests; the table, the exit code; a mistake is a usage error."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makepyfile("def test_it(): raise AssertionError")
    result = pytester.runpytest_subprocess("--compile-selftest=generator seeded, random number,operands swapped")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["4 cases on torch *", "| kind *", "| value *|       1 |      1 |      0 |*",
                                 "| rng *|       3 |      3 |*", "passed in * s"])
    assert "test_it" not in result.stdout.str()
    result = pytester.runpytest_subprocess("--compile-selftest=strcture")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --compile-selftest: 'strcture' is no kind*"])


@pytest.mark.parametrize(("asked", "line"), [("--help", "usage: *"), ("--version", "pytest *")])
def test_help_and_version_answer_before_the_selftest(pytester, asked, line):
    """As everywhere in pytest: who asks for help waits for no run."""
    result = pytester.runpytest("--compile-selftest=no such words", asked)
    assert result.ret == 0
    result.stdout.fnmatch_lines([line])
