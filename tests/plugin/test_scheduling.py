"""CellScheduling: cells stay whole and the longest start first."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plugin.scheduler_choice import choose_scheduler, missing_internals
from pytest_torchcompile.plugin.scheduling import CellScheduling, cell_families, cell_units

ITEMS = [f"matrix/m.yaml::{cell}::{check}" for cell in ("short", "long", "new") for check in ("a", "b")]


def test_units():
    """A cell's items are one unit, the longest cell first; one never timed counts as the longest, a plain test last."""
    found = cell_units(["tests/t.py::test_x", *ITEMS], {"short": 1.0, "long": 9.0})
    assert found == [[3, 4], [5, 6], [1, 2], [0]]


def test_this_xdist_has_what_the_scheduler_is_made_of():
    """Whatever its version: else cells would be spread by another one."""
    assert missing_internals(scheduler([], [Node()]).config, None) == []


@pytest.mark.parametrize(("where", "name"), [
    ("xdist.scheduler.load.LoadScheduling", "_check_nodes_have_same_collection"),
    ("xdist.workermanage.WorkerController", "send_runtest_some"),
])
def test_another_xdist_keeps_cells_whole_too(where, name, monkeypatch):
    """One without what ours is made of spreads scopes, which are cells, and the run says so."""
    config = scheduler([], [Node()]).config
    monkeypatch.delattr(f"{where}.{name}")
    lines = []
    config.pluginmanager = SimpleNamespace(get_plugin=lambda name: SimpleNamespace(write_line=lines.append))
    chosen = choose_scheduler(config, None, {}, {}, [])
    assert type(chosen).__name__ == "LoadScopeScheduling"
    assert {chosen._split_scope(item) for item in ITEMS} == {"matrix/m.yaml::short", "matrix/m.yaml::long",
                                                             "matrix/m.yaml::new"}
    assert lines == [
        f"note: this pytest-xdist lacks {where.rpartition('.')[2]}.{name}, of which the scheduler for cells is made; "
        "cells are spread as by --dist loadscope, and the longest do not start first"]


def test_an_xdist_whose_scheduler_has_moved(monkeypatch):
    """No module, other arguments: what was found is told, and nothing is raised."""
    config = scheduler([], [Node()]).config
    with monkeypatch.context() as changed:
        changed.setitem(sys.modules, "xdist.scheduler.load", None)
        (told,) = missing_internals(config, None)
        assert told.startswith("ModuleNotFoundError: ")
    monkeypatch.setattr("xdist.scheduler.load.LoadScheduling.__init__", lambda self, config, log, hub: None)
    (told,) = missing_internals(config, None)
    assert told.startswith("TypeError: ")


class Node:
    """A worker that notes what it is sent."""

    def __init__(self):
        self.sent, self.shutting_down, self.gateway = [], False, SimpleNamespace(id="gw")

    def send_runtest_some(self, indices):
        if self.shutting_down:
            raise AssertionError("sent work to a worker that is shutting down")
        self.sent += indices

    def shutdown(self):
        self.shutting_down = True


def scheduler(items, nodes, families=None, seconds=None, graphs=None):
    config = SimpleNamespace(getoption=lambda name: {"tx": ["popen"] * len(nodes), "maxschedchunk": None}.get(name),
                             getvalue=lambda name: ["popen"] * len(nodes),
                             option=SimpleNamespace(tx=["popen"] * len(nodes)))
    made = CellScheduling(config, None, seconds or {}, families or {}, graphs or {})
    for node in nodes:
        made.add_node(node)
        made.add_node_collection(node, items)
    return made


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 4), st.randoms())
def test_every_item_runs_once_and_cells_stay_whole(sizes, count, graphs, random):
    """Whatever the sizes of the cells, the graphs that they share, and the order in which workers finish."""
    items = [f"m.yaml::cell{i}::check{j}" for i, size in enumerate(sizes) for j in range(size)]
    nodes = [Node() for _ in range(count)]
    shared = {f"cell{i}": {str(random.randrange(graphs))} for i in range(len(sizes)) if graphs}
    made = scheduler(items, nodes, graphs=shared)
    made.schedule()
    while busy := [n for n in nodes if made.node2pending[n] and (n.shutting_down or len(made.node2pending[n]) > 1)]:
        node = random.choice(busy)
        made.mark_test_complete(node, made.node2pending[node][0])
    assert made.tests_finished
    assert sorted(i for n in nodes for i in n.sent) == list(range(len(items)))
    for node in nodes:
        assert node.shutting_down
    home = {items[i].split("::")[1]: node for node in nodes for i in node.sent}
    for node in nodes:
        assert all(home[items[i].split("::")[1]] is node for i in node.sent)


def test_a_worker_that_dies_gives_its_cells_back():
    """What a dead worker had not run is run by the others; the item it was running is reported."""
    nodes = [Node(), Node()]
    made = scheduler(ITEMS * 1, nodes)
    made.schedule()
    dead = nodes[0]
    running, left = made.node2pending[dead][0], made.node2pending[dead][1:]
    assert made.remove_node(dead) == ITEMS[running]
    other = nodes[1]
    while made.node2pending[other] and (other.shutting_down or len(made.node2pending[other]) > 1):
        made.mark_test_complete(other, made.node2pending[other][0])
    assert set(left) <= set(other.sent)
    assert made.tests_finished


FAMILIES = {f"{model}{k}": model for model in "abc" for k in range(4)}
CELLS = [f"m.yaml::{cell}::check" for cell in FAMILIES]


def finish(made, node):
    """The worker has run what it was at."""
    made.mark_test_complete(node, made.node2pending[node][0])


def sent(node):
    return [CELLS[index].split("::")[1] for index in node.sent]


def test_a_worker_stays_with_the_cells_of_a_model_in_a_first_run():
    """Each begins with a model of its own, goes on with it, then with one that nobody is at; none is idle."""
    nodes = [Node(), Node()]
    made = scheduler(CELLS, nodes, FAMILIES)
    made.schedule()
    for _ in range(2):
        for node in nodes:
            finish(made, node)
    assert [sent(node) for node in nodes] == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]]
    finish(made, nodes[1])
    assert sent(nodes[1])[-1] == "c0"
    finish(made, nodes[0])
    assert sent(nodes[0])[-1] == "c3"  # a is done, and c is another's: help it from its other end


def test_timed_cells_start_longest_first_whatever_they_share():
    """What was compiled once is in the caches; then the length alone counts."""
    nodes = [Node(), Node()]
    made = scheduler(CELLS, nodes, FAMILIES, {cell: float(k) for k, cell in enumerate(FAMILIES)})
    made.schedule()
    assert [sent(node) for node in nodes] == [["c3", "c2"], ["c1", "c0"]]


def at_once(made, nodes, graphs, in_cache):
    """Graphs that two workers compile at the same time: each runs its first cell, and what ran is in the cache."""
    compiled = []
    for node in nodes:
        cells = {CELLS[index].split("::")[1] for index in made.node2pending[node][:1]}
        compiled.append({graph for cell in cells for graph in graphs[cell]} - in_cache)
    return compiled[0] & compiled[1]


def test_a_graph_is_compiled_by_one_worker_alone():
    """Followers wait for the leader while anything else is left; then their worker waits, until the leader has run."""
    graphs = {cell: {cell[0]} for cell in FAMILIES}
    nodes = [Node(), Node()]
    made = scheduler(CELLS, nodes, FAMILIES, dict.fromkeys(FAMILIES, 1.0), graphs)
    made.schedule()
    # The first worker has what shares a graph with its own cell; the second has another model.
    assert [{cell[0] for cell in sent(node)} for node in nodes] == [{sent(nodes[0])[0][0]}, {sent(nodes[1])[0][0]}]
    assert len({sent(node)[0][0] for node in nodes}) == 2
    in_cache = set()
    while not made.tests_finished:
        assert not at_once(made, nodes, graphs, in_cache)
        ready = next(node for node in nodes if may_run(made, node))
        in_cache |= graphs[CELLS[made.node2pending[ready][0]].split("::")[1]]
        finish(made, ready)
    assert sorted(sent(nodes[0]) + sent(nodes[1])) == sorted(FAMILIES)


def run_all(made, nodes):
    """Each worker runs an item as soon as it may, the first one first."""
    while not made.tests_finished:
        finish(made, next(node for node in nodes if may_run(made, node)))


def may_run(made, node):
    """Has the worker an item, and knows it what comes next?"""
    return len(made.node2pending[node]) > (not node.shutting_down)


ALIKE = ("one", "two", "three", "four")
"""Cells that share a graph."""


@pytest.mark.parametrize("checks", ["a", "ab"])
def test_a_worker_waits_for_the_leader_and_goes_on(checks):
    """All cells share one graph: the second worker begins when the leader's first item is done."""
    items = [f"m.yaml::{cell}::{check}" for cell in ALIKE for check in checks]
    nodes = [Node(), Node()]
    made = scheduler(items, nodes, {}, dict.fromkeys(ALIKE, 1.0), dict.fromkeys(ALIKE, "k"))
    made.schedule()
    # Of single items a worker has to know the next one.
    assert [node.sent for node in nodes] == [[0, 1], []]
    finish(made, nodes[0])
    assert nodes[1].sent
    run_all(made, nodes)
    assert sorted(nodes[0].sent + nodes[1].sent) == list(range(len(items)))


def test_a_worker_that_waits_is_not_forgotten():
    """Where the leader's worker dies its cells are the other's."""
    items = [f"m.yaml::{cell}::a" for cell in ALIKE]
    nodes = [Node(), Node()]
    made = scheduler(items, nodes, {}, dict.fromkeys(ALIKE, 1.0), dict.fromkeys(ALIKE, "k"))
    made.schedule()
    assert [node.sent for node in nodes] == [[0, 1], []]
    assert made.remove_node(nodes[0]) == items[0]
    run_all(made, nodes[1:])
    assert sorted(nodes[1].sent) == [1, 2, 3]
    assert nodes[1].shutting_down


def test_families_of_cells():
    """Mode, dynamic, backend and wrapper leave the graphs' family; model, dtype, device, phase and user axes do not."""
    cells = [Cell(model="m"), Cell(model="m", mode="max-autotune", wrapper="autocast", dynamic="static"),
             Cell(model="m", dtype="bfloat16"), Cell(model="n"), Cell(model="m", phase="inference"),
             Cell(model="m", user=(("width", 3),))]
    found = cell_families([PlannedCell(cell) for cell in cells])
    assert len(found) == len(cells)
    names = list(found.values())
    assert names[0] == names[1]
    assert len(set(names)) == len(cells) - 1
