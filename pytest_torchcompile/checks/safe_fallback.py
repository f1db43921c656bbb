"""safe_fallback: where the cell's model does not compile, maybe_compile hands out a model that runs as eager does.

Tried on the cell's own model and settings, during an outage of the compiler (``gauges.compiler``): with a
sample batch it must return the model itself, untouched, and without one a model whose first call gives bit by bit what
eager gives, gradients, buffers and random numbers included. Either way with a record in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.checks.check import Check
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.oracle.expected import Repeated
    from pytest_torchcompile.oracle.recording import Recording
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

FELL_BACK = "fallback_eager"
"""What the log says of a model that runs eagerly instead."""


def measure(run: CellTrial) -> dict[str, Any]:
    """What maybe_compile did with the cell's model during an outage."""
    import torch

    from pytest_torchcompile.gauges.compiler import compiler_outage
    from pytest_torchcompile.layer.config import CompileConfig
    from pytest_torchcompile.layer.preservation import DeepSnapshot
    from pytest_torchcompile.layer.wrap import maybe_compile
    from pytest_torchcompile.state.snapshot import changed_names, copy_state

    side, first = run.make(None), run.calls[0]
    call = _as_compilable(side.call)
    settings = {name: value for name, value in run.settings.items() if name in ("backend", "mode", "dynamic")}
    config, log = CompileConfig(enabled=True, **settings), _Log()
    section: dict[str, Any] = {"error": None, "original": False, "changed": [], "differs": [], "met": []}
    with compiler_outage() as met, torch.set_grad_enabled(run.train):
        try:
            kept, before = DeepSnapshot(side.module), copy_state(side.module)
            try:
                section["original"] = maybe_compile(call, config, log.logger, first.batch.value) is call
            finally:
                # Also of an attempt that raises.
                section["changed"] = [*changed_names(before, copy_state(side.module)), *kept.changed()]
            met_with_sample = met.met
            fallen_back = maybe_compile(call, config, log.logger)
            fall_back = partial(maybe_compile, call, config, _Log().logger)
            section["differs"] = list(_differences(run, side, call, fallen_back, fall_back))
            section["met"] = [met_with_sample, met.met - met_with_sample]
        except Exception as error:
            section["error"] = f"{type(error).__name__}: {error}"
    return section | {"log": log.results}


# Further fallbacks whose first call is looked at where one differs from an eager model that has repeated itself so far.
_FURTHER_FALLBACKS = 8


def _differences(run: CellTrial, side: Side, call: Callable[..., Any], fallen: Callable[..., Any],
                 fall_back: Callable[[], Callable[..., Any]]) -> Iterator[str]:
    """What one call of the model gives otherwise when it falls back, in one line each.

    ``fall_back`` makes one more model that falls back in its first call.
    """
    from pytest_torchcompile.layer.preservation import DeepSnapshot
    from pytest_torchcompile.oracle import compare, record
    from pytest_torchcompile.oracle.expected import FAR, Repeated
    from pytest_torchcompile.oracle.leaf_limits import NOTED, Limits, problem

    side.restore()
    kept = DeepSnapshot(side.module)

    # Each recording starts from the same state and seed, whatever the one before has changed.
    def record_call(function: Callable[..., Any]) -> Any:
        kept.restore()
        return record(function, side.module, run.calls[0].batch, loss=run.loss, train=run.train, seed=run.seed)

    eager = record_call(call)
    repeated = Repeated(eager, partial(record_call, call))
    fallen_back = record_call(fallen)
    further: list[Recording] = []
    for leaf in compare(eager, fallen_back, repeated):
        if leaf.bitwise or leaf.kind in NOTED:
            continue
        # Where eager does not repeat itself the fallback need not repeat it either.
        if not leaf.message and repeated.distance(leaf.name, fallen_back) <= FAR:
            continue
        if problem(leaf, Limits()) is None:
            # No more than rounding. Sums that a GPU adds up in any order may come out alike in all of eager's runs; a
            # fallback that brings a difference in brings it in each time.
            while len(further) < _FURTHER_FALLBACKS and not _any_agrees(further, leaf.name, repeated):
                further.append(record_call(fall_back()))
            if _any_agrees(further, leaf.name, repeated):
                continue
        yield problem(leaf, Limits(0, 0, 0, grain=0)) or f"{leaf.name}: differs"


def _any_agrees(recordings: Iterable[Recording], name: str, eager: Repeated) -> bool:
    """Whether a value is in one of the recordings what eager's runs make of it."""
    from pytest_torchcompile.oracle.expected import FAR

    return any(eager.distance(name, recording) <= FAR for recording in recordings)


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section, the worst first; takes no limits."""
    yield from _harm_done(section)
    if section["error"]:
        yield Problem(f"maybe_compile let a failure of the compiler through: {section['error']}")
        return
    with_sample, without_sample = section["met"]
    if not (with_sample and without_sample):
        yield Problem("nothing was proven: the model met no outage, because nothing of it was to be compiled",
                      evidence=f"attempts with and without a sample batch: {section['met']}")
    if with_sample and not section["original"]:
        yield Problem("with a sample batch that does not compile, maybe_compile returned something else than the model")
    attempts = bool(with_sample) + bool(without_sample)
    # A fall-back that nobody is told of looks like a compiled model.
    if section["log"].count(FELL_BACK) < attempts:
        yield Problem(f"the log says {', '.join(section['log']) or 'nothing'}; expected {FELL_BACK} for each attempt")


def _harm_done(section: Mapping[str, Any]) -> Iterator[Problem]:
    """Changed state and results that differ: wrong also where an attempt met no outage, or raised."""
    if section["changed"]:
        yield Problem(f"the attempt left {len(section['changed'])} thing(s) changed",
                      evidence="\n".join(section["changed"]))
    how = "after the fallback"
    if section["differs"] and not section["met"][1]:
        how = "without a fallback"
    for text in section["differs"]:
        yield Problem(f"{how}, {text}", "beside the same call of the eager model")


class _Log:
    """A logger of its own, whose records go nowhere else."""

    def __init__(self) -> None:
        self.results: list[str] = []
        self.logger = logging.Logger("safe_fallback")
        handler = logging.Handler()
        handler.emit = self._keep_result  # type: ignore[method-assign]
        self.logger.addHandler(handler)

    def _keep_result(self, record: logging.LogRecord) -> None:
        self.results.append(str(getattr(record, "torchcompile", {}).get("result")))


def _as_compilable(call: Callable[..., Any]) -> Callable[..., Any]:
    """What maybe_compile takes: a module or a function."""
    import types

    from torch import nn

    if isinstance(call, (nn.Module, types.FunctionType, types.MethodType)):
        return call

    def forward_call(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward_call


CHECK = Check("safe_fallback", measure, judge)
