"""MachineFacts: what is the same for every cell of a run: Python, packages, this package's code, machine and compilers.

Each part is told fact by fact, by name and hash, so that where it differs it can be said in what.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pytest_torchcompile.reuse.digests import digest_of
from pytest_torchcompile.run.imported import hash_of
from pytest_torchcompile.system import usable_cores

__all__ = ["NOT_IN_RANKS", "facts_of_gpus", "machine_digests", "machine_facts", "tools_of_path"]

_PACKAGE: Final = Path(__file__).parents[1]
NOT_IN_RANKS: Final = frozenset(
    {
        "zoo",
        "gates",
        "faults",
        "report",
        "gate",
        "page",
        "playbook",
        "adoption",
        "explain",
        "upgrade",
        "plugin",
        "cli.py",
        "__main__.py",
    }
)
"""Rooms of this package that nothing imports which runs or judges a cell. The zoo is told as models are."""
_LISTS: Final = (".dist-info", ".egg-info")
_LINKS: Final = (".pth", ".egg-link", ".pyi_hash")
_TOOLS: Final = (
    *("g++", "gcc", "c++", "cc", "clang++", "clang", "icpx", "as", "ld", "ld.gold", "ld.lld"),
    *("nvcc", "ptxas", "cuobjdump", "nvdisasm", "hipcc"),
)
"""Programs that torch, Triton or a compiler of theirs looks for in ``PATH``."""
_LARGEST_SCRIPT: Final = 1 << 20
"""Bytes of a program that may be a script around another one."""


@functools.lru_cache(maxsize=1)
def machine_facts() -> dict[str, dict[str, str]]:
    """A word for each part, and its facts by name. Read once in a process."""
    return {
        "Python": {name: digest_of(value) for name, value in _facts_of_python().items()},
        "the code of pytest-torchcompile": dict(_own_code()),
        "the installed packages": dict(_packages()),
        "the machine": {name: digest_of(value) for name, value in _facts_of_machine().items()},
        "the C++ compiler": {name: digest_of(value) for name, value in _compiler().items()},
    }


def machine_digests() -> dict[str, str]:
    """A word for each part, and the hash of its facts."""
    return {part: digest_of(facts) for part, facts in machine_facts().items()}


def _facts_of_python() -> dict[str, object]:
    # Flags of this interpreter, such as -B, are not handed on to rank processes; variables are, and count as such.
    return {"version": sys.version, "implementation": sys.implementation.name, "operating system": _system()}


def _system() -> list[str]:
    """The operating system, as far as code that is compiled or computes can tell.

    On Linux that is the C library, with its mathematical functions; a kernel's release is another one on each machine.
    """
    if platform.system() == "Linux":
        return ["Linux", *platform.libc_ver()]
    return [platform.platform()]


def _own_code() -> Iterator[tuple[str, str]]:
    """This package's files that are loaded where a cell is run or judged."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        name = file.relative_to(_PACKAGE).as_posix()
        if name.partition("/")[0] not in NOT_IN_RANKS:
            yield name, hash_of(file)


def _packages() -> Iterator[tuple[str, str]]:
    """Every installed distribution with its list of files, and every file that adds to the path."""
    met: Counter[str] = Counter()
    for folder in dict.fromkeys(sys.path):
        try:
            # An empty entry of the path is the current folder, as Python has it.
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            path = Path(folder, entry)
            if entry.endswith(_LISTS):
                digest = hash_of(path / "RECORD") or hash_of(path / "PKG-INFO") or hash_of(path)
            elif entry.endswith(_LINKS) or entry in ("sitecustomize.py", "usercustomize.py"):
                digest = hash_of(path)
            else:
                continue
            # Of two folders that have one of the same name, the first is asked first.
            met[entry] += 1
            yield entry if met[entry] == 1 else f"{entry} ({met[entry]})", digest


def _facts_of_machine() -> dict[str, object]:
    return {
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "processor": _processor(),
        "NVIDIA's driver": _read("/proc/driver/nvidia/version"),
        "GPUs": facts_of_gpus(),
    }


def _processor() -> str:
    """Model and instruction set of the first processor; elsewhere than on Linux what Python knows."""
    kept = []
    for line in _read("/proc/cpuinfo").partition("\n\n")[0].splitlines():
        name = line.partition("\t")[0].strip()
        # Others, such as the clock rate, are never the same.
        if name in ("model name", "flags", "Features", "CPU part", "vendor_id", "cpu family", "model", "stepping"):
            kept.append(line)
    return "\n".join(kept) or platform.processor()


def facts_of_gpus() -> list[str]:
    """The models of NVIDIA's GPUs, as the kernel module tells them; empty where it does not."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(str(file)).splitlines():
            if line.startswith(("Model:", "Video BIOS:")):
                found.append(line)
    return found


def _compiler() -> dict[str, str]:
    program = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if program is None:
        return {}
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    # A wrapper script without `--version` is told apart by its file, below.
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return {"place": program, "version": told, "file": _mark_of_file(program)}


def tools_of_path(variables: Mapping[str, str]) -> dict[str, str]:
    """The programs by which ``PATH`` may change what is compiled, each with its file and a mark of it.

    A project that starts a program, or looks for one, is run each time.
    """
    return dict(_tools_of(variables.get("PATH", "")))


# Each look-up hashes every tool that it finds; a run seldom has more than one PATH.
@functools.lru_cache(maxsize=8)
def _tools_of(path: str) -> tuple[tuple[str, str], ...]:
    found = []
    for name in _TOOLS:
        program = shutil.which(name, path=path)
        if program is not None:
            found.append((name, _mark_of_file(program)))
    return tuple(found)


def _mark_of_file(program: str) -> str:
    """The file that a program is, through links, and the hash of its bytes; of a large one the size.

    A script around a compiler may hand on other options, and tell the same version.
    """
    file = os.path.realpath(program)
    size = os.path.getsize(file)
    return f"{file} {size if size > _LARGEST_SCRIPT else hash_of(Path(file))}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
