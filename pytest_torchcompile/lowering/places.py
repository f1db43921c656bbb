"""Places in the user's code, out of what torch writes beside a node of a graph. No torch."""

from __future__ import annotations

import re
from typing import Final

from pytest_torchcompile.ledger.break_sites import is_torch

__all__ = ["module_name", "place_of_stack"]

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


def module_name(path: str) -> str:
    """``blocks.0.norm`` of ``L['self'].blocks._modules['0'].norm``, as Dynamo writes it.

    >>> module_name("L['self']._modules['blocks']._modules['0'].norm")
    'blocks.0.norm'
    """
    path = re.sub(r"\._modules\['(.+?)'\]", r".\1", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    return re.sub(r"^L\['\w+'\]\.?", "", path)
