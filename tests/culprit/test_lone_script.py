"""A script is tried where torch is all that there is: an issue's reader has neither the project nor its settings."""

from __future__ import annotations

import os
import textwrap
from unittest import mock

import pytest
import torch
from torch._inductor.decomposition import decompositions, fast_random_decomps

from pytest_torchcompile.culprit.captured_graph import GraphCatcher
from pytest_torchcompile.culprit.culprit_record import culprit_text, issue_text
from pytest_torchcompile.culprit.culprit_search import find_graphs_culprit
from pytest_torchcompile.culprit.graph_trial import NUMBERS
from pytest_torchcompile.culprit.lone_script import LoneRun, run_alone
from pytest_torchcompile.faults.wrong_compiler import WRONG_COMPILERS
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.torch_state import isolated

pytestmark = pytest.mark.needs_torch

PLANT = """
import torch
from torch._inductor.lowering import lowerings

relu, add = torch.ops.aten.relu.default, torch.ops.aten.add.Tensor
right = lowerings[relu]
lowerings[relu] = lambda x: lowerings[add](right(x), 0.25)
"""
"""A wrong lowering as every process of this Python has it: a sitecustomize.py."""


@pytest.fixture(autouse=True)
def _isolated():
    with isolated([]):
        yield


def written(text):
    return textwrap.dedent(text).lstrip()


def test_it_shows_what_it_should():
    alone = run_alone(written("""
        import torch
        torch.testing.assert_close(torch.ones(2), torch.zeros(2))
    """), NUMBERS, 300)
    assert alone.shown.startswith("AssertionError: Tensor-likes are not close!\n\nMismatched elements: 2 / 2 (100")
    assert (alone.needs_more, alone.why_not) == ("", "")


def test_what_it_should_raise_may_have_a_cause_and_a_module():
    alone = run_alone(written("""
        class Refused(Exception):
            pass
        try:
            {}["x"]
        except KeyError as why:
            raise Refused("no x") from why
    """), "raises Refused", 300)
    assert alone == LoneRun(shown="Refused: no x")


def test_it_does_not_find_what_the_project_has(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text("")
    monkeypatch.chdir(tmp_path)
    alone = run_alone("import models\n", NUMBERS, 300)
    assert alone.needs_more == "ModuleNotFoundError: No module named 'models'"


def test_it_agrees_there():
    assert run_alone("import torch\n", NUMBERS, 300).why_not == (
        "eager and compiled agree there, so what the project sets has a part in it")


def test_it_is_ended(monkeypatch):
    monkeypatch.setattr("pytest_torchcompile.culprit.lone_script._FEWEST_SECONDS", 0)
    assert run_alone("import time; time.sleep(60)\n", NUMBERS, 1).why_not == "it did not end within 1 s"


def test_it_is_not_tried_without_time():
    """Who asks is ended when the time is over, with all that was found."""
    assert run_alone("1 / 0\n", NUMBERS, 5).why_not == "no time was left to try it"


def culprit_of(model, backend):
    def capture():
        catcher = GraphCatcher()
        torch.compile(model, backend=catcher, dynamic=False)(torch.randn(4, 8))
        return catcher.graphs

    return find_graphs_culprit(capture, backend, frozenset({NUMBERS}), 3000, {}, os.getcwd())


@pytest.mark.slow
@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")
def test_an_issue_has_what_the_script_showed_with_torch_alone(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fault = next(fault for fault in WRONG_COMPILERS if fault.name == "lowering of relu")
    with fault.plant():
        found = culprit_of(lambda x: torch.relu(x) * 2, "inductor")
    assert (found.subsystem, found.left) == ("lowerings", ("relu",))
    assert (found.needs_more, found.why_not_alone) == ("", "")
    text = issue_text(found)
    assert "In a process of its own and an empty folder it ends with:" in text
    assert "Greatest absolute difference: 0.25" in text


def test_an_operator_of_the_project_makes_no_issue():
    """It is registered in this process: the script runs here, and nowhere else."""

    @torch.library.custom_op("lone_script_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    double.register_fake(torch.empty_like)
    with mock.patch.dict(decompositions, {torch.ops.lone_script_test.double.default: lambda x: 2 * x + 0.25}):
        fast_random_decomps.cache_clear()
        found = culprit_of(torch.ops.lone_script_test.double, "aot_eager_decomp_partition")
    fast_random_decomps.cache_clear()
    assert "torch.ops.lone_script_test.double" in found.script
    assert found.needs_more.startswith("AttributeError: '_OpNamespace' 'lone_script_test' object has no attribute")
    assert "no issue draft: with torch alone the script ends with AttributeError" in culprit_text(found)
    assert issue_text(found) == ""
