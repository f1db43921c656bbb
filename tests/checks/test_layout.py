"""The check `layout`: which strides fail a cell, which are only told, and what is said of each."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load
from pytest_torchcompile.gauges.autotune import _is_padding
from pytest_torchcompile.oracle.leaf_limits import Leaf, is_stride

LAYOUT = load("layout")


def stride(name="output", timed="", calls=("call 1",)):
    return {"name": name, "eager": "(8, 1)", "compiled": "(1, 4)", "timed": timed, "calls": list(calls)}


def section(*strides, compared=1, raised=None):
    return {"raised": raised, "compared": compared, "strides": list(strides)}


def problems(*strides, limits=None, **more):
    return list(LAYOUT.judge(section(*strides, **more), limits or {}))


@pytest.mark.parametrize("name", ["output", "output['logits']", "input x", "buffer running_mean", "attribute cache"])
def test_what_eager_promises_fails(name):
    """With the leaf, both strides, and how to allow it."""
    (problem,) = problems(stride(name))
    assert problem.message == f"{name}: stride is (8, 1) in eager, (1, 4) compiled"
    assert problem.evidence == "in call 1"
    assert problem.hint.endswith("allow it by the rule `- limits: {strides: 1}`")


@pytest.mark.parametrize("told", [
    stride("gradient of up.weight"), stride(timed="autotuning"),
    stride("buffer cache", "the padding of matrix products"),
], ids=["a gradient", "autotuned", "padded"])
def test_what_nobody_promises_is_only_told(told):
    """Gradients, and what a stopwatch may have decided; a limit of strides counts them."""
    assert problems(told) == []
    assert LAYOUT.remark(section(told)).startswith("1 stride(s) differ, which are not promised or allowed")
    (problem,) = problems(told, limits={"strides": 0})
    assert problem.message.startswith(f"{told['name']}: stride is (8, 1) in eager, (1, 4) compiled")
    assert problem.message.endswith(f"; {told['timed']} may have decided by timing") is bool(told["timed"])


def test_the_limit_counts_all():
    """At the limit nothing fails; one above it each is told, with the limit that would let it pass."""
    three = [stride("output"), stride("gradient of x"), stride("input x", "autotuning")]
    assert problems(*three, limits={"strides": 3}) == []
    told = problems(*three, limits={"strides": 2})
    assert [problem.message.partition(":")[0] for problem in told] == ["output", "gradient of x", "input x"]
    assert all("{strides: 3}" in problem.hint for problem in told)


def test_every_call_counts_once():
    """One leaf in three calls is one stride that differs."""
    (problem,) = problems(stride(calls=("call 1", "call 2", "call 3")))
    assert problem.evidence == "in call 1, and in 2 more call(s)"


def test_nothing_compared_is_no_pass():
    """Nor is a run that raised."""
    (empty,) = problems(compared=0)
    assert empty.message == "nothing was compared: the model has no output"
    (raised,) = problems(compared=0, raised="InductorError")
    assert raised.message == "nothing to judge: the compiled run raised InductorError"


def test_the_remark():
    """Each way of timing is named once; without a difference nothing is said."""
    assert LAYOUT.remark(section()) == ""
    assert LAYOUT.remark({}) == ""
    both = section(stride(timed="b"), stride("input x", "a"), stride("input y", "b"))
    assert LAYOUT.remark(both) == ("3 stride(s) differ, which are not promised or allowed; a and b may have decided by "
                                   "timing")


@pytest.mark.parametrize(("eager", "compiled", "padded"), [
    ("(8, 1)", "(16, 1)", True),
    ("(24, 8, 1)", "(64, 16, 1)", True),
    ("(8, 1)", "(8, 1)", True),
    ("(8, 1)", "(1, 8)", False),
    ("(16, 1)", "(8, 1)", False),
    ("(4, 1)", "(8, 2)", False),
    ("(1,)", "(2,)", False),
    ("(6, 1, 0)", "(24, 4, 1)", False),
    ("(1, 5)", "(1, 8)", True),
    ("(24, 8, 1)", "(24, 1, 3)", False),
    ("(8, 1)", "(16, 2, 1)", False),
    ("None", "(8, 1)", False),
    ("(8, 1)", "None", False),
])
def test_padding_only_widens_gaps(eager, compiled, padded):
    """An axis that moves is another memory format, and no padding."""
    assert _is_padding(eager, compiled) is padded


def test_strides_among_other_leaves():
    """A sparse tensor for a dense one has the same kind, and is no stride that differs."""
    assert is_stride(Leaf("output", "stride", message="stride is (8, 1) in eager, (1, 4) compiled"))
    assert not is_stride(Leaf("output", "stride", message="layout is strided in eager, sparse_coo compiled"))
    assert not is_stride(Leaf("output", "shape", message="stride is (8, 1) in eager, (1, 4) compiled"))
