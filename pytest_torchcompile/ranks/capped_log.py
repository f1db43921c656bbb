"""Capped logs: of what a cell writes to stdout and stderr the head and the tail are kept, and the middle is dropped.

A process writes to a file, and not to a pipe, because its last lines have to be there when it has crashed. Whoever has
started it looks at the file from outside, so that it does not matter what the process is doing. On Linux a hole is made
in the middle, so that the file takes no room; elsewhere all but the head is cut off.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["HEAD_BYTES", "TAIL_BYTES", "drop_middle", "read_ends", "start_anew"]

# The head has what began it, the tail what ended it; between lie repetitions, which fill disks.
HEAD_BYTES: Final = 8 << 20
TAIL_BYTES: Final = 8 << 20
_KEEP_SIZE_AND_PUNCH_HOLE: Final = 1 | 2
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`` of linux/falloc.h."""
# More of the tail: the reason of a crash comes last.
_SHOWN_HEAD: Final = 800
_SHOWN_TAIL: Final = 3200


def drop_middle(log: Path) -> int:
    """Give back the room of all but the head and the tail; return how long the file is."""
    try:
        size = log.stat().st_size
        if size > HEAD_BYTES + TAIL_BYTES and not _punch_middle(log, size):
            os.truncate(log, HEAD_BYTES)
    except OSError:
        # The run has ended, and its folder is gone.
        return 0
    return size


def _punch_middle(log: Path, size: int) -> bool:
    """Whether the middle could be made a hole: not every file system can."""
    is_punched = False
    if sys.platform == "linux":
        punch = ctypes.CDLL(None).fallocate64
        punch.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        file = os.open(log, os.O_WRONLY)
        try:
            middle = size - HEAD_BYTES - TAIL_BYTES
            is_punched = bool(punch(file, _KEEP_SIZE_AND_PUNCH_HOLE, HEAD_BYTES, middle) == 0)
        finally:
            os.close(file)
    return is_punched


def start_anew(log: Path) -> None:
    """Empty the log of a process that is about to begin a cell; it goes on at the new end of the file."""
    try:
        os.truncate(log, 0)
    except OSError:
        # It has no log yet.
        return


def read_ends(log: Path) -> str:
    """The first and the last lines, and how much was left out between them."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            # Never all of a long file: its middle may be a hole of many gigabytes.
            if size <= _SHOWN_HEAD + _SHOWN_TAIL:
                return file.read().decode(errors="replace").strip()
            head = file.read(_SHOWN_HEAD).decode(errors="replace")
            file.seek(size - _SHOWN_TAIL)
            tail = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Whole lines, where there are any: the head may end in the middle of one, and the tail begin so.
    first = head.rpartition("\n")[0] or head
    last = tail.partition("\n")[2] or tail
    return f"{first}\n... ({size:,} bytes were written to stdout and stderr)\n{last}".strip()
