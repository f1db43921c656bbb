"""The compiler of a process: what its first compile pays and keeps for later ones: probes, threads, pools of processes.

And an outage of it: while that lasts, whatever is to be compiled fails at once, before anything is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.errors import InstrumentError

__all__ = ["Outage", "PlannedFailure", "compiler_outage", "cpu_build", "kept_processes",
           "leave_untraced", "pay_first_compile", "set_compile_threads", "warm_toolchain"]

_COMMANDS: Final = (
    "torch/_inductor/compile_worker/", "torch/_inductor/__autotune_main__",
    "multiprocessing.forkserver", "multiprocessing.resource_tracker",
)


def cpu_build() -> bool:
    """Whether torch is built for CPUs alone.

    ``torch.version.cuda``, ``hip`` and ``xpu``: torch 2.8 to 2.15.
    """
    import torch

    return not any(getattr(torch.version, gpu, None) for gpu in ("cuda", "hip", "xpu"))


def pay_first_compile() -> None:
    """Probe the vector instruction set and compile one training step of a two-layer function, single-threaded.

    It pays torch's costs of a first compile, so that no cell has to.
    ``torch._inductor.config.compile_threads`` and ``torch._inductor.cpu_vec_isa.pick_vec_isa``: torch 2.8 to 2.15.
    """
    import torch
    from torch._inductor import config, cpu_vec_isa

    # A kernel that was built by a thread pool leaves a pool without threads to forked processes, which wait forever.
    config.compile_threads = 1
    # In a build for GPUs the forward pass alone is compiled and run. Its first backward pass starts autograd's threads,
    # one for each kind of device, also where there is no GPU; a fork afterwards can run no backward pass any more.
    trains = cpu_build()

    def function(x: Any) -> Any:
        return (x * 2).sin().sum()

    try:
        cpu_vec_isa.pick_vec_isa()
        result = torch.compile(function)(torch.ones(8, 8, requires_grad=trains))
        if trains:
            result.backward()
    except Exception:
        # None of ours to report: the first cell meets the same compiler and reports it as its own.
        return
    finally:
        torch.compiler.reset()


def warm_toolchain(settings: Mapping[str, Any], device: str) -> None:
    """Compile something small: what is paid once in a cache folder, such as a precompiled header, is no model's.

    ``settings`` are those of ``torch.compile``; raises what it raises.
    """
    import torch

    def small(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    with torch.no_grad():
        torch.compile(small, **settings)(torch.ones(5, device=device))
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


def leave_untraced(function: Callable[..., Any]) -> None:
    """Have Dynamo leave a function alone that Python calls at any time: it is neither compiled nor told of.

    ``torch._dynamo.eval_frame.skip_code``: torch 2.8 to 2.13. Without it Dynamo would look at the function and find
    nothing to compile.
    """
    from torch._dynamo import eval_frame

    skip = getattr(eval_frame, "skip_code", None)
    if skip is not None:
        skip(function.__code__)


def kept_processes(pids: Iterable[int]) -> set[int]:
    """Which of these processes are Inductor's pools, for compiling and for autotuning, or Python's own servants.

    Torch and Python keep them from one compile to the next. Their commands: torch 2.8 to 2.15, Python 3.10 to 3.14.
    """
    kept = _forked_pool()
    for pid in pids:
        command = _command_of(pid)
        if any(known in command for known in _COMMANDS):
            kept.add(pid)
    return kept


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _forked_pool() -> set[int]:
    """Inductor's pool where it is told to fork its workers, which have this process' own command.

    ``torch._inductor.async_compile.AsyncCompile.process_pool``, cached, and its ``_processes``: torch 2.8 to 2.15.
    """
    from torch._inductor.async_compile import AsyncCompile

    # Asked only where it was made: to call it makes one.
    cache_info = getattr(AsyncCompile.process_pool, "cache_info", None)
    if cache_info is None or not cache_info().currsize:
        return set()
    return set(getattr(AsyncCompile.process_pool(), "_processes", None) or ())


class PlannedFailure(RuntimeError):
    """What the compiler says while there is an outage."""


@dataclass
class Outage:
    """One outage."""

    met: int = 0
    """How often something was to be compiled."""


@contextlib.contextmanager
def compiler_outage() -> Iterator[Outage]:
    """Have every compile of this process fail; the cheapest way to see what a program does then.

    A callback that Dynamo calls before it compiles a frame, and that raises
    (``torch._dynamo.callback.callback_handler``, torch 2.8 to 2.15). Compiled code that is there already still runs.

    :raises InstrumentError: this torch has no such callbacks.
    """
    import torch
    from torch._dynamo import callback

    lasting = Outage()

    def fail(*_: object) -> None:
        lasting.met += 1
        raise PlannedFailure("a planned outage of the compiler")

    try:
        callback.callback_handler.register_start_callback(fail)
        remove = callback.callback_handler.remove_start_callback
    except AttributeError:
        raise InstrumentError(f"torch {torch.__version__} has no torch._dynamo.callback.callback_handler, by which an "
                              "outage of the compiler is planned; please report it with this version") from None
    try:
        yield lasting
    finally:
        # torch.compiler.reset() drops all callbacks, and may have been called meanwhile.
        with contextlib.suppress(ValueError):
            remove(fail)
