"""What a captured graph writes to besides its outputs: inputs that it mutates, random states that it advances.

Asked by running the graph on fake tensors. Inductor's kernels write to memory without advancing the version counters of
tensors, so that these can't tell afterwards what a failed run has changed; the operators of the graph can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Before", "Effects", "effects_of"]


@dataclass(frozen=True)
class Effects:
    """What a run changes: inputs by place, and whether it draws random numbers."""

    mutated: tuple[int, ...] = ()
    draws: bool = False

    @property
    def none(self) -> bool:
        """Running it again, or for the first time after a failed run, gives the same."""
        return not self.mutated and not self.draws


def effects_of(graph: Callable[..., Any], args: Sequence[Any]) -> Effects | None:
    """What ``graph(*args)`` would change; None if that can't be told (an operator without a schema).

    ``torch._subclasses.FakeTensorMode`` and ``_disable_current_modes`` (torch 2.8 to 2.15). Nothing real is computed or
    changed, nor seen by others: without gradients nothing is saved, for saved tensors may have hooks of a user's or of
    activation checkpointing; and modes of a user's that count operators do not count these.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        with torch.no_grad(), _disable_current_modes():
            return _seen(FakeTensorMode(allow_non_fake_inputs=True), graph, args)
    except Exception:
        return None


def _seen(mode: Any, graph: Callable[..., Any], args: Sequence[Any]) -> Effects:
    fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    places: dict[int, list[int]] = {}
    for place, fake in enumerate(fakes):
        if isinstance(fake, Tensor):
            places.setdefault(_storage(fake), []).append(place)
    with mode, _Watch() as seen:
        graph(*fakes)
    mutated = {place for storage in seen.written for place in places.get(storage, ())}
    return Effects(tuple(sorted(mutated)), seen.draws)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator: its schema says what it writes to, its tags whether it draws."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.draws = False
        self._kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        named = {argument.name: (argument, value) for argument, value in _arguments(func._schema, args, given)}
        if torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p", (None, 1.0))[1] != 0.0:
            self.draws = True
        # Batch norm's schema does not say that it updates its statistics while training.
        updates = named.get("training", named.get("train", (None, True)))[1] is not False
        for name, (argument, value) in named.items():
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or (updates and name in ("running_mean", "running_var")):
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        self._kept.append(tensor)  # or its storage's address could be given to another
                        self.written.add(_storage(tensor))
        return func(*args, **given)


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


class Before:
    """Copies of what a run is about to change; :meth:`restore` puts it back.

    Values are put back without advancing version counters, as if nothing had been written.
    """

    def __init__(self, effects: Effects, args: Sequence[Any]) -> None:
        self._saved = [(args[place], args[place].detach().clone()) for place in effects.mutated]
        self._random = _random_states(args) if effects.draws else []

    def restore(self) -> None:
        """Put values and random states back."""
        for tensor, value in self._saved:
            tensor.data.copy_(value)
        for put_back, state in self._random:
            put_back(state)


def _random_states(args: Sequence[Any]) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    found: list[tuple[Callable[[Tensor], None], Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta")}
    for device in devices:
        module = torch.get_device_module(device)
        found.append((lambda state, m=module, d=device: m.set_rng_state(state, d),  # type: ignore[misc]
                      module.get_rng_state(device)))
    return found
