"""Notes: what a comparison could not decide is told, and nothing that was undecidable counts as proof."""

from __future__ import annotations

from dataclasses import replace

from pytest_torchcompile.checks import load
from pytest_torchcompile.oracle.discrepancies import undecided_notes, why_vacuous
from pytest_torchcompile.oracle.leaf_limits import Leaf, note, problem

EXACT = Leaf("output", "value", numel=8, bitwise=True)
NEAR = Leaf("output", "value", numel=8, rms=1.0, bias=1.0, peak=1.0, against="float64")
NOISE = replace(NEAR, name="gradient of bias", kind="gradient", blind=8)
WRONG = Leaf("output", "dtype", message="dtype is a in eager, b compiled")


def test_a_leaf_of_noise_is_no_problem_and_no_proof():
    """It has a note, four times the room, and does not count as decided."""
    assert problem(NOISE) is None
    assert "gradient of bias: undecidable, its values are no larger than their rounding noise" in note(NOISE)
    assert not NOISE.decided
    assert problem(replace(NEAR, rms=8.0)) is not None
    assert problem(replace(NOISE, rms=8.0)) is None
    assert problem(replace(NOISE, rms=40.0)) is not None


def noisy_leaf(blind=100, **numbers):
    return Leaf("gradient of bias", "gradient", numel=100, dtype="float32", rms=5.0, bias=1.0, draws=9, blind=blind,
                **numbers)


def test_the_worst_element_of_noise_is_held_against_eagers_own_worst():
    """Where noise flips decisions no number of draws shows all of it; eager and compiled have the same worst."""
    assert problem(noisy_leaf(peak=500.0, beside_own=1.2)) is None
    assert problem(noisy_leaf(peak=500.0, beside_own=4.0)) is None
    assert "one element is 500 times" in problem(noisy_leaf(peak=500.0, beside_own=4.1))
    assert "one element is 500 times" in problem(noisy_leaf(peak=500.0))


def test_only_the_worst_element_of_nothing_but_noise_is():
    assert "one element is 500 times" in problem(replace(noisy_leaf(blind=99, peak=500.0, beside_own=1.2), rms=1.0))
    assert "error is 20 times" in problem(replace(noisy_leaf(peak=500.0, beside_own=1.2), rms=20.0))
    assert "a systematic offset" in problem(replace(noisy_leaf(peak=500.0, beside_own=1.2), bias=40.0))


def test_what_is_decided_has_no_note():
    """Neither an equal leaf, nor a near one, nor a wrong one."""
    assert [note(leaf) for leaf in (EXACT, NEAR, WRONG)] == [None, None, None]
    assert all(leaf.decided for leaf in (EXACT, NEAR, WRONG))


def test_ranks_beside_one_process_are_called_so():
    """Both sides ran eagerly, so neither is called compiled."""
    far = replace(NEAR, rms=9.0, index=(1,), eager=1.0, compiled=2.0, expected=1.5, ranks=True)
    assert problem(far) == ("output: error is 9 times the rounding noise (limit 5.5) at [1]: one process 1, ranks 2, "
                            "expected 1.5 (no dtype; expected comes from a float64 run)")
    assert "eager 1, compiled 2, expected 1.5" in problem(replace(far, ranks=False))
    assert problem(replace(WRONG, ranks=True)).endswith(
        "b compiled (uncompiled on both sides: what is called eager is one process, and compiled the ranks)")
    assert Leaf.from_dict(far.to_dict()) == far


def test_a_comparison_of_nothing_but_noise_is_vacuous():
    """One value that could have failed is enough; properties are none."""
    structure = Leaf("output structure", "structure", bitwise=True)
    text = why_vacuous([("call 1", NOISE), ("call 1", structure)])
    assert text.startswith("all 1 values are nothing but rounding noise")
    assert why_vacuous([("call 1", NOISE), ("call 1", NEAR)]) is None
    assert why_vacuous([("call 1", NOISE), ("call 1", EXACT)]) is None
    assert why_vacuous([("call 1", structure)]) is None


def test_empty_tensors_prove_nothing():
    """They are equal whatever a compiler does."""
    empty = replace(EXACT, numel=0)
    assert why_vacuous([("call 1", NOISE), ("call 1", empty)]) is not None


def test_a_note_is_given_once_with_its_calls():
    """Not once for each call."""
    found = undecided_notes([("call 1", NOISE), ("call 2", NOISE), ("call 3", NOISE), ("call 3", NEAR)])
    assert len(found) == 1
    assert found[0].endswith(", in call 1 and 2 more")


def test_the_reason_of_a_fallback_is_told_once():
    """However many values were measured that way."""
    fallen = replace(NEAR, against="float32", why="float64: TypeError in forward: no kernel")
    found = undecided_notes([("call 1", fallen), ("call 1", replace(fallen, name="loss"))])
    assert found == ["measured from a float32 run, not from a float64 one "
                     "(float64: TypeError in forward: no kernel), in call 1"]


def test_blind_elements_survive_json():
    """A stored report can be judged again."""
    assert Leaf.from_dict(NOISE.to_dict()) == NOISE


def test_zeros_for_none_fail_only_under_a_limit():
    """They are counted by name; without the limit they are a note."""
    section = {"raised": None, "vacuous": None, "compared": 3, "nonzero": 2, "leaves": [],
               "zero_gradients": ["gradient of a", "gradient of b"]}
    judge = load("gradients").judge
    assert list(judge(section, {})) == []
    assert list(judge(section, {"zero_gradients": 2})) == []
    (found,) = judge(section, {"zero_gradients": 1})
    assert found.message == "2 gradient(s) are zeros where eager has none, 1 allowed"
    assert found.evidence == "gradient of a\ngradient of b"
    assert found.hint.startswith("a parameter that takes no part in the loss: freeze it")


def test_zeros_of_another_sign_fail_only_under_a_limit():
    judge = load("equivalence").judge
    section = {"raised": None, "vacuous": None, "compared": 2, "undecided": 0, "leaves": [],
               "zero_signs": ["output['x']", "output['y']"]}
    assert list(judge(section, {})) == []
    assert list(judge(section, {"zero_signs": 2})) == []
    (found,) = judge(section, {"zero_signs": 1})
    assert found.message == "2 output(s) have zeros of another sign, 1 allowed"
    assert found.evidence == "output['x']\noutput['y']"
    assert found.hint == "1 / -0.0 is -inf: where nothing divides by them, raise the limit `zero_signs`"
