"""Costs: where the time of a run went, and how much of it no run could do without. No torch.

The floor is unique compiling: each graph once. What lies above it is compiling the same graph again in another process,
judging, and workers that wait. All figures are wall seconds of workers: a run of 60 s on two of them has 120.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from pytest_torchcompile.ledger.records import Compile
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts, as_mapping, as_number
from pytest_torchcompile.report.reading import read_report
from pytest_torchcompile.report.safe_output import harmless_text

__all__ = ["CellCost", "RunCost", "cost_lines", "costs_of_block", "measure_costs",
           "run_command", "seconds_between", "shared_graphs", "time_line"]

_DEAREST: Final = 10
"""Cells that are listed."""
_MISS: Final = "fx miss"
"""What Inductor's cache answers about a graph that it has to compile."""
_LOOKED_UP: Final = frozenset({_MISS, "fx hit"})
_COMPILED: Final = "compiled"
"""The phase of a cell in which compiled code runs; compiling is part of it."""
_WITHIN: Final = "autotuning, in these"
"""No phase of its own: seconds that other phases have counted."""
_STAGES: Final = "stages"
"""The phase in which a failure is looked for in each stage of the compiler."""


@dataclass(frozen=True)
class CellCost:
    """Where the wall seconds of one cell went. ``total`` is the sum of the others."""

    id: str
    total: float
    unique: float
    """Compiling graphs that no other cell of the run compiled, or that are dearest here."""
    repeated: float
    """Compiling graphs that another cell of the run compiled as well, though one cache could have kept them."""
    judging: float
    """Eager, float64 and noise runs, comparisons, and the calls of compiled code."""
    other: float
    """Checks with runs of their own (smoketest, fallback, fuzz), looking for the failing stage, waiting for a rank."""
    advice: str = ""
    """What would make it cheaper; empty if nothing is known."""


@dataclass(frozen=True)
class RunCost:
    """Where the time of a run went."""

    cells: tuple[CellCost, ...]
    """Cells that were run, the dearest first."""
    wall: float | None
    """Seconds from the beginning of the run to its end; None where the report does not tell."""
    workers: int
    earlier: int = 0
    """Cells whose results are of earlier runs: reused, or kept in the report."""

    @property
    def idle(self) -> float | None:
        """Seconds in which workers started, or had no cell."""
        if self.wall is None:
            return None
        return max(0.0, self.wall * self.workers - self.sum_of("total"))

    def sum_of(self, part: str) -> float:
        """The sum of one field over all cells."""
        return sum(float(getattr(cell, part)) for cell in self.cells)


def measure_costs(cells: Iterable[Facts], run: Mapping[str, Any]) -> RunCost:
    """The costs of the cells of one run. ``run``: the key ``run`` of its report, with its beginning and its end."""
    timed: list[Facts] = []
    earlier = 0
    for facts in cells:
        if _is_of_another_run(facts):
            earlier += 1
        elif facts.total_seconds:
            timed.append(facts)
    dearest = _dearest_compiles(timed)
    costs = [_cost_of_cell(facts, dearest) for facts in timed]
    costs.sort(key=lambda cost: cost.total, reverse=True)
    workers = as_number(run.get("workers")) or 1
    wall = seconds_between(run.get("started"), run.get("finished"))
    return RunCost(tuple(costs), wall, int(workers), earlier)


def _is_of_another_run(facts: Facts) -> bool:
    """Was the cell taken over from an earlier report? Its time was not spent in this run."""
    # Of some only the comparisons are of another run.
    return bool(facts.cell.get("kept") or (facts.reused and "comparisons" not in facts.reused))


def _dearest_compiles(cells: Iterable[Facts]) -> dict[str, Compile]:
    """For each graph that Inductor's cache did not have: the compile that took longest for it."""
    dearest: dict[str, Compile] = {}
    for facts in cells:
        for compiled in facts.compiles:
            for key in _missed_graphs(facts, compiled):
                if key not in dearest or compiled.seconds > dearest[key].seconds:
                    dearest[key] = compiled
    return dearest


def _missed_graphs(facts: Facts, compiled: Compile) -> list[str]:
    """The keys of the graphs that Inductor compiled, because a cache that other cells share had them not."""
    # Each rank of several has a cache of its own, which must not be shared.
    if facts.lane != "single":
        return []
    answers = zip(compiled.caches, compiled.cache_keys, strict=False)
    return [key for answer, key in answers if answer == _MISS and key]


def shared_graphs(observations: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Cell to the keys of the graphs that it has in common with another one, in the cache that cells share.

    ``observations``: by cell, as a report has them.
    """
    keys: dict[str, set[str]] = {}
    for cell, observation in observations.items():
        # Ranks after the first have caches of their own, and so has then the first.
        if observation.get("ranks"):
            continue
        compiles = as_mapping(as_mapping(observation.get("sections")).get("compiles")).get("compiles") or ()
        keys[cell] = set()
        for each in compiles:

            answers = zip(each["caches"], each["cache_keys"], strict=False)
            keys[cell].update(key for answer, key in answers if answer in _LOOKED_UP and key)
    cells_of = Counter(itertools.chain.from_iterable(keys.values()))
    shared = {}
    for cell, mine in keys.items():
        with_others = sorted(key for key in mine if cells_of[key] > 1)
        if with_others:
            shared[cell] = with_others
    return shared


def _cost_of_cell(facts: Facts, dearest: Mapping[str, Compile]) -> CellCost:
    total = facts.total_seconds or 0.0
    unique = repeated = 0.0
    for compiled in facts.compiles:
        keys = _missed_graphs(facts, compiled)
        is_repeated = bool(keys) and all(dearest[key] is not compiled for key in keys)
        if is_repeated:
            repeated += compiled.seconds
        else:
            unique += compiled.seconds
    phases = {name: seconds for name, seconds in facts.seconds.items() if name != _WITHIN}
    # A cell's compiles are part of this phase; where a check of its own compiled more, nothing is left of it.
    running = max(0.0, phases.pop(_COMPILED, 0.0) - unique - repeated)
    phases.pop(_STAGES, None)
    judging = running + sum(phases.values())
    other = max(0.0, total - unique - repeated - judging)
    return CellCost(facts.id, total, unique, repeated, judging, other, _advice(facts, total, unique, repeated, judging))


def _advice(facts: Facts, total: float, unique: float, repeated: float, judging: float) -> str:
    """One way to make a cell cheaper: the one for what is largest in it."""
    # Where that is the largest part, whatever else would help helps less.
    if facts.seconds.get(_STAGES, 0.0) > max(unique, repeated, judging):
        return "none while it fails: most of it is looking for the stage of the compiler that does"
    # From a quarter on, the waste is worth an advice of its own before anything about the cell itself.
    if repeated > total / 4:
        return "its graphs were compiled by another cell too: keep TORCHINDUCTOR_CACHE_DIR, or use fewer workers"
    if unique > total / 2:
        return _advice_on_compiling(facts)
    if judging > total / 2:
        return "fewer or smaller sizes: each is run in eager and in float64"
    return ""


def _advice_on_compiling(facts: Facts) -> str:
    """For a cell that compiles most of its time what no other cell compiles."""
    # The first recompile of a function makes its sizes dynamic, unless they are to be static.
    usual = 1
    if facts.axes.get("dynamic") == "static":
        usual = 0
    recompiles = Counter(f"{each.function} ({each.file}:{each.line})" for each in facts.recompiles)
    for function, number in recompiles.most_common(1):
        if number > usual:
            return f"{count(number, 'recompile')} of {function}: fewer sizes, or dynamic shapes"
    if not any(each.cache_keys for each in facts.compiles):
        return "a smaller model: it is traced, and no cache keeps that"
    return "a kept TORCHINDUCTOR_CACHE_DIR; else a smaller model, or aot_eager, which makes no code"


def seconds_between(started: Any, finished: Any) -> float | None:
    """Seconds between two times of a report; None where one is missing or is none."""
    try:
        begin, end = (datetime.datetime.fromisoformat(str(time)) for time in (started, finished))
        return max(0.0, (end - begin).total_seconds())
    # Not a time, or one of them without a zone.
    except (ValueError, TypeError):
        return None


def cost_lines(cost: RunCost, cores: Any = None) -> list[str]:
    """The costs as lines for a terminal. ``cores``: of the machine, where the report has them."""
    if not cost.cells:
        return [harmless_text(_why_no_cost(cost))]
    lines = [*_total_lines(cost, as_number(cores)), ""]
    title = "the dearest cells"
    width = max(map(len, [title, *(cell.id for cell in cost.cells[:_DEAREST])]))
    lines.append(f"{title:{width}}   total  unique  repeated  judging  other")
    for cell in cost.cells[:_DEAREST]:
        numbers = f"{cell.total:6.1f}  {cell.unique:6.1f}  {cell.repeated:8.1f}  {cell.judging:7.1f}  {cell.other:5.1f}"
        lines.append(f"{cell.id:{width}}  {numbers}")
        if cell.advice:
            lines.append(f"    {cell.advice}")
    return [harmless_text(line) for line in lines]


def _why_no_cost(cost: RunCost) -> str:
    """Why there is no table: of a run whose cells all are of earlier runs, or were not run."""
    wall = "" if cost.wall is None else f" The run took {cost.wall:.0f} s."
    if cost.earlier:
        return f"No cell was run: {count(cost.earlier, 'result is', 'results are')} of earlier runs.{wall}"
    return f"No cell was run, so there are no costs.{wall}"


def time_line(cost: RunCost) -> str:
    """The same in one line, without the cells."""
    parts = [f"{seconds:.0f} s {name}" for name, seconds in _parts(cost)]
    return f"time of {count(cost.workers, 'worker')}: {', '.join(parts)}"


def _total_lines(cost: RunCost, cores: float | None) -> Iterator[str]:
    on = f" on {count(int(cores), 'core')}" if cores else ""
    wall = "" if cost.wall is None else f", {cost.wall:.0f} s wall"
    yield f"{count(len(cost.cells), 'cell')}, {count(cost.workers, 'worker')}{on}{wall}"
    parts = _parts(cost)
    everything = sum(seconds for _, seconds in parts)
    for name, seconds in parts:
        share = seconds / everything if everything else 0.0
        yield f"  {seconds:8.1f} s  {share:4.0%}  {name}"


def _parts(cost: RunCost) -> list[tuple[str, float]]:
    """What the time is made of, and the seconds of each."""
    parts = [
        ("unique compiling", cost.sum_of("unique")),
        ("compiling the same again", cost.sum_of("repeated")),
        ("judging", cost.sum_of("judging")),
        ("checks with runs of their own", cost.sum_of("other")),
    ]
    if cost.idle is not None:
        parts.append(("start-up and idle workers", cost.idle))
    return parts


def costs_of_block(block: Mapping[str, Any]) -> tuple[RunCost, Any]:
    """The costs of a report's block ``compile_matrix``, and the machine's number of cores."""
    environment = as_mapping(block.get("environment"))
    cells = [Facts(cell) for cell in block.get("cells", ())]
    return measure_costs(cells, as_mapping(block.get("run"))), environment.get("cores")


def run_command(given: argparse.Namespace) -> int:
    """``pytest-torchcompile costs``."""
    cost, cores = costs_of_block(read_report(given.report).block)
    if given.json:
        print(json.dumps({**asdict(cost), "idle": cost.idle, "cores": cores}, indent=1))
        return 0
    for line in cost_lines(cost, cores):
        print(line)
    return 0
