"""Dumps of graphs: the code of one before and after each pass, and what the pass changed, as files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["dump_change", "dump_graph"]


def dump_graph(module: Any) -> str:
    """A graph as readable code, after a line for each input and result that has a descriptor."""
    lines = [f"# {line}" for line in _described(module)]
    code: str = module.print_readable(print_output=False)
    return "\n".join([*lines, code, ""])


def _described(module: Any) -> Iterator[str]:
    """``primals_1 is self.get_parameter('a.weight')``, so that parameters can be told by their names."""
    for node in module.graph.nodes:
        descriptor = node.meta.get("desc")
        if node.op == "placeholder" and descriptor is not None:
            yield f"{node.name} is {_words_for(descriptor)}"
        if node.op == "output" and isinstance(descriptor, (list, tuple)) and node.args:
            for result, each in zip(node.args[0], descriptor, strict=False):
                if each is not None:
                    yield f"returns {result} as {_words_for(each)}"


def _words_for(descriptor: Any) -> str:
    return str(descriptor.expr()) if hasattr(descriptor, "expr") else str(descriptor)


def dump_change(folder: Path, graph: str, number: int, name: str, before: str, after: str) -> None:
    """Write three files: ``joint-1.2-fold.before.py``, ``.after.py``, and ``.diff``, empty if nothing was changed."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{graph}.{number}-{re.sub(r'[^A-Za-z0-9_.]+', '_', name)}"
    (folder / f"{stem}.before.py").write_text(before)
    (folder / f"{stem}.after.py").write_text(after)
    changes = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True),
                                   f"{stem}.before.py", f"{stem}.after.py")
    (folder / f"{stem}.diff").write_text("".join(changes))
