"""What compilers were writing when they are killed: it goes with them.

A linker that is killed leaves half a library under its final name. Torch's cache takes a file that is there for a whole
one, so every later run would fail to load it. So whoever kills processes first stops them, removes what compilers among
them are writing, and kills them then: while they are stopped nobody writes, and locks that they hold are still held.

Only Linux tells what a process was called with (``/proc``); elsewhere nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

__all__ = ["remove_unfinished"]

_WRITTEN: Final = frozenset({".so", ".o", ".gch", ".pch"})
"""Endings of what a C++ compiler or a linker makes for torch."""


def remove_unfinished(pids: Iterable[int]) -> None:
    """Stop the processes, and remove the files that compilers among them were told to make. They are to be killed."""
    if sys.platform != "linux":
        return
    writing: set[Path] = set()
    for pid in pids:
        if outputs := _outputs_of(pid):
            # It may have ended meanwhile; then what it has written is whole, and is made again.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP)
            writing |= outputs
    for path in writing:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _outputs_of(pid: int) -> set[Path]:
    """Files that follow ``-o`` in a command line, if their ending is a compiler's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        folder = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return set()
    outputs: set[Path] = set()
    for option, value in pairwise(words):
        path = folder / os.fsdecode(value)
        if option == b"-o" and path.suffix in _WRITTEN:
            outputs.add(path)
    return outputs
