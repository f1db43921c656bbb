"""Of a cell of the toolkit: what each pass did to each graph, and what each table of decompositions would change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from pytest_torchcompile.backends import TABLES
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.explain.explanation_records import PassChange
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["read_changes", "table_changes"]

_BEFORE: Final = ".before.py"


def read_changes(folder: Path) -> list[PassChange]:
    """What ``Toolkit(dump=folder)`` has written, in the order in which it was."""
    files = sorted(folder.glob(f"*{_BEFORE}"), key=lambda file: file.stat().st_mtime_ns)
    changes = []
    for file in files:
        stem = file.name.removesuffix(_BEFORE)
        after, diff = folder / f"{stem}.after.py", folder / f"{stem}.diff"
        changes.append(PassChange(stem, file.read_text(), after.read_text(), diff.read_text()))
    return changes


def table_changes(toolkit: Toolkit, run: Callable[[Toolkit], object]) -> dict[str, dict[str, int]]:
    """By how many each operator of a model becomes more or fewer with each table that has a name, and with its own.

    Args:
        toolkit: Of the cell.
        run: Compiles the model with a toolkit, and runs it.
    """
    names: list[object] = list(TABLES)
    if toolkit.decompositions not in (None, *TABLES):
        names.append(toolkit.decompositions)
    counts: dict[str, dict[str, int]] = {}
    for table in names:
        forget_compiled()
        bare = replace(toolkit.with_passes(0), decompositions=table, compiler="eager", dump=None)  # type: ignore[arg-type]
        run(bare)
        counts[str(table)] = bare.operators
    forget_compiled()
    plain = counts.pop("none")
    return {table: _difference(plain, found) for table, found in counts.items()}


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    changes = {}
    for name in sorted({*before, *after}):
        change = after.get(name, 0) - before.get(name, 0)
        if change:
            changes[name] = change
    return changes
