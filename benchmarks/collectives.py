"""What each parallel wrapper communicates in one eager training step: collectives of rank 0, and their bytes.

Counted as they are dispatched to c10d, over gloo, in the third step. Bytes are those of the largest argument of each
call, which is the whole one: gathered, or before it is scattered. A functional all_gather has its shard alone there,
and counts times the ranks. PP's output, which our wrapper broadcasts so that it can be compared, is left out.

    python benchmarks/collectives.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_torchcompile import zoo
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.wrappers.protocol import load

WRAPPERS = ("ddp", "fsdp2", "simple_fsdp", "fsdp1", "tp", "pp", "fsdp2+tp", "simple_fsdp+tp")
NO_DATA = ("wait_tensor", "barrier", "wrap_tensor_autograd")


class CommunicationCount(TorchDispatchMode):
    """Counts collectives, and their bytes, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator, and run it."""
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            short = name.rpartition("::")[2].strip("_")
            if short not in NO_DATA:
                # What is gathered may be one tensor, or a list of parts.
                self.calls[short] += 1
                self.bytes[short] += _whole_bytes(short, args)
        return func(*args, **(kwargs or {}))


def _whole_bytes(operator: str, args: tuple[Any, ...]) -> int:
    largest = max(map(_bytes_of, args), default=0)
    if operator == "all_gather_into_tensor":
        # torch.distributed._functional_collectives, torch 2.8 to 2.13: (shard, ranks of the group, name of the group).
        return largest * args[1]
    return largest


def _bytes_of(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))


def run_rank(rank: int, ranks: int, name: str, store: str, folder: str) -> None:
    """Three steps of one rank; what is only sent once is sent in the first two."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    wrapper = load(name, Path(), "here")
    cell = Cell(model="mini_gpt", wrapper=name, phase="training")
    mesh = init_device_mesh("cpu", wrapper.shape(ranks), mesh_dim_names=wrapper.axes)
    torch.manual_seed(0)
    model = zoo.mini_gpt()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    call = wrapper.wrap(model, None, cell, mesh)
    ids = zoo.token_batch(4, 32)
    for _ in range(3):
        model.zero_grad()
        with CommunicationCount() as forward:
            output = call(ids)
        with CommunicationCount() as backward:
            zoo.lm_loss(output, ids).backward()
    if rank == 0:
        lines = [f"{name}*{ranks}: parameters {parameters:,} bytes"]
        for when, count in (("forward", forward), ("backward", backward)):
            for operator, calls in count.calls.items():
                if name == "pp" and operator == "broadcast":
                    continue
                lines.append(f"  {when:9} {operator:28} {calls:4} calls {count.bytes[operator]:12,} bytes")
        Path(folder, "counted").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run each wrapper and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wrappers", nargs="*", default=WRAPPERS)
    for name in parser.parse_args().wrappers:
        ranks = load(name, Path(), "here").ranks
        with tempfile.TemporaryDirectory() as folder:
            processes.spawn(run_rank, (ranks, name, f"{folder}/store", folder), nprocs=ranks)
            print(Path(folder, "counted").read_text(), flush=True)


if __name__ == "__main__":
    main()
