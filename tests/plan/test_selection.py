"""What ``-m`` and ``--compile-checks`` name: what the matrix has a use for, or a usage error."""

from __future__ import annotations

import re

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.selection import idle_cells, refuse_idle, refuse_unknown

CELLS = [{"model": "net", "backend": "eager", "hidden": 8, "bias": True}, {"model": "net", "backend": "inductor"}]


@pytest.mark.parametrize("expression", [
    "", "slow and not fast", "compile_cell", "not compile_cell(backend='eager')",
    'compile_cell( backend = "inductor", model=\'net\' ) or other(baxkend="x")', "compile_cell(hidden=8)",
    "compile_cell(bias=True) and compile_cell(model='net')", "compile_cell(backend=eager)", "compile_cell(backend=",
])  # fmt: skip
def test_what_the_matrix_has(expression):
    """Known axes and values pass; other markers, and what pytest cannot parse, are none of ours."""
    refuse_unknown(expression, CELLS)


@pytest.mark.parametrize(("expression", "text"), [
    ("compile_cell(baxkend='eager')", "-m: no cell of the matrix has an axis 'baxkend'; did you mean 'backend'? Known"),
    ("slow or not compile_cell(model='net', baxkend='eager')", "has an axis 'baxkend'; did you mean 'backend'?"),
    ("compile_cell(backend='eagr')", "-m: no cell of the matrix has backend='eagr'; did you mean 'eager'? Known: "),
    ("compile_cell(hidden='8')", "-m: no cell of the matrix has hidden='8'; write hidden=8"),
    ("compile_cell(hidden=9)", "-m: no cell of the matrix has hidden=9; Known: 8"),
    ("compile_cell(hidden=True)", "-m: no cell of the matrix has hidden=True; Known: 8"),
])  # fmt: skip
def test_what_it_does_not_have(expression, text):
    """One line with the nearest name; a number is no text, as for pytest."""
    with pytest.raises(UsageError, match=re.escape(text)):
        refuse_unknown(expression, CELLS)


NOTHING = " has nothing to judge in any cell of the matrix: "


def cells(*wrappers, **more):
    return [{"phase": "training", "device": "cpu", "backend": "inductor", "wrapper": each} | more for each in wrappers]


@pytest.mark.parametrize(("checks", "given", "text"), [
    (["randomness"], cells("tp*fake8"), f"randomness{NOTHING}in the fake lane no number means anything"),
    (["gradients"], cells("none", phase="inference"),
     f"gradients{NOTHING}it judges phase training, not inference"),
    (["rank_divergence"], cells("none"), "it judges cells of several ranks only"),
    (["smoketest", "fuzz"], cells("ddp", "ddp*4", "tp*fake8"),
     f"smoketest{NOTHING}it judges cells of one rank only (2 of 3 cells)"),
    (["cudagraphs"], cells("none"), "no CUDA graphs are promised, by a mode or a backend on device cuda"),
])
def test_checks_without_anything_to_judge(checks, given, text):
    """No test would be collected; the first of them says why."""
    with pytest.raises(UsageError) as raised:
        refuse_idle(checks, given, "--compile-checks", each=False)
    assert str(raised.value).startswith(f"--compile-checks: {checks[0]} has nothing to judge")
    assert str(raised.value).endswith(text)


def test_one_check_with_something_to_judge_will_do():
    """In one cell, where nobody asked for these very checks; a matrix without cells is no business of the checks."""
    refuse_idle(["smoketest", "compiles"], cells("tp*fake8"), "m.yaml: checks", each=False)
    refuse_idle(["randomness"], cells("tp*fake8", "none"), "--compile-checks", each=True)
    refuse_idle(["randomness"], [], "--compile-checks", each=True)


def test_each_check_that_is_asked_for_has_something_to_judge():
    """Else it would be dropped without a word, as the others go on."""
    text = f"--compile-checks: randomness{NOTHING}in the fake lane no number means anything"
    with pytest.raises(UsageError, match=f"^{re.escape(text)}$"):
        refuse_idle(["compiles", "randomness"], cells("tp*fake8", "fsdp2*fake4"), "--compile-checks", each=True)


def test_cells_without_a_check_are_told():
    """How many, and why; nothing of a check that all cells have."""
    given = [*cells("none", "ddp*2", "tp*fake8"), *cells("none", phase="inference")]
    assert list(idle_cells(["compiles", "randomness", "gradients"], given)) == [
        "randomness has nothing to judge in 1 of 4 cells: it judges cells of one rank only",
        "randomness has nothing to judge in 1 of 4 cells: in the fake lane no number means anything",
        "gradients has nothing to judge in 1 of 4 cells: in the fake lane no number means anything",
        "gradients has nothing to judge in 1 of 4 cells: it judges phase training, not inference",
    ]
