"""Offspring: the processes that descend from this one, and the end of those that a cell left behind.

A process that is left without a parent would become init's, and nobody would know whose it was. So a rank process, and
the zygote above it, ask Linux for such processes of theirs, also of a daemon with a session of its own. On other
systems nothing is found, and a rank's process group is all that is ended with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NoReturn

from pytest_torchcompile.run.unfinished_output import remove_unfinished

__all__ = ["adopt_orphans", "children_of", "end_offspring", "end_own_group", "kill_group", "offspring_of"]

# Of linux/prctl.h; Python has no name for it.
_PR_SET_CHILD_SUBREAPER: Final = 36
_ROUNDS: Final = 100
_ROUND_SECONDS: Final = 0.01
"""How often what is left is looked for again: a process that is killed may have started another one before."""


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends. Not handed on to forks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """The processes that a process has started or adopted, those that have ended and were not waited for among them."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, file.read_text().split()))
    return found


def offspring_of(pid: int, keep: Collection[int] = ()) -> set[int]:
    """Every process that descends from a process, without itself, those to keep, and theirs."""
    seen = set(keep)
    return set(_descend(pid, seen))


def _descend(pid: int, seen: set[int]) -> Iterator[int]:
    for child in children_of(pid) - seen:
        seen.add(child)
        yield child
        yield from _descend(child, seen)


def end_offspring(keep: Collection[int] = ()) -> None:
    """Kill every descendant but those to keep and theirs, and wait a second for their ends."""
    me = os.getpid()
    for _ in range(_ROUNDS):
        left = offspring_of(me, keep)
        if not left:
            return
        remove_unfinished(left)
        for pid in left:
            _kill_one(pid)
        if sys.platform != "win32":
            # One that was not waited for would be found again, though it has ended.
            for pid in children_of(me) & left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(_ROUND_SECONDS)


def kill_group(pid: int) -> None:
    """Kill the process group that a rank process leads, and the process; on Windows it and what it has started.

    What compilers in it were writing goes with them.
    """
    if sys.platform == "win32":
        # Nothing else there knows what a process has started.
        with contextlib.suppress(OSError):
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(pid)], capture_output=True, check=False)
    else:
        remove_unfinished(offspring_of(pid))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    # One that was forked just now has no group of its own yet.
    _kill_one(pid)


def end_own_group() -> NoReturn:
    """Kill the process group of this process, and with it this process."""
    if sys.platform != "win32":
        remove_unfinished(offspring_of(os.getpid()))
        os.killpg(0, signal.SIGKILL)
    # Not sys.exit(): this is called in a thread, while the main one does whatever it does.
    os._exit(1)


def _kill_one(pid: int) -> None:
    """Kill a process that may have ended already."""
    # On Windows every signal ends a process at once, and an OSError says that there is none.
    deadly = signal.SIGTERM
    if sys.platform != "win32":
        deadly = signal.SIGKILL
    with contextlib.suppress(OSError):
        os.kill(pid, deadly)
