"""The zygote: one process that imports torch once and forks a rank process for whoever connects.

``python -m pytest_torchcompile.zygote FOLDER`` listens on ``FOLDER/socket`` until its standard input closes,
so it can't outlive the pytest that started it, not even one that was killed. Each connection gets a forked
child that serves jobs (see :mod:`pytest_torchcompile.ranks`); when a child ends, its wait status is written
to ``FOLDER/<pid>.status``, because only the parent can know by which signal it died.

Forking a process that has run multi-threaded code is unsafe (libgomp's pool and Inductor's compile threads
do not survive it), so everything before the fork runs with one thread and one compile thread, and on a machine
with a GPU nothing but imports happens here: a CUDA driver that was initialised can't be used after a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

__all__ = ["WARM", "gpu_device_files", "main", "preload", "set_environment"]

WARM = "PYTEST_TORCHCOMPILE_WARM"
"""Set to 0 in the environment to import only, without the warm-up compile."""


def gpu_device_files() -> list[str]:
    """Device files of GPUs, found without asking a driver (asking would initialise it)."""
    dev = Path("/dev")
    return sorted(str(p) for pattern in ("nvidia[0-9]*", "kfd") for p in dev.glob(pattern))


def set_environment() -> None:
    """What must be in the environment before torch is loaded; what the user has set stays.

    A passive wait saves 15 to 35 % of the CPU time of parallel workers and changes no cache key. Kineto, the
    profiler behind coverage, writes a line to stderr for each start and stop unless its log level is above all.
    Asking NVML instead of CUDA whether there is a GPU keeps the driver uninitialised, so that forks can use it.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def preload() -> None:
    """Import what every rank needs, and run one tiny compile where a fork afterwards is safe."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    torch.set_num_threads(1)
    if not gpu_device_files() and os.environ.get(WARM, "1") != "0":
        from pytest_torchcompile.instruments.warmup import warm_up

        warm_up()
    gc.collect()
    gc.freeze()  # the pages of all these modules stay shared with the children


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
from pytest_torchcompile.ranks import serve
serve(int(sys.argv[2]), Path(sys.argv[3]))
"""
"""A rank process in a new interpreter, for when a fork would not do."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere the closed pipe has to do."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(folder: Path) -> None:
    """Serve until standard input closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle; it then closes our stdin
    set_environment()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(folder / "socket"))
    server.listen(64)
    preload()
    (folder / "ready").touch()
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    stdin = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([server, stdin, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        _reap(children, folder)
        if stdin in ready and not os.read(stdin, 1):
            break
        if server in ready:
            children.add(_fork(server, folder, (wake, wake_write)))
    for pid in children:
        _kill_group(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _fork(server: socket.socket, folder: Path, private: tuple[int, int]) -> int:
    connection, _ = server.accept()
    pid = os.fork()
    if pid:
        connection.close()
        return pid
    status = 70  # EX_SOFTWARE: reached only if serve() itself is broken
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for fd in private:
            os.close(fd)
        server.close()
        fd = connection.detach()
        if spoilt_for_cuda():
            os.set_inheritable(fd, True)
            os.execv(sys.executable, [sys.executable, "-c", _FRESH, json.dumps(sys.path), str(fd), str(folder)])
        from pytest_torchcompile.ranks import serve

        serve(fd, folder)
        status = 0
    except BaseException:
        traceback.print_exc()  # into the rank's log, whose end becomes the cell's evidence
        sys.stderr.flush()
    finally:
        os._exit(status)


def _reap(children: set[int], folder: Path) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            unfinished = folder / f"{pid}.status.new"
            unfinished.write_text(str(status))
            unfinished.rename(folder / f"{pid}.status")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # one that was forked just now has no group of its own yet


if __name__ == "__main__":
    main(Path(sys.argv[1]))
