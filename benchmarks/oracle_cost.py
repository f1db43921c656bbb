"""What a full comparison costs: ``python benchmarks/oracle_cost.py``; ``--real bert swin``: of models of ``zoo.real``.

CPU seconds of ``reference`` and ``compare`` over those of one eager training step (forward, loss, backward), made in
turn; medians of their ratios. The compiled side is eager's with half of all values moved by one rounding, so that every
leaf is measured. Told are the first comparison of a cell, a further one of the same model, whose float64 copy is made,
and one with a draw of noise for every leaf.

And the largest number of tensor bytes alive at once over that of the step. Bytes are counted by a dispatch mode that
follows the storages that operators return; a step's own figure has parameters, inputs and gradients in it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import statistics
import time
import warnings
import weakref
from dataclasses import replace

import torch
from oracle_programs import Block, Mlp
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, default_loss, problem, record, reference
from pytest_torchcompile.zoo import real

_TIMES = 7
_REAL = {
    "bert": ("tokens", {"B": 16, "S": 96}),
    "gpt2": ("tokens", {"B": 16, "S": 96}),
    "llama": ("tokens", {"B": 16, "S": 96}),
    "t5": ("decoder_tokens", {"B": 16, "S": 96, "T": 40}),
    "mixtral": ("tokens", {"B": 16, "S": 96}),
    "mamba": ("tokens", {"B": 8, "S": 56}),
    "swin": ("pixel_values", {"B": 40}),
    "convnext": ("pixel_values", {"B": 16, "H": 64, "W": 64}),
    "resnet": ("pixel_values", {"B": 16, "H": 64, "W": 64}),
    "mobilenet_v2": ("pixel_values", {"B": 8, "H": 64, "W": 64}),
    "wav2vec2": ("waveform", {"B": 8, "L": 2400}),
    "hubert": ("waveform", {"B": 8, "L": 2400}),
}
"""Models with a step of ten milliseconds or more on an idle core: what makes their batch, and its sizes."""


class Bytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the largest sum."""

    def __init__(self, tensors) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in tensors:
            self.follow(tensor)

    def follow(self, tensor: torch.Tensor) -> None:
        """Count a storage until it goes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        """A storage has gone."""
        self.now -= self.alive.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Follow what an operator returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.follow(leaf)
        return out


def step(model: nn.Module, batch: Batch) -> None:
    """One eager training step, without an update."""
    model.zero_grad()
    private = batch.clone()
    default_loss(model(*private.args, **private.kwargs)).backward()


def seconds(action) -> float:
    """CPU seconds."""
    start = time.process_time()
    action()
    return time.process_time() - start


def moved(value):
    """Half of the values one rounding nearer to zero; what is no floating tensor stays."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.where(torch.rand(value.shape) < 0.5, value, torch.nextafter(value, torch.zeros_like(value)))


class Residual(nn.Module):
    """Four residual blocks of convolutions, batch norms and relu gates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolved(3, 32, 1)
        self.first, self.second = nn.ModuleList(), nn.ModuleList()
        self.short = nn.ModuleList()
        for before, after, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
            self.first.append(_convolved(before, after, stride))
            self.second.append(_convolved(after, after, 1))
            same = before == after and stride == 1
            self.short.append(nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False))
        self.out = nn.Linear(128, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to classes."""
        x = torch.relu(self.stem(x))
        for first, second, short in zip(self.first, self.second, self.short, strict=True):
            x = torch.relu(second(torch.relu(first(x))) + short(x))
        return self.out(x.mean((2, 3)))


def _convolved(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))


def measured(name: str, model: nn.Module, batch: Batch) -> str:
    """A row of the table."""
    tape = Tape()
    eager = record(model, model, batch, mode=tape)
    outputs = {key: replace(item, value=moved(item.value)) for key, item in eager.outputs.items()}
    gradients = {key: moved(g) for key, g in eager.gradients.items()}
    other = replace(eager, outputs=outputs, gradients=gradients)
    kept: dict = {}

    def compared(wide: dict, draw: bool = False) -> list:
        return compare(eager, other, reference(model, batch, tape=tape, draw=draw, kept=wide))

    leaves = compared(kept)
    equal = sum(leaf.bitwise for leaf in leaves if leaf.kind in ("value", "gradient"))
    wrong = [text for leaf in leaves if (text := problem(leaf))]
    step(model, batch)
    # As in a rank process: what was imported before is not looked through again by each collection of garbage.
    gc.collect()
    gc.freeze()
    ones, firsts, furthers, drawn = [], [], [], []
    for _ in range(_TIMES):
        ones.append(seconds(lambda: step(model, batch)))
        firsts.append(seconds(lambda: compared({})) / ones[-1])
        furthers.append(seconds(lambda: compared(kept)) / ones[-1])
        drawn.append(seconds(lambda: compared(kept, draw=True)) / ones[-1])
    one = statistics.median(ones)
    gc.unfreeze()
    model.zero_grad()
    held = [*model.parameters(), *batch.tensors()]
    with Bytes(held) as alone:
        step(model, batch)
    model.zero_grad()
    recorded = [item.value for item in eager.outputs.values()] + [*eager.gradients.values()]
    with Bytes([*held, *recorded, *outputs_of(other)]) as full:
        compared({})
    size = sum(p.numel() for p in model.parameters())
    first, further, draw = (statistics.median(ratios) for ratios in (firsts, furthers, drawn))
    return (f"| {name} | {size:,} | {one * 1e3:.1f} ms | {first:.1f} | {further:.1f} | {draw:.1f} | "
            f"{alone.most / 1e6:.1f} MB | {full.most / alone.most:.1f} | {len(wrong)} | {equal} |")


def outputs_of(recording):
    """Tensors of a recording."""
    return [v for _, _, v in recording.values() if isinstance(v, torch.Tensor)]


def real_cases(names):
    """Models of libraries, each with a batch."""
    for name in names:
        kind, sizes = _REAL[name]
        torch.manual_seed(0)
        yield name, real.build(name).train(), Batch.of(getattr(real, kind)(**sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", nargs="*", choices=_REAL, help="real models instead of our own; without names: all")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| program | parameters | one step | first comparison, in steps | a further one | with a draw | "
          "bytes of a step | bytes, times that | alarms | leaves equal |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    if args.real is not None:
        for name, model, batch in real_cases(args.real or _REAL):
            print(measured(name, model, batch), flush=True)
        return
    wide = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    cases = {
        "mlp (16, 48)": (Mlp(), torch.randn(16, 48)),
        "block, width 48 (2, 24)": (Block(), torch.randn(2, 24, 48)),
        "block, width 512 (8, 128)": (Block(512, 8), torch.randn(8, 128, 512)),
        "block, width 512, bfloat16": (Block(512, 8).bfloat16(), torch.randn(8, 128, 512).bfloat16()),
        "residual network (10, 3, 32, 32)": (Residual(), torch.randn(10, 3, 32, 32)),
        "mostly parameters (4, 1024)": (wide, torch.randn(4, 1024)),
        "mostly activations (2048, 1024)": (wide, torch.randn(2048, 1024)),
    }
    for name, (model, x) in cases.items():
        print(measured(name, model, Batch.of(x)), flush=True)
    print(f"largest resident size of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
