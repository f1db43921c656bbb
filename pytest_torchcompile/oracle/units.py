"""Unit roundoffs: the largest relative error of one rounding to a dtype. And which products torch may compute in less
than the dtype of their inputs: TF32, bfloat16, rounded partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["FLOAT32_UNIT", "input_units", "narrowest_unit", "program_unit", "unit_of", "wide_dtype"]

FLOAT32_UNIT = 2.0**-24
"""The unit of float32, in which kernels accumulate sums of float32, bfloat16 and float16."""


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number: 2**-24 for float32, 2**-8 for bfloat16.

    A complex dtype has the unit of its parts.
    """
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.finfo(dtype).eps / 2


def narrowest_unit(tensors: Iterable[torch.Tensor]) -> float | None:
    """The largest unit among floating and complex tensors; ``None`` where there is none."""
    units = [unit_of(t.dtype) for t in tensors if t.is_floating_point() or t.is_complex()]
    return max(units, default=None)


def program_unit(tensors: Iterable[torch.Tensor], seen: float | None) -> float:
    """The unit that a program works with: the largest of its tensors' and of what its operators were ``seen`` to round
    to; the default dtype's where nothing is known."""
    units = [unit for unit in (narrowest_unit(tensors), seen) if unit is not None]
    return max(units, default=unit_of(torch.get_default_dtype()))


def wide_dtype(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """``wide`` for a floating dtype, its complex dtype for a complex one, others as they are."""
    if dtype.is_floating_point:
        return wide
    if dtype.is_complex:
        return wide.to_complex()
    return dtype


_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "_addmm_activation")
_CONVOLUTIONS = ("convolution", "convolution_backward", "cudnn_convolution", "cudnn_convolution_transpose")
_RECURRENT = ("_cudnn_rnn", "_cudnn_rnn_backward")
# By torch's name of a precision; one that is not here rounds no inputs.
_UNITS = {"tf32": 2.0**-11, "bf16": unit_of(torch.bfloat16)}


def input_units(tensors: Iterable[torch.Tensor], unit: float) -> dict[str, float]:
    """Operator name to the unit that its inputs are rounded to first, from torch's settings and the devices.

    Empty where products are exact up to their accumulation, and for float64.
    """
    devices = {t.device.type for t in tensors}
    if unit < FLOAT32_UNIT:
        return {}
    if "cuda" in devices:
        return _cuda_units(unit)
    if "cpu" in devices and (products := _UNITS.get(_onednn_products())) is not None:
        return dict.fromkeys(_PRODUCTS, products)
    return {}


def _cuda_units(unit: float) -> dict[str, float]:
    units: dict[str, float] = {}
    if unit > FLOAT32_UNIT and _rounds_partial_sums():
        # split-K kernels add partial sums that are rounded to the dtype of the result
        units |= dict.fromkeys(_PRODUCTS, unit)
    elif (products := _UNITS.get(_cuda_products())) is not None:
        units |= dict.fromkeys(_PRODUCTS, products)
    for names, part in ((_CONVOLUTIONS, "conv"), (_RECURRENT, "rnn")):
        if (cudnn := _UNITS.get(_cudnn_precision(part))) is not None:
            units |= dict.fromkeys(names, cudnn)
    return units


# torch 2.9 has `fp32_precision` beside the older flags; once somebody has used both, reading an older one raises.


def _cuda_products() -> str:
    settings = torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        return str(settings.fp32_precision)
    return "tf32" if settings.allow_tf32 else "ieee"


def _cudnn_precision(part: str) -> str:
    settings = getattr(torch.backends.cudnn, part, None)
    if settings is not None and hasattr(torch.backends, "fp32_precision"):
        return str(settings.fp32_precision)
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _onednn_products() -> str:
    if hasattr(torch.backends, "fp32_precision"):
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined, unused-ignore]
    return {"medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")


def _rounds_partial_sums() -> bool:
    matmul = torch.backends.cuda.matmul
    # A torch without the flags rounds them.
    return bool(
        getattr(matmul, "allow_bf16_reduced_precision_reduction", True)
        or getattr(matmul, "allow_fp16_reduced_precision_reduction", True)
    )
