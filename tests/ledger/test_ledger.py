"""observe(): compiles, recompiles, eager frames and graph runs of real runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_torchcompile.ledger import Ledger, observe

# Torch's own: Inductor's first import, and Dynamo looking at `.grad` of an input that is no leaf.
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def double(x):
    """One operator."""
    return x * 2


def ones(*sizes):
    """A tensor."""
    return torch.ones(*sizes)


def test_one_compile_and_every_run_are_counted():
    """Three calls of one shape: one compile, one graph with one operator, three runs."""
    compiled = torch.compile(double, backend="eager")
    with observe() as seen:
        for _ in range(3):
            compiled(ones(3))
    (compile_,) = seen.compiles
    assert (compile_.function, compile_.kind, compile_.graphs, compile_.ops) == ("double", "first", 1, 1)
    assert (compile_.file, compile_.line) == (__file__, double.__code__.co_firstlineno)
    assert [(g.ops, g.runs, g.function) for g in seen.graphs] == [(1, 3, "double")]
    assert [*seen.recompiles, *seen.graph_breaks, *seen.eager_frames, *seen.failures, *seen.lost] == []


def test_a_recompile_names_guard_cause_and_call():
    """A new size with dynamic=False: one recompile, with the guard's words, its class, and the call."""
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as seen:
        for size in (3, 4, 3):
            with seen.during(f"size {size}"):
                compiled(ones(size))
        (recompile,) = seen.recompiles  # live, before the block ends
    assert recompile.kind == "recompile"
    assert recompile.reason == "tensor 'x' size mismatch at index 0. expected 3, actual 4"
    assert (recompile.cause, recompile.during) == ("shape", "size 4")
    assert [g.runs for g in seen.graphs] == [2, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_graphs_from_before_the_block_are_counted_and_everything_is_put_back(backend):
    """A warm model compiles nothing in the block, its graph runs are counted; hooks are gone after it."""
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.output_graph import OutputGraph

    places = [(convert_frame.CatchErrorsWrapper, "__call__"), (eval_frame, "_callback_from_stance"),
              (eval_frame, "_maybe_set_eval_frame"), (OutputGraph, "install_global_unsafe")]
    before = [getattr(*place) for place in places]
    compiled = torch.compile(double, backend=backend)
    compiled(ones(3))
    installed = {k: v for k, v in globals().items() if k.startswith("__compiled_fn")}
    with observe() as seen:
        compiled(ones(3))
        assert [getattr(*place) for place in places] != before
    compiled(ones(3))  # after the block: not counted
    assert not seen.compiles
    assert [g.runs for g in seen.graphs] == [1]
    assert [getattr(*place) for place in places] == before
    assert {k: v for k, v in globals().items() if k.startswith("__compiled_fn")} == installed


def test_ledgers_nest():
    """An inner block sees what happens in it, the outer block all; each with its own label."""
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as outer:
        compiled(ones(3))
        with outer.during("o"), observe() as inner, inner.during("i"):
            compiled(ones(4))
        compiled(ones(5))
    assert [c.during for c in outer.compiles] == ["", "o", ""]
    assert [c.during for c in inner.compiles] == ["i"]


def test_many_ledgers_inside_of_one_each_see_their_own_run():
    """Also where Python gives a new ledger the memory of one that is gone."""
    compiled = torch.compile(double, backend="eager")
    compiled(ones(3))
    runs = []
    with observe() as outer:
        for _ in range(20):
            with observe() as inner:
                compiled(ones(3))
                runs.append(sum(g.runs for g in inner.graphs))
            del inner
    assert runs == [1] * 20
    assert [g.runs for g in outer.graphs] == [20]


def test_a_cleared_ledger_counts_older_graphs_anew():
    """clear() forgets what was seen; a graph from before it is there again with its first run after it."""
    compiled = torch.compile(double, backend="eager")
    with observe() as seen:
        compiled(ones(3)), compiled(ones(3))
        seen.clear()
        assert (seen.graphs, seen.compiles) == ([], [])
        compiled(ones(3))
    assert [g.runs for g in seen.graphs] == [1]


def test_a_call_while_an_exception_is_handled_is_no_call_that_raised():
    """In an except block an eager call is named; one that raises is counted, not named."""

    def refuse(x):
        raise KeyError("mine")

    compiled, raising = torch.compile(double, backend="eager"), torch.compile(refuse, backend="eager")
    with observe() as seen:
        try:
            raise ValueError
        except ValueError:
            with torch.compiler.set_stance("force_eager"):
                compiled(ones(3))
                assert ([f.kind for f in seen.eager_frames], seen.raised) == (["stance"], 0)
                with pytest.raises(KeyError):
                    raising(ones(3))
    assert ([f.kind for f in seen.eager_frames], seen.raised) == (["stance"], 1)


def test_an_exception_leaves_no_hook_behind():
    """A raising block restores torch; the ledger keeps what it saw, and names a compile that raised."""
    from torch._dynamo import convert_frame

    def refuse(gm, inputs):
        raise RuntimeError("no backend today")

    before = convert_frame.CatchErrorsWrapper.__call__
    with pytest.raises(Exception, match="no backend today"), observe() as seen:
        torch.compile(double, backend=refuse)(ones(3))
    assert convert_frame.CatchErrorsWrapper.__call__ is before
    assert [(f.function, f.type) for f in seen.failures] == [("double", "BackendCompilerFailed")]
    assert not seen.compiles


def test_a_ledger_survives_json():
    """to_dict gives JSON-able data, from_dict the same records."""
    import json

    compiled = torch.compile(double, backend="eager", dynamic=False)
    with observe() as seen, torch._dynamo.config.patch(recompile_limit=1):
        compiled(ones(3))
        compiled(ones(4))
    data = json.loads(json.dumps(seen.to_dict()))
    assert Ledger.from_dict(data).to_dict() == seen.to_dict()
    assert Ledger.from_dict(data).eager_frames[0].kind == "limit"


def test_there_are_enough_sequences():
    """A guard against losing them: fewer than forty sequences with known ledgers are no evidence."""
    files = [Path(__file__).with_name(f"test_ledger_{name}.py") for name in ("objects", "tensors")]
    assert sum(file.read_text(encoding="utf-8").count("(known_ledger):") for file in files) >= 50


@pytest.mark.parametrize(("often", "times", "shortest"), [
    (False, [9000.0, 1300.0, 1200.0, 1250.0, 8000.0], 1200), (False, [9000.0, 130.0], 130), (False, [130.0], 130),
    (True, [130.0, 100.0, 9000.0, 90.0, 95.0], 90),
])
def test_guards_that_seem_slow_or_have_a_limit_are_timed_more_than_once(monkeypatch, often, times, shortest):
    """One time that something interrupted is not what they cost. A short one nearly is, and timing takes 17 ms."""
    guards = pytest.importorskip("torch._dynamo.guards")
    if not hasattr(guards, "profile_guard_manager"):
        pytest.skip("torch before 2.9 does not time guards")
    left = iter(times)
    monkeypatch.setattr(guards, "profile_guard_manager", lambda *asked: next(left))
    torch._dynamo.reset()
    with observe() as seen:
        seen.times_guards_often = often
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert [found.guard_microseconds for found in seen.compiles] == [shortest]
    assert next(left, None) is None
