"""FLOP formulas: how many floating-point operations an operator takes, by the shapes of what it is given.

``torch.utils.flop_counter`` is the first source. Where it is wrong or has nothing, a formula stands here; of what is
left nobody knows, and that is said. A multiplication and an addition are two.

Those of linear algebra are the leading terms for n by n matrices of Golub and Van Loan, Matrix Computations, 4th
edition: n^3/3 for Cholesky (4.2), 2n^3/3 for LU (3.2), 2n^3 for the inverse, n^2 for each right side of a triangular
solve (3.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from pytest_torchcompile.gauges.library_operators import calls_library, is_custom

__all__ = ["flop_formula", "flops_unknown"]

Formula = Callable[..., int]
_ATTENTION: Final = "_scaled_dot_product"
_UNCOUNTED: Final = re.compile(r"linalg_|_fft_|cholesky|geqrf|ormqr|orgqr|lu_solve|triangular_solve|matrix_exp"
                               r"|triton_kernel")
"""Operators whose work is not one operation for each element of their result."""
_NO_WORK: Final = frozenset({"_linalg_check_errors", "linalg_cross", "linalg_vector_norm"})
"""Named alike, and about one operation an element, or none."""


def flop_formula(packet: Any) -> Formula | None:
    """The formula for an operator, by its packet; None where there is none.

    It is called with the operator's arguments and ``out_val``, its result; tensors may be given as their shapes.
    ``flop_registry`` has one for each operator that torch knows (torch/utils/flop_counter.py, torch 2.8 to 2.15).
    """
    name = packet.__name__
    if str(packet).partition(".")[0] == "aten" and name in _OWN:
        return _OWN[name]
    formula = flop_registry.get(packet)
    if formula is None and name.startswith(_ATTENTION):
        # Attention on a CPU is missing there: its first arguments are those of flash attention.
        direction = "_backward" if "_backward" in name else ""
        formula = flop_registry.get(getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}"))
    return formula


def flops_unknown(name: str, has_formula: bool) -> bool:
    """Whether nobody knows the FLOPs of an operator; one of ATen's may be named without its namespace.

    >>> [flops_unknown(name, False) for name in ("linalg_svd", "mine::scale", "add", "linalg_vector_norm")]
    [True, True, False, False]
    """
    operator = name.rpartition("::")[2]
    if has_formula or operator in _NO_WORK:
        return False
    return is_custom(name) or calls_library(operator) or bool(_UNCOUNTED.search(operator))


def _convolution_backward(
    grad: Any, given: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, output_mask: Sequence[bool], **more: Any,
) -> int:
    """The gradient of the input and that of the weight take as many each as the forward pass.

    Torch counts that of the weight for every pair of channels, as if there were no groups (2.8 to 2.13): of a depthwise
    convolution as many times too much as it has channels.
    """
    inside = _shape(given if transposed else grad)[2:]
    forward = 2 * _shape(given)[0] * prod(inside) * prod(_shape(weight))
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


def _product(first: Any, second: Any, *more: Any, **named: Any) -> int:
    rows, inner = _shape(first)[-2:]
    return 2 * rows * inner * _shape(second)[-1]


def _product_and_sum(added: Any, first: Any, second: Any, *more: Any, **named: Any) -> int:
    return _product(first, second)


def _inverse(matrix: Any, *more: Any, **named: Any) -> int:
    return 2 * _cubes(matrix)


def _cholesky(matrix: Any, *more: Any, **named: Any) -> int:
    return _cubes(matrix) // 3


def _lu(matrix: Any, *more: Any, **named: Any) -> int:
    return 2 * _cubes(matrix) // 3


def _solve(matrix: Any, right: Any, *more: Any, **named: Any) -> int:
    """LU, then two triangular solves."""
    return _lu(matrix) + 2 * _triangular(matrix, right)


def _triangular(matrix: Any, right: Any, *more: Any, **named: Any) -> int:
    return int(_shape(matrix)[-1] * prod(_shape(right)))


def _cholesky_solve(right: Any, factor: Any, *more: Any, **named: Any) -> int:
    return 2 * _triangular(factor, right)


def _cubes(matrix: Any) -> int:
    """n^3 of each n by n matrix of a batch."""
    shape = _shape(matrix)
    return int(prod(shape) * shape[-1])


def _shape(value: Any) -> Sequence[int]:
    return value.shape if isinstance(value, torch.Tensor) else value


_OWN: Final[dict[str, Formula]] = {
    "convolution_backward": _convolution_backward,
    "_int_mm": _product,
    "_addmm_activation": _product_and_sum,
    "linalg_inv_ex": _inverse,
    "linalg_cholesky_ex": _cholesky,
    "cholesky": _cholesky,
    "linalg_lu_factor_ex": _lu,
    "_linalg_det": _lu,
    "_linalg_slogdet": _lu,
    "_linalg_solve_ex": _solve,
    "linalg_solve_triangular": _triangular,
    "cholesky_solve": _cholesky_solve,
}
"""Operators of ATen that torch's counter has not, or counts wrongly."""
