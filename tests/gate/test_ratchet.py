"""--update-policy makes a policy stricter, never looser, and leaves its comments alone."""

from __future__ import annotations

import datetime

import pytest
from runs import Run

from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.gate.announcement import announcement
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.gate_command import update
from pytest_torchcompile.gate.policyfile import read_policy

TODAY = datetime.date(2026, 11, 21)
POLICY = """\
version: 1   # of the format
ran_at_least: 2
limits:
  # as few as may be
  - {when: {model: net}, recompiles: 5, graph_breaks: 3}   # net
  - graphs: 7
    when: {model: gpt}
# what we know
allowed_failures:
  - cells: {model: net, backend: inductor}   # stays
    reason: é
    issue: a/b#1
    until: 2026-12-31
    at_most: 3
  # this one is over
  - cells: {model: gpt}
    reason: |
      several
      lines
    issue: a/b#2
    until: 2026-12-31
  # a comment at the end
allowed_skips: []
"""
STRICTER = """\
version: 1   # of the format
ran_at_least: 4
limits:
  # as few as may be
  - {when: {model: net}, recompiles: 0, graph_breaks: 2}   # net
  - graphs: 1
    when: {model: gpt}
# what we know
allowed_failures:
  - cells: {model: net, backend: inductor}   # stays
    reason: é
    issue: a/b#1
    until: 2026-12-31
    at_most: 1
  # this one is over
  # a comment at the end
allowed_skips: []
"""


@pytest.fixture
def run():
    """A run with two graph breaks in one cell, which therefore also fails `compiles`."""
    made = Run()
    made.breaks(made.ids[0], {}, {"line": 20})
    made.section(made.ids[0], "compiles")["coverage"][0] |= {"share": 0.5, "outside": 2}
    return made


def judged(run, path):
    return gate(run.reports(), read_policy(path), today=TODAY)


def test_it_takes_over_what_improved(run, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(POLICY)
    assert judged(run, path).code == 1
    taken = update(judged(run, path), path)
    assert path.read_text() == STRICTER
    assert [text.rpartition(f"{path}:")[2] for text in taken] == [
        "16: allowed failure taken out: several\nlines\n (a/b#2; until 2026-12-31)", "5: recompiles: 5 -> 0",
        "5: graph_breaks: 3 -> 2", "6: graphs: 7 -> 1", "14: at_most: 3 -> 1", "2: ran_at_least: 2 -> 4"]
    assert judged(run, path).code == 0
    assert update(judged(run, path), path) == []


def test_the_last_entry_leaves_an_empty_list(tmp_path):
    path = tmp_path / "p.yaml"
    for indent in ("", "  "):
        path.write_text("version: 1\nallowed_failures:\n" + indent
                        + "- {cells: {model: net}, reason: x, issue: y, until: 2027-01-01}\nratchet: true\n")
        update(judged(Run(), path), path)
        assert path.read_text() == "version: 1\nallowed_failures:\n  []\nratchet: true\n"
        assert judged(Run(), path).code == 0


def test_what_cannot_be_edited_is_left_alone(tmp_path):
    path = tmp_path / "p.yaml"
    text = "version: 1\nallowed_failures: [{cells: {model: net}, reason: x, issue: y, until: 2027-01-01}]\n"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"p.yaml:2: the allowed failure .* take the entry out by hand"):
        update(judged(Run(), path), path)
    assert path.read_text() == text


def test_a_partial_run_takes_nothing_over(tmp_path):
    """What a missing shard needs is not known."""
    path = tmp_path / "p.yaml"
    path.write_text(POLICY)
    outcome = gate(Run().reports(2)[:1], read_policy(path), today=TODAY)
    assert not any(finding.kind == "improved" and finding.weight == "fail" for finding in outcome.findings)
    with pytest.raises(UsageError, match="not updated: the run is not whole"):
        update(outcome, path)
    assert path.read_text() == POLICY


def test_an_expired_entry_stays_for_a_person(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(POLICY.replace("2026-12-31", "2026-01-01"))
    outcome = judged(Run(), path)
    assert "expired on 2026-01-01" in "\n".join(announcement(outcome))
    update(outcome, path)
    assert path.read_text().count("until: 2026-01-01") == 2


@pytest.mark.parametrize(("ratchet", "code"), [("true", 1), ("false", 0)])
def test_loose_limits_fail_only_if_the_policy_says_so(tmp_path, ratchet, code):
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nlimits: [{{recompiles: 2}}]\nratchet: {ratchet}\n")
    outcome = judged(Run(), path)
    assert outcome.code == code
    assert f"improved: {path}:2: recompiles: 2 -> 0" in "\n".join(announcement(outcome))


ALLOWED = """\
version: 1
allowed_skips:
  - {cells: {backend: eager}, reason: no GPU here}
limits: [{recompiles: 2}]
allowed_failures:
  - {cells: {backend: eager}, reason: x, issue: y, until: 2027-01-01}
"""


@pytest.mark.parametrize("kind", ["skip", "crash"])
def test_what_was_not_judged_may_still_be_needed(tmp_path, kind):
    """A cell that was skipped, or that crashed, does not tell that it would pass, nor what it counts."""
    made = Run()
    skipped = [name for name in made.ids if "-eager-" in name]
    for name in skipped:
        made.fails(name, kind, "no GPU")
    path = tmp_path / "p.yaml"
    path.write_text(ALLOWED if kind == "skip" else ALLOWED.replace("y, until", "y, verdicts: [fail], until"))
    outcome = judged(made, path)
    assert outcome.code == (0 if kind == "skip" else 1)
    said = "\n".join(announcement(outcome))
    assert f"whether {path}:6 is still needed can't be told: {skipped[0]}" in said
    assert "improved" not in said
    assert update(outcome, path) == []


@pytest.mark.parametrize(("name", "found"), [("graph_breaks", 1), ("graphs", 3)])
def test_the_worst_rank_counts(name, found, tmp_path):
    """A limit holds for every rank, so it is not too high because it is for the first."""
    run = Run(wrapper=["ddp"])
    (cell,) = run.ids
    run.plan(cell, "run", limits={"coverage": 1.0, "graph_breaks": 1})
    other = Run(wrapper=["ddp"])
    other.breaks(cell)
    other.section(cell, "compiles")["graphs"] = [{"runs": 4}] * 3
    run.observations[cell].ranks = [{"sections": other.observations[cell].sections, "failure": None}]
    path = tmp_path / "p.yaml"
    for limit, code in ((found, 0), (found - 1, 1)):
        path.write_text(f"version: 1\nratchet: true\ngates: [shape_stability]\nlimits:\n  - {name}: {limit}\n")
        outcome = judged(run, path)
        assert not [finding for finding in outcome.findings if finding.kind == "improved"]
        assert any(finding.kind == name for finding in outcome.findings) is bool(code), outcome.findings
