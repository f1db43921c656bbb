"""benchmark: is it worth it? Steps of the compiled model beside eager ones, turn by turn, in the cell's own process.

Both run on one machine at one time, so that the ratio means something where seconds do not. Without a limit nothing but
vacuous timings fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, not_run, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK"]

SIGMAS = 2 * 2.576
"""The width of an interval of 99 % in standard deviations, for normal noise."""
MIB = 2**20


def measure(run: CellTrial) -> dict[str, Any]:
    """Times of a step, eager and compiled, their ratio, and the memory of a compiled step; all batches take part."""
    from pytest_torchcompile.layer.benchmark import StepRunner, benchmark_sides
    from pytest_torchcompile.oracle.losses import default_loss

    if run.compiled.error or run.side is None:
        return not_run(run)
    loss = (run.loss or default_loss) if run.train else None
    # The compiled model is the one that the run has compiled, so what is timed here is what was judged.
    eager, batches = run.make(None), [call.batch for call in run.calls]
    for side in (eager, run.side):
        side.restore()

    def make_batch(number: int) -> Any:
        return batches[number % len(batches)].value

    # At least one warm step of each size.
    warmup = max(3, len(batches))
    eager_runner = StepRunner(eager.call, eager.module, loss)
    compiled_runner = StepRunner(run.side.call, run.side.module, loss)
    timed = benchmark_sides(eager_runner, compiled_runner, make_batch, warmup=warmup)
    # Compiled over eager time; a speed-up is the inverse.
    ratio = timed.ratio
    return {
        "raised": None,
        "verdict": timed.verdict,
        "speedup": timed.speedup,
        "speedup_spread": (1 / ratio.low - 1 / ratio.high) / SIGMAS,
        "interval": [1 / ratio.high, 1 / ratio.low],
        "memory_mib": timed.compiled.peak_bytes / MIB,
        "memory_delta_mib": (timed.compiled.peak_bytes - timed.eager.peak_bytes) / MIB,
        "late_compiles": timed.late_compiles,
        "sides": {"eager": asdict(timed.eager), "compiled": asdict(timed.compiled)},
        "text": _steady_rows(str(timed)),
    }


def _steady_rows(table: str) -> str:
    """Without what was before the steady state: here the model came compiled."""
    return "\n".join(line for line in table.splitlines()[:-1] if not line.startswith("first step"))


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``speedup`` (at least) and ``memory_mib`` (at most).

    A speed-up is too small where all of its 99 % interval is: noise fails nothing.
    """
    if section["raised"]:
        yield from unjudged(section)
        return
    if section["verdict"] == "nothing was compiled":
        yield Problem("nothing ran compiled in the timed steps, so their times say nothing", section["text"])
        return
    if section["late_compiles"]:
        yield Problem(f"{section['late_compiles']} compile(s) in the timed steps: there was no steady state",
                      section["text"], "see `recompiles` and `shape_stability`")
    least, (low, high) = limits.get("speedup"), section["interval"]
    if least is not None and high < least:
        yield Problem(f"{section['speedup']:.2f} times as fast compiled (99 % interval {low:.2f} to {high:.2f}), at "
                      f"least {least:g} wanted", section["text"], "the check `kernels` shows what was fused")
    most = limits.get("memory_mib")
    if most is not None and section["memory_mib"] > most:
        yield Problem(f"a compiled step takes {section['memory_mib']:.4g} MiB at its peak, at most {most:g} allowed",
                      section["text"])


CHECK = Check("benchmark", measure, judge)
