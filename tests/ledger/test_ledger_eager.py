"""Calls of compiled callables that run eagerly, all or in part, without a word of torch's; and twins that don't."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch_versions import TORCH, since

from pytest_torchcompile.ledger import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip
COROUTINES_FAIL = TORCH <= (2, 12)
"""Torch cannot read the byte code that Python 3.12 and 3.13 make of a coroutine; 2.14 can (seen on 3.12)."""


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Mine(nn.Module):
    """A linear layer of the user's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Forward."""
        return self.linear(x)


class Breaks(nn.Module):
    """A break."""

    def forward(self, x):
        """Forward."""
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


class Around(nn.Module):
    """Modules of torch's own beside one that breaks."""

    def __init__(self, *more):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), *more, nn.ReLU())

    def forward(self, x):
        """Forward."""
        return self.inner(x * 2)


class Off(nn.Module):
    """Disabled by the user."""

    @torch.compiler.disable
    def forward(self, x):
        """Forward."""
        return x + 1


class Called:
    """An object that is called."""

    def __call__(self, x):
        """Add."""
        return x + 1


@dataclasses.dataclass
class Batch:
    """Holds a tensor where torch does not look for one."""

    x: torch.Tensor


def halves(batch):
    """A break; what is after it has only the batch."""
    batch.x.sum().item()
    return helper(batch)


def helper(batch):
    """Only the batch."""
    return batch.x * 2


def number_left(batch):
    """A break; after it there is a number, nothing to compile."""
    return batch.x.sum().item() * 2


def row(x):
    """One row."""
    return x.sum()


def generator(x):
    """Yield."""
    yield x + 1


def in_place(module):
    """module.compile()."""
    module.compile(backend="eager")
    return module


def wrapped(function):
    """torch.compile."""
    return torch.compile(function, backend="eager")


X = torch.ones(2, 4)
EAGER = {  # torch 2.14 compiles a module of its own in place, as it does any other
    "module of torch's own": (lambda: in_place(nn.Linear(4, 4)), X,
                              since((2, 14), [], [("Linear.forward", "skipped", 2)])),
    "several": (lambda: in_place(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), X,
                since((2, 14), [], [("Sequential.forward", "skipped", 2)])),
    "one of two": (lambda: in_place(nn.Sequential(nn.Linear(4, 4), Mine())), X,
                   since((2, 14), [], [("Sequential.forward", "skipped", 1)])),
    "taken out by a break": (lambda: wrapped(Around(Breaks())), X,
                             [("Linear.forward", "graph_break", 1), ("ReLU.forward", "graph_break", 1)]),
    "disabled in place": (lambda: in_place(Off()), X, [("Off.forward", "disabled", 2)]),
    "disabled": (lambda: wrapped(Off()), X, [("Off.forward", "disabled", 2)]),
    "generator": (lambda: wrapped(generator), X, [("generator", "skipped", 2)]),
    "no graph left": (lambda: wrapped(torch.allclose), (X, X), [("allclose", "graph_break", 2)]),
    "hidden tensor": (lambda: wrapped(halves), Batch(X), [("halves", "graph_break", 1)]),
    "nothing to compile": (lambda: in_place(nn.Identity()), X, [("Identity.forward", "empty", 2)]),
}  # fmt: skip
HEALTHY = {
    "module of torch's own": (lambda: wrapped(nn.Linear(4, 4)), X, "Linear.forward"),
    "in place": (lambda: in_place(Mine()), X, "Mine.forward"),
    "in a container of torch's": (lambda: in_place(nn.Sequential(Mine())), X,
                                  since((2, 14), "Sequential.forward", "Mine.forward")),
    "no break": (lambda: wrapped(Around()), X, "Around.forward"),
    "number left": (lambda: wrapped(number_left), Batch(X), "number_left"),
    "built-in": (lambda: wrapped(torch.sin), X, "sin"),
    "behind vmap": (lambda: wrapped(torch.vmap(row)), X, "row"),
    "object": (lambda: wrapped(Called()), X, "Called.__call__"),
}  # fmt: skip


def observed(make, given):
    """Ledger of two calls."""
    call = make()
    with observe() as seen:
        for _ in range(2):
            call(*given) if isinstance(given, tuple) else call(given)
    assert seen.lost == []
    return seen


@pytest.mark.parametrize("name", EAGER)
def test_what_ran_eagerly_is_named(name):
    """Function, kind and calls, whether or not a graph ran beside it."""
    make, given, expected = EAGER[name]
    seen = observed(make, given)
    assert [(f.function, f.kind, f.calls) for f in seen.eager_frames] == expected
    assert all(f.reason for f in seen.eager_frames)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_ran_compiled_is_no_alarm(name):
    """No eager frame; the compile bears the user's name for what he compiled."""
    make, given, function = HEALTHY[name]
    seen = observed(make, given)
    assert seen.eager_frames == []
    assert seen.compiles[0].function == function
    assert sum(g.runs for g in seen.graphs) == 2


def test_the_reasons_help():
    """A module compiled in place is told what does compile it; one that a break took out, where it was called."""
    found = observed(*EAGER["module of torch's own"][:2]).eager_frames
    assert [frame.reason.endswith("torch.compile(module) does") for frame in found] == since((2, 14), [], [True])
    found = observed(*EAGER["taken out by a break"][:2]).eager_frames[0]
    line = Around.forward.__code__.co_firstlineno + 2
    assert found.reason.endswith(f"a graph break took this one out, at test_ledger_eager.py:{line}")


def test_a_late_observation_names_what_it_can():
    """Torch said its reasons before the block; modules compiled in place and disabled ones are known by themselves."""
    for make, kind in ((lambda: in_place(nn.Conv1d(4, 4, 1)), "skipped"), (lambda: in_place(Off()), "disabled")):
        call = make()
        call(X.t() if kind == "skipped" else X)
        with observe() as seen:
            call(X.t() if kind == "skipped" else X)
        compiled = since((2, 14), kind == "skipped", False)
        assert [(f.kind, f.calls) for f in seen.eager_frames] == ([] if compiled else [(kind, 1)])


def scaled(x, k):
    """The rest after the break is compiled for each k."""
    x = x.sin()
    torch._dynamo.graph_break()
    return x * k


def eagerly(seen):
    """Function, kind and calls of what ran eagerly, and how many graphs ran."""
    return [(f.function, f.kind, f.calls) for f in seen.eager_frames], sum(g.runs for g in seen.graphs)


def test_the_rest_of_a_function_that_may_not_recompile():
    """A graph ran in each of these calls, and the rest after the break ran eagerly without a word."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with observe() as seen:
        compiled(X, 1)
        with torch.compiler.set_stance("eager_on_recompile"):
            assert compiled(X, 2).equal(X.sin() * 2)
            compiled(X, 3)
            compiled(X, 1)
    assert eagerly(seen) == ([("scaled", "stance", 2)], 6)
    assert seen.eager_frames[0].reason == "torch.compiler.set_stance('eager_on_recompile') is in force"


def test_torchs_run():
    """It runs what is compiled and compiles nothing: of a new shape neither part, of a new number not the rest."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    compiled(X, 1)
    with observe() as seen:
        for given in ((X, 1), (X[:1], 1), (X, 2)):
            torch._dynamo.run(compiled)(*given)
        torch._dynamo.run(row)(X)
    found, graphs = eagerly(seen)
    assert (found, graphs) == ([("scaled", "stance", 1), ("scaled", "stance", 1), ("row", "stance", 1)], 3)
    # The function and its rest behind the break are told apart.
    whole, rest, _ = (frame.part for frame in seen.eager_frames)
    assert whole == "scaled"
    assert rest.startswith("the rest of scaled after line ")
    assert seen.eager_frames[0].reason == "torch._dynamo.run runs only what is compiled, and none of it fits"
    assert seen.compiles == []


def test_every_call_over_the_recompile_limit_counts():
    """Of the rest after a break too, whether the limit was hit in this observation or before; a reset ends it."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        with observe() as seen:
            for k in range(7):
                compiled(X, k)
        assert eagerly(seen) == ([("scaled", "limit", 4)], 10)
        with observe() as late:
            assert compiled(X, 77.0).equal(X.sin() * 77)
            compiled(X, 0)
        assert eagerly(late) == ([("scaled", "limit", 1)], 3)
        assert late.eager_frames[0].reason == "the recompile limit was hit earlier (3 entries)"
        with observe() as seen:
            torch.compiler.reset()
            compiled(X, 77.0)
        assert eagerly(seen) == ([], 2)


def test_over_the_limit_torch_is_left_as_it_was():
    """It asks nobody about such a function afterwards, though it did while a ledger was open."""
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for block in (observe, observe):
            with block():
                compiled(X, 1)
                compiled(X, 2)
            before = len(torch._dynamo.utils.get_compilation_metrics())
            compiled(X, 3)
            assert len(torch._dynamo.utils.get_compilation_metrics()) == before


def test_the_eager_side_of_a_comparison_is_no_missed_compile():
    """maybe_compile and the smoketest run a compiled model eagerly to compare; a later stance is seen as ever."""
    import logging

    from pytest_torchcompile import CompileConfig, CompileSmoketest, maybe_compile

    model = Mine()
    with observe() as seen:
        config = CompileConfig(enabled=True, backend="eager")
        compiled = maybe_compile(model, config, logging.getLogger("test"), sample_batch=X)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        assert CompileSmoketest(steps=2).run(torch.compile(model, backend="eager"), X, optimizer)
        assert (seen.eager_frames, seen.raised) == ([], 0)
        assert seen.compiles
        with torch.compiler.set_stance("force_eager"):
            torch.compile(model, backend="eager")(X)
            compiled(X)
    assert {f.kind for f in seen.eager_frames} == {"stance"}


COROUTINE = """
import asyncio, os, torch
from pytest_torchcompile import observe

async def later(x):
    return x.sin() + 1

with observe() as seen:
    asyncio.run(torch.compile(later, backend="eager")(torch.ones(3)))
print([f.kind for f in seen.eager_frames], sum(g.runs for g in seen.graphs), flush=True)
os._exit(0)
"""


def test_a_coroutine_runs_when_it_is_awaited():
    """The call that makes it ran no graph, and is no missed compile. One call, apart: torch 2.13 damages memory."""
    done = subprocess.run([sys.executable, "-c", COROUTINE], capture_output=True, text=True, check=False)
    expected = "[] 1\n"
    if sys.version_info < (3, 11):  # torch is not asked about it, and nothing is compiled
        expected = "['skipped'] 0\n"
    if sys.version_info >= (3, 12) and COROUTINES_FAIL:
        expected = ""
        assert "torch._dynamo.exc.InternalTorchDynamoError: KeyError: Instruction(" in done.stderr
    assert done.stdout == expected, done.stderr
