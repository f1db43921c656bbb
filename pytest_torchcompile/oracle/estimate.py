"""Estimate: the expected value of one leaf and the size of its rounding noise, gathered draw by draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from pytest_torchcompile.oracle.measurement import read_numbers
from pytest_torchcompile.oracle.noise_levels import SAMPLE, Levels, Noise, Projections, levels_of, sample_elements
from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = [
    "CANCELLED",
    "HUGE",
    "ROUNDINGS",
    "Estimate",
    "as_real",
    "finite_values",
    "length_class",
    "piece_size",
    "small_ones_to_cpu",
    "small_to_cpu",
    "split_groups",
    "split_pieces",
    "stack_rows",
    "zeros_to_fill",
]

OneLeaf = TypeVar("OneLeaf")
Key = TypeVar("Key")

# Elements looked at in one go: what bounds the memory of a comparison; on a CPU what its cache holds.
_PIECES = {"cpu": 1 << 17}
_PIECE = 1 << 22
_MOST_ROWS = 64
# Pieces that leaves may fill which are measured side by side: what each is made from is held until all are done.
_SIDE_BY_SIDE = 2
# And groups: their tables are held too.
_MOST_GROUPS = 16
# Elements up to which a tensor of a GPU is looked at on the CPU: one that is looked at by itself is so more quickly.
_SMALL = 1 << 11
# Leaves with fewer elements have their spread kept in float64.
_FINE = 1 << 20
ROUNDINGS: Final = 2.0**8
"""Roundings of the largest values up to which an error may be rounding alone."""
# Share of a leaf's usual size up to which no noise of it is large.
_STEADY = 2.0**-8
# And for a leaf of one draw: random numbers that nobody replays may come out alike once.
_STEADY_ONCE = 2.0**-12
CANCELLED: Final = 2.0**-16
"""Share of its noise up to which a leaf is zero but for rounding."""
HUGE: Final = 1e38
"""A leaf with values from here on has its errors held in float64: bfloat16's largest number is 3.4e38."""
# Share of a dtype's range beyond which rounding decides about overflow.
_NEAR = 0.9


class Estimate:
    """The reference value of a leaf and what the noise draws did to it.

    No draw is stored: ``spread`` and ``reach`` hold one number per element, the rest are scalars per draw. So memory
    does not grow with the number of draws.
    """

    def __init__(self, value: Any, largest: float = float("inf")) -> None:
        """Start with the value itself; ``largest`` is the end of the range of eager's dtype."""
        self.value = _as_number(value)
        # Draws that were made for this leaf, also those that raised or gave something else.
        self.offered = 0
        # Draws that had the leaf's type and shape.
        self.draws = 0
        # Root of the sum of squared deviations per element (flat).
        self.spread: torch.Tensor | None = None
        # The largest deviation of each element (flat): what a decision that noise flips amounts to.
        self.reach: torch.Tensor | None = None
        # Discrete leaves: which elements some draw flipped.
        self.flips: torch.Tensor | None = None
        # Discrete leaves: how many elements each draw of plain noise flipped.
        self.flipped: list[int] = []
        # Which elements (flat) are beyond the range of eager's dtype in some draw, or near its end.
        self.brink: torch.Tensor | None = None
        self._near = _NEAR * largest
        # The noise of the first draw by magnitude, which makes the weights of ``noise``.
        self.levels: Levels | None = None
        self.noise = Noise()
        # Draws of another type or shape: rounding decides about the shape itself.
        self.odd = 0
        if self.continuous:
            self._confine_to_range()

    @property
    def continuous(self) -> bool:
        """Whether this leaf is a tensor of floating numbers."""
        return isinstance(self.value, torch.Tensor) and self.value.is_floating_point()

    def held_tensors(self) -> list[torch.Tensor]:
        """What takes memory."""
        held = (self.value, self.spread, self.reach, self.flips, self.brink)
        return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]

    def add(self, value: Any, share: float = 1.0) -> None:
        """Take one more draw in; ``share``: what it counts for, less than 1 if it has more noise than the program."""
        if not isinstance(self.value, torch.Tensor):
            if isinstance(value, (bool, int, str, type(None))):
                self.odd += self.value != value
            return
        value = _as_number(value)
        same_shape = isinstance(value, torch.Tensor) and value.shape == self.value.shape
        if not same_shape or value.dtype != self.value.dtype:
            self.odd += 1
            return
        self.draws += 1
        if self.continuous:
            if value.numel():
                self._add_deviations(value, share)
            return
        flips = value != self.value
        if self.flips is not None:
            self.flips = self.flips | flips
        else:
            self.flips = flips
        if share == 1:
            self.flipped.append(int(flips.sum()))

    def takes_rows_of(self, drawn: torch.Tensor) -> bool:
        """Whether draws of this leaf, as ``drawn``, need no look at each: at its shape, or the end of its range."""
        if not self.continuous or not drawn.numel() or self._near < math.inf:
            return False
        same_shape = drawn.shape == self.value.shape and drawn.dtype == self.value.dtype
        return same_shape and (self.reach is None or self.reach.dtype == torch.bfloat16)

    @property
    def spread_dtype(self) -> torch.dtype:
        """That of ``spread``: float64 of a leaf that is not large."""
        fine = self.value.dtype == torch.float64 and self.value.numel() < _FINE
        return torch.float64 if fine else torch.float32

    def begin_deviations(self, spread: torch.Tensor, reach: torch.Tensor, levels: Levels) -> None:
        """Take in what the first draw did to each element, and its noise by magnitude."""
        self.spread, self.reach, self.levels = spread, reach, levels

    def add_deviation(self, distance: torch.Tensor, reach: torch.Tensor) -> None:
        """Take in what one more draw did: how far it moves each element (flat, finite), in two dtypes."""
        if self.spread is None or self.reach is None:
            raise ValueError("the first draw begins the deviations")
        torch.maximum(self.reach, reach, out=self.reach)
        torch.hypot(self.spread, distance.to(self.spread.dtype), out=self.spread)

    def is_near(self, eager: torch.Tensor) -> bool:
        """Whether eager is so near that its own error is nothing but rounding: within 256 roundings as a whole.

        Of half precision, whose rounding is coarse, a sixteenth of the values at most.
        """
        if not self.continuous or self.value.shape != eager.shape:
            return False
        apart = size = 0.0
        for mine, exact in split_pieces(eager, self.value):
            error = finite_values(mine.double() - exact)
            exact = finite_values(exact)
            squares = read_numbers(error.dot(error), exact.dot(exact))
            apart, size = apart + squares[0], size + squares[1]
        return self.is_so_near(apart, size, eager.dtype)

    def is_so_near(self, apart: float, size: float, dtype: torch.dtype) -> bool:
        """:meth:`is_near`, of the sums of squares of eager's errors and of the expected values."""
        share = min(ROUNDINGS * torch.finfo(dtype).eps / 2, 1 / 16)
        return apart <= share**2 * size

    @property
    def is_steady(self) -> bool:
        """Whether no draw moves any element by more than a 256th of the leaf's usual size: no chance is in it but
        rounding. Of a single draw a 4,096th is asked for."""
        return self.reach is not None and self._is_steady_at(self._usual_size(), float(self.reach.amax()))

    @property
    def is_cancelled(self) -> bool:
        """Whether the leaf is zero but for rounding: without noise it is a 65,536th of what a draw makes of it.

        Random numbers that nobody replays are as large in one run as in another.
        """
        return self.reach is not None and self._usual_size() <= CANCELLED * float(self.reach.amax())

    def is_calm_at(self, size: float, farthest: float) -> bool:
        """Whether :attr:`is_steady` or :attr:`is_cancelled`, by the usual size and the largest deviation."""
        return self._is_steady_at(size, farthest) or size <= CANCELLED * farthest

    def _is_steady_at(self, size: float, farthest: float) -> bool:
        share = _STEADY_ONCE if self.draws == 1 else _STEADY
        return size > 0 and farthest <= share * size

    def _usual_size(self) -> float:
        """Root mean square of what is expected; NaN where that is not finite, and infinite for what has no sizes."""
        if not self.continuous or not self.value.numel():
            return math.inf
        squares = 0.0
        for (exact,) in split_pieces(self.value):
            squares += float(exact.dot(exact))
        return math.sqrt(squares / self.value.numel())

    def is_repeated_by(self, value: Any, unit: float) -> bool:
        """Whether another run without noise came to the same value, within one rounding or its own share of the noise.

        A nondeterministic model also makes its noise estimate vary, so its float64 run is allowed float64's own
        rounding: a share of the noise, and not all of it.
        """
        value = _as_number(value)
        if not isinstance(self.value, torch.Tensor) or not isinstance(value, torch.Tensor):
            return bool(self.value == value)
        if value.shape != self.value.shape or not self.continuous:
            return value.shape == self.value.shape and torch.equal(value, self.value)
        spread = self.spread
        if spread is None:
            spread = torch.zeros((), device=value.device).expand(value.numel())
        share = min(1.0, 2.0**10 * torch.finfo(self.value.dtype).eps / unit)
        for again, exact, deviation in split_pieces(value, self.value, spread):
            allowed = share * deviation.double() + unit * finite_values(exact).abs()
            if bool((finite_values(again - exact).abs() > allowed).any()):
                return False
        return True

    def _confine_to_range(self) -> None:
        """Values beyond the range of eager's dtype become infinite: nothing is measured from them."""
        if self._near < float("inf"):
            beyond = self.value.isfinite() & (self.value.abs() > self._near)
            if bool(beyond.any()):
                self.value = self.value.masked_fill(beyond, float("inf"))
                self.brink = beyond.flatten()

    def _add_deviations(self, value: torch.Tensor, share: float) -> None:
        if self.spread is None or self.reach is None or self.levels is None:
            self.spread = torch.zeros(self.value.numel(), dtype=self.spread_dtype, device=self.value.device)
            # Two bytes an element, where no error can be beyond their range.
            held, sizes = torch.bfloat16, self.value.abs()
            if bool(((sizes > HUGE) & (sizes < math.inf)).any()):
                held = torch.float64
            self.reach = torch.zeros_like(self.spread, dtype=held)
            exact = sample_elements(self.value)
            self.levels = levels_of(finite_values(exact), finite_values(sample_elements(value) - exact) * share)
        projections = Projections(self.levels)
        start = 0
        for spread, reach, exact, drawn in split_pieces(self.spread, self.reach, self.value, value):
            error = (drawn - exact).mul_(share)
            if not math.isfinite(float(error.dot(error))) or self._near < float("inf"):
                # Not (a > b): NaN is not smaller. More noise than the program has says nothing of its range.
                if share == 1:
                    self._mark_brink(start, exact.isfinite() & ~(drawn.abs() <= self._near))
                missing = exact.isfinite() & ~drawn.isfinite()
                error, exact = finite_values(error), finite_values(exact)
                # No deviation is no small deviation: the usual one stands in for it.
                error = torch.where(missing, self.levels.of(exact).to(error.dtype), error)
            torch.maximum(reach, error.abs().to(reach.dtype), out=reach)
            torch.hypot(spread, error.to(spread.dtype), out=spread)
            projections.add(error, exact)
            start += drawn.numel()
        self.noise.add(projections)

    def _mark_brink(self, start: int, beyond: torch.Tensor) -> None:
        if bool(beyond.any()):
            if self.brink is None:
                self.brink = torch.zeros(self.value.numel(), dtype=torch.bool, device=self.value.device)
            self.brink[start : start + beyond.numel()] |= beyond


def _as_number(value: Any) -> Any:
    """A Python float or complex number as a tensor, complex tensors as real ones, small ones at hand."""
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, complex):
        value = torch.tensor(value, dtype=torch.complex128)
    if isinstance(value, torch.Tensor):
        value = as_real(small_to_cpu(value))
    return value


def small_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor of a GPU on the CPU, any other as it is.

    A comparison is a few dozen operators and as many questions; each is a launch and a wait there, some 30 microseconds
    for what a CPU does in two.
    """
    if _belongs_on_cpu(tensor):
        return tensor.cpu()
    return tensor


def _belongs_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.numel() <= _SMALL


def small_ones_to_cpu(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """:func:`small_to_cpu` of each value: a GPU is waited for once for each dtype, and not for each tensor."""
    moved = dict(values)
    groups: dict[tuple[torch.dtype, torch.device], list[Key]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and is_plain(value) and _belongs_on_cpu(value):
            groups.setdefault((value.dtype, value.device), []).append(name)
    for names in groups.values():
        flat = torch.cat([values[name].reshape(-1) for name in names]).cpu()
        parts = torch.split(flat, [values[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            moved[name] = part.view(values[name].shape)
    return moved


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers (one more axis), any other as it is."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


def finite_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros for NaN and infinities."""
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def piece_size(device: torch.device) -> int:
    """How many elements are looked at in one go."""
    return _PIECES.get(device.type, _PIECE)


def length_class(length: int) -> int:
    """Leaves of one class become rows of one matrix: of one length, or up to 65,536 below the same power of two."""
    if length > SAMPLE:
        return length
    return 1 << (length - 1).bit_length()


def stack_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors as the rows of a matrix, shorter ones filled up with zeros; a single one is not copied."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    if len(flat) == 1:
        return flat[0][None]
    if not zeros_to_fill(tensors):
        return torch.stack(flat)
    return torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)


def zeros_to_fill(tensors: Sequence[torch.Tensor]) -> list[int]:
    """With how many zeros each is filled up to the longest; empty where all are of one length."""
    longest = max(tensor.numel() for tensor in tensors)
    zeros = [longest - tensor.numel() for tensor in tensors]
    return zeros if any(zeros) else []


def split_groups(
    groups: Iterable[Sequence[OneLeaf]], value_of: Callable[[OneLeaf], torch.Tensor]
) -> Iterator[list[Sequence[OneLeaf]]]:
    """Groups of leaves, each of one class of lengths, in lists of what is measured side by side.

    Memory stays bounded: a group has 64 leaves at most, as of each a table of its noise by magnitude is made. A list
    has 16 groups at most, which together fill two pieces, or it is one leaf.
    """
    listed: list[Sequence[OneLeaf]] = []
    room = float(_SIDE_BY_SIDE)
    for group in groups:
        values = [value_of(leaf) for leaf in group]
        # Of a piece.
        share = max(value.numel() for value in values) / piece_size(values[0].device)
        most = min(_MOST_ROWS, max(1, int(1 / share)))
        for start in range(0, len(group), most):
            leaves = group[start : start + most]
            if len(listed) == _MOST_GROUPS or (listed and room < share * len(leaves)):
                yield listed
                listed, room = [], float(_SIDE_BY_SIDE)
            listed.append(leaves)
            room -= share * len(leaves)
    if listed:
        yield listed


def split_pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same stretch of every tensor, flattened, so many elements at a time that memory stays bounded."""
    size = piece_size(tensors[0].device)
    yield from zip(*(torch.split(t.reshape(-1), size) for t in tensors), strict=True)
