"""Costs: compiling that no run can do without, compiling that a cache could have spared, judging and waiting."""

from __future__ import annotations

import json

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.report.costs import cost_lines, measure_costs, shared_graphs, time_line
from pytest_torchcompile.report.facts import Facts


def compiled(seconds, *answers):
    """A compile, and what the cache answered about each graph: pairs of answer and key."""
    return {"function": "f", "file": "m.py", "line": 1, "compile_id": "0/0", "kind": "first", "seconds": seconds,
            "caches": [answer for answer, _ in answers], "cache_keys": [key for _, key in answers]}


def cell(name, total, compiles, *, seconds=None, backend="inductor", wrapper="none", **more):
    """A cell of a report; ``seconds`` of its phases, by default nothing but compiled code."""
    phases = seconds or {"compiled": total}
    return {"id": name, "axes": {"backend": backend, "wrapper": wrapper}, "status": "pass", "seconds": total,
            "observation": {"sections": {"compiles": {"compiles": compiles}}, "seconds": phases}, **more}


def measured(*cells, **run):
    """Costs of the cells, by id, and the whole."""
    cost = measure_costs(map(Facts, cells), run)
    return {each.id: each for each in cost.cells}, cost


def test_a_graph_that_two_cells_compile_is_unique_once():
    """The dearer one counts as needed, whichever comes first."""
    short, long = compiled(2.0, ("fx miss", "g1")), compiled(5.0, ("fx miss", "g1"))
    cells, cost = measured(cell("a", 3.0, [short]), cell("b", 6.0, [long]))
    assert (cells["a"].unique, cells["a"].repeated) == (0.0, 2.0)
    assert (cells["b"].unique, cells["b"].repeated) == (5.0, 0.0)
    assert [each.id for each in cost.cells] == ["b", "a"], "the dearest first"
    assert "was compiled by another cell" not in cells["b"].advice
    assert "TORCHINDUCTOR_CACHE_DIR" in cells["a"].advice


@pytest.mark.parametrize("answers", [
    [("fx miss", "other")],  # another graph
    [("fx hit", "g1")],  # out of the cache
    [("fx miss", "")],  # torch names no key
    [("fx miss", "g1"), ("fx miss", "other")],  # one of its graphs is nobody else's
    [("aot miss", "g1")],  # AOTAutograd's cache, whose miss makes no code
])
def test_other_compiles_are_unique(answers):
    """Only a graph that Inductor made twice is repeated."""
    cells, _ = measured(cell("a", 3.0, [compiled(2.0, *answers)]), cell("b", 6.0, [compiled(5.0, ("fx miss", "g1"))]))
    assert (cells["a"].unique, cells["a"].repeated) == (2.0, 0.0)


def recompiles_of_f(number, line=1):
    return [compiled(2.0) | {"kind": "recompile", "reason": "size", "line": line} for _ in range(number)]


TRACED = "a smaller model: it is traced, and no cache keeps that"
KEPT = "a kept TORCHINDUCTOR_CACHE_DIR; else a smaller model, or aot_eager, which makes no code"


@pytest.mark.parametrize(("first", "recompiles", "dynamic", "advice"), [
    (compiled(4.0), recompiles_of_f(2), "auto", "2 recompiles of f (m.py:1): fewer sizes, or dynamic shapes"),
    # The one that makes a size dynamic is no waste, also where there are two functions: no two sizes take less.
    (compiled(4.0), recompiles_of_f(1), "auto", TRACED),
    (compiled(4.0), recompiles_of_f(1) + recompiles_of_f(1, line=9), "auto", TRACED),
    (compiled(4.0), recompiles_of_f(1), "static", "1 recompile of f (m.py:1): fewer sizes, or dynamic shapes"),
    (compiled(4.0, ("fx miss", "g")), recompiles_of_f(1), "auto", KEPT),
])
def test_advice_where_most_is_compiling(first, recompiles, dynamic, advice):
    given = cell("a", 10.0, [first, *recompiles])
    given["axes"]["dynamic"] = dynamic
    cells, _ = measured(given)
    assert cells["a"].advice == advice


def test_ranks_share_no_cache_so_they_repeat_nothing():
    """Each rank of a cell of several has a folder of its own, because ranks that share one mix up process groups."""
    twice = [compiled(2.0, ("fx miss", "g1"))]
    cells, _ = measured(cell("a", 3.0, twice, wrapper="ddp"), cell("b", 3.0, twice))
    assert cells["a"].repeated == cells["b"].repeated == 0.0


def test_what_is_not_compiling_is_judging_or_other():
    """The parts add up to the whole; what a phase counts twice counts once."""
    seconds = {"compiled": 5.0, "eager": 1.0, "compare": 2.0, "autotuning, in these": 0.5}
    cells, cost = measured(cell("a", 10.0, [compiled(4.0)], seconds=seconds), started="2026-01-01T00:00:00+00:00",
                           finished="2026-01-01T00:00:08+00:00", workers=2)
    a = cells["a"]
    assert (a.unique, a.judging, a.other) == (4.0, 4.0, 2.0)
    assert a.unique + a.repeated + a.judging + a.other == a.total
    assert cost.idle == 8 * 2 - 10
    assert time_line(cost) == ("time of 2 workers: 4 s unique compiling, 0 s compiling the same again, 4 s judging, "
                               "2 s checks with runs of their own, 6 s start-up and idle workers")


def test_looking_for_the_failing_stage_is_no_judging():
    """A cell that fails is compiled again by each stage of the compiler; fewer sizes are no help then."""
    seconds = {"compiled": 2.0, "stages": 27.0, "compare": 3.0}
    cells, _ = measured(cell("a", 33.0, [compiled(1.0)], seconds=seconds))
    a = cells["a"]
    assert (a.unique, a.judging, a.other) == (1.0, 4.0, 28.0)
    assert a.advice == "none while it fails: most of it is looking for the stage of the compiler that does"
    slow, _ = measured(cell("a", 33.0, [compiled(1.0)], seconds=seconds | {"compare": 28.0, "stages": 2.0}))
    assert slow["a"].advice == "fewer or smaller sizes: each is run in eager and in float64"


def test_the_lines_of_a_terminal():
    """Totals with shares, then the dearest cells with what would make them cheaper."""
    _, cost = measured(
        cell("big-inductor", 10.0, [compiled(9.0, ("fx miss", "g"))], seconds={"compiled": 10.0}),
        cell("small-eager", 1.0, [], seconds={"eager": 0.75, "compiled": 0.25}, backend="eager"),
        started="2026-01-01T00:00:00+00:00", finished="2026-01-01T00:00:20+00:00")
    assert cost_lines(cost, 2) == [
        "2 cells, 1 worker on 2 cores, 20 s wall",
        "       9.0 s   45%  unique compiling",
        "       0.0 s    0%  compiling the same again",
        "       2.0 s   10%  judging",
        "       0.0 s    0%  checks with runs of their own",
        "       9.0 s   45%  start-up and idle workers",
        "",
        "the dearest cells   total  unique  repeated  judging  other",
        "big-inductor         10.0     9.0       0.0      1.0    0.0",
        "    a kept TORCHINDUCTOR_CACHE_DIR; else a smaller model, or aot_eager, which makes no code",
        "small-eager           1.0     0.0       0.0      1.0    0.0",
        "    fewer or smaller sizes: each is run in eager and in float64",
    ]


def test_cells_of_an_earlier_run_cost_this_one_nothing():
    """A report keeps the cells that were not selected; so does one whose cells were not run again."""
    cells, cost = measured(cell("kept", 5.0, [], kept=[{"checks": ["compiles"]}]), cell("run", 3.0, []))
    assert set(cells) == {"run"}
    assert cost.sum_of("total") == 3.0


@pytest.mark.parametrize(("cells", "text"), [
    ([cell("a", 5.0, [], reused={"age": 60}), cell("b", 2.0, [], reused={"age": 60})],
     "No cell was run: 2 results are of earlier runs. The run took 3 s."),
    ([cell("a", None, [])], "No cell was run, so there are no costs. The run took 3 s."),
])
def test_a_run_without_costs_says_why(cells, text):
    """All cells reused, or skipped: no table of zeros."""
    times = {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:03+00:00"}
    _, cost = measured(*cells, **times)
    assert cost_lines(cost) == [text]


@pytest.mark.parametrize("run", [{}, {"started": "2026-01-01T00:00:00+00:00", "finished": None},
                                 {"started": "soon", "finished": "2026-01-01T00:00:00+00:00"},
                                 {"started": "2026-01-01T00:00:00", "finished": "2026-01-01T00:00:00+00:00"}])
def test_a_run_of_unknown_length_has_no_idle_time(run):
    """It was killed, or its times are none: what is not known is not shown."""
    _, cost = measured(cell("a", 3.0, []), **run)
    assert cost.wall is cost.idle is None
    assert not any("idle" in line or "wall" in line for line in cost_lines(cost))


def test_the_command_reads_a_report(tmp_path, capsys):
    """A report that is none ends it with the gate's exit code 2."""
    from sample_report import sample_report

    path = tmp_path / "report.json"
    path.write_text(json.dumps(sample_report()))
    assert main(["costs", str(path)]) == 0
    assert "unique compiling" in capsys.readouterr().out
    assert main(["costs", "--json", str(path)]) == 0
    assert {"cells", "wall", "workers", "earlier", "idle", "cores"} == set(json.loads(capsys.readouterr().out))
    assert main(["costs", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_graphs_that_cells_share():
    """Found in the cache or not; for what one cell alone has nobody waits, and ranks have caches of their own."""
    cells = {
        "a": cell("a", 3.0, [compiled(2.0, ("fx miss", "g1"), ("aot miss", "h"))]),
        "b": cell("b", 3.0, [compiled(2.0, ("fx hit", "g1"), ("fx miss", "g2"), ("fx miss", ""))]),
        "c": cell("c", 3.0, [compiled(2.0, ("fx miss", "g3"), ("aot miss", "h"))]),
        "d": cell("d", 3.0, [compiled(2.0, ("fx miss", "g3"))]),
    }
    observations = {name: each["observation"] for name, each in cells.items()}
    observations["d"]["ranks"] = [{"sections": {}}]
    observations["e"] = {"sections": {"compiles": None}}
    assert shared_graphs(observations) == {"a": ["g1"], "b": ["g1"]}
