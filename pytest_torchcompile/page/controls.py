"""Controls: the legend, and with JavaScript what the map shows and how; and the numbers that it can be coloured by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.page.baseline_comparison import MARKS
from pytest_torchcompile.page.markup import STEPS, VERDICT_STYLES, Html, tag
from pytest_torchcompile.report.facts import Facts, as_number
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["controls", "measure_cells"]

_HAVE_METRICS: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels"})
"""Sections whose numbers are among the metrics, as far as they say anything."""


def measure_cells(cells: Sequence[Facts]) -> dict[str, list[float | None]]:
    """Each number that some cell has, and its value for every cell.

    Numbers that other sections hold at their top are among them, as ``section: key``.
    """
    numbers: dict[str, list[float | None]] = {}
    for name in METRICS:
        numbers[name] = [as_number(worst_rank(cell.ranks, name)) for cell in cells]
    numbers["coverage, %"] = list(map(_coverage_percent, cells))
    numbers["error over noise"] = list(map(_error_over_noise, cells))
    numbers["cell_seconds"] = [cell.total_seconds for cell in cells]
    for section, key in dict.fromkeys(_other_numbers(cells)):
        numbers[f"{section}: {key}"] = [as_number(cell.section(section).get(key)) for cell in cells]
    # A number that no cell has would be a choice that colours nothing.
    for name in [name for name, values in numbers.items() if set(values) <= {None}]:
        del numbers[name]
    return numbers


def _coverage_percent(facts: Facts) -> float | None:
    return None if facts.coverage is None else 100 * facts.coverage


def _error_over_noise(facts: Facts) -> float | None:
    """The largest of what was compared; 0 where everything is bitwise equal."""
    if not any(section.get("compared") for section in facts.compared.values()):
        return None
    return max((leaf.rms for leaf in facts.leaves if as_number(leaf.rms) and leaf.rms), default=0.0)


def _other_numbers(cells: Iterable[Facts]) -> Iterator[tuple[str, str]]:
    """(section, key) of numbers that are no metrics."""
    for cell in cells:
        for name, section in cell.sections.items():
            # Sections that compare have numbers of each tensor, and `error over noise` sums them up.
            if name in _HAVE_METRICS or name in cell.compared:
                continue
            for key, value in section.items():
                if as_number(value) is not None and key not in METRICS:
                    yield name, key


def controls(cells: Sequence[Facts], numbers: Iterable[str], marks: Mapping[str, str]) -> Html:
    """Two lines. ``numbers``: what the map can be coloured by; ``marks``: cell to its mark against a baseline."""
    checks: dict[str, None] = {}
    for cell in cells:
        checks.update((verdict.check, None) for verdict in cell.verdicts)
    choices = [tag("option", "verdict", value=""), _option_group("one check", "check", checks),
               _option_group("a number", "number", numbers)]
    steps = [tag("span", " ", class_=f"s step{number}") for number in range(len(STEPS))]
    # The script shows it where the map is coloured by a number.
    ramp = tag("span", tag("span", id="least"), " ", tag("span", steps, class_="ramp"), " ", tag("span", id="most"),
               id="ramp", hidden=True)
    search = tag("input", type="search", id="search", placeholder="cell, file, text")
    keys = "arrows, Enter, Esc · n, p: next, previous failing · /: search"
    return tag(
        "div",
        tag("div", _legend(cells, marks), ramp, tag("span", id="count", role="status", class_="quiet js"),
            tag("button", "all cells", type="button", id="all", hidden=True, class_="js"),
            tag("button", "light / dark", type="button", id="theme", class_="js")),
        tag("details", tag("summary", "arrange, colour, search"),
            tag("div", _choice("rows"), _choice("columns"), _choice("by", *choices, label="colour by"),
                tag("label", "search", search), tag("span", "only", class_="quiet"), tag("span", id="filters")),
            tag("p", keys, class_="quiet keys"), class_="js", id="tools"),
        class_="controls",
    )  # fmt: skip


def _option_group(label: str, kind: str, names: Iterable[str]) -> Html:
    """``kind``: how page.js tells what to colour by."""
    return tag("optgroup", [tag("option", name, value=f"{kind} {name}") for name in names], label=label)


def _legend(cells: Sequence[Facts], marks: Mapping[str, str]) -> Html:
    counts = Counter(cell.status for cell in cells)
    items = []
    for name, style in VERDICT_STYLES.items():
        if counts[name]:
            box = tag("input", type="checkbox", checked=True, value=name, class_="js")
            letter = tag("span", style.letter, class_=f"s {name}", aria_hidden="true")
            items.append(tag("li", tag("label", box, letter, f" {name} {counts[name]}", title=style.help)))
    marked = Counter(marks[cell.id] for cell in cells if cell.id in marks)
    for mark, meaning in MARKS.items():
        if marked[mark]:
            square = tag("span", class_=f"s skip {mark}", aria_hidden="true")
            items.append(tag("li", square, f" {meaning} {marked[mark]}"))
    reused = sum(cell.reused is not None for cell in cells)
    if reused:
        items.append(tag("li", tag("span", "P", class_="s pass reused", aria_hidden="true"), f" reused {reused}"))
    return tag("ul", items, class_="legend", aria_label="Verdicts")


def _choice(id: str, *options: Html, label: str = "") -> Html:
    return tag("label", label or id, tag("select", options, id=id))
