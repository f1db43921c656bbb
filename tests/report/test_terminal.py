"""What the terminal shows, as text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_torchcompile.checks import CHECKS
from pytest_torchcompile.observation import Failure, Judgement, Observation, Problem
from pytest_torchcompile.oracle.pass_records import PassStep
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.report.causes import Fresh
from pytest_torchcompile.report.journal import Journal
from pytest_torchcompile.report.metrics import METRICS
from pytest_torchcompile.report.terminal import failure_text, header_lines, summary_lines
from pytest_torchcompile.run.settings import Settings

MATRIX = """
version: 1
models:
  net: {factory: "models:net", inputs: "models:batch", dims: {B: 4}}
axes:
  backend: [eager, aot_eager, inductor]
  mode: [default, max-autotune]
rules:
  - exclude: {backend: [eager, aot_eager], mode: max-autotune}
    reason: modes are Inductor's
  - skip: {backend: aot_eager}
    reason: no time
"""
SETTINGS = Settings("m.yaml", (), (1, 1), 300.0, "rank", False)


@pytest.fixture
def matrix(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    (tmp_path / "models.py").write_text("def net(): ...\ndef batch(B): ...\n")
    return load_matrix(tmp_path / "m.yaml")


@pytest.fixture
def journal(matrix, tmp_path):
    made = Journal(matrix, matrix.cells, SETTINGS, tmp_path / "journal.jsonl")
    made.expect_items([f"m.yaml::{p.cell.id}::compiles" for p in matrix.cells])
    yield made
    made.finish(0)


def verdict(cell, kind="pass", graphs=1, **changes):
    observation = Observation(cell, sections={"compiles": {"graphs": [{"runs": 1}] * graphs}},
                              environment={"torch": "2"}, **changes)
    return {"cell": cell, "check": "compiles", "seconds": 2.0, "observation": observation.to_dict(),
            **Judgement(kind).to_dict()}


def test_header(matrix):
    """What is planned, what is not, and why."""
    lines = header_lines(matrix, matrix.cells, SETTINGS)
    assert lines[1] == "compile matrix: m.yaml: 4 cells planned, 2 excluded, 1 to skip, 0 expected to fail"
    assert lines[2:] == ["  excluded 2: modes are Inductor's", "  skip 1: no time"]


def test_the_header_tells_where_a_check_that_was_named_has_nothing_to_judge(matrix):
    """What nobody named is not told: a matrix has many cells without this or that check."""
    named = dataclasses.replace(SETTINGS, checks=("compiles", "cudagraphs"))
    told = "  note: cudagraphs has nothing to judge in 4 of 4 cells: no CUDA graphs are promised, by a mode or a " \
           "backend on device cuda"
    assert header_lines(matrix, matrix.cells, named)[4:] == [told]
    assert header_lines(matrix, matrix.cells, SETTINGS)[4:] == []
    asked = dataclasses.replace(matrix, checks=("compiles", "cudagraphs", "randomness"), cells=())
    fake = [dataclasses.replace(p, cell=dataclasses.replace(p.cell, wrapper="tp*fake8")) for p in matrix.cells[:1]]
    assert header_lines(asked, [*matrix.cells, *fake], SETTINGS)[4:] == [
        "  note: randomness has nothing to judge in 1 of 5 cells: in the fake lane no number means anything"]


def test_failure_text():
    """Culprit, evidence, what to try, how to run it again."""
    judged = Judgement("fail", (Problem("2 breaks", "m.py:3\nm.py:9", "split it"),))
    assert failure_text("graph_breaks", {"graph_breaks": judged}, "pytest x") == (
        "graph_breaks: 2 breaks\n    m.py:3\n    m.py:9\n  try    split it\n"
        "  logs   --compile-logs=graph_breaks shows more\n  again  pytest x")


@pytest.mark.parametrize("check", CHECKS)
def test_every_failing_check_names_channels_of_torchs_log(check):
    """Where its problem is told in full, and only there."""
    failed = Judgement("fail", (Problem("it does not hold"),))
    assert f"  logs   --compile-logs={CHECKS[check].logs} shows" in failure_text(check, {check: failed}, "pytest x")
    assert CHECKS[check].logs
    broken = Judgement("crash", (Problem("aborted"),))
    assert "  logs   " not in failure_text(check, {check: broken}, "pytest x")


def test_a_crash_is_shown_once():
    """Later checks of a cell that crashed name the first, from which a crash does not follow."""
    judged = Judgement("crash", (Problem("aborted (SIGABRT)", "a long stack"),))
    told = {"compiles": judged, "gradients": judged}
    assert failure_text("compiles", told, "pytest x") == (
        "crash: aborted (SIGABRT)\n    a long stack\n  same as above: 1 check: gradients\n  again  pytest x")
    assert failure_text("gradients", told, "pytest x") == (
        "gradients: the cell has no result, as compiles tells: aborted (SIGABRT)\n  again  pytest x")


def test_what_follows_is_told_with_its_cause():
    """Each message once, with the checks that have it, also where it follows from what follows itself."""
    problems = {"graph_breaks": "graph break (1 place(s), 0 allowed): item()",
                "compiles": "only 80% of the model's operator calls ran inside compiled graphs at call 1",
                "equivalence": "output: error is 9 times the rounding noise"}
    told = {name: Judgement("fail", (Problem(text),)) for name, text in problems.items()}
    text = failure_text("graph_breaks", told, "pytest x")
    assert "\n  so    compiles: only 80% of the model's operator calls ran inside compiled graphs at call 1\n" in text
    assert "equivalence" not in text


def test_a_mistake_of_the_cell_is_told_in_full_once():
    """The first check tells it, later ones how it begins."""
    judged = Judgement("error", (Problem(f"tp_plan['up'] is 'colwise', {'and so on ' * 30}"),))
    told = {"compiles": judged, "gradients": judged}
    first, later = (failure_text(check, told, "pytest x") for check in told)
    assert judged.problems[0].message in first
    assert later.startswith("gradients: the cell has no result, as compiles tells: tp_plan['up'] is 'colwise', and so")
    assert later.endswith(" ...\n  again  pytest x")
    assert len(later) < 180


def test_the_columns_of_a_check_that_was_asked_for(journal, matrix):
    """The terminal knows them from the check's record; a section that was ended early has none."""
    measured = [{"speedup": 1.25, "memory_mib": 3.0}, {"speedup": 0.5}, {}]
    for planned, numbers in zip(matrix.cells, measured, strict=False):
        carried = verdict(planned.cell.id)
        carried["observation"]["sections"] |= {"worth": numbers, "kernels": {"raised": "ValueError"}}
        journal.add_verdict(carried)
    lines = [text for text, _ in summary_lines(journal)]
    assert f"speedup: 0.5 to 1.25 in 2 cells, the worst in {matrix.cells[1].cell.id}" in lines
    assert f"memory_mib: 3 to 3 MiB in 1 cell, the worst in {matrix.cells[0].cell.id}" in lines
    assert not [line for line in lines if line.startswith(("kernels", "graphs"))]


def test_every_number_that_is_shown_is_a_column_of_a_check():
    """So a newcomer's column is known to terminal, page, policy and baseline alike."""
    columns = {column.name: column for check in CHECKS.values() for column in check.columns}
    assert list(METRICS) == list(columns)
    metric, column = METRICS["speedup"], columns["speedup"]
    assert (metric.kind, metric.whole, metric.help) == (column.kind, column.whole, column.help)


def test_summary(journal, matrix):
    """A table of backend and mode, totals, and what no gate would take."""
    ids = [p.cell.id for p in matrix.cells]
    journal.add_verdict(verdict(ids[0]))
    journal.add_verdict(verdict(ids[1], "skip", graphs=0))
    journal.add_verdict(verdict(ids[2], "fail", leaks=["grad mode: True -> False"]))
    lines = [text for text, _ in summary_lines(journal)]
    assert lines == [
        "           default  max-autotune",
        "eager      1 pass   -",
        "aot_eager  1 skip   -",
        "inductor   1 fail   1 not_run",
        "4 cells: 1 pass, 1 skip, 1 not_run, 1 fail; 2 ran compiled code",
        f"{ids[2]} changed torch's settings, which were put back: grad mode: True -> False",
        f"1 planned verdict never came, for example {ids[3]}::compiles",
    ]


@pytest.mark.parametrize(("spent", "told"), [
    ("seconds", ["the seconds ran out; give more: --compile-fuzz-seconds"]), ("compiles", ["the compiles ran out"]),
    ("", [])])
def test_fuzzing_that_was_cut_short_is_told(journal, matrix, spent, told):
    """A cell that passed over few sequences is not as good as one that passed over all."""
    for number, planned in enumerate(matrix.cells):
        event = verdict(planned.cell.id)
        rungs = [{"spent": "", "examples": 30}, {"spent": spent, "examples": 3 + number}]
        event["observation"]["sections"]["fuzz"] = {"rungs": rungs, "finding": None}
        journal.add_verdict(event)
    lines = [text for text, _ in summary_lines(journal) if text.startswith("fuzz")]
    assert lines == [f"fuzz: 4 cells were not fuzzed to the end: of {matrix.cells[0].cell.id} 3 sequences were "
                     f"compared, then {text}" for text in told]


@pytest.mark.parametrize(("changed", "told"), [((False, False), True), ((False, True), False)])
def test_a_pass_that_changed_nothing_in_any_cell_is_told(journal, matrix, changed, told):
    """Green says nothing about it. One that changed the graph of one cell is not told."""
    for planned, has_changed in zip(matrix.cells[:2], changed, strict=True):
        event = verdict(planned.cell.id)
        steps = [PassStep("the capture itself", compared=3),
                 PassStep("pass 1 of 1 (mine:fold)", changed=has_changed, compared=3)]
        event["observation"]["sections"]["passes"] = {"passes": [step.to_dict() for step in steps]}
        journal.add_verdict(event)
    lines = [text for text, _ in summary_lines(journal) if text.startswith("pass ")]
    assert lines == ["pass mine:fold changed no graph in 2 cells, so nothing is proved of it: give it a model with "
                     "something to change"] * told


def test_a_pass_that_a_table_leaves_nothing_for_is_told(matrix, tmp_path):
    """Before Inductor a softmax is no operator any more: green there says nothing of the pass over it."""
    cells = []
    for planned, table in zip(matrix.cells[:3], ("inductor", "inductor", "none"), strict=True):
        cells.append(dataclasses.replace(planned, cell=dataclasses.replace(planned.cell, decompositions=table)))
    journal = Journal(matrix, cells, SETTINGS, tmp_path / "journal.jsonl")
    journal.expect_items([f"m.yaml::{planned.cell.id}::compiles" for planned in cells])
    for planned in cells:
        event = verdict(planned.cell.id)
        step = PassStep("pass 1 of 1 (mine:softmax)", changed=planned.cell.decompositions == "none", compared=3)
        event["observation"]["sections"]["passes"] = {"passes": [step.to_dict()]}
        journal.add_verdict(event)
    lines = [text for text, _ in summary_lines(journal) if text.startswith("pass ")]
    journal.finish(0)
    assert lines == [
        "pass mine:softmax changed no graph in 2 cells, all with decompositions inductor, and did with others: the "
        "table may have taken its operators apart; pytest-torchcompile explain CELL lists them"]


def test_a_run_that_compiled_nothing_is_told(journal, matrix):
    """A run in which every cell was skipped is no green one."""
    for planned in matrix.cells:
        journal.add_verdict(verdict(planned.cell.id, "skip", graphs=0))
    nothing_ran = "no cell ran compiled code: this run proves nothing, and no gate will pass it"
    assert (nothing_ran, {"red": True}) in summary_lines(journal)


def test_the_journal_is_on_disk_at_once(journal, matrix):
    """Each verdict is a line as soon as it is known, after a line with the plan."""
    cell = matrix.cells[0].cell.id
    journal.add_verdict(verdict(cell))
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "verdict"]
    assert lines[0]["expected"] == {p.cell.id: ["compiles"] for p in matrix.cells}
    assert lines[1]["cell"] == cell


def test_a_lost_worker_is_a_crash(journal, matrix):
    """xdist reports only that the worker died: the verdict is a crash of that cell."""
    cell = matrix.cells[0].cell.id
    journal.add_lost_item(f"m.yaml::{cell}::compiles", "worker 'gw1' crashed")
    assert journal.status(cell) == "crash"
    assert journal.not_run() == [f"{p.cell.id}::compiles" for p in matrix.cells[1:]]


def test_ranks_that_differ_are_visible(journal, matrix):
    """The first environment is the report's; a cell from another one carries its own, for the gate to refuse."""
    ids = [p.cell.id for p in matrix.cells]
    other = verdict(ids[1])
    other["observation"]["environment"] = {"torch": "3"}
    journal.add_verdict(verdict(ids[0]))
    journal.add_verdict(other)
    cells = {cell["id"]: cell for cell in journal.block()["cells"]}
    assert journal.block()["environment"] == {"torch": "2"}
    assert "environment" not in cells[ids[0]]["observation"]
    assert cells[ids[1]]["observation"]["environment"] == {"torch": "3"}


def test_usage_errors_are_collected(journal, matrix):
    """A mistake in the matrix that a rank found is told once."""
    for planned in matrix.cells[:2]:
        journal.add_verdict(verdict(planned.cell.id, "error", failure=Failure("usage", "m.yaml:4:3: no")))
    assert journal.usage_errors() == ["m.yaml:4:3: no"]
    assert Path(journal.path).is_file()


def test_no_wrong_numbers_are_cut_off(tmp_path):
    """Ten liars and ten graph breaks: eight causes are shown, and every lie, the new one first."""
    names = [*(f"broken{number}" for number in range(10)), *(f"liar{number}" for number in range(10))]
    models = "\n".join(f'  {name}: {{factory: "models:net", inputs: "models:batch"}}' for name in names)
    (tmp_path / "m.yaml").write_text(f"version: 1\nmodels:\n{models}\naxes: {{backend: [eager]}}\n")
    (tmp_path / "models.py").write_text("def net(): ...\ndef batch(): ...\n")
    matrix = load_matrix(tmp_path / "m.yaml")
    journal = Journal(matrix, matrix.cells, SETTINGS, tmp_path / "journal.jsonl")
    for number, planned in enumerate(matrix.cells):
        lies = planned.cell.model.startswith("liar")
        problem = Problem("output: error is 9 times the noise") if lies else \
            Problem("graph break (1 place(s), 0 allowed): x", file="m.py", line=number + 1)
        check = "equivalence" if lies else "graph_breaks"
        event = verdict(planned.cell.id) | {"check": check} | Judgement("fail", (problem,)).to_dict()
        journal.expect_items([f"m.yaml::{planned.cell.id}::{check}"])
        journal.add_verdict(event)
    new = f"{names[-1]}-eager-default-auto-none"
    lines = [line for line, _ in summary_lines(journal, Fresh(frozenset({(new, "equivalence")})))]
    journal.finish(0)
    told = lines[lines.index(next(line for line in lines if "wrong numbers" in line)):]
    liars = ", ".join((names[-1], *names[10:-1]))
    assert told[0] == f"10 models compute wrong numbers ({liars}, 1 new); 10 models have graph breaks"
    assert told[1:3] == ["1 cell  equivalence: output: error is 9 times the noise, new since the baseline",
                         f"    in {new}"]
    assert sum(line.startswith("1 cell  equivalence") for line in told) == 10
    assert not any(line.startswith("1 cell  graph_breaks") for line in told)
    assert told[-1] == "and 10 more causes"


def test_a_mistake_is_one_line_of_the_summary(journal, matrix):
    """However long; with the cells that have it."""
    text = f"m.yaml:4:3: no, {'and so on ' * 30}that was it"
    for planned in matrix.cells[:2]:
        event = verdict(planned.cell.id, "error", failure=Failure("usage", text))
        journal.add_verdict(event | Judgement("error", (Problem(text),)).to_dict())
    lines = [line for line, _ in summary_lines(journal)]
    assert [line for line in lines if "m.yaml:4:3" in line] == [f"2 cells  compiles: {text}"]
    assert f"    in {matrix.cells[0].cell.id}, {matrix.cells[1].cell.id}" in lines
