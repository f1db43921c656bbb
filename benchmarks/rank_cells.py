"""What several ranks cost: ``python benchmarks/rank_cells.py``.

A cell of two ranks in warm rank processes, beside the same cell in two processes that are started for it (spawn: a
new interpreter that imports torch), and in two forks of a process that has imported torch
(``--compile-isolation=cell``).
Overhead is the wall time of a cell less the time that its ranks spend on building, compiling and running it (the
slowest rank's phases). Variants take turns, medians.

    --cells N        cells of each variant (default 9)
    --device DEVICE  cpu (over gloo, the default) or cuda (over NCCL; needs two GPUs)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.ranks.rank_group import Group
from pytest_torchcompile.ranks.starting import open_processes

ROOT = Path(__file__).parent.parent / "tests" / "ranks"
CHECKS = ("compiles", "equivalence", "gradients", "rank_divergence")


def job(device: str) -> Job:
    """A small model under DDP, compiled by the backend eager, so that what is measured is not the compiler."""
    cell = Cell(model="net", backend="eager", wrapper="ddp", device=device)
    entry = ModelEntry("net", "rank_faults:Net", "rank_faults:rows", dims={"B": Dim(choices=(4, 6))}, where="here:1:1")
    return Job(cell=cell.to_dict(), entry=entry.to_dict(), root=str(ROOT), checks=CHECKS, threads=1)


def _spawned(rank: int, device: str, store: str, answers: Any) -> None:
    from dataclasses import replace

    from pytest_torchcompile.ranks.serving import set_environment

    set_environment()
    from pytest_torchcompile.run import runner

    seen, _ = runner.run_cell(replace(job(device), rank=rank, world=2, rendezvous=store))
    answers.put((seen["failure"], sum(seen["seconds"].values())))


def spawned(device: str) -> tuple[float, float]:
    """Wall seconds and the slowest rank's own seconds of a cell in two new interpreters."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        ranks = [context.Process(target=_spawned, args=(r, device, os.path.join(folder, "store"), answers))
                 for r in range(2)]
        for rank in ranks:
            rank.start()
        own = [answers.get(timeout=180) for _ in ranks]
        for rank in ranks:
            rank.join()
        wall = time.perf_counter() - start
    assert all(failure is None for failure, _ in own), own
    return wall, max(seconds for _, seconds in own)


def grouped(group: Group, device: str, fresh: bool) -> tuple[float, float]:
    """The same in forks of the zygote: kept from cell to cell, or new ones for each."""
    start = time.perf_counter()
    outcomes = group.run(job(device), 2, sys.path, 180)
    if fresh:
        group.close()
    wall = time.perf_counter() - start
    assert all(outcome.status == "done" and outcome.value["failure"] is None for outcome in outcomes), outcomes
    return wall, max(sum(outcome.value["seconds"].values()) for outcome in outcomes)


def main() -> None:
    """Print a line for each variant and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    processes = open_processes()
    warm, fresh = Group(processes.folder), Group(processes.folder)
    variants = {"warm ranks": lambda: grouped(warm, args.device, fresh=False),
                "forks for each cell": lambda: grouped(fresh, args.device, fresh=True),
                "spawn for each cell": lambda: spawned(args.device)}
    try:
        for run in variants.values():
            run()  # the first of each also waits for the zygote
        walls: dict[str, list[float]] = {name: [] for name in variants}
        overheads: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(args.cells):
            for name, run in variants.items():
                wall, own = run()
                print(f"  {name:20}  wall {wall:6.2f} s   overhead {wall - own:6.2f} s", flush=True)
                walls[name].append(wall)
                overheads[name].append(wall - own)
    finally:
        for group in (warm, fresh):
            group.close()
        processes.close()
    base = statistics.median(overheads["warm ranks"])
    for name in variants:
        wall, over = statistics.median(walls[name]), statistics.median(overheads[name])
        print(f"{name:20}  wall {wall:6.2f} s   overhead {over:6.2f} s   {over / base:5.1f} x the warm ranks' overhead")


if __name__ == "__main__":
    main()
