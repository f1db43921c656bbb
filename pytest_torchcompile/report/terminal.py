"""What the terminal shows of a matrix run: a header, the text of a failure, a table at the end. Pure text."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.fuzz.fuzz_options import ran_out
from pytest_torchcompile.observation import VERDICTS, Judgement
from pytest_torchcompile.plan.selection import idle_cells
from pytest_torchcompile.quantity import count
from pytest_torchcompile.ranks.zygote import gpu_device_files
from pytest_torchcompile.report.causes import Fresh, first_with_problem, group_causes, root_check
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.harmless import harmless_text
from pytest_torchcompile.report.headline import headline
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.wrappers.wrapping import lane_of

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import Matrix, PlannedCell
    from pytest_torchcompile.report.journal import Journal
    from pytest_torchcompile.run.settings import Settings

__all__ = ["failure_text", "header_lines", "summary_lines"]

_COLOURS = {"pass": "green", "skip": "yellow", "xfail": "yellow", "not_run": "red"}


def header_lines(matrix: Matrix, planned: Sequence[PlannedCell], settings: Settings) -> list[str]:
    """Versions, device and compiler as far as they can be told without torch; what is planned, and why not the rest."""
    gpus = gpu_device_files()
    compiler = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))  # as torch
    index, of = settings.shard
    outcomes = Counter(p.outcome for p in planned)
    shard = f" (shard {index} of {of}, {len(matrix.cells)} in all)" if of > 1 else ""
    return [
        f"torch.compile: torch {_version('torch')}, {count(len(gpus), 'GPU') if gpus else 'no GPU'}, "
        f"C++ compiler {compiler or 'none: Inductor cells on CPU will skip'}",
        f"compile matrix: {settings.matrix}: {count(len(planned), 'cell')} planned{shard}, "
        f"{len(matrix.excluded)} excluded, "
        f"{outcomes['skip']} to skip, {outcomes['xfail']} expected to fail",
        *_reasons("excluded", Counter(e.reason for e in matrix.excluded)),
        *_reasons("skip", Counter(p.reason for p in planned if p.outcome == "skip")),
        *(f"  note: {note}" for note in matrix.notes),
        *(f"  note: {text}" for text in idle_cells(_named(matrix, settings), [p.cell.axes for p in planned])),
    ]


def _named(matrix: Matrix, settings: Settings) -> Iterable[str]:
    """The checks that somebody named, not those that every matrix has."""
    return settings.checks or (name for name in matrix.checks if CHECKS[name].on_request)


def _reasons(what: str, reasons: Counter[str]) -> Iterator[str]:
    for reason, cells in reasons.most_common():
        yield f"  {what} {cells}: {reason}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def failure_text(check: str, judgements: Mapping[str, Judgement], again: str, alone: str = "") -> str:
    """Culprit, evidence, what to try, and how to run it again, or ``alone``, without the matrix.

    A problem that only follows from that of another check is one line. ``judgements``: of each check of the cell.
    """
    verdicts = Facts({"checks": {name: judgement.to_dict() for name, judgement in judgements.items()}}).verdicts
    own = next(verdict for verdict in verdicts if verdict.check == check)
    lines: list[str] = []
    for problem in own.problems:
        if root := root_check(own, problem, verdicts):
            text = textwrap.shorten(problem.message, _AGAIN, placeholder=" ...")
            lines.append(f"{check}: follows from {root}: {text}")
            continue
        if first := first_with_problem(own, problem, verdicts):
            text = textwrap.shorten(problem.message, _AGAIN, placeholder=" ...")
            lines.append(f"{check}: the cell has no result, as {first} tells: {text}")
            continue
        lines.append(f"{check}: {problem.message}")
        if problem.evidence:
            lines.append(textwrap.indent(problem.evidence, "    "))
        if problem.hint:
            lines.append(f"  try    {problem.hint}")
    lines.append(f"  again  {again}")
    if alone:
        lines.append(f"  alone  {alone}")
    return harmless_text("\n".join(lines))


def summary_lines(journal: Journal, fresh: Fresh | None = None) -> Iterator[tuple[str, dict[str, bool]]]:
    """Lines with markup: a table of cells by backend and mode, totals, and what a gate would not accept.

    ``fresh``: what is worse than in the baseline, if there is one.
    """
    selected = [p for p in journal.planned if journal.is_selected(p.cell.id)]
    by_place: dict[tuple[str, str], Counter[str]] = {}
    total: Counter[str] = Counter()
    for planned in selected:
        status = journal.status(planned.cell.id)
        by_place.setdefault((planned.cell.backend, planned.cell.mode), Counter())[status] += 1
        total[status] += 1
    backends = list(dict.fromkeys(backend for backend, _ in by_place))
    modes = list(dict.fromkeys(mode for _, mode in by_place))
    if by_place:
        rows = [["", *modes], *([b, *(_counts(by_place.get((b, m))) for m in modes)] for b in backends)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(modes) + 1)]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip(), {}
    bad = [v for v in total if _COLOURS.get(v, "red") == "red"]
    fake = sum(lane_of(p.cell.wrapper) == "fake" for p in selected)
    lane = f"; {fake} in the fake lane, where no number is judged" if fake else ""
    compiled = journal.count_compiled()
    yield (f"{count(len(selected), 'cell')}: {_counts(total) or 'none'}; {compiled} ran compiled code{lane}",
           {"red" if bad else "green": True})
    if selected and not compiled:
        yield "no cell ran compiled code: this run proves nothing, and no gate will pass it", {"red": True}
    for cell in (p.cell.id for p in selected):
        if leaks := journal.leaks(cell):
            yield f"{cell} changed torch's settings, which were put back: {'; '.join(leaks)}", {"yellow": True}
    yield from ((text, {}) for text in _columns(journal))
    if short := journal.cut_short():
        cell, (compared, spent) = min(short.items(), key=lambda each: each[1])
        yield (f"fuzz: {count(len(short), 'cell was', 'cells were')} not fuzzed to the end: of {cell} "
               f"{count(compared, 'sequence was', 'sequences were')} compared, "
               f"{ran_out(spent)}", {"yellow": True})
    mistakes = journal.usage_errors()
    told = list(_causes(journal, mistakes, fresh)) if bad else []
    yield from told
    if missing := journal.not_run():
        yield f"{count(len(missing), 'planned verdict')} never came, for example {missing[0]}", {"red": True}
    for text in mistakes:
        if not any(text in line for line, _ in told):
            yield text, {"red": True}


def _columns(journal: Journal) -> Iterator[str]:
    """The numbers of checks that run on request only: how they are spread, and in which cell the worst one is."""
    for column in (column for check in CHECKS.values() if check.on_request for column in check.columns):
        found = journal.read_numbers(METRICS[column.name].read)
        if not found:
            continue
        least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        worst = least if column.kind == "min" else most
        yield (f"{column.name}: {found[least]:.4g} to {found[most]:.4g}{column.unit} in {count(len(found), 'cell')}, "
               f"the worst in {worst}")


_SHOWN = 8
"""Causes that the summary lists (and all of wrong numbers), and cells that it names for each."""
_AGAIN = 100
"""Characters of a problem that only follows from another one of the cell."""


def _causes(journal: Journal, mistakes: Collection[str],
            fresh: Fresh | None) -> Iterator[tuple[str, dict[str, bool]]]:
    """The headline, and what is wrong, once for all cells that it is wrong in.

    ``mistakes`` (of the matrix, which nobody can do without) are told in full.
    """
    found = group_causes((Facts(cell) for cell in journal.block()["cells"]), fresh=fresh)
    if text := headline(found):
        yield text, {"red": True}
    shown = [cause for place, cause in enumerate(found) if place < _SHOWN or cause.wrong_numbers]
    for cause in shown:
        message = cause.problem.message
        text = message if message in mistakes else textwrap.shorten(message, 200, placeholder=" ...")
        place = f" ({cause.problem.place})" if cause.problem.place else ""
        new = ", new since the baseline" if cause.new else ""
        yield f"{count(len(cause.cells), 'cell')}  {', '.join(cause.checks)}: {text}{place}{new}", {"red": True}
        more = len(cause.cells) - _SHOWN
        yield "    in " + ", ".join(cause.cells[:_SHOWN]) + (f" and {more} more" if more > 0 else ""), {}
        for check in cause.consequences:
            yield f"    {check} follows from {cause.checks[0]}", {}
    if len(found) > len(shown):
        yield f"and {count(len(found) - len(shown), 'more cause')}", {"red": True}


def _counts(counts: Counter[str] | None) -> str:
    """``12 pass, 1 xfail``, the good ones first."""
    return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) if counts else "-"
