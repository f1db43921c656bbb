"""The zygote: one process that imports torch once and forks a rank process for whoever connects.

It listens on ``FOLDER/socket`` until the FIFO ``FOLDER/../lifeline`` closes (see
:mod:`pytest_torchcompile.ranks.zygotes`), so it can't outlive the pytest that owns the run, not even one that was
killed. Each connection gets a forked child that serves jobs (see :mod:`pytest_torchcompile.ranks.serving`); when a
child ends, its exit code is written to ``FOLDER/<pid>.status``, because only the parent can know by which signal it
died. With a child end the processes that it has left behind. What the children write to their logs is kept within
bounds.

Forking a process that has run multi-threaded code is unsafe (libgomp's pool and Inductor's compile threads
do not survive it), so everything before the fork runs with one thread and one compile thread, and on a machine
with a GPU nothing but imports happens here: a CUDA driver that was initialised can't be used after a fork. A build
for GPUs runs no backward pass here either (:func:`~pytest_torchcompile.gauges.compiler.pay_first_compile`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytest_torchcompile.ranks.capped_log import drop_middle
from pytest_torchcompile.ranks.gpus import gpu_device_files
from pytest_torchcompile.ranks.serving import WARM, set_environment
from pytest_torchcompile.run.offspring import adopt_orphans, children_of, end_offspring, kill_group

__all__ = ["main", "preload_torch"]

# Loaded only where `can_fork` says so; a type checker for Windows reads no further.
if sys.platform == "win32":
    raise ImportError("this system has no fork and no locks that end with a process")
from pytest_torchcompile.ranks.zygotes import WARM_SECONDS_FILE, is_alive

LOOK_SECONDS: Final = 0.25
"""How often the logs are looked at."""
HURRY_SECONDS: Final = 0.02
"""The same while one of them grows fast."""
FAST_BYTES: Final = 4 << 20
"""What a log may grow by between two looks."""


class _TookTooLong(BaseException):
    """The first compile has not ended in time. No Exception, for torch would call it a failure of the backend."""


def preload_torch(warm_seconds: float) -> None:
    """Import what every rank needs, and run one tiny compile where a fork afterwards is safe.

    One that has not ended after so many seconds is given up, with the compiler that it waits for: the first cell meets
    the same one, and has its own time for it.
    """
    # Imports make no garbage: to look for it takes a fifth of their time.
    gc.disable()
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    gc.enable()
    torch.set_num_threads(1)
    if not gpu_device_files() and os.environ.get(WARM, "1") != "0":
        from pytest_torchcompile.gauges.compiler import pay_first_compile

        with contextlib.suppress(_TookTooLong), _interrupted_after(warm_seconds):
            pay_first_compile()
    gc.collect()
    # So the pages of all these modules stay shared with the children.
    gc.freeze()


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise :class:`_TookTooLong` in this thread when the time is over, and end what it has started."""

    def give_up(*_: object) -> None:
        end_offspring()
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # The timer before the handler: an alarm in between would meet the default one, which ends the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spoilt_for_cuda() -> bool:
    """Whether this is the fork of a process that had talked to the CUDA driver, so that CUDA can't be used in it.

    ``torch.cuda._is_in_bad_fork``: torch 2.8 to 2.15.
    """
    import torch

    return bool(gpu_device_files()) and torch.cuda._is_in_bad_fork()


_FRESH = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
from pytest_torchcompile.ranks.serving import serve
serve(int(sys.argv[2]), Path(sys.argv[3]))
"""
"""A rank process in a new interpreter, for when a fork would not do."""


def main(folder: Path, alive: int) -> None:
    """Serve until the owner of the run ends. ``alive`` is a file that is locked as long as this process has it open."""
    os.set_inheritable(alive, False)
    # Ctrl-C is pytest's to handle; it then closes the lifeline.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    set_environment()
    lifeline = os.open(folder.parent / "lifeline", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(folder / "socket"))
    # xdist's workers may all ask in the same moment; who finds the queue full is refused.
    server.listen(64)
    adopt_orphans()
    try:
        preload_torch(float((folder.parent / WARM_SECONDS_FILE).read_text(encoding="ascii")))
    except Exception as error:
        traceback.print_exc()
        (folder / "failed").write_text(_cannot_import(error), encoding="utf-8")
        sys.exit(1)
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake_write)
    # A handler of any kind: what is ignored does not write to the wake-up file.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, int] = {}
    # What the imports have started is not to be ended with a rank.
    own = children_of(os.getpid())
    # A lifeline whose other end was closed before it was opened here does not become readable.
    while is_alive(folder.parent):
        ready, _, _ = select.select([server.fileno(), lifeline, wake], [], [], _cap_logs(ranks, folder))
        if wake in ready:
            # Emptied, whatever is in it: that something ended is the news, not how much of it.
            os.read(wake, 4096)
        _reap_ranks(ranks, own, folder)
        if lifeline in ready:
            break
        if server.fileno() in ready:
            _fork_rank(server, folder, (wake, wake_write, lifeline, alive), ranks)
    for pid in ranks:
        kill_group(pid)
    end_offspring()


def _cannot_import(error: Exception) -> str:
    """One sentence."""
    first = str(error).strip().partition("\n")[0]
    return f"torch cannot be imported by {sys.executable}: {type(error).__name__}: {first}"


def _cap_logs(ranks: dict[int, int], folder: Path) -> float | None:
    """Drop the middle of each long log; the seconds after which to look again, None where nobody writes."""
    fast = False
    for pid, before in ranks.items():
        ranks[pid] = drop_middle(folder / f"{pid}.log")
        fast = fast or ranks[pid] - before > FAST_BYTES
    if not ranks:
        return None
    return HURRY_SECONDS if fast else LOOK_SECONDS


def _fork_rank(server: socket.socket, folder: Path, private: tuple[int, ...], ranks: dict[int, int]) -> None:
    """Give the next connection a rank process. ``ranks``: the length of each one's log."""
    connection, _ = server.accept()
    try:
        pid = os.fork()
    except OSError:
        # Too many processes, or no memory: that is one cell's error, told by the closed connection.
        traceback.print_exc()
        connection.close()
        return
    if pid:
        connection.close()
        ranks[pid] = 0
        return
    # EX_SOFTWARE: it stays so only if serve() itself is broken.
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # What is held open here would live on with the rank: the zygote's lock, and the reading end of the lifeline.
        for fd in private:
            os.close(fd)
        server.close()
        faulthandler.disable()
        fd = connection.detach()
        if spoilt_for_cuda():
            os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, "-c", _FRESH, json.dumps(sys.path), str(fd), str(folder)])
        from pytest_torchcompile.ranks.serving import serve

        serve(fd, folder)
        status = 0
    except BaseException:
        # Into the rank's log, whose end becomes the cell's evidence.
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Not sys.exit(): what the zygote has registered for its own end is not the child's to run.
        os._exit(status)


def _reap_ranks(ranks: dict[int, int], own: set[int], folder: Path) -> None:
    """Take note of the rank processes that have ended, once what they left behind has ended too."""
    statuses: dict[int, int] = {}
    for pid in list(ranks):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            del ranks[pid]
            drop_middle(folder / f"{pid}.log")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            statuses[pid] = status
    if statuses:
        end_offspring(keep={*ranks, *own})
    # Last: whoever sees the file takes all for ended.
    for pid, status in statuses.items():
        unfinished = folder / f"{pid}.status.new"
        # On a full disk it stays unknown how it ended.
        with contextlib.suppress(OSError):
            unfinished.write_text(str(os.waitstatus_to_exitcode(status)), encoding="ascii")
            unfinished.rename(folder / f"{pid}.status")
