"""What the noise model has to know about an operator: does it round, does it add up, how many terms?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

__all__ = ["APPROXIMATED", "PRODUCTS", "Operator", "operator", "terms"]

PRODUCTS = frozenset({"addmm", "addmv", "baddbmm", "bmm", "mm", "mv"})
"""Matrix products, each linear in two tensors."""

APPROXIMATED = frozenset({"celu", "elu", "erf", "erfc", "erfinv", "gelu", "gelu_backward", "selu"})
"""Functions that kernels approximate to an absolute error: near their zeros that is far more than one rounding.

Not expm1 and log1p, which are there to be right near zero."""

# Operators that only move, choose or count values: what they return is one of their inputs, exactly.
_EXACT = frozenset({
    "_to_copy", "_unsafe_index", "_unsafe_view", "abs", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "alias", "amax", "amin", "arange", "argmax", "argmin", "bernoulli", "cat", "ceil", "clamp",
    "clamp_max", "clamp_min", "clone", "complex", "constant_pad_nd", "copy", "copysign", "cummax",
    "cummin", "detach", "diagonal_copy", "embedding", "empty", "empty_like", "empty_permuted",
    "empty_strided", "expand_copy", "eye", "fill", "flip", "floor", "fmax", "fmin", "full", "full_like",
    "gather", "index", "index_copy", "index_select", "kthvalue", "lift", "lift_fresh", "lift_fresh_copy",
    "masked_fill", "masked_scatter", "masked_select", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "mode", "multinomial", "nan_to_num",
    "neg", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal", "ones",
    "ones_like", "permute_copy", "pixel_shuffle", "pixel_unshuffle", "rand", "rand_like", "randint",
    "randn", "randn_like", "randperm", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "relu",
    "repeat", "replication_pad1d", "replication_pad2d", "replication_pad3d", "resize", "roll", "round",
    "scalar_tensor", "scatter", "select_backward", "select_copy", "select_scatter", "sgn", "sign",
    "slice_backward", "slice_copy", "slice_scatter", "sort", "split_copy", "split_with_sizes_copy",
    "squeeze_copy", "stack", "t_copy", "take", "threshold", "threshold_backward", "topk",
    "transpose_copy", "tril", "triu", "trunc", "unbind_copy", "uniform", "unsqueeze_copy",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view_copy", "where", "zero",
    "zeros", "zeros_like",
})
_REDUCTIONS = frozenset({
    "linalg_vector_norm", "logsumexp", "mean", "nansum", "norm", "prod", "std", "std_mean", "sum", "var",
    "var_mean",
})


@dataclass(frozen=True)
class Operator:
    """Facts about one overload, read once from its schema."""

    name: str
    """Without namespace and trailing underscore: ``aten::add_.Tensor`` is ``add``."""
    exact: bool
    random: bool
    accumulates: bool
    writes: dict[int, str]
    """Positions and names of the arguments that it declares to write to."""
    running: tuple[int, ...]
    """Positions of running statistics, which batch norm writes to without saying so."""
    fresh: tuple[bool, ...]
    """For each result, whether it is new memory."""
    copies: int | None = None
    """Position of the argument that it copies, perhaps into another dtype."""


@cache
def operator(func: Any) -> Operator:
    """Read the schema of an ``OpOverload``."""
    schema = func._schema
    name = schema.name.split("::")[1]
    base = name if name.startswith("__") else name.rstrip("_")
    arguments = list(enumerate(schema.arguments))
    writes = {i: a.name for i, a in arguments if a.alias_info is not None and a.alias_info.is_write}
    return Operator(
        name=base,
        exact=bool(func.is_view) or base in _EXACT,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        accumulates=not writes and torch.Tag.pointwise not in func.tags,
        writes=writes,
        running=tuple(i for i, a in arguments if "batch_norm" in base and a.name.startswith("running")),
        fresh=tuple(r.alias_info is None for r in schema.returns),
        copies={"_to_copy": 0, "copy": 1}.get(base),
    )


def terms(name: str, args: Sequence[Any]) -> int:
    """How many terms one element of the result accumulates (an estimate).

    Terms perturbed by ``unit * sqrt(n)`` make the total noise about ``unit * sum|terms|``, the usual size for
    sequential or blocked accumulation, whatever n is (Higham and Mary 2019, probabilistic rounding analysis).
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel()]
    if not tensors:
        return 1
    big = tensors[0]
    if name in ("mm", "bmm"):
        return big.shape[-1]
    if name in ("addmm", "baddbmm", "addmv", "_addmm_activation"):
        return tensors[min(1, len(tensors) - 1)].shape[-1]
    if "convolution_backward" in name and len(tensors) > 2:
        return max(big.numel() // max(1, big.shape[1]), tensors[2][0].numel())
    if "convolution" in name and len(tensors) > 1:
        return tensors[1][0].numel()
    if "norm" in name and name not in _REDUCTIONS:
        return _norm_terms(name, max(tensors[:2], key=torch.Tensor.numel))
    return _reduced(name, big, args)


def _norm_terms(name: str, big: torch.Tensor) -> int:
    if big.dim() < 2:
        return max(1, big.numel())
    if "batch" in name or "group" in name:
        return max(1, big.numel() // big.shape[1])
    return max(1, big.shape[-1], big.numel() // big.shape[-1]) if "backward" in name else big.shape[-1]


def _reduced(name: str, big: torch.Tensor, args: Sequence[Any]) -> int:
    named = args[1] if len(args) > 1 else None
    axes = [named] if isinstance(named, int) else list(named) if isinstance(named, (list, tuple)) else []
    if axes and big.dim() and all(isinstance(a, int) and -big.dim() <= a < big.dim() for a in axes):
        return prod(big.shape[a] for a in axes)
    if name in _REDUCTIONS:
        return big.numel()
    return big.shape[-1] if big.dim() else 1
