"""Baseline: what is worse, better or gone beside an earlier run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.slower import Change, Pairs, slower
from pytest_torchcompile.quantity import count, first_names
from pytest_torchcompile.report.causes import Fresh, check_effect, portable_path
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["Change", "another_machine", "changes", "fresh"]

_Key = TypeVar("_Key", bound=tuple[Any, ...])
_MACHINE: Final = ("cpu", "cores", "devices")


def another_machine(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Why times of the two environments can't be compared; empty if they can."""
    for key in _MACHINE:
        if now.get(key) != then.get(key):
            return f"the baseline is of another machine: {key} was {then.get(key)} and is {now.get(key)}"
    return ""


def changes(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], comparable: bool,
            noun: str = "cell") -> list[Change]:
    """All changes, the worst first. ``comparable``: may times be compared? ``noun``: ``cell`` or ``test``."""
    both = {cell: (now[cell], then[cell]) for cell in now if cell in then}
    found = [*_failures(both, noun), *_breaks(both, noun), *_recompiles(both, noun), *_gone(now, then, noun)]
    if comparable:
        found += [change for name, metric in METRICS.items() if not metric.whole for change in slower(both, name)]
    return [*found, *_improved(both, noun), *_new(now, then, noun)]


def fresh(found: Sequence[Change]) -> Fresh:
    """What causes are told to be new by."""
    checks = {(cell, change.check) for change in found if change.kind == "failures" for cell in change.cells}
    places = {(cell, change.file, change.line) for change in found if change.kind in ("graph_breaks", "recompiles")
              for cell in change.cells}
    return Fresh(frozenset(checks), frozenset(places))


def _failures(both: Pairs, noun: str) -> Iterator[Change]:
    """By check, the worst first."""
    by_check: dict[str, list[str]] = {}
    for cell, (now, then) in both.items():
        for check in now.bad:
            if check not in then.bad:
                by_check.setdefault(check, []).append(cell)
    for check, cells in sorted(by_check.items(), key=lambda pair: -check_effect(pair[0]).severity):
        text = f"{check} held in the baseline and fails now in {count(len(cells), noun)}: {first_names(cells)}"
        yield Change("failures", text, tuple(cells), check=check)


def _measured(cell: JudgedCell, section: str) -> bool:
    return any(section in sections for sections in cell.ranks)


def _records(cell: JudgedCell, section: str) -> list[list[Mapping[str, Any]]]:
    """Of each rank."""
    found = (sections.get(section, {}).get(section) for sections in cell.ranks)
    return [[each for each in one if isinstance(each, dict)] if isinstance(one, list) else [] for one in found]


def _together(ranks: Iterable[Iterable[_Key]]) -> Counter[_Key]:
    """What ranks have alike counts once: each as often as on the rank that has most of it."""
    found: Counter[_Key] = Counter()
    for one in ranks:
        found |= Counter(one)
    return found


def _breaks(both: Pairs, noun: str) -> Iterator[Change]:
    """By the user's line; one that only moved, within its file and with the same reason, is not new."""
    places: dict[tuple[str, int, str], list[str]] = {}
    for cell, (now, then) in both.items():
        if not _measured(then, "graph_breaks"):
            continue
        old, found = (_together(map(_place, rank) for rank in _records(each, "graph_breaks")) for each in (then, now))
        moved = Counter((file, reason) for file, line, reason in old.elements())
        moved.subtract((file, reason) for file, line, reason in found.elements() if (file, line, reason) in old)
        for file, line, reason in (place for place in found.elements() if place not in old):
            if moved[file, reason] > 0:
                moved[file, reason] -= 1
            else:
                places.setdefault((file, line, reason), []).append(cell)
    for (file, line, reason), cells in places.items():
        yield Change("graph_breaks", f"new graph break at {file}:{line} in {count(len(cells), noun)}: {reason}",
                     tuple(cells), file, line)


def _place(found: Mapping[str, Any]) -> tuple[str, int, str]:
    line, reason = found.get("line"), str(found.get("reason", ""))
    return portable_path(str(found.get("file", ""))), line if isinstance(line, int) else 0, reason.partition("\n")[0]


def _recompiles(both: Pairs, noun: str) -> Iterator[Change]:
    places: dict[tuple[str, int, str, str], list[str]] = {}
    for cell, (now, then) in both.items():
        if not _measured(then, "recompiles"):
            continue
        ranks, before = _records(now, "recompiles"), _records(then, "recompiles")
        if max(map(len, ranks)) > max(map(len, before)):
            new, old = (_together(map(_guard, rank) for rank in each) for each in (ranks, before))
            for key in new - old or new:
                lines = [each.get("line", 0) for rank in ranks for each in rank if _guard(each) == key]
                places.setdefault((key[0], lines[0] if isinstance(lines[0], int) else 0, *key[1:]), []).append(cell)
    for (file, line, function, cause), cells in places.items():
        text = f"new recompile of {function} ({file}:{line}) in {count(len(cells), noun)}, cause: {cause}"
        yield Change("recompiles", text, tuple(cells), file, line)


def _guard(found: Mapping[str, Any]) -> tuple[str, str, str]:
    return portable_path(str(found.get("file", ""))), str(found.get("function", "")), str(found.get("cause", ""))


def _gone(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], noun: str) -> Iterator[Change]:
    lost = [cell for cell, old in then.items() if _ran(old) and cell not in now]
    idle = [cell for cell, old in then.items() if _ran(old) and cell in now and not _ran(now[cell])]
    for cells, what in ((lost, "gone from the matrix" if noun == "cell" else "gone"), (idle, "not run any more")):
        if cells:
            ran = "that ran in the baseline"
            told = count(len(cells), f"{noun} {ran} is", f"{noun}s {ran} are")
            yield Change("gone", f"{told} {what}: {first_names(cells)}", tuple(cells))


def _ran(cell: JudgedCell) -> bool:
    return bool(cell.verdicts) and cell.status not in ("skip", "not_run")


def _improved(both: Pairs, noun: str) -> Iterator[Change]:
    cells = [cell for cell, (now, then) in both.items() if then.bad and not now.bad and _ran(now)]
    if cells:
        hold = "holds" if len(cells) == 1 else "hold"
        text = f"{count(len(cells), noun)} failed in the baseline and {hold} now: {first_names(cells)}"
        yield Change("improved", text, tuple(cells))


def _new(now: Mapping[str, JudgedCell], then: Mapping[str, JudgedCell], noun: str) -> Iterator[Change]:
    cells = [cell for cell in now if cell not in then]
    if cells:
        text = f"{count(len(cells), f'{noun} is', f'{noun}s are')} not in the baseline: {first_names(cells)}"
        yield Change("new", text, tuple(cells))
