"""The end of a rank process with the pytest that it works for, also in the middle of a cell."""

from __future__ import annotations

import os
import select
import signal
import threading

__all__ = ["end_with_other_side"]


def end_with_other_side(connection: int) -> None:
    """Kill this process' group once nobody holds the other end of a connection any more.

    The zygote does so too, but it may have been killed, or live on when a worker of xdist has crashed.
    """
    threading.Thread(target=_wait_and_end, args=(connection,), daemon=True).start()


def _wait_and_end(connection: int) -> None:
    waiting = select.poll()
    # For no event: a hang-up is told unasked.
    waiting.register(connection, 0)
    waiting.poll()
    os.killpg(0, signal.SIGKILL)
