"""What a full comparison costs: ``python benchmarks/oracle_cost.py``.

CPU seconds of ``reference`` and ``compare`` over those of one eager training step (forward, loss, backward), and the
largest number of tensor bytes alive at once over that of the step. Bytes are counted by a dispatch mode that follows
the storages that operators return; a step's own figure has parameters, inputs and gradients in it.
"""

from __future__ import annotations

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


def seconds(action, times: int = 5) -> float:
    """Median CPU seconds."""
    taken = []
    for _ in range(times):
        start = time.process_time()
        action()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def measured(name: str, model: nn.Module, batch: Batch) -> str:
    """A row of the table."""
    tape = Tape()
    eager = record(model, model, batch, mode=tape)
    # not bitwise equal anywhere, and right: every leaf is measured
    unit = torch.finfo(next(model.parameters()).dtype).eps / 8
    outputs = {key: replace(item, value=item.value * (1 + unit)) for key, item in eager.outputs.items()}
    gradients = {key: g * (1 + unit) for key, g in eager.gradients.items()}
    other = replace(eager, outputs=outputs, gradients=gradients)
    step(model, batch)
    one = seconds(lambda: step(model, batch))
    whole = seconds(lambda: compare(eager, other, reference(model, batch, tape=tape)), times=3)
    wrong = [text for leaf in compare(eager, other, reference(model, batch, tape=tape)) if (text := problem(leaf))]
    model.zero_grad()
    held = [*model.parameters(), *batch.tensors()]
    with Bytes(held) as alone:
        step(model, batch)
    model.zero_grad()
    recorded = [item.value for item in eager.outputs.values()] + [*eager.gradients.values()]
    with Bytes([*held, *recorded, *outputs_of(other)]) as full:
        compare(eager, other, reference(model, batch, tape=tape))
    size = sum(p.numel() for p in model.parameters())
    return (f"| {name} | {size:,} | {one * 1e3:.1f} ms | {whole / one:.1f} | {alone.most / 1e6:.1f} MB | "
            f"{full.most / alone.most:.1f} | {len(wrong)} |")


def outputs_of(recording):
    """Tensors of a recording."""
    return [v for _, _, v in recording.values() if isinstance(v, torch.Tensor)]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| program | parameters | one step | comparison, in steps | bytes of a step | bytes, times that | alarms |")
    print("|---|---|---|---|---|---|---|")
    wide = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    cases = {
        "mlp (16, 48)": (Mlp(), torch.randn(16, 48)),
        "block, width 48 (2, 24)": (Block(), torch.randn(2, 24, 48)),
        "block, width 512 (8, 128)": (Block(512, 8), torch.randn(8, 128, 512)),
        "block, width 512, bfloat16": (Block(512, 8).bfloat16(), torch.randn(8, 128, 512).bfloat16()),
        "mostly parameters (4, 1024)": (wide, torch.randn(4, 1024)),
        "mostly activations (2048, 1024)": (wide, torch.randn(2048, 1024)),
    }
    for name, (model, x) in cases.items():
        print(measured(name, model, Batch.of(x)), flush=True)
    print(f"largest resident size of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
