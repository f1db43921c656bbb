"""Strategy: which of the allowed cells a matrix runs: all, a covering array, or a sample."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

import yaml

from pytest_torchcompile.plan.reader import Reader

__all__ = ["KEYS", "KINDS", "Strategy", "choose", "cover", "read_strategy"]

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
        details = {
            "full": "",
            "pairwise": f" of strength {self.strength}" if self.strength != 2 else "",
            "sample": f" of {self.n}, seed {self.seed}",
        }
        return f"{self.kind}{details[self.kind]}"


def read_strategy(reader: Reader, node: yaml.Node | None) -> Strategy:
    """Read the key ``strategy``: ``full``, ``pairwise``, or a mapping with settings."""
    if node is None:
        return Strategy()
    if isinstance(node, yaml.ScalarNode):
        name = reader.name(node, "a strategy", KINDS)
        if name == "sample":
            reader.wrong(node, "strategy: sample needs its size; expected {sample: {n: 200, seed: 1}}")
        return Strategy("pairwise" if name == "pairwise" else "full")
    found = reader.fields(node, "strategy", KEYS)
    if len(found) > 1:
        reader.wrong(node, f"strategy: found {' and '.join(found)}, expected one of them")
    if "pairwise" in found:
        given = reader.fields(found["pairwise"], "pairwise", KEYS["pairwise"], ("strength",))
        least, most = STRENGTHS
        strength = [reader.number(each, "strength", least=least, most=most) for each in given.values()]
        return Strategy("pairwise", strength=int((strength or [2])[0] or 2))
    if "sample" in found:
        given = reader.fields(found["sample"], "sample", KEYS["sample"], ("n",))
        sizes = {key: reader.integer(each, f"{key} of sample", least=int(key == "n")) or 0
                 for key, each in given.items()}
        return Strategy("sample", **sizes)
    return Strategy()


def choose(strategy: Strategy, rows: Sequence[Sequence[int]], ids: Sequence[str],
           ranks: Sequence[int]) -> list[int]:
    """Return the indices of the cells to run, ascending.

    ``rows`` are the cells as numbers, ``ids`` their ids; ``ranks``: of two cells that cover the same, a
    covering array takes the one of the lower rank (cells that run before cells that skip).
    """
    if strategy.kind == "full":
        return list(range(len(rows)))
    if strategy.kind == "sample":
        # By hash, not by a generator: a cell stays in the sample when others come and go.
        hashes = [hashlib.sha256(f"{strategy.seed} {cell}".encode()).digest() for cell in ids]
        return sorted(sorted(range(len(rows)), key=hashes.__getitem__)[: strategy.n])
    groups = [[k for k in range(len(rows)) if ranks[k] == rank] for rank in sorted(set(ranks))]
    chosen = cover([[rows[k] for k in group] for group in groups], strategy.strength)
    return sorted(group[k] for group, taken in zip(groups, chosen, strict=True) for k in taken)


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
    rows = [row for group in groups for row in group]
    columns = range(len(rows[0]) if rows else 0)
    varied = [column for column in columns if len({row[column] for row in rows}) > 1]
    # The empty set of values too: at least one row is taken, also if all are alike.
    combined = [(), *combinations(varied, min(strength, len(varied)))]
    numbers: dict[tuple[int, ...], int] = {}  # a set of t values -> its bit
    covered = 0
    chosen = []
    for group in groups:
        masks = [_mask(row, combined, numbers) for row in group]
        taken, covered = _greedy(masks, covered)
        chosen.append(taken)
    return chosen


def _mask(row: Row, combined: Sequence[tuple[int, ...]], numbers: dict[tuple[int, ...], int]) -> int:
    """Return the sets of values that the row contains, one bit each."""
    mask = 0
    for place, columns in enumerate(combined):
        key = (place, *[row[column] for column in columns])
        mask |= 1 << numbers.setdefault(key, len(numbers))
    return mask


def _greedy(masks: Sequence[int], covered: int) -> tuple[list[int], int]:
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
        if -bound > gain:
            heapq.heappush(heap, (-gain, index))
            continue
        taken.append(index)
        covered |= masks[index]
    return sorted(taken), covered
