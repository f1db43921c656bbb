"""Is the fault really there? Asked bit by bit, of plain runs, without reference runs, noise or limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.faults.case import Case
from pytest_torchcompile.oracle import Item, Recording, record
from pytest_torchcompile.oracle.chances import same_random_draws
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_values import same_bits
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["Presence"]

Pair = tuple[str, Any, Any]
PASSES: Final = 3
"""How often all calls are made: a fault may wait for the third."""


class Presence:
    """Every call of a case, PASSES times over, eagerly and compiled."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.overwritten = False
        """Did a later call of the compiled model change what an earlier one had returned?"""
        with isolated([]), same_random_draws():
            self.eager = self._run(case.program.build())
            model = case.program.build()
            self.compiled = self._run(model, torch.compile(model, backend=case.backend(), dynamic=case.dynamic))

    def _run(self, model: torch.nn.Module, compiled: Callable[..., Any] | None = None,
             change: Callable[[Batch], Batch] = lambda batch: batch) -> list[Recording]:
        returned: list[tuple[Tensor, Tensor]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            output = (model if compiled is None else compiled)(*args, **kwargs)
            returned.extend((t, t.detach().clone()) for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
            return output

        start, found = StateSnapshot(model), []
        for _ in range(PASSES):
            for index, batch in enumerate(self.case.program.calls()):
                start.restore()
                found.append(record(call, model, change(batch), seed=index))
        self.overwritten |= any(not same_bits(now.detach(), then) for now, then in returned)
        return found

    def differences(self) -> set[str]:
        """Names of what is not the same, bit by bit, in any call."""
        found = {name for eager, compiled in zip(self.eager, self.compiled, strict=True)
                 for name, one, other in pairs(eager, compiled) if not _same(one, other)}
        return found | ({"an earlier output"} if self.overwritten else set())

    def wavers(self) -> bool:
        """Do two eager runs of one call differ?"""
        calls = len(self.eager) // PASSES
        return any(not _same(one, other) for first, second in zip(self.eager, self.eager[calls:], strict=False)
                   for _, one, other in pairs(first, second))

    def largest(self) -> float:
        """The largest difference of any tensor, relative to the tensor's largest number; inf where only one is NaN."""
        return max((_distance(one, other) for eager, compiled in zip(self.eager, self.compiled, strict=True)
                    for _, one, other in pairs(eager, compiled)), default=0.0)

    def exact(self) -> list[Recording]:
        """The eager runs in float64."""
        model = self.case.program.build().double()
        return self._run(model, change=lambda batch: batch.to(dtype=torch.float64))

    def excused(self, most: float = 4.0) -> bool:
        """Is compiled no further from a float64 run than ``most`` times eager is, in every leaf, as root mean square?

        So torch's own benchmarks judge, with 2 to 10 (``torch/_dynamo/utils.py: same``); 4 is our limit of a leaf.
        """
        for wide, eager, compiled in zip(self.exact(), self.eager, self.compiled, strict=True):
            truths = {name: value for name, value, _ in pairs(wide, wide)}
            for name, one, other in pairs(eager, compiled):
                if not _same(one, other) and _error(other, truths[name]) > most * _error(one, truths[name]):
                    return False
        return True


def pairs(eager: Recording, compiled: Recording) -> Iterator[Pair]:
    """``(name, eager, compiled)`` of everything that two recordings hold."""
    yield "error", eager.error is None, compiled.error is None
    if eager.error or compiled.error:
        return
    for name in ("structure", "backward", "aliases"):
        yield name, getattr(eager, name), getattr(compiled, name)
    yield "loss", eager.loss, compiled.loss
    for group in ("outputs", "mutated", "buffers", "gradients", "generators"):
        one, other = getattr(eager, group), getattr(compiled, group)
        for name in [*one, *(n for n in other if n not in one)]:
            yield name, *(_whole(items[name]) if name in items else ... for items in (one, other))


def _whole(item: Any) -> Any:
    return (item.value, item.stride, item.requires_grad) if isinstance(item, Item) else item


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def _tensor(value: Any) -> Tensor | None:
    value = value[0] if isinstance(value, tuple) else value
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else None


def _distance(one: Any, other: Any) -> float:
    mine, found = _tensor(one), _tensor(other)
    if mine is None or found is None or mine.shape != found.shape or not mine.numel():
        return 0.0
    if not torch.equal(mine.isfinite(), found.isfinite()):
        return math.inf
    return float((found - mine).abs().max() / mine.abs().max().clamp(min=1e-30))


def _error(value: Any, truth: Any) -> float:
    mine, exact = _tensor(value), _tensor(truth)
    return 0.0 if mine is None or exact is None else float((mine - exact).square().mean().sqrt())
