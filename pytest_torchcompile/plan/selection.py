"""Which cells run: what the matrix chooses of those that are allowed, its shards, and what was asked for by name.

Strategy: all, a covering array, or a sample. Shards take about as long each, for as many machines. Of a selection by
name, nothing or less than was named may be left; here somebody is told why. No pytest, no torch.

``-m "compile_cell(backend='eager')"``: does it speak of axes and values that the matrix has?
``--compile-checks=NAMES``: has each of them something to judge in it, and in which cells?
"""

from __future__ import annotations

import ast
import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, Final, Literal

import yaml

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.reader import Reader
from pytest_torchcompile.quantity import count

__all__ = [
    "KEYS", "KINDS", "Strategy", "cells_of_shard", "choose_cells", "cover", "estimated_seconds", "idle_cells",
    "parse_shard", "read_strategy", "refuse_idle", "refuse_unknown",
]

KINDS: Final = ("full", "pairwise", "sample")
KEYS: Final = {
    "pairwise": {"strength": "how many values of different axes must meet in some cell; plain pairwise: 2"},
    "sample": {"n": "how many cells", "seed": "which of them (default 0)"},
}
STRENGTHS: Final = (1, 6)


@dataclass(frozen=True)
class Strategy:
    """What is run of the cells that the rules leave."""

    kind: Literal["full", "pairwise", "sample"] = "full"
    strength: int = 2
    n: int = 0
    seed: int = 0

    def __str__(self) -> str:
        if self.kind == "sample":
            return f"sample of {self.n}, seed {self.seed}"
        if self.kind == "pairwise" and self.strength != 2:
            return f"pairwise of strength {self.strength}"
        return self.kind


def read_strategy(reader: Reader, node: yaml.Node | None) -> Strategy:
    """Read the key ``strategy``: ``full``, ``pairwise``, or a mapping with settings."""
    if node is None:
        return Strategy()
    if isinstance(node, yaml.ScalarNode):
        name = reader.name(node, "a strategy", KINDS)
        # Known, so that the message is about what is missing and not about the name.
        if name == "sample":
            reader.wrong(node, "strategy: sample needs its size; expected {sample: {n: 200, seed: 1}}")
        return Strategy("pairwise" if name == "pairwise" else "full")
    kinds = reader.fields(node, "strategy", KEYS)
    if len(kinds) > 1:
        reader.wrong(node, f"strategy: found {' and '.join(kinds)}, expected one of them")
    if "pairwise" in kinds:
        return _read_pairwise(reader, kinds["pairwise"])
    if "sample" in kinds:
        return _read_sample(reader, kinds["sample"])
    return Strategy()


def _read_pairwise(reader: Reader, node: yaml.Node) -> Strategy:
    settings = reader.fields(node, "pairwise", KEYS["pairwise"], ("strength",))
    strength: int | float | None = None
    if "strength" in settings:
        least, most = STRENGTHS
        strength = reader.number(settings["strength"], "strength", least=least, most=most)
    # A missing or wrong strength is noted in the reader, so that this value is never used.
    return Strategy("pairwise", strength=int(strength or 2))


def _read_sample(reader: Reader, node: yaml.Node) -> Strategy:
    sizes = {}
    for key, value in reader.fields(node, "sample", KEYS["sample"], ("n",)).items():
        # A sample of no cells is a mistake; seed 0 is a seed.
        least = 1 if key == "n" else 0
        sizes[key] = reader.integer(value, f"{key} of sample", least=least) or 0
    return Strategy("sample", **sizes)


def choose_cells(strategy: Strategy, rows: Sequence[Sequence[int]], ids: Sequence[str],
                 preferences: Sequence[int]) -> list[int]:
    """Return the indices of the cells to run, ascending.

    ``rows`` are the cells as numbers, ``ids`` their ids. Of two cells that cover the same, a covering array takes the
    one with the lower number in ``preferences`` (cells that run before cells that skip).
    """
    if strategy.kind == "full":
        return list(range(len(rows)))
    if strategy.kind == "sample":
        return _sampled_cells(strategy, ids)
    groups: dict[int, list[int]] = {}
    for index, preference in enumerate(preferences):
        groups.setdefault(preference, []).append(index)
    ordered = [groups[preference] for preference in sorted(groups)]
    rows_of_groups = []
    for group in ordered:
        rows_of_groups.append([rows[index] for index in group])
    # Of each group the places that were chosen; a place in a group is not the index of the cell.
    chosen = []
    for group, places in zip(ordered, cover(rows_of_groups, strategy.strength), strict=True):
        chosen += [group[place] for place in places]
    return sorted(chosen)


def _sampled_cells(strategy: Strategy, ids: Sequence[str]) -> list[int]:
    # By hash, not by a generator: a cell stays in the sample when others come and go.
    hashes = [hashlib.sha256(f"{strategy.seed} {cell}".encode()).digest() for cell in ids]
    by_hash = sorted(range(len(ids)), key=hashes.__getitem__)
    return sorted(by_hash[: strategy.n])


# Covering arrays: a few rows in which every t values of different axes meet, if they meet in any row at all.
#
# Greedy, deterministic, on the list of the rows that are allowed: what no allowed row contains is not required,
# so constraints between axes need no language of their own.

Row = Sequence[int]


def cover(groups: Sequence[Sequence[Row]], strength: int = 2) -> list[list[int]]:
    """Choose rows (values given as numbers, one column an axis) that cover every ``strength`` values.

    Groups are in order of preference: rows of a later one are taken only for what no earlier one contains.
    Returns, for each group, the indices of its chosen rows, ascending.
    """
    rows = list(chain.from_iterable(groups))
    values_of_columns = map(set, zip(*rows, strict=True))
    # An axis of one value meets every value of the others anyway.
    varied = [column for column, values in enumerate(values_of_columns) if len(values) > 1]
    # The empty set of values too: at least one row is taken, also if all are alike.
    combined = [(), *combinations(varied, min(strength, len(varied)))]
    # Each set of t values has a bit of its own; they are numbered as they are met.
    numbers: dict[tuple[int, ...], int] = {}
    covered = 0
    chosen = []
    for group in groups:
        masks = [_covered_sets(row, combined, numbers) for row in group]
        taken, covered = _take_rows(masks, covered)
        chosen.append(taken)
    return chosen


def _covered_sets(row: Row, combined: Sequence[tuple[int, ...]], numbers: dict[tuple[int, ...], int]) -> int:
    """Return the sets of values that the row contains, one bit each."""
    mask = 0
    for place, columns in enumerate(combined):
        key = (place, *[row[column] for column in columns])
        mask |= 1 << numbers.setdefault(key, len(numbers))
    return mask


def _take_rows(masks: Sequence[int], covered: int) -> tuple[list[int], int]:
    """Take the row with the most that is new, the first of equals, until nothing is new.

    A row's gain only ever falls, so an old gain is an upper bound, and most rows are never looked at twice.
    """
    heap = [(-(mask & ~covered).bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(heap)
    taken = []
    while heap:
        bound, index = heapq.heappop(heap)
        gain = (masks[index] & ~covered).bit_count()
        if gain == 0:
            continue
        # The row was pushed with what it gained then; rows taken since have made it less.
        if -bound > gain:
            heapq.heappush(heap, (-gain, index))
            continue
        taken.append(index)
        covered |= masks[index]
    return sorted(taken), covered


# ----------------------------------------------------------------------------------------------------- shards and names
MOST_SHARDS: Final = 9999
_KERNELS: Final = 8.0
_AUTOTUNED: Final = 4.0
"""Rough seconds of a cold cell on CPU: generated kernels must be built, autotuned ones several times."""


def parse_shard(text: str) -> tuple[int, int]:
    """Read ``2/8`` as (2, 8). Raises :class:`UsageError` for anything that is no part of a whole."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(f"shard {text!r} is not a part of a whole; expected I/N, for example 2/8")
    index, of = int(match[1]), int(match[2])
    if not 1 <= of <= MOST_SHARDS:
        raise UsageError(f"shard {text!r}: cannot cut into {of} parts; expected 1 to {MOST_SHARDS}")
    if not 1 <= index <= of:
        raise UsageError(f"shard {text!r}: there is no part {index} of {of}; expected 1/{of} to {of}/{of}")
    return index, of


def cells_of_shard(cells: Sequence[PlannedCell], index: int, of: int) -> tuple[PlannedCell, ...]:
    """Return part ``index`` (from 1) of ``of``, in the order of ``cells``.

    Every cell is in exactly one part, the same whatever the order of ``cells``. The dearest cell goes first,
    each to the part that has least to do; equally dear cells of one model and dynamic are dealt in turn.
    """
    # A heap: what each part has to do.
    loads = [(0.0, part) for part in range(1, of + 1)]
    mine = set()
    for planned in sorted(cells, key=_dearest_first):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + estimated_seconds(planned), part))
        if part == index:
            mine.add(planned.cell.id)
    return tuple(planned for planned in cells if planned.cell.id in mine)


def estimated_seconds(planned: PlannedCell) -> float:
    """Return about how long the cell takes, in seconds of a machine that has compiled nothing yet."""
    cell = planned.cell
    if planned.outcome == "skip":
        # Not nothing: a cell that is skipped is still collected and reported.
        return 0.01
    seconds = 1.0
    backend = BACKENDS.get(cell.backend)
    # A backend that is not in the table may well generate kernels.
    if backend is None or backend.kernels:
        autotuned = "max-autotune" in cell.mode
        seconds += _KERNELS * _AUTOTUNED if autotuned else _KERNELS
    # Compiled static first, then once more for changed shapes.
    if cell.dynamic == "auto":
        seconds *= 1.5
    if cell.phase == "training":
        seconds *= 2.0
    return seconds


def _dearest_first(planned: PlannedCell) -> tuple[float, str, str, bytes]:
    # By hash at last: cells that cost the same are spread over the shards, whatever the order of the file.
    cell: Cell = planned.cell
    return -estimated_seconds(planned), cell.model, cell.dynamic, hashlib.sha256(cell.id.encode()).digest()


# ------------------------------------------------------------------------------------------- what was asked for by name
_ARGUMENT: Final = r"(\w+)\s*=\s*('[^']*'|\"[^\"]*\"|[\w.+-]+)"
_MARKER: Final = re.compile(rf"\bcompile_cell\s*\(\s*((?:{_ARGUMENT}\s*,?\s*)*)\)")


def refuse_unknown(expression: str, cells: Iterable[Mapping[str, Any]]) -> None:
    """Raise :class:`UsageError` for an axis that no cell has, or a value that no cell has on its axis.

    To pytest both are just no match: ``-m`` would select nothing, and with ``not`` everything.

    :param expression: what ``-m`` was given; its grammar is left to pytest.
    :param cells: axis name to value of each cell of the matrix.
    """
    named = list(_named_values(expression))
    if not named:
        return
    # A dict, not a set: the values stay in the order of the matrix.
    known: dict[str, dict[Any, None]] = {}
    for cell in cells:
        for axis, value in cell.items():
            known.setdefault(axis, {})[value] = None
    for axis, value in named:
        if axis not in known:
            raise UsageError(f"-m: no cell of the matrix has an axis {axis!r}; {nearest(axis, known)}")
        if value not in known[axis] or type(value) not in map(type, known[axis]):
            # 2 and '2' are different values, and read alike in a message.
            alike = [other for other in known[axis] if str(other) == str(value)]
            if alike:
                hint = f"write {axis}={alike[0]!r}"
            else:
                hint = nearest(str(value), map(str, known[axis]))
            raise UsageError(f"-m: no cell of the matrix has {axis}={value!r}; {hint}")


def refuse_idle(names: Iterable[str], cells: Sequence[Mapping[str, Any]], given: str, *, each: bool) -> None:
    """Raise :class:`UsageError` if no cell at all has anything to judge for one of the checks, ``each``, or for all.

    :param given: where the checks are named.
    :param each: somebody asked for these very checks; else they may be those of every matrix.
    """
    reasons_of = {name: _idle_reasons(name, cells) for name in names}
    # The empty reason is that of a cell in which the check has something to judge.
    idle = [name for name, reasons in reasons_of.items() if cells and "" not in reasons]
    if not idle or not (each or len(idle) == len(reasons_of)):
        return
    name = idle[0]
    [(text, times)] = reasons_of[name].most_common(1)
    share = ""
    if times < len(cells):
        share = f" ({times} of {count(len(cells), 'cell')})"
    raise UsageError(f"{given}: {name} has nothing to judge in any cell of the matrix: {text}{share}")


def idle_cells(names: Iterable[str], cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each check and each reason why some of the cells have no such check."""
    for name in names:
        for text, times in _idle_reasons(name, cells).most_common():
            if text:
                yield f"{name} has nothing to judge in {times} of {count(len(cells), 'cell')}: {text}"


def _idle_reasons(name: str, cells: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Why the check has nothing to judge in a cell, and in how many; empty: it has."""
    return Counter(CHECKS[name].idle(cell) for cell in cells)


def _named_values(expression: str) -> Iterator[tuple[str, Any]]:
    for marker in _MARKER.finditer(expression):
        for axis, text in re.findall(_ARGUMENT, marker[1]):
            try:
                yield axis, ast.literal_eval(text)
            except (ValueError, SyntaxError):
                # pytest says what is wrong with it.
                continue
