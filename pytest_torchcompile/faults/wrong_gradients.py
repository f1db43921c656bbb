"""Planted faults: the outputs are right, the backward is not."""



from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Runner, Toolkit, drop, edit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import backward, element, gradient, rounded, traced

__all__ = ["GRADIENTS"]

PERCEPTRON = Program(p.Perceptron, p.rows)
HALF = Program(p.Perceptron, p.rows, dtype=torch.bfloat16)
SIZES = Program(p.Perceptron, p.rows, ({"B": 4}, {"B": 7}, {"B": 6}))
TWO_BATCHES = Program(p.Perceptron, p.rows, ({"B": 8}, {"B": 8}))
TIED = Program(p.Tied, p.rows)
NAMED = Program(p.Named, p.rows)
ATTENTION = Program(p.Attention, p.sequences, ({"B": 2},))
DROPPING = Program(p.Dropping, p.rows, ({"B": 32},))
TOKENS = Program(p.Tokens, p.token_ids)
B, C_BIAS, X = (24, 24), (6,), (8, 12)
"""Shapes that tell the gradients of a perceptron apart: b.weight, c.bias, the input."""


class Clipped(nn.Module):
    """Values between -1 and 1; what is cut off has no gradient. (B, 12) -> (B, 12)."""

    def forward(self, x: Tensor) -> Any:
        return x.clamp(-1, 1) * 3


class Distances(nn.Module):
    """Lengths of rows, some of which are zero: there the gradient is zero by convention. (B, 12) -> (B,)."""

    def forward(self, x: Tensor) -> Any:
        return torch.linalg.vector_norm(x * (torch.arange(x.shape[0], device=x.device) % 2).view(-1, 1), dim=-1)


class Largest(nn.Module):
    """The largest number of each row; where several are equal the gradient is shared. (B, 12) -> (B,)."""

    def forward(self, x: Tensor) -> Any:
        return torch.amax(x, -1)


class Stopped(nn.Module):
    """A weight that takes part but gets no gradient. (B, 12) -> (B, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.target = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Any:
        return x * self.w - self.target.detach()


def _ones_for_gradients(module: fx.GraphModule) -> Runner:
    module.recompile()
    run = module.forward
    return lambda *inputs: run(*inputs[:-1], torch.ones_like(inputs[-1]))


def _swapped(found: list[Any], _: object) -> list[Any]:
    """The gradients of the two weights of one shape change places."""
    one, other = (i for i, g in enumerate(found) if isinstance(g, Tensor) and g.shape == (6, 12))
    found[one], found[other] = found[other], found[one]
    return found


def _kept_from_before(add: bool) -> Toolkit:
    """The gradients of the first backward; added to those of later ones, or in their place."""
    first: list[Any] = []

    def change(found: list[Any], _: object) -> list[Any]:
        if not first:
            first[:] = found
            return found
        return [g if g is None else f + g if add else f for f, g in zip(first, found, strict=True)]

    return Toolkit(backward=results(change))


def _no_gradient(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w, bias.detach())


class _Unclipped(torch.autograd.Function):
    """clamp, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def _unclipped(x: Tensor, low: float, high: float) -> Any:
    return _Unclipped.apply(x, low, high)  # type: ignore[no-untyped-call]


def _in_dynamic_graphs(module: fx.GraphModule) -> Runner | None:
    symbolic = any(isinstance(size, torch.SymInt) for node in module.graph.nodes if node.op == "placeholder"
                   for size in getattr(node.meta.get("val"), "shape", ()))
    return results(lambda found, _: [g if g is None else g * 1.01 for g in found])(module) if symbolic else None


GRADIENTS: Final = (
    Case("gradient zero", "one weight never learns", PERCEPTRON, "gradient", gradient(B, lambda g: g * 0), "b.weight",
         alone=True),
    Case("gradient negated", "one weight learns the opposite", PERCEPTRON, "gradient", gradient(B, lambda g: -g),
         "b.weight", alone=True),
    Case("gradient x 1.01", "one weight learns 1 % faster", PERCEPTRON, "gradient", gradient(B, lambda g: g * 1.01),
         "b.weight", alone=True),
    Case("gradient x 1.0001", "one weight learns 0.01 % faster", PERCEPTRON, "gradient",
         gradient(B, lambda g: g * 1.0001), "b.weight", alone=True),
    Case("gradient x 1.0000001", "one weight learns 1e-7 faster", PERCEPTRON, "gradient",
         gradient(B, lambda g: g * 1.0000001), "b.weight", below="the next float32 number"),
    Case("gradient of the input", "x 1.01, which only models before this one see", PERCEPTRON, "gradient",
         gradient(X, lambda g: g * 1.01), "input", alone=True),
    Case("gradient of a bias", "averaged over the batch instead of summed", PERCEPTRON, "gradient",
         gradient(C_BIAS, lambda g: g / 8), "c.bias", alone=True),
    Case("one element of a gradient", "one of 576 is 1 % off", PERCEPTRON, "gradient", gradient(B, element(300, 1.01)),
         "b.weight", alone=True),
    Case("gradient transposed", "of a square weight", PERCEPTRON, "gradient", gradient(B, lambda g: g.t().contiguous()),
         "b.weight", alone=True),
    Case("gradient rounded to float16", "a float32 gradient went through float16", PERCEPTRON, "gradient",
         gradient(B, rounded(torch.float16)), "b.weight", alone=True),
    Case("gradient NaN", "one element of one gradient", PERCEPTRON, "gradient", gradient(B, element(5, float("nan"))),
         "b.weight", alone=True),
    Case("gradient x 1.05 in bfloat16", "one weight learns 5 % faster", HALF, "gradient",
         gradient(B, lambda g: g * 1.05), "b.weight", alone=True),
    Case("gradient x 1.005 in bfloat16", "one weight learns 0.5 % faster", HALF, "gradient",
         gradient(B, lambda g: g * 1.005), "b.weight", below="bfloat16 has 8 bits: neighbours are 0.4 to 0.8 % apart"),
    Case("not accumulated", "of a weight that is used twice only one use counts", TIED, "gradient",
         lambda: Toolkit(backward=drop("add")), "w", alone=True),
    Case("missing gradient", "a bias is cut off from the loss", PERCEPTRON, "gradient",
         traced("linear", _no_gradient, nth=1), "b.bias", alone=True),
    Case("extra gradient", "what the model detaches learns", Program(Stopped, p.rows), "gradient",
         lambda: Toolkit(dynamo=drop("detach")), "target", alone=True),
    Case("gradients swapped", "two weights of one shape learn for each other", NAMED, "gradient",
         lambda: Toolkit(backward=results(_swapped)), "a.weight"),
    Case("incoming gradient ignored", "the backward starts from ones", PERCEPTRON, "gradient",
         lambda: Toolkit(backward=_ones_for_gradients)),
    Case("operator dropped in the backward", "tanh is differentiated as the identity", PERCEPTRON, "gradient",
         lambda: Toolkit(backward=drop("tanh_backward")), "a.weight"),
    Case("wrong derivative", "that of tanh gelu for exact gelu", PERCEPTRON, "gradient",
         backward("gelu_backward", lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh")), "b.weight"),
    Case("gradient of what was clipped", "passes outside of the range too", Program(Clipped, p.rows), "gradient",
         traced("clamp", _unclipped), "input", alone=True),
    Case("gradient of a length at zero", "NaN instead of zero", Program(Distances, p.rows), "gradient",
         traced("linalg_vector_norm", lambda x, dim: x.square().sum(dim).sqrt()), "input", alone=True),
    Case("gradient among ties", "goes to the first of equal numbers", Program(Largest, p.whole_rows), "gradient",
         traced("amax", lambda x, dim: x.max(dim).values), "input", alone=True),
    Case("softmax without its sum", "the backward of softmax leaves a term out", ATTENTION, "gradient",
         backward("_softmax_backward_data", lambda g, y, dim, dtype: g * y), "q.weight"),
    Case("another mask in the backward", "dropout draws again", DROPPING, "gradient",
         backward("native_dropout_backward", lambda g, mask, scale: g * mask.roll(1, 0) * scale), "a.weight"),
    Case("duplicates lost in the backward", "a token that occurs twice learns once", TOKENS, "gradient",
         backward("embedding_dense_backward", lambda g, ids, n, *_: g.new_zeros(n, g.shape[-1]).index_copy(
             0, ids.reshape(-1), g.reshape(-1, g.shape[-1]))), "table.weight", alone=True),
    Case("stale gradient", "that of the first batch", TWO_BATCHES, "gradient", lambda: _kept_from_before(False)),
    Case("gradient of two calls", "that of the first batch is added to every later one", TWO_BATCHES, "gradient",
         lambda: _kept_from_before(True)),
    Case("wrong backward when dynamic", "1 % off in a backward graph with symbolic sizes", SIZES, "gradient",
         lambda: Toolkit(backward=_in_dynamic_graphs)),
    Case("constant of the backward", "the forward multiplies by 0.7, the backward by 0.7007",
         Program(p.Pointwise, p.rows), "gradient", lambda: Toolkit(backward=edit("mul", _a_number_off)), "shift"),
    Case("amax in bfloat16", "torch's own: NaN where a maximum is stored rounded (pytorch#186799)",
         Program(p.Peak, p.rows, ({"B": 16, "width": 64},), dtype=torch.bfloat16), "gradient",
         lambda: "inductor", "w", inductor=True, upstream="pytorch#186799"),
    Case("group norm in channels_last", "torch's own: aot_eager mixes memory formats up in the backward",
         Program(p.GroupUp, p.images, ({"B": 2, "C": 16, "H": 10},)), "gradient",
         lambda: "aot_eager", "norm.weight", upstream="native_group_norm_backward"),
)


def _a_number_off(node: fx.Node) -> None:
    if node.args[1] == 0.7:
        node.update_arg(1, 0.7007)
