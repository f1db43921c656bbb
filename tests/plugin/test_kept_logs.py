"""--compile-logs: what torch logs of a cell is printed and kept, though it runs in a rank; a trace for tlparse."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
MODELS = """
def net():
    return Net()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y + 1
"""
MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, aot_eager]
  phase: [inference]
checks: [compiles]
"""


def test_a_log_of_each_cell(repo):
    """The break is told below each cell's id; the trace is a file; a second run leaves nothing of the first."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    result = repo.run("--compile-logs=graph_breaks,trace")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([
        "*torch's log*",
        "net-eager-default-auto-none-inference: .compile-matrix/logs/net-eager-default-auto-none-inference.log",
        "*Graph break*",
        "net-eager-default-auto-none-inference: trace for tlparse: "
        ".compile-matrix/logs/net-eager-default-auto-none-inference.trace.log",
        "net-aot_eager-default-auto-none-inference: *.log",
        "*Graph break*",
    ])
    logs = repo.path / ".compile-matrix" / "logs"
    assert len(list(logs.iterdir())) == 4
    trace = (logs / "net-eager-default-auto-none-inference.trace.log").read_text()
    assert '"dynamo_output_graph"' in trace
    result = repo.run("--compile-logs=recompiles", "-m", "compile_cell(backend='eager')")
    result.stdout.fnmatch_lines(["  nothing was logged in these channels"])
    assert [file.name for file in logs.iterdir()] == ["net-eager-default-auto-none-inference.log"]


def test_a_channel_that_is_none(repo):
    """The nearest one is named; it is a mistake of the command, and no verdict."""
    repo.matrix(MATRIX)
    result = repo.run("--compile-logs=recompile", "-m", "compile_cell(backend='eager')")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*'recompile' is no channel of torch's log; did you mean 'recompiles'*"])
