"""A run of a part taken over into the report that is kept."""

from __future__ import annotations

import copy
import json

import pytest
from runs import Run

from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.report.keeping import ReportKeeper
from pytest_torchcompile.report.provenance import cell_fingerprint, head_fingerprint
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.report.record import gate_verdicts
from pytest_torchcompile.report.takeover import is_whole, not_mergeable, take_over
from tests.gate.test_gate_of_tests import recorded

CLEAN = {"commit": "4f2c" * 10, "changed": False, "diff_sha256": "", "prefix": ""}


@pytest.fixture
def run():
    run = Run()
    run.git = CLEAN
    return run


def whole(run):
    return json.loads(json.dumps(run.blocks()[0]))


def part(run, *cells, checks=None, exit_status=None):
    """The block of a run that judged these cells, or these checks of them."""
    block = whole(run)
    for cell in block["cells"]:
        if cell["id"] not in cells:
            cell |= {"selected": False, "checks": {}, "status": "not_run", "seconds": None, "observation": None}
        elif checks:
            sections = cell["observation"]["sections"]
            cell["observation"]["sections"] = {name: sections[name] for name in checks}
            cell["checks"] = {name: cell["checks"][name] for name in checks}
        cell["evidence_sha256"] = cell_fingerprint(cell)
    block["run"] |= {"started": "2026-11-22T10:00:00+00:00", "finished": "2026-11-22T10:01:00+00:00"}
    if exit_status is not None:
        block["run"]["exit_status"] = exit_status
    block["gates"] = gate_verdicts(block["matrix"]["checks"], block["cells"])
    return block | {"head_sha256": head_fingerprint(block)}


def merged(kept, new):
    assert not_mergeable(kept, new) == ""
    block = take_over({"compile_matrix": kept}, {"compile_matrix": new})["compile_matrix"]
    return block, gate([Report("report.json", json.loads(json.dumps(block)))])


def test_a_cell_is_replaced_and_the_others_are_kept(run):
    one, *others = run.ids
    block, outcome = merged(whole(run), part(run, one))
    assert outcome.code == 0
    assert is_whole(block)
    assert ["kept" in cell for cell in block["cells"]] == [False, True, True, True]
    kept = block["cells"][1]["kept"]
    assert kept == [{"checks": sorted(run.checks), "started": "2026-11-21T10:00:00+00:00",
                     "finished": "2026-11-21T10:20:00+00:00", "git": CLEAN, "sources": "same"}]
    again, outcome = merged(block, part(run, others[0]))
    assert outcome.code == 0
    assert again["cells"][2]["kept"] == kept
    assert again["cells"][0]["kept"][0]["finished"] == "2026-11-22T10:01:00+00:00"


def test_chunks_of_a_matrix_make_one_report(run):
    """Runs of some models each (`-m "compile_cell(model='bert')"`): the gate passes once the last has come."""
    first, second = run.ids[:2], run.ids[2:]
    begun = part(run, *first)
    assert gate([Report("report.json", begun)]).code == 2
    block, outcome = merged(begun, part(run, *second))
    assert outcome.code == 0
    assert [cell["status"] for cell in block["cells"]] == ["pass"] * len(run.ids)


def test_one_check_of_a_cell(run):
    """The verdict and its section are replaced; the evidence is that of both, and is judged again."""
    one = run.ids[0]
    kept = whole(run)
    run.breaks(one)
    block, outcome = merged(kept, part(run, one, checks=["graph_breaks"], exit_status=1))
    cell = block["cells"][0]
    assert cell["checks"]["graph_breaks"]["verdict"] == cell["status"] == "fail"
    assert cell["checks"]["recompiles"]["verdict"] == "pass"
    assert cell["kept"][0]["checks"] == ["compiles", "recompiles"]
    assert outcome.code == 1
    assert not outcome.cells[one].contradictions


def test_a_failure_that_is_mended(run):
    """The exit status is that of one run with these verdicts."""
    one = run.ids[0]
    good = part(run, one)
    run.breaks(one)
    kept = whole(run)
    assert kept["run"]["exit_status"] == 1
    block, outcome = merged(kept, good)
    assert block["run"]["exit_status"] == 0
    assert outcome.code == 0


@pytest.mark.parametrize("status", [1, 3, 2])
def test_what_no_cell_explains_is_not_forgotten(run, status):
    kept = whole(run)
    kept["run"]["exit_status"] = status
    block, outcome = merged(kept, part(run, run.ids[0]))
    assert block["run"]["exit_status"] == status
    assert outcome.code == 2


def test_a_part_that_was_interrupted(run):
    """What it did not come to is as it was, and the whole is partial."""
    new = part(run, *run.ids[:2], exit_status=2)
    waits = {"verdict": "not_run", "problems": []}
    new["cells"][1] |= {"checks": dict.fromkeys(run.checks, waits), "status": "not_run"}
    new["finished"] = False
    block, outcome = merged(whole(run), new)
    assert block["cells"][1]["status"] == "pass"
    assert outcome.code == 2


@pytest.mark.parametrize("which", ["kept", "part"])
def test_a_cell_without_a_result_is_not_mixed(run, which):
    """Of a crash nothing else is known: the newer of the two stands alone."""
    one = run.ids[0]
    good = copy.deepcopy(run)
    run.fails(one, "crash", "SIGSEGV")
    kept, new = (whole(run), part(good, one, checks=["compiles"])) if which == "kept" else \
        (whole(good), part(run, one))
    block, outcome = merged(kept, new)
    assert "kept" not in block["cells"][0]
    assert outcome.code == (2 if which == "kept" else 1)


def test_damaged_evidence_gets_no_new_fingerprint(run):
    kept = whole(run)
    for cell in kept["cells"]:
        cell["observation"]["sections"]["compiles"]["seconds"] = 0.5
    _, outcome = merged(kept, part(run, run.ids[0], checks=["compiles"]))
    assert outcome.code == 2


@pytest.mark.parametrize(("edit", "text"), [
    (lambda block: block["matrix"].update(sha256="1" * 64), "is of another matrix"),
    (lambda block: block["shard"].update(index=2, of=2), "is of shard 2 of 2"),
    (lambda block: block["run"].update(plugin="9"), "was written by another version of pytest-torchcompile"),
    (lambda block: block.update(schema_version="1.9"), "is of schema 1.9"),
])
def test_what_has_no_place(run, edit, text):
    kept = whole(run)
    edit(kept)
    assert not_mergeable(kept, part(run, run.ids[0])) == text


def test_tests_that_a_part_did_not_run_are_kept(run, tmp_path):
    """Those of pytest-json-report too, with a summary that counts them all."""
    tests = [{"nodeid": f"t.py::{name}", "outcome": outcome} for name, outcome in (("a", "failed"), ("b", "passed"))]
    keeper = ReportKeeper(tmp_path, tmp_path / ".compile-matrix/report.json", tmp_path / "journal.jsonl")
    keeper.save({"tests": tests, "summary": {}, "compile_matrix": whole(run)})
    mended = {"nodeid": "t.py::a", "outcome": "passed"}
    keeper.save({"tests": [mended], "summary": {}, "compile_matrix": part(run, run.ids[0])})
    content = json.loads(keeper.report.read_text())
    assert content["tests"] == [mended, tests[1]]
    assert content["summary"] == {"passed": 2, "total": 2, "collected": 2}
    assert read_report(keeper.report).sealed
    assert keeper.message == ".compile-matrix/report.json has 1 cell of this run, and verdicts of an earlier run in " \
                             "3 cells; the record of this run alone is .compile-matrix/part/report.json"


@pytest.mark.parametrize("of", ["all cells", "one cell"])
def test_tests_that_were_deselected(run, of):
    """They are kept with their age, or told as not run; what a whole run did not find may be there no more."""
    kept = whole(run)
    kept["tests"] = [recorded(f"t.py::{name}").to_dict() for name in "abc"]
    kept["tests_planned"] = [test["id"] for test in kept["tests"]]
    new = part(run, *(run.ids if of == "all cells" else run.ids[:1]))
    new["tests"], new["tests_planned"] = [kept["tests"][0]], ["t.py::a"]
    new["run"]["tests_deselected"] = ["t.py::b", "t.py::new"]
    assert not is_whole(new)
    block, outcome = merged(kept, new)
    names = ["t.py::b"] if of == "all cells" else ["t.py::b", "t.py::c"]
    assert block["tests_planned"] == [*names, "t.py::a"]
    (before,) = block["tests_kept"]
    assert (before["tests"], before["finished"]) == (names, "2026-11-21T10:20:00+00:00")
    assert outcome.code == 0
    told = [finding.text for finding in outcome.findings]
    assert "1 test that uses our fixtures was deselected and not run: t.py::new" in told
    assert any("verdicts of an earlier run of the same sources" in text for text in told)


def test_a_whole_run_of_another_matrix_with_deselected_tests_replaces_the_report(run, tmp_path):
    """Such a selection may stand in the ini file, and every run has it."""
    keeper = ReportKeeper(tmp_path, tmp_path / ".compile-matrix/report.json", tmp_path / "journal.jsonl")
    keeper.save({"compile_matrix": whole(run)})
    for sha in ("1" * 64, "2" * 64):
        new = whole(run)
        new["matrix"]["sha256"] = sha
        new["run"]["tests_deselected"] = ["t.py::a"]
        new["head_sha256"] = head_fingerprint(new)
        keeper.save({"compile_matrix": new})
        assert read_report(keeper.report).block["matrix"]["sha256"] == sha
    before = read_report(tmp_path / ".compile-matrix/previous/report.json").block
    assert before["matrix"]["sha256"] == "1" * 64


@pytest.mark.parametrize("edit", ["seal", "head"])
def test_a_report_that_was_edited_is_not_sealed_anew(run, tmp_path, edit):
    """What a part is taken over into must be as its run wrote it; else it goes to ``previous``."""
    keeper = ReportKeeper(tmp_path, tmp_path / ".compile-matrix/report.json", tmp_path / "journal.jsonl")
    keeper.save({"tests": [], "summary": {}, "compile_matrix": whole(run)})
    text = keeper.report.read_text()
    if edit == "seal":
        keeper.report.write_text(text.replace('"tests": []', '"tests": [{"nodeid": "t.py::a"}]', 1))
    else:
        content = json.loads(text)
        del content["compile_matrix_seal"]
        content["compile_matrix"]["run"]["started"] = "2026-11-22T09:00:00+00:00"
        keeper.report.write_text(json.dumps(content))
    edited = keeper.report.read_text()
    keeper.begin(("-k", run.ids[0]))
    keeper.save({"tests": [], "summary": {}, "compile_matrix": part(run, run.ids[0])})
    assert gate([read_report(keeper.report)]).code == 2
    assert (tmp_path / ".compile-matrix/previous/report.json").read_text()[:1000] == edited[:1000]


def killed(keeper, run, *, ended=False):
    """The journal of a later run, which was to judge everything."""
    head = {"run": {"started": "2026-11-22T09:00:00+00:00"}}
    plan = {"kind": "plan", "head": head, "expected": dict.fromkeys(run.ids, run.checks), "expected_tests": []}
    lines = [plan, {"kind": "verdict", "cell": run.ids[0], "verdict": "fail"}, *[{"kind": "end"}] * ended]
    keeper.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_killed_run_was_to_judge_stays_in_doubt(run, tmp_path, ended):
    """Its failure is in no report. Cell by cell the doubt goes; a run that judges everything ends it at once."""
    keeper = ReportKeeper(tmp_path, tmp_path / ".compile-matrix/report.json", tmp_path / "journal.jsonl")
    keeper.save({"compile_matrix": whole(run)})
    killed(keeper, run, ended=ended)
    for k, name in enumerate(run.ids):
        keeper.begin(("--compile-matrix=m.yaml", "-k", name))
        keeper.journal.unlink(missing_ok=True)
        keeper.save({"compile_matrix": part(run, name)})
        report = read_report(keeper.report)
        assert report.sealed
        in_doubt = not ended and k + 1 < len(run.ids)
        assert gate([report]).code == (2 if in_doubt else 0)
        # The run that was killed is named, not the first one that came after it.
        assert report.later_run == ("`pytest ...` of 2026-11-22T09:00:00+00:00" if in_doubt else "")


def test_a_run_of_everything_ends_the_doubt(run, tmp_path):
    keeper = ReportKeeper(tmp_path, tmp_path / ".compile-matrix/report.json", tmp_path / "journal.jsonl")
    keeper.save({"compile_matrix": whole(run)})
    killed(keeper, run)
    for _ in range(2):  # a second run that was killed finds the note of the first
        keeper.begin(())
        killed(keeper, run)
    assert json.loads(keeper.report.read_text())["compile_matrix_interrupted"] == run.ids
    keeper.save({"compile_matrix": whole(run)})
    assert gate([read_report(keeper.report)]).code == 0
