"""Tests that use our fixtures, in reports: judged by the gate beside the cells. Made by hand; no torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from runs import Run, stated

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.announcement import announcement, compare_with_baseline, run_facts, sentence
from pytest_torchcompile.gate.ci_formats import junit
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.markdown import markdown
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import Compile, EagerFrame, Graph, GraphBreak
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.page.document import page
from pytest_torchcompile.page.svg import svg
from pytest_torchcompile.report.reading import Report, read_report
from pytest_torchcompile.report.record import Record, RecordedTest, head_without_matrix, seal_test
from pytest_torchcompile.report.schema import block_schema
from pytest_torchcompile.report.strictjson import compile_schema

NAME = "tests/test_scorer.py::test_it[default-eager]"
RECOMPILE = Compile("f", "net.py", 3, "0/1", "recompile", reason="size", cause="shape")
BREAK = GraphBreak("data dependent", "gb0025", "net.py", 9)
SILENT = EagerFrame("f", "net.py", 3, "too many", "limit")


def ledger(**lists):
    """A ledger in which one compiled graph ran."""
    made = Ledger(graphs=[Graph("0/0", 1, runs=1)], compiles=[Compile("f", "net.py", 3, "0/0", "first")])
    for name, records in lists.items():
        setattr(made, name, records)
    return made.to_dict()


def recorded(name=NAME, verdict="pass", **more):
    return RecordedTest(name, verdict, **({"ledger": ledger(), "seconds": 1.5} | more))


def failed(name=NAME, message="assert 1 == 2", verdict="fail", **more):
    return recorded(name, verdict, problems=(Problem(message, "a text", file="tests/test_scorer.py", line=7),), **more)


def skipped(name=NAME, reason="no GPU"):
    return RecordedTest(name, "skip", note=reason)


def block(*tests, planned=None, exit_status=None):
    """The block of a run without a matrix, as the plugin makes it."""
    record = Record(head_without_matrix(Path("/")))
    record.expected_tests = [test.id for test in tests] if planned is None else planned
    for test in tests:
        record.add_test(test.to_dict(), {"torch": "2.13.0", "devices": ["cpu"]})
    status = int(any(test.verdict in ("fail", "error", "xpass", "crash") for test in tests))
    record.finish(status if exit_status is None else exit_status, "2026-11-22T10:00:00+00:00")
    return json.loads(json.dumps(record.block()))


def reports(*tests, **more):
    made = block(*tests, **more)
    assert compile_schema(block_schema())(made) is None
    return [Report("report.json", made)]


def edited(change, *tests):
    """A report in which one test was edited, fingerprint and all."""
    made = block(*tests)
    change(made["tests"][0])
    made["tests"][0] = seal_test(made["tests"][0])
    return [Report("report.json", made)]


def judged(*tests, policy="", **more):
    return gate(reports(*tests, **more), parse_policy(f"version: 1\n{policy}".encode(), "release.yaml"))


def told(outcome):
    return "\n".join(announcement(outcome))


def test_tests_alone_pass():
    outcome = judged(recorded(), recorded("tests/test_b.py::test_b", "xfail", note="known"))
    assert outcome.code == 0
    assert sentence(outcome) == "PASS: the 2 tests are good on torch 2.13.0: 1 pass, 1 xfail"
    assert run_facts(outcome) == "on torch 2.13.0, cpu: 2 tests: 1 pass, 1 xfail; 2 ran compiled code"


def test_tests_beside_cells():
    """One sentence for both; a test that fails, fails the run of good cells."""
    def beside(test):
        run = Run(backend=["eager"]).blocks()[0]
        own = block(test)
        run |= {"tests": own["tests"], "tests_planned": own["tests_planned"]}
        run["run"]["exit_status"] = own["run"]["exit_status"]
        return gate([stated(Report("report.json", run))])

    assert beside(recorded()).code == 0
    assert " and 1 test are good on torch" in sentence(beside(recorded()))
    assert beside(failed()).code == 1
    assert sentence(beside(failed())) == f"FAIL: 1 test fails ({NAME})"
    assert "fail      test: assert 1 == 2" in told(beside(failed()))


@pytest.mark.parametrize(("verdict", "word"), [("fail", "test: a"), ("error", "error: a"), ("crash", "crash: a"),
                                               ("xpass", "xpass: a")])
def test_a_test_that_fails_is_told_with_its_id_and_reason(verdict, word):
    outcome = judged(failed(message="a reason", verdict=verdict))
    assert outcome.code == 1
    assert NAME in sentence(outcome)
    assert f"{word} reason" in told(outcome)
    assert f"again  pytest '{NAME}'" in told(outcome)
    assert "tests/test_scorer.py:7" in told(outcome)


def test_what_matters_of_a_failing_test_is_shown():
    """The line that failed and what it says, not the model's repr and the test's source above it."""
    evidence = "\n".join(["model = Net(", *["  (layer): Linear(...)"] * 20, ")", "", "    def test_it(model):",
                          ">       assert model(2) == 3", "E       AssertionError: assert 4 == 3",
                          "E        +  where 4 = Net(2)", "", "tests/test_scorer.py:7: AssertionError"])
    problem = Problem("assert 4 == 3", evidence, file="tests/test_scorer.py", line=7)
    text = told(judged(recorded(NAME, "fail", problems=(problem,))))
    assert ("\n            >       assert model(2) == 3\n            E       AssertionError: assert 4 == 3\n"
            "            E        +  where 4 = Net(2)\n") in text
    assert "Linear" not in text


def test_a_skipped_test_must_be_allowed():
    """As a cell must; the lines to write are lines that the policy takes."""
    refused = judged(recorded("tests/test_b.py::test_b"), skipped())
    assert refused.code == 1
    assert "1 of 2 tests was skipped, and no policy allows it: no GPU" in sentence(refused)
    (hint,) = [finding.hint for finding in refused.findings if finding.kind == "skip"]
    lines = hint[hint.index("allowed_skips"):]
    assert judged(recorded("tests/test_b.py::test_b"), skipped(), policy=lines).code == 0
    entry = "allowed_skips: [{tests: 'tests/test_scorer.py::*', contains: %s, reason: r}]"
    assert judged(recorded("tests/test_b.py::test_b"), skipped(), policy=entry % "GPU").code == 0
    assert judged(recorded("tests/test_b.py::test_b"), skipped(), policy=entry % "MPS").code == 1


def test_brackets_of_a_node_id_are_no_pattern():
    other = "tests/test_scorer.py::test_it[d]"  # as a class of characters `[default-eager]` would match it
    policy = f"allowed_skips: [{{tests: '{NAME}', reason: r}}]"
    assert judged(recorded(other), skipped(), policy=policy).code == 0
    assert judged(recorded("t.py::a"), skipped(), skipped(other), policy=policy).code == 1


@pytest.mark.parametrize(("policy", "text"), [
    ("allowed_skips: [{tests: 'tests/test_scorer.pi::*', reason: r}]", "matches no test that uses our fixtures: "),
    ("allowed_skips: [{reason: r}]", "this entry has neither `cells` nor `tests`; expected one of them"),
    ("allowed_skips: [{tests: a, cells: {model: b}, reason: r}]", "this entry has both `cells` and `tests`; expected"),
    ("allowed_failures: [{tests: a, checks: recompiles, reason: r, issue: i, until: 9999-01-01}]",
     "'recompiles' is not a check that an entry of tests can name; Known: equivalence"),
    ("tests: {ran: 3}", "unknown key 'ran'"),
    ("tests: 3", "tests: found '3', expected a mapping"),
    ("tests: {ran_at_least: 0}", "ran_at_least"),
])
def test_mistakes_in_a_policy_are_told(policy, text):
    with pytest.raises(MatrixError) as found:
        judged(recorded(), policy=policy)
    assert text in str(found.value)
    assert "release.yaml:2:" in str(found.value)


def test_known_failures_of_tests_may_be_allowed():
    entry = ("allowed_failures: [{tests: 'tests/test_scorer.py::*', contains: '1 == 2', reason: r, issue: i, "
             "until: 9999-01-01}]")
    good = recorded("tests/test_b.py::test_b")
    assert judged(failed(), good, policy=entry).code == 0
    assert judged(failed(message="another"), good, policy=entry).code == 1
    assert "nothing fails any more" in told(judged(recorded(), good, policy=entry))


WRONG = "AssertionError: not equivalent (wrong numbers): 40 values and properties compared, 38 exactly equal"
KNOWN = "tests: 'tests/test_scorer.py::*', reason: r, issue: i, until: 9999-01-01"


@pytest.mark.parametrize(("message", "verdict"), [
    (WRONG, "fail"),
    ("AssertionError: net-eager-default-auto-none: value: output: error is 9 times its noise", "fail"),
    ("AssertionError: Tensor-likes are not close!", "fail"),
    ("AssertionError: Scalars are not equal!", "fail"),
    ("AssertionError: The values for attribute 'dtype' do not match: torch.float32 != torch.float64.", "fail"),
    ("assert not (Discrepancy(kind='stride', where='output', ...), Discrepancy(kind='value', where='output'))", "fail"),
    ("AssertionError: Not equal to tolerance rtol=1e-07, atol=0", "fail"),
    ("AssertionError: assert False where False = <built-in method allclose of type object>(tensor([1.]), ...", "fail"),
    ("assert False where False = Comparison(problems=(Discrepancy(kind='gradient', where='gradient of w', ...", "fail"),
    (f"in its setup: {WRONG}", "error"),
])
def test_wrong_numbers_in_a_test_pass_by_no_entry_that_does_not_name_the_check(message, verdict):
    """Neither by its verdict nor by its text; `checks: [equivalence]` says that they are known."""
    test, good = failed(message=message, verdict=verdict), recorded("tests/test_b.py::test_b")
    for more in ("", ", contains: 'a text'"):
        entry = f"allowed_failures: [{{{KNOWN}, verdicts: [fail, error]{more}}}]"
        refused = judged(test, good, policy=entry)
        assert refused.code == 1
        assert "the allowed failure of release.yaml:2 names no checks, so it hides no wrong numbers" in told(refused)
        assert "give it `checks: [equivalence]`" in told(refused)
        assert judged(test, good, policy=entry.replace("reason:", "checks: equivalence, reason:")).code == 0


@pytest.mark.parametrize("message", [
    "AssertionError: not equivalent: 40 values and properties compared", "AssertionError: the tensors are not close!",
    "AssertionError: net-eager-default-auto-none: graph_breaks: graph break 1", "assert False where False = fits()",
    "assert False where False = Comparison(problems=(Discrepancy(kind='stride', where='output', ...",
])
def test_what_tells_of_no_numbers_needs_no_name(message):
    """And an entry that names the check is not for it."""
    good, entry = recorded("tests/test_b.py::test_b"), f"allowed_failures: [{{{KNOWN}}}]"
    assert judged(failed(message=message), good, policy=entry).code == 0
    named = judged(failed(message=message), good, policy=entry.replace("reason:", "checks: equivalence, reason:"))
    assert named.code == 1


def test_wrong_numbers_of_a_test_are_told_first():
    """Before another test that fails by anything else."""
    outcome = judged(failed("tests/test_a.py::test_a"), failed("tests/test_b.py::test_b", message=WRONG))
    worst = next(finding for finding in outcome.findings if finding.weight == "fail")
    assert worst.cells == ("tests/test_b.py::test_b",)


def test_an_entry_that_names_the_check_is_not_unneeded_while_its_test_is_skipped():
    entry = f"allowed_failures: [{{{KNOWN}, checks: equivalence}}]\nallowed_skips: [{{tests: '*', reason: r}}]"
    text = told(judged(skipped(), recorded("tests/test_b.py::test_b"), policy=entry))
    assert "whether release.yaml:2 is still needed can't be told" in text
    assert "nothing fails any more" not in text
    assert "nothing fails any more" in told(judged(recorded(), policy=entry))


def test_so_many_must_have_run():
    idle = recorded("tests/test_b.py::test_b", ledger=Ledger().to_dict())
    assert judged(recorded(), idle, policy="tests: {ran_at_least: 1}").code == 0
    few = judged(recorded(), idle, policy="tests: {ran_at_least: 2}")
    assert few.code == 1
    assert sentence(few) == "FAIL: 1 test ran compiled code, at least 2 wanted"


def test_a_planned_test_without_a_verdict():
    outcome = judged(recorded(), planned=[NAME, "tests/test_b.py::test_b"])
    assert outcome.code == 2
    assert outcome.tests["tests/test_b.py::test_b"].status == "not_run"
    assert "1 planned test was not run: tests/test_b.py::test_b" in told(outcome)


def test_nothing_to_judge():
    """Neither a cell nor a test that ran compiled code."""
    assert judged().code == 3
    outcome = judged(recorded(ledger=Ledger().to_dict()))
    assert outcome.code == 3
    assert sentence(outcome) == ("NOTHING TO JUDGE: no cell was planned, and no test that holds ran compiled code")


@pytest.mark.parametrize(("change", "text"), [
    (lambda t: t["ledger"].update(recompiles=[RECOMPILE.to_dict()] * 2), "its counts are not those of its ledger"),
    (lambda t: t["ledger"].update(lost=["odd"]), "its ledger says compile_limits: not all that torch did could"),
    (lambda t: t["limits"].clear() or t["ledger"].update(graphs=[]) or t["counts"].update(graphs=0, runs=0),
     "its ledger says compiled_model was never called"),
    (lambda t: t["model"].update(ran=False), "nothing of it ran compiled"),
    (lambda t: t.update(ledger=None, counts=dict.fromkeys(t["counts"], 0)), "its ledger says nothing: it has none"),
    (lambda t: t.update(problems=[{"message": "no", "evidence": "", "hint": "", "file": "", "line": 0}]),
     "its ledger says no"),
    (lambda t: t["limits"].update(colour=1), "its ledger can't be judged: TypeError"),
    (lambda t: t["ledger"].update(compiles=[{"x": 1}]), "its ledger can't be judged: TypeError"),
])
def test_a_claim_that_the_ledger_does_not_bear_out(change, text):
    """A pass must follow from the ledger beside it, even where the fingerprint was made anew."""
    fair = recorded(limits={"recompiles": 1}, must_run=True, asks_model=True, model={"called": True, "ran": True})
    assert gate(edited(lambda t: None, fair)).code == 0
    outcome = gate(edited(change, fair))
    assert outcome.code in (1, 2)
    assert text in told(outcome)


def test_a_pass_over_its_limit_is_unusable():
    over = recorded(ledger=ledger(recompiles=[RECOMPILE, RECOMPILE]), limits={"recompiles": 1})
    outcome = judged(over)
    assert outcome.tests[NAME].status == "fail"
    assert any(finding.weight == "unusable" and "the report says pass, its ledger says compile_limits: 2 recompiles, "
               "1 allowed" in finding.text for finding in outcome.findings)
    assert judged(dataclasses.replace(over, limits={"recompiles": 2})).code == 0


def test_every_value_of_a_test_is_fingerprinted():
    """Whatever is edited, the gate does not pass it: neither what a verdict follows from nor the verdict itself."""
    def places(value, path=()):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            if isinstance(child, (dict, list)):
                yield from places(child, (*path, key))

    whole = block(failed(ledger=ledger(recompiles=[RECOMPILE]), limits={"recompiles": 1}), recorded("t.py::t"))
    for path in places(whole["tests"][0]):
        broken = json.loads(json.dumps(whole))
        place = broken["tests"][0]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "pass" if path == ("verdict",) else "other"
        if compile_schema(block_schema())(broken) is None:
            assert gate([Report("report.json", broken)]).code in (1, 2), path
        del place[path[-1]]
        if compile_schema(block_schema())(broken) is None:
            assert gate([Report("report.json", broken)]).code in (1, 2), path


@pytest.mark.parametrize("damage", [
    lambda b: b["tests"].pop(), lambda b: b["tests_planned"].pop(), lambda b: b["tests"].append(b["tests"][0]),
])
def test_tests_that_are_lost(damage):
    broken = block(recorded(), recorded("t.py::t"))
    damage(broken)
    assert gate([Report("report.json", broken)]).code == 2


@pytest.mark.parametrize("key", ["tests", "tests_planned"])
def test_a_report_without_the_key_is_refused(key, tmp_path):
    broken = block(recorded())
    del broken[key]
    (tmp_path / "r.json").write_text(json.dumps({"compile_matrix": broken}))
    with pytest.raises(Exception, match=f"the key '{key}' is missing"):
        read_report(tmp_path / "r.json")


def test_shards_that_ran_the_same_test():
    """Each shard may run all tests; of one test the worst verdict holds."""
    first, second = Run(backend=["eager", "aot_eager"]).blocks(2)
    for part, test in ((first, recorded()), (second, failed())):
        own = block(test)
        part |= {"tests": own["tests"], "tests_planned": own["tests_planned"]}
    second["run"]["exit_status"] = 1
    outcome = gate([Report("1.json", first), Report("2.json", second)])
    assert outcome.code == 1
    assert len(outcome.tests) == 1


def test_a_baseline():
    """New graph breaks, recompiles and failures in tests, and tests that are gone; no times."""
    def beside(now, then):
        return gate(reports(*now), baseline=reports(*then))

    other = recorded("t.py::t")
    assert beside([recorded(), other], [recorded(), other]).code == 0
    outcome = beside([recorded(ledger=ledger(graph_breaks=[BREAK]))], [recorded()])
    assert sentence(outcome).startswith("FAIL: new graph break at net.py:9 in 1 test: data dependent")
    outcome = beside([recorded(ledger=ledger(recompiles=[RECOMPILE]))], [recorded()])
    assert "new recompile of f (net.py:3) in 1 test, cause: shape" in sentence(outcome)
    outcome = beside([failed()], [recorded()])
    assert sentence(outcome) == f"FAIL: 1 test fails ({NAME}, new)"
    assert "held in the baseline" not in told(outcome)
    outcome = beside([recorded()], [recorded(), other])
    assert outcome.code == 1
    assert "1 test that ran in the baseline is gone: t.py::t" in sentence(outcome)
    assert "1 test is not in the baseline: t.py::t" in told(beside([recorded(), other], [recorded()]))


def test_the_baseline_at_the_end_of_a_run():
    """``--compile-baseline`` tells of tests too, but not of those that this run did not name."""
    then = reports(recorded(), recorded("t.py::t"))
    same = compare_with_baseline(block(recorded()), then)
    assert same.lines[-1][0] == "0 cells and 1 test as in the baseline"
    worse = compare_with_baseline(block(recorded(ledger=ledger(graph_breaks=[BREAK]))), then)
    assert "new graph break at net.py:9 in 1 test: data dependent" in [text for text, _ in worse.lines]


def test_silent_eager_frames_are_noted():
    """Without a limit the test passes in pytest, with a warning; the gate says it too."""
    outcome = judged(recorded(ledger=ledger(eager_frames=[SILENT])))
    assert outcome.code == 0
    assert "1 test holds, though torch silently ran something in it eagerly" in told(outcome)


def test_other_ways_to_tell():
    """JUnit and Markdown have the tests, too."""
    outcome = judged(failed(), recorded("t.py::t"), skipped("t.py::s"))
    text = junit(outcome)
    assert '<testsuite name="torch.compile tests" tests="3" failures="1" errors="0" skipped="1">' in text
    assert f'name="{NAME}"' in text
    assert '<property name="recompiles" value="0"' in text
    assert "| tests | 1 pass, 1 skip, 1 fail |" in markdown(outcome)


def test_the_page():
    """The worst test first, with counts, limits and ledger; a finding leads to its row. No cell is needed."""
    again = recorded("t.py::t", ledger=ledger(recompiles=[RECOMPILE]), limits={"recompiles": 1})
    outcome = judged(again, failed("t.py::test[<b>]"), skipped("t.py::s"),
                     planned=["t.py::t", "t.py::test[<b>]", "t.py::s", "x"])
    text = page(outcome)
    assert "4 tests of yours with our fixtures" in text
    assert text.index('id="test:t.py::test[&lt;b&gt;]"') < text.index('id="test:t.py::t"')
    assert 'href="#test:t.py::test%5B%3Cb%3E%5D"' in text
    assert '<td class="number">1 (limit 1)</td>' in text
    assert "what was compiled" in text
    assert "no GPU" in text
    assert "<b>]" not in text
    assert "4 tests: 1 pass" in svg(outcome)
    assert "our fixtures" not in page(gate(Run(backend=["eager"]).reports()))


def test_a_journal_that_learns_of_tests_late(tmp_path):
    """Under xdist a worker tells of a test when it begins it, after others are done: the journal says the same."""
    from pytest_torchcompile.plan.matrix import load_matrix
    from pytest_torchcompile.report.journal import Journal
    from pytest_torchcompile.run.settings import Settings

    (tmp_path / "late_models.py").write_text("def net(): pass\ndef batch(B): pass\n")
    (tmp_path / "m.yaml").write_text("version: 1\naxes: {backend: [eager]}\nmodels:\n"
                                     "  net: {factory: 'late_models:net', inputs: 'late_models:batch', dims: {B: 4}}\n")
    settings = Settings("m.yaml", (), (1, 1), 300.0, "rank", False)
    journal = Journal(load_matrix(tmp_path / "m.yaml"), (), settings, tmp_path / "journal.jsonl")
    journal.begin()
    for test in (recorded("t.py::a"), recorded("t.py::b")):
        journal.expect_tests([test.id])
        journal.add_test(test.to_dict(), {}, {})
    journal.expect_tests(["t.py::b", "t.py::c"])
    journal.finish(0)
    block = read_report(tmp_path / "journal.jsonl").block
    assert block["tests_planned"] == ["t.py::a", "t.py::b", "t.py::c"]
    assert block["tests"] == json.loads(json.dumps(journal.block()["tests"]))
    assert block["tests"][2]["verdict"] == "not_run"
