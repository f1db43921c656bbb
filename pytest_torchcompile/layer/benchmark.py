"""benchmark: is a model faster compiled? Eager and compiled side by side, and what the numbers can and can't say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.memory import measure_memory
from pytest_torchcompile.gauges.quietness import (
    LEAST_SECONDS,
    TURNS,
    is_quiet,
    unrest_of,
    unrest_of_round,
    watch_others,
)
from pytest_torchcompile.layer.batch_items import Items, count_items
from pytest_torchcompile.layer.benchmark_result import (
    LEAST_ROUNDS,
    NOTHING,
    Benchmark,
    Ratio,
    SideFigures,
    came_from_cache,
    quantile,
    ratio_of,
)
from pytest_torchcompile.layer.compiled_modules import compiled_part, join_modules
from pytest_torchcompile.layer.config import CompileConfig
from pytest_torchcompile.layer.preservation import preserved
from pytest_torchcompile.layer.sample_batch import batch_for, maker_by_round
from pytest_torchcompile.layer.step_runner import StepRunner, device_of, look_inside, steady_coverage
from pytest_torchcompile.layer.training_step import loss_of_step
from pytest_torchcompile.ledger import Ledger, observe
from pytest_torchcompile.ledger.eager_reasons import eager_reason
from pytest_torchcompile.ledger.explain import functions_over_limit
from pytest_torchcompile.ledger.records import Compile, Text, whole_compiles

__all__ = ["Benchmark", "benchmark", "benchmark_sides", "steady_ratio", "steps_of_timing"]

NARROW: Final = 1.15
"""An interval that is wider than this gets more rounds, up to :data:`MOST_ROUNDS` times as many."""
MOST_ROUNDS: Final = 3


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
    GPU timings are taken by CUDA events, else by the wall clock. On a noisy machine more rounds follow, up to three
    times as many; and where a difference is seen it has to be seen again, in as many.

    The verdict rests on the ratio of the shortest timings in each round, of which it takes the median and its
    distribution-free 99 % interval (:func:`~pytest_torchcompile.layer.benchmark_result.ratio_of`): ``no difference``
    unless the whole interval is on one side of 1 and the median is at least ``least`` away from it, and ``could not be
    told`` where the interval is so wide that a difference of a quarter may hide in it.

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
    part = compiled_part(model)
    if part:
        raise ValueError(f"it runs compiled already ({part}), so there is no eager side; give benchmark a model of "
                         "which nothing is compiled (a compiled module keeps the original as _orig_mod)")
    module = join_modules(model, loss_fn)
    loss = loss_of_step(module, loss_fn, train)
    compiled = torch.compile(model, **config.settings()) if config.enabled else model
    maker = maker_by_round(make_batch)

    def batch_of_round(number: int) -> Batch:
        return batch_for(model, maker(number))

    return benchmark_sides(
        StepRunner(model, module, loss), StepRunner(compiled, module, loss), batch_of_round, rounds=rounds,
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
    seconds: float | None = None,
    texts: Sequence[Text] = (),
    earlier: Sequence[Compile] = (),
) -> Benchmark:
    """:func:`benchmark` of two sides that are there already.

    Args:
        eager: The first side.
        compiled: The second side.
        maker: Makes the batch of a round.
        rounds: As for :func:`benchmark`, and so are ``warmup``, ``least`` and ``items``.
        asked: The second was to be compiled.
        seconds: About how long the timed rounds may take; at least 8 rounds are made, however long those take.
        texts: The code of what was compiled before, so that its kernels are counted.
        earlier: Recompiles before, which may have been up to Dynamo's limit.
    """
    sides = (eager, compiled)
    with preserved(eager.module), preserved(compiled.module), observe(keep_texts=True) as seen:
        # By the wall clock: compiling is work of the CPU.
        first = [side.time_steps(Batch.of(maker(0)), 1, wall=True) for side in sides]
        first_recompiles = len(seen.recompiles)
        for number in range(warmup):
            for side in sides:
                side.time_steps(Batch.of(maker(number)), 1)
        plan = _plan_timings(sides, Batch.of(maker(0)), rounds, seconds)
        # From here on nothing should compile: what does is told as late.
        first_compiles = len(seen.compiles)
        with watch_others() as others:
            timings, confirmed = _confirmed_rounds(sides, maker, plan, warmup, least)
        late = whole_compiles(seen.compiles[first_compiles:])
        batch = Batch.of(maker(0))
        # The copy is made before: it is no memory of the step.
        # What ran compiled in the first steps only, as before a recompile limit, is not what was timed.
        earlier_runs = seen.graph_runs
        peaks = [measure_memory(partial(side.step, batch.clone()), device_of(batch)) for side in sides]
        insides = look_inside(sides, batch, [*texts, *seen.texts])
        ran = seen.graph_runs > earlier_runs
        over_limit = functions_over_limit(seen, earlier)
        # A function that was given up still runs what was compiled of it before, so each batch may fare otherwise.
        asked_of = range(warmup) if over_limit else range(1)
        coverage = steady_coverage(sides, maker, asked_of)
    ratio = _trusted_ratio(timings)
    counted = Items(items(batch.value)) if items is not None else count_items(batch)
    figures: list[SideFigures] = []
    for which, timed in enumerate(timings):
        middle = median(timed.all)
        figures.append(SideFigures(
            first_seconds=first[which],
            median=middle,
            low=quantile(timed.all, 0.1),
            high=quantile(timed.all, 0.9),
            items_per_second=counted.count / middle,
            peak_bytes=peaks[which].extra,
            kernels=insides.kernels[which],
        ))
    verdict = ratio.verdict(least, confirmed)
    if asked and not ran:
        verdict = NOTHING
    not_compiled = ""
    # A function that was given up for its recompiles says more.
    if verdict == NOTHING and not over_limit:
        not_compiled = _why_nothing(seen)
    compiles = whole_compiles(seen.compiles)
    cached = sum(came_from_cache(compile_record.caches) for compile_record in compiles)
    return Benchmark(
        eager=figures[0],
        compiled=figures[1],
        ratio=ratio,
        verdict=verdict,
        repeats=plan.repeats[0],
        compiles=len(compiles),
        cached=cached,
        recompiles=len(seen.recompiles) - first_recompiles,
        late_compiles=len(late),
        memory_source=peaks[0].source,
        unit=counted.unit,
        enabled=asked,
        profile=insides.profile,
        launches=insides.launches,
        work=insides.work,
        parts=insides.parts,
        late=[record.to_dict() for record in late],
        over_limit=over_limit,
        coverage=coverage,
        eager_operators=insides.eager_operators,
        others_load=others.told,
        not_compiled=not_compiled,
    )


def _why_nothing(seen: Ledger) -> str:
    """Why no compiled code ran, in words."""
    why = eager_reason([record.to_dict() for record in seen.graph_breaks],
                       [record.to_dict() for record in seen.eager_frames])
    return f"{why.what}: {why.remedy}"


def steady_ratio(
    eager: StepRunner, compiled: StepRunner, batch: Batch, *, seconds: float, rounds: int = 24, least: float = 0.02
) -> tuple[Ratio, str]:
    """The ratio of steps on one batch, compiled over eager, and its verdict; nothing else is measured.

    Both sides run the same module, whose state is put back. Arguments as for :func:`benchmark_sides`.
    """
    sides = (eager, compiled)

    def make_batch(number: int) -> Batch:
        return batch

    with preserved(eager.module):
        for _ in range(3):
            for side in sides:
                side.time_steps(batch, 1)
        plan = _plan_timings(sides, batch, rounds, seconds)
        timings, confirmed = _confirmed_rounds(sides, make_batch, plan, 0, least)
    ratio = _trusted_ratio(timings)
    return ratio, ratio.verdict(least, confirmed)


@dataclass(frozen=True)
class _TimingPlan:
    """How long each side is timed."""

    repeats: tuple[int, int]
    """Steps in one timing, eager and compiled."""
    rounds: int
    most: int
    """Rounds where the interval stays wide."""


def _plan_timings(
    sides: tuple[StepRunner, StepRunner], batch: Batch, rounds: int, seconds: float | None
) -> _TimingPlan:
    """As many steps in a timing of each side as fill it, and as many rounds as ``seconds`` can pay."""
    # The shortest of a few: one that was interrupted would leave too few rounds.
    eager, compiled = sides
    eager_seconds = min(eager.time_steps(batch, 1) for _ in range(TURNS))
    compiled_seconds = min(compiled.time_steps(batch, 1) for _ in range(TURNS))
    # Each by its own speed: a slow side that is repeated as often as a fast one is timed for minutes.
    repeats = steps_of_timing(eager_seconds), steps_of_timing(compiled_seconds)
    most = MOST_ROUNDS * rounds
    if seconds is not None:
        one_round = TURNS * (repeats[0] * eager_seconds + repeats[1] * compiled_seconds)
        affordable = max(LEAST_ROUNDS, int(seconds / one_round))
        rounds, most = min(rounds, affordable), min(most, affordable)
    return _TimingPlan(repeats, rounds, most)


def steps_of_timing(step_seconds: float) -> int:
    """How many steps of that length fill one timing; at least one."""
    return max(1, round(LEAST_SECONDS / step_seconds))


@dataclass
class _Timings:
    """Seconds of the steps of one side."""

    all: list[float] = field(default_factory=list)
    shortest: list[float] = field(default_factory=list)
    """Of each round."""
    unrest: list[float] = field(default_factory=list)
    """Of each round how many times its longest timing is its shortest one: of the same steps, on the same batch."""


def _confirmed_rounds(
    sides: Sequence[StepRunner], maker: Callable[[int], Any], plan: _TimingPlan, start: int, least: float
) -> tuple[tuple[_Timings, _Timings], bool]:
    """The timings, and whether a difference was seen twice: a second series is timed where the first shows one.

    One interval of 99 % is wrong once in a hundred runs, and on a busy machine more often. Two agree by chance hardly
    ever, so that a model which is as fast is not told to be slower.
    """
    timings = _timed_rounds(sides, maker, plan, start)
    first = ratio_of(timings[1].shortest, timings[0].shortest)
    if not first.differs(least):
        return timings, False
    again = _timed_rounds(sides, maker, plan, start)
    second = ratio_of(again[1].shortest, again[0].shortest)
    for timed, more in zip(timings, again, strict=True):
        timed.all += more.all
        timed.shortest += more.shortest
        timed.unrest += more.unrest
    return timings, first.agrees(second, least)


def _trusted_ratio(timings: tuple[_Timings, _Timings]) -> Ratio:
    """The ratio, with a wider interval where the machine is not quiet: eager steps then differ from themselves.

    Load is no noise that cancels: threads of one side may wait for each other longer than those of the other.
    """
    ratio = ratio_of(timings[1].shortest, timings[0].shortest)
    unrest = unrest_of(timings[0].unrest)
    return ratio if is_quiet(unrest) else ratio.widened(unrest)


def _timed_rounds(
    sides: Sequence[StepRunner], maker: Callable[[int], Any], plan: _TimingPlan, start: int
) -> tuple[_Timings, _Timings]:
    """Time both sides turn by turn; which comes first alternates, from turn to turn and from round to round."""
    timings = _Timings(), _Timings()
    for number in range(plan.most):
        # Asked of the width alone: who stops at the first verdict he likes gets it too often.
        if number >= plan.rounds and ratio_of(timings[1].shortest, timings[0].shortest).width <= NARROW:
            break
        batch = Batch.of(maker(start + number))
        taken: tuple[list[float], list[float]] = [], []
        for turn in range(TURNS):
            for which in (0, 1) if (number + turn) % 2 else (1, 0):
                taken[which].append(sides[which].time_steps(batch, plan.repeats[which]))
        for timed, seconds in zip(timings, taken, strict=True):
            timed.all += seconds
            timed.shortest.append(min(seconds))
            timed.unrest.append(unrest_of_round(seconds))
    return timings
