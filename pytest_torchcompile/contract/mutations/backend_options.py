"""backend_options: an option of Inductor around the call; the space is that of torch's own ConfigFuzzer."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def backend_options(choice: str, device: str) -> Any:
    """``epilogue_fusion=False``, around the forward; other backends don't read it."""
    name, _, value = choice.partition("=")
    known = torch._inductor.config.get_config_copy()
    return torch._inductor.config.patch({name: value == "True"} if name in known else {})


_OPTIONS = (
    "allow_buffer_reuse=False", "inplace_buffers=False", "epilogue_fusion=False", "prologue_fusion=False",
    "pattern_matcher=False", "joint_graph_constant_folding=False", "loop_ordering_after_fusion=False",
    "split_reductions=False", "pick_loop_orders=False", "reorder_for_locality=False", "reorder_for_peak_memory=False",
    "comprehensive_padding=False", "layout_optimization=False", "conv_1x1_as_mm=True", "permute_fusion=True",
    "memory_planning=True", "graph_partition=False", "cpp.enable_loop_tail_vec=False",
    "cpp.enable_tiling_heuristics=False", "cpp.no_redundant_loops=False", "cpp.weight_prepack=False",
    "cpp.fallback_scatter_reduce_sum=False", "emulate_precision_casts=True",
)  # fmt: skip
"""Of the flags that ConfigFuzzer switches those that promise the same results; each as it is not by default."""


def _choices(module: Any, batch: Any) -> list[str]:
    return list(_OPTIONS)


MUTATION = Mutation("backend_options", "an option of Inductor around the call", "around", _choices, backend_options)
