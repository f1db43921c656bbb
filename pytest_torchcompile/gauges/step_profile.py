"""Step profile: where the time of one step on a CPU goes, and how many kernels it runs. Torch's CPU profiler tells.

A *kernel* on a CPU is an operator call that computes: no view, no allocation, and not one that only calls others
(``aten::linear`` calls ``aten::addmm``). The kernels that Inductor generates are no events of the profiler:
:func:`~pytest_torchcompile.gauges.kernels.read_kernels` counts those in their code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.gauges.coverage import CALL, IN_GRAPH, marked_graphs
from pytest_torchcompile.gauges.settled_collectives import settled_collectives
from pytest_torchcompile.gauges.user_python import UserPython
from pytest_torchcompile.ledger import observe

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

__all__ = ["StepProfile", "computes", "profile_step"]

_GRAPH: Final = (IN_GRAPH, "## Call CompiledFxGraph", "CompiledFunctionBackward")
"""How events begin that hold a compiled graph: our own marker, Inductor's (``CompiledFxGraph`` in
torch/_inductor/output_code.py) and AOTAutograd's backward node; torch 2.8 to 2.15."""
_TAKES_NUMBER: Final = "aten::_local_scalar_dense"
_GUARDS: Final = "TorchDynamo Cache Lookup"
"""Dynamo evaluates its guards (torch/csrc/dynamo/eval_frame.c, torch 2.8 to 2.15)."""
_NO_OPERATOR: Final = ("autograd::", "torch::autograd::", "pytest_torchcompile::")
"""How events begin that have the form of an operator's name and are none."""
_ALLOCATES: Final = frozenset({
    "_local_scalar_dense", "_unsafe_view", "empty", "empty_like", "empty_permuted", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "resize_", "result_type", "set_",
})
"""ATen operators that make or read memory and compute nothing, though their schema is none of a view."""

_MOST_TIMES: Final = 20
"""Repetitions of the shortest steps: each has some hundred events to be read."""


@dataclass(frozen=True)
class StepProfile:
    """One step, in seconds. The parts add up to all of it."""

    seconds: float
    """All of the step. With the profiler on it takes longer than without."""
    library: float
    """In operators that compiled graphs call: matrix products, convolutions, all that is not generated."""
    generated: float
    """In compiled graphs beside that: generated kernels, and the Python that calls them."""
    operators: float
    """In operators outside of compiled graphs."""
    guards: float
    """In Dynamo's guards."""
    python: float
    """In nothing of this: Python, be it the user's or torch's own, and the profiler."""
    kernels: int
    """Kernels outside of compiled graphs."""
    kernels_in_graphs: int
    """Kernels that compiled graphs call and that are not generated."""
    waits: int = 0
    """Numbers taken out of tensors (``.item()``, a branch on a tensor): a GPU is waited for each time."""
    library_calls: dict[str, int] = field(default_factory=dict)
    """Operators that compiled graphs call, by name; those that take longest first."""
    library_seconds: dict[str, float] = field(default_factory=dict)
    """Of these the seconds of all calls."""
    operator_names: tuple[str, ...] = ()
    """All operators that the step calls, also those that others call."""
    user_python: UserPython = field(default=UserPython(0.0))
    """Python of the user's own, measured apart; ``python`` holds torch's too, and what the profiler itself costs."""

    def share(self, part: str) -> float:
        """The share of a part (``library``, ``guards``, ...) in all of the step."""
        seconds: float = getattr(self, part)
        return seconds / self.seconds if self.seconds else 0.0


def profile_step(step: Callable[[], object], times: int = 3, seconds: float = 0.03) -> StepProfile:
    """Profile ``step``, warm, ``times`` over; the shortest counts, for what interrupts a step only makes it longer.

    Short steps are repeated until ``seconds`` have passed, for one interruption outlasts three of them. All in one
    session: the first step of a session takes longer, because the profiler itself is cold.
    """
    # The markers are opened by the hooks of a ledger.
    with observe():
        events = list(_record_events(step, times, seconds))
    return min(map(_read_events, _by_step(events)), key=_seconds_of)


def _seconds_of(profile: StepProfile) -> float:
    return profile.seconds


def _record_events(step: Callable[[], object], times: int, seconds: float) -> Iterable[FunctionEvent]:
    import torch

    profiler = torch.autograd.profiler
    with marked_graphs(), profiler.profile(use_cpu=True) as profile, settled_collectives():
        end, run = time.perf_counter() + seconds, 0
        while run < times or (run < _MOST_TIMES and time.perf_counter() < end):
            with profiler.record_function(CALL):
                step()
            run += 1
    return profile.function_events or ()


def _by_step(events: Iterable[FunctionEvent]) -> Iterable[list[FunctionEvent]]:
    """The events of each step, which is one event itself; other threads move data and are not waited for."""
    steps: dict[int, list[FunctionEvent]] = {}
    for event in events:
        outermost = event
        while outermost.cpu_parent is not None:
            outermost = outermost.cpu_parent
        if outermost.name == CALL:
            steps.setdefault(id(outermost), []).append(event)
    return steps.values()


@dataclass
class _Sums:
    """Microseconds, and counts, of the events of one step."""

    all: float = 0.0
    graphs: float = 0.0
    library: float = 0.0
    operators: float = 0.0
    guards: float = 0.0
    kernels: int = 0
    kernels_in_graphs: int = 0
    waits: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    seconds_of: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)


def _read_events(events: Iterable[FunctionEvent]) -> StepProfile:
    sums = _Sums()
    for event in events:
        _add_event(sums, event)
    second = 1e6
    named = sorted(sums.calls, key=lambda name: -sums.seconds_of[name])
    beside = sums.graphs + sums.operators + sums.guards
    return StepProfile(
        seconds=sums.all / second,
        library=sums.library / second,
        generated=max(0.0, sums.graphs - sums.library) / second,
        operators=sums.operators / second,
        guards=sums.guards / second,
        python=max(0.0, sums.all - beside) / second,
        kernels=sums.kernels,
        kernels_in_graphs=sums.kernels_in_graphs,
        waits=sums.waits,
        library_calls={name: sums.calls[name] for name in named},
        library_seconds={name: sums.seconds_of[name] / second for name in named},
        operator_names=tuple(sorted(sums.names)),
    )


def _add_event(sums: _Sums, event: FunctionEvent) -> None:
    outer = _outer_names(event)
    in_graph = any(name.startswith(_GRAPH) for name in outer)
    lasted: float = event.time_range.elapsed_us()  # type: ignore[no-untyped-call]
    if event.name == CALL:
        sums.all += lasted
    elif event.name.startswith(_GRAPH):
        if not in_graph:
            sums.graphs += lasted
    elif event.name == _GUARDS:
        if not in_graph:
            sums.guards += lasted
    elif _is_operator(event.name):
        sums.names.add(event.name)
        sums.waits += event.name == _TAKES_NUMBER
        if not any(map(_is_operator, outer)):
            _add_outermost_operator(sums, event, lasted, in_graph)
        if computes(event.name) and not _computes_inside(event):
            sums.kernels_in_graphs += in_graph
            sums.kernels += not in_graph


def _add_outermost_operator(sums: _Sums, event: FunctionEvent, lasted: float, in_graph: bool) -> None:
    if not in_graph:
        sums.operators += lasted
        return
    sums.library += lasted
    if computes(event.name) or _computes_inside(event):
        sums.calls[event.name] += 1
        # A Counter holds any numbers.
        sums.seconds_of[event.name] += lasted  # type: ignore[assignment]


def _outer_names(event: FunctionEvent) -> list[str]:
    names = []
    outer = event.cpu_parent
    while outer is not None:
        names.append(outer.name)
        outer = outer.cpu_parent
    return names


def _computes_inside(event: FunctionEvent) -> bool:
    return any(computes(inner.name) or _computes_inside(inner) for inner in event.cpu_children)


@cache
def _is_operator(name: str) -> bool:
    return "::" in name and " " not in name and not name.startswith(_NO_OPERATOR)


@cache
def computes(name: str) -> bool:
    """Whether some overload of the operator computes something itself."""
    import torch

    if not _is_operator(name):
        return False
    namespace, _, operator = name.partition("::")
    if namespace != "aten":
        # A library of its own, or the user's: what it calls is counted in its place.
        return True
    packet = getattr(torch.ops.aten, operator, None)
    if packet is None or operator in _ALLOCATES:
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    for overload in packet.overloads():
        function = getattr(packet, overload)
        # Some overloads are TorchScript's alone.
        if function.name() not in _dispatched():
            continue
        returned = [value.alias_info for value in function._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if not is_view and not function.has_kernel_for_dispatch_key(composite):
            return True
    return False


@cache
def _dispatched() -> frozenset[str]:
    """Names of all operators of the dispatcher (torch 2.8 to 2.15)."""
    import torch

    return frozenset(torch._C._dispatch_get_all_op_names())
