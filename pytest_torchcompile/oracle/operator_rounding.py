"""How operators round. First the unit roundoffs: the largest relative error of one rounding to a dtype, and which
products torch may compute in less than the dtype of their inputs: TF32, bfloat16, rounded partial sums.

Then what the noise model has to know about an operator: does it round, does it add up, how many terms? One that moves,
chooses or counts belongs into ``_EXACT``, one that is approximated to an absolute error into ``APPROXIMATED``. All
others round once, by the unit that the eager run shows. Where only some calls round, see ``exact_calls.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

import torch

__all__ = [
    "APPROXIMATED",
    "EMULATED",
    "FLOAT32_UNIT",
    "PRODUCTS",
    "Operator",
    "count_terms",
    "input_units",
    "narrowest_unit",
    "operator_facts",
    "program_unit",
    "smallest_noise",
    "sum_roundings",
    "unit_of",
    "wide_dtype",
]


# Smallest scale, whose square is still a number.
_SMALLEST = 1e-150
FLOAT32_UNIT = 2.0**-24
"""The unit of float32, in which kernels accumulate sums of float32, bfloat16 and float16."""


def unit_of(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next larger number: 2**-24 for float32, 2**-8 for bfloat16.

    A complex dtype has the unit of its parts.
    """
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.finfo(dtype).eps / 2


def smallest_noise(dtype: torch.dtype) -> float:
    """Half a step of subnormals: some for float16, whose subnormals are in daily use."""
    if dtype == torch.float16:
        return 2.0**-25
    info = torch.finfo(dtype)
    return max(info.tiny * info.eps / 2, _SMALLEST)


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


_NARROWED_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "_addmm_activation")
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
        return dict.fromkeys(_NARROWED_PRODUCTS, products)
    return {}


def _cuda_units(unit: float) -> dict[str, float]:
    units: dict[str, float] = {}
    if unit > FLOAT32_UNIT and _rounds_partial_sums():
        # split-K kernels add partial sums that are rounded to the dtype of the result
        units |= dict.fromkeys(_NARROWED_PRODUCTS, unit)
    elif (products := _UNITS.get(_cuda_products())) is not None:
        units |= dict.fromkeys(_NARROWED_PRODUCTS, products)
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


# ------------------------------------------------------------------------------------------------------------ operators
PRODUCTS = frozenset({"addmm", "addmv", "baddbmm", "bmm", "mm", "mv"})
"""Matrix products, each linear in two tensors."""

APPROXIMATED = frozenset({"celu", "elu", "erf", "erfc", "erfinv", "gelu", "gelu_backward", "selu"})
"""Functions that kernels approximate to an absolute error: near their zeros that is far more than one rounding.

Not expm1 and log1p, which are there to be right near zero."""

# Operators that only move, choose or count values: what they return is one of their inputs, or a whole number. Of a
# mixture of experts ``histc`` counts the tokens: with noise a token went to another expert.
_EXACT = frozenset({
    "_efficientzerotensor", "_local_scalar_dense", "_sparse_compressed_tensor_unsafe",
    "_sparse_compressed_tensor_with_dims", "_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors",
    "_to_copy", "_to_sparse", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr",
    "_unique", "_unique2", "_unsafe_index", "_unsafe_view", "abs",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "alias", "amax", "amin", "aminmax", "arange",
    "argmax", "argmin", "bernoulli", "bucketize", "cat", "ceil", "clamp", "clamp_max", "clamp_min",
    "clone", "complex", "constant_pad_nd", "copy", "copysign", "count_nonzero", "cummax", "cummin",
    "detach", "diagonal_copy", "embedding", "empty", "empty_like", "empty_permuted", "empty_strided",
    "equal", "expand_copy", "eye", "fill", "flip", "floor", "fmax", "fmin", "full", "full_like",
    "gather", "histc", "index", "index_copy", "index_select", "isin", "kthvalue", "lift", "lift_fresh",
    "lift_fresh_copy", "masked_fill", "masked_scatter", "masked_select", "max",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "mode",
    "multinomial", "nan_to_num", "nanmedian", "neg", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "nonzero", "normal", "ones", "ones_like", "permute_copy", "pixel_shuffle",
    "pixel_unshuffle", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "relu", "repeat", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "resize", "roll", "round", "scalar_tensor", "scatter",
    "searchsorted", "select_backward", "select_copy", "select_scatter", "sgn", "sign", "slice_backward",
    "slice_copy", "slice_scatter", "sort", "split_copy", "split_with_sizes_copy", "squeeze_copy",
    "stack", "t_copy", "take", "threshold", "threshold_backward", "topk", "transpose_copy", "tril",
    "triu", "trunc", "unbind_copy", "uniform", "unique_consecutive", "unique_dim", "unsqueeze_copy",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view_copy", "where", "zero",
    "zeros", "zeros_like",
})
EMULATED: Final = frozenset({"_grouped_mm", "convolution", "convolution_backward"})
"""Operators in whose place something else runs in a wide dtype: see ``wide_operators.py``."""
_TORCH_NAMESPACES = frozenset({"aten", "prims"})
# Fewer terms than this are added up with an error that the noise of the terms covers.
_LONG_SUM = 16
_REDUCTIONS = frozenset({
    "linalg_vector_norm", "logsumexp", "mean", "nansum", "norm", "prod", "std", "std_mean", "sum", "var",
    "var_mean",
})
_RUNNING_SUMS = frozenset({"cumsum", "logcumsumexp"})


@dataclass(frozen=True)
class Operator:
    """Facts about one overload, read once from its schema."""

    name: str
    """``aten::add_.Tensor`` is ``add``: without trailing underscore, and of torch's own without the namespace."""
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
def operator_facts(func: Any) -> Operator:
    """Read the schema of an ``OpOverload``."""
    schema = func._schema
    namespace, name = schema.name.split("::")
    # What a library calls ``mylib::sort`` may do anything.
    if namespace not in _TORCH_NAMESPACES:
        name = schema.name
    if not name.startswith("__"):
        name = name.rstrip("_")
    writes, running = {}, []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes[position] = argument.name
        if "batch_norm" in name and argument.name.startswith("running"):
            running.append(position)
    return Operator(
        name=name,
        exact=bool(func.is_view) or name in _EXACT,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        accumulates=not writes and torch.Tag.pointwise not in func.tags,
        writes=writes,
        running=tuple(running),
        fresh=tuple(result.alias_info is None for result in schema.returns),
        copies={"_to_copy": 0, "copy": 1}.get(name),
    )


def count_terms(name: str, args: Sequence[Any]) -> int:
    """How many terms one element of the result accumulates (an estimate).

    Terms perturbed by ``unit * sqrt(n)`` make the total noise about ``unit * sum|terms|``, the usual size for
    sequential or blocked accumulation, whatever n is (Higham and Mary 2019, probabilistic rounding analysis).
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel()]
    if not tensors:
        return 1
    big = tensors[0]
    if name in ("mm", "bmm", "mv"):
        return _product_terms(big)
    if name in ("addmm", "baddbmm", "addmv", "_addmm_activation", "_sparse_addmm"):
        # The first tensor is the one that the product is added to.
        return _product_terms(tensors[min(1, len(tensors) - 1)])
    if "convolution_backward" in name and len(tensors) > 2:
        return max(big.numel() // max(1, big.shape[1]), tensors[2][0].numel())
    if "convolution" in name and len(tensors) > 1:
        return tensors[1][0].numel()
    if "norm" in name and name not in _REDUCTIONS:
        return _norm_terms(name, max(tensors[:2], key=torch.Tensor.numel))
    return _reduced_terms(name, big, args)


def _product_terms(factor: torch.Tensor) -> int:
    """The numbers in a row of a product's first factor: of a sparse one in its fullest row."""
    length = factor.shape[-1]
    if factor.device.type != "cpu":
        # To ask would be to wait for a GPU.
        return length
    if factor.layout is torch.sparse_coo and factor.sparse_dim() == factor.dim() == 2:
        rows = factor._indices()[0]
        return int(rows.bincount().max()) if rows.numel() else 1
    if factor.layout is torch.sparse_csr and factor.dim() == 2:
        return max(1, int(factor.crow_indices().diff().max()))
    return length


def sum_roundings(name: str, args: Sequence[Any]) -> float:
    """How many unit roundoffs a sum is off as a whole, beside what the noise of its terms makes: 0 where it is no sum.

    In a loop over n terms each addition rounds the sum so far. Where terms have one sign that makes ``0.24 * sqrt(n)``
    roundings of the sum, in the root mean square. The noise of independent terms makes 0.6, whatever n is. Inductor's
    loops over an outer axis add so (torch 2.13, CPU); eager adds in blocks. Products of matrices are the library's on
    both sides.
    """
    if name in _REDUCTIONS or name in _RUNNING_SUMS:
        terms = count_terms(name, args)
    elif "loss" in name and not name.endswith("_backward"):
        terms = _loss_terms(args)
    else:
        return 0.0
    return terms**0.5 / 4 if terms >= _LONG_SUM else 0.0


def _loss_terms(args: Sequence[Any]) -> int:
    """All elements, whatever their axes; one where it is told not to reduce (``Reduction::None`` is 0)."""
    reduction = next((arg for arg in args if isinstance(arg, int)), None)
    if reduction == 0:
        return 1
    return max((arg.numel() for arg in args if isinstance(arg, torch.Tensor)), default=1)


def _norm_terms(name: str, big: torch.Tensor) -> int:
    if big.dim() < 2:
        return max(1, big.numel())
    if "batch" in name or "group" in name:
        return max(1, big.numel() // big.shape[1])
    if "backward" in name:
        return max(1, big.shape[-1], big.numel() // big.shape[-1])
    return big.shape[-1]


def _reduced_terms(name: str, big: torch.Tensor, args: Sequence[Any]) -> int:
    axes = _reduced_axes(args)
    if axes and big.dim() and all(isinstance(a, int) and -big.dim() <= a < big.dim() for a in axes):
        return prod(big.shape[a] for a in axes)
    if name in _REDUCTIONS:
        return big.numel()
    return big.shape[-1] if big.dim() else 1


def _reduced_axes(args: Sequence[Any]) -> list[Any]:
    """What the second argument names: most reductions have their axes there."""
    named = args[1] if len(args) > 1 else None
    if isinstance(named, int):
        return [named]
    if isinstance(named, (list, tuple)):
        return list(named)
    return []
