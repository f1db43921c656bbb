"""A graph break that makes torch give up whole functions: what is advised is all that the cell needs."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.needs_torch
MATRIX = """
version: 1
models:
  net: {factory: "models:Tagger", inputs: "models:wave", dims: {B: 4}}
axes: {backend: [eager]}
checks: [compiles, graph_breaks]
"""
MODELS = """
class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.front = torch.nn.Conv1d(1, 8, 3)
        self.rnn = torch.nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        h = self.front(x).relu()
        return self.rnn(h.transpose(1, 2))[0].mean(1)

def wave(B):
    return torch.randn(B, 1, 12)
"""


def test_it_is_told_in_full_once(repo):
    """In the terminal: the second cell says "same as above", and JUnit's file has each in full."""
    repo.models(MODELS)
    repo.matrix(MATRIX.replace("[eager]", "[eager, aot_eager]"))
    text = repo.run("--junitxml=junit.xml").stdout.str()
    assert text.count("if it is meant, allow it by the rule") == 1
    assert "graph_breaks: same as above, models.py:" in text
    file = (repo.path / "junit.xml").read_text()
    assert file.count("if it is meant, allow it by the rule") == 2
    assert "same as above" not in file


def rules(lines):
    return MATRIX + "rules:\n" + "".join(f"  {line}\n    when: {{model: net}}\n    reason: meant\n" for line in lines)


def test_the_lines_to_paste(repo):
    """Both of them; with both pasted the cell is green, and with one alone nothing is called silent."""
    repo.models(MODELS)
    repo.matrix(MATRIX)
    text = repo.run().stdout.str()
    (advice,) = re.findall(r"if it is meant, allow it by the rule .*", text)
    lines = re.findall(r"`(- limits: .*?)`", advice)
    assert [line.split()[2] for line in lines] == ["{graph_breaks:", "{coverage:"]
    assert advice.endswith("(both lines)")

    repo.matrix(rules(lines[:1]))
    text = repo.run().stdout.str()
    assert "silent" not in text
    assert "1 model runs more eagerly than is allowed (net)" in text
    assert "operator calls ran inside compiled graphs beside graph breaks that are allowed at call 1" in text

    repo.matrix(rules(lines))
    repo.run()
    assert set(repo.verdicts().values()) == {"pass"}
