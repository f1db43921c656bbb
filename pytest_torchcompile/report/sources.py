"""Sources: were files of the project edited while a run went on? Then its verdicts are of no one state of it.

Looked at are Python and YAML files that git tracks, or neither tracks nor ignores, and whatever the run has imported.
A file that came or went without ever being tracked was probably generated, and is no edit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.report.finding import first
from pytest_torchcompile.report.provenance import SOURCES, git_output, git_state, head_commit, is_source
from pytest_torchcompile.run.imported import edited_since, hash_of

__all__ = ["Sources", "edited_since_run"]

MOST: Final = 20
"""Edited files that are told."""


@dataclass(frozen=True)
class _State:
    """What differs from a commit: file (from the top of the repository) to its hash."""

    changed: Mapping[str, str]
    new: Mapping[str, str]


@dataclass(frozen=True)
class Sources:
    """The project's sources as they were when a run began."""

    root: Path = Path()
    commit: str = ""
    """That was checked out; empty where there is no git, or where it takes too long."""
    state: _State | None = None

    @classmethod
    def take(cls, root: Path) -> Sources:
        """The state of now."""
        commit = head_commit(root) or ""
        return cls(root, commit, _state(root, commit))

    def edited(self, imported: Mapping[str, str]) -> list[str]:
        """The files that differ now, from ``root``; ``imported`` are those of the run, with their hashes then."""
        found = set(_edited_between(self.state, _state(self.root, self.commit)))
        names = {Path(os.path.relpath(self._top / name, self.root)).as_posix() for name in found}
        names.update(name for name in edited_since(self.root, imported) if (self.root / name).exists())
        return sorted(names)[:MOST]

    @property
    def _top(self) -> Path:
        return Path(git_output(self.root, "rev-parse", "--show-toplevel") or self.root)


def edited_since_run(run: Mapping[str, Any] | None, folder: Path) -> str:
    """What of a run's sources is not any more as the run had it, told in the repository in which ``folder`` lies.

    Empty where nothing is, and where another commit is checked out, or no git: then nothing is like it was anyway.
    """
    git, top = (run or {}).get("git"), git_output(folder, "rev-parse", "--show-toplevel")
    if run is None or git is None or top is None or head_commit(folder) != git["commit"]:
        return ""
    root = Path(top) / git["prefix"]
    known = run.get("sources", {})
    if edited := [name for name in edited_since(root, known) if (root / name).exists()]:
        return first(edited)
    state = git_state(root)
    alike = state is None or all(state[key] == git.get(key) for key in ("changed", "diff_sha256"))
    return "" if alike else "files that git tracks"


def _edited_between(before: _State | None, after: _State | None) -> Iterator[str]:
    """Nothing, where one of the states is not known: that git was too slow is no edit."""
    if before is None or after is None:
        return
    for name in {*before.changed, *after.changed}:
        if before.changed.get(name) != after.changed.get(name):
            yield name
    for name in before.new.keys() & after.new.keys():
        if before.new[name] != after.new[name]:
            yield name


def _state(root: Path, commit: str) -> _State | None:
    if not commit:
        return None
    everywhere = [f":(top){pattern}" for pattern in SOURCES]
    difference = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--name-only", "-z")
    changed = git_output(root, *difference, "--diff-filter=a", commit, "--", *everywhere)
    added = git_output(root, *difference, "--diff-filter=A", commit, "--", *everywhere)
    others = git_output(root, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *SOURCES)
    top = git_output(root, "rev-parse", "--show-toplevel")
    if changed is None or added is None or others is None or top is None:
        return None
    return _State(_hashes(Path(top), changed.split("\0")), _hashes(Path(top), f"{added}\0{others}".split("\0")))


def _hashes(top: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hash_of(top / name) for name in names if is_source(name)}
