"""The system: what Linux, macOS and Windows do not have alike, each difference behind one function. No torch.

Names that only POSIX has are used here, in ``run/offspring`` and ``ranks/listeners`` behind a question, and freely in
modules that are loaded only where :func:`can_fork` is true: ``ranks/zygote``, ``ranks/zygotes`` and ``ranks/leases``.
``mypy --platform win32`` and a test that hides these names hold it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["allowed_memory_bytes", "can_fork", "can_lock_files", "can_make_pipes", "make_pipe", "memory_bytes",
           "peak_resident_bytes", "resident_bytes", "usable_cores"]

_STATM: Final = Path("/proc/self/statm")
_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")
"""What a container may use (cgroup v2); ``max`` where there is no limit."""
_UNKNOWN_MEMORY: Final = 8 << 30
"""What a machine is taken to have that does not say."""


def can_fork() -> bool:
    """Whether rank processes may be forks of a process that has imported torch.

    Windows has no fork. On macOS system libraries that torch loads may end a fork that uses them.
    """
    return sys.platform not in ("win32", "darwin") and hasattr(os, "fork")


def can_lock_files() -> bool:
    """Whether GPUs can be leased: by locks that end with the process that holds them, and that several may share."""
    return sys.platform != "win32"


def can_make_pipes() -> bool:
    """Whether a pipe can have a name in a folder, by which a process is asked something meanwhile."""
    return hasattr(os, "mkfifo")


def make_pipe(path: Path) -> None:
    """Make a pipe with a name, for this user alone; only where :func:`can_make_pipes` is true."""
    if sys.platform != "win32":
        os.mkfifo(path, 0o600)


def usable_cores() -> int:
    """The cores that this process may use, of which a container or taskset may leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or 8 GiB where the system does not say."""
    if hasattr(os, "sysconf"):
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return _UNKNOWN_MEMORY


def allowed_memory_bytes() -> int:
    """The machine's memory, or what a container may use of it."""
    memory = memory_bytes()
    # There may be no cgroup v2, or no limit in it.
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(_CGROUP.read_text(encoding="ascii")))
    return memory


def resident_bytes() -> int:
    """Resident bytes of this process; 0 where the system does not say."""
    if not hasattr(os, "sysconf"):
        return 0
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * int(os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return 0


def peak_resident_bytes() -> int:
    """The most that was resident of this process since it began; 0 where the system does not say."""
    peak = 0
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux and BSD count in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
