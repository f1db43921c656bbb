"""A small model of everything that a fallback can get wrong, and compilers that break it, each in another way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Toolkit, results
from pytest_torchcompile.gates import Place

__all__ = ["BREAKS", "EXIT", "Break", "Net", "ends_the_process", "injected_breaks", "net", "rows"]

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
        # With fullgraph=True it is an error; without, Dynamo would compile around it.
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


def _raise_error(*_: Any) -> NoReturn:
    raise RuntimeError("a planted failure")


def _scale_results(returned: list[Any], _: Any) -> list[Any]:
    scaled = []
    for each in returned:
        is_float = isinstance(each, Tensor) and each.is_floating_point()
        scaled.append(each * 1.01 if is_float else each)
    return scaled


def _compile_first_only() -> Any:
    """Compiles one graph and no other."""
    compiled: list[fx.GraphModule] = []

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if compiled:
            _raise_error()
        compiled.append(graph)
        return Toolkit()(graph, inputs)

    return compile_graph


def ends_the_process(graph: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
    """A compiler that takes its process with it, as a crash in C++ does."""
    # Not sys.exit: that is an exception, which could be caught.
    os._exit(EXIT)


BREAKS: Final = (
    Break("unsupported operation", partial(str, "aot_eager"), Stops, {"fullgraph": True}),
    Break("error at compile", partial(Toolkit, dynamo=_raise_error)),
    Break("error when run", partial(Toolkit, forward=results(_raise_error))),
    Break("wrong result", partial(Toolkit, forward=results(_scale_results)), raises=False, phases=("comparison",)),
    Break("backward does not compile", partial(Toolkit, backward=_raise_error), phases=("forward", "backward")),
    Break("error only in backward", partial(Toolkit, backward=results(_raise_error)), phases=("backward",)),
    Break("wrong gradient", partial(Toolkit, backward=results(_scale_results)), raises=False, phases=("comparison",)),
    # Dynamic shapes would serve the second shape with the first graph.
    Break("error at the second shape", _compile_first_only, settings={"dynamic": False}, sizes=(4, 7)),
)
"""In the order of a training step."""

_UPSTREAM_PHASES = {"compile_error": ("forward",), "runtime_error": ("forward",), "accuracy": ("comparison",)}


def injected_breaks(place: Place) -> Iterator[tuple[Break, AbstractContextManager[object]]]:
    """Torch's own planted faults in the real Inductor, each with what to open around it; none on other backends.

    They are what ours stand for: ``torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY`` and its twin in
    ``triton`` (torch 2.8 to 2.15).
    """
    if place.backend != "inductor":
        return
    from torch._inductor import config

    language = "cpp" if place.device == "cpu" else "triton"
    for kind, phases in _UPSTREAM_PHASES.items():
        # A Triton kernel that fails when it runs ends the use of the GPU in its process.
        if language == "triton" and kind == "runtime_error":
            continue
        broken = Break(f"Inductor's {kind}", partial(str, "inductor"), raises=kind != "accuracy", phases=phases)
        yield broken, config.patch({f"{language}.inject_relu_bug_TESTING_ONLY": kind})
