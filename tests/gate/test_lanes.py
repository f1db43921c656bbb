"""Lanes: which a cell is of, what is judged in it, and that the gate never takes the fake one for ranks."""

from __future__ import annotations

import datetime
import re

import pytest
import yaml
from runs import Run

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.gate.announcement import run_facts, sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policy import PassRate, Policy
from pytest_torchcompile.wrappers.wrapping import LANES, Wrapping, lane_of, wrapper_of

TODAY = datetime.date(2026, 11, 21)


@pytest.mark.parametrize(("value", "lane", "ranks", "processes"), [
    ("none", "single", 1, 1), ("tp", "ranks", 2, 2), ("fsdp2@inner_blocks*4", "ranks", 4, 4),
    ("tp*fake8", "fake", 8, 1), ("fsdp2@wrap_then_compile*fake64", "fake", 64, 1),
    ("mine.parallel:wrap*fake3", "fake", 3, 1),
])
def test_lane(value, lane, ranks, processes):
    """A lane for each value of the axis; fake ranks are one process."""
    wrapping = Wrapping.read(value)
    assert (wrapping.lane, wrapping.ranks, wrapping.processes) == (lane, ranks, processes)
    assert lane_of(value) == lane in LANES
    assert wrapper_of(value) == wrapping.name


@pytest.mark.parametrize(("value", "text"), [
    ("ddp*fake8", "wrapper 'ddp' has no fake lane, found *fake8; it is for fsdp2, "),
    ("none*fake8", "wrapper 'none' has no fake lane"),
    ("tp*fake", "wrapper 'tp*fake': '' is not a number of ranks; expected for example tp*2"),
    ("fsdp2+tp*fake7", "wrapper 'fsdp2+tp' runs on 4, 6, 8, ... ranks, found *7"),
    ("tp*fakes8", "'s8' is not a number of ranks"),
])
def test_mistakes(value, text):
    """What cannot be faked is told where it is written."""
    with pytest.raises(ValueError, match=re.escape(text)):
        Wrapping.read(value)


def test_what_is_judged():
    """In the fake lane nothing that looks at a number, at time or at another rank is judged, nor even planned."""
    judged = {name for name, check in CHECKS.items() if check.applies({"phase": "training", "wrapper": "tp*fake64"})}
    assert judged == {"compiles", "graph_breaks", "recompiles"}
    assert judged < {name for name, check in CHECKS.items() if check.applies({"phase": "training", "wrapper": "tp*2"})}


def outcome(*wrappers, **policy):
    run = Run(wrapper=list(wrappers))
    run.checks = ["compiles", "graph_breaks", "recompiles"]
    return gate(run.reports(), Policy(**policy), today=TODAY)


def test_the_fake_lane_alone_is_nothing():
    """Green cells of the fake lane alone prove nothing: that is no pass."""
    found = outcome("tp*fake8", "fsdp2*fake64")
    assert found.code == 3
    assert sentence(found) == "NOTHING TO JUDGE: only cells of the fake lane hold, whose numbers mean nothing"


def test_a_wrapper_that_ran_nowhere_else_is_named():
    """Beside cells that ran, the gate says which wrappers were judged in the fake lane only."""
    found = outcome("none", "tp", "tp*fake8", "fsdp2*fake64")
    assert found.code == 0
    (note,) = (each for each in found.findings if each.kind == "lane")
    assert note.weight == "note"
    assert note.text == "fsdp2: in the fake lane only, where no number is judged; no cell holds on real ranks"
    assert note.cells == ("net-inductor-default-auto-fsdp2_fake64",)
    assert "4 ran compiled code, 2 of them in the fake lane" in run_facts(found)


def test_no_fake_lane_no_word():
    """Runs without it are told as ever."""
    found = outcome("none", "tp")
    assert not [each for each in found.findings if each.kind == "lane"]
    assert "lane" not in run_facts(found)


def test_a_policy_counts_cells_that_ran():
    """``ran_at_least`` means cells whose numbers were judged."""
    assert outcome("none", "tp*fake8", ran_at_least=1).code == 0


def test_a_lane_that_is_claimed():
    """A report can't call its fake cells real: the axes decide, and the claim is told."""
    run = Run(wrapper=["none", "tp*fake8"])
    run.checks = ["compiles", "graph_breaks", "recompiles"]
    reports = run.reports()
    for cell in reports[0].cells:
        cell["lane"] = "ranks" if "fake" in cell["id"] else "single"
    found = gate(reports, today=TODAY)
    assert found.code == 2
    assert "it is said to be of the lane ranks, and its axes say fake" in sentence(found)


def test_a_rank_that_is_not_told_of():
    """What a rank recorded can't be left out of a report: a cell on two ranks has two of them."""
    run = Run(wrapper=["none", "tp"])
    assert gate(run.reports(), today=TODAY).code == 0
    for name in run.cells:
        run.observations[name].ranks = []
    found = gate(run.reports(), today=TODAY)
    assert found.code == 2
    assert "it holds what 1 rank recorded, and its axes say 2" in sentence(found)


def test_a_skipped_cell_of_several_ranks():
    """Nobody recorded anything there."""
    run = Run(wrapper=["none", "tp"])
    run.skips(run.ids[1])
    assert not [each for each in gate(run.reports(), today=TODAY).findings if each.kind == "contradiction"]


def test_a_fake_lane_of_another_version():
    """A wrapper that this version does not know is fake where its report says so."""
    run = Run(plugin="99.0", wrapper=["tp*fake8"])
    reports = run.reports()
    for cell in reports[0].cells:
        cell["lane"], cell["axes"]["wrapper"] = "fake", "newer*fake8"
    found = gate(reports, today=TODAY)
    assert not [cell.id for cell in found.cells.values() if cell.proven]


def test_fake_cells_fill_no_pass_rate():
    """Cells that can't fail by a number don't make up for those that did."""
    fakes = [f"tp*fake{ranks}" for ranks in range(2, 40, 2)]
    policy = Policy(pass_rates=(PassRate(0.9, yaml.compose("0.9")),))
    run = Run(wrapper=["none", "tp", *fakes])
    run.breaks(run.ids[0])
    found = gate(run.reports(), policy, today=TODAY)
    assert found.code == 1
    (rate,) = (each for each in found.findings if each.kind == "pass_rate" and each.weight == "fail")
    assert rate.text == "50.0% of the 2 cells are good, 90.0% wanted"
    run = Run(wrapper=["none", "tp", *fakes])
    run.breaks(run.ids[2])
    assert gate(run.reports(), policy, today=TODAY).code == 0
