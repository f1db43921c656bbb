"""Wide operators: what runs in a wide dtype in place of operators that have no kernel there, or a slow one.

To add one: a function of the operator's own arguments, and its name here and in ``EMULATED`` of operator_rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["wide_version"]


def _grouped_mm(
    one: torch.Tensor, other: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``aten::_grouped_mm`` (torch 2.8 to 2.15), the products of a mixture of experts: not in float64.

    ``offs`` are the ends of the groups, along the axis that only matrices (and no batch of them) have: rows of the
    first, columns of the second, or the axis that is summed over where both are matrices.
    """
    if offs is None:
        product = torch.bmm(one, other)
    else:
        ends = offs.tolist()
        product = _products_of_groups(one, other, list(zip([0, *ends], ends, strict=False)))
    if bias is None:
        return product
    return product + bias


def _products_of_groups(one: torch.Tensor, other: torch.Tensor, groups: list[tuple[int, int]]) -> torch.Tensor:
    if one.ndim == 2 and other.ndim == 2:
        return torch.stack([one[:, start:end] @ other[start:end] for start, end in groups])
    if one.ndim == 2:
        product = one.new_zeros(one.shape[0], other.shape[-1])
        for number, (start, end) in enumerate(groups):
            product[start:end] = one[start:end] @ other[number]
        return product
    product = one.new_zeros(one.shape[-2], other.shape[-1])
    for number, (start, end) in enumerate(groups):
        product[:, start:end] = one[number] @ other[:, start:end]
    return product


def _convolution(*args: Any) -> torch.Tensor:
    """``aten::convolution`` with its channels before rows and columns, and the result laid out as it would be."""
    result: torch.Tensor = _laid_out_as(args[:2], torch.ops.aten.convolution.default(*_channels_first(args)))
    return result


def _convolution_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """``aten::convolution_backward``, likewise."""
    for_input, for_weight, for_bias = torch.ops.aten.convolution_backward.default(*_channels_first(args))
    factors = args[1:3]
    return _laid_out_as(factors, for_input), _laid_out_as(factors, for_weight), for_bias


def _channels_first(args: Sequence[Any]) -> list[Any]:
    """The arguments; images on a CPU whose channels are last are copied.

    There torch's convolutions of float64 go through the groups one by one, and take six times as long.
    """
    return [argument.contiguous() if _has_channels_last(argument) else argument for argument in args]


def _has_channels_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return False
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def _laid_out_as(factors: Sequence[Any], result: Any) -> Any:
    """With its channels last where one of the two factors has them there, as torch does."""
    if result is not None and any(map(_has_channels_last, factors)):
        return result.contiguous(memory_format=torch.channels_last)
    return result


_VERSIONS: Final[dict[str, Callable[..., Any]]] = {
    "_grouped_mm": _grouped_mm, "convolution": _convolution, "convolution_backward": _convolution_backward,
}


def wide_version(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of an operator in a wide run, by its name without the namespace: most often itself."""
    return _VERSIONS.get(name, operator)
