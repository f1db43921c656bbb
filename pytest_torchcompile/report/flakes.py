"""Flakes: two verdicts on one key. No torch.

A key says what a verdict rests on. Where it is the same and the verdict is not, nothing that we know of has changed it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SAYS_NOTHING", "Flake", "find_flakes", "key_of_cell"]

SAYS_NOTHING = frozenset({"not_run", "skip"})
"""Verdicts of what was not judged."""


@dataclass(frozen=True)
class Flake:
    """One check with several verdicts on one key."""

    key: str
    check: str
    verdicts: tuple[str, ...]
    """In the order of the runs."""


def find_flakes(sightings: Iterable[tuple[str, Mapping[str, str]]]) -> list[Flake]:
    """The checks of one cell that have two verdicts on one key.

    ``sightings``: of each run the key, and check to verdict. An empty key is that of a run of which too little is
    known, and tells of no flake; nor does a verdict that says nothing, such as a skip.
    """
    verdicts_of: dict[tuple[str, str], list[str]] = {}
    for key, verdicts in sightings:
        for check, verdict in verdicts.items():
            if key and verdict not in SAYS_NOTHING:
                verdicts_of.setdefault((key, check), []).append(verdict)
    flakes = []
    for (key, check), seen in verdicts_of.items():
        if len(set(seen)) > 1:
            flakes.append(Flake(key, check, tuple(seen)))
    return flakes


def key_of_cell(cell: Mapping[str, Any], run: Mapping[str, Any] | None, environment: Mapping[str, Any]) -> str:
    """What a report knows that the cell's verdicts rest on; empty where that is too little, or another run's.

    The files of the project that the cell imported, by their contents, else the commit with its edits; what the matrix
    asks of it; environment, version of this package, and of every other package that was installed. A report of a
    version of this package that did not tell them says too little: an upgrade of one would look like a flake.
    """
    run = run or {}
    if "packages" not in run:
        return ""
    observation = cell.get("observation") or {}
    rests_on = observation.get("sources") or run.get("sources") or run.get("git")
    if not rests_on or "kept" in cell or "reused" in cell or run.get("sources_edited"):
        return ""
    planned = {name: value for name, value in (cell.get("planned") or {}).items() if name != "rule"}
    told = json.dumps([rests_on, planned, dict(environment), run.get("plugin"), run["packages"]],
                      sort_keys=True)
    # 48 bits: enough to tell the few runs of one cell apart, and short in a report.
    return hashlib.sha256(told.encode()).hexdigest()[:12]
