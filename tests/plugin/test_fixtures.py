"""Fixtures and markers in a model repository, each test a pytest run of its own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
CONFTEST = """
import pytest
from models import Net

@pytest.fixture
def model():
    return Net()
"""
BREAKS = """
class Breaks(Net):
    def forward(self, x):
        x = self.inner(x)
        print(end="")
        return self.outer(x)
"""


@pytest.fixture
def tests(repo):
    """Write a test file beside a conftest with a model, and run it."""
    repo.file("conftest.py", CONFTEST)

    def run(text, *args, name="test_it.py"):
        repo.file(name, "import pytest, torch\nfrom models import *\n" + text)
        return repo.run("-p", "no:cacheprovider", *args, option="")

    return run


def lines(result, *expected):
    result.stdout.fnmatch_lines([f"*{line}*" for line in expected])


def test_combinations_are_tests(tests):
    """compile_modes makes a test of each combination; the model is really compiled so, and says so in its id."""
    result = tests("""
@pytest.mark.compile_modes("default", dynamic=["auto", "static"], backend=["eager", "aot_eager"],
                           fullgraph=[False, True])
def test_one(compiled_model, compile_config, recompile_counter, model):
    for size in (2, 3, 4):
        torch.testing.assert_close(compiled_model(batch(size) * 0), model(batch(size) * 0))
    assert recompile_counter.count == {"auto": 1, "static": 2}[compile_config.dynamic]
    assert len(recompile_counter.compiles) == recompile_counter.count + 1
    assert compile_config.mode == "default" and compile_config.wrapper == "none"

def test_plain(compile_config):
    assert (compile_config.backend, compile_config.dynamic) == ("inductor", "auto")
""", "-v")
    result.assert_outcomes(passed=9)
    ids = [f"{dynamic}{backend}{full}" for dynamic in ("", "-static") for backend in ("-eager", "-aot_eager")
           for full in ("", "-fullgraph")]
    lines(result, *(f"test_one[[]default{i}[]] PASSED" for i in ids), "test_plain PASSED")


def test_fullgraph_and_own_backends_reach_torch(tests):
    """fullgraph=True makes a break an error; module:attribute is looked up, and sys.path left as it was."""
    result = tests(BREAKS + """
import functools, sys
seen = []

def mine(graph, inputs):
    seen.append(graph)
    return graph.forward

@pytest.fixture
def model():
    return Breaks()

@pytest.mark.compile_modes(backend="eager", fullgraph=True)
def test_full(compiled_model):
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled_model(batch(2))

path = list(sys.path)

@pytest.mark.compile_modes(backend="test_it:mine")
def test_own(compiled_model):
    compiled_model(batch(2))
    assert len(seen) == 2
    assert sys.path[:len(path)] == path  # torch may append to it

@pytest.mark.compile_modes(backend=[mine, functools.partial(mine)], dynamic="static")
def test_given(compiled_model):
    seen.clear()
    compiled_model(batch(2))
    assert len(seen) == 2

@pytest.mark.compile_modes(backend="test_it:nothing")
def test_none(compiled_model):
    pass
""", "-v")
    result.assert_outcomes(passed=4, errors=1)
    lines(result, "test_given[[]default-static-mine*[]] PASSED")
    lines(result, "test_it.py:*: 'test_it' has no attribute 'nothing'; *Known: *")


def test_inductor(tests):
    """The default is torch.compile's own: Inductor."""
    tests("""
def test_default(compiled_model, recompile_counter, model):
    x = batch(2)
    torch.testing.assert_close(compiled_model(x), model(x))
    assert recompile_counter.compiles[0].seconds_in["inductor"] > 0
""").assert_outcomes(passed=1)


def test_wrappers_leave_no_trace(repo, tests):
    """A wrapper that changes the module is undone, so that a model of the whole session can be compiled again."""
    repo.file("conftest.py", """
    import pytest, torch

    class Block(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block(6, 6) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    @pytest.fixture(scope="session")
    def model():
        return Deep()
    """)
    result = tests("""
@pytest.mark.compile_modes(backend="eager", wrapper=["regional", "checkpoint", "autocast", "none"])
def test_one(compiled_model, compile_config, recompile_counter, model):
    out = compiled_model(batch(2))
    assert out.dtype is (torch.bfloat16 if compile_config.wrapper == "autocast" else torch.float32)
    function = recompile_counter.compiles[0].function
    assert ("Block" in function) == (compile_config.wrapper == "regional"), function

def test_after(model, recompile_counter):
    model(batch(2))
    assert not recompile_counter.compiles
    assert all("forward" not in vars(block) and "_compiled_call_impl" not in vars(block) for block in model.blocks)
""")
    result.assert_outcomes(passed=5)


def test_models_that_cannot_be_compiled(tests):
    """What the fixture `model` returned or the wrapper asks is told in a line, as an error of the test."""
    result = tests("""
# The lines below are named in what is expected.


@pytest.mark.parametrize("model", [None])
def test_none(compiled_model): pass

@pytest.mark.parametrize("model", [Net])
def test_class(compiled_model): pass

def test_the_class_is_as_it_was(recompile_counter):
    torch.compile(Net(), backend="eager")(batch(2))

@pytest.mark.parametrize("model", [torch.sin])
@pytest.mark.compile_modes(wrapper="autocast", backend="eager")
def test_function(compiled_model): pass

@pytest.mark.compile_modes(wrapper="regional", backend="eager")
def test_blocks(compiled_model): pass

@pytest.mark.compile_modes(wrapper="ddp", backend="eager")
def test_ranks(compiled_model): pass

@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr("pytest_torchcompile.run.subject.cxx_compiler", lambda: None)

def test_machine(no_compiler, compiled_model): pass
""", "-rs")
    result.assert_outcomes(errors=5, skipped=1, passed=1)
    lines(result, "test_it.py:7: the fixture `model` returned None; expected a torch.nn.Module or a function",
          "test_it.py:10: the fixture `model` returned the class Net; return an instance of it, Net()",
          "test_it.py:16: the wrapper 'autocast' needs a torch.nn.Module; the fixture `model` returned <built-in*sin*",
          "test_it.py:20: wrapper 'regional' works on the children of an nn.ModuleList, and model 'model' has none",
          "test_it.py:23: wrapper 'ddp' needs 2 processes, and a test has one; put it into a matrix",
          "SKIPPED [[]1[]]*: no C++ compiler found; install g++ or clang")
    assert "During handling" not in result.stdout.str()
    assert "with a rule" not in result.stdout.str()


def test_no_model(repo, tests):
    """Without a fixture `model` the error shows what to write."""
    repo.file("conftest.py", "")
    result = tests("""
def test_it(compiled_model):
    pass
""")
    result.assert_outcomes(errors=1)
    lines(result, "test_it.py:4: compiled_model compiles what the fixture `model` returns, and there is none here.",
          "Add one, for example to conftest.py:", "    @pytest.fixture", "    def model():")


def test_a_parametrized_model(repo, tests):
    """A fixture `model` with params, or a parameter of that name, is compiled for each."""
    repo.file("conftest.py", CONFTEST.replace("@pytest.fixture", "@pytest.fixture(params=[8, 16])")
              .replace("model()", "model(request)").replace("Net()", "Net(request.param)"))
    tests("""
@pytest.mark.compile_modes(backend="eager", dynamic=["auto", "static"])
def test_it(compiled_model, model):
    assert compiled_model(batch(2)).shape == (2, 3)

@pytest.mark.compile_modes(backend="eager")
@pytest.mark.parametrize("model", [Net(4), torch.sin])
def test_given(compiled_model):
    compiled_model(batch(2))
""").assert_outcomes(passed=6)


def test_limits(tests):
    """compile_limits lets a test within its limits pass and tells each recompile, break and eager frame beyond them."""
    result = tests("import unittest" + BREAKS + """
@pytest.mark.compile_limits(recompiles=1, graph_breaks=0)
@pytest.mark.compile_modes(backend="eager")
def test_within(compiled_model):
    for size in (2, 3, 4):
        compiled_model(batch(size))

@pytest.mark.compile_limits(recompiles=1)
@pytest.mark.compile_modes(backend="eager", dynamic="static")
def test_recompiles(compiled_model):
    for size in (2, 3, 4):
        compiled_model(batch(size))

@pytest.mark.compile_limits(graph_breaks=0)
def test_breaks():
    torch.compile(Breaks(), backend="eager")(batch(2))

@pytest.mark.compile_limits(eager_frames=0)
def test_eager():
    @torch.compile(backend="eager")
    def f(x):
        for _ in range(2):
            print(end="")
        return x + 1
    f(batch(2))

@pytest.mark.compile_limits(recompiles=9)
def test_gave_up():
    with torch._dynamo.config.patch(recompile_limit=1):
        f = torch.compile(Net(), backend="eager", dynamic=False)
        f(batch(2)), f(batch(3))

@pytest.mark.compile_limits(recompiles=0)
def test_nothing_compiled():
    Net()(batch(2))

@pytest.mark.compile_limits(recompiles=0)
def test_fails_itself(compiled_model):
    raise ValueError("first")

@pytest.mark.xfail(reason="known")
@pytest.mark.compile_limits(graph_breaks=0)
def test_expected():
    torch.compile(Breaks(), backend="eager")(batch(2))

@pytest.mark.compile_limits(recompiles=0)
class TestClass:
    def test_plain(self):
        pass

class TestUnit(unittest.TestCase):
    @pytest.mark.compile_limits(recompiles=0)
    def test_case(self):
        f = torch.compile(torch.sin, backend="eager", dynamic=False)
        f(torch.ones(2)), f(torch.ones(3))
""")
    result.assert_outcomes(passed=2, failed=7, xfailed=1)
    lines(result, "compile_limits: 2 recompiles, 1 allowed", "1. *forward  models.py:*", "shape: x.size(0)  2 -> 3",
          "guard: *", "try: pad to a few buckets*")
    lines(result, "compile_limits: 1 graph break, none allowed", "1. Breaks.forward  test_it.py:7", "*print*")
    lines(result, "compile_limits: 1 function ran eagerly, none allowed", "1. f  test_it.py:28",
          ", 1 call: ")
    lines(result, "compile_limits: torch gave up compiling, so that the other numbers are too small: 1 function ran*",
          "limit, 1 call: *")
    lines(result, "compile_limits: nothing to judge: no compiled graph ran in this test")
    lines(result, "ValueError: first")
    lines(result, "TestUnit.test_case", "compile_limits: 1 recompile, none allowed")
    assert "torch.__trace" not in result.stdout.str()  # what the ledger reads is no log for users


def test_limits_of_several_markers(tests):
    """Stacked, or of a class and a method, they hold together; of two that name one limit the nearer wins."""
    result = tests(BREAKS + """
def recompiles(n):
    net = torch.compile(Breaks(), backend="eager", dynamic=False)
    for size in range(2, 3 + n):
        net(batch(size))

@pytest.mark.compile_limits(graph_breaks=0)
@pytest.mark.compile_limits(recompiles=9)
def test_stacked():
    recompiles(0)

@pytest.mark.compile_limits(graph_breaks=0, recompiles=0)
class TestClass:
    @pytest.mark.compile_limits(recompiles=9)
    def test_breaks(self):
        recompiles(1)

    @pytest.mark.compile_limits(graph_breaks=1)
    def test_recompiles(self):
        recompiles(1)

    @pytest.mark.compile_limits(graph_breaks=1, recompiles=9)
    def test_both_wider(self):
        recompiles(1)
""")
    result.assert_outcomes(passed=1, failed=3)
    lines(result, "_ test_stacked _", "compile_limits: 1 graph break, none allowed")
    lines(result, "_ TestClass.test_breaks _", "compile_limits: 1 graph break, none allowed")
    lines(result, "_ TestClass.test_recompiles _", "compile_limits: 2 recompiles, none allowed")


def test_the_counter(tests):
    """expect and assert_no_recompiles judge their block alone: too many, too few, given up, nothing ran, raised."""
    result = tests("""
@pytest.fixture
def static(recompile_counter):
    return torch.compile(Net(), backend="eager", dynamic=False)

def test_exact(static, recompile_counter):
    static(batch(2))
    with recompile_counter.expect(2):
        static(batch(3)), static(batch(4))
    with recompile_counter.assert_no_recompiles():
        static(batch(2))
    assert recompile_counter.count == 2
    assert recompile_counter.explain().startswith("2 recompiles\\n  1. ")
    assert recompile_counter.explain(1).startswith("2 recompiles, 1 allowed\\n  1. ")
    assert repr(recompile_counter) == "<2 recompiles, 3 compiles>"
    assert [r.cause for r in recompile_counter.recompiles] == ["shape", "shape"]

def test_too_many(static, recompile_counter):
    static(batch(2)), static(batch(7))
    with recompile_counter.assert_no_recompiles():
        static(batch(3))

def test_too_few(static, recompile_counter):
    with recompile_counter.expect(2):
        static(batch(2)), static(batch(3))

def test_given_up(static, recompile_counter):
    static(batch(2))
    with torch._dynamo.config.patch(recompile_limit=1), recompile_counter.assert_no_recompiles():
        static(batch(3))

def test_nothing(recompile_counter):
    with recompile_counter.assert_no_recompiles():
        Net()(batch(2))

def test_raises(recompile_counter):
    with recompile_counter.expect(1):
        raise ValueError("mine")

def test_number(recompile_counter):
    recompile_counter.expect(-1)
""")
    result.assert_outcomes(passed=1, failed=6)
    lines(result, "AssertionError: 1 recompile, none allowed", "shape: x.size(0)  2 -> 3")
    lines(result, "AssertionError: 1 recompile, 2 expected", "shape: x.size(0)  2 -> 3")
    lines(result, "AssertionError: torch gave up compiling, so that the other numbers are too small: 1 function*")
    lines(result, "AssertionError: no compiled graph ran in the block, so that its recompiles prove nothing")
    lines(result, "ValueError: mine")
    lines(result, "ValueError: expect(-1); expected a whole number from 0 on")
    assert "__exit__" not in result.stdout.str()  # the traceback ends at the user's line


def test_breaks_as_a_list(tests):
    """graph_breaks equals, counts and slices as a list, and tells each in words."""
    tests(BREAKS + """
def test_it(graph_breaks):
    assert graph_breaks == [] and not graph_breaks and repr(graph_breaks) == "<graph breaks: none>"
    torch.compile(Breaks(), backend="eager")(batch(2))
    (found,) = graph_breaks
    assert graph_breaks == [found] and graph_breaks[0] is found and graph_breaks[:1] == [found]
    assert found.owner == "mine" and found.file == __file__
    assert repr(graph_breaks) == f"<graph breaks: {__file__}:{found.line}>"
    assert graph_breaks.explain().startswith("1 graph break\\n  1. ")
    assert graph_breaks.explain(0).startswith("1 graph break, none allowed\\n  1. ")
    assert "print" in graph_breaks.explain()
""").assert_outcomes(passed=1)


def test_buckets(tests):
    """shape_buckets steps through the marker's sizes, by the keyword S or by place, and names them in the ledger."""
    result = tests("""
import functools

def by_name(B=2, *, S): return torch.ones(B, S)
def by_place(size): return torch.ones(2, size)
def any_name(**dims): return torch.ones(2, dims["S"])
def two(B, S): return torch.ones(B, S)

@pytest.mark.shape_buckets(4, 8)
@pytest.mark.parametrize("make", [by_name, by_place, any_name, functools.partial(two, 2), functools.partial(two, B=2)])
def test_sizes(shape_buckets, make):
    assert shape_buckets.sizes == (4, 8)
    assert [tuple(b.shape) for b in shape_buckets.batches(make)] == [(2, 4), (2, 8)]

@pytest.mark.shape_buckets(4, 8)
def test_the_rest(shape_buckets, recompile_counter):
    assert repr(shape_buckets) == "<shape buckets 4, 8>"
    assert shape_buckets.stabilizer.bucket_batch(torch.ones(2, 5, dtype=torch.int64)).shape == (2, 8)
    assert list(shape_buckets.batches(torch.zeros))[1].shape == (8,)
    compiled = torch.compile(torch.sin, backend="eager", dynamic=False)
    for batch in shape_buckets.batches(by_name):
        compiled(batch)
    assert [c.during for c in recompile_counter.compiles] == ["S=4", "S=8"]
    assert "during S=8" in recompile_counter.explain()
    with pytest.raises(TypeError, match=r"batches calls two\\(S=size\\): missing .*'B'; functools.partial gives it"):
        shape_buckets.batches(two)
    with pytest.raises(TypeError, match=r"batches calls none\\(size\\): too many positional arguments"):
        def none(): pass
        shape_buckets.batches(none)

def test_without_marker(shape_buckets):
    assert shape_buckets.sizes == (256, 512, 1024, 2048)
""")
    result.assert_outcomes(passed=7)
