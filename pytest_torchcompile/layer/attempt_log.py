"""The log of the production layer: one structured record for each attempt to compile a model."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from typing import Any, Final

from pytest_torchcompile.errors import headline
from pytest_torchcompile.layer.config import CompileConfig

__all__ = ["RESULTS", "Attempt", "Seconds", "error_headline"]

RESULTS: Final = {
    "disabled": (logging.DEBUG, "it is not enabled, so it runs eagerly"),
    "compiled": (logging.INFO, "it runs compiled"),
    "inner_blocks": (logging.WARNING, "it does not run compiled as a whole; its inner blocks do, each by itself"),
    "deferred": (logging.INFO, "it compiles in its first call"),
    "nothing_compiled": (logging.WARNING, "nothing of it was compiled, so it runs eagerly"),
    "recompile_limit": (logging.WARNING, "a function of it runs eagerly from now on where no compiled code fits"),
    "hooks_changed": (logging.WARNING, "it is compiled again with its hooks, and from now on they are guarded"),
    "fallback_eager": (logging.WARNING, "it runs eagerly from now on"),
    "user_error": (logging.INFO, "it raises without torch.compile too"),
    "raised": (logging.ERROR, "the failure is raised"),
    "cannot_fall_back": (logging.ERROR, "the failure is raised, because to end this step eagerly could give wrong "
                         "results"),
}
"""What a record's ``result`` can be, its level, and what it means for the model."""


@dataclass(frozen=True)
class Seconds:
    """How long an attempt took."""

    all: float = 0.0
    compiling: float = 0.0
    """Of these, the seconds in which the compiler worked."""
    healthcheck: float = 0.0
    """Of these, the seconds that the healthcheck took beside."""

    def rounded(self) -> dict[str, float]:
        """The record's keys, to the microsecond."""
        return {"seconds": round(self.all, 6), "compile_seconds": round(self.compiling, 6),
                "healthcheck_seconds": round(self.healthcheck, 6)}


class Attempt:
    """Logs what became of one model. The record is ``torchcompile`` of a :class:`logging.LogRecord`, plain data:

    ``model, enabled, backend, mode, dynamic, fullgraph, result, phase, seconds, compile_seconds, healthcheck_seconds,
    reason, exception``, where ``exception`` is None or ``{type, message, stack}``, and ``phase`` is ``build``,
    ``healthcheck``, ``benchmark``, ``call`` or ``backward``. ``seconds`` are all, ``compile_seconds`` those that the
    compiler took of them, and ``healthcheck_seconds`` the rest of a healthcheck. The exception itself is the record's
    ``exc_info``.
    """

    def __init__(
        self, model: Any, config: CompileConfig, logger: logging.Logger | logging.LoggerAdapter[Any] | None
    ) -> None:
        self.model = getattr(model, "__name__", type(model).__name__)
        self.config = config
        self.logger = logger or logging.getLogger("pytest_torchcompile")

    def log(
        self,
        result: str,
        phase: str,
        seconds: Seconds,
        error: BaseException | None = None,
        reason: str = "",
    ) -> None:
        """Write one record. ``error`` and ``reason`` say why; without a reason it is the error's first line."""
        level, meaning = RESULTS[result]
        if not reason and error is not None:
            reason = error_headline(error)
        record = {"model": self.model, **_settings_of(self.config), "result": result, "phase": phase,
                  **seconds.rounded(), "reason": reason, "exception": _as_plain_data(error)}
        text = (f"torch.compile of {self.model} (backend {record['backend']}, mode {record['mode']}, dynamic "
                f"{record['dynamic']}, fullgraph {record['fullgraph']}): {result} after {seconds.all:.1f} s; {meaning}")
        if reason:
            text = f"{text}: {reason}"
        _write_record(self.logger, level, text, error, {"torchcompile": record})


def error_headline(error: BaseException) -> str:
    """Type and headline of an exception."""
    kind, text = type(error).__name__, headline(str(error))
    return f"{kind}: {text}" if text else kind


def _settings_of(config: CompileConfig) -> dict[str, Any]:
    backend = config.backend
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    return {"enabled": config.enabled, "backend": name, "mode": config.mode, "dynamic": config.dynamic,
            "fullgraph": config.fullgraph}


def _as_plain_data(error: BaseException | None) -> dict[str, str] | None:
    if error is None:
        return None
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "message": str(error), "stack": stack}


def _write_record(logger: Any, level: int, text: str, error: BaseException | None, extra: dict[str, Any]) -> None:
    options: Any = {}
    # An adapter puts its own extra in the place of ours.
    if isinstance(logger, logging.LoggerAdapter):
        text, options = logger.process(text, options)
        extra = {**(options.pop("extra", None) or {}), **extra}
        logger = logger.logger
    logger.log(level, "%s", text, **{"exc_info": error, **options, "extra": extra})
