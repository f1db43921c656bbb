"""Planted faults: wrong only sometimes: for a size, in a dynamic graph, in a later call, for other numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Pass, Runner, Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import Case, Program, change_in_runs, change_output, first_scaled, scaled_by

__all__ = ["MOMENTS"]

BATCH, WEIGHT = (8, 12), (24, 24)
ONE_ROW = Program(p.Perceptron, p.rows, ({"B": 4}, {"B": 1}))
TURNED = Program(p.Perceptron, p.turned_rows, ({"B": 8, "turned": 0}, {"B": 8, "turned": 1}))

# Not torch's generator, which a seed would make repeat itself.
_ENTROPY = random.SystemRandom()


# for some sizes


def _wrong_for(rows: int) -> Callable[[], Toolkit]:
    def change(y: Tensor) -> Tensor:
        if y.shape[0] == rows:
            return y * 1.01
        return y

    return change_output(change)


def _wrong_if_odd(y: Tensor) -> Tensor:
    if y.shape[0] % 2:
        return y * 1.01
    return y


def _wrong_unless_power_of_two(y: Tensor) -> Tensor:
    rows = y.shape[0]
    if rows & (rows - 1) == 0:
        return y
    return y * 1.01


def _wrong_where_symbolic(module: fx.GraphModule) -> Runner | None:
    """Right where every size is a number, wrong where one is a symbol."""
    # AOTAutograd hands a symbolic size to its graph as an input of its own.
    for node in module.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
            return results(first_scaled)(module)
    return None


# what was kept from an earlier call


def _stale() -> Toolkit:
    """Returns what it returned first for inputs of these shapes."""
    first: dict[Any, list[Any]] = {}

    def return_first(returned: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
        shapes = tuple(getattr(each, "shape", None) for each in inputs)
        return first.setdefault(shapes, returned)

    return Toolkit(forward=results(return_first))


def _baked(shape: tuple[int, ...]) -> Toolkit:
    """The first tensor of this shape that it met is a constant from then on, but for what the backward keeps."""
    met: list[Tensor] = []

    def bake(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run_with_first(*inputs: Any) -> Any:
            place = next(i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.shape == shape)
            met.append(inputs[place].clone())
            return forward(*inputs[:place], met[0], *inputs[place + 1:])

        return run_with_first

    return Toolkit(forward=bake)


# how the batch is read


def _view_copied(module: fx.GraphModule) -> None:
    """The second argument is copied before anything is written."""
    _, view = (node for node in module.graph.nodes if node.op == "placeholder")
    with module.graph.inserting_after(view):
        copied = module.graph.call_function(torch.clone, (view,))

    def reads_the_view(user: fx.Node) -> bool:
        return user is not copied

    view.replace_all_uses_with(copied, delete_user_cb=reads_the_view)


def _read_as(change: Callable[[Tensor], Tensor]) -> Pass:
    """The batch is read through other strides or from another place."""

    def change_batch(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run_changed(*inputs: Any) -> Any:
            changed = []
            for each in inputs:
                is_batch = getattr(each, "shape", ()) == BATCH
                changed.append(change(each) if is_batch else each)
            return forward(*changed)

        return run_changed

    return change_batch


def _as_if_contiguous(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (x.shape[1], 1))


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-100, 100)


# the runs in which it is wrong


def _second_run(run: int) -> bool:
    return run == 2


def _third_run(run: int) -> bool:
    # CUDA graphs run plainly at first and are recorded next, so the third run is the first replay.
    return run == 3


def _from_third_run(run: int) -> bool:
    return run >= 3


def _at_random(run: int) -> bool:
    # The first run is always wrong: else all of few runs could be right.
    return run == 1 or _ENTROPY.random() < 0.5


def _scaled_at_random(y: Tensor) -> Tensor:
    return y * _ENTROPY.uniform(1.01, 1.02)


MOMENTS: Final = (
    Case("wrong for one size", "1 % off where B is 7", p.THREE_SIZES, "value", _wrong_for(7)),
    Case("wrong for odd sizes", "1 % off where B is odd", p.THREE_SIZES, "value", change_output(_wrong_if_odd)),
    Case("wrong for sizes that are no power of two", "1 % off where B is 6 or 7", p.THREE_SIZES, "value",
         change_output(_wrong_unless_power_of_two)),
    Case("wrong for one row", "1 % off where B is 1", ONE_ROW, "value", _wrong_for(1)),
    Case("wrong when dynamic", "1 % off in a graph with a symbolic size", p.PERCEPTRON, "value",
         partial(Toolkit, forward=_wrong_where_symbolic), dynamic=True),
    Case("wrong when it became dynamic", "right for the first size, 1 % off in the graph that serves the others",
         p.THREE_SIZES, "value", partial(Toolkit, forward=_wrong_where_symbolic)),
    Case("wrong in the second call", "1 % off in the second run of the graph", p.PERCEPTRON, "value",
         change_in_runs(_second_run, scaled_by(1.01))),
    Case("wrong in the third call", "1 % off in the third run of the graph", p.PERCEPTRON, "value",
         change_in_runs(_third_run, scaled_by(1.01))),
    Case("wrong from the third call on", "drifts: 0.1 % more with each run after the second", p.PERCEPTRON, "value",
         change_in_runs(_from_third_run, scaled_by(1.001))),
    Case("stale result", "returns what it returned for the first batch of this shape", p.TWO_BATCHES, "value", _stale),
    Case("an input baked in", "computes with the first batch that it met", p.TWO_BATCHES, "value",
         partial(_baked, BATCH)),
    Case("weights baked in", "computes with the weights that it met first, which an optimizer has changed since",
         p.PERCEPTRON, "value", partial(_baked, WEIGHT), steps=2),
    Case("strides of an input ignored", "reads a turned matrix as if it were not", TURNED, "value",
         partial(Toolkit, forward=_read_as(_as_if_contiguous))),
    Case("shared memory of inputs ignored", "a write to one argument is not seen in its view",
         Program(p.Shares, p.rows_and_one_of_them), "value", partial(Toolkit, dynamo=_view_copied), "output"),
    Case("non-deterministic", "1 % off, or not, as it happens", p.PERCEPTRON, "value",
         change_in_runs(_at_random, _scaled_at_random)),
    Case("wrong for large numbers", "clamped at 100", Program(p.Perceptron, p.large_rows), "value",
         partial(Toolkit, forward=_read_as(_clamped))),
)
