"""Step work: floating-point operations and bytes of one eager step, and the least time that they can take.

FLOPs are those of ``torch.utils.flop_counter`` where it has the operator, else one for each element of the result.
Bytes are those of the tensors that an operator takes and returns. The *least* bytes no compiler can save: inputs and
parameters are read once, and what the step returns is written once. Everything else may stay in registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pytest_torchcompile.gauges.machine_peaks import MachinePeaks
from pytest_torchcompile.gauges.step_profile import computes

__all__ = [
    "OperatorWork", "Roof", "StepWork", "WorkCounter", "flop_formula", "measure_work", "operator_flops", "roof_of",
]

_LOOKS_UP: Final = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Operators that read as much of their first tensor as they return."""
_RECURRENT: Final = re.compile(r"rnn|lstm|gru")
"""Recurrent layers that a library computes as a whole (``mkldnn_rnn_layer``, ``_cudnn_rnn``)."""
_ATTENTION: Final = "_scaled_dot_product"


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
    """It is one whose FLOPs torch knows: a matrix product, a convolution or attention, which libraries compute."""


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
    """``memory`` or ``compute``: which of both takes longer."""
    bandwidth: float
    """Peak, bytes a second."""
    flops_per_second: float
    """Peak of matrix products in the dtype with most of the work; in float32 where the step has none."""
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
    """The least seconds of this work: products at their peak, the least bytes at the memory's; the longer counts."""
    by_dtype: dict[str, int] = {}
    for operator in work.operators:
        if operator.library or not library_only:
            by_dtype[operator.dtype] = by_dtype.get(operator.dtype, 0) + operator.flops
    computing = sum(flops / peaks.products_per_second(dtype) for dtype, flops in by_dtype.items())
    moving = work.least_bytes / peaks.bandwidth
    most = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
    peak = peaks.products_per_second(most or "float32")
    bound = "compute" if computing > moving else "memory"
    return Roof(max(computing, moving), bound, peaks.bandwidth, peak, peaks.device)


def flop_formula(packet: Any) -> Any:
    """The formula for an operator, by its packet; None where torch has none.

    ``flop_registry`` has one for each operator that it knows (torch/utils/flop_counter.py, torch 2.8 to 2.15).
    Attention on a CPU is missing there: its formula is that of flash attention, whose first arguments are the same.
    """
    formula = flop_registry.get(packet)
    if formula is None and packet.__name__.startswith(_ATTENTION):
        direction = "_backward" if "_backward" in packet.__name__ else ""
        formula = flop_registry.get(getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{direction}"))
    return formula


def operator_flops(function: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, bool]:
    """FLOPs of a call, and whether it stays a call of its own when compiled: a library's, or a custom operator's.

    Where ``torch.utils.flop_counter`` has no formula the FLOPs are one for each element of the first result.
    """
    formula = flop_formula(function._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result)), True
    first = next(_tensors_in(result), None)
    opaque = function.namespace not in ("aten", "prims") or bool(_RECURRENT.search(function._overloadpacket.__name__))
    return (0 if first is None else first.numel()), opaque


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _bytes_of(tensor: torch.Tensor) -> int:
    """What is in memory of it: an expanded tensor has less than its shape says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator that is dispatched while it is entered, views and allocations aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: dict[tuple[str, str], OperatorWork] = {}
        self._given: dict[int, int] = {}
        """Memory that the step found there, to the most bytes of it that one operator has read."""
        self._made: dict[int, str] = {}
        """Memory that the step wrote, to the kind of what wrote it last: ``fusible`` or ``library``."""
        self._unread: dict[int, int] = {}
        """Of that what nobody has read yet."""
        self._fused_bytes, self._groups, self._in_group = 0, 0, False
        self._stored: set[int] = set()
        self._read_in_group: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if computes(f"{func.namespace}::{name}"):
            self._count(func, name, args, kwargs, result)
        return result

    def work(self) -> StepWork:
        """What was counted."""
        operators = sorted(self._operators.values(), key=lambda operator: -operator.bytes)
        least = sum(self._given.values()) + sum(self._unread.values())
        # What nobody read is what the step returns: it has to be stored, by whichever kernel made it.
        returned = sum(size for place, size in self._unread.items() if self._made.get(place) == "fusible")
        return StepWork(operators, least, max(least, self._fused_bytes + returned), self._groups)

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        flops, library = operator_flops(func, args, kwargs, result)
        taken, returned = list(_tensors_in((args, kwargs))), list(_tensors_in(result))
        read = self._read_by(name, taken, returned)
        written = {_place_of(tensor): _bytes_of(tensor) for tensor in returned}
        dtype = str(returned[0].dtype if returned else torch.float32).removeprefix("torch.")
        counted = self._operators.setdefault((name, dtype), OperatorWork(name, dtype, library=library))
        counted.calls += 1
        counted.flops += flops
        counted.bytes += sum(read.values()) + sum(written.values())
        self._add_traffic(read, written, library)

    def _read_by(self, name: str, taken: Iterable[torch.Tensor], returned: list[torch.Tensor]) -> dict[int, int]:
        read: dict[int, int] = {}
        for number, tensor in enumerate(taken):
            size = _bytes_of(tensor)
            if number == 0 and name in _LOOKS_UP and returned:
                size = min(size, _bytes_of(returned[0]))
            place = _place_of(tensor)
            read[place] = max(size, read.get(place, 0))
        return read

    def _add_traffic(self, read: dict[int, int], written: dict[int, int], library: bool) -> None:
        """What fusion cannot save of this call, and what of it was given or is not read yet."""
        if not library and not self._in_group:
            self._groups += 1
            self._read_in_group.clear()
        self._in_group = not library
        for place, size in read.items():
            self._unread.pop(place, None)
            maker = self._made.get(place)
            if maker is None:
                self._given[place] = max(size, self._given.get(place, 0))
            # A fused kernel reads what it is given once, however many of its operators take it.
            if library or (maker != "fusible" and place not in self._read_in_group):
                self._fused_bytes += size
                self._read_in_group.add(place)
            # A library reads from memory, so what was fused until here is stored first.
            if library and maker == "fusible" and place not in self._stored:
                self._stored.add(place)
                self._fused_bytes += size
        for place, size in written.items():
            self._made[place] = "library" if library else "fusible"
            self._unread[place] = size
            self._stored.discard(place)
            if library:
                self._fused_bytes += size
