"""Step work: floating-point operations and bytes of one eager step, and the least time that they can take.

FLOPs are those of :mod:`.flop_formulas` where it has the operator, else one for each element of the result.
Bytes are those of the tensors that an operator takes and returns. The *least* bytes no compiler can save: inputs and
parameters are read once, and what the step returns is written once. Everything else may stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.gauges.flop_formulas import flop_formula, flops_unknown
from pytest_torchcompile.gauges.library_operators import calls_library, is_convolution, is_function
from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.memory_regions import Regions, Traffic, tensors_in, traffic_of
from pytest_torchcompile.gauges.step_profile import computes

__all__ = [
    "OperatorWork", "Roof", "StepWork", "WorkCounter", "function_seconds", "measure_work", "operator_flops", "roof_of",
]


@dataclass
class OperatorWork:
    """All calls of one operator with results of one dtype."""

    name: str
    """``addmm``"""
    dtype: str
    calls: int = 0
    flops: int = 0
    bytes: int = 0
    library: bool = False
    """It stays a call of its own (:func:`~pytest_torchcompile.gauges.library_operators.calls_library`)."""


@dataclass
class StepWork:
    """One step as eager runs it."""

    operators: list[OperatorWork] = field(default_factory=list)
    """Those with most bytes first."""
    least_bytes: int = 0
    """What has to be read and written, whatever is fused."""
    fused_bytes: int = 0
    """What is read and written where each run of fusible operators keeps its intermediates in registers."""
    groups: int = 0
    """Such runs: kernels that remain of the fusible operators."""

    uncounted: tuple[str, ...] = ()
    """Operators whose FLOPs nobody knows, by name: the step computes more than is told."""

    @property
    def flops(self) -> int:
        """Of all operators."""
        return sum(operator.flops for operator in self.operators)

    @property
    def bytes(self) -> int:
        """What eager reads and writes."""
        return sum(operator.bytes for operator in self.operators)

    @property
    def calls(self) -> int:
        """Operators that compute something."""
        return sum(operator.calls for operator in self.operators)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "flops": self.flops, "bytes": self.bytes, "calls": self.calls}


@dataclass(frozen=True)
class Roof:
    """The least time of a step, by the machine's peaks."""

    seconds: float
    bound: str
    """``memory`` or ``compute``, whichever takes longer; ``functions``: computing, which is mostly exp, tanh, ..."""
    bandwidth: float
    """Peak, bytes a second."""
    flops_per_second: float
    """Peak of products in the dtype with most of the work (:meth:`MachinePeaks.multiplied_in`); in float32 where the
    step has none."""
    device: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_work(step: Callable[[], object]) -> StepWork:
    """Run ``step`` once, eagerly, and count. What runs compiled in it is not seen."""
    counted = WorkCounter()
    with counted:
        step()
    return counted.work()


def roof_of(work: StepWork, peaks: MachinePeaks, library_only: bool = True) -> Roof:
    """The least seconds of this work: products and functions at their peak, the least bytes at the memory's; the longer
    counts. Of all other operators nothing is counted but what they move.
    """
    by_dtype: dict[str, int] = {}
    for operator in work.operators:
        if operator.library or not library_only:
            dtype = peaks.multiplied_in(operator.dtype, is_convolution(operator.name))
            by_dtype[dtype] = by_dtype.get(dtype, 0) + operator.flops
    products = sum(flops / peaks.products_per_second(dtype) for dtype, flops in by_dtype.items())
    functions = function_seconds(work, peaks)
    computing = products + functions
    moving = work.least_bytes / peaks.bandwidth
    most = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
    peak = peaks.products_per_second(most or "float32")
    bound = "memory"
    if computing > moving:
        bound = "functions" if functions > products else "compute"
    return Roof(max(computing, moving), bound, peaks.bandwidth, peak, peaks.device)


def function_seconds(work: StepWork, peaks: MachinePeaks) -> float:
    """What exp, tanh and the like take at the least, each counted as exp; 0 where no peak of it is known."""
    if not peaks.functions:
        return 0.0
    elements = sum(each.flops for each in work.operators if not each.library and is_function(each.name))
    return elements / peaks.functions


def operator_flops(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[int | None, bool]:
    """FLOPs of a call, and whether it stays a call of its own when compiled: a library's, or a custom operator's.

    None where :mod:`.flop_formulas` has no formula.
    """
    packet = function._overloadpacket
    library = calls_library(f"{function.namespace}::{packet.__name__}")
    formula = flop_formula(packet)
    return (None if formula is None else int(formula(*args, **kwargs, out_val=result))), library


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator that is dispatched while it is entered, views and allocations aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uncounted: set[str] = set()
        self._operators: dict[tuple[str, str], OperatorWork] = {}
        self._given: dict[int, Regions] = {}
        """Memory that the step found there, to what of it was read."""
        self._put: dict[int, Regions] = {}
        """Memory that the step found there, and writes parts of: to those parts."""
        self._made: dict[int, str] = {}
        """Memory that the step wrote, to the kind of what wrote it last: ``fusible`` or ``library``."""
        self._unread: dict[int, int] = {}
        """Of that what nobody has read yet."""
        self._fused_bytes, self._groups, self._in_group = 0, 0, False
        self._stored: set[int] = set()
        self._read_in_group: dict[int, Regions] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if computes(f"{func.namespace}::{name}"):
            self._count(func, name, args, kwargs, result)
        else:
            self._note_allocated(args, kwargs, result)
        return result

    def work(self) -> StepWork:
        """What was counted."""
        operators = sorted(self._operators.values(), key=lambda operator: -operator.bytes)
        read = sum(regions.bytes for regions in self._given.values())
        put = sum(regions.bytes for regions in self._put.values())
        least = read + put + sum(self._unread.values())
        # What nobody read is what the step returns: it has to be stored, by whichever kernel made it.
        returned = sum(size for place, size in self._unread.items() if self._made.get(place) == "fusible")
        return StepWork(operators, least, max(least, self._fused_bytes + returned), self._groups,
                        tuple(sorted(self._uncounted)))

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        flops, library = operator_flops(func, args, kwargs, result)
        if flops_unknown(f"{func.namespace}::{name}", flops is not None):
            self._uncounted.add(name)
        traffic = traffic_of(name, args, kwargs, result)
        returned = next(tensors_in(result), None)
        dtype = str(torch.float32 if returned is None else returned.dtype).removeprefix("torch.")
        counted = self._operators.setdefault((name, dtype), OperatorWork(name, dtype, library=library))
        counted.calls += 1
        counted.flops += traffic.elements if flops is None else flops
        for regions in (*traffic.read.values(), *traffic.written.values()):
            counted.bytes += regions.bytes
        self._add_traffic(traffic, library)

    def _note_allocated(self, args: Any, kwargs: Any, result: Any) -> None:
        """Memory that is new: the step did not find it there, so reading it back is no must."""
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            place = tensor.untyped_storage().data_ptr()
            if place not in known:
                self._made[place] = "fusible"
                self._stored.discard(place)

    def _add_traffic(self, traffic: Traffic, library: bool) -> None:
        """What fusion cannot save of this call, and what of it was given or is not read yet."""
        if not library and not self._in_group:
            self._groups += 1
            self._read_in_group.clear()
        self._in_group = not library
        for place, regions in traffic.read.items():
            self._add_read(place, regions, library)
        for place, regions in traffic.written.items():
            if place in traffic.partly and place not in self._made:
                # The rest of it is still as the step found it, and this part is in memory after the step.
                self._put.setdefault(place, Regions()).add(regions)
                self._fused_bytes += regions.bytes
                continue
            self._made[place] = "library" if library else "fusible"
            self._unread[place] = regions.bytes
            self._stored.discard(place)
            if library:
                self._fused_bytes += regions.bytes

    def _add_read(self, place: int, regions: Regions, library: bool) -> None:
        self._unread.pop(place, None)
        maker = self._made.get(place)
        if maker is None:
            self._given.setdefault(place, Regions()).add(regions)
        if library:
            self._fused_bytes += regions.bytes
        elif maker != "fusible":
            # A fused kernel reads what it is given once, however many of its operators take it.
            known = self._read_in_group.setdefault(place, Regions())
            before = known.bytes
            known.add(regions)
            self._fused_bytes += known.bytes - before
        # A library reads from memory, so what was fused until here is stored first.
        if library and maker == "fusible" and place not in self._stored:
            self._stored.add(place)
            self._fused_bytes += regions.bytes
