"""Measures: the numbers that a heat map can be coloured by, as far as a report has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias

from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.report.facts import Facts, as_number
from pytest_torchcompile.report.metrics import METRICS

__all__ = ["measured"]

Measure: TypeAlias = Callable[[Facts], "float | None"]


def _noise(facts: Facts) -> float | None:
    """The largest error over its noise of what was compared; 0 where everything is bitwise equal."""
    if not any(section.get("compared") for section in facts.compared.values()):
        return None
    return max((leaf.rms for leaf in facts.leaves if as_number(leaf.rms) and leaf.rms), default=0.0)


def _metric(name: str, facts: Facts) -> float | None:
    return as_number(worst_rank(facts.ranks, name))


_OURS: Final[dict[str, Measure]] = {
    **{name: partial(_metric, name) for name in METRICS},
    "coverage, %": lambda facts: None if facts.coverage is None else 100 * facts.coverage,
    "error over noise": _noise,
    "cell_seconds": lambda facts: facts.total_seconds,
}
_READ: Final = frozenset({"compiles", "graph_breaks", "recompiles", "kernels"})


def measured(cells: Sequence[Facts]) -> dict[str, list[float | None]]:
    """Each number that some cell has, and its value for every cell.

    Numbers that other sections hold at their top are among them, as ``section: key``.
    """
    found = {name: [measure(cell) for cell in cells] for name, measure in _OURS.items()}
    for section, key in dict.fromkeys(_others(cells)):
        found[f"{section}: {key}"] = [as_number(cell.section(section).get(key)) for cell in cells]
    return {name: numbers for name, numbers in found.items() if any(n is not None for n in numbers)}


def _others(cells: Iterable[Facts]) -> Iterator[tuple[str, str]]:
    for cell in cells:
        for name, section in cell.sections.items():
            if name not in _READ and name not in cell.compared:
                yield from ((name, key) for key, found in section.items()
                            if as_number(found) is not None and key not in METRICS)
