"""What several files of tests of the instruments share."""

from __future__ import annotations

import contextlib

import pytest


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def known_ledger(request):
    """Compare the ledger of a sequence of calls with what it is known to be, on each backend.

    ``with known_ledger(kinds of compiles, recompiles as (cause, what, old, new), runs of each graph, **options) as c``
    gives what compiles a function. There must be nothing else in the ledger: no false alarm.

    Inductor's caches of graphs are off. They key a graph by its operations alone and, on a hit, add the guards of
    whoever compiled it first. So after ``test_size_modulo`` a plain ``x + 1`` recompiles for an odd size. Torch 2.13
    does that, and the ledger says so, but a known sequence must not depend on the test before it.
    """
    import torch

    from pytest_torchcompile.ledger import observe
    from pytest_torchcompile.lowering.scheduler_notes import compile_anew

    @contextlib.contextmanager
    def known(compiles, recompiles, runs, **options):
        torch.compiler.reset()
        with compile_anew(), observe() as seen, torch.random.fork_rng():
            yield lambda f, **own: torch.compile(f, backend=request.param, **{**options, **own})
        torch.compiler.reset()
        told = [(c.kind, c.reason) for c in seen.compiles if c.kind != "backward"]
        assert [kind for kind, _ in told] == compiles, told
        # Torch 2.15 tells a parameter from other tensors in what it expected.
        found = [(r.cause, r.what, r.expected.replace("Parameter", "a tensor"), r.actual) for r in seen.recompiles]
        assert found == recompiles
        assert [g.runs for g in seen.graphs] == runs
        assert [*seen.graph_breaks, *seen.eager_frames, *seen.failures, *seen.lost] == []
        assert all(r.reason in r.all_reasons for r in seen.recompiles)
        assert [len(r.all_reasons) for r in seen.recompiles] == list(range(1, len(recompiles) + 1))

    return known
