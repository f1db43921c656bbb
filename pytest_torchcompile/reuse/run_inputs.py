"""RunInputs: what a rank process had imported, opened and looked for when a cell ended. Plain data.

A rank process runs cells one after the other, so this is of all cells that it ran: a superset is safe.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

from pytest_torchcompile.reuse.watched_files import (
    changed_since_start,
    hash_of_listing,
    is_cache,
    is_installed,
    is_own,
    is_standard,
    opened_so_far,
)
from pytest_torchcompile.run.imported import hash_of

__all__ = ["RunInputs", "collect_inputs", "files_differ", "installed_differ", "modules_differ",
           "places_of_names"]


@dataclass
class RunInputs:
    """Files below the root are told from there, others by their absolute paths."""

    modules: dict[str, str] = field(default_factory=dict)
    """Module of the project to its file."""
    absent: list[str] = field(default_factory=list)
    """Modules that were looked for in packages of the project, and not found."""
    files: dict[str, str] = field(default_factory=dict)
    """Data file to the hash of its bytes; empty where there was none."""
    folders: dict[str, str] = field(default_factory=dict)
    """Folder that was listed to the hash of the names in it."""
    untraceable: list[str] = field(default_factory=list)
    """Why what the process did can't be followed."""
    all_code: bool = False
    """Do all definitions of the modules count, whichever the cell comes to?"""
    installed: dict[str, str] = field(default_factory=dict)
    """File of an installed package that was imported to the hash of its bytes."""
    names: list[str] = field(default_factory=list)
    """The first part of each module's name that was asked for, of whomever."""
    places: dict[str, str] = field(default_factory=dict)
    """Where of these the project has a module or package of that name (:func:`places_of_names`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunInputs:
        """Make it from what :meth:`to_dict` returned. Raises TypeError for other keys."""
        return cls(**data)

    @classmethod
    def of_ranks(cls, ranks: Iterable[Mapping[str, Any]]) -> RunInputs:
        """What the ranks of a cell had read, together. Where one read what another did not, both count."""
        joined = cls()
        for each in map(cls.from_dict, ranks):
            for mine, theirs in (
                (joined.modules, each.modules),
                (joined.installed, each.installed),
                (joined.files, each.files),
                (joined.folders, each.folders),
            ):
                # The file was written between two reads, so that nobody knows which text counts.
                if any(mine.get(name, value) != value for name, value in theirs.items()):
                    joined.untraceable.append("the ranks have read different contents of one file")
                mine.update(theirs)
            joined.absent = sorted({*joined.absent, *each.absent})
            joined.names = sorted({*joined.names, *each.names})
            joined.all_code |= each.all_code
            joined.untraceable += [why for why in each.untraceable if why not in joined.untraceable]
        return joined


def collect_inputs(root: Path) -> dict[str, Any]:
    """What this process has read so far, as plain data."""
    inputs = RunInputs()
    imported: set[str] = set()
    # A copy: to look at a module may import another one.
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        # These are our own ranks' start code.
        if isinstance(file, str) and name not in ("__main__", "__mp_main__"):
            imported.add(file)
            _take_module(inputs, name, file, root)
    opened = opened_so_far(root, imported)
    inputs.files = {_from_root(path, root): digest for path, digest in opened.files.items()}
    inputs.folders = {_from_root(path, root): digest for path, digest in opened.folders.items()}
    inputs.untraceable += opened.untraceable
    inputs.all_code = opened.all_code
    asked = opened.imports | set(sys.modules)
    inputs.names = sorted({name.partition(".")[0] for name in asked})
    packages = {name.partition(".")[0] for name in inputs.modules}
    inputs.absent = sorted(name for name in opened.imports - set(sys.modules) if name.partition(".")[0] in packages)
    return inputs.to_dict()


def _take_module(inputs: RunInputs, name: str, file: str, root: Path) -> None:
    # What the compiler made is told by what it was made of.
    if is_own(file) or is_standard(file) or is_cache(file):
        return
    if is_installed(file):
        # Libraries of packages are told by the lists that were installed with them.
        if file.endswith(".py"):
            inputs.installed[file] = _first_hash(file)
        return
    if not file.endswith(".py"):
        inputs.untraceable.append(f"the module {name} is no Python source: {Path(file).name}")
        return
    # Nobody knows then which of its contents was imported.
    if changed_since_start(file):
        inputs.untraceable.append(f"{_from_root(file, root)} was written while the process ran")
    inputs.modules[name] = _from_root(file, root)


@functools.cache
def _first_hash(file: str) -> str:
    return hash_of(Path(file))


def _from_root(path: str, root: Path) -> str:
    if path.startswith(os.path.join(str(root), "")):
        return Path(os.path.relpath(path, root)).as_posix()
    return path


# is all of that as it was?


def modules_differ(inputs: RunInputs, root: Path) -> str:
    """Which module would be found elsewhere now, or is found that was not; empty for none."""
    for name, file in inputs.modules.items():
        place = root / file
        found = _find_module(name, place, root)
        # By the real path: a checkout may be reached through a link.
        if found is None or os.path.realpath(found) != os.path.realpath(place):
            return f"the module {name} is not found in {file} any more"
    for name in inputs.absent:
        parent = inputs.modules.get(name.rpartition(".")[0])
        if parent is not None and PathFinder.find_spec(name, [str((root / parent).parent)]) is not None:
            return f"there is a module {name} now"
    now = places_of_names(inputs, root)
    for name in sorted({*now, *inputs.places}):
        if now.get(name) != inputs.places.get(name):
            return f"{name} may be imported from another place now"
    return ""


def _find_module(name: str, file: Path, root: Path) -> str | None:
    """Where the import system would find a module: one in a package in the folder of the package."""
    if name.partition(".")[2]:
        folder = file.parent.parent if file.name == "__init__.py" else file.parent
        spec = PathFinder.find_spec(name, [str(folder)])
    else:
        spec = PathFinder.find_spec(name, [str(root), *sys.path])
    return spec.origin if spec is not None else None


def places_of_names(inputs: RunInputs, root: Path) -> dict[str, str]:
    """For each name that was imported, the first folder that has it before the installed packages and Python's own."""
    places: dict[str, str] = {}
    names = set(inputs.names)
    for folder in dict.fromkeys((str(root), *sys.path)):
        inside = os.path.join(folder, "")
        if not folder or is_installed(inside) or is_standard(inside):
            continue
        for name in names & _importable_names(folder):
            places.setdefault(name, _from_root(inside, root))
    return places


@functools.lru_cache(maxsize=64)
def _importable_names(folder: str) -> frozenset[str]:
    """Names of modules and packages in a folder. One lookup of a run's start holds for the run."""
    names: set[str] = set()
    try:
        entries = sorted(os.listdir(folder))
    except OSError:
        return frozenset()
    for entry in entries:
        for suffix in (".py", ".pyc", *EXTENSION_SUFFIXES):
            if entry.endswith(suffix):
                names.add(entry.removesuffix(suffix))
        if os.path.isfile(os.path.join(folder, entry, "__init__.py")):
            names.add(entry)
    return frozenset(names)


def installed_differ(installed: Mapping[str, str]) -> str:
    """A file of an installed package that is not as it was; empty for none."""
    for file, digest in installed.items():
        if _first_hash(file) != digest:
            return file
    return ""


def files_differ(inputs: RunInputs, root: Path) -> str:
    """A data file or folder that is not as it was; empty for none."""
    for name, digest in inputs.files.items():
        if hash_of(root / name) != digest:
            return name
    for name, digest in inputs.folders.items():
        if hash_of_listing(root / name) != digest:
            return name
    return ""
