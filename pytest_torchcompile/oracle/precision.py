"""Which products torch may compute in less than the dtype of their inputs: TF32, bfloat16, rounded partial sums."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_torchcompile.oracle.units import FLOAT32_UNIT, unit_of

__all__ = ["input_units"]

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "_addmm_activation")
_CONVOLUTIONS = ("convolution", "convolution_backward", "cudnn_convolution", "cudnn_convolution_transpose")
_RECURRENT = ("_cudnn_rnn", "_cudnn_rnn_backward")
_UNITS = {"tf32": 2.0**-11, "bf16": unit_of(torch.bfloat16)}


def input_units(tensors: Iterable[torch.Tensor], unit: float) -> dict[str, float]:
    """Operator name to the unit that its inputs are rounded to first, from torch's settings and the devices.

    Empty where products are exact up to their accumulation, and for float64.
    """
    devices = {t.device.type for t in tensors}
    if unit < FLOAT32_UNIT:
        return {}
    units: dict[str, float] = {}
    if "cuda" in devices:
        if unit > FLOAT32_UNIT and _reduced_sums():
            # split-K kernels add partial sums that are rounded to the dtype of the result
            units |= dict.fromkeys(_PRODUCTS, unit)
        elif (products := _UNITS.get(_cuda_products())) is not None:
            units |= dict.fromkeys(_PRODUCTS, products)
        for names, part in ((_CONVOLUTIONS, "conv"), (_RECURRENT, "rnn")):
            if (cudnn := _UNITS.get(_cudnn(part))) is not None:
                units |= dict.fromkeys(names, cudnn)
    elif "cpu" in devices and (products := _UNITS.get(_onednn_products())) is not None:
        units |= dict.fromkeys(_PRODUCTS, products)
    return units


# torch 2.9 has `fp32_precision` beside the older flags; once somebody has used both, reading an older one raises.


def _cuda_products() -> str:
    settings = torch.backends.cuda.matmul
    if hasattr(torch.backends, "fp32_precision"):
        return str(settings.fp32_precision)
    return "tf32" if settings.allow_tf32 else "ieee"


def _cudnn(part: str) -> str:
    settings = getattr(torch.backends.cudnn, part, None)
    if settings is not None and hasattr(torch.backends, "fp32_precision"):
        return str(settings.fp32_precision)
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


def _onednn_products() -> str:
    if hasattr(torch.backends, "fp32_precision"):
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined, unused-ignore]
    return {"medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")


def _reduced_sums() -> bool:
    matmul = torch.backends.cuda.matmul
    return bool(
        getattr(matmul, "allow_bf16_reduced_precision_reduction", True)
        or getattr(matmul, "allow_fp16_reduced_precision_reduction", True)
    )
