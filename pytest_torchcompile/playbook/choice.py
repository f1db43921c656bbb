"""Choice: which way of compiling holds for each model, and which of those the report speaks for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.gate.markdown import inline_code as code
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.playbook.prose import evidence, table
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.facts import Facts

__all__ = ["Setting", "best", "choices", "ran", "settings"]

AXES: Final = ("backend", "mode", "dynamic", "wrapper")
"""What one chooses when one compiles. The other axes (dtype, phase, your own) are what it has to hold for."""
DEFAULTS: Final = {"mode": "default", "dynamic": "auto", "wrapper": "none"}


RULE: Final = ("Of the settings in which every check holds in every cell: the one with most cells, then the fastest "
               "where speed was measured, then the one that recompiles least, then the one nearest to torch's "
               "defaults.")


@dataclass(frozen=True)
class Setting:
    """One way to compile one model, and its cells that ran."""

    model: str
    values: tuple[str, ...]
    """Of :data:`AXES`."""
    cells: tuple[Facts, ...]

    @property
    def holds(self) -> bool:
        """Whether every check holds in every cell."""
        return all(cell.status == "pass" for cell in self.cells)

    @property
    def stage(self) -> bool:
        """Whether the backend only shows how far the compiler comes; nobody deploys it."""
        record = BACKENDS.get(self.values[0])
        return record is not None and not record.kernels and record.name != "cudagraphs"

    @property
    def fake(self) -> bool:
        """Whether it was compiled in the fake lane, which says nothing of any number."""
        return any(cell.lane == "fake" for cell in self.cells)

    @property
    def ids(self) -> list[str]:
        """Of its cells."""
        return [cell.id for cell in self.cells]

    def worst(self, metric: str) -> float | None:
        """The largest number of a metric over the cells that measured it."""
        return max(self._numbers(metric), default=None)

    def median(self, metric: str) -> float | None:
        """The median of a metric over the cells that measured it."""
        found = list(self._numbers(metric))
        return statistics.median(found) if found else None

    def _numbers(self, metric: str) -> Iterator[float]:
        for cell in self.cells:
            if (found := worst_rank(cell.ranks, metric)) is not None:
                yield found

    def __str__(self) -> str:
        """As arguments of torch.compile, Markdown; what is at its default is left out."""
        told = [f"{axis}={value}" for axis, value in zip(AXES, self.values, strict=True)
                if value and DEFAULTS.get(axis) != value]
        return code(", ".join(told))


def ran(cell: Facts) -> bool:
    """Did the cell come to a verdict?"""
    return cell.status not in ("skip", "not_run")


def settings(cells: Iterable[Facts]) -> dict[str, list[Setting]]:
    """Every setting of each model, in the order of the report; cells that did not run count for nothing."""
    found: dict[str, dict[tuple[str, ...], list[Facts]]] = {}
    for cell in cells:
        if ran(cell):
            values = tuple(cell.axes.get(axis, "") for axis in AXES)
            found.setdefault(cell.axes.get("model", ""), {}).setdefault(values, []).append(cell)
    return {model: [Setting(model, values, tuple(own)) for values, own in of.items()] for model, of in found.items()}


def best(of: Sequence[Setting]) -> Setting | None:
    """The setting that the report speaks for, by :data:`RULE`; None where none holds."""
    good = [setting for setting in of if setting.holds and not setting.stage and not setting.fake]
    most = max((len(setting.cells) for setting in good), default=0)
    return min((s for s in good if len(s.cells) == most), key=_cost, default=None)


def _cost(setting: Setting) -> tuple[float, float, int, float]:
    changed = sum(DEFAULTS.get(axis, value) != value for axis, value in zip(AXES, setting.values, strict=True))
    return (-(setting.median("speedup") or 1.0), setting.worst("recompiles") or 0.0, changed,
            setting.median("compile_seconds") or 0.0)


def choices(by_model: dict[str, list[Setting]]) -> list[str]:
    """A table: for each model what to use and why."""
    rows = [(code(model), *_row(of)) for model, of in by_model.items()]
    lines = table(("model", "use", "because", "does not hold"), rows)
    if all(best(of) is None for of in by_model.values()):  # nothing was chosen, so there is no rule to tell
        return [*lines, ""]
    lines += [RULE, ""]
    if not any(setting.median("speedup") is not None for of in by_model.values() for setting in of):
        lines += ["Speed was not measured in this report, so it does not say whether compiling is worth it: the choice "
                  "above is between what is right. `pytest_torchcompile.benchmark` measures it.", ""]
    return lines


def _row(of: Sequence[Setting]) -> tuple[str, str, str]:
    real = [setting for setting in of if not setting.stage and not setting.fake]
    bad = [setting for setting in real if not setting.holds]
    told = ", ".join(map(str, bad[:4])) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "") or "-"
    chosen = best(of)
    if chosen is not None:
        others = len(real) - len(bad) - 1
        also = f"; {count(others, 'other setting')} hold{'s' * (others == 1)} too" if others else ""
        return str(chosen), f"{'; '.join(_reasons(chosen))} {evidence(chosen.ids)}{also}", told
    if real:
        return "no compiling yet", f"none of {count(len(real), 'setting')} holds: see the gotchas", told
    if all(setting.fake for setting in of):
        return "not told", f"only the fake lane was tried, in which no number is judged " \
                           f"{evidence(c for s in of for c in s.ids)}", told
    holds = [setting for setting in of if setting.holds]
    names = ", ".join(sorted({code(setting.values[0]) for setting in holds}))
    verb = "hold" if "," in names else "holds"
    why = "only stages of the compiler were tried"
    if holds:
        return "not told", f"{why}; {names} {verb} {evidence(c for s in holds for c in s.ids)}", told
    return "not told", f"{why}, and none holds {evidence(c for s in of for c in s.ids)}", told


def _reasons(setting: Setting) -> Iterator[str]:
    yield f"every check holds in {count(len(setting.cells), 'cell')}"
    numbers: tuple[tuple[str, Callable[[str], float | None], Callable[[float], str]], ...] = (
        ("speedup", setting.median, lambda n: f"{n:.2f} times as fast as eager"),
        ("graph_breaks", setting.worst, lambda n: f"{count(int(n), 'graph break') if n else 'no graph break'}"),
        ("recompiles", setting.worst, lambda n: f"{count(int(n), 'recompile')} at most" if n else "no recompile"),
        ("compile_seconds", setting.median, lambda n: f"compiles in {readable_seconds(n)}"),
    )
    for metric, over, told in numbers:
        if (found := over(metric)) is not None:
            yield told(found)
