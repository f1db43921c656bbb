"""Zygotes of a run: the first one, and the one that takes its place if it is killed. No torch.

A run has a folder that its owner, the pytest that sees all verdicts, makes and removes::

    torchcompile-XXXX/
      alive        locked by the owner as long as it lives
      lifeline     a FIFO that the owner holds open; each zygote ends when it closes
      warm_seconds how long a zygote's first compile may take
      renewing     locked by whoever starts another zygote
      1/           the first zygote's: alive (locked by it), socket, its log, the files of its rank processes
      2/           the second one's

Workers of xdist know only the folder. Whoever finds the newest zygote dead starts the next one, which does not end
with who started it, but with the owner. Rank processes live on when their zygote is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import NoRank
from pytest_torchcompile.ranks.capped_log import read_ends
from pytest_torchcompile.ranks.fresh import START_SECONDS
from pytest_torchcompile.run.offspring import kill_group
from pytest_torchcompile.system import make_pipe

# Loaded only where `can_fork` says so; a type checker for Windows reads no further.
if sys.platform == "win32":
    raise ImportError("this system has no fork and no locks that end with a process")
import fcntl

__all__ = ["WARM_SECONDS_FILE", "Zygote", "connect_rank", "is_alive"]

WARM_SECONDS_FILE: Final = "warm_seconds"
"""The file in the run's folder that says how long a zygote's first compile may take."""
ZYGOTES: Final = 2
"""How many a run may have: one, and one more where it was killed."""
_PREFIX: Final = "torchcompile-"
_UNLOCKED_PREFIX: Final = "torchcompile_new-"
_FRESH_SECONDS: Final = 60.0
"""A folder without a lock that is younger than this may be of a run that begins."""
_END_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.05
_REFUSALS: Final = 3
"""How often a living zygote may close a connection without a word: it could not fork, or its child died at once."""
_COMMAND: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from pathlib import Path; from pytest_torchcompile.ranks.zygote import main;"
    "main(Path(sys.argv[2]), int(sys.argv[3]))"
)


class Zygote:
    """The owner's side: makes the folder with the first zygote, and ends all of them, and with them every rank."""

    def __init__(self, warm_seconds: float) -> None:
        """``warm_seconds``: how long the first compile may take. Raises OSError where the folder has no room."""
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) >= 60:
            # AF_UNIX paths are limited to about 100 bytes, so a long TMPDIR can't be used.
            parent = Path("/tmp")
        _remove_left_folders(parent)
        # It gets its name with the lock in it: another run that begins meanwhile takes one without for left behind.
        unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
        self._alive = _open_locked(unlocked / "alive")
        self.folder = unlocked.rename(parent / unlocked.name.replace(_UNLOCKED_PREFIX, _PREFIX))
        (self.folder / WARM_SECONDS_FILE).write_text(str(warm_seconds), encoding="ascii")
        make_pipe(self.folder / "lifeline")
        # For reading too, since to open a FIFO for writing waits for a reader.
        self._lifeline = os.open(self.folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
        self._process = _start_zygote(self.folder, 1)

    @property
    def was_replaced(self) -> bool:
        """Whether the first zygote was killed, and another one started."""
        return _newest_zygote(self.folder) > 1

    def close(self) -> None:
        """End every rank process and remove the folder."""
        # In this order: who opens the lifeline too late to see it close finds that nobody owns the run.
        os.close(self._alive)
        os.close(self._lifeline)
        for number in range(1, _newest_zygote(self.folder) + 1):
            _wait_for_end(self.folder / str(number))
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # Nobody owns the folder any more, so a run that begins may have removed it, with the number in it.
            kill_group(self._process.pid)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def connect_rank(root: Path) -> tuple[Connection, int, Path]:
    """A new rank process: the connection to it, its number, and the folder of its files.

    Raises :class:`NoRank` where the newest zygote is dead and no other one may be started, or where it says nothing.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        # Asked anew in each round: another worker may have started the next one meanwhile.
        number = _newest_zygote(root)
        if number == 0:
            raise NoRank(f"the folder of the run's processes is gone: {root}")
        folder = root / str(number)
        answer = _ask_for_rank(folder, deadline)
        if answer is not None:
            return *answer, folder
        _start_next_zygote(root, number)


def is_alive(folder: Path) -> bool:
    """Whether the process that locked ``folder/alive`` lives."""
    try:
        file = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who look at the same time do not take each other for the owner.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _newest_zygote(root: Path) -> int:
    """The number of the last zygote that was started; 0 where the run has ended."""
    newest = 0
    for number in range(1, ZYGOTES + 1):
        if (root / str(number)).is_dir():
            newest = number
    return newest


def _start_zygote(root: Path, number: int) -> subprocess.Popen[bytes]:
    folder = root / str(number)
    folder.mkdir(mode=0o700)
    # The lock is the zygote's too, and lasts until both have closed the file.
    alive = _open_locked(folder / "alive")
    try:
        with (folder / "zygote.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(folder), str(alive)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(alive,),
            )
    finally:
        os.close(alive)
    (folder / "pid").write_text(str(process.pid))
    return process


def _ask_for_rank(folder: Path, deadline: float) -> tuple[Connection, int] | None:
    """The connection to a new rank process, and its number; None where the zygote is dead."""
    refused = 0
    while time.monotonic() < deadline:
        # Before the connection is tried: one that ends in between has a socket that nobody serves.
        lives = is_alive(folder)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.connect(str(folder / "socket"))
        except OSError:
            channel.close()
            if not lives:
                return None
            # It has not opened its socket yet.
            time.sleep(_POLL_SECONDS)
            continue
        connection = Connection(channel.detach())
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection, connection.recv()
        # A zygote that ran out of memory for a fork closes without a word; the next try may do.
        except (EOFError, OSError):
            refused += 1
        connection.close()
        if not is_alive(folder):
            return None
        if refused == _REFUSALS:
            raise NoRank("a rank process could not be started", _zygote_log(folder))
        # The zygote may be about to end.
        time.sleep(_POLL_SECONDS)
    raise NoRank(f"no rank process has answered in {START_SECONDS:g} s", _zygote_log(folder))


def _start_next_zygote(root: Path, dead: int) -> None:
    """Start the zygote after this one, unless somebody has. Raises :class:`NoRank` where there are to be no more."""
    folder = root / str(dead)
    try:
        lock = _open_locked(root / "renewing")
    except OSError:
        raise NoRank(f"the folder of the run's processes is gone: {root}") from None
    try:
        if _newest_zygote(root) > dead or is_alive(folder):
            # Somebody has, while this one waited for the lock.
            return
        failed = folder / "failed"
        if failed.exists():
            raise NoRank(failed.read_text(encoding="utf-8"), _zygote_log(folder))
        if dead == ZYGOTES:
            raise NoRank(f"the process that starts rank processes was killed {ZYGOTES} times, and is not started again",
                         _zygote_log(folder))
        # It ends with the run, maybe after this process, so nobody waits for it, and Python need not warn of that.
        _start_zygote(root, dead + 1).returncode = 0
    finally:
        os.close(lock)


def _zygote_log(folder: Path) -> str:
    return read_ends(folder / "zygote.log")


def _open_locked(path: Path) -> int:
    """A file's descriptor, with its lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _wait_for_end(folder: Path) -> None:
    """Wait until a zygote has ended its rank processes and itself; kill it where it does not."""
    deadline = time.monotonic() + _END_SECONDS
    while is_alive(folder):
        if time.monotonic() > deadline:
            # Its group too: a compiler that it has started for the first compile may hang.
            with contextlib.suppress(OSError, ValueError):
                kill_group(int((folder / "pid").read_text()))
            return
        time.sleep(0.01)


def _remove_left_folders(parent: Path) -> None:
    """Remove the folders of this user's runs that were killed."""
    for folder in [*parent.glob(f"{_PREFIX}*"), *parent.glob(f"{_UNLOCKED_PREFIX}*")]:
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and _has_no_owner(folder, status):
                shutil.rmtree(folder, ignore_errors=True)


def _has_no_owner(folder: Path, status: os.stat_result) -> bool:
    """Whether nobody owns the folder any more."""
    if is_alive(folder):
        return False
    if folder.name.startswith(_PREFIX) and (folder / "alive").exists():
        return True
    # Of a run that begins, or of a version without that file, whose zygote listens in the folder itself.
    return time.time() - status.st_mtime > _FRESH_SECONDS and not _somebody_listens(folder / "socket")


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        try:
            channel.connect(str(path))
        except OSError:
            return False
    return True
