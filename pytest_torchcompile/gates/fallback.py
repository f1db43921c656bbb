"""The gate safe_fallback: however compiling fails, the model runs as eager does, and nothing of the attempt remains."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.gates import Place, Tried
from pytest_torchcompile.gates.breaks import BREAKS, EXIT, Break
from pytest_torchcompile.gates.upstream import injected
from pytest_torchcompile.layer import wrap
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.ranks.rank import Rank, Zygote
from pytest_torchcompile.ranks.zygote import WARM
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["tried"]

SILENT = logging.Logger("gates", logging.CRITICAL + 1)


def tried(place: Place) -> Iterator[Tried]:
    """Every break, found before the model is used and, where it is an error, while it is used."""
    for broken in BREAKS:
        with isolated([]):
            wrong = "" if broken.late else _before_use(broken, place)
        with isolated([]):
            wrong = wrong or (_in_use(broken, place) if broken.raises else "")
        yield Tried(broken.name, wrong)
    for broken, around in injected(place):
        with isolated([]), around:
            yield Tried(broken.name, _before_use(broken, place))
    yield Tried("process ended at compile", _own_process())


def _config(broken: Break) -> CompileConfig:
    return CompileConfig(enabled=True, backend=broken.backend(), **broken.settings)


def _made(broken: Break, place: Place) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    model = broken.model().to(place.device)
    return model, [torch.randn(size, 6, device=place.device) for size in broken.sizes]


def _before_use(broken: Break, place: Place) -> str:
    """With a sample batch: the model itself comes back, as it was."""
    model, (sample, *_) = _made(broken, place)
    before = _state(model)
    found = wrap.maybe_compile(model, _config(broken), SILENT, sample)
    if found is not model:
        return "maybe_compile did not return the model itself"
    changed = _differing(before, _state(model))
    return f"the attempt left {', '.join(changed)} changed" if changed else ""


def _in_use(broken: Break, place: Place) -> str:
    """Without one: training steps give what they give eagerly."""
    model, batches = _made(broken, place)
    twin, spare, start = copy.deepcopy(model), copy.deepcopy(model), torch.get_rng_state()
    devices = [torch.device(place.device)] if place.device != "cpu" else []
    ends = []
    for each in (twin, spare, wrap.maybe_compile(model, _config(broken), SILENT)):
        torch.set_rng_state(start)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(2)
            ends.append(_train(each, batches))
    eager, again, fallen = ends
    wavers = _differing(eager, again)  # what eager itself does not repeat says nothing of the fallback
    changed = [name for name in _differing(eager, fallen) if name not in wavers]
    return f"after the fallback, {', '.join(changed)} differ from eager's" if changed else ""


def _train(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **_state(model)}


def _state(model: nn.Module) -> dict[str, Any]:
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {**tensors, **gradients, "the training flag": model.training, "the random state": torch.get_rng_state()}


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, value in one.items() if not _same(value, other.get(name))]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other


def _own_process() -> str:
    """A compiler that ends its process costs that one cell its verdict, and the next cell runs."""
    before = os.environ.get(WARM)
    os.environ[WARM] = "0"
    zygote = Zygote()
    try:
        rank = Rank(zygote.folder)
        died, lived = (rank.run({"do": "cell", "job": _job(backend), "path": []}, 120)
                       for backend in ("pytest_torchcompile.gates.breaks:ends_the_process", "eager"))
        rank.close()
    finally:
        zygote.close()
        os.environ.pop(WARM) if before is None else os.environ.update({WARM: before})
    if died.status != "crash" or f"exit code {EXIT}" not in died.message:
        return f"a process that ended itself was reported as {died.status}: {died.message}"
    failure = lived.value["failure"] if lived.status == "done" else lived.message
    return f"after it the next cell did not run: {failure}" if failure else ""


def _job(backend: str) -> Job:
    here = "pytest_torchcompile.gates.breaks"
    entry = ModelEntry("net", f"{here}:net", f"{here}:rows", None, {"B": Dim(size=4)}, "gates")
    cell = Cell(model="net", backend=backend)
    return Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), ("compiles",))
