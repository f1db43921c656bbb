"""maybe_compile: a model compiled if that works, else the model itself."""

from __future__ import annotations

import functools
import glob
import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from torch import nn

from pytest_torchcompile.errors import CompileFailed
from pytest_torchcompile.layer.attempt_log import Attempt, Seconds, headline
from pytest_torchcompile.layer.compiled_modules import compiled_module_of, is_compiled_module, modules_of
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.dynamo import Compiled, backend_of, context, frame_of, is_inlined, sizes_seen
from pytest_torchcompile.layer.graphs import Backend
from pytest_torchcompile.layer.guarded_model import Guard, guarded
from pytest_torchcompile.layer.hooks import Hooks
from pytest_torchcompile.layer.rank_votes import FailedElsewhere, RankVotes
from pytest_torchcompile.layer.selective import Selection, inner_blocks
from pytest_torchcompile.layer.smoketest import CompileSmoketest, SmoketestResult

__all__ = ["maybe_compile"]

M = TypeVar("M", bound=Callable[..., Any])
Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any] | None"


def maybe_compile(model: M, cfg: CompileConfig, logger: Logger = None, sample_batch: Any = None) -> M:
    """Return ``model`` compiled as ``cfg`` says, or ``model`` itself where it is disabled or does not work.

    With a sample batch and ``cfg.healthcheck`` the compiled model is tried first, by :class:`CompileSmoketest`, on
    state that is put back exactly. A model that is spread over ranks (DDP, FSDP, tensor parallel) is compiled on all of
    them or on none, so every rank must call this; where it can't be compiled whole, its inner blocks (what is in its
    ``nn.ModuleList``) are tried. Without, it compiles in its first call. If that fails, or a later call, or a
    backward pass, the returned module runs eagerly for good, the state being as if the failed attempt had never been;
    see ``docs/adopting.md`` for what is guaranteed.

    The module that is returned is another object for the same model (:mod:`.twin`): its class is a subclass with the
    same name, parameters and all attributes are shared, and so are ``state_dict``, ``train()`` and ``to()``. Copies and
    pickles of it are compiled modules again, without a healthcheck.

    Args:
        model: A module, or a function. Not one that torch.compile or maybe_compile has returned.
        cfg: Disabled: ``model`` itself is returned, untouched, with one record of level DEBUG.
        logger: Gets one record for each attempt (:class:`~.attempts.Attempt`); None: ``pytest_torchcompile``.
        sample_batch: A tensor, a tuple of positional or a dict of keyword arguments, or ``(args, kwargs)``. It is not
            written to.

    Raises:
        TypeError: ``cfg`` is no CompileConfig, or ``logger`` no logger.
        ValueError: For a model or a config that cannot be used, such as a pattern that matches no module.
        CompileFailed: With ``cfg.fail_policy == "raise"``, where it does not compile or fails the healthcheck.
        Exception: What the model raises for the sample batch without torch.compile too, as it is.
    """
    _refuse_mistaken(cfg, logger)
    if not cfg.enabled:
        Attempt(model, cfg, logger).log("disabled", "build", Seconds())
        return model
    _refuse_unusable(model, cfg)
    selection = Selection.of(model, cfg) if isinstance(model, nn.Module) else None
    attempt = Attempt(model, cfg, logger)
    if cfg.healthcheck and sample_batch is not None:
        return _Trial(model, attempt, sample_batch).run(selection)  # type: ignore[no-any-return]
    settings, began = cfg.settings(), time.perf_counter()
    try:
        made = _make(model, attempt, settings, selection)
    except Exception as error:
        took = Seconds(time.perf_counter() - began)
        return _failed(model, attempt, took, _Failure("build", error))  # type: ignore[no-any-return]
    if made is None:
        attempt.log("nothing_compiled", "build", Seconds(), reason=_SWITCHED_OFF)
        return model
    attempt.log("deferred", "build", Seconds(time.perf_counter() - began))
    return made.compiled  # type: ignore[no-any-return]


_SWITCHED_OFF: Final = "torch.compile is switched off (TORCHDYNAMO_DISABLE)"


def _refuse_mistaken(cfg: Any, logger: Any) -> None:
    if not isinstance(cfg, CompileConfig):
        hint = "; CompileConfig.from_dict makes one of a dict" if isinstance(cfg, Mapping) else ""
        raise TypeError(f"maybe_compile: cfg is of type {type(cfg).__name__}; expected a CompileConfig{hint}")
    if logger is not None and not callable(getattr(logger, "warning", None)):  # a tensor has a `log` too
        raise TypeError(f"maybe_compile: logger is of type {type(logger).__name__}; expected a logging.Logger or None "
                        "(the sample batch is the argument after it)")


class _Made:
    """A compiled model, and what watches over it."""

    def __init__(self, compiled: Any, guard: Guard, entries: Compiled) -> None:
        self.compiled, self.guard, self.entries = compiled, guard, entries
        self.praise = ""
        """What the smoketest saw to work."""


def _make(model: Any, attempt: Attempt, settings: dict[str, Any], selection: Selection | None) -> _Made | None:
    inner = backend_of(settings)
    if inner is None:
        return None
    hooks = Hooks(lambda: _traced_modules(model, selection))
    guard, entries = Guard(attempt, hooks), Compiled()

    def compiling(frame: Callable[..., Any]) -> Callable[..., Any]:
        return context(Backend(inner, guard), settings, guard, entries)(frame)  # type: ignore[no-any-return]

    if selection is None:
        call = guarded(guard, lambda: compiling(model), model)
        return _Made(functools.wraps(model)(call), guard, entries)

    def put_guard(part: Any) -> Callable[..., Any]:
        return guarded(guard, lambda: compiling(frame_of(part, part._call_impl)), part._call_impl, part=True)

    def make_whole() -> Callable[..., Any]:
        return compiling(frame_of(model, model.__call__)) if selection.whole else model

    guard.undo = selection.put(put_guard)
    call = guarded(guard, make_whole, model)

    def again(copied: Any) -> Any:
        return copied if guard.eager else maybe_compile(copied, attempt.config, attempt.logger)

    def recipe() -> tuple[Any, ...]:
        return _unpickled, (model, attempt.config, attempt.logger, guard.eager)

    return _Made(compiled_module_of(model, call, again, recipe, guard.drop), guard, entries)


def _traced_modules(model: Any, selection: Selection | None) -> list[tuple[str, nn.Module]]:
    """The modules whose hooks Dynamo traces, by name: all inside of what is compiled, and itself where that is inlined.

    Where only its ``forward`` is compiled, a module's own hooks run eagerly around that.
    """
    if selection is None:
        return [named for module in modules_of(model) for named in module.named_modules()]
    compiled = {id(part): part for part in ([model] if selection.whole else selection.compiled)}
    names = {id(module): name for name, module in model.named_modules()}
    inside = {id(module): module for part in compiled.values() for module in part.modules()}
    return [(names.get(i, ""), module) for i, module in inside.items() if i not in compiled or is_inlined(module)]


def _unpickled(model: Any, cfg: CompileConfig, logger: Any, eager: bool) -> Any:
    return model if eager else maybe_compile(model, cfg, logger)


class _Failure(NamedTuple):
    """Why a model is not used compiled."""

    phase: str
    error: BaseException
    reason: str = ""
    final: bool = False
    """There is no use in trying it in another way."""

    @property
    def text(self) -> str:
        """The reason, or what the error says."""
        return self.reason or headline(self.error)


class _Trial:
    """The healthcheck of one model. Where it is spread over ranks, each of them comes to the same end."""

    def __init__(self, model: Any, attempt: Attempt, sample_batch: Any) -> None:
        self.model, self.attempt, self.sample_batch = model, attempt, sample_batch
        self.together = RankVotes(model)
        self.began, self.compiling = time.perf_counter(), 0.0

    def run(self, selection: Selection | None) -> Any:
        """The compiled model if it passes, or the model with compiled blocks, or the model as it is."""
        attempt = self.attempt
        found = self._tried(attempt, selection)
        if isinstance(found, _Failure) and (blocks := self._blocks(selection, found)) is not None:
            inner = self._tried(Attempt(self.model, blocks.config, attempt.logger), blocks.selection)
            if isinstance(inner, _Made):
                self._log("inner_blocks", found.error, f"{found.text}. Compiled are {blocks.names}")
                return inner.compiled
            if inner is not None:
                found = found._replace(reason=f"{found.text}. Nor do its inner blocks, each by itself: {inner.text}")
        if isinstance(found, _Failure):
            return _failed(self.model, attempt, self._took(), found)
        if found is None:
            attempt.log("nothing_compiled", "build", Seconds(), reason=_SWITCHED_OFF)
            return self.model
        self._log("compiled", None, found.praise)
        return found.compiled

    def _tried(self, attempt: Attempt, selection: Selection | None) -> _Made | _Failure | None:
        """Compile and ask the smoketest; None: torch.compile is switched off, be it on one of the ranks."""
        built: list[_Made | None] = []
        try:
            settings = self.together.run_agreed(attempt.config.settings)
        except FailedElsewhere as other:
            return _Failure("build", other, final=True)
        try:
            self.together.run_agreed(lambda: built.append(_make(self.model, attempt, settings, selection)))
            off = self.together.any_rank(built[0] is None)
        except Exception as failure:
            _drop(built)
            return _Failure("build", failure)
        made = built[0]
        if off or made is None:
            _drop(built)
            return None
        try:
            result = self._result(made)
        except Exception as ours:  # what the model itself raises is in the result
            return _Failure("healthcheck", ours, f"the healthcheck itself failed: {headline(ours)}", final=True)
        if result.ok:
            made.entries.keep()
            made.praise = result.reason
            return made
        if final := self.together.any_rank(result.user_error is not None) or self.together.diverged:
            self._refuse_of_user(result)
        if result.phase == "rank":
            return _Failure("healthcheck", FailedElsewhere(result.ranks), result.reason, final)
        error = made.guard.failure or CompileFailed("\n".join(filter(None, (result.reason, result.evidence))))
        return _Failure("healthcheck", error, f"{result.reason} (in {result.phase})", final)

    def _result(self, made: _Made) -> SmoketestResult:
        """What the smoketest says, which is no on every rank if it is on one; then nothing is left of the attempt."""
        guard, test = made.guard, CompileSmoketest(self.attempt.config.smoketest_steps)
        guard.trial, guard.watchful, guard.waited_for = True, False, self.together.spread
        test.noted = lambda: guard.failure
        forget_sizes, passed = sizes_seen(), False
        try:
            test.run(made.compiled, self.sample_batch)
            result = test.last_result
            self.together.diverged = test.apart
            passed = result is not None and result.ok
            ranks = self.together.ranks_saying(not passed)
            if ranks and passed:
                result, passed = SmoketestResult(False, str(FailedElsewhere(ranks)), "rank", ranks=ranks), False
        finally:
            guard.trial = guard.waited_for = False
            self.compiling += guard.take_seconds()
            if not passed:
                _drop([made])
                forget_sizes()
        if result is None:
            raise RuntimeError("the smoketest has no result")
        return result

    def _refuse_of_user(self, result: SmoketestResult) -> None:
        if result.user_error is not None:
            self._log("user_error", result.user_error, result.reason)
            raise result.user_error

    def _blocks(self, selection: Selection | None, whole: _Failure) -> _Blocks | None:
        """The blocks to compile instead of a model that is spread over ranks; the same on each of them."""
        cfg = self.attempt.config
        if whole.final or cfg.fail_policy == "raise" or not self.together.spread or not (selection and selection.whole):
            return None
        names = tuple(inner_blocks(self.model).values())
        narrow = replace(cfg, allowlist=tuple(map(glob.escape, names)))
        try:
            return _Blocks(names, narrow, Selection.of(self.model, narrow)) if names else None
        except ValueError:  # all of them are in the blocklist
            return None

    def _log(self, result: str, error: BaseException | None, reason: str) -> None:
        self.attempt.log(result, "healthcheck", self._took(), error, reason)

    def _took(self) -> Seconds:
        both = time.perf_counter() - self.began
        return Seconds(both, self.compiling, max(0.0, both - self.compiling))


class _Blocks:
    """A model's inner blocks, chosen instead of all of it."""

    def __init__(self, names: Sequence[str], config: CompileConfig, selection: Selection) -> None:
        self.config, self.selection = config, selection
        few = names if len(names) < 6 else (*names[:2], "...", names[-1])
        self.names = f"{len(names)} blocks: {', '.join(few)}"


def _drop(built: Sequence[_Made | None]) -> None:
    for made in built:
        if made is not None:
            made.guard.drop()
            made.entries.drop()


def _failed(model: Any, attempt: Attempt, took: Seconds, failure: _Failure) -> Any:
    phase, error, reason, _ = failure
    if attempt.config.fail_policy == "raise":
        attempt.log("raised", phase, took, error, reason)
        raise CompileFailed(f"{attempt.model} is not used compiled: {reason or error}") from error
    attempt.log("fallback_eager", phase, took, error, reason)
    return model


def _refuse_unusable(model: Any, cfg: CompileConfig) -> None:
    if is_compiled_module(model) or hasattr(model, "_torchdynamo_orig_callable"):
        raise ValueError(f"{type(model).__name__} is compiled already; give maybe_compile the original "
                         "(a compiled module keeps it as _orig_mod)")
    if not isinstance(model, nn.Module):
        if not isinstance(model, (types.FunctionType, types.MethodType)):
            raise ValueError(f"an object of type {type(model).__name__} cannot be compiled; expected a module "
                             "or a function")
        if cfg.allowlist or cfg.blocklist:
            raise ValueError(f"allowlist and blocklist choose parts of a module, and {model.__name__} is a function")
