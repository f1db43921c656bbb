"""What the terminal shows of a matrix run: a header, the text of a failure, a table at the end. Pure text."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_torchcompile.checks import CHECKS, Column
from pytest_torchcompile.fuzz.fuzz_options import ran_out
from pytest_torchcompile.observation import VERDICTS, Judgement, Problem
from pytest_torchcompile.plan.selection import idle_cells
from pytest_torchcompile.quantity import count, first_names, listed_counts, readable_age
from pytest_torchcompile.ranks.gpus import gpu_device_files
from pytest_torchcompile.report.causes import Fresh, first_with_problem, group_causes, root_check, told_by
from pytest_torchcompile.report.costs import costs_of_block, seconds_between, time_line
from pytest_torchcompile.report.facts import Facts, Verdict
from pytest_torchcompile.report.finding import headline
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import utc_time
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.wrappers.wrapping import lane_of

if TYPE_CHECKING:
    from pytest_torchcompile.plan.matrix import Matrix, PlannedCell
    from pytest_torchcompile.report.journal import Journal
    from pytest_torchcompile.run.settings import Settings

__all__ = ["failure_text", "header_lines", "same_text_key", "summary_lines"]

_Line: TypeAlias = "tuple[str, dict[str, bool]]"
"""A line, and the markup that pytest's terminal gives it."""
_Common: TypeAlias = "Callable[[Iterable[Mapping[str, Any]], Collection[str]], str]"
_ByPlace: TypeAlias = "dict[tuple[str, str], Counter[str]]"
"""(backend, mode) to how many cells have each status."""

_NOT_BAD: Final = frozenset({"pass", "skip", "xfail"})
"""Statuses with which the totals are green."""
_SHOWN: Final = 8
"""Causes that the summary lists (and all of wrong numbers), and cells that it names for each."""
_LONG_RUN: Final = 60
"""Seconds from which a run says where its time went."""
_LONGEST_CAUSE: Final = 200
"""Characters of what a cause says."""
_RULE_TO_PASTE: Final = re.compile(r"`- limits: [^`]*`")
_LONGEST_CONSEQUENCE: Final = 100
"""Characters of a problem that only follows from another one of the cell."""


def header_lines(matrix: Matrix, planned: Sequence[PlannedCell], settings: Settings) -> list[str]:
    """Versions, device and compiler as far as they can be told without torch; what is planned, and why not the rest."""
    outcomes = Counter(p.outcome for p in planned)
    excluded = Counter(exclusion.reason for exclusion in matrix.excluded)
    skipped = Counter(p.reason for p in planned if p.outcome == "skip")
    index, of = settings.shard
    shard = f" (shard {index} of {of}, {len(matrix.cells)} in all)" if of > 1 else ""
    idle = idle_cells(_checks_by_name(matrix, settings), [p.cell.axes for p in planned])
    return [
        _machine_line(),
        f"compile matrix: {settings.matrix}: {count(len(planned), 'cell')} planned{shard}, "
        f"{len(matrix.excluded)} excluded, "
        f"{outcomes['skip']} to skip, {outcomes['xfail']} expected to fail",
        *_reason_lines("excluded", excluded),
        *_reason_lines("skip", skipped),
        *map("  note: {}".format, (*matrix.notes, *idle)),
    ]


def _machine_line() -> str:
    gpus = gpu_device_files()
    devices = count(len(gpus), "GPU") if gpus else "no GPU"
    # torch looks for these names too, so what is found here is what Inductor will use.
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = shutil.which(os.environ.get("CXX") or usual)
    named = compiler or "none: Inductor cells on CPU will skip"
    return f"torch.compile: torch {_version_of('torch')}, {devices}, C++ compiler {named}"


def _checks_by_name(matrix: Matrix, settings: Settings) -> Iterable[str]:
    """The checks that somebody named, not those that every matrix has."""
    return settings.checks or (name for name in matrix.checks if CHECKS[name].on_request)


def _reason_lines(what: str, reasons: Counter[str]) -> Iterator[str]:
    for reason, cells in reasons.most_common():
        yield f"  {what} {cells}: {reason}"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    # Run from a checkout that was not installed.
    except metadata.PackageNotFoundError:
        return "(not installed)"


def failure_text(check: str, judgements: Mapping[str, Judgement], again: str, alone: str = "", *,
                 told_before: bool = False) -> str:
    """Culprit, evidence, what to try, and how to run it again, or ``alone``, without the matrix.

    A problem that only follows from that of another check is one line. ``judgements``: of each check of the cell.
    ``told_before``: another cell has told the same, so that evidence and advice are left out.
    """
    verdicts = _verdicts_of(judgements)
    own = next(verdict for verdict in verdicts if verdict.check == check)
    lines: list[str] = []
    for problem in own.problems:
        # Hundreds of cells may fail alike, and the terminal is read from its end.
        if told_before:
            short = textwrap.shorten(problem.message, _LONGEST_CONSEQUENCE, placeholder=" ...")
            lines.append(f"{check}: same as above, {problem.place}: {short}")
        else:
            lines += _problem_lines(own, problem, verdicts)
    lines += _lines_of_followers(own, verdicts)
    if not told_before:
        lines += _lines_of_logs(own, verdicts)
    lines.append(f"  again  {again}")
    if alone:
        lines.append(f"  alone  {alone}")
    return harmless_text("\n".join(lines))


def same_text_key(check: str, judgements: Mapping[str, Judgement]) -> str:
    """What failures of several cells have in common that are told once; empty for one that each cell tells in full.

    That are failures with a place in somebody's code, such as graph breaks, with the same limits to paste.
    """
    own = next(verdict for verdict in _verdicts_of(judgements) if verdict.check == check)
    if own.verdict != "fail" or not all(problem.place for problem in own.problems):
        return ""
    parts = [check]
    for problem in own.problems:
        parts += [problem.place, problem.message, *_RULE_TO_PASTE.findall(problem.hint)]
    return "\n".join(parts)


def _verdicts_of(judgements: Mapping[str, Judgement]) -> list[Verdict]:
    return Facts({"checks": {name: judgement.to_dict() for name, judgement in judgements.items()}}).verdicts


def _problem_lines(verdict: Verdict, problem: Problem, verdicts: Sequence[Verdict]) -> Iterator[str]:
    check = verdict.check
    short = textwrap.shorten(problem.message, _LONGEST_CONSEQUENCE, placeholder=" ...")
    # What only follows is told in full by the other check, which is shown too.
    if root := root_check(verdict, problem, verdicts):
        yield f"{check}: follows from {root}: {short}"
        return
    if first := first_with_problem(verdict, problem, verdicts):
        yield f"{check}: the cell has no result, as {first} tells: {short}"
        return
    # What ended the process is no finding of the check that is the first to tell it.
    ended = verdict.verdict in ("crash", "timeout")
    yield f"{verdict.verdict if ended else check}: {problem.message}"
    if problem.evidence:
        yield textwrap.indent(problem.evidence, "    ")
    if problem.hint:
        yield f"  try    {problem.hint}"


def _lines_of_logs(verdict: Verdict, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The channels of torch's log that show more; where it follows from another check, that one has the line."""
    entry = CHECKS.get(verdict.check)
    if verdict.verdict != "fail":
        return
    told = []
    for problem in verdict.problems:
        # What follows from another check, or was told at an earlier one, is not told again.
        if not root_check(verdict, problem, verdicts) and not first_with_problem(verdict, problem, verdicts):
            told.append(problem)
    if told and entry is not None and entry.logs:
        yield f"  logs   --compile-logs={entry.logs} shows more"


def _lines_of_followers(verdict: Verdict, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The checks of the cell that are told here, because they fail for the same cause."""
    told = told_by(verdicts)
    followers = [other for other in verdicts if told.get(other.check) == verdict.check]
    same = [other.check for other in followers if other.problems == verdict.problems]
    if same:
        yield f"  same as above: {count(len(same), 'check')}: {first_names(same)}"
    by_message: dict[str, list[str]] = {}
    for other in followers:
        if other.check not in same:
            by_message.setdefault(other.problems[0].message, []).append(other.check)
    for message, checks in by_message.items():
        short = textwrap.shorten(message, _LONGEST_CONSEQUENCE, placeholder=" ...")
        yield f"  so    {first_names(checks)}: {short}"


def summary_lines(journal: Journal, fresh: Fresh | None = None, common: _Common | None = None) -> Iterator[_Line]:
    """Lines with markup: a table of cells by backend and mode, totals, and what a gate would not accept.

    ``fresh``: what is worse than in the baseline, if there is one. ``common``: says what some of the cells of a report
    have in common.
    """
    selected = [p for p in journal.planned if journal.is_selected(p.cell.id)]
    by_place: _ByPlace = {}
    total: Counter[str] = Counter()
    for planned in selected:
        status = journal.status(planned.cell.id)
        by_place.setdefault((planned.cell.backend, planned.cell.mode), Counter())[status] += 1
        total[status] += 1
    any_bad = not total.keys() <= _NOT_BAD

    for text in _table_lines(by_place):
        yield text, {}
    yield from _total_lines(journal, selected, total, any_bad)
    if text := reused_text(journal.reused(), len(selected)):
        yield text, {}
    yield from _leak_lines(journal, selected)
    for text in _column_lines(journal):
        yield text, {}
    yield from _cut_short_lines(journal)
    yield from _idle_pass_lines(journal)
    yield from _time_lines(journal)

    mistakes = journal.usage_errors()
    causes: list[_Line] = []
    # To group causes looks at every cell again, which a green run does not need.
    if any_bad:
        causes += _cause_lines(journal, mistakes, fresh, common)
    yield from causes
    if missing := journal.not_run():
        yield f"{count(len(missing), 'planned verdict')} never came, for example {missing[0]}", {"red": True}
    for mistake in mistakes:
        if not any(mistake in line for line, _ in causes):
            yield mistake, {"red": True}


def _leak_lines(journal: Journal, selected: Iterable[PlannedCell]) -> Iterator[_Line]:
    for planned in selected:
        if leaks := journal.leaks(planned.cell.id):
            yield (f"{planned.cell.id} changed torch's settings, which were put back: {'; '.join(leaks)}",
                   {"yellow": True})


def _idle_pass_lines(journal: Journal) -> Iterator[_Line]:
    """Graph passes that had nothing to do in any cell, or in none of those with one table of decompositions."""
    for (name, table), cells in journal.idle_passes().items():
        advice = "so nothing is proved of it: give it a model with something to change"
        # With another table it found something: then the model is not to blame.
        if table:
            advice = (f"all with decompositions {table}, and did with others: the table may have taken its operators "
                      "apart; pytest-torchcompile explain CELL lists them")
        yield f"pass {name} changed no graph in {count(cells, 'cell')}, {advice}", {"yellow": True}


def _table_lines(by_place: _ByPlace) -> Iterator[str]:
    """A row for each backend, a column for each mode; nothing where no cell was selected."""
    if not by_place:
        return
    backends = dict.fromkeys(backend for backend, _ in by_place)
    modes = list(dict.fromkeys(mode for _, mode in by_place))
    rows = [["", *modes]]
    for backend in backends:
        rows.append([backend, *(_status_counts(by_place.get((backend, mode))) for mode in modes)])
    # As wide as the widest text of each column.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _total_lines(journal: Journal, selected: Sequence[PlannedCell], total: Counter[str],
                 any_bad: bool) -> Iterator[_Line]:
    compiled = journal.compiled_cells()
    earlier = len(compiled & journal.reused().keys())
    of_earlier = f" ({earlier} of them in an earlier run)" if earlier else ""
    fake = sum(lane_of(p.cell.wrapper) == "fake" for p in selected)
    lane = f"; {fake} in the fake lane, where no number is judged" if fake else ""
    colour = "red" if any_bad else "green"
    counts = _status_counts(total)
    if not selected:
        yield "no cell was selected, so nothing was judged here", {"yellow": True}
        return
    ran = f"{len(compiled)} ran compiled code{of_earlier}{lane}"
    yield f"{count(len(selected), 'cell')}: {counts}; {ran}", {colour: True}
    if not compiled:
        yield "no cell ran compiled code: this run proves nothing, and no gate will pass it", {"red": True}


def _time_lines(journal: Journal) -> Iterator[_Line]:
    """Where the time went, of a run that took long enough to be worth the question."""
    now = utc_time()
    wall = seconds_between(journal.started, now)
    # First: the block has every cell, and a short run should not wait for it.
    if wall is None or wall < _LONG_RUN:
        return
    block = journal.block()
    run = {**block["run"], "finished": block["run"]["finished"] or now}
    cost, _ = costs_of_block({**block, "run": run})
    yield f"{time_line(cost)}; pytest-torchcompile costs tells more", {}


def _column_lines(journal: Journal) -> Iterator[str]:
    """The numbers of checks that run on request only: how they are spread, and in which cell the worst one is."""
    for check in CHECKS.values():
        if check.on_request:
            for column in check.columns:
                yield from _column_line(column, journal.read_numbers(METRICS[column.name].read))


def _column_line(column: Column, numbers: Mapping[str, float]) -> Iterator[str]:
    """One line, or none where no cell has the number."""
    if not numbers:
        return
    least, most = min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)
    # Of a column with a lower limit, such as a speedup, the smallest number is the worst.
    worst = least if column.kind == "min" else most
    yield (f"{column.name}: {numbers[least]:.4g} to {numbers[most]:.4g}{column.unit} in "
           f"{count(len(numbers), 'cell')}, the worst in {worst}")


def _cut_short_lines(journal: Journal) -> Iterator[_Line]:
    """Fuzzing that its budget has ended, with the cell that got the least far."""
    cut_short = journal.cut_short()
    if not cut_short:
        return
    cell = min(cut_short, key=cut_short.__getitem__)
    compared, spent = cut_short[cell]
    yield (f"fuzz: {count(len(cut_short), 'cell was', 'cells were')} not fuzzed to the end: of {cell} "
           f"{count(compared, 'sequence was', 'sequences were')} compared, {ran_out(spent)}", {"yellow": True})


def reused_text(reused: Mapping[str, Mapping[str, Any]], total: int) -> str:
    """How many cells were not run because nothing of them had changed, and how old the oldest result is."""
    if not reused:
        return ""
    oldest = max(origin["age"] for origin in reused.values())
    commits = dict.fromkeys(str(origin["commit"])[:12] for origin in reused.values() if origin["commit"])
    of_commits = f", of commit {first_names(commits)}" if commits else ""
    cells = count(total, "cell")
    same_code = sum("comparisons" in origin for origin in reused.values())
    compiled = f" ({same_code} compiled to the same code, and not compared again)" if same_code else ""
    return f"{len(reused)} of {cells} reused{compiled}{of_commits}; the oldest result is {readable_age(oldest)} old"


def _cause_lines(journal: Journal, mistakes: Collection[str], fresh: Fresh | None,
                 common: _Common | None) -> Iterator[_Line]:
    """The headline, and what is wrong, once for all cells that it is wrong in.

    ``mistakes`` (of the matrix, which nobody can do without) are told in full.
    """
    cells = journal.block()["cells"]
    causes = group_causes(map(Facts, cells), fresh=fresh)
    if text := headline(causes):
        yield text, {"red": True}
    # No list is so long that wrong numbers are cut off.
    listed = [cause for place, cause in enumerate(causes) if place < _SHOWN or cause.wrong_numbers]
    for cause in listed:
        text = cause.problem.message
        if text not in mistakes:
            text = textwrap.shorten(text, _LONGEST_CAUSE, placeholder=" ...")
        if cause.problem.place:
            text += f" ({cause.problem.place})"
        if cause.new:
            text += ", new since the baseline"
        yield f"{count(len(cause.cells), 'cell')}  {cause.name}: {text}", {"red": True}
        yield f"    in {first_names(cause.cells, _SHOWN)}", {}
        # Of one cell its name says that.
        if common is not None and len(cause.cells) > 1 and (words := common(cells, cause.cells)):
            yield f"    of all cells those with {words}", {}
        for check in cause.consequences:
            yield f"    {check} follows from {cause.checks[0]}", {}
    more = len(causes) - len(listed)
    if more:
        yield f"and {count(more, 'more cause')}", {"red": True}


def _status_counts(counts: Counter[str] | None) -> str:
    """``12 pass, 1 xfail``, the good ones first."""
    if not counts:
        return "-"
    return listed_counts(counts, VERDICTS)
