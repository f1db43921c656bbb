"""cudagraphs: where a mode or backend promises CUDA graphs, every compiled graph of a step replays one.

One more step of each size is run once all are warm, and replays are counted where they happen. Torch says nothing, or
only logs a line, where it does without: a CPU scalar, a mutated input, an operator that it takes for unsafe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import Call, Side
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]


def measure(run: CellTrial) -> dict[str, Any]:
    """Replays of each compiled graph in a step of each size, and the reasons that torch gave where it did without."""
    section: dict[str, Any] = {
        "raised": run.compiled.error.type if run.compiled.error else None,
        "functions": {graph["compile_id"]: graph["function"] for graph in run.compiled.seen["graphs"]},
        "skips": run.compiled.seen["cudagraph_skips"],
        "steps": [],
    }
    if run.compiled.error is None and run.side is not None:
        section["steps"] = [_measure_step(run, run.side, call) for call in run.calls]
    return section


def _measure_step(run: CellTrial, side: Side, call: Call) -> dict[str, Any]:
    import torch

    from pytest_torchcompile.gauges.replays import compiled_backwards, count_replays, step_begins
    from pytest_torchcompile.oracle.training import loss_of

    batch = call.batch.clone()
    # All calls were compiled and recorded before: one more step of each size is warm.
    side.restore()
    with count_replays() as seen, torch.set_grad_enabled(run.train):
        step_begins()
        output = side.call(*batch.args, **batch.kwargs)
        loss = loss_of(run.loss, output, batch.for_loss) if run.train else None
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
    # A graph that is split has a CUDA graph for each part that can have one.
    partial = [skip["reason"] for skip in section["skips"] if skip["part"]]
    worst = max(steps, key=lambda step: len(step["without"]))
    if len(worst["without"]) + len(partial) <= limits.get("uncaptured", 0):
        return
    if worst["without"]:
        yield _missing_problem(section, worst)
    if partial:
        yield Problem(f"{len(partial)} CUDA graph(s) hold only a part of their graph: the rest is launched step by "
                      "step", "\n".join(partial), "what is meant may go to the limit `uncaptured`")


def _missing_problem(section: Mapping[str, Any], step: Mapping[str, Any]) -> Problem:
    """Graphs of a step ran without a CUDA graph; torch may have said why, and where."""
    missing = step["without"]
    total = len(step["graphs"]) + step["backwards"]
    names = sorted({section["functions"].get(graph) or graph for graph in missing})
    reasons, file, line = [], "", 0
    for skip in section["skips"]:
        reason = str(skip["reason"])
        if skip["file"]:
            reason += f"  {skip['file']}:{skip['line']}"
        # The first place that torch names is the problem's.
        if skip["file"] and not file:
            file, line = skip["file"], skip["line"]
        reasons.append(reason)
    return Problem(
        f"{len(missing)} of {total} compiled graphs ran without a CUDA graph at {step['call']}: {', '.join(names)}",
        "\n".join(reasons) or "torch gave no reason",
        "keep CPU tensors and in-place changes of inputs out of the compiled part, or choose a mode "
        "without CUDA graphs; what is meant may go to the limit `uncaptured`",
        file, line)


CHECK = Check("cudagraphs", measure, judge)
