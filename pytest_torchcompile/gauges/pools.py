"""Processes that torch and Python keep for themselves from one compile to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["kept_processes"]

_COMMANDS: Final = (
    "torch/_inductor/compile_worker/", "torch/_inductor/__autotune_main__",
    "multiprocessing.forkserver", "multiprocessing.resource_tracker",
)


def kept_processes(pids: Iterable[int]) -> set[int]:
    """Which of these processes are Inductor's pools, for compiling and for autotuning, or Python's own servants.

    Their commands: torch 2.8 to 2.15, Python 3.10 to 3.14.
    """
    own = {pid for pid in pids if any(command in _command(pid) for command in _COMMANDS)}
    return own | _forked_pool()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _forked_pool() -> set[int]:
    """Inductor's pool where it is told to fork its workers, which have this process' own command.

    ``torch._inductor.async_compile.AsyncCompile.process_pool``, cached, and its ``_processes``: torch 2.8 to 2.15.
    """
    from torch._inductor.async_compile import AsyncCompile

    cached = getattr(AsyncCompile.process_pool, "cache_info", None)
    if cached is None or not cached().currsize:
        return set()
    return set(getattr(AsyncCompile.process_pool(), "_processes", None) or ())
