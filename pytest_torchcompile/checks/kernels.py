"""kernels: what Inductor generated for the cell's graphs, and how much of it.

Fewer kernels are better fusion: a limit keeps a change of the model, or of torch, from losing it unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.layer.benchmark import StepRunner
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

SHOWN = 20


def measure(run: CellTrial) -> dict[str, Any]:
    """The kernels of each graph, with the operators fused in them, and the calls that no kernel was generated for."""
    from pytest_torchcompile.gauges.kernels import aten_operators, read_kernels

    error = run.compiled.error
    graphs = [graph.to_dict() for graph in read_kernels(run.texts, aten_operators())]
    if error:
        return {"raised": error.type, "graphs": graphs, "launches": None}
    return {"raised": None, "graphs": graphs, "launches": _measure_launches(run)}


def _measure_launches(run: CellTrial) -> dict[str, Any] | None:
    """What the GPU ran in one warm step of the first size, eagerly and compiled, loss included; None without a GPU."""
    from pytest_torchcompile.gauges.kernels import count_launches
    from pytest_torchcompile.layer.benchmark import StepRunner
    from pytest_torchcompile.oracle.training import default_loss

    # The profiler sees kernels of a GPU only.
    batch = run.calls[0].batch
    if run.side is None or not any(tensor.is_cuda for tensor in batch.tensors()):
        return None
    loss = (run.loss or default_loss) if run.train else None
    section: dict[str, Any] = {"call": run.calls[0].label}
    for name, side in (("eager", run.make(None)), ("compiled", run.side)):
        side.restore()
        runner = StepRunner(side.call, side.module, loss)
        # One step before, so that what is done once is not counted.
        runner.step(batch.clone())
        section[name] = count_launches(partial(_take_step, runner, batch)).to_dict()
        side.restore()
    return section


def _take_step(runner: StepRunner, batch: Batch) -> None:
    runner.step(batch.clone())


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
    count = sum(len(graph["generated"]) for graph in section["graphs"])
    if not section["graphs"]:
        yield Problem(f"Inductor generated nothing, so the limit of {most:g} kernels says nothing",
                      hint="only the backend inductor has kernels: give the rule `when: {backend: inductor}`")
    elif count > most:
        lines = []
        for graph in section["graphs"]:
            place = f"graph {graph['compile_id']} ({graph['stage']})"
            lines += [f"{place}: {kernel['name']}: {', '.join(kernel['ops'])}" for kernel in graph["generated"]]
        if count > SHOWN:
            lines[SHOWN:] = [f"and {count - SHOWN} more"]
        yield Problem(f"kernels that Inductor generated: {count}, at most {most:g} allowed", "\n".join(lines),
                      "what keeps operators apart is a graph break, a mutation or a library call between them; "
                      "`TORCH_LOGS=fusion` tells why two were not fused")


def _judge_launches(launches: Mapping[str, Any] | None, most: float) -> Iterator[Problem]:
    if launches is None:
        yield Problem(f"no GPU ran anything, so the limit of {most:g} launches says nothing",
                      hint="give the rule `when: {device: cuda}`")
    elif not (count := launches["compiled"]["kernels"]):
        yield Problem(f"the profiler saw no kernel in {launches['call']}, so a limit of {most:g} says nothing")
    elif count > most:
        names = sorted(launches["compiled"]["by_name"].items(), key=itemgetter(1), reverse=True)
        yield Problem(f"kernels that the GPU runs in a compiled step ({launches['call']}): {count}, at most {most:g} "
                      f"allowed; eagerly {launches['eager']['kernels']}",
                      "\n".join(f"{times} x {name}" for name, times in names[:SHOWN]),
                      "`TORCH_LOGS=fusion` tells why two kernels were not fused")


CHECK = Check("kernels", measure, judge)
