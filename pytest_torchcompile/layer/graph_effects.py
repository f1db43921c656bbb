"""What a run of a captured graph changes besides its outputs, and copies of that, so that it can be taken back.

It may mutate inputs and advance random states. Which, is asked by running the graph on fake tensors. Inductor's kernels
write to memory without advancing the version counters of tensors, so that these can't tell afterwards what a failed run
has changed; the operators of the graph can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.state.random_operators import call_draws

__all__ = ["SMALL", "Before", "Effects", "Rewinding", "copied_before", "effects_of", "getter"]

SMALL: Final = 4 * 2**20
"""Bytes that are copied before each run of a graph that writes to its inputs, such as statistics of batch norm. More
would cost more than a fallback is worth."""


@dataclass(frozen=True)
class Effects:
    """What a run changes: inputs by place, and whether it draws random numbers."""

    mutated: tuple[int, ...] = ()
    draws: bool = False

    @property
    def harmless(self) -> bool:
        """Running it again, or for the first time after a failed run, gives the same."""
        return not self.mutated and not self.draws

    def written_bytes(self, args: Sequence[Any]) -> int:
        """The size of the inputs that a run writes to."""
        return sum(args[place].nbytes for place in self.mutated)


def effects_of(graph: Callable[..., Any], args: Sequence[Any]) -> Effects | None:
    """What ``graph(*args)`` would change; None if that can't be told (an operator without a schema).

    ``torch._subclasses.FakeTensorMode`` and ``_disable_current_modes`` (torch 2.8 to 2.15). Nothing real is computed or
    changed, nor seen by others: without gradients nothing is saved, for saved tensors may have hooks of a user's or of
    activation checkpointing; and modes of a user's that count operators do not count these.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        # Neither autograd nor anybody's modes may see this run.
        with torch.no_grad(), _disable_current_modes():
            return _observed_effects(FakeTensorMode(allow_non_fake_inputs=True), graph, args)
    except Exception:
        return None


def _observed_effects(mode: Any, graph: Callable[..., Any], args: Sequence[Any]) -> Effects:
    fakes = list(args)
    # Views of one storage are several inputs that one write changes.
    places: dict[int, list[int]] = {}
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor):
            fakes[place] = _fake_tensor(mode, arg)
            places.setdefault(_storage_of(fakes[place]), []).append(place)
    with mode, _OperatorWatch() as seen:
        graph(*fakes)
    mutated: set[int] = set()
    for storage in seen.written:
        mutated.update(places.get(storage, ()))
    return Effects(tuple(sorted(mutated)), seen.draws)


def _fake_tensor(mode: Any, tensor: Tensor) -> Any:
    """A tensor without values; but of a number that Dynamo passes in a tensor, with it, because the graph asks for it.

    Dynamo wraps floats (the ``eps`` of a norm) in graphs with dynamic sizes. ``FakeTensorConverter.from_real_tensor``
    (torch/_subclasses/fake_tensor.py, torch 2.8 to 2.15).
    """
    if tensor.ndim or tensor.dtype is not torch.float64 or tensor.device.type != "cpu" or tensor.requires_grad:
        return mode.from_tensor(tensor)
    # A copy, because operators on known values are really run.
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor.clone(), make_constant=True)


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator: its schema says what it writes to, its tags whether it draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.draws = False
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        named: dict[str, tuple[Any, Any]] = {}
        for argument, value in _given_arguments(func._schema, args, given):
            named[argument.name] = argument, value
        self.draws = self.draws or call_draws(func, args, given)
        # Batch norm's schema does not say that it updates its statistics while training.
        updates = named.get("training", named.get("train", (None, True)))[1] is not False
        for name, (argument, value) in named.items():
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or (updates and name in ("running_mean", "running_var")):
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        # Kept, or its storage's address could be given to another.
                        self._kept.append(tensor)
                        self.written.add(_storage_of(tensor))
        return func(*args, **given)


def _given_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


class Before:
    """What a run is about to change, as it was; :meth:`restore` puts it back.

    Values are put back without advancing version counters, as if nothing had been written.
    """

    def __init__(self, values: Sequence[tuple[Tensor, Tensor]], states: Sequence[tuple[Any, Tensor]]) -> None:
        """Live tensors with their copies; setters of random states with what they were."""
        self._values, self._states = values, states

    def restore(self) -> None:
        """Put values and random states back."""
        for tensor, value in self._values:
            # Through .data, which leaves the version counter alone.
            tensor.data.copy_(value)
        for set_state, state in self._states:
            set_state(state)


def copied_before(effects: Effects | None, args: Sequence[Any], most: int | None = None) -> Before | None:
    """:class:`Before`, unless nobody knows what a run changes, it is more than ``most`` bytes, or memory is wanting."""
    if effects is None or (most is not None and effects.written_bytes(args) > most):
        return None
    try:
        values = [(args[place], args[place].detach().clone()) for place in effects.mutated]
        states = [(generator.set_state, generator.get_state()) for generator in _generators_of(effects, args)]
    except Exception:
        # No memory for copies.
        return None
    return Before(values, states)


class Rewinding:
    """:class:`Before` for each run of one graph, as cheap as it can be: memory is kept, and one kernel copies all.

    A model has a hundred statistics, and to clone each by itself costs more than many a call.
    """

    def __init__(self, effects: Effects, args: Sequence[Any], fixed: frozenset[int]) -> None:
        """``args`` of a run; ``fixed``: the places of tensors that have the same shape in every run."""
        self._effects = effects
        self._generators = _generators_of(effects, args)
        joinable = [_can_be_joined(args[place]) for place in effects.mutated]
        self._plain = fixed.issuperset(effects.mutated) and all(joinable)
        self._groups: list[_Group] = []
        if self._plain:
            self._groups = _groups_of(effects, args)
        self._unused: list[list[Tensor]] = []
        """Memory for copies that no run in progress needs. Appending to it and popping need no lock."""

    def begin(self, args: Sequence[Any]) -> Copied | None:
        """Before a run: copy what it may change; None where that can't be done."""
        try:
            # Sizes vary, or tensors are of kinds that no kernel joins: each is copied by itself.
            if not self._plain:
                before = copied_before(self._effects, args, SMALL)
                return None if before is None else Copied([], [], before)
            copies = self._unused.pop() if self._unused else _new_memory(self._groups)
            written = []
            for group, copy in zip(self._groups, copies, strict=True):
                lives = group.tensors(args)
                group.join(lives, out=copy)
                written.append((lives, group, copy))
            return Copied(written, [(set_state, get_state()) for get_state, set_state in self._generators])
        except Exception:
            # No memory for copies; or a CUDA graph is being captured, where no generator can be read.
            return None

    def end(self, copied: Copied | None) -> None:
        """After a run that did not fail."""
        if copied is not None and copied.written:
            self._unused.append([copy for _, _, copy in copied.written])


class Copied:
    """What one run may change: live tensors, each group of them with the tensor that holds its copy, and states."""

    __slots__ = ("other", "states", "written")

    def __init__(
        self, written: list[tuple[Sequence[Tensor], _Group, Tensor]], states: Any, other: Before | None = None
    ) -> None:
        self.written, self.states, self.other = written, states, other

    def before(self) -> Before:
        """To restore it."""
        if self.other is not None:
            return self.other
        pairs: list[tuple[Tensor, Tensor]] = []
        for lives, group, copy in self.written:
            pairs.extend(zip(lives, group.parts(copy), strict=True))
        return Before(pairs, self.states)


class _Group:
    """Tensors that one kernel copies into one: of one dtype, device, and shape but for the first dimension."""

    def __init__(self, places: Sequence[int], args: Sequence[Any]) -> None:
        first = args[places[0]]
        self.tensors = getter(places)
        """The tensors of a run."""
        # ``foreach_copy`` takes four times as long on a CPU, where it copies one after the other (torch 2.13).
        self.join: Callable[..., object] = torch.stack
        """Copies all into one."""
        self._sizes: list[int] | None = None
        rows = len(places)
        if first.ndim:
            self.join = torch.cat
            self._sizes = [args[place].shape[0] for place in places]
            rows = sum(self._sizes)
        self._shape = (rows, *first.shape[1:])
        self._like = {"dtype": first.dtype, "device": first.device}

    def memory(self) -> Tensor:
        """Room for a copy of all."""
        return torch.empty(self._shape, **self._like)

    def parts(self, copy: Tensor) -> Sequence[Tensor]:
        """The copy of each."""
        if self._sizes is None:
            return copy.unbind()
        return copy.split(self._sizes)  # type: ignore[no-untyped-call,no-any-return]


def _can_be_joined(tensor: Tensor) -> bool:
    """Whether its values can be joined with others': it is no subclass, nothing differentiates it, it is strided."""
    usual = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return usual and not tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_quantized


def _groups_of(effects: Effects, args: Sequence[Any]) -> list[_Group]:
    alike: dict[Any, list[int]] = {}
    for place in effects.mutated:
        tensor = args[place]
        alike.setdefault((tensor.dtype, tensor.device, tensor.ndim, tensor.shape[1:]), []).append(place)
    return [_Group(places, args) for places in alike.values()]


def _new_memory(groups: Sequence[_Group]) -> list[Tensor]:
    """Not inference tensors, which nobody could write to in a later run outside of inference mode."""
    with torch.inference_mode(False):
        return [group.memory() for group in groups]


def getter(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the values at some places of a sequence, however few they are."""
    if len(places) > 1:
        return itemgetter(*places)
    # itemgetter gives one value alone, and takes no empty list of places.
    return lambda args: [args[place] for place in places]


class _Generator(NamedTuple):
    """How to read and to set the state of a random generator."""

    get_state: Callable[[], Tensor]
    set_state: Callable[[Tensor], None]


def _generators_of(effects: Effects, args: Sequence[Any]) -> list[_Generator]:
    """The generators that a run may advance."""
    if not effects.draws:
        return []
    generators = [_Generator(torch.get_rng_state, torch.set_rng_state)]
    devices = set()
    for arg in args:
        # The CPU's generator is looked at anyway, and meta has none.
        if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta"):
            devices.add(arg.device)
    return generators + [_device_generator(device) for device in devices]


def _device_generator(device: torch.device) -> _Generator:
    # Looked up when they are called: an accelerator of another package may have neither, and then no copy is kept.
    module = torch.get_device_module(device)

    def get_state() -> Tensor:
        state: Tensor = module.get_rng_state(device)
        return state

    def set_state(state: Tensor) -> None:
        module.set_rng_state(state, device)

    return _Generator(get_state, set_state)
