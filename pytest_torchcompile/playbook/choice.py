"""Choice: which way of compiling holds for each model, and which of those the report speaks for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.gate.markdown import inline_code
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.playbook.prose import evidence, table
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.facts import Facts

__all__ = ["Setting", "best_setting", "choices", "has_verdict", "settings_by_model"]

AXES: Final = ("backend", "mode", "dynamic", "wrapper")
"""What one chooses when one compiles. The other axes (dtype, phase, your own) are what it has to hold for."""
DEFAULTS: Final = {"mode": "default", "dynamic": "auto", "wrapper": "none"}
NAMED: Final = 4
"""Settings that are named where more do not hold."""


RULE: Final = ("Of the settings in which every check holds in every cell: the one with most cells, then the fastest "
               "where speed was measured, then the one that recompiles least, then the one nearest to torch's "
               "defaults.")
NO_SPEED: Final = ("Speed was not measured in this report, so it does not say whether compiling is worth it: the "
                   "choice above is between what is right. `pytest_torchcompile.benchmark` measures it.")


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
    def is_stage(self) -> bool:
        """Whether the backend only shows how far the compiler comes; nobody deploys it."""
        record = BACKENDS.get(self.values[0])
        return record is not None and not record.kernels and record.name != "cudagraphs"

    @property
    def is_fake(self) -> bool:
        """Whether it was compiled in the fake lane, which says nothing of any number."""
        return any(cell.lane == "fake" for cell in self.cells)

    @property
    def is_real(self) -> bool:
        """Whether somebody could deploy it."""
        return not self.is_stage and not self.is_fake

    @property
    def ids(self) -> list[str]:
        """Of its cells."""
        return [cell.id for cell in self.cells]

    def worst_of(self, metric: str) -> float | None:
        """The largest number of a metric over the cells that measured it."""
        return max(self._numbers_of(metric), default=None)

    def median_of(self, metric: str) -> float | None:
        """The median of a metric over the cells that measured it."""
        numbers = self._numbers_of(metric)
        return statistics.median(numbers) if numbers else None

    def _numbers_of(self, metric: str) -> list[float]:
        measured = [worst_rank(cell.ranks, metric) for cell in self.cells]
        return [number for number in measured if number is not None]

    def __str__(self) -> str:
        """As arguments of torch.compile, Markdown; what is at its default is left out."""
        arguments = []
        for axis, value in zip(AXES, self.values, strict=True):
            if value and value != DEFAULTS.get(axis):
                arguments.append(f"{axis}={value}")
        return inline_code(", ".join(arguments))


def has_verdict(cell: Facts) -> bool:
    """Did the cell come to a verdict?"""
    return cell.status not in ("skip", "not_run")


def settings_by_model(cells: Iterable[Facts]) -> dict[str, list[Setting]]:
    """Every setting of each model, in the order of the report; cells that did not run count for nothing."""
    grouped: dict[str, dict[tuple[str, ...], list[Facts]]] = {}
    for cell in filter(has_verdict, cells):
        values = tuple(cell.axes.get(axis, "") for axis in AXES)
        grouped.setdefault(cell.axes.get("model", ""), {}).setdefault(values, []).append(cell)
    by_model = {}
    for model, groups in grouped.items():
        by_model[model] = [Setting(model, values, tuple(group)) for values, group in groups.items()]
    return by_model


def best_setting(settings: Sequence[Setting]) -> Setting | None:
    """The setting that the report speaks for, by :data:`RULE`; None where none holds."""
    good = [setting for setting in settings if setting.holds and setting.is_real]
    return min(good, key=_rank_by_rule, default=None)


def _rank_by_rule(setting: Setting) -> tuple[int, float, float, int, float]:
    """Smaller is better."""
    # A backend has no default, so none is a change.
    changed = sum(DEFAULTS.get(axis, value) != value for axis, value in zip(AXES, setting.values, strict=True))
    return (-len(setting.cells), -(setting.median_of("speedup") or 1.0), setting.worst_of("recompiles") or 0.0,
            changed, setting.median_of("compile_seconds") or 0.0)


def choices(by_model: dict[str, list[Setting]]) -> list[str]:
    """A table: for each model what to use and why. Empty where no cell ran."""
    if not by_model:
        return []
    lines = table(("model", "use", "because", "does not hold"),
                  [_table_row(model, settings) for model, settings in by_model.items()])
    # Where nothing was chosen there is no rule to tell.
    if not any(map(best_setting, by_model.values())):
        return lines
    lines += [RULE, ""]
    every = [setting for settings in by_model.values() for setting in settings]
    if all(setting.median_of("speedup") is None for setting in every):
        lines += [NO_SPEED, ""]
    return lines


def _table_row(model: str, settings: Sequence[Setting]) -> tuple[str, str, str, str]:
    real = [setting for setting in settings if setting.is_real]
    bad = [setting for setting in real if not setting.holds]
    does_not_hold = ", ".join(map(str, bad[:NAMED])) or "-"
    if len(bad) > NAMED:
        does_not_hold += f" and {len(bad) - NAMED} more"
    chosen = best_setting(settings)
    if chosen is not None:
        use = str(chosen)
        because = f"{'; '.join(_reasons_for(chosen))} {evidence(chosen.ids)}"
        # All that hold, less the one that was chosen.
        others = len(real) - len(bad) - 1
        if others:
            because += f"; {count(others, 'other setting holds', 'other settings hold')} too"
    elif real:
        use, because = "no compiling yet", f"none of {count(len(real), 'setting')} holds: see the gotchas"
    else:
        use, because = "not told", _why_no_choice(settings)
    return inline_code(model), use, because, does_not_hold


def _why_no_choice(settings: Sequence[Setting]) -> str:
    """Of settings of which nobody could deploy one."""
    # No setting was chosen, so every cell is evidence for that.
    every_cell = [cell for setting in settings for cell in setting.ids]
    if all(setting.is_fake for setting in settings):
        return f"only the fake lane was tried, in which no number is judged {evidence(every_cell)}"
    why = "only stages of the compiler were tried"
    holding = [setting for setting in settings if setting.holds]
    if not holding:
        return f"{why}, and none holds {evidence(every_cell)}"
    names = sorted({inline_code(setting.values[0]) for setting in holding})
    verb = "holds" if len(names) == 1 else "hold"
    return f"{why}; {', '.join(names)} {verb} {evidence(cell for setting in holding for cell in setting.ids)}"


def _reasons_for(setting: Setting) -> Iterator[str]:
    yield f"every check holds in {count(len(setting.cells), 'cell')}"
    speedup, seconds = setting.median_of("speedup"), setting.median_of("compile_seconds")
    breaks, recompiles = setting.worst_of("graph_breaks"), setting.worst_of("recompiles")
    if speedup is not None:
        yield f"{speedup:.2f} times as fast as eager"
    if breaks is not None:
        yield count(int(breaks), "graph break") if breaks else "no graph break"
    if recompiles is not None:
        yield f"{count(int(recompiles), 'recompile')} at most" if recompiles else "no recompile"
    if seconds is not None:
        yield f"compiles in {readable_seconds(seconds)}"
