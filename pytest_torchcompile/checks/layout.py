"""layout: what eager promises to lie in memory in one way lies so compiled: strides of outputs, inputs and buffers.

A check of its own, because a stopwatch may decide: on a GPU Inductor times whether to pad a matrix product, and
autotuning picks kernels. Strides that may come of that are told and fail nothing, nor do those of gradients, which
nobody promises. The limit ``strides`` counts all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.leaf_limits import is_stride

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK"]

_PROMISED = ("output", "input", "buffer", "attribute")
"""How the leaves begin whose strides compiled code keeps (torch._inductor.config.keep_output_stride)."""


def measure(run: Trial) -> dict[str, Any]:
    """Which strides differ, by leaf, each with what may have decided by timing."""
    from pytest_torchcompile.gauges.autotune import timing_behind_stride

    devices: set[str] = set()
    for call in run.calls:
        devices.update(tensor.device.type for tensor in call.batch.tensors())
    # By leaf, not by call: the same stride in ten calls is one difference.
    strides: dict[str, dict[str, Any]] = {}
    for label, leaf in run.leaves:
        if not is_stride(leaf):
            continue
        timed = timing_behind_stride(run.settings, devices, str(leaf.eager), str(leaf.compiled))
        entry: dict[str, Any] = {"name": leaf.name, "eager": leaf.eager, "compiled": leaf.compiled, "timed": timed,
                                 "calls": []}
        strides.setdefault(leaf.name, entry)["calls"].append(label)
    error = run.compiled.error
    return {"raised": error.type if error else None, "compared": sum(leaf.kind == "value" for _, leaf in run.leaves),
            "strides": list(strides.values())}


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``strides``, how many may differ, whatever has decided."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if not section["compared"]:
        yield Problem("nothing was compared: the model has no output", hint="return a tensor")
        return
    strides = section["strides"]
    # With a limit every difference counts; without one only what torch promises, and what no timing decided.
    if "strides" in limits:
        if len(strides) > limits["strides"]:
            for each in strides:
                yield _stride_problem(each, len(strides))
        return
    for each in strides:
        if each["name"].startswith(_PROMISED) and not each["timed"]:
            yield _stride_problem(each, len(strides))


def _stride_problem(stride: Mapping[str, Any], differing: int) -> Problem:
    message = f"{stride['name']}: stride is {stride['eager']} in eager, {stride['compiled']} compiled"
    if stride["timed"]:
        message += f"; {stride['timed']} may have decided by timing"
    first, *others = stride["calls"]
    where = f"in {first}"
    if others:
        where += f", and in {len(others)} more call(s)"
    return Problem(message, where,
                   "whoever calls view() or as_strided() on it, or hands its memory on, sees the difference; "
                   f"where nobody does, allow it by the rule `- limits: {{strides: {differing}}}`")


def remark_strides(section: Mapping[str, Any]) -> str:
    """How many strides differ, and what may have decided that."""
    strides = section.get("strides", ())
    if not strides:
        return ""
    text = f"{len(strides)} stride(s) differ, which are not promised or allowed"
    timed = sorted({each["timed"] for each in strides if each["timed"]})
    if timed:
        text += f"; {' and '.join(timed)} may have decided by timing"
    return text


CHECK = Check("layout", measure, judge, remark_strides)
