"""Timed decisions: where a stopwatch decides what Inductor generates, so that two runs may have other strides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["autotunes", "pads_by_timing"]


def autotunes(settings: Mapping[str, Any]) -> bool:
    """Whether kernels are chosen by timing: by the mode, or by a setting of Inductor's (torch 2.8 to 2.15)."""
    if settings.get("backend", "inductor") != "inductor":
        return False
    from torch._inductor import config

    options = settings.get("options") or {}
    names = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
    return "max-autotune" in str(settings.get("mode")) or any(options.get(n, getattr(config, n, False)) for n in names)


def pads_by_timing(settings: Mapping[str, Any], devices: Collection[str]) -> bool:
    """Whether Inductor times if a matrix product is faster when it is padded.

    Only on GPUs, by ``should_pad_bench`` in torch/_inductor/fx_passes/pad_mm.py (torch 2.8 to 2.15), with the setting
    ``shape_padding``, which is on by default; ``force_shape_pad`` pads without asking. A kept graph from a compile
    cache holds what was timed when it was made.
    """
    if settings.get("backend", "inductor") != "inductor" or set(devices) <= {"cpu", "meta"}:
        return False
    from torch._inductor import config

    options = settings.get("options") or {}
    pads = options.get("shape_padding", getattr(config, "shape_padding", False))
    return bool(pads) and not options.get("force_shape_pad", getattr(config, "force_shape_pad", False))
