"""Planted faults: the numbers are right, but too little was compiled, or too often, or memory is lost."""



from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pytest_torchcompile.backends.toolkit import Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program

__all__ = ["COMPILING", "CONTROLS_OF_CHECKS"]


class Prints(p.Perceptron):
    """A print in the middle: the graph ends there."""

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.a(x))
        print(end="")
        return self.c(self.b(x))


class Branches(p.Perceptron):
    """A Python branch on data."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class PartDisabled(p.Perceptron):
    """One layer of three is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.b.forward = torch.compiler.disable(self.b.forward)  # type: ignore[method-assign, no-untyped-call]


class GivesUp(p.Perceptron):
    """A break that torch can't resume from: the whole frame runs eagerly."""

    def forward(self, x: Tensor) -> Any:
        try:
            print(end="")
        finally:
            x = torch.tanh(self.a(x))
        return self.c(self.b(x))


class Forced(p.Perceptron):
    """Sets a stance under which nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.compiler.set_stance("force_eager")


class Counts(p.Perceptron):
    """Counts its calls in a Python number, which torch guards on."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls**0


class Specialises(p.Perceptron):
    """Looks the size up in a dictionary, so that every size is a graph of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * {4: 1.0}.get(x.shape[0], 1.0)


def _keeps(forward: bool) -> Any:
    """A backend that never lets go of what it has computed."""

    def make() -> Toolkit:
        kept: list[Any] = []

        def change(found: list[Any], _: object) -> list[Any]:
            kept.append([t.repeat(4, *(1,) * (t.ndim - 1)) for t in found if isinstance(t, Tensor)])
            return found

        return Toolkit(forward=results(change)) if forward else Toolkit(backward=results(change))

    return make


def _eager() -> str:
    return "eager"


MANY = ({"B": 4}, {"B": 7}, {"B": 6}, {"B": 9}, {"B": 10})
LARGE = Program(p.Perceptron, p.rows, ({"B": 20_000},))

COMPILING: Final = (
    Case("graph break", "a print between two layers", Program(Prints, p.rows), "graph_break", _eager,
         check="graph_breaks"),
    Case("branch on data", "a Python if on a tensor", Program(Branches, p.rows), "graph_break", _eager,
         check="graph_breaks"),
    Case("layer left out", "one of three layers is disabled", Program(PartDisabled, p.rows), "vacuous", _eager,
         check="compiles"),
    Case("frame given up", "a break that torch can't resume from", Program(GivesUp, p.rows), "vacuous", _eager,
         check="compiles"),
    Case("stance", "the model sets force_eager", Program(Forced, p.rows), "vacuous", _eager, check="compiles"),
    Case("recompile storm", "a Python number changes with every call", Program(Counts, p.rows, MANY), "recompile",
         _eager, check="recompiles"),
    Case("specialised", "every size is a graph of its own", Program(Specialises, p.rows, MANY), "recompile", _eager,
         check="recompiles"),
    Case("memory leak", "the backend keeps what the forward computed", LARGE, "memory", _keeps(True), check="memory"),
    Case("memory leak in the backward", "the backend keeps every gradient", LARGE, "memory", _keeps(False),
         check="memory"),
)

CONTROLS_OF_CHECKS: Final = (
    *(Case(f"untouched, check {check}", "nothing", Program(p.Perceptron, p.rows, MANY), "", _eager, check=check,
           control=True) for check in ("graph_breaks", "compiles", "recompiles")),
    Case("untouched, check memory", "nothing", LARGE, check="memory", control=True),
)
