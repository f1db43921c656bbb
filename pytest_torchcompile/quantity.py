"""Quantities in sentences: one of a thing or several, the first few of many names, seconds as one reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["count", "first_names", "listed_counts", "named_sizes", "numbered", "readable_age", "readable_seconds"]


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


def listed_counts(counts: Mapping[str, int], order: Iterable[str] | None = None) -> str:
    """How many there are of each kind, in the order given; kinds of which there are none are left out.

    >>> listed_counts({"fail": 1, "pass": 3, "skip": 0}), listed_counts({"fail": 1, "pass": 3}, ("pass", "fail"))
    ('1 fail, 3 pass', '3 pass, 1 fail')
    """
    kinds = counts if order is None else order
    return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts.get(kind))


def named_sizes(sizes: Mapping[str, int]) -> str:
    """Sizes with their names.

    >>> named_sizes({"B": 2, "S": 64})
    'B=2, S=64'
    """
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def first_names(names: Iterable[object], shown: int = 3) -> str:
    """The first few of some names, and how many more there are.

    >>> first_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    texts = list(map(str, names))
    more = len(texts) - shown
    text = ", ".join(texts[:shown])
    return f"{text} and {more} more" if more > 0 else text


def readable_seconds(value: float) -> str:
    """Seconds in a unit that fits.

    >>> readable_seconds(0.0000312), readable_seconds(0.0123), readable_seconds(2.34), readable_seconds(300)
    ('31 µs', '12 ms', '2.3 s', '5.0 min')
    """
    if 0 < value < 0.001:
        return f"{1e6 * value:.0f} µs"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def readable_age(seconds: float) -> str:
    """How old something is.

    >>> readable_age(30), readable_age(7200), readable_age(200_000)
    ('30 seconds', '2 hours', '2 days')
    """
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return count(int(seconds // size), unit)
    return count(int(seconds), "second")
