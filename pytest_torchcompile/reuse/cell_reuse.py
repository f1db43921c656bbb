"""CellReuse: a cell's result of an earlier run, if its key is unchanged, and the keeping of new ones.

They are kept in a folder (:class:`ResultStore`) that several runs may write to at once, and that may be copied
anywhere. An entry is one file, written beside its place and renamed, so that a reader never meets half of one. Its
first line is the hash of the rest: what was torn or edited is no entry. Nothing in the folder is changed once it is
there. What several entries share, such as the list of installed files, is a file of its own, named by its hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.bounded_folder import beside_place, tidy_folder
from pytest_torchcompile.observation import Job, Observation
from pytest_torchcompile.plan.matrix import PlannedCell
from pytest_torchcompile.reuse.cell_key import (
    asked_of,
    cell_folder,
    folder_prefix,
    is_settled,
    key_marks,
    key_parts,
    source_use,
    why_untraceable,
)
from pytest_torchcompile.reuse.definitions import SourceUse
from pytest_torchcompile.reuse.digests import names_that_differ
from pytest_torchcompile.reuse.named_lines import LinesMoved, NamedLines, find_lines, move_lines
from pytest_torchcompile.reuse.run_inputs import (
    RunInputs,
    files_differ,
    installed_differ,
    modules_differ,
    places_of_names,
)
from pytest_torchcompile.reuse.variables import environment_digest, variable_marks
from pytest_torchcompile.run.imported import edited_since, hash_of

__all__ = ["LARGEST", "OLDEST", "VERSION", "CellReuse", "EarlierResult", "ResultStore", "why_always_run"]

LARGEST: Final = 256 << 20
"""Bytes of the whole folder, above which the entries that were used longest ago go."""
OLDEST: Final = 30 * 24 * 3600.0
"""Seconds since an entry was last used, after which it goes."""
_VARIANTS: Final = 8
"""Entries of one cell that are looked at, the last used first: of the branches that one works on."""
_LISTS: Final = "lists"
VERSION: Final = 3
"""Of an entry's content: one of another version is not read."""
_TIMED: Final = "worth"
_SHARED: Final = ("installed", "names")
"""What the inputs of most cells have in common, and a file of its own holds."""


class ResultStore:
    """The folder. Whatever goes wrong with it, a result is not found or not kept, and nobody is told a wrong one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lists: dict[str, Any] = {}

    def entries(self, name: str) -> Iterator[dict[str, Any]]:
        """The entries in the folder ``name``, the last used first. Each has its own file's name as ``file``."""
        files: list[tuple[float, Path]] = []
        for file in self.folder.joinpath(name).glob("*.entry"):
            with contextlib.suppress(OSError):
                # Another process may remove it between the list and this.
                files.append((file.stat().st_mtime, file))
        for _, file in sorted(files, reverse=True)[:_VARIANTS]:
            content = _read_file(file)
            if content is not None:
                yield {**content, "file": str(file)}

    def keep(self, name: str, content: dict[str, Any]) -> bool:
        """Keep an entry in the folder ``name``; whether it could be written."""
        data = _encode(content)
        # Named by its content: two workers that keep the same result write the same file.
        return self._write(self.folder / name / f"{hashlib.sha256(data).hexdigest()[:32]}.entry", data)

    def entries_of_prefix(self, prefix: str) -> Iterator[dict[str, Any]]:
        """The last used entry of each folder whose name begins so, the last used first."""
        newest: dict[Path, Path] = {}
        for file in sorted(self.folder.glob(f"{prefix}*/*.entry"), key=_time_of_use):
            newest[file.parent] = file
        for file in sorted(newest.values(), key=_time_of_use, reverse=True):
            content = _read_file(file)
            if content is not None:
                yield content

    def is_empty(self) -> bool:
        """Is nothing kept at all?"""
        return next(self.folder.glob("*/*.entry"), None) is None

    def mark_used(self, entry: dict[str, Any]) -> None:
        """Take note that an entry was of use, so that it goes later than others."""
        with contextlib.suppress(OSError):
            os.utime(entry["file"])

    def keep_list(self, content: Any) -> str:
        """Keep what several entries share; returns its name, or an empty text where it can't be written."""
        data = _encode(content)
        name = hashlib.sha256(data).hexdigest()
        file = self._list_file(name)
        if name not in self._lists and not self._write(file, data):
            return ""
        self._lists[name] = content
        return name

    def read_list(self, name: str) -> Any:
        """What :meth:`keep_list` has kept by this name; None where it is gone."""
        if name not in self._lists:
            file = self._list_file(name)
            self._lists[name] = _read_file(file)
            with contextlib.suppress(OSError):
                os.utime(file)
        return self._lists[name]

    def tidy(self, largest: int = LARGEST, oldest: float = OLDEST) -> int:
        """Remove what was not used for long, and what is too much; returns how many files went."""
        return tidy_folder(self.folder, ".entry", largest, oldest)

    def _list_file(self, name: str) -> Path:
        return self.folder / _LISTS / f"{name}.entry"

    def _write(self, file: Path, data: bytes) -> bool:
        """Write a file whole or not at all."""
        beside = beside_place(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Beside it and moved, for another worker may read the folder at this moment.
            beside.write_bytes(data)
            beside.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            return False
        return True


def _time_of_use(file: Path) -> float:
    try:
        # Another run may tidy the folder meanwhile; what is gone was used least.
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _encode(content: Any) -> bytes:
    # The fastest level: observations are mostly repetition, and shrink well even so.
    packed = zlib.compress(json.dumps(content, sort_keys=True).encode(), 1)
    # A checksum in front: what was damaged on the disk must never become a verdict.
    return hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed


def _read_file(file: Path) -> Any:
    """The content of a file; None for one that is gone, or is not as it was written."""
    try:
        digest, _, packed = file.read_bytes().partition(b"\n")
        if hashlib.sha256(packed).hexdigest().encode() != digest:
            return None
        return json.loads(zlib.decompress(packed))
    # A damaged entry is as good as none: the cell is run.
    except (OSError, ValueError, zlib.error):
        return None


@dataclass(frozen=True)
class EarlierResult:
    """What an earlier run observed."""

    observation: Observation
    seconds: float
    """Wall seconds that the cell took then."""
    origin: dict[str, Any]
    """``run`` (when that run began), ``commit`` (None without git), ``changed`` (files differed from the commit), and
    ``age`` (seconds since the cell ran)."""


def why_always_run(planned: PlannedCell, job: Job) -> str:
    """Why a cell is run each time, whatever is unchanged; empty for one that need not be."""
    if planned.outcome != "run":
        return f"a cell with a rule `{planned.outcome}` always runs"
    if _TIMED in job.checks:
        return f"a cell that is timed (check {_TIMED}) always runs"
    return ""


class CellReuse:
    """Of one process. ``describe_run`` gives ``run``, ``commit`` and ``changed``; it is called when first needed."""

    def __init__(self, folder: Path, describe_run: Callable[[], dict[str, Any]]) -> None:
        self.store = ResultStore(folder)
        self._describe_run = describe_run
        self._run: dict[str, Any] | None = None
        self._variables = dict(os.environ)
        self._same_installed: dict[str, str] = {}
        # Asked once: while the run goes on, what it keeps itself is there.
        self._began_empty = self.store.is_empty()

    def look_up(self, planned: PlannedCell, job: Job) -> EarlierResult | str:
        """The result of an earlier run that still holds; or why there is none, in words."""
        if why := why_always_run(planned, job):
            return why
        if why := self.unsteady_environment():
            return why
        reason = ""
        for entry in self.store.entries(cell_folder(job)):
            try:
                changed = self._what_changed(entry, job)
                if not changed:
                    result = _earlier_result(entry, Path(job.root))
                    self.store.mark_used(entry)
                    return result
            except (LinesMoved, OSError, SyntaxError) as error:
                changed = str(error)
            # What another version has written, or somebody by hand.
            except (KeyError, TypeError, AttributeError, ValueError):
                continue
            # The reason of the entry used last: that of an older branch would only confuse.
            reason = reason or changed
        return reason or self._why_none_is_kept(job)

    def _why_none_is_kept(self, job: Job) -> str:
        """Why there is no result of which what was asked is what is asked now."""
        asked = asked_of(job)
        for entry in self.store.entries_of_prefix(folder_prefix(job)):
            # Comparisons of same code, and what another version has written, tell nothing of this.
            if isinstance(entry.get("asked"), dict):
                return f"what is asked of it changed{names_that_differ(entry['asked'], asked)}"
        if self._began_empty:
            return f"nothing was kept in {self.store.folder} before this run"
        return "no result is kept"

    def _what_changed(self, entry: Mapping[str, Any], job: Job) -> str:
        """What is not as it was when the entry was made; empty where all is."""
        if entry["version"] != VERSION:
            return "the kept result is of another version"
        shared = self.store.read_list(entry["shared"])
        if shared is None:
            return "a part of the kept result is gone"
        root = Path(job.root)
        inputs = RunInputs.from_dict({**entry["inputs"], **shared})
        # The cheap questions first: this only asks where modules are found, the next parses them.
        if elsewhere := modules_differ(inputs, root):
            return elsewhere
        try:
            use = source_use(inputs, job)
        # The file may have been edited since the run, and broken by it; then nothing can be said of it.
        except (OSError, SyntaxError, ValueError) as error:
            return f"the code of its model can't be read: {error}"
        now, then = key_parts(job, use, os.environ), entry["parts"]
        for part in {**then, **now}:
            if now.get(part) != then.get(part):
                return f"{part} changed{self._names_in_part(entry, part, use)}"
        if file := self.installed_change(entry["shared"]):
            return f"{file} changed"
        if file := files_differ(inputs, root):
            return f"{file} changed"
        return ""

    def _names_in_part(self, entry: Mapping[str, Any], part: str, use: SourceUse) -> str:
        """What has changed in a part of the key, as a clause; empty where it can't be told."""
        then = (self.store.read_list(entry["marks"]) or {}).get(part)
        if then is None:
            return ""
        return names_that_differ(then, key_marks(use, os.environ).get(part, {}))

    def installed_change(self, shared: str) -> str:
        """A file of an installed package that is not as it was, by the name of what :meth:`keep_shared` kept."""
        # Thousands of files, which most cells have in common.
        if shared not in self._same_installed:
            kept = self.store.read_list(shared)
            if kept is None:
                return "a part of the kept result"
            self._same_installed[shared] = installed_differ(kept["installed"])
        return self._same_installed[shared]

    def keep_shared(self, inputs: RunInputs) -> tuple[str, dict[str, Any]]:
        """Keep what most cells have in common; returns its name, empty where it can't be written, and the rest."""
        told = inputs.to_dict()
        return self.store.keep_list({name: told.pop(name) for name in _SHARED}), told

    def keep(
        self, planned: PlannedCell, job: Job, observation: Observation, seconds: float, read: list[Mapping[str, Any]],
        older: Mapping[str, Any] | None = None,
    ) -> str:
        """Keep what a run observed of a cell that passed. ``read``: what each of its ranks told of what it read.

        ``older``: the earlier run of which a part of it is (:attr:`EarlierResult.origin`). Returns why it is not kept;
        empty where it is.
        """
        root = Path(job.root)
        if why := why_always_run(planned, job):
            return why
        content = observation.to_dict()
        # One that wavers has no result to speak of: the next run may well come to another.
        if not is_settled(content):
            return "a model whose runs differ is always run"
        if why := self.unsteady_environment():
            return why
        inputs = RunInputs.of_ranks(read)
        inputs.places = places_of_names(inputs, root)
        # The cell may have run the old text, and its key would be that of the new one.
        if edited_since(root, observation.sources or {}):
            return "its code was edited while it ran"
        try:
            use = source_use(inputs, job)
            lines = find_lines(content, set(inputs.modules.values()), root)
        except (OSError, SyntaxError, ValueError) as error:
            return f"the code of its model can't be read: {error}"
        if why := modules_differ(inputs, root) or why_untraceable(inputs, use, job):
            return why
        shared, told = self.keep_shared(inputs)
        entry = {
            "version": VERSION,
            "inputs": told,
            "shared": shared,
            "marks": self.store.keep_list(key_marks(use, os.environ)),
            "asked": asked_of(job),
            "lines": lines.to_dict(),
            "parts": key_parts(job, use, os.environ),
            "observation": content,
            "seconds": seconds,
            **_time_and_run(older or {**self.this_run(), "age": 0}),
        }
        if not shared or not self.store.keep(cell_folder(job), entry):
            return f"{self.store.folder} can't be written"
        return ""

    def this_run(self) -> dict[str, Any]:
        """What a kept result tells of this run."""
        if self._run is None:
            self._run = self._describe_run()
        return self._run

    def unsteady_environment(self) -> str:
        """Why the environment is not as when this process began, for rank processes have the variables of then."""
        if environment_digest(os.environ, ()) == environment_digest(self._variables, ()):
            return ""
        then, now = variable_marks(self._variables, ()), variable_marks(os.environ, ())
        return f"the environment variables changed while pytest ran{names_that_differ(then, now)}"


def _time_and_run(origin: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry says of when the cell ran."""
    run = {name: origin[name] for name in ("run", "commit", "changed")}
    return {"run": run, "at": time.time() - origin["age"]}


def _earlier_result(entry: Mapping[str, Any], root: Path) -> EarlierResult:
    # Comments may be others: lines, and the files on which the verdict rests, are told as they are now.
    content = move_lines(entry["observation"], NamedLines.from_dict(entry["lines"]), root)
    observation = Observation.from_dict(content)
    observation.sources = {name: hash_of(root / name) for name in observation.sources or {}}
    age = max(0, round(time.time() - entry["at"]))
    return EarlierResult(observation, float(entry["seconds"]), {**entry["run"], "age": age})
