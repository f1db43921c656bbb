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

The sequence is the dimension before the last: rows of (rows, width), S of (B, S, width). The ranks must divide it, and
what ``colwise`` and ``rowwise`` split: torch takes all parts to be of one size, and where they are not, an operator
fails on shapes that nobody has written, or the transport aborts the process. What ``colwise_gather`` splits, and the
rows of an embedding, may be any number.
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

__all__ = ["TP", "split_layers", "wrap"]

_SEQUENCE: Final = -2


def wrap(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Split the model's layers over the mesh, then compile the whole, or each repeated block."""
    return in_order(model, settings, cell, lambda inner: split_layers(inner, cell, mesh, eager=settings is None))


def split_layers(model: nn.Module, cell: Cell, mesh: Any, eager: bool = False) -> nn.Module:
    """Split the layers that the model's ``tp_plan`` names, and return it.

    ``eager``: it is not compiled, so that its layers may look at the sequences that they are given, and refuse one that
    the ranks do not divide. (Eager runs first, and what is compiled shall hold the model alone.)
    Raises :class:`UsageError` for a plan that does not fit, or sizes that the ranks do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            f"wrapper {cell.wrapper!r} splits the layers that the model's attribute tp_plan names, and model "
            f"{cell.model!r} has none; give it one, such as\n"
            '    tp_plan = {"blocks.*.widen": "colwise", "blocks.*.narrow": "rowwise"}')
    styles = _layer_styles()
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
    for name, pattern in taken.items():
        _check_divided(parts[name], plan[pattern], mesh.size(), f"model {cell.model!r}: tp_plan[{pattern!r}]", name)
        if eager and plan[pattern] == "rowwise_sequence":
            parts[name].register_forward_pre_hook(_sequence_divided(
                mesh.size(), f"model {cell.model!r}: tp_plan[{pattern!r}]", name))
    parallelize_module(model, mesh, {name: styles[plan[pattern]](parts[name]) for name, pattern in taken.items()})
    return model


def _check_divided(layer: Any, style: str, ranks: int, where: str, name: str) -> None:
    """Refuse features that can't be split into parts of one size."""
    linear = isinstance(layer, nn.Linear)
    feature = {"colwise": "out_features" if linear else "embedding_dim",
               "colwise_sequence": "out_features" if linear else "embedding_dim",
               "rowwise": "in_features" if linear else "",
               "rowwise_sequence": "in_features" if linear else ""}.get(style)
    if feature and (size := getattr(layer, feature)) % ranks:
        raise UsageError(f"{where} is {style!r}, which splits {feature}={size} of {name} over {ranks} ranks, and they "
                         f"do not divide it; run the model on ranks that do ({_dividing(size)}), give it a size that "
                         f"is a multiple of {ranks}, or leave the layer out of the plan")


def _dividing(size: int) -> str:
    some = [str(ranks) for ranks in range(2, min(size, 64) + 1) if size % ranks == 0]
    return ", ".join(some[:4]) + (", ..." if some[4:] else "") if some else "none do"


def _sequence_divided(ranks: int, where: str, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that refuses, before any collective, a sequence that can't be split into parts of one length."""

    def check(layer: nn.Module, given: tuple[Any, ...]) -> None:
        shape = given[0].shape
        length = shape[-1] if isinstance(layer, nn.Embedding) else shape[_SEQUENCE]
        if length % ranks:
            raise UsageError(
                f"{where} is 'rowwise_sequence', which splits the sequence that {name} gives over {ranks} ranks, and "
                f"they do not divide its length {length} (input of shape {tuple(shape)}); have the matrix make lengths "
                f"that are multiples of {ranks}, by multiple_of: {ranks} or by choices of the dim that it comes from, "
                "or pad it in the model")

    return check


def _layer_styles() -> dict[str, Callable[[Any], Any]]:
    """Style to what makes it for a layer; a ``ParallelStyle`` is of one layer. An embedding's ids are whole on each
    rank, which is not what ``RowwiseParallel`` takes a layer's input for."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def rowwise(layer: nn.Module, **outputs: Any) -> Any:
        return RowwiseParallel(input_layouts=Replicate() if isinstance(layer, nn.Embedding) else None, **outputs)

    return {
        "colwise": lambda layer: ColwiseParallel(),
        "rowwise": rowwise,
        "colwise_gather": lambda layer: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_sequence": lambda layer: rowwise(layer, output_layouts=Shard(_SEQUENCE)),
        "colwise_sequence": lambda layer: ColwiseParallel(input_layouts=Shard(_SEQUENCE)),
        "sequence": lambda layer: SequenceParallel(sequence_dim=_SEQUENCE),
    }


TP = Wrapper("tp", wrap, ranks=2, axes=("tensor",))
