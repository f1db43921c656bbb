"""The user's line that an operator of a compiled graph comes from, where that operator raised."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.ledger.sites import owner

__all__ = ["raising_line"]

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
            if owner(file, str(root) if root else None) in ("mine", "third_party"):
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
