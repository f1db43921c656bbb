"""Leases: which cells hold which GPUs of this host, whatever the number of workers and of pytest runs.

File locks, all or nothing under one mutex, so that nobody holds one GPU while waiting for another (no deadlock), and
in strict order of tickets, so that a cell that wants all GPUs is not overtaken for ever (no starving). The kernel drops
the locks of a process that is gone. A cell that shares a GPU holds its file's lock together with others and one slot of
it alone; one that wants the GPU to itself holds the file's lock alone.

The folder is in ``/tmp`` under a name that anybody can guess: see :mod:`~pytest_torchcompile.ranks.private_folder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.ranks.private_folder import PrivateFolder

__all__ = ["Leases", "host_leases", "visible_gpus"]

POLL_SECONDS: Final = 0.02
MUTEX_SECONDS: Final = 60.0
"""How long the mutex may be waited for, which nobody holds for more than a moment."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus(device_files: Sequence[str]) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them: its list, or all by number.

    ``device_files`` are those of the machine's GPUs: no driver is asked, which would initialise it.
    """
    given = os.environ.get(VISIBLE)
    if given is None:
        return tuple(str(number) for number in range(len(device_files)))
    names: list[str] = []
    for name in given.split(","):
        # CUDA stops there too.
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return tuple(names)


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
    def hold_gpus(self, count: int, *, alone: bool = False, timeout: float = 3600.0) -> Iterator[tuple[str, ...]]:
        """Hold ``count`` different GPUs while the block runs; ``alone``: shared with nobody. 0 holds nothing.

        Raises:
            ValueError: more than there are: whoever asks should have said so when planning.
            TorchcompileError: after ``timeout`` seconds of waiting, with who stands before; or the folder is not ours.
        """
        if count > len(self.gpus):
            raise ValueError(f"{count} GPUs wanted, {len(self.gpus)} here")
        if count == 0:
            yield ()
            return
        taken = self._wait_for_gpus(count, alone or self.sharing == 1, timeout)
        self._last = tuple(sorted(taken, key=self.gpus.index))
        try:
            yield self._last
        finally:
            _release_locks(taken)

    def _wait_for_gpus(self, count: int, alone: bool, timeout: float) -> dict[str, list[int]]:
        folder = PrivateFolder.open(self.folder)
        try:
            queue = PrivateFolder.open(Path("queue"), inside=folder)
            try:
                return self._wait_in_queue(folder, queue, count, alone, timeout)
            finally:
                queue.close()
        finally:
            folder.close()

    def _wait_in_queue(self, folder: PrivateFolder, queue: PrivateFolder, count: int, alone: bool,
                       timeout: float) -> dict[str, list[int]]:
        deadline = time.monotonic() + timeout
        name, ticket = _take_ticket(folder, queue)
        try:
            while True:
                with _hold_mutex(folder):
                    head = _first_ticket(queue)
                    if head == name:
                        taken = self._lock_gpus(folder, count, alone)
                        if taken is not None:
                            return taken
                if time.monotonic() > deadline:
                    who = "others hold them" if head == name else f"ticket {head} is first"
                    raise TorchcompileError(f"no {count} GPU(s) of {', '.join(self.gpus)} in {timeout:g} s; {who} "
                                            f"(locks in {self.folder})")
                time.sleep(POLL_SECONDS)
        finally:
            # The name first: while the ticket is locked, nobody takes its owner for dead.
            queue.remove_file(name)
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
        while not _try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TorchcompileError(f"{folder.path / 'mutex'} has been locked for {MUTEX_SECONDS:g} s; expected a "
                                        "moment; end the process that holds it (fuser names it)")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _take_ticket(folder: PrivateFolder, queue: PrivateFolder) -> tuple[str, int]:
    """A new ticket at the end of the queue, locked as long as this process lives."""
    with _hold_mutex(folder):
        name = f"{_next_number(folder, queue):012d}"
        ticket = queue.open_file(name)
        _try_lock(ticket, fcntl.LOCK_EX)
    return name, ticket


def _next_number(folder: PrivateFolder, queue: PrivateFolder) -> int:
    """Count on, behind all that wait; a counter that was cut or overwritten begins anew."""
    last = max(map(int, _ticket_names(queue)), default=0)
    counter = folder.open_file("counter")
    try:
        written = os.read(counter, 32).strip()
        if written.isdigit():
            last = max(last, int(written))
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
