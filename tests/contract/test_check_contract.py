"""What the check says of a section, and the decorator of what was written."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_torchcompile import compile_contract
from pytest_torchcompile.checks import load, way_of
from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.contract.contract_search import ContractResult
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.search import Result
from pytest_torchcompile.plugin.compile_contract import ContractTest

SECTION = {"wrapper": "none", "offered": {"strides": 4}, "histories": 9, "calls": 20, "refused": 1, "mute": 0,
           "graphs": 9, "findings": []}
FINDING = {"kind": "value", "where": "output", "message": "output: error is 9 times the rounding noise",
           "code": "[call(B=2)]", "drawn": "[call(B=2), call(B=3)]", "cut": "seconds", "without": ["stem"],
           "stage": "aot_eager", "search": "wrong result aot_eager", "script": "import torch"}


def problems(**changes):
    """What is said of a section with changes."""
    return list(load("contract").judge(SECTION | changes, {}))


def test_all_is_well():
    assert problems() == []
    remark = load("contract").remark(SECTION)
    assert remark == "9 histories over 1 mutation, 20 calls compared, 1 refused by eager"


def test_a_mutation_that_was_never_compared_is_no_passed_one():
    """The budget may end before it, and eager may refuse it."""
    section = SECTION | {"offered": {"strides": 4, "dtypes": 1, "thread": 1}, "uncompared": ["dtypes", "thread"]}
    assert load("contract").remark(section) == ("9 histories over 1 mutation, 20 calls compared, 1 refused by eager; "
                                                "never compared: dtypes, thread")


@pytest.mark.parametrize(("changes", "text"), [
    ({"calls": 0}, "vacuous: no call was compared: eager refuses every one, or the time was over before the first"),
    ({"graphs": 0}, "vacuous: no compiled graph ran in any history"),
    ({"uncompared": ["strides"]}, "vacuous: no call with a mutation was compared: eager refuses each, or the time was "
                                  "over before the first"),
    ({"mute": 20}, "vacuous: of every call nothing came but zeros, NaN, rounding noise, or values that "
                   "eager does not repeat"),
    ({"wrapper": "autocast"}, "nothing to judge: the contract is that of a module as it is, not in the wrapper "
                              "'autocast'"),
])
def test_nothing_was_shown(changes, text):
    (problem,) = problems(**changes)
    assert problem.message == text


def test_a_finding():
    (problem,) = problems(findings=[FINDING])
    assert problem.message == "value: after [call(B=2)]: output: error is 9 times the rounding noise"
    assert problem.evidence.splitlines() == [
        "found as [call(B=2), call(B=3)]",
        "with an Identity instead of stem it is the same",
        "the backend 'aot_eager' shows it, and none with less of the compiler",
        "not shrunk to the end: the seconds ran out",
        "to look for it in torch's tracker: wrong result aot_eager", "", "import torch"]
    assert way_of("contract", problem.message) is None


@pytest.mark.parametrize(("kind", "severity"), [("crash", Severity.CRASH), ("stride", Severity.UNSTABLE)])
def test_what_is_milder_than_wrong_numbers(kind, severity):
    (problem,) = problems(findings=[FINDING | {"kind": kind}])
    assert way_of("contract", problem.message).effect.severity == severity


@pytest.mark.parametrize("offered", [{}, {"dtypes": ["float64 0"]}], ids=["of no use", "refused"])
def test_a_decorator_whose_mutations_were_never_compared(offered):
    """Plain calls alone show nothing of the contract."""
    @compile_contract(inputs=dict, mutations=["dtypes"])
    def model():
        """None is made."""

    tested = next(value for value in vars(model).values() if isinstance(value, ContractTest))
    came = ContractResult(Result(), offered, counts=Counter(calls=4, graphs=1), uncompared=list(offered))
    with pytest.raises(AssertionError, match="no call with a mutation was compared, of dtypes: the module has no use"):
        tested._refuse_nothing_compared(came)


def test_a_decorator_of_what_does_not_exist():
    with pytest.raises(UsageError, match="'threads' is no mutation of the contract; did you mean 'thread'"):
        compile_contract(inputs=dict, mutations=["threads"])
    with pytest.raises(UsageError, match=r"compile_contract: B=2\.5; expected dim"):
        compile_contract(inputs=dict, B=2.5)
