"""Correct backends whose roundings are not eager's: nothing may be reported about them."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Pass, Runner, Toolkit, both, operator_of, replace
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program

__all__ = ["REWRITES"]

PERCEPTRON = Program(p.Perceptron, p.rows)
HALF, FLOAT16 = (Program(p.Perceptron, p.rows, dtype=d) for d in (torch.bfloat16, torch.float16))
POINTWISE = Program(p.Pointwise, p.rows)
ATTENTION = Program(p.Attention, p.sequences, ({"B": 2},))
FUSED = Program(p.Fused, p.sequences, ({"B": 2},))
NORMS = Program(p.Norms, p.rows)
CONVOLUTION = Program(p.Convolution, p.images, ({"B": 4},))
REDUCTIONS = Program(p.Reductions, p.rows, ({"B": 4, "width": 300},))
DROPPING = Program(p.Dropping, p.rows, ({"B": 32},))
TOKENS = Program(p.Tokens, p.token_ids)
TIED = Program(p.Tied, p.rows)
WIDE = Program(lambda: nn.Sequential(nn.Linear(200, 40), nn.Tanh(), nn.Linear(40, 6)),
               lambda B: p.rows(B, 200))


def _aten(**functions: Callable[..., Any]) -> Callable[[], Toolkit]:
    """Other functions for ATen operators, wherever they occur, in forward and backward."""
    change = _where_found(functions)
    return lambda: Toolkit(forward=change, backward=change)


def _where_found(functions: dict[str, Callable[..., Any]]) -> Pass:
    def change(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if operator_of(node) in functions:
                node.target = functions[operator_of(node)]

    return change


def _traced(**functions: Callable[..., Any]) -> Callable[[], Toolkit]:
    """Other functions for operators of Dynamo's graph; the backward follows."""
    return lambda: Toolkit(dynamo=both(*(replace(name, function) for name, function in functions.items())))


# products of matrices

def _split(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    def product(a: Tensor, b: Tensor) -> Tensor:
        pieces = zip(a.tensor_split(parts, -1), b.tensor_split(parts, 0), strict=True)
        return torch.stack([x @ y for x, y in pieces]).sum(0)

    return product


def _product(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Toolkit]:
    return _aten(mm=multiply, addmm=lambda c, a, b: multiply(a, b) + c)


def _transposed(a: Tensor, b: Tensor) -> Tensor:
    return (b.t() @ a.t()).t().contiguous()


def _broadcast(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b).sum(-2)


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = torch.addcmul(total, a[:, k, None], b[None, k])
    return total


def _backwards(a: Tensor, b: Tensor) -> Tensor:
    return a.flip(-1) @ b.flip(0)


def _as(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def _whole_in(dtype: torch.dtype) -> Callable[[], Toolkit]:
    """The whole graph in another precision, rounded only where it ends, as fused kernels do."""

    def change(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run(*inputs: Any) -> list[Any]:
            like = next(i.dtype for i in inputs if isinstance(i, Tensor) and i.is_floating_point())
            return [_to(found, like) for found in forward(*(_to(i, dtype) for i in inputs))]

        return run

    return lambda: Toolkit(forward=change, backward=change)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# sums

def _pairwise(x: Tensor, dim: int) -> Tensor:
    while x.shape[dim] > 1:
        odd = x.narrow(dim, x.shape[dim] - 1, 1) if x.shape[dim] % 2 else None
        half = x.shape[dim] // 2
        x = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = x if odd is None else torch.cat([x, odd], dim)
    return x.squeeze(dim)


def _in_order(x: Tensor, dims: list[int]) -> Tensor:
    total = torch.zeros_like(x[:, 0])
    for part in x.unbind(dims[0]):
        total = total + part
    return total


def _by_blocks(x: Tensor, dim: int) -> Tensor:
    return torch.stack([block.sum(dim) for block in torch.split(x, 32, dim)]).sum(0)


def _by_product(x: Tensor, dim: int) -> Tensor:
    return x @ x.new_ones(x.shape[dim])


def _scan_by_blocks(x: Tensor, dim: int) -> Tensor:
    blocks = [block.cumsum(dim) for block in torch.split(x, 25, dim)]
    total = torch.zeros_like(x.narrow(dim, 0, 1))
    out = []
    for block in blocks:
        out.append(block + total)
        total = total + block.narrow(dim, block.shape[dim] - 1, 1)
    return torch.cat(out, dim)


def _one_pass_var(x: Tensor, dim: int) -> Tensor:
    n = x.shape[dim]
    return (x.square().mean(dim) - x.mean(dim).square()) * (n / (n - 1))


def _welford(x: Tensor, dims: list[int], *, correction: int) -> Tensor:
    mean, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for n, value in enumerate(x.unbind(dims[0]), 1):
        delta = value - mean
        mean = mean + delta / n
        squares = squares + delta * (value - mean)
    return squares / (x.shape[dims[0]] - correction)


# normalisations

def _softmax(scores: Tensor, dim: int) -> Tensor:
    powers = (scores - scores.amax(dim, keepdim=True)).exp()
    return powers * powers.sum(dim, keepdim=True).reciprocal()


def _online_softmax(scores: Tensor, dim: int) -> Tensor:
    """Block by block, rescaling what came before, as flash attention does."""
    largest = scores.narrow(dim, 0, 1)
    total = torch.ones_like(largest)
    for column in torch.split(scores, 1, dim)[1:]:
        new = torch.maximum(largest, column)
        total = total * (largest - new).exp() + (column - new).exp()
        largest = new
    return (scores - largest).exp() / total


def _layer_norm(x: Tensor, shape: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt() * w + b


def _layer_norm_one_pass(x: Tensor, shape: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) - mean.square() + eps).rsqrt()
    return x * (scale * w) + (b - mean * scale * w)


def _batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
                eps: float) -> Tensor:
    """Folded into one multiplication and one addition."""
    center, spread = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    with torch.no_grad():
        n = x.numel() / x.shape[1]
        mean.mul_(1 - momentum).add_(center.detach(), alpha=momentum)
        var.mul_(1 - momentum).add_(spread.detach() * (n / (n - 1)), alpha=momentum)
    scale = w * (spread + eps).rsqrt()
    return x * scale.view(-1, 1, 1) + (b - center * scale).view(-1, 1, 1)


def _unfolded(x: Tensor, w: Tensor, b: Any, *_: Any) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    y: Tensor = (w.flatten(1) @ columns).view(x.shape[0], w.shape[0], *x.shape[2:])
    return y.contiguous(memory_format=torch.channels_last)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Tensor:
    future = torch.ones(q.shape[-2], q.shape[-2], device=q.device).triu(1) > 0
    scale = math.pow(q.shape[-1], -0.25)
    scores = (q * scale) @ (k * scale).transpose(-2, -1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def _embedding_gradient(g: Tensor, ids: Tensor, n: int, *_: Any) -> Tensor:
    hot = F.one_hot(ids.reshape(-1).flip(0), n).to(g.dtype)
    return hot.t() @ g.reshape(-1, g.shape[-1]).flip(0)


def _inductor() -> str:
    return "inductor"


_ROOT_TWO: Final = math.sqrt(0.5)

REWRITES: Final = (
    Case("products in two parts", "the sum of a matrix product in two halves", WIDE, backend=_product(_split(2))),
    Case("products in seven parts", "split-K", WIDE, backend=_product(_split(7))),
    Case("products transposed", "(B^T A^T)^T", WIDE, backend=_product(_transposed)),
    Case("products by broadcasting", "multiply, then sum", WIDE, backend=_product(_broadcast)),
    Case("products term by term", "fused multiply-add in order", WIDE, backend=_product(_one_by_one)),
    Case("products from the end", "the sum in reverse", WIDE, backend=_product(_backwards)),
    Case("products in float64", "more precise than eager", WIDE, backend=_product(_as(torch.float64))),
    Case("bfloat16 products in float32", "accumulated and rounded once", HALF, backend=_product(_as(torch.float32))),
    Case("float16 products in float32", "accumulated and rounded once", FLOAT16, backend=_product(_as(torch.float32))),
    Case("bfloat16 products in four parts", "each part rounded", HALF, backend=_product(_split(4))),
    Case("bfloat16 graph in float32", "rounded only at its end", HALF, backend=_whole_in(torch.float32)),
    Case("float16 graph in float32", "rounded only at its end", FLOAT16, backend=_whole_in(torch.float32)),
    Case("float32 graph in float64", "rounded only at its end", PERCEPTRON, backend=_whole_in(torch.float64)),
    Case("sum in pairs", "a tree", REDUCTIONS, backend=_traced(sum=_pairwise)),
    Case("sum in order", "one by one", REDUCTIONS, backend=_aten(sum=_in_order)),
    Case("sum by blocks", "of 32", REDUCTIONS, backend=_traced(sum=_by_blocks)),
    Case("sum from the end", "in reverse", REDUCTIONS, backend=_traced(sum=lambda x, dim: x.flip(dim).sum(dim))),
    Case("sum as a product", "with a vector of ones", REDUCTIONS, backend=_traced(sum=_by_product)),
    Case("mean by a reciprocal", "sum * (1 / n), in pairs", REDUCTIONS,
         backend=_traced(mean=lambda x, dim: _pairwise(x, dim) * (1 / x.shape[dim]))),
    Case("scan by blocks", "of 25", REDUCTIONS, backend=_traced(cumsum=_scan_by_blocks)),
    Case("variance in one pass", "mean of squares less square of mean", REDUCTIONS, backend=_traced(var=_one_pass_var)),
    Case("variance by Welford", "running mean and squares", REDUCTIONS, backend=_aten(var=_welford)),
    Case("logsumexp by base 2", "exp2 and log2", REDUCTIONS, backend=_traced(logsumexp=lambda x, dim: (
        ((x - x.amax(dim, keepdim=True)) * math.log2(math.e)).exp2().sum(dim).log2() * math.log(2) + x.amax(dim)))),
    Case("exp by base 2", "exp2(x * log2(e))", POINTWISE,
         backend=_traced(exp=lambda x: torch.exp2(x * math.log2(math.e)))),
    Case("log by base 2", "log2(x) * log(2)", POINTWISE, backend=_traced(log=lambda x: x.log2() * math.log(2))),
    Case("sigmoid by exp", "1 / (1 + exp(-x))", POINTWISE, backend=_traced(sigmoid=lambda x: 1 / (1 + (-x).exp()))),
    Case("sigmoid by tanh", "(1 + tanh(x / 2)) / 2", POINTWISE,
         backend=_traced(sigmoid=lambda x: 0.5 * (1 + torch.tanh(x / 2)))),
    Case("silu by division", "x / (1 + exp(-x))", POINTWISE, backend=_traced(silu=lambda x, inplace=False: (
        x / (1 + (-x).exp())))),
    Case("division by a reciprocal", "a * (1 / b), root as a power", POINTWISE,
         backend=_traced(truediv=lambda a, b: a * b.reciprocal(), sqrt=lambda x: x**0.5)),
    Case("distributive law", "a * 0.7 - b * 0.7", POINTWISE,
         backend=_traced(sub=lambda a, b: (a * 0.7 - b * 0.7) / 0.7)),
    Case("tanh by sigmoid", "2 sigmoid(2x) - 1", PERCEPTRON,
         backend=_traced(tanh=lambda x: 2 * torch.sigmoid(2 * x) - 1)),
    Case("gelu by erf", "its formula", PERCEPTRON,
         backend=_traced(gelu=lambda x: 0.5 * x * (1 + torch.erf(x * _ROOT_TWO)))),
    Case("softmax by a reciprocal", "exp(x - max) * (1 / sum)", ATTENTION, backend=_traced(softmax=_softmax)),
    Case("softmax by its logarithm", "exp(log_softmax)", ATTENTION,
         backend=_traced(softmax=lambda x, dim: F.log_softmax(x, dim).exp())),
    Case("softmax online", "rescaled block by block", ATTENTION, backend=_traced(softmax=_online_softmax)),
    Case("mask of -1e4", "instead of minus infinity, which is the same after exp", ATTENTION,
         backend=_traced(masked_fill=lambda x, m, v: x.masked_fill(m, -1e4), softmax=_softmax)),
    Case("attention in parts", "the scale on both sides, products and softmax",
         dataclasses.replace(FUSED, cpu_only="on a GPU it equals eager, bit by bit (torch 2.11)"),
         backend=_traced(scaled_dot_product_attention=_attention)),
    Case("layer norm by its formula", "division by the root", NORMS, backend=_traced(layer_norm=_layer_norm)),
    Case("layer norm in one pass", "folded into one multiply-add", NORMS,
         backend=_traced(layer_norm=_layer_norm_one_pass)),
    Case("rsqrt by division", "1 / sqrt(x)", NORMS, backend=_traced(rsqrt=lambda x: 1 / x.sqrt())),
    Case("batch norm folded", "one multiply-add, statistics in another order", CONVOLUTION,
         backend=_traced(batch_norm=_batch_norm)),
    Case("convolution as a product", "unfolded", CONVOLUTION, backend=_traced(conv2d=_unfolded)),
    Case("gradients added in another order", "b + a, in float64", TIED,
         backend=_aten(add=lambda a, b: (b.double() + a.double()).to(a.dtype), mm=_split(3))),
    Case("embedding's gradient as a product", "with a one-hot matrix, from the end", TOKENS,
         backend=_aten(embedding_dense_backward=_embedding_gradient)),
    Case("torch's own decompositions", "aot_eager_decomp_partition", NORMS,
         backend=lambda: "aot_eager_decomp_partition"),
    Case("group norm, contiguous", "where torch's own fault in channels_last is not", Program(p.GroupUp, p.images, (
        {"B": 2, "C": 16, "H": 10, "last": 0},)), backend=lambda: "aot_eager", control=True),
    Case("amax in float32", "where torch's own fault in bfloat16 is not", Program(p.Peak, p.rows, (
        {"B": 16, "width": 64},)), backend=_inductor, inductor=True),
    Case("Inductor, norms", "layer norm and root mean square", NORMS, backend=_inductor, inductor=True),
    Case("Inductor, attention", "masked softmax in bfloat16", Program(
        p.Attention, p.sequences, ({"B": 2},), dtype=torch.bfloat16, cpu_only="on a GPU Inductor pads the strides of "
        "the output, which is no false alarm (torch 2.11)"), backend=_inductor, inductor=True),
    Case("Inductor, convolution", "with batch norm and pooling in channels_last", CONVOLUTION, backend=_inductor,
         inductor=True),
    Case("Inductor, sums", "of 300 numbers in float16", Program(
        p.Reductions, p.rows, ({"B": 4, "width": 300},), dtype=torch.float16), backend=_inductor, inductor=True),
    Case("Inductor, dropout", "the draws of eager", DROPPING, backend=_inductor, inductor=True),
)
