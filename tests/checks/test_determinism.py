"""The check determinism: what two processes compiled, and in which stage of the compiler the difference begins."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_torchcompile.checks.determinism import _HASH_SEEDS, CHECK
from pytest_torchcompile.observation import Job


def made(graph="g1", kernel="k1", failure="", **stages):
    """What one process tells."""
    keys = {"dynamo": "d", "forward": "f", "code": "c", **stages}
    graphs = [{"graph": "0/0 forward", "key": graph, "kernels": [["add_0", kernel]]}]
    texts = {key: f"text of\n{key}" for key in (graph, kernel)}
    return {"graphs": graphs, "texts": texts, "stages": keys, "failure": failure}


def problems_of(first, *others, error=None):
    """What the check makes of some processes, the last for all that come after it, and the hash seeds it asked for."""
    answers, seeds = [first, *others], []

    def compile_apart(seed):
        seeds.append(seed)
        return answers[min(len(seeds), len(answers)) - 1]

    compiled = SimpleNamespace(error=error)
    section = CHECK.measure(SimpleNamespace(compiled=compiled, side=object(), compile_apart=compile_apart))
    return list(CHECK.judge(section, {})), seeds, section


def test_the_same_code():
    """No problem; the remark tells what was compared, and the seeds differ."""
    problems, seeds, section = problems_of(made(), made())
    assert problems == []
    assert len(set(seeds)) == 5
    assert CHECK.remark(section) == "1 graph and 1 kernel are the same in 5 processes"
    # A report of an earlier version.
    del section["processes"]
    assert CHECK.remark(section) == "1 graph and 1 kernel are the same in 2 processes"


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_the_first_process_that_differs_is_the_last(number):
    """What two seeds order alike a later one does not; no more is compiled than is needed."""
    same = [made() for _ in range(number - 1)]
    (problem,), seeds, _ = problems_of(*same, made(kernel="k2", code="x"))
    assert len(seeds) == number
    assert f"+++ PYTHONHASHSEED={seeds[-1]}" in problem.evidence


def test_five_seeds_order_small_sets_otherwise():
    """Of pairs of words at most a tenth are in the same order under all seeds, and of two seeds half."""
    words = [f"{first}{second}" for first in ("weight", "bias", "query", "key", "value") for second in range(12)]
    script = f"for a in {words!r}:\n  for b in {words!r}:\n    print(int(a < b and next(iter({{a, b}})) == a), end='')"
    orders = []
    for seed in _HASH_SEEDS:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        orders.append(subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True,
                                     check=True).stdout)
    pairs = len(words) * (len(words) - 1) / 2

    def alike(number):
        """The share of pairs whose order is the same in so many processes."""
        always = sum(set(each) == {"1"} for each in zip(*orders[:number], strict=True))
        ever = sum("1" in each for each in zip(*orders[:number], strict=True))
        return (always + pairs - ever) / pairs

    assert alike(2) > 0.4
    assert alike(len(orders)) < 0.1


@pytest.mark.parametrize(("second", "names", "lines", "hint"), [
    (made(kernel="k2", code="x"), "kernel 0/0 forward: add_0", ["-k1", "+k2"], "Inductor's graphs are the same"),
    (made(graph="g2", forward="x", code="x"), "graph 0/0 forward", ["-g1", "+g2"], "the joint graph is the same"),
    (made("g2", "k2", dynamo="x"), "kernel 0/0 forward: add_0, graph 0/0 forward", ["-k1", "+k2", "-g1", "+g2"],
     "Dynamo's graph already differs"),
])  # fmt: skip
def test_other_code(second, names, lines, hint):
    """Each piece once, kernels first, with what differs; the hint is about the first stage that does."""
    (problem,), *_ = problems_of(made(), second)
    assert problem.message == f"two processes compiled it to different code: {names}"
    changed = [line for line in problem.evidence.splitlines() if line[0] in "-+" and line[:3] not in ("---", "+++")]
    assert changed == lines
    assert "--- PYTHONHASHSEED=1" in problem.evidence
    assert problem.hint.startswith(hint)


def test_a_graph_that_one_process_has_not():
    """Nothing stands beside it."""
    second = made()
    second["graphs"] *= 2
    (problem,), *_ = problems_of(made(), second)
    assert problem.message.endswith("kernel 0/0 forward: add_0, graph 0/0 forward")
    assert "+k1" in problem.evidence


@pytest.mark.parametrize(("first", "error", "message"), [
    (made(failure="its process ended with 1: boom"), None,
     "nothing to judge: another process could not compile the model, though the cell's own did"),
    ({"graphs": [], "texts": {}, "stages": {}, "failure": ""}, None,
     "nothing to judge: no graph was compiled in another process"),
    (made(), SimpleNamespace(type="RuntimeError"), "nothing to judge: the compiled run raised RuntimeError"),
])
def test_where_nothing_can_be_said(first, error, message):
    """It never passes then."""
    (problem,), *_ = problems_of(first, error=error)
    assert problem.message == message


@pytest.mark.needs_torch
def test_a_process_that_fails(tmp_path):
    """Its last words are told."""
    from pytest_torchcompile.cell import Cell
    from pytest_torchcompile.plan.models import ModelEntry
    from pytest_torchcompile.run.cold_compile import compile_in_process

    (tmp_path / "broken_model.py").write_text("raise ValueError('no weights here')\n")
    entry = ModelEntry("net", "broken_model:net", "broken_model:batch", where=f"{tmp_path}/a.yaml:1:1")
    job = Job(Cell(model="net").to_dict(), entry.to_dict(), str(tmp_path), ("determinism",), modules=("broken_model",))
    failure = compile_in_process(job, 1)["failure"]
    assert failure.startswith("its process ended with 1: ")
    assert "no weights here" in failure
