"""Torch's structured trace, read live: the records behind ``TORCH_TRACE`` and tlparse.

``trace_structured`` (torch/_logging/_internal.py) writes them to the logger ``torch.__trace``; event names
are unchanged from torch 2.8 to 2.15. With a handler there the records are made, else they cost nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger import break_sites, decisions
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Text
from pytest_torchcompile.ledger.users import FrameAttempt, FunctionPlace

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["compile_id", "install_hook", "muted_trace"]

_LOGGER: Final = "torch.__trace"
_CONTEXT: Final = frozenset({
    "rank", "frame_id", "frame_compile_id", "attempt", "has_payload", "stack", "compiled_autograd_id",
    "subgraph_name", "severity", "timestamp", "pathname", "thread",
})  # fmt: skip
"""Keys that any record may have. The one that is left is the name of the event."""
_IGNORED: Final = frozenset({"str", "chromium_event", "dynamo_start", "create_symbol"})
"""A compile makes some 300 records; nothing is read of these."""
_STAGES: Final = {
    "dynamo_output_graph": "dynamo",
    "aot_joint_graph": "joint",
    "aot_forward_graph": "forward",
    "aot_inference_graph": "forward",
    "aot_backward_graph": "backward",
    "inductor_post_grad_graph": "post_grad",
    # Torch 2.8 writes this one on a cache miss.
    "after_post_grad_graph": "post_grad",
    "inductor_output_code": "code",
    # Since torch 2.9, and only where kernels are compiled with the lines of the user's code.
    "inductor_provenance_tracking_kernel_stack_traces": "kernel_lines",
}
"""Events and artifacts of the structured trace (names: torch 2.8 to 2.15), and our names of the stages."""
_CACHE: Final = re.compile(r"(fx_graph|aotautograd)(?:_bundled)?_cache_(hit|miss|bypass)$")
_CACHE_NAMES: Final = {"fx_graph": "fx", "aotautograd": "aot"}
_KEY_LENGTH: Final = 16
"""Characters of a cache's key that are kept: 80 bits in base 32, enough to tell the graphs of a run apart."""


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
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
        mute.unmute()
        log.setLevel(level)
        log.propagate = propagate
        # Torch's own lazy handler takes itself away at the first record without TORCH_TRACE; put it back.
        # pytest's handlers are those of a phase, maybe a past one.
        for other in others:
            if other not in log.handlers and not _is_pytests(other):
                log.addHandler(other)


@contextlib.contextmanager
def muted_trace() -> Iterator[None]:
    """Keep the trace out of pytest's captured log while the block compiles and nothing reads it."""
    log, mute = logging.getLogger(_LOGGER), _Mute()
    log.addFilter(mute)
    try:
        yield
    finally:
        log.removeFilter(mute)
        mute.unmute()


@contextlib.contextmanager
def _whatever_is_disabled(log: logging.Logger) -> Iterator[None]:
    """Have records handled also where ``logging.config`` or ``logging.disable`` has switched all loggers off.

    ``dictConfig`` disables every logger that it does not name, and compiles would go unseen.
    """
    def handle(record: logging.LogRecord) -> None:
        if log.filter(record):
            log.callHandlers(record)

    def always(level: int) -> bool:
        return True

    # On the instance, so that the user may switch the logger off meanwhile, and finds it as he left it.
    own: dict[str, Callable[..., Any]] = {"isEnabledFor": always, "handle": handle}
    vars(log).update(own)
    try:
        yield
    finally:
        for name in own:
            vars(log).pop(name, None)


def compile_id(metadata: dict[str, Any]) -> str:
    """A compile id as torch spells it (``CompileId.__str__`` in torch/_guards.py), out of a record."""
    frame = f"{metadata.get('frame_id', '-')}/{metadata.get('frame_compile_id', '-')}"
    autograd = metadata.get("compiled_autograd_id")
    if autograd is None:
        return frame
    if "frame_id" in metadata:
        return f"!{autograd}/{frame}"
    return f"!{autograd}"


def _cache_key(payload: Any) -> str:
    """The beginning of the key that a cache looked for, as its record has it (torch 2.8 to 2.15, both caches)."""
    try:
        key = json.loads(payload).get("key")
    # No JSON, or no object: then nobody can tell which graph the answer is about.
    except (TypeError, ValueError, AttributeError):
        return ""
    return str(key or "")[:_KEY_LENGTH]


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
                handler.addFilter(_is_of_others)
        return True

    def unmute(self) -> None:
        """Let pytest's handlers be as they were."""
        for handler in self.muted:
            handler.removeFilter(_is_of_others)


def _is_pytests(handler: logging.Handler) -> bool:
    return type(handler).__module__ == "_pytest.logging"


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a record is none of the trace's."""
    return record.name != _LOGGER


def _event_name(metadata: Any) -> str:
    """What a record is about; empty where it is none of torch's, or of no interest."""
    if isinstance(metadata, dict):
        for name in metadata:
            if name not in _CONTEXT:
                if name in _IGNORED or name.startswith("describe_"):
                    return ""
                return str(name)
    return ""


class _Handler(logging.Handler):
    def __init__(self, watch: LedgerWatch) -> None:
        super().__init__(logging.DEBUG)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        if self.watch.thread.attempts:
            self.watch.thread.attempts[-1].heard = True
        metadata = getattr(record, "metadata", None)
        name = _event_name(metadata)
        if metadata is None or not name:
            return
        try:
            self._read_record(name, metadata, getattr(record, "payload", None))
        except Exception as error:  # must not fail the run that is watched, nor be hidden
            self.watch.note_loss(f"trace record {name!r}: {type(error).__name__}: {error}")

    def _read_record(self, name: str, metadata: dict[str, Any], payload: Any) -> None:
        if name == "artifact":
            name = metadata["artifact"]["name"]
        attempt = self.watch.thread.attempts[-1] if self.watch.thread.attempts else None
        # The first three come without an attempt too: autograd's thread compiles a backward, and Dynamo is not asked.
        if name == "dynamo_graph_break_reason":
            self._enter_break(str(payload), compile_id(metadata), attempt)
        elif name == "bwd_compilation_metrics":
            self._enter_backward(compile_id(metadata), metadata[name])
        elif name in _STAGES:
            self._keep_text(compile_id(metadata), _STAGES[name], payload)
        elif attempt is None:
            return
        elif name == "recompile_reasons":
            attempt.reasons = decisions.read_failed_guards(attempt, payload)
        elif name == "compilation_metrics":
            attempt.metrics = metadata[name]
        elif name == "symbolic_shape_specialization":
            # Rare: only then is the module loaded.
            from pytest_torchcompile.ledger.specialised_sizes import specialised_sizes

            attempt.specialised.update(specialised_sizes(metadata[name]))
        elif cache := _CACHE.match(name):
            attempt.caches.append(f"{_CACHE_NAMES[cache[1]]} {cache[2]}")
            attempt.cache_keys.append(_cache_key(payload))

    def _keep_text(self, of: str, stage: str, payload: Any) -> None:
        for ledger, _root in self.watch.ledgers:
            if ledger.keep_texts:
                ledger.add(Text(of, stage, str(payload), ledger.label))

    def _enter_break(self, text: str, of: str, attempt: FrameAttempt | None) -> None:
        watch = self.watch
        if watch.thread.regions:
            watch.broken.add(watch.place_of(watch.thread.regions[-1]))
        traced = attempt.traced if attempt else break_sites.TracedCode()
        for ledger, root in watch.ledgers:
            found = break_sites.parse_break(text, root=root, during=ledger.label, compile_id=of, traced=traced)
            # Told as an eager frame, when the frame is decided on.
            if break_sites.is_limit(found.reason):
                return
            found = ledger.add(found)
            if attempt:
                attempt.breaks.append(found)
        if watch.ledgers and (name := break_sites.disabled_function(found)):
            eager = EagerFrame(name, found.file, found.line, "torch.compiler.disable", "disabled")
            watch.give_up(FrameAttempt(), eager)

    def _enter_backward(self, of: str, metrics: dict[str, Any]) -> None:
        other = self.watch.other_thread()
        for ledger, _root in self.watch.ledgers:
            # It is compiled in the name of its forward, the last one: numbers begin anew after a reset.
            where = FunctionPlace("", "", 0)
            for compiled in reversed(ledger.compiles):
                if compiled.compile_id == of:
                    where = FunctionPlace(compiled.function, compiled.file, compiled.line)
                    break
            ledger.add(Compile(
                *where, of, "backward", during=ledger.label, seconds=(metrics.get("duration_us") or 0) / 1e6,
                seconds_in=decisions.seconds_in(metrics), thread=other.name, missed=other.missed,
            ))  # fmt: skip
