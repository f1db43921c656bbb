"""The check `cudagraphs`: where it applies, and what it says of stored sections."""

from __future__ import annotations

import pytest

from pytest_torchcompile.backends import promised
from pytest_torchcompile.checks import CHECKS, load

FUNCTIONS = {"0/0": "Net.forward", "1/0": "torch_dynamo_resume_in_forward_at_7"}
SKIP = {"reason": "mutated inputs (1 instances)", "file": "net.py", "line": 5, "during": "call 1", "part": False}


def step(*replays, backwards=0, elsewhere=0):
    """One step, with so many replays in each of its graphs."""
    graphs = [{"compile_id": f"{k}/0", "replays": n} for k, n in enumerate(replays)]
    without = [g["compile_id"] for g in graphs if not g["replays"]] + ["backward"] * max(0, backwards - elsewhere)
    return {"call": "call 1 (B=4)", "graphs": graphs, "elsewhere": elsewhere, "backwards": backwards,
            "without": without}


def judged(*steps, skips=(), limits=None, raised=None):
    """Messages and evidence of the problems."""
    section = {"raised": raised, "functions": FUNCTIONS, "skips": list(skips), "steps": list(steps)}
    return [f"{p.message} | {p.evidence} | {p.file}:{p.line}" for p in load("cudagraphs").judge(section, limits or {})]


def test_all_replayed_is_silent():
    """Forward and backward."""
    assert judged(step(1, backwards=1, elsewhere=1), step(2, 1)) == []


def test_a_forward_without():
    """Named, with torch's reason and its line."""
    assert judged(step(1, 0, backwards=1, elsewhere=1), skips=[SKIP]) == [
        "1 of 3 compiled graphs ran without a CUDA graph at call 1 (B=4): torch_dynamo_resume_in_forward_at_7 | "
        "mutated inputs (1 instances)  net.py:5 | net.py:5"]


def test_a_backward_without_and_without_a_reason():
    """Torch says nothing of graphs that it partitions."""
    assert judged(step(1, backwards=1)) == [
        "1 of 2 compiled graphs ran without a CUDA graph at call 1 (B=4): backward | torch gave no reason | :0"]


def test_a_part_without():
    """Everything replays, and yet some of it is launched one by one."""
    part = {"reason": "outside of 2 captured part(s): aten.nonzero", "file": "", "line": 0, "during": "", "part": True}
    assert judged(step(2), skips=[part]) == [
        "1 CUDA graph(s) hold only a part of their graph: the rest is launched step by step | "
        "outside of 2 captured part(s): aten.nonzero | :0"]
    assert judged(step(2), skips=[part], limits={"uncaptured": 1}) == []


def test_the_limit_counts_graphs():
    """As many as it allows, and no more."""
    assert judged(step(0, 1), limits={"uncaptured": 1}) == []
    assert len(judged(step(0, 0), limits={"uncaptured": 1})) == 1


def test_nothing_ran():
    """A step in which no graph ran proves nothing, and an error neither."""
    assert judged() == ["nothing to judge: no compiled graph ran in any step |  | :0"]
    assert judged(step()) == ["nothing to judge: no compiled graph ran in any step |  | :0"]
    assert judged(step(1), raised="RuntimeError") == [
        "nothing to judge: the compiled run raised RuntimeError |  | :0"]


@pytest.mark.parametrize(("settings", "promise"), [
    ({"backend": "inductor", "mode": "reduce-overhead"}, True),
    ({"backend": "inductor", "mode": "max-autotune"}, True),
    ({"mode": "max-autotune"}, True),
    ({"backend": "cudagraphs"}, True),
    ({"backend": "inductor", "options": {"triton.cudagraphs": True}}, True),
    ({"backend": "inductor", "options": {"triton.cudagraphs": False}}, False),
    ({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, False),
    ({"backend": "inductor", "mode": None}, False),
    ({"backend": "aot_eager", "mode": "reduce-overhead"}, False),
    ({"backend": print, "mode": "reduce-overhead"}, False),
])
def test_what_promises_cuda_graphs(settings, promise):
    """Modes of Inductor and the backend; an item of the check is there only on a GPU."""
    assert promised(settings) == promise
    axes = settings | {"phase": "training", "wrapper": "none"}
    assert CHECKS["cudagraphs"].applies(axes | {"device": "cuda:1"}) == promise
    assert not CHECKS["cudagraphs"].applies(axes | {"device": "cpu"})
    assert CHECKS["compiles"].applies(axes | {"device": "cpu"})
    assert not CHECKS["gradients"].applies(axes | {"phase": "inference"})
