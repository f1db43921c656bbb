"""Reference: the expected values of a run with the size of their noise; where references are kept between cells; and
eager itself as the reference, run several times, where it does not repeat itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from pytest_torchcompile.oracle.estimate import Estimate, as_real, finite_values, small_ones_to_cpu, small_to_cpu
from pytest_torchcompile.oracle.operator_rounding import FLOAT32_UNIT, unit_of
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.state.tensor_forms import computable

__all__ = ["BY_OPERATOR", "FAR", "LEAST", "RUNS", "WIDER", "WIDE_DTYPES", "Reference", "References", "Repeated",
           "distance_from_runs", "eager_is_near", "kinds_to_try", "room_beside"]

WIDER: Final = frozenset({"float64", "float32"})
"""Kinds of references that are wider than eager: its own error from them is a measure of rounding."""
RUNS: Final = 4
"""Further eager runs that are made where one differs from the first."""
FAR: Final = 16.0
"""So many times what eager's runs differ by is no chance: of six runs of any even spread, once in a million."""
LEAST: Final = 1 << 28
"""Bytes that :class:`References` keep at least."""
_MOST: Final = 6 << 30
WIDE_DTYPES: Final = {"float64": torch.float64, "float32": torch.float32, "float64-inputs": torch.float64,
                      "same-precision": torch.float64}
"""The dtype that a program runs in, by the kind of run."""
BY_OPERATOR: Final = ("float64", "float32", "same-precision")
"""The kinds of run in which operators get their noise one by one."""
# Of a device's memory. A trial makes its calls three times over: where the references of one pass do not fit, they are
# made again in the third. A T5 of 46 million parameters takes 1.5 GB for each of its calls.
_SHARE_OF_GPU: Final = 1 / 24
# Many workers share the memory of a machine.
_SHARE: Final = 1 / 50
_ENDLESS = float("inf")


def kinds_to_try(unit: float) -> list[str]:
    """In their order; see :class:`Reference`."""
    if unit <= unit_of(torch.float64):
        return ["same-precision", "float64-inputs"]
    if unit <= FLOAT32_UNIT:
        return ["float64", "float64-inputs"]
    return ["float64", "float32", "float64-inputs"]


def _moved_as_expected(value: Any, before: Estimate | None, after: Estimate | None) -> Any:
    """What a value would be if another one had been expected: what rounding has made of it stays.

    ``before``: what was expected of it. A value without an estimate of its shape stays as it is.
    """
    if before is None or after is None:
        return value
    was, now = before.value, after.value
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return value
    if isinstance(value, float):
        return value + float(finite_values(now) - finite_values(was))
    if not isinstance(value, torch.Tensor):
        return value
    moved = as_real(value.detach())
    if not was.shape == now.shape == moved.shape:
        return value
    if not before.continuous:
        return torch.where((was == now).to(moved.device), moved, now.to(moved))
    way = finite_values(now.double()) - finite_values(was.double())
    # A mask may put an infinity there, or take one away.
    is_masked = (was.isfinite() != now.isfinite()).to(moved.device)
    moved = torch.where(is_masked, now.to(moved.device), moved.double() + way.to(moved.device)).to(moved.dtype)
    return torch.view_as_complex(moved) if value.is_complex() else moved


class Reference:
    """Expected values with their noise, by the names of a :class:`Recording`.

    ``kind`` says how they were made:

    ==================  ====================================================================================
    ``float64``         a float64 run of the program; noise by Monte-Carlo arithmetic at every operator
    ``same-precision``  the model is float64 already: a run of it, noise of one unit in the last place
    ``float32``         half precision where float64 can't be had: the same in float32
    ``float64-inputs``  float64 without a look at the operators; noise by perturbed parameters and inputs
    ``eager-draws``     spread over ranks, or nothing wider runs: eager itself; perturbed parameters and inputs
    ``eager-only``      nothing wider can be had: eager itself, and a scale made from its dtype
    ==================  ====================================================================================
    """

    def __init__(self, recording: Recording) -> None:
        """Take a recording itself for what is expected, without any noise draw: the kind ``eager-only``."""
        self.kind = "eager-only"
        # Why it is not ``float64``.
        self.why = ""
        # Of a scale made from the dtype: the unit roundoff of a narrower dtype in which parts are known to run.
        self.unit = 0.0
        # How many noise draws the estimate with the most of them holds.
        self.draws = 0
        self.estimates: dict[str, Estimate] = {}
        self._recording = recording
        self._expect_values(recording)

    def _expect_values(self, recording: Recording, ranges: dict[str, float] | None = None) -> None:
        """Take what is recorded for what is expected; ``ranges``: where the range of a leaf's dtype ends."""
        ends = ranges or {}
        self.estimates = {}
        for name, value in small_ones_to_cpu(recording.values_by_name()).items():
            self.estimates[name] = Estimate(value, ends.get(name, _ENDLESS))

    def more(self, names: Collection[str] | None = None) -> bool:
        """Draw more noise for some leaves, or for all; whether there was more to draw."""
        return False

    def end_draws(self) -> None:
        """No more are wanted for now."""

    def twin(self) -> Recording:
        """A second eager run from the same state and seed: what differs is not deterministic."""
        return self._recording

    def twins(self) -> list[Recording]:
        """Several of them; of a recording that nobody can repeat just itself."""
        return [self.twin()]

    def repeats(self, name: str) -> bool:
        """Whether a second float64 run gives this leaf again, up to rounding: then only rounding wavers."""
        return False

    def is_repeated_by_graph(self, name: str) -> bool:
        """Whether a CUDA graph, recorded in a second float64 run, gives this leaf again; False where there is none.

        It is what that one run did. A program that does something else now and then is seen by :meth:`repeats` alone.
        """
        return False

    def other_orders(self, name: str) -> Estimate | None:
        """What eager makes of this leaf where it adds up in other orders; None where no sum has terms that
        repeat."""
        return None

    def deciding_as(self, values: Mapping[str, Any], accused: Collection[str]) -> Reference | None:
        """A reference that decides as compiled code perhaps does, where only rounding decides.

        None where it decides as this one. ``values``: its values by name; ``accused``: which of them are wrong beside
        this one. See :mod:`~pytest_torchcompile.oracle.own_decisions`.
        """
        return None

    def moved(self, name: str, value: Any, before: Reference) -> Any:
        """What a value of eager's would be, had it decided as this reference does, and not as ``before``."""
        return _moved_as_expected(value, before.estimates.get(name), self.estimates.get(name))

    def held_tensors(self) -> list[torch.Tensor]:
        """What takes memory: the estimates. They do not grow with the number of draws."""
        tensors: list[torch.Tensor] = []
        for estimate in self.estimates.values():
            tensors += estimate.held_tensors()
        return tensors

    @property
    def nbytes(self) -> int:
        """Memory of the tensors it holds."""
        return _bytes_of([self])


def room_beside(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that references may take of the memory of the device that some tensors are on."""
    for tensor in tensors:
        if tensor.is_cuda:
            return int(_SHARE_OF_GPU * torch.cuda.get_device_properties(tensor.device).total_memory)
    # Here: on a GPU nobody asks, and `compare` is to load little.
    from pytest_torchcompile.system import memory_bytes

    return int(_SHARE * memory_bytes())


class References:
    """References that are likely to be asked for again, as many as fit in ``limit`` bytes.

    They are kept between cells: the float64 run of a model is the same for every mode and backend.
    """

    def __init__(self, limit: int = LEAST) -> None:
        self.limit = limit
        # By program and call, the one that was asked for last at the end.
        self._kept: OrderedDict[tuple[Hashable, Hashable], Reference] = OrderedDict()
        self._passing: set[tuple[Hashable, Hashable]] = set()

    def make_room(self, room: int) -> None:
        """Take so many bytes, if that is more than the limit; 6 GiB at most."""
        self.limit = max(self.limit, min(_MOST, room))

    def get(self, program: Hashable, call: Hashable, make: Callable[[], Reference], passing: bool = False) -> Reference:
        """Return the reference for a call of a program, made by ``make`` if it isn't kept.

        ``passing``: whether a trial asks for it once, so that it is kept only where there is room.
        """
        key = (program, call)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make()
        if passing:
            self._passing.add(key)
        reference = self._kept[key]
        # Counted anew each time: a reference grows when a suspicion buys it more draws.
        for dropped in self._least_wanted(key):
            if _bytes_of(self._kept.values()) <= self.limit:
                break
            del self._kept[dropped]
            self._passing.discard(dropped)
        return reference

    def _least_wanted(self, current: tuple[Hashable, Hashable]) -> list[tuple[Hashable, Hashable]]:
        """All keys, the least wanted first.

        A trial asks for its calls in turn, time after time: what it has asked for last it needs last again.
        """
        of_others = [key for key in self._kept if key[0] != current[0]]
        passing = [key for key in self._kept if key[0] == current[0] and key in self._passing]
        others = [key for key in reversed(self._kept) if key not in {current, *of_others, *passing}]
        ordered = [*of_others, *passing, *others]
        if current not in ordered:
            ordered.append(current)
        return ordered


def _bytes_of(references: Iterable[Reference]) -> int:
    """Those of one model have its parameters in common."""
    sizes: dict[int, int] = {}
    for reference in references:
        for tensor in reference.held_tensors():
            sizes[id(tensor)] = tensor.numel() * tensor.itemsize
    return sum(sizes.values())


class Repeated(Reference):
    """A reference that is eager itself, run again when somebody asks whether it repeats itself."""

    def __init__(self, recording: Recording, again: Callable[[], Recording]) -> None:
        super().__init__(recording)
        self._again, self._runs = again, list[Recording]()

    def twin(self) -> Recording:
        """The second eager run."""
        return self.twins()[0]

    def twins(self) -> list[Recording]:
        """All further runs."""
        if not self._runs:
            self._runs = [self._again() for _ in range(1 + RUNS)]
        return self._runs

    def distance(self, name: str, other: Recording) -> float:
        """:func:`distance_from_runs` of a value of another recording."""
        runs = [recording.values_by_name().get(name) for recording in (self._recording, *self.twins())]
        return distance_from_runs(other.values_by_name().get(name), runs)


def distance_from_runs(value: Any, runs: Sequence[Any]) -> float:
    """How far a value is from the nearest of some eager runs, over the largest distance of those from the first.

    Infinite where they are all equal and the value is another one, or where it alone is not finite. Zero for what has
    no distance: objects, whole numbers, tensors of several shapes.
    """
    tensors = []
    for each in (value, *runs):
        tensor = _real_tensor(each)
        if tensor is None:
            return 0.0
        tensors.append(tensor)
    compared, *eager = tensors
    if len({tensor.shape for tensor in tensors}) != 1 or not compared.numel():
        return 0.0
    settled = torch.stack([run.isfinite() for run in eager]).all(0)
    if bool((settled & ~compared.isfinite()).any()):
        return float("inf")
    nearest = min(_largest_distance(compared, run, settled) for run in eager)
    width = max(_largest_distance(eager[0], run, settled) for run in eager)
    if width == 0.0:
        return float("inf") if nearest else 0.0
    return nearest / width


def _real_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, (float, complex)):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return None
    return as_real(value.detach()).double()


def _largest_distance(one: torch.Tensor, other: torch.Tensor, where: torch.Tensor) -> float:
    return float((finite_values(one) - finite_values(other)).abs().where(where, 0.0).amax())


def eager_is_near(eager: Any, estimate: Estimate) -> bool:
    """Whether eager is so near to what is expected that its own error is rounding, and can be a measure of it."""
    if isinstance(eager, float):
        eager = torch.tensor(eager, dtype=torch.float64)
    elif isinstance(eager, complex):
        eager = torch.tensor(eager, dtype=torch.complex128)
    if not isinstance(eager, torch.Tensor) or not estimate.continuous:
        return True
    return estimate.is_near(computable(as_real(small_to_cpu(eager.detach()))))
