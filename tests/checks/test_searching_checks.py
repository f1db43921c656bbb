"""The checks `fuzz` and `contract`: what they make of a search that found something, or that could show nothing."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load

RUNG = {"backend": "inductor", "examples": 5, "tries": 5, "calls": 20, "refused": 0, "mute": 0, "compiles": 2,
        "seconds": 3.0, "spent": ""}
NOTHING = {"finding": None, "sequence": [], "code": "[]", "drawn": "[]", "kept": False, "cut": "", "test": ""}
WRONG = NOTHING | {"finding": {"kind": "value", "message": "output is 9 times the noise off", "evidence": "in call 2"},
                   "code": "f(B=3)", "drawn": "f(B=3)", "test": "def test_it(): ..."}
RAISES = WRONG | {"finding": {"kind": "error", "message": "KeyError", "evidence": ""}, "code": "f(B=1)"}


def fuzzed(*rungs, found=NOTHING, **changes):
    section = {"varied": ["B"], "seed": 0, "rungs": list(rungs), **found, "milder": []} | changes
    return list(load("fuzz").judge(section, {}))


def test_a_search_that_found_nothing_passes():
    assert not fuzzed(RUNG)


def test_a_model_of_one_size_is_not_searched():
    (problem,) = fuzzed(varied=[])
    assert problem.message.startswith("nothing to judge: no dim of the model has more than one size")


@pytest.mark.parametrize(("changes", "text", "hint"), [
    ({"spent": "sizes"}, "no sequence was run: no sizes were found that the dims' expressions go with", "expressions"),
    ({"refused": 7}, "nothing was compared: eager refuses all 7 call(s) that were drawn", "narrow the model's dims"),
    ({"refused": 7, "mute": 2}, "nothing was compared: eager refuses all 7 call(s) that were drawn, or gives nothing "
     "but zeros, NaN or rounding noise: 2", "narrow the model's dims"),
    ({"mute": 6}, "nothing is proved: in all 6 call(s) that were drawn the model gives nothing but zeros, NaN or "
     "rounding noise", "inputs and weights"),
    ({"spent": "time"}, "no sequence was run: the time for fuzzing was over before the first",
     "--compile-fuzz-seconds"),
])
def test_a_search_without_a_try_shows_nothing(changes, text, hint):
    """What it lacked decides what to do about it."""
    (problem,) = fuzzed(RUNG | {"tries": 0} | changes)
    assert problem.message == text
    assert hint in problem.hint


def test_the_cells_own_backend_has_to_be_tried():
    """Tries on a cheaper rung prove nothing of the last; the backend that went without is named."""
    cheap = RUNG | {"backend": "aot_eager"}
    (problem,) = fuzzed(cheap, RUNG | {"tries": 0, "spent": "time"})
    assert problem.message.startswith("no sequence was run with the backend inductor: ")
    assert not fuzzed(cheap | {"tries": 0}, RUNG)


def test_the_worst_problem_comes_first_and_milder_ones_after_it():
    first, second = fuzzed(RUNG, found=WRONG, milder=[RAISES])
    assert first.message == "value: after f(B=3): output is 9 times the noise off"
    assert second.message == "error: after f(B=1): KeyError"


@pytest.mark.parametrize(("changes", "says", "lacks"), [
    ({}, "in call 2\n\ndef test_it(): ...", "found as"),
    ({"drawn": "f(B=31)"}, "found as f(B=31)", "not shrunk"),
    ({"kept": True}, "kept from an earlier run in .hypothesis", "found as"),
    ({"cut": "time"}, "not shrunk to the end: the time ran out", "kept from"),
])
def test_the_evidence_tells_how_it_was_found(changes, says, lacks):
    (problem,) = fuzzed(RUNG, found=WRONG | changes)
    assert says in problem.evidence
    assert lacks not in problem.evidence
    assert problem.evidence.endswith("def test_it(): ...")


# contract

SEARCHED = {"wrapper": "none", "offered": {"strides": 3, "threads": 1}, "uncompared": [], "histories": 6, "calls": 20,
            "refused": 2, "mute": 0, "graphs": 4, "findings": []}


@pytest.mark.parametrize(("changes", "text"), [
    ({"calls": 0}, "vacuous: no call was compared"),
    ({"graphs": 0}, "vacuous: no compiled graph ran in any history"),
    ({"mute": 20}, "vacuous: of every call nothing came but zeros"),
    ({"uncompared": ["strides", "threads"]}, "vacuous: no call with a mutation was compared"),
    ({"wrapper": "ddp"}, "nothing to judge: the contract is that of a module as it is, not in the wrapper 'ddp'"),
])
def test_histories_that_show_nothing_do_not_pass(changes, text):
    (problem,) = load("contract").judge(SEARCHED | changes, {})
    assert problem.message.startswith(text)
    assert problem.hint


@pytest.mark.parametrize("changes", [{}, {"mute": 19}, {"uncompared": ["threads"]}])
def test_histories_that_were_compared_pass(changes):
    assert not list(load("contract").judge(SEARCHED | changes, {}))


def test_the_remark_tells_what_was_never_compared():
    contract = load("contract")
    told = "6 histories over 2 mutations, 20 calls compared, 2 refused by eager"
    assert contract.remark(SEARCHED) == told
    left = contract.remark(SEARCHED | {"uncompared": ["threads"]})
    assert left == told.replace("2 mutations", "1 mutation") + "; never compared: threads"
