"""Job processes: a fresh process is handed a job of one rank, and answers with plain data. No torch at its top."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import Job

__all__ = ["answer_with", "ask_process", "read_job"]

_LAST_LINES: Final = 12
"""Of what a process said that failed."""


def ask_process(module: str, job: Job, also: Mapping[str, Any] | None = None, *,
                environment: Mapping[str, str] | None = None,
                seconds: float | None = None) -> tuple[dict[str, Any] | None, str]:
    """Run ``python -m module``, which reads a job (:func:`read_job`) and answers (:func:`answer_with`).

    Args:
        module: What is run.
        job: What it is asked about.
        also: Plain data beside it.
        environment: Of the process; None: this one's.
        seconds: After so many it is ended; None: its time is the cell's, which ends with its children.

    Returns what it answers, or None and why there is no answer.
    """
    asked = json.dumps({"job": asdict(replace(job, comparisons=None)), "path": sys.path, **(also or {})})
    # Folders whose names begin with torchcompile- are those of rank processes: another run removes what nobody locks.
    with tempfile.TemporaryDirectory(prefix="pytest-torchcompile-job-") as folder:
        # What the model prints goes elsewhere.
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", module, str(answer)]
        try:
            done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=False,
                                  timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, f"its process had no answer after {seconds:g} s"
        if not answer.exists():
            said = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
            return None, f"its process ended with {_end_of(done.returncode)}: {said}"
        made: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return made, ""


def _end_of(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return str(code)


def read_job() -> tuple[Job, dict[str, Any]]:
    """In such a process: the job, and what came beside it. Modules are looked up as in the process that asks."""
    asked = json.load(sys.stdin)
    sys.path += [entry for entry in asked["path"] if entry not in sys.path]
    plain = asked.pop("job")
    return Job(**{**plain, "checks": tuple(plain["checks"]), "modules": tuple(plain["modules"])}), asked


def answer_with(answer: Mapping[str, Any]) -> None:
    """In such a process: the answer, whole or not at all."""
    file = Path(sys.argv[1])
    draft = file.with_suffix(".part")
    draft.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(draft, file)
