"""The process that :mod:`pytest_torchcompile.run.culprit_cell` starts: it finds the operator to blame in a cell."""

from __future__ import annotations

from pytest_torchcompile.culprit.culprit_search import find_culprit
from pytest_torchcompile.run.job_process import answer_with, read_job
from pytest_torchcompile.run.prepared_run import prepared_run

__all__: list[str] = []


def _main() -> None:
    job, asked = read_job()
    with prepared_run(job) as run:
        found = find_culprit(run, asked["backend"], frozenset(asked["signs"]), asked["seconds"])
    answer_with(found.to_dict())


if __name__ == "__main__":
    _main()
