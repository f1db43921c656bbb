"""Public names are loaded on first use, from the module that holds them."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from pytest_torchcompile import on_first_use

PACKAGES = ["pytest_torchcompile", "pytest_torchcompile.oracle"]


def test_a_name_is_loaded_once():
    """The first use puts it among the package's globals; before that it is listed all the same."""
    namespace = {"own": 1}
    load, names = on_first_use("pytest_torchcompile", namespace, {"Cell": "cell"})
    assert names() == ["Cell", "own"]
    assert load("Cell") is import_module("pytest_torchcompile.cell").Cell is namespace["Cell"]


def test_an_unknown_name_is_an_attribute_error():
    """Worded as Python words it."""
    load, _ = on_first_use("pytest_torchcompile", {}, {})
    with pytest.raises(AttributeError, match="module 'pytest_torchcompile' has no attribute 'Cel'"):
        load("Cel")


@pytest.mark.parametrize("name", PACKAGES)
def test_all_three_lists_agree(name):
    """`__all__`, the table, and what type checkers see hold the same names."""
    package = import_module(name)
    source = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    typed = [alias.asname or alias.name for node in source.body if isinstance(node, ast.If)
             for imported in node.body for alias in imported.names]
    assert sorted(typed) == sorted(package.__all__) == sorted(package._EXPORTS)
    assert set(package.__all__) <= set(dir(package))
