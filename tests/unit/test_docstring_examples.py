"""The examples in docstrings say what happens: each is run, and its output held against what stands there."""

from __future__ import annotations

import doctest
import importlib
import types

import pytest
from unit.rooms import MODULES

WITH_EXAMPLES = sorted(name for name, path in MODULES.items() if ">>> " in path.read_text(encoding="utf-8"))


def failures_in(module):
    """What is told of examples whose output is another one."""
    told = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=told.append, clear_globs=True)
    return told


def imported(name):
    """A module of ours; the test is skipped where it needs torch and there is none."""
    name = name.replace("/", ".").removesuffix(".__init__").removesuffix("__init__")
    try:
        return importlib.import_module(f"pytest_torchcompile.{name}".rstrip("."))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip("needs torch")


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    """As a reader would type them."""
    assert not failures_in(imported(name))


def test_a_wrong_example_is_told():
    """With the line, what was expected and what came."""
    planted = types.ModuleType("planted", ">>> 1 + 1\n3\n")
    (text,) = failures_in(planted)
    assert "Expected:\n    3\nGot:\n    2" in text


def test_some_modules_have_examples():
    """Else nothing is run above."""
    assert {"quantity", "ledger/reasons"} <= set(WITH_EXAMPLES)
