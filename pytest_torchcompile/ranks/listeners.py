"""Listeners: threads of a rank process that wait for its other side, whatever the cell is doing. No torch.

One answers for the tail of the flight recorder, asked for from outside while the rank is stuck in a collective. The
main thread waits in C++ code then, without the interpreter's lock, so another thread can read the recorder. It waits
for a byte in a named pipe, ``FILE.ask``, and answers in ``FILE``.

The other ends the process with the pytest that it works for, also in the middle of a cell. In a fresh process, which
may have neither signals nor pipes with names, it also passes the jobs on, and writes stacks when it is asked to.

Stacks that are shown leave out the threads that wait here: :mod:`~pytest_torchcompile.ranks.rank` knows this file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final

from pytest_torchcompile.ranks.message_frames import read_frame
from pytest_torchcompile.run.offspring import end_own_group
from pytest_torchcompile.system import can_make_pipes, make_pipe

__all__ = ["STACKS", "answer_questions", "ask_recorder", "end_with_other_side", "listen_to_frames",
           "listen_to_signals", "read_answer"]

PATIENCE: Final = 2.0
"""Seconds that an answer may take."""
_ASK, _END = b"?", b"."
STACKS: Final = b"?"
"""The frame that asks a fresh process for its stacks; no pickled job is as short."""


def ask_recorder(file: Path) -> bool:
    """Ask the process that answers in ``file``; False if none is listening."""
    try:
        pipe = os.open(_question_pipe(file), os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        # There is no pipe, or nobody at its other end.
        return False
    try:
        # It may end between the opening and this.
        os.write(pipe, _ASK)
    except OSError:
        return False
    finally:
        os.close(pipe)
    return True


def read_answer(file: Path) -> str:
    """The answer to :func:`ask_recorder`."""
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > deadline:
            return (f"flight recorder: not read within {PATIENCE:g} s, because the main thread does not let go of the "
                    "interpreter")
        # Short beside the patience, and long enough not to take the core that is waited for.
        time.sleep(0.02)
    return file.read_text(encoding="utf-8")


@contextmanager
def answer_questions(file: Path) -> Iterator[None]:
    """Inside of it this process answers one question in ``file``, of the collectives that it begins from now on.

    To be entered before the process makes its first process group. Where pipes have no names it answers nothing.
    """
    if not can_make_pipes():
        yield
        return
    from pytest_torchcompile.gauges import flight_recorder

    flight_recorder.keep_entries()
    question = _question_pipe(file)
    # What is there is of a process that had the same number.
    question.unlink(missing_ok=True)
    file.unlink(missing_ok=True)
    make_pipe(question)
    # For writing too: a read must not end because nobody has opened it yet.
    pipe = os.open(question, os.O_RDWR)
    thread = threading.Thread(target=_answer_once, args=(pipe, file, time.time_ns()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(pipe, _END)
        thread.join()
        os.close(pipe)
        # The folder is removed when the run ends, which may be before this.
        with contextlib.suppress(OSError):
            question.unlink()


def _answer_once(pipe: int, file: Path, since: int) -> None:
    from pytest_torchcompile.gauges import flight_recorder

    if os.read(pipe, 1) != _ASK:
        return
    try:
        text = flight_recorder.last_collectives(since)
    except Exception as why:
        text = f"flight recorder: it could not be read: {type(why).__name__}: {why}"
    # In one step: whoever waits for the file reads it as soon as it is there.
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def _question_pipe(file: Path) -> Path:
    return file.with_name(f"{file.name}.ask")


def end_with_other_side(connection: int) -> None:
    """Kill this process' group once nobody holds the other end of a connection any more.

    The zygote does so too, but it may have been killed, or live on when a worker of xdist has crashed.
    """
    threading.Thread(target=_wait_and_end, args=(connection,), daemon=True).start()


def listen_to_signals(connection: int, stacks: BinaryIO) -> None:
    """Write stacks at a signal, also where C code runs that never comes back to Python; end with the other side."""
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    end_with_other_side(connection)


def listen_to_frames(incoming: BinaryIO, jobs: SimpleQueue[bytes], stacks: BinaryIO) -> None:
    """Pass on the jobs that come in, write stacks when asked to, and end this process when nothing can come any more.

    Python code must run for that: where C code keeps the interpreter to itself, there are no stacks.
    """
    threading.Thread(target=_pass_on_and_end, args=(incoming, jobs, stacks), daemon=True).start()


def _pass_on_and_end(incoming: BinaryIO, jobs: SimpleQueue[bytes], stacks: BinaryIO) -> None:
    while (frame := read_frame(incoming)) is not None:
        if frame == STACKS:
            faulthandler.dump_traceback(stacks, all_threads=True)
        else:
            jobs.put(frame)
    end_own_group()


def _wait_and_end(connection: int) -> None:
    if sys.platform != "win32":
        waiting = select.poll()
        # For no event: a hang-up is told unasked.
        waiting.register(connection, 0)
        waiting.poll()
    end_own_group()
