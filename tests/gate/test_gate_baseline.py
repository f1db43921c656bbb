"""What is worse, better or gone beside an earlier run; and that a baseline never excuses anything."""

from __future__ import annotations

import datetime

import pytest
from runs import Run, compiled

from pytest_torchcompile.gate.announcement import announcement, compare_with_baseline, sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import parse_policy

TODAY = datetime.date(2026, 11, 21)
LOOSE = "version: 1\nlimits: [{graph_breaks: 9, recompiles: 9}]\n"
"""A policy under which only the baseline has something to say."""


@pytest.fixture
def before():
    return Run()


@pytest.fixture
def now():
    return Run()


def outcome(now, before, text=LOOSE):
    return gate(now.reports(), parse_policy(text.encode(), "p.yaml"), before.reports(), TODAY)


def told(found):
    return "\n".join(announcement(found))


def test_the_same_again_passes(now, before):
    found = outcome(now, before)
    assert found.code == 0
    assert not [finding for finding in found.findings if finding.kind == "baseline"]


def test_a_new_failure_comes_first_and_is_called_new(now, before):
    """An old failure is not excused by having been there."""
    for run in (now, before):
        run.breaks(now.ids[0], {"line": 3})
    assert outcome(now, before, "version: 1\n").code == 1
    now.breaks(now.ids[2], {"line": 40})
    found = outcome(now, before, "version: 1\n")
    assert sentence(found) == "FAIL: 2 models have graph breaks (gpt, net, 1 new)"
    assert [finding.cells[0] for finding in found.findings] == [now.ids[2], now.ids[0]]
    assert [finding.new for finding in found.findings] == [True, False]
    assert told(found).count("new since the baseline") == 1
    assert "held in the baseline" not in told(found)  # one cause is one finding


def test_new_graph_breaks_are_told_by_line(now, before):
    """Within the limit, but not there before."""
    before.breaks(now.ids[0])
    now.breaks(now.ids[0], {}, {"line": 30})
    now.breaks(now.ids[1], {"line": 30})
    found = outcome(now, before)
    assert found.code == 1
    assert "new graph break at models.py:30 in 2 cells: Tensor.item()" in sentence(found)


def test_an_environment_in_another_folder_has_no_new_graph_breaks(now, before):
    """Files of installed packages are compared by their paths inside of site-packages."""
    for run, folder in ((before, "/old/lib/python3.11/site-packages"), (now, "/new/lib/python3.12/site-packages")):
        run.section(run.ids[0], "graph_breaks")["graph_breaks"] = [
            {"reason": "print", "file": f"{folder}/library/model.py", "line": 7, "owner": "third_party"}]
    assert outcome(now, before).code == 0
    now.section(now.ids[0], "graph_breaks")["graph_breaks"][0]["file"] = "/new/site-packages/other/model.py"
    assert "new graph break at other/model.py:7" in sentence(outcome(now, before))


def test_a_graph_break_that_moved_is_not_new(now, before):
    """Somebody wrote a line above it."""
    before.breaks(now.ids[0], {"line": 12})
    now.breaks(now.ids[0], {"line": 14})
    assert outcome(now, before).code == 0
    now.breaks(now.ids[0], {"line": 14, "reason": "another"})
    assert outcome(now, before).code == 1


def test_a_graph_break_in_other_words_is_not_new(now, before):
    """Another torch has another reason for the same line; a second break there is new."""
    before.breaks(now.ids[0], {"line": 12, "reason": "Unsupported method call"})
    now.breaks(now.ids[0], {"line": 12, "reason": "Missing tp_iternext"})
    assert outcome(now, before).code == 0
    now.breaks(now.ids[0], {"line": 12, "reason": "Missing tp_iternext"}, {"line": 12, "reason": "print"})
    assert "new graph break at models.py:12 in 1 cell: print" in told(outcome(now, before))


def test_one_old_graph_break_stands_for_one_new_one(now, before):
    """One that moved, and another at the line that it left: one of the two is new."""
    cell = now.ids[0]
    before.breaks(cell, {"line": 10})
    now.breaks(cell, {"line": 12}, {"line": 10, "reason": "print"})
    assert "new graph break at models.py:10 in 1 cell: print" in told(outcome(now, before))
    # One that moved from the other line, and one at the first line in other words: nothing is new.
    before.breaks(cell, {"line": 10}, {"line": 20})
    now.breaks(cell, {"line": 10, "reason": "print"}, {"line": 30})
    assert outcome(now, before).code == 0


def test_new_recompiles(now, before):
    before.recompiles(now.ids[0], 1)
    now.recompiles(now.ids[0], 1)
    assert outcome(now, before).code == 0
    now.recompiles(now.ids[0], 2)
    found = outcome(now, before)
    assert found.code == 1
    assert "new recompile of Net.forward (models.py:9) in 1 cell, cause: value" in sentence(found)


@pytest.fixture
def ranks():
    """A function that makes a run of one cell of two ranks, of which rank 1 recorded other things than rank 0."""
    def made(*acts):
        run, other = Run(wrapper=["ddp"]), Run(wrapper=["ddp"])
        (cell,) = run.ids
        for act in acts:
            act(other, cell)
        run.observations[cell].ranks = [{"sections": other.observations[cell].sections, "failure": None}]
        return run

    return made


@pytest.mark.parametrize(("act", "text"), [
    (lambda run, cell: run.breaks(cell, {"line": 30}), "new graph break at models.py:30 in 1 cell: Tensor.item()"),
    (lambda run, cell: run.recompiles(cell, 1),
     "new recompile of Net.forward (models.py:9) in 1 cell, cause: value"),
])
def test_the_other_ranks_are_compared_too(ranks, act, text):
    """What rank 1 has alone is new, unless it had it."""
    found = outcome(ranks(act), ranks())
    assert text in told(found)
    assert text not in told(outcome(ranks(act), ranks(act)))
    assert text not in told(outcome(ranks(), ranks(act)))


def test_what_two_ranks_have_is_told_once(ranks):
    """A line that breaks on both is one, also where it moved."""
    def at(line):
        run = ranks(lambda other, cell: other.breaks(cell, {"line": line}))
        run.breaks(run.ids[0], {"line": line})
        return run

    assert len([each for each in outcome(at(30), ranks()).findings if "new graph break" in each.text]) == 1
    assert "new graph break" not in told(outcome(at(32), at(30)))


def test_compile_times_are_those_of_the_slowest_rank():
    """Rank 1 compiles ten times as long as it did, in one cell of many."""
    def run(slowest):
        made = Run(model=[f"m{n}" for n in range(8)], wrapper=["ddp"])
        other = Run(model=[f"m{n}" for n in range(8)], wrapper=["ddp"])
        for number, cell in enumerate(made.ids):
            other.section(cell, "compiles")["compiles"] = [compiled(slowest if number == 3 else 2.0)]
            made.observations[cell].ranks = [{"sections": other.observations[cell].sections, "failure": None}]
        return made

    found = [each.text for each in outcome(run(20.0), run(2.0)).findings if "compiles of the cell" in each.text]
    assert len(found) == 1
    assert "was 2 s and is 20 s" in found[0]


def test_cells_that_are_gone(before):
    """From the matrix, or only from what ran; a cell that was skipped then is no loss."""
    now = Run(model=["net"], backend=["inductor", "eager"])
    found = outcome(now, before)
    assert found.code == 1
    assert "2 cells that ran in the baseline are gone from the matrix" in sentence(found)
    before.skips(*before.ids[2:])
    assert outcome(now, before).code == 0


def test_a_cell_that_does_not_run_any_more(now, before):
    now.skips(now.ids[3])
    text = LOOSE + "allowed_skips: [{cells: {model: gpt}, reason: x}]\n"
    assert "1 cell that ran in the baseline is not run any more" in sentence(outcome(now, before, text))


def test_new_and_improved_cells_are_notes(before):
    now = Run(model=["net", "gpt", "moe"], backend=["inductor", "eager"])
    before.breaks(before.ids[0])
    found = outcome(now, before)
    assert found.code == 0
    assert "1 cell failed in the baseline and holds now" in told(found)
    assert "2 cells are not in the baseline" in told(found)


def test_a_policy_makes_changes_notes(now, before):
    now.recompiles(now.ids[0])
    found = outcome(now, before, LOOSE + "baseline: {recompiles: note}\n")
    assert found.code == 0
    assert "new recompile" in told(found)


def test_allowed_failures_are_allowed_beside_a_baseline(now, before):
    now.breaks(now.ids[0])
    text = "version: 1\nallowed_failures:\n- {cells: {model: net}, reason: x, issue: y, until: 2026-12-01}\n"
    assert outcome(now, before, text).code == 0


def test_a_failure_within_a_pass_rate_is_new_all_the_same(now, before):
    now.breaks(now.ids[0])
    assert gate(now.reports(), parse_policy(b"version: 1\npass_rate: {total: 0.5}\n", "p"), today=TODAY).code == 0
    assert outcome(now, before, "version: 1\npass_rate: {total: 0.5}\n").code == 1


def many(seconds, **odd):
    run = Run(size=list(range(12)))
    for k, cell in enumerate(run.ids):
        run.section(cell, "compiles")["compiles"] = [compiled(seconds * (1 + k % 3 / 50) * odd.get(f"cell{k}", 1))]
    return run


def test_slower_compiles_of_single_runs_are_a_note():
    """Their spread is known only from that between cells; a policy may have them fail."""
    found = outcome(many(2.0), many(1.0))
    assert found.code == 0
    assert "2.00 times worse than in the baseline, the median of 12 cells" in told(found)
    assert outcome(many(2.0), many(1.0), LOOSE + "baseline: {slower: fail}\n").code == 1
    assert "worse" not in told(outcome(many(1.1), many(1.0)))
    assert "worse" not in told(outcome(many(1.0), many(2.0)))


def test_one_slower_cell_stands_out():
    found = outcome(many(2.0, cell5=3), many(2.0))
    assert "size=5: seconds of all compiles of the cell was 2.08 s and is 6.24 s, 3.00 times as much" in told(found)
    assert "size=4:" not in told(found)


def test_times_of_another_machine_are_not_compared():
    now = many(9.0)
    now.environment["cpu"] = "another"
    found = outcome(now, many(1.0))
    assert found.code == 0
    assert "cpu was x86_64 and is another; times and sizes are not compared" in told(found)


@pytest.mark.parametrize(("speedup", "code"), [(1.9, 0), (1.5, 1), (2.5, 0)])
def test_slower_than_the_measured_spread_fails(now, before, speedup, code):
    """Where the section tells the spread of its repetitions, four times that is more than the spread."""
    before.section(now.ids[0], "timing").update(speedup=2.0, speedup_spread=0.05)
    now.section(now.ids[0], "timing").update(speedup=speedup, speedup_spread=0.05)
    assert outcome(now, before).code == code


def test_a_partial_baseline_is_no_baseline(now, before):
    found = gate(now.reports(), baseline=before.reports(2)[:1], today=TODAY)
    assert found.code == 2
    assert sentence(found).startswith("UNUSABLE: the baseline is partial: shard 2 of 2 is missing")


def test_the_diff_at_the_end_of_a_run(now, before):
    """``--compile-baseline``: what is worse and better, and what software moved."""
    before.environment["torch"] = "2.12.0"
    now.breaks(now.ids[0])
    lines = dict(compare_with_baseline(now.blocks()[0], before.reports()).lines)
    assert lines["torch: 2.12.0 -> 2.13.0"] == {"yellow": True}
    assert lines["new graph break at models.py:12 in 1 cell: Tensor.item()"] == {"red": True}
    same = compare_with_baseline(Run().blocks()[0], Run().reports())
    assert dict(same.lines) == {"4 cells as in the baseline": {"green": True}}


def test_the_diff_of_a_shard_misses_nothing(now, before):
    """The cells of the other shards are not gone."""
    lines = dict(compare_with_baseline(now.blocks(2)[0], before.reports()).lines)
    assert lines == {"2 cells as in the baseline": {"green": True}}
