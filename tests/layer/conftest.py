"""What several files of tests of the instruments share."""

from __future__ import annotations

import pytest


@pytest.fixture
def check_ledger():
    """Compare the ledger of a sequence of calls with what it is known to be."""
    import torch

    from pytest_torchcompile.instruments import observe

    def check(sequence, compiles, recompiles, runs, options, backend):
        torch.compiler.reset()
        with observe() as seen, torch.random.fork_rng():
            sequence(lambda f, **own: torch.compile(f, backend=backend, **{**options, **own}))
        torch.compiler.reset()
        assert [c.kind for c in seen.compiles if c.kind != "backward"] == compiles
        # Torch 2.15 tells a parameter from other tensors in what it expected.
        found = [(r.cause, r.what, r.expected.replace("Parameter", "a tensor"), r.actual) for r in seen.recompiles]
        assert found == recompiles
        assert [g.runs for g in seen.graphs] == runs
        assert [*seen.graph_breaks, *seen.eager_frames, *seen.failures, *seen.lost] == []
        assert all(r.reason in r.all_reasons for r in seen.recompiles)
        cached = range(1, len(seen.recompiles) + 1)
        assert [len(r.all_reasons) for r in seen.recompiles] == list(cached)[-len(seen.recompiles) :]

    return check
