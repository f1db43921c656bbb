"""What calls return that do their own backward passes: steps of a training, or one whole step, by names of a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["NamedLeaf", "Step", "StepOutput", "TrainingOutput", "parameter_moved_by"]

_GRADIENT_OF: Final = ": gradient of "
_ADDED_TO: Final = ", added to that of "


@dataclass(frozen=True, eq=False)
class Step:
    """What one step of a training computed."""

    name: str
    """``step 2``."""
    outputs: dict[str, Any]
    """By path, as ``output['logits']``."""
    loss: torch.Tensor | None
    """None where there is none, or nothing that depends on a parameter."""
    gradients: dict[str, torch.Tensor | None]
    """By parameter; None where none arrived."""
    added_to: str = ""
    """The step whose gradients were still there when its own arrived; '': there were none."""

    def leaves(self) -> Iterator[NamedLeaf]:
        """All of it, in the words of a report: ``step 2: gradient of up.weight``."""
        for path, value in self.outputs.items():
            yield NamedLeaf(f"{self.name}: {path}", value)
        if self.loss is not None:
            yield NamedLeaf(f"{self.name}: loss", self.loss)
        for parameter, gradient in self.gradients.items():
            name = f"{self.name}{_GRADIENT_OF}{parameter}"
            if self.added_to:
                name = f"{name}{_ADDED_TO}{self.added_to}"
            yield NamedLeaf(name, gradient, "gradient")


def parameter_moved_by(name: str) -> str:
    """The parameter that a step moves, by the name of the leaf of its gradient; '' of any other leaf."""
    step, _, parameter = name.partition(_GRADIENT_OF)
    if not step.startswith("step "):
        return ""
    return parameter.partition(_ADDED_TO)[0]


@dataclass(frozen=True, eq=False)
class TrainingOutput:
    """What a training of several steps returns."""

    steps: list[Step]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """What a step that does its own backward pass returns, by the names of a report."""

    values: dict[str, Any]

    def leaves(self) -> Iterator[NamedLeaf]:
        """All of it: ``output``, ``loss of the step``, ``gradient of up.weight``."""
        for name, value in self.values.items():
            if name.startswith("gradient of "):
                yield NamedLeaf(name, value, "gradient")
            else:
                yield NamedLeaf(name, value)


@dataclass(frozen=True, eq=False)
class NamedLeaf:
    """A leaf of what a call returned, under the name that a report prints."""

    name: str
    value: Any
    kind: str = "value"
    """A kind of :data:`~pytest_torchcompile.oracle.leaf_limits.KINDS`."""
