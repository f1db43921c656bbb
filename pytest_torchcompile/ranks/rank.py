"""Rank processes: a cell runs in one, so that a crash or a hang is that cell's verdict and nobody else's end.

A rank process is a fork of the :mod:`~pytest_torchcompile.ranks.zygote`, so it starts in some 30 ms with torch
imported, and is reused between cells; :mod:`~pytest_torchcompile.ranks.starting` has what serves where none can be
forked. :class:`Rank` is the side that pytest sees; :mod:`~pytest_torchcompile.ranks.serving` is the rank's own. No
torch is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from pytest_torchcompile.observation import RankOutcome, portable_path
from pytest_torchcompile.ranks import listeners
from pytest_torchcompile.ranks.capped_log import read_ends, start_anew
from pytest_torchcompile.ranks.message_frames import Channel
from pytest_torchcompile.ranks.starting import ask_for_stacks, may_still_tell, start_rank
from pytest_torchcompile.run.offspring import kill_group
from pytest_torchcompile.system import allowed_memory_bytes

__all__ = ["WAITS_FOR_PEERS", "Rank", "growth_bytes"]

WAITS_FOR_PEERS = "settled_collectives.py"
"""The one file of ours where a rank waits for what others have to do."""
STACK_LINES = 80
"""How many lines of a dead process' stacks go into a report."""


class Rank:
    """One rank process, started when first needed and started anew after a crash or a time-out."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the run's: :attr:`pytest_torchcompile.ranks.zygotes.Zygote.folder`."""
        self.folder = folder
        self.pid = 0
        self._home = folder
        """Where the files of the process are: its zygote's folder."""
        self._connection: Channel | None = None
        self._first_rss = 0
        self._began = 0.0
        self._asked = False
        """Whether the flight recorder was asked for."""

    def run(self, job: dict[str, Any], timeout: float) -> RankOutcome:
        """Have the rank do a job: a plain dict with the key ``do``, see
        :func:`~pytest_torchcompile.ranks.serving.execute_job`.

        ``timeout`` is in seconds; when it passes, the process' stacks are taken and it is killed.
        """
        connection = self.begin(job)
        if connection.poll(timeout):
            return self.finish()
        return self.give_up(f"no result after {timeout:g} s")

    def begin(self, job: dict[str, Any]) -> Channel:
        """Hand the rank a job; what is returned is ready, as ``connection.wait`` means it, once it has an outcome.

        Raises :class:`NoRank` where there is no process, and none can be started.
        """
        if self._connection is not None and self._connection.poll(0):
            # A rank says nothing unasked: it died between two cells, which is not the next cell's fault.
            self.close()
        connection = self._connection or self._start_process()
        start_anew(self._process_file("log"))
        self._began = time.monotonic()
        # Where it has died, finish() says how.
        with contextlib.suppress(OSError):
            connection.send({**job, "flight": self._process_file("flight")})
        return connection

    def finish(self) -> RankOutcome:
        """The outcome of a job whose connection is ready."""
        try:
            if self._connection is None:
                raise EOFError
            answer = json.loads(self._connection.recv())
        except (EOFError, OSError):
            return self._crash_outcome()
        self._end_if_spoilt(answer)
        return RankOutcome("done", answer["value"], seconds=self._job_seconds)

    def give_up(self, message: str) -> RankOutcome:
        """Take the stacks of a rank that has no outcome, and kill it."""
        self.ask_for_stacks()
        return self.kill_with_stacks(message)

    @property
    def log(self) -> str:
        """What the last job wrote to stdout and stderr, the first and the last lines of it."""
        return read_ends(self._process_file("log"))

    def _process_file(self, kind: str) -> Path:
        """A file of the process: its ``log``, ``stacks``, wait ``status``, or what its ``flight`` recorder holds."""
        return self._home / f"{self.pid}.{kind}"

    @property
    def _job_seconds(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._connection is not None:
            # Before the connection is closed, at which the process would end itself.
            kill_group(self.pid)
            self._connection.close()
            self._connection = None

    def _start_process(self) -> Channel:
        self._connection, self.pid, self._home = start_rank(self.folder)
        self._first_rss = 0
        return self._connection

    def ask_for_stacks(self) -> None:
        """Have the process write where its threads are and, if it is one of several, its last collectives."""
        ask_for_stacks(self._connection, self.pid)
        self._asked = listeners.ask_recorder(self._process_file("flight"))

    def kill_with_stacks(self, message: str) -> RankOutcome:
        """Kill the process once its stacks are there; a ``timeout`` with them."""
        stacks = self._process_file("stacks")
        _wait_for_stacks(stacks)
        recorded = listeners.read_answer(self._process_file("flight")) if self._asked else ""
        evidence = "\n".join(filter(None, (_read_stacks(stacks), recorded, self.log)))
        self.close()
        return RankOutcome("timeout", message=message, evidence=evidence, seconds=self._job_seconds)

    def _crash_outcome(self) -> RankOutcome:
        """How the process ended, of which whoever started it writes a file."""
        seconds, at = self._job_seconds, time.monotonic()
        status_file = self._process_file("status")
        deadline = time.monotonic() + 5
        # Without its zygote nobody knows how it ended.
        while not status_file.exists() and may_still_tell(self._home) and time.monotonic() < deadline:
            time.sleep(0.01)
        message, stacks = "the process is gone", self._process_file("stacks")
        if status_file.exists():
            code = int(status_file.read_text(encoding="ascii"))
            message = _how_it_ended(code)
            if _writes_stacks(code):
                message += _innermost_place(_raw_text(stacks))
        evidence = "\n".join(filter(None, (_read_stacks(stacks), self.log)))
        self.close()
        return RankOutcome("crash", message=message, evidence=evidence, seconds=seconds, at=at)

    def _end_if_spoilt(self, answer: dict[str, Any]) -> None:
        self._first_rss = self._first_rss or answer["rss"]
        if answer["poisoned"] or answer["rss"] - self._first_rss > growth_bytes():
            self.close()


def growth_bytes() -> int:
    """How much a rank process may grow before it is replaced: a quarter of a core's share of the memory.

    Cells leave some 70 MB each behind (compiled code, libraries), and there may be a rank process for each core.
    """
    # A quarter of a rank's share: the next cell needs the rest, for the model, its copies and the compiler.
    return allowed_memory_bytes() // (os.cpu_count() or 1) // 4


def _how_it_ended(code: int) -> str:
    """In words; ``code`` is negative where a signal has ended the process."""
    if code == _ACCESS_VIOLATION:
        return "segmentation fault (access violation)"
    if code >= 0:
        return f"the process ended itself with exit code {code}"
    if -code not in set(signal.Signals):
        return f"ended by a signal (signal {-code})"
    name = signal.Signals(-code).name
    return f"{_SIGNALS.get(name, 'ended by a signal')} ({name})"


_SIGNALS = {
    "SIGSEGV": "segmentation fault", "SIGKILL": "killed, perhaps for want of memory", "SIGABRT": "aborted",
    "SIGBUS": "bus error", "SIGFPE": "arithmetic error", "SIGILL": "illegal instruction",
}


def _writes_stacks(code: int) -> bool:
    """Whether it is an end at which faulthandler writes where the process was; of SIGKILL nobody is told."""
    if code == _ACCESS_VIOLATION:
        return True
    return -code in set(signal.Signals) and signal.Signals(-code).name in _SIGNALS.keys() - {"SIGKILL"}


_ACCESS_VIOLATION = 0xC0000005
"""The exit code that Windows gives."""


def _wait_for_stacks(path: Path) -> None:
    """Wait until faulthandler has written all stacks, two seconds at most.

    It writes from a signal handler, also while C code runs, but line by line: on a busy machine half of it may be
    there. Who is to blame for a hang is read off the stack of the current thread, so that one must not be missing.
    """
    size = 0
    # faulthandler writes from a signal handler and tells nobody when it has ended: two seconds at most.
    for _ in range(20):
        before, size = size, path.stat().st_size
        if size and size == before:
            return
        time.sleep(0.1)


def _read_stacks(path: Path) -> str:
    """What faulthandler wrote: the innermost frames come first, so the head is kept; our own are left out."""
    lines: list[str] = []
    for thread in re.split(r"^(?=Thread 0x|Current thread 0x)", _raw_text(path), flags=re.MULTILINE):
        if not (_waits_for_other_side(thread) or _is_ending(thread) or _watches_progress_bars(thread)):
            lines += [line for line in thread.splitlines() if not _is_own_line(line)]
    if len(lines) > STACK_LINES:
        lines = [*lines[:STACK_LINES], "  ..."]
    return "\n".join(lines).strip()


def _raw_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _innermost_place(stacks: str) -> str:
    """`` in conv2d (torch/nn/functional.py:549)``, of the thread that a signal has ended; empty where none was written.

    Of all that faulthandler has written the last counts: a process that this one has forked writes to the same file.
    """
    # The other threads follow behind an empty line.
    _, current, rest = stacks.rpartition("Current thread ")
    frames = rest.partition("\n\n")[0]
    if not current or "Fatal Python error" not in stacks:
        return ""
    frame = re.search(r'^  File "(.*)", line (\d+) in (.+)$', frames, re.MULTILINE)
    if frame is None:
        return " in a thread that runs no Python"
    file, line, function = frame.groups()
    if _GENERATED.search(file):
        # Its name is another one for each graph, and causes are grouped by their texts.
        return " in code that Inductor has generated"
    shown = portable_path(file)
    if shown == file:
        # A file of the user's or of Python's: the folder tells one __init__.py from another.
        shown = "/".join(re.split(r"[/\\]", file)[-2:])
    return f" in {function} ({shown}:{line})"


_GENERATED = re.compile(r"[/\\]\w{2}[/\\]c\w{40,}\.py$")
"""A file that Inductor has written: FOLDER/HASH.py of ``torch._inductor.codecache``, torch 2.8 to 2.15."""


_PACKAGE = Path(__file__).parent.parent
_LISTENERS = Path(listeners.__file__).name
"""Where our own threads in a rank process wait."""


def _is_own_line(line: str) -> bool:
    """Whether it is a frame of this package, of the start code, or no frame: what the reader's model has no part in."""
    if WAITS_FOR_PEERS in line:
        # It tells why the rank does not go on.
        return False
    ours = f'File "{_PACKAGE}{os.sep}'
    return ours in line or 'File "<string>"' in line or line.startswith("Extension modules:")


def _waits_for_other_side(thread: str) -> bool:
    """Whether it is a thread of ours that waits for the other side of this process.

    By the end of the path: a rank may have imported a checkout where pytest has the installed package.
    """
    room = Path(__file__).parent.name
    return os.path.join(room, _LISTENERS) in thread


def _watches_progress_bars(thread: str) -> bool:
    """Whether it is tqdm's, which runs beside everything from a process' first progress bar on."""
    return os.path.join("tqdm", "_monitor.py") in thread


def _is_ending(thread: str) -> bool:
    """Whether only Python's own frames of a thread are left: it has done what it was for (the flight recorder's)."""
    frames = [line for line in thread.splitlines() if line.startswith("  File ")]
    return bool(frames) and all(f'{os.sep}threading.py"' in frame for frame in frames)
