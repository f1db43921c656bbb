"""Digests: hashes of plain data, and what of two sets of named ones differs, in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["digest_of", "names_that_differ", "short_marks"]

_MOST: Final = 3
"""Names that are told of a difference."""


def digest_of(value: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def short_marks(facts: Mapping[str, str]) -> dict[str, str]:
    """The beginning of each fact's hash: 16 bits tell nearly every change, and give no value away."""
    return {name: digest_of(value)[:4] for name, value in facts.items()}


def names_that_differ(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The names of the facts that differ, as a clause to put behind ``changed``; empty where none can be told."""
    differing = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    shown = []
    for name in differing[:_MOST]:
        if name not in then:
            name += " is new"
        elif name not in now:
            name += " is gone"
        shown.append(name)
    if len(differing) > _MOST:
        shown.append(f"{len(differing) - _MOST} more")
    return f" ({', '.join(shown)})" if shown else ""
