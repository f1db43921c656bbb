"""Why it is not faster: each cause is named from its evidence, the largest first, and a healthy model has none."""

from __future__ import annotations

import pytest

from pytest_torchcompile.checks.slow_causes import idle_remark, slow_cause, slow_causes
from pytest_torchcompile.checks.step_evidence import gpu_share, kernel_time, roof_share

PARTS = {"library": 0.1, "generated": 0.7, "operators": 0.1, "guards": 0.02, "python": 0.08}
SIDES = {"eager": {"kernels": 30}, "compiled": {"kernels": 12, "low": 5e-5}}
EAGERS = ["aten::linear", "aten::addmm", "aten::mm"]
OWN = {"share": 0.8, "function": "Net.forward", "file": "net.py", "line": 3}
BREAKS = [{"file": "models.py", "line": 7}]


def broken_by(reason):
    return [{**BREAKS[0], "reason": reason}]


def section(verdict="slower", coverage=1.0, breaks=(), kernels_share=0.4, sides=SIDES, roof=0.1, bound="memory",
            late=(), launches=None, skips=(), **parts):
    profile = {"seconds": 1.0, "waits": 0, "library_calls": {"aten::mm": 19, "aten::addmm": 8}, **PARTS, **parts}
    return {"verdict": verdict, "coverage": coverage, "breaks": list(breaks), "kernels_share": kernels_share,
            "sides": sides, "profile": profile, "roof": {"share": roof, "bound": bound, "device": "cpu"},
            "late": list(late), "launches": launches or {}, "skips": list(skips), "eager_operators": EAGERS}


def on_gpu(busy, graphs=0, generated=0.0):
    """A GPU that is busy so many of 100 ms; eager launches thirty kernels, compiled twelve."""
    compiled = {"busy_seconds": busy, "generated_seconds": generated, "graphs": graphs, "host_launches": 12}
    return {"launches": {"eager": {}, "compiled": compiled},
            "sides": {"eager": {"kernels": 30}, "compiled": {"kernels": 12, "low": 0.1}}}


@pytest.mark.parametrize(("planted", "text"), [
    ({"coverage": 0.4, "breaks": BREAKS}, "60% of the operator calls run outside of compiled graphs; the first graph "
                                          "break is at models.py:7: move what breaks the graph out of forward"),
    ({"coverage": 0.4, "breaks": broken_by("Unsupported Tensor.item() call with capture_scalar_outputs=False")},
     "60% of the operator calls run outside of compiled graphs; the first graph break is at models.py:7, where a "
     "number is taken out of a tensor (`.item()`, `float()`): keep it a tensor, or set torch._dynamo.config.capture_"),
    ({"coverage": 0.4, "breaks": broken_by("Tensor.tolist() with non-integer tensor")},
     "60% of the operator calls run outside of compiled graphs; the first graph break is at models.py:7, where numbers "
     "are taken out of a tensor (`.tolist()`): keep them a tensor"),
    ({"coverage": 0.4, "breaks": broken_by("Data-dependent branching")},
     "60% of the operator calls run outside of compiled graphs; the first graph break is at models.py:7, where the "
     "code branches on a number of a tensor: compute both sides and choose by torch.where, or write it with torch."),
    ({"coverage": 0.4, "breaks": broken_by("Call to `torch._dynamo.graph_break()`")},
     "60% of the operator calls run outside of compiled graphs; the first graph break is at models.py:7 (Call to "
     "`torch._dynamo.graph_break()`): move what breaks the graph out of forward"),
    ({"coverage": 0.4}, "60% of the operator calls run outside of compiled graphs: see the check `compiles`"),
    ({"guards": 0.3}, "Dynamo's guards take 30% of a compiled step (300000 µs): "),
    ({"python": 0.7, "breaks": BREAKS, "user_python": OWN},
     "70% of a compiled step passes in Python of the model's own, most of it in Net.forward (net.py:3), the first "
     "graph break being at models.py:7: take prints"),
    ({"python": 0.6}, "62% of a compiled step of 50 µs is what calling compiled code costs (torch's own Python and "
                      "guards around 12 kernel calls): give it larger batches, or compile a larger part at once"),
    ({"kernels_share": 1.0, "sides": {"eager": {"kernels": 12}, "compiled": {"kernels": 12}}},
     "a compiled step runs 12 kernels and an eager one 12, so nothing was fused: "),
    ({"library": 0.8}, "80% of a compiled step is library calls that eager makes too (19 x aten::mm, 8 x aten::addmm)"),
    ({"kernels_share": 1.0, "sides": {"eager": {"kernels": 12}, "compiled": {"kernels": 12}}, "library": 0.3},
     "a compiled step runs 12 kernels and an eager one 12, so nothing was fused, and library calls take 30% of it: "),
    ({"sides": {"eager": {"kernels": 90}, "compiled": {"kernels": 80}}, "seconds": 1e-3, "library": 2e-4,
      "generated": 7e-4, "kernels_share": 1.0, "guards": 0, "python": 0, "operators": 0},
     "a compiled step makes 80 kernel calls of 11.2 µs each, of which 10% is work at this machine's peak: "),
    ({"roof": 0.8}, "it runs at 80% of the memory's bandwidth of this machine (cpu), so no compiler helps: move fewer"),
    ({"roof": 0.7, "bound": "compute", "library": 0.9},
     "it runs at 70% of the peak of matrix products of this machine (cpu), so no compiler helps: compute less"),
    ({"waits": 2, "operators": 0.3, "breaks": BREAKS},
     "a step takes 2 numbers out of tensors (`.item()`, a branch on a value); the first graph break is at models"),
    (on_gpu(0.02), "the GPU works 20% of a compiled step, and else waits for 12 launches of the host: mode "
                   "reduce-overhead replays them as one CUDA graph"),
    ({**on_gpu(0.02), "skips": ["mutated inputs"]},
     "the GPU works 20% of a compiled step, and else waits for 12 launches of the host: CUDA graphs were skipped: mut"),
    ({**on_gpu(0.02), "python": 0.9, "generated": 0.05, "user_python": OWN}, "72% of a compiled step passes in Python"),
    ({**on_gpu(0.02), "python": 0.9, "generated": 0.05},
     "74% of a compiled step of 100 ms is what calling compiled code costs (torch's own Python and guards around 12 "
     "kernel calls): give it larger batches, or have its kernels replayed as one CUDA graph, by mode reduce-overhead"),
    ({**on_gpu(0.02), "python": 0.9, "generated": 0.05, "skips": ["mutated inputs"]},
     "74% of a compiled step of 100 ms is what calling compiled code costs (torch's own Python and guards around 12 "
     "kernel calls): give it larger batches; CUDA graphs were skipped: mutated inputs"),
    (on_gpu(0.09), "90% of a compiled step is library calls that eager makes too"),
    ({**on_gpu(0.03, graphs=1), "waits": 1}, "a step takes 1 number out of tensors"),
    ({"library": 0.6, "guards": 0.2}, "60% of a compiled step is library calls"),
    ({"library": 0.5, "python": 0.6, "user_python": OWN}, "60% of a compiled step passes in Python"),
    # A custom operator: what is inside of it looks like kernels that nothing fused.
    ({"library": 0.8, "generated": 0.1, "library_calls": {"mine::soft": 2, "aten::mm": 1},
      "library_seconds": {"mine::soft": 0.7, "aten::mm": 0.1}, "kernels_share": 1.0,
      "sides": {"eager": {"kernels": 40}, "compiled": {"kernels": 40}}},
     "70% of a compiled step is in custom operators, which the compiler does not look into (2 x mine::soft): only what "
     "is around them can be fused"),
    # A function of numpy's that is compiled to torch's: eager has no such operator.
    ({"library": 0.9, "library_calls": {"aten::sort": 1}, "library_seconds": {"aten::sort": 0.9},
      "kernels_share": None, "sides": {"eager": {"kernels": 0}, "compiled": {"kernels": 1}}},
     "90% of a compiled step is in operators that an eager step does not call (1 x aten::sort): compiled code has them "
     "in place of what eager runs, as of a function of numpy's, so keep that part out of the graph by torch.compiler."),
    # Another product than eager's, and the same operator in place, are eager's too.
    ({"library": 0.9, "library_calls": {"mkldnn::_linear_pointwise": 3, "aten::addmm_": 1},
      "library_seconds": {"mkldnn::_linear_pointwise": 0.5, "aten::addmm_": 0.4}},
     "90% of a compiled step is library calls that eager makes too (3 x mkldnn::_linear_pointwise, 1 x aten::addmm_)"),
])
def test_each_cause_is_named_and_the_largest_first(planted, text):
    assert slow_cause(section(**planted)).startswith(text)
    assert slow_cause(section("no difference", **planted)).startswith(text)


UNFUSED = {"kernels_share": 1.0, "sides": {"eager": {"kernels": 12}, "compiled": {"kernels": 12}}}


def test_eager_does_as_well_only_where_it_is_as_fast():
    assert slow_cause(section("no difference", **UNFUSED)).endswith("tells why, and eager does as well")
    assert slow_cause(section("slower", **UNFUSED)).endswith("`TORCH_LOGS=fusion` tells why")


def test_of_an_older_report_nobody_knows_what_eager_called():
    """So nothing is said of it, neither that it calls the same nor that it does not."""
    old = {**section(library=0.8), "eager_operators": None}
    assert slow_cause(old).startswith("80% of a compiled step is library calls (19 x aten::mm, 8 x aten::addmm)")


FRAME = {"function": "Net.forward", "file": "net.py", "line": 3, "kind": "graph_break", "resumed_at": 0,
         "reason": "Unsupported Tensor.item() call; then graph break in loop"}
SKIPPED = {**FRAME, "kind": "skipped", "reason": "torch does not compile such code"}


@pytest.mark.parametrize(("breaks", "frames", "text"), [
    (broken_by("Unsupported Tensor.item() call with capture_scalar_outputs=False"), [FRAME],
     "no operator call ran in a compiled graph: torch gave up Net.forward (net.py:3) at the graph break at models.py:7"
     ", where a number is taken out of a tensor (`.item()`, `float()`), inside a loop, where torch cannot go on: keep "
     "it a tensor, or set torch._dynamo.config.capture_scalar_outputs = True"),
    (broken_by("Attempted to wrap RNN, GRU, or LSTM"), [{**FRAME, "reason": "Attempted to wrap RNN, GRU, or LSTM"}],
     "no operator call ran in a compiled graph: torch gave up Net.forward (net.py:3) at the graph break at models.py:7"
     ", where an RNN, GRU or LSTM of torch's is called, which torch.compile leaves to eager: leave it eager and "
     "compile the parts around it, or try torch._dynamo.config.allow_rnn = True, which traces each of its steps"),
    ([{**BREAKS[0], "reason": "Failed to trace builtin operator", "hint": "Avoid calling builtin `print`."}], [FRAME],
     "no operator call ran in a compiled graph: torch gave up Net.forward (net.py:3) at the graph break at models.py:7 "
     "(Failed to trace builtin operator), inside a loop, where torch cannot go on: move what breaks the graph out of "
     "forward, as the check `graph_breaks` says; torch's hint: Avoid calling builtin `print`."),
    ([], [SKIPPED], "no operator call ran in a compiled graph: Net.forward (net.py:3) ran eagerly (torch does not "
                    "compile such code): see the check `compiles` for what stayed outside"),
    (BREAKS, [], "no operator call ran in a compiled graph: there is the graph break at models.py:7: move what breaks "
                 "the graph out of forward, as the check `graph_breaks` says"),
    ([], [], "no operator call ran in a compiled graph: torch reports no graph break and no frame that it skipped: a "
             "frame without tensor operations, torch.compiler.disable, a stance or TORCHDYNAMO_DISABLE=1 does this"),
])
def test_why_nothing_was_compiled(breaks, frames, text):
    """The line of the break or of the skipped frame, torch's reason, and what to do."""
    found = {**section("nothing was compiled", coverage=0.0, breaks=breaks), "eager_frames": frames}
    assert slow_cause(found) == text


def test_a_skipped_frame_is_told_where_little_was_compiled():
    found = {**section(coverage=0.4), "eager_frames": [SKIPPED]}
    assert slow_cause(found) == ("60% of the operator calls run outside of compiled graphs; Net.forward (net.py:3) ran "
                                 "eagerly (torch does not compile such code): see the check `compiles` for what stayed "
                                 "outside")


LATE = {"function": "Net.forward", "file": "net.py", "line": 3, "cause": "shape", "what": "x.size(0)",
        "advice": "pad to a few buckets"}


@pytest.mark.parametrize("verdict", ["slower", "could not be told"])
def test_what_compiles_in_the_timed_steps_is_told_first(verdict):
    """Then there is no steady state, and what the times say is nothing."""
    found = section(verdict, late=[LATE], python=0.9)
    assert slow_cause(found) == ("1 compile in the timed steps: Net.forward (net.py:3) is compiled again because of "
                                 "x.size(0): pad to a few buckets")


OVER = {"function": "Net.forward", "file": "net.py", "line": 3, "guard": "self.n == 7", "what": "self.n",
        "at": "models/net.py:4", "advice": "register self.n as a buffer (a tensor)"}
OVER_TEXT = ("Net.forward (net.py:3) hit Dynamo's recompile limit because of self.n at net.py:4, and runs eagerly from "
             "then on (90% of the operator calls run eagerly in all): register self.n as a buffer (a tensor)")


@pytest.mark.parametrize("verdict", ["nothing was compiled", "slower", "could not be told"])
def test_a_recompile_limit_is_told_first(verdict):
    """What was compiled too often runs eagerly, which no Python of the step explains."""
    found = {**section(verdict, late=[LATE], python=0.9, coverage=0.1), "over_limit": [OVER]}
    assert slow_cause(found) == OVER_TEXT
    unknown = {**OVER, "guard": "", "what": "", "at": ""}
    assert slow_cause({**found, "over_limit": [unknown]}).startswith(
        "Net.forward (net.py:3) hit Dynamo's recompile limit, and runs eagerly from then on (90% of the operator calls "
        "run eagerly in all): ")


REST = {**OVER, "resumed_at": 9}
REST_TEXT = ("the rest of Net.forward after line 9 (net.py:9) hit Dynamo's recompile limit because of self.n at "
             "net.py:4, and runs eagerly from then on (2% of the operator calls run eagerly in all): register self.n")


def test_only_the_rest_behind_a_break_is_given_up():
    """It is told as what it is, and first only where it takes most of the step."""
    small = {**section(library=0.8, coverage=0.98), "over_limit": [REST]}
    assert slow_cause(small).startswith("80% of a compiled step is library calls")
    assert [cause.kind for cause in slow_causes(small)] == ["fusion", "recompiles"]
    large = {**section(operators=0.9, coverage=0.98), "over_limit": [REST]}
    assert slow_cause(large).startswith(REST_TEXT)
    # Without an operator in it, it takes nothing of the step.
    assert slow_cause({**section(python=0.9, coverage=1.0, user_python=OWN), "over_limit": [REST]}).startswith(
        "80% of a compiled step passes in Python")


def test_a_model_that_is_faster_has_no_cause_of_slowness_in_its_limit():
    """It is told beside the verdict, as what is left to win."""
    faster = {**section("faster", coverage=0.98), "over_limit": [REST]}
    assert slow_cause(faster) == ""
    assert idle_remark(faster).startswith(f"more to win: {REST_TEXT}")


@pytest.mark.parametrize("changes", [
    {}, on_gpu(0.09, generated=0.08), on_gpu(0.02, graphs=1), {**on_gpu(0.09, generated=0.08), "python": 0.9},
])
def test_the_healthy_has_none(changes):
    """Fused, compiled whole, far from the roof; of a GPU that works all the time nobody asks what the host does."""
    assert slow_cause(section("no difference", **changes)) == ""


@pytest.mark.parametrize("verdict", ["faster", "could not be told"])
def test_what_is_not_slow_has_no_cause(verdict):
    assert slow_cause(section(verdict, coverage=0.1, library=0.9)) == ""


@pytest.mark.parametrize("known", [section(), {"verdict": "slower"}, {"verdict": "slower", "profile": None}])
def test_without_evidence_nothing_is_said(known):
    assert slow_cause(known) == ""


GUARD = "___as_tensor(step) == 7 # a step that nobody knows"


@pytest.mark.parametrize(("late", "words"), [
    ({**LATE, "cause": "other", "what": "", "reason": GUARD}, f"because a guard failed: {GUARD}: pad"),
    ({**LATE, "cause": "other", "what": ""}, "is compiled again: pad"),
    ({**LATE, "cause": "shape", "what": "", "reason": ""}, "is compiled again because of its shape: pad"),
])
def test_a_recompile_is_told_in_torchs_words(late, words):
    """Where no variable is known; the kind 'other' tells nobody anything. All compiles count, not the kept ones."""
    found = {**section(late=[late] * 3), "late_compiles": 95}
    assert slow_cause(found).startswith("95 compiles in the timed steps: Net.forward (net.py:3) is compiled again")
    assert words in slow_cause(found)
    assert "other" not in slow_cause(found)


def test_what_breaks_leave_is_told_after_them():
    """Launches of operators that run eagerly follow from graph breaks, whichever takes longer under a profiler."""
    planted = {**on_gpu(0.009), "coverage": 0.14, "generated": 0.45, "library": 0.1, "operators": 0.3, "python": 0.13}
    coverage, launches = slow_causes(section(**planted))
    assert (coverage.kind, launches.kind) == ("coverage", "launches")
    assert coverage.share < launches.share
    assert "replays those of compiled graphs alone" in launches.text
    # Of a model that is mostly compiled the larger comes first.
    assert slow_causes(section(**{**planted, "coverage": 0.8}))[0].kind == "launches"


ONE_KERNEL = {"kernels_share": 1.0, "bound": "compute",
              "sides": {"eager": {"kernels": 1}, "compiled": {"kernels": 1, "low": 0.1}}}


@pytest.mark.parametrize("planted", [
    {**on_gpu(0.097), **ONE_KERNEL, "roof": 0.97}, {**on_gpu(0.096), **ONE_KERNEL, "roof": 0.97},
    {**on_gpu(0.1, generated=0.1), **ONE_KERNEL, "roof": 0.94},
])
def test_at_the_roof_nothing_else_is_told(planted):
    """One kernel has nothing to be fused with, and what is left is a few hundredths, or less than nothing."""
    assert [cause.kind for cause in slow_causes(section(**planted))] == ["roof"]


@pytest.mark.parametrize(("share", "kinds"), [(1.25, ["roof"]), (1.26, []), (40.0, [])])
def test_a_step_far_above_its_roof_has_none(share, kinds):
    """What lies in caches, or was counted and not moved, is no bandwidth that is reached."""
    planted = {"roof": share, "library": 0.02, "generated": 0.9, "operators": 0.02}
    assert [cause.kind for cause in slow_causes(section(**planted))] == kinds
    assert roof_share({"share": share}) == (1.0 if kinds else None)


def test_without_a_roof_no_share_of_work_is_told():
    """Zero per cent would say that nothing is computed."""
    short = {"sides": {"eager": {"kernels": 90}, "compiled": {"kernels": 80}}, "seconds": 1e-3,
             "library": 0, "generated": 9e-4, "guards": 0, "python": 0, "operators": 0}
    assert slow_cause(section(roof=2.0, **short)).startswith(
        "a compiled step makes 80 kernel calls of 11.2 µs each: calling is what takes the time")


def test_a_cause_of_some_hundredths_is_not_told():
    unfused = {**on_gpu(0.07, generated=0.07), "kernels_share": 1.0, "roof": 0.5}
    assert [cause.kind for cause in slow_causes(section(**unfused))] == ["fusion"]
    assert slow_causes(section(**{**unfused, **on_gpu(0.065, generated=0.065), "roof": 0.59})) == []


def test_a_gpu_that_waits_is_worth_a_remark():
    """Faster, and most of the step the GPU does nothing: there is more to win, and it is said how."""
    tiny = on_gpu(0.01)
    assert idle_remark(section("faster", **tiny)).startswith(
        "more to win: the GPU works 10% of a compiled step, and else waits for 12 launches of the host: mode reduce-")
    assert slow_cause(section("faster", **tiny)) == ""
    for quiet in (section("faster", **on_gpu(0.06)), section("faster"), section("slower", **tiny),
                  section("faster", **on_gpu(0.01, graphs=1)), section("could not be told", **tiny),
                  section("faster", late=[LATE], **tiny)):
        assert idle_remark(quiet) == ""


def test_a_gpu_works_no_longer_than_the_step():
    """Some hundredths more are the profiled step's cold caches; what was measured can still be asked for."""
    busy = section(**on_gpu(0.104))
    assert (kernel_time(busy), gpu_share(busy)) == (pytest.approx(1.04), 1.0)
    assert gpu_share(section()) is None
