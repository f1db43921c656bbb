"""Shards: every cell in exactly one, about equally long."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.cell import DYNAMIC, MODES, Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.selection import cells_of_shard, estimated_seconds, parse_shard

CELLS = [
    PlannedCell(Cell(model=model, backend=backend, mode=mode, dynamic=dynamic, phase=phase), outcome)
    for model, backend, mode, dynamic, phase, outcome in product(
        ("gpt", "conv"), ("inductor", "eager"), MODES, DYNAMIC, ("training", "inference"), ("run",))
]
PLANNED = st.lists(st.sampled_from(CELLS), unique_by=lambda each: each.cell.id, max_size=60)


@given(PLANNED, st.integers(1, 12), st.randoms())
def test_every_cell_is_in_one_shard(cells, of, random):
    """The shards are the cells, each once, in their order, whatever the order they come in."""
    shards = [cells_of_shard(cells, index, of) for index in range(1, of + 1)]
    ids = [each.cell.id for part in shards for each in part]
    assert sorted(ids) == sorted(each.cell.id for each in cells)
    for part in shards:
        places = [cells.index(each) for each in part]
        assert places == sorted(places)
    shuffled = random.sample(cells, len(cells))
    for index, part in enumerate(shards, start=1):
        assert {each.cell.id for each in cells_of_shard(shuffled, index, of)} == {each.cell.id for each in part}


@given(PLANNED, st.integers(1, 12))
def test_balanced(cells, of):
    """No shard takes longer than another by more than the dearest cell."""
    loads = [sum(map(estimated_seconds, cells_of_shard(cells, index, of))) for index in range(1, of + 1)]
    assert max(loads) - min(loads) <= max(map(estimated_seconds, cells), default=0) + 1e-9


@pytest.mark.parametrize("of", [2, 3, 5, 7])
def test_dearest_first(of):
    """Cheap cells fill what dear ones leave, so that shards differ by a few seconds of many hundred."""
    loads = [sum(map(estimated_seconds, cells_of_shard(CELLS, index, of))) for index in range(1, of + 1)]
    assert max(loads) - min(loads) <= min(map(estimated_seconds, CELLS)) + 1


def test_kinds_are_spread():
    """Cells of each model and dynamic are in every shard: no machine has all the slow ones."""
    for index in (1, 2, 3):
        kinds = {(each.cell.model, each.cell.dynamic) for each in cells_of_shard(CELLS, index, 3)}
        assert len(kinds) == 2 * len(DYNAMIC)


def test_cost():
    """Kernels cost more than none, tuning them more yet, a skip next to nothing."""
    def of(outcome="run", **axes):
        return estimated_seconds(PlannedCell(Cell(model="m", **axes), outcome))

    assert of(outcome="skip") < of(backend="eager") < of() < of(mode="max-autotune")
    assert of(backend="someone.elses:backend") == of()
    assert of(phase="inference") < of()
    assert of(dynamic="static") < of()


def test_many_shards():
    """More shards than cells leave some empty, and ten thousand take no time."""
    sizes = [len(cells_of_shard(CELLS[:3], index, 9999)) for index in (1, 2, 3, 4, 9999)]
    assert sizes == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(("text", "expected"), [
    ("1/1", (1, 1)), ("2/8", (2, 8)), (" 8/8 ", (8, 8)), ("02/8", (2, 8)),
])
def test_parse(text, expected):
    """I/N."""
    assert parse_shard(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("9/8", "shard '9/8': there is no part 9 of 8; expected 1/8 to 8/8"),
    ("0/8", "shard '0/8': there is no part 0 of 8; expected 1/8 to 8/8"),
    ("1/0", "shard '1/0': cannot cut into 0 parts; expected 1 to 9999"),
    ("1/10000", "shard '1/10000': cannot cut into 10000 parts; expected 1 to 9999"),
    *[(text, f"shard {text!r} is not a part of a whole; expected I/N, for example 2/8")
      for text in ("", "2", "2/", "/8", "a/b", "-1/8", "1/8/2", "1 / 8", "1.0/8", "\u0661/8", "1/8\n1")],
])
def test_parse_mistakes(text, expected):
    """What is no part of a whole is told with what is expected."""
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        parse_shard(text)
