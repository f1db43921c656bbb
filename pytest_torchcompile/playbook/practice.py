"""Practice: warm-up, caches and sizes, as far as the ledgers of the report tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pytest_torchcompile.checks.recompiles import SHAPES
from pytest_torchcompile.gate.markdown import inline_code as code
from pytest_torchcompile.playbook.choice import Setting, best
from pytest_torchcompile.playbook.prose import evidence, prose, table
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.facts import Facts, as_number

__all__ = ["caches", "shapes", "warm_up"]


def warm_up(by_model: Mapping[str, Sequence[Setting]]) -> list[str]:
    """For each model's chosen setting: the calls that compile, whether it ever ends, and what it takes."""
    rows = []
    for model, of in by_model.items():
        chosen = best(of)
        for cell in chosen.cells if chosen is not None else ():
            if cell.compiles:
                rows.append((code(model), *_calls(cell), evidence([cell.id])))
    every = [setting for of in by_model.values() for setting in of]
    if every and all(setting.stage for setting in every):
        return ["Only stages of the compiler were tried, which nobody runs in production: there is nothing to warm up.",
                ""]
    if not rows:
        return ["The report has no setting that holds, so there is nothing to warm up yet.", ""]
    lines = table(("model", "warm up with", "then", "it takes", "cell"), rows)
    return [*lines, "Warm up with calls of these sizes, in this order, before the first request or step: each of them "
                    "waits for a compiler.", ""]


def _calls(cell: Facts) -> tuple[str, str, str]:
    """The calls of the first pass that compiled, what came after, and the seconds."""
    compiles = cell.compiles
    first = [c.during for c in compiles if c.during and "," not in _tail(c.during)]
    later = [c for c in compiles if c.during and "," in _tail(c.during)]
    names = list(dict.fromkeys(first))
    trains = cell.axes.get("phase") == "training" or any(c.kind == "backward" for c in compiles)
    backward = ", forward and backward" if trains else ""
    then = "nothing compiles any more" if not later else \
        f"the same calls still compile {count(len(later), 'time')}: no warm-up ends this"
    return prose(", ".join(names) + backward) or "any call", then, readable_seconds(sum(c.seconds for c in compiles))


def _tail(label: str) -> str:
    """``call 2 (B=6), second time`` without its sizes: a comma in it says that the call came again."""
    head, _, rest = label.partition("(")
    return head + rest.partition(")")[2]


def caches(cells: Sequence[Facts]) -> list[str]:
    """What the compile caches answered, and what a kept cache would save."""
    answers: Counter[str] = Counter(answer for cell in cells for c in cell.compiles for answer in c.caches)
    if not answers:
        return ["No compile of this report asked a cache.", ""]
    lines = [f"- Asked {sum(answers.values())} times: {', '.join(f'{n} {code(a)}' for a, n in answers.most_common())}."]
    missed = [(cell, c) for cell in cells for c in cell.compiles if any(a.endswith("miss") for a in c.caches)]
    served = [(cell, c) for cell in cells for c in cell.compiles
              if c.caches and all(a.endswith("hit") for a in c.caches)]
    for what, found in (("with a miss", missed), ("served from a cache", served)):
        if found:
            mean = sum(c.seconds for _, c in found) / len(found)
            lines.append(f"- {count(len(found), 'compile')} {what} took {readable_seconds(mean)} each "
                         f"{evidence(cell.id for cell, _ in found)}.")
    if missed:
        lines.append("- Keep the folder of `TORCHINDUCTOR_CACHE_DIR` between processes and CI jobs: the look-ups that "
                     "missed are then hits.")
    past = [cell.id for cell in cells if any(a.endswith("bypass") for c in cell.compiles for a in c.caches)]
    if past:
        lines.append(f"- Some graphs are never cached (`bypass`), so each process compiles them anew {evidence(past)}.")
    return [*lines, ""]


def shapes(by_model: Mapping[str, Sequence[Setting]]) -> list[str]:
    """What ``dynamic`` does to each model, where the report has more than one value of it and more than one size."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for model, of in by_model.items():
        by_value = _by_dynamic(of)
        if len(by_value) > 1:
            for value, cells in by_value.items():
                rows.append((code(model), code(value), *_recompiles(cells), evidence(c.id for c in cells)))
            notes += _note(model, by_value)
        cells = [cell for setting in of for cell in setting.cells]
        notes += [*_covered(model, cells), *_padded(model, cells)]
    if not rows:
        return ["The report has no model with more than one value of `dynamic` and more than one size.", "", *notes, ""]
    return [*table(("model", "dynamic", "sizes", "recompiles", "compiles in", "cells"), rows), *notes, ""]


def _covered(model: str, cells: Sequence[Facts]) -> Iterator[str]:
    """So many graphs for all lengths up to the largest bucket (check ``shape_stability``, where it passed)."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        passed = any(each.check == "shape_stability" and each.verdict == "pass" for each in cell.verdicts)
        covered = cell.section("shape_stability").get("covered") if passed else None
        for each in filter(lambda one: isinstance(one, dict), covered if isinstance(covered, list) else ()):
            told = (f"{each.get('graphs')} graph(s) do for every {each.get('dim')} from {each.get('least')} to "
                    f"{each.get('most')}, padded to its bucket")
            found.setdefault(told, []).append(cell.id)
    for told, ids in found.items():
        yield f"- {code(model)}: {prose(told)} {evidence(ids)}."


def _padded(model: str, cells: Sequence[Facts]) -> Iterator[str]:
    """What lengths between the buckets did when they were padded (check ``shape_stability``)."""
    served: dict[str, list[str]] = {}
    other: dict[str, list[str]] = {}
    for cell in cells:
        between = cell.section("shape_stability").get("between")
        for each in filter(lambda found: isinstance(found, dict), between if isinstance(between, list) else ()):
            name = f"{each.get('dim')}={each.get('length')} to {each.get('bucket')}"
            good = each.get("graphs") and not each.get("compiles") and not each.get("error")
            (served if good else other).setdefault(name, []).append(cell.id)
    for found, told in ((served, "run what is compiled already"), (other, "do not: see the gotchas")):
        if found:
            ids = [cell for cells in found.values() for cell in cells]
            yield f"- {code(model)}: lengths padded to their bucket ({prose(', '.join(found))}) {told} {evidence(ids)}."


def _by_dynamic(of: Sequence[Setting]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for setting in [setting for setting in of if not setting.stage] or of:
        for cell in setting.cells:
            if (_sizes(cell) or 0) > 1 and cell.compiles and "dynamic" in cell.axes:
                found.setdefault(cell.axes["dynamic"], []).append(cell)
    return found


def _sizes(cell: Facts) -> float | None:
    return as_number(cell.section("recompiles").get("sizes"))


def _recompiles(cells: Sequence[Facts]) -> tuple[str, str, str]:
    counts = [len(cell.recompiles) for cell in cells]
    times = [sum(c.seconds for c in cell.compiles) for cell in cells]
    return (f"{max(_sizes(cell) or 0 for cell in cells):g}", _range(f"{min(counts)}", f"{max(counts)}"),
            _range(readable_seconds(min(times)), readable_seconds(max(times))))


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _note(model: str, by_value: Mapping[str, Sequence[Facts]]) -> Iterator[str]:
    most = {value: max(len(cell.recompiles) for cell in cells) for value, cells in by_value.items()}
    others = [count for value, count in most.items() if value != "static"]
    if "static" in most and others and most["static"] > max(others):
        yield f"- {code(model)}: `static` compiles again for each size. Pad to a few lengths (`ShapeStabilizer`), or " \
              "mark the dimension with its range (`mark_dynamic_dims`). Only where neither can be, take another " \
              "value of `dynamic`; `dynamic=True` is discouraged."
    every = [cell for cells in by_value.values() for cell in cells]
    for (what, place), cells in _other_causes(every).items():
        if len({cell.axes["dynamic"] for cell in cells}) == len(by_value):
            yield f"- {code(model)}: recompiles because of {prose(what)} ({code(place)}), whatever `dynamic` says: " \
                  f"see the gotchas {evidence(cell.id for cell in cells)}."
    special = [cell.id for cell in every if (as_number(cell.section("recompiles").get("special")) or 0) > 0]
    if special:
        yield f"- {code(model)}: sizes 0 and 1 are compiled apart, whatever `dynamic` says {evidence(special)}."


def _other_causes(cells: Sequence[Facts]) -> dict[tuple[str, str], list[Facts]]:
    """(what differed, place) to cells, of the recompiles that no size explains."""
    found: dict[tuple[str, str], list[Facts]] = {}
    for cell in cells:
        for what in dict.fromkeys((c.what or c.cause, f"{c.file}:{c.line}") for c in cell.recompiles
                                  if c.cause not in SHAPES):
            found.setdefault(what, []).append(cell)
    return found
