"""The smallest error that is seen: ``python benchmarks/oracle_sensitivity.py``.

The output of one operator of a program (a linear layer or a convolution, three per program: first, middle, last) is
multiplied by ``1 + error``, in all elements or in one; the rest is ``aot_eager_decomp_partition``, which is correct but
not bitwise eager. Errors are a grid of factors of two from a quarter of eps. Beside the oracle judge
``torch.testing.assert_close`` with its defaults and ``torch._dynamo.utils.same`` with a float64 run, as torch's own
benchmarks do. What alarms without any error is not counted as detection: the operator is unusable for it. With
``--out`` each program's rows are kept; ``--table FILE...`` prints the table of such files.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import warnings
from pathlib import Path

import torch
from oracle_programs import PROGRAMS, draw
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, problem, record, reference
from pytest_torchcompile.state.snapshot import StateSnapshot

CHOSEN = ("mlp", "edges", "block", "llama", "recurrent", "writes", "mixed", "zoo conv_net", "zoo encoder")
JUDGES = ("oracle", "assert_close", "same, tol 1e-4", "same, tol 1e-3")
LARGEST = 64.0


class Spoiler:
    """Multiplies what a layer returns by a buffer, whose values are changed between runs without compiling again."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.factor, self.handle = layer, None, None

    def measure(self, model: nn.Module, batch: Batch) -> None:
        """Make the buffer, as large as what the layer returns."""
        shapes = []
        handle = self.layer.register_forward_hook(lambda m, a, out: shapes.append(out.shape))
        with torch.no_grad():
            private = batch.clone()
            model(*private.args, **private.kwargs)
        handle.remove()
        self.factor = torch.ones(shapes[0])
        self.handle = self.layer.register_forward_hook(
            lambda m, a, out: (out.float() * self.factor).to(out.dtype) if out.shape == self.factor.shape else out
        )

    def set(self, error: float, one: bool) -> None:
        """An error in all elements or in one of them."""
        self.factor.fill_(1.0 if one else 1.0 + error)
        if one:
            self.factor.view(-1)[self.factor.numel() // 3] += error


def verdicts(eager, compiled, expected, exact) -> dict[str, bool]:
    """Which judges alarm."""
    from torch._dynamo.utils import same

    found = {"oracle": any(problem(leaf) for leaf in compare(eager, compiled, expected))}
    others = {name: value for name, _, value in compiled.values()}
    pairs = [(value, others[name], exact.get(name)) for name, _, value in eager.values()
             if isinstance(value, torch.Tensor) and value.is_floating_point()]

    def alarms(check) -> bool:
        for e, c, r in pairs:
            try:
                if check(e, c, r) is False:
                    return True
            except Exception:
                return True
        return False

    found["assert_close"] = alarms(lambda e, c, r: torch.testing.assert_close(c, e, equal_nan=True))
    for name, tol in (("same, tol 1e-4", 1e-4), ("same, tol 1e-3", 1e-3)):
        found[name] = alarms(lambda e, c, r, tol=tol: same(e, c, r, tol=tol, equal_nan=True))
    return found


def smallest(name: str, dtype: torch.dtype, number: int, one: bool) -> dict[str, float | None]:
    """By judge: the smallest relative error seen from there on upwards; None where it alarms without any."""
    program = PROGRAMS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    model = program.make().to(dtype)
    draw(model, 1)
    layers = [part for part in model.modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    spoiler = Spoiler(layers[number * (len(layers) - 1) // 2])
    batch = Batch.of(program.inputs()).to(dtype=dtype)
    snapshot, tape = StateSnapshot(model), Tape()
    eager = record(model, model, batch, loss=program.loss, mode=tape)
    snapshot.restore()
    expected = reference(model, batch, loss=program.loss, tape=tape, draw=False)
    exact = {key: estimate.value for key, estimate in expected.estimates.items()}
    spoiler.measure(model, batch)
    snapshot.restore()
    call = torch.compile(model, backend="aot_eager_decomp_partition")

    def at(error: float) -> dict[str, bool]:
        spoiler.set(error, one)
        compiled = record(call, model, batch, loss=program.loss)
        snapshot.restore()
        return verdicts(eager, compiled, expected, exact)

    silent = {judge for judge, alarm in at(0.0).items() if not alarm}
    found: dict[str, float | None] = {judge: math.inf if judge in silent else None for judge in JUDGES}
    error = LARGEST
    while error >= torch.finfo(dtype).eps / 4:
        alarmed = at(error)
        still = {judge for judge in silent if alarmed[judge]}
        for judge in still:
            found[judge] = error
        silent = still
        if not silent:
            break
        error /= 2
    return found


def shown(error: float | None, dtype: torch.dtype) -> str:
    """As a multiple of eps."""
    if error is None:
        return "-"
    return "never" if error == math.inf else f"{error / torch.finfo(dtype).eps:.3g} eps"


def table(records: list[dict]) -> None:
    """A line for each dtype, for an error in all elements and in one."""
    print(f"| dtype, elements wrong | {' | '.join(JUDGES)} |\n|{'---|' * (len(JUDGES) + 1)}", flush=True)
    for kind, one in dict.fromkeys((row["dtype"], row["one"]) for row in records):
        rows = [each["found"] for each in records if (each["dtype"], each["one"]) == (kind, one)]
        cells = []
        for judge in JUDGES:
            usable = [row[judge] for row in rows if row[judge] is not None]
            middle = statistics.median_low(usable) if usable else None
            never = usable.count(math.inf)
            cells.append(f"{shown(middle, getattr(torch, kind))} ({len(usable)}/{len(rows)} usable, {never} never)")
        print(f"| {kind}, {'one' if one else 'all'} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=CHOSEN)
    parser.add_argument("--dtypes", nargs="*", default=("float32", "bfloat16", "float16"))
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
    for kind in options.dtypes:
        for one in (False, True):
            for name in options.programs:
                for number in range(3):
                    found = smallest(name, getattr(torch, kind), number, one)
                    records.append({"program": name, "layer": number, "dtype": kind, "one": one, "found": found})
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(json.dumps(records[-1]) + "\n")
    table(records)


if __name__ == "__main__":
    main()
