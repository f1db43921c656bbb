"""Variables: which environment variables count for a cell. A value is never kept, only hashes.

All count, but those of terminals, shells and CI, and those that say where something is kept or shown. One of these
counts all the same if the project's code or data names it, or how its name begins (``JOB_``) or ends (``_TOKEN``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from pytest_torchcompile.reuse.definitions import SourceUse
from pytest_torchcompile.reuse.digests import digest_of, short_marks
from pytest_torchcompile.reuse.machine_facts import tools_of_path

__all__ = ["counted_variables", "environment_digest", "is_passing", "named_variables", "names_in_data",
           "variable_marks"]

PASSING: Final = re.compile(
    r"PWD|OLDPWD|SHLVL|_|TERM.*|COLORTERM|COLUMNS|LINES|LS_COLORS|LESS.*|PAGER|EDITOR|VISUAL|PS[0-9]|PROMPT.*|HIST.*|"
    r"SSH_.*|DISPLAY|WAYLAND.*|WINDOWID|TMUX.*|STY|DBUS_.*|XDG_(RUNTIME_DIR|SESSION_.*|SEAT|SEAT_PATH|VTNR|CURRENT_DESKTOP|MENU_PREFIX|GREETER_.*)|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_.*|HOSTNAME|"
    r"SHELL|PYTEST_.*|_PYTEST.*|COV_.*|TOX_.*|GIT_.*|NO_COLOR|FORCE_COLOR|PY_COLORS|"
    # Not CI itself, by which torch chooses other settings, nor where users keep caches and settings.
    r"CI_.*|GITHUB_.*|RUNNER_.*|ACTIONS_.*|GITLAB_.*|BUILDKITE.*|BUILD_.*|JOB_.*|CIRCLE.*|JENKINS.*|EXECUTOR_NUMBER|"
    r"KUBERNETES_.*|.*_TOKEN|.*_SECRET|ImageVersion|ImageOS|STATS_.*|AGENT_.*|DEPLOYMENT_.*|MANPATH|INFOPATH|MAIL|"
    # What Python prints and where it keeps bytecode; the path that an environment adds is looked at itself.
    r"PYTHON(DONTWRITEBYTECODE|PYCACHEPREFIX|UNBUFFERED|VERBOSE|INSPECT|STARTUP|FAULTHANDLER|PROFILEIMPORTTIME)|"
    r"VIRTUAL_ENV|VIRTUAL_ENV_PROMPT|CONDA_PROMPT_MODIFIER|PIP_.*|"
    # Where compiled code is kept: what is in a cache is what would be made again.
    r"TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|CUDA_CACHE_PATH|"
    r"CCACHE_(DIR|TEMPDIR|MAXSIZE|MAXFILES|LOGFILE|DEBUG|STATS.*|UMASK|NOCOMPRESS|COMPRESS.*|READONLY.*|RECACHE|DISABLE)"
)
"""Variables that are others in each run, or change no verdict."""
_PATH: Final = "PATH"
_LAST_PROGRAM: Final = "_"
"""A shell sets it to the program that it starts. It is also the name of what a loop does not need, so that it counts
only as a text, of code that reads variables."""
_READS_VARIABLES: Final = frozenset({"environ", "environb", "getenv"})


_NAME_IN_DATA: Final = re.compile(rb"[A-Z][A-Z0-9_]+")
_LARGEST_TEXT: Final = 1 << 20
"""Bytes of a file of data in which somebody may have written the name of a variable."""


def names_in_data(files: Iterable[Path]) -> frozenset[str]:
    """What may be a variable's name in files of data, such as ``${oc.env:JOB_SIZE}`` in one of settings."""
    names: set[str] = set()
    for file in files:
        # One that is gone is told as such.
        with contextlib.suppress(OSError):
            if file.stat().st_size <= _LARGEST_TEXT:
                names.update(name.decode() for name in _NAME_IN_DATA.findall(file.read_bytes()))
    return frozenset(names)


def is_passing(name: str) -> bool:
    """Is the variable one of those that change no verdict, if nothing names it?"""
    return PASSING.fullmatch(name) is not None


def named_variables(use: SourceUse) -> set[str]:
    """Every name and word of the project's code, which may be that of a variable."""
    named = use.texts | use.identifiers
    if _LAST_PROGRAM not in use.texts or _READS_VARIABLES.isdisjoint(use.identifiers):
        named -= {_LAST_PROGRAM}
    return set(named)


def counted_variables(variables: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """Those that count, with their values. ``named``: of :func:`named_variables`.

    ``PATH`` counts by the programs that are found in it, unless it is named.
    """
    counted = {}
    beginnings = tuple(word.upper() for word in named if word.endswith("_") and word.strip("_"))
    ends = tuple(word for word in named if word.startswith("_") and word.strip("_"))
    for name, value in variables.items():
        # Code may put a name together, or take all that begin so.
        if name in named or name.startswith(beginnings) or name.endswith(ends):
            counted[name] = value
        elif name == _PATH:
            for tool, file in tools_of_path(variables).items():
                counted[f"{tool} in PATH"] = file
        elif not is_passing(name):
            counted[name] = value
    return counted


def environment_digest(variables: Mapping[str, str], named: Collection[str]) -> str:
    """The hash of all variables that count."""
    return digest_of(counted_variables(variables, named))


def variable_marks(variables: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """For each variable that counts a mark by which it can be told that its value is another one."""
    return short_marks(counted_variables(variables, named))
