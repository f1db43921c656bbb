"""The roofline on the page: two steps below the roof, and nothing where a report has no figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from pytest_torchcompile.page.roofline_figure import RoofPoint, roofline_figure, step_roofline

WORTH = {
    "roof": {"bandwidth": 1e10, "flops_per_second": 1e11, "share": 0.5},
    "work": {"flops": 1e8, "bytes": 4e7, "fused_bytes": 1e7},
    "sides": {"eager": {"low": 4e-3}, "compiled": {"low": 2e-3}},
}


def elements(figure, name):
    return [each for each in ElementTree.fromstring(str(figure)).iter() if each.tag.endswith(name)]


def test_an_eager_and_a_compiled_step():
    """The compiled one does more FLOPs for each byte, in half of the time."""
    figure = step_roofline(WORTH)
    titles = [each.text for each in elements(figure, "title")]
    assert titles == ["eager: 2.5 FLOPs a byte, 25 GFLOP/s", "compiled: 10 FLOPs a byte, 50 GFLOP/s"]
    eager, compiled = ((float(each.get("cx")), float(each.get("cy"))) for each in elements(figure, "circle"))
    assert compiled[0] > eager[0]
    assert compiled[1] < eager[1]


def test_a_point_on_the_roof_lies_on_the_line():
    """At the ridge the slanted part ends and the flat one begins."""
    figure = roofline_figure([RoofPoint("k", 10.0, 1e11, "compute")], 1e10, 1e11)
    (line,) = elements(figure, "polyline")
    _, ridge, _ = line.get("points").split()
    (circle,) = elements(figure, "circle")
    assert [float(part) for part in ridge.split(",")] == [float(circle.get("cx")), float(circle.get("cy"))]


def test_what_computes_nothing_stands_inside():
    figure = roofline_figure([RoofPoint("copy", 0.0, 0.0, "memory")], 1e10, 1e11)
    (circle,) = elements(figure, "circle")
    assert 0 < float(circle.get("cx")) < 460
    assert 0 < float(circle.get("cy")) < 280


def test_a_name_cannot_break_out():
    assert "<script>" not in str(roofline_figure([RoofPoint("<script>", 1.0, 1e9, "step")], 1e10, 1e11))


@pytest.mark.parametrize("worth", [
    {}, {"roof": None, "work": None}, {**WORTH, "roof": "no"}, {**WORTH, "work": {"flops": "many"}},
    {**WORTH, "sides": {}}, {**WORTH, "roof": {"bandwidth": 0, "flops_per_second": 1}},
])
def test_without_figures_there_is_no_figure(worth):
    assert step_roofline(worth) is None


def test_peaks_have_to_be_some():
    with pytest.raises(ValueError, match="bandwidth=0, flops_per_second=1: expected positive peaks"):
        roofline_figure([], 0, 1)
