"""How often benchmark() is wrong on this machine: eager against eager, and a planted slowdown of 30 %.

    python benchmarks/benchmark_null.py [RUNS]

Prints for each how many of RUNS (default 100) ended in which verdict, and the medians of what they found.
"""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median

import torch

from pytest_torchcompile import CompileConfig, benchmark

LAYERS = 10


class Layers(torch.nn.Module):
    """Ten products and activations: about a millisecond."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x):  # noqa: D102
        for _ in range(LAYERS):
            x = torch.tanh(x @ self.weight)
        return x


def longer(graph, example):
    """A backend that does 3 layers more than the 10 of the model."""
    weight = torch.randn(256, 256) / 16

    def run(*args):
        x = torch.ones(64, 256)
        for _ in range(LAYERS * 3 // 10):
            x = torch.tanh(x @ weight)
        return graph(*args)

    return run


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    model = Layers().eval()
    for name, config in {"eager against eager": CompileConfig(),
                         "30 % more work": CompileConfig(enabled=True, backend=longer)}.items():
        torch.compiler.reset()
        found = [benchmark(model, config, lambda: torch.randn(64, 256)) for _ in range(runs)]
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(f.verdict for f in found).most_common())
        ratios, widths = [f.ratio.value for f in found], [f.ratio.high / f.ratio.low for f in found]
        print(f"{name:20} {verdicts}; ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
              f"width of the interval {median(widths):.2f}")


if __name__ == "__main__":
    main()
