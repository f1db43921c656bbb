"""tp: tensor parallel. Single linear layers are split over the ranks, which work on one batch together.

Which ones and how is the model's to say, by an attribute ``tp_plan``::

    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}

The styles (:data:`STYLES`) are those of ``torch.distributed.tensor.parallel``. Those of sequence parallel leave each rank
a part of the sequence between the layers, which is a tensor's dimension before the last: rows of (rows, width), and S of
(B, S, width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.wrappers.blocks import compile_blocks
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["STYLES", "TP", "split", "wrap"]

STYLES: Final[dict[str, str]] = {
    "colwise": "splits a layer's outputs",
    "rowwise": "splits the inputs of the layer that they go to, whose results are added up",
    "colwise_gather": "splits a layer's outputs and puts them together again",
    "colwise_sequence": "colwise for a layer whose input is a part of the sequence: the parts are gathered first",
    "rowwise_sequence": "rowwise whose results are added up and scattered: each rank keeps its part of the sequence",
    "sequence": "a layer between those two, such as a norm, whole on each rank, that works on a part of the sequence",
}
"""Style of a ``tp_plan`` to what it does."""
_SEQUENCE: Final = -2


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
    from torch.distributed.tensor.parallel import parallelize_module

    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"wrapper {cell.wrapper!r} splits the layers that the model's attribute tp_plan names, and model "
            f"{cell.model!r} has none; give it one, such as\n"
            '    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}')
    names = [name for name, _ in model.named_modules() if name]
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UsageError(f"model {cell.model!r}: tp_plan[{pattern!r}] is {style!r}, which is no style; "
                             f"{nearest(str(style), STYLES)}")
        chosen = [name for name in names if fnmatchcase(name, pattern)]
        if not chosen:
            raise UsageError(f"model {cell.model!r}: tp_plan names {pattern!r}, and no module is called so; "
                             f"{nearest(pattern, names)}")
        parallelize_module(model, mesh, {name: _style(style) for name in chosen})


def _style(name: str) -> Any:
    """A ``ParallelStyle`` of torch, for one layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    made: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_sequence": lambda: ColwiseParallel(input_layouts=Shard(_SEQUENCE)),
        "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(_SEQUENCE)),
        "sequence": lambda: SequenceParallel(sequence_dim=_SEQUENCE),
    }
    return made[name]()


TP = Wrapper("tp", wrap, ranks=2, axes=("tensor",))
