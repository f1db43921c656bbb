"""Planted faults: wrong numbers, in every call."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor

from pytest_torchcompile.backends.toolkit import Toolkit, replace
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import (
    Case,
    Program,
    change_output,
    change_results,
    drop_operator,
    one_element,
    rounded_to,
    shift_constant,
    swap_operator,
)

__all__ = ["VALUES"]


def _large_rows(B: int) -> Tensor:
    """Positive numbers whose sum is more than float16 can hold, and whose mean is not."""
    return torch.rand(B, 300) * 800


HALF_POINTWISE = Program(p.Pointwise, p.rows, dtype=torch.bfloat16)
TINY = Program(p.Tiny, p.rows)
# Scores so large that their exponentials overflow.
LARGE_SCORES = Program(p.Attention, p.sequences, ({"B": 2, "scale": 40},))
# Seven rows of six are no multiple of a vector's 16 numbers.
SEVEN_ROWS = Program(p.Perceptron, p.rows, ({"B": 7},))
FLOAT16_REDUCTIONS = Program(p.Reductions, _large_rows, ({"B": 4},), dtype=torch.float16)
EVALUATED_CONVOLUTION = Program(p.Convolution, p.images, ({"B": 4},), training=False)
EVALUATED_DROPPING = Program(p.Dropping, p.rows, ({"B": 32},), training=False)


# operators


def _swapped_operands(a: Tensor, b: Tensor) -> Tensor:
    return b - a


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _untransposed_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x @ w + b


def _coarse_layer_norm(x: Tensor, shape: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, shape, w, b, 1e-3)


def _biased_variance(x: Tensor, dim: int) -> Tensor:
    return x.var(dim, correction=0)


def _sum_without_last(x: Tensor, dim: int) -> Tensor:
    return x[:, :-1].sum(dim)


# parts of the result


def _without_second_half(x: Tensor) -> Tensor:
    half = len(x) // 2
    return torch.cat([x[:half], torch.zeros_like(x[half:])])


def _without_remainder(x: Tensor) -> Tensor:
    """What lies behind the last whole vector of 16 numbers is not computed."""
    flat = x.reshape(-1)
    vectors = flat.numel() // 16 * 16
    return torch.cat([flat[:vectors], torch.zeros_like(flat[vectors:])]).view(x.shape)


def _rolled_rows(y: Tensor) -> Tensor:
    return y.roll(1, 0)


def _first_two_swapped(returned: list[Any], _: object) -> list[Any]:
    return [returned[1], returned[0], *returned[2:]]


# attention


def _triu_one_higher(ones: Tensor, diagonal: int) -> Tensor:
    return ones.triu(diagonal + 1)


def _last_row_masked(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    place = torch.arange(6, device=scores.device)
    return scores.masked_fill(mask | (place == 5).view(6, 1) & (place < 5), value)


def _naive_softmax(scores: Tensor, dim: int) -> Tensor:
    powers = scores.exp()
    return powers / powers.sum(dim, keepdim=True)


# precision


def _mean_of_overflow(x: Tensor, dim: int) -> Tensor:
    # cumsum, because float16's sum is accumulated in float32
    return x.cumsum(dim)[:, -1] / x.shape[-1]


def _naive_log1p(x: Tensor) -> Tensor:
    return torch.log(1 + x)


def _naive_expm1(x: Tensor) -> Tensor:
    return torch.exp(x) - 1


def _tf32_rounded(x: Tensor) -> Tensor:
    """Ten bits of mantissa, as TF32 has them; rounded towards zero."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _tf32_addmm(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(c, _tf32_rounded(a), _tf32_rounded(b))


def _bfloat16_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float()


def _bfloat16_sums(x: Tensor, dim: int) -> Tensor:
    """Twenty sums of 15 numbers, added in bfloat16 one by one."""
    total = x.new_zeros(x.shape[0], dtype=torch.bfloat16)
    for part in torch.split(x, 15, dim):
        total = total + part.sum(dim).to(torch.bfloat16)
    return total.to(x.dtype)


def _wrong_in_bfloat16(y: Tensor) -> Tensor:
    if y.dtype is torch.bfloat16:
        return y * 1.05
    return y


def _first_one_step_off(y: Tensor) -> Tensor:
    """The first number becomes the next one of bfloat16, away from zero."""
    following = (y.view(torch.int16) + 1).view(torch.bfloat16)
    is_first = torch.arange(y.numel(), device=y.device).view(y.shape) == 0
    return torch.where(is_first, following, y)


# the modes of training and evaluation, and padding


def _evaluated_batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, *_: Any) -> Tensor:
    return F.batch_norm(x, mean, var, w, b)


def _trained_batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, *_: Any) -> Tensor:
    return F.batch_norm(x, None, None, w, b, True)


def _zero_padded_pool(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.max_pool2d(x.clamp(min=0), 2)


def _no_dropout(x: Tensor, p: float, *_: Any) -> Tensor:
    return x * 1


def _unscaled_dropout(x: Tensor, p: float, *_: Any) -> Tensor:
    return F.dropout(x, p) * (1 - p)


def _higher_dropout(x: Tensor, p: float, *_: Any) -> Tensor:
    return F.dropout(x, 0.6)


def _dropout_always(x: Tensor, p: float, *_: Any) -> Tensor:
    return F.dropout(x, p, True)


def _same_mask_for_rows(x: Tensor, p: float, *_: Any) -> Tensor:
    """One mask for every row, and as many draws as the right one."""
    return F.dropout(torch.ones_like(x), p)[:1] * x


# indices and whole numbers


def _no_duplicates(zeros: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return zeros.index_copy(dim, index, source)


def _first_column(x: Tensor, i: Any) -> Tensor:
    return x[:, 0]


def _divided_towards_zero(n: Tensor, by: int, rounding_mode: str) -> Tensor:
    return n.div(by, rounding_mode="trunc")


def _one_index_off(x: Tensor, dim: int) -> Tensor:
    is_fourth = torch.arange(x.shape[0], device=x.device) == 3
    return (x.argmax(dim) + is_fourth) % 6


def _less_or_equal(a: Tensor, b: Tensor) -> Tensor:
    return a <= b


def _sum_in_32_bits(n: Tensor, dim: int) -> Tensor:
    return n.sum(dim, dtype=torch.int32).long()


def _sign_without_zero(n: Tensor) -> Tensor:
    return torch.where(n >= 0, 1, -1)


def _constants_off(*errors: float) -> list[Case]:
    cases = []
    for error in errors:
        cases.append(Case(f"constant off by {error:g}", f"x * 0.7 becomes x * 0.7 * (1 + {error:g})", p.POINTWISE,
                          "value", shift_constant("mul", error)))
    return cases


VALUES: Final = (
    # an operator computes something else
    Case("operator dropped", "tanh is left out", p.PERCEPTRON, "value", drop_operator("tanh")),
    Case("operands swapped", "a - b becomes b - a", p.POINTWISE, "value", swap_operator("sub", _swapped_operands)),
    Case("another operator", "exact gelu becomes its tanh approximation", p.PERCEPTRON, "value",
         swap_operator("gelu", _tanh_gelu)),
    Case("matrix transposed", "a square weight is used as it lies in memory", p.PERCEPTRON, "value",
         swap_operator("linear", _untransposed_linear, nth=1)),
    *_constants_off(1e-2, 1e-3, 1e-4, 1e-5),
    Case("constant off by 6e-08", "x * 0.7 becomes x * 0.7 * (1 + 6e-08)", p.POINTWISE, "value",
         shift_constant("mul", 6e-8), below="float32 itself rounds 0.7 and the product by 6e-8"),
    Case("constant off by 1e-01 in bfloat16", "x * 0.7 becomes x * 0.77", HALF_POINTWISE, "value",
         shift_constant("mul", 1e-1)),
    Case("constant off by 1e-03 in bfloat16", "x * 0.7 becomes x * 0.7007", HALF_POINTWISE, "value",
         shift_constant("mul", 1e-3), below="bfloat16 has 8 bits: numbers around 0.7 are 4e-3 apart"),
    Case("epsilon of a norm", "layer norm with 1e-3 instead of 1e-5", p.NORMS, "value",
         swap_operator("layer_norm", _coarse_layer_norm)),
    Case("divided by n, not n - 1", "the biased variance", p.REDUCTIONS, "value",
         swap_operator("var", _biased_variance)),
    Case("one number less in a sum", "the last element is left out", p.REDUCTIONS, "value",
         swap_operator("sum", _sum_without_last)),
    # a part of the result is wrong
    Case("first element only", "output[0] is 1 % off", p.PERCEPTRON, "value", change_output(one_element(0, 1.01))),
    Case("last element only", "output[-1] is 1 % off", p.PERCEPTRON, "value", change_output(one_element(-1, 1.01))),
    Case("one element only, by 1e-3", "one of 96 is 0.1 % off", p.POINTWISE, "value",
         change_output(one_element(50, 1.001))),
    Case("one NaN", "one element is NaN", p.PERCEPTRON, "value", change_output(one_element(7, float("nan")))),
    Case("the rest behind the last vector", "elements beyond a multiple of 16 stay zero", SEVEN_ROWS, "value",
         change_output(_without_remainder)),
    Case("half of the batch", "the second half of the rows stays zero", p.PERCEPTRON, "value",
         change_output(_without_second_half)),
    Case("rows in another order", "right numbers in wrong places", p.PERCEPTRON, "value", change_output(_rolled_rows)),
    Case("two outputs swapped", "both have the same shape and dtype", p.NAMED, "value",
         change_results(_first_two_swapped)),
    # attention
    Case("masked region", "attention sees one token of the future", p.ATTENTION, "value",
         swap_operator("triu", _triu_one_higher)),
    Case("mask of the last row", "the last token attends to itself alone", p.ATTENTION, "value",
         swap_operator("masked_fill", _last_row_masked)),
    Case("NaN for large inputs", "softmax without taking the maximum off", LARGE_SCORES, "value",
         swap_operator("softmax", _naive_softmax)),
    # precision
    Case("overflow of a large sum", "float16 sum before the division of a mean", FLOAT16_REDUCTIONS, "value",
         swap_operator("mean", _mean_of_overflow)),
    Case("naive log1p", "log(1 + x) of numbers around 1e-6", TINY, "value", swap_operator("log1p", _naive_log1p)),
    Case("naive expm1", "exp(x) - 1 of numbers around 1e-5", TINY, "value", swap_operator("expm1", _naive_expm1)),
    Case("rounded to float16", "a float32 result went through float16", p.PERCEPTRON, "value",
         change_output(rounded_to(torch.float16))),
    Case("TF32 where it is not allowed", "matrix products with 10 bits of mantissa", p.PERCEPTRON, "value",
         partial(Toolkit, forward=replace("addmm", _tf32_addmm))),
    Case("autocast where there is none", "a layer computed in bfloat16", p.PERCEPTRON, "value",
         swap_operator("linear", _bfloat16_linear, nth=1)),
    Case("sum in half precision", "20 parts added in bfloat16", p.REDUCTIONS, "value",
         swap_operator("sum", _bfloat16_sums)),
    Case("wrong in bfloat16 only", "5 % off where the dtype is bfloat16", p.HALF_PERCEPTRON, "value",
         change_output(_wrong_in_bfloat16)),
    Case("one element in bfloat16", "output[0] is the next number of bfloat16", p.HALF_PERCEPTRON, "value",
         change_output(_first_one_step_off), below="eager's own rounding moves elements by as much"),
    # training and evaluation, padding
    Case("train flag ignored", "batch norm as in evaluation", p.CONVOLUTION, "value",
         swap_operator("batch_norm", _evaluated_batch_norm)),
    Case("evaluation flag ignored", "batch norm as in training", EVALUATED_CONVOLUTION, "value",
         swap_operator("batch_norm", _trained_batch_norm)),
    Case("padded with zeros", "maximum pooling of negative numbers", p.CONVOLUTION, "value",
         swap_operator("max_pool2d", _zero_padded_pool)),
    Case("dropout off", "nothing is dropped in training", p.DROPPING, "value", swap_operator("dropout", _no_dropout)),
    Case("dropout not scaled", "what is kept is not divided by the share that is", p.DROPPING, "value",
         swap_operator("dropout", _unscaled_dropout)),
    Case("dropout at another rate", "0.6 instead of 0.5", p.DROPPING, "value",
         swap_operator("dropout", _higher_dropout)),
    Case("dropout in evaluation", "drops where nothing is to be dropped", EVALUATED_DROPPING, "value",
         swap_operator("dropout", _dropout_always)),
    Case("one dropout mask for all rows", "drawn once and broadcast", p.DROPPING, "value",
         swap_operator("dropout", _same_mask_for_rows)),
    # indices and whole numbers, which nothing rounds: whatever differs is wrong
    Case("duplicates lost", "a sum by index keeps one number of each index", p.TOKENS, "value",
         swap_operator("index_add", _no_duplicates)),
    Case("index from the end", "x[-1] becomes x[0]", p.TOKENS, "value",
         swap_operator("getitem", _first_column, nth=1)),
    Case("division towards zero", "floor(-7 / 3) becomes -2", p.INTEGERS, "value",
         swap_operator("div", _divided_towards_zero), where="floor", alone=True),
    Case("another index", "one row's argmax is one off", p.INTEGERS, "value",
         swap_operator("argmax", _one_index_off), where="best", alone=True),
    Case("less or equal", "< becomes <=", p.INTEGERS, "value", swap_operator("lt", _less_or_equal), where="less",
         alone=True),
    Case("a sum that wraps", "64-bit numbers added in 32 bits", p.INTEGERS, "value",
         swap_operator("sum", _sum_in_32_bits), where="sum", alone=True),
    Case("sign of zero", "sign(0) becomes 1", p.INTEGERS, "value", swap_operator("sign", _sign_without_zero),
         where="sign", alone=True),
)
