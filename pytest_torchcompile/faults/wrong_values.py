"""Planted faults: wrong numbers, in every call."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor

from pytest_torchcompile.backends.toolkit import Toolkit, drop, replace
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import after, constant, element, output, rounded, traced

__all__ = ["VALUES"]

PERCEPTRON = Program(p.Perceptron, p.rows)
HALF = Program(p.Perceptron, p.rows, dtype=torch.bfloat16)
POINTWISE = Program(p.Pointwise, p.rows)
TINY = Program(p.Tiny, p.rows)
ATTENTION = Program(p.Attention, p.sequences, ({"B": 2},))
LARGE = Program(p.Attention, p.sequences, ({"B": 2, "scale": 40},))
NORMS = Program(p.Norms, p.rows)
CONVOLUTION = Program(p.Convolution, p.images, ({"B": 4},))
DROPPING = Program(p.Dropping, p.rows, ({"B": 32},))
REDUCTIONS = Program(p.Reductions, p.rows, ({"B": 4, "width": 300},))
TOKENS = Program(p.Tokens, p.token_ids)
INTEGERS = Program(p.Integers, p.integers)
NAMED = Program(p.Named, p.rows)


def _other_half(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 2], torch.zeros_like(x[len(x) // 2 :])])


def _ragged(x: Tensor) -> Tensor:
    """What lies behind the last whole vector of 16 numbers is not computed."""
    flat = x.reshape(-1)
    whole = flat.numel() // 16 * 16
    return torch.cat([flat[:whole], torch.zeros_like(flat[whole:])]).view(x.shape)


def _next(x: Tensor) -> Tensor:
    """The next number of bfloat16, away from zero."""
    return (x.view(torch.int16) + 1).view(torch.bfloat16)


def _tf32(x: Tensor) -> Tensor:
    """Ten bits of mantissa, as TF32 has them; rounded towards zero."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _naive_softmax(scores: Tensor, dim: int) -> Tensor:
    powers = scores.exp()
    return powers / powers.sum(dim, keepdim=True)


def _half_sums(x: Tensor, dim: int) -> Tensor:
    """Twenty sums of 15 numbers, added in bfloat16 one by one."""
    total = x.new_zeros(x.shape[0], dtype=torch.bfloat16)
    for part in torch.split(x, 15, dim):
        total = total + part.sum(dim).to(torch.bfloat16)
    return total.to(x.dtype)


def _last_row(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    place = torch.arange(6, device=scores.device)
    return scores.masked_fill(mask | (place == 5).view(6, 1) & (place < 5), value)


def _same_mask(x: Tensor, p: float, *_: Any) -> Tensor:
    """One mask for every row, and as many draws as the right one."""
    return F.dropout(torch.ones_like(x), p)[:1] * x


def _no_duplicates(zeros: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return zeros.index_copy(dim, index, source)


VALUES: Final = (
    Case("operator dropped", "tanh is left out", PERCEPTRON, "value", lambda: Toolkit(dynamo=drop("tanh"))),
    Case("operands swapped", "a - b becomes b - a", POINTWISE, "value", traced("sub", lambda a, b: b - a)),
    Case("another operator", "exact gelu becomes its tanh approximation", PERCEPTRON, "value",
         traced("gelu", lambda x: F.gelu(x, approximate="tanh"))),
    Case("matrix transposed", "a square weight is used as it lies in memory", PERCEPTRON, "value",
         traced("linear", lambda x, w, b: x @ w + b, nth=1)),
    *(Case(f"constant off by {error:g}", f"x * 0.7 becomes x * 0.7 * (1 + {error:g})", POINTWISE, "value",
           constant("mul", error)) for error in (1e-2, 1e-3, 1e-4, 1e-5)),
    Case("constant off by 6e-08", "x * 0.7 becomes x * 0.7 * (1 + 6e-08)", POINTWISE, "value",
         constant("mul", 6e-8), below="float32 itself rounds 0.7 and the product by 6e-8"),
    Case("constant off by 1e-01 in bfloat16", "x * 0.7 becomes x * 0.77",
         Program(p.Pointwise, p.rows, dtype=torch.bfloat16), "value", constant("mul", 1e-1)),
    Case("constant off by 1e-03 in bfloat16", "x * 0.7 becomes x * 0.7007",
         Program(p.Pointwise, p.rows, dtype=torch.bfloat16), "value", constant("mul", 1e-3),
         below="bfloat16 has 8 bits: numbers around 0.7 are 4e-3 apart"),
    Case("epsilon of a norm", "layer norm with 1e-3 instead of 1e-5", NORMS, "value",
         traced("layer_norm", lambda x, shape, w, b, eps: F.layer_norm(x, shape, w, b, 1e-3))),
    Case("divided by n, not n - 1", "the biased variance", REDUCTIONS, "value",
         traced("var", lambda x, dim: x.var(dim, correction=0))),
    Case("one number less in a sum", "the last element is left out", REDUCTIONS, "value",
         traced("sum", lambda x, dim: x[:, :-1].sum(dim))),
    Case("first element only", "output[0] is 1 % off", PERCEPTRON, "value", output(element(0, 1.01))),
    Case("last element only", "output[-1] is 1 % off", PERCEPTRON, "value", output(element(-1, 1.01))),
    Case("one element only, by 1e-3", "one of 96 is 0.1 % off", POINTWISE, "value", output(element(50, 1.001))),
    Case("one NaN", "one element is NaN", PERCEPTRON, "value", output(element(7, float("nan")))),
    Case("the rest behind the last vector", "elements beyond a multiple of 16 stay zero",
         Program(p.Perceptron, p.rows, ({"B": 7},)), "value", output(_ragged)),
    Case("half of the batch", "the second half of the rows stays zero", PERCEPTRON, "value", output(_other_half)),
    Case("rows in another order", "right numbers in wrong places", PERCEPTRON, "value",
         output(lambda y: y.roll(1, 0))),
    Case("two outputs swapped", "both have the same shape and dtype", NAMED, "value",
         after(lambda found, _: [found[1], found[0], *found[2:]])),
    Case("masked region", "attention sees one token of the future", ATTENTION, "value",
         traced("triu", lambda ones, diagonal: ones.triu(diagonal + 1))),
    Case("mask of the last row", "the last token attends to itself alone", ATTENTION, "value",
         traced("masked_fill", _last_row)),
    Case("NaN for large inputs", "softmax without taking the maximum off", LARGE, "value",
         traced("softmax", _naive_softmax)),
    Case("overflow of a large sum", "float16 sum before the division of a mean",
         Program(p.Reductions, lambda B: torch.rand(B, 300) * 800, ({"B": 4},), dtype=torch.float16), "value",
         traced("mean", lambda x, dim: x.cumsum(dim)[:, -1] / x.shape[-1])),
    Case("naive log1p", "log(1 + x) of numbers around 1e-6", TINY, "value",
         traced("log1p", lambda x: torch.log(1 + x))),
    Case("naive expm1", "exp(x) - 1 of numbers around 1e-5", TINY, "value",
         traced("expm1", lambda x: torch.exp(x) - 1)),
    Case("rounded to float16", "a float32 result went through float16", PERCEPTRON, "value",
         output(rounded(torch.float16))),
    Case("TF32 where it is not allowed", "matrix products with 10 bits of mantissa", PERCEPTRON, "value",
         lambda: Toolkit(forward=replace(
             "addmm", lambda c, a, b: torch.addmm(c, _tf32(a), _tf32(b))))),
    Case("autocast where there is none", "a layer computed in bfloat16", PERCEPTRON, "value",
         traced("linear", lambda x, w, b: F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float(), nth=1)),
    Case("sum in half precision", "20 parts added in bfloat16", REDUCTIONS, "value",
         traced("sum", _half_sums)),
    Case("wrong in bfloat16 only", "5 % off where the dtype is bfloat16", HALF, "value",
         output(lambda y: y * 1.05 if y.dtype is torch.bfloat16 else y)),
    Case("one element in bfloat16", "output[0] is the next number of bfloat16", HALF, "value",
         output(lambda y: torch.where(torch.arange(y.numel(), device=y.device).view(y.shape) == 0, _next(y), y)),
         below="eager's own rounding moves elements by as much"),
    Case("train flag ignored", "batch norm as in evaluation", CONVOLUTION, "value",
         traced("batch_norm", lambda x, mean, var, w, b, *_: F.batch_norm(x, mean, var, w, b))),
    Case("evaluation flag ignored", "batch norm as in training",
         Program(p.Convolution, p.images, ({"B": 4},), training=False), "value",
         traced("batch_norm", lambda x, mean, var, w, b, *_: F.batch_norm(x, None, None, w, b, True))),
    Case("padded with zeros", "maximum pooling of negative numbers", CONVOLUTION, "value",
         traced("max_pool2d", lambda x, *_, **__: F.max_pool2d(x.clamp(min=0), 2))),
    Case("dropout off", "nothing is dropped in training", DROPPING, "value",
         traced("dropout", lambda x, p, *_: x * 1)),
    Case("dropout not scaled", "what is kept is not divided by the share that is", DROPPING, "value",
         traced("dropout", lambda x, p, *_: F.dropout(x, p) * (1 - p))),
    Case("dropout at another rate", "0.6 instead of 0.5", DROPPING, "value",
         traced("dropout", lambda x, p, *_: F.dropout(x, 0.6))),
    Case("dropout in evaluation", "drops where nothing is to be dropped",
         Program(p.Dropping, p.rows, ({"B": 32},), training=False), "value",
         traced("dropout", lambda x, p, *_: F.dropout(x, p, True))),
    Case("one dropout mask for all rows", "drawn once and broadcast", DROPPING, "value",
         traced("dropout", _same_mask)),
    Case("duplicates lost", "a sum by index keeps one number of each index", TOKENS, "value",
         traced("index_add", _no_duplicates)),
    Case("index from the end", "x[-1] becomes x[0]", TOKENS, "value",
         traced("getitem", lambda x, i: x[:, 0], nth=1)),
    Case("division towards zero", "floor(-7 / 3) becomes -2", INTEGERS, "value", where="floor", backend=
         traced("div", lambda n, by, rounding_mode: n.div(by, rounding_mode="trunc")), alone=True),
    Case("another index", "one row's argmax is one off", INTEGERS, "value", where="best", backend=
         traced("argmax", lambda x, dim: (x.argmax(dim) + (torch.arange(x.shape[0], device=x.device) == 3)) % 6),
         alone=True),
    Case("less or equal", "< becomes <=", INTEGERS, "value", traced("lt", lambda a, b: a <= b), where="less",
         alone=True),
    Case("a sum that wraps", "64-bit numbers added in 32 bits", INTEGERS, "value", where="sum", backend=
         traced("sum", lambda n, dim: n.sum(dim, dtype=torch.int32).long()), alone=True),
    Case("sign of zero", "sign(0) becomes 1", INTEGERS, "value", where="sign", backend=
         traced("sign", lambda n: torch.where(n >= 0, 1, -1)), alone=True),
)
