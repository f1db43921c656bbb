"""Covering arrays: a few rows in which every t values of different axes meet, if they meet in any row at all.

Greedy, deterministic, on the list of the rows that are allowed: what no allowed row contains is not required,
so constraints between axes need no language of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations

__all__ = ["cover"]

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
