"""The process that :mod:`pytest_torchcompile.run.cold_compile` starts: it compiles a cell, and writes what came."""

from __future__ import annotations

from typing import Any

from pytest_torchcompile.gauges.generated_code import read_generated_code, stage_keys
from pytest_torchcompile.lowering.scheduler_notes import compile_anew
from pytest_torchcompile.observation import Job
from pytest_torchcompile.run.cold_compile import nothing_made
from pytest_torchcompile.run.job_process import answer_with, read_job
from pytest_torchcompile.run.prepared_run import prepared_run

__all__: list[str] = []


def _compile_here(job: Job) -> dict[str, Any]:
    """Compile a cell in this process, as its rank does."""
    with compile_anew(), prepared_run(job) as run:
        texts, failure = run.compile_calls()
    if failure:
        return nothing_made(failure)
    generated = read_generated_code(texts)
    graphs = [graph.to_dict() for graph in generated.graphs]
    return {"graphs": graphs, "texts": generated.texts, "stages": stage_keys(texts), "failure": ""}


def _main() -> None:
    job, _ = read_job()
    answer_with(_compile_here(job))


if __name__ == "__main__":
    _main()
