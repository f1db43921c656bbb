"""Planted faults: wrong only sometimes: for a size, in a dynamic graph, in a later call, for other numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, fx

from pytest_torchcompile.backends.toolkit import Pass, Runner, Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import output, sometimes

__all__ = ["MOMENTS"]

BATCH, WEIGHT = (8, 12), (24, 24)
ONE_SIZE = Program(p.Perceptron, p.rows)
SIZES = Program(p.Perceptron, p.rows, ({"B": 4}, {"B": 7}, {"B": 6}))
ONE_ROW = Program(p.Perceptron, p.rows, ({"B": 4}, {"B": 1}))
TWO_BATCHES = Program(p.Perceptron, p.rows, ({"B": 8}, {"B": 8}))


def _only_rows(wrong: int) -> Any:
    return output(lambda y: y * 1.01 if y.shape[0] == wrong else y)


def _in_dynamic_graphs() -> Toolkit:
    """Right where every size is a number, wrong where one is a symbol."""

    def change(module: fx.GraphModule) -> Runner | None:
        symbols = [n for n in module.graph.nodes if n.op == "placeholder"
                   and isinstance(n.meta.get("val"), torch.SymInt)]
        return results(lambda found, _: [found[0] * 1.01, *found[1:]])(module) if symbols else None

    return Toolkit(forward=change)


def _stale() -> Toolkit:
    """Returns what it returned first for inputs of these shapes."""
    kept: dict[Any, list[Any]] = {}

    def change(found: list[Any], inputs: tuple[Any, ...]) -> list[Any]:
        shapes = tuple(i.shape if isinstance(i, Tensor) else None for i in inputs)
        return kept.setdefault(shapes, found)

    return Toolkit(forward=results(change))


def _baked(*shape: int) -> Toolkit:
    """The first tensor of this shape that it met is a constant from then on, but for what the backward keeps."""
    kept: list[Tensor] = []

    def change(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward

        def run(*inputs: Any) -> Any:
            place = next(i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.shape == shape)
            kept.append(inputs[place].clone())
            return forward(*inputs[:place], kept[0], *inputs[place + 1 :])

        return run

    return Toolkit(forward=change)


def _overwritten() -> Toolkit:
    """All calls return their output in the same memory, as a CUDA graph does."""
    memory: dict[Any, Tensor] = {}

    def change(found: list[Any], _: object) -> list[Any]:
        mine = memory.setdefault(found[0].shape, torch.empty_like(found[0]))
        return [mine.copy_(found[0]), *found[1:]]

    return Toolkit(forward=results(change))


def _view_copied(module: fx.GraphModule) -> None:
    """The second argument is copied before anything is written."""
    _, view = (node for node in module.graph.nodes if node.op == "placeholder")
    with module.graph.inserting_after(view):
        copied = module.graph.call_function(torch.clone, (view,))
    view.replace_all_uses_with(copied, delete_user_cb=lambda user: user is not copied)


def _read_as(change: Callable[[Tensor], Tensor]) -> Pass:
    """The batch is read through other strides or from another place."""

    def run(module: fx.GraphModule) -> Runner:
        module.recompile()
        forward = module.forward
        return lambda *inputs: forward(*(change(i) if getattr(i, "shape", ()) == BATCH else i for i in inputs))

    return run


_ENTROPY = random.SystemRandom()

MOMENTS: Final = (
    Case("wrong for one size", "1 % off where B is 7", SIZES, "value", _only_rows(7)),
    Case("wrong for odd sizes", "1 % off where B is odd", SIZES, "value",
         output(lambda y: y * 1.01 if y.shape[0] % 2 else y)),
    Case("wrong for sizes that are no power of two", "1 % off where B is 6 or 7", SIZES, "value",
         output(lambda y: y if (y.shape[0] & (y.shape[0] - 1)) == 0 else y * 1.01)),
    Case("wrong for one row", "1 % off where B is 1", ONE_ROW, "value", _only_rows(1)),
    Case("wrong when dynamic", "1 % off in a graph with a symbolic size", ONE_SIZE, "value", _in_dynamic_graphs,
         dynamic=True),
    Case("wrong when it became dynamic", "right for the first size, 1 % off in the graph that serves the others", SIZES,
         "value", _in_dynamic_graphs),
    Case("wrong in the second call", "1 % off in the second run of the graph", ONE_SIZE, "value",
         sometimes(lambda run, _: run == 2, lambda y: y * 1.01)),
    Case("wrong in the third call", "1 % off in the third run of the graph", ONE_SIZE, "value",
         sometimes(lambda run, _: run == 3, lambda y: y * 1.01)),
    Case("wrong from the third call on", "drifts: 0.1 % more with each run after the second", ONE_SIZE, "value",
         sometimes(lambda run, _: run >= 3, lambda y: y * 1.001)),
    Case("stale result", "returns what it returned for the first batch of this shape", TWO_BATCHES, "value", _stale),
    Case("an input baked in", "computes with the first batch that it met", TWO_BATCHES, "value",
         lambda: _baked(*BATCH)),
    Case("weights baked in", "computes with the weights that it met first, which an optimizer has changed since",
         ONE_SIZE, "value", lambda: _baked(*WEIGHT), steps=2),
    Case("strides of an input ignored", "reads a turned matrix as if it were not",
         Program(p.Perceptron, p.turned_rows, ({"B": 8, "turned": 0}, {"B": 8, "turned": 1})), "value",
         lambda: Toolkit(forward=_read_as(lambda x: x.as_strided(x.shape, (x.shape[1], 1))))),
    Case("shared memory of inputs ignored", "a write to one argument is not seen in its view", Program(
        p.Shares, p.rows_and_one_of_them), "value", lambda: Toolkit(dynamo=_view_copied), "output"),
    Case("output overwritten", "a later call writes into the memory of an earlier output", TWO_BATCHES, "alias",
         _overwritten),
    Case("non-deterministic", "1 % off, or not, as it happens", ONE_SIZE, "value",
         sometimes(lambda run, _: run == 1 or _ENTROPY.random() < 0.5, lambda y: y * _ENTROPY.uniform(1.01, 1.02))),
    Case("wrong for large numbers", "clamped at 100", Program(p.Perceptron, p.large_rows), "value",
         lambda: Toolkit(forward=_read_as(lambda x: x.clamp(-100, 100)))),
)


