"""cudagraphs: where a mode or backend promises CUDA graphs, every compiled graph of a step replays one.

One more step of each size is run once all are warm, and replays are counted where they happen. Torch says nothing, or
only logs a line, where it does without: a CPU scalar, a mutated input, an operator that it takes for unsafe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import Call, Side
    from pytest_torchcompile.wrappers.cell_trial import CellTrial

__all__ = ["CHECK"]


def measure(run: CellTrial) -> dict[str, Any]:
    """Replays of each compiled graph in a step of each size, and the reasons that torch gave where it did without."""
    found: dict[str, Any] = {
        "raised": run.compiled.error.type if run.compiled.error else None,
        "functions": {graph["compile_id"]: graph["function"] for graph in run.compiled.seen["graphs"]},
        "skips": run.compiled.seen["cudagraph_skips"],
        "steps": [],
    }
    if run.compiled.error is None and run.side is not None:
        found["steps"] = [_step(run, run.side, call) for call in run.calls]
    return found


def _step(run: CellTrial, side: Side, call: Call) -> dict[str, Any]:
    import torch

    from pytest_torchcompile.gauges.replays import compiled_backwards, count_replays, step_begins
    from pytest_torchcompile.oracle.losses import loss_of

    batch = call.batch.clone()
    side.restore()
    with count_replays() as seen, torch.set_grad_enabled(run.train):
        step_begins()
        output = side.call(*batch.args, **batch.kwargs)
        loss = loss_of(run.loss, output, batch.value) if run.train else None
        if loss is not None and loss.requires_grad:
            seen.backwards = compiled_backwards(loss)
            loss.backward()  # type: ignore[no-untyped-call]
    side.restore()
    return {"call": call.label, **seen.to_dict(), "without": seen.without}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``uncaptured``: how much of a step may run without CUDA graphs."""
    if section["raised"]:
        yield from unjudged(section)
        return
    steps = section["steps"]
    if not any(step["graphs"] for step in steps):
        yield Problem("nothing to judge: no compiled graph ran in any step", hint="see the check `compiles`")
        return
    if idle := [step["call"] for step in steps if not step["graphs"]]:
        yield Problem(f"no compiled graph ran at {', '.join(idle)}, so there is no CUDA graph to replay",
                      hint="see the check `compiles`")
    skips = section["skips"]
    evidence = "\n".join(f"{skip['reason']}" + (f"  {skip['file']}:{skip['line']}" if skip["file"] else "")
                         for skip in skips) or "torch gave no reason"
    parts = [skip for skip in skips if skip["part"]]
    missing = max((step["without"] for step in steps), key=len)
    if len(missing) + len(parts) <= limits.get("uncaptured", 0):
        return
    if missing:
        step = next(step for step in steps if step["without"] == missing)
        total = len(step["graphs"]) + step["backwards"]
        names = sorted({section["functions"].get(name) or name for name in missing})
        first = next((skip for skip in skips if skip["file"]), None)
        yield Problem(
            f"{len(missing)} of {total} compiled graphs ran without a CUDA graph at {step['call']}: {', '.join(names)}",
            evidence, "keep CPU tensors and in-place changes of inputs out of the compiled part, or choose a mode "
            "without CUDA graphs; what is meant may go to the limit `uncaptured`",
            first["file"] if first else "", first["line"] if first else 0)
    if parts:
        yield Problem(f"{len(parts)} CUDA graph(s) hold only a part of their graph: the rest is launched step by step",
                      "\n".join(part["reason"] for part in parts),
                      "what is meant may go to the limit `uncaptured`")


CHECK = Check("cudagraphs", measure, judge)
