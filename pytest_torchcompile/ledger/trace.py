"""Torch's structured trace, read live: the records behind ``TORCH_TRACE`` and tlparse.

``trace_structured`` (torch/_logging/_internal.py) writes them to the logger ``torch.__trace``; event names
are unchanged from torch 2.8 to 2.15. With a handler there the records are made, else they cost nothing.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger import break_text as graph_breaks
from pytest_torchcompile.ledger import decisions
from pytest_torchcompile.ledger.in_progress import Attempt
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Text
from pytest_torchcompile.ledger.stages import STAGES, seconds_in

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import Watch

__all__ = ["compile_id", "install_hook"]

_LOGGER: Final = "torch.__trace"
_CONTEXT: Final = frozenset({
    "rank", "frame_id", "frame_compile_id", "attempt", "has_payload", "stack", "compiled_autograd_id",
    "subgraph_name", "severity", "timestamp", "pathname", "thread",
})  # fmt: skip
_IGNORED: Final = frozenset({"str", "chromium_event", "dynamo_start", "create_symbol"})
_CACHE: Final = re.compile(r"(fx_graph|aotautograd)(?:_bundled)?_cache_(hit|miss|bypass)$")


@contextlib.contextmanager
def install_hook(watch: Watch) -> Iterator[None]:
    """Read the trace for ``watch`` while the block runs."""
    import torch._logging  # noqa: F401  # registers the logger

    log, handler, mute = logging.getLogger(_LOGGER), _Handler(watch), _Mute()
    level, propagate, others = log.level, log.propagate, list(log.handlers)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addFilter(mute)
    log.addHandler(handler)
    try:
        with _whatever_is_disabled(log):
            yield
    finally:
        log.removeHandler(handler)
        log.removeFilter(mute)
        mute.undo()
        log.setLevel(level)
        log.propagate = propagate
        # Torch's own lazy handler takes itself away at the first record without TORCH_TRACE; put it back.
        for other in others:
            if other not in log.handlers and not _is_pytests(other):  # pytest's are those of a phase, maybe a past one
                log.addHandler(other)


@contextlib.contextmanager
def _whatever_is_disabled(log: logging.Logger) -> Iterator[None]:
    """Have records handled also where ``logging.config`` or ``logging.disable`` has switched all loggers off."""
    def handle(record: logging.LogRecord) -> None:
        if log.filter(record):
            log.callHandlers(record)

    own = {"isEnabledFor": lambda level: True, "handle": handle}
    vars(log).update(own)
    try:
        yield
    finally:
        for name in own:
            vars(log).pop(name, None)


def compile_id(metadata: dict[str, Any]) -> str:
    """A compile id as torch spells it (``CompileId.__str__`` in torch/_guards.py), out of a record."""
    autograd = metadata.get("compiled_autograd_id")
    frame = f"{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"
    return frame if autograd is None else f"!{autograd}/{frame}" if "frame_id" in metadata else f"!{autograd}"


class _Mute(logging.Filter):
    """Keeps the trace out of pytest's captured log, where every failure would show some hundred lines of it.

    From pytest 9.2 on (_pytest/logging.py, ``catching_logs``) its handlers are put on loggers that do not
    propagate too, anew in each phase of a test; so they are looked for at each record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.muted: list[logging.Handler] = []

    def filter(self, record: logging.LogRecord) -> bool:
        for handler in logging.getLogger(_LOGGER).handlers:
            if _is_pytests(handler) and handler not in self.muted:
                self.muted.append(handler)
                handler.addFilter(_of_others)
        return True

    def undo(self) -> None:
        for handler in self.muted:
            handler.removeFilter(_of_others)


def _is_pytests(handler: logging.Handler) -> bool:
    return type(handler).__module__ == "_pytest.logging"


def _of_others(record: logging.LogRecord) -> bool:
    """Whether a record is none of the trace's."""
    return record.name != _LOGGER


class _Handler(logging.Handler):
    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.DEBUG)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        if self.watch.thread.attempts:
            self.watch.thread.attempts[-1].heard = True
        metadata = getattr(record, "metadata", None)
        name = next((k for k in metadata if k not in _CONTEXT), "") if isinstance(metadata, dict) else ""
        if metadata is None or not name or name in _IGNORED or name.startswith("describe_"):
            return
        try:
            self._read(name, metadata, getattr(record, "payload", None))
        except Exception as error:  # must not fail the run that is watched, nor be hidden
            self.watch.note_loss(f"trace record {name!r}: {type(error).__name__}: {error}")

    def _read(self, name: str, metadata: dict[str, Any], payload: Any) -> None:
        if name == "artifact":
            name = metadata["artifact"]["name"]
        attempt = self.watch.thread.attempts[-1] if self.watch.thread.attempts else None
        if name == "dynamo_graph_break_reason":
            self._graph_break(str(payload), compile_id(metadata), attempt)
        elif name == "recompile_reasons" and attempt:
            attempt.reasons = decisions.read_failed_guards(attempt, payload)
        elif name == "compilation_metrics" and attempt:
            attempt.metrics = metadata[name]
        elif name == "bwd_compilation_metrics":
            self._backward(compile_id(metadata), metadata[name])
        elif name in STAGES:
            for ledger, _root in self.watch.ledgers:
                if ledger.keep_texts:
                    ledger.add(Text(compile_id(metadata), STAGES[name], str(payload), ledger.label))
        elif (cache := _CACHE.match(name)) and attempt:
            attempt.caches.append(f"{'fx' if cache[1] == 'fx_graph' else 'aot'} {cache[2]}")

    def _graph_break(self, text: str, of: str, attempt: Attempt | None) -> None:
        code, lines, at = ("", ""), Attempt().lines, ("", 0, "")
        if self.watch.thread.regions:
            self.watch.broken.add(self.watch.callable_place(self.watch.thread.regions[-1]))
        if attempt:
            code, lines, at = attempt.code, attempt.lines, (attempt.file, attempt.line, attempt.function)
        for ledger, root in self.watch.ledgers:
            found = graph_breaks.parse_break(text, root=root, during=ledger.label, compile_id=of, traced=code,
                                       lines=lines, outermost=at)  # fmt: skip
            if graph_breaks.is_limit(found.reason):
                return
            found = ledger.add(found)
            if attempt:
                attempt.breaks.append(found)
        if self.watch.ledgers and (name := graph_breaks.disabled_function(found)):
            eager = EagerFrame(name, found.file, found.line, "torch.compiler.disable", "disabled")
            self.watch.give_up(Attempt(), eager)

    def _backward(self, of: str, metrics: dict[str, Any]) -> None:
        for ledger, _root in self.watch.ledgers:
            forward = next((c for c in reversed(ledger.compiles) if c.compile_id == of), None)
            where = (forward.function, forward.file, forward.line) if forward else ("", "", 0)
            ledger.add(Compile(
                *where, of, "backward", during=ledger.label, seconds=(metrics.get("duration_us") or 0) / 1e6,
                seconds_in=seconds_in(metrics),
            ))  # fmt: skip
