"""Planted faults: errors that eager does not raise, errors lost, runs that prove nothing, models that waver."""

# ruff: noqa: N803 -- dims have capital letters

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import Tensor, fx, nn

from pytest_torchcompile.backends.toolkit import Toolkit, results
from pytest_torchcompile.faults import programs as p
from pytest_torchcompile.faults.case import Case, Program
from pytest_torchcompile.faults.spoilers import output, traced

__all__ = ["FAILURES"]

PERCEPTRON = Program(p.Perceptron, p.rows)
SIZES = Program(p.Perceptron, p.rows, ({"B": 4}, {"B": 7}, {"B": 6}))
_ENTROPY = random.SystemRandom()


def _refuses(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    raise NotImplementedError("this backend compiles nothing")


def _raises(*_: Any) -> Any:
    raise RuntimeError("no kernel for this")


def _raises_in_run(number: int) -> Any:
    def make() -> Toolkit:
        runs = 0

        def change(found: list[Any], _: object) -> list[Any]:
            nonlocal runs
            runs += 1
            return _raises() if runs == number else found

        return Toolkit(forward=results(change))

    return make


def _unlike_seven(y: Tensor) -> Any:
    return y if y.shape[0] != 7 else _raises()


class Strict(nn.Module):
    """Refuses ids that its table does not have, as eager's embedding does. (B, 6) -> (B, 6, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids)


def _ids_from(B: int, least: int) -> Tensor:
    return torch.arange(least, least + 6).expand(B, 6).clone()


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


@torch.library.custom_op("pytest_torchcompile::entropy", mutates_args=())
def _entropy(x: Tensor) -> Tensor:
    """A number around 1, another one in each call."""
    return x.new_full((1,), _ENTROPY.uniform(0.9, 1.1))


@_entropy.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((1,))


def _suppressed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Fails, and has torch hide it."""
    torch._dynamo.config.suppress_errors = True
    raise NotImplementedError("this backend compiles nothing")


FAILURES: Final = (
    Case("error at compile", "the backend raises", PERCEPTRON, "error", lambda: _refuses),
    Case("error at run", "the compiled code raises", PERCEPTRON, "error", output(_raises)),
    Case("error in the backward", "the compiled backward raises", PERCEPTRON, "error",
         lambda: Toolkit(backward=results(_raises))),
    Case("error for one size", "raises where B is 7", SIZES, "error", output(_unlike_seven)),
    Case("error in the third call", "the first two runs are right", PERCEPTRON, "error", _raises_in_run(3)),
    Case("error of eager lost", "an id out of range reads the last row instead", Program(
        Strict, _ids_from, ({"B": 4, "least": 0}, {"B": 4, "least": 8}), cpu_only="an id out of range is a device-side "
        "assertion on a GPU, after which the process can't use it"), "error",
         traced("embedding", lambda ids, w, *_: F.embedding(ids.clamp(max=9), w))),
    Case("silently eager", "torch.compiler.disable on the model", Program(Disabled, p.rows), "vacuous"),
    Case("errors suppressed", "the backend fails, and torch is told to hide it", PERCEPTRON, "vacuous",
         lambda: _suppressed),
    Case("nothing to compile", "a model without operators", Program(NoOperator, p.rows), "vacuous"),
    Case("only zeros", "eager and compiled agree, because both return zeros", Program(Zero, p.rows), "vacuous"),
    Case("zeros from compiled", "the backend returns zeros", PERCEPTRON, "value", output(torch.zeros_like)),
    Case("model that wavers", "no two eager runs agree", Program(Wavers, p.rows), "nondeterministic"),
)
