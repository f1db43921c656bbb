"""RankOutcome: how a job ended that a rank process was given. Plain data, no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RankOutcome", "rank_failed"]


@dataclass(frozen=True)
class RankOutcome:
    """How a job ended: ``done`` with its value, ``crash`` or ``timeout`` with evidence, ``no_rank`` if none began."""

    status: str
    value: Any = None
    message: str = ""
    evidence: str = ""
    seconds: float = 0.0
    at: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` when it was noticed."""


def rank_failed(outcome: RankOutcome) -> bool:
    """Whether the other ranks may now wait for this one in vain."""
    if outcome.status != "done":
        return True
    seen: Mapping[str, Any] = outcome.value
    return bool(seen["failure"] or (seen["sections"].get("compiles") or {}).get("error"))
