"""Quantities in sentences: one of a thing, or several."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count", "numbered"]


def count(number: int, one: str, many: str = "") -> str:
    """The number with its noun, and with what else changes with it, such as a verb.

    >>> count(1, "cell"), count(2, "cell"), count(0, "cell fails", "cells fail")
    ('1 cell', '2 cells', '0 cells fail')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def numbered(one: str, numbers: Sequence[int]) -> str:
    """The noun with the numbers that the things have.

    >>> numbered("rank", [1]), numbered("rank", [1, 3])
    ('rank 1', 'ranks 1, 3')
    """
    return f"{one}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
