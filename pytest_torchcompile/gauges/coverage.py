"""Coverage: the share of a model's operator calls that ran inside compiled graphs.

    share = 1 - outside / total

``total``: operator calls of the eager forward, ``outside``: operator calls of the compiled forward that ran
in no graph. Both count top-level ATen calls (``aten::linear`` is one, whatever it calls in turn), as the CPU
profiler sees them; a graph's own calls, and those that torch makes while it compiles, lie between markers of
ours. The profiler's own ``Torch-Compiled Region`` does not serve: it also spans Python between two graphs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.gauges.settled_collectives import settled_collectives
from pytest_torchcompile.ledger import observe

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

__all__ = ["CALL", "IN_GRAPH", "Coverage", "marked_graphs", "measure_coverage"]

IN_GRAPH: Final = "pytest_torchcompile::compiled"
CALL: Final = "pytest_torchcompile::call"
_INSIDE: Final = frozenset({IN_GRAPH, "Pregraph bytecode", "TorchDynamo Cache Lookup"})
"""Ours, and what Dynamo does itself around a graph: making tensors of floats before it
(``record_pregraph_bytecode_enter`` in torch/_dynamo/utils.py, torch 2.8 to 2.15), and evaluating guards (which
makes tensors too on torch 2.11)."""


@dataclass(frozen=True)
class Coverage:
    """Operator calls of one forward pass."""

    total: int
    """Of the eager forward."""
    outside: int
    """Of the compiled forward, outside of every compiled graph; never more than ``total``."""
    share: float
    """Between 0 and 1. A model without operators has 0: nothing of it was compiled."""
    sites: tuple[str, ...] = ()
    """What ran outside, most frequent first, like ``aten::mul x3``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Coverage:
        """Make a coverage from what :meth:`to_dict` returned."""
        return cls(**{**data, "sites": tuple(data["sites"])})


def measure_coverage(eager_call: Callable[[], object], compiled_call: Callable[[], object]) -> Coverage:
    """Run each call once (forward only) and compare what ran where.

    Neither call is traced again or recompiled for it: the profiler is no dispatch mode and no guard. A call
    that compiles is fine too, what torch runs while it compiles does not count.
    """
    total = sum(_calls_outside(eager_call).values())
    # The markers are opened by the hooks of a ledger.
    with observe():
        outside = _calls_outside(compiled_call)
    # A compiled call may run more outside of its graphs than the eager one has in all.
    count = min(sum(outside.values()), total)
    share = 1 - count / total if total else 0.0
    return Coverage(total, count, share, tuple(f"{name} x{n}" for name, n in outside.most_common()))


def _calls_outside(call: Callable[[], object]) -> Counter[str]:
    """Top-level ATen calls that ``call`` makes outside of our markers, by name."""
    import torch

    profiler = torch.autograd.profiler
    with (marked_graphs(), profiler.profile(use_cpu=True) as profile, settled_collectives(),
          profiler.record_function(CALL)):  # fmt: skip
        call()
    events = profile.function_events or ()
    # gloo's own threads move data by operators, none of which is the model's: an all_gather's aten::copy_ for each
    # rank, whether what began it ran in a graph or not (AsyncAllgatherWork, torch/csrc/distributed/c10d/
    # ProcessGroupGloo.cpp, torch 2.8 to 2.13).
    transport = _threads_of(events, "gloo:") - _threads_of(events, CALL)
    calls: Counter[str] = Counter()
    for event in events:
        if _is_top_level(event) and not _is_in_graph(event) and event.thread not in transport:
            calls[event.name] += 1
    return calls


def _threads_of(events: Iterable[FunctionEvent], prefix: str) -> set[int]:
    """The threads of events of these names."""
    return {event.thread for event in events if event.name.startswith(prefix)}


@contextlib.contextmanager
def marked_graphs() -> Iterator[None]:
    """Give the profiler an event for each compiled graph that runs while a ledger is open, and for each compile."""
    import torch

    from pytest_torchcompile.ledger.process_watch import watch

    def marker(compile_id: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autograd.profiler.record_function(IN_GRAPH)

    before, watch.marker = watch.marker, marker
    try:
        yield
    finally:
        watch.marker = before


def _is_top_level(event: FunctionEvent) -> bool:
    return event.name.startswith("aten::") and not any(outer.name.startswith("aten::") for outer in _parents_of(event))


def _is_in_graph(event: FunctionEvent) -> bool:
    return any(outer.name in _INSIDE for outer in _parents_of(event))


def _parents_of(event: FunctionEvent) -> Iterator[FunctionEvent]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent
