"""User Python: how much of a step passes in code that is not torch's, nor generated, nor ours, and in which function.

A profiler of operators sees that time passes between them, and not whose: torch's own Python around a compiled graph
takes tens of microseconds a call, and no print that is taken out makes it less. So a step is run once more with
``sys.setprofile``, and the time of each frame goes to whoever wrote it. Code of the standard library is its caller's.

It sees the thread that calls it: a backward pass on a GPU runs in another one.
"""

from __future__ import annotations

import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

__all__ = ["UserPython", "measure_user_python"]

_TIMES: Final = 3
_OURS: Final = str(Path(__file__).parents[1])
_STANDARD: Final = str(Path(types.__file__).parent)
_INSTALLED: Final = ("site-packages", "dist-packages")
_GENERATED: Final = ("torchinductor", "torch_compile_debug")
"""Folders that Inductor writes its code into have one of these in their path (torch 2.8 to 2.15)."""
_USER, _NEUTRAL, _OTHER = "user", "neutral", "other"


@dataclass(frozen=True)
class UserPython:
    """Of one step."""

    share: float
    """Between 0 and 1: of the step without what this profiler itself takes."""
    function: str = ""
    """That which takes most of it; empty where there is none."""
    file: str = ""
    line: int = 0
    """Its first line (one-based)."""


def measure_user_python(step: Callable[[], object]) -> UserPython:
    """Run ``step``, warm, some times over; of these the one with the smallest share counts.

    Another profiler of the thread, such as that of a coverage tool, is put back.
    """
    measured = [_FrameTimes().run(step) for _ in range(_TIMES)]
    return min(measured, key=_share_of)


def _share_of(found: UserPython) -> float:
    return found.share


class _FrameTimes:
    """Seconds of each user's function by itself, without what it calls of others."""

    def __init__(self) -> None:
        self._seconds: Counter[types.CodeType] = Counter()
        self._owners: list[types.CodeType | None] = []
        """Of each frame that is running, innermost last, the user's code whose time it is; None: somebody else's."""
        self._since = self._all = 0.0

    def run(self, step: Callable[[], object]) -> UserPython:
        """Run it and tell what was measured."""
        before = sys.getprofile()
        self._since = time.perf_counter()
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(before)
        if not self._seconds or not self._all:
            return UserPython(0.0)
        code, _ = self._seconds.most_common(1)[0]
        share = min(1.0, sum(self._seconds.values()) / self._all)
        name = getattr(code, "co_qualname", code.co_name)
        return UserPython(share, name, code.co_filename, code.co_firstlineno)

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        passed = time.perf_counter() - self._since
        self._all += passed
        if self._owners and (owner := self._owners[-1]) is not None:
            # A Counter holds any numbers.
            self._seconds[owner] += passed  # type: ignore[assignment]
        if event == "call":
            self._owners.append(self._owner_of(frame.f_code))
        elif self._owners:
            self._owners.pop()
        # What is noted here is nobody's time.
        self._since = time.perf_counter()

    def _owner_of(self, code: types.CodeType) -> types.CodeType | None:
        kind = _kind_of(code.co_filename)
        if kind == _USER:
            return code
        if kind == _NEUTRAL and self._owners:
            return self._owners[-1]
        return None


@cache
def _kind_of(file: str) -> str:
    """Whose code a file is."""
    import torch

    if file.startswith((str(Path(torch.__file__).parent), _OURS)):
        return _OTHER
    # Code without a file is made by torch, as that of a graph; so is what Inductor writes.
    if file.startswith("<") or any(folder in file for folder in _GENERATED):
        return _NEUTRAL if file.startswith("<frozen") else _OTHER
    installed = any(folder in file for folder in _INSTALLED)
    return _NEUTRAL if file.startswith(_STANDARD) and not installed else _USER
