"""shape_stability: once every size was met, nothing is compiled again, at any length that padding brings to a bucket.

Two statements. Of every cell: after the first pass over its sizes no function is compiled again. And of a cell with a
dim of buckets whose batch has token ids: ``ShapeStabilizer`` pads lengths between two buckets to the next one, and
the compiled model runs them without compiling anything: so many graphs do for all lengths up to the largest bucket, and
the dim has none beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile import dims
from pytest_torchcompile.checks.check import Check, unjudged
from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.records import Compile
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.quantity import count

if TYPE_CHECKING:
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK", "between"]


def measure(run: CellTrial) -> dict[str, Any]:
    """Recompiles after the first pass, and what lengths between the buckets did."""
    # A first pass may compile what it likes; from then on nothing is new.
    first = {call.label for call in run.calls}
    later = {passed.call.label for passed in run.passed} - first
    section: dict[str, Any] = {
        "raised": run.compiled.error.type if run.compiled.error else None,
        "sizes": len({tuple(call.sizes.values()) for call in run.calls}),
        "calls": sum(passed.call.label in later for passed in run.passed),
        "late": [each for each in run.compiled.seen["recompiles"] if each["during"] in later],
        "between": [], "unpadded": "", "covered": [],
    }
    if run.compiled.error is not None or run.side is None:
        return section
    for name, dim in run.dims.items():
        if not dim.buckets:
            continue
        _pad_and_run(run, run.side, name, dim, section)
        # A batch that can't be padded in one dim can't be in another either.
        if section["unpadded"]:
            break
        section["covered"].append({"dim": name, "least": min([*between(dim), *dim.buckets]),
                                   "most": max(dim.buckets), "largest": dim.max or max(dim.buckets),
                                   "graphs": len(run.compiled.seen["graphs"])})
    return section


def _pad_and_run(run: CellTrial, side: Side, name: str, dim: dims.Dim, section: dict[str, Any]) -> None:
    """Run lengths between the buckets of one dim, and write to ``section`` what became of each."""
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.layer.shape_stabilizer import ShapeStabilizer
    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.oracle.calls import Call

    stabilizer = ShapeStabilizer(dim.buckets)
    for length in between(dim):
        bucket = stabilizer.config.bucket(length)
        sizes = dims.first_sizes({**run.dims, name: dims.Dim(size=length)})
        try:
            batch = Batch.of(stabilizer.bucket_batch(run.batch(sizes, run.seed).value))
        except ValueError as why:
            # Nothing in it is known to be padded.
            section["unpadded"] = str(why)
            return
        of_bucket = [call.batch for call in run.calls if call.sizes.get(name) == bucket]
        wanted = _shapes_of(of_bucket[0]) if of_bucket else None
        shapes = _shapes_of(batch)
        if shapes != wanted:
            section["unpadded"] = f"padded to {bucket} it has the shapes {shapes}, a batch of that size {wanted}"
            return
        with observe(root=run.root) as seen, seen.during(f"{name}={length}, padded to {bucket}"):
            seen_call, _ = side.run(Call(0, batch, sizes), run.loss, run.train, run.seed)
        section["between"].append({
            "dim": name, "length": length, "bucket": bucket, "graphs": seen.graph_runs,
            "compiles": [each.to_dict() for each in seen.compiles],
            "error": str(seen_call.error) if seen_call.error else None,
        })


def between(dim: dims.Dim) -> list[int]:
    """Lengths just above one bucket and just below the next, as far as the dim allows them; no 0 or 1."""
    edges = [max(1, dim.min - 1), *sorted(dim.buckets)]
    # The ends of each gap: if a length between two buckets were left unpadded, these would be too.
    lengths = set()
    for low, high in pairwise(edges):
        lengths |= {_next_size(dim, low, 1), _next_size(dim, high, -1)}
    between = {length for length in lengths if 1 < length < max(dim.buckets)}
    return sorted(between.difference(dim.buckets))


def _next_size(dim: dims.Dim, size: int, step: int) -> int:
    """The nearest size above or below that the dim allows."""
    size += step
    while 1 < size < max(dim.buckets) and not dim.allows(size):
        size += step
    return size


def _shapes_of(batch: Batch) -> list[list[int]]:
    return [list(tensor.shape) for tensor in batch.tensors()]


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; ``limits`` may hold ``late_recompiles``, how many are allowed after the first pass."""
    if section["raised"]:
        yield from unjudged(section)
        return
    if not section["calls"]:
        yield Problem("nothing to judge: no size was run a second time")
    yield from _judge_late(section, limits.get("late_recompiles", 0))
    # Older reports do not say what was covered.
    for each in section.get("covered", ()):
        if each["largest"] > each["most"]:
            yield Problem(f"{each['dim']}={each['most'] + 1} to {each['largest']} fit no bucket: the largest is "
                          f"{each['most']}", hint=f"add a bucket of {each['largest']}, or lower the dim's max")
    for each in section["between"]:
        what = f"{each['dim']}={each['length']}, padded to {each['bucket']}"
        if each["error"]:
            yield Problem(f"{what}: the compiled model raised {each['error']}")
        elif not each["graphs"]:
            yield Problem(f"{what}: nothing of it ran compiled")
        for compiled in each["compiles"]:
            yield _compile_problem(compiled, f"compiled for {what}, after the bucket itself was met")


def _judge_late(section: Mapping[str, Any], most: float) -> Iterator[Problem]:
    late = section["late"]
    if len(late) <= most:
        return
    allowed = f" ({len(late)} times, {most:g} allowed)" if most else ""
    rule = f"; if it is meant, allow it by the rule `- limits: {{late_recompiles: {len(late)}}}`"
    for each in late:
        where = _call_and_pass(each["during"])
        met = count(section["sizes"], "size was", "sizes were")
        yield _compile_problem(each, f"compiled again in {where}, after all {met} met{allowed}", rule)


_PASSES: Final = {", with other values": "second", ", once more": "second", ", again": "third"}
"""How the label of a call ends (:func:`pytest_torchcompile.oracle.calls.passes_over`) to the pass that it is of."""


def _call_and_pass(label: str) -> str:
    """``call 1 (B=4), in the second pass``."""
    for suffix, number in _PASSES.items():
        if label.endswith(suffix):
            return f"{label.removesuffix(suffix)}, in the {number} pass"
    return label


def _compile_problem(compiled: Mapping[str, Any], message: str, rule: str = "") -> Problem:
    why = "a first compile"
    if compiled["reason"]:
        why = f"{compiled['cause']}: {compiled['reason']}"
    return Problem(f"{compiled['function']} is {message}", f"{compiled['file']}:{compiled['line']}  {why}",
                   recompile_advice(Compile.from_dict(dict(compiled))) + rule, compiled["file"], compiled["line"])


CHECK = Check("shape_stability", measure, judge)
