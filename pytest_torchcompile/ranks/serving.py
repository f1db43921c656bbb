"""The rank's own end: a fork of the zygote, or a fresh process, does jobs until the other side closes. No torch until
the first job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, Final

from pytest_torchcompile.ranks import listeners
from pytest_torchcompile.ranks.message_frames import Messages
from pytest_torchcompile.run.offspring import adopt_orphans
from pytest_torchcompile.system import resident_bytes

__all__ = ["COLLECT_AFTER", "WARM", "execute_job", "serve", "serve_jobs", "set_environment"]

WARM = "PYTEST_TORCHCOMPILE_WARM"
"""Set to 0 in the environment to have the zygote import only, without the warm-up compile."""

COLLECT_AFTER: Final = (5000, 10, 10)
"""When Python looks for garbage: thresholds of ``gc.set_threshold``. With its own, tracing a graph has it look through
everything that torch keeps many times over, in a tenth of a second each; a rank's memory is the same with these."""


def set_environment() -> None:
    """What must be in the environment before torch is loaded; what the user has set stays.

    A passive wait saves 15 to 35 % of the CPU time of parallel workers and changes no cache key. Kineto, the
    profiler behind coverage, writes a line to stderr for each start and stop unless its log level is above all.
    Asking NVML instead of CUDA whether there is a GPU keeps the driver uninitialised, so that forks can use it.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def serve(fd: int, folder: Path) -> None:
    """Do jobs until the other side closes. Runs in a fresh fork of the zygote."""
    if sys.platform != "win32":
        # A group of its own, so that its compiler processes can be killed with it.
        os.setpgid(0, 0)
    with Connection(fd) as connection:
        serve_jobs(connection, folder, functools.partial(listeners.listen_to_signals, fd))


def serve_jobs(connection: Messages, folder: Path, listen: Callable[[BinaryIO], None]) -> None:
    """Do jobs until the other side closes. ``listen`` starts what has this process write its stacks into a file when
    it is asked to, and what ends it with the other side.
    """
    pid = os.getpid()
    gc.set_threshold(*COLLECT_AFTER)
    _redirect_streams(folder / f"{pid}.log")
    adopt_orphans()
    with (folder / f"{pid}.stacks").open("wb") as stacks:
        # It writes to the file from a signal handler, also where C code runs that never comes back to Python.
        faulthandler.enable(stacks)
        listen(stacks)
        connection.send(pid)
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            # As JSON, so that only plain data gets out: unpickling a torch object would import torch in pytest.
            connection.send(json.dumps(execute_job(job, in_rank=True)))


def _redirect_streams(log: Path) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    # No input: a model that asks for a key must fail at once, and not wait until the time-out.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    # They last as long as the process. What cannot be written is escaped: a cell's words must not be its failure.
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def execute_job(job: dict[str, Any], in_rank: bool = False) -> dict[str, Any]:
    """Do one job in this process: ``{"do": "cell", "job": Job, "path": [...], "gpus": [...]}``,
    ``{"do": "environment"}``, or ``{"do": "tell", ...}`` and ``{"do": "watch", ...}`` with the arguments of
    ``exchange_outcomes`` and ``failed_elsewhere`` (:mod:`~pytest_torchcompile.wrappers.process_group`).

    ``path`` is pytest's ``sys.path``: a model must be importable here whenever it is there. ``gpus`` are those that
    this process may use from now on; CUDA looks when it is first used. ``flight`` is where a rank of several tells what
    its flight recorder holds. ``in_rank``: this is a rank process, and not pytest's own.
    """
    if gpus := job.get("gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    sys.path += [entry for entry in job.get("path", ()) if entry not in sys.path]
    # Before the first import that brings torch.
    set_environment()
    watched = job["do"] == "cell" and job["job"].watched
    if watched:
        from pytest_torchcompile.reuse.watched_files import start_watching

        start_watching()
    from pytest_torchcompile.run import runner

    value: Any
    poisoned = False
    if job["do"] == "cell":
        with _answering_for_its_flight(job):
            value, poisoned = runner.run_cell(job["job"], in_rank)
        if watched:
            from pytest_torchcompile.reuse.run_inputs import collect_inputs

            value["read"] = collect_inputs(Path(job["job"].root))
    elif job["do"] == "tell":
        from pytest_torchcompile.wrappers.process_group import exchange_outcomes

        value = exchange_outcomes(job["meeting"], job["rank"], job["world"], job["mine"], job["patience"])
    elif job["do"] == "watch":
        from pytest_torchcompile.wrappers.process_group import failed_elsewhere

        value = failed_elsewhere(job["meeting"], job["rank"], job["patience"])
    else:
        value = runner.environment()
    return {"value": value, "poisoned": poisoned, "rss": resident_bytes()}


def _answering_for_its_flight(job: dict[str, Any]) -> AbstractContextManager[None]:
    """A rank of several tells meanwhile what its flight recorder holds; one alone has no collectives."""
    return listeners.answer_questions(job["flight"]) if job["job"].world > 1 else contextlib.nullcontext()
