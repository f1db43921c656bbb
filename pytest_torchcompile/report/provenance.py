"""Where a report comes from: our version, the commit, and what CI says of itself, by an allow-list. Never a secret."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["CI_VARIABLES", "provenance"]

CI_VARIABLES: Final = (
    "GITHUB_REPOSITORY", "GITHUB_WORKFLOW", "GITHUB_JOB", "GITHUB_RUN_ID", "GITHUB_RUN_NUMBER", "GITHUB_RUN_ATTEMPT",
    "GITHUB_EVENT_NAME", "GITHUB_REF_NAME", "GITHUB_SHA", "RUNNER_OS", "RUNNER_ARCH",
    "CI_PROJECT_PATH", "CI_PIPELINE_ID", "CI_JOB_ID", "CI_JOB_NAME", "CI_COMMIT_SHA", "CI_COMMIT_REF_NAME",
    "BUILD_NUMBER", "JOB_NAME", "BUILDKITE_BUILD_NUMBER", "BUILDKITE_PIPELINE_SLUG", "CIRCLE_BUILD_NUM", "CIRCLE_JOB",
)
"""The only environment variables that a report holds: names and numbers of runs, which CI systems set themselves."""
LONGEST: Final = 200
PATIENCE: Final = 10.0


def provenance(root: Path, variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The block ``run``, without its times: version of this package, commit of ``root``, variables of CI."""
    from pytest_torchcompile import __version__

    return {
        "plugin": __version__,
        "git": _git(root),
        "ci": {name: variables[name][:LONGEST] for name in CI_VARIABLES if variables.get(name)},
    }


def _git(root: Path) -> dict[str, Any] | None:
    """The commit that is checked out, whether tracked files differ from it and how, and where ``root`` lies in it.

    None where there is no git. Of the difference only a hash is kept: it tells two edits apart, and nothing else.
    """
    commit = _output(root, "rev-parse", "HEAD")
    if commit is None or not re.fullmatch("[0-9a-f]{40,64}", commit):
        return None
    changes = _output(root, "status", "--porcelain", "--untracked-files=no")
    difference = _output(root, "diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD") if changes else ""
    told = hashlib.sha256(difference.encode("utf-8", "surrogateescape")).hexdigest() if difference else ""
    return {"commit": commit, "changed": changes != "", "diff_sha256": told,
            "prefix": _output(root, "rev-parse", "--show-prefix") or ""}


def _output(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=PATIENCE,
                              errors="surrogateescape", check=False, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
