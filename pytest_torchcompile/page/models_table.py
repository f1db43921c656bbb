"""The models of a run as one table of Markdown, for a page of a repository's documentation. No torch.

A row is a model under one backend: what every phase came to, where graphs break, and what compiling costs. Where the
matrix has several devices, it is so on one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Final

from pytest_torchcompile.gate.markdown import escape_line
from pytest_torchcompile.quantity import count
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["models_table"]

HEAD: Final = ("model", "backend", "verdicts", "graph breaks", "recompiles", "seconds")
SPEEDUP_HEAD: Final = "speed-up"
"""A column more, where the check ``worth`` has timed a cell."""
PLACES: Final = 3
"""How many places of graph breaks a row names."""
SITE_PACKAGES: Final = "site-packages"


def models_table(merged: Merged) -> str:
    """The table, with a line above it that says what was run."""
    all_facts = [Facts(cell) for cell in merged.cells.values()]
    several_devices = len({facts.axes.get("device", "") for facts in all_facts}) > 1
    judged: list[Facts] = []
    not_judged: list[Facts] = []
    for facts in all_facts:
        # A cell that was never judged must not count as one that holds; it has a line of its own below.
        if facts.status == "not_run":
            not_judged.append(facts)
        else:
            judged.append(facts)
    rows: dict[tuple[str, str], list[Facts]] = {}
    for facts in judged:
        rows.setdefault((facts.axes.get("model", ""), _backend_of(facts, several_devices)), []).append(facts)
    head = [*HEAD]
    if _largest_metric("speedup", judged, "{:.2f}"):
        head.append(SPEEDUP_HEAD)
    lines = [_what_was_run(merged, len(judged)), "", _table_row(head), _table_row(["---"] * len(head))]
    for (model, backend), cells in rows.items():
        columns = [*_columns_of_model(model, backend, cells)]
        if SPEEDUP_HEAD in head:
            columns.append(_largest_metric("speedup", cells, "{:.2f}"))
        lines.append(_table_row(columns))
    lines += _what_was_not_judged(judged, not_judged, several_devices)
    return "\n".join([*lines, *_reasons_of_skips(judged)]) + "\n"


def _backend_of(facts: Facts, with_device: bool) -> str:
    """``inductor``, or with the device ``inductor on cuda``."""
    backend = facts.axes.get("backend", "")
    if with_device:
        return f"{backend} on {facts.axes.get('device', '')}"
    return backend


def _what_was_run(merged: Merged, judged: int) -> str:
    versions = []
    for name in ("torch", "python"):
        # A run in which no cell ran knows no environment.
        if merged.environment.get(name):
            versions.append(f"{name} {merged.environment[name]}")
    matrix = escape_line(str(merged.matrix["path"]))
    planned = count(len(merged.matrix["cells_planned"]), "cell")
    return f"{judged} of {planned} of {matrix}; {', '.join(versions)}."


def _columns_of_model(model: str, backend: str, cells: list[Facts]) -> Iterator[str]:
    """In the order of :data:`HEAD`."""
    yield escape_line(model)
    yield escape_line(backend)
    yield "<br>".join(map(escape_line, _verdicts_of_phases(cells)))
    yield _places_of_breaks(cells)
    yield _largest_metric("recompiles", cells, "{:.0f}")
    yield f"{sum(float(facts.cell.get('seconds') or 0) for facts in cells):.0f}"


def _verdicts_of_phases(cells: Iterable[Facts]) -> Iterator[str]:
    """What is the same in several cells, which differ in other axes, stands once with their number."""
    counts = Counter(map(_verdict_of_phase, cells))
    for text, number in counts.items():
        yield text if number == 1 else f"{text}, {number} times"


def _verdict_of_phase(facts: Facts) -> str:
    """``inference: pass``, or with the checks that did not."""
    text = f"{facts.axes.get('phase', '')}: {facts.status}"
    others = []
    for verdict in facts.verdicts:
        if verdict.verdict not in ("pass", "skip"):
            others.append(f"{verdict.check} {verdict.verdict}")
    # A skipped cell ran nothing, so its checks say nothing.
    if others and facts.status != "skip":
        return f"{text} ({', '.join(others)})"
    return text


def _places_of_breaks(cells: Iterable[Facts]) -> str:
    """How many places, and the first of them."""
    places: dict[str, None] = {}
    for facts in cells:
        breaks = facts.sections.get("graph_breaks", {}).get("graph_breaks")
        for each in breaks if isinstance(breaks, list) else ():
            places[f"{_path_in_package(str(each.get('file', '')))}:{each.get('line', 0)}"] = None
    if not places:
        return "0"
    shown = [f"`{place}`" for place in list(places)[:PLACES]]
    if len(places) > PLACES:
        shown.append(f"and {len(places) - PLACES} more")
    return f"{len(places)}: {'<br>'.join(shown)}"


def _path_in_package(file: str) -> str:
    """A path from the package on, the same whatever folder the package is installed in."""
    parts = PurePath(file).parts
    if SITE_PACKAGES in parts:
        parts = parts[parts.index(SITE_PACKAGES) + 1:]
    return "/".join(parts[-2:])


def _largest_metric(metric: str, cells: Iterable[Facts], form: str) -> str:
    """Empty where no cell measured it."""
    numbers = []
    for facts in cells:
        try:
            number = METRICS[metric].read(facts.sections)
        # A section of another version.
        except (KeyError, TypeError, ValueError):
            continue
        if number is not None:
            numbers.append(number)
    return form.format(max(numbers)) if numbers else ""


def _what_was_not_judged(judged: Iterable[Facts], not_judged: Iterable[Facts],
                         several_devices: bool) -> Iterator[str]:
    """The models that have no row, and then, by backend and phase, those that lack a part of theirs."""
    with_row = {facts.axes.get("model", facts.id) for facts in judged}
    without_row: dict[str, None] = {}
    parts: dict[str, dict[str, None]] = {}
    for facts in not_judged:
        model = facts.axes.get("model", facts.id)
        if model in with_row:
            part = f"{_backend_of(facts, several_devices)} {facts.axes.get('phase', '')}"
            parts.setdefault(part, {})[model] = None
        else:
            without_row[model] = None
    if without_row or parts:
        yield ""
    if without_row:
        yield f"Not judged in this run: {', '.join(map(escape_line, without_row))}."
    for part, models in parts.items():
        yield f"- Not judged in this run, {escape_line(part)}: {', '.join(map(escape_line, models))}."


def _reasons_of_skips(judged: Iterable[Facts]) -> Iterator[str]:
    """Why cells are skipped or expected to fail, each reason once."""
    models: dict[str, dict[str, None]] = {}
    for facts in judged:
        if facts.status in ("skip", "xfail") and facts.note:
            models.setdefault(facts.note, {})[facts.axes.get("model", facts.id)] = None
    if models:
        yield ""
    for reason, names in models.items():
        yield f"- {escape_line(', '.join(names))}: {escape_line(reason)}"


def _table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
