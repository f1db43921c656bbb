"""Mistakes in our markers: what of a test's markers says something that nobody knows. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

__all__ = ["MARKERS", "lone_pass_hint", "marker_mistake", "misspelt_marker", "place_of", "registered_markers"]

MARKERS = ("compile_modes", "compile_limits", "shape_buckets", "graph_passes")
_USERS = {"compile_modes": "compile_config", "shape_buckets": "shape_buckets", "graph_passes": "graph_pass"}
"""Marker to the fixture without which it says nothing."""
_OUR_FIXTURES = ("compiled_model", "compile_config", "recompile_counter", "graph_breaks", "shape_buckets", "graph_pass")


def marker_mistake(item: pytest.Item, mark: pytest.Mark) -> str:
    """What is wrong with a marker of ours on a test; else empty."""
    from pytest_torchcompile.errors import UsageError
    from pytest_torchcompile.plan.markers import READERS

    try:
        READERS[mark.name](mark.args, mark.kwargs)
    except UsageError as error:
        return str(error)
    names = getattr(item, "fixturenames", None)
    if names is None:
        return f"{item.name} takes no fixtures; the marker is for test functions"
    user = _USERS.get(mark.name)
    own = mark in item.own_markers
    if user and own and user not in names:
        if user == "compile_config":
            # What the user writes: compiled_model takes the other one.
            user = "compiled_model"
        return f"{item.name} does not use the fixture {user}"
    callspec = getattr(item, "callspec", None)
    if mark.name == "compile_modes" and own and (callspec is None or "compile_config" not in callspec.params):
        return f"the marker of one parameter cannot make several tests of {item.name}; put it on the function"
    return ""


def registered_markers(config: pytest.Config) -> set[str]:
    """Names of all markers that some plugin or the ini file knows."""
    return {re.split(r"[(:]", line, maxsplit=1)[0].strip() for line in config.getini("markers")}


def misspelt_marker(item: pytest.Item, name: str, registered: Collection[str]) -> str:
    """What to say of a marker that nobody knows and that looks like one of ours; else empty.

    Pytest only warns of it, and the test would run once, with defaults, and be green.
    """
    if name in registered or not set(_OUR_FIXTURES).intersection(getattr(item, "fixturenames", ())):
        return ""
    from difflib import get_close_matches

    # Close ones only: a project's own marker must not be taken for a misspelt one of ours.
    close = get_close_matches(name, MARKERS, n=1, cutoff=0.8)
    return f"unknown marker; did you mean {close[0]!r}?" if close else ""


def lone_pass_hint(text: str) -> str:
    """What to say of an error of collection that comes of ``@pytest.mark.graph_passes(my_pass)``; else empty.

    Pytest takes a lone function for the test that is marked, and then runs the pass on the test.
    """
    if not re.search(r"@pytest\.mark\.graph_passes\(\s*[\w.]+\s*\)", text) or "'function' object" not in text:
        return ""
    return ("pytest takes a lone function in a marker for the test that is marked; put it into a list: "
            "@pytest.mark.graph_passes([my_pass])")


def place_of(item: pytest.Item) -> str:
    """``test_net.py:12``; pytest counts lines from 0, and has none for what is no function."""
    file, line, _ = item.location
    return f"{file}:{(line or 0) + 1}"
