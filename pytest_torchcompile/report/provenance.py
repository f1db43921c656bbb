"""Where a report comes from: our version, the commit, and what CI says of itself, by an allow-list. Never a secret.

Were files of the project edited while a run went on? Then its verdicts are of no one state of it. Looked at are Python
and YAML files that git tracks, or neither tracks nor ignores, and whatever the run has imported. A file that came or
went without ever being tracked was probably generated, and is no edit.

Was the report itself damaged or edited later? Its fingerprints and its seal tell, and it is not judged as the original.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name

from pytest_torchcompile.quantity import first_names
from pytest_torchcompile.run.imported import edited_since, hash_of

__all__ = [
    "CI_VARIABLES", "EVIDENCE", "HEAD", "SEAL", "SOURCES", "TRACKED_FILES", "Sources", "add_seal", "cell_fingerprint",
    "changed_by_policy_alone", "edited_since_run", "fingerprint", "git_output", "git_state", "head_commit",
    "head_fingerprint", "installed_packages", "is_sealed", "is_source", "remove_seal", "run_provenance",
]

TRACKED_FILES = "files that git tracks"
"""What was edited since a run, where it is nothing that the run has imported."""

CI_VARIABLES: Final = (
    "GITHUB_REPOSITORY", "GITHUB_WORKFLOW", "GITHUB_JOB", "GITHUB_RUN_ID", "GITHUB_RUN_NUMBER", "GITHUB_RUN_ATTEMPT",
    "GITHUB_EVENT_NAME", "GITHUB_REF_NAME", "GITHUB_SHA", "RUNNER_OS", "RUNNER_ARCH",
    "CI_PROJECT_PATH", "CI_PIPELINE_ID", "CI_JOB_ID", "CI_JOB_NAME", "CI_COMMIT_SHA", "CI_COMMIT_REF_NAME",
    "BUILD_NUMBER", "JOB_NAME", "BUILDKITE_BUILD_NUMBER", "BUILDKITE_PIPELINE_SLUG", "CIRCLE_BUILD_NUM", "CIRCLE_JOB",
)
"""The only environment variables that a report holds: names and numbers of runs, which CI systems set themselves."""
LONGEST: Final = 200
"""Characters of such a variable."""
SOURCES: Final = ("*.py", "*.yaml", "*.yml")
UNTRACKED_READ: Final = 2000
"""Untracked files that are looked into."""
_SKIPPED: Final = frozenset({"site-packages", "node_modules", "__pycache__"})
PATIENCE: Final = 10.0
"""Seconds that a command of git may take."""


def run_provenance(root: Path, variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The block ``run``, without its times: version of this package and of all others, commit of ``root``, variables
    of CI."""
    from pytest_torchcompile import __version__

    ci = {name: variables[name][:LONGEST] for name in CI_VARIABLES if variables.get(name)}
    return {"plugin": __version__, "packages": installed_packages(), "git": git_state(root), "ci": ci}


def installed_packages() -> dict[str, str]:
    """Every package that this Python finds, by its normalised name, and its version.

    Of one that is there twice it is the one that is imported: the first on the path.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        # A folder that an interrupted installation left has no name, and nothing imports it.
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return dict(sorted(versions.items()))


def head_commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder; None where there is no git."""
    commit = git_output(folder, "rev-parse", "HEAD")
    # In a repository without a commit git says "HEAD".
    if commit is None or not re.fullmatch("[0-9a-f]{40,64}", commit):
        return None
    return commit


def git_state(root: Path, counted: Sequence[str] = (":(top)",)) -> dict[str, Any] | None:
    """The commit that is checked out, whether tracked files differ from it and how, and where ``root`` lies in it.

    None where there is no git. Of differences, and of sources that git does not track, only a hash is kept: it tells
    two edits apart, and nothing else. ``counted``: pathspecs of the tracked files whose edits count; all by default.
    """
    commit = head_commit(root)
    if commit is None:
        return None
    changes = git_output(root, "status", "--porcelain", "--untracked-files=no", "--", *counted)
    difference = None
    if changes:
        # What the user has configured for git (another program for diffs, filters) would make other texts of it.
        command = ("diff", "--no-ext-diff", "--no-textconv", "--binary", "--submodule=diff", "HEAD", "--", *counted)
        difference = git_output(root, *command)
    digest = hashlib.sha256(difference.encode("utf-8", "surrogateescape")).hexdigest() if difference else ""
    return {"commit": commit, "changed": changes != "", "diff_sha256": digest,
            "prefix": git_output(root, "rev-parse", "--show-prefix") or "", "untracked_sha256": _hash_untracked(root)}


def is_source(name: str) -> bool:
    """Is the file one of the project's own? Caches and environments often lie in a repository."""
    parts = Path(name).parts
    hidden = any(part.startswith(".") for part in parts)
    return bool(name) and not hidden and _SKIPPED.isdisjoint(parts)


def _hash_untracked(root: Path) -> str:
    """The hash of Python and YAML files that git neither tracks nor ignores; empty without any."""
    listed = git_output(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES) or ""
    names = sorted(filter(is_source, listed.split("\0")))
    if not names:
        return ""
    digest = hashlib.sha256()
    for name in names[:UNTRACKED_READ]:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        try:
            digest.update(hashlib.sha256((root / name).read_bytes()).digest())
        # A link to nowhere.
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()


def git_output(root: Path, *command: str) -> str | None:
    """What git says; None where it says no, is not there, or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=PATIENCE,
                              errors="surrogateescape", check=False, stdin=subprocess.DEVNULL)
    # No git, a path that it refuses, a repository on a slow disk: of which commit a run was is then unknown, no error.
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


EDITED_SHOWN: Final = 20
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
        return cls(root, commit, _state_since(root, commit))

    def edited_files(self, imported: Mapping[str, str]) -> list[str]:
        """The files that differ now, from ``root``; ``imported`` are those of the run, with their hashes then."""
        top = self._top
        names: set[str] = set()
        for name in _edited_between(self.state, _state_since(self.root, self.commit)):
            # Git tells names from the repository's top, which may lie above the root.
            names.add(Path(os.path.relpath(top / name, self.root)).as_posix())
        names.update(_edited_and_there(self.root, imported))
        return sorted(names)[:EDITED_SHOWN]

    @property
    def _top(self) -> Path:
        return Path(git_output(self.root, "rev-parse", "--show-toplevel") or self.root)


def edited_since_run(run: Mapping[str, Any] | None, folder: Path, policy: Path | None = None) -> str:
    """What of a run's sources is not any more as the run had it, told in the repository in which ``folder`` lies.

    Empty where nothing is, and where another commit is checked out, or no git: then nothing is like it was anyway.
    ``policy``: the one that judges. It is read when a run is over, so an edit of it makes no run an earlier one.
    """
    git, top = (run or {}).get("git"), git_output(folder, "rev-parse", "--show-toplevel")
    if run is None or git is None or top is None or head_commit(folder) != git["commit"]:
        return ""
    root = Path(top) / git["prefix"]
    if edited := _edited_and_there(root, run.get("sources", {})):
        return first_names(edited)
    state = git_state(root)
    # That git was too slow is no edit.
    if state is None:
        return ""
    if _is_state(state, git):
        return ""
    name = _name_of_policy(run, root, Path(top), policy)
    if name:
        rest = git_state(root, (":(top)", f":(top,exclude,literal){name}"))
        if rest is not None and _is_state(rest, git):
            return ""
    return TRACKED_FILES


def changed_by_policy_alone(run: Mapping[str, Any] | None, folder: Path, policy: Path | None) -> bool:
    """Were the uncommitted changes of a run those that the policy has in the repository of ``folder``, and no others?

    The run knows a hash of its changes only, so a policy that was edited once more since is one that nobody knows.
    """
    git, top = (run or {}).get("git"), git_output(folder, "rev-parse", "--show-toplevel")
    if run is None or git is None or top is None or head_commit(folder) != git["commit"]:
        return False
    root = Path(top) / git["prefix"]
    name = _name_of_policy(run, root, Path(top), policy)
    if not name:
        return False
    state = git_state(root, (f":(top,literal){name}",))
    return state is not None and state["changed"] and _is_state(state, git)


def _name_of_policy(run: Mapping[str, Any], root: Path, top: Path, policy: Path | None) -> str:
    """The policy as git names it, from the top; empty where it lies elsewhere, or may be more than a policy."""
    # A file of Python may be a policy by its text, and a module that a run imports.
    if policy is None or policy.suffix not in (".yaml", ".yml"):
        return ""
    # Git looks through links to folders, and at a link itself: what it leads to counts as all files do.
    path = policy.parent.resolve() / policy.name
    if not path.is_relative_to(top.resolve()) or os.path.relpath(path, root.resolve()) in run.get("sources", {}):
        return ""
    return path.relative_to(top.resolve()).as_posix()


def _is_state(state: Mapping[str, Any], git: Mapping[str, Any]) -> bool:
    return (state["changed"], state["diff_sha256"]) == (git.get("changed"), git.get("diff_sha256"))


def _edited_and_there(root: Path, imported: Mapping[str, str]) -> list[str]:
    """Imported files that are not any more as they were; one that is gone may have been generated."""
    return [name for name in edited_since(root, imported) if (root / name).exists()]


def _edited_between(before: _State | None, after: _State | None) -> Iterator[str]:
    """Nothing, where one of the states is not known: that git was too slow is no edit."""
    if before is None or after is None:
        return
    for name in {*before.changed, *after.changed}:
        if before.changed.get(name) != after.changed.get(name):
            yield name
    # A file that came or went without ever being tracked was probably generated.
    for name in before.new.keys() & after.new.keys():
        if before.new[name] != after.new[name]:
            yield name


def _state_since(root: Path, commit: str) -> _State | None:
    if not commit:
        return None
    # Without ":(top)" git looks at no file above the folder in which it runs.
    everywhere = [f":(top){pattern}" for pattern in SOURCES]
    difference = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--name-only", "-z")
    changed = git_output(root, *difference, "--diff-filter=a", commit, "--", *everywhere)
    added = git_output(root, *difference, "--diff-filter=A", commit, "--", *everywhere)
    others = git_output(root, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", "--", *SOURCES)
    top = git_output(root, "rev-parse", "--show-toplevel")
    if changed is None or added is None or others is None or top is None:
        return None
    return _State(_hash_sources(Path(top), changed), _hash_sources(Path(top), f"{added}\0{others}"))


def _hash_sources(top: Path, listed: str) -> dict[str, str]:
    """Hashes of the sources in a list that git has made with ``-z``."""
    return {name: hash_of(top / name) for name in filter(is_source, listed.split("\0"))}


# -------------------------------------------------------------------------------------------- fingerprints and the seal
# Fingerprints are over what a report holds as evidence. The seal of a report file is a checksum of its text as it was
# written, which tells at once that it is whole. It keeps accidents and careless edits out, not forgers: who can write a
# report can seal it too. A seal that is there and wrong says that the file is not as its run wrote it, and the gate
# does not judge it. A file without a seal is judged by its fingerprints, unless a policy says ``sealed: required``.
EVIDENCE: Final = ("axes", "planned", "seconds", "observation")
"""The keys of a cell that verdicts are made from. (What they were found to be can be told again from these.)"""

HEAD: Final = ("run", "environment", "matrix", "shard", "finished")
"""The keys of a block that say what its verdicts hold for."""


def head_fingerprint(block: Mapping[str, Any]) -> str:
    """The fingerprint of what the verdicts hold for: environment, run, matrix, and the runs of kept verdicts."""
    kept = {cell["id"]: cell["kept"] for cell in block["cells"] if "kept" in cell}
    head = {key: block.get(key) for key in HEAD}
    return fingerprint({**head, "kept": kept, "tests_kept": block.get("tests_kept", [])})


def cell_fingerprint(cell: Mapping[str, Any]) -> str:
    """The fingerprint of a cell's evidence."""
    evidence = {key: cell[key] for key in EVIDENCE}
    # Only where it is there: reports of earlier versions have fingerprints without it.
    if "reused" in cell:
        evidence["reused"] = cell["reused"]
    return fingerprint(evidence)


def fingerprint(value: Mapping[str, Any]) -> str:
    """SHA-256 of a value as JSON with sorted keys and no spaces, non-ASCII escaped.

    Raises ValueError for NaN and infinities, which JSON does not have.
    """
    return hashlib.sha256(_ENCODER.encode(value).encode("ascii")).hexdigest()


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)


SEAL: Final = "compile_matrix_seal"
"""The key that the seal is, at the top of a report."""

_SEAL: Final = re.compile(rb', "compile_matrix_seal": "([0-9a-f]{64})"\}\s*\Z')
_LENGTH: Final = 110
"""Bytes from the end in which the seal is looked for."""


def add_seal(text: str) -> str:
    """The text of a JSON object with one more key at its end: the BLAKE2b (32 bytes) of all that stands before it."""
    body = text.rstrip().removesuffix("}")
    digest = _digest_of(body.encode("utf-8", errors="backslashreplace"))
    return f'{body}, "compile_matrix_seal": "{digest}"}}\n'


def is_sealed(data: bytes) -> bool:
    """Is the file as :func:`add_seal` made it?"""
    seal = _SEAL.search(data, max(0, len(data) - _LENGTH))
    # A view, because a report may have hundreds of megabytes.
    return seal is not None and _digest_of(memoryview(data)[:seal.start()]) == seal[1].decode()


def remove_seal(data: bytes) -> tuple[bytes, bool]:
    """The JSON object without its seal, and whether it had one that held. A seal that is wrong stays where it is."""
    seal = _SEAL.search(data, max(0, len(data) - _LENGTH))
    if seal is None or not is_sealed(data):
        return data.rstrip(), False
    return data[:seal.start()] + b"}", True


def _digest_of(data: bytes | memoryview) -> str:
    # BLAKE2b takes half the time of SHA-256 where the processor has no instructions for that.
    return hashlib.blake2b(data, digest_size=32).hexdigest()
