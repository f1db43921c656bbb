"""Where a report comes from: our version, the commit, and what CI says of itself, by an allow-list. Never a secret."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["CI_VARIABLES", "SOURCES", "git_output", "git_state", "head_commit", "is_source", "provenance"]

CI_VARIABLES: Final = (
    "GITHUB_REPOSITORY", "GITHUB_WORKFLOW", "GITHUB_JOB", "GITHUB_RUN_ID", "GITHUB_RUN_NUMBER", "GITHUB_RUN_ATTEMPT",
    "GITHUB_EVENT_NAME", "GITHUB_REF_NAME", "GITHUB_SHA", "RUNNER_OS", "RUNNER_ARCH",
    "CI_PROJECT_PATH", "CI_PIPELINE_ID", "CI_JOB_ID", "CI_JOB_NAME", "CI_COMMIT_SHA", "CI_COMMIT_REF_NAME",
    "BUILD_NUMBER", "JOB_NAME", "BUILDKITE_BUILD_NUMBER", "BUILDKITE_PIPELINE_SLUG", "CIRCLE_BUILD_NUM", "CIRCLE_JOB",
)
"""The only environment variables that a report holds: names and numbers of runs, which CI systems set themselves."""
LONGEST: Final = 200
SOURCES: Final = ("*.py", "*.yaml", "*.yml")
MOST: Final = 2000
"""Untracked files that are looked into."""
_SKIPPED: Final = frozenset({"site-packages", "node_modules", "__pycache__"})
PATIENCE: Final = 10.0


def provenance(root: Path, variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The block ``run``, without its times: version of this package, commit of ``root``, variables of CI."""
    from pytest_torchcompile import __version__

    return {
        "plugin": __version__,
        "git": git_state(root),
        "ci": {name: variables[name][:LONGEST] for name in CI_VARIABLES if variables.get(name)},
    }


def head_commit(folder: Path) -> str | None:
    """The commit that is checked out in a folder; None where there is no git."""
    commit = git_output(folder, "rev-parse", "HEAD")
    return commit if commit is not None and re.fullmatch("[0-9a-f]{40,64}", commit) else None


def git_state(root: Path) -> dict[str, Any] | None:
    """The commit that is checked out, whether tracked files differ from it and how, and where ``root`` lies in it.

    None where there is no git. Of differences, and of sources that git does not track, only a hash is kept: it tells
    two edits apart, and nothing else.
    """
    commit = head_commit(root)
    if commit is None:
        return None
    changes = git_output(root, "status", "--porcelain", "--untracked-files=no")
    command = ("diff", "--no-ext-diff", "--no-textconv", "--binary", "--submodule=diff", "HEAD")
    difference = git_output(root, *command) if changes else ""
    told = hashlib.sha256(difference.encode("utf-8", "surrogateescape")).hexdigest() if difference else ""
    return {"commit": commit, "changed": changes != "", "diff_sha256": told,
            "prefix": git_output(root, "rev-parse", "--show-prefix") or "", "untracked_sha256": _untracked(root)}


def is_source(name: str) -> bool:
    """Is the file one of the project's own? Caches and environments often lie in a repository."""
    parts = Path(name).parts
    return bool(name) and _SKIPPED.isdisjoint(parts) and not any(part.startswith(".") for part in parts)


def _untracked(root: Path) -> str:
    """The hash of Python and YAML files that git neither tracks nor ignores; empty without any."""
    listed = git_output(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *SOURCES) or ""
    names = [name for name in listed.split("\0") if is_source(name)]
    if not names:
        return ""
    told = hashlib.sha256()
    for name in sorted(names)[:MOST]:
        told.update(name.encode("utf-8", "surrogateescape") + b"\0")
        try:
            told.update(hashlib.sha256((root / name).read_bytes()).digest())
        except OSError:  # a link to nowhere
            told.update(b"unreadable")
    return told.hexdigest()


def git_output(root: Path, *command: str) -> str | None:
    """What git says; None where it says no, is not there, or takes too long."""
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=PATIENCE,
                              errors="surrogateescape", check=False, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
