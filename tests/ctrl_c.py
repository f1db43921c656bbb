"""Ctrl-C for a process that a test starts; tests in the background (nohup, many CI runners) ignore it."""

from __future__ import annotations

import signal

__all__ = ["heed_ctrl_c"]


def heed_ctrl_c() -> None:
    """To be called in the process before it begins: SIGINT ends it, whatever was handed on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
