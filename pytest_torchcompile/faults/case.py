"""Case: one planted fault, or one correct backend that rounds differently, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from pytest_torchcompile.backends.toolkit import toolkit
from pytest_torchcompile.batch import Batch

__all__ = ["KINDS", "Case", "Program"]

KINDS: Final = (
    "value", "dtype", "shape", "stride", "alias", "mutation", "requires_grad", "gradient", "buffer", "error",
    "vacuous", "rng", "structure", "nondeterministic", "graph_break", "recompile", "memory",
)  # fmt: skip
"""The kinds of problems that ``compare`` reports, then those that the other checks are for."""


def untouched() -> Any:
    """The backend that changes nothing."""
    return toolkit


@dataclass(frozen=True)
class Program:
    """A model and the calls on which a fault shows."""

    model: Callable[[], torch.nn.Module]
    inputs: Callable[..., Any]
    """Called with one entry of ``sizes`` as keywords, gives one batch."""
    sizes: tuple[Mapping[str, int], ...] = ({"B": 8},)
    dtype: torch.dtype = torch.float32
    training: bool = True
    """``model.train()`` or ``model.eval()``; gradients are computed either way."""
    device: str = "cpu"
    cpu_only: str = ""
    """Why it is not run elsewhere."""

    def __str__(self) -> str:
        calls = []
        for sizes in self.sizes:
            calls.append(", ".join(f"{name}={size}" for name, size in sizes.items()))
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"{self.model.__name__} of {self.inputs.__name__} ({'; '.join(calls)}), {dtype}"
        if not self.training:
            text += ", evaluation"
        return text

    def build_model(self) -> torch.nn.Module:
        """The model with the same parameters each time."""
        torch.manual_seed(0)
        return self.model().to(self.device, self.dtype).train(self.training)

    def make_calls(self) -> list[Batch]:
        """One batch for each entry of ``sizes``, the same each time."""
        # Another seed than the model's: batches made of the numbers of its parameters would be no random ones.
        torch.manual_seed(1)
        return [Batch.of(self.inputs(**sizes)).to(device=self.device, dtype=self.dtype) for sizes in self.sizes]


@dataclass(frozen=True)
class Case:
    """What is wrong (or only different), where it shows, and what must be said about it."""

    name: str
    says: str
    """What it breaks; of a correct one, what it computes differently."""
    program: Program
    kind: str = ""
    """One of ``KINDS``: what must be reported. Empty: it is correct, and nothing may be reported."""
    backend: Callable[[], Any] = untouched
    """Makes what ``torch.compile(backend=...)`` is given, anew for each run: a wrong backend may have a memory."""
    where: str = ""
    """Must be in the name of a place that is reported: the output, parameter or buffer that is wrong."""
    alone: bool = False
    """Is everything else right, so that nothing else may be reported?"""
    check: str = "compare"
    """What must catch it: ``compare``, a check of the matrix, or ``memory`` (``gauges.memory.memory_growth``)."""
    dynamic: bool | None = None
    steps: int = 1
    below: str = ""
    """Why rounding excuses it: such a fault counts neither as caught nor as missed."""
    control: bool = False
    """Is it a program as it is, to show that nothing but the fault is reported? Then it may equal eager bit by bit."""
    upstream: str = ""
    """Torch's own fault, with its issue: a torch in which it is mended has nothing to catch."""
    inductor: bool = False
    """Does it need Inductor, and so a C++ compiler?"""
