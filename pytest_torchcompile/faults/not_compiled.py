"""Planted faults: errors, runs that prove nothing, and compiling that is too little, too often, or loses memory."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Pass, Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.fault_parts import (
    Case,
    Program,
    change_output,
    named_backend,
    settings_are_of_one_thread,
    swap_operator,
)

__all__ = ["COMPILING", "CONTROLS_OF_CHECKS", "FAILURES", "LEAKING_BACKWARD", "LEAKING_FORWARD", "OTHER_DRAWS"]

# Not torch's generator, which a seed would make repeat itself.
_ENTROPY = random.SystemRandom()


# errors


def _refuse_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
    raise NotImplementedError("this backend compiles nothing")


def _refuse_and_suppress(graph: fx.GraphModule, inputs: Sequence[Any]) -> NoReturn:
    """Fails, and has torch hide it."""
    torch._dynamo.config.suppress_errors = True
    _refuse_graph(graph, inputs)


def _refusing() -> Callable[..., NoReturn]:
    return _refuse_graph


def _suppressing() -> Callable[..., NoReturn]:
    return _refuse_and_suppress


def _raise_error(*_: Any) -> NoReturn:
    raise RuntimeError("no kernel for this")


def _raising_in_third_run() -> Toolkit:
    runs = 0

    def raise_if_third(returned: list[Any], _: object) -> list[Any]:
        nonlocal runs
        runs += 1
        if runs == 3:
            _raise_error()
        return returned

    return Toolkit(forward=results(raise_if_third))


def _raise_for_seven(y: Tensor) -> Tensor:
    if y.shape[0] == 7:
        _raise_error()
    return y


class Strict(nn.Module):
    """Refuses ids that its table does not have, as eager's embedding does. (B, 6) -> (B, 6, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids)


def _ids_from(B: int, least: int) -> Tensor:
    return torch.arange(least, least + 6).expand(B, 6).clone()


def _clamped_embedding(ids: Tensor, w: Tensor, *_: Any) -> Tensor:
    return F.embedding(ids.clamp(max=9), w)


OUT_OF_RANGE = Program(
    Strict, _ids_from, ({"B": 4, "least": 0}, {"B": 4, "least": 8}),
    cpu_only="an id out of range is a device-side assertion on a GPU, after which the process can't use it",
)


# runs that prove nothing


class Disabled(p.Perceptron):
    """Asks torch.compile to leave it alone."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class NoOperator(nn.Module):
    """Has nothing to compile."""

    def forward(self, x: Tensor) -> Any:
        return x


class Zero(p.Perceptron):
    """Returns zeros, which are right whatever is wrong before them."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 0


class Wavers(nn.Module):
    """Draws from the system's entropy: no seed makes two runs equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Any:
        return self.a(x) * _entropy(x.detach())


# A custom operator, so that Dynamo puts it into the graph: it would break the graph at random.SystemRandom.
@torch.library.custom_op("pytest_torchcompile::entropy", mutates_args=())
def _entropy(x: Tensor) -> Tensor:
    """A number around 1, another one in each call."""
    return x.new_full((1,), _ENTROPY.uniform(0.9, 1.1))


@_entropy.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((1,))


FAILURES: Final = (
    Case("error at compile", "the backend raises", p.PERCEPTRON, "error", _refusing),
    Case("error at run", "the compiled code raises", p.PERCEPTRON, "error", change_output(_raise_error)),
    Case("error in the backward", "the compiled backward raises", p.PERCEPTRON, "error",
         partial(Toolkit, backward=results(_raise_error))),
    Case("error for one size", "raises where B is 7", p.THREE_SIZES, "error", change_output(_raise_for_seven)),
    Case("error in the third call", "the first two runs are right", p.PERCEPTRON, "error", _raising_in_third_run),
    Case("error of eager lost", "an id out of range reads the last row instead", OUT_OF_RANGE, "error",
         swap_operator("embedding", _clamped_embedding)),
    Case("silently eager", "torch.compiler.disable on the model", Program(Disabled, p.rows), "vacuous"),
    Case("errors suppressed", "the backend fails, and torch is told to hide it", p.PERCEPTRON, "vacuous", _suppressing),
    Case("nothing to compile", "a model without operators", Program(NoOperator, p.rows), "vacuous"),
    Case("only zeros", "eager and compiled agree, because both return zeros", Program(Zero, p.rows), "vacuous"),
    Case("zeros from compiled", "the backend returns zeros", p.PERCEPTRON, "value", change_output(torch.zeros_like)),
    Case("model that wavers", "no two eager runs agree", Program(Wavers, p.rows), "nondeterministic"),
)


# too little is compiled


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


# compiled too often


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


# memory that is lost


def _keeping_all() -> Pass:
    """A pass that never lets go of what its graph has computed."""
    kept: list[Any] = []

    def keep(returned: list[Any], _: object) -> list[Any]:
        kept.append(list(returned))
        return returned

    return results(keep)


# Backends, as cells name them.
LEAKING_FORWARD: Final = Toolkit(forward=_keeping_all())
LEAKING_BACKWARD: Final = Toolkit(backward=_keeping_all())


# code that is other code in each process


class SumsASet(p.Perceptron):
    """Goes through a set of texts, whose order is another one in each process."""

    def forward(self, x: Tensor) -> Any:
        names = {"tanh", "sin", "cos", "atan", "erf", "sigmoid"}
        for name in names:
            x = x + getattr(torch, name)(x)
        return super().forward(x)


def scale_in_set_order(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend that multiplies an output by powers of two whose product is one, in the order of a set."""
    from torch._dynamo.backends.debugging import aot_eager

    (end,) = graph.graph.find_nodes(op="output")
    outputs, factors = list(end.args[0]), {"0.5", "2.0", "0.25", "4.0", "0.125", "8.0"}
    with graph.graph.inserting_before(end):
        for factor in factors:
            outputs[0] = graph.graph.call_function(torch.mul, (outputs[0], float(factor)))
    end.args = (tuple(outputs),)
    graph.recompile()
    return aot_eager(graph, inputs)


class ManyGuards(p.Perceptron):
    """Goes through 2,000 modules that do nothing, each of which has guards that are asked in every call."""

    count = 2000

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.ModuleList(nn.Identity() for _ in range(self.count))

    def forward(self, x: Tensor) -> Any:
        for module in self.idle:
            x = module(x)
        return super().forward(x)


class FewGuards(ManyGuards):
    """Goes through four."""

    count = 4


class ServesInAThread(p.Perceptron):
    """A compiled layer, for each number a graph, in a thread that a raised limit does not reach."""

    numbers = range(2, 14)

    def __init__(self) -> None:
        super().__init__()
        # More than the numbers: here, and since torch 2.12 in this thread alone.
        torch._dynamo.config.recompile_limit = 64
        self.scaled = torch.compile(lambda x, number: torch.tanh(x) * number, backend="eager", dynamic=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.serve(x))

    @torch.compiler.disable  # type: ignore[untyped-decorator, no-untyped-call, unused-ignore]
    def serve(self, x: Tensor) -> Tensor:
        """One number after the other, without gradients as a server does."""
        came = [x]

        def work() -> None:
            with torch.no_grad():
                came.extend(self.scaled(x.detach(), number) for number in self.numbers)

        server = threading.Thread(target=work, name="server")
        server.start()
        server.join()
        return x + came[-1] / 100


class ServesFewNumbers(ServesInAThread):
    """No more than torch's own limit, which holds there."""

    numbers = range(2, 5)


# The backend of these is right: what is wrong, Dynamo does before it.
EAGER: Final = named_backend("eager")
FAST_GUARDS: Final = {"guard_us": 300.0}
MANY_SIZES = ({"B": 4}, {"B": 7}, {"B": 6}, {"B": 9}, {"B": 10})

COMPILING: Final = (
    Case("graph break", "a print between two layers", Program(Prints, p.rows), "graph_break", EAGER,
         check="graph_breaks"),
    Case("branch on data", "a Python if on a tensor", Program(Branches, p.rows), "graph_break", EAGER,
         check="graph_breaks"),
    Case("layer left out", "one of three layers is disabled", Program(PartDisabled, p.rows), "vacuous", EAGER,
         check="compiles"),
    Case("frame given up", "a break that torch can't resume from", Program(GivesUp, p.rows), "vacuous", EAGER,
         check="compiles"),
    Case("stance", "the model sets force_eager", Program(Forced, p.rows), "vacuous", EAGER, check="compiles"),
    Case("setting of another thread", "a raised recompile limit does not reach the thread that compiles",
         Program(ServesInAThread, p.rows), "vacuous", EAGER, "did not get a setting", check="compiles",
         limits={"coverage": 0.0}, upstream="a setting holds for one thread since torch 2.12",
         has_fault=settings_are_of_one_thread),
    Case("slow guards", "2,000 idle modules, whose guards are asked in every call", Program(ManyGuards, p.rows),
         "guards", EAGER, check="compiles", limits=FAST_GUARDS),
    Case("recompile storm", "a Python number changes with every call", Program(Counts, p.rows, MANY_SIZES),
         "recompile", EAGER, check="recompiles"),
    Case("specialised", "every size is a graph of its own", Program(Specialises, p.rows, MANY_SIZES), "recompile",
         EAGER, check="recompiles"),
    Case("memory leak", "the backend keeps what the forward computed", p.PERCEPTRON, "memory",
         named_backend(f"{__name__}:LEAKING_FORWARD"), check="memory"),
    Case("memory leak in the backward", "the backend keeps every gradient", p.PERCEPTRON, "memory",
         named_backend(f"{__name__}:LEAKING_BACKWARD"), check="memory"),
    Case("graph in the order of a set", "the model goes through a set of names", Program(SumsASet, p.rows), "code",
         EAGER, check="determinism"),
    Case("pass in the order of a set", "the backend changes the graph in the order of a set", p.PERCEPTRON, "code",
         named_backend(f"{__name__}:scale_in_set_order"), check="determinism"),
)


def _healthy(check: str) -> Case:
    program = Program(p.Perceptron, p.rows, MANY_SIZES)
    return Case(f"untouched, check {check}", "nothing", program, "", EAGER, check=check, control=True)


def _dropout_by_hand(x: Tensor, p: float, *_: Any) -> Tensor:
    return x * (torch.rand_like(x) >= p) / (1 - p)


OTHER_DRAWS: Final = swap_operator("dropout", _dropout_by_hand)()
"""A backend, as cells name one: dropout draws its mask by another operator, and is right."""

CONTROLS_OF_CHECKS: Final = (
    _healthy("graph_breaks"),
    _healthy("compiles"),
    _healthy("recompiles"),
    _healthy("memory"),
    _healthy("determinism"),
    Case("guards of four idle modules", "nothing", Program(FewGuards, p.rows), "", EAGER, check="compiles",
         limits=FAST_GUARDS, control=True),
    Case("another thread within its limit", "nothing", Program(ServesFewNumbers, p.rows), "", EAGER, check="compiles",
         limits={"coverage": 0.0}, control=True),
    Case("dropout drawn in another way", "other random numbers", p.DROPPING, "",
         named_backend(f"{__name__}:OTHER_DRAWS"), check="randomness", control=True),
)
