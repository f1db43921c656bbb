"""Draws of noise by a transcript beside draws by the program itself: the same bits, and how much quicker.

    python benchmarks/transcripts.py                     # every model of matrix/real.yaml that is installed
    python benchmarks/transcripts.py --matrix FILE --models bert t5

For each model: one training call of the first size, with noise of one sequence. Seconds are medians of five pairs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.loading import resolve
from pytest_torchcompile.oracle import Tape, noisy_runs, record, reference
from pytest_torchcompile.oracle.transcript import Transcript
from pytest_torchcompile.state.snapshot import StateSnapshot
from pytest_torchcompile.state.tensor_forms import same_bits

_PAIRS = 5


def reference_of(entry: dict[str, Any]) -> Any:
    """The reference of a model's first call, without a draw."""
    torch.manual_seed(0)
    arguments = dict(entry["factory"])
    model = resolve(arguments.pop("call"), Path(), "factory")(**arguments)
    sizes = {name: first_size(dim) for name, dim in entry["dims"].items()}
    batch = Batch.of(resolve(entry["inputs"], Path(), "inputs")(**sizes))
    tape, before = Tape(), StateSnapshot(model)
    recording = record(model, model, batch, mode=tape)
    before.restore()
    if recording.error is not None:
        raise RuntimeError(str(recording.error))
    return reference(model, batch, tape=tape, draw=False)


def first_size(dim: Any) -> Any:
    """The first of a dim's sizes."""
    if isinstance(dim, dict):
        dim = next(iter(dim.values()))
    return dim[0] if isinstance(dim, list) else dim


def compared(runs: Any) -> str:
    """What came of it, in a line; raises where bits differ."""
    if not hasattr(runs, "_noisy_runs"):
        return f"no draws: {runs.why}"
    transcript = Transcript()
    runs._run_with(1.0, listener=transcript)
    for sequence in (0, 1):
        runs._noisy_runs.draw(sequence, 1.0, True)
    if runs._noisy_runs.made_of is None:
        return f"runs itself: {transcript.why or 'its transcript does not repeat it'}"
    seconds: list[tuple[float, float]] = []
    for sequence in range(2, 2 + _PAIRS):
        start = time.perf_counter()
        by_transcript, _ = runs._noisy_runs.draw(sequence, 1.0, True)
        middle = time.perf_counter()
        runs._dice.begin_sequence(sequence)
        by_program = runs._run_with(1.0).values_by_name()
        seconds.append((middle - start, time.perf_counter() - middle))
        differing = [name for name, value in by_program.items() if not same(by_transcript[name], value)]
        if differing:
            raise AssertionError(f"{len(differing)} of {len(by_program)} values differ: {differing[:3]}")
    fast, slow = (statistics.median(each) for each in zip(*seconds, strict=True))
    return f"{len(by_program)} values, the same bits; {slow:.3f} s -> {fast:.3f} s, {slow / fast:.1f} times as fast"


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals NaN."""
    if not isinstance(other, torch.Tensor):
        return bool(one == other)
    return same_bits(one, other)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", default="matrix/real.yaml")
    parser.add_argument("--models", nargs="*", default=[])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # In the first draw, not in the fifth.
    noisy_runs._BEFORE = 0
    with open(args.matrix) as file:
        models = yaml.safe_load(file)["models"]
    for name, entry in models.items():
        if args.models and name not in args.models:
            continue
        try:
            print(f"{name:22}{compared(reference_of(entry))}", flush=True)
        except Exception as error:
            print(f"{name:22}{type(error).__name__}: {str(error)[:90]}", flush=True)


if __name__ == "__main__":
    main()
