"""The ledger in words, and what it advises."""

from __future__ import annotations

import os

import pytest

from pytest_torchcompile.ledger import explain
from pytest_torchcompile.ledger.explain import recompile_advice
from pytest_torchcompile.ledger.reasons import CAUSES
from pytest_torchcompile.ledger.records import Compile, EagerFrame, GraphBreak


def recompile(cause, what="", expected="", actual="", reason="guard", **more):
    """A recompile as the ledger would hold it."""
    return Compile("Net.forward", "/src/net.py", 8, "0/1", "recompile", reason, cause, (reason,), what=what,
                   expected=expected, actual=actual, **more)  # fmt: skip


def test_recompiles_in_words():
    """Number allowed, function, place, call, old -> new, guard, line, advice."""
    size = recompile("shape", "x.size(0)", "4", "5", "tensor 'x' size mismatch", during="call 2 (B=5)")
    value = recompile("value", "self.k", "1", "2", "self.k == 1", source="return x * self.k", at="/src/net.py:9",
                      resumed_at=3)  # fmt: skip
    assert explain.recompiles([size, value], allowed=1).splitlines() == [
        "2 recompiles, 1 allowed",
        "  1. Net.forward  /src/net.py:8  during call 2 (B=5)",
        "     shape: x.size(0)  4 -> 5",
        "     guard: tensor 'x' size mismatch",
        "     try: pad to a few buckets (ShapeStabilizer, shape_buckets); or torch._dynamo.mark_dynamic(x, 0, min=2, "
        "max=your largest) before the first call; last, and discouraged: dynamic=True, which makes every size dynamic "
        "and often the code slower",
        "  2. Net.forward, resumed at line 3  /src/net.py:8",
        "     value: self.k  1 -> 2",
        "     guard: self.k == 1  at /src/net.py:9",
        "     code: return x * self.k",
        "     try: pass self.k as a tensor, or keep it constant between calls",
    ]


def test_other_entries_in_words():
    """Each kind of reason once, without the headline's own; of many the first three."""
    reasons = ("GLOBAL_STATE changed: grad_mode", "tensor 'x' size mismatch at index 0. expected 3, actual 5",
               "tensor 'x' size mismatch at index 0. expected 4, actual 5", "k == 1", "k == 2", "k == 3", "len(y) == 1",
               "y is None")
    found = recompile("shape", "x.size(0)", "4", "5", reasons[2])
    found.all_reasons = reasons
    assert explain.recompiles([found]).splitlines()[4] == (
        "     other cached entries: GLOBAL_STATE changed: grad_mode; k == 1 (and 2 like it); len(y) == 1; 1 more")
    assert explain.other_reasons(recompile("shape", "x.size(0)", "4", "5", reasons[2])) == ""


def test_an_unknown_value_is_said_to_be_unknown():
    """Of num_threads torch tells no old value; of an unknown guard nothing at all."""
    assert "num_threads  ? -> 3" in explain.recompiles([recompile("global_state", "num_threads", "", "3")])
    assert "other: a new guard" in explain.recompiles([recompile("other", reason="a new guard")])


def test_breaks_in_words():
    """Owner where it is not the user, id, explanation, hint, link."""
    found = GraphBreak("Failed to trace", "gb0059", "/v/site-packages/t.py", 3, "Do not.", "third_party", "step", True,
                       "print was called", "https://docs.example.org/gb0059", "call 1")  # fmt: skip
    assert explain.graph_breaks([found]).splitlines() == [
        "1 graph break, none allowed",
        "  1. step  /v/site-packages/t.py:3  (third_party)  during call 1",
        "     Failed to trace  [gb0059]",
        "     why: print was called",
        "     torch cannot resume after it: all of step runs eagerly",
        "     try: Do not.",
        "     more: https://docs.example.org/gb0059",
    ]


def test_eager_frames_in_words():
    """Kind, calls, reason; a switch of the process has no place."""
    off = EagerFrame("", "", 0, "TORCHDYNAMO_DISABLE=1", "off")
    limit = EagerFrame("f", "/src/net.py", 8, "limit hit", "limit", "call 9", 3)
    assert explain.eager_frames([limit, off]).splitlines() == [
        "2 functions ran eagerly", "  1. f  /src/net.py:8  during call 9", "     limit, 3 calls: limit hit",
        "  2. ", "     off, 1 call: TORCHDYNAMO_DISABLE=1",
    ]  # fmt: skip


def test_stored_records_read_the_same():
    """A report holds dicts; so does JSON."""
    record = recompile("value", "y", "'a'", "'b'")
    assert explain.recompiles([record.to_dict()]) == explain.recompiles([record])
    found = GraphBreak("r", "", "f.py", 1)
    assert explain.graph_breaks([found.to_dict()]) == explain.graph_breaks([found])


def test_paths_below_the_current_folder_are_relative(tmp_path, monkeypatch):
    """As one would type them."""
    monkeypatch.chdir(tmp_path)
    path = os.path.join(tmp_path, "app", "net.py")
    assert "  1. f  app/net.py:1" in explain.graph_breaks([GraphBreak("r", "", path, 1, function="f")])


@pytest.mark.parametrize("cause", [*CAUSES, "a class of a later version"])
def test_every_cause_has_advice(cause):
    """Also where nothing about the guard is known."""
    assert recompile_advice(recompile(cause))
    assert "None" not in recompile_advice(recompile(cause))
    assert "  " not in recompile_advice(recompile(cause, "x.size(0)", "1", "2"))


@pytest.mark.parametrize("resumed_at", [0, 7])
def test_advice_about_sizes_begins_with_buckets_and_ends_with_dynamic(resumed_at):
    text = recompile_advice(recompile("shape", "x.size(0)", "4", "5", resumed_at=resumed_at))
    places = [text.index(part) for part in ("bucket", "mark_dynamic", "min=", "max=", "discouraged", "dynamic=True")]
    assert places == sorted(places)


@pytest.mark.parametrize(("record", "text"), [
    (recompile("shape", "x.dim()", "1", "2"), "give x the same number of dimensions"),
    (recompile("shape", "self.w.size(0)", "4", "5", advice="Guard failed on a parameter"), "resize self.w before"),
    (recompile("shape", "y.size(0)", "4", "5", resumed_at=7), "pad the input that this size comes from to"),
    (recompile("stride", "x.stride(0)", "4", "1"), "x.contiguous()"),
    (recompile("dtype", "x.dtype", "Float", "Double"), "cast x once"),
    (recompile("requires_grad", "x.requires_grad", "False", "True"), "detach x,"),
    (recompile("type", "type(m)", "Linear", "ReLU"), "pass m as the same type"),
    (recompile("symbolic", "x.size(0)", "2 <= x.size(0)", "1", "2 <= x.size()[0]"), "mark_unbacked(x, 0)"),
    (recompile("symbolic", "x.size(0)", "2 <= x.size(0) <= 5", "6", "2 <= x.size()[0] <= 5", source="if n > 5:"),
     "decides by a size (if n > 5:)"),
    (recompile("symbolic", "(x.size(2) // 5)", "249", "399", "(x.size()[2] // 5) == 249"),
     "most likely an operator or its backward pass (torch names no line) makes a constant of this size, so each value "
     "of it is compiled apart, and neither mark_dynamic nor dynamic=True helps: pad to a few buckets"),
    (recompile("symbolic", "(x.size(2) // 5)", "249", "399", "(x.size()[2] // 5) == 249",
               at="a/autograd_cache.py:1210"),
     "(the graph is out of torch's cache, which names no line; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 has torch name"),
    (recompile("symbolic", "(x.size(2) // 5)", "249", "399", "(x.size()[2] // 5) == 249", source="conv_lowering",
               at="_inductor/kernel/conv.py:1091"),
     "an operator of torch's (conv_lowering, _inductor/kernel/conv.py:1091) makes a constant of this size"),
    (recompile("symbolic", "(x.size(0) // 4)", "2", "4", "(x.size()[0] // 4) == 2", at="net.py:28",
               source="for i in range(x.shape[0] // 4):"),
     "a loop of the code (for i in range(x.shape[0] // 4):, net.py:28) makes a constant of this size, so each value"),
    (recompile("symbolic", "(x.size(2) // 5)", "249", "399", "(x.size()[2] // 5) == 249", source="if n // 5 == 249:"),
     "decides by a size (if n // 5 == 249:): keep sizes on one side"),
    (recompile("symbolic", "(x.size(0) % 2)", "0", "1", "(x.size()[0] % 2) == 0"), "keep sizes on one side"),
    (recompile("symbolic", "y.size(0)", "x.size(0)", "4", "y.size()[0] == x.size()[0]"), "use_duck_shape"),
    (recompile("symbolic", reason="_has_dynamo_dim_marking is present on runtime tensor"), "mark the same"),
    (recompile("value", "self.k", "1", "2", advice="considers integer attributes of the nn.Module static"),
     "allow_unspec_int_on_nn_module"),
    (recompile("value", "flag", "True", "False"), "keep flag constant"),
    (recompile("value", "y", "2.5", "3.5"), "pass y as a tensor"),
    (recompile("closure", "f.__code__", "code", "code g"), "holds f once"),
    (recompile("other", reason='Duplicate tensors found: ["x", "y"]'), "clone one of them"),
    (recompile("other", advice="do this"), "do this"),
    (recompile("other"), "TORCH_LOGS=recompiles_verbose"),
])  # fmt: skip
def test_advice_fits_the_cause(record, text):
    """The line names the user's own variable."""
    assert text in recompile_advice(record)
