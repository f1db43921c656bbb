"""A folder that runs write into and none outgrows: what was used longest ago goes, and what a killed run left there.

A file is written beside its place, under a name that says so, and renamed: a reader never meets half of one.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from os import getpid, stat_result
from pathlib import Path
from typing import Final

__all__ = ["beside_place", "tidy_folder"]

_HALF_WRITTEN: Final = re.compile(r"\..+\.\d+")
_PATIENCE: Final = 3600.0
"""Seconds after which nobody writes on at a file any more."""


def beside_place(file: Path) -> Path:
    """Where this process writes a file before it gets its place: ``.NAME.PID`` in the same folder.

    In the same folder, because only within one disk a rename is done at once.
    """
    return file.with_name(f".{file.name}.{getpid()}")


def tidy_folder(folder: Path, suffix: str, largest: int, oldest: float = float("inf")) -> int:
    """Remove files that were not used for long, and the others in that order until the rest is small enough.

    Args:
        folder: With all folders in it; one that is not there has nothing to remove.
        suffix: Of the files that count. Others stay, but for half-written ones that nobody finishes.
        largest: Bytes of all that is left.
        oldest: Seconds since a file was last used, which is when it was last modified.

    Returns:
        How many files went.
    """
    now = time.time()
    files = sorted(_files_of(folder, suffix), key=lambda found: found[1].st_mtime)
    left = sum(status.st_size for _, status in files)
    removed = 0
    for file, status in files:
        age = now - status.st_mtime
        is_abandoned = file.suffix != suffix and age > _PATIENCE
        if left <= largest and age <= oldest and not is_abandoned:
            continue
        # Another run may have removed it.
        with contextlib.suppress(OSError):
            file.unlink()
            left -= status.st_size
            removed += 1
    return removed


def _files_of(folder: Path, suffix: str) -> Iterator[tuple[Path, stat_result]]:
    for file in folder.rglob("*"):
        if file.suffix == suffix or _HALF_WRITTEN.fullmatch(file.name):
            with contextlib.suppress(OSError):
                yield file, file.stat()
