"""Kept runs: reports of the last whole runs, each in ``.compile-matrix/runs/DATE-COMMIT/``, so many and no more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.report.safe_output import FOLDER, make_folder, replace_file

__all__ = ["RUNS", "keep_run", "kept_runs", "newest_of_other_commit"]

RUNS: Final = f"{FOLDER}/runs"
REPORT: Final = "report.json"
_NO_COMMIT: Final = "no-commit"
_NAME: Final = re.compile(rf"(?P<date>\d{{8}}T\d{{6}})-(?P<commit>[0-9a-f]{{12}}|{_NO_COMMIT})(?P<shard>-\d+of\d+)?")
"""What we call a run's folder; another one in there is somebody else's, and is left alone."""


def keep_run(root: Path, report: Path, block: Mapping[str, Any], most: int) -> None:
    """Copy the report of a whole run, and remove the oldest beyond so many. Raises OSError.

    ``root``: pytest's root folder; ``block``: what the report holds; ``most``: 0 keeps none, and removes none.
    """
    name = _name_of_run(block)
    if not name or most < 1:
        return
    folder = root / RUNS / name
    make_folder(folder)
    # Whole or not at all: a kill in the middle leaves no half of a report.
    replace_file(folder / REPORT, report.read_text(encoding="utf-8"))
    for old in kept_runs(root, _shard_of(block))[most:]:
        shutil.rmtree(old.parent, ignore_errors=True)


def kept_runs(root: Path, shard: tuple[int, int] = (1, 1)) -> list[Path]:
    """The reports that are kept of this shard, the newest first."""
    found = []
    for path in (root / RUNS).glob(f"*/{REPORT}"):
        match = _NAME.fullmatch(path.parent.name)
        if match is not None and (match["shard"] or "") == _shard_suffix(shard):
            found.append(path)
    # The name begins with the date.
    return sorted(found, key=lambda path: path.parent.name, reverse=True)


def newest_of_other_commit(root: Path, commit: str, shard: tuple[int, int] = (1, 1)) -> Path | None:
    """The newest report of another commit; where none is known (``commit`` is empty) the newest of all."""
    for path in kept_runs(root, shard):
        match = _NAME.fullmatch(path.parent.name)
        if match is not None and (not commit or match["commit"] != commit[:12]):
            return path
    return None


def _name_of_run(block: Mapping[str, Any]) -> str:
    """``20261123T184501-0123456789ab``; empty where the run does not tell when it began."""
    run = block["run"] or {}
    # Without separators, for a colon is not allowed in names on Windows; cut before the zone.
    date = re.sub(r"[-:]", "", str(run.get("started") or ""))[:15]
    commit = str((run.get("git") or {}).get("commit") or "")[:12] or _NO_COMMIT
    name = f"{date}-{commit}{_shard_suffix(_shard_of(block))}"
    return name if _NAME.fullmatch(name) else ""


def _shard_of(block: Mapping[str, Any]) -> tuple[int, int]:
    return block["shard"]["index"], block["shard"]["of"]


def _shard_suffix(shard: tuple[int, int]) -> str:
    index, of = shard
    return f"-{index}of{of}" if of > 1 else ""
