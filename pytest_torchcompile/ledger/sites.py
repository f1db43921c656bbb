"""Whose code is it? User names and lines for frames, from plain names and paths."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["code_owner", "is_torch", "raising_line", "read_code_name"]

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


def read_code_name(name: str) -> tuple[str, int]:
    """Name of a function as its author knows it, and the line where a resume function resumes (else 0).

    >>> read_code_name("torch_dynamo_resume_in_forward_at_17")
    ('forward', 17)
    >>> read_code_name("test_x.<locals>.Net.forward")
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


def code_owner(path: str, root: str | None = None) -> str:
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


_GRAPH_CODE: Final = "<eval_with_key>"
"""How the file of a graph's generated code begins (torch/fx/graph_module.py, torch 2.8 to 2.15)."""
_RESULT: Final = re.compile(r"\s*(\w+)\b[^=]*=")
"""``view_3`` of the line ``view_3 = torch.ops.aten.view.default(...)``: the name of the graph's node."""
_FRAME: Final = re.compile(r'^  File "(.+?)", line (\d+), in .+\n(.*)$', re.M)


def raising_line(error: BaseException | None, root: Path | None = None) -> tuple[str, int, str] | None:
    """File, line and source of the user's code whose operator raised in a graph; None where no graph tells.

    The traceback of a graph that ran has generated code alone. The graph's nodes know the user's stack
    (``meta["stack_trace"]``, torch 2.8 to 2.15). Files below ``root`` are named from there, as in the ledger.
    """
    found = None
    for graph, name in _graph_frames(error):
        trace = next((node.meta.get("stack_trace") for node in graph.graph.nodes if node.name == name), None)
        for file, line, source in _FRAME.findall(trace or ""):
            if code_owner(file, str(root) if root else None) in ("mine", "third_party"):
                found = file.removeprefix(f"{root or Path.cwd()}{os.sep}"), int(line), source.strip()
    return found


def _graph_frames(error: BaseException | None) -> Iterator[tuple[Any, str]]:
    """Graph modules that were running, the outermost first, each with the name of the node that raised."""
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        code, graph = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_filename.startswith(_GRAPH_CODE) and hasattr(graph, "graph"):
            match = _RESULT.match(linecache.getline(code.co_filename, trace.tb_lineno))
            if match:
                yield graph, match[1]
        trace = trace.tb_next
