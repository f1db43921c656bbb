"""tp: tensor parallel. Single linear layers are split over the ranks, which work on one batch together.

Which ones and how is the model's to say, by an attribute ``tp_plan``::

    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}

``colwise`` splits a layer's outputs, and ``rowwise`` the inputs of the layer that they go to, whose results are added
up. ``colwise_gather`` splits a layer's outputs and puts them together again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.wrappers.blocks import compile_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["TP", "split", "wrap"]

def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Split the model's layers over the mesh, then compile the whole, or each repeated block."""
    split(model, cell, mesh)
    if settings is None:
        return model
    if Wrapping.read(cell.wrapper).order == "inner_blocks":
        compile_blocks(model, settings, cell)
        return model
    return torch.compile(model, **settings)


def split(model: nn.Module, cell: Cell, mesh: Any) -> None:
    """Split the layers that the model's ``tp_plan`` names. Raises :class:`UsageError` for a plan that does not fit."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"wrapper {cell.wrapper!r} splits the layers that the model's attribute tp_plan names, and model "
            f"{cell.model!r} has none; give it one, such as\n"
            '    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}')
    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel, "rowwise": RowwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if style not in styles:
            raise UsageError(f"model {cell.model!r}: tp_plan[{pattern!r}] is {style!r}, which is no style; "
                             f"{nearest(str(style), styles)}")
        chosen = [name for name in names if fnmatchcase(name, pattern)]
        if not chosen:
            raise UsageError(f"model {cell.model!r}: tp_plan names {pattern!r}, and no module is called so; "
                             f"{nearest(pattern, names)}")
        parallelize_module(model, mesh, {name: styles[style]() for name in chosen})


TP = Wrapper("tp", wrap, ranks=2, axes=("tensor",))
