"""The search for the first bad version: planted histories, three answers, and a bound on the questions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.upgrade.bisection import find_first_bad, most_questions


@pytest.mark.parametrize("versions", [2, 3, 4, 9, 17, 18, 200])
def test_every_planted_shift_is_found_exactly(versions):
    """Wherever the fault came, with at most ceil(log2(n)) questions where each is answered."""
    for first in range(1, versions):
        found = find_first_bad(range(versions), lambda version, first=first: "yes" if version >= first else "no")
        assert (found.last_good, found.first_bad, found.between) == (first - 1, first, ())
        assert len(found.answers) <= math.ceil(math.log2(max(1, versions - 1)))
        assert {0, versions - 1}.isdisjoint(found.answers)


@given(st.lists(st.sampled_from(["yes", "no", "unknown"]), max_size=40))
def test_whatever_the_history_it_says_nothing_wrong(history):
    """A fault may come and go, and versions may tell nothing: the two ends are what was answered, within the bound."""
    history = ["no", *history, "yes"]
    found = find_first_bad(range(len(history)), history.__getitem__)
    assert (history[found.last_good], history[found.first_bad]) == ("no", "yes")
    assert len(found.answers) <= most_questions(len(history)) == math.ceil(math.log2(max(1, len(history) - 1))) + 1
    assert found.between == tuple(range(found.last_good + 1, found.first_bad))
    for version in found.between:
        # What is left between was unknown, or there was no question left to ask.
        assert found.answers.get(version, "unknown") == "unknown"


def test_an_unknown_version_costs_one_question():
    """Its neighbour is asked, and the shift is found all the same."""
    history = ["no", "no", "no", "unknown", "yes", "yes", "yes"]
    found = find_first_bad(range(7), history.__getitem__)
    assert (found.last_good, found.first_bad, found.between) == (2, 4, (3,))
    assert found.answers == {3: "unknown", 2: "no", 4: "yes"}
    nothing = find_first_bad(range(3), lambda version: "unknown")
    assert (nothing.last_good, nothing.first_bad, nothing.between) == (0, 2, (1,))


def test_one_version_is_no_history():
    """There must be one without the fault and one with it."""
    with pytest.raises(ValueError, match="1 versions; expected at least one without the fault and one with it"):
        find_first_bad(["2.13.0"], lambda version: "yes")
