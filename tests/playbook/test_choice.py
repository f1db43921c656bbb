"""The choice of a setting, unit by unit, out of cells made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_torchcompile.playbook.choice import (
    Setting,
    best_setting,
    from_cache,
    has_verdict,
    least_slow,
    settings_by_model,
    speed_interval,
)
from pytest_torchcompile.report.facts import Facts


def cell(status: str = "pass", worth: dict[str, Any] | None = None, **axes: str) -> Facts:
    sections = {} if worth is None else {"worth": worth}
    checks = {}
    if status == "fail":
        checks = {"worth": {"verdict": "fail", "problems": [], "note": ""}}
    axes = {"model": "m", "backend": "inductor", "mode": "default", "dynamic": "auto", "wrapper": "none", **axes}
    return Facts({"id": "-".join(axes.values()), "axes": axes, "status": status, "checks": checks,
                  "observation": {"sections": sections}})


def timed(verdict: str, speedup: float) -> dict[str, Any]:
    return {"verdict": verdict, "speedup": speedup, "interval": [speedup * 0.9, speedup * 1.1]}


def settings(*cells: Facts) -> list[Setting]:
    return settings_by_model(cells)["m"]


def chosen(*cells: Facts) -> str:
    setting = best_setting(settings(*cells))
    return "none" if setting is None else str(setting)


def test_cells_are_grouped_by_what_one_chooses():
    """The dtype is what a setting has to hold for; a cell that did not run is of no setting."""
    found = settings(cell(dtype="float32"), cell(dtype="float64"), cell(mode="max-autotune"), cell("skip", mode="x"))
    assert [len(setting.cells) for setting in found] == [2, 1]


@pytest.mark.parametrize(("status", "expected"), [
    ("pass", True), ("fail", True), ("crash", True), ("skip", False), ("not_run", False)])
def test_what_a_verdict_is(status, expected):
    assert has_verdict(cell(status)) is expected


def test_of_equals_the_nearest_to_the_defaults():
    assert chosen(cell(mode="max-autotune", dynamic="static"), cell()) == "`backend=inductor`"


def test_one_cell_that_fails_takes_its_setting_out():
    assert chosen(cell(dtype="float32"), cell("crash", dtype="float64"), cell(mode="max-autotune")) \
        == "`backend=inductor, mode=max-autotune`"


def test_more_cells_go_before_more_speed():
    slow_and_broad = [cell(dtype=dtype, worth=timed("faster", 1.2)) for dtype in ("float32", "float64")]
    assert chosen(*slow_and_broad, cell(mode="max-autotune", worth=timed("faster", 3.0))) == "`backend=inductor`"


def test_the_faster_of_two():
    assert chosen(cell(worth=timed("faster", 1.2)), cell(mode="max-autotune", worth=timed("faster", 1.5))) \
        == "`backend=inductor, mode=max-autotune`"


def test_what_is_slower_is_not_chosen_nor_what_nobody_timed_beside_it():
    """Twin: with nothing timed, the second would be the choice."""
    assert chosen(cell("fail", timed("slower", 0.5)), cell(mode="max-autotune")) == "none"
    assert chosen(cell("crash"), cell(mode="max-autotune")) == "`backend=inductor, mode=max-autotune`"


def test_the_fastest_of_what_is_slower():
    found = least_slow(settings(cell("fail", timed("slower", 0.5)),
                                cell("fail", timed("slower", 0.8), mode="max-autotune")))
    assert str(found) == "`backend=inductor, mode=max-autotune`"
    assert least_slow(settings(cell(worth=timed("faster", 1.5)))) is None


def test_nobody_deploys_a_stage_of_the_compiler_or_the_fake_lane():
    assert chosen(cell(backend="aot_eager")) == "none"
    assert chosen(cell(wrapper="fsdp2*fake4")) == "none"
    assert chosen(cell()) == "`backend=inductor`"


@pytest.mark.parametrize(("worth", "interval"), [
    (None, None), ({}, None), ({"interval": [1.0, 1.2]}, (1.0, 1.2)), ({"interval": [1.0]}, None),
    ({"interval": "1.0 1.2"}, None), ({"interval": [1.0, "fast"]}, None), ({"interval": [1.0, None]}, None),
])
def test_an_interval_is_two_numbers_or_none(worth, interval):
    """A report may have been edited."""
    assert speed_interval(cell(worth=worth)) == interval


class Compiled:
    def __init__(self, *caches: str) -> None:
        self.caches = caches


@pytest.mark.parametrize(("compiles", "expected"), [
    ([], False), ([Compiled()], False), ([Compiled("fx miss", "aot bypass")], False),
    ([Compiled("fx miss"), Compiled("aot miss", "fx hit")], True),
])
def test_one_hit_of_a_cache_is_enough(compiles, expected):
    assert from_cache(compiles) is expected
