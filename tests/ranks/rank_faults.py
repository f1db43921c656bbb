"""Wrappers of several ranks with a fault each, named by the tests as ``rank_faults:NAME*2``."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from pytest_torchcompile.oracle.spread import Spread
from pytest_torchcompile.wrappers import tp
from pytest_torchcompile.wrappers.data_parallel import FlatShards
from pytest_torchcompile.wrappers.protocol import Wrapper


class Net(nn.Module):
    """Two layers. (B, 8) -> (B, 4)."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Three blocks, of which a rank may shard or run some. (B, 8) -> (B, 8)."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def stage(self, index, count):
        return nn.Sequential(*self.blocks[3 * index // count:3 * (index + 1) // count])


class Sequenced(Net):
    """Sequence parallel: its rows are the sequence. (B, 8) -> (B, 4)."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise_sequence", "norm": "sequence", "last": "colwise_sequence",
                         "least": "rowwise"}

    def __init__(self):
        super().__init__()
        self.norm, self.last, self.least = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.least(torch.tanh(self.last(self.norm(super().forward(x)))))


class Embedded(nn.Module):
    """Each rank has a part of the rows of an embedding, nine, which it need not divide. (B, 8) -> (B, 8, 4)."""

    tp_plan: ClassVar = {"rows": "rowwise"}

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 4)

    def forward(self, x):
        return self.rows(x).tanh()


def tokens(B):
    return torch.randint(9, (B, 8))


class Block(nn.Module):
    """A residual of twelve features, which 2 and 3 ranks divide. (B, 8) -> (B, 8)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Normed(nn.Module):
    """Batch norm, whose statistics are each replica's own, and dropout. (B, 8) -> (B, 8)."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.25)

    def forward(self, x):
        return self.drop(self.norm(self.up(x)))


def rows(B):
    return torch.randn(B, 8, requires_grad=True)


def compiled(model, settings):
    return model if settings is None else torch.compile(model, **settings)


def _ddp(model, **hooks):
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, **hooks)


def right(model, settings, cell, mesh):
    return _ddp(compiled(model, settings))


def alone(model, settings, cell, mesh):
    """Runs only where compiled code is kept apart from other ranks' and wrappers'."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    if folder.parts[-2:] != ("rank_faults_alone_2", f"{dist.get_rank()}of2"):
        raise RuntimeError(f"compiled code is kept in {folder}")
    return right(model, settings, cell, mesh)


def _overlapped(model, settings, cell, mesh):
    """Sums gradients up while the backward pass goes on."""
    model.__dict__["sums"] = []

    def begin_sum(parameter):
        model.__dict__["sums"].append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin_sum)
    return compiled(model, settings)


class _Sums(Spread):
    """The gradients are whole once the sums that have begun have come in."""

    divided = True

    @contextmanager
    def whole(self):
        while sums := self.model.__dict__["sums"]:
            parameter, work = sums.pop()
            work.wait()
            if self.divided:
                parameter.grad.div_(dist.get_world_size())
        yield


class _Undivided(_Sums):
    divided = False


overlapped = Wrapper("overlapped", _overlapped, ranks=2, spread=_Sums)
"""Right, by what it says itself of how gradients are read."""
overlapped_undivided = Wrapper("overlapped_undivided", _overlapped, ranks=2, spread=_Undivided)


def forgets(model, settings, cell, mesh):
    """No gradient leaves its rank."""
    return compiled(model, settings)


def forgets_compiled(model, settings, cell, mesh):
    """Only the compiled model forgets."""
    return _ddp(model) if settings is None else compiled(model, settings)


def _sum(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def adds(model, settings, cell, mesh):
    """Gradients are added up, not averaged."""
    wrapped = _ddp(compiled(model, settings))
    wrapped.register_comm_hook(None, _sum)
    return wrapped


def _half_of(model, settings, cell, mesh):
    call = compiled(model, settings)
    return lambda x: call(x) * (1 + 1e-3 * dist.get_rank())


drifts = Wrapper("drifts", _half_of, ranks=2, axes=("tensor",))
"""Ranks that work on one batch together, and one of them is off by a thousandth."""


def diverges(model, settings, cell, mesh):
    """Rank 1 compiles for every size anew."""
    if settings is not None and dist.get_rank() == 1:
        settings = settings | {"dynamic": False}
    return _ddp(compiled(model, settings))


def _at_the_third_call(act):
    def wrap(model, settings, cell, mesh):
        inner, calls = right(model, settings, cell, mesh), []

        def call(x):
            calls.append(0)
            if settings is not None and len(calls) == 3 and dist.get_rank() == 1:
                act()
            return inner(x)

        return call

    return wrap


def _raise():
    raise ValueError("rank 1 has had enough")


def _hog():
    """Wants more than there is, on a GPU of its memory; what little the rest of the cell needs is left."""
    if dist.get_backend() == "nccl":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    import resource  # Linux

    with open("/proc/self/statm") as told:
        used = int(told.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
    torch.ones(1 << 32).sum()


raises = _at_the_third_call(_raise)
dies = _at_the_third_call(lambda: os.kill(os.getpid(), signal.SIGKILL))
faults = _at_the_third_call(lambda: os.kill(os.getpid(), signal.SIGSEGV))
leaves = _at_the_third_call(lambda: os._exit(3))
hogs = _at_the_third_call(_hog)


def _hang():
    if mark := os.environ.get("CHAOS_HANGS"):
        with open(mark, "w"):
            pass
    time.sleep(1000)


hangs = _at_the_third_call(_hang)


def _raises_inside(model, side):
    """Rank 1 raises at its third call, in the second of three blocks; the others are waiting, or will be."""
    calls = []

    def objects(block, given):
        calls.append(0)
        if len(calls) == 3:
            raise ValueError("a block has had enough")

    if side and dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(objects)


def sharded_raises(model, settings, cell, mesh):
    """Compiled FSDP2, between its collectives for a block and the next."""
    from torch.distributed.fsdp import fully_shard

    _raises_inside(model, settings is not None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        if settings is not None:
            block.compile(**settings)
    return fully_shard(model, mesh=mesh)


def _split_raises(model, settings, cell, mesh):
    _raises_inside(tp.split_layers(model, cell, mesh), settings is None)
    return compiled(model, settings)


split_raises = Wrapper("split_raises", _split_raises, ranks=2, axes=("tensor",))
"""Eager tensor parallel, between the sums of two blocks."""


def _whole_raises(model, settings, cell, mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    _raises_inside(model, settings is not None)
    if settings is not None:
        model.compile(**settings)
    return FullyShardedDataParallel(model, process_group=mesh.get_group(), use_orig_params=True,
                                    device_id=torch.device("cpu"))


whole_raises = Wrapper("whole_raises", _whole_raises, ranks=2, spread=FlatShards)
"""Compiled FSDP1, whose gradients are read by all ranks together."""
