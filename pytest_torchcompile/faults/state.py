"""Planted faults: outputs and gradients are right, but something else happened, or did not."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Toolkit, drop, edit
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import after, traced

__all__ = ["STATE"]

WRITES = Program(p.Writes, p.rows_and_cache)
CONVOLUTION = Program(p.Convolution, p.images, ({"B": 4},))
DROPPING = Program(p.Dropping, p.rows, ({"B": 32},))
PLAIN = Program(p.Perceptron, p.rows_without_gradient)
NAMED = Program(p.Named, p.rows)
VIEWS = Program(p.Views, p.rows)


def _on_a_copy(node: fx.Node) -> None:
    """What writes in place writes to a copy, and everything after it reads the copy."""
    target = node.args[0]
    node.op, node.target = "call_function", lambda t, *rest: t.clone().mul_(*rest)
    target.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)  # type: ignore[union-attr]


def _batch_norm(**changes: Any) -> Any:
    """Batch norm whose statistics are updated otherwise; what it returns stays right."""

    def norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
             eps: float) -> Tensor:
        for _ in range(changes.get("times", 1)):
            y = F.batch_norm(x, mean, var, w, b, training, changes.get("momentum", momentum), eps)
        return y

    return traced("batch_norm", norm)


def _biased(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, training: bool, momentum: float,
            eps: float) -> Tensor:
    """Running variance from the variance divided by n."""
    y = F.batch_norm(x, mean, var.clone(), w, b, training, momentum, eps)
    var.lerp_(x.detach().var((0, 2, 3), correction=0), momentum)
    return y


def _input_used_as_scratch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x.clone(), w, b)
    x.zero_()
    return y


def _one_draw(count: int) -> Any:
    def change(found: list[Any], _: object) -> list[Any]:
        torch.rand(count)
        return found

    return after(change)


def _seeded(found: list[Any], _: object) -> list[Any]:
    torch.manual_seed(1)
    return found


STATE: Final = (
    Case("write to an input lost", "the model writes to a copy", WRITES, "mutation",
         lambda: Toolkit(dynamo=edit("mul_", _on_a_copy)), "input[1]", alone=True),
    Case("write done twice", "an input is halved twice", WRITES, "mutation",
         traced("mul_", lambda c, by: c.mul_(by).mul_(by)), "input[1]"),
    Case("write done in part", "only the first row of an input is written to", WRITES, "mutation",
         traced("mul_", lambda c, by: c[:1].mul_(by)), "input[1]"),
    Case("write that eager does not do", "an input is used as scratch memory", PLAIN, "mutation",
         traced("linear", _input_used_as_scratch, nth=0), "input", alone=True),
    Case("a parameter written to", "a bias is zero after the call", PLAIN, "mutation",
         lambda: Toolkit(forward=_zero_a_bias), "bias", alone=True),
    Case("statistics not updated", "batch norm's running mean and variance stay", CONVOLUTION, "buffer",
         _batch_norm(momentum=0.0), "norm.running_mean"),
    Case("statistics updated twice", "batch norm sees each batch two times", CONVOLUTION, "buffer",
         _batch_norm(times=2), "norm.running_mean"),
    Case("momentum", "0.01 instead of 0.1", CONVOLUTION, "buffer", _batch_norm(momentum=0.01), "norm.running_var"),
    Case("biased running variance", "divided by n instead of n - 1", CONVOLUTION, "buffer",
         traced("batch_norm", _biased), "norm.running_var"),
    Case("counter not counted", "num_batches_tracked stays", CONVOLUTION, "buffer",
         lambda: Toolkit(dynamo=drop("add_")), "norm.num_batches_tracked", alone=True),
    Case("buffer updated twice", "a counter of calls counts two", WRITES, "buffer",
         traced("add_", lambda n, one: n.add_(2 * one)), "seen", alone=True),
    Case("one random number more", "the generator is one draw ahead", DROPPING, "rng", _one_draw(1), "generator",
         alone=True),
    Case("generator seeded", "every call leaves it in the same state", DROPPING, "rng", after(_seeded),
         "generator", alone=True),
    Case("fewer random numbers", "a mask without draws", DROPPING, "rng", traced(
        "dropout", lambda x, p, *_: x * (torch.arange(x.numel(), device=x.device).view(x.shape) % 2) * 2), "generator"),
    Case("view is a copy", "an output no longer shares the input's memory", VIEWS, "alias",
         traced("getitem", lambda x, i: x[i].clone(), nth=0), "part", alone=True),
    Case("copy is a view", "an output shares the input's memory", VIEWS, "alias",
         lambda: Toolkit(dynamo=drop("clone")), "own", alone=True),
    Case("outputs no longer share memory", "the transpose is a copy", VIEWS, "alias",
         traced("t", lambda y: y.clone().t()), "turned"),
    Case("outputs share memory", "a copy of an output is the output itself", NAMED, "alias",
         lambda: Toolkit(dynamo=drop("clone")), "still", alone=True),
)


def _zero_a_bias(module: fx.GraphModule) -> Any:
    module.recompile()
    forward = module.forward

    def run(*inputs: Any) -> Any:
        found = forward(*inputs)
        bias = next(i for i in inputs if isinstance(i, Tensor) and i.shape == (24,))
        bias.detach().zero_()
        return found

    return run
