"""compare(): is a compiled model the same computation as the eager one? Without pytest, for any module or function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.checks import compiles
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.instruments.state import isolated
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.oracle.calls import Call, Side
from pytest_torchcompile.oracle.findings import Finding, findings
from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.trial import Trial, same_random_draws
from pytest_torchcompile.oracle.twins import Closure, twin

__all__ = ["Comparison", "assert_equivalent", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found."""

    problems: tuple[Finding, ...]
    leaves: tuple[tuple[str, Leaf], ...] = ()
    """Everything that was compared, each with its call: ``("call 1", Leaf(...))``."""
    notes: tuple[str, ...] = ()
    """What the comparison had to do without."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and compiled code was judged."""
        return not self.problems

    @property
    def noise(self) -> float:
        """Largest error of a whole leaf over its rounding noise; 0 where all is bitwise equal."""
        found = [leaf.rms for _, leaf in self.leaves if leaf.rms is not None]
        return max((r if not math.isnan(r) else math.inf for r in found), default=0.0)

    def __str__(self) -> str:
        exact = sum(leaf.bitwise for _, leaf in self.leaves)
        head = (f"{len(self.problems)} problem(s)" if self.problems else "equivalent") + (
            f": {len(self.leaves)} values and properties compared, {exact} exactly equal, "
            f"the largest error is {self.noise:.3g} times the rounding noise")
        return "\n".join([head, *map(str, self.problems), *(f"note: {note}" for note in self.notes)])


def compare(
    model: Callable[..., Any],
    calls: list[Any],
    config: CompileConfig,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    steps: int = 1,
    seed: int = 0,
) -> Comparison:
    """Run a model eagerly and compiled on the same calls, and compare everything that can be seen.

    Eager is the truth in everything but rounding; where values are not bitwise equal both are held against a float64
    run, in units of this program's own rounding noise. Nothing is left changed: copies of the model are run, and
    torch's settings and random state are put back. Code that was compiled before is dropped, as by
    ``torch.compiler.reset()``.

    Args:
        model: A module, in the state and training mode to be compared in, or a function; not compiled.
        calls: A list of batches: a tensor, a tuple of arguments, a dict of keyword arguments, or ``(args, kwargs)``.
        config: How to compile. ``enabled``, ``healthcheck`` and ``fail_policy`` say nothing here.
        loss: ``loss(output, batch)``, a tensor of one element; None: a weighted mean square of all float outputs.
        train: Whether to run backward and compare gradients; else all runs under ``torch.no_grad()``.
        steps: Training steps.
        seed: Of every random number that the model draws, and of the noise.

    Raises:
        UsageError: the model, calls, loss or config is of no use; the text says which.
    """
    trial = _Trial(model, calls, config, loss=loss, train=train, steps=steps, seed=seed)
    with isolated([]), same_random_draws():
        trial.run()
    leaves = (*trial.leaves, *trial.trained)
    return Comparison((*_proof(trial), *findings(leaves)), leaves, tuple(trial.notes))


def assert_equivalent(model: Callable[..., Any], calls: list[Any], config: CompileConfig, **options: Any) -> None:
    """:func:`compare`, for tests: raises AssertionError, whose text is all that was found."""
    found = compare(model, calls, config, **options)
    if not found.ok:
        raise AssertionError(str(found))


class _Trial(Trial):
    """A trial of an object that somebody has made."""

    def __init__(self, model: Any, calls: Any, config: Any, **options: Any) -> None:
        if not isinstance(config, CompileConfig):
            raise UsageError(f"config is {config!r}, expected a CompileConfig, like CompileConfig(backend='inductor')")
        self.model = _module(model)
        self.notes: list[str] = []
        super().__init__(self._side, self.model, config.settings(), list(_calls(calls)),
                         may_raise=True, **options)

    def _side(self, settings: dict[str, Any] | None) -> Side:
        module = twin(self.model)
        call = module.__dict__["function"] if isinstance(module, Closure) else module
        return Side(call if settings is None else torch.compile(call, **settings), module)


def _module(model: Any) -> nn.Module:
    if not callable(model):
        raise UsageError(f"model is {type(model).__name__}, expected a torch.nn.Module or a function")
    return model if isinstance(model, nn.Module) else Closure(model)


def _calls(calls: Any) -> Iterator[Call]:
    if not isinstance(calls, Iterable) or isinstance(calls, (torch.Tensor, dict, tuple, str)):
        raise UsageError(f"calls is {type(calls).__name__}, expected a list with a batch for each call, like [batch]")
    batches = list(calls)
    if not batches:
        raise UsageError("calls is empty: nothing would be compared")
    for index, value in enumerate(batches):
        yield Call(index, Batch.of(value))


def _proof(trial: Trial) -> Iterator[Finding]:
    """What keeps the comparison from proving anything about compiled code."""
    if error := trial.compiled.error:
        yield Finding("error", error.phase, f"the compiled run raised {error}; eager did not",
                      f"{error.text}\n{error.traceback}".strip())
        return
    if all(passed.raised for passed in trial.passed):
        yield Finding("vacuous", "eager", "eager raises in every call: nothing was compared")
        return
    for found in compiles.judge(compiles.measure(trial), {"coverage": 0.0}):
        yield Finding("vacuous", "compiled code", found.message, found.evidence, found.hint)
    for call in trial.calls:
        made = [passed for passed in trial.passed if passed.call.index == call.index]
        if not any(passed.graphs or passed.raised for passed in made):
            yield Finding("vacuous", call.label, f"{call.label} ran without any compiled graph")
