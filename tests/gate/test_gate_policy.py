"""What a policy asks beyond the default rule, what it lets pass, and its mistakes."""

from __future__ import annotations

import datetime

import pytest
from planted import LIAR, planted
from runs import Run, compiled

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.gate.announcement import announcement, sentence
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.policyfile import parse_policy
from pytest_torchcompile.report.provenance import head_fingerprint

TODAY = datetime.date(2026, 11, 21)
KNOWN = """
allowed_failures:
  - cells: {model: net, backend: inductor}
    checks: graph_breaks
    reason: upstream
    issue: pytorch/pytorch#1
    until: 2026-12-31
"""


@pytest.fixture
def run():
    return Run()


def policy(text):
    return parse_policy(f"version: 1\n{text}".encode(), "p.yaml")


def outcome(run, text, **options):
    return gate(run.reports(), policy(text), today=options.pop("today", TODAY), **options)


def told(found):
    return "\n".join(announcement(found))


def test_an_empty_policy_is_the_default_rule(run):
    assert outcome(run, "").code == 0
    run.breaks(run.ids[0])
    assert outcome(run, "").code == 1


def test_an_allowed_failure_passes_and_is_told(run):
    run.breaks(run.ids[0])
    found = outcome(run, KNOWN)
    assert found.code == 0
    assert "1 cell fails as p.yaml allows: upstream (pytorch/pytorch#1; until 2026-12-31)" in told(found)
    assert sentence(found).endswith("3 pass, 1 fail as the policy allows; no check compared numbers")


@pytest.mark.parametrize("more", ["checks: recompiles", "contains: something else", "verdicts: crash",
                                  "cells: {model: gpt}"])
def test_another_failure_is_not_allowed(run, more):
    """Of another check, with another text, by a crash, in another cell."""
    key = more.partition(":")[0]
    run.breaks(run.ids[0])
    lines = [line for line in KNOWN.splitlines() if not line.strip(" -").startswith(key)]
    text = "\n".join(lines) + f"\n    {more}\n" if key != "cells" else KNOWN.replace("model: net", "model: gpt")
    assert outcome(run, text).code == 1
    assert run.ids[0] in outcome(run, text).allowed.failing


LYING = f"""
allowed_failures:
  - cells: {{model: {LIAR}}}
    reason: upstream
    issue: pytorch/pytorch#1
    until: 2026-12-31
"""


def test_an_allowed_failure_without_checks_hides_no_wrong_numbers():
    """It lets graph breaks pass, and says what to write where a model computes something else."""
    broken = planted(broken=2, liars=())
    broken.observations |= {cell: seen for cell, seen in planted(broken=2, liars=(), faulty=False).observations.items()
                            if cell.startswith("broken1")}
    assert outcome(broken, LYING.replace(LIAR, "broken0")).code == 0
    lying = planted(broken=1, faulty=True)
    lying.observations = planted(broken=1, faulty=False).observations | {
        cell: seen for cell, seen in lying.observations.items() if cell.startswith(LIAR)}
    found = outcome(lying, LYING)
    assert found.code == 1
    assert not any(each.kind == "improved" for each in found.findings)
    (said,) = (each for each in found.findings if each.kind == "allowed_failures")
    assert said.text == "the allowed failure of p.yaml:4 names no checks, so it hides no wrong numbers"
    assert said.hint == "if these are known, give it `checks: [equivalence, gradients, training_steps, smoketest]`"
    named = LYING.replace("    reason", "    checks: [equivalence, gradients, training_steps, smoketest]\n    reason")
    assert outcome(lying, named).code == 0


def test_what_raises_later_hides_no_wrong_numbers():
    """Numbers were wrong in one call, and the next one raised: the model computes something else all the same."""
    lying = planted(broken=1)
    lying.observations |= {cell: seen for cell, seen in planted(broken=1, faulty=False).observations.items()
                           if not cell.startswith(LIAR)}
    for cell, given in lying.cells.items():
        if given.model == LIAR:
            for name in ("equivalence", "gradients", "training_steps", "smoketest"):
                lying.section(cell, name)["raised"] = "InductorError in forward"
    found = outcome(lying, LYING)
    assert found.code == 1
    failing = next(iter(found.allowed.failing.values()))
    texts = [problem["message"] for problem in failing["equivalence"]["problems"]]
    assert texts[0].startswith("output: error is")
    assert texts[1] == "nothing to judge: the compiled run raised InductorError in forward"


def test_a_pass_rate_hides_no_wrong_numbers():
    """A share of cells may fail, but none may compute something else."""
    assert outcome(planted(broken=9, liars=()), "pass_rate: {total: 0}").code == 3
    lying = planted(broken=1)
    assert outcome(lying, "pass_rate: {total: 0}").code == 1
    assert {cell.partition("-")[0] for cell in outcome(lying, "pass_rate: {total: 0}").allowed.failing} == {LIAR}


def test_an_allowed_failure_expires(run):
    run.breaks(run.ids[0])
    assert outcome(run, KNOWN, today=datetime.date(2026, 12, 31)).code == 0
    found = outcome(run, KNOWN, today=datetime.date(2027, 1, 1))
    assert found.code == 1
    assert "the allowed failure of p.yaml:4 expired on 2026-12-31: upstream (pytorch/pytorch#1)" in told(found)


def test_an_allowed_failure_that_nothing_needs_must_leave(run):
    found = outcome(run, KNOWN)
    assert found.code == 1
    assert sentence(found) == "FAIL: improved: nothing fails any more as p.yaml:4 allows: " \
                              "upstream (pytorch/pytorch#1; until 2026-12-31)"


def test_at_most(run):
    for cell in run.ids[:3]:
        run.breaks(cell)
    wide = KNOWN.replace("{model: net, backend: inductor}", "{model: [net, gpt]}")
    assert outcome(run, wide + "    at_most: 3\n").code == 0
    found = outcome(run, wide + "    at_most: 2\n")
    assert found.code == 1
    assert "3 cells fail as p.yaml:4 allows for 2" in sentence(found)


def test_allowed_skips(run):
    """With its reason, for the cells named, where the cell's own reason says what was meant."""
    run.skips(run.ids[3])
    entry = "allowed_skips:\n  - {cells: {model: gpt, backend: eager}, reason: no GPU here}\n"
    assert outcome(run, entry).code == 0
    assert sentence(outcome(run, entry)).endswith("3 pass, 1 skip; no check compared numbers")
    assert outcome(run, entry.replace("reason", "contains: no GPU, reason")).code == 0
    assert outcome(run, entry.replace("reason", "contains: no compiler, reason")).code == 1
    run.skips(run.ids[0])
    assert outcome(run, entry).code == 1


def test_the_text_to_write_for_a_skip_works(run):
    """What the gate tells to write is a policy that passes."""
    run.skips(*run.ids[:2], reason="it's: no GPU # here")
    hint = outcome(run, "").findings[0].hint
    assert hint.startswith("if that is meant, write to p.yaml:\n\nallowed_skips:")
    assert outcome(run, hint.partition("\n\n")[2]).code == 0


def test_skips_never_make_a_run_green_alone(run):
    run.skips(*run.ids)
    assert outcome(run, "allowed_skips:\n  - {cells: {model: [net, gpt]}, reason: x}\n").code == 3


def test_pass_rates(run):
    """They let fail what they cover, and every one that covers a cell must hold."""
    run.breaks(run.ids[0])
    assert outcome(run, "pass_rate: {total: 0.75}").code == 0
    assert outcome(run, "pass_rate: {total: 0.76}").code == 1
    assert outcome(run, "pass_rate: {backend: 0.5}").code == 0
    found = outcome(run, "pass_rate: {total: 0.75, backend: {inductor: 1.0}}")
    assert found.code == 1
    assert "50.0% of the 2 cells with backend = inductor are good, 100.0% wanted" in told(found)
    assert outcome(run, "pass_rate: {backend: {eager: 0.1}}").code == 1  # it does not cover the cell


def test_a_policy_cannot_let_everything_fail(run):
    """Green means that something holds."""
    for cell in run.ids:
        run.breaks(cell)
    found = outcome(run, "pass_rate: {total: 0}")
    assert found.code == 3
    assert sentence(found) == ("NOTHING TO JUDGE: not one cell holds: all that ran is expected to fail, by the matrix "
                               "or the policy")


def test_pass_rates_count_what_ran(run):
    """A skipped cell is no pass."""
    run.breaks(run.ids[0])
    run.skips(run.ids[1])
    text = "allowed_skips: [{cells: {backend: eager, model: net}, reason: x}]\n"
    assert outcome(run, text + "pass_rate: {total: 0.66}").code == 0
    assert outcome(run, text + "pass_rate: {total: 0.7}").code == 1


def test_limits_of_the_matrix_are_judged_again(run):
    """Looser or stricter than in the matrix, from the stored observation."""
    run.breaks(run.ids[0])
    found = outcome(run, "limits: [{graph_breaks: 1, when: {model: net}}]")
    assert found.code == 0
    assert "1 cell has other verdicts than in the report" in told(found)
    assert outcome(run, "limits: [{graph_breaks: 1, when: {model: gpt}}]").code == 1
    run = Run()
    run.recompiles(run.ids[0], cause="shape")
    run.section(run.ids[0], "recompiles")["sizes"] = 2
    assert outcome(run, "").code == 0
    found = outcome(run, "limits: [{recompiles: 0}]")
    assert found.code == 1
    assert "recompiles: 1 recompile(s), 0 allowed" in told(found)


@pytest.mark.parametrize(("limit", "message"), [
    ("compile_seconds: 0.5", "seconds of all compiles of the cell: 1 s, at most 0.5 s allowed"),
    ("silent_eager: 0", "frames that silently ran eagerly: 1, at most 0 allowed"),
    ("graphs: 0", "graphs that the backend compiled: 1, at most 0 allowed"),
])
def test_limits_that_only_policies_have(run, limit, message):
    cell = run.ids[1]
    run.section(cell, "compiles")["eager_frames"] = [{"kind": "limit", "function": "f", "file": "m.py", "line": 1,
                                                      "reason": "r"}]
    found = outcome(run, f"limits:\n  - {{{limit}, when: {{model: net, backend: eager}}}}\n")
    assert found.code == 1
    assert message in told(found)
    assert "p.yaml:3" in told(found)


@pytest.mark.parametrize(("limit", "message"), [
    ("kernels: 1", "kernels that Inductor generated: 2, at most 1 allowed"),
    ("speedup: 1.5", "1.20 times as fast compiled (99 % interval 1.10 to 1.30), at least 1.5 wanted"),
    ("memory_mib: 10", "a compiled step takes 12 MiB at its peak, at most 10 allowed"),
])
def test_limits_of_what_compiling_is_worth(run, limit, message):
    """The release asks for more than the matrix did, of the same stored numbers."""
    cell = run.ids[1]
    run.checks += ["kernels", "worth"]
    for each in run.ids:
        run.section(each, "kernels").update(raised=None, graphs=[{"compile_id": "0/0", "stage": "forward", "generated":
                                                                  [{"name": "k", "ops": []}] * (1 + (each == cell))}])
        run.section(each, "worth").update(
            raised=None, verdict="faster", late_compiles=0, text="", **(
                {"speedup": 1.2, "interval": [1.1, 1.3], "memory_mib": 12} if each == cell else
                {"speedup": 2.0, "interval": [1.9, 2.1], "memory_mib": 1}))
    assert outcome(run, "ratchet: false").code == 0
    found = outcome(run, f"limits:\n  - {{{limit}, when: {{model: net, backend: eager}}}}\n")
    assert found.code == 1
    assert message in told(found)


def test_a_limit_that_is_not_measured_is_not_green(run):
    found = outcome(run, "limits: [{speedup: 1.1}]")
    assert found.code == 2
    assert sentence(found) == "UNUSABLE: the limit speedup of p.yaml:2 can't be judged for 4 cells: " \
                              "the check worth did not judge them"


def test_ratios_to_the_baseline(run):
    text = "limits: [{compile_seconds_ratio: 1.5}]"
    assert outcome(run, text).code == 2
    assert "it needs --baseline" in sentence(outcome(run, text))
    before = Run().reports()
    assert outcome(run, text, baseline=before).code == 0
    run.section(run.ids[0], "compiles")["compiles"] = [compiled(1.6)]
    assert outcome(run, text, baseline=before).code == 1
    run.section(run.ids[0], "compiles")["compiles"] = [compiled(1.6, caches=["fx hit"])]
    assert "the compile caches answered otherwise in the baseline" in told(outcome(run, text, baseline=before))
    run.environment["cpu"] = "another"
    assert outcome(run, text, baseline=before).code == 2


def test_gates_that_the_policy_requires(run):
    found = outcome(run, "gates: [smoketest]")
    assert found.code == 1
    assert sentence(found) == "FAIL: the gate smoketest was not run"
    assert "try    add smoketest to the key checks of matrix/smoke.yaml" in told(found)


def test_a_gate_that_no_cell_of_the_run_can_have():
    """To name it in the matrix again would not help."""
    (report,) = Run(wrapper=["ddp"]).reports()
    report.block["matrix"]["checks"].append("smoketest")
    (finding,) = [each for each in gate([report]).findings if each.kind == "gate"]
    assert finding.hint == ("no cell of this run can: those of several ranks and of the fake lane have no such check; "
                            "add a cell with wrapper: none to matrix/smoke.yaml")


def test_a_gate_that_may_be_in_a_missing_shard():
    """To run again is what helps: 2, and no advice to write another matrix."""
    found = Run(wrapper=["ddp"])
    report, _ = found.reports(2)
    report.block["matrix"]["checks"].append("smoketest")
    assert gate([report], today=TODAY).code == 2
    (finding,) = [each for each in gate([report], today=TODAY).findings if each.kind == "gate"]
    assert (finding.weight, finding.hint) == ("unusable", "it may be in what is missing of the run")


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("fail", 1), ("skip", 1), ("not_run", 2), ("xfail", 1)])
def test_gates_that_a_report_states(run, verdict, code):
    """They must pass, asked for or not. What was not judged, as after Ctrl-C, is missing and has not failed."""
    (report,) = run.reports()
    report.block["gates"] = {"smoketest": {"verdict": verdict, "problems": []}}
    assert gate([report], today=TODAY).code == code
    assert gate([report], policy("gates: [smoketest]"), today=TODAY).code == code
    hints = [each.hint for each in gate([report], today=TODAY).findings if each.kind == "gate"]
    advised = any("take such cells out by one with exclude" in hint for hint in hints)
    assert advised == (verdict == "xfail")


@pytest.mark.parametrize(("text", "code"), [
    ("ran_at_least: 4", 0), ("ran_at_least: 5", 1), ("devices: [cpu]", 0), ("devices: ['NVIDIA H100*']", 1),
    ("environment: {torch: '2.13.*'}", 0), ("environment: {torch: '2.12.*'}", 2), ("may_differ: [compiler]", 0),
])  # fmt: skip
def test_demands_on_the_run(run, text, code):
    assert outcome(run, text).code == code


def test_a_device_that_no_cell_used_did_not_run(run):
    """The machine had the GPU; all cells ran on its CPU."""
    run.environment["devices"] = ["cpu", "NVIDIA H100 80GB HBM3"]
    found = outcome(run, "devices: ['NVIDIA H100*']")
    assert sentence(found) == "FAIL: the device NVIDIA H100* is wanted, and no cell ran on it"


def test_the_matrix_that_a_policy_names(run, project):
    """Its bytes and its cells must be those of the reports."""
    path = project.root / "release.yaml"
    path.write_text("version: 1\nmatrix: matrix/m.yaml\n")
    project.load("version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\n")
    found = gate(run.reports(), parse_policy(path.read_bytes(), str(path)), today=TODAY)
    assert found.code == 2
    assert "the reports are of another matrix/smoke.yaml than" in sentence(found)


def test_the_same_matrix_file_that_plans_other_cells_now(run, project):
    """As under another version of this package: the bytes are the same, and the reports are of other cells."""
    path = project.root / "release.yaml"
    path.write_text("version: 1\nmatrix: matrix/m.yaml\n")
    matrix = project.load("version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\n")
    (report,) = run.reports()
    report.block["matrix"]["sha256"] = matrix.sha256
    report.block["head_sha256"] = head_fingerprint(report.block)
    found = gate([report], parse_policy(path.read_bytes(), str(path)), today=TODAY)
    assert found.code == 2
    assert "the reports plan other cells than" in sentence(found)


def test_a_policy_may_name_a_shipped_matrix(run):
    """It is found without a file in the policy's folder."""
    assert outcome(run, "matrix: shipped:fuzz").code == 2
    assert "the reports are of another matrix/smoke.yaml than shipped:fuzz is now" in sentence(
        outcome(run, "matrix: shipped:fuzz"))


def test_a_matrix_that_is_not_there_is_told_at_the_policy(run, project):
    path = project.root / "release.yaml"
    path.write_text("version: 1\nmatrix: matrix/smal.yaml\n")
    with pytest.raises(MatrixError, match=r"release.yaml:2:1: matrix: there is no file .*smal.yaml"):
        gate(run.reports(), parse_policy(path.read_bytes(), str(path)), today=TODAY)


MISTAKES = """
gates: [smoke]                          | p.yaml:2:9: 'smoke' is not a gate; did you mean 'smoketest'?
limit: []                               | p.yaml:2:1: unknown key 'limit' in the policy; did you mean 'limits'?
limits: [{limits: {recompiles: 1}}]     | p.yaml:2:11: in a policy limits stand beside `when`, not in `limits:` as in
limits: [{recompile: 1}]                | p.yaml:2:11: unknown limit 'recompile'; did you mean 'recompiles'?
limits: [{when: {model: net}}]          | p.yaml:2:10: this entry has no limit; expected at least one of
limits: [{recompiles: many}]            | p.yaml:2:23: recompiles: found 'many', expected a whole number
limits: [{graphs: 1, when: {model: gtp}}] | p.yaml:2:29: 'gtp' is not a model in this run; did you mean 'gpt'?
limits: [{graphs: 1, when: {beckend: x}}] | p.yaml:2:29: unknown axis 'beckend'; did you mean 'backend'?
allowed_failures: [{cells: {model: net}, reason: x, until: 2027-01-01}] | an allowed failure: key 'issue' is missing
allowed_failures: [{cells: {}, reason: x, issue: y, until: 2027-01-01}] | no axis is named, so every cell matches
allowed_failures: [{cells: {model: net}, reason: x, issue: y, until: soon}] | expected a day as YYYY-MM-DD
allowed_failures: [{cells: {model: net}, verdicts: skip, reason: x, issue: y, until: 2027-01-01}] | 'skip' is not
allowed_skips: [{cells: {model: net}}]  | an allowed skip: key 'reason' is missing
pass_rate: {total: 98}                  | p.yaml:2:20: pass_rate of 'total': found 98, expected a number from 0 to 1
pass_rate: {backed: 0.9}                | p.yaml:2:13: unknown axis 'backed'; did you mean 'backend'?
pass_rate: {backend: {cuda: 0.9}}       | 'cuda' is not a value of axis 'backend' in this run
baseline: {slow: note}                  | unknown key 'slow' in baseline; did you mean 'slower'?
baseline: {slower: ignore}              | 'ignore' is not what a change may do
environment: {trch: '2.*'}              | environment: reports do not tell 'trch'; did you mean 'torch'?
ran_at_least: 0                         | ran_at_least: found 0, expected a whole number at least 1
ratchet: 1                              | ratchet: found '1', expected true or false
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_mistakes_are_told_with_their_place(run, line):
    text, _, message = line.partition("|")
    with pytest.raises(MatrixError) as caught:
        outcome(run, text.strip())
    assert caught.value.exit_code == 4
    assert str(caught.value).startswith("p.yaml:2:")
    assert message.strip() in str(caught.value)


def test_a_selector_of_known_values_may_still_match_nothing():
    run = Run(model=["net"], backend=["eager"])
    with pytest.raises(MatrixError, match="unknown axis 'size'"):
        outcome(run, "limits: [{graphs: 1, when: {size: 3}}]")


def test_other_versions_of_the_format_are_refused():
    with pytest.raises(MatrixError, match=r"p.yaml:1:10: version: found '2', expected 1"):
        parse_policy(b"version: 2\n", "p.yaml")
    with pytest.raises(MatrixError, match="the file is empty; expected at least the key version"):
        parse_policy(b"", "p.yaml")


def test_a_policy_is_not_blamed_for_what_is_missing(run):
    """While a shard is missing, its cells may be those that the policy names."""
    one = run.reports(2)[:1]
    assert gate(one, policy("limits: [{graphs: 1, when: {backend: eager}}]"), today=TODAY).code == 2
