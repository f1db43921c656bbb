"""PastRuns: the runs of a folder of reports, each as the few numbers and verdicts that a trend is made of.

A report of a thousand cells has tens of megabytes, so each is read, shortened to a :class:`PastRun`, and forgotten.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Final

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.baseline import another_machine
from pytest_torchcompile.gate.judged import BAD, JudgedCell
from pytest_torchcompile.gate.policy_limits import cache_answers, worst_rank
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.facts import Facts, as_number
from pytest_torchcompile.report.flakes import key_of_cell
from pytest_torchcompile.report.kept_runs import RUNS
from pytest_torchcompile.report.merging import ONE_RUN, Merged, merge_reports
from pytest_torchcompile.report.reading import Report, read_report

__all__ = ["History", "PastRun", "commit_in_words", "day_in_words", "label_of_run", "moment_in_words", "read_folder"]

COMMIT: Final = 8
"""Letters of a commit's name."""
MOST: Final = 30
"""Runs that a trend shows; of more, the newest."""
# A fresh environment differs in dozens of packages, and the first few tell that it is one.
PACKAGES_SHOWN: Final = 6
SOFTWARE: Final = ("torch", "triton", "python", "compiler", "cuda", "driver")


@dataclass(frozen=True)
class PastRun:
    """One run."""

    paths: tuple[str, ...]
    """Its reports: one, or one of each shard."""
    started: str
    """When it began, as the report has it; empty: not told (reports of schema 1.0)."""
    git: Mapping[str, Any] | None
    environment: Mapping[str, Any]
    matrix: str
    statuses: dict[str, str] = field(default_factory=dict)
    """Cell to its status."""
    axes: dict[str, dict[str, str]] = field(default_factory=dict)
    red: dict[str, frozenset[str]] = field(default_factory=dict)
    """Cell to the checks that do not hold in it."""
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Cell to the verdict of each check."""
    keys: dict[str, str] = field(default_factory=dict)
    """Cell to the key of what its verdicts rest on; empty where too little is known."""
    speedups: dict[str, float] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    """Of cells that no compile cache answered for: with its answers a compile is another thing."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Every installed package and its version; empty: not told (reports of older versions of this package)."""
    matrix_path: str = ""
    """The matrix as the run was given it; :attr:`matrix` is the name of its file."""

    @property
    def label(self) -> str:
        """Its commit and its day."""
        return label_of_run(self.git, self.started)

    def software_changes(self, before: PastRun) -> list[str]:
        """``torch 2.12.0 to 2.13.0``, for what is not as in the run before it."""
        changes = []
        for name in SOFTWARE:
            old, new = before.environment.get(name), self.environment.get(name)
            # Where nothing ran no environment is known.
            if before.environment and self.environment and old != new:
                changes.append(f"{name} {old or 'none'} to {new or 'none'}")
        changes += self._package_changes(before)
        if before.environment and self.environment and another_machine(self.environment, before.environment):
            changes.append("another machine")
        return changes

    def _package_changes(self, before: PastRun) -> Iterator[str]:
        """The same of all other packages, where both runs tell them."""
        if not before.packages or not self.packages:
            return
        changed = []
        for name in sorted(before.packages.keys() | self.packages.keys()):
            old, new = before.packages.get(name), self.packages.get(name)
            if old != new and name not in SOFTWARE:
                changed.append(f"{name} {old or 'none'} to {new or 'none'}")
        yield from changed[:PACKAGES_SHOWN]
        # In another environment everything may be another one.
        if len(changed) > PACKAGES_SHOWN:
            yield f"{count(len(changed) - PACKAGES_SHOWN, 'package')} more"


@dataclass(frozen=True)
class History:
    """The runs of one matrix, the oldest first."""

    runs: tuple[PastRun, ...] = ()
    notes: tuple[str, ...] = ()
    """What of the folder is not shown, and why; a sentence each."""

    @property
    def reference(self) -> int:
        """Which run says what is new: the last one of another commit; where none is told, the one before the last.

        -1: there is none.
        """
        last = len(self.runs) - 1
        commit = _commit_of(self.runs[-1]) if self.runs else ""
        for index in range(last - 1, -1, -1):
            if _commit_of(self.runs[index]) != commit:
                return index
        return last - 1 if last > 0 else -1

    def judged_again(self, cells: Mapping[str, JudgedCell]) -> History:
        """With the verdicts of the last run as they hold under a policy, and on this day."""
        if not self.runs:
            return self
        statuses = {name: cell.status for name, cell in cells.items()}
        red = {name: frozenset(cell.bad) for name, cell in cells.items()}
        return History((*self.runs[:-1], replace(self.runs[-1], statuses=statuses, red=red)), self.notes)

    def red_since(self, cell: str, checks: Iterable[str]) -> int | None:
        """From which run on the cell fails by one of the checks, without a break up to the last run; None: it does not.

        A run that did not judge the cell tells nothing, and so is no break.
        """
        wanted = frozenset(checks)
        first = None
        for index in range(len(self.runs) - 1, -1, -1):
            run = self.runs[index]
            if run.statuses.get(cell, "not_run") in ("not_run", "skip"):
                continue
            if not run.red.get(cell, frozenset()) & wanted:
                break
            first = index
        return first


def _commit_of(run: PastRun) -> str:
    return str(run.git["commit"]) if run.git else ""


# ------------------------------------------------------------------------------------------------------ names of a run
def moment_in_words(text: str) -> datetime.datetime | None:
    """A time of a report, in UTC; None where it is none."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    # A report that was edited may name no zone; ours are written in UTC.
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    try:
        return moment.astimezone(datetime.timezone.utc)
    # A time at the ends of what a calendar holds.
    except (OverflowError, ValueError):
        return None


def day_in_words(started: str) -> str:
    """The day of a run, ``2026-11-20``."""
    moment = moment_in_words(started)
    return moment.strftime("%Y-%m-%d") if moment else "day not told"


def commit_in_words(git: Mapping[str, Any] | None) -> str:
    """The first letters of a commit's name."""
    return str(git["commit"])[:COMMIT] if git else "no commit"


def label_of_run(git: Mapping[str, Any] | None, started: str) -> str:
    """Commit and day."""
    return f"{commit_in_words(git)}, {day_in_words(started)}"


# ----------------------------------------------------------------------------------------------------------- the folder
def read_folder(folder: Path) -> tuple[list[Report], History]:
    """The reports of the newest run in a folder, or one level below it, and the runs of its matrix.

    Files that are no reports of ours are named in one sentence.
    Raises :class:`~pytest_torchcompile.errors.ReportError` where there is no report at all.
    """
    unread: list[str] = []
    shards: list[Report] = []
    runs = list(_whole_runs((folder, *_folders_in(folder)), shards, unread))
    for group in group_shards(shards):
        try:
            # A folder of CI artifacts may lack a shard of one run; the other runs are worth showing all the same.
            runs.append(shorten_run(merge_reports(group)))
        except ReportError as error:
            unread.append(str(error))
    if not runs:
        because = f"; {_unread_in_words(unread)}" if unread else ""
        raise ReportError(f"{folder}: holds no report of ours, nor does a folder in it{because}; expected reports of "
                          f"`pytest --compile-matrix`, such as {RUNS}/DATE-COMMIT/report.json")
    return _newest_and_history(_without_repeats(runs), unread)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError as error:
        raise ReportError(f"{folder}: cannot be read: {error.strerror or error}") from None


def _whole_runs(folders: Iterable[Path], shards: list[Report], unread: list[str]) -> Iterator[PastRun]:
    """The runs that are one report each. ``shards`` gets the other reports, ``unread`` why files are none."""
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            try:
                report = read_report(path)
                if report.shard[1] > 1:
                    shards.append(report)
                else:
                    yield shorten_run(merge_reports([report]))
            except ReportError as error:
                unread.append(str(error))


def group_shards(shards: Iterable[Report]) -> list[list[Report]]:
    """The shards of each run, in any folders: in the order of time, each goes to the last run that lacks it."""
    groups: list[list[Report]] = []
    of_key: dict[str, list[list[Report]]] = {}
    for report in sorted(shards, key=lambda report: _seconds_of(_started(report))):
        known = of_key.setdefault(_key_of_shards(report), [])
        lacking = [group for group in known if not _has_shard(group, report)]
        # The last one: a shard that came late belongs to the run that began last before it.
        if lacking:
            lacking[-1].append(report)
        else:
            known.append([report])
            groups.append(known[-1])
    return groups


def _has_shard(group: Iterable[Report], report: Report) -> bool:
    return any(other.shard == report.shard for other in group)


def _started(report: Report) -> str:
    """Empty in reports of schema 1.0."""
    return str((report.block["run"] or {}).get("started", ""))


def _key_of_shards(report: Report) -> str:
    """What shards of one run have in common; others are refused when they are merged."""
    run = report.block["run"] or {}
    numbers = [run.get("ci", {}).get(name) for name in sorted(ONE_RUN)]
    return f"{report.shard[1]} {report.block['matrix']['sha256']} {run.get('git')} {numbers}"


def shorten_run(merged: Merged) -> PastRun:
    """What a trend needs of a run."""
    started = min(map(_started, merged.reports))
    run = PastRun(tuple(report.name for report in merged.reports), started, merged.git, merged.environment,
                  PurePath(merged.matrix["path"].replace("\\", "/")).name, matrix_path=merged.matrix["path"],
                  packages=(merged.reports[0].block["run"] or {}).get("packages", {}))
    for name, cell in merged.cells.items():
        facts = Facts(cell)
        run.statuses[name], run.axes[name] = facts.status, facts.axes
        run.red[name] = frozenset(verdict.check for verdict in facts.verdicts if verdict.verdict in BAD)
        run.verdicts[name] = {verdict.check: verdict.verdict for verdict in facts.verdicts}
        run.keys[name] = key_of_cell(cell, merged.reports[0].block["run"], merged.environment)
        speedup = as_number(worst_rank(facts.ranks, "speedup"))
        if speedup is not None:
            run.speedups[name] = speedup
        seconds = as_number(worst_rank(facts.ranks, "compile_seconds"))
        if seconds is not None and "hit" not in cache_answers(facts.ranks) and "reused" not in cell:
            run.compile_seconds[name] = seconds
    return run


def _without_repeats(runs: Sequence[PastRun]) -> list[PastRun]:
    """A run is there twice where its report was copied."""
    known: dict[object, PastRun] = {}
    for run in runs:
        identity = (run.started, run.matrix, len(run.paths), tuple(run.statuses.items()))
        # Reports of schema 1.0 do not say when they began, so their files tell them apart.
        known.setdefault(identity if run.started else run.paths, run)
    return list(known.values())


def _newest_and_history(runs: Sequence[PastRun], unread: Sequence[str]) -> tuple[list[Report], History]:
    # Without a time a run is taken for the oldest.
    ordered = sorted(runs, key=lambda run: (_seconds_of(run.started), run.paths))
    newest = ordered[-1]
    alike = [run for run in ordered if run.matrix == newest.matrix]
    notes = []
    if len(alike) < len(ordered):
        others = dict.fromkeys(run.matrix for run in ordered if run.matrix != newest.matrix)
        left_out = count(len(ordered) - len(alike), "run is", "runs are")
        notes.append(f"{left_out} of another matrix, and not shown: {first_names(others)}.")
    if len(alike) > MOST:
        notes.append(f"{count(len(alike) - MOST, 'older run is', 'older runs are')} not shown.")
    if unread:
        notes.append(f"{_unread_in_words(unread)}.")
    return [read_report(path) for path in newest.paths], History(tuple(alike[-MOST:]), tuple(notes))


def _seconds_of(started: str) -> float:
    moment = moment_in_words(started)
    return moment.timestamp() if moment else float("-inf")


def _unread_in_words(unread: Sequence[str]) -> str:
    """One sentence for all files that were left out, with the reasons of the first few."""
    return f"{count(len(unread), 'file was', 'files were')} left out: {first_names(unread)}"
