"""The process that :mod:`pytest_torchcompile.run.cold_compile` starts: it compiles a cell, and writes what came."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.gauges.autotune import limit_autotuning
from pytest_torchcompile.gauges.compiler import set_compile_threads
from pytest_torchcompile.gauges.generated_code import read_generated_code, stage_keys
from pytest_torchcompile.loading import import_all
from pytest_torchcompile.lowering.scheduler_notes import compile_anew
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.cold_compile import nothing_made
from pytest_torchcompile.run.runner import Run
from pytest_torchcompile.state.torch_state import same_random_draws
from pytest_torchcompile.wrappers.protocol import load as load_wrapper

__all__: list[str] = []


def _compile_here(job: Job) -> dict[str, Any]:
    """Compile a cell in this process, as its rank does."""
    root = Path(job.root)
    torch.set_num_threads(job.threads or torch.get_num_threads())
    set_compile_threads(job.compile_threads)
    import_all(job.modules, root)
    cell = Cell.from_dict(job.cell)
    wrapper = load_wrapper(cell.wrapper, root, ModelEntry.from_dict(job.entry).where)
    with compile_anew(), same_random_draws(), limit_autotuning(job.autotune_choices):
        texts, failure = Run(job, cell, wrapper).compile_calls()
    if failure:
        return nothing_made(failure)
    generated = read_generated_code(texts)
    graphs = [graph.to_dict() for graph in generated.graphs]
    return {"graphs": graphs, "texts": generated.texts, "stages": stage_keys(texts), "failure": ""}


def _main() -> None:
    asked = json.load(sys.stdin)
    sys.path += [entry for entry in asked["path"] if entry not in sys.path]
    job = Job(**{**asked["job"], "checks": tuple(asked["job"]["checks"]), "modules": tuple(asked["job"]["modules"])})
    made = _compile_here(job)
    Path(sys.argv[1]).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    _main()
