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

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.wrappers.protocol import Settings, Wrapper, in_order, shipped_wrapper

__all__ = ["TP", "split_layers"]

_SEQUENCE: Final = -2
"""The dimension of the sequence."""


def _wrap_split(model: nn.Module, settings: Settings | None, cell: Cell, mesh: Any) -> Callable[..., Any]:
    """Split the model's layers over the mesh, then compile the whole, or each repeated block."""
    def wrap(inner: nn.Module) -> nn.Module:
        return split_layers(inner, cell, mesh, eager=settings is None)

    return in_order(model, settings, cell, wrap)


def split_layers(model: nn.Module, cell: Cell, mesh: Any, eager: bool = False) -> nn.Module:
    """Split the layers that the model's ``tp_plan`` names, and return it.

    ``eager``: it is not compiled, so its layers may look at the sequences that they are given, and refuse one that the
    ranks do not divide. Eager runs first, and what is compiled shall hold the model alone.
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
    layers = {name: layer for name, layer in model.named_modules() if name}
    pattern_of = _match_patterns(plan, layers, styles, cell)
    for name, pattern in pattern_of.items():
        where = f"model {cell.model!r}: tp_plan[{pattern!r}]"
        _refuse_undivided(layers[name], plan[pattern], mesh.size(), where, name)
        if eager and plan[pattern] == "rowwise_sequence":
            layers[name].register_forward_pre_hook(_sequence_guard(mesh.size(), where, name))
    # A style for each layer: torch keeps in a ParallelStyle what it has learnt of its layer.
    chosen = {name: styles[plan[pattern]](layers[name]) for name, pattern in pattern_of.items()}
    parallelize_module(model, mesh, chosen)
    return model


def _match_patterns(plan: Mapping[Any, Any], layers: Mapping[str, nn.Module], styles: Collection[str],
                    cell: Cell) -> dict[str, str]:
    """Name of each layer that the plan names, to the pattern that does."""
    pattern_of: dict[str, str] = {}
    for pattern, style in plan.items():
        where = f"model {cell.model!r}: tp_plan[{pattern!r}]"
        if not isinstance(style, str) or style not in styles:
            raise UsageError(f"{where} is {style!r}, which is no style; {nearest(str(style), styles)}")
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(f"model {cell.model!r}: tp_plan names {pattern!r}, and no module is called so; "
                             f"{nearest(pattern, layers)}")
        for name in matching:
            if name in pattern_of:
                raise UsageError(f"model {cell.model!r}: tp_plan names {name} twice, by {pattern_of[name]!r} and by "
                                 f"{pattern!r}; a layer has one style")
            pattern_of[name] = pattern
            _refuse_other_class(layers[name], style, where, name)
    return pattern_of


def _refuse_other_class(layer: nn.Module, style: str, where: str, name: str) -> None:
    """Refuse a layer of a class that the style is not for."""
    wanted = "for an nn.Linear or an nn.Embedding"
    if style == "sequence":
        wanted = "for a layer that is whole on each rank, such as a norm"
    can_be_split = isinstance(layer, (nn.Linear, nn.Embedding))
    if can_be_split is (style == "sequence"):
        raise UsageError(f"{where} is {style!r}, {wanted}; {name} is a {type(layer).__name__}")


_SPLIT_FEATURE: Final = {
    (nn.Linear, "colwise"): "out_features",
    (nn.Linear, "colwise_sequence"): "out_features",
    (nn.Linear, "rowwise"): "in_features",
    (nn.Linear, "rowwise_sequence"): "in_features",
    (nn.Embedding, "colwise"): "embedding_dim",
    (nn.Embedding, "colwise_sequence"): "embedding_dim",
}
"""Class and style of a layer to the number that the ranks must divide. Others may be split into unequal parts."""


def _refuse_undivided(layer: nn.Module, style: str, ranks: int, where: str, name: str) -> None:
    """Refuse features that can't be split into parts of one size."""
    for (kind, split_style), feature in _SPLIT_FEATURE.items():
        if split_style != style or not isinstance(layer, kind):
            continue
        size = getattr(layer, feature)
        if size % ranks:
            raise UsageError(f"{where} is {style!r}, which splits {feature}={size} of {name} over {ranks} ranks, and "
                             f"they do not divide it; run the model on ranks that do ({_dividing_ranks(size)}), give "
                             f"it a size that is a multiple of {ranks}, or leave the layer out of the plan")


def _dividing_ranks(size: int) -> str:
    # No further than 64: larger groups have no place in one machine, which is where cells run.
    dividing = [str(ranks) for ranks in range(2, min(size, 64) + 1) if size % ranks == 0]
    if not dividing:
        return "none do"
    # Four numbers show the pattern; nobody has more ranks than the largest of them at hand.
    text = ", ".join(dividing[:4])
    if len(dividing) > 4:
        text += ", ..."
    return text


def _sequence_guard(ranks: int, where: str, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that refuses, before any collective, a sequence that can't be split into parts of one length."""

    def check_length(layer: nn.Module, given: tuple[Any, ...]) -> None:
        shape = given[0].shape
        if isinstance(layer, nn.Embedding):
            # It is given ids: the width, which comes after the sequence, is yet to be added.
            length = shape[-1]
        else:
            length = shape[_SEQUENCE]
        if length % ranks:
            raise UsageError(
                f"{where} is 'rowwise_sequence', which splits the sequence that {name} gives over {ranks} ranks, and "
                f"they do not divide its length {length} (input of shape {tuple(shape)}); have the matrix make lengths "
                f"that are multiples of {ranks}, by multiple_of: {ranks} or by choices of the dim that it comes from, "
                "or pad it in the model")

    return check_length


def _layer_styles() -> dict[str, Callable[[Any], Any]]:
    """Style to what makes torch's ``ParallelStyle`` of it for a layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def split_rows(layer: nn.Module, **outputs: Any) -> Any:
        layouts = None
        if isinstance(layer, nn.Embedding):
            # Its ids are whole on each rank, which is not what RowwiseParallel takes a layer's input for.
            layouts = Replicate()
        return RowwiseParallel(input_layouts=layouts, **outputs)

    return {
        "colwise": lambda layer: ColwiseParallel(),
        "rowwise": split_rows,
        "colwise_gather": lambda layer: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_sequence": lambda layer: split_rows(layer, output_layouts=Shard(_SEQUENCE)),
        "colwise_sequence": lambda layer: ColwiseParallel(input_layouts=Shard(_SEQUENCE)),
        "sequence": lambda layer: SequenceParallel(sequence_dim=_SEQUENCE),
    }


TP: Wrapper = shipped_wrapper("tp", _wrap_split)
