"""How many graphs a history of sizes explains; tests/fuzz/test_fuzz.py holds it against torch itself."""

from __future__ import annotations

import pytest

from pytest_torchcompile.fuzz.explained import explained_graphs

HISTORIES = [  # the size of B in inputs of (B, 5); research of July 2026 on torch 2.13, confirmed by the layer's test
    ("auto", [2], [1]),
    ("auto", [2, 3], [1, 2]),
    ("auto", [2, 3, 4], [1, 2, 2]),
    ("dynamic", [2, 3, 4], [1, 1, 1]),
    ("static", [2, 3, 4, 2], [1, 2, 3, 3]),
    ("auto", [1, 2, 3], [1, 2, 2]),
    ("auto", [2, 3, 1], [1, 2, 3]),
    ("dynamic", [2, 1, 0, 1], [1, 2, 3, 3]),
    ("dynamic", [5, 10], [1, 2]),  # equal to the feature size at first: one symbol for both
    ("static", [2, 1, 2], [1, 2, 2]),
]


@pytest.mark.parametrize(("dynamic", "sizes", "expected"), HISTORIES)
def test_histories(dynamic, sizes, expected):
    """Static sizes, automatic dynamic ones, 0 and 1 apart, duck shapes."""
    assert explained_graphs(dynamic, [(size, 5) for size in sizes]) == expected


def test_one_dim_after_the_other():
    """Each dim that is first found changed costs a graph of its own."""
    assert explained_graphs("auto", [(2, 5), (3, 5), (3, 6), (4, 7)]) == [1, 2, 3, 3]


def test_inputs_of_another_rank_are_counted_apart():
    """A second input is another signature."""
    assert explained_graphs("auto", [(2, 5), (2, 5, 7), (3, 5)]) == [1, 2, 3]
