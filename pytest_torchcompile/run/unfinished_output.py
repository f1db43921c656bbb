"""What compilers were writing when they are killed: it goes with them.

A linker that is killed leaves half a library under its final name. Torch's cache takes a file that is there for a whole
one, so every later run would fail to load it. So whoever kills processes first stops the compilers among them, removes
what they are writing, and kills them then: while they are stopped nobody writes, and their locks are still held.

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
    """Of processes that are to be killed stop the compilers, remove what they were told to make, and kill them."""
    if sys.platform != "linux":
        return
    writing = {pid: _outputs_of(pid) for pid in pids}
    compilers = [pid for pid, outputs in writing.items() if outputs]
    for pid in compilers:
        _send(pid, signal.SIGSTOP)
    for pid in compilers:
        # One that has ended meanwhile has written it whole, and another run, which waited for its lock, may load it.
        # Its number may be another process' by now, which goes on.
        if _outputs_of(pid) != writing[pid]:
            _send(pid, signal.SIGCONT)
            continue
        for path in writing[pid]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        # Here, for one in a process group of its own would stay stopped for ever.
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _outputs_of(pid: int) -> set[Path]:
    """Files that follow ``-o`` in a command line, if their ending is a compiler's."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        folder = Path(f"/proc/{pid}/cwd").readlink()
    # The process may have ended between the list and this look.
    except OSError:
        return set()
    outputs: set[Path] = set()
    for option, value in pairwise(words):
        path = folder / os.fsdecode(value)
        if option == b"-o" and path.suffix in _WRITTEN:
            outputs.add(path)
    return outputs
