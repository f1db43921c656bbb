"""A run with a lying backend: one model that it computes wrongly, among nine with a harmless graph break."""

from __future__ import annotations

import pytest

from pytest_torchcompile.cli import main

pytestmark = pytest.mark.needs_torch
BROKEN = """
class Broken{number}(Net):
    def forward(self, x):
        h = torch.tanh(self.inner(x))
        if h.mean().item() > 9:
            h = h / 2
        return self.outer(h)
"""
_ENTRY = '  {}: {{factory: "models:{}", inputs: "models:batch", dims: {{B: 4}}}}'
NAMES = [*((f"broken{number}", f"Broken{number}") for number in range(9)), ("liar", "Net")]
MODELS = "\n".join(_ENTRY.format(*names) for names in NAMES)
MATRIX = f"""
version: 1
models:
{MODELS}
axes:
  backend: [relu_accuracy_error_TESTING_ONLY]
checks: [compiles, graph_breaks, equivalence, gradients, smoketest]
"""
LIAR = "liar-relu_accuracy_error_TESTING_ONLY-default-auto-none"
HEADLINE = "1 model computes wrong numbers (liar); 9 models have graph breaks"


def test_one_lie_among_nine_graph_breaks(repo, capsys):
    """The terminal, the gate and the items themselves: the lie first, and what follows from a break in one line."""
    repo.models("".join(BROKEN.replace("{number}", str(number)) for number in range(9)))
    repo.matrix(MATRIX)
    result = repo.run("-p", "no:xdist")
    lines = result.stdout.lines
    summary = lines[lines.index(HEADLINE):]
    assert summary[1].startswith("1 cell  equivalence, gradients, smoketest: ")
    assert summary[2] == f"    in {LIAR}"
    assert summary[3].startswith("1 cell  graph_breaks: graph break (1 place(s), 0 allowed): ")
    assert summary[5] == "    compiles follows from graph_breaks"
    assert "and 2 more causes" in summary  # eight are shown
    result.stdout.fnmatch_lines(["  so    compiles: only 0.* of the model's operator calls*"])
    failed = [line.split("::")[2].split(" ")[0] for line in lines if line.startswith("FAILED ") and "broken0" in line]
    assert failed == ["graph_breaks"]  # however the matrix lists them, and what follows is told with it
    # Nothing is told twice, and every item counts: the break of nine models, and what follows from it.
    result.stdout.fnmatch_lines(["=* 12 failed, 29 passed, 9 same cause in *"])
    capsys.readouterr()
    assert main(["gate", str(repo.path / ".compile-matrix/report.json"), "--github"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"FAIL: {HEADLINE}"
    assert sum(line.startswith("fail ") for line in told) == 10
    assert sum(line.startswith("::error ") for line in told) == 10
    assert "equivalence: " in next(line for line in told if line.startswith("::error "))
