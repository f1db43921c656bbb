"""CellKey: what must be the same for a result to be reused, as a few words each with a hash.

What is asked of the cell names the folder of its results. All else are parts, compared one by one, so that it can be
said which of them changed: sources, variables, packages, this package's own code, and the machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.reuse.definitions import SourceUse, use_of_sources
from pytest_torchcompile.reuse.digests import digest_of, short_marks
from pytest_torchcompile.reuse.machine_facts import facts_of_gpus, machine_digests, machine_facts
from pytest_torchcompile.reuse.run_inputs import RunInputs
from pytest_torchcompile.reuse.syntax import WAYS_THROUGH_LINKS
from pytest_torchcompile.reuse.variables import environment_digest, named_variables, names_in_data, variable_marks
from pytest_torchcompile.reuse.watched_files import is_installed

__all__ = [
    "asked_of", "cell_folder", "folder_prefix", "is_settled", "key_marks", "key_parts", "machine_parts",
    "source_use", "start_names", "why_untraceable",
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
    "warm_toolchain",
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
        "access",
        "getctime",
        "getatime",
        "which",
        "find_spec",
    }
)
_FOLLOWS_LINKS: Final = frozenset({"readlink", "islink", "is_symlink", "samefile", *WAYS_THROUGH_LINKS})
_PACKAGES_OF_READERS: Final = frozenset(
    {
        "safetensors",
        "h5py",
        "pyarrow",
        "pandas",
        "lmdb",
        "cv2",
        "netCDF4",
        "tables",
        "zarr",
        "mmap",
        "ctypes",
        "cffi",
        "tokenizers",
        "torchaudio",
        "onnx",
    }
)
"""Packages that open files where Python does not see it. Where nobody asked for one, its name is another thing's."""
_UNSEEN_READERS: Final = frozenset(
    {
        "safe_open",
        "from_pretrained",
        "load_dataset",
        "from_file",
        "memmap",
        "load_library",
        "read_image",
        "read_file",
        "load_from_disk",
    }
)
"""Names of code that does so, whatever package it is of."""
_ASKED_WORDS: Final = {
    "entry": "the model's entry in the matrix",
    "modules": "the modules that the matrix names",
    "fuzz": "the options of the fuzzer",
    "autotune_choices": "autotuning choices",
}
"""Parts of a job in the words of a user; the others are called as they are."""
_DRAWING: Final = frozenset(name for name, check in CHECKS.items() if check.draws)
"""Checks that draw by the options of the fuzzer."""


def cell_folder(job: Job) -> str:
    """The name of the folder in which the results of a cell are: the cell's own part, and a hash of all asked of it."""
    # 160 bits of the hash: no two cells meet by chance, and paths stay short.
    return f"{folder_prefix(job)}{digest_of(asked_of(job))[:40]}"


def folder_prefix(job: Job) -> str:
    """What the names of all folders of a cell begin with, whatever is asked of it."""
    return f"{digest_of([job.cell, _matrix_file(job)])[:20]}-"


def asked_of(job: Job) -> dict[str, str]:
    """All that is asked of a cell: a word for each part, and its hash."""
    asked = asdict(job)
    for name in _NOT_ASKED:
        del asked[name]
    # A new default of the fuzzer must not run cells again that draw nothing.
    asked["fuzz"] = {}
    if not _DRAWING.isdisjoint(job.checks):
        asked["fuzz"] = {name: value for name, value in job.fuzz.items() if name != "root"}
    # Where the model stands in its file changes nothing.
    asked["entry"] = {name: value for name, value in job.entry.items() if name != "where"}
    asked["matrix"] = _matrix_file(job)
    return {_ASKED_WORDS.get(name, name): digest_of(value) for name, value in asked.items()}


def _matrix_file(job: Job) -> str:
    """The matrix' file, from the root."""
    # From the right: a path on Windows has a colon of its own.
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
        # Every word of every text: `package.module:Class.make` may reach code by any of its parts.
        names.update(_WORD.findall(str(text)))
    return names


def source_use(inputs: RunInputs, job: Job) -> SourceUse:
    """The definitions of the project that the cell rests on. Raises OSError, SyntaxError or ValueError."""
    root = Path(job.root)
    files = {name: root / file for name, file in inputs.modules.items()}
    # A file of data may name what is to be built of it; one of an installed package knows nothing of the project.
    data = [root / file for file, digest in inputs.files.items() if digest and not is_installed(file)]
    use = use_of_sources(files, start_names(job), everything=bool(data) or inputs.all_code)
    return replace(use, texts=use.texts | names_in_data(data))


_VARIABLES: Final = "the environment variables"
_CODE: Final = "the code of its model"


def key_parts(job: Job, use: SourceUse, variables: Mapping[str, str]) -> dict[str, str]:
    """Each part of the key that is not compared file by file, in words, and its hash."""
    return {
        **machine_parts(job, variables),
        _VARIABLES: environment_digest(variables, named_variables(use)),
        _CODE: use.digest,
    }


def machine_parts(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    """The parts that are the same whatever the project's code is."""
    return {
        **machine_digests(),
        "the working folder": os.path.relpath(os.getcwd(), job.root),
        _VARIABLES: environment_digest(variables, ()),
    }


def key_marks(use: SourceUse, variables: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """For each part of the key a mark of each fact in it: where a part differs, they tell in what."""
    return {
        **{part: short_marks(facts) for part, facts in machine_facts().items()},
        _VARIABLES: variable_marks(variables, named_variables(use)),
        _CODE: short_marks(use.modules),
    }


def why_untraceable(inputs: RunInputs, use: SourceUse, job: Job) -> str:
    """Why nobody can tell whether the cell has changed; empty where one can."""
    reasons = list(inputs.untraceable)
    reasons += _reasons_of_names(use.identifiers & _ASKS_FOR_FILES, "asks whether files are there")
    reasons += _reasons_of_names(use.identifiers & _FOLLOWS_LINKS, "asks where links lead")
    readers = _UNSEEN_READERS | _PACKAGES_OF_READERS.intersection(inputs.names)
    reasons += _reasons_of_names(use.identifiers & readers, "may read files where Python does not see it")
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
