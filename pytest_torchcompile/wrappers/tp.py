"""tp: tensor parallel. Single linear layers are split over the ranks, which work on one batch together.

Which ones and how is the model's to say, by an attribute ``tp_plan``::

    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}

Its styles are those of ``torch.distributed.tensor.parallel``:

``colwise``
    splits a layer's outputs.
``rowwise``
    splits the inputs of the layer that they go to, whose results are added up.
``colwise_gather``
    splits a layer's outputs and puts them together again.

and those of sequence parallel, where each rank has a part of the sequence between the layers that are split:

``rowwise_sequence``
    ``rowwise``, and each rank keeps its part of the sequence of what was added up.
``colwise_sequence``
    ``colwise`` for a layer whose input is such a part: the whole is gathered first.
``sequence``
    for a layer between those two, such as a norm, which is whole on each rank and works on a part.

The sequence is the dimension before the last: rows of (rows, width), S of (B, S, width). The ranks must divide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.wrappers.order import in_order
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper

__all__ = ["TP", "split", "wrap"]

_SEQUENCE: Final = -2


def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Split the model's layers over the mesh, then compile the whole, or each repeated block."""
    return in_order(model, settings, cell, lambda inner: split(inner, cell, mesh))


def split(model: nn.Module, cell: Cell, mesh: Any) -> nn.Module:
    """Split the layers that the model's ``tp_plan`` names, and return it.

    Raises :class:`UsageError` for a plan that does not fit.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"wrapper {cell.wrapper!r} splits the layers that the model's attribute tp_plan names, and model "
            f"{cell.model!r} has none; give it one, such as\n"
            '    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}')
    styles = _styles()
    parts = {name: part for name, part in model.named_modules() if name}
    names, taken = list(parts), dict[str, str]()
    for pattern, style in plan.items():
        if not isinstance(style, str) or style not in styles:
            raise UsageError(f"model {cell.model!r}: tp_plan[{pattern!r}] is {style!r}, which is no style; "
                             f"{nearest(str(style), styles)}")
        chosen = [name for name in names if fnmatchcase(name, pattern)]
        if not chosen:
            raise UsageError(f"model {cell.model!r}: tp_plan names {pattern!r}, and no module is called so; "
                             f"{nearest(pattern, names)}")
        for name in chosen:
            if name in taken:
                raise UsageError(f"model {cell.model!r}: tp_plan names {name} twice, by {taken[name]!r} and by "
                                 f"{pattern!r}; a layer has one style")
            taken[name] = pattern
            if isinstance(parts[name], (nn.Linear, nn.Embedding)) is (style == "sequence"):
                wanted = "for a layer that is whole on each rank, such as a norm" if style == "sequence" else \
                    "for an nn.Linear or an nn.Embedding"
                raise UsageError(f"model {cell.model!r}: tp_plan[{pattern!r}] is {style!r}, {wanted}; {name} is a "
                                 f"{type(parts[name]).__name__}")
    parallelize_module(model, mesh, {name: styles[plan[pattern]]() for name, pattern in taken.items()})
    return model


def _styles() -> dict[str, Callable[[], Any]]:
    """Style to what makes it; a ``ParallelStyle`` is of one layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_sequence": lambda: RowwiseParallel(output_layouts=Shard(_SEQUENCE)),
        "colwise_sequence": lambda: ColwiseParallel(input_layouts=Shard(_SEQUENCE)),
        "sequence": lambda: SequenceParallel(sequence_dim=_SEQUENCE),
    }


TP = Wrapper("tp", wrap, ranks=2, axes=("tensor",))
