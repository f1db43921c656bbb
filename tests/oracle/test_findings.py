"""The texts about what was found: findings, headlines, stages, what a check lists."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load
from pytest_torchcompile.errors import headline
from pytest_torchcompile.oracle.diagnosis import stage_summary, stages_before
from pytest_torchcompile.oracle.discrepancies import Discrepancy, find_discrepancies
from pytest_torchcompile.oracle.leaf_limits import Leaf

WRONG = Leaf("output", "value", 8, dtype="float32", rms=50.0, bias=1.0, peak=60.0, index=(0,), eager=1.0, compiled=2.0,
             expected=1.0, against="float64", wrong=0.5)
RIGHT = Leaf("loss", "value", bitwise=True)


def test_one_finding_for_each_place():
    """However many calls show it; what agrees is none."""
    shape = Leaf("output", "shape", message="shape is (2,) in eager, (3,) compiled")
    (value, other) = find_discrepancies([("call 1", RIGHT), ("call 1", WRONG), ("call 2", WRONG), ("call 2", shape)])
    assert (value.kind, value.where, value.evidence) == ("value", "output", "in call 1, and in 1 more call(s)")
    assert value.message.startswith("output: error is 50 times the rounding noise")
    assert (other.kind, other.evidence) == ("shape", "in call 2")


def test_a_finding_as_text():
    """Kind and message, evidence below, what to try."""
    text = str(Discrepancy("vacuous", "call 1", "nothing ran", "a\nb", "give it work"))
    assert text == "vacuous: nothing ran\n    a\n    b\n    try: give it work"


@pytest.mark.parametrize(("text", "line"), [
    ("", ""), ("one\ntwo", "one"),
    ("backend='x' raised:\n\n  RuntimeError: no\nmore", "backend='x' raised: RuntimeError: no"),
    ("x" * 300, "x" * 197 + "..."),
])  # fmt: skip
def test_headline(text, line):
    """The first line, with the next where it only leads up to it."""
    assert headline(text) == line


@pytest.mark.parametrize(("backend", "before"), [
    ("eager", []), ("aot_eager", ["eager"]), ("inductor", ["eager", "aot_eager", "aot_eager_decomp_partition"]),
    ("models:mine", ["eager", "aot_eager"]),
])  # fmt: skip
def test_the_stages_before_a_backend(backend, before):
    """Those that do part of what it does, in order."""
    assert stages_before(backend) == before


@pytest.mark.parametrize(("backend", "stages", "text"), [
    ("inductor", [("eager", "agrees"), ("aot_eager", "agrees"), ("aot_eager_decomp_partition", "agrees")],
     "stages: backend eager agrees, aot_eager agrees, aot_eager_decomp_partition agrees; inductor is the first "
     "that does not: look at Inductor's lowering, fusion or generated code"),
    ("inductor", [("eager", "agrees"), ("aot_eager", "differs")],
     "stages: backend eager agrees, aot_eager differs: look at AOTAutograd's graphs of forward and backward"),
    ("inductor", [("eager", "raises KeyError")],
     "stages: backend eager raises KeyError: look at Dynamo's capture of the program"),
    ("eager", [], "stages: backend eager does nothing but run Dynamo's capture of the program: look there"),
    ("mine", [("eager", "agrees"), ("aot_eager", "agrees")],
     "stages: backend eager agrees, aot_eager agrees; mine is the first that does not: look at the backend itself"),
])  # fmt: skip
def test_the_first_stage_that_differs(backend, stages, text):
    """One line: what was tried, and where to look."""
    assert stage_summary({"backend": backend, "stages": stages}) == text


def section(*names, **more):
    leaves = [{"call": "call 1", **Leaf(**{**vars(WRONG), "name": name}).to_dict()} for name in names]
    return {"raised": None, "compared": 9, "leaves": leaves, "nonzero": 1, "steps": 3, **more}


def test_a_check_lists_the_first_problems():
    """In the order in which a program makes them; the others are named at the end, the stages at the beginning."""
    names = [f"step {step}: {what}" for step in (2, 1) for what in ("gradient of a", "loss", "output")]
    located = {"backend": "mine", "stages": [("eager", "differs")]}
    problems = list(load("training_steps").judge(section(*names, "a after 3 steps", located=located), {}))
    assert [p.message.partition(": error")[0] for p in problems] == [
        "step 1: output", "step 1: loss", "step 1: gradient of a", "step 2: output", "step 2: loss"]
    assert problems[0].evidence == "in call 1\nstages: backend eager differs: look at Dynamo's capture of the program"
    assert problems[-1].evidence == "in call 1\n2 more differ: step 2: gradient of a, a after 3 steps"


def test_too_few_steps_for_the_limit():
    """An observation judged again under a higher limit says that it has less."""
    assert not list(load("training_steps").judge(section(), {}))
    (problem,) = load("training_steps").judge(section(), {"steps": 5})
    assert problem.message == "3 training steps were compared, 5 wanted"


def test_no_step_at_all():
    """A model that nothing trains fails the check."""
    (problem,) = load("training_steps").judge(section(steps=0), {})
    assert "no step was made" in problem.message


def test_an_error_has_its_headline():
    """The check `compiles` says in one line what was raised, and where to look."""
    error = {"type": "KeyError", "phase": "forward", "text": "'k'\nmore", "traceback": "File x"}
    located = {"backend": "aot_eager", "stages": [("eager", "agrees")]}
    (problem,) = load("compiles").judge({"error": error, "located": located}, {})
    assert problem.message == "the compiled run raised KeyError in forward; eager did not: 'k'"
    assert problem.evidence.endswith("stages: backend eager agrees; aot_eager is the first that does not: "
                                     "look at AOTAutograd's graphs of forward and backward")
    assert not problem.hint
