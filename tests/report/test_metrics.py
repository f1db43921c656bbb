"""Each metric out of sections made by hand: what is counted, what is not measured, what another version wrote."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.report.metrics import METRICS, metric_spread

FRAMES = [{"kind": kind} for kind in (*sorted(SILENT), "graph_break", "off")]

ROUTE = {"skipped": "", "refused": "", "problems": [], "cached": False, "misses": 0}
SHIPPED = [ROUTE | {"cached": True, "misses": 3}, ROUTE, ROUTE | {"problems": [{"kind": "value"}]},
           ROUTE | {"skipped": "no such route"}, ROUTE | {"refused": "a graph break"}]


@pytest.mark.parametrize(("name", "sections", "value"), [
    ("graph_breaks", {"graph_breaks": {"graph_breaks": []}}, 0),
    ("graph_breaks", {"graph_breaks": {"graph_breaks": [{}, {}]}}, 2),
    ("recompiles", {"recompiles": {"recompiles": [{}]}}, 1),
    ("silent_eager", {"compiles": {"eager_frames": []}}, 0),
    ("silent_eager", {"compiles": {"eager_frames": FRAMES}}, sum(frame["kind"] in SILENT for frame in FRAMES)),
    ("compile_seconds", {"compiles": {"compiles": []}}, 0),
    ("compile_seconds", {"compiles": {"compiles": [{"seconds": 0.1}] * 10}}, 1.0),
    ("kernels", {"kernels": {"graphs": []}}, 0),
    ("kernels", {"kernels": {"graphs": [{"generated": [1, 2]}, {"generated": []}, {"generated": [3]}]}}, 3),
    ("speedup", {"worth": {"speedup": 1.5}}, 1.5),
    ("speedup", {"worth": {"speedup": 0}}, 0),
    ("shipped_routes", {"artifacts": {"routes": SHIPPED}}, 2),
    ("cache_misses", {"artifacts": {"routes": SHIPPED}}, 3),
    ("cache_misses", {"artifacts": {"routes": SHIPPED[2:]}}, None),
    ("memory_mib", {"anything": {"memory_mib": 12.5}}, 12.5),
    ("memory_mib", {"a": {"memory_mib": None}, "b": {"memory_mib": 3}}, 3),
])
def test_what_is_measured(name, sections, value):
    assert METRICS[name].read(sections) == value


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("sections", [{}, {"numerics": {}}], ids=["no sections", "another section"])
def test_what_is_not_measured(name, sections):
    """It is None, and never zero: a limit that nothing was measured for does not hold."""
    assert METRICS[name].read(sections) is None


@pytest.mark.parametrize(("name", "value"), [
    ("speedup", "fast"), ("speedup", True), ("speedup", None), ("memory_mib", [1]), ("memory_mib", {}),
])
def test_a_number_of_another_type_is_none(name, value):
    assert METRICS[name].read({"worth": {name: value}}) is None


@pytest.mark.parametrize("value", [None, "2", 2.5, {"a": 1}])
def test_a_count_of_another_type_is_none(value):
    assert METRICS["graph_breaks"].read({"graph_breaks": {"graph_breaks": value}}) is None


@pytest.mark.parametrize(("sections", "spread"), [
    ({"worth": {"speedup": 1.5, "speedup_spread": 0.1}}, 0.1), ({"benchmark": {"speedup": 1.5}}, None), ({}, None),
    ({"worth": {"speedup_spread": True}}, None),
])
def test_the_spread_of_a_metric(sections, spread):
    assert metric_spread(sections, "speedup") == spread


def test_each_column_of_a_check_is_a_metric():
    """With its words, and the way in which it is better."""
    columns = {column.name: column for check in CHECKS.values() for column in check.columns}
    assert list(METRICS) == list(columns)
    for name, metric in METRICS.items():
        assert (metric.kind, metric.whole, metric.help) == (columns[name].kind, columns[name].whole, columns[name].help)
    assert [name for name, metric in METRICS.items() if metric.kind == "min"] == ["speedup", "shipped_routes"]
