"""Choice: which way of compiling holds for each model, and which of those the report speaks for."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.gate.markdown import evidence, inline_code, table
from pytest_torchcompile.gate.policy_limits import worst_rank
from pytest_torchcompile.layer.benchmark_result import NOT_TOLD
from pytest_torchcompile.ledger.records import Compile
from pytest_torchcompile.quantity import count, readable_seconds
from pytest_torchcompile.report.facts import Facts, as_number

__all__ = ["Setting", "best_setting", "choices", "from_cache", "has_verdict", "settings_by_model", "speed_interval"]

AXES: Final = ("backend", "mode", "dynamic", "wrapper")
"""What one chooses when one compiles. The other axes (dtype, phase, your own) are what it has to hold for."""
DEFAULTS: Final = {"mode": "default", "dynamic": "auto", "wrapper": "none"}
NAMED: Final = 4
"""Settings that are named where more do not hold."""


RULE: Final = ("Of the settings in which every check holds in every cell, and that are not slower than eager, and of "
               "those that were timed where some were: the one with most cells, then the fastest where speed was "
               "measured, then the one that recompiles least, then the one nearest to torch's defaults.")
NO_SPEED: Final = ("Speed was not measured in this report, so it does not say whether compiling is worth it: the "
                   "choice above is between what is right. The check `worth` measures it.")
DO_NOT: Final = "do not compile this"
"""The advice where all that is right is slower than eager."""


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
    def is_right(self) -> bool:
        """Whether every check holds in every cell, but for the one that asks for speed."""
        return all(cell.status == "pass" or _fails_by_speed_alone(cell) for cell in self.cells)

    @property
    def slower(self) -> list[Facts]:
        """The cells that are slower compiled, which the whole 99 % interval says."""
        return [cell for cell in self.cells if _is_slower(cell)]

    @property
    def is_slower(self) -> bool:
        """Whether every cell that was timed is slower compiled."""
        timed = [cell for cell in self.cells if speed_interval(cell)]
        return bool(timed) and len(self.slower) == len(timed)

    @property
    def is_timed(self) -> bool:
        """Whether the check `worth` has timed a cell, and the numbers are right."""
        return self.is_right and any(map(speed_interval, self.cells))

    @property
    def is_told(self) -> bool:
        """Whether a machine that was quiet enough has timed a cell."""
        return any(_section_of_worth(cell).get("verdict") not in (None, NOT_TOLD) for cell in self.cells)

    @property
    def is_stage(self) -> bool:
        """Whether the backend only shows how far the compiler comes; nobody deploys it."""
        record = BACKENDS.get(self.values[0])
        return record is not None and record.is_stage

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


def _fails_by_speed_alone(cell: Facts) -> bool:
    failed = [verdict.check for verdict in cell.failed]
    return cell.status == "fail" and failed == ["worth"] and speed_interval(cell) is not None


def speed_interval(cell: Facts) -> tuple[float, float] | None:
    """The 99 % interval of how many times as fast the cell is compiled; None where that was not measured."""
    ends = _section_of_worth(cell).get("interval")
    if not isinstance(ends, list) or len(ends) != 2:
        return None
    low, high = map(as_number, ends)
    if low is None or high is None:
        return None
    return low, high


def _section_of_worth(cell: Facts) -> Mapping[str, Any]:
    """The section of the check `worth`, by its name or its old one."""
    return cell.section("worth") or cell.section("benchmark")


def _is_slower(cell: Facts) -> bool:
    verdict = _section_of_worth(cell).get("verdict")
    return verdict == "slower" and _upper_end(cell) < 1


def from_cache(compiles: Iterable[Compile]) -> bool:
    """Did a compile cache serve one of them? Its seconds then say nothing beside those of empty caches."""
    answers = itertools.chain.from_iterable(each.caches for each in compiles)
    return any(answer.endswith("hit") for answer in answers)


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
    good = [setting for setting in settings if setting.holds and setting.is_real and not setting.is_slower]
    # What was not timed is no way out where everything that was timed is slower.
    if any(setting.is_timed for setting in settings if setting.is_real):
        good = [setting for setting in good if setting.is_timed]
    return min(good, key=_rank_by_rule, default=None)


def least_slow(settings: Sequence[Setting]) -> Setting | None:
    """Of the settings that are right and slower than eager the fastest; None where there is none."""
    slow = [setting for setting in settings if setting.is_real and setting.is_right and setting.is_slower]
    return max(slow, key=_speedup_of, default=None)


def _speedup_of(setting: Setting) -> float:
    return setting.median_of("speedup") or 0.0


def _rank_by_rule(setting: Setting) -> tuple[int, float, float, int]:
    """Smaller is better."""
    # A backend has no default, so none is a change.
    changed = sum(DEFAULTS.get(axis, value) != value for axis, value in zip(AXES, setting.values, strict=True))
    return (-len(setting.cells), -(setting.median_of("speedup") or 1.0), setting.worst_of("recompiles") or 0.0,
            changed)


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
    every: list[Setting] = []
    for settings in by_model.values():
        every += settings
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
    elif (slow := least_slow(real)) is not None:
        use, because = DO_NOT, _why_not_to_compile(slow)
        untimed = [setting for setting in real if setting.holds and not setting.is_timed]
        if untimed:
            because += f"; {count(len(untimed), 'setting holds', 'settings hold')} that nobody timed"
    elif real:
        use, because = "no compiling yet", f"none of {count(len(real), 'setting')} holds: see the gotchas"
    else:
        use, because = "not told", _why_no_choice(settings)
    return inline_code(model), use, because, does_not_hold


def _why_not_to_compile(setting: Setting) -> str:
    """The figures of a setting that is right and slower; there is none that is faster."""
    cell = min(setting.slower, key=_upper_end)
    low, high = speed_interval(cell) or (0.0, 0.0)
    speedup = as_number(_section_of_worth(cell).get("speedup")) or 0.0
    return (f"eager is faster: {setting} is {speedup:.2f} times as fast (99 % interval {low:.2f} to {high:.2f}) "
            f"{evidence([cell.id])}")


def _upper_end(cell: Facts) -> float:
    interval = speed_interval(cell)
    return interval[1] if interval else 1.0


def _why_no_choice(settings: Sequence[Setting]) -> str:
    """Of settings of which nobody could deploy one."""
    # No setting was chosen, so every cell is evidence for that.
    every_cell = _cells_of(settings)
    if all(setting.is_fake for setting in settings):
        return f"only the fake lane was tried, in which no number is judged {evidence(every_cell)}"
    why = "only stages of the compiler were tried"
    holding = [setting for setting in settings if setting.holds]
    if not holding:
        return f"{why}, and none holds {evidence(every_cell)}"
    names = sorted({inline_code(setting.values[0]) for setting in holding})
    verb = "holds" if len(names) == 1 else "hold"
    return f"{why}; {', '.join(names)} {verb} {evidence(_cells_of(holding))}"


def _cells_of(settings: Iterable[Setting]) -> list[str]:
    cells: list[str] = []
    for setting in settings:
        cells += setting.ids
    return cells


def _reasons_for(setting: Setting) -> Iterator[str]:
    yield f"every check holds in {count(len(setting.cells), 'cell')}"
    speedup, seconds = setting.median_of("speedup"), setting.median_of("compile_seconds")
    breaks, recompiles = setting.worst_of("graph_breaks"), setting.worst_of("recompiles")
    if speedup is not None and setting.is_timed and not setting.is_told:
        yield "whether it is faster could not be told, for the machine was busy"
    elif speedup is not None:
        yield f"{speedup:.2f} times as fast as eager"
    if setting.slower:
        yield f"but slower in {count(len(setting.slower), 'cell')} {evidence(cell.id for cell in setting.slower)}"
    if breaks is not None:
        yield count(int(breaks), "graph break") if breaks else "no graph break"
    if recompiles is not None:
        yield f"{count(int(recompiles), 'recompile')} at most" if recompiles else "no recompile"
    if any(from_cache(cell.compiles) for cell in setting.cells):
        yield "compiled with the help of a cache"
    elif seconds is not None:
        yield f"compiles in {readable_seconds(seconds)}"
