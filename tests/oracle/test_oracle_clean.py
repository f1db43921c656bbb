"""No false alarms: correct compiled models of several kinds, in float32 and half precision, over some seeds."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, problem, record, reference
from pytest_torchcompile.state.snapshot import StateSnapshot

# Torch's own: Inductor's first import, and Dynamo looking at `.grad` of an input that is no leaf.
pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
SEEDS = range(4)


class Block(nn.Module):
    """A transformer block through scaled_dot_product_attention; ends in a layer norm."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Attend, then a perceptron."""
        heads = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = self.one(x + self.out(y))
        return self.two(x + self.down(F.gelu(self.up(x))))

    @staticmethod
    def inputs(generator):
        """A batch of sequences."""
        return torch.randn(2, 12, 32, generator=generator).requires_grad_()


class ConvNorm(nn.Module):
    """Convolutions and batch norm in training: the gradient of the first bias is nothing but noise."""

    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.m = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        """Two layers and a pool."""
        return F.adaptive_avg_pool2d(F.silu(self.m(self.b(F.relu(self.n(self.a(x)))))), 2)

    @staticmethod
    def inputs(generator):
        """Images."""
        return torch.randn(4, 3, 10, 10, generator=generator).requires_grad_()


class Chances(nn.Module):
    """Dropout, uniform noise and a Bernoulli gate; a router's top two; a write to an input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x, cache):
        """Return values, indices and a view of the cache."""
        y = F.dropout(F.relu(self.a(x)), 0.25, True)
        gate = torch.bernoulli(torch.full((x.shape[0], 16), 0.5, dtype=x.dtype))
        y = self.b(y + 0.1 * torch.rand_like(y)) * gate
        cache[:, 1:3] = y.detach()[:, :2]
        top = self.b(F.relu(self.a(x))).softmax(-1).topk(2, -1)
        return y, top.indices, top.values, cache[:, 0]

    @staticmethod
    def inputs(generator):
        """Rows and a cache."""
        return torch.randn(16, 32, generator=generator).requires_grad_(), torch.zeros(16, 5)


class Cancels(nn.Module):
    """Cancellation on purpose: centred moments, a variance as a difference, sums from both ends."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))

    def forward(self, x):
        """Four ill-conditioned results."""
        y = x * self.w + 8
        moment = (y - y.mean(-1, keepdim=True)).pow(3).mean(-1)
        variance = y.pow(2).mean(-1) - y.mean(-1).pow(2)
        peak = y.logsumexp(-1) - y.max(-1).values
        return moment, variance, peak, y.cumsum(-1) - y.flip(-1).cumsum(-1)

    @staticmethod
    def inputs(generator):
        """Rows."""
        return torch.randn(16, 64, generator=generator).requires_grad_()


def draw(model, seed):
    """New weights in place, so that one compiled graph serves all seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=generator) / math.sqrt(max(1, p[0].numel()))
            p.copy_(values if p.dim() > 1 else (1 if "bias" not in name else 0) + 0.1 * values)


@pytest.fixture(autouse=True)
def _same_draws():
    """Inductor draws eager's random numbers; nothing compiled is left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import config
    torch.compiler.reset()
    with config.patch(fallback_random=True):
        yield
    torch.compiler.reset()


def alarms(kind, dtype, backend):
    """Problems over all seeds, and how many leaves were no bitwise match."""
    torch.manual_seed(0)
    model = kind().to(dtype)
    call = torch.compile(model, backend=backend)
    found, inexact = [], 0
    for seed in SEEDS:
        draw(model, seed)
        batch = Batch.of(kind.inputs(torch.Generator().manual_seed(seed))).to(dtype=dtype)
        snapshot, tape = StateSnapshot(model), Tape()
        eager = record(model, model, batch, mode=tape)
        snapshot.restore()
        compiled = record(call, model, batch)
        snapshot.restore()
        leaves = compare(eager, compiled, lambda b=batch, t=tape: reference(model, b, tape=t))
        found += [(seed, problem(leaf)) for leaf in leaves if problem(leaf)]
        inexact += sum(leaf.numerical for leaf in leaves)
    return found, inexact


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Block, torch.bfloat16), (ConvNorm, torch.float32), (Chances, torch.float32)]
)
def test_inductor_raises_no_alarm(kind, dtype):
    """Fused and re-associated, so not bitwise equal, and right."""
    found, inexact = alarms(kind, dtype, "inductor")
    assert found == []
    assert inexact > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [Block, ConvNorm, Chances, Cancels])
def test_aot_eager_raises_no_alarm(kind, dtype):
    """The same kernels in another order at most."""
    assert alarms(kind, dtype, "aot_eager")[0] == []


def test_other_decompositions_raise_no_alarm():
    """Operators written out as smaller ones round more often, in float16."""
    found, inexact = alarms(Block, torch.float16, "aot_eager_decomp_partition")
    assert found == []
    assert inexact > 0


def test_an_autocast_raises_no_alarm_and_hides_no_error():
    """The tape sees bfloat16 inside the autocast; an error of a tenth is still one."""
    torch.manual_seed(0)
    model, batch = Block(), Batch.of(Block.inputs(torch.Generator().manual_seed(0)))
    call = torch.compile(model, backend="aot_eager_decomp_partition")

    def leaves(spoil):
        tape, snapshot = Tape(), StateSnapshot(model)
        with torch.autocast("cpu", torch.bfloat16):
            eager = record(model, model, batch, mode=tape)
            snapshot.restore()
            compiled = record(lambda x: call(x) * spoil, model, batch)
        found = reference(model, batch, tape=tape)
        assert found.unit == 2**-8
        return compare(eager, compiled, found)

    assert [problem(leaf) for leaf in leaves(1.0) if problem(leaf)] == []
    assert any(problem(leaf) for leaf in leaves(1.1))
