"""Memory of one call: what it holds afterwards, and its peak. CUDA's allocator on a GPU, resident memory on a CPU.

And what each further call leaves behind, exactly: by CUDA's allocator, or by what the CPU's tells torch's profiler.

And of the GPU between two cells: is there memory left, and does it work? After an illegal access or a failed device
assertion it does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.gauges.settled_collectives import settled_collectives
from pytest_torchcompile.system import peak_resident_bytes

__all__ = ["Memory", "measure_memory", "memory_growth", "out_of_memory", "release_memory", "sticky_error"]

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_REPEATS: Final = 3
"""How often growth is measured."""


@dataclass(frozen=True)
class Memory:
    """Bytes around one call."""

    before: int
    after: int
    peak: int
    """Largest while it ran; at least ``before`` and ``after``."""
    source: str
    """``cuda`` (allocated by torch on one GPU), ``rss`` (resident memory of the process) or ``maxrss`` (the same, where
    the system cannot reset the peak: too high if the process was larger before). ``unknown``: the system tells
    nothing, and all is 0. Linux counts resident pages core by core and adds them up late: 64 cores have been seen
    17 MB off."""

    @property
    def delta(self) -> int:
        """Bytes that the call left behind."""
        return self.after - self.before

    @property
    def extra(self) -> int:
        """Bytes that the call needed at its peak, beyond what was there before."""
        return self.peak - self.before

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_memory(call: Callable[[], object], device: str = "cpu") -> Memory:
    """Run ``call`` once. What it returns is dropped before the memory after it is read."""
    if device.startswith("cuda"):
        return _measure_cuda(call, device)
    return _measure_resident(call)


def memory_growth(call: Callable[[], object], device: str = "cpu", *, calls: int = 8) -> float:
    """Bytes of tensors that each further call leaves behind, once some have been made.

    ``calls`` are made to warm up (compile, fill caches and the allocator's pools). As many are measured, three times
    over, and the least counts: the CPU's profiler does not see that a call gives back what was there before the first
    of them, and what is kept but once is no growth.
    """
    for _ in range(calls):
        call()

    def call_repeatedly() -> None:
        for _ in range(calls):
            call()
        gc.collect()

    measure = _growth_on_cuda if device.startswith("cuda") else _growth_on_cpu
    return min(measure(call_repeatedly, device) for _ in range(_REPEATS)) / calls


def _growth_on_cuda(call: Callable[[], object], device: str) -> int:
    gc.collect()
    return measure_memory(call, device).delta


def _growth_on_cpu(call: Callable[[], object], device: str) -> int:
    """Bytes that torch's CPU allocator has given out and not got back.

    Private: ``profile.profiler.kineto_results`` and its events ``[memory]`` (torch 2.8 to 2.15).
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, settled_collectives():
        call()
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def _measure_cuda(call: Callable[[], object], device: str) -> Memory:
    import torch

    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    after, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return Memory(before, after, peak, "cuda")


def _measure_resident(call: Callable[[], object]) -> Memory:
    resettable = _reset_peak()
    try:
        before = _status_bytes("VmRSS")
    except OSError:
        return _measure_peak(call)
    call()
    after = _status_bytes("VmRSS")
    if resettable:
        peak, source = _status_bytes("VmHWM"), "rss"
    else:
        peak, source = peak_resident_bytes(), "maxrss"
    # Linux adds pages up late, so the peak that it names may be below what it names before and after.
    return Memory(before, after, max(peak, before, after), source)


def _measure_peak(call: Callable[[], object]) -> Memory:
    """Where only the process' peak is told, or not even that."""
    before = peak_resident_bytes()
    call()
    after = peak_resident_bytes()
    return Memory(before, after, after, "maxrss" if after else "unknown")


def _reset_peak() -> bool:
    """Set the peak to what is resident now (``clear_refs``, proc(5)); containers may forbid it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    """One line of /proc/self/status, in bytes."""
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


_MUCH: Final = 1 << 30
"""Bytes that something of the cell still holds, likely in a cycle."""


def sticky_error(*, wait: bool = True) -> str:
    """Why nothing more can run on this process' GPUs, in CUDA's words; empty if all is well, or none is in use.

    Such errors are sticky: CUDA repeats them at every later call of the process, whatever it is. So the process waits
    for everything that it has started, and then allocates and computes something of its own. Without ``wait`` it only
    asks: a collective that another rank never joins would never end.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        if not wait:
            torch.cuda.current_stream().query()
            return ""
        torch.cuda.synchronize()
        if int(torch.ones(2, device="cuda").sum().item()) != 2:
            return "the GPU adds 1 and 1 wrongly"
    except Exception as error:
        # What the cell has left is collected with it; the memory itself works.
        if out_of_memory(error):
            return ""
        # The lines after the first are the same for every error: that it may be of an earlier call, and how to find it.
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the GPU has no memory left, which is no sticky error."""
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def release_memory() -> None:
    """Give back cached memory of the GPUs in use, so that the next cell, or another process, can have it."""
    import gc

    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Collecting takes half a second, so it is done only where it is likely to help.
        if torch.cuda.memory_allocated() > _MUCH:
            gc.collect()
        torch.cuda.empty_cache()
