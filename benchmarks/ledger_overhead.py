"""What an open ledger costs a steady-state compiled call, and a compile: ``python benchmarks/ledger_overhead.py``.

The same warm compiled model, with and without ``observe()``, in turns of one run; medians of the turns. What is
counted is CPU time of the one thread that calls, so that other work on the machine matters little.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from pytest_torchcompile.ledger import observe

TURNS = 31
COMPILES = 11


def turn(compiled, x, calls: int) -> float:
    """CPU microseconds of a call, over some calls."""
    start = time.thread_time()
    for _ in range(calls):
        compiled(x)
    return (time.thread_time() - start) / calls * 1e6


def compare(name: str, model: nn.Module, x: torch.Tensor, calls: int) -> None:
    """Print what a call takes without and with a ledger."""
    compiled = torch.compile(model.eval(), dynamic=False)
    turn(compiled, x, calls)
    turns = []
    for _ in range(TURNS):
        without = turn(compiled, x, calls)
        with observe():
            turns.append((without, turn(compiled, x, calls)))
    without, extra = statistics.median(a for a, _ in turns), statistics.median(b - a for a, b in turns)
    print(f"{name}: {without:.1f} CPU µs a call, {extra:+.1f} µs ({extra / without:+.2%}) with a ledger open")


def compile_once(model: nn.Module, x: torch.Tensor) -> float:
    """CPU milliseconds of a compile by Dynamo alone: all that a ledger watches is there."""
    torch.compiler.reset()
    start = time.thread_time()
    torch.compile(model, backend="eager", dynamic=False)(x)
    return (time.thread_time() - start) * 1e3


def compare_compiles(name: str, model: nn.Module, x: torch.Tensor) -> None:
    """Print what a compile takes without and with a ledger."""
    compile_once(model, x)
    turns = []
    for _ in range(COMPILES):
        without = compile_once(model, x)
        with observe():
            turns.append((without, compile_once(model, x)))
    without, ratio = statistics.median(a for a, _ in turns), statistics.median(b / a for a, b in turns)
    print(f"{name}: {without:.1f} CPU ms a compile, {ratio:.2f} times that with a ledger open")


def main() -> None:
    """Print lines for a call that does next to nothing, and for one layer of a small transformer."""
    torch.set_num_threads(1)
    with torch.no_grad():
        compare("one addition", Addition(), torch.ones(8), 2000)
        layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
        torch.backends.mha.set_fastpath_enabled(False)
        compare("transformer layer, 4 x 128 tokens", layer, torch.randn(4, 128, 256), 10)
        compare_compiles("one addition", Addition(), torch.ones(8))
        compare_compiles("transformer layer", layer, torch.randn(4, 128, 256))


class Addition(nn.Module):
    """The cheapest graph there is."""

    def forward(self, x):
        """Add one."""
        return x + 1


if __name__ == "__main__":
    main()
