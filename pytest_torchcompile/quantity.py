"""Quantities in sentences: one of a thing, or several."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, one: str, many: str = "") -> str:
    """The number with its noun, and with what else changes with it, such as a verb.

    >>> count(1, "cell"), count(2, "cell"), count(0, "cell fails", "cells fail")
    ('1 cell', '2 cells', '0 cells fail')
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"
