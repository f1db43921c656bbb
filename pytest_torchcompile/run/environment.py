"""What the machine and the process that ran a cell are: the part of a report that must match between shards."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.system import usable_cores

__all__ = ["environment", "own_environment"]


@functools.lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Versions and devices, as plain data. No environment variables: they may hold secrets."""
    return {**_versions(), "devices": _device_names()}


def own_environment() -> dict[str, Any]:
    """The same of a process of the user's. A GPU that nothing in it has touched is not touched to ask for its name."""
    touched: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = _device_names() if touched else ["cpu"]
    return {**_versions(), "devices": devices}


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, Any]:
    return {
        "torch": str(torch.__version__),
        "torch_git": getattr(torch.version, "git_version", None),
        "triton": _triton_version(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "compiler": _compiler_version(),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _triton_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("triton")
    # CPU builds of torch come without it.
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability}"


def _compiler_version() -> str | None:
    program = cxx_compiler()
    if program is None:
        return None
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False)
    # Its name is better than nothing, and a report must not fail for it.
    except (OSError, subprocess.TimeoutExpired):
        return program
    return (done.stdout or done.stderr).partition("\n")[0].strip() or program


def _driver_version() -> str | None:
    """Version of NVIDIA's kernel module, as it tells itself; None where there is none."""
    try:
        # Read rather than asked of CUDA: to ask would make a context, and after that no process may be forked.
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s", text)
    return match[1] if match else None


def _device_names() -> list[str]:
    if not torch.cuda.is_available():
        return ["cpu"]
    return ["cpu", *map(torch.cuda.get_device_name, range(torch.cuda.device_count()))]
