"""What the runner makes of one rank's run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.observation import Observation

pytestmark = pytest.mark.needs_torch

GRAPH = "class GraphModule(torch.nn.Module):\n    def forward(self, x):\n        return (x + 1,)\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_code_of_rank_0_alone_is_sent(rank, monkeypatch):
    """Its keys are told by every rank."""
    from pytest_torchcompile.run import runner

    monkeypatch.setattr(runner.checks, "load", lambda name: SimpleNamespace(measure=lambda run: {}))
    run = SimpleNamespace(
        run=lambda: None, compiled=SimpleNamespace(error=None), seconds={}, leaks=[], compared=False, single=False,
        options=SimpleNamespace(known=None),
        job=SimpleNamespace(checks=("compiles",), rank=rank), texts=[Text("0/0", "dynamo", GRAPH)],
    )  # fmt: skip
    seen = Observation("cell")
    runner._observe_run(run, seen)
    (graph,) = seen.sections["compiles"]["code"]
    assert graph["graph"] == "0/0 dynamo"
    assert set(seen.code_texts or ()) == ({graph["key"]} if rank == 0 else set())
