"""Judging an observation, and applying an xfail rule to what came of it."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest

from pytest_torchcompile.checks import CHECKS, computes_wrong_numbers, load, way_of
from pytest_torchcompile.checks.severity import Severity
from pytest_torchcompile.observation import Failure, Judgement, Observation, Problem, worst
from pytest_torchcompile.run.timeout_text import timeout_problem
from pytest_torchcompile.run.verdicts import apply_xfail, judge_observation


def section(**changes):
    """A section of `compiles` in which all is well, with changes."""
    return {"compiles": [], "graphs": [{"runs": 2}], "eager_frames": [], "lost": [], "coverage": [
        {"call": "call 1", "share": 1.0, "total": 4, "outside": 0, "sites": []}],
        "all_zero": [False], "eager_all_zero": [False], "error": None, "seconds": 1.0} | changes


FRAME = {"function": "forward", "file": "m.py", "line": 3, "reason": "why", "kind": "limit"}
ERROR = {"type": "InductorError", "text": "no", "phase": "forward", "traceback": "at line 1"}


@pytest.mark.parametrize(("changes", "text"), [
    ({"graphs": []}, "nothing was compiled: no graph reached the backend"),
    ({"graphs": [{"runs": 0}]}, "graphs were compiled, but none was ever executed"),
    ({"eager_frames": [FRAME]}, "1 frame(s) silently ran eagerly: limit"),
    ({"coverage": [{"call": "call 2 (B=1)", "share": 0.5, "total": 4, "outside": 2, "sites": ["m.py:3"]}]},
     "only 0.5 of the model's operator calls ran inside compiled graphs at call 2 (B=1), 1 wanted "
     "(2 of 4 ran eagerly)"),
    ({"lost": ["a record of a kind that is unknown"]}, "can't vouch for this cell"),
    ({"all_zero": [True], "eager_all_zero": [True]}, "their equality proves nothing"),
    ({"all_zero": [True]}, "every output of the compiled model is zero, NaN or infinite"),
    ({"error": ERROR}, "the compiled run raised InductorError in forward; eager did not"),
])  # fmt: skip
def test_nothing_vacuous_passes(changes, text):
    """Each way in which a compiled run can be vacuous is a problem of the check `compiles`."""
    (problem,) = load("compiles").judge(section(**changes), {})
    assert text in problem.message


def test_a_good_section_passes():
    """The section that the tests above change has no problem itself."""
    assert not list(load("compiles").judge(section(), {}))


def test_a_lower_coverage_can_be_allowed():
    """The limit `coverage` is the smallest share that passes."""
    low = section(coverage=[{"call": "call 1", "share": 0.5, "total": 4, "outside": 2, "sites": []}])
    assert not list(load("compiles").judge(low, {"coverage": 0.5}))
    assert list(load("compiles").judge(low, {"coverage": 0.51}))


def low(share=0.76839, **changes):
    """A section in which some operators ran eagerly."""
    return section(coverage=[{"call": "call 1", "share": share, "total": 4, "outside": 2, "sites": []}], **changes)


def test_the_coverage_to_paste_is_one_that_passes():
    """As a number, rounded down, as a rule of the matrix has it."""
    (problem,) = load("compiles").judge(low(), {"coverage": 1.0})
    assert problem.message.startswith("only 0.7683 of the model's")
    assert problem.hint.endswith("if it is meant, allow it by the rule `- limits: {coverage: 0.7683}`")
    assert not list(load("compiles").judge(low(), {"coverage": 0.7683}))


@pytest.mark.parametrize(("changes", "why"), [
    ({"breaks": 1}, "graph_breaks lists where"),
    ({"wrapper": "fsdp2*fake8"}, "no graph broke: the wrapper fsdp2*fake8 runs operators of its own"),
    ({"wrapper": "none"}, "no graph broke: torch does not compile the functions that ran"),
])  # fmt: skip
def test_why_operators_ran_eagerly(changes, why):
    """The check graph_breaks is named only where it lists something."""
    (problem,) = load("compiles").judge(low(**changes), {})
    assert problem.hint.startswith(why)


def test_classes_of_torchs_own_are_not_compiled_in_place():
    """That is what the hint is about, where it is so."""
    frame = FRAME | {"kind": "skipped", "reason": "torch does not compile modules of its own in place"}
    (problem,) = load("compiles").judge(section(graphs=[], eager_frames=[frame]), {})
    assert problem.hint.endswith("give the blocks a class of your own, whose forward calls the one of torch's class")
    (problem,) = load("compiles").judge(section(graphs=[]), {})
    assert "a stance or TORCHDYNAMO_DISABLE=1" in problem.hint


def test_an_allowed_break_explains_what_ran_between_graphs():
    """Without a lower coverage; a break too many, or frames that were given up as a whole, are not explained."""
    judge = load("compiles").judge
    assert not list(judge(low(breaks=1), {"coverage": 1.0, "graph_breaks": 1}))
    assert list(judge(low(breaks=2), {"coverage": 1.0, "graph_breaks": 1}))
    assert list(judge(low(breaks=0), {"coverage": 1.0, "graph_breaks": 1}))
    assert list(judge(low(breaks=1, eager_frames=[FRAME | {"kind": "graph_break"}]),
                      {"coverage": 1.0, "graph_breaks": 1}))
    assert list(judge(low(breaks=1), {"coverage": 0.9, "graph_breaks": 1})), "a share that is asked for is asked for"


def test_silent_frames_are_a_problem_for_each_place():
    """So that what two functions do is not told as one; the coverage that comes of it is not told."""
    frames = [{"kind": "limit", "function": f"M.{name}", "file": "m.py", "line": line, "reason": "8 entries"}
              for name, line in (("f", 3), ("g", 9), ("g", 9))]
    low = [{"call": "call 1", "share": 0.5, "total": 4, "outside": 2, "sites": []}]
    found = list(load("compiles").judge(section(eager_frames=frames, coverage=low), {}))
    assert [(p.message, p.file, p.line) for p in found] == [
        ("1 frame(s) silently ran eagerly: limit in M.f", "m.py", 3),
        ("2 frame(s) silently ran eagerly: limit in M.g", "m.py", 9)]


def test_fuzz_passes_no_model_of_one_size():
    """Sequences of shapes that are all the same prove nothing of shapes."""
    (same,) = load("fuzz").judge({"varied": [], "rungs": [], "finding": None}, {})
    assert same.message == ("nothing to judge: no dim of the model has more than one size, so no sequences of shapes "
                            "differ")
    assert same.hint.startswith("give a dim a range, like {min: 1, max: 64}, or leave the model's cells out: -m \"not ")
    assert not list(load("fuzz").judge({"varied": ["B"], "rungs": [{"tries": 3, "spent": ""}], "finding": None}, {}))


FAULT = {"finding": {"kind": "value", "message": "output: error is 9", "evidence": "in call 1"}, "sequence": [],
         "code": "[call(B=37)]", "drawn": "[call(B=37)]", "kept": False, "cut": "", "test": "# test_it.py"}
MILD = FAULT | {"finding": {"kind": "graph_breaks", "message": "graph break 1", "evidence": "m.py:3"},
                "code": "[call(B=6)]", "cut": "seconds"}


def test_fuzz_tells_the_worst_and_what_is_milder():
    """Each with its sequence and test; that the real backend had no time for any is told too."""
    rungs = [{"backend": "eager", "tries": 3, "spent": ""}, {"backend": "inductor", "tries": 0, "spent": "seconds"}]
    section = {"varied": ["B"], "rungs": rungs, **FAULT, "milder": [MILD]}
    worst, mild, untried = load("fuzz").judge(section, {})
    assert worst.message == "value: after [call(B=37)]: output: error is 9"
    assert "not shrunk" not in worst.evidence
    assert mild.message == "graph_breaks: after [call(B=6)]: graph break 1"
    assert "not shrunk to the end: the seconds ran out" in mild.evidence
    assert untried.message.startswith("no sequence was run with the backend inductor: the time for fuzzing was over")
    assert CHECKS["fuzz"].effect.severity > way_of("fuzz", mild.message).effect.severity


def test_a_report_of_a_search_that_ended_at_its_first_finding():
    """As older versions wrote it."""
    older = {name: value for name, value in MILD.items() if name != "cut"}
    section = {"varied": ["B"], "rungs": [{"backend": "eager", "tries": 3, "spent": "compiles"}], **older}
    (problem,) = load("fuzz").judge(section, {})
    assert "not shrunk to the end: the compiles ran out" in problem.evidence


EMPTY = {
    "shape_stability": {"calls": 0, "late": [], "between": []},
    "smoketest": {"ok": False, "reason": "nothing was compiled", "phase": "forward"},
    "safe_fallback": {"error": None, "original": True, "changed": [], "differs": [], "met": [0, 0], "log": []},
    "cudagraphs": {"steps": [], "skips": []},
    "kernels": {"graphs": []},
    "memory": {"graph_runs": 0, "eager_bytes": 0, "leaked_bytes": 0, "device": "cpu", "call": "call 1"},
    "determinism": {"raised": None, "failure": "", "graphs": 0, "kernels": 0, "changed": [], "begins": ""},
    "worth": {"verdict": "nothing was compiled", "text": ""},
    "contract": {"wrapper": "none", "calls": 0, "graphs": 0, "mute": 0, "findings": []},
    "artifacts": {"raised": None, "unfit": "", "routes": []},
    "fuzz": {"rungs": [{"tries": 0}], "finding": None},
    "passes": {"passes": []},
}
"""Sections of checks that have a form of their own, of a run in which nothing was compiled."""


# The others run on their own.
@pytest.mark.parametrize("name", [n for n in CHECKS if n not in ("safe_fallback", "contract", "fuzz")])
def test_no_check_passes_a_run_that_raised(name):
    """Where the compiled run raised, every check fails: nothing was seen, so nothing is good."""
    nothing = {"raised": "InductorError", "graphs": 0, "graph_breaks": [], "recompiles": [], "sizes": 1,
               "dynamic": "auto", "compared": 0, "leaves": [], "nonzero": 1, "steps": 3}
    problems = list(load(name).judge(section(error=ERROR, graphs=[]) if name == "compiles" else nothing, {}))
    assert problems


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "compiles"])
def test_no_check_passes_a_run_that_saw_nothing(name):
    """Nor does one where nothing was compiled or compared."""
    nothing = {"raised": None, "graphs": 0, "graph_breaks": [], "recompiles": [], "sizes": 1, "dynamic": "auto",
               "compared": 0, "leaves": [], "nonzero": 0, "steps": 3, **EMPTY.get(name, {})}
    assert list(load(name).judge(nothing, {"kernels": 1}))  # which are only recorded without a limit


def test_fuzz_tells_want_of_time_from_sizes_that_eager_refuses():
    """Either way nothing was compared, and what to do is another thing."""
    rungs = [{"backend": "eager", "tries": 4, "refused": 2}, {"backend": "inductor", "tries": 0, "refused": 7}]
    (refused,) = load("fuzz").judge({"rungs": rungs, "finding": None}, {})
    assert refused.message == ("nothing was compared with the backend inductor: eager refuses all 7 call(s) that were "
                               "drawn")
    assert refused.hint == "narrow the model's dims to the sizes that it takes"
    (both,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 7, "mute": 2}], "finding": None}, {})
    assert both.message.endswith("all 7 call(s) that were drawn, or gives nothing but zeros, NaN or rounding noise: 2")
    (mute,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 0, "mute": 3}], "finding": None}, {})
    assert mute.message == ("nothing is proved: in all 3 call(s) that were drawn the model gives nothing but zeros, "
                            "NaN or rounding noise")
    (impossible,) = load("fuzz").judge({"rungs": [{"tries": 0, "spent": "sizes"}], "finding": None}, {})
    assert impossible.message == "no sequence was run: no sizes were found that the dims' expressions go with"
    (late,) = load("fuzz").judge({"rungs": [{"tries": 0, "refused": 0}], "finding": None}, {})
    assert late.message == "no sequence was run: the time for fuzzing was over before the first"


@pytest.mark.parametrize(("name", "section"), [
    # the first rung has used up the budget: nothing was run with the cell's own backend
    ("fuzz", {"rungs": [{"backend": "eager", "tries": 9}, {"backend": "inductor", "tries": 0}], "finding": None}),
    ("fuzz", {"rungs": [], "finding": None}),
    # every drawn call was refused by eager
    ("fuzz", {"rungs": [{"backend": "eager", "tries": 0, "refused": 9}], "finding": None}),
    # both sides raised, or gave nothing that can be compared
    ("randomness", {"raised": None, "random": False, "seeds": 4, "graphs": 1, "compared": 1, "wrong": []}),
    # one size replays, and of the other nothing ran compiled
    ("cudagraphs", {"raised": None, "functions": {}, "skips": [], "steps": [
        {"call": "call 1", "graphs": [{"compile_id": "0/0", "replays": 1}], "elsewhere": 0, "backwards": 0,
         "without": []},
        {"call": "call 2", "graphs": [], "elsewhere": 0, "backwards": 0, "without": []}]}),
])
def test_no_check_passes_what_it_saw_in_part(name, section):
    """Where the part that counts was not run, nothing is good."""
    assert list(load(name).judge(section, {}))


@pytest.mark.parametrize(("backend", "advice"), [
    ("inductor", "; `torch._inductor.config.fallback_random = True` has it draw eager's own"),
    ("aot_eager", "; this backend runs torch's own operators, so look at what changes the graph before it"),
    ("m:mine", "; look at what the backend 'm:mine' makes of them; where it goes on to Inductor, `torch._inductor."
               "config.fallback_random = True` has it draw eager's own"),
])
def test_advice_about_random_numbers_is_for_the_backend(backend, advice):
    """Inductor's setting is no use to others."""
    section = {"raised": None, "backend": backend, "random": True, "seeds": 64, "graphs": 1, "compared": 3,
               "wrong": ["mean of output: is 3, expected 2"]}
    (found,) = load("randomness").judge(section, {})
    assert found.hint == f"the compiled code draws its random numbers in another way than eager{advice}"


@pytest.mark.parametrize(("dynamic", "sizes", "allowed"), [
    ("static", 3, 2), ("static", 1, 0), ("auto", 3, 1), ("auto", 1, 0), ("dynamic", 3, 0),
])  # fmt: skip
def test_recompiles_that_shapes_explain(dynamic, sizes, allowed):
    """Without a limit in the matrix, no function may recompile more often than its shapes explain."""
    def found(count):
        one = {"function": "forward", "file": "m.py", "line": 3, "compile_id": "0/1", "kind": "recompile",
               "cause": "shape", "reason": "size mismatch", "what": "x.size(0)", "expected": "4", "actual": "8",
               "during": "call 2"}
        return {"raised": None, "graphs": 1, "recompiles": [one] * count, "sizes": sizes, "dynamic": dynamic}

    check = load("recompiles")
    assert not list(check.judge(found(allowed), {}))
    (problem,) = check.judge(found(allowed + 1), {})
    assert problem.message == (f"{allowed + 1} recompile(s), {allowed} explained by {sizes} size(s) "
                               f"with dynamic={dynamic}")
    assert "call 2: forward m.py:3  shape: x.size(0)  4 -> 8" in problem.evidence
    assert "mark_dynamic" in problem.hint


def test_a_section_that_is_missing_is_an_error():
    """A check that was not measured is never a pass."""
    assert judge_observation(Observation("c"), ["compiles"], {})["compiles"].verdict == "error"


@pytest.mark.parametrize(("kind", "verdict"), [
    ("skip", "skip"), ("crash", "crash"), ("timeout", "timeout"), ("user", "error"), ("usage", "error"),
    ("internal", "error"),
])  # fmt: skip
def test_failures(kind, verdict):
    """What kept a run from having a result becomes the verdict of each check."""
    found = judge_observation(Observation("c", failure=Failure(kind, "why")), ["compiles", "equivalence"], {})
    assert {j.verdict for j in found.values()} == {verdict}


@pytest.mark.parametrize(("stacks", "compiler"), [
    ('File "/s/torch/_inductor/cpp_builder.py", line 1700 in build', "the C++ compiler"),
    ('File "/s/triton/compiler/compiler.py", line 300 in compile', "Triton's compiler"),
    ('File "/s/torch/_inductor/async_compile.py", line 700 in wait',
     "a compiler that Inductor waited for (C++ or Triton)"),
])  # fmt: skip
def test_a_time_out_names_the_compiler_that_ran(stacks, compiler):
    """Other sizes and aot_eager help against a slow compiler, and against nothing else."""
    problem = timeout_problem("no result after 60 s", stacks)
    assert problem.message == f"no result after 60 s; {compiler} was running"
    assert problem.hint == ("raise --compile-timeout (--compile-timeout=120 gives it twice the time); or run again, "
                            "for kernels that were finished are in torch's cache; or try smaller sizes or a smaller "
                            "model, or take `backend: aot_eager`, which needs no such compiler")


@pytest.mark.parametrize(("stacks", "what"), [
    ([], ""),
    (["/e/lib/python3.11/threading.py", "/e/site-packages/torch/nn/modules/module.py"], ""),
    (["/e/lib/python3.11/threading.py", "/me/models.py", "/s/pytest_torchcompile/oracle/trial.py"],
     "; f at models.py:3 was running"),
    (["/s/torch/_inductor/compile_fx.py", "/s/torch/_dynamo/symbolic_convert.py"], "; Inductor was running"),
    (["/s/torch/_functorch/_aot_autograd/graph_compile.py", "/s/torch/_dynamo/symbolic_convert.py"],
     "; AOTAutograd was running"),
    (["/s/torch/_dynamo/symbolic_convert.py", "/s/pytest_torchcompile/oracle/torch_hints.py"],
     "; Dynamo was running, to try torch's hint about a graph break"),
    (["/s/pytest_torchcompile/oracle/reference_runs.py"],
     "; it ran for the float64 run that numbers are held against"),
])
def test_a_time_out_says_what_ran(stacks, what):
    """As far as the stacks say it; the option that gives more time is named with a number."""
    text = "\n".join(f'  File "{file}", line 3 in f' for file in stacks)
    failure = Failure("timeout", "rank 1: no result after 25 s", evidence=text)
    (problem,) = judge_observation(Observation("c", failure=failure), ["compiles"], {})["compiles"].problems
    assert problem.message == f"rank 1: no result after 25 s{what}"
    assert problem.hint == ("raise --compile-timeout (--compile-timeout=50 gives it twice the time) if the cell is "
                            "just slow")
    in_check = timeout_problem("killed", '  File "/s/pytest_torchcompile/checks/worth.py", line 44 in measure')
    assert (in_check.message, in_check.hint) == ("killed; it ran for the check worth",
                                                 "raise --compile-timeout if the cell is just slow")


def planned(checks=()):
    return SimpleNamespace(outcome="xfail", checks=checks, reason="known", issue="a/b#1", rule="m.yaml:3",
                           expired=None)


def judged(**verdicts):
    return {name: Judgement(v, () if v == "pass" else (Problem("p"),)) for name, v in verdicts.items()}


@pytest.mark.parametrize(("before", "checks", "after"), [
    ({"a": "fail", "b": "pass"}, (), {"a": "xfail", "b": "pass"}),
    ({"a": "pass", "b": "pass"}, (), {"a": "xpass", "b": "xpass"}),
    ({"a": "fail", "b": "pass"}, ("b",), {"a": "fail", "b": "xpass"}),
    ({"a": "crash", "b": "crash"}, (), {"a": "xfail", "b": "xfail"}),
    ({"a": "error", "b": "error"}, (), {"a": "error", "b": "error"}),
    ({"a": "skip", "b": "skip"}, (), {"a": "skip", "b": "skip"}),
])  # fmt: skip
def test_xfail(before, checks, after):
    """Strict: an expected failure that did not come fails; an error or a skip is never an expected failure."""
    found = apply_xfail(judged(**before), planned(checks))
    assert {name: j.verdict for name, j in found.items()} == after


@pytest.mark.parametrize(("verdict", "told"), [("fail", ""), ("timeout", "; this time timeout: p"),
                                               ("crash", "; this time crash: p")])
def test_what_came_in_place_of_an_expected_failure_is_told(verdict, told):
    """A rule about graph breaks explains no time-out."""
    found = apply_xfail(judged(a=verdict), planned())
    assert found["a"].note == f"known (a/b#1){told}"


@pytest.mark.parametrize(("check", "message", "hidden"), [
    ("equivalence", "output: 0.3 is 12 times its rounding noise", False),
    ("gradients", "rank 1: gradient of w: wrong", False),
    ("safe_fallback", "the running mean is not as it was", False),
    ("equivalence", "nothing to judge: the compiled run raised ValueError", True),
    ("equivalence", "output: stride is (4, 1) in eager, (1, 4) compiled", True),
    ("graph_breaks", "graph break (1 place(s))", True),
])
def test_an_xfail_that_names_no_checks_hides_no_wrong_numbers(check, message, hidden):
    """Nor is it called stale beside them: what it expects may have come too."""
    before = {check: Judgement("fail", (Problem(message, hint="look"),)), "recompiles": Judgement("pass")}
    found = apply_xfail(before, planned())
    assert {name: each.verdict for name, each in found.items()} == {check: "xfail" if hidden else "fail",
                                                                    "recompiles": "pass"}
    if not hidden:
        assert found[check].problems[0].hint == (
            "look; the xfail of m.yaml:3 names no checks, so it hides no wrong numbers; if these are known, give it "
            f"`checks: [{check}]`")
    assert apply_xfail(before, planned((check,)))[check].verdict == "xfail"


@pytest.mark.parametrize(("checks", "told"), [((), "ab"), (("a",), "a"), (("b",), "b")])
def test_an_xfail_whose_day_is_over_is_named_at_the_failure(checks, told):
    """Who reads the failure did nothing: the day came."""
    rule = SimpleNamespace(until=datetime.date(2026, 5, 1), where="m.yaml:3", reason="known", checks=checks)
    over = SimpleNamespace(outcome="run", expired=rule)
    found = apply_xfail(judged(a="fail", b="crash", c="pass"), over)
    assert {name: each.verdict for name, each in found.items()} == {"a": "fail", "b": "crash", "c": "pass"}
    hint = "it was expected to fail until 2026-05-01 (m.yaml:3: known); that day is over"
    assert {name for name, each in found.items() if each.problems and each.problems[0].hint == hint} == set(told)


def test_an_incomplete_selection_proves_no_unexpected_pass():
    """Where -k left checks of the cell out, the ones that ran may pass."""
    assert apply_xfail(judged(a="pass"), planned(), complete=False)["a"].verdict == "pass"


def test_worst():
    """A cell is as bad as its worst check."""
    assert worst(["pass", "xfail", "pass"]) == "xfail"
    assert worst(["fail", "crash"]) == "crash"
    assert worst([]) == "not_run"


# the checks of the production layer


SMOKETEST = {"raised": None, "ok": True, "reason": "2 step(s) ran", "phase": "", "step": 0, "seconds": 1.0, "graphs": 2,
             "compiles": 0, "evidence": "", "notes": []}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"raised": "InductorError"}, "nothing to judge: the compiled run raised InductorError", ""),
    ({"ok": False, "reason": "output: error is 9", "phase": "comparison", "step": 2, "evidence": "at line 1"},
     "the smoketest says False: output: error is 9 (step 2, comparison)", "at line 1"),
    ({"ok": False, "reason": "nothing was compiled", "phase": "forward"},
     "the smoketest says False: nothing was compiled (forward)", ""),
    ({"compiles": 3}, "3 compile(s) in the smoketest of a model that was warm", ""),
    ({"ok": False, "reason": "no", "phase": "state", "compiles": 3}, "the smoketest says False: no (state)", ""),
])  # fmt: skip
def test_the_smoketest_of_a_cell(changes, message, evidence):
    """One problem for each: the run, what the smoketest says, what it compiled."""
    judge_it = load("smoketest").judge
    assert not list(judge_it(SMOKETEST, {}))
    (problem,) = judge_it(SMOKETEST | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)
    assert ("an optimiser's step or another seed" in problem.hint) is message.startswith("3 compile")


FALLBACK = {"error": None, "original": True, "changed": [], "differs": [], "met": [1, 2],
            "log": ["fallback_eager", "fallback_eager"]}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"error": "RuntimeError: no"}, "maybe_compile let a failure of the compiler through: RuntimeError: no", ""),
    ({"error": "RuntimeError: no", "met": [], "log": []},
     "maybe_compile let a failure of the compiler through: RuntimeError: no", ""),
    ({"met": [1, 0]}, "nothing was proven: the model met no outage, because nothing of it was to be compiled",
     "attempts with and without a sample batch: [1, 0]"),
    ({"met": [0, 1], "original": False, "log": ["fallback_eager"]},
     "nothing was proven: the model met no outage, because nothing of it was to be compiled",
     "attempts with and without a sample batch: [0, 1]"),
    ({"original": False}, "with a sample batch that does not compile, maybe_compile returned something else than the "
     "model", ""),
    ({"changed": ["inner.weight", "calls"]}, "the attempt left 2 thing(s) changed", "inner.weight\ncalls"),
    ({"differs": ["output: differs"]}, "after the fallback, output: differs",
     "beside the same call of the eager model"),
    ({"log": ["fallback_eager"]}, "the log says fallback_eager; expected fallback_eager for each attempt", ""),
    ({"log": []}, "the log says nothing; expected fallback_eager for each attempt", ""),
    ({"log": ["fallback_eager", "compiled"]},
     "the log says fallback_eager, compiled; expected fallback_eager for each attempt", ""),
])  # fmt: skip
def test_the_fallback_of_a_cell(changes, message, evidence):
    """What maybe_compile let through, did not meet, returned, left changed, computed, and logged."""
    judge_it = load("safe_fallback").judge
    assert not list(judge_it(FALLBACK, {}))
    (problem,) = judge_it(FALLBACK | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)


@pytest.mark.parametrize("changes", [{"met": [0, 2]}, {"met": [1, 0]}, {"met": [0, 0]}, {"error": "RuntimeError: no"}])
def test_harm_is_told_of_an_attempt_that_met_no_outage_or_raised(changes):
    """First of all, for an entry that allows what is milder must not excuse it."""
    harm = {"changed": ["a"], "differs": ["output: differs"]}
    found = [problem.message for problem in load("safe_fallback").judge(FALLBACK | harm | changes, {})]
    how = "after the fallback"
    if changes in ({"met": [1, 0]}, {"met": [0, 0]}):
        how = "without a fallback"
    assert found[:2] == ["the attempt left 1 thing(s) changed", f"{how}, output: differs"]
    assert all(computes_wrong_numbers("safe_fallback", message) for message in found[:2])
    assert found[2].startswith(("nothing was proven: ", "maybe_compile let a failure"))


@pytest.mark.parametrize(("met", "log"), [([0, 2], []), ([1, 0], []), ([1, 0], ["compiled"])])
def test_an_outage_that_was_met_once_still_has_its_record(met, log):
    """What was met is judged, whatever the other attempt met."""
    first, second = load("safe_fallback").judge(FALLBACK | {"met": met, "log": log}, {})
    assert first.message.startswith("nothing was proven: ")
    assert second.message.startswith("the log says ")


def test_a_fallback_that_is_wrong_in_every_way():
    """One problem does not hide the next; of several differences each is one."""
    wrong = {"original": False, "changed": ["a"], "differs": ["b: differs", "c: differs"], "log": []}
    assert len(list(load("safe_fallback").judge(FALLBACK | wrong, {}))) == 5


STABLE = {"raised": None, "sizes": 2, "calls": 4, "late": [], "between": [], "unpadded": ""}
COVERED = {"dim": "S", "least": 2, "most": 32, "largest": 32, "graphs": 2}
PADDED = {"dim": "S", "length": 5, "bucket": 8, "graphs": 1, "compiles": [], "error": None}
LATE = {"function": "forward", "file": "m.py", "line": 3, "compile_id": "0/1", "kind": "recompile", "cause": "shape",
        "reason": "size mismatch", "what": "x.size(0)", "expected": "4", "actual": "8", "during": "call 1, again"}
FIRST = LATE | {"kind": "first", "cause": "", "reason": ""}


@pytest.mark.parametrize(("changes", "message", "evidence"), [
    ({"raised": "InductorError", "calls": 0}, "nothing to judge: the compiled run raised InductorError", ""),
    ({"calls": 0}, "nothing to judge: no size was run a second time", ""),
    ({"late": [LATE]}, "forward is compiled again in call 1, in the third pass, after all 2 sizes were met",
     "m.py:3  shape: size mismatch"),
    ({"covered": [COVERED | {"largest": 40}]}, "S=33 to 40 fit no bucket: the largest is 32", ""),
    ({"between": [PADDED, PADDED | {"error": "RuntimeError in forward: no", "graphs": 0}]},
     "S=5, padded to 8: the compiled model raised RuntimeError in forward: no", ""),
    ({"between": [PADDED | {"graphs": 0}]}, "S=5, padded to 8: nothing of it ran compiled", ""),
    ({"between": [PADDED | {"compiles": [LATE]}]},
     "forward is compiled for S=5, padded to 8, after the bucket itself was met", "m.py:3  shape: size mismatch"),
    ({"between": [PADDED | {"compiles": [FIRST]}]},
     "forward is compiled for S=5, padded to 8, after the bucket itself was met", "m.py:3  a first compile"),
])  # fmt: skip
def test_the_shapes_of_a_cell(changes, message, evidence):
    """Nothing may be compiled once every size was met, between two buckets neither."""
    judge_it = load("shape_stability").judge
    assert not list(judge_it(STABLE | {"between": [PADDED], "covered": [COVERED]}, {}))
    (problem,) = judge_it(STABLE | changes, {})
    assert (problem.message, problem.evidence) == (message, evidence)
    assert ("mark_dynamic" in problem.hint) is ("shape: size" in evidence)
    assert (problem.file, problem.line) == (("m.py", 3) if evidence else ("", 0))


def test_late_recompiles_can_be_allowed():
    """The limit is how many there may be; beyond it each is told."""
    judge_it = load("shape_stability").judge
    assert not list(judge_it(STABLE | {"late": [LATE]}, {"late_recompiles": 1}))
    problems = list(judge_it(STABLE | {"late": [LATE, LATE]}, {"late_recompiles": 1}))
    assert [problem.message for problem in problems] == [
        "forward is compiled again in call 1, in the third pass, after all 2 sizes were met (2 times, 1 allowed)"] * 2


def _rank(*compiles, **more):
    """The section ``rank_divergence`` of one rank."""
    return {"raised": None, "graphs": 1, "runs": 4, "graph_breaks": 0, "compiles": list(compiles),
            "collectives": {"group of 2": 7}} | more


def _compile(during="call 1", **more):
    return {"during": during, "function": "Net.forward", "file": "m.py", "line": 3, "compile_id": "0/0",
            "kind": "first", "cause": "", "reason": ""} | more


AGAIN = {"kind": "recompile", "cause": "shape", "reason": "size mismatch", "compile_id": "0/1"}


@pytest.mark.parametrize(("ranks", "alike", "text"), [
    ([_rank(_compile()), _rank(_compile())], True, ""),
    ([_rank(_compile()), _rank(_compile(), _compile("call 2", **AGAIN))], True,
     "rank 1 compiled otherwise than rank 0 in call 2: 1 and 0 compile(s)"),
    ([_rank(_compile()), _rank(_compile(compile_id="0/1"))], True, "rank 1 compiled otherwise than rank 0 in call 1"),
    ([_rank(_compile(ops=11)), _rank(_compile(ops=12))], True, "rank 1 compiled otherwise than rank 0 in call 1"),
    ([_rank(_compile(ops=11)), _rank(_compile(ops=12))], False, ""),
    ([_rank(_compile()), _rank(_compile(), runs=5)], True,
     "the ranks differ in their number of runs of compiled graphs: rank 0 has 4, rank 1 has 5"),
    ([_rank(_compile()), _rank(_compile(), graphs=2)], True, "their number of graphs: rank 0 has 1, rank 1 has 2"),
    ([_rank(_compile()), _rank(_compile(), collectives={"group of 2": 8})], True,
     "different numbers of collectives: rank 0: 7 in group of 2; rank 1: 8 in group of 2"),
    ([_rank(_compile()), _rank(_compile("call 2", function="Other.forward"), runs=9)], False, ""),
    ([_rank(_compile()), _rank(_compile("call 2", **AGAIN))], False, "rank 1 compiled otherwise than rank 0 in call 2"),
    ([_rank(_compile()), None], True, "nothing to judge: rank 1 has recorded nothing"),
    ([_rank(graphs=0), _rank(graphs=0)], True, "nothing to judge: no rank has compiled a graph"),
    ([_rank(_compile())], True, "nothing to judge: the observation is not of several ranks"),
])  # fmt: skip
def test_ranks_that_compile_otherwise(ranks, alike, text):
    """Of ranks that run one program everything agrees; of stages of a pipeline all compile again, or none."""
    found = [problem.message for problem in load("rank_divergence").judge({"ranks": ranks, "alike": alike}, {})]
    assert any(text in message for message in found) if text else found == []


def _two_ranks(**more):
    """An observation of two ranks, the second of which compiled once more."""
    sections = {"compiles": section(), "graph_breaks": {"raised": None, "graphs": 1, "graph_breaks": []},
                "rank_divergence": {"alike": True, "ranks": [_rank(_compile()), _rank(_compile(), graphs=2)]}}
    return Observation("c", sections, ranks=[{"failure": None, "sections": sections}], **more)


def test_what_ranks_differ_in_is_no_single_rank_s():
    """The check that compares ranks names them itself; its problems are not said to be those of rank 0."""
    (problem,) = judge_observation(_two_ranks(), ["rank_divergence"], {})["rank_divergence"].problems
    assert problem.message.startswith("the ranks differ in their number of graphs: rank 0 has 1, rank 1 has 2")


@pytest.mark.parametrize(("several", "hint"), [(False, "--compile-inprocess"), (True, "TORCH_LOGS_OUT=torch.log")])
def test_a_hint_that_can_be_followed(several, hint):
    """Cells of several ranks do not run in pytest's own process, so after a crash nobody is sent there."""
    failure = Failure("crash", "rank 1: the process ended by SIGSEGV")
    seen = _two_ranks(failure=failure) if several else Observation("c", failure=failure)
    (problem,) = judge_observation(seen, ["compiles"], {})["compiles"].problems
    assert hint in problem.hint
    assert ("--compile-inprocess" in problem.hint) is not several


def recompile(cause="shape", function="f", **found):
    """A recompile as a section has it."""
    return {"function": function, "file": "m.py", "line": 3, "compile_id": "0/1", "kind": "recompile", "reason": "why",
            "cause": cause, "during": "call 2", **found}


def recompiling(*recompiles, dynamic="auto", sizes=2, **more):
    """A section of `recompiles`."""
    return {"raised": None, "graphs": 1, "recompiles": list(recompiles), "sizes": sizes, "special": 0, "bound": {},
            "dynamic": dynamic, **more}


def test_recompiles_that_no_size_explains_are_allowed_per_function():
    """The number to write is that of the worst function, not the cell's total with all that sizes explain."""
    values = [recompile("value", expected="1", actual=str(n), line=n) for n in (2, 3)]
    section = recompiling(recompile(), *values, recompile("value", function="g", expected="1", actual="2"))
    judge = load("recompiles").judge
    (problem,) = judge(section, {})
    assert problem.message == "3 recompile(s) that no size explains"
    assert problem.hint.endswith("if it is meant, allow it by the rule `- limits: {unexplained: 1}`")
    one = [recompile("value", expected="1", actual=str(n), what=f"v{n}", reason="") for n in (2, 3)]
    (problem,) = judge(recompiling(recompile(), *one), {"unexplained": 1})
    assert problem.hint.startswith("pass v3 as a tensor"), "the first one is allowed"
    assert problem.hint.endswith("`- limits: {unexplained: 2}`")
    assert not list(judge(recompiling(recompile(), *one), {"unexplained": 2}))


def test_the_hint_is_of_the_recompile_over_the_limit():
    """The sizes explain the first; what comes after it is decided by the code."""
    first = recompile(what="x.size(1)", expected="20", actual="40")
    second = recompile("symbolic", what="x.size(1)", expected="3*x.size(1) < 256", actual="90",
                       reason="3*x.size(1) < 256", source="if big.shape[1] < 256:", at="m.py:7")
    (problem,) = load("recompiles").judge(recompiling(first, second, sizes=3), {})
    assert problem.message == "2 recompile(s), 1 explained by 3 size(s) with dynamic=auto"
    assert problem.hint.startswith("the code decides by a size (if big.shape[1] < 256:, m.py:7)")
    assert "asked by `if big.shape[1] < 256:` at m.py:7" in problem.evidence
    assert not list(load("recompiles").judge(recompiling(first, second, sizes=3), {"unexplained": 1}))
    (problem,) = load("recompiles").judge(recompiling(first, second, sizes=3), {"recompiles": 1})
    assert problem.hint.startswith("the code decides by a size")
    assert problem.hint.endswith("`- limits: {recompiles: 2}`")


def test_a_size_that_equals_another_one():
    """Torch takes equal sizes for one; what is advised is another size, and nothing that is done already."""
    found = recompile(what="ids.size(1)", expected="16", actual="24")
    judge = load("recompiles").judge
    (problem,) = judge(recompiling(found, dynamic="dynamic", sizes=3, equal={"S": {"16": "head_dim"}}), {})
    assert problem.hint.startswith("S was 16 when it was compiled, and so is head_dim: torch takes equal sizes for "
                                   "one. Give S a size that nothing else in the model has, such as 17")
    (problem,) = judge(recompiling(found, dynamic="dynamic", sizes=3), {})
    assert "dynamic=True" not in problem.hint


def test_classes_that_differ_though_their_names_do_not():
    """As parametrize makes them: one class for each module, all of one name."""
    found = recompile("type", what="type(self.conv)", expected="ParametrizedConv1d", actual="ParametrizedConv1d")
    (problem,) = load("recompiles").judge(recompiling(found), {})
    assert "type(self.conv)  ParametrizedConv1d -> another class of the name ParametrizedConv1d" in problem.evidence
    assert problem.hint.startswith("ParametrizedConv1d is made anew for each module")


def broke(line, **found):
    """A graph break as a section has it."""
    return {"reason": f"broke at {line}", "gb_id": "gb0001", "file": "m.py", "line": line, "owner": "mine", **found}


def test_the_break_that_made_torch_give_up_a_frame_is_told_first():
    """With its line of code and its callers; then what was given up because of it, and the rule that allows all."""
    breaks = [broke(9, reason="Encountered graph break that we cannot resume from.", whole_frame=True,
                    gave_up="M.forward"),
              broke(4, hint="Avoid it.", source="x.item()", stack=("m.py:4 in f", "m.py:9 in M.forward"))]
    cause, after = load("graph_breaks").judge({"raised": None, "graphs": [1], "graph_breaks": breaks}, {})
    assert cause.message == "graph break (2 place(s), 0 allowed): broke at 4"
    assert cause.evidence == "m.py:4 (mine)  gb0001\n    x.item()\ncalled by m.py:9 in M.forward"
    assert cause.hint == "Avoid it; if it is meant, allow it by the rule `- limits: {graph_breaks: 2}`"
    assert after.line == 9
    assert after.evidence.endswith("all of M.forward ran eagerly because of it")


@pytest.mark.parametrize("check", ["equivalence", "gradients", "training_steps"])
def test_a_share_of_decided_leaves_can_be_asked_for(check):
    """What noise leaves undecided passes by default, and is counted with the verdict."""
    seen = {"raised": None, "compared": 63, "undecided": 18, "leaves": [], "vacuous": None, "nonzero": 1, "steps": 3,
            "notes": ["output: nothing can be said"]}
    assert not list(load(check).judge(seen, {}))
    assert load(check).remark(seen) == "63 of 81 leaves were decided"
    (problem,) = load(check).judge(seen, {"decided": 1})
    assert problem.message == "63 of 81 leaves were decided, a share of 0.7777; 1 wanted"
    assert "output: nothing can be said" in problem.evidence
    assert problem.hint.endswith("`- limits: {decided: 0.7777}`")
    assert not list(load(check).judge(seen, {"decided": 0.7777}))


def test_frames_that_torch_made_are_told_by_what_they_are_the_rest_of():
    """After the break that made torch give them up; the line is that of the function, not of the break."""
    reason = "WON'T CONVERT torch_dynamo_resume_in__pad1d_at_150 /library/encodec.py line 150"
    breaks = [broke(138, reason=reason), broke(150, reason="Data-dependent branching")]
    cause, after = load("graph_breaks").judge({"raised": None, "graphs": [1], "graph_breaks": breaks}, {})
    assert cause.line == 150
    assert after.message.endswith(": the rest of _pad1d after the graph break at line 150 was given up")


def test_a_raised_error_names_the_users_line():
    """The traceback of a graph has generated code alone."""
    found = section(error=ERROR, raised_at=["m.py", 7, "x.view(-1)"])
    (problem,) = load("compiles").judge(found, {})
    assert (problem.file, problem.line) == ("m.py", 7)
    assert problem.evidence.startswith("the operator comes from m.py:7\n    x.view(-1)\n")


def test_that_inductor_works_where_aot_eager_raises_is_said():
    """Where it does."""
    stages = {"backend": "aot_eager", "stages": [["eager", "agrees"]], "beyond": [["inductor", "agrees"]]}
    (problem,) = load("compiles").judge(section(error=ERROR, located=stages), {})
    assert problem.evidence.endswith("; inductor works where aot_eager raises")
    stages["beyond"] = [["inductor", "raises RuntimeError"]]
    (problem,) = load("compiles").judge(section(error=ERROR, located=stages), {})
    assert "works where" not in problem.evidence


def test_recompiles_beyond_the_sizes_are_counted_with_those_that_no_size_explains():
    """So that the number in the message is the number to write."""
    found = [recompile(), recompile(actual="3"), recompile("value", expected="1", actual="2")]
    (problem,) = load("recompiles").judge(recompiling(*found), {})
    assert problem.message == "1 recompile(s) that no size explains, and 1 of f more than its sizes do"
    assert problem.hint.endswith("`- limits: {unexplained: 2}`")


def test_a_break_in_a_frame_that_was_given_up_is_a_cause():
    """Torch gave the frame up for it, and nothing else broke before."""
    breaks = [broke(4, whole_frame=True, gave_up="M.forward"), broke(9)]
    found = load("graph_breaks").judge({"raised": None, "graphs": [1], "graph_breaks": breaks}, {})
    assert [problem.line for problem in found] == [4, 9]


def test_what_came_of_torchs_hint_is_said_before_it():
    """It was tried."""
    breaks = [broke(4, hint="Set x = True.", hint_tried="x = True was tried and does not help here")]
    (problem,) = load("graph_breaks").judge({"raised": None, "graphs": [1], "graph_breaks": breaks}, {})
    assert problem.hint.startswith("x = True was tried and does not help here; if it is")


def slow_guards(*costs):
    return [{"function": "forward", "file": "m.py", "line": 3, "guards": 7, "guard_microseconds": cost}
            for cost in costs]


def test_guards_that_take_long():
    """Those of all entries of one function together; only where a limit asks for it."""
    seen = section(compiles=slow_guards(30, 40))
    check = load("compiles")
    assert not list(check.judge(seen, {}))
    assert not list(check.judge(seen, {"guard_us": 70}))
    (problem,) = check.judge(seen, {"guard_us": 50})
    assert problem.message == "the guards of forward (m.py:3) take 70 µs, 50 wanted"
    assert way_of("compiles", problem.message).effect.severity == Severity.SLOW


def test_guards_that_torch_does_not_measure():
    (problem,) = load("compiles").judge(section(compiles=slow_guards(0)), {"guard_us": 50})
    assert problem.message == "the guards of all functions are unknown: this torch does not measure them"
