"""Wrong numbers come first, everywhere, and one cause is one finding: the planted run, in every output."""

from __future__ import annotations

import datetime
import re
from xml.etree import ElementTree

import pytest
from planted import LIAR, planted
from runs import Run

from pytest_torchcompile.checks import CHECKS, COMPARING
from pytest_torchcompile.checks.severity import Effect, Severity
from pytest_torchcompile.gate import ci_formats
from pytest_torchcompile.gate.announcement import SHOWN, announcement, sentence
from pytest_torchcompile.gate.ci_formats import junit
from pytest_torchcompile.gate.gate import gate
from pytest_torchcompile.gate.markdown import markdown
from pytest_torchcompile.observation import Problem
from pytest_torchcompile.page.document import page
from pytest_torchcompile.playbook.chapters import playbook
from pytest_torchcompile.report.causes import check_effect, effect_of, first_with_problem, group_causes, root_check
from pytest_torchcompile.report.facts import Facts, Verdict
from pytest_torchcompile.report.finding import HEADLINE_WORDS, headline, shorten_to_headline
from pytest_torchcompile.report.merging import merge_reports

TODAY = datetime.date(2026, 11, 21)
HEADLINE = "1 model computes wrong numbers (liar, new); 9 models have graph breaks"
OLD = HEADLINE.replace(", new", "")
CELLS = ("liar-inductor-default-auto-none", "liar-inductor-default-dynamic-none")


def judged(baseline=True, **how):
    """What the gate says of the planted run, beside the run before."""
    before = planted(**how, faulty=False).reports() if baseline else ()
    return gate(planted(**how).reports(), None, before, TODAY)


@pytest.fixture(scope="module")
def outcome():
    return judged()


def failing(outcome):
    return [finding for finding in outcome.findings if finding.weight == "fail"]


def test_ten_faults_are_ten_findings_and_the_lie_comes_first(outcome):
    """Not one for each check that sees it, nor again for the gate and for the baseline."""
    found = failing(outcome)
    assert [finding.cause.models for finding in found] == [[LIAR], *([f"broken{k}"] for k in range(9))]
    assert found[0].kind == "equivalence"
    assert found[0].cells == CELLS
    assert all(finding.new for finding in found)


def test_what_shows_a_cause_and_what_follows_from_it_is_told_with_it(outcome):
    """The checks, the coverage that a graph break costs, and the gate that does not pass: a line each."""
    lie, broken, *_ = failing(outcome)
    assert [re.sub(":.*", "", line) for line in lie.lines] == [
        "new since the baseline", "also gradients", "also training_steps", "also smoketest",
        "so the gate smoketest does not pass"]
    assert broken.lines == ["new since the baseline", "compiles follows from graph_breaks"]


def test_the_headline_names_what_is_worst(outcome):
    """In the words of the issue."""
    assert sentence(outcome) == f"FAIL: {HEADLINE}"
    assert sentence(judged(baseline=False)) == f"FAIL: {OLD}"


def test_the_exit_code_is_what_it_was(outcome):
    assert outcome.code == 1
    assert gate(planted(faulty=False).reports(), today=TODAY).code == 0


def test_the_gates_text(outcome):
    """The headline, then the lie."""
    lines = list(announcement(outcome))
    assert lines[0] == f"FAIL: {HEADLINE}"
    assert lines[2].startswith("fail      equivalence: output: error is 4.1e+06 times the rounding noise")
    assert "          compiles follows from graph_breaks" in lines


def test_annotations(outcome):
    """Ten findings are ten annotations, the lie first; each break at its own line."""
    lines = list(ci_formats.annotate_findings(outcome))
    assert len(lines) == 10
    assert "equivalence: output: error is" in lines[0]
    assert "%0Anew since the baseline%0Aalso gradients: " in lines[0]
    assert [re.search("line=([0-9]+)", line)[1] for line in lines[1:]] == [str(20 + 10 * k) for k in range(9)]


def test_markdown(outcome):
    """The heading, and the first row."""
    text = markdown(outcome)
    rows = [line for line in text.splitlines() if line.startswith("| 🔴")]
    assert HEADLINE.replace("(", "\\(").replace(")", "\\)") in text
    assert len(rows) == 10
    assert rows[0].startswith("| 🔴 fail | equivalence: output: error is")
    assert "<br>compiles follows from graph\\_breaks" in rows[1]


def test_junit(outcome):
    """A case for each cell: the first of a cause has all of it, the others say where that is."""
    cells, whole = ElementTree.fromstring(junit(outcome))
    assert len(cells) == 20
    first, second = (cells.find(f"testcase[@name='{name}']/failure") for name in CELLS)
    assert first.get("message") == second.get("message")
    assert "also smoketest: the smoketest says False" in first.text
    assert second.text.endswith(f"\n(one cause in 2 cells, told at {CELLS[0]})")
    broken = cells.find("testcase[@name='broken0-inductor-default-auto-none']/failure")
    assert broken.text.count("compiles follows from graph_breaks") == 1
    assert "operator calls" not in broken.text
    assert whole[0].find("failure").get("message") == f"FAIL: {HEADLINE}"


def test_the_page(outcome):
    """Its head, its list of findings, and the article of a cell."""
    text = page(outcome, merge_reports(planted(faulty=False).reports()))
    assert f'class="sentence bad">FAIL: {HEADLINE}<' in text
    listed = text[text.index('class="findings"'):]
    assert text.count('class="findings"') == 2
    for group, number in (("Wrong numbers", 1), ("Slow", 9)):
        assert f'<h3>{group} <span class="quiet">{number}</span></h3>' in text
    assert listed.index("liar computes wrong numbers") < listed.index("broken0 has graph breaks")
    assert listed.index("equivalence: output: error") < listed.index("graph_breaks: graph break")
    article = text[text.index('<article id="cell:broken0-inductor-default-auto-none"'):]
    article = article[:article.index("</article>")]
    follows_from = article.index('<p class="quiet">follows from graph_breaks: only 0.8')
    assert article.index("graph break (1 place(s)") < follows_from


def test_the_playbook(outcome):
    """A gotcha for each cause, the lie first."""
    text = playbook(outcome)
    titles = re.findall("^### .*$", text, re.MULTILINE)
    assert len(titles) == 10
    assert titles[0].startswith("### 1. equivalence, gradients, training_steps, smoketest: output: error is")
    assert "- compiles follows from graph_breaks\n" in text


# more than any list shows


def test_no_list_cuts_off_wrong_numbers():
    """Seventy liars among thirty graph breaks: all of them are told, in text, annotations, Markdown and page."""
    liars = tuple(f"liar{k:02}" for k in range(70))
    outcome = judged(broken=30, liars=liars)
    cells = [f"{name}-inductor-default-auto-none" for name in liars]
    lines = list(announcement(outcome))
    assert len(liars) > SHOWN
    annotations = list(ci_formats.annotate_findings(outcome))
    assert len(annotations) == ci_formats.MOST_ANNOTATIONS
    for text in ("\n".join(lines), "\n".join(annotations), markdown(outcome), page(outcome), junit(outcome)):
        told = text if "<html" not in text else text[text.index('class="findings"'):]
        assert [cell for cell in cells if cell not in told] == []
    assert "... and 30 more findings" in lines
    assert len(sentence(outcome).split()) <= HEADLINE_WORDS
    assert sentence(outcome).startswith("FAIL: 70 models compute wrong numbers (liar00, liar01, ")


# order and grouping


def of(model, cell, *verdicts, verdict="fail"):
    """A cell whose checks have failed: (check, message) or (check, message, line)."""
    checks = {}
    for check, message, *line in verdicts:
        problem = {"message": message, "file": "m.py" if line else "", "line": line[0] if line else 0}
        checks.setdefault(check, {"verdict": verdict, "problems": []})["problems"].append(problem)
    return Facts({"id": cell, "axes": {"model": model}, "status": verdict, "checks": checks})


def test_the_levels_are_told_in_order():
    """Wrong numbers, a crash, silently eager, unstable, slow, cosmetic; however many cells each has."""
    ladder = [
        of("f", "f1", ("compiles", "passed, although m.yaml:3 expects it to fail"), verdict="xpass"),
        of("e", "e1", ("graph_breaks", "graph break", 9)), of("e", "e2", ("graph_breaks", "graph break", 9)),
        of("d", "d1", ("recompiles", "3 recompile(s) that no size explains", 4)),
        of("c", "c1", ("compiles", "1 frame(s) silently ran eagerly: limit in f", 2)),
        of("b", "b1", ("compiles", "killed by SIGSEGV"), verdict="crash"),
        of("a", "a1", ("gradients", "gradient of w: error is 9 times the rounding noise")),
    ]
    found = group_causes(ladder)
    assert [cause.models for cause in found] == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]
    assert [cause.effect.severity for cause in found] == sorted(Severity, reverse=True)


def test_wrong_numbers_of_one_model_that_come_together_are_one_cause():
    """Where only the gradients show it, too; another model, and what never came together, are others."""
    found = group_causes([
        of("a", "a1", ("equivalence", "output: error is 9 times"), ("gradients", "gradient of w: error is 7 times")),
        of("a", "a2", ("gradients", "gradient of w: error is 5 times")),
        of("b", "b1", ("gradients", "gradient of w: error is 5 times")),
        of("a", "a3", ("equivalence", "output: dtype is float32 in eager, float64 compiled")),
    ])
    assert [cause.cells for cause in found] == [["a1", "a2"], ["b1"], ["a3"]]
    assert list(found[0].further_lines()) == ["also gradients: gradient of w: error is 7 times"]


def test_backends_of_the_users_own_have_a_cause_each():
    """One may be wrong in the forward pass, another one in the backward pass; torch's own are parts of one compiler."""
    def cell(name, backend, *problems):
        facts = of("a", name, *problems)
        facts.axes["backend"] = backend
        return facts

    output = ("equivalence", "output: error is 9 times")
    gradient = ("gradients", "gradient of w: error is 7 times")
    found = group_causes([
        cell("a1", "m:forward", output, gradient), cell("a2", "m:backward", gradient),
        cell("a3", "aot_eager", output, gradient), cell("a4", "inductor", gradient), cell("a5", "m:backward", gradient),
    ])
    assert sorted(cause.cells for cause in found) == [["a1"], ["a2", "a5"], ["a3", "a4"]]


def test_a_graph_pass_to_blame_is_one_cause():
    """In all models, at whatever place among the passes; what is wrong beside it is its doing, and no other pass's."""
    output = "output: error is 9 times"
    raises = "the compiled run raised BackendCompilerFailed in forward; eager did not"
    found = group_causes([
        of("a", "a1", ("equivalence", output), ("passes", "pass 1 of 1 (m:fold) changed output (9 times)")),
        of("b", "b1", ("gradients", "gradient of w: error is 7 times"),
           ("passes", "pass 2 of 2 (m:fold) changed gradient of w (7 times)")),
        of("a", "a2", ("equivalence", output), ("passes", "pass 1 of 1 (m:scale(by=2)) changed output (3 times)")),
        of("a", "a3", ("equivalence", output)),
        of("b", "b2", ("compiles", raises), ("passes", "with pass 1 of 2 (m:gone) the model raises: KeyError")),
    ])
    assert [(cause.problem.message, cause.cells) for cause in found] == [
        ("pass 1 of 1 (m:fold) changed output (9 times)", ["a1", "b1"]),
        ("pass 1 of 1 (m:scale(by=2)) changed output (3 times)", ["a2"]),
        (output, ["a3"]),
        ("with pass 1 of 2 (m:gone) the model raises: KeyError", ["b2"]),
    ]
    assert found[0].name == "passes, equivalence, gradients"
    assert found[0].models == ["a", "b"]
    assert found[3].name == "passes, compiles"


def test_what_has_no_place_is_told_with_what_has_one_and_does_the_same():
    """Two places stay two causes, whatever has shown with both."""
    warm = ("smoketest", "2 compile(s) in the smoketest of a model that was warm")
    found = group_causes([of("a", "a1", ("recompiles", "3 recompile(s)", 4), warm),
                    of("a", "a2", ("recompiles", "3 recompile(s)", 5), warm), of("a", "a3", warm)])
    assert [(cause.checks, cause.cells) for cause in found] == [
        (["recompiles", "smoketest"], ["a1"]), (["recompiles", "smoketest"], ["a2"]), (["smoketest"], ["a3"])]


UNCOVERED = "only 0.8 of the model's operator calls ran inside compiled graphs at call 1, 1 wanted"


@pytest.mark.parametrize(("check", "message", "others", "root"), [
    ("compiles", UNCOVERED, {"graph_breaks": "graph break"}, "graph_breaks"),
    ("compiles", f"rank 1: {UNCOVERED}", {"graph_breaks": "rank 1: graph break"}, "graph_breaks"),
    ("compiles", UNCOVERED, {"recompiles": "3 recompile(s)"}, ""),
    ("compiles", "the compiled run raised ValueError in forward", {"graph_breaks": "graph break"}, ""),
    ("graph_breaks", "nothing to judge: the compiled run raised ValueError",
     {"compiles": "the compiled run raised ValueError in forward"}, "compiles"),
    ("recompiles", "nothing to judge: no graph was compiled", {"compiles": "nothing was compiled"}, "compiles"),
    ("recompiles", "nothing to judge: no graph was compiled", {"smoketest": "the smoketest says False"}, ""),
    ("fuzz", "nothing to judge: no dim of the model has more than one size", {"compiles": UNCOVERED}, ""),
    ("equivalence", "rank 0: nothing to judge: no compiled code ran", {"compiles": "nothing was compiled"}, "compiles"),
    ("gradients", "gradient of w: wrong", {"equivalence": "output: wrong"}, ""),
])
def test_what_follows_from_another_check(check, message, others, root):
    """A consequence names its cause; wrong gradients beside wrong outputs may have one of their own."""
    verdict = Verdict(check, "fail", [Problem(message)])
    cell = [verdict, *(Verdict(name, "fail", [Problem(text)]) for name, text in others.items())]
    assert root_check(verdict, verdict.problems[0], cell) == root


def test_a_crash_follows_from_no_graph_break():
    """Each check has it, since the cell has no result; the first one tells it."""
    cell = [Verdict(name, "crash", [Problem("killed by SIGSEGV")]) for name in ("graph_breaks", "compiles")]
    assert [root_check(verdict, verdict.problems[0], cell) for verdict in cell] == ["", ""]
    assert [first_with_problem(verdict, verdict.problems[0], cell) for verdict in cell] == ["", "graph_breaks"]


def test_a_cause_that_is_allowed_leaves_its_consequence_alone():
    """What the matrix expects is no reason: then the coverage is told itself."""
    verdict = Verdict("compiles", "fail", [Problem(UNCOVERED)])
    known = Verdict("graph_breaks", "xfail", [Problem("graph break")])
    assert root_check(verdict, verdict.problems[0], [known, verdict]) == ""


# records


def test_causes_are_judged_before_what_follows_from_them():
    """In the order of CHECKS, which is that of the report and of pytest's items."""
    order = list(CHECKS)
    for name, entry in CHECKS.items():
        for way in entry.ways:
            assert not way.follows or order.index(way.follows) < order.index(name), name


def test_which_checks_compare_numbers_is_told_by_their_records():
    """What has a section of leaves, and only that."""
    assert sorted(COMPARING) == ["aliasing", "equivalence", "gradients", "training_steps"]
    assert all(CHECKS[name].effect.severity == Severity.WRONG_NUMBERS for name in COMPARING)


EFFECTS = [
    ("equivalence", "fail", "output: error is 9 times the rounding noise", Severity.WRONG_NUMBERS),
    ("equivalence", "fail", "rank 1: output: stride is (2, 1) in eager, (1, 2) compiled", Severity.UNSTABLE),
    ("equivalence", "fail", "nothing was compared: the model has no output", Severity.SILENTLY_EAGER),
    ("gradients", "fail", "every gradient is zero, NaN or infinite in the eager run too: their equality proves nothing",
     Severity.SILENTLY_EAGER),
    ("gradients", "fail", "2 gradient(s) are zeros where eager has none, 0 allowed", Severity.UNSTABLE),
    ("fuzz", "fail", "nothing to judge: no dim of the model has more than one size", Severity.SILENTLY_EAGER),
    ("equivalence", "crash", "killed by SIGSEGV", Severity.CRASH),
    ("recompiles", "timeout", "no end after 300 s", Severity.CRASH),
    ("recompiles", "error", "the observation has no section", Severity.CRASH),
    ("equivalence", "xpass", "passed, although", Severity.COSMETIC),
    ("equivalence", "xfail", "output: error is 9 times the rounding noise", Severity.WRONG_NUMBERS),
    ("compiles", "fail", "the compiled run raised ValueError in forward; eager did not: no", Severity.CRASH),
    ("compiles", "fail", "nothing was compiled: no graph reached the backend", Severity.SILENTLY_EAGER),
    ("compiles", "fail", "every output of the compiled model is zero, NaN or infinite", Severity.WRONG_NUMBERS),
    ("smoketest", "fail", "the smoketest says False: compiled it raises, eagerly it does not: no", Severity.CRASH),
    ("smoketest", "fail", "the smoketest says False: output['raises'] is 5.2e+03 times the noise (comparison)",
     Severity.WRONG_NUMBERS),
    ("smoketest", "fail", "the smoketest says False: gradient of praises.weight: error is 9 times",
     Severity.WRONG_NUMBERS),
    ("smoketest", "fail", "the smoketest says False: the optimiser raises ValueError for the compiled gradients, for "
     "those of eager it does not: no (step 1, step)", Severity.WRONG_NUMBERS),
    ("smoketest", "fail", "the smoketest says False: the optimiser raises ValueError, eagerly too: no (step 1, step)",
     Severity.CRASH),
    ("smoketest", "fail", "the smoketest says False: ranks 1 and 2 had to leave the same call, and the log there says",
     Severity.CRASH),
    ("smoketest", "fail", "the smoketest says False: the test itself failed, which is no fault of the model: no",
     Severity.SILENTLY_EAGER),
    ("smoketest", "fail", "the smoketest says False: it did not compile and ran eagerly instead",
     Severity.SILENTLY_EAGER),
    ("smoketest", "fail", "2 compile(s) in the smoketest of a model that was warm", Severity.UNSTABLE),
    ("safe_fallback", "fail", "the attempt left 2 thing(s) changed", Severity.WRONG_NUMBERS),
    ("safe_fallback", "fail", "the log says nothing; expected fallback_eager for each attempt", Severity.UNSTABLE),
    ("fuzz", "fail", "value: after f(B=3): output: error is 9 times", Severity.WRONG_NUMBERS),
    ("fuzz", "fail", "recompiles: after f(B=3): 3 recompile(s) of f", Severity.UNSTABLE),
    ("fuzz", "fail", "graph_breaks: after f(B=3): graph break 1", Severity.SLOW),
    ("worth", "fail", "1.1 times as fast compiled", Severity.SLOW),
    ("worth", "fail", "slower: 0.6 times as fast compiled", Severity.SLOW),
    ("worth", "fail", "it computes wrong numbers, so its speed says nothing: output: value", Severity.WRONG_NUMBERS),
    ("worth", "fail", "2 compile(s) in the timed steps: there was no steady state", Severity.UNSTABLE),
    ("silent_eager", "fail", "frames that silently ran eagerly: 1, at most 0 allowed", Severity.SILENTLY_EAGER),
    ("compile_seconds_ratio", "fail", "seconds: 3 times the baseline's", Severity.SLOW),
    ("of_another_version", "fail", "no", Severity.CRASH),
    ("equivalence", "fail", "output['proves nothing']: error is 9 times the rounding noise", Severity.WRONG_NUMBERS),
    ("equivalence", "fail", "output['x: stride is y']: error is 9 times the rounding noise", Severity.WRONG_NUMBERS),
    ("gradients", "fail", "gradient of d.says nothing: error is 9 times the noise (float32)", Severity.WRONG_NUMBERS),
    ("equivalence", "fail", "all 1 values are nothing but rounding noise: nothing is proved", Severity.SILENTLY_EAGER),
    ("smoketest", "fail", "the smoketest says False: output: stride is (2, 1) in eager, (1, 2) compiled (comparison)",
     Severity.UNSTABLE),
    ("smoketest", "fail", "the smoketest says False: that they agree proves nothing (step 1, comparison)",
     Severity.SILENTLY_EAGER),
]


@pytest.mark.parametrize(("check", "verdict", "message", "severity"), EFFECTS)
def test_how_bad_a_problem_is(check, verdict, message, severity):
    """By the check's record, by the words of the problem, and by the kind of verdict."""
    assert effect_of(Verdict(check, verdict, []), Problem(message)).severity == severity


def test_every_check_and_limit_has_an_effect():
    """With words for one model and for several."""
    for name in (*CHECKS, "kernels", "memory_mib"):
        effect = check_effect(name)
        assert 1 <= len(effect.one.split()) <= 6
        assert 1 <= len(effect.many.split()) <= 6


# the headline


def test_the_headline_has_at_most_25_words():
    """Whatever there is: names go first, then effects, the worst stays."""
    words = [Effect(severity, f"does the thing number {severity} badly", f"do the thing number {severity} badly")
             for severity in sorted(Severity, reverse=True)]
    found = [cause for model in range(40)
             for cause in group_causes([of(f"m{model}", f"m{model}", ("equivalence", "o: no"))])]
    for number, cause in enumerate(found):
        cause.effect = words[number % len(words)]
    found.sort(key=lambda cause: cause.order)
    for most in range(1, 41):
        text = headline(found[:most], "FAIL: ", others=most)
        assert len(text.split()) <= HEADLINE_WORDS
        assert "does the thing number 6" in text or "do the thing number 6" in text
        assert text.endswith("more findings") or most == 1


def test_a_long_finding_that_is_no_cause_is_cut_too():
    """A skip's reason is as long as somebody wrote it."""
    run = Run()
    run.skips(*run.ids[2:], reason="no " * 60)
    text = sentence(gate(run.reports(), today=TODAY))
    assert text.startswith("FAIL: 2 of 4 cells were skipped, and no policy allows it: no no")
    assert text.endswith(" ...")
    assert len(text.split()) == HEADLINE_WORDS
    assert shorten_to_headline("a b c") == "a b c"
