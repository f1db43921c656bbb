"""Places in the user's code, out of what torch writes beside a node of a graph. No torch."""

from __future__ import annotations

import re
from typing import Final

from pytest_torchcompile.ledger.break_sites import is_torch

__all__ = ["place_of_stack"]

_FRAME: Final = re.compile(r'File "(.+?)", line (\d+)')


def place_of_stack(stack: str) -> str:
    """``file:line`` of the innermost frame of a stack trace that is not torch's own; empty where there is none.

    >>> place_of_stack('File "/home/me/net.py", line 7, in forward')
    '/home/me/net.py:7'
    """
    frames = _FRAME.findall(stack)
    for file, line in reversed(frames):
        if not is_torch(file):
            return f"{file}:{line}"
    return ""
