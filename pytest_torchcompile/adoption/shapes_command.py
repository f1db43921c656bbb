"""The command ``pytest-torchcompile shapes``: one model, sizes that vary, and four ways to compile for them.

Each way runs in a process with an empty cache folder of its own, so that its seconds of compiling are cold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_torchcompile.adoption.chosen_cell import chosen_cell
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.empty_caches import empty_caches
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.layer.shape_ways import WAYS, ShapeExperiment, Way, bucket_of, default_buckets
from pytest_torchcompile.plan.matrix import Matrix
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.playbook.shape_notes import experiment_table
from pytest_torchcompile.quantity import count
from pytest_torchcompile.ranks.serving import set_environment
from pytest_torchcompile.report.safe_output import harmless_text
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["FOLDER", "experiment_lines", "read_traffic", "run_command"]

FOLDER: Final = Path(".compile-matrix") / "shapes"
"""Where the JSON of each experiment is written, for the playbook."""
_MODULE: Final = "pytest_torchcompile.adoption.shape_trial"
_CALLS: Final = 1000
"""Of each size that names no number."""
# The last lines of a traceback have the error.
_LAST_LINES: Final = 3
_ITEM: Final = re.compile(r"(\d+)(?:\*(\d+))?")


def run_command(given: argparse.Namespace) -> int:
    """Run the ways and print what came of them; returns 0, or 1 where a way could not be tried.

    Raises :class:`UsageError` for sizes that are none, and for a model, a cell or a dim that is not there.
    """
    traffic = read_traffic(given.sizes, given.calls)
    if not 0 < given.timeout < math.inf:
        raise UsageError(f"--timeout: {given.timeout:g} is not a number of seconds above 0, for example 1800")
    buckets = _read_buckets(given.buckets, traffic)
    matrix, planned = chosen_cell(given)
    cell = planned.cell if given.backend is None else replace(planned.cell, backend=given.backend)
    if Wrapping.read(cell.wrapper).ranks > 1:
        raise UsageError(f"{cell.id}: shapes runs one process for each way, and wrapper {cell.wrapper!r} needs "
                         "several; name the cell of this model with wrapper none")
    dim = _varying_dim(matrix.models[cell.model], given.dim)
    set_environment()
    experiment = _run_ways(matrix, cell, dim, traffic, buckets, given.timeout)
    path = FOLDER / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', cell.model)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(experiment.to_dict(), indent=1), encoding="utf-8")
    if given.json:
        print(json.dumps(experiment.to_dict(), indent=1))
    else:
        lines = experiment_table if given.markdown else experiment_lines
        for line in lines(experiment):
            print(harmless_text(line))
        print(f"\n{path.as_posix()} has the figures; `playbook --shapes` takes it in")
    return 1 if any(way.error for way in experiment.ways) else 0


def read_traffic(text: str, calls: int = _CALLS) -> dict[int, int]:
    """Sizes and how often each comes: ``8,12*50,40``. Raises :class:`UsageError` for anything else.

    >>> read_traffic("8,12*50", 10)
    {8: 10, 12: 50}
    """
    traffic: dict[int, int] = {}
    for word in text.split(","):
        found = _ITEM.fullmatch(word.strip())
        if found is None or not int(found[1]) or found[2] == "0":
            raise UsageError(f"--sizes: {word.strip()!r} is no size; expected sizes from 1 on, each with its number of "
                             "calls if it is not that of --calls, for example 8,12*50,40")
        size = int(found[1])
        if size in traffic:
            raise UsageError(f"--sizes: {size} is listed twice; write {size}*CALLS once")
        traffic[size] = int(found[2] or calls)
    if len(traffic) < 2:
        raise UsageError(f"--sizes: {text!r} is one size, which does not vary; name two or more, for example 8,12,40")
    return traffic


def _read_buckets(text: str | None, traffic: Mapping[int, int]) -> tuple[int, ...]:
    if text is None:
        return default_buckets(list(traffic))
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong:
        raise UsageError(f"--buckets: {wrong[0]!r} is no size; expected sizes, for example 16,64")
    buckets = tuple(sorted(set(map(int, words))))
    if max(traffic) > buckets[-1]:
        raise UsageError(f"--buckets: size {max(traffic)} fits into none of {text}; add a larger one")
    return buckets


def _varying_dim(entry: ModelEntry, named: str | None) -> str:
    """The dim whose size varies. Raises :class:`UsageError` where that is not clear."""
    free = [name for name, dim in entry.dims.items() if dim.expression is None]
    if named is not None:
        if named not in free:
            raise UsageError(f"--dim: model {entry.name!r} has no dim {named!r} that may vary; {nearest(named, free)}")
        return named
    several = []
    for name in free:
        if len(entry.dims[name].listed) > 1 or entry.dims[name].max:
            several.append(name)
    choice = several if len(several) == 1 else free
    if len(choice) != 1:
        raise UsageError(f"--dim: model {entry.name!r} has the dims {', '.join(free) or '(none)'}; say which of them "
                         "varies")
    return choice[0]


def _run_ways(
    matrix: Matrix, cell: Cell, dim: str, traffic: Mapping[int, int], buckets: tuple[int, ...], timeout: float
) -> ShapeExperiment:
    answers = {name: _try_apart(matrix, cell, dim, list(traffic), name, buckets, timeout) for name in WAYS}
    good = [answer for answer in answers.values() if "error" not in answer]
    # The machine is as fast as it was at its best; each way is held against eager of its own process.
    eager = {}
    for size in traffic:
        seconds = [float(answer["eager"][str(size)]) for answer in good]
        eager[size] = min(seconds, default=0.0)
    ways = []
    for name, answer in answers.items():
        if "error" in answer:
            ways.append(Way(name, 0, 0.0, {}, error=answer["error"]))
            continue
        steady, least, most = {}, {}, {}
        for size in traffic:
            value, low, high = answer["ratio"][str(size)]
            steady[size], least[size], most[size] = eager[size] * value, eager[size] * low, eager[size] * high
        ways.append(Way(name, answer["compiles"], answer["cold_seconds"], steady, tuple(answer["eager_sizes"]),
                        answer["late_compiles"], least=least, most=most, recompiled=answer["recompiled"]))
    torch = good[0]["torch"] if good else ""
    return ShapeExperiment(cell.model, dim, cell.backend, cell.phase, torch, dict(traffic), buckets, eager, tuple(ways))


def _try_apart(
    matrix: Matrix, cell: Cell, dim: str, sizes: Sequence[int], name: str, buckets: Sequence[int], timeout: float
) -> dict[str, Any]:
    """What :mod:`.shape_trial` answers of one way, in a process that nothing was compiled in."""
    padded = {size: size for size in sizes}
    if name == "buckets":
        padded = {size: bucket_of(size, buckets) for size in sizes}
    # What is padded to a few sizes is compiled for these alone.
    dynamic = "static" if name == "buckets" else name
    asked = {"cell": replace(cell, dynamic=dynamic).to_dict(), "entry": matrix.models[cell.model].to_dict(),
             "root": str(matrix.root), "path": sys.path, "dim": dim, "sizes": sizes, "padded": padded}
    # It may take minutes, and what is printed comes at the end.
    number = WAYS.index(name) + 1
    print(f"shapes: way {number} of {len(WAYS)}, {name}: compiling and timing {count(len(sizes), 'size')}",
          file=sys.stderr, flush=True)
    with empty_caches() as caches:
        try:
            done = subprocess.run([sys.executable, "-m", _MODULE], input=json.dumps(asked), capture_output=True,
                                  text=True, check=False, env={**os.environ, **caches}, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"it did not end within {timeout:g} s, and was stopped; name fewer sizes, or give it more "
                             "time by --timeout"}
    if not done.stdout:
        last = " / ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        return {"error": f"its process ended with {done.returncode}: {last or 'it said nothing'}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def experiment_lines(experiment: ShapeExperiment) -> Iterator[str]:
    """The experiment for a terminal."""
    yield (f"{experiment.model}: {experiment.dim} varies, backend {experiment.backend}, {experiment.phase}, torch "
           f"{experiment.torch}; each way with an empty cache of its own")
    rows = [experiment.head, *experiment.rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield from experiment.sentences()
