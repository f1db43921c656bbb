"""benchmark: is a model faster compiled? Eager and compiled side by side, and what the numbers can and can't say."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.kernels import count_launches, read_kernels
from pytest_torchcompile.gauges.memory import measure_memory
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.layer.compiled_modules import compiled_part, join_modules
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.intervals import LEAST_ROUNDS, Ratio, quantile, ratio_of
from pytest_torchcompile.layer.items import Items, count_items
from pytest_torchcompile.layer.preservation import preserved
from pytest_torchcompile.layer.training_step import adapted_loss
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.oracle import default_loss

__all__ = ["Benchmark", "SideFigures", "StepRunner", "benchmark", "benchmark_sides"]

TURNS: Final = 3
"""Timings of each side in a round. The shortest counts for the ratio: what interrupts a step only makes it longer."""
LEAST_SECONDS: Final = 2e-3
"""A timing lasts at least this long: faster steps are repeated in it."""


@dataclass(frozen=True)
class SideFigures:
    """One way to run the model."""

    first_seconds: float
    """Wall seconds of the first step, compilation among them."""
    median: float
    """Seconds of a step in the steady state."""
    low: float
    high: float
    """Between them lie 8 of 10 steady steps."""
    items_per_second: float
    """Items of a batch over the median; of what, says :attr:`Benchmark.unit`."""
    peak_bytes: int
    """Memory that a step needs at its peak, beyond what was there before it."""
    kernels: int | None
    """GPU kernels of a step. On a CPU the calls of Inductor's kernels and of library ones; None where nobody counts."""


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark found. Its text is a table."""

    eager: SideFigures
    compiled: SideFigures
    ratio: Ratio
    """Seconds of a compiled step over those of an eager one."""
    verdict: str
    """``faster``, ``slower``, ``no difference``, or ``nothing was compiled``."""
    repeats: int
    """Steps in one timing."""
    compiles: int
    cached: int
    """Compiles that a compile cache served, at least in part: the first step says little about an empty cache then."""
    recompiles: int
    """After the first step."""
    late_compiles: int
    """Compiles in the timed rounds: the steady state was none."""
    memory_source: str
    """How memory was read: ``cuda``, ``rss`` or ``maxrss``."""
    unit: str = "items"
    """What is counted in a second: ``tokens`` of a batch of token ids, else ``items``."""
    enabled: bool = True
    """Was the second side to be compiled? Else eager was timed beside eager."""

    @property
    def speedup(self) -> float:
        """How many times as fast compiled is."""
        return 1 / self.ratio.value

    @property
    def pays_after(self) -> int | None:
        """Steps until compiling has paid for itself; None if it never does."""
        saved = self.eager.median - self.compiled.median
        cost = max(0.0, self.compiled.first_seconds - self.eager.first_seconds)
        return int(cost / saved) + 1 if self.verdict == "faster" and saved > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"speedup": self.speedup, "pays_after": self.pays_after}

    def __str__(self) -> str:
        ratio = self.ratio
        what = self.verdict if self.enabled else f"not enabled, so both sides are eager: {self.verdict}"
        lines = [
            f"{what}: {self.speedup:.2f} times as fast compiled (99 % interval {1 / ratio.high:.2f} to "
            f"{1 / ratio.low:.2f}, {ratio.rounds} rounds, {self.repeats} step(s) a timing)",
            f"{'':20}{'eager':>14}{'compiled':>14}",
        ]
        for row, show in _ROWS:
            name = row.format(unit=self.unit)
            lines.append(f"{name:20}{show(self.eager):>14}{show(self.compiled):>14}")
        lines.append(f"{self.compiles} compile(s), {self.cached} of them from a cache, {self.recompiles} recompile(s)"
                     + (f"; {self.late_compiles} in the timed rounds" if self.late_compiles else "")
                     + (f"; compiling pays after {self.pays_after} steps" if self.pays_after else ""))
        return "\n".join(lines)


_ROWS: Final[tuple[tuple[str, Callable[[SideFigures], str]], ...]] = (
    ("first step", lambda side: f"{side.first_seconds:.3f} s"),
    ("step, median", lambda side: f"{side.median * 1e3:.3f} ms"),
    ("8 of 10 steps", lambda side: f"{side.low * 1e3:.3f}-{side.high * 1e3:.3f}"),
    ("{unit} per second", lambda side: f"{side.items_per_second:.4g}"),
    ("memory of a step", lambda side: f"{side.peak_bytes / 2**20:.1f} MiB"),
    ("kernels of a step", lambda side: "-" if side.kernels is None else str(side.kernels)),
)


def benchmark(
    model: Callable[..., Any],
    config: CompileConfig,
    make_batch: Callable[..., Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    train: bool | None = None,
    rounds: int = 24,
    warmup: int = 3,
    least: float = 0.02,
    items: Callable[[Any], int] | None = None,
) -> Benchmark:
    """Time a model eagerly and compiled in one run, turn by turn, and judge the difference.

    A step is a forward pass without gradients, or, with ``train``, forward, loss and backward. A round is three timings
    of each on one batch, turn by turn; which comes first alternates. The first ``warmup`` rounds are thrown away. On a
    GPU timings are taken by CUDA events, else by the wall clock.

    The verdict rests on the ratio of the shortest timings in each round, of which it takes the median and its
    distribution-free 99 % interval (:func:`~pytest_torchcompile.layer.intervals.ratio_of`): ``no difference`` unless
    the whole interval is on one side of 1 and the median is at least ``least`` away from it.

    Args:
        model: Eager; a module or a function. Its state and the random states are put back at the end.
        config: How to compile; one that is not ``enabled`` compares eager with eager.
        make_batch: ``make_batch(round)`` or ``make_batch()``, not timed. Shapes that vary have to come up in the
            first ``warmup`` rounds, or they compile in the timed ones (``late_compiles``).
        loss_fn: As for :class:`CompileSmoketest`.
        train: None: if there is a loss, or the model is in training mode, has parameters, and gradients are enabled.
        rounds: At least 8.
        warmup: Rounds before; at least 1.
        least: The smallest relative difference that counts.
        items: Items of a batch; None: the tokens of a batch of token ids, padding included, else the size of the first
            dimension of its first tensor.

    Raises:
        ValueError: For too few rounds, and for a model that is compiled already, or a part of which is, be it by
            ``Module.compile`` or by an allowlist of a model that still lives. What the model or the compiler raises is
            raised as it is.
    """
    if rounds < LEAST_ROUNDS or warmup < 1:
        raise ValueError(f"rounds={rounds}, warmup={warmup}: expected at least {LEAST_ROUNDS} rounds and 1 before")
    if part := compiled_part(model):
        raise ValueError(f"it runs compiled already ({part}), so there is no eager side; give benchmark a model of "
                         "which nothing is compiled (a compiled module keeps the original as _orig_mod)")
    module = join_modules(model, loss_fn)
    if train is None:
        asked = module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        train = loss_fn is not None or asked
    loss = (adapted_loss(loss_fn) if loss_fn is not None else default_loss) if train else None
    compiled = torch.compile(model, **config.settings()) if config.enabled else model
    return benchmark_sides(
        StepRunner(model, module, loss), StepRunner(compiled, module, loss), _by_round(make_batch), rounds=rounds,
        warmup=warmup, least=least, items=items, asked=config.enabled,
    )  # fmt: skip


def benchmark_sides(
    eager: StepRunner,
    compiled: StepRunner,
    maker: Callable[[int], Any],
    *,
    rounds: int = 24,
    warmup: int = 3,
    least: float = 0.02,
    items: Callable[[Any], int] | None = None,
    asked: bool = True,
) -> Benchmark:
    """:func:`benchmark` of two sides that are there already; ``asked``: the second was to be compiled."""
    runs = [eager, compiled]
    with preserved(eager.module), preserved(compiled.module), observe(keep_texts=True) as seen:
        first = [run.timed(Batch.of(maker(0)), 1, wall=True) for run in runs]
        known = len(seen.recompiles)
        for number in range(warmup):
            for run in runs:
                run.timed(Batch.of(maker(number)), 1)
        repeats = max(1, round(LEAST_SECONDS / max(1e-9, eager.timed(Batch.of(maker(0)), 1))))
        before = len(seen.compiles)
        timings, shortest = _rounds(runs, maker, rounds, warmup, repeats)
        late, batch = len(seen.compiles) - before, Batch.of(maker(0))
        spaces = [measure_memory(lambda run=run: run.step(batch.clone()), _device(batch)) for run in runs]  # type: ignore[misc]
        counts = _kernels(runs, batch, seen)
    ran = any(graph.runs for graph in seen.graphs)
    ratio = ratio_of(shortest[1], shortest[0])
    counted = Items(items(batch.value)) if items else count_items(batch)
    sides = []
    for start, times, space, calls in zip(first, timings, spaces, counts, strict=True):
        middle = median(times)
        sides.append(SideFigures(start, middle, quantile(times, 0.1), quantile(times, 0.9), counted.count / middle,
                          space.extra, calls))
    verdict = "nothing was compiled" if asked and not ran else _verdict(ratio, least)
    cached = sum(any("hit" in answer for answer in found.caches) for found in seen.compiles)
    return Benchmark(sides[0], sides[1], ratio, verdict, repeats, len(seen.compiles), cached,
                     len(seen.recompiles) - known, late, spaces[0].source, counted.unit, asked)


def _verdict(ratio: Ratio, least: float) -> str:
    if not ratio.differs(least):
        return "no difference"
    return "faster" if ratio.value < 1 else "slower"


def _rounds(
    runs: list[StepRunner], maker: Callable[[int], Any], rounds: int, start: int, repeats: int
) -> tuple[list[list[float]], list[list[float]]]:
    """All timings of each side, and the shortest of each round."""
    timings: list[list[float]] = [[], []]
    shortest: list[list[float]] = [[], []]
    for number in range(rounds):
        batch = Batch.of(maker(start + number))
        taken: list[list[float]] = [[], []]
        for turn in range(TURNS):
            for which in (0, 1) if (number + turn) % 2 else (1, 0):
                taken[which].append(runs[which].timed(batch, repeats))
        for which in (0, 1):
            timings[which] += taken[which]
            shortest[which].append(min(taken[which]))
    return timings, shortest


class StepRunner:
    """Runs steps of one side: ``loss(output, batch)`` with its backward pass, or, without a loss, a forward pass."""

    def __init__(self, call: Callable[..., Any], module: torch.nn.Module, loss: Callable[..., Any] | None) -> None:
        self.call, self.module, self.loss = call, module, loss
        self._parameters = list(module.parameters())

    def timed(self, batch: Batch, repeats: int, wall: bool = False) -> float:
        """Seconds of one step, as the mean of ``repeats`` in a row."""
        private = batch.clone()
        if _device(batch) != "cpu" and not wall:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(repeats):
                self.step(private)
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / repeats
        start = time.perf_counter()
        for _ in range(repeats):
            self.step(private)
        if _device(batch) != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    def step(self, batch: Batch) -> None:
        """One step; gradients are dropped after it."""
        step_begins()
        with torch.set_grad_enabled(self.loss is not None):
            output = self.call(*batch.args, **batch.kwargs)
            if self.loss is not None:
                self.loss(output, batch.value).backward()
        for parameter in self._parameters:
            parameter.grad = None


def _device(batch: Batch) -> str:
    return next((str(tensor.device) for tensor in batch.tensors() if tensor.is_cuda), "cpu")


def _kernels(runs: list[StepRunner], batch: Batch, seen: Ledger) -> list[int | None]:
    """Kernels of one step of each: by the profiler on a GPU, by Inductor's code on a CPU."""
    if _device(batch) != "cpu":
        return [count_launches(lambda run=run: run.step(batch.clone())).kernels for run in runs]  # type: ignore[misc]
    made = {found.compile_id: 0 for found in read_kernels(seen.texts)}
    for found in read_kernels(seen.texts):
        made[found.compile_id] += found.launches
    with observe() as once:
        runs[1].step(batch.clone())
    counts = [made[graph.compile_id] * graph.runs for graph in once.graphs if graph.compile_id in made]
    return [None, sum(counts) if counts else None]


def _by_round(make: Callable[..., Any]) -> Callable[[int], Any]:
    try:
        inspect.signature(make).bind(0)
    except TypeError:
        return lambda _: make()
    except ValueError:  # written in C
        return make
    return make
