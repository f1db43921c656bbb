"""Graph shrinking: torch's own minifier, asked by the oracle's verdict, and inputs that a line can make."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from pytest_torchcompile.culprit.captured_graph import CapturedGraph, leaf_copies
from pytest_torchcompile.ledger.torch_internals import private_name

__all__ = ["Shows", "drawable_inputs", "shrink_graph"]

Shows = Callable[[CapturedGraph], bool]
"""Does a graph still show what is looked for?"""


class _OutOfTime(Exception):
    """The budget is spent."""


def shrink_graph(captured: CapturedGraph, shows: Shows, deadline: float) -> CapturedGraph:
    """The smallest graph found until a deadline of ``time.monotonic()`` that still shows it.

    ``torch._functorch.fx_minifier.minifier``, torch 2.13: cuts off the end, makes inputs of values in the middle, drops
    outputs. It prints what it does, and takes what its question raises for its own failure.

    Raises InstrumentError where this torch lacks it.
    """
    minifier = private_name("torch._functorch.fx_minifier", "minifier", "makes graphs smaller",
                            "a graph can't be made smaller")
    best = captured

    def still_shows(module: fx.GraphModule, values: Sequence[Any]) -> bool:
        nonlocal best
        if time.monotonic() > deadline:
            raise _OutOfTime
        smaller = CapturedGraph(module, leaf_copies(tuple(values)), captured.grad)
        found = shows(smaller)
        # Kept here, not where it reports: there it may have been stopped before.
        if found and len(module.graph.nodes) <= len(best.module.graph.nodes):
            best = smaller
        return found

    silent = io.StringIO()
    # Whether it takes the graph at all, or says that it has made no progress, is no news: the smallest so far stands.
    with (contextlib.suppress(_OutOfTime, RuntimeError, AssertionError, AttributeError, ValueError, KeyError),
          contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent)):
        minifier(captured.module, list(leaf_copies(captured.inputs)), still_shows,
                 dump_state=lambda module, values: None)
    return best


def drawable_inputs(captured: CapturedGraph, shows: Shows, deadline: float) -> CapturedGraph:
    """The graph with inputs that one line of a script makes, so far as it still shows what is looked for."""
    drawn = [_drawn_like(value, number) for number, value in enumerate(captured.inputs)]
    every = CapturedGraph(captured.module, tuple(drawn), captured.grad)
    if shows(every):
        return every
    kept = list(captured.inputs)
    for number, value in enumerate(drawn):
        if time.monotonic() > deadline or value is kept[number]:
            continue
        tried = [*kept[:number], value, *kept[number + 1:]]
        if shows(CapturedGraph(captured.module, tuple(tried), captured.grad)):
            kept = tried
    return CapturedGraph(captured.module, tuple(kept), captured.grad)


def _drawn_like(value: Any, seed: int) -> Any:
    """A tensor of normal numbers with the form of another; what is no plain floating tensor stays."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.device.type == "meta":
        return value
    torch.manual_seed(seed)
    drawn = torch.randn(value.shape, dtype=value.dtype)
    # Strides are part of a fault: those of a copy that keeps them are the value's own.
    like = torch.empty_like(value.detach(), memory_format=torch.preserve_format)
    with torch.no_grad():
        like.copy_(drawn)
    if like.stride() != value.stride():
        return value
    drawn_like = like.requires_grad_(value.requires_grad)
    drawn_like._torchcompile_seed = seed  # type: ignore[attr-defined]
    return drawn_like
