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

__all__ = ["Effects", "effects_of"]


@dataclass(frozen=True)
class Effects:
    """What a run changes: inputs by place, and whether it draws random numbers."""

    mutated: tuple[int, ...] = ()
    draws: bool = False

    @property
    def none(self) -> bool:
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
        with torch.no_grad(), _disable_current_modes():
            return _seen(FakeTensorMode(allow_non_fake_inputs=True), graph, args)
    except Exception:
        return None


def _seen(mode: Any, graph: Callable[..., Any], args: Sequence[Any]) -> Effects:
    fakes = [_fake(mode, arg) if isinstance(arg, Tensor) else arg for arg in args]
    places: dict[int, list[int]] = {}
    for place, fake in enumerate(fakes):
        if isinstance(fake, Tensor):
            places.setdefault(_storage(fake), []).append(place)
    with mode, _Watch() as seen:
        graph(*fakes)
    mutated = {place for storage in seen.written for place in places.get(storage, ())}
    return Effects(tuple(sorted(mutated)), seen.draws)


def _fake(mode: Any, tensor: Tensor) -> Any:
    """A tensor without values; but of a number that Dynamo passes in a tensor, with it, because the graph asks for it.

    Dynamo wraps floats (the ``eps`` of a norm) in graphs with dynamic sizes. ``FakeTensorConverter.from_real_tensor``
    (torch/_subclasses/fake_tensor.py, torch 2.8 to 2.15).
    """
    if tensor.ndim or tensor.dtype is not torch.float64 or tensor.device.type != "cpu" or tensor.requires_grad:
        return mode.from_tensor(tensor)
    # A copy, because operators on known values are really run.
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor.clone(), make_constant=True)


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
