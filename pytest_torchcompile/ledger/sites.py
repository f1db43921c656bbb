"""Whose code is it? User names and lines for frames, from plain names and paths."""

from __future__ import annotations

import os
import re
import sysconfig
from typing import Final

__all__ = ["is_torch", "owner", "readable"]

_RESUME: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")  # resume_execution.py, 2.8-2.15
_TORCH: Final = re.compile(
    r"/(site|dist)-packages/(torch|functorch|torchgen|triton)/"
    r"|/torch/(_dynamo|_inductor|_functorch|_higher_order_ops|_refs|fx|nn/modules)/"  # a source build
)
_LIBRARIES: Final = tuple(
    {os.path.normpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")}
)


_HOME: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS: Final = ("ledger", "gauges", "state", "oracle", "layer", "run", "ranks")
"""Our rooms whose code calls models and watches them."""
_OURS: Final = tuple(os.path.join(_HOME, room) + os.sep for room in _ROOMS)


def readable(name: str) -> tuple[str, int]:
    """Name of a function as its author knows it, and the line where a resume function resumes (else 0).

    >>> readable("torch_dynamo_resume_in_forward_at_17")
    ('forward', 17)
    >>> readable("test_x.<locals>.Net.forward")
    ('Net.forward', 0)
    """
    short = name.rsplit("<locals>.", 1)[-1]
    match = _RESUME.search(short)
    return (match[1], int(match[2])) if match else (short, 0)


def _installed(path: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.replace("\\", "/").split("/"))


def is_torch(path: str) -> bool:
    """Whether a file belongs to torch itself (or to the compilers that it ships)."""
    return bool(_TORCH.search(path.replace("\\", "/")))


def owner(path: str, root: str | None = None) -> str:
    """``mine``, ``third_party``, ``python``, ``torch`` or ``ours``. ``root``: the project's (default: the current).

    ``python`` is the standard library: nobody's to change. ``ours`` are the frames of this package that call models and
    watch them: never the user's, wherever it is installed. A file that is none of these is ``mine`` too, also
    outside the root: test files live in temporary folders, and source given as ``<string>`` has no folder.
    """
    if is_torch(path):
        return "torch"
    full = os.path.normpath(path)
    if full.startswith(_OURS):
        return "ours"
    if _installed(full):
        return "third_party"
    base = os.path.normpath(root or os.getcwd()) + os.sep
    if full.startswith(base) and base.startswith(_LIBRARIES):  # a project inside of an environment's folder
        return "mine"
    return "python" if full.startswith(_LIBRARIES) or path.startswith("<frozen ") else "mine"
