"""ColdCompile: a cell is compiled by a process of its own, which tells the code that came of it. No torch at its top.

The caches of graphs are left aside, so that nothing is taken from an earlier compile. A kernel whose source was built
before is not built again: what is asked is which sources the compiler writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import Job

__all__ = ["compile_in_process", "nothing_made"]

_PROCESS: Final = "pytest_torchcompile.run.cold_process"
_LAST_LINES: Final = 12
"""Of what a process said that failed."""


def compile_in_process(job: Job, hash_seed: int) -> dict[str, Any]:
    """Compile a cell of one rank in a fresh process, in which Python hashes texts by this seed.

    Returns what :meth:`~pytest_torchcompile.wrappers.protocol.CellTrial.compile_apart` does.
    """
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    asked = json.dumps({"job": asdict(replace(job, comparisons=None)), "path": sys.path})
    with tempfile.TemporaryDirectory(prefix="torchcompile-cold-") as folder:
        # What the model prints goes elsewhere.
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", _PROCESS, str(answer)]
        # Its time is the cell's, whose process is ended with its children when it is over.
        done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False)
        if not answer.exists():
            said = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
            return nothing_made(f"its process ended with {done.returncode}: {said}")
        made: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return made


def nothing_made(failure: str) -> dict[str, Any]:
    """What is told where nothing was compiled."""
    return {"graphs": [], "texts": {}, "stages": {}, "failure": failure}
