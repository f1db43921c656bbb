"""A training step on a mesh of data parallel 2 x tensor parallel 2: eager, Inductor and the toolkit beside each other.

Four processes run one model each way: eager, compiled by aot_eager, by Inductor, and by the toolkit with Inductor last,
without a pass and with ``bucket_collectives``. Told of each, by rank 0:

- outputs and gradients beside one process that runs the plain model on the batches of both replicas;
- how far the outputs of a replica's two ranks are apart, and whether all ranks begin the same collectives;
- collectives of a step by kind, with their bytes where torch records them (NCCL);
- seconds of a step, in turns, and how much of the machine's peak of products that is;
- memory that a step adds at its peak (CUDA).

    python benchmarks/mesh_steps.py                        # gloo, the small model
    python benchmarks/mesh_steps.py --device cuda wide_gpt --dtype bfloat16 --batch 64 --length 128 --rounds 12

    --json FILE    the same as data
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from toolkit_inductor import error_of, ratio_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchcompile import zoo
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.gauges.machine_peaks import machine_peaks
from pytest_torchcompile.wrappers.protocol import load

RANKS = 4
REPLICAS = 2
WRAPPERS = ("fsdp2+tp", "simple_fsdp+tp")
MODELS: dict[str, dict[str, int]] = {
    "mini_gpt": {},
    "wide_gpt": {"width": 1024, "heads": 16, "layers": 4},
}
"""Arguments of ``zoo.mini_gpt_aligned``."""
STEPS = 5
"""Timed steps of a side in a round."""
SIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1}
"""Bytes of an element, by the names of dtypes in torch's trace."""


def backends() -> dict[str, Any]:
    """The sides, the first of which is eager."""
    return {
        "eager": None,
        "aot_eager": "aot_eager",
        "inductor": "inductor",
        "toolkit": Toolkit(compiler="inductor", decompositions="inductor"),
        "toolkit, bucket_collectives": Toolkit(passes=["bucket_collectives"], compiler="inductor",
                                               decompositions="inductor"),
    }


@dataclass
class SideResult:
    """What one way to run the model showed. Rank 0's, and of all ranks where it says so."""

    model: str
    wrapper: str
    side: str
    error: str = ""
    first_step: float = 0.0
    """Seconds of the first step, which compiles."""
    output_error: float = 0.0
    """Beside one process: root of squares of the difference over that of the output; the largest of all ranks."""
    gradient_error: float = 0.0
    """The same for the parameter whose gradient is farthest off, of all ranks."""
    pairs_apart: float = 0.0
    """The outputs of the two ranks of a replica beside each other, as ``output_error``; 0: equal bit by bit."""
    ranks_agree: bool = False
    """All ranks began as many collectives of each kind."""
    collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes: dict[str, int] = field(default_factory=dict)
    """By NCCL's name of the collective; empty where nobody records it."""
    step_seconds: float = 0.0
    """The median; of each round the slowest rank counts."""
    beside_eager: str = ""
    beside_inductor: str = ""
    flops: int = 0
    """Of products of a step, on one rank."""
    share_of_roof: float = 0.0
    peak_bytes: int = 0
    """Most memory in a step, beyond what was there before it."""


@dataclass
class Given:
    """What the command line asks for."""

    device: str
    dtype: str
    batch: int
    length: int
    rounds: int
    models: list[str]
    wrappers: list[str]


def make_model(name: str, given: Given, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return zoo.mini_gpt_aligned(**MODELS[name]).to(device, getattr(torch, given.dtype))


def make_batch(replica: int, given: Given, device: torch.device) -> torch.Tensor:
    """The ids of one replica."""
    drawn = torch.Generator().manual_seed(replica)
    return torch.randint(0, zoo.VOCABULARY, (given.batch, given.length), generator=drawn).to(device)


def run_step(call: Callable[..., Any], model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    output: torch.Tensor = call(ids)
    zoo.lm_loss(output.float(), ids).backward()
    return output.detach()


def whole(tensor: Any) -> torch.Tensor:
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


@dataclass
class Plain:
    """What one process makes of all batches, and FLOPs of a step of one replica."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    flops: int


def run_plain(name: str, given: Given, device: torch.device) -> Plain:
    model = make_model(name, given, device)
    outputs: list[torch.Tensor] = []
    sums: dict[str, torch.Tensor] = {}
    counter = FlopCounterMode(display=False)
    for replica in range(REPLICAS):
        ids = make_batch(replica, given, device)
        # It begins at zero each time.
        with counter:
            outputs.append(run_step(model, model, ids))
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[key] = sums.get(key, 0) + parameter.grad.double() / REPLICAS
    return Plain(outputs, sums, counter.get_total_flops())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def collectives_of(step: Callable[[], object], device: torch.device, folder: Path) -> tuple[Counter[str], Counter[str]]:
    """How many collectives a step begins by the name of c10d's operator, and bytes by the name of NCCL's.

    From the profiler, which sees eager and compiled code alike.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
        synchronize(device)
    file = folder / f"trace{dist.get_rank()}.json"
    profile.export_chrome_trace(str(file))
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for event in json.loads(file.read_text())["traceEvents"]:
        name, facts = event.get("name", ""), event.get("args", {})
        if name.startswith("c10d::"):
            calls[name.removeprefix("c10d::").strip("_")] += 1
        if name.startswith("ncclDevKernel") and "Collective name" in facts:
            elements = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
            moved[facts["Collective name"]] += elements * SIZES.get(facts.get("dtype", ""), 4)
    calls.pop("barrier", None)
    return calls, moved


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def rounds_of(steps: list[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Seconds of a step of each side in each round, of the slowest rank. Sides take turns, and so does their order."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        turn = number % len(steps)
        for index in [*range(turn, len(steps)), *range(turn)]:
            # Untimed, so that the timed ones begin alike.
            steps[index]()
            synchronize(device)
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                steps[index]()
            synchronize(device)
            slowest = torch.tensor((time.perf_counter() - begun) / STEPS, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            found[index].append(float(slowest))
    return found


def gathered(value: object) -> list[Any]:
    """What each rank has to say."""
    heard: list[Any] = [None] * RANKS
    dist.all_gather_object(heard, value)
    return heard


@dataclass
class Errors:
    """What one rank has to say of a side."""

    output: float
    gradients: float
    pair: float
    collectives: dict[str, int]


def judge_side(result: SideResult, step: Callable[[], torch.Tensor], model: torch.nn.Module, plain: Plain,
               replica: int, pair: Any, device: torch.device, folder: Path) -> Errors:
    """Fill in what this rank alone can tell, but the seconds of warm steps; what all have to tell is returned."""
    begun = time.perf_counter()
    output = step()
    synchronize(device)
    result.first_step = time.perf_counter() - begun
    gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    gradient_error = error_of(list(gradients.values()), [plain.gradients[name] for name in gradients])
    first = output.clone()
    # The first rank of a pair hands on its output.
    dist.broadcast(first, group=pair, group_src=0)
    for _ in range(2):
        step()
    calls, moved = collectives_of(step, device, folder)
    result.collectives, result.collective_bytes = dict(calls), dict(moved)
    result.peak_bytes = peak_of(step, device)
    output_error, pair_error = error_of([output], [plain.outputs[replica]]), error_of([output], [first])
    return Errors(output_error, gradient_error, pair_error, dict(calls))


def fill_in(result: SideResult, heard: list[Errors]) -> None:
    """What all ranks have told."""
    result.output_error = max(errors.output for errors in heard)
    result.gradient_error = max(errors.gradients for errors in heard)
    result.pairs_apart = max(errors.pair for errors in heard)
    result.ranks_agree = all(errors.collectives == heard[0].collectives for errors in heard)


def judge_wrapper(name: str, wrapper: str, given: Given, mesh: Any, device: torch.device, folder: Path
                  ) -> list[SideResult]:
    record = load(wrapper, Path(), "here")
    replica = mesh.get_local_rank("data")
    plain, ids = run_plain(name, given, device), make_batch(replica, given, device)
    results: list[SideResult] = []
    steps: list[Callable[[], torch.Tensor]] = []
    for side, backend in backends().items():
        result = SideResult(name, wrapper, side)
        results.append(result)
        model = make_model(name, given, device)
        settings = None if backend is None else {"backend": backend, "dynamic": False}
        call = record.wrap(model, settings, Cell(model=name, wrapper=wrapper, device=given.device), mesh)

        def step(call: Callable[..., Any] = call, model: torch.nn.Module = model) -> torch.Tensor:
            return run_step(call, model, ids)

        mine: Errors | None = None
        try:
            mine = judge_side(result, step, model, plain, replica, mesh.get_group("tensor"), device, folder)
        except Exception as error:
            result.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        # A side that one rank cannot run would hang the others in its timing.
        heard = gathered(mine)
        if any(errors is None for errors in heard):
            result.error = result.error or "another rank failed"
            continue
        fill_in(result, heard)
        steps.append(step)
    timed = [result for result in results if not result.error]
    seconds = rounds_of(steps, given.rounds, device)
    by_side = {result.side: found for result, found in zip(timed, seconds, strict=True)}
    peak = machine_peaks(str(device)).products_per_second(given.dtype)
    for result, found in zip(timed, seconds, strict=True):
        result.step_seconds = median(found)
        result.beside_eager = str(ratio_of(found, by_side["eager"]))
        if "inductor" in by_side:
            result.beside_inductor = str(ratio_of(found, by_side["inductor"]))
        # Pairs of ranks share what a replica computes; what is not split both compute, so this is the least.
        result.flops = plain.flops * REPLICAS // RANKS
        result.share_of_roof = result.flops / result.step_seconds / peak
    return results


def told(result: SideResult) -> str:
    """One side, in lines."""
    head = f"{result.model} {result.wrapper} {result.side}"
    if result.error:
        return f"{head}: {result.error}"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.collectives.items()))
    moved = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in sorted(result.collective_bytes.items()))
    return (f"{head}: output {result.output_error:.1e}, gradients {result.gradient_error:.1e} from one process, pairs "
            f"{result.pairs_apart:.1e} apart; ranks {'agree' if result.ranks_agree else 'DISAGREE'}\n"
            f"    collectives: {counts or 'none'}{'; ' + moved if moved else ''}\n"
            f"    first step {result.first_step:.1f} s, then {1000 * result.step_seconds:.3f} ms: {result.beside_eager}"
            f" of eager, {result.beside_inductor} of inductor; {result.share_of_roof:.1%} of the roof; at most "
            f"{result.peak_bytes / 2**20:.1f} MiB more in a step")


def run_rank(rank: int, given: Given, folder: str) -> None:
    """One rank: every model and wrapper in turn."""
    device = torch.device("cpu")
    torch.set_num_threads(1)
    if given.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store",
                            rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=240))
    # One for all: groups of a second mesh have other names, and collectives of two names are not joined.
    mesh = init_device_mesh(device.type, (REPLICAS, RANKS // REPLICAS), mesh_dim_names=("data", "tensor"))
    results: list[SideResult] = []
    for name in given.models:
        for wrapper in given.wrappers:
            torch.compiler.reset()
            results += judge_wrapper(name, wrapper, given, mesh, device, Path(folder))
            if rank == 0:
                Path(folder, "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
                print("\n".join(told(each) for each in results[-len(backends()):]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, and keep what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a replica")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence, at most 128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--wrappers", nargs="*", default=list(WRAPPERS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    given = Given(asked.device, asked.dtype, asked.batch, asked.length, asked.rounds, asked.models or ["mini_gpt"],
                  asked.wrappers)
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(run_rank, (given, folder), nprocs=RANKS)
        finally:
            kept = Path(folder, "results.json")
            if asked.json and kept.is_file():
                asked.json.write_text(kept.read_text())


if __name__ == "__main__":
    main()
