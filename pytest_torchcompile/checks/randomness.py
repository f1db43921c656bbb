"""randomness: what a model draws at random has eagerly and compiled the same distribution, and obeys the seed.

The other checks have Inductor draw eager's own numbers, so that every value can be compared. In production it draws its
own, by other code: here the model is compiled for that, and both are run with many seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.backends import BACKENDS
from pytest_torchcompile.checks.check import Check, not_run, unjudged
from pytest_torchcompile.errors import headline
from pytest_torchcompile.observation import Problem

if TYPE_CHECKING:
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.wrappers.protocol import CellTrial

__all__ = ["CHECK"]

INDUCTORS = ("inductor", "aot_eager_decomp_partition", "aot_eager_decomp_partition_crossref")
"""Backends that Inductor's setting about random numbers holds for: its decompositions obey it too."""
RAISES = "compiled with random numbers of its own, as production compiles it, it raises in"
SEEDS, FEW = 64, 4
"""Seeds that each side is run with; fewer where eager draws nothing, so that a seed must not matter at all."""


def measure(run: CellTrial) -> dict[str, Any]:
    """The leaves that are no draws of one distribution, and whether there was anything random."""
    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.oracle.chances import Chances, compare_chances, sample_chances
    from pytest_torchcompile.oracle.leaf_limits import problem
    from pytest_torchcompile.state.torch_state import own_random_draws

    if run.compiled.error or run.side is None:
        return not_run(run)

    def run_seeds(side: Side, seeds: int, first: int) -> Chances:
        return sample_chances(side.call, side.module, run.calls[0].batch, loss=run.loss, train=run.train,
                              seeds=seeds, first=first)

    eager = run.make(None)
    expected, seeds = run_seeds(eager, FEW, run.seed), FEW
    if expected.varies:
        expected, seeds = run_seeds(eager, SEEDS, run.seed), SEEDS
    with own_random_draws(), observe() as seen:
        # Other seeds than eager's: equal draws would be no two samples of one distribution.
        side = run.make(run.settings)
        actual = run_seeds(side, seeds, run.seed + seeds)
        raises = [] if actual.error else list(_raised_by_others(run, side))
    leaves = compare_chances(expected, actual)
    return {"raised": None, "backend": run.cell.backend, "graphs": len(seen.graphs), "random": expected.varies,
            "seeds": seeds, "compared": len(leaves), "raises": raises,
            "wrong": list(filter(None, map(problem, leaves)))}


def _raised_by_others(run: CellTrial, side: Side) -> Iterator[str]:
    """Call once with each size that the first call has not, or make a step of it; eager has done so before."""
    from pytest_torchcompile.oracle.recorder import record
    from pytest_torchcompile.state.snapshot import StateSnapshot

    start, met = StateSnapshot(side.module), {_shapes_of(run.calls[0].batch)}
    for call in run.calls[1:]:
        shapes = _shapes_of(call.batch)
        # Batches of equal shapes run the same code.
        if shapes in met:
            continue
        met.add(shapes)
        recording = record(side.call, side.module, call.batch, loss=run.loss, train=run.train, seed=run.seed)
        # A step changes the state, and the next size has to begin where the first did.
        start.restore()
        if recording.error is not None:
            yield f"{call.label}: {headline(str(recording.error))}"


def _shapes_of(batch: Batch) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in batch.tensors())


def judge(section: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Problem]:
    """Problems of one section; takes no limits."""
    if section["raised"]:
        yield from unjudged(section)
    elif not section["graphs"]:
        yield Problem("no graph was compiled with random numbers of its own, so there is nothing to judge")
    # Older reports have run the first size alone.
    elif raises := section.get("raises"):
        yield Problem(f"{RAISES} {raises[0]}", "\n".join(raises[1:]), _hint_for(section.get("backend", "inductor")))
    elif wrong := section["wrong"]:
        yield Problem(wrong[0], "\n".join(wrong[1:]), _hint_for(section.get("backend", "inductor")))
    # The first of what is compared is about the seeds.
    elif section["compared"] < 2:
        yield Problem("nothing to judge: with the seeds of this check both sides raised, or gave no number to compare")


def _hint_for(backend: str) -> str:
    """``backend``: a name or ``module:attribute``."""
    setting = "`torch._inductor.config.fallback_random = True` has it draw eager's own"
    if backend in INDUCTORS:
        advice = setting
    elif backend in BACKENDS and not BACKENDS[backend].kernels:
        advice = "this backend runs torch's own operators, so look at what changes the graph before it"
    else:
        advice = f"look at what the backend {backend!r} makes of them; where it goes on to Inductor, {setting}"
    return f"the compiled code draws its random numbers in another way than eager; {advice}"


CHECK = Check("randomness", measure, judge)
