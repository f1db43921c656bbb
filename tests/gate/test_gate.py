"""The gate without a policy: what is green, what is not, and what its first sentence says."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest
from runs import CALL, Run, stated

from pytest_torchcompile.errors import ReportError
from pytest_torchcompile.gate.announcement import announcement, sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.provenance import cell_fingerprint
from pytest_torchcompile.report.reading import read_report

STORED = Path(__file__).parents[1] / "reports"
TODAY = datetime.date(2026, 11, 21)
COMMIT = {"commit": "a" * 40, "changed": False, "prefix": ""}


@pytest.fixture
def run():
    return Run()


def sections(cell):
    return cell["observation"]["sections"]


def outcome(run, shards=1, **options):
    return gate(run.reports(shards), today=TODAY, **options)


def test_a_good_run_passes(run):
    """All cells there, all good."""
    assert sentence(outcome(run)) == \
        "PASS: the 4 cells of matrix/smoke.yaml are good on torch 2.13.0: 4 pass; no check compared numbers"
    assert outcome(run).code == 0


def test_a_run_that_compares_numbers_has_no_such_remark(run):
    """That nobody asked whether the numbers are right is told with the verdict, which else claims too much."""
    run.checks.append("equivalence")
    for observation in run.observations.values():
        observation.sections["equivalence"] = {
            "raised": None, "compared": 2, "undecided": 0, "vacuous": "", "notes": [], "bitwise": 2, "inexact": 0,
            "looks": 2, "leaves": []}
    assert sentence(outcome(run)) == \
        "PASS: the 4 cells of matrix/smoke.yaml are good on torch 2.13.0: 4 pass"


def test_shards_are_merged(run):
    """Two shards are one run, whichever comes first."""
    one, two = run.reports(2)
    assert gate([two, one], today=TODAY).code == 0
    assert list(gate([two, one], today=TODAY).cells) == run.ids


def test_the_planted_regression_is_named_in_the_first_line(run):
    """One cell of four breaks: the model, what and where; below it the cell, the check, and what to do."""
    run.breaks(run.ids[2])
    found = outcome(run, 2)
    assert found.code == 1
    assert sentence(found) == "FAIL: 1 model has graph breaks (gpt, models.py:12)"
    text = "\n".join(announcement(found))
    assert "fail      graph_breaks: graph break (1 place(s), 0 allowed): Tensor.item()  models.py:12\n" in text
    assert "compiles follows from" not in text
    assert f"again  pytest --compile-matrix=matrix/smoke.yaml 'matrix/smoke.yaml::{run.ids[2]}::graph_breaks'" in text
    assert "try    don't" in text


def test_one_cause_in_many_cells_is_told_once(run):
    """The same line of the user's in all cells is one finding."""
    for cell in run.ids:
        run.breaks(cell)
    (finding,) = outcome(run).findings
    assert finding.cells == tuple(run.ids)
    assert sentence(outcome(run)) == "FAIL: 2 models have graph breaks (net, gpt, models.py:12)"


@pytest.mark.parametrize(("kind", "verdict", "told"), [
    ("crash", "crash", "crashes"), ("timeout", "timeout", "runs out of time"),
    ("user", "error", "could not be judged")])
def test_a_cell_without_a_result_fails(run, kind, verdict, told):
    """Crash, time-out and error are failures too."""
    run.fails(run.ids[0], kind, "killed by SIGSEGV")
    found = outcome(run)
    assert sentence(found) == f"FAIL: 1 model {told} (net)"
    assert [finding.text for finding in found.findings] == [f"{verdict}: killed by SIGSEGV"]


def test_expected_failures_pass_until_they_do_not_fail(run):
    """xfail is good, xpass is not."""
    run.plan(run.ids[0], "xfail", rule="m.yaml:9")
    assert outcome(run).code == 1
    assert sentence(outcome(run)) == "FAIL: 1 model passes unexpectedly (net)"
    assert "passed, although m.yaml:9 expects it to fail" in "\n".join(announcement(outcome(run)))
    run.breaks(run.ids[0])
    assert outcome(run).code == 0


def test_a_cell_that_is_expected_to_fail_does_not_count_as_one_that_holds(run):
    """A run in which nothing else ran proves nothing, and such cells are not among those that a policy wants."""
    for name in run.ids:
        run.plan(name, "xfail", rule="m.yaml:9")
        run.breaks(name)
    assert outcome(run).code == 3
    assert sentence(outcome(run)) == ("NOTHING TO JUDGE: not one cell holds: all that ran is expected to fail, by the "
                                      "matrix or the policy")
    run.planned[run.ids[0]] = {}
    run.observations[run.ids[0]] = Run().observations[run.ids[0]]
    assert outcome(run).code == 0
    wanted = gate(run.reports(), parse_policy(b"version: 1\nran_at_least: 2\n", "release.yaml"), today=TODAY)
    assert [finding.text for finding in wanted.findings] == ["1 cell ran compiled code, at least 2 wanted",
                                                             "3 cells fail as the matrix expects: known"]


def test_an_expected_failure_whose_day_is_over_fails(run):
    """The matrix was right on the day of the run; the gate looks at its own day."""
    run.plan(run.ids[0], "xfail", until="2026-11-21", rule="m.yaml:9")
    run.breaks(run.ids[0])
    assert outcome(run).code == 0
    found = gate(run.reports(), today=TODAY + datetime.timedelta(days=1))
    assert found.code == 1
    hint = "it was expected to fail until 2026-11-21 (m.yaml:9: known); that day is over"
    assert hint in "\n".join(announcement(found))


def test_a_skip_needs_a_policy_and_the_text_to_write_is_told(run):
    """The default rule takes pass and xfail only; what to write is there to copy."""
    run.skips(*run.ids[2:])
    found = outcome(run)
    assert found.code == 1
    assert sentence(found) == "FAIL: 2 of 4 cells were skipped, and no policy allows it: no GPU"
    assert found.findings[0].hint == ('if that is meant, write to a file, and give it by --policy:\n\nversion: 1\n'
                                      'allowed_skips:\n  - cells: {model: gpt}\n    reason: "no GPU"')


def test_all_skipped_is_nothing_to_judge(run):
    """Not one cell ran: 3, not a list of skips."""
    run.skips(*run.ids)
    assert outcome(run).code == 3
    assert sentence(outcome(run)) == "NOTHING TO JUDGE: all 4 cells were skipped: no GPU"


def test_no_cells_is_nothing_to_judge(run):
    """A plan without cells."""
    run.cells = {}
    assert outcome(run).code == 3
    assert sentence(outcome(run)) == "NOTHING TO JUDGE: no cell was planned"


def test_a_missing_shard_is_named(run):
    """With the cells that nobody judged."""
    found = gate(run.reports(3)[:1], today=TODAY)
    assert found.code == 2
    assert sentence(found).startswith("UNUSABLE: shards 2, 3 of 3 are missing")


def test_a_failure_outweighs_a_missing_shard(run):
    """1, not 2: a CI that runs again on 2 must not run a failure again."""
    run.breaks(run.ids[0])
    found = gate(run.reports(2)[:1], today=TODAY)
    assert found.code == 1
    assert sentence(found).endswith("; and 2 more findings")


def test_a_second_cause_is_in_the_first_line_too(run):
    """Whoever reads one line only must not think that one thing is wrong."""
    run.breaks(run.ids[0])
    run.recompiles(run.ids[2], 5, function="Gpt.forward", file="gpt.py", line=7)
    assert sentence(outcome(run)) == "FAIL: 1 model recompiles too often (gpt, gpt.py:7); 1 model has graph breaks"


@pytest.mark.parametrize(("key", "value"), [("torch", "2.12.0"), ("python", "3.12.1"), ("devices", ["cpu", "H100"]),
                                            ("compiler", None)])
def test_shards_of_other_environments_are_refused(run, key, value):
    """A verdict holds for one environment."""
    one, two = run.reports(2)
    two.block["environment"][key] = value
    with pytest.raises(ReportError, match=rf"mixed environments: {key} is .* in report-1.json and .* in report-2.json"):
        gate([one, two])


def test_runners_that_differ_are_noted(run):
    """CPUs, cores and kernels of hosted runners differ, which changes no verdict."""
    one, two = run.reports(2)
    two.block["environment"]["cores"] = 4
    found = gate([one, stated(two)], today=TODAY)
    assert found.code == 0
    assert found.findings[0].text == \
        "the shards ran on machines that differ: cores is 2 in report-1.json and 4 in report-2.json"


@pytest.mark.parametrize(("edit", "text"), [
    (lambda block: block["matrix"].update(sha256="0" * 64), "their matrix files"),
    (lambda block: block["matrix"]["cells_planned"].reverse(), "their planned cells differ"),
    (lambda block: block["run"].update(plugin="9"), "their versions of pytest-torchcompile differ"),
    (lambda block: block["run"].update(git=COMMIT), "their commits differ"),
    (lambda block: block["shard"].update(of=3), "their numbers of shards differ: 2 and 3"),
    (lambda block: block["shard"].update(index=1), "report-1.json and report-2.json are both shard 1 of 2"),
    (lambda block: block["shard"].update(index=5), "says that it is shard 5 of 2"),
    (lambda block: block["cells"].append(block["cells"][0]), "is twice in report-2.json"),
    (lambda block: block["cells"][0].update(id="nobody"), "cell nobody is not among the cells planned"),
])  # fmt: skip
def test_what_is_not_one_run_is_refused(run, edit, text):
    """Another matrix, commit or version; a shard or a cell twice; a cell that nobody planned."""
    one, two = run.reports(2)
    edit(two.block)
    with pytest.raises(ReportError, match=re.escape(text)):
        gate([one, two])


@pytest.mark.parametrize(("edit", "code", "text"), [
    (lambda cell: cell["checks"]["compiles"].update(verdict="skip"), 1, "says skip, its observation says pass"),
    (lambda cell: cell["checks"]["compiles"].update(verdict="xfail"), 2, "says xfail, its observation says pass"),
    (lambda cell: cell.update(status="skip"), 2, "its status is skip, which is not the worst of its checks"),
    (lambda cell: cell.update(status="fail"), 1, "a cell's status is fail, though none of its checks says so"),
    (lambda cell: cell["checks"].pop("compiles"), 2, "no verdict of compiles, which the matrix asks for"),
    (lambda cell: cell["checks"].update(other=cell["checks"]["compiles"]), 2, "which is no check of the matrix"),
    (lambda cell: cell["axes"].update(backend="aot_eager"), 2, "its id is not that of its axes"),
    (lambda cell: sections(cell)["compiles"].update(lost=0), 2, "its evidence is not what was judged"),
    (lambda cell: sections(cell).pop("compiles"), 1, "no section 'compiles'"),
    (lambda cell: sections(cell)["recompiles"].pop("graphs"), 2, "can't be judged: KeyError: 'graphs'"),
    (lambda cell: cell.update(observation=None), 2, "has verdicts without an observation"),
    (lambda cell: cell.update(selected=False), 2, "has verdicts, though it says that it was not selected"),
    (lambda cell: cell["planned"].update(checks=["compiles"]), 2, "not those of the matrix"),
])  # fmt: skip
def test_a_report_that_contradicts_itself_does_not_pass(run, edit, code, text):
    """What a report claims must follow from its evidence; what it says to be bad is believed."""
    (report,) = run.reports()
    edit(report.cells[1])
    found = gate([report], today=TODAY)
    assert found.code == code
    assert text in "\n".join(announcement(found))


@pytest.mark.parametrize(("axis", "value", "code"), [
    ("dtype", "float32", 0), ("device", "cpu", 0), ("phase", "inference", 2), ("model", "net", 2),
])
def test_a_report_of_before_an_axis_was_added(axis, value, code):
    """Its cells are as they are with that axis at its default, and no other cells."""
    run = Run(model=["net"], **({} if axis == "model" else {axis: [value]}))
    (report,) = run.reports()
    (cell,) = report.cells
    del cell["axes"][axis]
    cell["evidence_sha256"] = cell_fingerprint(cell)
    found = gate([report], today=TODAY)
    assert found.code == code
    assert ("its id is not that of its axes" in "\n".join(announcement(found))) is bool(code)


def test_a_verdict_that_is_worse_than_its_evidence_is_believed(run):
    """A worker that died after judging, or an edit: the failure counts."""
    run.stored[run.ids[0], "recompiles"] = "crash"
    assert outcome(run).code == 1
    assert sentence(outcome(run)).startswith(f"FAIL: recompiles: crash in {run.ids[0]}; the report")


def test_another_version_of_ours_may_judge_otherwise(run):
    """A report of another version need not agree to the letter; the worse of both verdicts holds."""
    run.plugin = "0.0.9"
    run.breaks(run.ids[0])
    run.stored[run.ids[0], "graph_breaks"] = "pass"
    assert outcome(run).code == 1
    run.stored[run.ids[1], "graph_breaks"] = "fail"
    assert len(outcome(run).allowed.failing) == 2


@pytest.mark.parametrize(("edit", "text"), [
    (lambda cell: sections(cell)["compiles"].update(seconds=77), "its evidence is not what was judged"),
    (lambda cell: cell.update(status="skip"), "its status is skip"),
])
def test_the_evidence_of_another_version_must_be_whole_too(run, edit, text):
    """Else an edit of the version alone would switch the looking off."""
    run.plugin = "0.0.9"
    (report,) = run.reports()
    edit(report.cells[0])
    assert gate([report], today=TODAY).code == 2
    assert text in sentence(gate([report], today=TODAY))


@pytest.mark.parametrize(("runs", "refused"), [
    ([{"GITHUB_RUN_ID": "7"}, {"GITHUB_RUN_ID": "8"}], True),
    ([{"GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1"}, {"GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "2"}], False),
])
def test_a_shard_that_is_left_from_an_earlier_run_is_refused(run, runs, refused):
    """Of the same commit, but not of this run; shards that were run again are of this one."""
    reports = run.reports(2)
    for report, ci in zip(reports, runs, strict=True):
        report.block["run"]["ci"] = ci
    if refused:
        with pytest.raises(ReportError, match="their CI runs differ: 7 and 8"):
            gate(reports)
    else:
        assert gate(list(map(stated, reports)), today=TODAY).code == 0


@pytest.mark.parametrize("states", [
    ({"changed": False}, {"changed": True}),
    ({"changed": True, "diff_sha256": "a" * 64}, {"changed": True, "diff_sha256": "b" * 64}),
], ids=["changed", "changed otherwise"])
def test_a_shard_of_a_changed_tree_is_refused(run, states):
    reports = run.reports(2)
    for report, state in zip(reports, states, strict=True):
        report.block["run"]["git"] = COMMIT | state
    with pytest.raises(ReportError, match="their states of the working tree differ"):
        gate(reports)


def test_shards_that_imported_other_contents_of_a_file_are_refused(run):
    """Git knows nothing of a model that it ignores. Each shard may import files of its own."""
    reports = run.reports(2)
    for report, digest in zip(reports, ("a" * 64, "b" * 64), strict=True):
        report.block["run"]["sources"] = {f"{digest[0]}.py": digest, "models.py": "c" * 64}
    assert gate(list(map(stated, reports)), today=TODAY).code == 0
    reports[1].block["run"]["sources"]["models.py"] = "d" * 64
    with pytest.raises(ReportError, match=r"they imported different contents of models\.py; give the shards"):
        gate(list(map(stated, reports)))


def test_shards_may_name_their_matrix_otherwise(run):
    """By a relative path and by an absolute one; a file of another name is another matrix."""
    reports = run.reports(2)
    path = reports[1].block["matrix"]["path"]
    reports[1].block["matrix"] = reports[1].block["matrix"] | {"path": f"/home/ci/{path}"}
    assert gate([reports[0], stated(reports[1])], today=TODAY).code == 0
    reports[1].block["matrix"] |= {"path": "/home/ci/other.yaml"}
    with pytest.raises(ReportError, match=r"their names of the matrix differ: .* and other.yaml"):
        gate(reports)


def test_a_cell_that_no_check_judged_is_not_good(run):
    """A matrix without checks for a phase."""
    (report,) = run.reports()
    report.block["matrix"]["checks"] = []
    for cell in report.cells:
        cell["planned"]["checks"] = []
        cell |= {"checks": {}, "status": "not_run", "evidence_sha256": cell_fingerprint(cell)}
    assert gate([report], today=TODAY).code == 2
    assert sentence(gate([report], today=TODAY)).startswith("UNUSABLE: 4 cells have verdicts that never came")


def test_an_exit_status_that_no_cell_explains_is_not_green(run):
    """pytest failed, and the report does not show why; but other tests of that run may have."""
    run.exit_status = 1
    assert outcome(run).code == 2
    assert "pytest ended with 1, though no cell or test failed" in sentence(outcome(run))


def test_another_test_that_failed_is_told_in_one_sentence(run, tmp_path):
    """The gate is for torch.compile; a policy may make it one for all of that pytest run."""
    run.exit_status = 1
    tests = [{"nodeid": "tests/test_it.py::test_it", "outcome": "failed"}]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"tests": tests, "compile_matrix": run.blocks()[0]}))
    text = f"{path}: 1 other test of that pytest run failed, which the gate does not judge: tests/test_it.py::test_it"
    found = gate([read_report(path)], today=TODAY)
    assert (found.code, [finding.text for finding in found.findings]) == (0, [text])
    for word, code in (("note", 0), ("fail", 1)):
        policy = parse_policy(f"version: 1\nother_tests: {word}\n".encode(), "release.yaml")
        found = gate([read_report(path)], policy, today=TODAY)
        assert (found.code, [finding.text for finding in found.findings]) == (code, [text])
    assert (found.findings[0].file, found.findings[0].line) == ("release.yaml", 2)


@pytest.mark.parametrize("status", [2, 3, 4, 5, 137, None])
def test_a_run_that_did_not_end_well_is_partial(run, status):
    """Interrupted, an internal error, nothing collected, killed."""
    (report,) = run.reports()
    report.block["run"]["exit_status"] = status
    assert gate([report], today=TODAY).code == 2
    assert "report.json is partial" in sentence(gate([report], today=TODAY))


def test_a_mistake_that_only_a_rank_found_is_one_finding(run):
    """pytest ends with 4 for it, and every cell has its verdicts: nothing is missing."""
    mistake = "m.yaml:3:3: cannot import 'models': ModuleNotFoundError: No module named 'lib' (models.py:2)"
    for name in run.ids:
        run.fails(name, "usage", mistake)
    run.exit_status = 4
    found = outcome(run)
    assert found.code == 1
    assert [finding.text for finding in found.findings] == [f"error: {mistake}"]
    (report,) = run.reports()
    report.cells[0].update(checks={}, status="not_run")
    assert report.partial.startswith("pytest ended with 4")


def test_what_limits_allow_is_noted(run):
    """Green as `accept` leaves it, and the graph breaks are still there."""
    one, other, *_ = run.ids
    for name in (one, other):
        run.plan(name, "run", limits={"coverage": 1.0, "graph_breaks": 1})
        run.breaks(name)
    run.plan(run.ids[2], "run", limits={"coverage": 0.5, "graph_breaks": 0})
    found = outcome(run)
    assert found.code == 0
    (note,) = found.findings
    assert (note.kind, note.weight, note.cells) == ("limits", "note", (one, other))
    assert note.text == ("2 cells hold only by limits of the matrix, which allow: graph_breaks at models.py:12 "
                         "(2 cells); by graph_breaks 1 instead of 0 (2 cells)")


def test_a_break_in_an_installed_package_that_is_allowed(run):
    """Told without the folder of the environment."""
    run.plan(run.ids[0], "run", limits={"coverage": 1.0, "graph_breaks": 1})
    run.breaks(run.ids[0], {"file": "/e/lib/python3.11/site-packages/lib/net.py", "line": 3})
    (note,) = outcome(run).findings
    assert "which allow: graph_breaks at lib/net.py:3 (1 cell)" in note.text


def test_a_limit_without_a_default_is_noted(run):
    """And one that this version does not know is nothing to stumble over."""
    run.plan(run.ids[0], "run", limits={"coverage": 1.0, "graph_breaks": 0, "unexplained": 1, "of_tomorrow": 3})
    run.recompiles(run.ids[0])
    found = outcome(run)
    assert found.code == 0
    (note,) = found.findings
    assert note.text.endswith("; by unexplained 1 (1 cell)")


def test_a_lowered_coverage_is_noted(run):
    """It comes of the graph break, which is allowed too: each limit that weakens a check is told, at its loosest."""
    for name, share in zip(run.ids, (0.4444, 0.75), strict=False):
        run.plan(name, "run", limits={"coverage": share, "graph_breaks": 1})
        run.breaks(name)
        section = run.observations[name].sections["compiles"]
        section["coverage"] = [CALL | {"share": share, "outside": 2, "total": 9}]
        section["eager_frames"] = [{"function": "forward", "file": "models.py", "line": 9, "kind": "graph_break",
                                    "reason": "a break", "calls": 1, "during": "call 1"}]
    found = outcome(run)
    assert found.code == 0
    (note,) = found.findings
    assert note.text.endswith("; by coverage 0.4444 instead of 1 (2 cells), graph_breaks 1 instead of 0 (2 cells)")


def test_deselected_cells_are_missing(run):
    """A run with -k judged a part."""
    (report,) = run.reports()
    report.cells[0].update(selected=False, checks={}, observation=None, status="not_run")
    found = gate([report], today=TODAY)
    assert found.code == 2
    assert sentence(found) == f"UNUSABLE: 1 of the 4 planned cells was not judged: {run.ids[0]}"


def test_the_only_cell_of_a_matrix_is_named_where_it_is_missing():
    """One planned cell is told in the singular, and listed as any other."""
    run = Run(model=["net"])
    (report,) = run.reports()
    report.cells[0].update(selected=False, checks={}, observation=None, status="not_run")
    finding = gate([report], today=TODAY).findings[0]
    assert finding.text == f"1 of the 1 planned cell was not judged: {run.ids[0]}"
    assert finding.cells == (run.ids[0],)


def test_a_shard_without_cells_is_whole():
    """Eight machines for five cells: pytest ends with 5 on three of them, and nothing is missing."""
    run = Run(backend=["eager"])
    reports = run.reports(2)
    reports[1].block["run"]["exit_status"] = 5
    reports[1].block["environment"] = {}
    assert gate([reports[0], stated(reports[1])], today=TODAY).code == 0


@pytest.mark.parametrize("names", [["shard-1.json", "shard-2.json"], ["shard-1.jsonl", "shard-2.json"]])
def test_stored_reports_of_a_real_run(names):
    """Reports, and a journal that has its end, of a real run (tests/reports/make.py)."""
    assert gate([read_report(STORED / name) for name in names]).code == 0


def test_the_stored_regression():
    """The second shard with a branch on a tensor's value in the model."""
    found = gate([read_report(STORED / name) for name in ("shard-1.json", "broken-2.json")])
    assert found.code == 1
    assert sentence(found) == "FAIL: 1 model has graph breaks (scorer, models.py:12)"
