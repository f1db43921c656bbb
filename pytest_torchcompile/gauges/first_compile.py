"""One tiny compile that pays torch's once-per-process costs, so that no cell has to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["cpu_build", "kept_processes", "pay_first_compile", "set_compile_threads"]


def cpu_build() -> bool:
    """Whether torch is built for CPUs alone.

    ``torch.version.cuda``, ``hip`` and ``xpu``: torch 2.8 to 2.15.
    """
    import torch

    return not any(getattr(torch.version, gpu, None) for gpu in ("cuda", "hip", "xpu"))


def pay_first_compile() -> None:
    """Probe the vector instruction set and compile one training step of a two-layer function, single-threaded.

    In a build for GPUs the forward pass alone is compiled and run. Its first backward pass starts autograd's threads,
    one for each kind of device, also where there is no GPU; a fork afterwards can run no backward pass any more.

    A failure is none of ours to report: the first cell meets the same compiler and reports it as its own.
    ``torch._inductor.config.compile_threads`` and ``torch._inductor.cpu_vec_isa.pick_vec_isa``: torch 2.8 to 2.15.
    """
    import torch
    from torch._inductor import config, cpu_vec_isa

    config.compile_threads = 1
    trains = cpu_build()
    try:
        cpu_vec_isa.pick_vec_isa()
        x = torch.ones(8, 8, requires_grad=trains)
        result = torch.compile(lambda t: (t * 2).sin().sum())(x)
        if trains:
            result.backward()
    except Exception:
        return
    finally:
        torch.compiler.reset()


def set_compile_threads(count: int) -> None:
    """Let Inductor use ``count`` threads from here on; drops the pool that a parent process may have made.

    A thread pool does not survive a fork, and ``AsyncCompile.pool`` is cached for the life of the process
    (``torch/_inductor/async_compile.py``, torch 2.8 to 2.15).
    """
    from torch._inductor import async_compile, config

    config.compile_threads = count
    clear = getattr(getattr(async_compile.AsyncCompile, "pool", None), "cache_clear", None)
    if clear is not None:
        clear()


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
