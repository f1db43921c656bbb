"""ColdCompile: a cell is compiled by a process of its own, which tells the code that came of it. No torch at its top.

The caches of graphs are left aside, so that nothing is taken from an earlier compile. A kernel whose source was built
before is not built again: what is asked is which sources the compiler writes.
"""

from __future__ import annotations

import os
from typing import Any, Final

from pytest_torchcompile.observation import Job
from pytest_torchcompile.run.job_process import ask_process

__all__ = ["compile_in_process", "nothing_made"]

_PROCESS: Final = "pytest_torchcompile.run.cold_process"


def compile_in_process(job: Job, hash_seed: int) -> dict[str, Any]:
    """Compile a cell of one rank in a fresh process, in which Python hashes texts by this seed.

    Returns what :meth:`~pytest_torchcompile.wrappers.protocol.CellTrial.compile_apart` does.
    """
    made, why = ask_process(_PROCESS, job, environment={**os.environ, "PYTHONHASHSEED": str(hash_seed)})
    return nothing_made(why) if made is None else made


def nothing_made(failure: str) -> dict[str, Any]:
    """What is told where nothing was compiled."""
    return {"graphs": [], "texts": {}, "stages": {}, "failure": failure}
