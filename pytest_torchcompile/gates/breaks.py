"""A small model of everything that a fallback can get wrong, and compilers that break it, each in another way."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Toolkit, results

__all__ = ["BREAKS", "EXIT", "Break", "Net", "ends_the_process", "net", "rows"]

EXIT: Final = 3


class Net(nn.Module):
    """Parameters, running statistics, random numbers, and a relu, which torch's own planted faults look for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        """(B, 6) -> (B, 3)."""
        hidden = torch.relu(self.norm(self.inner(x)))
        return self.outer(nn.functional.dropout(hidden, 0.2, self.training))


class Stops(Net):
    """An operation in the middle that no graph can hold."""

    def forward(self, x: Tensor) -> Any:
        """(B, 6) -> (B, 3)."""
        x = x * 2
        torch._dynamo.graph_break()
        return super().forward(x)


def net() -> nn.Module:
    """A new model, for a matrix."""
    return Net()


def rows(B: int) -> Tensor:  # noqa: N803 -- dims have capital letters
    """One batch, for a matrix."""
    return torch.randn(B, 6)


@dataclass(frozen=True)
class Break:
    """One way to break a compiled model."""

    name: str
    backend: Callable[[], Any]
    """Makes the compiler, anew for each use: it may count."""
    model: Callable[[], nn.Module] = Net
    settings: dict[str, Any] = field(default_factory=dict)
    raises: bool = True
    """Is it an error? A wrong number is found only by who compares."""
    phases: tuple[str, ...] = ("forward",)
    """Where the smoketest must see it."""
    sizes: tuple[int, ...] = (4, 4)
    """Of the batches that it takes; with a first that works it can't be found before it is used."""

    @property
    def late(self) -> bool:
        """Does it work at first?"""
        return self.sizes[0] != self.sizes[-1]


def _fail(*_: Any) -> NoReturn:
    raise RuntimeError("a planted failure")


def _times(factor: float) -> Callable[[list[Any], Any], list[Any]]:
    def change(found: list[Any], _: Any) -> list[Any]:
        return [each * factor if isinstance(each, Tensor) and each.is_floating_point() else each for each in found]

    return change


def _only_first() -> Any:
    """Compiles one graph and no other."""
    made: list[int] = []

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        made.append(1)
        return Toolkit()(graph, inputs) if len(made) == 1 else _fail()

    return compiler


def ends_the_process(graph: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
    """A compiler that takes its process with it, as a crash in C++ does."""
    os._exit(EXIT)


BREAKS: Final = (
    Break("unsupported operation", lambda: "aot_eager", Stops, {"fullgraph": True}),
    Break("error at compile", lambda: Toolkit(dynamo=_fail)),
    Break("error when run", lambda: Toolkit(forward=results(_fail))),
    Break("wrong result", lambda: Toolkit(forward=results(_times(1.01))), raises=False, phases=("comparison",)),
    Break("backward does not compile", lambda: Toolkit(backward=_fail), phases=("forward", "backward")),
    Break("error only in backward", lambda: Toolkit(backward=results(_fail)), phases=("backward",)),
    Break("wrong gradient", lambda: Toolkit(backward=results(_times(1.01))), raises=False, phases=("comparison",)),
    Break("error at the second shape", _only_first, settings={"dynamic": False}, sizes=(4, 7)),
)
"""In the order of a training step."""
