"""What checks make of a section: pure functions over plain data, without torch."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks import load
from pytest_torchcompile.checks.graph_breaks import _short_reason
from pytest_torchcompile.checks.recompiles import _count_sizes, _dim_that_changed, _values_of_dims, explained_recompiles
from pytest_torchcompile.checks.shape_stability import _call_and_pass, _next_size
from pytest_torchcompile.dims import Dim

COMPILED = {"function": "forward", "file": "net.py", "line": 5, "compile_id": "0/0", "kind": "first", "cause": "",
            "reason": "", "during": "call 1"}


def judged(check, section, **limits):
    return list(load(check).judge(section, limits))


def messages(check, section, **limits):
    return [problem.message for problem in judged(check, section, **limits)]


# recompiles


@pytest.mark.parametrize(("dynamic", "sizes", "special", "expected"), [
    ("static", 1, 0, 0), ("static", 4, 0, 3), ("static", 4, 2, 3),
    ("auto", 1, 0, 0), ("auto", 2, 0, 1), ("auto", 9, 0, 1), ("auto", 3, 1, 2), ("auto", 2, 1, 1),
    ("dynamic", 1, 0, 0), ("dynamic", 9, 0, 0), ("dynamic", 3, 1, 1), ("dynamic", 2, 2, 1),
    ("static", 0, 0, 0), ("auto", 0, 0, 0), ("dynamic", 0, 0, 0),
])
def test_recompiles_that_sizes_explain(dynamic, sizes, special, expected):
    """Static: a graph for each size. Auto: two. Dynamic: one. A size of 0 or 1 is always a graph of its own."""
    assert explained_recompiles(dynamic, sizes, special) == expected


@pytest.mark.parametrize(("calls", "sizes", "special"), [
    ([{"B": 2}, {"B": 2}], 1, 0), ([{"B": 2}, {"B": 3}], 2, 0), ([{"B": 1}, {"B": 3}], 2, 1),
    # What never varies stays a constant anyway.
    ([{"B": 1, "S": 4}, {"B": 1, "S": 8}], 2, 0),
    ([{"B": 1, "S": 4}, {"B": 2, "S": 0}, {"B": 2, "S": 4}], 3, 2), ([{}], 1, 0), ([], 0, 0),
])
def test_sizes_of_calls(calls, sizes, special):
    """Different ones, and those with a 0 or 1 where a dimension varies."""
    assert _count_sizes(calls) == {"sizes": sizes, "special": special}


def test_values_of_dims():
    """Each once, in order."""
    assert _values_of_dims([{"B": 8, "S": 1}, {"B": 2, "S": 1}]) == {"B": [2, 8], "S": [1]}


@pytest.mark.parametrize(("expected", "actual", "cause", "dim"), [
    ("4", "8", "value", "S"), ("8", "4", "value", "S"), ("4", "9", "value", ""), ("4", "4", "value", ""),
    ("4", "8", "shape", ""), ("4", "", "value", ""),
])
def test_a_dim_that_is_called_as_a_number(expected, actual, cause, dim):
    """Both values are among those of one dim."""
    recompile = {"cause": cause, "expected": expected, "actual": actual}
    assert _dim_that_changed(recompile, {"B": [2], "S": [4, 8]}) == dim


# graph_breaks


def broke(reason, line=1):
    return {"reason": reason, "gb_id": "", "file": "net.py", "line": line, "hint": "", "owner": "mine"}


def breaks(*records):
    return {"graph_breaks": list(records), "raised": None, "graphs": 1}


def test_the_cause_of_a_break_comes_first():
    """Torch gives up a frame because of a break inside of it, and tells both."""
    given_up = broke("WON'T CONVERT forward net.py line 3", line=3)
    assert [problem.line for problem in judged("graph_breaks", breaks(given_up, broke("print", 7)))] == [7, 3]


def test_breaks_that_are_allowed():
    """At most so many places; the rule that would allow them all is told."""
    two = breaks(broke("print"), broke("item"))
    assert not judged("graph_breaks", two, graph_breaks=2)
    problem, _ = judged("graph_breaks", two, graph_breaks=1)
    assert problem.message == "graph break (2 place(s), 1 allowed): print"
    assert problem.hint == "if it is meant, allow it by the rule `- limits: {graph_breaks: 2}`"
    problem, _ = judged("graph_breaks", two | {"coverage_needed": 0.4444}, graph_breaks=1)
    assert problem.hint == ("if it is meant, allow it by the rule `- limits: {graph_breaks: 2}` and, for torch gave up "
                            "whole functions because of it, `- limits: {coverage: 0.4444}` (both lines)")
    problem, _ = judged("graph_breaks", two | {"whole": True})
    assert problem.hint == ("no limit allows a break here, for the cell takes the whole model as one graph: mend the "
                            "line, or take such cells out by a rule `- exclude:` or `- xfail:`, with a reason")
    problem, _ = judged("graph_breaks", two | {"graphs": 0})
    assert problem.hint == ("no limit makes this cell pass, for nothing is compiled: put what breaks into a function "
                            "under torch.compiler.disable, so that the rest is compiled, or take such cells out by a "
                            "rule `- exclude:` or `- xfail:`, with a reason")


@pytest.mark.parametrize(("section", "message"), [
    ({"graphs": 0}, "no graph was compiled"), ({"raised": "ValueError"}, "ValueError"),
])
def test_no_graph_has_no_breaks(section, message):
    """Which is no praise."""
    (problem,) = judged("graph_breaks", breaks() | section)
    assert problem.message.startswith("nothing to judge")
    assert message in problem.message


def test_a_rest_that_was_given_up():
    """By the function that the user has written, not by the name that torch has made for its rest."""
    reason = "WON'T CONVERT torch_dynamo_resume_in_forward_at_12 net.py line 3\nmore"
    assert _short_reason(broke(reason)) == "the rest of forward after the graph break at line 12 was given up"
    assert _short_reason(broke("print\nmore")) == "print"
    not_resumed = broke("Encountered graph break that we cannot resume from. Compiling up to the previous ...")
    assert _short_reason(not_resumed).startswith("Encountered graph break")
    assert _short_reason(not_resumed | {"explanation": "Dynamo does not support RNN, GRU, or LSTM."}) == (
        "Dynamo does not support RNN, GRU, or LSTM; torch cannot resume after it, so the rest of the function ran "
        "eagerly")


def test_the_evidence_of_a_break():
    """The place, its line of code, what ran eagerly because of it, and who called."""
    record = broke("print", 7) | {"gb_id": "gb0025", "source": "print(x)", "whole_frame": True, "gave_up": "forward",
                                  "stack": ["net.py:7 forward", *(f"net.py:{line} outer" for line in range(20, 30))]}
    (problem,) = judged("graph_breaks", breaks(record))
    first, source, eager, *callers = problem.evidence.splitlines()
    assert (first, source.strip()) == ("net.py:7 (mine)  gb0025", "print(x)")
    assert eager == "all of forward ran eagerly because of it"
    assert callers == [f"called by net.py:{line} outer" for line in range(20, 26)]


def test_a_hint_that_was_tried():
    """What came of it is told before torch's hint."""
    record = broke("item") | {"hint": "set capture_scalar_outputs.", "hint_tried": "it was tried and does not help"}
    (problem,) = judged("graph_breaks", breaks(record))
    advice = "keep the number a tensor, by torch.where, or by torch.cond where it decides a branch"
    assert problem.hint.startswith(f"it was tried and does not help: {advice}; if it is")


# memory


def grown(leaked, eager=0, **changes):
    return {"raised": None, "call": "call 1", "device": "cpu", "graph_runs": 3, "eager_bytes": eager,
            "leaked_bytes": leaked} | changes


def test_bytes_that_steps_leave():
    """More than an eager step leaves, and more than the limit allows beside it."""
    (problem,) = judged("memory", grown(5_000_000, eager=1_000), leaked_bytes=100)
    assert problem.message == "each step leaves 5,000,000 bytes behind, an eager one 1,000"
    assert problem.evidence == "warm steps of call 1; at most 1,100 may be left"
    assert not judged("memory", grown(1_100, eager=1_000), leaked_bytes=100)
    assert judged("memory", grown(1_101, eager=1_000), leaked_bytes=100)


def test_memory_of_steps_that_ran_nothing_compiled():
    """It proves nothing, however little they leave."""
    assert messages("memory", grown(0, graph_runs=0)) == [
        "nothing to judge: no compiled graph ran in the steps that were measured"]


# smoketest


@pytest.mark.parametrize(("section", "expected"), [
    ({"ok": True, "compiles": 0}, []),
    ({"ok": True, "compiles": 2}, ["2 compile(s) in the smoketest of a model that was warm"]),
    ({"ok": False, "reason": "it differs", "phase": "comparison", "step": 2},
     ["the smoketest says False: it differs (step 2, comparison)"]),
    ({"ok": False, "reason": "no memory", "phase": "state"}, ["the smoketest says False: no memory (state)"]),
], ids=["fine", "compiled anew", "in a step", "before the first"])
def test_smoketest(section, expected):
    """Where it failed, or that a warm model was compiled again."""
    assert messages("smoketest", {"raised": None} | section) == expected


# rank_divergence


def rank(**changes):
    return {"raised": None, "compiles": [COMPILED], "graphs": 1, "runs": 2, "graph_breaks": 0,
            "collectives": {"dp": 3}} | changes


def ranks(*each, alike=True):
    return {"ranks": list(each), "alike": alike}


def test_ranks_that_do_the_same():
    """Nothing is told of them."""
    assert not judged("rank_divergence", ranks(rank(), rank(), rank()))


@pytest.mark.parametrize(("changes", "message"), [
    ({"graphs": 2}, "the ranks differ in their number of graphs: rank 0 has 1, rank 1 has 2"),
    ({"runs": 3}, "the ranks differ in their number of runs of compiled graphs: rank 0 has 2, rank 1 has 3"),
    ({"graph_breaks": 1}, "the ranks differ in their number of graph breaks: rank 0 has 0, rank 1 has 1"),
    ({"collectives": {"dp": 3, "tp": 1}},
     "the ranks began different numbers of collectives: rank 0: 3 in dp; rank 1: 3 in dp, 1 in tp"),
    ({"collectives": {}}, "the ranks began different numbers of collectives: rank 0: 3 in dp; rank 1: none"),
])
def test_counts_that_differ(changes, message):
    """Each with the number of every rank; of stages of a pipeline they do differ."""
    assert messages("rank_divergence", ranks(rank(), rank(**changes))) == [message]
    assert not judged("rank_divergence", ranks(rank(), rank(**changes), alike=False))


def test_a_compile_of_one_rank_alone():
    """The first call in which that is so, for what comes after may only follow from it."""
    late, later = COMPILED | {"during": "call 2", "compile_id": "0/1"}, COMPILED | {"during": "call 3"}
    (problem,) = judged("rank_divergence", ranks(rank(), rank(compiles=[COMPILED, late, later])))
    assert problem.message == "rank 1 compiled otherwise than rank 0 in call 2: 1 and 0 compile(s)"
    assert problem.evidence.splitlines() == ["rank 0: compiled nothing", "rank 1: forward net.py:5  0/1 first"]
    assert (problem.file, problem.line) == ("net.py", 5)


@pytest.mark.parametrize(("kind", "told"), [("first", 0), ("recompile", 1)])
def test_unlike_ranks(kind, told):
    """Each compiles a program of its own: only whether all or none compile again is asked."""
    other = COMPILED | {"kind": kind, "function": "stage_1"}
    assert len(judged("rank_divergence", ranks(rank(), rank(compiles=[other]), alike=False))) == told


# shape_stability


@pytest.mark.parametrize(("label", "text"), [
    ("call 1 (B=4), with other values", "call 1 (B=4), in the second pass"),
    ("call 1, once more", "call 1, in the second pass"), ("call 2, again", "call 2, in the third pass"),
    ("call 2", "call 2"),
])
def test_passes_in_words(label, text):
    """As the label of a call ends."""
    assert _call_and_pass(label) == text


@pytest.mark.parametrize(("size", "step", "expected"), [(16, 1, 24), (16, -1, 8), (30, 1, 32), (9, -1, 8)])
def test_the_next_size_that_a_dim_allows(size, step, expected):
    """Above or below, in its multiples."""
    assert _next_size(Dim(buckets=(16, 32), multiple_of=8), size, step) == expected


def between(**changes):
    return {"dim": "S", "length": 20, "bucket": 32, "error": "", "graphs": 1, "compiles": []} | changes


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, []), ({"error": "RuntimeError"}, ["S=20, padded to 32: the compiled model raised RuntimeError"]),
    ({"graphs": 0}, ["S=20, padded to 32: nothing of it ran compiled"]),
    ({"compiles": [COMPILED]}, ["forward is compiled for S=20, padded to 32, after the bucket itself was met"]),
])
def test_lengths_between_buckets(changes, expected):
    """Padded they are the bucket, for which there is a graph already."""
    section = {"raised": None, "calls": 2, "sizes": 2, "late": [], "between": [between(**changes)]}
    assert messages("shape_stability", section) == expected


# Of a cell whose code was compiled and ran.
PROVEN = {"compiles": [], "graphs": [{"runs": 2}], "eager_frames": [], "lost": [], "coverage": [
    {"call": "call 1", "share": 1.0, "total": 4, "outside": 0, "sites": []}],
    "all_zero": [False], "eager_all_zero": [False], "error": None}
RAN_TOO = {"tried": True, "calls": 3, "graphs": 2, "silent": [], "error": None, "call": "", "raised_at": None}
RAISED = {"type": "ValueError", "text": "no code for it", "phase": "backward", "traceback": "  the stack"}
OWN_DRAWS = "with Inductor's own random numbers, as in production,"


@pytest.mark.parametrize(("changes", "message"), [
    ({"error": RAISED, "call": "call 2 (B=4)", "raised_at": ("net.py", 7, "dropout(x)")},
     f"{OWN_DRAWS} the compiled run raised ValueError in backward of call 2 (B=4): no code for it"),
    ({"error": RAISED, "call": "call 1"}, f"{OWN_DRAWS} the compiled run raised ValueError in backward of call 1: no "
     "code for it"),
    ({"graphs": 0}, f"{OWN_DRAWS} nothing was compiled"),
    ({"silent": ["forward"]}, f"{OWN_DRAWS} 1 function(s) silently ran eagerly"),
])
def test_what_only_production_would_meet_fails_compiles(changes, message):
    """Cells have Inductor draw eager's numbers, so that code of its own draws is compiled apart."""
    from pytest_torchcompile.checks.compiles import CHECK

    section = PROVEN | {"own_draws": RAN_TOO | changes}
    found = list(CHECK.judge(section, {}))
    assert [problem.message for problem in found] == [message]
    assert "`torch._inductor.config.fallback_random = True`" in found[0].hint
    if changes.get("raised_at"):
        assert (found[0].file, found[0].line) == ("net.py", 7)
        assert found[0].evidence.startswith("the operator comes from net.py:7\n    dropout(x)")


@pytest.mark.parametrize(("drawn", "says"), [
    (RAN_TOO, "the model draws random numbers: with Inductor's own, as production has them, 3 call(s) ran too"),
    (RAN_TOO | {"judged": True}, "the model draws random numbers: Inductor's own, as production has them; eager was "
     "given the same, so that values were compared"),
    ({"tried": False}, "the model draws random numbers, here eager's own; what Inductor makes of them by default"),
    (None, ""),
])
def test_how_random_numbers_were_drawn_is_remarked(drawn, says):
    from pytest_torchcompile.checks.compiles import CHECK

    section = PROVEN | {"own_draws": drawn}
    assert not list(CHECK.judge(section, {}))
    assert CHECK.remark(section).startswith(says)
    assert bool(CHECK.remark(section)) == bool(says)
