"""The planted faults of ``pytest --compile-selftest``, as tests: the same records, run by the same function."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from pytest_torchcompile.faults import CASES, CONTROLS, CORRECT, FAULTS
from pytest_torchcompile.faults.fault_parts import KINDS, untouched
from pytest_torchcompile.faults.judged_case import run_case

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore")]  # torch warns about some of what is planted

FEW = 3
"""So many of each kind and check, and of what is correct, run always; the others with the slow tests, and in the
selftest."""
SLOW = {"untouched, check determinism", "pass in the order of a set", "Inductor, attention"}
"""Each starts processes of its own, or Inductor for large kernels; other cases of the same checks are quick."""


def quick_names():
    """Of each kind and check the first few that are not slow by themselves."""
    counted = Counter()
    names = set()
    for case in CASES:
        group = (case.kind, case.check)
        if case.name not in SLOW and counted[group] < FEW:
            counted[group] += 1
            names.add(case.name)
    return names


QUICK = quick_names()


@pytest.fixture(autouse=True)
def _timed_guards(monkeypatch):
    """One fault is slow guards: torch times them here, and not as in other tests (tests/conftest.py)."""
    from torch._C._dynamo import guards

    # Torch 2.8 times none.
    if hasattr(guards, "profile_guard_manager"):
        monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", guards.profile_guard_manager)


@pytest.fixture(autouse=True)
def _quiet():
    """Torch logs what it thinks of these faults, at length."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in CASES
], ids=lambda case: f"{case.kind or 'correct'}: {case.name}")
def test_case(case):
    """A fault is caught as what it is and where it is, or proven to be less than rounding; what is correct is not
    reported, and differs from eager."""
    judged = run_case(case)
    if judged.verdict == "unavailable":
        pytest.skip(judged.text)
    assert judged.ok, str(judged)


def test_there_are_enough():
    """Of every kind several; names tell them apart."""
    assert len(FAULTS) - sum(bool(case.below) for case in FAULTS) >= 60
    assert len(CORRECT) >= 30
    assert {case.kind for case in FAULTS} == set(KINDS)
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []


def test_controls_are_the_programs_of_the_faults():
    """Every program that a wrong backend is tried on is also tried without it."""
    controlled = [case.program for case in CONTROLS]
    backends = [case for case in FAULTS if case.check == "compare" and case.backend is not untouched]
    assert [case.name for case in backends if not case.upstream and case.program not in controlled] == []
