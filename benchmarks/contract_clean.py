"""False findings of the contract: ``python benchmarks/contract_clean.py --backend aot_eager --histories 5000``.

Small correct programs (layers of ``torch.nn``, chains of functions, models of the zoo), each called in histories as the
check ``contract`` draws them, with at least one mutation in each. Whatever is found is false, or an error of torch:
those that ``docs/found`` has are in ``KNOWN`` and counted apart, each by the program, the history and the kind. Each
program's line goes to a file at once; the same command goes on behind the last one. ``--seed`` draws other histories,
so that many processes share the work. ``--table`` prints the sums over all seeds of a backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

from pytest_torchcompile.contract.contract_search import MAX_CALLS
from pytest_torchcompile.contract.hunt import ZOO
from pytest_torchcompile.contract.layer_library import LAYERS, chain_source, layer_source
from pytest_torchcompile.contract.mutation import NAMES
from pytest_torchcompile.contract.worker import OwnFailure, ProgramSource, Worker
from pytest_torchcompile.dims import Dim, Dims
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_code, call, shape_sequences

KNOWN = (
    ("torch.nn.GroupNorm(", "memory_format", "crash", "groupnorm-channels-last-crash.md"),
    ("torch.nn.Dropout(", "training=False", "alias", "dropout-in-evaluation.md"),
    ("torch.nn.AlphaDropout(", "training=False", "alias", "dropout-in-evaluation.md"),
    ("torch.nn.RReLU(", "training=False", "stride", "rrelu-in-evaluation-memory-order.md"),
    ("torch.nn.GELU(", "special_values", "value", "gelu-of-infinity.md"),
    (".half().float()", "special_values", "value", "infinity-of-float16.md"),
    ("mode='linear'", "special_values", "value", "linear-interpolation-overflows.md"),
    ("mode='bilinear'", "special_values", "value", "linear-interpolation-overflows.md"),
    ("mode='trilinear'", "special_values", "value", "linear-interpolation-overflows.md"),
    ("torch.nn.MultiMarginLoss(", "empty_batch", "value", "margin-loss-of-nothing.md"),
    ("torch.nn.MultiMarginLoss(", "special_values", "value", "margin-losses-drop-nan.md"),
    ("torch.nn.MultiLabelMarginLoss(", "special_values", "value", "margin-losses-drop-nan.md"),
    ("torch.nn.Conv", "empty_batch dtypes", "error", "empty-batch-of-another-dtype.md"),
    (".heaviside(", "empty_batch", "error", "backward-nobody-asks-for.md"),
    (".floor_divide(", "empty_batch", "error", "backward-nobody-asks-for.md"),
    (" // ", "empty_batch", "error", "backward-nobody-asks-for.md"),
    (" // ", "training=False grad_mode", "error", "backward-nobody-asks-for.md"),
    ("AlphaDropout(", "strides", "value", "bernoulli-in-another-order.md"),
    ("AlphaDropout(", "memory_format", "value", "bernoulli-in-another-order.md"),
    (".heaviside(", "training=False grad_mode", "error", "backward-nobody-asks-for.md"),
    (".floor_divide(", "training=False grad_mode", "error", "backward-nobody-asks-for.md"),
    ("torch.nn.LSTMCell(", "autocast inner_autocast", "error", "backward-under-autocast.md"),
    ("torch.nn.Linear(", "autocast inner_autocast", "gradient", "backward-under-autocast.md"),
    ("", "unfrozen=True", "gradient", "unfrozen-parameters-keep-no-gradient.md"),
    ("", "unfrozen=True", "requires_grad", "unfrozen-parameters-keep-no-gradient.md"),
    ("interpolate(", "cuda=True autocast", "dtype", "interpolate-under-autocast.md"),
    ("interpolate(", "cuda=True inner_autocast", "dtype", "interpolate-under-autocast.md"),
    ("linear'", "cuda=True memory_format", "stride", "interpolate-memory-order.md"),
    ("torch.nn.RReLU(", "cuda=True strides", "stride", "rrelu-in-evaluation-memory-order.md"),
    ("torch.nn.BatchNorm", "special_values=inf", "buffer", "batch-norm-of-infinity.md"),
    ("torch.nn.BatchNorm", "special_values=mixed", "buffer", "batch-norm-of-infinity.md"),
    ("", "changed_class=True", "dtype", "class-change-unseen.md"),
    (".amax((1, 2)", "autocast=float16", "gradient", "amax-in-half-precision.md"),
    ("torch.nn.Dropout(", "training=False", "requires_grad", "dropout-in-evaluation.md"),
    ("Chain", "cuda=True autocast inner_autocast", "error", "backward-under-autocast.md"),
    ("", "not_contiguous=True empty_batch", "error", "attention-of-an-empty-batch.md"),
    (" % ", "special_values=mixed", "value", "remainder-of-large-numbers.md"),
)
"""Errors of torch: what the program calls, what the call that shows it has, the kind, the page of ``docs/found``.

On torch 2.11 set ``TORCHINDUCTOR_AUTOGRAD_CACHE=0``: its cache hands graphs of another autocast dtype out, which no
history tells (autocast-dtype-not-in-cache-key.md)."""
_FEW = ("Linear(6, 5)", "Conv2d(4, 6, 3, padding=1)", "BatchNorm2d(4)", "LayerNorm(6)", "GELU()", "Embedding(10, 6)",
        "MaxPool2d(2)", "MultiheadAttention(6, 2, batch_first=True)", "Dropout(0.3)", "LSTMCell(6, 5)")
_APART = 37
"""Programs between the beginnings of two seeds."""
_SEEDS_EACH = 1_000_000
"""Hypothesis' seeds of one ``--seed``: no two runs draw the same histories."""


def programs(few: bool) -> Iterator[tuple[str, str, str]]:
    """Name, text of the file, and what it is; for Inductor few, whose graphs its cache has after a while."""
    for number, (layer, _) in enumerate(LAYERS):
        if not few or layer in _FEW:
            yield f"layer_{number}", layer_source(number), layer
    for number in range(10 if few else 60):
        yield f"chain_{number}", chain_source(number), f"chain {number}"
    for name in ZOO:
        yield name, "", name


def mutated_histories(dims: Dims, offered: dict[str, list[str]], count: int, seed: int) -> list[Sequence]:
    """So many as the check draws them, each once, without those in which nobody does anything otherwise."""
    import hypothesis

    drawn: dict[Sequence, None] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=4 * count, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(shape_sequences(dims, MAX_CALLS, flips=True, mutations=offered))
    def draw(history: Sequence) -> None:
        if any(call.mutations for call in history):
            drawn[history] = None

    draw()
    return list(drawn)[:count]


def page_of(text: str, found: list[Any], device: str = "cpu") -> str:
    """The page of a known error; empty: the finding is false, or an error of torch that nobody knew.

    Only the call that shows it is looked at: another call of its history excuses nothing, unless it has put the module
    into evaluation, or frozen parameters that are frozen no more.
    """
    history, kind, _, message, at = found
    if at < 0:
        return ""
    # The history is the code of calls.
    calls = eval(history, {"call": call})[: at + 1]
    had = {name for name, _ in calls[-1].mutations}
    had |= {f"{name}={choice.partition(' ')[0]}" for name, choice in calls[-1].mutations}
    modes = [each.training for each in calls if each.training is not None]
    if modes and not modes[-1]:
        had.add("training=False")
    if device == "cuda":
        had.add("cuda=True")
        if "last dimension must be contiguous" in message:
            had.add("not_contiguous=True")
    if version("torch").startswith("2.11"):
        had |= _changed_unseen(calls, kind, message)
    for program, words, its_kind, page in KNOWN:
        if program in text and kind == its_kind and set(words.split()) <= had:
            return page
    return ""


def _changed_unseen(calls: Sequence, kind: str, message: str) -> set[str]:
    """What torch 2.11, and 2.13 no more, does not see of a module that changes between calls."""
    unseen = set()
    frozen = [dict(each.mutations).get("frozen") for each in calls]
    # Other parameters are frozen in a later call, and the graph of the first goes on.
    if any(frozen[1:]) and (kind == "requires_grad" or "eager has a gradient, compiled none" in message):
        unseen.add("unfrozen=True")
    entered = ["inner_autocast" in dict(each.mutations) for each in calls]
    # The class before computes in the dtype of the inputs.
    if any(entered[1:]) and not entered[0] and message.endswith("torch.float32 compiled"):
        unseen.add("changed_class=True")
    return unseen


def run_program(worker: Worker, dims: Dims, count: int, seed: int) -> dict[str, Any]:
    """What came of one program's histories."""
    counts: Counter[str] = Counter()
    findings, ratios = [], []
    for history in mutated_histories(dims, worker.offered, count, seed):
        told = worker.run(history)
        counts.update(told.counts)
        counts["drawn"] += 1
        counts["compared"] += told.counts.get("calls", 0) > 0 or bool(told.kind)
        if told.counts.get("in_calls") and told.counts["calls"]:
            ratios.append(told.counts["seconds"] / told.counts["in_calls"])
        if told.kind:
            findings.append([as_code(history), told.kind, told.where, told.message, told.at])
    return {"counts": dict(counts), "findings": findings, "ratios": ratios}


def source_of(name: str, text: str, folder: Path, backend: str, device: str) -> tuple[ProgramSource, Dims]:
    """Where the worker gets a program from, and its sizes."""
    around = {"backend": backend, "device": device}
    target = "pytest_torchcompile.contract.hunt:program_of"
    if not text:
        inputs, dims = ZOO[name]
        sizes = {dim: each.size or max(2, each.min or 2) for dim, each in dims.items()}
        return ProgramSource(target, {"zoo": name, "inputs": inputs} | around, NAMES, sizes), dims
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    dims = {"B": Dim(min=1, max=5)}
    return ProgramSource(target, {"file": str(path)} | around, NAMES, {"B": 2}), dims


def records_of(log: Path) -> list[dict[str, Any]]:
    """What a run has written so far: one record a program and turn."""
    if not log.exists():
        return []
    # A run that was ended in the middle of a line has not written it.
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in lines]


def summary(records: list[dict[str, Any]], device: str) -> None:
    """Print counts, findings, and the cost of a history."""
    counts: Counter[str] = Counter()
    for each in records:
        counts.update(each["counts"])
    pages: Counter[str] = Counter()
    false = []
    for each in records:
        for found in each["findings"]:
            if page := page_of(each["text"], found, device):
                pages[page] += 1
            else:
                false.append((each["about"], found))
    ratios = [ratio for each in records for ratio in each["ratios"]]
    print(f"{counts['drawn']:.0f} histories, {counts['compared']:.0f} with a call that was compared, "
          f"{counts['calls']:.0f} calls compared, {counts['refused']:.0f} refused by eager, {counts['mute']:.0f} mute")
    print(f"findings: {len(false)}, and {pages.total()} of known errors of torch: {dict(pages)}")
    if ratios:
        print(f"seconds of a history over those of its calls: median {statistics.median(ratios):.2f}, sum "
              f"{counts['seconds'] / counts['in_calls']:.2f}")
    for about, found in false:
        print(about, *found, sep=" | ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--histories", type=int, default=5000)
    parser.add_argument("--each", type=int, default=20, help="histories of a program in one turn")
    parser.add_argument("--few", action="store_true", help="24 programs, for Inductor")
    parser.add_argument("--folder", type=Path, default=Path(".compile-matrix/contract_clean"))
    parser.add_argument("--seed", type=int, default=0, help="of the histories; another one begins at another program")
    parser.add_argument("--table", action="store_true", help="only print the sums of what has run, over all seeds")
    options = parser.parse_args()
    # Programs' files are written again in each turn: processes side by side share none.
    side = options.backend if options.device == "cpu" else f"{options.backend}.{options.device}"
    own_folder = options.folder / f"{side}-{options.seed}"
    own_folder.mkdir(parents=True, exist_ok=True)
    if options.table:
        logs = sorted(options.folder.glob(f"{side}-*.jsonl"))
        summary([record for log in logs for record in records_of(log)], options.device)
        return
    log = options.folder / f"{side}-{options.seed}.jsonl"
    records = records_of(log)
    known_programs = list(programs(options.few))
    # Processes that end early have not all seen the same ones.
    begin = options.seed * _APART % len(known_programs)
    known_programs = known_programs[begin:] + known_programs[:begin]
    worker, start = None, time.monotonic()
    for place, (name, text, about) in enumerate(cycle(known_programs)):
        if place < len(records):
            continue
        if sum(each["counts"].get("drawn", 0) for each in records) >= options.histories:
            break
        source, dims = source_of(name, text, own_folder, options.backend, options.device)
        turn = place // len(known_programs)
        found: dict[str, Any] = {"counts": {}, "findings": [], "ratios": []}
        try:
            if worker is None:
                worker = Worker(source)
            else:
                worker.load(source)
            found = run_program(worker, dims, options.each, options.seed * _SEEDS_EACH + 1000 * turn + place)
        except OwnFailure as error:
            found["findings"] = [["", "own failure", "", str(error), -1]]
            worker = None
        except (UsageError, EOFError, OSError) as error:
            print(f"{name}: left out: {error}", flush=True)
            worker = None
        records.append({"program": name, "about": about, "turn": turn, "text": text, **found})
        with log.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        histories = sum(each["counts"].get("drawn", 0) for each in records)
        print(f"{time.monotonic() - start:6.0f} s {histories:6.0f} histories, {about}: "
              f"{len(found['findings'])} findings", flush=True)
        for each in found["findings"]:
            print("   ", page_of(text, each, options.device) or "FALSE?", *each, sep=" | ", flush=True)
    if worker is not None:
        worker.close()
    summary(records, options.device)


if __name__ == "__main__":
    main()
