"""Zygotes for the tests' inner runs of pytest: forks of one process that has imported torch already.

A zygote imports torch and forks ranks. That import is half of what a small inner run costs, and the same in all. So a
worker of the tests starts one process that has done it (:class:`WarmProcess`), and each inner pytest, which loads this
file as a plugin, has its zygotes forked from there. From then on they are what they are anyway:
:func:`pytest_torchcompile.ranks.zygote.main` runs in them, with the inner run's environment, folder and path.

An inner run whose environment may change what torch does when it is imported starts its zygotes as users' runs do. So
does one whose test takes the variable :data:`ADDRESS` out of the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ADDRESS = "TESTS_WARM_PROCESS"
"""Names the socket of the warm process, for the inner run."""
WITHOUT_EFFECT = frozenset({
    ADDRESS, "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_TORCHCOMPILE_WARM", "PYTEST_VERSION",
    "PYTEST_CURRENT_TEST", "PYTEST_DEBUG_TEMPROOT", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "HOME", "USERPROFILE", "PWD", "OLDPWD", "COLUMNS", "LINES",
    "OMP_WAIT_POLICY", "PYTORCH_NVML_BASED_CUDA_CHECK", "KINETO_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "CI",
    "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TERM",
})
"""Variables that torch does not read when it is imported, or that the warm process sets as every zygote does."""


class WarmProcess:
    """The process that is forked. It ends with whoever made it."""

    def __init__(self) -> None:
        # A socket's path may have about 100 bytes, so it can't be in pytest's own folder.
        self._folder = tempfile.TemporaryDirectory(prefix="warm-", dir="/tmp")
        self.address = f"{self._folder.name}/socket"
        self._process = subprocess.Popen([sys.executable, __file__, self.address], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self._process.pid
        # It says so when it listens, or it has failed with a traceback.
        assert self._process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End it."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


class ForkedZygote:
    """What a run uses of the ``Popen`` of its zygote, of one that is no child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._ended: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit code is its real parent's to know."""
        if self._ended is not None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        self.returncode = 0
        return self.returncode


def _ask_for_zygote(address: str, root: Path, number: int) -> ForkedZygote:
    """As ``zygotes._start_zygote``, in the same order."""
    from pytest_torchcompile.ranks import zygotes

    folder = root / str(number)
    folder.mkdir(mode=0o700)
    alive = zygotes._open_locked(folder / "alive")
    try:
        with (folder / "zygote.log").open("wb") as log, socket.socket(socket.AF_UNIX) as channel:
            channel.connect(address)
            socket.send_fds(channel, [b"."], [alive, log.fileno()])
            wanted = {"path": sys.path, "environment": dict(os.environ), "cwd": os.getcwd(), "folder": str(folder)}
            channel.sendall(json.dumps(wanted).encode())
            channel.shutdown(socket.SHUT_WR)
            pid = int(channel.recv(32))
    finally:
        os.close(alive)
    (folder / "pid").write_text(str(pid))
    return ForkedZygote(pid)


def _serve(address: str) -> None:
    """Import what zygotes import, then fork one for each connection until the standard input closes."""
    from pytest_torchcompile.ranks.zygote import WARM, preload_torch, set_environment

    known = dict(os.environ)
    set_environment()
    # The warm-up compile is each zygote's own matter.
    os.environ[WARM] = "0"
    preload_torch(0.0)
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(16)
    # Nobody asks how a zygote has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    Path(f"{address}.environment").write_text(json.dumps(known))
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        channel, _ = server.accept()
        if os.fork() == 0:
            server.close()
            _become_zygote(channel)
        channel.close()


def _become_zygote(channel: socket.socket) -> None:
    """Take over everything that a new interpreter would have been started with, and never return."""
    _, (alive, log), _, _ = socket.recv_fds(channel, 1, 2)
    told = b""
    while piece := channel.recv(1 << 16):
        told += piece
    wanted = json.loads(told)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["cwd"])
    sys.path[:] = wanted["path"]
    importlib.invalidate_caches()
    channel.sendall(str(os.getpid()).encode())
    channel.close()
    from pytest_torchcompile.ranks.zygote import main

    status = 1
    try:
        main(Path(wanted["folder"]), alive)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _is_imported_alike(address: str) -> bool:
    """Whether torch would be imported here as the warm process has imported it."""
    searched = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # pytester adds the folder that the run is in. What lies elsewhere may be another torch.
    if not searched <= {os.getcwd(), str(Path(__file__).parent)}:
        return False
    theirs = json.loads(Path(f"{address}.environment").read_text())
    different = {name for name, value in os.environ.items() if theirs.get(name) != value}
    different |= theirs.keys() - os.environ.keys()
    return different <= WITHOUT_EFFECT


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In an inner run: have its zygotes forked from the warm process."""
    address = os.environ.get(ADDRESS)
    if address is None or not _is_imported_alike(address):
        return
    from pytest_torchcompile.ranks import zygotes

    usual = zygotes._start_zygote
    zygotes._start_zygote = lambda root, number: _ask_for_zygote(address, root, number)
    # For an inner run in the process of the outer one.
    config.add_cleanup(lambda: setattr(zygotes, "_start_zygote", usual))


if __name__ == "__main__":
    _serve(sys.argv[1])
