"""torch.compile beside a Triton kernel written by hand: ``silu(x) * y + 1``, eager, fused by Inductor, and with an op.

Numbers of all three are held against float64; kernels and bytes are those that ``explain`` tells of the compiled ones;
times are medians of many calls, on a GPU by CUDA events. A CPU runs the hand-written kernel by Triton's interpreter, so
its time says nothing there.

    python benchmarks/hand_written.py --device cuda
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.explain import explain


class Plain(nn.Module):
    """The expression, which Inductor may fuse."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Gate ``y`` by ``x``."""
        return silu(x) * y + 1


class ByHand(nn.Module):
    """The same, with the hand-written kernel in place of the first two operators."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Gate ``y`` by ``x``."""
        from pytest_torchcompile.zoo.gated_unit import gate

        return gate(x, y) + 1


def seconds_of(call: Callable[[], object], device: str, times: int = 200) -> float:
    """The median of some calls."""
    for _ in range(10):
        call()
    found = []
    for _ in range(times):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            call()
            found.append(time.perf_counter() - begun)
    return median(found)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 24)
    given = parser.parse_args()
    try:
        from pytest_torchcompile import zoo

        zoo.triton_op(given.device)
    except Unavailable as why:
        raise SystemExit(str(why)) from None
    torch.manual_seed(0)
    x, y = (torch.randn(given.elements, device=given.device) for _ in range(2))
    exact = silu(x.double()) * y.double() + 1
    with torch.no_grad():
        for name, model, compiled in (("eager", Plain(), False), ("compiled", Plain(), True),
                                      ("by hand, eager", ByHand(), False), ("by hand, compiled", ByHand(), True)):
            told = ""
            if compiled:
                explained = explain(model, ((x, y), {}), train=False)
                touched = sum(kernel.bytes_read + kernel.bytes_written for kernel in explained.kernels)
                told = f", {len(explained.kernels)} kernel calls over {touched / 2**10:.0f} KiB"
            torch.compiler.reset()
            run = torch.compile(model) if compiled else model
            error = float((run(x, y).double() - exact).abs().max())
            seconds = seconds_of(lambda run=run: run(x, y), given.device, 200 if given.device == "cuda" else 3)
            print(f"{name:18} {1e6 * seconds:9.1f} us, largest error {error:.1e}{told}", flush=True)


if __name__ == "__main__":
    main()
