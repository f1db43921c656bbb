"""Starting: how a run comes to rank processes on this system, as forks of a zygote or as fresh processes. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, Protocol

from pytest_torchcompile.ranks.fresh import FreshChannel, FreshProcesses, start_fresh
from pytest_torchcompile.ranks.message_frames import Channel
from pytest_torchcompile.system import can_fork

__all__ = ["RankProcesses", "ask_for_stacks", "may_still_tell", "open_processes", "start_rank", "wait_for_any"]

WARM_SECONDS: Final = 90.0
"""By default, and at most: half of what whoever wants a rank process waits for one."""


class RankProcesses(Protocol):
    """What the owner of a run has: the folder that every rank process of it uses, and the end of them."""

    folder: Path

    @property
    def was_replaced(self) -> bool:
        """Whether what starts rank processes was killed, and started again."""

    def close(self) -> None:
        """End every rank process and remove the folder."""


def open_processes(warm_seconds: float = WARM_SECONDS) -> RankProcesses:
    """Make the folder of a run, and what starts its rank processes. Raises OSError where there is no room for it.

    ``warm_seconds``: how long the first compile may take, by which rank processes are made warm before they start.
    """
    if sys.platform != "win32" and can_fork():
        from pytest_torchcompile.ranks.zygotes import Zygote

        return Zygote(min(warm_seconds, WARM_SECONDS))
    return FreshProcesses()


def start_rank(folder: Path) -> tuple[Channel, int, Path]:
    """A new rank process of the run with this folder: the connection to it, its number, and where its files are.

    Raises :class:`~pytest_torchcompile.errors.NoRank` where none can be had.
    """
    if sys.platform != "win32" and can_fork():
        from pytest_torchcompile.ranks.zygotes import connect_rank

        return connect_rank(folder)
    return start_fresh(folder)


def wait_for_any(channels: Iterable[Channel], timeout: float) -> list[Channel]:
    """Those that have a message, or the end of one, once there is one; none after so many seconds."""
    waiting: dict[Any, Channel] = {}
    for channel in channels:
        source: Any = channel
        if isinstance(channel, FreshChannel):
            source = channel.answers
        waiting[source] = channel
    return [waiting[ready] for ready in connection.wait(list(waiting), timeout)]


def may_still_tell(home: Path) -> bool:
    """Whether somebody may yet write how a rank process has ended whose files are there."""
    if sys.platform != "win32" and can_fork():
        from pytest_torchcompile.ranks.zygotes import is_alive

        return is_alive(home)
    # Of a fresh process it was written before its connection closed.
    return False


def ask_for_stacks(channel: Channel | None, pid: int) -> None:
    """Have a rank process write where its threads are."""
    # It may have ended: then there is no such process, or nobody at the other side.
    with contextlib.suppress(OSError):
        if sys.platform != "win32" and can_fork():
            os.kill(pid, signal.SIGUSR1)
        elif isinstance(channel, FreshChannel):
            channel.ask_for_stacks()
