"""The value that a guard met: found where that runs no user code, unknown where it would."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass

import pytest

from pytest_torchcompile.ledger.entries import actual_value, shown_value

Point = namedtuple("Point", "a b")


class Plain:
    """An attribute of its own, one of its class, a slot, and things that run code."""

    kind = "plain"

    def __init__(self):
        self.k = 3

    @property
    def loud(self):
        """Raise: nobody may read it."""
        raise AssertionError("a property was read")

    def __getattr__(self, name):
        raise AssertionError(f"__getattr__({name!r}) was called")


@dataclass
class Slotted:
    """One slot."""

    __slots__ = ("k",)
    k: int


class Items(dict):
    """A dict whose items are computed."""

    def __getitem__(self, key):
        raise AssertionError("__getitem__ was called")


def some(k=1):
    """A function."""
    return k


SCOPE = {
    "y": 2, "o": Plain(), "s": Slotted(5), "p": Point(1, 2), "d": {"a": [1, 2], "b": 0}, "n": None,
    "items": Items(a=1), "f": functools.partial(some, k=7), "g": some, "G": {"SCALE": 4},
}  # fmt: skip


@pytest.mark.parametrize(("what", "text"), [
    ("y", "2"), ("o.k", "3"), ("o.kind", "'plain'"), ("s.k", "5"), ("p.b", "2"), ("p[0]", "1"),
    ("d['a'][1]", "2"), ("len(d['a'])", "2"), ("type(o)", "Plain"), ("o.__dict__['k']", "3"),
    ("f.keywords['k']", "7"), ("n", "None"),
    ("G['SCALE']", "4"), ("g", "function some"), ("(y % 2)", "0"), ("d", "dict of 2"), ("o", "Plain"),
    ("g.__defaults__[0]", "1"),
])  # fmt: skip
def test_values_that_are_plainly_there(what, text):
    """Names, attributes, items, lengths, types."""
    assert actual_value(what, SCOPE) == text


@pytest.mark.parametrize("what", [
    "o.loud", "o.missing", "items['a']", "absent", "d['c']", "o.k()", "y +", "y.a.b", "[i for i in d]",
    "y if y else y", "(y % n)", "len(y)", "some(1)",
])  # fmt: skip
def test_what_would_run_code_or_is_not_there_stays_unknown(what):
    """No property, no ``__getattr__``, no ``__getitem__``, no call, no error."""
    assert actual_value(what, SCOPE) == ""


def test_long_values_are_cut():
    """One line of a report, not a page."""
    text = shown_value("x" * 500)
    assert len(text) == 60
    assert text.endswith("...")


def test_code_is_named_by_its_line():
    """Two lambdas have one name."""
    assert shown_value(some.__code__) == f"code some of line {some.__code__.co_firstlineno}"
