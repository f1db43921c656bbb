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
from pytest_torchcompile.gates.breaks import BREAKS, EXIT, Break, injected_breaks
from pytest_torchcompile.layer import wrap
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.ranks.rank import Rank
from pytest_torchcompile.ranks.serving import WARM
from pytest_torchcompile.ranks.starting import open_processes
from pytest_torchcompile.state.snapshot import changed_names, copy_state
from pytest_torchcompile.state.torch_state import isolated

__all__ = ["tried"]

SILENT = logging.Logger("gates", logging.CRITICAL + 1)


def tried(place: Place) -> Iterator[Tried]:
    """Every break, found before the model is used and, where it is an error, while it is used."""
    for broken in BREAKS:
        wrong = ""
        # What fails later can't be found with one sample batch; what only computes wrongly can't be without one.
        if not broken.late:
            with isolated([]):
                wrong = _before_use(broken, place)
        if broken.raises and not wrong:
            with isolated([]):
                wrong = _in_use(broken, place)
        yield Tried(broken.name, wrong)
    for broken, injection in injected_breaks(place):
        with isolated([]), injection:
            yield Tried(broken.name, _before_use(broken, place))
    yield Tried("process ended at compile", _own_process())


def _compile_config(broken: Break) -> CompileConfig:
    return CompileConfig(enabled=True, backend=broken.backend(), **broken.settings)


def _make_model(broken: Break, place: Place) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(1)
    model = broken.model().to(place.device)
    return model, [torch.randn(size, 6, device=place.device) for size in broken.sizes]


def _before_use(broken: Break, place: Place) -> str:
    """With a sample batch: the model itself comes back, as it was."""
    model, (sample, *_) = _make_model(broken, place)
    before = copy_state(model)
    returned = wrap.maybe_compile(model, _compile_config(broken), SILENT, sample)
    wrong = []
    changed = changed_names(before, copy_state(model))
    if changed:
        wrong.append(f"the attempt left {', '.join(changed)} changed")
    if returned is not model:
        wrong.append("maybe_compile did not return the model itself")
    return "; ".join(wrong)


def _in_use(broken: Break, place: Place) -> str:
    """Without one: training steps give what they give eagerly."""
    model, batches = _make_model(broken, place)
    twin, spare, start = copy.deepcopy(model), copy.deepcopy(model), torch.get_rng_state()
    devices = []
    if place.device != "cpu":
        devices.append(torch.device(place.device))
    ends = []
    for each in (twin, spare, wrap.maybe_compile(model, _compile_config(broken), SILENT)):
        torch.set_rng_state(start)
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(2)
            ends.append(_train_steps(each, batches))
    eager, again, fallen_back = ends
    # What eager itself does not repeat says nothing of the fallback.
    unstable = changed_names(eager, again)
    changed = [name for name in changed_names(eager, fallen_back) if name not in unstable]
    if changed:
        return f"after the fallback, {', '.join(changed)} differ from eager's"
    return ""


def _train_steps(model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **copy_state(model)}


def _own_process() -> str:
    """A compiler that ends its process costs that one cell its verdict, and the next cell runs."""
    before = os.environ.get(WARM)
    # A warm zygote would import what this one rank does not need.
    os.environ[WARM] = "0"
    processes = open_processes()
    try:
        rank = Rank(processes.folder)
        died = rank.run(_job_message("pytest_torchcompile.gates.breaks:ends_the_process"), 120)
        lived = rank.run(_job_message("eager"), 120)
        rank.close()
    finally:
        processes.close()
        if before is None:
            del os.environ[WARM]
        else:
            os.environ[WARM] = before
    if died.status != "crash" or f"exit code {EXIT}" not in died.message:
        return f"a process that ended itself was reported as {died.status}: {died.message}"
    failure = lived.message
    if lived.status == "done":
        failure = lived.value["failure"]
    if failure:
        return f"after it the next cell did not run: {failure}"
    return ""


def _job_message(backend: str) -> dict[str, Any]:
    here = "pytest_torchcompile.gates.breaks"
    entry = ModelEntry("net", f"{here}:net", f"{here}:rows", None, {"B": Dim(size=4)}, "gates")
    cell = Cell(model="net", backend=backend)
    job = Job(cell.to_dict(), entry.to_dict(), str(Path.cwd()), ("compiles",))
    return {"do": "cell", "job": job, "path": []}
