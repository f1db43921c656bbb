"""Fresh ranks: rank processes that are interpreters of their own, for systems on which none can be a fork. No torch.

Each imports torch itself, so the first cell of each starts some seconds later than a fork would. After that it is used
again between cells like any other. Jobs and answers go through its stdin and stdout, in frames, which every system has.
A thread at each end reads meanwhile, so that an answer can be waited for, and the end of the other side is noticed::

    FreshChannel -- stdin --------------------------> thread -- queue -- serve_jobs
                 <- connection -- thread <- stdout ---------------------

The run's folder holds their logs. That of a run that was killed stays in the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Final, cast

from pytest_torchcompile.errors import NoRank
from pytest_torchcompile.ranks.capped_log import drop_middle, read_ends
from pytest_torchcompile.ranks.listeners import STACKS, listen_to_frames
from pytest_torchcompile.ranks.message_frames import read_frame, write_frame

__all__ = ["START_SECONDS", "FreshChannel", "FreshProcesses", "main", "start_fresh"]

START_SECONDS: Final = 180.0
"""How long a rank process may take to answer first: somebody may still be importing torch."""
_PREFIX: Final = "torchcompile-"
_LOOK_SECONDS: Final = 0.25
"""How often a log is looked at."""
# A rank asked to end flushes its logs; after that it is killed.
_END_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.01
_COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from pathlib import Path; from pytest_torchcompile.ranks.fresh import main;"
    "main(Path(sys.argv[2]))"
)


class FreshProcesses:
    """The owner's side: makes the run's folder, and removes it. Each process ends with the pytest that started it."""

    was_replaced = False
    """Nobody starts processes for others here, so nobody is started again."""

    def __init__(self) -> None:
        """Raises OSError where there is no room for the folder."""
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))

    def close(self) -> None:
        """Remove the folder; for some seconds a process that is ending may still use a file of it."""
        deadline = time.monotonic() + _END_SECONDS
        while self.folder.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(_POLL_SECONDS)


def start_fresh(folder: Path) -> tuple[FreshChannel, int, Path]:
    """A new rank process: the channel to it, its number, and the folder of its files.

    Raises :class:`NoRank` where none can be started, or where it says nothing.
    """
    if not folder.is_dir():
        raise NoRank(f"the folder of the run's processes is gone: {folder}")
    first_words = folder / f"start-{time.monotonic_ns()}.log"
    try:
        with first_words.open("wb") as log:
            # A group of its own: Ctrl-C is pytest's to handle. Each system ignores the other one's word for that.
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
    # Too many processes, or no memory for one more: it is the machine's, not the cell's.
    except OSError as error:
        raise NoRank(f"a rank process could not be started: {error}") from error
    channel, passed_on = FreshChannel.of_process(process)
    threading.Thread(target=_pass_answers, args=(process, passed_on, folder), daemon=True).start()
    threading.Thread(target=_cap_log, args=(process, folder), daemon=True).start()
    try:
        if channel.poll(START_SECONDS):
            return channel, channel.recv(), folder
    except (EOFError, OSError):
        channel.close()
        raise NoRank("a rank process ended before it could take a job", read_ends(first_words)) from None
    process.terminate()
    channel.close()
    raise NoRank(f"no rank process has answered in {START_SECONDS:g} s", read_ends(first_words))


@dataclass(frozen=True, eq=False)
class FreshChannel:
    """Pytest's end: jobs go into the process' stdin, answers come from a connection that can be waited for."""

    jobs: IO[bytes]
    answers: Connection

    @classmethod
    def of_process(cls, process: subprocess.Popen[bytes]) -> tuple[FreshChannel, Connection]:
        """The channel, and the connection into which somebody has to pass the answers on."""
        # On Windows its ends are of another class, with the same methods.
        ends: Any = connection.Pipe(duplex=False)
        return cls(cast("IO[bytes]", process.stdin), ends[0]), ends[1]

    def send(self, message: Any) -> None:
        """Raises OSError where the process has ended."""
        write_frame(self.jobs, pickle.dumps(message))

    def ask_for_stacks(self) -> None:
        """Raises OSError where the process has ended."""
        write_frame(self.jobs, STACKS)

    def recv(self) -> Any:
        """Raises EOFError where the process has ended."""
        return self.answers.recv()

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether there is an answer, or none can come any more, within so many seconds."""
        return self.answers.poll(timeout)

    def close(self) -> None:
        """The process ends when it sees this."""
        # It may have ended before it took all of a job.
        with contextlib.suppress(OSError):
            self.jobs.close()
        self.answers.close()


def _pass_answers(process: subprocess.Popen[bytes], answers: Connection, folder: Path) -> None:
    """Until the process has ended; how, is then in a file of its number."""
    stdout = cast("IO[bytes]", process.stdout)
    # Where nobody listens any more, the process is about to be ended.
    with contextlib.suppress(OSError):
        while (frame := read_frame(stdout)) is not None:
            answers.send_bytes(frame)
    stdout.close()
    code = process.wait()
    # The run may have ended, and its folder be gone.
    with contextlib.suppress(OSError):
        (folder / f"{process.pid}.status").write_text(str(code), encoding="ascii")
    # Last: whoever sees it closed reads the file.
    answers.close()


def _cap_log(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Keep what the process writes within bounds."""
    while process.poll() is None:
        drop_middle(folder / f"{process.pid}.log")
        time.sleep(_LOOK_SECONDS)


def main(folder: Path) -> None:
    """Do jobs until the other side closes: the whole life of a fresh process."""
    from pytest_torchcompile.ranks.serving import serve_jobs

    # What a cell reads and writes there is not ours, so these move to numbers that nothing it starts inherits.
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    jobs = SimpleQueue[bytes]()
    serve_jobs(_OwnEnd(jobs, outgoing), folder, functools.partial(listen_to_frames, incoming, jobs))


@dataclass(frozen=True)
class _OwnEnd:
    """The rank's end."""

    jobs: SimpleQueue[bytes]
    outgoing: IO[bytes]

    def send(self, message: Any) -> None:
        write_frame(self.outgoing, pickle.dumps(message))

    def recv(self) -> Any:
        # The listener ends the process where nothing can come any more, so that this may wait for ever.
        return pickle.loads(self.jobs.get())
