"""Ownership: whose code raised, the user's or ours? Only the user's own mistake may be told as one."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

import torch

__all__ = ["raised_by_us", "run_theirs", "says_fork"]

Result = TypeVar("Result")

_OURS: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# What of ours runs around and inside the user's model, and hands on what that raises.
_GUESTS: Final = tuple(_OURS + name for name in ("zoo", "wrappers", "backends", "layer", "ledger", "gauges", "faults"))
_ZOO: Final = _OURS + "zoo"
# Torch and Python raise on behalf of whoever calls them. What is installed beside them is the user's.
_NEITHER: Final = (os.path.join(os.path.dirname(torch.__file__), ""),
                   os.path.join(sysconfig.get_path("stdlib"), ""))
_INSTALLED: Final = f"{os.sep}site-packages{os.sep}"
# What autograd (torch/csrc/autograd/engine.cpp) and CUDA (torch/cuda/__init__.py) say in a fork that came too late:
# torch 2.8 to 2.15. Cells run in forks, and it is us who forked.
_OF_A_FORK: Final = ("fork-based multiprocessing", "in forked subprocess")


def run_theirs(function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    """Call what is the user's: a model, a loss, a backward pass, or an operator in one of them.

    The frame of this call is the border that :func:`raised_by_us` looks for.
    """
    return function(*args, **kwargs)


def says_fork(error: BaseException) -> bool:
    """Whether torch says that this process was forked too late, which is no doing of the user's."""
    return any(text in str(error) for text in _OF_A_FORK)


def raised_by_us(error: BaseException) -> bool:
    """Whether an exception of an eager run is our own mistake, by the place where it was raised.

    It is the user's only inside of :func:`run_theirs`, and there only if no code of ours was entered once more, as that
    of a mode which watches each operator.
    """
    if says_fork(error):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    borders = [place for place, frame in enumerate(frames) if frame.f_code is run_theirs.__code__]
    if not borders:
        return True
    inside = frames[borders[-1] + 1:]
    for frame in reversed(inside):
        if _is_neutral(frame, innermost=frame is inside[-1]):
            continue
        return frame.f_code.co_filename.startswith(_OURS)
    return False


def _is_neutral(frame: FrameType, innermost: bool) -> bool:
    """Whether a frame says nothing about whose mistake it was: the one that called it has to be asked."""
    file = frame.f_code.co_filename
    if file.startswith(_OURS):
        return file.startswith(_ZOO) or (file.startswith(_GUESTS) and not innermost)
    if file.startswith("<"):
        return True
    return file.startswith(_NEITHER[0]) or (file.startswith(_NEITHER[1]) and _INSTALLED not in file)
