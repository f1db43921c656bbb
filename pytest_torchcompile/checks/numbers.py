"""The numbers of a check: limits that a matrix may set, and columns that a page shows. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Column", "Limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """A number that a check compares what it measured with; a matrix sets it with the verb ``limits``."""

    name: str
    kind: Literal["min", "max"]
    """``min``: what was measured must be at least this; ``max``: at most."""
    default: float | None
    """None: the check derives it from the cell."""
    help: str
    whole: bool = True
    """Is it a count?"""
    least: float = 0
    most: float | None = None
    """The range that a matrix may choose from."""


@dataclass(frozen=True, slots=True)
class Column:
    """A number of a cell that the check's section holds: by its name at the top, or as the length of a list there.

    Policy, baseline, page and playbook have each. The terminal sums up those of a check that a run has asked for.
    """

    name: str
    kind: Literal["min", "max"]
    """``max``: a policy says how large it may be; ``min``: how small."""
    help: str
    whole: bool = True
    """Is it a count? Counts are exact, so they are compared exactly."""
    unit: str = ""
