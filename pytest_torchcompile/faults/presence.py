"""Is the fault really there? Asked bit by bit, of plain runs, without reference runs, noise or limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_torchcompile.faults.case import Case
from pytest_torchcompile.oracle import Item, Recording, record
from pytest_torchcompile.oracle.chances import same_random_draws
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_values import same_bits
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["Presence"]

PASSES: Final = 3
"""How often all calls are made: a fault may wait for the third."""


class Presence:
    """Every call of a case, PASSES times over, eagerly and compiled."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.overwritten = False
        """Did a later call of the compiled model change what an earlier one had returned?"""
        with isolated([]), same_random_draws():
            model = case.program.build_model()
            self.eager = self._record_calls(model, model)
            # A new model: the calls of the first have changed its buffers.
            model = case.program.build_model()
            compiled = torch.compile(model, backend=case.backend(), dynamic=case.dynamic)
            self.compiled = self._record_calls(model, compiled)

    def _record_calls(self, model: torch.nn.Module, function: Callable[..., Any],
                      dtype: torch.dtype | None = None) -> list[Recording]:
        """Call a model by ``function``, which may be the compiled one, with the batches in ``dtype`` if given."""
        returned: list[tuple[Tensor, Tensor]] = []

        def call_and_keep(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            for leaf in pytree.tree_leaves(output):
                # Held, and copied: if they differ later, somebody wrote into what had been returned.
                if isinstance(leaf, Tensor):
                    returned.append((leaf, leaf.detach().clone()))
            return output

        # Every call starts from the same parameters and buffers, so that calls of both sides can be paired.
        start = StateSnapshot(model)
        recordings = []
        for _ in range(PASSES):
            for index, batch in enumerate(self.case.program.make_calls()):
                start.restore()
                if dtype is not None:
                    batch = batch.to(dtype=dtype)
                recordings.append(record(call_and_keep, model, batch, seed=index))
        self.overwritten |= any(not same_bits(now.detach(), then) for now, then in returned)
        return recordings

    def _leaves(self) -> Iterator[Pair]:
        for eager, compiled in zip(self.eager, self.compiled, strict=True):
            yield from pair_leaves(eager, compiled)

    def differences(self) -> set[str]:
        """Names of what is not the same, bit by bit, in any call."""
        names = {pair.name for pair in self._leaves() if not _are_same(pair.eager, pair.compiled)}
        if self.overwritten:
            names.add("an earlier output")
        return names

    def largest_difference(self) -> float:
        """The largest difference of any tensor, relative to the tensor's largest number; inf where only one is NaN."""
        return max((_relative_distance(pair.eager, pair.compiled) for pair in self._leaves()), default=0.0)

    def exact(self) -> list[Recording]:
        """The eager runs in float64."""
        model = self.case.program.build_model().double()
        return self._record_calls(model, model, torch.float64)

    def is_rounding(self, most: float = 4.0) -> bool:
        """Is compiled no further from a float64 run than ``most`` times eager is, in every leaf, as root mean square?

        So torch's own benchmarks judge, with 2 to 10 (``torch/_dynamo/utils.py: same``); 4 is our limit of a leaf.
        """
        for exact, eager, compiled in zip(self.exact(), self.eager, self.compiled, strict=True):
            truths = {pair.name: pair.eager for pair in pair_leaves(exact, exact)}
            for pair in pair_leaves(eager, compiled):
                if _are_same(pair.eager, pair.compiled):
                    continue
                truth = truths[pair.name]
                if _mean_error(pair.compiled, truth) > most * _mean_error(pair.eager, truth):
                    return False
        return True


class Pair(NamedTuple):
    """One thing that both recordings of a call hold."""

    name: str
    eager: Any
    compiled: Any


def pair_leaves(eager: Recording, compiled: Recording) -> Iterator[Pair]:
    """Everything that two recordings hold; ``...`` stands for what one of them lacks."""
    yield Pair("error", eager.error is None, compiled.error is None)
    if eager.error or compiled.error:
        return
    for name in ("structure", "backward", "aliases"):
        yield Pair(name, getattr(eager, name), getattr(compiled, name))
    yield Pair("loss", eager.loss, compiled.loss)
    for group in ("outputs", "mutated", "buffers", "gradients", "generators"):
        eager_items, compiled_items = getattr(eager, group), getattr(compiled, group)
        for name in dict.fromkeys([*eager_items, *compiled_items]):
            yield Pair(name, _item_facts(eager_items, name), _item_facts(compiled_items, name))


def _item_facts(items: Mapping[str, Any], name: str) -> Any:
    """What of an item has to be the same: of a tensor also its strides and whether it wants a gradient."""
    item = items.get(name, ...)
    if isinstance(item, Item):
        return item.value, item.stride, item.requires_grad
    return item


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(_are_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def _as_float64(facts: Any) -> Tensor | None:
    """The tensor among the facts of an item; None where there is none of floats."""
    value = facts
    if isinstance(facts, tuple):
        value = facts[0]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return None


def _relative_distance(eager: Any, compiled: Any) -> float:
    expected, actual = _as_float64(eager), _as_float64(compiled)
    if expected is None or actual is None or expected.shape != actual.shape or not expected.numel():
        return 0.0
    if not torch.equal(expected.isfinite(), actual.isfinite()):
        return math.inf
    # Clamped, since all of eager's numbers may be zero.
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _mean_error(value: Any, truth: Any) -> float:
    actual, exact = _as_float64(value), _as_float64(truth)
    if actual is None or exact is None:
        return 0.0
    return float((actual - exact).square().mean().sqrt())
