"""A test of a compiled model that proves nothing fails; one that proves less than it seems to is warned of."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
CONFTEST = """
import pytest
from models import Net

@pytest.fixture
def model():
    return Net()

@pytest.fixture
def engine(compiled_model):
    return {"run": compiled_model}

@pytest.fixture
def output(compiled_model):
    return compiled_model(batch(2))
"""
NEVER = """
import pytest, torch
from models import *

pytestmark = pytest.mark.compile_modes(backend="eager")

class Off(Net):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)

class Picky(Net):
    def forward(self, x):
        if x.shape[0] > 3:
            raise ValueError("too many")
        return super().forward(x)

def test_forgotten(compiled_model, model):
    assert model(batch(2)).shape == (2, 3)

@pytest.mark.parametrize("model", [Off()])
def test_disabled(compiled_model, graph_breaks):
    compiled_model(batch(2))
    assert len(graph_breaks) == 1

class TestClass:
    def test_forgotten_too(self, compiled_model):
        pass

@pytest.mark.parametrize("model", [Picky()])
def test_that_it_raises(compiled_model):
    with pytest.raises(ValueError, match="too many"):
        compiled_model(batch(4))

@pytest.mark.compile_modes(backend="eager", fullgraph=True)
@pytest.mark.parametrize("model", [Off()])
def test_that_it_does_not_compile(compiled_model):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_model(batch(2))

def test_of_another_fixture(engine):
    assert "run" in engine

def test_run_by_another_fixture(compiled_model, output):
    assert output.shape == (2, 3)

@pytest.mark.compile_limits(eager_frames=1)
@pytest.mark.parametrize("model", [Off()])
def test_meant_to_be_eager(compiled_model):
    compiled_model(batch(2))

def test_skips_itself(compiled_model):
    pytest.skip("no reason")

def test_another_ran(compiled_model):
    torch.compile(lambda x: x.sin(), backend="eager")(batch(2))

@pytest.mark.compile_limits(recompiles=0)
def test_another_ran_within_limits(compiled_model):
    torch.compile(lambda x: x.sin(), backend="eager")(batch(2))

@pytest.mark.parametrize("model", [Off()])
def test_disabled_beside_another(compiled_model):
    torch.compile(lambda x: x.sin(), backend="eager")(batch(2))
    compiled_model(batch(2))

@pytest.mark.parametrize("model", [torch.sin, lambda x: x.sin(), Net().forward])
def test_a_function(compiled_model):
    compiled_model(batch(2))

@pytest.mark.compile_modes(backend="eager", wrapper=["autocast", "checkpoint", "regional"])
@pytest.mark.parametrize("model", [Blocks()])
def test_wrapped(compiled_model):
    compiled_model(batch(2))

@pytest.mark.compile_modes(backend="eager", wrapper="models:mine")
def test_a_wrapper_of_ones_own(compiled_model):
    compiled_model(batch(2))
"""
MINE = """
class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Net()])

    def forward(self, x):
        return self.blocks[0](x)

def mine(model, settings, cell):
    return torch.compile(lambda x: model(x), **settings)
"""


def test_a_compiled_model_that_never_ran(repo):
    """Without limits and counters too; a call that raised, or a model run by another fixture, did run."""
    repo.file("conftest.py", CONFTEST + "from models import batch\n")
    repo.models(MINE)
    repo.file("test_it.py", NEVER)
    result = repo.run("-p", "no:cacheprovider", option="")
    result.assert_outcomes(passed=12, failed=6, skipped=1)
    forgotten = ("compiled_model was never called, so this test says nothing about it; call it, or take the fixture "
                 "`model` instead")
    result.stdout.fnmatch_lines(["*_ test_forgotten*", forgotten, "*_ test_disabled*",
                                 "compiled_model was called, but nothing of it ran compiled: no graph ran in this test",
                                 "  1. Off.forward  test_it.py:*", "     disabled, 1 call: *",
                                 "*_ TestClass.test_forgotten_too*", forgotten,
                                 "*_ test_another_ran*", forgotten, "*_ test_another_ran_within_limits*", forgotten,
                                 "*_ test_disabled_beside_another*",
                                 "compiled_model was called, but nothing of it ran compiled: no graph ran in its calls",
                                 "  1. Off.forward  test_it.py:*"])


LESS = """
import pytest, torch
from models import *

def in_place():
    layer = torch.nn.Linear(6, 3)
    layer.compile(backend="eager")
    layer(batch(2))

@pytest.mark.compile_modes(backend="eager")
def test_part(compiled_model):
    compiled_model(batch(2))
    in_place()

@pytest.mark.compile_modes(backend="eager")
@pytest.mark.compile_limits(eager_frames=1)
def test_allowed(compiled_model):
    compiled_model(batch(2))
    in_place()

@pytest.mark.parametrize("how", ["assert_no_recompiles", "expect"])
def test_forgot_with(recompile_counter, how):
    recompile_counter.expect(0) if how == "expect" else recompile_counter.assert_no_recompiles()
    torch.compile(torch.sin, backend="eager")(batch(2))

def test_counts_nothing(recompile_counter, model):
    model(batch(2))
    assert recompile_counter.count == 0

def test_looks(recompile_counter, model):
    model(batch(2))
    assert recompile_counter.count == 0 and not recompile_counter.compiles

def test_finds_no_break(graph_breaks, model):
    model(batch(2))
    assert not graph_breaks

def test_finds_none_in_what_ran(graph_breaks):
    torch.compile(torch.sin, backend="eager")(batch(2))
    assert graph_breaks == []

def test_does_not_look(graph_breaks, model):
    repr(graph_breaks), graph_breaks.explain()

def test_counts(recompile_counter):
    torch.compile(torch.sin, backend="eager")(batch(2))
    assert recompile_counter.count == 0
"""


def test_what_proves_less_than_it_seems_to(repo):
    """A frame that silently ran eagerly beside compiled ones, and a count of nothing, are warned of, at the test."""
    repo.file("conftest.py", CONFTEST)
    repo.file("test_it.py", LESS)
    result = repo.run("-p", "no:cacheprovider", option="")
    result.assert_outcomes(passed=8, failed=2, warnings=3)
    for call in ("assert_no_recompiles()", "expect(0)"):
        result.stdout.fnmatch_lines([f"recompile_counter.{call} was called without `with`, so it checked nothing; "
                                     f"write `with recompile_counter.{call}:` around the calls"])
    result.stdout.fnmatch_lines([
        "*test_it.py:10: RanEagerlyWarning: test_part[[]default-eager[]]: 1 function ran eagerly though meant to be "
        "compiled, and torch did not raise (compile_limits(eager_frames=1) allows it)",
        "    1. Linear.forward  *",
        "       skipped, 1 call: torch does not compile modules of its own in place*",
        "*test_it.py:26: RanEagerlyWarning: test_counts_nothing: recompile_counter was asked, but no compiled graph "
        "ran in this test: its 0 proves nothing",
        "*test_it.py:34: RanEagerlyWarning: test_finds_no_break: graph_breaks was asked, but no compiled graph ran in "
        "this test: that it is empty proves nothing",
    ])
