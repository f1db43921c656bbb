"""What a call of a module returned by maybe_compile costs over one that torch.compile returned.

Both are called in turn, in blocks of calls, in one process; a line is the median over the blocks. The promise for
Small, Deep and Broken is at most 2 microseconds or 1 % of a call. For the other two it is a price that is told:

- Where a model draws random numbers or has statistics, they are copied before each call. The 60 tensors and the random
  state of Stateful were 30 microseconds (3.2 %), and 48 without gradients (4.7 %). Of these the copies themselves are
  15 with everything in the cache: one kernel for each dtype, and nothing of it can be left out.
- "hooked" is Deep with a submodule that gets a hook after compiling: 28 microseconds, for torch's own guards on the
  hooks of 61 modules. Without them a hook that comes later would be left out.

    python benchmarks/wrap_overhead.py [--backend eager] [--blocks 200]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from pytest_torchcompile import CompileConfig, maybe_compile

SOURCE = '''
class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(60)])

    def forward(self, x):
        for part in self.parts:
            x = torch.relu(part(x))
        return x


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        return self.b(x)


class Stateful(torch.nn.Module):
    """20 batch norms and dropouts: what a run changes is copied before it."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(20)])
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(8) for _ in range(20)])
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        for part, norm in zip(self.parts, self.norms):
            x = self.dropout(torch.relu(norm(part(x))))
        return x
'''


def model(name: str) -> torch.nn.Module:
    """A model whose code is its own: compiled entries belong to code, and a lookup passes all of them."""
    scope = {"torch": torch}
    exec(SOURCE, scope)
    return scope[name]()


def block(call, x, calls) -> float:
    """CPU seconds of one call (nobody else on the machine counts), over a block of calls."""
    started = time.thread_time()
    for _ in range(calls):
        call(x)
    return (time.thread_time() - started) / calls


def measure(name, backend, grad, blocks, calls):
    x = torch.randn(4, 8)
    kind = "Deep" if name == "hooked" else name
    plain = torch.compile(model(kind), backend=backend)
    ours = maybe_compile(model(kind), CompileConfig(enabled=True, backend=backend))
    if name == "hooked":
        ours(x)
        ours.parts[0].register_forward_hook(lambda *args: None)
    with torch.set_grad_enabled(grad):
        for call in (plain, ours):
            block(call, x, 50)
        pairs = [(block(plain, x, calls), block(ours, x, calls)) for _ in range(blocks)]
    base = statistics.median(a for a, _ in pairs)
    return base, statistics.median(b - a for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--calls", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, backend {args.backend}, median of {args.blocks} blocks of {args.calls} calls")
    print(f"{'model':8}{'grad':>6}{'torch.compile':>16}{'maybe_compile':>16}{'more':>22}")
    for name in ("Small", "Deep", "Broken", "Stateful", "hooked"):
        for grad in (True, False):
            base, more = measure(name, args.backend, grad, args.blocks, args.calls)
            print(f"{name:8}{grad!s:>6}{base * 1e6:13.2f} us{(base + more) * 1e6:13.2f} us"
                  f"{more * 1e6:+10.2f} us {more / base:+7.1%}")


if __name__ == "__main__":
    main()
