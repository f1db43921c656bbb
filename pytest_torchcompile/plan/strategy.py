"""Strategy: which of the allowed cells a matrix runs: all, a covering array, or a sample."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Final, Literal

import yaml

from pytest_torchcompile.plan.reader import Reader

__all__ = ["KEYS", "KINDS", "Strategy", "choose_cells", "cover", "read_strategy"]

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
