"""Functions whose graph breaks are known: how many places, which lines, which ids, whether torch can resume."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import random
import sys
import threading
import time
import warnings

import pytest
import torch
from torch_versions import GRAPH_BREAKS, TORCH

from pytest_torchcompile.ledger import explain, observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:told you so|Dynamo does not know how to trace")]  # fmt: skip

FUNCTIONS = {}
LOCK = threading.Lock()


def breaks(*places, whole=False, graphs=None):
    """Note a function: its breaks as (id, lines below `def`), whether torch gives all of it up, graphs run.

    As in torch 2.13; ids and what breaks at all change with torch (torch_versions.GRAPH_BREAKS).
    """

    def note(function):
        FUNCTIONS[function.__name__] = (function, list(places), whole, graphs)
        return function

    return note


@torch.compiler.disable
def disabled_function(x):
    """Kept out by the user."""
    return x * 3


def breaking_helper(x):
    """One break, three lines below."""
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def breaking_generator(x):
    """Yield, then break."""
    yield x
    torch._dynamo.graph_break()


@contextlib.contextmanager
def own_context():
    """A context manager of the user's."""
    yield


class Box:
    """A property that breaks."""

    @property
    def value(self):
        """Two lines below the def line."""
        torch._dynamo.graph_break()
        return 2


@breaks(graphs=1)
def healthy(x):
    return (x + 1).relu()


@breaks(graphs=1)
def healthy_numpy_shape(x):
    return x + len(x.shape) + copy.deepcopy([1])[0]


@breaks(graphs=1)
def healthy_loop_and_try(x):
    try:
        for scale in (1, 2):
            x = x * scale
    except ValueError:
        return x
    return x.view(-1)


@breaks(graphs=1)
def healthy_no_grad(x):
    with torch.no_grad():
        return x * 2


@breaks(("gb0025", 2), graphs=2)
def explicit(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


@breaks(("gb0025", 1), graphs=1)
def leading(x):
    torch._dynamo.graph_break()
    return x * 2


@breaks(("gb0025", 2), graphs=1)
def trailing(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x


@breaks(("gb0025", 2), ("gb0025", 4), graphs=3)
def two_places(x):
    x = x + 1
    torch._dynamo.graph_break()
    x = x * 2
    torch._dynamo.graph_break()
    return x - 1


@breaks(("gb0059", 2), graphs=2)
def printing(x):
    x = x + 1
    print("printing", end="")
    return x * 2


@breaks(("gb0170", 1), graphs=2)
def branch_on_data(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


@breaks(("gb0170", 2), graphs=2)
def assert_with_message(x):
    x = x + 1
    assert x.sum() > 0, f"bad {x.shape}"
    return x * 2


@breaks(("gb0124", 1), graphs=2)
def item(x):
    n = x.sum().item()
    return x * n


@breaks(("gb0124", 1), graphs=2)
def to_int(x):
    return x * int(x.sum())


@breaks(("gb0124", 1), graphs=2)
def to_bool(x):
    return x + 1 if bool(x.any()) else x


@breaks(("gb0109", 1), graphs=1)
def to_list(x):
    return x * x.tolist()[0]


@breaks(("gb0036", 1), graphs=1)
def nonzero(x):
    return x.nonzero().float() * 2


@breaks(("gb0036", 1), graphs=2)
def boolean_mask(x):
    return x[x > 0] * 2


@breaks(("gb0036", 1), graphs=1)
def unique(x):
    return torch.unique(x) + 1


@breaks(("gb0124", 1), graphs=2)
def data_dependent_slice(x):
    n = int(x[0].item())
    return x[:n] * 2


@breaks(("gb0098", 1), graphs=2)
def calls_disabled(x):
    return disabled_function(x + 1) + 1


@breaks(("gb0025", breaking_helper), graphs=4)
def inlined_helper(x):
    return breaking_helper(x + 1) + 1


@breaks(("gb0025", breaking_helper), graphs=7)
def helper_called_twice(x):
    return breaking_helper(breaking_helper(x + 1) + 1) + 1


@breaks(("gb0025", 3), whole=True, graphs=0)
def in_a_loop(x):
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


@breaks(("gb0025", 3), whole=True, graphs=0)
def in_try(x):
    try:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2
    except ValueError:
        return x


@breaks(("gb0025", 4), whole=True, graphs=0)
def in_except(x):
    try:
        raise ValueError
    except ValueError:
        torch._dynamo.graph_break()
        return x + 1


@breaks(("gb0025", 3), whole=True, graphs=0)
def in_own_context(x):
    with own_context():
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2


@breaks(("gb0025", 3), graphs=2)
def in_no_grad(x):
    with torch.no_grad():
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
    return x + 1


@breaks(("gb0142", 1), whole=True, graphs=0)
def with_lock(x):
    with LOCK:
        return x + 1


@breaks(("gb0025", breaking_generator), whole=True, graphs=0)
def in_a_generator(x):
    return sum(breaking_generator(x))


@breaks(("gb0025", Box.value.fget), whole=True, graphs=0)
def in_a_property(x):
    return x * Box().value


@breaks(("gb0007", 1), graphs=1)
def reads_the_clock(x):
    now = time.time()
    return x + (now > 0)


@breaks(("gb0007", 1), graphs=1)
def draws_a_number(x):
    return x + random.random()


@breaks(("gb0007", 1), graphs=1)
def warns(x):
    warnings.warn("told you so", stacklevel=1)
    return x + 1


@breaks(("gb6215", 1), ("gb0291", 1), graphs=1)
def logs(x):
    logging.getLogger("net").info("x")
    return x + 1


@breaks(("gb0059", 1), ("gb0142", 1), whole=True, graphs=0)
def opens_a_file(x):
    with open(os.devnull) as file:
        file.read()
    return x + 1


@breaks(("gb0007", 1), graphs=1)
def counts_references(x):
    return x + sys.getrefcount(x)


@breaks(("gb3006", 1), whole=True, graphs=0)
def hashes_a_tensor(x):
    return x + hash(x) * 0


@breaks(("gb0088", 2), whole=True, graphs=0)
def formats_a_tensor(x):
    text = f"{x}"
    return x + len(text)


@breaks(("gb8985", 1), graphs=2)
def requires_grad_inside(x):
    y = (x + 1).requires_grad_()
    return y * 2


def first_break(function):
    """Line of a helper's graph_break call."""
    lines, start = __import__("inspect").getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if "graph_break()" in line)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def observed(function, backend="eager", calls=1, **options):
    """Ledger of some calls of a compiled function."""
    compiled = torch.compile(function, backend=backend, **options)
    with observe() as seen:
        for _ in range(calls):
            compiled(torch.arange(1.0, 5.0))
    return seen


@pytest.mark.skipif(TORCH not in GRAPH_BREAKS, reason=f"nobody has measured the places of torch {torch.__version__}")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_breaks_of_a_function(name, backend):
    """Exactly the known places, each once, as the user's own; eager frames only where torch gives up."""
    function, *known = FUNCTIONS[name]
    usual = ["graph_break"] if known[1] else ["disabled"] if name == "calls_disabled" else []
    places, whole, graphs, kinds = GRAPH_BREAKS[TORCH].get(name, (*known, usual))
    seen = observed(function, backend)
    start = function.__code__.co_firstlineno + 1  # one for the decorator
    helpers = {helper.__qualname__: helper for helper in (breaking_helper, breaking_generator, Box.value.fget)}
    lines = []
    for gb, at in places:
        at = helpers.get(at, at)
        gb = "" if TORCH == (2, 8) else gb
        lines.append((gb, first_break(at) if callable(at) else start + at))
    assert [(b.gb_id, b.line) for b in seen.graph_breaks] == lines
    assert {(b.file, b.owner) for b in seen.graph_breaks} <= {(__file__, "mine")}
    assert all(b.reason and "\n" not in b.reason and b.gb_id in b.link for b in seen.graph_breaks)
    # Torch explains a break where it has an id for it: 2.8 has no ids, 2.10 has none for a generator.
    assert all(b.explanation for b in seen.graph_breaks if b.gb_id)
    assert [b.whole_frame for b in seen.graph_breaks[-1:]] == [whole] * bool(places)
    assert [f.kind for f in seen.eager_frames] == kinds
    assert sum(g.runs for g in seen.graphs) == graphs
    assert [*seen.failures, *seen.lost] == []


def test_there_are_enough_functions():
    """A guard against losing them: fewer than thirty breaking functions are no evidence."""
    assert len([f for f in FUNCTIONS.values() if f[1]]) >= 30


def test_a_place_is_one_break_however_often_it_is_met():
    """Three shapes recompile both halves; the break stays one."""
    compiled = torch.compile(explicit, backend="eager", dynamic=False)
    with observe() as seen:
        for size in (3, 4, 5):
            with seen.during(f"size {size}"):
                compiled(torch.ones(size))
    assert len(seen.recompiles) == 4
    assert [b.during for b in seen.graph_breaks] == ["size 3"]


def test_resume_functions_bear_the_name_of_their_function():
    """The rest after a break is that function, resumed at the line of the break."""
    seen = observed(explicit)
    start = explicit.__code__.co_firstlineno
    assert [(c.function, c.line, c.kind, c.resumed_at) for c in seen.compiles] == [
        ("explicit", start, "first", 0), ("explicit", start, "resume", start + 3)]  # fmt: skip


def test_fullgraph_raises_and_the_break_is_still_in_the_ledger():
    """With fullgraph=True torch raises at the break: a failure, and the same place as without."""
    compiled = torch.compile(explicit, backend="eager", fullgraph=True)
    with observe() as seen, pytest.raises(Exception, match="graph_break"):
        compiled(torch.ones(3))
    (found,) = seen.graph_breaks
    assert (found.file, found.line) == (__file__, explicit.__code__.co_firstlineno + 3)
    assert [f.type for f in seen.failures] == ["Unsupported"]
    assert seen.eager_frames == []


def test_the_owner_is_whoever_wrote_the_innermost_line(tmp_path):
    """Below site-packages it is a third party's."""
    package = tmp_path / "site-packages" / "theirs.py"
    package.parent.mkdir()
    package.write_text("import torch\n\ndef step(x):\n    torch._dynamo.graph_break()\n    return x + 1\n")
    namespace = {}
    exec(compile(package.read_text(), str(package), "exec"), namespace)
    step = namespace["step"]
    (found,) = observed(lambda x: step(x * 2) * 2).graph_breaks
    assert (found.owner, found.file, found.line) == ("third_party", str(package), 4)
    assert found.stack == ("theirs.py:4 in step", f"{os.path.relpath(__file__)}:{found_line()} in <lambda>")


def found_line():
    """Line of the lambda of the test above."""
    import inspect

    lines, start = inspect.getsourcelines(test_the_owner_is_whoever_wrote_the_innermost_line)
    return start + next(i for i, line in enumerate(lines) if "lambda x: step" in line)


def test_the_function_given_up_may_be_a_caller():
    """A break in a helper that is called in a loop: the helper can resume after it, the loop around it cannot."""

    def in_a_loop_of_calls(x):
        for _ in range(2):
            x = breaking_helper(x)
        return x

    (found,) = (seen := observed(in_a_loop_of_calls)).graph_breaks
    assert (found.function, found.gave_up, found.whole_frame) == ("breaking_helper", "in_a_loop_of_calls", True)
    assert [f.function for f in seen.eager_frames] == ["in_a_loop_of_calls"]
    assert "all of in_a_loop_of_calls runs eagerly" in explain.graph_breaks([found])


def test_a_break_in_the_base_class_is_not_the_derived_ones():
    """Both methods are called forward; the line is that of the base class."""

    class Base(torch.nn.Module):
        def forward(self, x):
            """Break."""
            torch._dynamo.graph_break()
            return x + 1

    class Derived(Base):
        def forward(self, x):
            """Around it."""
            return super().forward(x * 2) * 3

    (found,) = observed(Derived()).graph_breaks
    assert found.line == Base.forward.__code__.co_firstlineno + 2
    assert found.function != "Derived.forward"


def test_a_disabled_forward_is_named_as_its_module():
    """The break is in a frame of torch's own around it; the place is the user's forward."""

    class Off(torch.nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            """Never compiled."""
            return x + 1

    (found,) = (seen := observed(Off())).graph_breaks
    assert (found.function, found.file, found.owner) == ("Off.forward", __file__, "mine")
    assert [(f.function, f.kind) for f in seen.eager_frames] == [("Off.forward", "disabled")]
