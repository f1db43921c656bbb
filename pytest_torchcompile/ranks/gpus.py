"""GPUs of this machine, as far as they can be known without asking a driver, which would initialise it, and who holds
them. No torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from pytest_torchcompile.system import can_lock_files

__all__ = ["Leases", "gpu_device_files", "open_leases", "visible_gpus"]

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def gpu_device_files() -> list[str]:
    """Device files of GPUs; none on a system that has no such files."""
    nvidia = Path("/dev").glob("nvidia[0-9]*")
    amd = Path("/dev").glob("kfd")
    return sorted(str(file) for file in (*nvidia, *amd))


def visible_gpus(device_files: Sequence[str]) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them: its list, or all by number.

    ``device_files`` are those of the machine's GPUs.
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


class Leases(Protocol):
    """Which cells hold which GPUs of this host."""

    gpus: tuple[str, ...]

    def hold_gpus(self, count: int, *, alone: bool = False, name: str = "") -> AbstractContextManager[tuple[str, ...]]:
        """Hold so many different GPUs while the block runs; ``alone``: shared with nobody; ``name``: of who waits."""

    def waiting_names(self) -> frozenset[str]:
        """The names of all who wait for a GPU of this host, in whatever run."""


def open_leases(sharing: int) -> Leases | None:
    """The leases of this host and user, with so many that may hold one GPU at a time; None where none can be had."""
    if sys.platform != "win32" and can_lock_files():
        from pytest_torchcompile.ranks.leases import host_leases

        return host_leases(visible_gpus(gpu_device_files()), sharing)
    return None
