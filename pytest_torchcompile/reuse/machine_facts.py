"""MachineFacts: what a key says of machine, Python, packages and this package's own code, without importing torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.run.imported import hash_of

__all__ = ["digest_of", "environment_digest", "facts_of_gpus", "is_passing", "machine_digests"]

_PACKAGE: Final = Path(__file__).parents[1]
_LISTS: Final = (".dist-info", ".egg-info")
_LINKS: Final = (".pth", ".egg-link", ".pyi_hash")
PASSING: Final = re.compile(
    r"PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|COLUMNS|LINES|LS_COLORS|LESS.*|PAGER|EDITOR|VISUAL|PS[0-9]|PROMPT.*|HIST.*|"
    r"SSH_.*|DISPLAY|WAYLAND.*|WINDOWID|TMUX.*|STY|DBUS_.*|XDG_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|HOSTNAME|"
    r"PYTEST_.*|_PYTEST.*|COV_.*|TOX_.*|VIRTUAL_ENV_PROMPT|GIT_.*|NO_COLOR|FORCE_COLOR|PY_COLORS|"
    r"CI|CI_.*|GITHUB_.*|RUNNER_.*|ACTIONS_.*|GITLAB_.*|BUILDKITE.*|BUILD_.*|JOB_.*|CIRCLE.*|JENKINS.*|EXECUTOR_NUMBER|"
    r"KUBERNETES_.*|.*_TOKEN|.*_SECRET|ImageVersion|ImageOS|STATS_.*|AGENT_.*|DEPLOYMENT_.*|MANPATH|INFOPATH|MAIL"
)
"""Variables of terminals, shells and CI that are others in each run. One whose name stands in the project's code
counts all the same; any other variable counts always."""


def is_passing(name: str) -> bool:
    """Is the variable one of those that are others in each run?"""
    return PASSING.fullmatch(name) is not None


def digest_of(value: Any) -> str:
    """SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def environment_digest(variables: Mapping[str, str], named: Iterable[str]) -> str:
    """The hash of all variables, but passing ones that the project's code does not name. No value is kept."""
    named = set(named)
    counted = {name: value for name, value in variables.items() if name in named or not is_passing(name)}
    return digest_of(counted)


@functools.lru_cache(maxsize=1)
def machine_digests() -> dict[str, str]:
    """What is the same for every cell: a word for each part, and its hash. Read once in a process."""
    return {
        "Python": digest_of([sys.version, sys.implementation.name, sys.flags, platform.platform()]),
        "the code of pytest-torchcompile": digest_of(dict(_own_code())),
        "the installed packages": digest_of(sorted(_packages())),
        "the machine": digest_of(_machine()),
        "the C++ compiler": digest_of(_compiler()),
    }


def _own_code() -> Iterator[tuple[str, str]]:
    """This package's files; what lies in its zoo is told as models are."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        name = file.relative_to(_PACKAGE).as_posix()
        if not name.startswith("zoo/"):
            yield name, hash_of(file)


def _packages() -> Iterator[tuple[str, str]]:
    """Every installed distribution with its list of files, and every file that adds to the path."""
    for folder in dict.fromkeys(sys.path):
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for entry in entries:
            path = Path(folder, entry)
            if entry.endswith(_LISTS):
                yield entry, hash_of(path / "RECORD") or hash_of(path / "PKG-INFO") or hash_of(path)
            elif entry.endswith(_LINKS) or entry in ("sitecustomize.py", "usercustomize.py"):
                yield entry, hash_of(path)


def _machine() -> list[Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [platform.machine(), cores, _processor(), _read("/proc/driver/nvidia/version"), facts_of_gpus()]


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


def _compiler() -> list[str]:
    program = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if program is None:
        return []
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return [program, told]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
