"""GPU kernels launched by one call, and CUDA graphs replayed, from the profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_torchcompile.errors import Unavailable

__all__ = ["Launches", "measure"]


@dataclass(frozen=True)
class Launches:
    """What one call did on the GPU."""

    kernels: int
    """Kernels that ran, those inside CUDA graphs included."""
    graphs: int
    """CUDA graphs replayed (calls of ``cudaGraphLaunch``)."""
    host_launches: int
    """Kernels launched one by one from the host: what a CUDA graph saves."""
    by_name: dict[str, int] = field(default_factory=dict)
    """Kernels that ran, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure(call: Callable[[], object]) -> Launches:
    """Run ``call`` once, warm, and count.

    :raises Unavailable: this torch sees no CUDA GPU.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise Unavailable("launches per call are counted on a CUDA GPU; torch sees none here")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    events = list(found.events() or ())
    gpu = [e.name for e in events if e.device_type.name == "CUDA" and not _copies(e.name)]
    host = Counter(e.name for e in events if e.device_type.name == "CPU")
    single = sum(n for name, n in host.items() if name.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return Launches(len(gpu), host["cudaGraphLaunch"] + host["cuGraphLaunch"], single, dict(Counter(gpu)))


def _copies(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset", "Command Buffer"))
