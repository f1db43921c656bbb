"""Axes and values that ``-m "compile_cell(...)"`` names: those of the matrix, or a usage error."""

from __future__ import annotations

import re

import pytest

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.selection import refuse_unknown

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
