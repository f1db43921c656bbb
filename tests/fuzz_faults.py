"""Models and backends with faults that only some sequences of sizes show."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from pytest_torchcompile import ShapeStabilizer


class Net(nn.Module):
    """(B, 5) -> (B, 1), or (B, S, 5) -> (B, S, 1)."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(5, 5)

    def forward(self, x):
        return torch.relu(self.line(x)).sum(-1, keepdim=True) + x


class GuardsOnEight(Net):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if x.shape[0] % 8 == 0 else y


class RaisesForOdd(Net):
    """Says itself which sizes it does not take."""

    def forward(self, x):
        if x.shape[0] % 2:
            raise ValueError("pairs only")
        return super().forward(x)


class RefusesOdd(Net):
    """Takes pairs of rows; what it is made of raises for odd sizes."""

    def forward(self, x):
        return super().forward(x.view(x.shape[0] // 2, 2, -1))


class Flat(nn.Module):
    """Refuses odd sizes in the one frame that it has, and breaks its graph above 100."""

    def forward(self, x):
        self.check(x)
        return torch.relu(x) + x

    def check(self, x):
        if x.shape[0] % 2:
            raise ValueError("pairs only")
        if x.shape[0] > 100:
            torch._dynamo.graph_break()


class Nested(Flat):
    """The same around a part that compiles by itself, whatever becomes of the whole."""

    def __init__(self):
        super().__init__()
        self.part = Net()

    def forward(self, x):
        self.check(x)
        return self.part(x) * 1.5


class TakesOddCompiled(Net):
    """Refuses odd sizes eagerly only."""

    def forward(self, x):
        if x.shape[0] % 2 and not torch.compiler.is_compiling():
            raise ValueError("pairs only")
        return super().forward(x)


class BreaksAbove100(Net):
    def forward(self, x):
        if x.shape[0] > 100:
            torch._dynamo.graph_break()
        return super().forward(x)


class BreaksAbove4(Net):
    """Breaks its graph at most sizes."""

    def forward(self, x):
        if x.shape[0] > 4:
            torch._dynamo.graph_break()
        return super().forward(x)


def wrong_for_37(tensors, out, memory):
    wrong = any(t.shape[0] == 37 for t in tensors)
    return tuple(o * 1.01 for o in out) if wrong else out


def spoiled(spoil):
    """aot_eager, its forward graphs' outputs gone through ``spoil(tensors in, outputs, memory)``."""
    memory = {}

    def backend(graph, inputs):
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*args):
            tensors = [a for a in args if isinstance(a, torch.Tensor) and a.ndim >= 2 and a.shape[-1] == 5
                       and not isinstance(a, nn.Parameter)]
            return spoil(tensors, compiled(*args), memory)
        return run
    return backend


class Cancels(Net):
    """What is left of its output is the rounding of a large sum."""

    def forward(self, x):
        return (super().forward(x) + 1e7) - 1e7


class Zeros(Net):
    """Gives zeros."""

    def forward(self, x):
        return super().forward(x) * 0.0


def tripled(graph, inputs):
    """A backend whose results are three times too large."""
    return lambda *args: [3 * out if isinstance(out, torch.Tensor) else out for out in graph(*args)]


def odd_above_16(tensors, out, memory):
    wrong = any(t.shape[0] % 2 and t.shape[0] > 16 for t in tensors)
    return tuple(o * 1.01 for o in out) if wrong else out


def equal_dims(tensors, out, memory):
    wrong = any(t.ndim == 3 and t.shape[0] == t.shape[1] for t in tensors)
    return tuple(o * 1.01 for o in out) if wrong else out


def smaller_than_before(tensors, out, memory):
    size = max(t.shape[0] for t in tensors)
    wrong = size < memory.get("largest", 0)
    memory["largest"] = max(size, memory.get("largest", 0))
    return tuple(o + 0.01 for o in out) if wrong else out


class ThirdCall:
    """A backend, wrong from the third call of whatever it compiled last."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph, inputs):
        compiled = lookup_backend("aot_eager")(graph, inputs)

        def run(*args):
            self.calls += 1
            out = compiled(*args)
            return tuple(o * 1.01 for o in out) if self.calls > 2 else out
        return run


class OverflowsByOne(ShapeStabilizer):
    """Takes a batch that is one longer than a bucket for one that fits: it stays as long as it is."""

    def bucket_batch(self, batch):
        fits = any(batch.shape[1] == size + 1 for size in self.config.buckets)
        return batch if fits else super().bucket_batch(batch)


class UnpadsOneTooMany(ShapeStabilizer):
    """Takes one token too many off what was padded."""

    def unpad(self, padded, batch, dim=1):
        found = super().unpad(padded, batch, dim)
        return found.narrow(dim, 0, found.shape[dim] - 1) if found.shape[dim] < padded.shape[dim] else found


class Tokens(nn.Module):
    """(B, S) token ids -> (B, S, 3), each token by itself, so that padding changes none."""

    def __init__(self):
        super().__init__()
        self.embed, self.line = nn.Embedding(32, 5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.line(torch.relu(self.embed(ids)))
