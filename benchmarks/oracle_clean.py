"""False alarms of the oracle: ``python benchmarks/oracle_clean.py --seeds 100 --out clean.jsonl``.

Correct programs (``oracle_programs.py``), each compiled once per dtype and backend and run with many seeds: weights and
batches drawn anew, forward and backward, every leaf compared. Prints, for each dtype and backend, the comparisons, the
ones that were equal bit for bit, the alarms, and the largest statistics of leaves that are more than noise. With
``--out`` the lines so far survive an end of the process; ``--table FILE...`` prints the table of such files.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from oracle_programs import PROGRAMS, draw

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Limits, Tape, compare, note, problem, record, reference
from pytest_torchcompile.state.snapshot import StateSnapshot

DTYPES = ("float32", "bfloat16", "float16")
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")

TITLES = (
    "dtype", "backend", "comparisons", "bit for bit", "leaves not equal", "alarms", "rms", "bias", "peak", "more draws"
)  # fmt: skip


def judged(name: str, dtype: torch.dtype, backend: str, seeds: range, device: str) -> dict:
    """What came of one program: counts, alarms, largest statistics."""
    program = PROGRAMS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    model = program.make().to(device, dtype)
    call = torch.compile(model, backend=backend)
    found = {"comparisons": 0, "bitwise": 0, "leaves": 0, "inexact": 0, "further": 0, "alarms": [], "notes": [],
             "rms": 0.0, "bias": 0.0, "peak": 0.0, "compiled_s": 0.0, "reference_s": 0.0}
    for seed in seeds:
        draw(model, seed)
        torch.manual_seed(seed)
        batch = Batch.of(program.inputs()).to(device, dtype)
        snapshot, tape, references = StateSnapshot(model), Tape(), []
        eager = record(model, model, batch, loss=program.loss, seed=seed, mode=tape)
        snapshot.restore()
        start = time.perf_counter()
        compiled = record(call, model, batch, loss=program.loss, seed=seed)
        found["compiled_s"] += time.perf_counter() - start
        snapshot.restore()

        def made(batch=batch, seed=seed, tape=tape, references=references):
            references.append(reference(model, batch, loss=program.loss, seed=seed, tape=tape, draw=False))
            return references[-1]

        start = time.perf_counter()
        leaves = compare(eager, compiled, made)
        found["reference_s"] += time.perf_counter() - start
        count(found, seed, leaves, references)
    return found


def count(found: dict, seed: int, leaves: list, references: list) -> None:
    """Add one comparison."""
    found["comparisons"] += 1
    found["bitwise"] += not references
    found["leaves"] += len(leaves)
    found["further"] += any(r.draws > 1 for r in references)
    # As the checks do it: the worst element of gradients is one of all gradients.
    gradients = [leaf for leaf in leaves if leaf.kind == "gradient"]
    for leaf in leaves:
        limits = Limits().over(gradients) if leaf.kind == "gradient" else Limits()
        if text := problem(leaf, limits):
            found["alarms"].append([seed, text])
    found["notes"] += [[seed, text] for leaf in leaves if (text := note(leaf))]
    for leaf in leaves:
        if leaf.numerical:
            found["inexact"] += 1
            if leaf.decided:
                rms, bias, peak = (a / b for a, b in zip(Limits().of(leaf.numel), Limits().of(10**9), strict=True))
                scaled = {"rms": leaf.rms / rms, "bias": leaf.bias / bias, "peak": leaf.peak / peak}
                found |= {key: max(found[key], value) for key, value in scaled.items()}


def table(records: list[dict]) -> None:
    """Print one line for each dtype and backend, and the alarms."""
    groups = defaultdict(list)
    for one in records:
        groups[one["dtype"], one["backend"]].append(one)
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for (dtype, backend), ones in sorted(groups.items()):
        total = {key: sum(o[key] for o in ones) for key in ("comparisons", "bitwise", "inexact", "further")}
        alarmed = sum(len({seed for seed, _ in o["alarms"]}) for o in ones)
        largest = " | ".join(f"{max(o[key] for o in ones):.2f}" for key in ("rms", "bias", "peak"))
        print(f"| {dtype} | {backend} | {total['comparisons']} | {total['bitwise']} | {total['inexact']} | {alarmed} | "
              f"{largest} | {total['further']} |")
    print(f"in all {sum(o['comparisons'] for o in records)} comparisons")
    for one in records:
        for seed, text in one["alarms"][:5]:
            print(f"alarm: {one['program']} {one['dtype']} {one['backend']} seed {seed}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="*", type=Path)
    options = parser.parse_args()
    if options.table:
        table([json.loads(line) for file in options.table for line in file.read_text().splitlines()])
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    from torch._inductor import config

    config.fallback_random = True
    records = []
    for name in options.programs:
        for dtype in (d for d in options.dtypes if d in PROGRAMS[name].dtypes):
            for backend in options.backends:
                seeds = range(options.first, options.first + options.seeds)
                found = judged(name, getattr(torch, dtype), backend, seeds, options.device)
                about = {"program": name, "dtype": dtype, "backend": backend, "device": options.device,
                         "torch": torch.__version__}
                records.append({**about, **found})
                shown = {k: len(v) if isinstance(v, list) else round(v, 2) for k, v in found.items()}
                print(name, dtype, backend, shown, found["alarms"][:2], flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(records[-1]) + "\n")
    table(records)


if __name__ == "__main__":
    main()
