"""Copies of what a run of a graph is about to change, so that a run that fails can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from pytest_torchcompile.layer.graph_effects import Effects

__all__ = ["SMALL", "Before", "Rewinding", "copied_before", "getter"]

SMALL: Final = 4 * 2**20
"""Bytes that are copied before each run of a graph that writes to its inputs, such as statistics of batch norm. More
would cost more than a fallback is worth."""


class Before:
    """What a run is about to change, as it was; :meth:`restore` puts it back.

    Values are put back without advancing version counters, as if nothing had been written.
    """

    def __init__(self, values: Sequence[tuple[Tensor, Tensor]], states: Sequence[tuple[Any, Tensor]]) -> None:
        self._values, self._states = values, states

    def restore(self) -> None:
        """Put values and random states back."""
        for tensor, value in self._values:
            tensor.data.copy_(value)
        for put_back, state in self._states:
            put_back(state)


def copied_before(effects: Effects | None, args: Sequence[Any], most: int | None = None) -> Before | None:
    """:class:`Before`, unless nobody knows what a run changes, it is more than ``most`` bytes, or memory is wanting."""
    if effects is None or (most is not None and effects.written_bytes(args) > most):
        return None
    try:
        values = [(args[place], args[place].detach().clone()) for place in effects.mutated]
        return Before(values, [(put, get()) for get, put in _generators(effects, args)])
    except Exception:  # no memory for copies
        return None


class Rewinding:
    """:class:`Before` for each run of one graph, as cheap as it can be: memory is kept, and one kernel copies all.

    A model has a hundred statistics, and to clone each by itself costs more than many a call.
    """

    def __init__(self, effects: Effects, args: Sequence[Any], fixed: frozenset[int]) -> None:
        """``args`` of a run; ``fixed``: the places of tensors that have the same shape in every run."""
        self._effects = effects
        self._generators = _generators(effects, args)
        self._plain = fixed.issuperset(effects.mutated) and all(_joins(args[place]) for place in effects.mutated)
        self._groups = _groups(effects, args) if self._plain else []
        self._unused: list[list[Tensor]] = []
        """Memory for copies that no run in progress needs. Appending to it and popping need no lock."""

    def begin(self, args: Sequence[Any]) -> Copied | None:
        """Before a run: copy what it may change; None where that can't be done."""
        try:
            if not self._plain:
                before = copied_before(self._effects, args, SMALL)
                return None if before is None else Copied([], [], before)
            copies = self._unused.pop() if self._unused else _memory(self._groups)
            written = []
            for group, copy in zip(self._groups, copies, strict=True):
                lives = group.of(args)
                group.join(lives, out=copy)
                written.append((lives, group, copy))
            return Copied(written, [(put, get()) for get, put in self._generators])
        except Exception:  # no memory for copies; or a CUDA graph is being captured, where no generator can be read
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
        self.of = getter(places)
        """The tensors of a run."""
        self.join: Callable[..., object] = torch.cat if first.ndim else torch.stack
        """``foreach_copy`` takes four times as long on a CPU, where it copies one after the other (torch 2.13)."""
        self._sizes = [args[place].shape[0] for place in places] if first.ndim else None
        self._shape = (sum(self._sizes) if self._sizes else len(places), *first.shape[1:])
        self._like = {"dtype": first.dtype, "device": first.device}

    def memory(self) -> Tensor:
        """Room for a copy of all."""
        return torch.empty(self._shape, **self._like)

    def parts(self, copy: Tensor) -> Sequence[Tensor]:
        """The copy of each."""
        return copy.split(self._sizes) if self._sizes else copy.unbind()  # type: ignore[no-untyped-call]


def _joins(tensor: Tensor) -> bool:
    """Whether its values can be joined with others': it is no subclass, nothing differentiates it, it is strided."""
    usual = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return usual and not tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_quantized


def _groups(effects: Effects, args: Sequence[Any]) -> list[_Group]:
    found: dict[Any, list[int]] = {}
    for place in effects.mutated:
        tensor = args[place]
        found.setdefault((tensor.dtype, tensor.device, tensor.ndim, tensor.shape[1:]), []).append(place)
    return [_Group(places, args) for places in found.values()]


def _memory(groups: Sequence[_Group]) -> list[Tensor]:
    """Not inference tensors, which nobody could write to in a later run outside of inference mode."""
    with torch.inference_mode(False):
        return [group.memory() for group in groups]


def getter(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the values at some places of a sequence, however few they are."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda args: [args[place] for place in places]


def _generators(effects: Effects, args: Sequence[Any]) -> list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]]:
    """How to read and to set the state of each generator that a run may advance."""
    if not effects.draws:
        return []
    found: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = [(torch.get_rng_state, torch.set_rng_state)]
    devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta")}
    for device in devices:
        found.append(_device_generator(device))
    return found


def _device_generator(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    module = torch.get_device_module(device)
    return (lambda: module.get_rng_state(device)), (lambda state: module.set_rng_state(state, device))
