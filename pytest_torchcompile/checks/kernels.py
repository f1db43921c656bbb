"""kernels: what Inductor generated for the cell's graphs, and how much of it.

Fewer kernels are better fusion: a limit keeps a change of the model, or of torch, from losing it unseen. Kernels are
counted in the generated code, which a cache brings too. What each reads and writes only Inductor's scheduler tells,
which a cache leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

SHOWN = 20


def measure(run: CellTrial) -> dict[str, Any]:
    """The kernels of each graph, with the operators fused in them, and the calls that no kernel was generated for.

    Beside them each call in order, with what it reads and writes, and what it keeps from memory; not of graphs that a
    cache served.
    """
    from pytest_torchcompile.gauges.kernels import aten_operators, read_kernels

    error = run.compiled.error
    graphs = [graph.to_dict() for graph in read_kernels(run.texts, aten_operators())]
    lost = [] if run.kernel_watch is None else list(run.kernel_watch.lost)
    _add_calls(graphs, run)
    _note_cached(graphs, run.compiled.seen["compiles"])
    if not lost:
        lost += _unnoted_graphs(graphs)
    if error:
        return {"raised": error.type, "graphs": graphs, "launches": None, "lost": lost}
    return {"raised": None, "graphs": graphs, "launches": _measure_launches(run), "lost": lost}


def _add_calls(graphs: list[dict[str, Any]], run: CellTrial) -> None:
    """The facts of each call of a kernel, and each generated kernel's lines in the user's code."""
    from pytest_torchcompile.lowering.kernel_records import call_facts, calls_that_move

    calls = [] if run.kernel_watch is None else run.kernel_watch.calls(run.texts)
    for number, graph in enumerate(graphs):
        of_graph = [call for call in calls if call.graph == number]
        moving = calls_that_move(of_graph)
        graph["calls"] = [call_facts(call, call in moving) for call in of_graph]
        for kernel in graph["generated"]:
            lines = dict.fromkeys(kernel["lines"])
            for call in of_graph:
                if call.name == kernel["name"]:
                    lines |= dict.fromkeys(call.places)
            kernel["lines"] = list(lines)


def _note_cached(graphs: list[dict[str, Any]], compiles: Iterable[Mapping[str, Any]]) -> None:
    """Mark the graphs whose calls are not known because a cache served them, by what the caches answered."""
    from pytest_torchcompile.layer.benchmark_result import came_from_cache

    served = {each["compile_id"] for each in compiles if came_from_cache(each["caches"])}
    for graph in graphs:
        graph["cached"] = not graph["calls"] and graph["compile_id"] in served


def _unnoted_graphs(graphs: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each graph that was generated here, and of whose kernels nothing was noted all the same."""
    for graph in graphs:
        called = any(kernel["calls"] for kernel in graph["generated"]) or graph["library"] or graph["fallbacks"]
        if called and not graph["calls"] and not graph["cached"]:
            yield (f"graph {graph['compile_id']} ({graph['stage']}) calls kernels, no cache served it, and its "
                   "scheduler told of none: what they read and write is not known")


def _measure_launches(run: CellTrial) -> dict[str, Any] | None:
    """What the GPU ran in one warm step of the first size, eagerly and compiled, loss included; None without a GPU."""
    from pytest_torchcompile.gauges.kernels import count_launches
    from pytest_torchcompile.layer.step_runner import StepRunner
    from pytest_torchcompile.oracle.training import default_loss

    # The profiler sees kernels of a GPU only.
    batch = run.calls[0].batch
    if run.side is None or not batch.is_on_cuda:
        return None
    loss = (run.loss or default_loss) if run.train else None
    section: dict[str, Any] = {"call": run.calls[0].label}
    for name, side in (("eager", run.make(None)), ("compiled", run.side)):
        side.restore()
        runner = StepRunner(side.call, side.module, loss)
        # One step before, so that what is done once is not counted.
        runner.step(batch.clone())
        # Copied before: on a GPU a copy is work, and none of the step's.
        section[name] = count_launches(partial(runner.step, batch.clone())).to_dict()
        side.restore()
    return section


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``kernels``, the most that may be generated, and ``launches``."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if (most := limits.get("launches")) is not None:
        yield from _judge_launches(section.get("launches"), most)
    if (most := limits.get("kernels")) is not None:
        yield from _judge_generated(section, most)


def _judge_generated(section: Mapping[str, Any], most: float) -> Iterator[Problem]:
    generated = sum(len(graph["generated"]) for graph in section["graphs"])
    if not section["graphs"]:
        yield Problem(f"Inductor generated nothing, so the limit of {most:g} kernels says nothing",
                      hint="only the backend inductor has kernels: give the rule `when: {backend: inductor}`")
    elif generated > most:
        lines = []
        for graph in section["graphs"]:
            place = f"graph {graph['compile_id']} ({graph['stage']})"
            lines += [f"{place}: {kernel['name']}: {', '.join(kernel['ops'])}" for kernel in graph["generated"]]
        if generated > SHOWN:
            lines[SHOWN:] = [f"and {generated - SHOWN} more"]
        yield Problem(f"kernels that Inductor generated: {generated}, at most {most:g} allowed", "\n".join(lines),
                      "what keeps operators apart is a graph break, a mutation or a library call between them; "
                      "`TORCH_LOGS=fusion` tells why two were not fused")


def _judge_launches(launches: Mapping[str, Any] | None, most: float) -> Iterator[Problem]:
    if launches is None:
        yield Problem(f"no GPU ran anything, so the limit of {most:g} launches says nothing",
                      hint="give the rule `when: {device: cuda}`")
    elif not (ran := launches["compiled"]["kernels"]):
        yield Problem(f"the profiler saw no kernel in {launches['call']}, so a limit of {most:g} says nothing")
    elif ran > most:
        names = sorted(launches["compiled"]["by_name"].items(), key=itemgetter(1), reverse=True)
        yield Problem(f"kernels that the GPU runs in a compiled step ({launches['call']}): {ran}, at most {most:g} "
                      f"allowed; eagerly {launches['eager']['kernels']}",
                      "\n".join(f"{times} x {name}" for name, times in names[:SHOWN]),
                      "`TORCH_LOGS=fusion` tells why two kernels were not fused")


def remark(section: Mapping[str, Any]) -> str:
    """How many graphs came from a cache, and could not be read; and what else could not be."""
    cached = sum(bool(graph.get("cached")) for graph in section["graphs"])
    words = list(section.get("lost", ()))
    if cached:
        served = count(cached, "graph was", "graphs were")
        words.append(f"{served} served by a cache; run once with a cold cache to see reads and writes")
    return "; ".join(words)


CHECK = Check("kernels", measure, judge, remark)
