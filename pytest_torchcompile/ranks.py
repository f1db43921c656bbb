"""Rank processes: a cell runs in one, so that a crash or a hang is that cell's verdict and nobody else's end.

A rank process is a fork of the :mod:`~pytest_torchcompile.zygote`, so it starts in some 30 ms with torch
imported, and is reused between cells. :class:`Zygote` and :class:`Rank` are the side that pytest sees;
:func:`serve` is the loop in the rank process itself. No torch is imported on pytest's side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_torchcompile import flight
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.zygote import die_with_parent, set_environment

__all__ = ["Outcome", "Rank", "Zygote", "serve"]

START_SECONDS = 180.0
"""How long a rank process may take to answer first: the zygote may still be importing torch."""
GROWTH_BYTES = 4 << 30
"""A rank process that grew by more than this is replaced before the next cell."""
LOG_BYTES = 4000
"""How much of a rank's log goes into a report."""
STACK_LINES = 80
"""How many lines of a dead process' stacks go into a report."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: ``done`` with its value, ``crash`` or ``timeout`` with evidence."""

    status: str
    value: Any = None
    message: str = ""
    evidence: str = ""
    seconds: float = 0.0
    at: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` when it was noticed."""


class Zygote:
    """Starts the zygote and ends it, and with it every rank process."""

    def __init__(self) -> None:
        # AF_UNIX paths are limited to about 100 bytes, so a long TMPDIR can't be used.
        parent = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="torchcompile-", dir=parent if len(parent) < 60 else "/tmp"))
        code = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
                "from pathlib import Path; from pytest_torchcompile.zygote import main; main(Path(sys.argv[2]))")
        with (self.folder / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), str(self.folder)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )

    def close(self) -> None:
        """End every rank process and remove the folder."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Rank:
    """One rank process, started when first needed and started anew after a crash or a time-out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = 0
        self._connection: Connection | None = None
        self._first_rss = 0
        self._log, self._offset, self._began = folder, 0, 0.0
        self._asked = False
        """Whether the flight recorder was asked for."""

    def run(self, job: dict[str, Any], timeout: float) -> Outcome:
        """Have the rank do a job: a plain dict with the key ``do``, see :func:`execute`.

        ``timeout`` is in seconds; when it passes, the process' stacks are taken and it is killed.
        """
        connection = self.begin(job)
        if connection.poll(timeout):
            return self.finish()
        return self.give_up(f"no result after {timeout:g} s")

    def begin(self, job: dict[str, Any]) -> Connection:
        """Hand the rank a job; what is returned is ready, as ``connection.wait`` means it, once it has an outcome."""
        if self._connection is not None and self._connection.poll(0):
            self.close()  # it died between two cells (a rank says nothing unasked): not the next cell's fault
        connection = self._connection or self._start()
        self._log = self.folder / f"{self.pid}.log"
        self._offset = self._log.stat().st_size
        self._began = time.monotonic()
        with contextlib.suppress(OSError):  # it has died: finish() says how
            connection.send({**job, "flight": self._flight})
        return connection

    def finish(self) -> Outcome:
        """The outcome of a job whose connection is ready."""
        try:
            if self._connection is None:
                raise EOFError
            answer = json.loads(self._connection.recv())
        except (EOFError, OSError):
            return self._crashed()
        self._recycle(answer)
        return Outcome("done", answer["value"], seconds=self._seconds)

    def give_up(self, message: str) -> Outcome:
        """Take the stacks of a rank that has no outcome, and kill it."""
        self.ask_for_stacks()
        return self.killed(message)

    @property
    def log(self) -> str:
        """What the last job wrote to stdout and stderr, the last lines of it."""
        return _tail(self._log, self._offset)

    @property
    def _flight(self) -> Path:
        """Where the process tells what its flight recorder holds."""
        return self.folder / f"{self.pid}.flight"

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _start(self) -> Connection:
        deadline = time.monotonic() + START_SECONDS
        while True:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                channel.connect(str(self.folder / "socket"))
                break
            except OSError as error:
                channel.close()
                over = isinstance(error, ConnectionRefusedError) or not self.folder.exists()
                if over or time.monotonic() > deadline:
                    raise self._no_zygote() from None
                time.sleep(0.05)
        connection = Connection(channel.detach())
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._no_zygote()
            self.pid = connection.recv()
        except (EOFError, OSError):
            raise self._no_zygote() from None
        self._connection = connection
        self._first_rss = 0
        return connection

    def _no_zygote(self) -> TorchcompileError:
        log = _tail(self.folder / "zygote.log", 0)
        return TorchcompileError(
            "the process that imports torch for the matrix did not start"
            + (f"; it said:\n{log}" if log else " and said nothing")
        )

    def ask_for_stacks(self) -> None:
        """Have the process write where its threads are and, if it is one of several, its last collectives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        self._asked = flight.ask(self._flight)

    def killed(self, message: str) -> Outcome:
        """Kill the process once its stacks are there; a ``timeout`` with them."""
        stacks = self.folder / f"{self.pid}.stacks"
        for _ in range(20):  # faulthandler writes from a signal handler, also while C code runs
            if stacks.stat().st_size:
                break
            time.sleep(0.05)
        time.sleep(0.05)
        recorded = flight.told(self._flight) if self._asked else ""
        evidence = "\n".join(filter(None, (_stacks(stacks), recorded, self.log)))
        self.close()
        return Outcome("timeout", message=message, evidence=evidence, seconds=self._seconds)

    def _crashed(self) -> Outcome:
        seconds, at = self._seconds, time.monotonic()
        status_file = self.folder / f"{self.pid}.status"
        deadline = time.monotonic() + 5
        while not status_file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        message = _how_it_ended(int(status_file.read_text())) if status_file.exists() else "the process is gone"
        evidence = "\n".join(filter(None, (_stacks(self.folder / f"{self.pid}.stacks"), self.log)))
        self.close()
        return Outcome("crash", message=message, evidence=evidence, seconds=seconds, at=at)

    def _recycle(self, answer: dict[str, Any]) -> None:
        self._first_rss = self._first_rss or answer["rss"]
        if answer["poisoned"] or answer["rss"] - self._first_rss > GROWTH_BYTES:
            self.close()


def _how_it_ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the process ended itself with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    what = {"SIGSEGV": "segmentation fault", "SIGKILL": "killed, perhaps for want of memory",
            "SIGABRT": "aborted", "SIGBUS": "bus error", "SIGFPE": "arithmetic error",
            "SIGILL": "illegal instruction"}.get(name, "ended by a signal")
    return f"{what} ({name})"


def _tail(path: Path, offset: int) -> str:
    """The last lines written after ``offset``, at most LOG_BYTES of them."""
    try:
        with path.open("rb") as file:
            start = max(offset, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return (text if start == offset else text.partition("\n")[2]).strip()


def _stacks(path: Path) -> str:
    """What faulthandler wrote: the innermost frames come first, so the head is kept; our own are left out."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    threads = re.split(r"^(?=Thread 0x|Current thread 0x)", text, flags=re.MULTILINE)
    lines = "".join(thread for thread in threads if flight.__file__ not in thread and not _ending(thread)).splitlines()
    ours = f'File "{Path(__file__).parent}{os.sep}'
    kept = [line for line in lines if ours not in line and 'File "<string>"' not in line
            and not line.startswith("Extension modules:")]
    return "\n".join(kept if len(kept) <= STACK_LINES else [*kept[:STACK_LINES], "  ..."]).strip()


def _ending(thread: str) -> bool:
    """Whether only Python's own frames of a thread are left: it has done what it was for (the flight recorder's)."""
    frames = [line for line in thread.splitlines() if line.startswith("  File ")]
    return bool(frames) and all(f'{os.sep}threading.py"' in frame for frame in frames)


def serve(fd: int, folder: Path) -> None:
    """Do jobs until the other side closes. Runs in a fresh fork of the zygote."""
    die_with_parent()
    os.setpgid(0, 0)  # a group of its own, so that its compiler processes can be killed with it
    pid = os.getpid()
    _redirect(folder / f"{pid}.log")
    with (folder / f"{pid}.stacks").open("wb") as stacks, Connection(fd) as connection:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send(pid)
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            # As JSON, so that only plain data gets out: unpickling a torch object would import torch in pytest.
            connection.send(json.dumps(execute(job)))


def _redirect(log: Path) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 -- they last as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process: ``{"do": "cell", "job": Job, "path": [...], "gpus": [...]}``,
    ``{"do": "environment"}``, or ``{"do": "tell", ...}`` and ``{"do": "watch", ...}`` with the arguments of
    :func:`~pytest_torchcompile.store.tell` and :func:`~pytest_torchcompile.store.failed_elsewhere`.

    ``path`` is pytest's ``sys.path``: a model must be importable here whenever it is there. ``gpus`` are those that
    this process may use from now on; CUDA looks when it is first used. ``flight`` is where a rank of several tells what
    its flight recorder holds.
    """
    if gpus := job.get("gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    sys.path += [entry for entry in job.get("path", ()) if entry not in sys.path]
    set_environment()
    from pytest_torchcompile import runner

    value: Any
    if job["do"] == "cell":
        several = job["job"].world > 1
        with flight.answering(job["flight"]) if several else contextlib.nullcontext():
            value, poisoned = runner.run_cell(job["job"])
    elif job["do"] == "tell":
        from pytest_torchcompile.store import tell

        value, poisoned = tell(job["meeting"], job["rank"], job["world"], job["mine"], job["patience"]), False
    elif job["do"] == "watch":
        from pytest_torchcompile.store import failed_elsewhere

        value, poisoned = failed_elsewhere(job["meeting"], job["rank"], job["patience"]), False
    else:
        value, poisoned = runner.environment(), False
    return {"value": value, "poisoned": poisoned, "rss": _rss()}


def _rss() -> int:
    """Resident bytes of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
