"""The models of a run as one table of Markdown, for a page of a repository's documentation. No torch.

A row is a model under one backend: what every phase came to, where graphs break, and what compiling costs.
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

__all__ = ["table"]

HEAD: Final = ("model", "backend", "verdicts", "graph breaks", "recompiles", "seconds", "speed-up")
PLACES: Final = 3
"""How many places of graph breaks a row names."""
SITE_PACKAGES: Final = "site-packages"


def table(merged: Merged) -> str:
    """The table, with a line above it that says what was run."""
    every = [Facts(cell) for cell in merged.cells.values()]
    judged = [facts for facts in every if facts.status != "not_run"]
    rows: dict[tuple[str, str], list[Facts]] = {}
    for facts in judged:
        rows.setdefault((facts.axes.get("model", ""), facts.axes.get("backend", "")), []).append(facts)
    lines = [_told(merged, len(judged)), "", _line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(_row(model, backend, cells)) for (model, backend), cells in rows.items()]
    left = dict.fromkeys(facts.axes.get("model", facts.id) for facts in every if facts.status == "not_run")
    if left:
        lines += ["", f"Not judged in this run: {', '.join(map(escape_line, left))}."]
    return "\n".join([*lines, *_reasons(judged)]) + "\n"


def _told(merged: Merged, judged: int) -> str:
    environment = merged.environment
    known = [f"{name} {environment[name]}" for name in ("torch", "python") if environment.get(name)]
    matrix = escape_line(str(merged.matrix["path"]))
    planned = count(len(merged.matrix["cells_planned"]), "cell")
    return f"{judged} of {planned} of {matrix}; {', '.join(known)}."


def _row(model: str, backend: str, cells: list[Facts]) -> Iterator[str]:
    yield escape_line(model)
    yield escape_line(backend)
    yield "<br>".join(escape_line(_verdict(facts)) for facts in cells)
    yield _breaks(cells)
    yield _largest("recompiles", cells, "{:.0f}")
    seconds = [float(facts.cell.get("seconds") or 0) for facts in cells]
    yield f"{sum(seconds):.0f}"
    yield _largest("speedup", cells, "{:.2f}")


def _verdict(facts: Facts) -> str:
    """``inference: pass``, or with the checks that did not."""
    others = [f"{verdict.check} {verdict.verdict}" for verdict in facts.verdicts if verdict.verdict not in
              ("pass", "skip")]
    phase = facts.axes.get("phase", "")
    return f"{phase}: {facts.status}" + (f" ({', '.join(others)})" if others and facts.status != "skip" else "")


def _breaks(cells: Iterable[Facts]) -> str:
    """How many places, and the first of them."""
    places: Counter[str] = Counter()
    for facts in cells:
        found = facts.sections.get("graph_breaks", {}).get("graph_breaks")
        for each in found if isinstance(found, list) else ():
            places[f"{_short(str(each.get('file', '')))}:{each.get('line', 0)}"] += 1
    if not places:
        return "0"
    shown = [f"`{place}`" for place in list(places)[:PLACES]]
    more = [f"and {len(places) - PLACES} more"] if len(places) > PLACES else []
    return f"{len(places)}: " + "<br>".join(shown + more)


def _short(file: str) -> str:
    """A path from the package on, the same whatever folder the package is installed in."""
    parts = PurePath(file).parts
    if SITE_PACKAGES in parts:
        parts = parts[parts.index(SITE_PACKAGES) + 1:]
    return "/".join(parts[-2:])


def _largest(metric: str, cells: Iterable[Facts], form: str) -> str:
    found = []
    for facts in cells:
        try:
            value = METRICS[metric].read(facts.sections)
        except (KeyError, TypeError, ValueError):  # a section of another version
            value = None
        if value is not None:
            found.append(value)
    return form.format(max(found)) if found else ""


def _reasons(judged: Iterable[Facts]) -> Iterator[str]:
    """Why cells are skipped or expected to fail, each reason once."""
    cells: dict[str, list[str]] = {}
    for facts in judged:
        if facts.status in ("skip", "xfail") and facts.note:
            cells.setdefault(facts.note, []).append(facts.axes.get("model", facts.id))
    if cells:
        yield ""
    for reason, models in cells.items():
        names = ", ".join(dict.fromkeys(models))
        yield f"- {escape_line(names)}: {escape_line(reason)}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
