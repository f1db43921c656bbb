"""An explanation as text for a terminal: the pipeline in a few lines, then every kernel with what it touches."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from pytest_torchcompile.explain.explanation import Explanation, calls_text, resumed_text, total_bytes
from pytest_torchcompile.explain.graph_texts import Stage
from pytest_torchcompile.explain.guards import count_kinds
from pytest_torchcompile.lowering.kernel_records import (
    KernelCall,
    Operator,
    TensorAccess,
    calls_that_move,
    readable_bytes,
    readable_shape,
    subgraph_text,
    sum_bytes,
)
from pytest_torchcompile.quantity import count, readable_seconds

__all__ = ["explanation_lines"]

_MOST: Final = 6
"""Tensors and operators of a kernel that are named; the JSON has all."""
_GRAPHS: Final = ("dynamo", "joint", "forward", "backward", "post_grad")
_PARTS: Final = ("forward", "inference", "backward")


def explanation_lines(explained: Explanation) -> Iterator[str]:
    """The whole of it."""
    graphs = sum(stage.stage == "code" for stage in explained.stages)
    breaks = f"{explained.breaks_text}, " if explained.breaks_text else ""
    yield (f"{explained.name}: {count(len(explained.compile_ids), 'frame')}, {count(graphs, 'generated graph')}, "
           f"{breaks}{calls_text(explained.kernels)}; {readable_seconds(explained.seconds)}; torch "
           f"{explained.torch_version}, {explained.settings}")
    if explained.error:
        yield f"the compiled step raised {explained.error}"
    if explained.busy:
        yield explained.busy
    for compile_id in explained.compile_ids:
        yield ""
        yield from _compile_lines(explained, compile_id)
    yield from _toolkit_lines(explained)
    yield from _eager_lines(explained)
    for text in explained.lost:
        yield f"could not be read: {text}"


def _compile_lines(explained: Explanation, compile_id: str) -> Iterator[str]:
    compiled = explained.compile_of(compile_id)
    title = f"compile {compile_id}"
    if compiled is not None:
        title += f"  {compiled.function}  {_short(f'{compiled.file}:{compiled.line}')}{resumed_text(compiled)}"
    yield title
    yield f"  stages     {_stages_text(explained, compile_id)}"
    saved = explained.saved_of(compile_id)
    if saved:
        new = [tensor for tensor in saved if not tensor.given]
        yield (f"  saved      {count(len(new), 'tensor')} of {readable_bytes(total_bytes(new))} for the backward pass; "
               f"beside them {count(len(saved) - len(new), 'input')}, in memory anyway")
    yield from _decomposition_lines(explained, compile_id)
    yield from _guard_lines(explained, compile_id)
    for part in _PARTS:
        kernels = explained.kernels_of(compile_id, part)
        if kernels:
            yield ""
            yield f"  {part}: {_sum_of(kernels)}"
            for number, kernel in enumerate(kernels, 1):
                yield from _kernel_lines(number, kernel)


def _decomposition_lines(explained: Explanation, compile_id: str) -> Iterator[str]:
    """What was taken apart, each operator once, and how much was kept."""
    operators = [operator for operator in explained.operators if operator.compile_id == compile_id]
    # A new name for the same thing is nothing to speak of: t is permute.
    apart = [operator for operator in operators if operator.by and len(operator.into) > 1]
    if not operators:
        return
    kept = sum(not operator.by for operator in operators)
    yield f"  decomposed {len(apart)} of {count(len(operators), 'operator')}; {kept} kept as they are, the rest renamed"
    times = Counter(_without_overload(operator.operator) for operator in apart)
    first = {_without_overload(operator.operator): operator for operator in reversed(apart)}
    for name, number in times.items():
        into = ", ".join(map(_without_overload, first[name].into))
        yield f"             {name}{f' x {number}' if number > 1 else ''} -> {into}"


def _toolkit_lines(explained: Explanation) -> Iterator[str]:
    """Passes with what they changed, and tables with what they would; nothing of another backend."""
    if explained.passes:
        yield ""
        yield "passes, each with the lines of code that it added and took away; the files of passes/ have the code:"
    for change in explained.passes:
        yield f"  {change.stem:<40} {change.told}"
    if explained.tables:
        yield ""
        yield "tables of decompositions, each with how many operators become more or fewer in this model:"
    for table, changes in explained.tables.items():
        listed = ", ".join(f"{_without_overload(name)} {number:+}" for name, number in changes.items())
        yield f"  {table:<10} {listed or 'changes nothing'}"


def _guard_lines(explained: Explanation, compile_id: str) -> Iterator[str]:
    guards = [guard for guard in explained.guards if guard.compile_id == compile_id]
    if not guards:
        return
    kinds = ", ".join(f"{number} {kind}" for kind, number in count_kinds(guards).items())
    cost = ""
    for compiled in explained.compiles:
        if compiled.compile_id == compile_id and compiled.guard_microseconds:
            cost = f", {compiled.guard_microseconds} µs to ask them once"
    yield f"  guards     {len(guards)}{cost}: {kinds}"
    for guard in guards:
        if guard.why:
            yield f"             {guard.text}: {guard.why}"


def _stages_text(explained: Explanation, compile_id: str) -> str:
    texts = []
    for stage in _GRAPHS:
        for found in explained.stages_of(compile_id, stage):
            texts.append(f"{stage} {_computing(found)}")
    codes = explained.stages_of(compile_id, "code")
    if codes:
        texts.append(f"code {count(sum(len(code.text.splitlines()) for code in codes), 'line')}")
    return ", ".join(texts) + " (nodes of each graph)"


def _computing(stage: Stage) -> int:
    return sum(node.target != "input" for node in stage.nodes)


def _sum_of(kernels: Sequence[KernelCall]) -> str:
    moving = calls_that_move(kernels)
    read = sum(kernel.bytes_read for kernel in moving)
    written = sum(kernel.bytes_written for kernel in moving)
    inside = sum(kernel.bytes_kept_inside for kernel in moving)
    return (f"{calls_text(kernels)}; {readable_bytes(read)} read, {readable_bytes(written)} written, "
            f"{readable_bytes(inside)} never reach memory")


def _kernel_lines(number: int, kernel: KernelCall) -> Iterator[str]:
    yield f"  {number:3} {kernel.name}"
    yield f"      {'kind':9} {_kind_text(kernel)}"
    if kernel.operators:
        yield f"      {'operators':9} {_operators_text(kernel.operators)}"
    yield f"      {'reads':9} {_tensors_text(kernel.reads)}"
    yield f"      {'writes':9} {_tensors_text(kernel.writes)}"
    if kernel.kept_inside:
        named = [f"{operator.node} {readable_bytes(operator.bytes)}" for operator in kernel.kept_inside]
        yield f"      {'inside':9} {readable_bytes(kernel.bytes_kept_inside)} never reach memory: {_cut(named)}"
    if kernel.places:
        yield f"      {'at':9} {_cut([_short(place) for place in kernel.places])}"


def _kind_text(kernel: KernelCall) -> str:
    words = [kernel.kind if not kernel.library else f"{kernel.kind} call, {kernel.library}"]
    if kernel.subgraph:
        words.append(subgraph_text(kernel))
    for outer, reduced in kernel.loops[:_MOST]:
        shown = f"loops over {_sizes(outer)}" if outer else "runs once"
        words.append(f"{shown}, reduces {_sizes(reduced)}" if reduced else shown)
    if kernel.vectorised is not None:
        words.append("vectorised" if kernel.vectorised else "not vectorised")
    if kernel.parallel is not None:
        words.append("parallel" if kernel.parallel else "one thread")
    if kernel.seconds is not None:
        words.append(f"{kernel.seconds * 1e6:.2f} µs a call")
    return "; ".join(words)


def _sizes(sizes: Iterable[int | str]) -> str:
    return " x ".join(map(str, sizes))


def _operators_text(operators: Iterable[Operator]) -> str:
    """Each ATen operator of the graph before decomposition, and what it was decomposed into, in order."""
    groups: list[tuple[str, list[str]]] = []
    for operator in operators:
        original = _without_overload(operator.original)
        if not groups or groups[-1][0] != original:
            groups.append((original, []))
        groups[-1][1].append(_without_overload(operator.target))
    texts = []
    for original, parts in groups:
        if set(parts) == {original}:
            # Several of them, each as the user wrote it: none was taken apart.
            texts.append(f"{original} x {len(parts)}" if len(parts) > 1 else original)
        else:
            texts.append(f"{original} ({', '.join(parts)})")
    return ", ".join(texts)


def _without_overload(target: str) -> str:
    """``layer_norm`` of ``aten.layer_norm.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _tensors_text(tensors: tuple[TensorAccess, ...]) -> str:
    if not tensors:
        return "nothing"
    named = []
    for tensor in tensors:
        of = f" ({tensor.of})" if tensor.of and tensor.of != tensor.name else ""
        named.append(f"{tensor.name}{of} {readable_shape(tensor.shape, tensor.dtype)} {readable_bytes(tensor.bytes)}")
    total = f"{readable_bytes(sum_bytes(tensors))}: " if len(tensors) > 1 else ""
    return total + _cut(named)


def _cut(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_MOST])
    more = len(texts) - _MOST
    return f"{shown}, {more} more" if more > 0 else shown


def _short(place: str) -> str:
    """A path from the current folder where it lies below."""
    file, _, line = place.rpartition(":")
    relative = os.path.relpath(file)
    return place if relative.startswith("..") else f"{relative}:{line}"


def _eager_lines(explained: Explanation) -> Iterator[str]:
    for failed in explained.backend_failures:
        yield ""
        yield f"backend      {_short(f'{failed.file}:{failed.line}')}  {failed.reason}"
    for found in explained.own_breaks:
        yield ""
        yield f"graph break  {_short(f'{found.file}:{found.line}')}  {found.reason}"
        if found.hint:
            # The check tries it with the model, and may say that it does not help.
            yield f"  torch's hint, not tried here (the check graph_breaks of a matrix tries it): {found.hint}"
    for eager in explained.eager_frames:
        yield ""
        yield f"ran eagerly  {eager.part}  {_short(f'{eager.file}:{eager.line}')}  {eager.reason}"
