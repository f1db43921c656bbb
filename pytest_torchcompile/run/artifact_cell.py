"""The two ends of a shipped cell, each in a process of its own: what makes the artifact, and the program that loads it.

:mod:`pytest_torchcompile.artifacts.shipping` names both functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.contract.worker import NotLoaded, OwnFailure, own_failure_text
from pytest_torchcompile.fuzz.drawn_call import from_plain
from pytest_torchcompile.loading import import_all
from pytest_torchcompile.run.contract_cell import program_of as cell_program

if TYPE_CHECKING:
    from pytest_torchcompile.contract.history_run import Program

__all__ = ["make_artifact", "program_of"]

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def make_artifact(order: Mapping[str, Any]) -> dict[str, Any]:
    """The first process; :class:`~pytest_torchcompile.artifacts.shipping.Shipment` has what it takes and returns."""
    import torch

    from pytest_torchcompile.artifacts.route import Refused, load_route, version_of
    from pytest_torchcompile.state.torch_state import isolated, same_random_draws

    folder = Path(order["folder"])
    os.environ[_CACHE] = str(folder / "cache")
    route = load_route(order["route"])
    program = cell_program(order["job"])
    made = {"missing": route.missing(version_of(torch.__version__), program.train), "failure": "", "seconds": 0.0,
            "cached": route.cached, "takes_module": route.takes_module}
    if made["missing"]:
        return made
    # What the user's own functions raise is told before torch is asked, with their names.
    program.make_model()
    program.batch(dict(from_plain(order["declared"])[0].sizes), program.seed)
    begun = time.perf_counter()
    try:
        # As the second process runs it: torch's settings are part of every key.
        with isolated([]), same_random_draws():
            route.ship(program, from_plain(order["declared"]), folder)
    # A route that says no has done its work; what it cannot ship is a result, no error.
    except Refused as why:
        made["failure"] = str(why)
    made["seconds"] = time.perf_counter() - begun
    return made


def program_of(order: Mapping[str, Any]) -> Program:
    """The second process: the cell's program, whose compiled side is what was shipped.

    Raises :class:`~pytest_torchcompile.contract.worker.NotLoaded` where torch does not take that.
    """
    from pytest_torchcompile.artifacts.route import Refused, load_route

    folder = Path(order["folder"])
    route = load_route(order["route"])
    cache = "moved" if route.moved else "cache"
    os.environ[_CACHE] = str(folder / cache)
    job = order["job"]
    # An artifact names the modules of its model, which are found as the cell finds them.
    import_all(tuple(job["modules"]), Path(job["root"]))
    program = cell_program(job)
    try:
        compiler = route.load(folder)
    except Refused as why:
        raise NotLoaded(str(why)) from why
    # Anything else is raised by our loading or torch's, not by the model, and is told so.
    except Exception as why:
        raise OwnFailure(own_failure_text()) from why
    return replace(program, compiler=compiler)
