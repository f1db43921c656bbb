"""Whose code is it? User names and lines for frames, from plain names and paths."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["CodeName", "code_owner", "is_torch", "raising_line", "read_code_name"]

_RESUME: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
"""Dynamo's name for the rest of a function after a graph break (resume_execution.py, torch 2.8 to 2.15)."""
_TORCH: Final = re.compile(
    r"/(site|dist)-packages/(torch|functorch|torchgen|triton)/"
    # A build from source is not below site-packages. These folders are torch's alone; torch/ may be a user's.
    r"|/torch/(_dynamo|_inductor|_functorch|_higher_order_ops|_refs|fx|nn/modules)/"
)
_LIBRARIES: Final = tuple(
    {os.path.normpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")}
)

_HOME: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOMS: Final = ("ledger", "gauges", "state", "oracle", "layer", "run", "ranks")
"""Our rooms whose code calls models and watches them. A frame of theirs was once told as the caller of a break."""
_OURS: Final = tuple(os.path.join(_HOME, room) + os.sep for room in _ROOMS)


class CodeName(NamedTuple):
    """The name of a code object, taken apart."""

    function: str
    """As its author knows it."""
    resumed_at: int
    """For a resume function the line of the graph break; else 0."""


def read_code_name(name: str) -> CodeName:
    """Take the name of a code object apart.

    >>> read_code_name("torch_dynamo_resume_in_forward_at_17")
    CodeName(function='forward', resumed_at=17)
    >>> read_code_name("test_x.<locals>.Net.forward").function
    'Net.forward'
    """
    short = name.rsplit("<locals>.", 1)[-1]
    match = _RESUME.search(short)
    return CodeName(match[1], int(match[2])) if match else CodeName(short, 0)


def _is_installed(path: str) -> bool:
    folders = path.replace("\\", "/").split("/")
    return "site-packages" in folders or "dist-packages" in folders


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
    # Before the installed packages: ours is one of them.
    if full.startswith(_OURS):
        return "ours"
    if _is_installed(full):
        return "third_party"
    base = os.path.normpath(root or os.getcwd()) + os.sep
    # A project may lie inside of an environment's folder, and an environment inside of the project, as conda makes it.
    # The former is the user's; of the latter the library folder is Python's.
    if full.startswith(base) and base.startswith(_LIBRARIES):
        return "mine"
    if full.startswith(_LIBRARIES) or path.startswith("<frozen "):
        return "python"
    return "mine"


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
    project = str(root) if root else None
    innermost = None
    for graph, name in _graph_frames(error):
        for file, line, source in _FRAME.findall(_node_stack(graph, name)):
            if code_owner(file, project) in ("mine", "third_party"):
                innermost = file, int(line), source.strip()
    if innermost is None:
        return None
    file, number, source = innermost
    return file.removeprefix(f"{root or Path.cwd()}{os.sep}"), number, source


def _node_stack(graph: Any, name: str) -> str:
    """The user's stack that a graph's node was traced from; empty where none was noted."""
    for node in graph.graph.nodes:
        if node.name == name:
            return node.meta.get("stack_trace") or ""
    return ""


def _graph_frames(error: BaseException | None) -> Iterator[tuple[Any, str]]:
    """Graph modules that were running, the outermost first, each with the name of the node that raised."""
    if error is None:
        return
    trace = error.__traceback__
    while trace is not None:
        code, graph = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_filename.startswith(_GRAPH_CODE) and hasattr(graph, "graph"):
            # torch.fx puts the generated source into linecache, or there would be no line to read.
            match = _RESULT.match(linecache.getline(code.co_filename, trace.tb_lineno))
            if match:
                yield graph, match[1]
        trace = trace.tb_next
