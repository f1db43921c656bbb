"""CellKey: what must be the same for a result to be reused, as a few words each with a hash.

What is asked of the cell names the folder of its results. All else are parts, compared one by one, so that it can be
said which of them changed: sources, variables, packages, this package's own code, and the machine.
"""

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
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse.definitions import SourceUse, use_of_sources
from pytest_torchcompile.reuse.run_inputs import RunInputs
from pytest_torchcompile.reuse.watched_files import is_installed
from pytest_torchcompile.run.imported import hash_of
from pytest_torchcompile.system import usable_cores

__all__ = [
    "cell_folder", "digest_of", "environment_digest", "facts_of_gpus", "is_passing", "is_settled", "key_parts",
    "machine_digests", "machine_parts", "source_use", "start_names", "why_untraceable",
]

_NOT_ASKED: Final = (
    "root",
    "locate",
    "culprit",
    "compile_threads",
    "rank",
    "world",
    "rendezvous",
    "logs",
    "log_folder",
    "local_rank",
    "timeout",
    "watched",
    "comparisons",
)
"""What of a job says where and how long it runs, and nothing of what comes of it."""
_WORD: Final = re.compile(r"[^\W\d]\w*")
_ASKS_FOR_FILES: Final = frozenset(
    {
        "exists",
        "lexists",
        "is_file",
        "isfile",
        "is_dir",
        "isdir",
        "getsize",
        "getmtime",
        "stat",
        "lstat",
        "st_mtime",
        "st_size",
    }
)
_UNSEEN_READERS: Final = frozenset(
    {
        "safetensors",
        "safe_open",
        "from_pretrained",
        "h5py",
        "pyarrow",
        "pandas",
        "lmdb",
        "cv2",
        "netCDF4",
        "tables",
        "zarr",
        "load_dataset",
        "from_file",
        "memmap",
        "mmap",
        "ctypes",
        "cffi",
        "load_library",
        "tokenizers",
        "torchaudio",
        "read_image",
        "read_file",
        "onnx",
        "load_from_disk",
    }
)
"""Names of code that opens files where Python does not see it."""
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


def cell_folder(job: Job) -> str:
    """The name of the folder in which the results of a cell are: a hash of all that is asked of it."""
    asked = asdict(job)
    for name in _NOT_ASKED:
        del asked[name]
    asked["fuzz"] = {name: value for name, value in job.fuzz.items() if name != "root"}
    # Where the model stands in its file changes nothing.
    asked["entry"] = {name: value for name, value in job.entry.items() if name != "where"}
    asked["matrix"] = _matrix_file(job)
    return digest_of(asked)


def _matrix_file(job: Job) -> str:
    """The matrix' file, from the root."""
    file = str(job.entry["where"]).rsplit(":", 2)[0]
    return Path(os.path.relpath(file, job.root)).as_posix() if os.path.isabs(file) else file


def start_names(job: Job) -> set[str]:
    """Names by which a cell comes to the project's code: factory, inputs, loss, and every text handed to them."""
    entry = ModelEntry.from_dict(job.entry)
    texts: list[Any] = [entry.factory, entry.inputs, entry.loss or ""]
    for arguments in entry.arguments.values():
        texts += [*arguments.keys(), *arguments.values()]
    for name, value in job.cell.items():
        if name == "user":
            texts += [*value.keys(), *value.values()]
        else:
            texts.append(value)
    names: set[str] = set()
    for text in texts:
        names.update(_WORD.findall(str(text)))
    return names


def source_use(inputs: RunInputs, job: Job) -> SourceUse:
    """The definitions of the project that the cell rests on. Raises OSError, SyntaxError or ValueError."""
    root = Path(job.root)
    files = {name: root / file for name, file in inputs.modules.items()}
    # A file of data may name what is to be built of it; one of an installed package knows nothing of the project.
    data = any(digest and not is_installed(file) for file, digest in inputs.files.items())
    return use_of_sources(files, start_names(job), everything=data)


def key_parts(job: Job, use: SourceUse, variables: Mapping[str, str]) -> dict[str, str]:
    """Each part of the key that is not compared file by file, in words, and its hash."""
    return {
        **machine_parts(job, variables),
        "the environment variables": environment_digest(variables, use.texts | use.identifiers),
        "the code of its model": use.digest,
    }


def machine_parts(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    """The parts that are the same whatever the project's code is."""
    return {
        **machine_digests(),
        "the working folder": os.path.relpath(os.getcwd(), job.root),
        "the environment variables": environment_digest(variables, ()),
    }


def why_untraceable(inputs: RunInputs, use: SourceUse, job: Job) -> str:
    """Why nobody can tell whether the cell has changed; empty where one can."""
    reasons = list(inputs.untraceable)
    reasons += _reasons_of_names(use.identifiers & _ASKS_FOR_FILES, "asks whether files are there")
    reasons += _reasons_of_names(use.identifiers & _UNSEEN_READERS, "may read files where Python does not see it")
    device = str(job.cell["device"]).partition(":")[0]
    if device == "cuda" and not facts_of_gpus():
        reasons.append("the driver does not tell the model of the GPU")
    elif device not in ("cpu", "cuda"):
        reasons.append(f"nothing is known of the device {device}")
    return "; ".join(reasons)


def _reasons_of_names(names: Iterable[str], what: str) -> list[str]:
    listed = ", ".join(sorted(names))
    return [f"its code {what} ({listed})"] if listed else []


def is_settled(observation: Mapping[str, Any]) -> bool:
    """Did every comparison of the cell come out the same each time? A model that wavers is always run."""
    return '"nondeterministic"' not in json.dumps(observation.get("sections", {}))


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
    return [platform.machine(), usable_cores(), _processor(), _read("/proc/driver/nvidia/version"), facts_of_gpus()]


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
