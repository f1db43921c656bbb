"""Planted faults: the outputs are right, the backward is not."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Runner, Toolkit, edit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import (
    Case,
    Program,
    change_gradient,
    drop_in_backward,
    drop_operator,
    named_backend,
    one_element,
    rounded_to,
    scaled_by,
    swap_in_backward,
    swap_operator,
)

__all__ = ["GRADIENTS", "PENALIZED_CONTROLS"]

B, C_BIAS, X = (24, 24), (6,), (8, 12)
"""Shapes that tell the gradients of a perceptron apart: b.weight, c.bias, the input."""


class Clipped(nn.Module):
    """Values between -1 and 1; what is cut off has no gradient. (B, 12) -> (B, 12)."""

    def forward(self, x: Tensor) -> Any:
        return x.clamp(-1, 1) * 3


class Hooked(p.Perceptron):
    """A perceptron, one of whose gradients is clipped by a hook of the parameter. (B, 12) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight.register_hook(_clip_closely)  # type: ignore[no-untyped-call]


def _clip_closely(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def _drop_hooks(returned: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
    for each in inputs:
        # Private: ``Tensor._backward_hooks`` (torch 2.8 to 2.15).
        if isinstance(each, nn.Parameter) and each._backward_hooks:
            each._backward_hooks.clear()
    return returned


class Locked(p.Perceptron):
    """A perceptron that can't be copied, so that eager, compiled and reference are one object. (B, 12) -> (B, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def _leave_hook(returned: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
    for each in inputs:
        if isinstance(each, nn.Parameter) and list(each.shape) == list(B):
            each.register_hook(scaled_by(1.5))  # type: ignore[no-untyped-call]
    return returned


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


# what is done to one gradient


def _negated(gradient: Tensor) -> Tensor:
    return -gradient


def _averaged_over_batch(gradient: Tensor) -> Tensor:
    return gradient / 8


def _transposed(gradient: Tensor) -> Tensor:
    return gradient.t().contiguous()


# what is done to the whole backward


def _ones_for_gradients(module: fx.GraphModule) -> Runner:
    module.recompile()
    backward = module.forward

    def run_from_ones(*inputs: Any) -> Any:
        # The last input is the gradient of the output; before it comes what the forward has kept.
        return backward(*inputs[:-1], torch.ones_like(inputs[-1]))

    return run_from_ones


def _weights_swapped(gradients: list[Any], _: object) -> list[Any]:
    """The gradients of the two weights of one shape change places."""
    one, other = (i for i, g in enumerate(gradients) if isinstance(g, Tensor) and g.shape == (6, 12))
    gradients[one], gradients[other] = gradients[other], gradients[one]
    return gradients


def _first_for_ever() -> Toolkit:
    """The gradients of the first backward take the place of those of later ones."""
    first: list[Any] = []

    def return_first(gradients: list[Any], _: object) -> list[Any]:
        if not first:
            first[:] = gradients
        returned = list(first)
        for index, new in enumerate(gradients):
            # Who asks for fewer gradients than the first time must not get more.
            if new is None:
                returned[index] = None
        return returned

    return Toolkit(backward=results(return_first))


def _first_added() -> Toolkit:
    """The gradients of the first backward are added to those of later ones."""
    first: list[Any] = []

    def add_first(gradients: list[Any], _: object) -> list[Any]:
        if not first:
            first[:] = gradients
            return gradients
        returned = list(gradients)
        for index, new in enumerate(gradients):
            if new is not None:
                returned[index] = first[index] + new
        return returned

    return Toolkit(backward=results(add_first))


def _all_scaled(gradients: list[Any], _: object) -> list[Any]:
    scaled = []
    for gradient in gradients:
        # None: nobody asked for the gradient of this input.
        if gradient is not None:
            gradient = gradient * 1.01
        scaled.append(gradient)
    return scaled


def _wrong_where_symbolic(module: fx.GraphModule) -> Runner | None:
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        shape = getattr(node.meta.get("val"), "shape", ())
        if any(isinstance(size, torch.SymInt) for size in shape):
            return results(_all_scaled)(module)
    return None


# one operator whose derivative is another one's


def _detached_bias(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w, bias.detach())


def _tanh_gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")  # type: ignore[no-any-return]


class _ClampAsIdentity(torch.autograd.Function):
    """clamp, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def _clamp_as_identity(x: Tensor, low: float, high: float) -> Any:
    return _ClampAsIdentity.apply(x, low, high)  # type: ignore[no-untyped-call]


def _length_by_formula(x: Tensor, dim: int) -> Tensor:
    # The derivative of the root at zero is infinite, and infinity times zero is NaN.
    return x.square().sum(dim).sqrt()


def _first_of_the_largest(x: Tensor, dim: int) -> Tensor:
    return x.max(dim).values


def _softmax_without_sum(gradient: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
    return gradient * y


def _rolled_mask(gradient: Tensor, mask: Tensor, scale: float) -> Tensor:
    return gradient * mask.roll(1, 0) * scale


def _duplicates_overwritten(gradient: Tensor, ids: Tensor, count: int, *_: Any) -> Tensor:
    width = gradient.shape[-1]
    return gradient.new_zeros(count, width).index_copy(0, ids.reshape(-1), gradient.reshape(-1, width))


def _shift_number(node: fx.Node) -> None:
    if node.args[1] == 0.7:
        node.update_arg(1, 0.7007)


def _under_autocast(module: fx.GraphModule) -> Runner:
    """The backward computes in bfloat16, as if the caller's autocast were around it."""
    module.recompile()
    backward = module.forward

    def run_backward(*inputs: Any) -> Any:
        device = next(each.device.type for each in inputs if isinstance(each, Tensor))
        with torch.autocast(device, torch.bfloat16):
            returned = backward(*inputs)
        return [each.float() if isinstance(each, Tensor) else each for each in returned]

    return run_backward


def gradient_penalty(output: Tensor, batch: Any) -> Tensor:
    """Squares of the output and of its slope: a loss that differentiates twice."""
    (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    penalty: Tensor = output.square().mean() + slope.square().sum()
    return penalty


class _TanhOnce(torch.autograd.Function):
    """The tangent, and a derivative that is right and a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slope: Tensor = gradient * (1 - y.detach() ** 2)
        return slope


def _tanh_once(x: Tensor) -> Any:
    return _TanhOnce.apply(x)  # type: ignore[no-untyped-call]


def _differentiable_once() -> Any:
    """A backend without AOTAutograd, which would refuse a second derivative."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is torch.tanh:
                node.target = _tanh_once
        module.recompile()
        return module.forward

    return compile_graph


PENALIZED: Final = Program(p.Perceptron, p.rows, loss=gradient_penalty)

PENALIZED_CONTROLS: Final = (
    Case("gradient penalty", "nothing", PENALIZED, backend=named_backend("eager"), control=True),
)

GRADIENTS: Final = (
    # a loss that differentiates twice
    Case("derivative of a gradient", "the slope of tanh is a constant where the loss differentiates it", PENALIZED,
         "gradient", _differentiable_once, "weight"),
    Case("double backward", "torch's own: AOTAutograd refuses what the loss asks for", PENALIZED, "error",
         named_backend("aot_eager"), upstream="pytorch#91469"),
    # autocast
    Case("backward under autocast", "computed in bfloat16, the forward in float32", p.PERCEPTRON, "gradient",
         partial(Toolkit, backward=_under_autocast), "weight"),
    # one gradient of several
    Case("gradient zero", "one weight never learns", p.PERCEPTRON, "gradient", change_gradient(B, scaled_by(0)),
         "b.weight", alone=True),
    Case("gradient negated", "one weight learns the opposite", p.PERCEPTRON, "gradient", change_gradient(B, _negated),
         "b.weight", alone=True),
    Case("gradient x 1.01", "one weight learns 1 % faster", p.PERCEPTRON, "gradient",
         change_gradient(B, scaled_by(1.01)), "b.weight", alone=True),
    Case("gradient x 1.0001", "one weight learns 0.01 % faster", p.PERCEPTRON, "gradient",
         change_gradient(B, scaled_by(1.0001)), "b.weight", alone=True),
    Case("gradient x 1.0000001", "one weight learns 1e-7 faster", p.PERCEPTRON, "gradient",
         change_gradient(B, scaled_by(1.0000001)), "b.weight", below="the next float32 number"),
    Case("gradient of the input", "x 1.01, which only models before this one see", p.PERCEPTRON, "gradient",
         change_gradient(X, scaled_by(1.01)), "input", alone=True),
    Case("gradient of a bias", "averaged over the batch instead of summed", p.PERCEPTRON, "gradient",
         change_gradient(C_BIAS, _averaged_over_batch), "c.bias", alone=True),
    Case("one element of a gradient", "one of 576 is 1 % off", p.PERCEPTRON, "gradient",
         change_gradient(B, one_element(300, 1.01)), "b.weight", alone=True),
    Case("gradient transposed", "of a square weight", p.PERCEPTRON, "gradient", change_gradient(B, _transposed),
         "b.weight", alone=True),
    Case("gradient rounded to float16", "a float32 gradient went through float16", p.PERCEPTRON, "gradient",
         change_gradient(B, rounded_to(torch.float16)), "b.weight", alone=True),
    Case("gradient NaN", "one element of one gradient", p.PERCEPTRON, "gradient",
         change_gradient(B, one_element(5, float("nan"))), "b.weight", alone=True),
    Case("gradient x 1.05 in bfloat16", "one weight learns 5 % faster", p.HALF_PERCEPTRON, "gradient",
         change_gradient(B, scaled_by(1.05)), "b.weight", alone=True),
    Case("gradient x 1.005 in bfloat16", "one weight learns 0.5 % faster", p.HALF_PERCEPTRON, "gradient",
         change_gradient(B, scaled_by(1.005)), "b.weight",
         below="bfloat16 has 8 bits: neighbours are 0.4 to 0.8 % apart"),
    # gradients that are lost, made up or mixed up
    Case("not accumulated", "of a weight that is used twice only one use counts", p.TIED, "gradient",
         drop_in_backward("add"), "w", alone=True),
    Case("missing gradient", "a bias is cut off from the loss", p.PERCEPTRON, "gradient",
         swap_operator("linear", _detached_bias, nth=1), "b.bias", alone=True),
    Case("extra gradient", "what the model detaches learns", Program(Stopped, p.rows), "gradient",
         drop_operator("detach"), "target", alone=True),
    Case("gradients swapped", "two weights of one shape learn for each other", p.NAMED, "gradient",
         partial(Toolkit, backward=results(_weights_swapped)), "a.weight"),
    Case("incoming gradient ignored", "the backward starts from ones", p.PERCEPTRON, "gradient",
         partial(Toolkit, backward=_ones_for_gradients)),
    # the derivative of one operator
    Case("operator dropped in the backward", "tanh is differentiated as the identity", p.PERCEPTRON, "gradient",
         drop_in_backward("tanh_backward"), "a.weight"),
    Case("wrong derivative", "that of tanh gelu for exact gelu", p.PERCEPTRON, "gradient",
         swap_in_backward("gelu_backward", _tanh_gelu_backward), "b.weight"),
    Case("gradient of what was clipped", "passes outside of the range too", Program(Clipped, p.rows), "gradient",
         swap_operator("clamp", _clamp_as_identity), "input", alone=True),
    Case("hook of a parameter dropped", "a gradient is not clipped", Program(Hooked, p.rows), "gradient",
         partial(Toolkit, forward=results(_drop_hooks)), "b.weight", alone=True),
    Case("hook of a parameter left", "a gradient is scaled, also in every later run", Program(Locked, p.rows),
         "gradient", partial(Toolkit, forward=results(_leave_hook)), "b.weight", alone=True),
    Case("gradient of a length at zero", "NaN instead of zero", Program(Distances, p.rows), "gradient",
         swap_operator("linalg_vector_norm", _length_by_formula), "input", alone=True),
    Case("gradient among ties", "goes to the first of equal numbers", Program(Largest, p.whole_rows), "gradient",
         swap_operator("amax", _first_of_the_largest), "input", alone=True),
    Case("softmax without its sum", "the backward of softmax leaves a term out", p.ATTENTION, "gradient",
         swap_in_backward("_softmax_backward_data", _softmax_without_sum), "q.weight"),
    Case("another mask in the backward", "dropout draws again", p.DROPPING, "gradient",
         swap_in_backward("native_dropout_backward", _rolled_mask), "a.weight"),
    Case("duplicates lost in the backward", "a token that occurs twice learns once", p.TOKENS, "gradient",
         swap_in_backward("embedding_dense_backward", _duplicates_overwritten), "table.weight", alone=True),
    # right at first
    Case("stale gradient", "that of the first batch", p.TWO_BATCHES, "gradient", _first_for_ever),
    Case("gradient of two calls", "that of the first batch is added to every later one", p.TWO_BATCHES, "gradient",
         _first_added),
    Case("wrong backward when dynamic", "1 % off in a backward graph with symbolic sizes", p.THREE_SIZES, "gradient",
         partial(Toolkit, backward=_wrong_where_symbolic)),
    Case("constant of the backward", "the forward multiplies by 0.7, the backward by 0.7007", p.POINTWISE, "gradient",
         partial(Toolkit, backward=edit("mul", _shift_number)), "shift"),
    # torch's own
    Case("amax in bfloat16", "torch's own: NaN where a maximum is stored rounded (pytorch#186799)",
         Program(p.Peak, p.rows, ({"B": 16, "width": 64},), dtype=torch.bfloat16), "gradient",
         named_backend("inductor"), "w", inductor=True, upstream="pytorch#186799"),
    Case("group norm in channels_last", "torch's own: aot_eager mixes memory formats up in the backward",
         Program(p.GroupUp, p.images, ({"B": 2, "C": 16, "H": 10},)), "gradient",
         named_backend("aot_eager"), "norm.weight", upstream="native_group_norm_backward"),
)
