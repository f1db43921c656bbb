"""What explaining a model costs beyond compiling it: the same step, compiled with the hooks and without.

Both are compiled anew, in one process, turn by turn, after a first turn that warms the cache of kernels. CPU seconds of
this process; with kernels in the cache g++ has no part in either.

    python benchmarks/explain_cost.py --model mini_gpt
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from pytest_torchcompile import zoo
from pytest_torchcompile.explain import explain
from pytest_torchcompile.explain.explanation import Explanation
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.files import write_files
from pytest_torchcompile.ledger.torch_logs import traced_to_file
from pytest_torchcompile.lowering.scheduler_notes import compile_anew

BATCHES: Final[dict[str, Callable[[], Any]]] = {
    "mini_gpt": lambda: zoo.token_batch(2, 32),
    "conv_net": lambda: zoo.image_batch(2),
    "feed_forward": lambda: zoo.vector_batch(4),
}


def compile_alone(name: str) -> float:
    """CPU seconds of one compiled training step."""
    torch.compiler.reset()
    model, batch = getattr(zoo, name)(), BATCHES[name]()
    begun = time.process_time()
    with compile_anew():
        torch.compile(model)(batch).square().mean().backward()
    return time.process_time() - begun


def explain_whole(name: str, folder: Path) -> tuple[float, Explanation]:
    """CPU seconds of the same, explained as text, page and files, with a trace for tlparse."""
    torch.compiler.reset()
    model, batch = getattr(zoo, name)(), BATCHES[name]()
    begun = time.process_time()
    trace = folder.with_suffix(".log")
    with traced_to_file(trace):
        explained = explain(model, batch, loss_fn=lambda output: output.square().mean(), name=name)
    write_files(explained, folder, trace)
    list(explanation_lines(explained))
    return time.process_time() - begun, explained


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BATCHES), default="mini_gpt")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    alone, whole = [], []
    with tempfile.TemporaryDirectory() as scratch:
        explain_whole(given.model, Path(scratch) / "warm")
        for turn in range(given.turns):
            alone.append(compile_alone(given.model))
            seconds, explained = explain_whole(given.model, Path(scratch) / str(turn))
            whole.append(seconds)
    print(f"{given.model}: compiled alone {median(alone):.2f} CPU s, explained {median(whole):.2f} "
          f"({median(whole) - median(alone):+.2f}); {len(explained.kernels)} kernel calls, medians of {given.turns}")


if __name__ == "__main__":
    main()
