"""Recording: everything observable about one call, in copies that no later call can overwrite."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pytest_torchcompile.state.tensor_values import dense_form, layout_of, visible_strides, whole_value

__all__ = ["Fault", "Item", "Recording", "detached_copy", "has_signal"]


@dataclass(frozen=True)
class Fault:
    """What a call raised."""

    type: str
    text: str
    phase: str
    """``forward``, ``loss`` or ``backward``."""
    traceback: str = ""
    """The stack, innermost frame last; long ones shortened in the middle."""
    family: frozenset[str] = frozenset()
    """Names of the classes between its own and ``Exception``, and those of the exceptions that it was raised from."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception itself, for whoever wants to raise it again."""
    at: float = field(default_factory=time.monotonic, compare=False)
    """``time.monotonic()`` when it was seen."""
    ours: bool = False
    """In an eager run: whether our own code raised it, and not the user's."""

    @classmethod
    def of(cls, error: BaseException, phase: str, *, ours: bool = False) -> Fault:
        """Describe an exception."""
        return cls(_qualified(type(error)), str(error), phase, _stack(error), _family(error), error, ours=ours)

    def akin(self, other: Fault) -> bool:
        """Whether whoever expects this error may take the other one for it.

        One class derives from the other, or one was raised from an error like the other. Dynamo and Inductor wrap what
        they meet while tracing, and name its class in their text. The kernels of Inductor know one error only.
        """
        if self.family & other.family:
            return True
        named = any(a.type.rpartition(".")[2] in b.text for a, b in ((self, other), (other, self)) if _wraps(b.type))
        bounds = all("out of bounds" in f.text or "out of range" in f.text for f in (self, other))
        return named or bounds

    def to_dict(self) -> dict[str, str]:
        """Plain data for a report."""
        return {"type": self.type, "text": self.text, "phase": self.phase, "traceback": self.traceback}

    def __str__(self) -> str:
        first = self.text.strip().splitlines()[0] if self.text.strip() else ""
        return f"{self.type} in {self.phase}" + (f": {first[:300]}" if first else "")


@dataclass(frozen=True, eq=False)
class Item:
    """A detached copy of a tensor with the properties of the original, or a Python object."""

    value: Any
    stride: tuple[int, ...] | None = None
    requires_grad: bool = False
    layout: str = str(torch.strided)

    @classmethod
    def of(cls, value: Any) -> Item:
        """Copy a tensor, with its visible strides; anything else is kept as it is."""
        if not isinstance(value, torch.Tensor):
            return cls(value)
        return cls(detached_copy(value), visible_strides(value), value.requires_grad, layout_of(value.detach()))


_PLAIN = Item(None)


@dataclass(frozen=True, eq=False)
class Recording:
    """One call, its loss and its backward pass. Names are the ones that a report prints."""

    outputs: dict[str, Item] = field(default_factory=dict)
    """By path: ``output``, ``output[0]``, ``output['logits']``, ``output.hidden``."""
    structure: str = ""
    loss: torch.Tensor | None = None
    backward: bool = False
    """Whether gradients were asked for: ``train``, and the loss depends on something that requires grad."""
    mutated: dict[str, torch.Tensor] = field(default_factory=dict)
    """Inputs and parameters that the call wrote to, as they are afterwards (unchanged ones are left out)."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers, and tensors that modules hold in attributes."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Of every parameter and every input that requires grad; ``None`` where none arrived."""
    properties: dict[str, Item] = field(default_factory=dict)
    """Strides and ``requires_grad`` of what the three hold, by name; the value is in those."""
    aliases: frozenset[tuple[str, str]] = frozenset()
    training: frozenset[str] = frozenset()
    """Names of the modules that were in training mode after the call."""
    left_out: tuple[str, ...] = ()
    """Outputs that the loss takes no gradient of; they have a backward pass of their own."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the random generators after the call, by device."""
    error: Fault | None = None

    def items(self) -> Iterator[tuple[str, str, Item]]:
        """``(name, kind, item)`` of everything that has a value, in the order of a report."""
        yield from ((name, "value", item) for name, item in self.outputs.items())
        if self.loss is not None:
            yield "loss", "value", Item(self.loss)
        tables: dict[str, Mapping[str, Any]] = {
            "mutation": self.mutated, "buffer": self.buffers, "gradient": self.gradients
        }  # fmt: skip
        for kind, table in tables.items():
            for name, value in table.items():
                yield name, kind, replace(self.properties.get(name, _PLAIN), value=value)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """:meth:`items` without the properties."""
        yield from ((name, kind, item.value) for name, kind, item in self.items())

    def without(self, parameters: frozenset[str]) -> Recording:
        """What is left if nothing is said of some parameters: no gradient, and not what the call wrote to them."""
        if not parameters:
            return self
        gradients = {name: None if name.removeprefix("gradient of ") in parameters else value
                     for name, value in self.gradients.items()}
        mutated = {name: value for name, value in self.mutated.items()
                   if name.removesuffix(" after the call") not in parameters}
        return replace(self, gradients=gradients, mutated=mutated)

    @property
    def all_zero(self) -> bool:
        """Whether every number that was returned is zero, NaN or infinite: such a call proves nothing."""
        tensors = [item.value for item in self.outputs.values() if isinstance(item.value, torch.Tensor)]
        return bool(tensors) and not any(has_signal(t) for t in tensors)


def has_signal(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element that is finite and not zero, so that equality with it says something."""
    if tensor.layout is not torch.strided:
        return bool(tensor.any())
    return bool((tensor.isfinite() & (tensor != 0)).any()) if tensor.numel() else False


def detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same strides where they can be kept; a distributed tensor is gathered whole.

    A sparse or nested one is made dense (:func:`~pytest_torchcompile.state.tensor_values.dense_form`).

    Gathering (``DTensor.full_tensor``) is collective: every rank must record the same call.
    """
    return dense_form(whole_value(tensor)).clone()


_OURS = os.path.dirname(os.path.dirname(__file__))


def _stack(error: BaseException) -> str:
    """The frames of an exception, without those of this package; at most 40 lines."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    lines = "".join(traceback.format_list(frames)).splitlines()
    return "\n".join(lines if len(lines) <= 40 else [*lines[:12], "  ...", *lines[-28:]])


def _family(error: BaseException | None) -> frozenset[str]:
    names: set[str] = set()
    depth = 0
    while error is not None and depth < 8:
        names |= {_qualified(kind) for kind in type(error).__mro__ if kind not in _COMMON}
        error, depth = error.__cause__ or error.__context__, depth + 1
    return frozenset(names)


_COMMON = (Exception, BaseException, object)


def _wraps(kind: str) -> bool:
    return kind.startswith(("torch._dynamo.", "torch._inductor."))


def _qualified(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
