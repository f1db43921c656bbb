"""Lines that a kept report names, found again after edits that change no code."""

from __future__ import annotations

import random

import pytest

from pytest_torchcompile.reuse.definitions import use_of_sources
from pytest_torchcompile.reuse.named_lines import LinesMoved, NamedLines, find_lines, move_lines

MODELS = '''\
"""Two models."""
import torch

SCALE = [1,
         2]
double = lambda x: 2 * x


class Net(torch.nn.Module):
    """A net."""

    def forward(self, x):
        y = scale(x)  # twice
        if x.sum() > 0:
            y = y + 1
        return torch.relu(
            y,
        )


def scale(x):
    """A scale."""
    return x * SCALE[1]


@torch.no_grad()
def other(x):
    return x


def other(x):
    return x
'''


def line_of(text, part):
    """Of the first line that has the part, one-based."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def observed(text, path="models.py"):
    """A report that names lines in all the ways in which reports do."""
    forward, branch = line_of(text, "def forward"), line_of(text, "if x.sum()")
    return {
        "sections": {
            "graph_breaks": {"graph_breaks": [{
                "file": path, "line": branch, "source": "if x.sum() > 0:", "stack": [f"{path}:{branch} in forward"],
            }]},
            "compiles": {"compiles": [
                {"file": path, "line": forward, "resumed_at": branch, "at": f"{path}:{line_of(text, 'y = scale')}",
                 "what": f"(value at line {branch}).size(0)", "function": f"torch_dynamo_resume_in_it_at_{branch}"},
                {"file": "/v/site-packages/torch/models.py", "line": 14, "resumed_at": 0, "what": "line 14"},
            ]},
        },
        "ranks": [{"sections": {path: f'  File "{path}", line {line_of(text, "return x * SCALE")}, in scale'}}],
        "failure": None,
        "seconds": {"build": 1.5},
        "notes": {f"{path}:{line_of(text, 'double =')}": 2},
    }


def kept_of(root, observation, *more):
    return NamedLines.from_dict(find_lines(observation, ["models.py", *more], root).to_dict())


@pytest.mark.parametrize(("before", "after"), [
    ('"""Two models."""', '# A licence.\n# Of two lines.\n"""Two models,\nand more."""'),
    ('    """A net."""', '    """A net.\n\n    That adds.\n    """'),
    ('    """A net."""\n\n', ''),
    ("\n\n\ndef scale", "\n\n\n# What follows is a scale.\ndef scale"),
    ("        if x.sum()", "\n        # a branch\n        if x.sum()"),
    ("class Net", "def unused():\n    return 3\n\n\nclass Net"),
    ("y = y + 1", "y = y + 1  # one"),
    ("    return x\n", "    return x  # as it was\n"),
], ids=["header", "docstring", "no docstring", "before a function", "before a line", "another function",
        "beside a line", "in two of one name"])
def test_lines_are_where_they_are_today(tmp_path, before, after):
    """Whatever an edit moves, the report is the one that a run of today would make; absolute paths too."""
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    assert before in MODELS
    edited = MODELS.replace(before, after)
    for path in ("models.py", str(file), "./models.py"):
        file.write_text(MODELS)
        kept = kept_of(tmp_path, observed(MODELS, path))
        assert not kept.unplaced
        file.write_text(edited)
        assert move_lines(observed(MODELS, path), kept, tmp_path) == observed(edited, path)


@pytest.mark.parametrize(("before", "after"), [
    ("if x.sum() > 0:", "if x.sum() > 0:  # a comment beside the line"),
    ("y = scale(x)  # twice", "y = scale(x)  # two times"),
    ("y = scale(x)", "y =  scale(x)"),
    ("x * SCALE[1]", "x * SCALE[0]"),
    ("def forward(self, x):", "def forward(self,\n                x):"),
], ids=["new comment", "other comment", "blanks", "another code", "broken line"])
def test_a_line_of_another_text_is_not_shown(tmp_path, before, after):
    """A report quotes lines: the cell is run where one of them reads otherwise."""
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    kept = kept_of(tmp_path, observed(MODELS))
    file.write_text(MODELS.replace(before, after))
    with pytest.raises(LinesMoved, match=r"^models\.py:\d+, which its report names, is not as it was$"):
        move_lines(observed(MODELS), kept, tmp_path)


def test_a_line_in_which_nothing_begins(tmp_path):
    """A report of such a line holds as long as its file is the same, byte by byte."""
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    named = {"text": f"models.py:{line_of(MODELS, 'A net.') + 1}"}
    kept = kept_of(tmp_path, named)
    assert move_lines(named, kept, tmp_path) == named
    file.write_text(f"{MODELS}# the end\n")
    with pytest.raises(LinesMoved, match=r"^models\.py:11, which"):
        move_lines(named, kept, tmp_path)


@pytest.mark.parametrize("named", [{"text": "the rest after line 3"}, {"text": "layers.py:3"}, {"line": 3}],
                         ids=["no file", "half a path", "a number"])
def test_a_line_of_nobody_knows_which_file(tmp_path, named):
    """After any edit the cell is run, for the line could be one that moved."""
    file, layers = tmp_path / "models.py", tmp_path / "parts/layers.py"
    layers.parent.mkdir()
    file.write_text(MODELS)
    layers.write_text("x = 1\n")
    kept = kept_of(tmp_path, named, "parts/layers.py")
    assert move_lines(named, kept, tmp_path) == named
    file.write_text(f"{MODELS}# the end\n")
    with pytest.raises(LinesMoved, match=r"^models\.py was edited, and its report names a line without a file$"):
        move_lines(named, kept, tmp_path)


def test_what_a_report_does_not_show_is_left_alone(tmp_path):
    """The texts of generated code are kept by the hash of their content."""
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    hidden = {"code_texts": {"a": "# models.py:12"}, "comparisons": {"b": "models.py:12"}, "text": "models.py:12"}
    kept = kept_of(tmp_path, hidden)
    file.write_text(f"\n\n{MODELS}")
    assert move_lines(hidden, kept, tmp_path) == {**hidden, "text": "models.py:14"}


@pytest.mark.parametrize("seed", range(60))
def test_seeded_edits(tmp_path, seed):
    """Comments and blank lines between any two statements: the key is the same, and each line is found, or refused."""
    chance = random.Random(seed)
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    lines = MODELS.splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.strip() and '"""' not in line]
    named = {"places": [f"models.py:{number}" for number in numbers if lines[number - 1].strip() not in (")", "2]")]}
    kept = kept_of(tmp_path, named)
    first = use_of_sources({"models": file}, ["Net"]).digest
    written, today = [], {}
    for number, line in enumerate(lines, 1):
        while chance.random() < 0.3:
            written.append(chance.choice(["", "# a comment", "    # def forward(self, x):"]))
        written.append(line)
        today[number] = len(written)
    file.write_text("\n".join(written) + "\n")
    assert use_of_sources({"models": file}, ["Net"]).digest == first
    inside = "\n".join(written[today[line_of(MODELS, "SCALE = [")] - 1 : today[line_of(MODELS, "2]")]]) \
        != "SCALE = [1,\n         2]"
    call = line_of(MODELS, "torch.relu(")
    inside |= today[call + 2] - today[call] != 2
    # A traceback shows a statement of several lines as a whole.
    if inside:
        with pytest.raises(LinesMoved):
            move_lines(named, kept, tmp_path)
    else:
        places = [f"models.py:{today[int(place.partition(':')[2])]}" for place in named["places"]]
        assert move_lines(named, kept, tmp_path) == {"places": places}
