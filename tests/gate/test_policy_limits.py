"""Limits that only a policy has: the number that each bounds, and why a cell has none."""

from __future__ import annotations

import datetime

import pytest
from runs import Run, compiled

from pytest_torchcompile.gate.announcement import announcement
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policy_limits import cache_answers, worst_rank
from pytest_torchcompile.gate.policyfile import parse_policy

TODAY = datetime.date(2026, 11, 21)
RATIO = "version: 1\nlimits: [{compile_seconds_ratio: 1.5}]\n"


def one_cell(seconds=1.0, **changes):
    """A run of one cell, which has compiled once."""
    run = Run(model=["net"])
    run.section(run.ids[0], "compiles")["compiles"] = [compiled(seconds, **changes)]
    return run


def outcome(run, before=None, text=RATIO):
    baseline = None if before is None else before.reports()
    return gate(run.reports(), parse_policy(text.encode(), "p.yaml"), baseline, TODAY)


def told(run, before=None, text=RATIO):
    return "\n".join(announcement(outcome(run, before, text)))


@pytest.mark.parametrize(("now", "then", "code"), [
    (1.5, 1.0, 0), (1.51, 1.0, 1), (0.1, 1.0, 0), (0.0, 0.0, 0), (0.1, 0.0, 1),
], ids=["at the limit", "over it", "faster", "nothing took time", "nothing took time before"])
def test_the_ratio(now, then, code):
    """A run that compiled for no time is no division by zero; one that compiles at all now is infinitely worse."""
    assert outcome(one_cell(now), one_cell(then)).code == code


def test_why_a_ratio_can_not_be_judged():
    """Never a green one: each reason is told with the line of the policy."""
    now = one_cell()
    assert "compile_seconds_ratio of p.yaml:2 can't be judged for 1 cell: it needs --baseline" in told(now)
    elsewhere = one_cell()
    elsewhere.environment["cores"] = 999
    assert "the baseline is of another machine: cores was 999" in told(now, elsewhere)
    cached = one_cell(caches=["fx hit"])
    assert "the compile caches answered otherwise in the baseline" in told(now, cached)
    assert "the baseline does not have them" in told(now, Run(model=["gpt"]))
    without = one_cell()
    del without.observations[without.ids[0]].sections["compiles"]
    assert "the baseline does not have them" in told(now, without)
    for before in (None, elsewhere, cached, without):
        assert outcome(now, before).code == 2
    # That a cell of the baseline is gone is a failure by itself.
    assert outcome(now, Run(model=["gpt"])).code == 1


def test_a_number_that_no_check_of_the_matrix_measures():
    """The policy asks for kernels, and no cell counted any."""
    text = "version: 1\nlimits: [{kernels: 5, when: {model: net}}]\n"
    assert "the check kernels did not judge them" in told(one_cell(), text=text)
    memory = "version: 1\nlimits: [{kernels_share_ratio: 2}]\n"
    assert "no check of this matrix measures kernels_share" in told(one_cell(), one_cell(), memory)


def test_a_cell_that_crashed_fails_for_that_alone():
    """Nothing was measured of it, and nobody has to be told."""
    run = one_cell()
    run.fails(run.ids[0], "crash", "signal 11")
    assert outcome(run, one_cell()).code == 1
    assert "can't be judged" not in told(run, one_cell())


@pytest.mark.parametrize(("name", "values", "worst"), [
    ("compile_seconds", (1.0, 3.0, 2.0), 3.0),
    ("compile_seconds", (), None),
])
def test_the_worst_rank_counts(name, values, worst):
    """The slowest rank is the one that a user waits for."""
    ranks = [{"compiles": {"compiles": [{"seconds": seconds}]}} for seconds in values]
    assert worst_rank(ranks, name) == worst


@pytest.mark.parametrize("sections", [
    {}, {"compiles": {}}, {"compiles": None}, {"compiles": {"compiles": [{}]}}, {"compiles": {"compiles": 5}},
])
def test_sections_of_another_version_measure_nothing(sections):
    """They are no error, beside a rank that can be read."""
    assert worst_rank([sections], "compile_seconds") is None
    assert worst_rank([sections, {"compiles": {"compiles": [{"seconds": 2.0}]}}], "compile_seconds") == 2.0


def test_of_a_speedup_the_smallest_is_the_worst():
    """Its limit is one from below."""
    assert worst_rank([{"worth": {"speedup": 1.4}}, {"worth": {"speedup": 1.1}}], "speedup") == 1.1


@pytest.mark.parametrize(("caches", "answers"), [
    ([["fx hit", "aot miss"], ["fx hit"]], {"hit", "miss"}),
    ([[]], set()),
    ([None], set()),
])
def test_what_the_caches_answered(caches, answers):
    """By the answers, whichever cache gave them; a section that can't be read has none."""
    ranks = [{"compiles": {"compiles": [{"caches": each} for each in caches]}}]
    assert cache_answers(ranks) == answers
    assert cache_answers([{}]) == frozenset()
