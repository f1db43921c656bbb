"""Planted faults: the numbers are right, but not their form, or something else happened, or did not."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Runner, Toolkit, edit
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import (
    Case,
    Program,
    change_output,
    change_results,
    change_returned,
    drop_operator,
    named_backend,
    swap_operator,
)

__all__ = ["DRAWS_SHARED", "FORM", "FORM_KEPT", "STATE"]

WRITES = Program(p.Writes, p.rows_and_cache)
PLAIN = Program(p.Perceptron, p.rows_without_gradient)


class _Answer(NamedTuple):
    y: Tensor
    z: Tensor


def _lying_model(change: Callable[[dict[str, Any]], Any]) -> Program:
    """A model that returns something else while it is compiled, as ``torch.compiler.is_compiling()`` lets it."""

    class Lying(p.Named):
        def forward(self, x: Tensor) -> Any:
            outputs = super().forward(x)
            if torch.compiler.is_compiling():
                return change(outputs)
            return outputs

    return Program(Lying, p.rows)


class Marked(Tensor):
    """A class of tensors as users write them."""


class Marks(p.Perceptron):
    """What it returns is of a class of its own. (B, 12) -> (B, 6)."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).as_subclass(Marked)


class Unmarks(p.Perceptron):
    """The same, and of torch's class while it is compiled: Dynamo itself would put the class back on."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if torch.compiler.is_compiling() else y.as_subclass(Marked)


class Sparse(torch.nn.Module):
    """A sparse vector in which one place has two numbers, to be added up. (B, 12) -> (4,)."""

    def forward(self, x: Tensor) -> Any:
        return torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), (x * 2)[0, :3], (4,))


class Coalesces(Sparse):
    """The same, added up while it is compiled."""

    def forward(self, x: Tensor) -> Any:
        # Asked first: Dynamo ends its graph before a sparse tensor.
        is_compiling = torch.compiler.is_compiling()
        vector = super().forward(x)
        return vector.coalesce() if is_compiling else vector


# dtypes and shapes


def _in_float64(y: Tensor) -> Tensor:
    return y.double()


def _in_float32(y: Tensor) -> Tensor:
    return y.float()


def _without_autocast(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, w, b)


def _argmax_in_int32(x: Tensor, dim: int) -> Tensor:
    return x.argmax(dim).int()


def _less_as_bytes(a: Tensor, b: Tensor) -> Tensor:
    return (a < b).byte()


def _with_leading_one(y: Tensor) -> Tensor:
    return y[None]


def _broadcast(y: Tensor) -> Tensor:
    return y.expand(len(y), *y.shape)


def _without_last_row(y: Tensor) -> Tensor:
    return y[:-1]


# strides


def _columns_first(y: Tensor) -> Tensor:
    return y.t().contiguous().t()


def _contiguous_pool(x: Tensor, size: int, *_: Any, **__: Any) -> Tensor:
    return torch.max_pool2d(x, size).contiguous()


def _contiguous_expand(y: Tensor, *sizes: int) -> Tensor:
    return y.expand(*sizes).contiguous()


# gradients that may not flow


def _detached_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).detach()


def _detached(y: Tensor) -> Tensor:
    return y.detach()


# the structure that is returned


def _key_renamed(outputs: dict[str, Any]) -> dict[str, Any]:
    outputs = dict(outputs)
    first = {"why": outputs.pop("y")}
    return first | outputs


def _key_missing(outputs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in outputs.items() if key != "z"}


def _key_more(outputs: dict[str, Any]) -> dict[str, Any]:
    return {**outputs, "extra": outputs["y"] * 2}


def _as_tuple(outputs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(outputs.values())


def _as_named_tuple(outputs: dict[str, Any]) -> _Answer:
    return _Answer(outputs["y"], outputs["z"])


def _none_for_tensor(outputs: dict[str, Any]) -> dict[str, Any]:
    return {**outputs, "z": None}


def _another_number(outputs: dict[str, Any]) -> dict[str, Any]:
    return {**outputs, "n": 4}


def _tensor_for_number(outputs: dict[str, Any]) -> dict[str, Any]:
    return {**outputs, "n": torch.tensor(3)}


FORM: Final = (
    Case("float64 returned", "a float32 output", p.PERCEPTRON, "dtype", change_returned(_in_float64)),
    Case("float32 returned", "a bfloat16 output", p.HALF_PERCEPTRON, "dtype", change_returned(_in_float32)),
    Case("autocast lost", "float32 where autocast gives bfloat16", Program(p.Casts, p.rows), "dtype",
         swap_operator("linear", _without_autocast, nth=0), "output[0]"),
    Case("int32 returned", "an index", p.INTEGERS, "dtype", swap_operator("argmax", _argmax_in_int32), "best",
         alone=True),
    Case("numbers for truth values", "a comparison", p.INTEGERS, "dtype", swap_operator("lt", _less_as_bytes), "less",
         alone=True),
    Case("one dimension more", "a leading 1", p.PERCEPTRON, "shape", change_returned(_with_leading_one)),
    Case("broadcast", "(B, 6) became (B, B, 6)", p.PERCEPTRON, "shape", change_returned(_broadcast)),
    Case("one row less", "the last row is missing", p.PERCEPTRON, "shape", change_returned(_without_last_row)),
    Case("columns first", "a matrix in the memory order of its transpose", p.PERCEPTRON, "stride",
         change_output(_columns_first), alone=True),
    Case("channels_last lost", "images in contiguous memory", p.CONVOLUTION, "stride",
         swap_operator("max_pool2d", _contiguous_pool), alone=True),
    Case("expanded output materialised", "a stride of 0 became memory", p.VIEWS, "stride",
         swap_operator("expand", _contiguous_expand), "wide"),
    Case("detached output", "one of two outputs is cut off from the loss", p.NAMED, "requires_grad",
         swap_operator("linear", _detached_linear, nth=1), "z"),
    Case("everything detached", "no gradient reaches anything", p.PERCEPTRON, "requires_grad",
         change_returned(_detached)),
    Case("constant wants a gradient", "a detached output is attached", p.NAMED, "requires_grad",
         drop_operator("detach"), "still"),
    Case("key renamed", "'y' became 'why'", _lying_model(_key_renamed), "structure"),
    Case("key missing", "'z' is not returned", _lying_model(_key_missing), "structure"),
    Case("one output more", "a key that eager does not have", _lying_model(_key_more), "structure"),
    Case("dict became a tuple", "the values without their names", _lying_model(_as_tuple), "structure"),
    Case("dict became a named tuple", "other access, same names", _lying_model(_as_named_tuple), "structure"),
    Case("None instead of a tensor", "'z' is None", _lying_model(_none_for_tensor), "value", where="'z'"),
    Case("another number", "n is 4, not 3", _lying_model(_another_number), "value", where="'n'", alone=True),
    Case("a tensor instead of a number", "n is a tensor", _lying_model(_tensor_for_number), "value", where="'n'",
         alone=True),
    Case("class lost", "a subclass of Tensor became a Tensor", Program(Unmarks, p.rows), "structure", where="output"),
    Case("sparse tensor coalesced", "numbers of one place are added up", Program(Coalesces, p.rows), "stride",
         where="output"),
)


# writes to inputs


def _on_a_copy(node: fx.Node) -> None:
    """What writes in place writes to a copy, and everything after it reads the copy."""
    target = node.args[0]

    def multiply_copy(tensor: Tensor, *factors: Any) -> Tensor:
        return tensor.clone().mul_(*factors)

    def is_other(user: fx.Node) -> bool:
        return user is not node

    node.op, node.target = "call_function", multiply_copy
    target.replace_all_uses_with(node, delete_user_cb=is_other)  # type: ignore[union-attr]


def _written_twice(cache: Tensor, by: float) -> Tensor:
    return cache.mul_(by).mul_(by)


def _written_in_part(cache: Tensor, by: float) -> Tensor:
    return cache[:1].mul_(by)


def _input_used_as_scratch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x.clone(), w, b)
    x.zero_()
    return y


def _zero_a_bias(module: fx.GraphModule) -> Runner:
    module.recompile()
    forward = module.forward

    def run_and_zero(*inputs: Any) -> Any:
        returned = forward(*inputs)
        bias = next(i for i in inputs if isinstance(i, Tensor) and i.shape == (24,))
        bias.detach().zero_()
        return returned

    return run_and_zero


# buffers: what batch norm returns stays right, its statistics are updated otherwise


def _batch_norm_with(fixed_momentum: float) -> Callable[[], Toolkit]:
    def norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
             eps: float) -> Tensor:
        return F.batch_norm(x, mean, var, w, b, training, fixed_momentum, eps)

    return swap_operator("batch_norm", norm)


def _batch_norm_twice(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
                      eps: float) -> Tensor:
    F.batch_norm(x, mean, var, w, b, training, momentum, eps)
    return F.batch_norm(x, mean, var, w, b, training, momentum, eps)


def _biased_batch_norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
                       eps: float) -> Tensor:
    """Running variance from the variance divided by n."""
    y = F.batch_norm(x, mean, var.clone(), w, b, training, momentum, eps)
    var.lerp_(x.detach().var((0, 2, 3), correction=0), momentum)
    return y


def _counted_twice(count: Tensor, one: int) -> Tensor:
    return count.add_(2 * one)


# random generators


def _one_draw_more(returned: list[Any], _: object) -> list[Any]:
    torch.rand(1)
    return returned


def _draw_of_python(returned: list[Any], _: object) -> list[Any]:
    random.random()
    return returned


def _seeded(returned: list[Any], _: object) -> list[Any]:
    torch.manual_seed(1)
    return returned


def _mask_without_draws(x: Tensor, p: float, *_: Any) -> Tensor:
    every_other = torch.arange(x.numel(), device=x.device).view(x.shape) % 2
    return x * every_other * 2


def _one_draw_for_four(x: Tensor, p: float, *_: Any) -> Tensor:
    """Dropout in which four neighbours share a draw: every element is kept as often as it should be."""
    draws = torch.rand(x.numel() // 4, device=x.device).repeat_interleave(4)
    return x * (draws.view(x.shape) >= p) / (1 - p)


DRAWS_SHARED: Final = swap_operator("dropout", _one_draw_for_four)()
"""A backend, as cells name one."""


# shared memory


def _copied_item(x: Tensor, item: Any) -> Tensor:
    return x[item].clone()


def _copied_transpose(y: Tensor) -> Tensor:
    return y.clone().t()


STATE: Final = (
    Case("write to an input lost", "the model writes to a copy", WRITES, "mutation",
         partial(Toolkit, dynamo=edit("mul_", _on_a_copy)), "input[1]", alone=True),
    Case("write done twice", "an input is halved twice", WRITES, "mutation",
         swap_operator("mul_", _written_twice), "input[1]"),
    Case("write done in part", "only the first row of an input is written to", WRITES, "mutation",
         swap_operator("mul_", _written_in_part), "input[1]"),
    Case("write that eager does not do", "an input is used as scratch memory", PLAIN, "mutation",
         swap_operator("linear", _input_used_as_scratch, nth=0), "input", alone=True),
    Case("a parameter written to", "a bias is zero after the call", PLAIN, "mutation",
         partial(Toolkit, forward=_zero_a_bias), "bias", alone=True),
    Case("statistics not updated", "batch norm's running mean and variance stay", p.CONVOLUTION, "buffer",
         _batch_norm_with(0.0), "norm.running_mean"),
    Case("statistics updated twice", "batch norm sees each batch two times", p.CONVOLUTION, "buffer",
         swap_operator("batch_norm", _batch_norm_twice), "norm.running_mean"),
    Case("momentum", "0.01 instead of 0.1", p.CONVOLUTION, "buffer", _batch_norm_with(0.01), "norm.running_var"),
    Case("biased running variance", "divided by n instead of n - 1", p.CONVOLUTION, "buffer",
         swap_operator("batch_norm", _biased_batch_norm), "norm.running_var"),
    Case("counter not counted", "num_batches_tracked stays", p.CONVOLUTION, "buffer",
         drop_operator("add_"), "norm.num_batches_tracked", alone=True),
    Case("buffer updated twice", "a counter of calls counts two", WRITES, "buffer",
         swap_operator("add_", _counted_twice), "seen", alone=True),
    Case("one random number more", "the generator is one draw ahead", p.DROPPING, "rng",
         change_results(_one_draw_more), "generator", alone=True),
    Case("a draw of Python", "the backend draws from the module random", p.PERCEPTRON, "rng",
         change_results(_draw_of_python), "Python", alone=True),
    Case("generator seeded", "every call leaves it in the same state", p.DROPPING, "rng", change_results(_seeded),
         "generator", alone=True),
    Case("fewer random numbers", "a mask without draws", p.DROPPING, "rng",
         swap_operator("dropout", _mask_without_draws), "generator"),
    Case("four neighbours share a draw", "a dropout mask of blocks, with the right keep rate",
         p.DROPPING, "rng", named_backend(f"{__name__}:DRAWS_SHARED"), check="randomness"),
    Case("view is a copy", "an output no longer shares the input's memory", p.VIEWS, "alias",
         swap_operator("getitem", _copied_item, nth=0), "part", alone=True),
    Case("copy is a view", "an output shares the input's memory", p.VIEWS, "alias", drop_operator("clone"), "own",
         alone=True),
    Case("outputs no longer share memory", "the transpose is a copy", p.VIEWS, "alias",
         swap_operator("t", _copied_transpose), "turned"),
    Case("outputs share memory", "a copy of an output is the output itself", p.NAMED, "alias",
         drop_operator("clone"), "still", alone=True),
)
FORM_KEPT: Final = (
    Case("class kept", "nothing", Program(Marks, p.rows), control=True),
    Case("sparse tensor as it is", "nothing", Program(Sparse, p.rows), control=True),
)
