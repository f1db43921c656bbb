"""What a rank finds when the toolkit takes a model that is spread over ranks. Run by ``two_ranks``, or in a fake group.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pytest_torchcompile import zoo
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.wrappers.protocol import load

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def model():
    torch.manual_seed(0)
    return zoo.feed_forward(width=16)


def batch(replica):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(replica))


def step(call, x):
    """Output and loss of a step, whose gradients are left."""
    output = call(x)
    output.square().mean().backward()
    return output.detach()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def expected_gradients(replicas):
    """By name: the means over the replicas' batches, in one process."""
    net = model()
    for replica in range(replicas):
        step(net, batch(replica))
    return {name: parameter.grad / replicas for name, parameter in net.named_parameters()}


def captured(wrapper, ranks, passes=(), compiler="eager"):
    """The model wrapped, compiled by the toolkit and run: what Dynamo did, what is in the graphs, and how far off."""
    record = load(wrapper, Path(), "m.yaml:3:5")
    mesh = init_device_mesh("cpu", record.shape(ranks), mesh_dim_names=record.axes)
    replica = mesh.get_local_rank("data") if "data" in record.axes else 0
    replicas = mesh["data"].size() if "data" in record.axes else 1
    decompositions = "inductor" if compiler == "inductor" else None
    names = []

    def look(module):
        names.extend(node.meta["desc"].expr() for node in module.graph.find_nodes(op="placeholder"))

    backend = Toolkit(passes=[look, *passes], compiler=compiler, decompositions=decompositions)
    net = model()
    before = [name for name, _ in net.named_parameters()]
    settings = {"backend": backend, "fullgraph": True, "dynamic": False}
    call = record.wrap(net, settings, Cell(model="feed_forward", wrapper=wrapper, backend="toolkit"), mesh)
    with observe() as seen:
        output = step(call, batch(replica))
    gradients = {name: whole(parameter.grad) for name, parameter in net.named_parameters()}
    found = {
        "graphs": len(seen.graphs), "runs": [graph.runs for graph in seen.graphs],
        "breaks": len(seen.graph_breaks), "eager": len(seen.eager_frames),
        "collectives": {note.graph: collectives_in(note) for note in backend.notes},
        "changed": [note.changed for note in backend.notes],
        "unnamed": [name for name in before if not any(f"'{name}'" in each for each in names)],
        "same names": before == [name for name, _ in net.named_parameters()],
    }  # fmt: skip
    if dist.get_backend() != "fake":
        wanted = expected_gradients(replicas)
        found["apart"] = max(float((gradients[name] - wanted[name]).abs().max()) for name in wanted)
        found["output apart"] = float((output - model()(batch(replica))).detach().abs().max())
    return found


def on_rank(rank, wrapper, **given):
    """The same, on one rank of a real group."""
    return captured(wrapper, dist.get_world_size(), **given)


def collectives_in(note):
    counts = {}
    for name in COLLECTIVES:
        count = note.operators.get(f"_c10d_functional.{name}.default", 0)
        if count:
            counts[name] = count
    return counts
