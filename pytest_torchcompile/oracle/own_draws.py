"""Own draws: a cell whose model draws random numbers, compiled once more as production compiles it.

Inductor draws by code of its own, in other graphs and kernels than under ``fallback_random``, where it calls eager's
generator. Where eager can be given the same numbers, production's code is what was judged
(:mod:`~pytest_torchcompile.oracle.production_numbers`). Else a cell runs under that setting, and production's code is
compiled here for each call and run. Whether its numbers have eager's distribution is asked by the check `randomness`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.ledger import observe
from pytest_torchcompile.ledger.break_sites import raising_line
from pytest_torchcompile.ledger.records import SILENT
from pytest_torchcompile.oracle.production_numbers import ends_in_inductor
from pytest_torchcompile.state.torch_state import forget_compiled, own_random_draws

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import Side
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["compile_with_own_draws", "production_side"]

_PHASE: Final = "own draws"


def compile_with_own_draws(run: Trial, alone: bool) -> dict[str, Any] | None:
    """Run the calls of a cell with random numbers that Inductor draws itself; forgets what was compiled before.

    ``alone``: no other rank waits for what this one does; several would have to agree on it.

    Returns ``tried``, whether that was done, as it is by a rank alone; ``calls`` that ran, ``graphs`` that were
    compiled, functions that silently ran eagerly, and ``error`` with ``call`` and ``raised_at``, if one raised;
    ``judged``, whether the run of the cell had such numbers itself, so that nothing was run again. None where there is
    nothing to try: the model draws nothing, its compiled run raised, or its backend does not end in Inductor.
    """
    if not run.draws or run.compiled.error or not ends_in_inductor(run):
        return None
    section: dict[str, Any] = {"tried": True, "calls": 0, "error": None, "call": "", "raised_at": None}
    if run.numbers is not None:
        # What of it ran eagerly is said of the run itself.
        graphs = len(run.compiled.seen["graphs"])
        return {**section, "calls": len(run.calls), "graphs": graphs, "silent": [], "judged": True}
    if not alone:
        return {"tried": False}
    # What the checks have compiled of the same functions counts towards torch's limit of recompiles.
    forget_compiled()
    with run.phase(_PHASE), own_random_draws(), observe(root=run.root) as seen:
        side = run.make(dict(run.settings))
        for call in run.calls:
            recording, _ = side.run(call, run.loss, run.train, run.seed)
            if error := recording.error:
                line = raising_line(error.exception, run.root)
                section |= {"error": error.to_dict(), "call": call.label, "raised_at": line}
                break
            section["calls"] += 1
    silent = sorted({frame.function for frame in seen.eager_frames if frame.kind in SILENT})
    return {**section, "graphs": len(seen.graphs), "silent": silent}


@contextlib.contextmanager
def production_side(run: Trial, alone: bool) -> Iterator[Side | None]:
    """A compiled side as production compiles it, to be timed; it is compiled while the block runs.

    ``alone`` as for :func:`compile_with_own_draws`. None where the side of the run is that already, or several ranks
    would have to agree. What was compiled before is forgotten, and what is compiled here too: code of either kind fits
    the same guards.
    """
    if run.numbers is not None or not alone or not run.draws or not ends_in_inductor(run):
        yield None
        return
    forget_compiled()
    try:
        with own_random_draws():
            yield run.make(dict(run.settings))
    finally:
        forget_compiled()
