"""Which products torch was allowed to compute in less than the dtype of their inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_torchcompile.oracle.units import FLOAT32_UNIT

__all__ = ["input_units"]

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "_addmm_activation")
_CONVOLUTIONS = ("convolution", "convolution_backward", "cudnn_convolution", "cudnn_convolution_transpose")
_TF32_UNIT = 2.0**-11
_BFLOAT16_UNIT = 2.0**-8


def input_units(tensors: Iterable[torch.Tensor], unit: float) -> dict[str, float]:
    """Operator name to the unit its inputs are rounded to first: TF32, bfloat16 products, reduced-precision
    sums.

    Read from torch's present settings and from the device of the model; empty for float64.
    """
    devices = {t.device.type for t in tensors}
    if unit < FLOAT32_UNIT:
        return {}
    units: dict[str, float] = {}
    if "cuda" in devices:
        if unit > FLOAT32_UNIT and _reduced_sums():
            # split-K kernels add partial sums that are rounded to the dtype of the result
            units |= dict.fromkeys(_PRODUCTS, unit)
        elif _tf32(torch.backends.cuda.matmul):
            units |= dict.fromkeys(_PRODUCTS, _TF32_UNIT)
        if _tf32(torch.backends.cudnn):
            units |= dict.fromkeys(_CONVOLUTIONS, _TF32_UNIT)
    elif torch.get_float32_matmul_precision() == "medium":
        # oneDNN multiplies float32 in bfloat16 where the processor can
        units |= dict.fromkeys(_PRODUCTS, _BFLOAT16_UNIT)
    return units


def _tf32(settings: object) -> bool:
    """Whether float32 products may be TF32; torch raises where both of its interfaces were used."""
    try:
        return bool(getattr(settings, "allow_tf32", False))
    except RuntimeError:
        return True


def _reduced_sums() -> bool:
    matmul = torch.backends.cuda.matmul
    return bool(
        getattr(matmul, "allow_bf16_reduced_precision_reduction", True)
        or getattr(matmul, "allow_fp16_reduced_precision_reduction", True)
    )
