"""The ten faults of torch.compile that single mechanisms miss, and four healthy controls: all named, no alarm."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from pytest_torchcompile.ledger import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip


class Healthy(nn.Module):
    """A linear layer and a ReLU."""

    def __init__(self, k=1.0):
        super().__init__()
        self.linear, self.k = nn.Linear(4, 4), k

    def forward(self, x):
        """Forward."""
        return self.linear(x).relu()


class BreakInside(Healthy):
    """A break in the middle."""

    def forward(self, x):
        """Forward."""
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.relu()


class BreakFirst(Healthy):
    """A break before the first operator."""

    def forward(self, x):
        """Forward."""
        torch._dynamo.graph_break()
        return self.linear(x).relu()


class Disabled(Healthy):
    """Nothing of it may be compiled."""

    @torch._dynamo.disable
    def forward(self, x):
        """Forward."""
        return self.linear(x).relu()


class Scaled(Healthy):
    """A Python number of the instance."""

    def forward(self, x):
        """Forward."""
        return self.linear(x) * self.k


def broken_backend(gm, inputs):
    """Raise."""
    raise RuntimeError("boom")


@dataclass
class Case:
    """A model, the batch sizes of warm-up and test, and what the ledger has to say."""

    model: type = Healthy
    warm: tuple = (4,)
    test: tuple = (4, 4)
    options: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    second: tuple | None = None
    """Arguments of a second instance, which the test calls run."""
    recompiles: tuple = ()
    """Cause of each recompile, warm-up included."""
    breaks: tuple = ()
    eager: tuple = ()
    """Kind and calls of each eager frame, warm-up included."""
    runs: int = 3
    """Graph runs, warm-up included."""
    late: tuple | None = None
    """Eager frames of an observation that begins after the warm-up; None: those of above."""
    late_recompiles: int | None = None


STATIC, DYNAMIC = {"dynamic": False}, {"dynamic": True}
HIDE = {"suppress_errors": True}
CASES = {
    "F1 break inside": Case(BreakInside, breaks=("gb0025",), runs=6),
    "F2 break first": Case(BreakFirst, breaks=("gb0025",), runs=3),
    "F3 new shape": Case(test=(5, 6), options=STATIC, recompiles=("shape", "shape")),
    "F4 disabled": Case(Disabled, breaks=("gb0099",), eager=(("disabled", 3),), runs=0, late=(("disabled", 2),)),
    "F5 limit hit in warm-up": Case(
        warm=tuple(range(2, 14)), test=(20, 21), options=STATIC, recompiles=("shape",) * 7,
        eager=(("limit", 6),), runs=8, late=(("limit", 2),), late_recompiles=0),
    "F6 broken backend, errors suppressed": Case(
        options={"backend": broken_backend}, config=HIDE, eager=(("suppressed", 3),), runs=0,
        late=(("unknown", 2),)),
    "F7 new shape, errors suppressed": Case(
        test=(5, 6), options=STATIC, config=HIDE, recompiles=("shape", "shape")),
    "F8 duck shapes": Case(test=(5, 6), options=DYNAMIC, recompiles=("shape",)),
    "F9 compiler off": Case(config={"disable": True}, eager=(("off", 3),), runs=0, late=(("off", 2),)),
    "F10 batch of one": Case(warm=(3,), test=(5, 1), options=DYNAMIC, recompiles=("symbolic",)),
    "H1 static": Case(),
    "H2 dynamic": Case(warm=(3,), test=(5, 6), options=DYNAMIC),
    "H3 second instance": Case(second=()),
    "H4 second instance, another number": Case(Scaled, second=(2.0,), recompiles=("value",)),
}  # fmt: skip


def run(case, backend, warm, test):
    """Run some calls of warm-up and test."""
    torch.manual_seed(0)
    with torch._dynamo.config.patch(case.config) if case.config else contextlib.nullcontext():
        compiled = torch.compile(case.model(), **{"backend": backend, **case.options})
        with warm:
            for size in case.warm:
                compiled(torch.ones(size, 4))
        with test:
            if case.second is not None:
                compiled = torch.compile(case.model(*case.second), **{"backend": backend, **case.options})
            for size in case.test:
                compiled(torch.ones(size, 4))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(name, backend):
    """Observe all of a case and compare."""
    case = CASES[name]
    with observe() as seen:
        run(case, backend, seen.during("warm-up"), seen.during("test"))
    assert [r.cause for r in seen.recompiles] == list(case.recompiles)
    assert [b.gb_id or case.breaks[0] for b in seen.graph_breaks] == list(case.breaks)  # torch 2.8 has no ids
    assert [(f.kind, f.calls) for f in seen.eager_frames] == list(case.eager)
    assert sum(g.runs for g in seen.graphs) == case.runs
    assert seen.lost == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_every_fault_is_named_and_nothing_else(name, backend):
    """Causes, break ids, eager kinds with calls, graph runs: exact."""
    whole(name, backend)


@pytest.mark.parametrize("name", CASES)
def test_an_observation_after_the_warm_up_misses_no_fault(name):
    """What went wrong in the warm-up is still going on: breaks, limits and eager calls show up late too."""
    case = CASES[name]
    with contextlib.ExitStack() as stack:
        late = stack.enter_context(contextlib.ExitStack())
        seen = []

        @contextlib.contextmanager
        def begin():
            seen.append(late.enter_context(observe()))
            yield

        run(case, "eager", contextlib.nullcontext(), begin())
    (ledger,) = seen
    assert len(ledger.graph_breaks) == (0 if case.model is Disabled else len(case.breaks))
    eager = case.late if case.late is not None else case.eager
    assert [(f.kind, f.calls) for f in ledger.eager_frames] == list(eager)
    recompiles = len(case.recompiles) if case.late_recompiles is None else case.late_recompiles
    assert len(ledger.recompiles) == recompiles
    assert ledger.lost == []


def test_the_culprits_are_named():
    """Each fault's record leads to the line: function and file of this module."""
    for name in ("F1 break inside", "F3 new shape", "F4 disabled", "F5 limit hit in warm-up"):
        torch.compiler.reset()
        with observe() as seen:
            run(CASES[name], "eager", contextlib.nullcontext(), contextlib.nullcontext())
        records = [*seen.recompiles, *seen.graph_breaks, *seen.eager_frames]
        assert {r.file for r in records} == {__file__}
        assert {r.function for r in records} == {f"{CASES[name].model.__name__}.forward"}
