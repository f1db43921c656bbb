"""maybe_compile: a model compiled if that works, else the model itself."""

from __future__ import annotations

import functools
import glob
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from torch import nn

from pytest_torchcompile.errors import CompileFailed
from pytest_torchcompile.layer.attempt_log import Attempt, Seconds, error_headline
from pytest_torchcompile.layer.compiled_modules import compiled_module_of, modules_of, refuse_mistaken, refuse_unusable
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.dynamo import CacheEntries, backend_of, dynamo_context, remember_sizes
from pytest_torchcompile.layer.graphs import GuardedBackend
from pytest_torchcompile.layer.guarded_model import Guard, guarded_call
from pytest_torchcompile.layer.later_calls import Hooks
from pytest_torchcompile.layer.rank_votes import FailedElsewhere, RankVotes
from pytest_torchcompile.layer.selective import Selection, frame_of, inner_blocks, is_inlined

if TYPE_CHECKING:
    from pytest_torchcompile.layer.smoketest import SmoketestResult

__all__ = ["maybe_compile"]

M = TypeVar("M", bound=Callable[..., Any])
Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any] | None"


def maybe_compile(model: M, cfg: CompileConfig, logger: Logger = None, sample_batch: Any = None, *,
                  min_speedup: float | None = None) -> M:
    """Return ``model`` compiled as ``cfg`` says, or ``model`` itself where it is disabled or does not work.

    With a sample batch and ``cfg.healthcheck`` the compiled model is tried first, by :class:`CompileSmoketest`, on
    state that is put back exactly. A model that is spread over ranks (DDP, FSDP, tensor parallel) is compiled on all of
    them or on none, so every rank must call this; where it can't be compiled whole, its inner blocks (what is in its
    ``nn.ModuleList``) are tried. Without, it compiles in its first call. If that fails, or a later call, or a
    backward pass, the returned module runs eagerly for good, the state being as if the failed attempt had never been;
    see ``docs/adopting.md`` for what is guaranteed.

    The module that is returned is another object for the same model (:mod:`.compiled_modules`): its class is a subclass
    with the same name, parameters and all attributes are shared, and so are ``state_dict``, ``train()`` and ``to()``.
    Copies and pickles of it are compiled modules again, without a healthcheck.

    Args:
        model: A module, or a function. Not one that torch.compile or maybe_compile has returned.
        cfg: Disabled: ``model`` itself is returned, untouched, with one record of level DEBUG.
        logger: Gets one record for each attempt (:class:`~.attempt_log.Attempt`); None: ``pytest_torchcompile``.
        sample_batch: A tensor, a tuple of positional or a dict of keyword arguments, or ``(args, kwargs)``. A dict is
            the argument itself where the model takes one, and no key by its name. It is not written to.
        min_speedup: In the place of ``cfg.min_speedup``. Only a difference that is certain counts against the model.

    Raises:
        TypeError: ``cfg`` is no CompileConfig, or ``logger`` no logger.
        ValueError: For a model or a config that cannot be used, such as a pattern that matches no module.
        CompileFailed: With ``cfg.fail_policy == "raise"``, where it does not compile or fails the healthcheck.
        Exception: What the model raises for the sample batch without torch.compile too, as it is.
    """
    refuse_mistaken(cfg, logger)
    if not cfg.enabled:
        Attempt(model, cfg, logger).log("disabled", "build", Seconds())
        return model
    if min_speedup is not None:
        cfg = replace(cfg, min_speedup=min_speedup)
    refuse_unusable(model, cfg, sample_batch)
    # Before anything is compiled: a pattern that matches nothing is the user's mistake, whatever the policy.
    selection = Selection.of(model, cfg) if isinstance(model, nn.Module) else None
    attempt = Attempt(model, cfg, logger)
    if cfg.healthcheck and sample_batch is not None:
        return _Healthcheck(model, attempt, sample_batch).run(selection)  # type: ignore[no-any-return]
    return _compile_later(model, attempt, selection)  # type: ignore[no-any-return]


_SWITCHED_OFF: Final = "torch.compile is switched off (TORCHDYNAMO_DISABLE)"


def _compile_later(model: Any, attempt: Attempt, selection: Selection | None) -> Any:
    """The model that compiles in its first call."""
    settings, began = attempt.config.settings(), time.perf_counter()
    try:
        built = _build(model, attempt, settings, selection)
    except Exception as error:
        took = Seconds(time.perf_counter() - began)
        return _fall_back(model, attempt, took, _Failure("build", error))
    if built is None:
        attempt.log("nothing_compiled", "build", Seconds(), reason=_SWITCHED_OFF)
        return model
    attempt.log("deferred", "build", Seconds(time.perf_counter() - began))
    return built.compiled


@dataclass
class _Built:
    """A compiled model, and what watches over it."""

    compiled: Any
    guard: Guard
    entries: CacheEntries
    praise: str = ""
    """What the smoketest saw to work."""

    def drop(self) -> None:
        """Leave nothing of it."""
        self.guard.drop()
        self.entries.drop()


def _build(model: Any, attempt: Attempt, settings: dict[str, Any], selection: Selection | None) -> _Built | None:
    """Nothing compiles yet. None: torch.compile is switched off."""
    backend = backend_of(settings)
    if backend is None:
        return None

    def traced_modules() -> list[tuple[str, nn.Module]]:
        return _traced_modules(model, selection)

    # Asked whenever hooks change, for modules may be put into the model later.
    hooks = Hooks(traced_modules)
    guard, entries = Guard(attempt, hooks), CacheEntries()

    def compile_frame(frame: Callable[..., Any]) -> Callable[..., Any]:
        context = dynamo_context(GuardedBackend(backend, guard), settings, guard, entries)
        return context(frame)  # type: ignore[no-any-return]

    if selection is None:
        call = guarded_call(guard, functools.partial(compile_frame, model), model)
        return _Built(functools.wraps(model)(call), guard, entries)
    whole = selection.whole

    def compile_part(part: Any) -> Callable[..., Any]:
        return compile_frame(frame_of(part, part._call_impl))

    def put_guard(part: Any) -> Callable[..., Any]:
        return guarded_call(guard, functools.partial(compile_part, part), part._call_impl, part=True)

    def compile_whole() -> Callable[..., Any]:
        if not whole:
            return model  # type: ignore[no-any-return]
        return compile_frame(frame_of(model, model.__call__))

    # A copy has no sample batch, and what was measured holds for it too.
    of_copies = replace(attempt.config, min_speedup=None)
    guard.undo = selection.put(put_guard)
    call = guarded_call(guard, compile_whole, model)

    def compile_copy(copied: Any) -> Any:
        if guard.runs_eagerly:
            return copied
        return maybe_compile(copied, of_copies, attempt.logger)

    def recipe() -> tuple[Any, ...]:
        return _unpickled, (model, of_copies, attempt.logger, guard.runs_eagerly)

    return _Built(compiled_module_of(model, call, compile_copy, recipe, guard.drop), guard, entries)


def _traced_modules(model: Any, selection: Selection | None) -> list[tuple[str, nn.Module]]:
    """The modules whose hooks Dynamo traces, by name: all inside of what is compiled, and itself where that is inlined.

    Where only its ``forward`` is compiled, a module's own hooks run eagerly around that.
    """
    if selection is None:
        return [named for module in modules_of(model) for named in module.named_modules()]
    compiled = [model] if selection.whole else selection.compiled
    names = {id(module): name for name, module in model.named_modules()}
    # By identity: blocks may contain each other, and modules may compare in any way.
    inside = {id(module): module for part in compiled for module in part.modules()}
    own_hooks_run_eagerly = {id(part) for part in compiled if not is_inlined(part)}
    traced: list[tuple[str, nn.Module]] = []
    for key, module in inside.items():
        if key not in own_hooks_run_eagerly:
            traced.append((names.get(key, ""), module))
    return traced


def _unpickled(model: Any, cfg: CompileConfig, logger: Any, eager: bool) -> Any:
    if eager:
        return model
    return maybe_compile(model, cfg, logger)


@dataclass(frozen=True)
class _Failure:
    """Why a model is not used compiled."""

    phase: str
    error: BaseException
    reason: str = ""
    final: bool = False
    """There is no use in trying it in another way."""

    @property
    def text(self) -> str:
        """The reason, or what the error says."""
        return self.reason or error_headline(self.error)


class _Healthcheck:
    """The healthcheck of one model. Where it is spread over ranks, each of them comes to the same end."""

    def __init__(self, model: Any, attempt: Attempt, sample_batch: Any) -> None:
        self.model, self.attempt, self.sample_batch = model, attempt, sample_batch
        self.votes = RankVotes(model)
        self.began, self.compile_seconds = time.perf_counter(), 0.0

    def run(self, selection: Selection | None) -> Any:
        """The compiled model if it passes, or the model with compiled blocks, or the model as it is."""
        attempt = self.attempt
        outcome = self._try(attempt, selection)
        if outcome is None:
            attempt.log("nothing_compiled", "build", Seconds(), reason=_SWITCHED_OFF)
            return self.model
        if isinstance(outcome, _Built):
            self._log("compiled", None, outcome.praise)
            return outcome.compiled
        blocks = self._inner_blocks(selection, outcome)
        if blocks is None:
            return _fall_back(self.model, attempt, self._seconds(), outcome)
        inner = self._try(Attempt(self.model, blocks.config, attempt.logger), blocks.selection)
        if isinstance(inner, _Built):
            self._log("inner_blocks", outcome.error, f"{outcome.text}. Compiled are {blocks.shown_names}")
            return inner.compiled
        if isinstance(inner, _Failure):
            both = f"{outcome.text}. Nor do its inner blocks, each by itself: {inner.text}"
            outcome = replace(outcome, reason=both)
        return _fall_back(self.model, attempt, self._seconds(), outcome)

    def _try(self, attempt: Attempt, selection: Selection | None) -> _Built | _Failure | None:
        """Compile and ask the smoketest; None: torch.compile is switched off, be it on one of the ranks."""
        try:
            settings = self.votes.run_agreed(attempt.config.settings)
        except FailedElsewhere as other:
            return _Failure("build", other, final=True)
        built: list[_Built | None] = []

        def build() -> None:
            built.append(_build(self.model, attempt, settings, selection))

        try:
            self.votes.run_agreed(build)
            # Each rank has its own environment, and TORCHDYNAMO_DISABLE may be set on one of them.
            switched_off = self.votes.any_rank(built[0] is None)
        except Exception as failure:
            _drop_all(built)
            return _Failure("build", failure)
        made = built[0]
        if switched_off or made is None:
            _drop_all(built)
            return None
        forget_sizes = remember_sizes()
        try:
            result = self._smoketest_result(made)
        except Exception as ours:
            # What the model itself raises is in the result.
            return _Failure("healthcheck", ours, f"the healthcheck itself failed: {error_headline(ours)}", final=True)
        if result.ok:
            made.praise = result.reason
            slow = self._too_slow(made)
            if slow is not None:
                made.drop()
                forget_sizes()
                return slow
            # What the trial compiled serves the first real call.
            made.entries.keep()
            return made
        return self._failure_of(made, result)

    def _too_slow(self, made: _Built) -> _Failure | None:
        """Why its speed does not suffice; None if it does, or if nobody asks."""
        wanted = self.attempt.config.min_speedup
        if wanted is None:
            return None
        if self.votes.spread:
            made.praise += "; its speed was not asked, for it is spread over ranks"
            return None
        from pytest_torchcompile.layer.speed_check import measure_speed

        guard = made.guard
        guard.under_test = True
        try:
            answer = measure_speed(self.model, made.compiled, guard, self.sample_batch, wanted)
        except Exception as error:
            failure = guard.failure_under_test
            if failure is not None:
                return _Failure("benchmark", failure, f"in its timed steps: {error_headline(failure)}")
            # What the smoketest saw to work stands.
            made.praise += f"; its speed was not measured: {error_headline(error)}"
            return None
        finally:
            guard.under_test = False
            self.compile_seconds += guard.take_seconds()
        if not answer.enough:
            return _Failure("benchmark", CompileFailed(answer.text), answer.text)
        made.praise += f"; {answer.text}"
        return None

    def _failure_of(self, made: _Built, result: SmoketestResult) -> _Failure:
        """Why the smoketest said no. Raises what the user's own code raised."""
        # Asked on every rank, also on those whose own code did not raise.
        final = self.votes.any_rank(result.user_error is not None) or self.votes.diverged
        if result.user_error is not None:
            self._log("user_error", result.user_error, result.reason)
            raise result.user_error
        if result.phase == "rank":
            return _Failure("healthcheck", FailedElsewhere(result.ranks), result.reason, final)
        error = made.guard.failure_under_test
        if error is None:
            error = CompileFailed("\n".join(filter(None, (result.reason, result.evidence))))
        return _Failure("healthcheck", error, f"{result.reason} (in {result.phase})", final)

    def _smoketest_result(self, made: _Built) -> SmoketestResult:
        """What the smoketest says, which is no on every rank if it is on one; then nothing is left of the attempt."""
        # Here, for a model that compiles in its first call needs none of it: fifty modules.
        from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult

        guard, test = made.guard, CompileSmoketest(self.attempt.config.smoketest_steps)
        # Failures are raised for the smoketest to see; where other ranks wait for this one, noted instead.
        guard.under_test, guard.watched, guard.ranks_wait = True, False, self.votes.spread
        test.noted = guard.noted_failure
        forget_sizes, passed = remember_sizes(), False
        try:
            test.run(made.compiled, self.sample_batch)
            result = test.last_result
            self.votes.diverged = test.apart
            passed = result is not None and result.ok
            ranks = self.votes.ranks_saying(not passed)
            # It passed here alone: then nobody runs compiled.
            if ranks and passed:
                result, passed = SmoketestResult(False, str(FailedElsewhere(ranks)), "rank", ranks=ranks), False
        finally:
            guard.under_test = guard.ranks_wait = False
            self.compile_seconds += guard.take_seconds()
            if not passed:
                made.drop()
                forget_sizes()
        if result is None:
            raise RuntimeError("the smoketest has no result")
        return result

    def _inner_blocks(self, selection: Selection | None, failure: _Failure) -> _InnerBlocks | None:
        """The blocks to compile instead of a model that is spread over ranks; the same on each of them."""
        config = self.attempt.config
        if failure.final or config.fail_policy == "raise" or not self.votes.spread:
            return None
        if selection is None or not selection.whole:
            return None
        names = tuple(inner_blocks(self.model).values())
        if not names:
            return None
        narrow = replace(config, allowlist=tuple(map(glob.escape, names)))
        try:
            return _InnerBlocks(names, narrow, Selection.of(self.model, narrow))
        except ValueError:
            # All of them are in the blocklist.
            return None

    def _log(self, result: str, error: BaseException | None, reason: str) -> None:
        self.attempt.log(result, "healthcheck", self._seconds(), error, reason)

    def _seconds(self) -> Seconds:
        passed = time.perf_counter() - self.began
        return Seconds(passed, self.compile_seconds, max(0.0, passed - self.compile_seconds))


@dataclass(frozen=True)
class _InnerBlocks:
    """A model's inner blocks, chosen instead of all of it."""

    names: Sequence[str]
    config: CompileConfig
    selection: Selection

    @property
    def shown_names(self) -> str:
        """How many, and the first ones."""
        names = self.names
        if len(names) > 5:
            names = (*names[:2], "...", names[-1])
        return f"{len(self.names)} blocks: {', '.join(names)}"


def _drop_all(built: Sequence[_Built | None]) -> None:
    for made in built:
        if made is not None:
            made.drop()


def _fall_back(model: Any, attempt: Attempt, took: Seconds, failure: _Failure) -> Any:
    """The model as it is, with a record of why; or the failure is raised, if that is asked for."""
    phase, error, reason = failure.phase, failure.error, failure.reason
    if attempt.config.fail_policy == "raise":
        attempt.log("raised", phase, took, error, reason)
        raise CompileFailed(f"{attempt.model} is not used compiled: {reason or error}") from error
    attempt.log("fallback_eager", phase, took, error, reason)
    return model
