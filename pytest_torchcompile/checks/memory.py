"""memory: what each warm step leaves behind, beside what an eager one does.

A backend that keeps outputs, activations or gradients of every call runs out of memory hours later. A step is counted
exactly, by torch's own allocators: bytes of tensors, not the size of the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

_CALLS = 4
"""Steps that are measured at a time."""
_NOISE = {"cpu": 0, "cuda": 512}
"""Bytes a step that are no growth: CUDA's allocator gives out blocks of 512."""


def measure(run: CellTrial) -> dict[str, Any]:
    """Bytes that a step of the first size leaves behind, eagerly and compiled, and how many graphs ran in one."""
    from pytest_torchcompile.ledger import observe

    if run.compiled.error or run.side is None:
        return not_run(run)
    batch = run.calls[0].batch
    device = "cuda" if batch.is_on_cuda else "cpu"
    # Eager as well: a model that keeps its outputs grows without any compiler.
    eager = _measure_growth(run, run.make(None), device)
    with observe() as seen:
        leaked = _measure_growth(run, run.side, device)
    return {"raised": None, "call": run.calls[0].label, "device": device, "graph_runs": seen.graph_runs,
            "eager_bytes": eager, "leaked_bytes": leaked}


def _measure_growth(run: CellTrial, side: Side, device: str) -> int:
    from pytest_torchcompile.gauges.memory import memory_growth
    from pytest_torchcompile.layer.step_runner import StepRunner
    from pytest_torchcompile.oracle.training import default_loss

    loss = (run.loss or default_loss) if run.train else None
    side.restore()
    runner = StepRunner(side.call, side.module, loss)
    growth = memory_growth(partial(_take_step, runner, run.calls[0].batch), device, calls=_CALLS)
    side.restore()
    return max(0, round(growth))


def _take_step(runner: Any, batch: Any) -> None:
    runner.step(batch.clone())


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``leaked_bytes``."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if not section["graph_runs"]:
        yield Problem("nothing to judge: no compiled graph ran in the steps that were measured",
                      hint="see the check `compiles` of this cell")
        return
    eager, leaked = section["eager_bytes"], section["leaked_bytes"]
    # A model that keeps something of each call, such as a cache that grows, does so eagerly too.
    most = eager + limits.get("leaked_bytes", _NOISE[section["device"]])
    if leaked > most:
        yield Problem(
            f"each step leaves {leaked:,} bytes behind, an eager one {eager:,}",
            f"warm steps of {section['call']}; at most {most:,.0f} may be left",
            "look at what the backend, or a hook that runs only with it, keeps of each call",
        )


CHECK = Check("memory", measure, judge)
