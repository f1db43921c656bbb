"""Ways to compile for sizes that vary: totals, break-even, padding and the winner, from plain figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_torchcompile.layer.shape_ways import Reign, ShapeExperiment, Way, default_buckets

EAGER = {8: 0.010, 12: 0.010}
STATIC = Way("static", 2, 20.0, {8: 0.002, 12: 0.002})
DYNAMIC = Way("dynamic", 1, 6.0, {8: 0.004, 12: 0.004})
SLOW = Way("auto", 2, 8.0, {8: 0.011, 12: 0.011})
BROKEN = Way("buckets", 0, 0.0, {}, error="raised RuntimeError")


def experiment(calls=100, **changes):
    facts = {"model": "net", "dim": "S", "backend": "inductor", "phase": "inference", "torch": "2.13.0",
             "traffic": {8: calls, 12: 3 * calls}, "buckets": (8, 16), "eager": EAGER,
             "ways": (STATIC, SLOW, DYNAMIC, BROKEN)}
    return ShapeExperiment(**{**facts, **changes})


@pytest.mark.parametrize(("calls", "winner"), [(100, "eager"), (500, "dynamic"), (5000, "static")])
def test_the_winner_depends_on_the_traffic(calls, winner):
    assert experiment(calls).winner == winner


def test_what_cannot_be_told_from_the_winner_is_named():
    """Intervals that overlap; without any, figures are taken as they are."""
    close = Way("auto", 1, 6.0, {8: 0.005, 12: 0.005}, least={8: 0.0035, 12: 0.0035}, most={8: 0.006, 12: 0.006})
    far = Way("buckets", 1, 6.0, {8: 0.007, 12: 0.007}, least={8: 0.0065, 12: 0.0065}, most={8: 0.008, 12: 0.008})
    dynamic = Way("dynamic", 1, 6.0, DYNAMIC.steady, least={8: 0.003, 12: 0.003}, most={8: 0.0045, 12: 0.0045})
    found = experiment(500, ways=(close, far, dynamic))
    assert (found.winner, found.rivals) == ("dynamic", ["auto"])
    assert next(found.sentences()) == (
        "Over 2000 calls: dynamic; this machine cannot tell it from auto (their 99 % intervals overlap).")
    assert found.total_range(dynamic) == pytest.approx((6 + 2000 * 0.003, 6 + 2000 * 0.0045))
    assert experiment(500).rivals == []
    read = ShapeExperiment.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (read, read.rivals) == (found, ["auto"])


def test_an_older_file_has_no_intervals():
    data = json.loads(json.dumps(experiment().to_dict()))
    for way in data["ways"]:
        del way["least"], way["most"]
    assert ShapeExperiment.from_dict(data) == experiment()


def test_break_even_from_one_to_the_next():
    """6 s are won back at 6 ms a call after 1000 calls; 14 s more at 2 ms a call after 7000."""
    found = experiment()
    assert found.reigns == [Reign(0, "eager"), Reign(1001, "dynamic"), Reign(7001, "static")]
    assert [found.pays_after(way) for way in found.tried] == [2501, None, 1001]
    assert "By the number of calls of this mix: eager, from 1001 on dynamic, from 7001 on static." in found.sentences()


def test_two_that_begin_to_pay_at_once():
    """The one with the shorter step stays."""
    same = Way("auto", 1, 6.0, {8: 0.004, 12: 0.004})
    shorter = Way("static", 1, 6.0, {8: 0.003, 12: 0.003})
    assert experiment(ways=(same, shorter)).reigns == [Reign(0, "eager"), Reign(858, "static")]


def test_padding_is_counted_over_the_traffic():
    """Sizes 8 and 12 to 8 and 16: of 8 + 3 * 16 elements 12 are padding."""
    assert experiment().padding_waste == pytest.approx(12 / 56)
    assert "Buckets 8, 16: 21% of the padded S is padding." in experiment().sentences()


def test_rows():
    rows = {row[0]: row for row in experiment().rows()}
    assert rows["eager"] == ("eager", "0", "-", "10.000 / 10.000 ms", "4.0 s", "-")
    assert rows["static"] == ("static", "2", "20.0 s", "2.000 / 2.000 ms", "20.8 s", "2501 calls")
    assert rows["auto"][-1] == "never"
    assert rows["buckets"][3] == "raised RuntimeError"


def test_what_was_given_up_and_what_never_ends_is_told():
    way = Way("static", 8, 20.0, STATIC.steady, eager_sizes=(12,), late_compiles=3)
    found = list(experiment(ways=(way,)).sentences())
    assert found[-2].startswith("static: S = 12 ran eagerly, for torch compiles one function only so often")
    assert found[-1] == "static: 3 compiles after every size was met; there is no end."


def test_why_a_way_with_open_sizes_compiles_each_time_is_told():
    """The guard, its line and the remedy, from the figures and again from their JSON."""
    why = "a guard failed 2 times, the last being (x.size()[0] // 4) == 4 (net.py:7): a loop of the code fixes it"
    found = experiment(ways=(replace(SLOW, compiles=3, recompiled=why), DYNAMIC))
    kept = ShapeExperiment.from_dict(json.loads(json.dumps(found.to_dict())))
    for each in (found, kept):
        told = [line for line in each.sentences() if "because" in line]
        assert told == [f"auto: 3 compiles for 2 sizes, because {why}."]


def test_what_compiled_nothing_is_no_winner():
    """It is eager under another name; the limit on recompiles is not why."""
    way = Way("static", 0, 0.0, {8: 0.001, 12: 0.001}, eager_sizes=(8, 12))
    found = experiment(ways=(way, SLOW))
    assert (found.winner, found.reigns) == ("eager", [Reign(0, "eager")])
    assert list(found.sentences())[-1].startswith("static: nothing ran compiled, so it says nothing; ")


def test_where_no_way_ran_nobody_wins():
    assert list(experiment(ways=(BROKEN,)).sentences()) == [
        "No way could be tried, so nothing is known of what compiling costs here."]


def test_it_comes_back_from_json():
    found = experiment()
    assert ShapeExperiment.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_buckets_hold_their_sizes():
    assert default_buckets([1, 2, 3, 16, 17]) == (1, 2, 4, 16, 32)
