"""The fixture graph_pass and its marker, in a test of somebody's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/toolkit.md"
pytestmark = pytest.mark.needs_torch

PASSES = """
import torch
aten = torch.ops.aten

def add_twice(module):
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if node.args[1] == 2:
            node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])

def add_thrice(module):
    for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if node.args[1] == 2:
            node.args = (node.args[0], 3)
"""
TEST = """
import pytest, torch
from passes import add_twice, add_thrice

class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x) * 2

@pytest.mark.graph_passes([add_twice])
def test_right(graph_pass):
    assert graph_pass(Doubles(), torch.randn(3, 4)).ok

@pytest.mark.graph_passes("dead_code", "passes:add_thrice", capture="forward_backward")
def test_wrong(graph_pass):
    graph_pass(Doubles(), torch.randn(3, 4))

@pytest.mark.graph_passes([add_twice])
def test_nothing_to_change(graph_pass):
    graph_pass(torch.nn.Linear(4, 4), torch.randn(3, 4))

def for_inference(module):
    if any(str(node.target).startswith("tangents") for node in module.graph.find_nodes(op="placeholder")):
        raise RuntimeError("not for training")
    add_twice(module)

@pytest.mark.graph_passes("dead_code, passes:add_twice", for_inference, train=False)
def test_inference(graph_pass):
    assert graph_pass.judge(Doubles(), torch.randn(3, 4)).ok

def test_in_training(graph_pass):
    graph_pass(Doubles(), torch.randn(3, 4), passes=for_inference)

def test_without_marker(graph_pass):
    assert not graph_pass.judge(Doubles(), torch.randn(3, 4), passes=[add_thrice]).ok
"""


def test_right_and_wrong_passes(pytester):
    """The wrong one fails with its number and what it changed; one that found nothing to change proves nothing."""
    pytester.makepyfile(passes=PASSES, test_it=TEST)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.re_match_lines_random([
        r"E +AssertionError: the capture itself: \d+ values and properties as before",
        r"E +pass 2 of 2 \(passes:add_thrice\) changed output \([\d.e+]+ times the rounding noise\)",
        r"E +AssertionError: pass 1 of 1 \(add_twice\) changed no graph of this model, so nothing is proved.*",
        r"E +with pass 1 of 1 \(for_inference\) the model raises: .* raised RuntimeError: not for training .*",
        r"E +note: pass 1 of 1 \(for_inference\): judged on the graph of forward and backward; a pass that is for "
        r"inference alone needs train=False",
    ])
    # The trace of torch's compiles is no log of the user's.
    result.stdout.no_fnmatch_line("*torch.__trace*")


@pytest.mark.parametrize(("mark", "text"), [
    ("graph_passes()", "names no pass; expected graph_passes*"),
    ("graph_passes(3)", "3 is no pass; expected a function, 'module:function' or a name such as 'dead_code'"),
    ("graph_passes('dead_code', capture='jiont')", "unknown capture 'jiont'; did you mean 'joint'?*"),
    ("graph_passes('dead_code', train=3)", "train=3; expected True or False"),
    ("graph_passes('dead_code', dynamic='static')", "dynamic='static'; expected None or True or False"),
    ("graph_passes('dead_code', captured='joint')", "unknown argument 'captured'; did you mean 'capture'?*"),
])
def test_mistakes_in_the_marker(pytester, mark, text):
    """Told before the test runs."""
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.{mark}
        def test_it(graph_pass):
            pass
    """)
    result = pytester.runpytest("-p", "no:cacheprovider")
    result.stderr.fnmatch_lines([f"*{text}"])
    assert result.ret != 0


def test_a_lone_function_in_the_marker(pytester):
    """Pytest marks it instead of the test, and hands it the test; our words stand below pytest's error."""
    pytester.makepyfile(passes=PASSES, test_it="""
        import pytest
        from passes import add_twice

        @pytest.mark.graph_passes(add_twice)
        def test_it(graph_pass):
            pass
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines([
        "*AttributeError: 'function' object has no attribute 'graph'*", "*- graph_passes -*",
        "pytest takes a lone function in a marker for the test that is marked; put it into a list: "
        "@pytest.mark.graph_passes([[]my_pass])"])


def test_the_page(pytester):
    """The pass and the test that docs/how-to/toolkit.md shows."""
    written, used, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    net = TEST.partition("class Doubles")[2].partition("@pytest")[0]
    given = f"import pytest, torch\nfrom passes import twice_as_sum\nclass Model{net}\nbatch = torch.randn(3, 4)\n"
    pytester.makepyfile(passes=written, test_it=given + used)
    # In a process of its own: pytester forgets what an earlier run has loaded, and Triton can't be loaded twice.
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
