"""Inductor's numbers: an eager run that is given the random numbers which compiled code draws by itself.

Inductor makes them from a seed for each random operator and the place of each element, by the generator Philox with
ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Eager draws the same seeds, from the
same generator in the same state. On a CPU the numbers are made by arithmetic on whole numbers, on a GPU by Triton's
generator in a kernel of ours. No code of Inductor's is run.
Its decompositions say what becomes of them: dropout keeps what is above its share (torch 2.8 to 2.15).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.gauges.random_seeds import LEAST_SEED, MOST_SEED
from pytest_torchcompile.state.random_operators import call_draws
from pytest_torchcompile.state.tensor_forms import is_plain

__all__ = ["KNOWN", "WAYS", "GivenNumbers", "SeedGroup", "Way", "given_numbers", "philox", "uniform_numbers"]

_aten = torch.ops.aten
_ATTENTIONS: Final = (
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
# A tape makes the mask of an attention with the last: it is given a seed and asks no generator.
_UNCHANGED: Final = frozenset({
    *_ATTENTIONS, "aten::multinomial", "aten::randperm", "aten::_fill_mem_eff_dropout_mask_",
})
"""Inductor leaves these to torch's own kernels, which ask the generator as they do eagerly."""
KNOWN: Final = _UNCHANGED | {"aten::native_dropout", "aten::bernoulli_", "aten::rand", "aten::rand_like"}
"""Random operators, by the names that a tape has, whose compiled numbers can be given to eager."""
# Functions that draw by ``bernoulli_``, and are compiled to that. All others that call it are dropout of some kind.
_BERNOULLIS: Final = frozenset({
    "bernoulli", "bernoulli_", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_",
    "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
})
_LOW: Final = (1 << 32) - 1
# The multipliers and the steps of the keys of Philox4x32.
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
# What 31 bits are multiplied by, so that the largest is below 1 in float32 (Triton's ``uint_to_uniform_float``).
_SCALE: Final = 4.6566127342e-10
# How many numbers of an operator are changed, and to what if not to 0.
_CHANGED: Final = 8
_ALMOST_ONE: Final = 1 - 2.0**-20
_KEPT_FORMATS: Final = (None, torch.preserve_format)
# Numbers made at a time: each takes six whole numbers of 64 bits meanwhile.
_AT_A_TIME: Final = 1 << 22

SeedGroup: TypeAlias = "tuple[str, int]"
"""A device, and how many seeds a graph draws for it at once."""


@dataclass(frozen=True)
class Way:
    """How compiled code comes to its numbers, as far as that can't be seen from outside."""

    fourfold: bool = False
    """Do four elements share a place (``rand4x``, torch 2.13)? Else each has the first of four numbers of its own."""
    written_out: bool = False
    """Is attention compiled to single operators, where eager has a kernel that draws by itself?"""


WAYS: Final = {
    "cpu": (Way(),),
    "cuda": (Way(), Way(written_out=True), Way(fourfold=True), Way(fourfold=True, written_out=True)),
}
"""By kind of device, in the order in which they are tried."""


def philox(seed: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
    """Four numbers of 32 bits for each place: Philox, written out.

    Args:
        seed: One whole number of 64 bits.
        places: Whole numbers of less than 32 bits, any shape; int64.

    Returns: four tensors of the shape of ``places``, int64.
    """
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    zeros = torch.zeros_like(places)
    first, second, third, fourth = places, zeros, zeros, zeros
    for _ in range(_ROUNDS):
        # Of the 64 bits of a product none is lost, though the highest counts as a sign.
        product, other_product = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first = ((other_product >> 32) & _LOW) ^ second ^ keys[0]
        third = ((product >> 32) & _LOW) ^ fourth ^ keys[1]
        second, fourth = other_product & _LOW, product & _LOW
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return [first, second, third, fourth]


def uniform_numbers(seed: torch.Tensor, count: int, fourfold: bool = False) -> torch.Tensor:
    """What Inductor draws for ``count`` elements, uniform from 0 up to 1: float32, one dimension.

    Args:
        seed: One whole number of 64 bits, on the device for whose code it is; a CPU's takes its lower half.
        count: How many elements.
        fourfold: As for :class:`Way`; a CPU knows no such thing.
    """
    numbers = torch.empty(count, dtype=torch.float32, device=seed.device)
    if seed.device.type != "cpu":
        # Here, for Triton is installed where there is a GPU.
        from pytest_torchcompile.oracle.triton_numbers import fill_uniformly

        fill_uniformly(numbers, seed, fourfold)
        return numbers
    for start in range(0, count, _AT_A_TIME):
        places = torch.arange(start, min(start + _AT_A_TIME, count), device=seed.device)
        bits = philox(seed & _LOW, places)[0]
        numbers[start:start + _AT_A_TIME] = (bits & (_LOW >> 1)).to(torch.float32) * _SCALE
    return numbers


class GivenNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives random operators of an eager run what compiled code draws; entered by :func:`given_numbers`."""

    supports_higher_order_operators = True

    def __init__(self, groups: Sequence[SeedGroup], fourfold: bool, changed: int | None = None) -> None:
        """Take what is given.

        Args:
            groups: Those of one call of the model, which are drawn over and over.
            fourfold: As for :class:`Way`.
            changed: Which random operator gets some other numbers, counted from 0; None: none.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.seeds: list[torch.Tensor] = []
        """What was drawn of torch's generators, a tensor for each group."""
        self.lost = ""
        """The first random operator that could not be given anything, or why; '' if none was."""
        self.function = ""
        """Name of the torch function that is running."""
        self.count = 0
        """How many random operators were given numbers."""
        self._fourfold, self._changed = fourfold, changed
        self._sizes: dict[str, list[int]] = defaultdict(list)
        for device, size in groups:
            self._sizes[device].append(size)
        # By device: which group is the next one, and the seeds that are left of the last.
        self._next: dict[str, int] = defaultdict(int)
        self._left: dict[str, deque[torch.Tensor]] = defaultdict(deque)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, or what Inductor makes of it."""
        given = dict(kwargs or {})
        if given.get("generator") is None and not self.lost and call_draws(func, args, given):
            # A backward pass is given the seed of its forward pass.
            name = func._schema.name.removesuffix("_backward")
            instead = _INSTEAD.get(func)
            if instead is not None and _takes_numbers(args):
                try:
                    return instead(self, func, args, given)
                # Whatever it is, the operator draws as it does, and the trial runs again with eager's numbers.
                except Exception as error:
                    self.lost = f"{name}: {error}"
            elif name not in _UNCHANGED:
                self.lost = name
        return func(*args, **given)

    @property
    def is_complete(self) -> bool:
        """Whether every operator was given its numbers, and no seed is left over."""
        return not self.lost and not any(self._left.values())

    def uniform(self, device: torch.device, count: int) -> torch.Tensor | None:
        """The numbers of the next random operator; None where the plan has no seed for it."""
        name = device.type
        if not self._left[name]:
            sizes = self._sizes[name]
            if not sizes:
                self.lost = f"a draw on {device}"
                return None
            size = sizes[self._next[name] % len(sizes)]
            self._next[name] += 1
            seeds = torch.randint(LEAST_SEED, MOST_SEED, [size], device=device)
            self.seeds.append(seeds)
            self._left[name] += seeds.unbind()
        numbers = uniform_numbers(self._left[name].popleft(), count, self._fourfold and name == "cuda")
        if self.count == self._changed:
            # What was kept is dropped there, and what was dropped is kept.
            some = numbers[::max(1, count // _CHANGED)]
            some.copy_(torch.where(some < 0.5, _ALMOST_ONE, 0.0))
        self.count += 1
        return numbers

    def uniform_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """For a tensor's elements in the order of their memory, float32, with the strides of ``empty_like``."""
        numbers = self.uniform(tensor.device, tensor.numel())
        if numbers is None:
            return None
        return numbers.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    @property
    def is_in_dropout(self) -> bool:
        """Whether a ``bernoulli_`` is the mask of a dropout that is compiled as ``native_dropout``."""
        return self.function not in _BERNOULLIS


def _takes_numbers(args: Sequence[Any]) -> bool:
    """Whether all tensors are torch's own, strided and not nested: elements of others have no place in memory."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    return all(is_plain(tensor) and not tensor.is_nested for tensor in tensors)


_Instead: TypeAlias = "Callable[[GivenNumbers, Any, tuple[Any, ...], dict[str, Any]], Any]"


def _keep(numbers: torch.Tensor, share: float, dtype: torch.dtype) -> torch.Tensor:
    """Which elements a dropout of tensors of ``dtype`` keeps. The numbers are not rounded to that, in fused code."""
    if numbers.device.type == "cpu":
        # The share is, in C++.
        share = float(torch.tensor(share, dtype=dtype))
    return numbers > share


def _drop(given: GivenNumbers, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``native_dropout(input, p, train)`` as its decomposition has it."""
    tensor, share = args[0], float(args[1])
    # These draw nothing when they are compiled.
    numbers = None
    if 0 < share < 1 and tensor.numel():
        numbers = given.uniform_like(tensor)
    if numbers is None:
        return operator(*args, **kwargs)
    kept = _keep(numbers, share, tensor.dtype)
    return kept * tensor * float(1.0 / (1.0 - share)), kept


def _fill_with_flags(given: GivenNumbers, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``bernoulli_(tensor, p)``: of dropout on a CPU the share that is kept; else the share of ones."""
    tensor, share = args[0], float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
    dropped = tensor.device.type == "cpu" and given.is_in_dropout
    # Compiled for a CPU it stays torch's own operator.
    if (tensor.device.type == "cpu" and not dropped) or not tensor.numel():
        return operator(*args, **kwargs)
    numbers = given.uniform_like(tensor)
    if numbers is None:
        return operator(*args, **kwargs)
    if dropped:
        return tensor.copy_(_keep(numbers, 1.0 - share, tensor.dtype))
    return tensor.copy_(numbers < share)


def _rand(given: GivenNumbers, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rand(size)`` and ``rand_like(tensor)``.

    Of other precisions fused code compares numbers that are not rounded. With a memory format of their own, tensors are
    filled in another order.
    """
    empty = _aten.empty.memory_format if operator is _aten.rand.default else _aten.empty_like.default
    drawn = empty(*args, **kwargs)
    numbers = None
    if drawn.dtype not in (torch.float32, torch.float64) or kwargs.get("memory_format") not in _KEPT_FORMATS:
        given.lost = f"{operator} as {drawn.dtype}"
    elif drawn.numel():
        numbers = given.uniform_like(drawn)
    if numbers is None:
        return operator(*args, **kwargs)
    return drawn.copy_(numbers)


_INSTEAD: Final[dict[Any, _Instead]] = {
    _aten.native_dropout.default: _drop,
    _aten.bernoulli_.float: _fill_with_flags,
    _aten.rand.default: _rand,
    _aten.rand_like.default: _rand,
}


class _FunctionName(TorchFunctionMode):
    """Notes which function of torch runs: on a CPU dropout is a ``bernoulli_`` by the time it is dispatched."""

    def __init__(self, given: GivenNumbers) -> None:
        super().__init__()
        self._given = given

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the function."""
        outer = self._given.function
        self._given.function = _name_of(func, args, kwargs or {})
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._given.function = outer


def _name_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    name: str = getattr(function, "__name__", "")
    # ``dropout(input, p, training, inplace)`` of torch.nn.functional.
    in_place = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    if name == "dropout" and in_place is True:
        return "dropout_"
    return name


@contextmanager
def given_numbers(groups: Sequence[SeedGroup], way: Way, changed: int | None = None) -> Iterator[GivenNumbers]:
    """Give eager what compiled code draws, while the block runs. It is to begin with the seeds of torch's generators.

    Args:
        groups: What the graphs of one call draw, in their order; drawn over and over.
        way: One of :data:`WAYS`.
        changed: As for :class:`GivenNumbers`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given = GivenNumbers(groups, way.fourfold, changed)
    attention = sdpa_kernel(SDPBackend.MATH) if way.written_out else nullcontext()
    with attention, _FunctionName(given), given:
        yield given
