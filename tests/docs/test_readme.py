"""README says what is so: its tables are made from the code's."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_torchcompile
from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.checks import CHECKS, LIMITS
from pytest_torchcompile.run.options import OPTIONS
from pytest_torchcompile.wrappers import WRAPPERS

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def text():
    return README.read_text(encoding="utf-8")


def options_table():
    return [f"| `{o.flag}{'=' + o.metavar if o.metavar else ''}` | `{o.ini}` | {o.help} |" for o in OPTIONS]


def test_options(text):
    """Every option is in the table, word for word."""
    for row in options_table():
        assert row in text, f"README lacks: {row}"


@pytest.mark.parametrize("name", [*CHECKS, *LIMITS, *WRAPPERS])
def test_names(text, name):
    """Every check, limit and wrapper is named."""
    assert f"`{name}`" in text


def test_public_names():
    """What the package exports is what it lists."""
    assert sorted(pytest_torchcompile.__all__) == sorted(pytest_torchcompile._EXPORTS)
    assert "inductor" in BACKENDS
