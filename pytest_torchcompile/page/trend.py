"""Trend: the runs of a folder of reports: which cells turned red when, speed-up and compile time over time."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.gate.judged import BAD
from pytest_torchcompile.observation import VERDICTS
from pytest_torchcompile.page.markup import ROWS, VERDICT_STYLES, Html, columns, join, link, more_note, tag
from pytest_torchcompile.page.past_runs import History, PastRun, commit_in_words, day_in_words
from pytest_torchcompile.quantity import count, first_names, listed_counts, readable_seconds

__all__ = ["trend_section"]

_UNKNOWN: Final = ("not_run", "skip", "")
"""Statuses that say nothing of a cell."""
# As wide as a card of the page, and low enough that several charts are seen at once.
WIDTH: Final = 280
HEIGHT: Final = 70
EDGE: Final = 5


@dataclass(frozen=True)
class Turn:
    """Cells that went through the runs alike."""

    cells: tuple[str, ...]
    statuses: tuple[str, ...]
    """For each run; empty where the cell is not in it."""
    at: int
    """The run since which they are as they are now."""

    @property
    def red(self) -> bool:
        """Do they fail now?"""
        return self.statuses[-1] in BAD

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts: what fails comes first, then what turned last, then what is most."""
        return not self.red, -self.at, -len(self.cells)


def trend_section(history: History) -> Html | None:
    """The section; None where no folder was given."""
    runs = history.runs
    if not runs:
        return None
    notes = [tag("p", note, class_="quiet") for note in history.notes]
    if len(runs) == 1:
        content: list[Html | None] = [tag("p", "The folder has one run of this matrix; a trend needs two.")]
    else:
        content = [tag("div", list(_charts(runs)), class_="charts"), _turns_table(runs), _runs_table(runs)]
    return tag("section", tag("h2", f"The last {count(len(runs), 'run')}"), content, notes, class_="trend", id="trend",
               aria_label="Trend")


# which cell turned red when


def find_turns(runs: Sequence[PastRun]) -> list[Turn]:
    """Cells that fail now, or failed in one of the runs; those that went alike are one."""
    names: dict[str, None] = {}
    for run in runs:
        names.update(dict.fromkeys(run.statuses))
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        statuses = tuple(run.statuses.get(name, "") for run in runs)
        if not set(BAD).isdisjoint(statuses):
            alike.setdefault(statuses, []).append(name)
    turns = [Turn(tuple(cells), statuses, _turned_at(statuses)) for statuses, cells in alike.items()]
    return sorted(turns, key=lambda turn: turn.order)


def _turned_at(statuses: Sequence[str]) -> int:
    """The first run of the last ones in which the cell is as red, or as green, as at the end."""
    at = len(statuses) - 1
    known = [index for index, status in enumerate(statuses) if status not in _UNKNOWN]
    for index in reversed(known):
        if (statuses[index] in BAD) != (statuses[known[-1]] in BAD):
            break
        at = index
    return at


def _turns_table(runs: Sequence[PastRun]) -> Html:
    turns = find_turns(runs)
    if not turns:
        return tag("p", "No cell failed in any of them.")
    heads = []
    for run in runs:
        label = f"{day_in_words(run.started)} {commit_in_words(run.git)}"
        heads.append(tag("th", tag("span", label), scope="col", title=label))
    rows = [_turn_row(turn, runs) for turn in turns[:ROWS]]
    head = tag("thead", tag("tr", tag("th", "cells", scope="col"), heads, tag("th", "since when", scope="col")))
    table = tag("table", tag("caption", "Cells that fail, or failed: the oldest run is at the left"), head,
                tag("tbody", rows), class_="turns")
    return tag("div", table, more_note(len(turns)), class_="scroll", tabindex=0, role="region",
               aria_label="Cells that fail, run by run")


def _turn_row(turn: Turn, runs: Sequence[PastRun]) -> Html:
    squares = []
    for status, run in zip(turn.statuses, runs, strict=True):
        squares.append(tag("td", _square(status, run)))
    return tag("tr", tag("th", _cells_of_turn(turn, runs[-1]), scope="row"), squares,
               tag("td", _turn_in_words(turn, runs)))


def _square(status: str, run: PastRun) -> Html:
    style = VERDICT_STYLES.get(status)
    words = f"{run.label}: {status or 'not in this run'}"
    return tag("span", style.letter if style else "–", class_=f"s {status or 'skip'}" if style else "s skip",
               role="img", aria_label=words, title=words)


def _cells_of_turn(turn: Turn, newest: PastRun) -> Html:
    links = []
    for cell in turn.cells[:ROWS]:
        # A cell that is gone has no article.
        links.append(tag("a", cell, href=link(cell)) if cell in newest.statuses else tag("span", cell))
    if len(links) == 1:
        return links[0]
    shared = _shared_values(turn.cells, newest)
    name = f"{', '.join(shared)}: {count(len(turn.cells), 'cell')}" if shared else first_names(turn.cells, 1)
    return tag("details", tag("summary", name), tag("div", links, more_note(len(turn.cells)), class_="cells"))


def _shared_values(cells: Sequence[str], newest: PastRun) -> list[str]:
    """What the cells have in common and others have not; nothing where one of them is gone."""
    if any(cell not in newest.axes for cell in cells):
        return []
    shared = []
    for axis, value in newest.axes[cells[0]].items():
        varies = any(axes.get(axis) != value for axes in newest.axes.values())
        if varies and all(newest.axes[cell].get(axis) == value for cell in cells):
            shared.append(value or f"no {axis}")
    return shared


def _turn_in_words(turn: Turn, runs: Sequence[PastRun]) -> Html:
    now = turn.statuses[-1]
    if now in _UNKNOWN:
        words = "gone" if now == "" else "not judged in the last run"
        return tag("span", words, class_="quiet")
    word = tag("b", "red", class_="weight fail") if turn.red else tag("b", "green again", class_="weight good")
    if turn.at == 0:
        return join(word, f" in all of the {len(runs)} runs")
    run = runs[turn.at]
    changes = [tag("p", text, class_="quiet") for text in run.software_changes(runs[turn.at - 1])]
    return join(word, " since ", tag("span", run.label, class_="number"), changes)


# numbers over time


def _charts(runs: Sequence[PastRun]) -> Iterator[Html]:
    failing: list[float | None] = [float(_number_red(run)) for run in runs]
    yield _chart("Cells that fail", f"of {len(runs[-1].statuses)}", runs, failing, "{:.0f}".format)
    speedups, cells = _over_shared_cells([run.speedups for run in runs], statistics.median)
    if cells:
        yield _chart("Speed-up", f"median of {count(cells, 'cell')}", runs, speedups, "{:.2f} ×".format)
    seconds, cells = _over_shared_cells([run.compile_seconds for run in runs], math.fsum)
    if cells:
        yield _chart("Compile time", f"sum of {count(cells, 'cell')}, no cache hits", runs, seconds, readable_seconds)


def _number_red(run: PastRun) -> int:
    return sum(status in BAD for status in run.statuses.values())


def _over_shared_cells(measured: Sequence[Mapping[str, float]],
                       combine: Callable[[Iterable[float]], float]) -> tuple[list[float | None], int]:
    """One number for each run, of the cells that all runs have measured; None for a run that has measured none."""
    told = [set(numbers) for numbers in measured if numbers]
    shared = set.intersection(*told) if len(told) > 1 else set()
    values: list[float | None] = []
    for numbers in measured:
        values.append(combine(numbers[cell] for cell in sorted(shared)) if numbers and shared else None)
    return values, len(shared)


def _chart(title: str, of_what: str, runs: Sequence[PastRun], values: Sequence[float | None],
           in_words: Callable[[float], str]) -> Html:
    """A line from zero up; without a line where a run has no number, or is of another machine."""
    # What is no number in a hand-made report has no place in a chart.
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    step = (WIDTH - 2 * EDGE) / (len(runs) - 1)
    parts = [tag("line", x1=0, x2=WIDTH, y1=HEIGHT - EDGE, y2=HEIGHT - EDGE, class_="zero")]
    told = []
    last: tuple[float, float] | None = None
    for index, (run, value) in enumerate(zip(runs, values, strict=True)):
        if value is None:
            last = None
            continue
        spot = EDGE + index * step, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * max(0.0, value) / most
        if last is not None and "another machine" not in run.software_changes(runs[index - 1]):
            ends = {"x1": last[0], "y1": last[1], "x2": spot[0], "y2": spot[1]}
            parts.append(tag("line", **{name: f"{value:.1f}" for name, value in ends.items()}))
        words = f"{run.label}: {in_words(value)}"
        parts.append(tag("circle", tag("title", words), cx=f"{spot[0]:.1f}", cy=f"{spot[1]:.1f}", r=3.5))
        told.append(words)
        last = spot
    picture = tag("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img",
                  aria_label=f"{title}: {'; '.join(told) or 'no number'}")
    now = in_words(values[-1]) if values[-1] is not None else "–"
    return tag("figure", tag("figcaption", tag("b", title), " ", tag("span", now, class_="figure"), " ",
                             tag("span", of_what, class_="quiet of")), picture)


def _runs_table(runs: Sequence[PastRun]) -> Html:
    rows = []
    for index in range(len(runs) - 1, -1, -1):
        run = runs[index]
        changes = run.software_changes(runs[index - 1]) if index else []
        counts = Counter(run.statuses.values())
        verdicts = listed_counts(counts, VERDICTS)
        rows.append(tag("tr", tag("td", day_in_words(run.started), class_="number"),
                        tag("td", commit_in_words(run.git), tag("p", ", ".join(run.paths), class_="quiet")),
                        tag("td", run.environment.get("torch") or "not told", [tag("p", text) for text in changes]),
                        tag("td", verdicts)))
    return tag("details", tag("summary", "every run"),
               tag("table", columns("day", "commit and reports", "torch, and what changed", "cells"),
                   tag("tbody", rows)))
