"""Copies of what a run of a graph is about to change, so that a run that fails can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor

from pytest_torchcompile.layer.effects import Effects

__all__ = ["SMALL", "Before", "Rewinding", "copied_before"]

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
        written = [args[place] for place in effects.mutated]
        self._plain = fixed.issuperset(effects.mutated) and not any(tensor.requires_grad for tensor in written)
        self._getters = [_getter(places) for places in _alike(effects, args)]
        self._unused: list[list[list[Tensor]]] = []
        """Memory for copies that no run in progress needs. Appending to it and popping need no lock."""

    def begin(self, args: Sequence[Any]) -> Copied | None:
        """Before a run: copy what it may change; None where that can't be done."""
        try:
            if not self._plain:
                before = copied_before(self._effects, args, SMALL)
                return None if before is None else Copied([], [], [], before)
            lives = [getter(args) for getter in self._getters]
            copies = self._unused.pop() if self._unused else _memory(lives)
            for copy, live in zip(copies, lives, strict=True):
                torch._foreach_copy_(copy, list(live))
            return Copied(lives, copies, [(put, get()) for get, put in self._generators])
        except Exception:  # no memory for copies; or a CUDA graph is being captured, where no generator can be read
            return None

    def end(self, copied: Copied | None) -> None:
        """After a run that did not fail."""
        if copied is not None and copied.copies:
            self._unused.append(copied.copies)


class Copied:
    """What one run may change: live tensors and copies of them, in the same order, and states of generators."""

    __slots__ = ("copies", "lives", "other", "states")

    def __init__(self, lives: Any, copies: Any, states: Any, other: Before | None = None) -> None:
        self.lives, self.copies, self.states, self.other = lives, copies, states, other

    def before(self) -> Before:
        """To restore it."""
        if self.other is not None:
            return self.other
        pairs = zip(self.lives, self.copies, strict=True)
        return Before([pair for live, copy in pairs for pair in zip(live, copy, strict=True)], self.states)


def _memory(lives: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Not inference tensors, which nobody could write to in a later run outside of inference mode."""
    with torch.inference_mode(False):
        return [[torch.empty_like(tensor) for tensor in live] for live in lives]


def _alike(effects: Effects, args: Sequence[Any]) -> list[list[int]]:
    """Places of what is written, those of one dtype and device together."""
    found: dict[Any, list[int]] = {}
    for place in effects.mutated:
        found.setdefault((args[place].dtype, args[place].device), []).append(place)
    return list(found.values())


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Tensor]]:
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places
    return lambda args: (args[place],)


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
