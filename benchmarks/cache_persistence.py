"""What to keep of the compile caches between runs: torch's cache folder, or its portable artifacts, one file?

The same cells in a process of their own, by what that process finds:

    cold        nothing
    kept        the cache folder and the temporary folder as the cold run left them: a runner of your own
    moved       a copy of the cache folder at another place, and an empty temporary folder: a CI engine's cache
    artifacts   only what torch.compiler.save_cache_artifacts() returned in the cold run: loaded before the cells

The cells run inside pytest (--compile-inprocess), so that one process compiles all of them and one file of artifacts
holds everything: the best that artifacts can do. A line is the median of the rounds; libraries are the shared objects
that a run compiled, on a CPU each a run of the C++ compiler.

    python benchmarks/cache_persistence.py [--matrix matrix/smoke.yaml] [--rounds 3]
                                           [--select "compile_cell(backend='inductor')"]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
LOAD, SAVE = "CACHE_PERSISTENCE_LOAD", "CACHE_PERSISTENCE_SAVE"
STATES = ("cold", "kept", "moved", "artifacts")


def pytest_sessionstart() -> None:
    """In the process that runs the cells: this file is a plugin there."""
    if path := os.environ.get(LOAD):
        import torch

        if torch.compiler.load_cache_artifacts(Path(path).read_bytes()) is None:
            raise pytest.UsageError(f"{path} holds no artifacts that this torch can read")


def pytest_sessionfinish() -> None:
    """Save what was compiled."""
    if path := os.environ.get(SAVE):
        import torch

        if (saved := torch.compiler.save_cache_artifacts()) is None:
            raise pytest.UsageError("nothing was compiled: there are no artifacts")
        Path(path).write_bytes(saved[0])


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    wall: float
    cpu: float
    """Seconds of the process and of the compilers that it started."""
    libraries: int


def libraries(folder: Path) -> int:
    """Shared objects in a cache folder."""
    return sum(1 for _ in folder.rglob("*.so"))


def megabytes(path: Path) -> float:
    """Size of a file, or of all files in a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()) / 1e6


def run(args: argparse.Namespace, state: str, cache: Path, temporary: Path, artifacts: dict[str, str]) -> Taken:
    """Run the cells once and print what it took; raises SystemExit if they do not pass."""
    temporary.mkdir(exist_ok=True)
    found = libraries(cache)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(temporary), "PYTHONPATH": path} | artifacts
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "cache_persistence", "--tb=short",
               f"--json-report-file={temporary / 'report.json'}", "--compile-inprocess",
               f"--compile-matrix={args.matrix}", "-m", args.select]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=os.environ | environment, cwd=REPOSITORY, capture_output=True, text=True,
                          check=False)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    taken = Taken(wall, cpu, libraries(cache) - found)
    print(f"  {state:10} {taken.wall:6.1f} s wall  {taken.cpu:6.1f} s CPU  {taken.libraries} libraries", flush=True)
    return taken


def one_round(args: argparse.Namespace, folder: Path) -> dict[str, Taken]:
    """Every state once, each with folders of its own."""
    saved = folder / "artifacts"
    taken = {"cold": run(args, "cold", folder / "cold", folder / "t0", {SAVE: str(saved)})}
    shutil.copytree(folder / "cold", folder / "moved")
    print(f"cache folder {megabytes(folder / 'cold'):.1f} MB, artifacts {megabytes(saved):.1f} MB, "
          f"temporary folder {megabytes(folder / 't0'):.0f} MB", flush=True)
    taken["kept"] = run(args, "kept", folder / "cold", folder / "t0", {})
    taken["moved"] = run(args, "moved", folder / "moved", folder / "t1", {})
    taken["artifacts"] = run(args, "artifacts", folder / "fresh", folder / "t2", {LOAD: str(saved)})
    return taken


def main() -> None:
    """Print a line for each state, and its share of the cold run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", default="matrix/smoke.yaml")
    parser.add_argument("--select", default="compile_cell(backend='inductor')", help="which cells, as pytest's -m")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds: list[dict[str, Taken]] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="cp") as folder:
            rounds.append(one_round(args, Path(folder)))
    cold = {field: statistics.median(getattr(each["cold"], field) for each in rounds) for field in ("wall", "cpu")}
    for state in STATES:
        wall, cpu, compiled = (statistics.median(getattr(each[state], field) for each in rounds)
                               for field in ("wall", "cpu", "libraries"))
        print(f"{state:10} {wall:6.1f} s wall ({wall / cold['wall']:.2f} of cold)  {cpu:6.1f} s CPU "
              f"({cpu / cold['cpu']:.2f})  {compiled:g} libraries compiled")


if __name__ == "__main__":
    main()
