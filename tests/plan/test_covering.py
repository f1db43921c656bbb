"""Covering arrays: complete, small, and the same every time."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.plan.selection import cover

ROWS = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width), min_size=1, max_size=60, unique=True))


def tuples(rows, strength):
    """Every set of `strength` values of different columns that some row has."""
    return {(columns, tuple(row[c] for c in columns))
            for row in rows for columns in combinations(range(len(row)), min(strength, len(row)))}


@given(ROWS, st.integers(1, 4))
def test_complete(rows, strength):
    """What meets in some row meets in a chosen row; no row is chosen twice, and they are in order."""
    (chosen,) = cover([rows], strength)
    assert tuples([rows[k] for k in chosen], strength) == tuples(rows, strength)
    assert chosen == sorted(set(chosen))
    assert cover([rows], strength) == [chosen]


@given(ROWS, ROWS, st.integers(1, 3))
def test_preferred_rows_first(first, second, strength):
    """A later group gives only what no row of an earlier one has."""
    second = [row for row in second if len(row) == len(first[0]) and row not in first]
    chosen, more = cover([first, second], strength)
    assert tuples([first[k] for k in chosen], strength) >= tuples(first, strength)
    both = [first[k] for k in chosen] + [second[k] for k in more]
    assert tuples(both, strength) == tuples(first + second, strength)
    covered = tuples(first, strength)
    if tuples(second, strength) <= covered:
        assert more == []


def test_small():
    """4 axes of 3 values: 9 rows are the optimum for pairs, and we stay near it."""
    rows = list(product(range(3), repeat=4))
    assert len(cover([rows])[0]) <= 12
    assert len(cover([list(product(range(2), repeat=10))])[0]) <= 12


def test_nothing_and_one():
    """No rows give none; a single one, or rows without any difference, give one."""
    assert cover([[]]) == [[]]
    assert cover([]) == []
    assert cover([[(0, 0)]]) == [[0]]
    assert cover([[()]], 2) == [[0]]
