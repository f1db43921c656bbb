"""Recording: everything observable about one call, in copies that no later call can overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Fault", "Item", "Recording", "kept", "speaks"]


@dataclass(frozen=True)
class Fault:
    """What a call raised."""

    type: str
    text: str
    phase: str
    """``forward``, ``loss`` or ``backward``."""
    traceback: str = ""
    """The stack, innermost frame last; long ones shortened in the middle."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception itself, for whoever wants to raise it again."""

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
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Of every parameter and every input that requires grad; ``None`` where none arrived."""
    aliases: frozenset[tuple[str, str]] = frozenset()
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of the random generators after the call, by device."""
    error: Fault | None = None

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """``(name, kind, value)`` of everything that has a value, in the order of a report."""
        for name, item in self.outputs.items():
            yield name, "value", item.value
        if self.loss is not None:
            yield "loss", "value", self.loss
        for name, tensor in self.mutated.items():
            yield name, "mutation", tensor
        for name, tensor in self.buffers.items():
            yield name, "buffer", tensor
        for name, gradient in self.gradients.items():
            yield name, "gradient", gradient

    @property
    def all_zero(self) -> bool:
        """Whether every number that was returned is zero, NaN or infinite: such a call proves nothing."""
        tensors = [item.value for item in self.outputs.values() if isinstance(item.value, torch.Tensor)]
        return bool(tensors) and not any(speaks(t) for t in tensors)


def speaks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an element that is finite and not zero, so that equality with it says something."""
    if tensor.layout is not torch.strided:
        return bool(tensor.any())
    return bool((tensor.isfinite() & (tensor != 0)).any()) if tensor.numel() else False


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same strides where they can be kept; a distributed tensor is gathered whole.

    Gathering (``DTensor.full_tensor``) is collective: every rank must record the same call.
    """
    plain = tensor.detach()
    whole = getattr(plain, "full_tensor", None)
    return (whole() if callable(whole) else plain).clone()
