"""Bisection: the first version that has a fault, by as few questions as may be. A pure function; three answers.

After ``least_satisfying`` of cargo-bisect-rustc: a question may be answered with "unknown", as by a version that cannot
be installed. Then its neighbours are asked, and what stays unknown between the two ends is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

__all__ = ["Answer", "FirstBad", "find_first_bad", "most_questions"]

Answer: TypeAlias = Literal["yes", "no", "unknown"]
"""Has this version the fault?"""
T = TypeVar("T")


@dataclass
class FirstBad(Generic[T]):
    """What a bisection found: the fault came behind ``last_good``, and ``first_bad`` has it."""

    last_good: T
    first_bad: T
    between: tuple[T, ...] = ()
    """Versions between these two that could not be told, or were not asked any more; empty: it is exact."""
    answers: dict[T, Answer] = field(default_factory=dict)
    """Each version that was asked, in the order of the questions."""


def most_questions(versions: int) -> int:
    """The most questions that are asked of so many versions, the good and the bad end among them.

    That is ``ceil(log2(n)) + 1``, where n versions may be the first bad one: one more than a search needs that has an
    answer to each question.

    >>> most_questions(2), most_questions(9), most_questions(10)
    (1, 4, 5)
    """
    candidates = max(1, versions - 1)
    # The bit length of n - 1 is the logarithm of n, rounded up, without a float.
    return (candidates - 1).bit_length() + 1


def find_first_bad(versions: Sequence[T], has_fault: Callable[[T], Answer]) -> FirstBad[T]:
    """Find the first version with the fault.

    ``versions``: from the oldest to the newest; the first is known not to have the fault and the last to have it, and
    neither is asked. Where the fault comes and goes, a version is found that has it while the one before it, as far as
    its answer is known, has not. Raises :class:`ValueError` for fewer than two versions.
    """
    if len(versions) < 2:
        raise ValueError(f"{len(versions)} versions; expected at least one without the fault and one with it")
    good, bad = 0, len(versions) - 1
    answers: dict[T, Answer] = {}
    unknown: set[int] = set()
    # Bounded: each question may install gigabytes, and unknown answers could else ask for all of them.
    for _ in range(most_questions(len(versions))):
        middle = _nearest_to_middle(good, bad, unknown)
        if middle is None:
            break
        answer = has_fault(versions[middle])
        answers[versions[middle]] = answer
        if answer == "yes":
            bad = middle
        elif answer == "no":
            good = middle
        else:
            # Neither end moves, and the next question is about a neighbour.
            unknown.add(middle)
    return FirstBad(versions[good], versions[bad], tuple(versions[good + 1:bad]), answers)


def _nearest_to_middle(good: int, bad: int, unknown: set[int]) -> int | None:
    """The version between both ends that halves what is left best, of those that may still be asked."""
    candidates = [index for index in range(good + 1, bad) if index not in unknown]
    if not candidates:
        return None
    return min(candidates, key=lambda index: abs(2 * index - good - bad))
