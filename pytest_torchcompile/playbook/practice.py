"""Practice: warm-up, caches and sizes, as far as the ledgers of the report tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pytest_torchcompile.checks.recompiles import SHAPES
from pytest_torchcompile.gate.markdown import evidence, inline_code, prose, table
from pytest_torchcompile.ledger.records import Compile
from pytest_torchcompile.playbook.choice import Setting, best_setting, from_cache
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.facts import Facts, as_number

__all__ = ["cache_notes", "shape_notes", "warm_up_notes"]

ONLY_STAGES: Final = ("Only stages of the compiler were tried, which nobody runs in production: there is nothing to "
                      "warm up.")
HOW_TO_WARM_UP: Final = ("Warm up with calls of these sizes, in this order, before the first request or step: each of "
                         "them waits for a compiler.")
SERVED: Final = "not told: a cache served some of it"
"""What stands where seconds were measured with a cache that was not empty."""
KEEP_CACHES: Final = ("- Keep the folder of `TORCHINDUCTOR_CACHE_DIR` between processes and CI jobs: the look-ups that "
                      "missed are then hits.")
STATIC_RECOMPILES: Final = ("`static` compiles again for each size. Pad to a few lengths (`ShapeStabilizer`), or mark "
                            "the dimension with its range (`mark_dynamic_dims`). Only where neither can be, take "
                            "another value of `dynamic`; `dynamic=True` is discouraged.")


# warm-up


def warm_up_notes(by_model: Mapping[str, Sequence[Setting]]) -> list[str]:
    """For each model's chosen setting: the calls that compile, whether it ever ends, and what it takes."""
    rows = []
    # Without any model nothing was tried at all, stages neither.
    only_stages = bool(by_model)
    for model, settings in by_model.items():
        only_stages = only_stages and all(setting.is_stage for setting in settings)
        chosen = best_setting(settings)
        if chosen is None:
            continue
        for cell in chosen.cells:
            if cell.compiles:
                rows.append((inline_code(model), _calls_to_make(cell), _what_comes_after(cell), _compile_time(cell),
                             evidence([cell.id])))
    if only_stages:
        return [ONLY_STAGES, ""]
    if not rows:
        return ["The report has no setting that holds, so there is nothing to warm up yet.", ""]
    return [*table(("model", "warm up with", "then", "it takes", "cell"), rows), HOW_TO_WARM_UP, ""]


def _calls_to_make(cell: Facts) -> str:
    """The calls of the first pass that compiled, each once."""
    calls: dict[str, None] = {}
    for compiled in cell.compiles:
        # A compile outside of any call has no label.
        if compiled.during and not _is_repeated_call(compiled.during):
            calls[compiled.during] = None
    names = ", ".join(calls)
    if cell.axes.get("phase") == "training" or any(compiled.kind == "backward" for compiled in cell.compiles):
        names += ", forward and backward"
    return prose(names) or "any call"


def _what_comes_after(cell: Facts) -> str:
    again = [compiled for compiled in cell.compiles if compiled.during and _is_repeated_call(compiled.during)]
    if again:
        return f"the same calls still compile {count(len(again), 'time')}: no warm-up ends this"
    return "nothing compiles any more"


def _is_repeated_call(label: str) -> bool:
    """``call 2 (B=6), second time``: a comma outside of the sizes says that the call came again."""
    head, _, rest = label.partition("(")
    _, _, tail = rest.partition(")")
    return "," in head + tail


def _compile_time(cell: Facts) -> str:
    # Seconds of a kept cache beside seconds of an empty one would be compared.
    return SERVED if from_cache(cell.compiles) else readable_seconds(_total_seconds(cell.compiles))


def _total_seconds(compiles: Iterable[Compile]) -> float:
    return sum(compiled.seconds for compiled in compiles)


# caches


def cache_notes(cells: Sequence[Facts]) -> list[str]:
    """What the compile caches answered, and what a kept cache would save."""
    answers: Counter[str] = Counter()
    missed: dict[str, list[Compile]] = {}
    served: dict[str, list[Compile]] = {}
    never_cached: list[str] = []
    for cell in cells:
        for compiled in cell.compiles:
            answers.update(compiled.caches)
            # `fx miss`, `aot hit`, `fx bypass`: which cache, and what it answered.
            kinds = {answer.rpartition(" ")[2] for answer in compiled.caches}
            if "miss" in kinds:
                missed.setdefault(cell.id, []).append(compiled)
            if kinds == {"hit"}:
                served.setdefault(cell.id, []).append(compiled)
            # Inductor says so of graphs with what its cache cannot hash, such as custom passes without an id.
            if "bypass" in kinds:
                never_cached.append(cell.id)
    if not answers:
        return ["No compile of this report asked a cache.", ""]
    counted = ", ".join(f"{number} {inline_code(answer)}" for answer, number in answers.most_common())
    lines = [f"- Asked {answers.total()} times: {counted}."]
    lines += [*_mean_compile_time("with a miss", missed), *_mean_compile_time("served from a cache", served)]
    if missed:
        lines.append(KEEP_CACHES)
    if never_cached:
        lines.append(f"- Some graphs are never cached (`bypass`), so each process compiles them anew "
                     f"{evidence(never_cached)}.")
    return [*lines, ""]


def _mean_compile_time(what: str, by_cell: Mapping[str, Sequence[Compile]]) -> Iterator[str]:
    if by_cell:
        number = sum(map(len, by_cell.values()))
        mean = sum(map(_total_seconds, by_cell.values())) / number
        yield f"- {count(number, 'compile')} {what} took {readable_seconds(mean)} each {evidence(by_cell)}."


# sizes and buckets


def shape_notes(by_model: Mapping[str, Sequence[Setting]]) -> list[str]:
    """What ``dynamic`` does to each model, where the report has more than one value of it and more than one size."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for model, settings in by_model.items():
        by_value = _cells_by_dynamic(settings)
        if len(by_value) > 1:
            for value, cells in by_value.items():
                rows.append((inline_code(model), inline_code(value), *_recompiles_columns(cells),
                             evidence(cell.id for cell in cells)))
            notes += _notes_on_dynamic(model, by_value)
        every_cell: list[Facts] = []
        for setting in settings:
            every_cell += setting.cells
        notes += [*_covered_ranges(model, every_cell), *_padded_lengths(model, every_cell)]
    if not rows:
        return ["The report has no model with more than one value of `dynamic` and more than one size.", "", *notes, ""]
    return [*table(("model", "dynamic", "sizes", "recompiles", "compiles in", "cells"), rows), *notes, ""]


def _covered_ranges(model: str, cells: Sequence[Facts]) -> Iterator[str]:
    """So many graphs for all lengths up to the largest bucket (check ``shape_stability``, where it passed)."""
    by_range: dict[str, list[str]] = {}
    for cell in cells:
        # What a failing check covered is no promise.
        if not any(each.check == "shape_stability" and each.verdict == "pass" for each in cell.verdicts):
            continue
        for each in _records_of_stability(cell, "covered"):
            text = (f"{each.get('graphs')} graph(s) do for every {each.get('dim')} from {each.get('least')} to "
                    f"{each.get('most')}, padded to its bucket")
            by_range.setdefault(text, []).append(cell.id)
    for text, ids in by_range.items():
        yield f"- {inline_code(model)}: {prose(text)} {evidence(ids)}."


def _padded_lengths(model: str, cells: Sequence[Facts]) -> Iterator[str]:
    """What lengths between the buckets did when they were padded (check ``shape_stability``)."""
    served: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}
    for cell in cells:
        for each in _records_of_stability(cell, "between"):
            name = f"{each.get('dim')}={each.get('length')} to {each.get('bucket')}"
            runs_what_is_there = each.get("graphs") and not each.get("compiles") and not each.get("error")
            lengths = served if runs_what_is_there else other
            lengths.setdefault(name, []).append(cell.id)
    for lengths, what in ((served, "run what is compiled already"), (other, "do not: see the gotchas")):
        if lengths:
            # A cell that met several lengths is told of once for each.
            ids: list[str] = []
            for cells_of_length in lengths.values():
                ids += cells_of_length
            yield f"- {inline_code(model)}: lengths padded to their bucket ({prose(', '.join(lengths))}) {what} " \
                  f"{evidence(ids)}."


def _records_of_stability(cell: Facts, key: str) -> list[dict[str, Any]]:
    """A list of the check's section; what is no record is left out."""
    records = cell.section("shape_stability").get(key)
    if not isinstance(records, list):
        return []
    return [each for each in records if isinstance(each, dict)]


def _cells_by_dynamic(settings: Sequence[Setting]) -> dict[str, list[Facts]]:
    """Cells that met more than one size, by their value of ``dynamic``."""
    by_value: dict[str, list[Facts]] = {}
    # A stage of the compiler counts only where nothing else was tried.
    real = [setting for setting in settings if not setting.is_stage]
    for setting in real or settings:
        for cell in setting.cells:
            if _number_of_sizes(cell) > 1 and cell.compiles and "dynamic" in cell.axes:
                by_value.setdefault(cell.axes["dynamic"], []).append(cell)
    return by_value


def _number_of_sizes(cell: Facts) -> float:
    return as_number(cell.section("recompiles").get("sizes")) or 0


def _recompiles_columns(cells: Sequence[Facts]) -> tuple[str, str, str]:
    """The columns ``sizes``, ``recompiles`` and ``compiles in``."""
    counts = [len(cell.recompiles) for cell in cells]
    times = [_total_seconds(cell.compiles) for cell in cells if not from_cache(cell.compiles)]
    seconds = SERVED
    if times:
        seconds = _range_text(readable_seconds(min(times)), readable_seconds(max(times)))
    return (f"{max(map(_number_of_sizes, cells)):g}", _range_text(str(min(counts)), str(max(counts))), seconds)


def _range_text(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _notes_on_dynamic(model: str, by_value: Mapping[str, Sequence[Facts]]) -> Iterator[str]:
    most = {}
    for value, cells in by_value.items():
        most[value] = max(len(cell.recompiles) for cell in cells)
    # The other values of `dynamic` are what it is compared with.
    static = most.pop("static", None)
    if static is not None and most and static > max(most.values()):
        yield f"- {inline_code(model)}: {STATIC_RECOMPILES}"
    every_cell: list[Facts] = []
    for cells in by_value.values():
        every_cell += cells
    for (what, place), cells in _cells_by_other_cause(every_cell).items():
        values = {cell.axes["dynamic"] for cell in cells}
        if len(values) == len(by_value):
            yield f"- {inline_code(model)}: recompiles because of {prose(what)} ({inline_code(place)}), whatever " \
                  f"`dynamic` says: see the gotchas {evidence(cell.id for cell in cells)}."
    special = []
    for cell in every_cell:
        if (as_number(cell.section("recompiles").get("special")) or 0) > 0:
            special.append(cell.id)
    if special:
        yield f"- {inline_code(model)}: sizes 0 and 1 are compiled apart, whatever `dynamic` says {evidence(special)}."


def _cells_by_other_cause(cells: Sequence[Facts]) -> dict[tuple[str, str], list[Facts]]:
    """(what differed, place) to cells, of the recompiles that no size explains."""
    by_cause: dict[tuple[str, str], list[Facts]] = {}
    for cell in cells:
        causes: dict[tuple[str, str], None] = {}
        for compiled in cell.recompiles:
            if compiled.cause not in SHAPES:
                causes[compiled.what or compiled.cause, f"{compiled.file}:{compiled.line}"] = None
        for cause in causes:
            by_cause.setdefault(cause, []).append(cell)
    return by_cause
