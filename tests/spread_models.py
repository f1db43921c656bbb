"""Models spread over ranks, and what each rank finds when it gives them to the layer. Run by ``two_ranks``."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pytest_torchcompile import CompileConfig, CompileSmoketest, maybe_compile, zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.layer.rank_votes import RankVotes
from pytest_torchcompile.oracle import recording
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.wrappers.tp import split_layers

logging.getLogger("torch").setLevel("ERROR")


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(nn.functional.dropout(hidden, self.dropout, self.training))


class Net(nn.Module):
    """Two blocks. ``lost``: a factor that its last two layers cancel, and with it so many of the results' digits."""

    def __init__(self, width=16, dropout=0.0, lost=0.0):
        super().__init__()
        self.first, self.last, self.less = nn.Linear(8, width), nn.Linear(width, 4), nn.Linear(width, 4)
        with torch.no_grad():
            self.last.weight += lost
            self.less.weight += lost
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) - self.less(x)


def device():
    """Where the ranks compute."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def spread(kind, **given):
    torch.manual_seed(0)
    if kind == "sequence":
        model = zoo.residual_outside(8).to(device())
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        split_layers(model, Cell(model="residual_outside", wrapper="tp"), mesh)
        return model
    model = Net(**given).to(device())
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for part in (*model.blocks, model):
            fully_shard(part)
        return model
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


# planted faults: backends


def refuses(graph, inputs):
    raise RuntimeError("planted: this backend compiles nothing")


def refuses_the_whole(graph, inputs):
    """Compiles no graph with the head in it, that is with more than a block."""
    if sum(node.target is nn.functional.linear or node.op == "call_module" for node in graph.graph.nodes) > 2:
        raise RuntimeError("planted: this graph is too large")
    return aot_autograd(fw_compiler=nop)(graph, inputs)


def raises_when_run(graph, inputs):
    def run(*args):
        raise RuntimeError("planted: it raises when it runs")

    return run


def adds(graph, inputs):
    """Results that are wrong by a thousandth."""
    return lambda *args: [out + 1e-3 if isinstance(out, torch.Tensor) and out.requires_grad else out
                          for out in graph(*args)]


def wide(graph, inputs):
    """Right, and rounded otherwise than eager: it computes in float64."""
    def run(*args):
        found = graph(*(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args))
        return [out.float() if isinstance(out, torch.Tensor) and out.dtype == torch.float64 else out for out in found]

    return run


def redraws(graph, inputs):
    """Right, with other random numbers than eager's."""
    def run(*args):
        torch.rand(3, device=device())
        return graph(*args)

    return run


def _no_backward(graph, inputs):
    raise RuntimeError("planted: no backward graph")


def _doubled(graph, inputs):
    return make_boxed_func(lambda *args: [2 * g if isinstance(g, torch.Tensor) else g for g in graph(*args)])


PLANTED = {
    "refuses": refuses, "refuses_the_whole": refuses_the_whole, "raises_when_run": raises_when_run, "adds": adds,
    "wide": wide, "redraws": redraws, "no_backward": aot_autograd(fw_compiler=nop, bw_compiler=_no_backward),
    "doubled_gradients": aot_autograd(fw_compiler=nop, bw_compiler=_doubled),
    "unknown": "no_such_module:backend", "healthy": "aot_eager",
}  # fmt: skip


# what a rank does


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append({key: record.torchcompile[key] for key in ("result", "phase", "reason")})


def state(model):
    """All that an attempt must leave as it was."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors],
        "which": [id(t) for t in tensors], "gradients": [t.grad is None for t in tensors],
        "random": torch.cat([torch.get_rng_state(), *torch.cuda.get_rng_state_all()]),
        "training": [part.training for part in model.modules()],
        "classes": [type(part) for part in model.modules()],
        "in place": [part._compiled_call_impl for part in model.modules()],
    }  # fmt: skip


def same(one, other):
    return [key for key in one if not all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*(s[key] if isinstance(s[key], list) else [s[key]] for s in (one, other)), strict=True))] == []


def batch(kind, rank):
    """Data parallel ranks have batches of their own; tensor parallel ones the same."""
    seed = 1 if kind in ("tp", "sequence") else rank
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).to(device())


def compiled(rank, kind, backend, on=(0, 1), model=None, serving=False, steps=1, **config):
    """Give a model to maybe_compile, with ``backend`` on the ranks ``on``, a healthy one elsewhere; train a step."""
    log, logger = Log(), logging.Logger(f"rank{rank}", "INFO")
    logger.addHandler(log)
    net, x = spread(kind, **(model or {})), batch(kind, rank)
    if serving:
        net.eval().requires_grad_(False)
        net(x)
    before = state(net) if not serving else None
    backend = PLANTED[backend if rank in on else "healthy"]
    cfg = CompileConfig(enabled=True, backend=backend, smoketest_steps=steps, **config)
    error = ""
    try:
        found = maybe_compile(net, cfg, logger, x)
    except Exception as raised:
        found, error = net, f"{type(raised).__name__}: {raised}"
    same_state = serving or same({**before, "in place": []}, {**state(net), "in place": []})
    in_place = [name for name, part in net.named_modules() if part._compiled_call_impl is not None]
    assert RankVotes(net).any_rank(True)  # votes of one place of the program meet
    expected, got = net(x), found(x)
    if not serving:
        got.square().mean().backward()
    dist.barrier()
    return {"compiled": found is not net, "records": log.records, "untouched": same_state, "in place": in_place,
            "error": error, "apart": float((expected - got).abs().max())}


def smoketested(rank, backend, on):
    """CompileSmoketest alone, of what torch.compile has compiled."""
    net = spread("ddp")
    before = state(net)
    test = CompileSmoketest(steps=1)
    ok = test.run(torch.compile(net, backend=PLANTED[backend if rank in on else "healthy"]), batch("ddp", rank))
    return {"ok": ok, "phase": test.last_result.phase, "reason": test.last_result.reason,
            "untouched": same(before, state(net))}


def switched_off(rank):
    """torch.compile does nothing on rank 1."""
    os.environ["TORCHDYNAMO_DISABLE"] = str(rank)
    try:
        return compiled(rank, "ddp", "healthy")
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]


def user_error(rank):
    """The model itself objects to the batch of rank 1, which serves: no other rank waits for it."""
    net = spread("ddp").eval().requires_grad_(False)
    net.module.first.register_forward_pre_hook(_objects if rank == 1 else _agrees)
    log, logger = Log(), logging.Logger(f"rank{rank}", "INFO")
    logger.addHandler(log)
    try:
        maybe_compile(net, CompileConfig(enabled=True, backend="aot_eager"), logger, batch("ddp", rank))
    except ValueError as error:
        return {"records": log.records, "error": str(error)}
    return {"records": log.records, "error": ""}


def user_error_inside(rank, kind, patience, timeout):
    """As :func:`user_error`, in training: rank 0 is left in the middle of its backward pass. Seconds."""
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    inner = Net().to(device())
    net = DistributedDataParallel(inner, process_group=group) if kind == "ddp" else FullyShardedDataParallel(
        inner, process_group=group, use_orig_params=True, device_id=device())
    if rank == 1:
        net.module.blocks[1].register_forward_pre_hook(_objects)
    log, logger = Log(), logging.Logger(f"rank{rank}", "INFO")
    logger.addHandler(log)
    before, began = state(net), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_torchcompile.layer.rank_votes.PATIENCE", patience)
        try:
            maybe_compile(net, CompileConfig(enabled=True, backend="aot_eager"), logger, batch("ddp", rank))
            error = ""
        except (ValueError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"records": log.records, "error": error, "seconds": time.monotonic() - began,
            "untouched": same(before, state(net))}


def user_error_late(rank, patience, timeout):
    """The model objects on rank 1 between the sums of two blocks, in the forward pass after the last step. Seconds."""
    # With a name of its own: without, the mesh of a later test in this process would equal it. What DTensor keeps of
    # operators is kept by mesh, and that test would be handed this one, whose group is gone by then.
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=timeout)), device().type,
                                 mesh_dim_names=("impatient",))
    torch.manual_seed(0)
    net, calls = Net().to(device()).eval().requires_grad_(False), []
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def objects(module, args):
        calls.append(0)
        if rank == 1 and len(calls) == 3:  # after the eager and the compiled one of the only step
            _objects(module, args)

    net.blocks[1].register_forward_pre_hook(objects)
    test, began = CompileSmoketest(steps=1), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_torchcompile.layer.rank_votes.LIMIT", patience)
        test.run(torch.compile(net, backend="aot_eager"), batch("tp", rank))
    return {"ok": test.last_result.ok, "reason": test.last_result.reason, "seconds": time.monotonic() - began}


def _objects(module, args):
    raise ValueError("the model's own objection")


def _agrees(module, args):
    return None


def voters(rank, voter):
    """Who voted yes, on a mesh of two dimensions."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net().to(device())
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh["dp"])
    votes = RankVotes(net)
    return {"spread": votes.spread, "who": votes.ranks_saying(rank == voter), "nobody": votes.ranks_saying(False)}


def gathered(rank, dynamic):
    """Coverage of a linear layer whose outputs all ranks put together, with and without a part that runs eagerly."""
    from pytest_torchcompile.gauges.coverage import measure_coverage

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    net = split_layers(zoo.tiny_head(8, 6).to(device()), Cell(model="tiny_head", wrapper="tp"), mesh)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(device())
    compiled = torch.compile(net, backend="aot_eager", dynamic=dynamic)
    compiled(x)
    whole = measure_coverage(lambda: net(x), lambda: compiled(x))
    part = measure_coverage(lambda: net(x).exp(), lambda: compiled(x).exp())
    return {"whole": whole.sites, "part": part.sites}


class Steps(nn.Module):
    """Its forward writes to a parameter of its own, and to no other."""

    def __init__(self, inner, writer):
        super().__init__()
        self.inner, self.writer = inner, writer

    def forward(self, x):
        if dist.get_rank() == self.writer:
            with torch.no_grad():
                self.inner.blocks[0].up.weight.to_local()[0, 0] += 1
        return self.inner(x)


def written(rank, kind, writer):
    """What a recording says was written to, and the collectives that reading it took beside those of the model."""
    module = Steps(spread(kind), writer)
    seen = Counter()
    real, real_whole = dist.all_reduce, recording.whole_value

    def counted(*args, **kwargs):
        seen["votes"] += 1
        return real(*args, **kwargs)

    def gathered_whole(tensor):
        if hasattr(tensor, "full_tensor"):
            seen["gathered"] += 1
        return real_whole(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        patch.setattr(recording, "whole_value", gathered_whole)
        made = record(module, module, Batch.of(torch.ones(3, 8, device=device())), train=False)
    return {"error": made.error and str(made.error), "mutated": sorted(made.mutated), **seen}


# faults of our own between the calls of the model, on one rank


PLACES = {
    "before": "layer.smoketest.preserved", "snapshot": "layer.smoketest.DeepSnapshot",
    "compared": "layer.step_comparison.compare", "disturbed": "layer.step_comparison.disturb",
    "means": "oracle.mean_comparison._add_run",
}  # fmt: skip


def interrupted(rank, place, kind="ddp", **given):
    """maybe_compile, with something of its own that raises on rank 1."""
    def short(*args, **kwargs):
        raise MemoryError(f"planted: no memory ({place})")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(f"pytest_torchcompile.{PLACES[place]}", short)
        return compiled(rank, kind, steps=2, **given)
