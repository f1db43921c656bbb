"""A matrix run beside the same cells in a plain parametrized pytest file: ``python benchmarks/matrix_run.py``.

Each variant runs in processes of its own with ``-n WORKERS``: all of them cold (an empty Inductor cache of its own),
and then all warm (the cache that its cold run left). Wall and CPU seconds, the compiler's processes included, and the
ratios to ours.

The variant ``pytest-torch`` has the same models in forward passes by that plugin's own assertions, if it is installed.
It knows no wrappers, so that with it all variants run the cells without one.

The variants ``reuse`` and ``reuse-code`` are ours with ``--compile-reuse`` and ``--compile-reuse=code``, in a copy of
this repository: a first run, then one after no change, after a comment in the zoo, and after another initialisation of
one model of it.

    --cells K      take every K-th cell of the matrix, for a quicker look (default 1: all)
    --modes M,...  take the cells of these modes alone
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_torchcompile.wrappers.wrapping import Wrapping

HERE = Path(__file__).parent
REPOSITORY = HERE.parent


ZOO = "pytest_torchcompile/zoo/__init__.py"
INITIALISED = "class TinyHead(nn.Module):"


def run(command: list[str], environment: dict[str, str], folder: Path = REPOSITORY) -> tuple[float, float, str]:
    """Wall seconds, CPU seconds of everything started, and the last line of output."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=os.environ | environment, cwd=folder, capture_output=True, text=True,
                          check=False)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1].strip("= ")
    return wall, cpu, last


def comparable(cell: dict[str, Any]) -> bool:
    """Whether a plain test does the same: on one rank, without fuzzing, and Triton's kernels on a GPU alone."""
    axes = cell["axes"]
    if cell["outcome"] not in ("run", "xfail") or cell["also"] or Wrapping.read(axes["wrapper"]).ranks > 1:
        return False
    return axes["model"] != "triton_op" or axes["device"].startswith("cuda")


def missing_rivals(variants: list[str]) -> dict[str, str]:
    """Variants that can't be run, each with the reason."""
    if "pytest-torch" in variants and importlib.util.find_spec("pytest_torch") is None:
        return {"pytest-torch": "it is not installed: pip install pytest-torch"}
    return {}


def run_reusing(name: str, command: list[str], environment: dict[str, str], copy: Path) -> None:
    """Run ours four times in a copy of the repository, of which results are reused; print a line for each."""
    ignored = shutil.ignore_patterns(".*", "examples", "docs", "__pycache__")
    shutil.copytree(REPOSITORY, copy, ignore=ignored)
    zoo = copy / ZOO
    text = zoo.read_text()
    edits = {
        "first run": text,
        "no change": text,
        "a comment": f"{text}\n# a comment\n",
        "one model's weights": _with_other_weights(text),
    }
    word = "--compile-reuse=code" if name == "reuse-code" else "--compile-reuse"
    for state, edited in edits.items():
        if zoo.read_text() != edited:
            zoo.write_text(edited)
        wall, cpu, last = run([*command, word], environment | {"PYTHONPATH": str(copy)}, copy)
        block = json.loads((copy / ".compile-matrix/report.json").read_text())["compile_matrix"]
        reused = sum("reused" in cell for cell in block["cells"])
        print(f"{name:12} {state:20} {wall:7.1f} s wall  {cpu:7.1f} s CPU  {reused} reused  ({last})", flush=True)


def _with_other_weights(text: str) -> str:
    """The zoo's code with another initialisation of one model."""
    before, _, after = text.partition(INITIALISED)
    if not after:
        raise ValueError(f"{ZOO} has no {INITIALISED!r}; name another model in this benchmark")
    changed = after.replace("super().__init__()", "super().__init__()\n        torch.manual_seed(7)", 1)
    return f"{before}{INITIALISED}{changed}"


def main() -> None:
    """Print a line for each run and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--matrix", default="matrix/default.yaml")
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--modes", default="")
    parser.add_argument("--variants", default="ours,one-a-check,one-a-cell")
    args = parser.parse_args()
    found = subprocess.run([sys.executable, "-m", "pytest_torchcompile", "cells", "--json", args.matrix],
                           capture_output=True, text=True, cwd=REPOSITORY, check=True)
    variants_asked = args.variants.split(",")
    unable = missing_rivals(variants_asked)
    for name, why in unable.items():
        print(f"{name}: not run: {why}", flush=True)
    asked = [name for name in variants_asked if name not in unable]
    modes = args.modes.split(",") if args.modes else ()
    cells = [cell for cell in json.loads(found.stdout) if comparable(cell)
             and (not modes or cell["axes"]["mode"] in modes)
             and ("pytest-torch" not in asked or cell["axes"]["wrapper"] == "none")][:: args.cells]
    results: dict[tuple[str, str], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "cells.json"
        plan.write_text(json.dumps(cells))
        naive = {"NAIVE_CELLS": str(plan), "NAIVE_MATRIX": args.matrix}
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", args.workers, "-p", "no:cacheprovider", "--tb=no"]
        by_hand = [*pytest, "-W", "default", "-r", "N"]
        file = [*by_hand, "benchmarks/naive/test_naive.py"]
        ours = [*pytest, f"--compile-matrix={args.matrix}", f"--compile-workers-per-gpu={args.workers}",
                *(f"{args.matrix}::{cell['id']}" for cell in cells)]
        variants: dict[str, tuple[list[str], dict[str, str]]] = {
            "ours": (ours, {}),
            "one-a-check": (file, naive),
            "pytest-torch": ([*by_hand, "benchmarks/naive/test_pytest_torch.py"], naive),
            "one-a-cell": (file, naive | {"NAIVE_ONE": "1", "OMP_WAIT_POLICY": "PASSIVE"}),
        }
        print(f"{len(cells)} cells of {args.matrix}, -n {args.workers}, {os.cpu_count()} cores", flush=True)
        for name in asked:
            if name in ("reuse", "reuse-code"):
                run_reusing(name, ours, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{name}"}, Path(folder) / name)
        # By turns, so that a machine that is busy for a while is so for all of them.
        for state in ("cold", "warm"):
            for name in asked:
                if name not in variants:
                    continue
                command, environment = variants[name]
                cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{name}"}
                wall, cpu, last = run(command, environment | cache)
                results[name, state] = wall, cpu
                print(f"{name:12} {state}  {wall:7.1f} s wall  {cpu:7.1f} s CPU  ({last})", flush=True)
    for name in asked:
        is_compared = ("ours", "cold") in results and (name, "cold") in results and name != "ours"
        for state in ("cold", "warm") if is_compared else ():
            wall, cpu = (ours_ / theirs for ours_, theirs in
                         zip(results["ours", state], results[name, state], strict=True))
            print(f"ours / {name}, {state}: {wall:.2f} of the wall, {cpu:.2f} of the CPU seconds")


if __name__ == "__main__":
    main()
