"""Baseline: what is worse, better or gone beside an earlier run.

A time, a speedup or a size is worse if it differs by more than the spread of its measurements.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy_limits import cache_answers, worst_rank
from pytest_torchcompile.observation import portable_path
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Fresh, check_effect
from pytest_torchcompile.report.metrics import METRICS, metric_spread

__all__ = ["Change", "another_machine", "find_changes", "fresh_places"]

Pairs: TypeAlias = "Mapping[str, tuple[JudgedCell, JudgedCell]]"
"""Cell to what it is now and what it was."""

SIGMAS: Final = 4.0
"""How many standard deviations are more than the spread."""
FEWEST: Final = 5
"""Cells from which the spread of single measurements can be told."""
LEAST_SIGMA: Final = 0.05
"""Relative: a spread that looks smaller was not seen often enough."""
LEAST_RATIO: Final = 1.25
LEAST_SECONDS: Final = 0.5
"""A compile that takes so little longer is not worth a word."""
_MACHINE: Final = ("cpu", "cores", "devices")


@dataclass(frozen=True)
class Change:
    """One thing that is not as in the baseline."""

    kind: str
    """A key of :data:`~pytest_torchcompile.gate.policy.BASELINE`, or ``improved`` or ``new``."""
    text: str
    cells: tuple[str, ...]
    file: str = ""
    line: int = 0
    check: str = ""
    """The check that held; of ``failures`` only."""
    sure: bool = True
    """False: of single measurements, whose spread was taken from that between cells."""
    metric: str = ""
    """The key of :data:`~pytest_torchcompile.report.metrics.METRICS` that got worse; of ``slower`` only."""
    about: str = ""
    """Without cells, place and numbers: a graph break's reason, the guard of a recompile."""


class BreakPlace(NamedTuple):
    """Where a graph broke, and why."""

    file: str
    line: int
    reason: str


class FailedGuard(NamedTuple):
    """What a recompile is told apart by. Not by its line: it moves with every edit above it."""

    file: str
    function: str
    cause: str


def another_machine(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Why times of the two environments can't be compared; empty if they can."""
    for key in _MACHINE:
        if now.get(key) != then.get(key):
            return f"the baseline is of another machine: {key} was {then.get(key)} and is {now.get(key)}"
    return ""


def find_changes(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], comparable: bool,
            noun: str = "cell") -> list[Change]:
    """All changes, the worst first. ``comparable``: may times be compared? ``noun``: ``cell`` or ``test``."""
    # Cells by their ids: a changed axis makes another cell, which is new.
    both = {cell: (now[cell], then[cell]) for cell in now if cell in then}
    changes = [*_new_failures(both, noun), *_new_breaks(both, noun), *_new_recompiles(both, noun),
               *_gone_cells(now, then, noun)]
    if comparable:
        for name, metric in METRICS.items():
            # Counts are no measurements: breaks and recompiles are compared one by one, above.
            if not metric.whole:
                changes += _slower_cells(both, name)
    return [*changes, *_improved_cells(both, noun), *_new_cells(now, then, noun)]


def fresh_places(changes: Sequence[Change]) -> Fresh:
    """What causes are told to be new by."""
    checks: set[tuple[str, str]] = set()
    places: set[tuple[str, str, int]] = set()
    for change in changes:
        if change.kind == "failures":
            checks.update((cell, change.check) for cell in change.cells)
        elif change.kind in ("graph_breaks", "recompiles"):
            places.update((cell, change.file, change.line) for cell in change.cells)
    return Fresh(frozenset(checks), frozenset(places))


# failures, graph breaks, recompiles


def _new_failures(both: Pairs, noun: str) -> Iterator[Change]:
    """By check, the worst first."""
    by_check: dict[str, list[str]] = {}
    for cell, (now, then) in both.items():
        for check in now.bad:
            if check not in then.bad:
                by_check.setdefault(check, []).append(cell)
    for check in sorted(by_check, key=_worst_check_first):
        cells = by_check[check]
        text = f"{check} held in the baseline and fails now in {count(len(cells), noun)}: {first_names(cells)}"
        yield Change("failures", text, tuple(cells), check=check)


def _worst_check_first(check: str) -> int:
    return -check_effect(check).severity


def _was_measured(cell: JudgedCell, section: str) -> bool:
    return any(section in sections for sections in cell.ranks)


def _records_by_rank(cell: JudgedCell, section: str) -> list[list[Mapping[str, Any]]]:
    """The records of a section, of each rank; what is no record is left out."""
    ranks: list[list[Mapping[str, Any]]] = []
    for sections in cell.ranks:
        records = sections.get(section, {}).get(section)
        if not isinstance(records, list):
            records = []
        ranks.append([each for each in records if isinstance(each, dict)])
    return ranks


def _count_over_ranks(ranks: Iterable[Iterable[Mapping[str, Any]]],
                      key_of: Callable[[Mapping[str, Any]], Any]) -> Counter[Any]:
    """What ranks have alike counts once: each as often as on the rank that has most of it."""
    counted: Counter[Any] = Counter()
    for records in ranks:
        # The union of counters takes the larger count.
        counted |= Counter(map(key_of, records))
    return counted


def _new_breaks(both: Pairs, noun: str) -> Iterator[Change]:
    """By the user's line."""
    places: dict[BreakPlace, list[str]] = {}
    for cell, (now, then) in both.items():
        # Of a run without that check everything would look new.
        if _was_measured(then, "graph_breaks"):
            for place in _breaks_not_moved(now, then):
                places.setdefault(place, []).append(cell)
    for place, cells in places.items():
        text = f"new graph break at {place.file}:{place.line} in {count(len(cells), noun)}: {place.reason}"
        yield Change("graph_breaks", text, tuple(cells), place.file, place.line, about=place.reason)


def _breaks_not_moved(now: JudgedCell, then: JudgedCell) -> Iterator[BreakPlace]:
    """New places. A break that only moved, within its file and with the same reason, is not new.

    Nor is one at the same line for another reason: each version of torch has other words for the same thing. A break
    that is gone stands for one new place, never for two.
    """
    old = _count_over_ranks(_records_by_rank(then, "graph_breaks"), _place_of_break)
    new = _count_over_ranks(_records_by_rank(now, "graph_breaks"), _place_of_break)
    gone, found = list((old - new).elements()), list((new - old).elements())
    lines = {(place.file, place.line) for place in found}
    # Where something breaks still, it is rather the reason that has other words.
    gone.sort(key=lambda place: (place.file, place.line) in lines)
    # A known place that breaks more often is not told, and stands for one that is gone.
    found.sort(key=lambda place: place not in old)
    not_moved = []
    for place in found:
        same_reason = [each for each in gone if (each.file, each.reason) == (place.file, place.reason)]
        if not _take_first(gone, same_reason):
            not_moved.append(place)
    for place in not_moved:
        same_line = [each for each in gone if place.line and (each.file, each.line) == (place.file, place.line)]
        if not _take_first(gone, same_line) and place not in old:
            yield place


def _take_first(places: list[BreakPlace], wanted: Sequence[BreakPlace]) -> bool:
    """Take the first of those that are wanted out of the places; False: there is none."""
    if not wanted:
        return False
    places.remove(wanted[0])
    return True


def _place_of_break(record: Mapping[str, Any]) -> BreakPlace:
    reason = str(record.get("reason", "")).partition("\n")[0]
    return BreakPlace(portable_path(str(record.get("file", ""))), _whole_number(record.get("line")), reason)


def _whole_number(value: Any) -> int:
    if isinstance(value, int):
        return value
    return 0


def _new_recompiles(both: Pairs, noun: str) -> Iterator[Change]:
    places: dict[tuple[FailedGuard, int], list[str]] = {}
    for cell, (now, then) in both.items():
        if not _was_measured(then, "recompiles"):
            continue
        ranks, before = _records_by_rank(now, "recompiles"), _records_by_rank(then, "recompiles")
        # Another guard in place of an old one is no more recompiles than before.
        if max(map(len, ranks)) <= max(map(len, before)):
            continue
        new, old = _count_over_ranks(ranks, _guard_of_recompile), _count_over_ranks(before, _guard_of_recompile)
        # More recompiles than before, yet no guard has more of them: then all are named.
        for guard in new - old or new:
            places.setdefault((guard, _line_of_guard(guard, ranks)), []).append(cell)
    for (guard, line), cells in places.items():
        text = f"new recompile of {guard.function} ({guard.file}:{line}) in {count(len(cells), noun)}, " \
               f"cause: {guard.cause}"
        about = f"{guard.function}, cause: {guard.cause}"
        yield Change("recompiles", text, tuple(cells), guard.file, line, about=about)


def _guard_of_recompile(record: Mapping[str, Any]) -> FailedGuard:
    return FailedGuard(portable_path(str(record.get("file", ""))), str(record.get("function", "")),
                       str(record.get("cause", "")))


def _line_of_guard(guard: FailedGuard, ranks: Iterable[Iterable[Mapping[str, Any]]]) -> int:
    """The line of the first recompile by this guard."""
    for records in ranks:
        for record in records:
            if _guard_of_recompile(record) == guard:
                return _whole_number(record.get("line", 0))
    return 0


# cells that came, went, or hold now


def _gone_cells(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], noun: str) -> Iterator[Change]:
    ran_before = [cell for cell, old in then.items() if _was_judged(old)]
    lost = [cell for cell in ran_before if cell not in now]
    idle = [cell for cell in ran_before if cell in now and not _was_judged(now[cell])]
    gone = {"cell": "gone from the matrix", "test": "gone"}[noun]
    for cells, what in ((lost, gone), (idle, "not run any more")):
        if cells:
            ran = "that ran in the baseline"
            subject = count(len(cells), f"{noun} {ran} is", f"{noun}s {ran} are")
            yield Change("gone", f"{subject} {what}: {first_names(cells)}", tuple(cells))


def _was_judged(cell: JudgedCell) -> bool:
    return bool(cell.verdicts) and cell.status not in ("skip", "not_run")


def _improved_cells(both: Pairs, noun: str) -> Iterator[Change]:
    cells = []
    for cell, (now, then) in both.items():
        # One that was skipped this time is not bad either, and no better for it.
        if then.bad and not now.bad and _was_judged(now):
            cells.append(cell)
    if cells:
        failed = "failed in the baseline and"
        subject = count(len(cells), f"{noun} {failed} holds", f"{noun}s {failed} hold")
        yield Change("improved", f"{subject} now: {first_names(cells)}", tuple(cells))


def _new_cells(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], noun: str) -> Iterator[Change]:
    cells = [cell for cell in now if cell not in then]
    if cells:
        text = f"{count(len(cells), f'{noun} is', f'{noun}s are')} not in the baseline: {first_names(cells)}"
        yield Change("new", text, tuple(cells))


# times, speedups, sizes


def _slower_cells(both: Pairs, name: str) -> Iterator[Change]:
    """By the spread of its repetitions where the section tells it; else by the spread between the cells' ratios."""
    factor = {"max": 1, "min": -1}[METRICS[name].kind]
    singles: dict[str, float] = {}
    for cell, (now, then) in both.items():
        new, old = worst_rank(now.ranks, name), worst_rank(then.ranks, name)
        # A logarithm of nothing: what took no time has no ratio.
        if not new or not old or min(new, old) <= 0:
            continue
        new_spread, old_spread = _largest_spread(now, name), _largest_spread(then, name)
        if new_spread is not None and old_spread is not None:
            sigma = math.hypot(new_spread, old_spread)
            # Two percent: a spread of zero is no licence for any difference.
            if factor * (new - old) > SIGMAS * sigma and factor * math.log(new / old) > math.log(1.02):
                text = f"{_was_and_is(cell, name, old, new)}, more than {SIGMAS:g} times the spread of {sigma:.2g}"
                yield Change("slower", text, (cell,), metric=name)
        # A compile that a cache answered is no slower compile than one that no cache answered: another thing.
        elif name != "compile_seconds" or cache_answers(now.ranks) == cache_answers(then.ranks):
            singles[cell] = factor * math.log(new / old)
    # A few cells tell nothing of the spread between cells.
    if len(singles) >= FEWEST:
        yield from _slower_outliers(singles, both, name)


def _largest_spread(cell: JudgedCell, name: str) -> float | None:
    """Of its ranks; None where no rank repeated the measurement."""
    spreads = [metric_spread(sections, name) for sections in cell.ranks]
    return max((sigma for sigma in spreads if sigma is not None), default=None)


def _slower_outliers(ratios: Mapping[str, float], both: Pairs, name: str) -> Iterator[Change]:
    """All cells together, and those that stand out from them."""
    shift = statistics.median(ratios.values())
    # 1.4826 times the median deviation estimates a normal distribution's sigma, and no outlier moves it.
    sigma = max(LEAST_SIGMA, 1.4826 * statistics.median(abs(ratio - shift) for ratio in ratios.values()))
    # The standard error of a median is 1.2533 (the root of pi/2) times that of a mean.
    if shift > max(math.log(LEAST_RATIO), SIGMAS * 1.2533 * sigma / math.sqrt(len(ratios))):
        text = f"{METRICS[name].help}: {_in_times(shift)} worse than in the baseline, the median of " \
               f"{count(len(ratios), 'cell')}"
        yield Change("slower", text, tuple(ratios), sure=False, metric=name)
    for cell, ratio in ratios.items():
        now, then = both[cell]
        new, old = worst_rank(now.ranks, name) or 0.0, worst_rank(then.ranks, name) or 0.0
        if name == "compile_seconds" and abs(new - old) < LEAST_SECONDS:
            continue
        if ratio - shift > max(SIGMAS * sigma, math.log(LEAST_RATIO)):
            text = f"{_was_and_is(cell, name, old, new)}, {_in_times(ratio - shift)} as much as the other cells'"
            yield Change("slower", text, (cell,), sure=False, metric=name)


def _in_times(logarithm: float) -> str:
    # A figure that was nearly nothing would else overflow; so many times is absurd anyway.
    return f"{math.exp(min(logarithm, 50.0)):.2f} times"


def _was_and_is(cell: str, name: str, old: float, new: float) -> str:
    metric = METRICS[name]
    return f"{cell}: {metric.help} was {old:.3g}{metric.unit} and is {new:.3g}{metric.unit}"
