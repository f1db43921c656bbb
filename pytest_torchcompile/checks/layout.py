"""layout: what eager promises to lie in memory in one way lies so compiled: strides of outputs, inputs and buffers.

A check of its own, because a stopwatch may decide: on a GPU Inductor times whether to pad a matrix product, and
autotuning picks kernels. Strides that may come of that are told and fail nothing, nor do those of gradients, which
nobody promises. The limit ``strides`` counts all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.protocol import Check, unjudged
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.oracle.leaf import Leaf

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["CHECK", "is_stride"]

_PROMISED = ("output", "input", "buffer", "attribute")
"""How the leaves begin whose strides compiled code keeps (torch._inductor.config.keep_output_stride)."""


def is_stride(leaf: Leaf) -> bool:
    """Whether a leaf says that strides differ; a sparse tensor for a dense one is another matter."""
    return leaf.kind == "stride" and leaf.message.startswith("stride is ")


def measure(run: Trial) -> dict[str, Any]:
    """Which strides differ, by leaf, each with what may have decided by timing."""
    from pytest_torchcompile.gauges.autotune import autotunes_kernels, pads_by_timing

    devices = {tensor.device.type for call in run.calls for tensor in call.batch.tensors()}
    tuned, padded = autotunes_kernels(run.settings), pads_by_timing(run.settings, devices)
    found: dict[str, dict[str, Any]] = {}
    for label, leaf in run.leaves:
        if not is_stride(leaf):
            continue
        timed = "autotuning" if tuned else ""
        if padded and not timed and _is_padding(str(leaf.eager), str(leaf.compiled)):
            timed = "the padding of matrix products (pad_mm)"
        entry: dict[str, Any] = {"name": leaf.name, "eager": leaf.eager, "compiled": leaf.compiled, "timed": timed,
                                 "calls": []}
        found.setdefault(leaf.name, entry)["calls"].append(label)
    error = run.compiled.error
    return {"raised": error.type if error else None, "compared": sum(leaf.kind == "value" for _, leaf in run.leaves),
            "strides": list(found.values())}


def _is_padding(eager: str, compiled: str) -> bool:
    """Whether the same axes come in the same order, with gaps between them."""
    mine, found = ast.literal_eval(eager), ast.literal_eval(compiled)
    if not isinstance(mine, tuple) or not isinstance(found, tuple) or len(mine) != len(found):
        return False
    wider = all(new >= old for old, new in zip(mine, found, strict=True))
    order = sorted(range(len(mine)), key=mine.__getitem__)
    return wider and order == sorted(range(len(found)), key=found.__getitem__)


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``strides``, how many may differ, whatever has decided."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if not section["compared"]:
        yield Problem("nothing was compared: the model has no output", hint="return a tensor")
        return
    found = section["strides"]
    if "strides" in limits:
        if len(found) > limits["strides"]:
            yield from map(_problem, found)
        return
    for each in found:
        if each["name"].startswith(_PROMISED) and not each["timed"]:
            yield _problem(each)


def _problem(found: Mapping[str, Any]) -> Problem:
    more = f", and in {len(found['calls']) - 1} more call(s)" if found["calls"][1:] else ""
    timed = f"; {found['timed']} may have decided by timing" if found["timed"] else ""
    return Problem(f"{found['name']}: stride is {found['eager']} in eager, {found['compiled']} compiled{timed}",
                   f"in {found['calls'][0]}{more}",
                   "whoever calls view() or as_strided() on it, or hands its memory on, sees the difference; "
                   "where nobody does, give a rule `limits: {strides: ...}`")


def remark(section: Mapping[str, Any]) -> str:
    """How many strides differ, and what may have decided that."""
    found = section.get("strides", ())
    if not found:
        return ""
    timed = sorted({each["timed"] for each in found if each["timed"]})
    why = f"; {' and '.join(timed)} may have decided by timing" if timed else ""
    return f"{len(found)} stride(s) differ, which are not promised or allowed{why}"


CHECK = Check("layout", measure, judge, remark)
