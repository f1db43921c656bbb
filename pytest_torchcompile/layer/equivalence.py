"""compare(): is a compiled model the same computation as the eager one? Without pytest, for any module or function."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError, headline
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.oracle.calls import Call, Side, TrialOptions, keep_state
from pytest_torchcompile.oracle.discrepancies import (
    NOT_HELD,
    Discrepancy,
    find_discrepancies,
    never_repeats,
    own_draws_text,
    undecided_notes,
    why_vacuous,
)
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.proof import doubts, proof
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.quantity import listed_counts
from pytest_torchcompile.state.model_copy import Closure, copy_model
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.torch_state import isolated, same_random_draws

__all__ = ["Comparison", "ObjectTrial", "assert_equivalent", "compare"]

Wrap: TypeAlias = "Callable[[Any, dict[str, Any] | None], Callable[..., Any]]"
_SHOWN = 12
"""Problems that a text lists; the others are counted."""
_MILDER = frozenset({"stride", "vacuous", "nondeterministic"})
"""Kinds of problems beside which the numbers may be right."""
_SHOWN_PARTS = 5
"""Notes on parts that ran eagerly."""
_WITHOUT_VALUES = frozenset({"error", "alias"})
"""What is compared of calls that raise on both sides: that they raise alike, and that no memory was kept."""


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found."""

    problems: tuple[Discrepancy, ...]
    """Each with ``kind``, ``where`` and ``message``."""
    leaves: tuple[tuple[str, Leaf], ...] = ()
    """Everything that was compared, each with its call: ``("call 1", Leaf(...))``."""
    stages: str = ""
    """One line on which stage of the compiler brings the problems in; empty if that was not asked or no stage could."""
    notes: tuple[str, ...] = ()
    """What the comparison had to do without."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and compiled code was judged."""
        return not self.problems

    @property
    def wrong_numbers(self) -> bool:
        """Whether the compiled model computes something else, so far as it ran."""
        return any(map(_computes_something_else, self.problems))

    @property
    def noise(self) -> float:
        """Largest error of a whole leaf over its rounding noise; 0 where all is bitwise equal."""
        errors = [leaf.rms for _, leaf in self.leaves if leaf.rms is not None]
        # NaN is larger than anything here, and max() would pass over it.
        if any(map(math.isnan, errors)):
            return math.inf
        return max(errors, default=0.0)

    def __str__(self) -> str:
        exact = sum(leaf.bitwise for _, leaf in self.leaves)
        lines = ["equivalent"]
        if self.problems:
            lines = ["not equivalent"]
        if self.wrong_numbers:
            # The first line is what a report tells of a test, and by these words a policy knows how bad it is.
            lines = ["not equivalent (wrong numbers)"]
        if any(leaf.kind not in _WITHOUT_VALUES for _, leaf in self.leaves):
            lines[0] += (f": {len(self.leaves)} values and properties compared, {exact} exactly equal, the largest "
                         f"error is {self.noise:.3g} times the rounding noise")
        lines += map(str, self.problems[:_SHOWN])
        more = Counter(problem.kind for problem in self.problems[_SHOWN:])
        if more:
            lines.append(f"and {sum(more.values())} more: {listed_counts(more)}")
        if self.stages:
            lines.append(self.stages)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _computes_something_else(found: Discrepancy) -> bool:
    if found.kind == "error":
        # What eager refuses compiled code must not take.
        return found.message.endswith("compiled ran")
    return found.kind not in _MILDER


def compare(
    model: Callable[..., Any],
    calls: list[Any],
    config: CompileConfig,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    steps: int = 1,
    seed: int = 0,
    wrap: Wrap | None = None,
    locate: bool = True,
) -> Comparison:
    """Run a model eagerly and compiled on the same calls, and compare everything that can be seen.

    Eager is the truth in everything but rounding; where values are not bitwise equal both are held against a float64
    run, in units of this program's own rounding noise. The calls are made three times over, the second time with other
    values, so that results which were kept are noticed. Nothing is left changed: copies of the model are run, and
    torch's settings and random state are put back. Code that was compiled before is dropped, as by
    ``torch.compiler.reset()``.

    For dropout eager is given the random numbers that Inductor draws itself, as production compiles it. Where that
    can't be done, or anything differs, all is compared with eager's (``fallback_random``) instead. The calls are then
    made once more with Inductor's own: they have to run, their values are not compared.

    Args:
        model: A module, in the state and training mode to be compared in, or a function; not compiled.
        calls: A list of batches: a tensor, a tuple of arguments, a dict of keyword arguments, or ``(args, kwargs)``.
        config: How to compile. ``enabled``, ``healthcheck``, ``fail_policy`` and ``smoketest_steps`` say nothing here.
        loss: ``loss(output, batch)``, a tensor of one element; None: a weighted mean of y^2 + y over all float outputs.
        train: Whether to run backward and compare gradients; else all runs are under ``torch.no_grad()``.
        steps: From 2 on, so many steps of SGD are compared as well, one after the other, with the calls' batches.
        seed: Of every random number that the model draws, and of the noise.
        wrap: ``wrap(model, settings)`` returns what is called in place of the model: compiled with
            ``torch.compile(**settings)``, or where ``settings`` is None its eager twin. None: the model itself.
        locate: Where something differs or raises, find the first stage of the compiler that does, by compiling again.

    Raises:
        UsageError: the model, calls, steps or loss are of no use; the text says which.
        ValueError: for a config that does not fit the model.
    """
    trial = ObjectTrial(model, calls, config, wrap=wrap, loss=loss, train=train, steps=steps, seed=seed)
    with isolated([]), same_random_draws(), trial.untouched(), warnings.catch_warnings():
        # A filter that makes errors of warnings would have torch's own end a compile.
        warnings.simplefilter("ignore")
        trial.run()
        stages = _located_stages(trial) if locate else ""
        drawn = _compiled_with_own_draws(trial)
    leaves = (*trial.leaves, *trial.trained)
    notes = [*trial.notes, *_eager_parts(trial), *undecided_notes(leaves)]
    if trial.untrained:
        notes.append(f"no step of training was compared, as eager raises in them: {trial.untrained}")
    if trial.replayed:
        notes.append(NOT_HELD)
    problems = (*_vacuous_problems(trial), *_own_draws_problems(drawn), *find_discrepancies(leaves))
    return Comparison(problems, leaves, stages, tuple(notes))


def _compiled_with_own_draws(trial: ObjectTrial) -> dict[str, Any] | None:
    if not trial.draws:
        return None
    # Here, for most models draw nothing, and it brings all backends with it.
    from pytest_torchcompile.oracle.own_draws import compile_with_own_draws

    return compile_with_own_draws(trial, alone=True)


def _own_draws_problems(drawn: Mapping[str, Any] | None) -> Iterator[Discrepancy]:
    """What production would meet where Inductor draws the random numbers itself."""
    text = own_draws_text(drawn)
    if drawn is None or not text:
        return
    if error := drawn["error"]:
        yield Discrepancy("error", error["phase"], text, f"{error['text']}\n{error['traceback']}".strip())
    else:
        yield Discrepancy("vacuous", "own draws", text, "\n".join(drawn["silent"]))


def _located_stages(trial: Trial) -> str:
    """Which stage of the compiler brings in what is wrong, in one line, and a second of what mends it, if
    that is known; '' where nothing is, or no stage does."""
    if trial.compiled.error is None and not find_discrepancies([*trial.leaves, *trial.trained]):
        return ""
    # A model that is fine has no stages to tell apart.
    from pytest_torchcompile.oracle.diagnosis import locate_stage, remedy_of, stage_summary

    located = locate_stage(trial)
    if not located:
        return ""
    return "\n".join(filter(None, (stage_summary(located), remedy_of(located))))


def assert_equivalent(model: Callable[..., Any], calls: list[Any], config: CompileConfig, **options: Any) -> None:
    """:func:`compare`, for tests: raises AssertionError, whose text is all that was found. ``options`` as there."""
    # pytest then shows the test, not this line.
    __tracebackhide__ = True
    comparison = compare(model, calls, config, **options)
    if not comparison.ok:
        raise AssertionError(str(comparison))


class ObjectTrial(Trial):
    """A trial of an object that somebody has made."""

    def __init__(self, model: Any, calls: Any, config: Any, wrap: Wrap | None, **options: Any) -> None:
        if not isinstance(config, CompileConfig):
            raise UsageError(f"config is {config!r}, expected a CompileConfig, like CompileConfig(backend='inductor')")
        if not isinstance(options["steps"], int) or options["steps"] < 1:
            raise UsageError(f"steps is {options['steps']!r}, expected a whole number from 1 on")
        self.config, self.wrap = config, wrap
        self.model = _usable_module(model)
        self.notes: list[str] = []
        # Tried here, so that a model that can't be copied is compared as far as that goes.
        self.shared = False
        try:
            copy_model(self.model)
        except Exception as error:
            self.shared = True
            self.notes.append("eager and compiled ran on one object, which can't be copied "
                              f"({type(error).__name__}: {error}): no float64 run, no other values, and what the model "
                              "keeps in Python is shared")
        begin_again = StateSnapshot(self.model).restore if self.shared else keep_state
        trial_options = TrialOptions(may_raise=True, varied=not self.shared, own_numbers=not self.shared,
                                     begin_again=begin_again, **options)
        super().__init__(self._make_side, self.model, config.settings(), list(_calls_of(calls)), trial_options)

    def _make_side(self, settings: dict[str, Any] | None) -> Side:
        # A copy for each side, so that neither sees what the other keeps in Python.
        module = self.model if self.shared else copy_model(self.model)
        call: Callable[..., Any] = module
        if isinstance(module, Closure):
            call = module.__dict__["function"]
        if self.wrap is not None:
            return Side(self.wrap(call, settings), module)
        if settings is None:
            return Side(call, module)
        if self.config.allowlist or self.config.blocklist:
            # Most configs compile the whole model, and have no use for it.
            from pytest_torchcompile.layer.selective import Selection, frame_of

            def compile_part(part: Any) -> Callable[..., Any]:
                return torch.compile(frame_of(part, part._call_impl), **settings)

            selection = Selection.of(module, self.config)
            selection.put(compile_part)
            if not selection.whole:
                return Side(call, module)
        return Side(torch.compile(call, **settings), module)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Put the model's state back, gradients included, if it is the model itself that runs."""
        if not self.shared:
            yield
            return
        start = StateSnapshot(self.model)
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        try:
            yield
        finally:
            start.restore()
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _usable_module(model: Any) -> nn.Module:
    # Here, so that what imports compare() reads less.
    from pytest_torchcompile.layer.compiled_modules import is_compiled_module

    if not callable(model) or isinstance(model, type):
        raise UsageError(f"model is {model!r}, expected a torch.nn.Module or a function")
    if hasattr(model, "_torchdynamo_orig_callable") or is_compiled_module(model):
        raise UsageError(f"model is compiled already ({type(model).__name__}): give compare() the eager one")
    module = model if isinstance(model, nn.Module) else Closure(model)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(f"model has no shape yet for {name!r} (a lazy module): call it once on a batch first")
    return module


def _calls_of(calls: Any) -> Iterator[Call]:
    if not isinstance(calls, Iterable) or isinstance(calls, (torch.Tensor, dict, tuple, str)):
        raise UsageError(f"calls is {type(calls).__name__}, expected a list with a batch for each call, like [batch]")
    batches = list(calls)
    if not batches:
        raise UsageError("calls is empty: nothing would be compared")
    for index, value in enumerate(batches):
        yield Call(index, Batch.of(value))


def _eager_parts(trial: Trial) -> list[str]:
    """What of the model ran eagerly although it was compiled: not wrong, but not judged either."""
    seen = trial.compiled.seen
    parts: dict[str, None] = {}
    for graph_break in seen["graph_breaks"]:
        reason = graph_break["reason"].splitlines()[0]
        parts[f"graph break at {graph_break['file']}:{graph_break['line']}: {reason}"] = None
    for frame in seen["eager_frames"]:
        if frame["kind"] in ("disabled", "graph_break", "skipped"):
            parts[f"{frame['function']} ran eagerly ({frame['kind']})"] = None
    return list(parts)[:_SHOWN_PARTS]


def _vacuous_problems(trial: Trial) -> Iterator[Discrepancy]:
    """What keeps the comparison from proving anything about compiled code."""
    error = trial.compiled.error
    if error:
        text = f"the compiled run raised {error.type} in {error.phase}; eager did not: {headline(error.text)}"
        yield Discrepancy("error", error.phase, text, f"{error.text}\n{error.traceback}".strip())
        return
    if all(passed.raised for passed in trial.passed):
        first = next(str(leaf.eager) for _, leaf in trial.leaves if leaf.kind == "error")
        text = f"eager raises in every call, so nothing was compared; the first: {first}"
        yield Discrepancy("vacuous", "eager", text, hint="mend the model or its inputs first")
        return
    unproven = list(doubts(proof(trial)))
    for doubt in unproven:
        yield Discrepancy("vacuous", "compiled code", doubt.message, doubt.evidence, doubt.hint)
    # Where nothing at all is proven no call need be named.
    if not unproven:
        yield from _uncompiled_calls(trial)
    if why := why_vacuous(trial.leaves):
        yield Discrepancy("nondeterministic" if never_repeats(trial.leaves) else "vacuous", "values", why)
    gradients = [leaf for _, leaf in trial.leaves if leaf.kind == "gradient"]
    if gradients and not any(passed.gradients for passed in trial.passed):
        yield Discrepancy("vacuous", "gradients", "every gradient is zero, NaN or infinite, eager and compiled: their "
                      "equality proves nothing", hint="a loss that depends on the parameters")


def _uncompiled_calls(trial: Trial) -> Iterator[Discrepancy]:
    for call in trial.calls:
        passes = [passed for passed in trial.passed if passed.call.index == call.index]
        if not any(passed.graphs or passed.raised for passed in passes):
            yield Discrepancy("vacuous", call.label, f"{call.label} ran without any compiled graph")
