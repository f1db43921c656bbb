"""Digests: the same data has the same one, and what differs is told by name, without giving a value away."""

from __future__ import annotations

import pytest

from pytest_torchcompile.reuse.digests import digest_of, names_that_differ, short_marks


def test_the_order_of_a_mapping_does_not_count():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})


@pytest.mark.parametrize(("one", "other"), [
    ([1, 2], [2, 1]), (1, "1"), (1, 1.5), (None, ""), ({"a": 1}, {"a": 1, "b": None}), (True, "True"),
])
def test_other_data_has_another_digest(one, other):
    assert digest_of(one) != digest_of(other)


def test_what_json_has_no_form_for_is_hashed_by_its_text():
    assert digest_of({"a": frozenset()}) == digest_of({"a": "frozenset()"})


def test_a_mark_is_short_and_moves_with_its_fact():
    before, after = short_marks({"PATH": "secret", "HOME": "h"}), short_marks({"PATH": "other", "HOME": "h"})
    assert {len(mark) for mark in before.values()} == {4}
    assert before["HOME"] == after["HOME"]
    assert before["PATH"] != after["PATH"]


@pytest.mark.parametrize(("then", "now", "clause"), [
    ({}, {}, ""),
    ({"a": "1"}, {"a": "1"}, ""),
    ({"a": "1"}, {"a": "2"}, " (a)"),
    ({"a": "1"}, {}, " (a is gone)"),
    ({}, {"a": "1"}, " (a is new)"),
    ({"c": "1", "b": "1"}, {"b": "2", "a": "1"}, " (a is new, b, c is gone)"),
])
def test_the_names_that_differ_are_told_in_order(then, now, clause):
    assert names_that_differ(then, now) == clause


def test_of_many_names_three_are_told_and_the_others_counted():
    assert names_that_differ({}, dict.fromkeys("edcba", "1")) == " (a is new, b is new, c is new, 2 more)"
