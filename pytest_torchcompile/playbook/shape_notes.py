"""Shape notes: what the command `shapes` has found, as a section of the playbook. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.markdown import inline_code, prose, table
from pytest_torchcompile.layer.shape_ways import ShapeExperiment
from pytest_torchcompile.quantity import count

__all__ = ["experiment_notes", "experiment_table", "read_experiment"]


def read_experiment(path: str) -> ShapeExperiment:
    """What ``pytest-torchcompile shapes`` has written. Raises :class:`ReportError` for anything else."""
    try:
        return ShapeExperiment.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ReportError(f"--shapes {path}: {error.strerror or error}") from None
    # Any JSON may be given by mistake, so any way of not fitting means the same: another file.
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ReportError(f"--shapes {path}: it is not what `pytest-torchcompile shapes` writes; give it a file of "
                          ".compile-matrix/shapes") from None


def experiment_notes(experiments: Sequence[ShapeExperiment]) -> Iterator[str]:
    """A section for each model; its figures are of the experiment, not of the report."""
    for experiment in experiments:
        yield ""
        yield f"### Sizes of {inline_code(experiment.model)}"
        yield ""
        yield (f"Measured by `pytest-torchcompile shapes` with torch {prose(experiment.torch)}, backend "
               f"{inline_code(experiment.backend)}, {experiment.phase}: {count(experiment.calls, 'call')} of "
               f"{len(experiment.traffic)} sizes of {inline_code(experiment.dim)}. Each way compiled with an empty "
               "cache of its own.")
        yield ""
        yield from experiment_table(experiment)
        yield ""


def experiment_table(experiment: ShapeExperiment) -> Iterator[str]:
    """The table of the ways, and what follows from it."""
    yield from table(experiment.head, [tuple(map(prose, row)) for row in experiment.rows()])
    for sentence in experiment.sentences():
        yield f"- {prose(sentence)}"
