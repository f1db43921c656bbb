"""Lone script: a script is run as who reads an issue runs it: a process of its own, torch alone, an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["LoneRun", "run_alone"]

_LAST_LINES: Final = 8
"""Of what a script said, in an issue."""
_FEWEST_SECONDS: Final = 10.0
"""Torch's import and one compile want more on any machine."""


@dataclass(frozen=True)
class LoneRun:
    """What came of it: one of these is told."""

    shown: str = ""
    """It ended with what it should end with: the last lines that it printed."""
    needs_more: str = ""
    """It ended with something else, so it needs what only the first process had: that line."""
    why_not: str = ""
    """It did not end so, or was not tried, in one sentence."""


def run_alone(script: str, sign: str, seconds: float) -> LoneRun:
    """Run a script that shows a fault.

    Args:
        script: Python; imports torch alone.
        sign: As :func:`~.graph_trial.signs_of` has it: ``raises KeyError``, or it ends with an AssertionError.
        seconds: After so many it is ended: who asks may be ended himself then. With less than 10 it is not tried.

    It compiles anew, whatever caches hold: they may be of a compiler that was changed since.
    """
    wanted = sign.removeprefix("raises ") if sign.startswith("raises ") else "AssertionError"
    if seconds < _FEWEST_SECONDS:
        return LoneRun(why_not="no time was left to try it")
    # TORCHINDUCTOR_FORCE_DISABLE_CACHES: torch/_inductor/config.py, torch 2.8 to 2.15.
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with tempfile.TemporaryDirectory(prefix="pytest-torchcompile-lone-") as folder:
        file = Path(folder, "shows_it.py")
        file.write_text(script, encoding="utf-8")
        try:
            done = subprocess.run([sys.executable, file.name], cwd=folder, env=environment, capture_output=True,
                                  text=True, errors="replace", check=False, timeout=seconds)
        except subprocess.TimeoutExpired:
            return LoneRun(why_not=f"it did not end within {seconds:.0f} s")
    if done.returncode == 0:
        return LoneRun(why_not="eager and compiled agree there, so what the project sets has a part in it")
    raised = _error_lines(done.stderr)
    name = raised[0].partition(":")[0].rpartition(".")[2] if raised else ""
    if name == wanted:
        return LoneRun(shown="\n".join(raised[:_LAST_LINES]))
    return LoneRun(needs_more=raised[0] if raised else f"it ended with {done.returncode}")


def _error_lines(said: str) -> list[str]:
    """What a traceback ends with: the error, and the rest of its message."""
    lines = said.rstrip().splitlines()
    last = 0
    for number, line in enumerate(lines):
        # Behind the frames, which are indented, and the last of several tracebacks.
        if line.startswith("Traceback ("):
            last = number
    for number in range(last + 1, len(lines)):
        if lines[number] and not lines[number].startswith(" "):
            return [line.rstrip() for line in lines[number:]]
    return []
