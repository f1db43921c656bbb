"""docs/gating.md says what is so: its policy is read, its words are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_torchcompile.cli import main
from pytest_torchcompile.gate.allowances import skip_findings
from pytest_torchcompile.gate.announcement import WORDS
from pytest_torchcompile.gate.judged import JudgedCell
from pytest_torchcompile.gate.policy import BASELINE, RATIOS, Policy
from pytest_torchcompile.gate.policyfile import KEYS, parse_policy
from pytest_torchcompile.gate.wholeness import nothing_to_judge
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.report.merging import VARYING
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.record import GATES

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="an sdist has no docs")


@pytest.fixture(scope="module")
def text():
    return (DOCS / "gating.md").read_text(encoding="utf-8")


def test_the_policy_is_read_and_shows_every_key(text):
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    policy = parse_policy(example.encode(), "release.yaml")
    assert policy.places.keys() | {"version"} == KEYS.keys()
    assert policy.allowed_failures[0].at_most == 2


def test_what_to_write_for_the_default_matrix(text):
    """Where Triton is not installed the cells of triton_op are skipped: the policy's lines are those of the text."""
    matrix = load_matrix(DOCS.parent / "matrix" / "default.yaml")
    check = {"verdict": "skip", "problems": [], "note": "no Triton"}
    cells = [JudgedCell(each.cell.id, each.cell.axes, {"compiles": check} if each.cell.model == "triton_op" else {}, {},
                        None, False) for each in matrix.cells]
    (finding,) = skip_findings(cells, Policy())
    assert "allowed_skips:\n  - cells: {model: triton_op}\n" in finding.hint
    assert "- cells: {model: triton_op}" in text


def test_exit_codes_and_words(text):
    for code, word in WORDS.items():
        assert f"| {code} | `{word}` |" in text
    assert "| 70 | |" in text


EXPECTED = "not one cell holds: all that ran is expected to fail, by the matrix or the policy"


@pytest.mark.parametrize(("cell", "words"), [
    ({"skipped": "no GPU", "compiled": False, "status": "skip"}, "all were skipped"),
    ({"skipped": None, "compiled": False, "status": "pass"}, "no cell ran compiled code"),
    ({"skipped": None, "compiled": True, "status": "pass"}, "only cells of the fake lane hold"),
    ({"skipped": None, "compiled": True, "status": "xfail"}, EXPECTED),
    ({"skipped": None, "compiled": True, "status": "fail"}, EXPECTED),
])
def test_why_there_is_nothing_to_judge(text, cell, words):
    """What the gate says with exit code 3 is what its row here and in the README says."""
    told = nothing_to_judge(SimpleNamespace(matrix={"cells_planned": ["a", "b"]}),
                   {name: SimpleNamespace(**cell) for name in ("a", "b")}, {}).text
    assert words.removeprefix("all ") in told
    assert words in _row(text, 3)
    if cell["skipped"] is None:
        assert words in _row((DOCS.parent / "README.md").read_text(encoding="utf-8"), 3)


def _row(text, code):
    (row,) = re.findall(rf"^\| {code} \|.*$", text, re.M)
    return row


@pytest.mark.parametrize("names", [METRICS, RATIOS, BASELINE, GATES, VARYING])
def test_every_name_is_told(text, names):
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_option_is_told(text, capsys):
    with pytest.raises(SystemExit):
        main(["gate", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options
    assert not [option for option in options if option not in text.partition("The first line")[0]]


def test_links(text):
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (DOCS / link).is_file(), link
