"""Leases: which cells hold which GPUs of this host, whatever the number of workers and of pytest runs.

File locks, all or nothing under one mutex, so that nobody holds one GPU while waiting for another (no deadlock), and
in strict order of tickets, so that a cell that wants all GPUs is not overtaken for ever (no starving). The kernel drops
the locks of a process that is gone. A cell that shares a GPU holds its file's lock together with others and one slot of
it alone; one that wants the GPU to itself holds the file's lock alone.

The folder is in ``/tmp`` under a name that anybody can guess. Another user may have made it first, or a link in its
place, so that what is written there would change files elsewhere. Whatever is opened there is looked at after it was
opened, and no link is followed (:class:`PrivateFolder`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import TorchcompileError

# Loaded only where `can_lock_files` says so; a type checker for Windows reads no further.
if sys.platform == "win32":
    raise ImportError("this system has no fork and no locks that end with a process")
import fcntl

__all__ = ["Leases", "PrivateFolder", "host_leases"]

POLL_SECONDS: Final = 0.02
MUTEX_SECONDS: Final = 60.0
"""How long the mutex may be waited for, which nobody holds for more than a moment."""
# Of a name that a ticket tells.
_NAME_BYTES: Final = 1 << 12


def host_leases(gpus: Sequence[str], sharing: int) -> Leases:
    """The leases of this host and user: a folder that every pytest run of theirs shares."""
    return Leases(Path(tempfile.gettempdir()) / f"pytest-torchcompile-gpus-{os.getuid()}", tuple(gpus), sharing)


@dataclass
class Leases:
    """GPUs, handed out by file locks below ``folder`` (a local disk: NFS may not lock)."""

    folder: Path
    gpus: tuple[str, ...]
    sharing: int = 1
    """How many may hold one GPU at a time."""
    _last: tuple[str, ...] = field(default=(), repr=False)
    """What was held before: taken again where it is free, since a process there is warm."""

    @contextlib.contextmanager
    def hold_gpus(self, count: int, *, alone: bool = False, name: str = "",
                  timeout: float = 3600.0) -> Iterator[tuple[str, ...]]:
        """Hold ``count`` different GPUs while the block runs; ``alone``: shared with nobody. 0 holds nothing.

        ``name``: what ``waiting_names`` tells while this waits.

        Raises:
            ValueError: more than there are: whoever asks should have said so when planning.
            TorchcompileError: after ``timeout`` seconds of waiting, with who stands before; or the folder is not ours.
        """
        if count > len(self.gpus):
            raise ValueError(f"{count} GPUs wanted, {len(self.gpus)} here")
        if count == 0:
            yield ()
            return
        taken = self._wait_for_gpus(count, alone or self.sharing == 1, name, timeout)
        # In the order of the machine: the ranks are numbered by it, whoever was free first.
        self._last = tuple(sorted(taken, key=self.gpus.index))
        try:
            yield self._last
        finally:
            _release_locks(taken)

    def waiting_names(self) -> frozenset[str]:
        """The names of all who wait for a GPU of this host, in whatever run.

        Raises :class:`~pytest_torchcompile.errors.TorchcompileError` where the folder is not ours.
        """
        with self._open_folders() as (_, queue):
            return frozenset(filter(None, map(queue.read_file, _ticket_names(queue))))

    @contextlib.contextmanager
    def _open_folders(self) -> Iterator[tuple[PrivateFolder, PrivateFolder]]:
        """The folder of the locks, and in it that of the tickets."""
        folder = PrivateFolder.open(self.folder)
        try:
            queue = PrivateFolder.open(Path("queue"), inside=folder)
            try:
                yield folder, queue
            finally:
                queue.close()
        finally:
            folder.close()

    def _wait_for_gpus(self, count: int, alone: bool, name: str, timeout: float) -> dict[str, list[int]]:
        with self._open_folders() as (folder, queue):
            return self._wait_in_queue(folder, queue, count, alone, name, timeout)

    def _wait_in_queue(self, folder: PrivateFolder, queue: PrivateFolder, count: int, alone: bool, name: str,
                       timeout: float) -> dict[str, list[int]]:
        deadline = time.monotonic() + timeout
        number, ticket = _take_ticket(folder, queue, name)
        try:
            while True:
                with _hold_mutex(folder):
                    head = _first_ticket(queue)
                    if head == number:
                        taken = self._lock_gpus(folder, count, alone)
                        if taken is not None:
                            return taken
                if time.monotonic() > deadline:
                    who = "others hold them" if head == number else f"ticket {head} is first"
                    raise TorchcompileError(f"no {count} GPU(s) of {', '.join(self.gpus)} in {timeout:g} s; {who} "
                                            f"(locks in {self.folder})")
                time.sleep(POLL_SECONDS)
        finally:
            # The file first: while the ticket is locked, nobody takes its owner for dead.
            queue.remove_file(number)
            os.close(ticket)

    def _lock_gpus(self, folder: PrivateFolder, count: int, alone: bool) -> dict[str, list[int]] | None:
        """Locks of so many GPUs, the ones held last first; None, and nothing held, if there are not enough."""
        taken: dict[str, list[int]] = {}
        # A process there is warm, and CUDA has read which GPUs it may see.
        for gpu in sorted(self.gpus, key=lambda gpu: gpu not in self._last):
            locks = self._lock_one(folder, gpu, alone)
            if locks is not None:
                taken[gpu] = locks
            if len(taken) == count:
                return taken
        _release_locks(taken)
        return None

    def _lock_one(self, folder: PrivateFolder, gpu: str, alone: bool) -> list[int] | None:
        name = f"gpu-{gpu.replace('/', '_')}"
        gpu_lock = folder.open_file(name)
        if alone and _try_lock(gpu_lock, fcntl.LOCK_EX):
            return [gpu_lock]
        # Shared with the others that hold a slot: whoever wants the GPU alone waits for all of them.
        if not alone and _try_lock(gpu_lock, fcntl.LOCK_SH):
            for slot in range(self.sharing):
                slot_lock = folder.open_file(f"{name}.{slot}")
                if _try_lock(slot_lock, fcntl.LOCK_EX):
                    return [gpu_lock, slot_lock]
                os.close(slot_lock)
        os.close(gpu_lock)
        return None


@contextlib.contextmanager
def _hold_mutex(folder: PrivateFolder) -> Iterator[None]:
    """Be the only one at the queue while the block runs.

    Raises :class:`~pytest_torchcompile.errors.TorchcompileError` where a process that is stopped holds it.
    """
    deadline = time.monotonic() + MUTEX_SECONDS
    lock = folder.open_file("mutex")
    try:
        # Not a blocking lock: a process that is stopped would hold up all others for ever, without a word.
        while not _try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TorchcompileError(f"{folder.path / 'mutex'} has been locked for {MUTEX_SECONDS:g} s; expected a "
                                        "moment; end the process that holds it (fuser names it)")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _take_ticket(folder: PrivateFolder, queue: PrivateFolder, name: str = "") -> tuple[str, int]:
    """A new ticket at the end of the queue, locked as long as this process lives; and its number."""
    with _hold_mutex(folder):
        number = f"{_next_number(folder, queue):012d}"
        ticket = queue.open_file(number)
        _try_lock(ticket, fcntl.LOCK_EX)
    os.write(ticket, name.encode())
    return number, ticket


def _next_number(folder: PrivateFolder, queue: PrivateFolder) -> int:
    """Count on, behind all that wait; a counter that was cut or overwritten begins anew."""
    last = max(map(int, _ticket_names(queue)), default=0)
    counter = folder.open_file("counter")
    try:
        # A ticket is a number of a few digits; the rest of a damaged file is of no use.
        written = os.read(counter, 32).strip()
        if written.isdigit():
            last = max(last, int(written))
        # Emptied first: a shorter number would else keep the last digits of a longer one.
        os.ftruncate(counter, 0)
        os.pwrite(counter, str(last + 1).encode(), 0)
    finally:
        os.close(counter)
    return last + 1


def _first_ticket(queue: PrivateFolder) -> str:
    """The first ticket whose owner lives; the tickets of dead ones are thrown away."""
    for name in _ticket_names(queue):
        ticket = queue.open_file(name)
        # The kernel has dropped the lock of a process that is gone.
        dead = _try_lock(ticket, fcntl.LOCK_EX)
        os.close(ticket)
        if not dead:
            return name
        queue.remove_file(name)
    return ""


def _ticket_names(queue: PrivateFolder) -> list[str]:
    # In order, since file_names() is and numbers are written with leading zeros.
    return [name for name in queue.file_names() if name.isascii() and name.isdigit()]


def _try_lock(lock: int, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release_locks(taken: dict[str, list[int]]) -> None:
    for locks in taken.values():
        for lock in locks:
            os.close(lock)


_WAY_OUT: Final = "have it removed, or set TMPDIR to a folder of your own"


@dataclass(frozen=True)
class PrivateFolder:
    """An open folder of mode 0700, in which nobody but this user can have put anything; names are relative to it."""

    path: Path
    descriptor: int

    @classmethod
    def open(cls, path: Path, inside: PrivateFolder | None = None) -> PrivateFolder:
        """Open the folder, and make it if need be. With ``inside``, ``path`` is a name in that folder.

        Raises :class:`~pytest_torchcompile.errors.TorchcompileError` where it is a link or another user's.
        """
        above = None
        full_path = path
        if inside is not None:
            above = inside.descriptor
            full_path = inside.path / path
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=above)
        status = os.stat(path, dir_fd=above, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no folder"
            raise TorchcompileError(f"{full_path} is {what}; expected a folder of this user; {_WAY_OUT}")
        # It may have become a link meanwhile, so that the open has to refuse one too.
        how = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = cls(full_path, os.open(path, how, dir_fd=above))
        try:
            folder._refuse_strangers()
        # Also for Ctrl-C: the descriptor would stay open.
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Close the folder; files of it that are open stay so."""
        os.close(self.descriptor)

    def open_file(self, name: str) -> int:
        """A descriptor of a file, for reading and writing; made if need be.

        Raises :class:`~pytest_torchcompile.errors.TorchcompileError` for what is no file of this user.
        """
        # Without waiting: a FIFO of this name has nobody at its other end.
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(name, how, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            # Of a link: ELOOP, or EMLINK on BSD.
            raise TorchcompileError(f"{self.path / name} can't be opened: {error.strerror}; expected a file of this "
                                    f"user; {_WAY_OUT}") from None
        status = os.fstat(file)
        # A second name of the file would be a stranger's: nobody here makes one.
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_nlink > 1:
            os.close(file)
            raise TorchcompileError(f"{self.path / name} is no file of this user alone; {_WAY_OUT}")
        return file

    def read_file(self, name: str) -> str:
        """The first characters of a file; empty where it is gone, or can't be read. Nothing is made or written."""
        how = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(name, how, dir_fd=self.descriptor)
        except OSError:
            return ""
        try:
            return os.read(file, _NAME_BYTES).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(file)

    def file_names(self) -> list[str]:
        """What is in the folder, in order."""
        return sorted(os.listdir(self.descriptor))

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def _refuse_strangers(self) -> None:
        status = os.fstat(self.descriptor)
        if status.st_uid != os.getuid():
            raise TorchcompileError(f"{self.path} belongs to user {status.st_uid}, and this is user {os.getuid()}; "
                                    f"{_WAY_OUT}")
        if status.st_mode & 0o077:
            # Made by an earlier version, under the user's umask.
            os.fchmod(self.descriptor, 0o700)
