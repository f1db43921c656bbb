"""The repeated blocks of a model: what is checkpointed, compiled or sharded one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.layer.selective import inner_blocks

__all__ = ["compile_blocks", "repeated_blocks"]


def repeated_blocks(model: nn.Module, cell: Cell) -> list[nn.Module]:
    """Return the direct children of the model's outermost ``nn.ModuleList``\\ s, each once.

    Raises :class:`UsageError` with the rule to paste if the model has none.
    """
    blocks = list(inner_blocks(model))
    if not blocks:
        raise UsageError(
            f"wrapper {cell.wrapper!r} works on the children of an nn.ModuleList, and model {cell.model!r} "
            "has none; leave it out with a rule:\n"
            f"  - exclude: {{model: {cell.model}, wrapper: {cell.wrapper}}}\n"
            "    reason: the model has no repeated blocks"
        )
    return blocks


def compile_blocks(model: nn.Module, settings: dict[str, Any], cell: Cell) -> None:
    """Compile each repeated block in place; blocks of one class share their compiled code."""
    for block in repeated_blocks(model, cell):
        block.compile(**settings)
