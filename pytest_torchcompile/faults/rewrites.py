"""Correct backends whose roundings are not eager's: nothing may be reported about them."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Runner, Toolkit, both, operator_of, replace
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import Case, Program, named_backend

__all__ = ["REWRITES"]

FLOAT16_PERCEPTRON = Program(p.Perceptron, p.rows, dtype=torch.float16)


def _wide_layers() -> nn.Module:
    # Sums of 200 products: of 12 ones too many would be bitwise equal in any order.
    return nn.Sequential(nn.Linear(200, 40), nn.Tanh(), nn.Linear(40, 6))


def _wide_rows(B: int) -> Tensor:
    return p.rows(B, 200)


WIDE = Program(_wide_layers, _wide_rows)
# Both have a fault of torch's in another dtype or memory format (wrong_gradients); here it is not.
CONTIGUOUS_GROUP_NORM = Program(p.GroupUp, p.images, ({"B": 2, "C": 16, "H": 10, "last": 0},))
FLOAT32_PEAK = Program(p.Peak, p.rows, ({"B": 16, "width": 64},))
FUSED_ON_CPU = dataclasses.replace(p.FUSED, cpu_only="on a GPU it equals eager, bit by bit (torch 2.11)")
HALF_ATTENTION = Program(
    p.Attention, p.sequences, ({"B": 2},), dtype=torch.bfloat16,
    cpu_only="on a GPU Inductor pads the strides of the output, which is no false alarm (torch 2.11)",
)
FLOAT16_REDUCTIONS = Program(p.Reductions, p.rows, ({"B": 4, "width": 300},), dtype=torch.float16)


def _swap_aten(**functions: Callable[..., Any]) -> Callable[[], Toolkit]:
    """Other functions for ATen operators, wherever they occur, in forward and backward."""

    def swap_targets(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if operator_of(node) in functions:
                node.target = functions[operator_of(node)]

    return partial(Toolkit, forward=swap_targets, backward=swap_targets)


def _swap_traced(**functions: Callable[..., Any]) -> Callable[[], Toolkit]:
    """Other functions for operators of Dynamo's graph; the backward follows."""
    passes = [replace(name, function) for name, function in functions.items()]
    return partial(Toolkit, dynamo=both(*passes))


# products of matrices

def _split_product(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        pieces = zip(a.tensor_split(parts, -1), b.tensor_split(parts, 0), strict=True)
        return torch.stack([x @ y for x, y in pieces]).sum(0)

    return multiply


def _product_in(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return (a.to(dtype) @ b.to(dtype)).to(a.dtype)

    return multiply


def _swap_products(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Toolkit]:
    def multiply_and_add(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b) + c

    return _swap_aten(mm=multiply, addmm=multiply_and_add)


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return (b.t() @ a.t()).t().contiguous()


def _broadcast_product(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(-1) * b).sum(-2)


def _term_by_term(a: Tensor, b: Tensor) -> Tensor:
    total = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = torch.addcmul(total, a[:, k, None], b[None, k])
    return total


def _from_the_end(a: Tensor, b: Tensor) -> Tensor:
    return a.flip(-1) @ b.flip(0)


def _graph_in(dtype: torch.dtype) -> Callable[[], Toolkit]:
    """The whole graph in another precision, rounded only where it ends, as fused kernels do."""

    def run_in_dtype(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run_cast(*inputs: Any) -> list[Any]:
            own = next(i.dtype for i in inputs if isinstance(i, Tensor) and i.is_floating_point())
            returned = forward(*(_cast(each, dtype) for each in inputs))
            return [_cast(each, own) for each in returned]

        return run_cast

    return partial(Toolkit, forward=run_in_dtype, backward=run_in_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


# sums

def _pairwise_sum(x: Tensor, dim: int) -> Tensor:
    while x.shape[dim] > 1:
        half, odd = divmod(x.shape[dim], 2)
        pairs = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        if odd:
            # The last term waits for the next round.
            pairs = torch.cat([pairs, x.narrow(dim, 2 * half, 1)], dim)
        x = pairs
    return x.squeeze(dim)


def _reversed_sum(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).sum(dim)


def _reciprocal_mean(x: Tensor, dim: int) -> Tensor:
    return _pairwise_sum(x, dim) * (1 / x.shape[dim])


def _sum_in_order(x: Tensor, dims: list[int]) -> Tensor:
    total = torch.zeros_like(x[:, 0])
    for part in x.unbind(dims[0]):
        total = total + part
    return total


def _sum_by_blocks(x: Tensor, dim: int) -> Tensor:
    return torch.stack([block.sum(dim) for block in torch.split(x, 32, dim)]).sum(0)


def _sum_as_product(x: Tensor, dim: int) -> Tensor:
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


def _welford_var(x: Tensor, dims: list[int], *, correction: int) -> Tensor:
    mean, squares = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for n, value in enumerate(x.unbind(dims[0]), 1):
        delta = value - mean
        mean = mean + delta / n
        squares = squares + delta * (value - mean)
    return squares / (x.shape[dims[0]] - correction)


def _base_two_logsumexp(x: Tensor, dim: int) -> Tensor:
    powers = ((x - x.amax(dim, keepdim=True)) * math.log2(math.e)).exp2()
    return powers.sum(dim).log2() * math.log(2) + x.amax(dim)


# functions of one number

def _base_two_exp(x: Tensor) -> Tensor:
    return torch.exp2(x * math.log2(math.e))


def _base_two_log(x: Tensor) -> Tensor:
    return x.log2() * math.log(2)


def _sigmoid_by_exp(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _sigmoid_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(x / 2))


def _silu_by_division(x: Tensor, inplace: bool = False) -> Tensor:
    return x / (1 + (-x).exp())


def _reciprocal_division(a: Tensor, b: Tensor) -> Tensor:
    return a * b.reciprocal()


def _root_as_power(x: Tensor) -> Tensor:
    return x**0.5


def _distributed_sub(a: Tensor, b: Tensor) -> Tensor:
    return (a * 0.7 - b * 0.7) / 0.7


def _tanh_by_sigmoid(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def _gelu_by_erf(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x * _ROOT_OF_HALF))


def _rsqrt_by_division(x: Tensor) -> Tensor:
    return 1 / x.sqrt()


# normalisations

def _reciprocal_softmax(scores: Tensor, dim: int) -> Tensor:
    powers = (scores - scores.amax(dim, keepdim=True)).exp()
    return powers * powers.sum(dim, keepdim=True).reciprocal()


def _exp_of_log_softmax(x: Tensor, dim: int) -> Tensor:
    return F.log_softmax(x, dim).exp()


def _finite_mask(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return x.masked_fill(mask, -1e4)


def _online_softmax(scores: Tensor, dim: int) -> Tensor:
    """Block by block, rescaling what came before, as flash attention does."""
    largest = scores.narrow(dim, 0, 1)
    total = torch.ones_like(largest)
    for column in torch.split(scores, 1, dim)[1:]:
        new = torch.maximum(largest, column)
        total = total * (largest - new).exp() + (column - new).exp()
        largest = new
    return (scores - largest).exp() / total


def _layer_norm_by_formula(x: Tensor, shape: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt() * w + b


def _layer_norm_one_pass(x: Tensor, shape: Any, w: Tensor, b: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) - mean.square() + eps).rsqrt()
    return x * (scale * w) + (b - mean * scale * w)


def _folded_batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
                       eps: float) -> Tensor:
    """Folded into one multiplication and one addition."""
    center, spread = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    with torch.no_grad():
        n = x.numel() / x.shape[1]
        mean.mul_(1 - momentum).add_(center.detach(), alpha=momentum)
        var.mul_(1 - momentum).add_(spread.detach() * (n / (n - 1)), alpha=momentum)
    scale = w * (spread + eps).rsqrt()
    return x * scale.view(-1, 1, 1) + (b - center * scale).view(-1, 1, 1)


def _unfolded_conv2d(x: Tensor, w: Tensor, b: Any, *_: Any) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    y: Tensor = (w.flatten(1) @ columns).view(x.shape[0], w.shape[0], *x.shape[2:])
    return y.contiguous(memory_format=torch.channels_last)


def _attention_in_parts(q: Tensor, k: Tensor, v: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> Tensor:
    future = torch.ones(q.shape[-2], q.shape[-2], device=q.device).triu(1) > 0
    scale = math.pow(q.shape[-1], -0.25)
    scores = (q * scale) @ (k * scale).transpose(-2, -1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def _embedding_gradient(g: Tensor, ids: Tensor, n: int, *_: Any) -> Tensor:
    hot = F.one_hot(ids.reshape(-1).flip(0), n).to(g.dtype)
    return hot.t() @ g.reshape(-1, g.shape[-1]).flip(0)


def _add_in_float64(a: Tensor, b: Tensor) -> Tensor:
    return (b.double() + a.double()).to(a.dtype)


_ROOT_OF_HALF: Final = math.sqrt(0.5)
INDUCTOR: Final = named_backend("inductor")

REWRITES: Final = (
    # products of matrices
    Case("products in two parts", "the sum of a matrix product in two halves", WIDE,
         backend=_swap_products(_split_product(2))),
    Case("products in seven parts", "split-K", WIDE, backend=_swap_products(_split_product(7))),
    Case("products transposed", "(B^T A^T)^T", WIDE, backend=_swap_products(_transposed_product)),
    Case("products by broadcasting", "multiply, then sum", WIDE, backend=_swap_products(_broadcast_product)),
    Case("products term by term", "fused multiply-add in order", WIDE, backend=_swap_products(_term_by_term)),
    Case("products from the end", "the sum in reverse", WIDE, backend=_swap_products(_from_the_end)),
    Case("products in float64", "more precise than eager", WIDE, backend=_swap_products(_product_in(torch.float64))),
    Case("bfloat16 products in float32", "accumulated and rounded once", p.HALF_PERCEPTRON,
         backend=_swap_products(_product_in(torch.float32))),
    Case("float16 products in float32", "accumulated and rounded once", FLOAT16_PERCEPTRON,
         backend=_swap_products(_product_in(torch.float32))),
    Case("bfloat16 products in four parts", "each part rounded", p.HALF_PERCEPTRON,
         backend=_swap_products(_split_product(4))),
    Case("bfloat16 graph in float32", "rounded only at its end", p.HALF_PERCEPTRON, backend=_graph_in(torch.float32)),
    Case("float16 graph in float32", "rounded only at its end", FLOAT16_PERCEPTRON, backend=_graph_in(torch.float32)),
    Case("float32 graph in float64", "rounded only at its end", p.PERCEPTRON, backend=_graph_in(torch.float64)),
    # sums
    Case("sum in pairs", "a tree", p.REDUCTIONS, backend=_swap_traced(sum=_pairwise_sum)),
    Case("sum in order", "one by one", p.REDUCTIONS, backend=_swap_aten(sum=_sum_in_order)),
    Case("sum by blocks", "of 32", p.REDUCTIONS, backend=_swap_traced(sum=_sum_by_blocks)),
    Case("sum from the end", "in reverse", p.REDUCTIONS, backend=_swap_traced(sum=_reversed_sum)),
    Case("sum as a product", "with a vector of ones", p.REDUCTIONS, backend=_swap_traced(sum=_sum_as_product)),
    Case("mean by a reciprocal", "sum * (1 / n), in pairs", p.REDUCTIONS, backend=_swap_traced(mean=_reciprocal_mean)),
    Case("scan by blocks", "of 25", p.REDUCTIONS, backend=_swap_traced(cumsum=_scan_by_blocks)),
    Case("variance in one pass", "mean of squares less square of mean", p.REDUCTIONS,
         backend=_swap_traced(var=_one_pass_var)),
    Case("variance by Welford", "running mean and squares", p.REDUCTIONS, backend=_swap_aten(var=_welford_var)),
    Case("logsumexp by base 2", "exp2 and log2", p.REDUCTIONS, backend=_swap_traced(logsumexp=_base_two_logsumexp)),
    # functions of one number
    Case("exp by base 2", "exp2(x * log2(e))", p.POINTWISE, backend=_swap_traced(exp=_base_two_exp)),
    Case("log by base 2", "log2(x) * log(2)", p.POINTWISE, backend=_swap_traced(log=_base_two_log)),
    Case("sigmoid by exp", "1 / (1 + exp(-x))", p.POINTWISE, backend=_swap_traced(sigmoid=_sigmoid_by_exp)),
    Case("sigmoid by tanh", "(1 + tanh(x / 2)) / 2", p.POINTWISE, backend=_swap_traced(sigmoid=_sigmoid_by_tanh)),
    Case("silu by division", "x / (1 + exp(-x))", p.POINTWISE, backend=_swap_traced(silu=_silu_by_division)),
    Case("division by a reciprocal", "a * (1 / b), root as a power", p.POINTWISE,
         backend=_swap_traced(truediv=_reciprocal_division, sqrt=_root_as_power)),
    Case("distributive law", "a * 0.7 - b * 0.7", p.POINTWISE, backend=_swap_traced(sub=_distributed_sub)),
    Case("tanh by sigmoid", "2 sigmoid(2x) - 1", p.PERCEPTRON, backend=_swap_traced(tanh=_tanh_by_sigmoid)),
    Case("gelu by erf", "its formula", p.PERCEPTRON, backend=_swap_traced(gelu=_gelu_by_erf)),
    # attention
    Case("softmax by a reciprocal", "exp(x - max) * (1 / sum)", p.ATTENTION,
         backend=_swap_traced(softmax=_reciprocal_softmax)),
    Case("softmax by its logarithm", "exp(log_softmax)", p.ATTENTION,
         backend=_swap_traced(softmax=_exp_of_log_softmax)),
    Case("softmax online", "rescaled block by block", p.ATTENTION, backend=_swap_traced(softmax=_online_softmax)),
    Case("mask of -1e4", "instead of minus infinity, which is the same after exp", p.ATTENTION,
         backend=_swap_traced(masked_fill=_finite_mask, softmax=_reciprocal_softmax)),
    Case("attention in parts", "the scale on both sides, products and softmax", FUSED_ON_CPU,
         backend=_swap_traced(scaled_dot_product_attention=_attention_in_parts)),
    # norms and convolutions
    Case("layer norm by its formula", "division by the root", p.NORMS,
         backend=_swap_traced(layer_norm=_layer_norm_by_formula)),
    Case("layer norm in one pass", "folded into one multiply-add", p.NORMS,
         backend=_swap_traced(layer_norm=_layer_norm_one_pass)),
    Case("rsqrt by division", "1 / sqrt(x)", p.NORMS, backend=_swap_traced(rsqrt=_rsqrt_by_division)),
    Case("batch norm folded", "one multiply-add, statistics in another order", p.CONVOLUTION,
         backend=_swap_traced(batch_norm=_folded_batch_norm)),
    Case("convolution as a product", "unfolded", p.CONVOLUTION, backend=_swap_traced(conv2d=_unfolded_conv2d)),
    # gradients
    Case("gradients added in another order", "b + a, in float64", p.TIED,
         backend=_swap_aten(add=_add_in_float64, mm=_split_product(3))),
    Case("embedding's gradient as a product", "with a one-hot matrix, from the end", p.TOKENS,
         backend=_swap_aten(embedding_dense_backward=_embedding_gradient)),
    # torch's own backends
    Case("torch's own decompositions", "aot_eager_decomp_partition", p.NORMS,
         backend=named_backend("aot_eager_decomp_partition")),
    Case("group norm, contiguous", "where torch's own fault in channels_last is not", CONTIGUOUS_GROUP_NORM,
         backend=named_backend("aot_eager"), control=True),
    Case("amax in float32", "where torch's own fault in bfloat16 is not", FLOAT32_PEAK, backend=INDUCTOR,
         inductor=True),
    Case("Inductor, norms", "layer norm and root mean square", p.NORMS, backend=INDUCTOR, inductor=True),
    Case("Inductor, attention", "masked softmax in bfloat16", HALF_ATTENTION, backend=INDUCTOR, inductor=True),
    Case("Inductor, convolution", "with batch norm and pooling in channels_last", p.CONVOLUTION, backend=INDUCTOR,
         inductor=True),
    Case("Inductor, sums", "of 300 numbers in float16", FLOAT16_REDUCTIONS, backend=INDUCTOR, inductor=True),
    Case("Inductor, dropout", "the draws of eager", p.DROPPING, backend=INDUCTOR, inductor=True),
)
