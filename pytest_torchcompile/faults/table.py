"""Table: what was caught, missed and falsely reported, by kind. Markdown, which a terminal shows as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_torchcompile.faults.case import KINDS
from pytest_torchcompile.faults.outcome import Outcome

__all__ = ["table"]

_APART = {"below noise": "below rounding", "mended": "not in this torch", "unavailable": "not run"}
_COLUMNS = ("kind", "planted", "caught", "missed", "below rounding", "false alarms")


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each kind of problem; a false alarm counts under every kind that it was reported as."""
    alarms = Counter(kind for o in outcomes if o.verdict == "false alarm"
                     for kind in {r.kind for r in o.reports} - {o.case.kind})
    planted = [o for o in outcomes if o.case.kind]
    rows = [_row(kind, [o for o in planted if o.case.kind == kind], alarms[kind]) for kind in KINDS]
    total = _row("all", planted, sum(o.verdict == "false alarm" for o in outcomes))
    cells = [_COLUMNS, *(row for row in rows if any(row[1:])), total]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(_COLUMNS))]
    lines = [f"| {' | '.join(_aligned(row, widths))} |" for row in cells]
    lines.insert(1, f"| {'-' * widths[0]} | {' | '.join('-' * (w - 1) + ':' for w in widths[1:])} |")
    return "\n".join([*lines, "", *_remarks(outcomes)])


def _row(kind: str, outcomes: Sequence[Outcome], alarms: int) -> tuple[str | int, ...]:
    verdicts = Counter(o.verdict for o in outcomes)
    missed = sum(not o.ok for o in outcomes)
    return kind, len(outcomes), verdicts["caught"], missed, verdicts["below noise"], alarms


def _aligned(row: Sequence[str | int], widths: Sequence[int]) -> Iterator[str]:
    yield f"{row[0]:{widths[0]}}"
    yield from (f"{value:>{width}}" for value, width in zip(row[1:], widths[1:], strict=True))


def _remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    correct = [o for o in outcomes if not o.case.kind and not o.case.control]
    controls = [o for o in outcomes if o.case.control]
    yield (f"False alarms are counted over {len(correct)} correct backends that round differently and "
           f"{len(controls)} programs with nothing planted in them.")
    for verdict, why in _APART.items():
        names = [f"{o.case.name} ({o.text})" for o in outcomes if o.verdict == verdict]
        if names:
            yield f"{len(names)} {why}: {'; '.join(names)}."
