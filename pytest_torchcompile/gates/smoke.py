"""The gate smoketest: True of what works end to end, False of what is broken in any phase, or not compiled at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.gates import Place, Tried
from pytest_torchcompile.gates.breaks import BREAKS, Break, Net
from pytest_torchcompile.gates.upstream import injected
from pytest_torchcompile.layer import smoketest
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["tried"]


class Tied(nn.Module):
    """One weight in two places, in a structure of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> Any:
        """(B, 6) -> a dict."""
        return {"y": self.outer(torch.tanh(self.inner(x))), "n": 1}


def _frozen() -> nn.Module:
    net = Net()
    net.inner.requires_grad_(False)
    return net


HEALTHY: Final[dict[str, Callable[[], nn.Module]]] = {
    "training": Net, "serving": lambda: Net().eval(), "tied weights": Tied, "frozen parameters": _frozen,
}
"""What compiles and trains, or serves."""


def tried(place: Place) -> Iterator[Tried]:
    """Healthy models, broken ones, and ones that no compiler has seen."""
    for name, make in HEALTHY.items():
        yield Tried(name, _says(True, partial(_compiled, make, place, backend=place.backend), place))
    for broken in BREAKS:
        if not broken.late:
            yield Tried(broken.name, _refused(broken, place))
    for broken, around in injected(place):
        with around:
            yield Tried(broken.name, _refused(broken, place))
    yield Tried("not compiled", _says(False, lambda: Net().to(place.device), place, ("forward",)))
    yield Tried("nothing left to compile", _says(False, partial(_compiled, _disabled, place), place, ("forward",)))


def _refused(broken: Break, place: Place) -> str:
    make = partial(_compiled, broken.model, place, backend=broken.backend(), **broken.settings)
    return _says(False, make, place, broken.phases)


def _compiled(make: Callable[[], nn.Module], place: Place, **settings: Any) -> Any:
    return torch.compile(make().to(place.device), **settings)


def _disabled() -> nn.Module:
    net = Net()
    net.forward = torch.compiler.disable(net.forward)  # type: ignore[method-assign, no-untyped-call]
    return net


def _says(expected: bool, make: Callable[[], Any], place: Place, phases: tuple[str, ...] = ()) -> str:
    """What is wrong with what the smoketest says of a model, or nothing."""
    with isolated([]):
        torch.manual_seed(1)
        test = smoketest.CompileSmoketest(steps=2)
        said = test.run(make(), torch.randn(5, 6, device=place.device))
        result = test.last_result
    if said is not expected:
        return f"it says {said}: {result.reason if result else 'and has no result'}"
    if not expected and (result is None or result.phase not in phases):
        return f"it says False for another reason: {result.reason if result else 'it has no result'}"
    return ""
