"""Paired reports: what is worse, and what is better, with the new version. A pure function of the reports of both.

It asks :func:`~pytest_torchcompile.gate.baseline.find_changes`, as baseline and page do, of each pair of an old and a
new run. Only what all pairs have is told as a difference; so noise of one run is not. The same function asked the other
way round says what got better.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from pytest_torchcompile.errors import NothingToJudge
from pytest_torchcompile.gate.baseline import Change, another_machine, find_changes, fresh_places
from pytest_torchcompile.gate.gate import judge_cells
from pytest_torchcompile.gate.judged import BAD, JudgedCell
from pytest_torchcompile.gate.policy import Policy
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.observation import portable_path
from pytest_torchcompile.report.causes import Cause, Fresh, group_causes
from pytest_torchcompile.report.code_changes import CodeChanges, compare_code
from pytest_torchcompile.report.facts import Facts
from pytest_torchcompile.report.flakes import SAYS_NOTHING, find_flakes
from pytest_torchcompile.report.merging import Merged
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.upgrade.run_noise import is_beyond_noise

__all__ = ["Figure", "NewCause", "UpgradeComparison", "Waver", "compare_versions"]

Cells: TypeAlias = "dict[str, JudgedCell]"
_Atom: TypeAlias = "tuple[str, ...]"
"""One change of one cell, as another run has it too."""

FIGURES_NEED: Final = 2
"""Runs of each version from which the noise of figures can be told."""


@dataclass(frozen=True)
class NewCause:
    """A cause that the new version has and the old one has not, and the cells in which it is new."""

    cause: Cause
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A number that is not what it was, in every pair of runs."""

    metric: str
    cells: tuple[str, ...]
    """Several: all cells together, by their median."""
    old: tuple[float, ...]
    """Of each run; of several cells the median of the ratios to the first old run, which is 1 there."""
    new: tuple[float, ...]
    better: bool


@dataclass(frozen=True)
class Waver:
    """A check of a cell that has two verdicts with one and the same version."""

    cell: str
    check: str
    old: tuple[str, ...]
    """Its verdict in each run."""
    new: tuple[str, ...]


@dataclass
class UpgradeComparison:
    """Everything that differs between two versions."""

    cells: int
    """Cells that both versions judged."""
    runs: tuple[int, int]
    """Runs of the old and of the new version."""
    causes: list[NewCause] = field(default_factory=list)
    """The worst first; also what passes unexpectedly, which is good news."""
    changes: list[Change] = field(default_factory=list)
    """Other changes for the worse, which no cause tells: graph breaks and recompiles within limits, cells that are
    gone."""
    better: list[Change] = field(default_factory=list)
    """What the old version has and the new one has not; as the changes from new to old."""
    figures: list[Figure] = field(default_factory=list)
    measured: frozenset[str] = frozenset()
    """Metrics that both versions have of some cell."""
    figures_note: str = ""
    """Why figures were not compared; empty if they were."""
    wavers: list[Waver] = field(default_factory=list)
    partly: tuple[str, ...] = ()
    """Cells that some runs of one version judged, and others of the same version did not."""
    ended_early: tuple[str, ...] = ()
    """Cells of which the old version came to no verdict, for their process ended or gave no answer: of them nothing is
    better."""
    code: CodeChanges = field(default_factory=CodeChanges)
    code_wavers: tuple[str, ...] = ()
    """Cells whose code differs between runs of one version, and is not compared."""


def compare_versions(olds: Sequence[Merged], news: Sequence[Merged],
                     today: datetime.date | None = None) -> UpgradeComparison:
    """Compare the runs of two versions; at least one of each.

    Raises :class:`~pytest_torchcompile.errors.NothingToJudge` where no cell was judged by both.
    """
    today = today or datetime.date.today()
    old_cells = [judge_cells(run, Policy(), today) for run in olds]
    new_cells = [judge_cells(run, Policy(), today) for run in news]
    ended_early = _without_verdict(old_cells)
    both = [name for name in _judged_by_all([*old_cells, *new_cells]) if name not in ended_early]
    if not both:
        raise NothingToJudge("upgrade: no cell was judged with both versions, so nothing can be said; see the logs "
                             "beside the reports")
    found = UpgradeComparison(len(both), (len(olds), len(news)))
    found.wavers = list(_find_wavers(both, old_cells, new_cells))
    found.partly = tuple(_judged_at_times(old_cells, new_cells))
    found.ended_early = tuple(ended_early)
    found.measured = frozenset(_measured_metrics(both, old_cells[0], new_cells[0]))
    elsewhere = another_machine(news[0].environment, olds[0].environment)
    found.figures_note = _why_no_figures(elsewhere, olds, news)
    worse = _steady_changes(old_cells, new_cells, figures=not found.figures_note)
    then = [_cells_without_names(run, ended_early) for run in old_cells]
    now = [_cells_without_names(run, ended_early) for run in new_cells]
    # Asked the other way round: what would be a loss on the way back is a gain.
    better = _steady_changes(now, then, figures=not found.figures_note)
    fresh = fresh_places(worse)
    found.causes = list(_new_causes(news[0], new_cells[0], fresh))
    for change in worse:
        if change.kind == "slower":
            found.figures.append(_figure(change, old_cells, new_cells, False))
        elif not _is_told(change, found.causes):
            found.changes.append(change)
    for change in better:
        if change.kind == "slower":
            found.figures.append(_figure(change, old_cells, new_cells, True))
        # On the way back a gain is a loss and a new cell one that is gone: neither is good news of the new version.
        elif change.kind not in ("improved", "new") and not _only_unexpected(change, old_cells[0]):
            found.better.append(change)
    found.code_wavers = tuple(_cells_of_changed_code(olds) | _cells_of_changed_code(news))
    found.code = compare_code(_cells_without(olds[0], found.code_wavers), _cells_without(news[0], found.code_wavers))
    return found


def _judged_by_all(runs: Sequence[Cells]) -> list[str]:
    """Cells of which each run has a verdict that says something."""
    cells = list(runs[0])
    for run in runs:
        cells = [name for name in cells if name in run and _was_judged(run[name])]
    return cells


def _without_verdict(olds: Sequence[Cells]) -> list[str]:
    """Cells with the status ``error`` in some run of the old version.

    With the new version it counts. With the old one it may be the machine's; a crash is a status of its own.
    """
    names: dict[str, None] = {}
    for run in olds:
        names |= dict.fromkeys(name for name, cell in run.items() if cell.status == "error")
    return list(names)


def _cells_without_names(run: Cells, names: Sequence[str]) -> Cells:
    return {name: cell for name, cell in run.items() if name not in names}


def _judged_at_times(olds: Sequence[Cells], news: Sequence[Cells]) -> Iterator[str]:
    """No pair of runs can tell of such a cell what every pair has."""
    for name in dict.fromkeys(itertools.chain(*olds, *news)):
        for runs in (olds, news):
            judged = [name in run and _was_judged(run[name]) for run in runs]
            if any(judged) and not all(judged):
                yield name
                break


def _was_judged(cell: JudgedCell) -> bool:
    return bool(cell.verdicts) and cell.status not in SAYS_NOTHING


def _measured_metrics(cells: Sequence[str], old: Cells, new: Cells) -> Iterator[str]:
    for name in METRICS:
        for cell in cells:
            if all(worst_rank(run[cell].ranks, name) is not None for run in (old, new)):
                yield name
                break


def _why_no_figures(elsewhere: str, olds: Sequence[Merged], news: Sequence[Merged]) -> str:
    if elsewhere:
        return f"{elsewhere}; times and sizes are not compared"
    if min(len(olds), len(news)) < FIGURES_NEED:
        return "each version was run once, so the noise of times and sizes is not known, and they are not compared"
    if not _ran_in_turn(olds, news):
        return ("the runs of both versions were not made in turn, so the load of the machine would look like the "
                "version, and times and sizes are not compared")
    return ""


def _ran_in_turn(olds: Sequence[Merged], news: Sequence[Merged]) -> bool:
    """Did each run of one version come after one of the other? A load that grows then slows both down.

    Reports that do not tell when they began are taken in the order in which they are given.
    """
    runs = []
    for old, new in itertools.zip_longest(olds, news):
        runs += [(_began(run), version) for run, version in ((old, "old"), (new, "new")) if run is not None]
    # Stable, so that runs of the same second stay as they are.
    runs.sort(key=lambda run: run[0])
    return all(one[1] != other[1] for one, other in itertools.pairwise(runs))


def _began(run: Merged) -> str:
    """In UTC, as ISO 8601 has it, which sorts as times do."""
    return min(str((report.block.get("run") or {}).get("started", "")) for report in run.reports)


# ------------------------------------------------------------------------------------------------------- what is steady
def _steady_changes(befores: Sequence[Cells], afters: Sequence[Cells], *, figures: bool) -> list[Change]:
    """The changes of the first pair, with those cells in which every other pair has them too."""
    steady: set[_Atom] | None = None
    for before, after in itertools.product(befores, afters):
        atoms = _atoms_in(find_changes(after, before, comparable=figures))
        steady = atoms if steady is None else steady & atoms
    # What a version differs in from itself is noise, whichever way it goes.
    for runs in (befores, afters):
        for one, other in itertools.permutations(runs, 2):
            for change in find_changes(one, other, comparable=figures):
                if change.kind == "slower":
                    steady = {atom for atom in steady or () if not _is_same_figure(atom, change)}
    kept = []
    for change in find_changes(afters[0], befores[0], comparable=figures):
        cells = tuple(cell for cell in change.cells if _atom(change, cell) in (steady or ()))
        if cells and (change.kind != "slower" or is_beyond_noise(change, befores, afters)):
            kept.append(replace(change, cells=cells))
    return kept


def _atoms_in(changes: Sequence[Change]) -> set[_Atom]:
    atoms: set[_Atom] = set()
    for change in changes:
        atoms.update(_atom(change, cell) for cell in change.cells)
    return atoms


def _atom(change: Change, cell: str) -> _Atom:
    # All cells together are another statement than each of them alone.
    reach = "all" if change.kind == "slower" and len(change.cells) > 1 else "one"
    # A break is told by its line: the words of its reason may have an address, which each run has anew.
    about = str(change.line) if change.kind == "graph_breaks" else change.about
    return change.kind, change.check, change.file, about, change.metric, reach, cell


def _is_same_figure(atom: _Atom, change: Change) -> bool:
    """Is the atom of the same metric, in a cell that the change is of?"""
    # By place: an atom is a plain tuple, so that sets of them can be cut with each other.
    return (atom[0], atom[4]) == ("slower", change.metric) and atom[-1] in change.cells


def _find_wavers(cells: Sequence[str], olds: Sequence[Cells], news: Sequence[Cells]) -> Iterator[Waver]:
    """Two verdicts with one version, which is what a verdict rests on here."""
    for name in cells:
        sightings = []
        for version, runs in (("old", olds), ("new", news)):
            for run in runs:
                verdicts = {check: _verdict(run[name], check) for check in run[name].verdicts}
                sightings.append((version, verdicts))
        for check in dict.fromkeys(flake.check for flake in find_flakes(sightings)):
            old = tuple(_verdict(run[name], check) for run in olds)
            new = tuple(_verdict(run[name], check) for run in news)
            yield Waver(name, check, old, new)


def _verdict(cell: JudgedCell, check: str) -> str:
    return str(cell.verdicts.get(check, {}).get("verdict", "not_run"))


# -------------------------------------------------------------------------------------------------------------- causes
def _new_causes(run: Merged, cells: Cells, fresh: Fresh) -> Iterator[NewCause]:
    """Why cells fail that did not, as the gate groups them."""
    facts = []
    for name, cell in cells.items():
        facts.append(Facts({**run.cells[name], "status": cell.status, "checks": cell.bad}))
    for cause in group_causes(facts, BAD, fresh):
        if not cause.new:
            continue
        place = (portable_path(cause.problem.file), cause.problem.line)
        new = tuple(cell for cell in cause.cells if _is_fresh(cell, cause, place, fresh))
        if new:
            yield NewCause(cause, new)


def _is_fresh(cell: str, cause: Cause, place: tuple[str, int], fresh: Fresh) -> bool:
    checks = (*cause.checks, *cause.consequences)
    return (cell, *place) in fresh.places or any((cell, check) in fresh.checks for check in checks)


def _is_told(change: Change, causes: Sequence[NewCause]) -> bool:
    """Does some new cause tell of the change, in all of its cells?"""
    if change.kind in ("improved", "new"):
        return True
    told: set[str] = set()
    for new in causes:
        problem = new.cause.problem
        of_check = change.check in (*new.cause.checks, *new.cause.consequences)
        if of_check or (portable_path(problem.file), problem.line) == (change.file, change.line):
            told.update(new.cells)
    return told.issuperset(change.cells)


def _only_unexpected(change: Change, olds: Cells) -> bool:
    """Is it a check that passed unexpectedly, and is expected rightly now? Nothing has got better then."""
    return bool(change.check) and all(_verdict(olds[cell], change.check) == "xpass" for cell in change.cells)


# ----------------------------------------------------------------------------------------------------- figures and code
def _figure(change: Change, olds: Sequence[Cells], news: Sequence[Cells], better: bool) -> Figure:
    first = [_number(olds[0], cell, change.metric) for cell in change.cells]
    # Of one cell the reader wants the figure itself; of several only ratios can be put together.
    if len(change.cells) == 1:
        first = [1.0]
    old = tuple(_median_of_ratios(run, change, first) for run in olds)
    new = tuple(_median_of_ratios(run, change, first) for run in news)
    return Figure(change.metric, change.cells, old, new, better)


def _median_of_ratios(run: Cells, change: Change, first: Sequence[float]) -> float:
    ratios = []
    for cell, base in zip(change.cells, first, strict=True):
        number = _number(run, cell, change.metric)
        if base and number:
            ratios.append(number / base)
    ratios.sort()
    return ratios[len(ratios) // 2] if ratios else 0.0


def _number(run: Cells, cell: str, metric: str) -> float:
    return worst_rank(run[cell].ranks, metric) or 0.0


def _cells_of_changed_code(runs: Sequence[Merged]) -> set[str]:
    """Cells whose code is not the same in all runs of one version."""
    changed: set[str] = set()
    for other in runs[1:]:
        for change in compare_code(runs[0].cells.values(), other.cells.values()).changes:
            changed.update(change.cells)
    return changed


def _cells_without(run: Merged, left_out: Sequence[str]) -> list[Mapping[str, Any]]:
    return [cell for name, cell in run.cells.items() if name not in left_out]
