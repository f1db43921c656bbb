"""Whatever is in a matrix file: a matrix, or lines that begin with file:line:column. Never a traceback."""

from __future__ import annotations

import copy
import json
import re

from hypothesis import event, given, settings
from hypothesis import strategies as st

from pytest_torchcompile.errors import MatrixError

GOOD = {
    "version": 1,
    "models": {"gpt": {
        "factory": "zoo:gpt",
        "inputs": "zoo:batch",
        "loss": "zoo:batch",
        "dims": {
            "B": 2,
            "S": {"buckets": [32, 64], "max": 64},
            "H": {"min": 2, "max": 9, "multiple_of": 2},
            "T": "S + 1",
        },
    }},
    "axes": {
        "mode": ["default", "max-autotune"],
        "dynamic": ["auto"],
        "backend": ["inductor", "zoo:gpt"],
        "width": [1, 2],
    },
    "rules": [
        {"exclude": {"mode": "default", "width": 1}, "reason": "x"},
        {"xfail": {"mode": ["max-autotune"]}, "reason": "x", "until": "2030-01-01", "checks": ["compiles"]},
        {"limits": {"coverage": 0.5, "recompiles": 1}, "when": {"width": 2}},
    ],
    "strategy": {"sample": {"n": 3, "seed": 1}},
    "checks": ["compiles", "recompiles"],
}
WORDS = st.sampled_from([
    "", " ", "on", "null", "1.10", "-1", "0", "1e3", "12:30", "2030-01-01", "default", "gpt", "model", "S",
    "S + 1", "zoo:gpt", "zoo:", "os:path.join", "exclude", "limits", "full", "pairwise", "{}", "a" * 2000,
    "\u2028", "\x00", "\ud7ff", "~",
])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, max_leaves=5,
    extend=lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))
SIGNS = st.text("[]{}:,-&*!|>'\"%@`#?\n\t ", max_size=6)
MARK = re.compile(r"m\.yaml:[1-9][0-9]*:[1-9][0-9]*: [^\n]+")
quiet = settings(max_examples=200)


def attempt(project, text):
    """Load, and look at the error if there is one."""
    try:
        matrix = project.load(text)
    except MatrixError as error:
        event("refused")
        lines = str(error).split("\n")
        assert [line for line in lines if not MARK.fullmatch(line) and not line.startswith("... and ")] == []
        return
    event("accepted")
    assert matrix.cells
    assert json.dumps([entry.to_dict() for entry in matrix.models.values()])


def places(data, path=()):
    """Every place in nested data."""
    yield path
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


PLACES = [path for path in places(GOOD) if path]


def test_good(project):
    """What the others change is a matrix to begin with."""
    assert len(project.load(json.dumps(GOOD)).cells) == 3


@quiet
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "rename"]), VALUES),
                min_size=1, max_size=2))
def test_other_values(project, changes):
    """Some values, keys or whole sections are replaced by something else."""
    data = copy.deepcopy(GOOD)
    for path, how, value in changes:
        holder = data
        try:
            for key in path[:-1]:
                holder = holder[key]
            old = holder.pop(path[-1])
        except (AttributeError, KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
        if how == "replace":
            (holder.insert if isinstance(holder, list) else holder.__setitem__)(path[-1], value)
        elif how == "rename" and isinstance(holder, dict):
            holder[str(value)] = old
    attempt(project, json.dumps(data, indent=1))


@quiet
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), WORDS | SIGNS), min_size=1, max_size=4))
def test_other_text(project, cuts):
    """Some of the text is cut out, and something else is put there."""
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in GOOD.items())
    for where, length, inserted in cuts:
        start = int(where * len(text))
        text = text[:start] + inserted + text[start + length:]
    attempt(project, text)


@quiet
@given(st.binary(max_size=200))
def test_any_bytes(project, data):
    """What is no text at all."""
    attempt(project, data)
