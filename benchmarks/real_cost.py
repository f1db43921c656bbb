"""What judging costs on real models, beside a plain loop that only compiles and runs them.

    python benchmarks/real_cost.py                       # every model that is installed, one after the other
    python benchmarks/real_cost.py -n 14 --device cuda   # 14 at a time
    python benchmarks/real_cost.py --tiny                # small sizes, and the zoo's models where a library is missing
    python benchmarks/real_cost.py --states cold --no-plain   # only ours, from an empty cache
    python benchmarks/real_cost.py --profile resnet18    # where the seconds of judging go

Ten models of torchvision and transformers with random weights (``real_models.py``) are trained for three calls of
different sizes. ``ours`` runs them as cells of a matrix; ``plain`` makes as many compiled calls, and judges nothing.
Each round runs both cold, from an empty Inductor cache, and then warm. Ratios are made within a round; their medians
over the rounds are told. With ``--states cold reused warm`` the cells also run with ``--compile-reuse``, after a cold
run that has kept its results: as CI does where nothing has changed. There is no such run of the plain loop.

For each cell: seconds compiling (the first pass over the calls), judging (references and comparisons), compiling again
(random numbers), stages (finding the stage of the compiler that brings a difference in), and the others.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_TINY = {"REAL_IMAGE": "64", "REAL_LENGTH": "32", "REAL_WIDTH": "128", "REAL_LAYERS": "2"}
_CHECKS = "compiles,equivalence,gradients,training_steps,aliasing"
_STEPS = 3
_PASSES = 3


def matrix(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The matrix of the cells, as plain data; JSON is YAML too."""
    models = {
        name: {"factory": f"real_models:{name}.build", "inputs": f"real_models:{name}.batch",
               "loss": f"real_models:{name}.loss", "dims": {"B": {"choices": args.batches}}}
        for name in names
    }
    axes = {"backend": [args.backend], "phase": ["training"], "device": [args.device]}
    return {"version": 1, "models": models, "axes": axes, "checks": _CHECKS.split(",")}


def ours(names: list[str], args: argparse.Namespace, cache: str, folder: Path, reuse: bool) -> dict[str, Any]:
    """Run the cells by pytest. Returns wall seconds, the seconds and verdicts of each cell, how many were reused, and
    why the others were not.

    ``reuse``: results of earlier runs are taken, and those of this run kept.
    """
    file, report = folder / "matrix.yaml", folder / "report.json"
    file.write_text(json.dumps(matrix(names, args)))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=no", "-n", str(args.workers),
               f"--rootdir={folder}", f"--compile-matrix={file}", f"--compile-timeout={args.limit}",
               f"--compile-workers-per-gpu={args.workers}", "--json-report", f"--json-report-file={report}"]
    if reuse:
        command.append("--compile-reuse")
    wall, text = timed(command, args, cache, folder)
    if not report.exists():
        raise SystemExit(f"pytest wrote no report:\n{text}")
    cells, taken = {}, 0
    for cell in json.loads(report.read_text())["compile_matrix"]["cells"]:
        taken += bool(cell.get("reused"))
        seen = cell["observation"] or {}
        failed = [name for name, check in cell["checks"].items() if check["verdict"] not in ("pass", "skip")]
        phases = seen.get("seconds") or {}
        cells[cell["axes"]["model"]] = {"phases": phases, "failed": failed, "failure": seen.get("failure")}
    causes = [line for line in text.splitlines() if " not reused: " in line]
    return {"wall": wall, "cells": cells, "taken": taken, "causes": causes}


def plain(names: list[str], args: argparse.Namespace, cache: str, folder: Path) -> dict[str, Any]:
    """Compile and run each model in a process of its own, as many at a time as there are workers."""

    def one(name: str) -> float:
        wall, text = timed([sys.executable, __file__, "--only", name, "--device", args.device, "--backend",
                            args.backend, "--batches", *map(str, args.batches)], args, cache, folder)
        if "seconds of the loop" not in text:
            print(f"the plain loop of {name} failed:\n{text[-2000:]}")
        return wall

    start = time.perf_counter()
    with ThreadPoolExecutor(max(1, args.workers)) as pool:
        each = dict(zip(names, pool.map(one, names), strict=True))
    return {"wall": time.perf_counter() - start, "each": each}


def timed(command: list[str], args: argparse.Namespace, cache: str, folder: Path) -> tuple[float, str]:
    """Wall seconds of a command, and what it printed."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if args.tiny:
        environment |= _TINY
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        try:
            subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, check=False)
        except KeyboardInterrupt:
            output.seek(0)
            print(f"stopped after {time.perf_counter() - start:.0f} s, having printed:\n{output.read()}", flush=True)
            raise
        output.seek(0)
        return time.perf_counter() - start, output.read()


def only(name: str, args: argparse.Namespace) -> None:
    """The plain loop: as many compiled calls and training steps as a cell makes."""
    import real_models
    import torch

    real = getattr(real_models, name)
    torch.manual_seed(0)
    model = real.build().to(args.device)
    batches = [moved(real.batch(B=size), args.device) for size in args.batches]
    compiled = torch.compile(model, backend=args.backend)
    start = time.perf_counter()
    for number in range(_PASSES * len(batches) + _STEPS):
        batch = batches[number % len(batches)]
        output = compiled(**batch) if isinstance(batch, dict) else compiled(batch)
        real.loss(output, batch).backward()
        if number >= _PASSES * len(batches):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad if parameter.grad is not None else 0.0, alpha=-1e-3)
        model.zero_grad()
    print(f"{time.perf_counter() - start:.1f} seconds of the loop")


def moved(batch: Any, device: str) -> Any:
    """A batch on another device."""
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return batch.to(device)


def shown(name: str, cell: dict[str, Any]) -> tuple[str, float | None]:
    """A row of the table, and the ratio of judging to compiling."""
    phases = cell["phases"]
    compiling, judging = phases.get("compiled", 0.0), phases.get("compare", 0.0)
    ratio = judging / compiling if compiling else None
    others = sum(phases.get(key, 0.0) for key in ("eager", "steady", "training", "coverage"))
    # Compiled another time: with Inductor's own random numbers, and before with those, where eager's had to decide.
    again = phases.get("own draws", 0.0) + phases.get("with Inductor's own random numbers", 0.0)
    told = f"{name:13}{compiling:10.1f}{judging:10.1f}{again:8.1f}{phases.get('stages', 0.0):9.1f}{others:9.1f}"
    told += "       -" if ratio is None else f"{ratio:8.2f}"
    failed = ", ".join(cell["failed"])
    failure = cell["failure"]
    return f"{told}  {failed}{' ' + failure['message'][:90] if failure else ''}", ratio


def print_table(names: list[str], cells: dict[str, Any]) -> dict[str, float]:
    """Print a row for each model. Returns by name the ratios of judging to compiling, where there is one."""
    print("model          compiling   judging   again   stages   others   ratio  failed checks")
    ratios = {}
    for name in names:
        row, ratio = shown(name, cells.get(name, {"phases": {}, "failed": [], "failure": None}))
        print(row, flush=True)
        if ratio is not None:
            ratios[name] = ratio
    return ratios


def profile(name: str, args: argparse.Namespace) -> None:
    """Run one model in this process, and print where the seconds of judging went."""
    if args.tiny:
        os.environ.update(_TINY)
    import real_models
    import torch

    from pytest_torchcompile import CompileConfig, compare
    from pytest_torchcompile.oracle import trial_account

    profiler, judge, seconds = cProfile.Profile(), trial_account.compare, 0.0

    def profiled(*given: Any, **options: Any) -> Any:
        nonlocal seconds
        start = time.perf_counter()
        profiler.enable()
        try:
            return judge(*given, **options)
        finally:
            profiler.disable()
            seconds += time.perf_counter() - start

    trial_account.compare = profiled
    real = getattr(real_models, name)
    torch.manual_seed(0)
    model = real.build().to(args.device)
    calls = [moved(real.batch(B=size), args.device) for size in args.batches]
    start = time.perf_counter()
    found = compare(model, calls, CompileConfig(backend=args.backend), loss=real.loss, steps=_STEPS, locate=False)
    whole = time.perf_counter() - start
    print(found)
    print(f"\n{name}: {seconds:.1f} of {whole:.1f} seconds were judging (profiled, so slower than usual)\n")
    table = pstats.Stats(profiler)
    table.strip_dirs().sort_stats("cumulative").print_stats(40)
    table.sort_stats("tottime").print_stats(25)


def rounds(names: list[str], args: argparse.Namespace) -> None:
    """Run both variants and print the tables and ratios."""
    import torch

    print(f"{len(names)} models, {args.workers} at a time, {args.device}, {os.cpu_count()} cores, "
          f"torch {torch.__version__}, batches of {args.batches}", flush=True)
    judging: dict[str, list[float]] = {name: [] for name in names}
    walls: dict[str, list[float]] = {state: [] for state in args.states}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            cache = args.cache or f"{folder}/cache-ours"
            for state in args.states:
                mine = theirs = None
                if args.ours:
                    # The warm run judges anew, and is not to take what the cold one has kept.
                    reuse = "reused" in args.states and state != "warm"
                    mine = ours(names, args, cache, folder, reuse)
                    print(f"\nround {number + 1}, {state}: ours {mine['wall']:.1f} s, {mine['taken']} results reused")
                    print("\n".join(mine["causes"]), flush=True)
                    # The seconds of a result that was reused are those of the run that made it.
                    if state != "reused":
                        ratio_by_name = print_table(names, mine["cells"])
                    if state == "cold":
                        for name, ratio in ratio_by_name.items():
                            judging[name].append(ratio)
                if args.plain and state != "reused":
                    theirs = plain(names, args, f"{folder}/cache-plain", folder)
                    each = ", ".join(f"{name} {seconds:.1f}" for name, seconds in theirs["each"].items())
                    print(f"plain, {state}: {theirs['wall']:.1f} s ({each})", flush=True)
                if mine and theirs:
                    walls[state].append(mine["wall"] / theirs["wall"])
                    print(f"ratio {walls[state][-1]:.2f}", flush=True)
    print("\nmedians over the rounds")
    for name, found in judging.items():
        if found:
            print(f"{name:13} judging / compiling, cold: {statistics.median(found):.2f}")
    for state, ratios in walls.items():
        if ratios:
            print(f"ours / plain, {state}: {statistics.median(ratios):.2f} of the wall seconds")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names, separated by commas (default: all that are installed)")
    parser.add_argument("-n", "--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 6, 10])
    parser.add_argument("--states", nargs="+", choices=("cold", "reused", "warm"), default=["cold", "warm"])
    parser.add_argument("--ours", action=argparse.BooleanOptionalAction, default=True, help="the cells")
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True, help="the plain loop beside it")
    parser.add_argument("--limit", type=int, default=3000, metavar="SECONDS", help="of a cell: then it is stopped")
    parser.add_argument("--cache", default="", metavar="FOLDER", help="Inductor's cache of the cells, which is kept; "
                        "of a full one take --states warm (default: a new one for each round)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", default="", metavar="MODEL")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        only(args.only, args)
        return
    if args.profile:
        profile(args.profile, args)
        return
    import real_models

    names = args.models.split(",") if args.models else real_models.available(args.tiny)
    if not names:
        raise SystemExit("neither torchvision nor transformers is installed; --tiny takes models of the zoo instead")
    rounds(names, args)


if __name__ == "__main__":
    main()
