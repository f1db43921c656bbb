"""Shape trial: one way to compile one model for sizes that vary, in a process and with a cache folder of its own.

Runs as ``python -m pytest_torchcompile.adoption.shape_trial``: it reads a request as JSON from stdin and answers by one
line of JSON. What the model prints goes to stderr. :mod:`.shapes_command` is its other end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import batch_sizes
from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges.compiler import warm_toolchain
from pytest_torchcompile.layer.benchmark import steps_of_timing
from pytest_torchcompile.layer.benchmark_result import Ratio, ratio_of
from pytest_torchcompile.layer.step_runner import StepRunner
from pytest_torchcompile.layer.training_step import adapted_loss
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.records import Compile, whole_compiles
from pytest_torchcompile.loading import one_line
from pytest_torchcompile.oracle import default_loss
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.quantity import count
from pytest_torchcompile.run import subject
from pytest_torchcompile.wrappers.protocol import load as load_wrapper

__all__ = ["try_way"]

SEED: Final = 0
TURNS: Final = 9
_RECOMPILES: Final = {"auto": 1, "dynamic": 0}
"""As many of a function keep its sizes open; with static sizes it recompiles for each by design."""
PASSES: Final = 2
"""How often each size is met before it is timed: what compiles later is late."""


def try_way(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Compile for each size, then time each beside eager.

    ``asked``: ``cell`` and ``entry`` as plain data, ``root``, ``dim``, ``sizes`` in their order, and ``padded``: what
    each size is padded to.
    """
    cell, entry, root = Cell.from_dict(asked["cell"]), ModelEntry.from_dict(asked["entry"]), Path(asked["root"])
    settings = subject.compile_settings(cell, root, entry.where)
    wrapper = load_wrapper(cell.wrapper, root, entry.where)
    loss = None
    if cell.phase == "training":
        own = subject.loss_function(entry, root)
        loss = default_loss if own is None else adapted_loss(own)

    def batch_of(size: int) -> Batch:
        # The other dims stay as in the first batch.
        sizes = {**batch_sizes(entry.dims)[0], asked["dim"]: size}
        return subject.make_batch(entry, cell, root, SEED, sizes)

    warm_toolchain(settings, cell.device)

    def side_with(settings_or_eager: dict[str, Any] | None) -> StepRunner:
        # Each has a model of its own: a wrapper may compile parts of it in place, or change its forward.
        module = subject.build_model(entry, cell, root, SEED)
        return StepRunner(wrapper.wrap(module, settings_or_eager, cell), module, loss)

    eager, compiled = side_with(None), side_with(settings)
    sizes: list[int] = asked["sizes"]
    padded = {int(size): to for size, to in asked["padded"].items()}
    given_up: list[int] = []
    with observe() as seen:
        for size in sizes:
            ran = seen.graph_runs
            compiled.step(batch_of(padded[size]))
            # Torch gives up a function that was compiled too often, and runs it eagerly from then on.
            if seen.graph_runs == ran:
                given_up.append(size)
        met = len(seen.compiles)
        for _ in range(PASSES):
            for size in sizes:
                compiled.step(batch_of(padded[size]))
        timed = {size: _timed(eager, compiled, batch_of(size), batch_of(padded[size])) for size in sizes}
    compiles = seen.compiles[:met]
    return {
        "compiles": len(whole_compiles(compiles)), "cold_seconds": sum(each.seconds for each in compiles),
        "eager_sizes": given_up,
        "late_compiles": len(whole_compiles(seen.compiles[met:])),
        "eager": {size: seconds for size, (seconds, _) in timed.items()},
        "ratio": {size: [ratio.value, ratio.low, ratio.high] for size, (_, ratio) in timed.items()},
        "recompiled": _recompiled_text(seen.recompiles, cell.dynamic),
        "torch": torch.__version__,
    }  # fmt: skip


def _recompiled_text(recompiles: Sequence[Compile], dynamic: str) -> str:
    """Of the function that recompiled most the guard that failed last, its line, and what to do.

    Empty where no function recompiled more often than this setting of ``dynamic`` has to: of sizes that torch is to
    find out about, once.
    """
    by_function: dict[tuple[str, int, int], list[Compile]] = {}
    for each in recompiles:
        by_function.setdefault((each.file, each.line, each.resumed_at), []).append(each)
    worst = max(by_function.values(), key=len, default=[])
    if dynamic not in _RECOMPILES or len(worst) <= _RECOMPILES[dynamic]:
        return ""
    last = worst[-1]
    place = f" ({last.at})" if last.at else ""
    advice = recompile_advice(last, dynamic=dynamic == "dynamic")
    return f"a guard failed {count(len(worst), 'time')}, the last being {last.reason}{place}: {advice}"


def _timed(eager: StepRunner, compiled: StepRunner, own: Batch, padded: Batch) -> tuple[float, Ratio]:
    """Seconds of an eager step, and how many times as long a compiled one takes, turn by turn.

    Of eager the shortest counts, for what interrupts a step makes it longer. The ratio has a 99 % interval.
    """
    sides = ((eager, own), (compiled, padded))
    repeats = [steps_of_timing(side.time_steps(batch, 1)) for side, batch in sides]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for which, (side, batch) in enumerate(sides):
            seconds[which].append(side.time_steps(batch, repeats[which]))
    return min(seconds[0]), ratio_of(seconds[1], seconds[0])


def main() -> None:
    """Read the request, answer on the real stdout."""
    asked = json.load(sys.stdin)
    sys.path += [entry for entry in asked["path"] if entry not in sys.path]
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        found = try_way(asked)
    except TorchcompileError as error:
        found = {"error": str(error)}
    except Exception as error:
        found = {"error": f"raised {one_line(error)}"}
    answer.write(json.dumps(found))
    answer.close()


if __name__ == "__main__":
    main()
