"""The gate smoketest: True of what works end to end, False of what is broken in any phase, or not compiled at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.gates import Place, Tried
from pytest_torchcompile.gates.breaks import BREAKS, Break, Net, injected_breaks
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


def _evaluated_net() -> nn.Module:
    return Net().eval()


def _frozen_net() -> nn.Module:
    net = Net()
    net.inner.requires_grad_(False)
    return net


HEALTHY: Final[dict[str, Callable[[], nn.Module]]] = {
    "training": Net, "serving": _evaluated_net, "tied weights": Tied, "frozen parameters": _frozen_net,
}
"""What compiles and trains, or serves."""


def tried(place: Place) -> Iterator[Tried]:
    """Healthy models, broken ones, and ones that no compiler has seen."""
    for name, make in HEALTHY.items():
        yield Tried(name, _not_accepted(partial(_compile_model, make, place, backend=place.backend), place))
    for broken in BREAKS:
        # A smoketest has one batch: it can't meet what fails at another size.
        if not broken.late:
            yield Tried(broken.name, _break_not_refused(broken, place))
    for broken, injection in injected_breaks(place):
        with injection:
            yield Tried(broken.name, _break_not_refused(broken, place))
    yield Tried("not compiled", _not_refused(partial(_make_net, place), place, ("forward",)))
    left_out = partial(_compile_model, _disabled_net, place)
    yield Tried("nothing left to compile", _not_refused(left_out, place, ("forward",)))


def _make_net(place: Place) -> nn.Module:
    return Net().to(place.device)


def _disabled_net() -> nn.Module:
    net = Net()
    net.forward = torch.compiler.disable(net.forward)  # type: ignore[method-assign, no-untyped-call]
    return net


def _compile_model(make: Callable[[], nn.Module], place: Place, **settings: Any) -> Any:
    return torch.compile(make().to(place.device), **settings)


def _run_smoketest(make: Callable[[], Any], place: Place) -> tuple[bool, Any]:
    """What the smoketest says of a model, and its result."""
    # Isolated: a compiled model that failed before would leave caches and counters behind.
    with isolated([]):
        torch.manual_seed(1)
        test = smoketest.CompileSmoketest(steps=2)
        answer = test.run(make(), torch.randn(5, 6, device=place.device))
        return answer, test.last_result


def _not_accepted(make: Callable[[], Any], place: Place) -> str:
    """What is wrong where the smoketest has to say True, or nothing."""
    answer, result = _run_smoketest(make, place)
    if answer is True:
        return ""
    return f"it says {answer}: {_reason_of(result, 'and has no result')}"


def _not_refused(make: Callable[[], Any], place: Place, phases: tuple[str, ...]) -> str:
    """What is wrong where the smoketest has to say False, because of what it met in one of the phases, or nothing."""
    answer, result = _run_smoketest(make, place)
    if answer is not False:
        return f"it says {answer}: {_reason_of(result, 'and has no result')}"
    if result is None or result.phase not in phases:
        return f"it says False for another reason: {_reason_of(result, 'it has no result')}"
    return ""


def _break_not_refused(broken: Break, place: Place) -> str:
    make = partial(_compile_model, broken.model, place, backend=broken.backend(), **broken.settings)
    return _not_refused(make, place, broken.phases)


def _reason_of(result: Any, missing: str) -> str:
    if result is None:
        return missing
    return str(result.reason)
