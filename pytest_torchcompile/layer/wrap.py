"""maybe_compile: a model compiled if that works, else the model itself."""

from __future__ import annotations

import functools
import logging
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import nn

from pytest_torchcompile.errors import CompileFailed
from pytest_torchcompile.layer.attempts import Attempt
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.dynamo import Compiled, backend_of, context, frame_of, sizes_seen
from pytest_torchcompile.layer.fallback import Guard, guarded
from pytest_torchcompile.layer.graphs import Backend
from pytest_torchcompile.layer.selective import Selection
from pytest_torchcompile.layer.smoketest import CompileSmoketest
from pytest_torchcompile.layer.twin import is_twin, twin_of

__all__ = ["maybe_compile"]

M = TypeVar("M", bound=Callable[..., Any])
Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[Any] | None"


def maybe_compile(model: M, cfg: CompileConfig, logger: Logger = None, sample_batch: Any = None) -> M:
    """Return ``model`` compiled as ``cfg`` says, or ``model`` itself where it is disabled or does not work.

    With a sample batch and ``cfg.healthcheck`` the compiled model is tried first, by :class:`CompileSmoketest`, on
    state that is put back exactly. Without, it compiles in its first call. If that fails, or a later call, or a
    backward pass, the returned module runs eagerly for good, the state being as if the failed attempt had never been;
    see ``docs/adopting.md`` for what is guaranteed.

    The module that is returned is another object for the same model (:mod:`.twin`): its class is a subclass with the
    same name, parameters and all attributes are shared, and so are ``state_dict``, ``train()`` and ``to()``. Copies and
    pickles of it are compiled modules again, without a healthcheck.

    Args:
        model: A module, or a function. Not one that torch.compile or maybe_compile has returned.
        cfg: Disabled: ``model`` itself is returned, untouched.
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
        return model
    _refuse_unusable(model, cfg)
    selection = Selection(model, cfg.allowlist, cfg.blocklist) if isinstance(model, nn.Module) else None
    settings = cfg.settings()
    attempt = Attempt(model, cfg, logger)
    began = time.perf_counter()
    try:
        made = _make(model, attempt, settings, selection)
    except Exception as error:
        return _failed(model, attempt, "build", began, error)  # type: ignore[no-any-return]
    if made is None:
        attempt.log("nothing_compiled", "build", 0.0, reason="torch.compile is switched off (TORCHDYNAMO_DISABLE)")
        return model
    if cfg.healthcheck and sample_batch is not None:
        return _tried(model, made, sample_batch, attempt, began)  # type: ignore[no-any-return]
    attempt.log("deferred", "build", time.perf_counter() - began)
    return made.compiled  # type: ignore[no-any-return]


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


def _make(model: Any, attempt: Attempt, settings: dict[str, Any], selection: Selection | None) -> _Made | None:
    inner = backend_of(settings)
    if inner is None:
        return None
    guard, entries = Guard(attempt), Compiled()
    around = context(Backend(inner, guard), settings, guard, entries)
    if selection is None:
        call = guarded(guard, around(model), model)
        return _Made(functools.wraps(model)(call), guard, entries)
    guard.undo = selection.put(lambda part: guarded(
        guard, around(frame_of(part, part._call_impl)), part._call_impl, part=True))
    whole = around(frame_of(model, model.__call__)) if selection.whole else model
    call = guarded(guard, whole, model)

    def again(copied: Any) -> Any:
        return copied if guard.eager else maybe_compile(copied, attempt.config, attempt.logger)

    def recipe() -> tuple[Any, ...]:
        return _unpickled, (model, attempt.config, attempt.logger, guard.eager)

    return _Made(twin_of(model, call, again, recipe, guard.drop), guard, entries)


def _unpickled(model: Any, cfg: CompileConfig, logger: Any, eager: bool) -> Any:
    return model if eager else maybe_compile(model, cfg, logger)


def _tried(model: Any, made: _Made, sample_batch: Any, attempt: Attempt, began: float) -> Any:
    """The compiled model if it passes the smoketest."""
    guard, test = made.guard, CompileSmoketest(attempt.config.smoketest_steps)
    guard.trial, guard.watchful = True, False
    forget_sizes, passed = sizes_seen(), False
    try:
        passed = test.run(made.compiled, sample_batch)
    finally:
        guard.trial = False
        if not passed:
            guard.drop()
            made.entries.drop()
            forget_sizes()
    result = test.last_result
    seconds = time.perf_counter() - began
    if result is None or passed:
        made.entries.keep()
        attempt.log("compiled", "healthcheck", seconds, reason=result.reason if result else "")
        return made.compiled
    if result.user_error is not None:
        attempt.log("user_error", "healthcheck", seconds, result.user_error, result.reason)
        raise result.user_error
    error = guard.failure or CompileFailed("\n".join(filter(None, (result.reason, result.evidence))))
    return _failed(model, attempt, "healthcheck", began, error, f"{result.reason} (in {result.phase})")


def _failed(
    model: Any, attempt: Attempt, phase: str, began: float, error: BaseException, reason: str = ""
) -> Any:
    seconds = time.perf_counter() - began
    if attempt.config.fail_policy == "raise":
        attempt.log("raised", phase, seconds, error, reason)
        raise CompileFailed(f"{attempt.model} is not used compiled: {reason or error}") from error
    attempt.log("fallback_eager", phase, seconds, error, reason)
    return model


def _refuse_unusable(model: Any, cfg: CompileConfig) -> None:
    if is_twin(model) or hasattr(model, "_torchdynamo_orig_callable"):
        raise ValueError(f"{type(model).__name__} is compiled already; give maybe_compile the original "
                         "(a compiled module keeps it as _orig_mod)")
    if not isinstance(model, nn.Module):
        if not isinstance(model, (types.FunctionType, types.MethodType)):
            raise ValueError(f"an object of type {type(model).__name__} cannot be compiled; expected a module "
                             "or a function")
        if cfg.allowlist or cfg.blocklist:
            raise ValueError(f"allowlist and blocklist choose parts of a module, and {model.__name__} is a function")
