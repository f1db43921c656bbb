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
        options=SimpleNamespace(known=None), draws=False,
        job=SimpleNamespace(checks=("compiles",), rank=rank, warm_toolchain=False),
        texts=[Text("0/0", "dynamo", GRAPH)],
    )  # fmt: skip
    seen = Observation("cell")
    runner._observe_run(run, seen)
    (graph,) = seen.sections["compiles"]["code"]
    assert graph["graph"] == "0/0 dynamo"
    assert set(seen.code_texts or ()) == ({graph["key"]} if rank == 0 else set())


@pytest.mark.parametrize("asked", [True, False])
def test_a_warm_compiler_is_had_before_the_cell_and_where_it_fails_the_cell_runs(asked, monkeypatch):
    """It is told why, for the seconds of compiling are those of a cold one."""
    from pytest_torchcompile.run import runner

    done = []

    def warm(settings, device):
        done.append((settings, device))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(runner.checks, "load", lambda name: SimpleNamespace(measure=lambda run: {}))
    monkeypatch.setattr(runner, "warm_toolchain", warm)
    seen = Observation("cell")
    run = SimpleNamespace(
        run=lambda: done.append("run"), compiled=SimpleNamespace(error=None), seconds={}, leaks=[], compared=False,
        single=False, options=SimpleNamespace(known=None), settings={"mode": "m"}, cell=SimpleNamespace(device="cpu"),
        draws=False,
        job=SimpleNamespace(checks=("compiles",), rank=0, warm_toolchain=asked), texts=[],
    )  # fmt: skip
    runner._observe_run(run, seen)
    assert done == ([({"mode": "m"}, "cpu"), "run"] if asked else ["run"])
    told = seen.sections["compiles"].get("cold_compiler", "")
    assert told.startswith("RuntimeError: no compiler (test_runner.py:") == asked
