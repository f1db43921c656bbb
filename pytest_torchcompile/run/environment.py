"""What the machine and the process that ran a cell are: the part of a report that must match between shards."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.run.subject import cxx_compiler

__all__ = ["environment", "own_environment"]


@functools.lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """Versions and devices, as plain data. No environment variables: they may hold secrets."""
    return {**_versions(), "devices": _devices()}


def own_environment() -> dict[str, Any]:
    """The same of a process of the user's. A GPU that nothing in it has touched is not touched to ask for its name."""
    touched: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {**_versions(), "devices": _devices() if touched else ["cpu"]}


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, Any]:
    return {
        "torch": str(torch.__version__),
        "torch_git": getattr(torch.version, "git_version", None),
        "triton": _triton(),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "compiler": _compiler(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _triton() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability}"


def _compiler() -> str | None:
    found = cxx_compiler()
    if found is None:
        return None
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return (done.stdout or done.stderr).partition("\n")[0].strip() or found


def _driver() -> str | None:
    """Version of NVIDIA's kernel module, as it tells itself; None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s", text)
    return found[1] if found else None


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["cpu"]
    return ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))]
