"""A graph break's text taken apart, in the formats of torch 2.8 to 2.15."""

from __future__ import annotations

import pytest

from pytest_torchcompile.ledger.break_sites import (
    Frame,
    TracedCode,
    disabled_function,
    headlines,
    is_limit,
    parse_break,
)

TEXT = '''Graph break in user code at /src/net.py:24
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Call to `torch._dynamo.graph_break()`
  Explanation: User-inserted graph break. Message: None
  Hint: Remove the `torch._dynamo.graph_break()` call.
  Hint: Or leave it,
    if you must.

  Developer debug context: Called `torch._dynamo.graph_break()` with args `[]`, kwargs `{}`

 For more details about this graph break, please visit: https://docs.example.org/gb/gb0025.html

User code traceback:
  File "/src/train.py", line 9, in main
    loss = model(x)
  File "/src/net.py", line 30, in forward
    y = helper(y)
  File "/src/net.py", line 24, in helper
    torch._dynamo.graph_break()

Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/_dynamo/symbolic_convert.py", line 1, in wrapper
    return inner_fn(self, inst)
'''

SKIPPED = '''Graph break in user code at /src/net.py:37
Graph Break Reason: Failed to handle graph break gracefully. Skipping the function and falling back to eager. \
Graph break encountered:

Data-dependent branching
  Explanation: Detected data-dependent branching.
  Hint: Use torch.cond.

*** While handling this graph break, another graph break occurred: ***

graph break in loop
  Explanation: torch.compile detected a graph break in a for/while loop.
  Hint: This one is not the hint.

User code traceback:
  File "/src/net.py", line 37, in g
    if x.sum() > 0:
'''

TORCH_2_8 = '''Graph break in user code at /src/net.py:12
Graph Break Reason: Unsupported Tensor.item() call with capture_scalar_outputs=False
  Explanation: Dynamo does not support tracing `Tensor.item()`.
  Hint: Set `torch._dynamo.config.capture_scalar_outputs = True`.

  Developer debug context: call_method TensorVariable() item () {}

User code traceback:
  File "/src/net.py", line 12, in forward
    n = x.item()
'''

NOT_LOGGED_BEFORE = '''Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.
torch.compile will skip tracing the frame f (/src/net.py line 3) and fall back to eager.
The graph break occurred in the following user code:
  File "/src/net.py", line 5, in f
    yield x

Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/_dynamo/convert_frame.py", line 1, in __call__
torch._dynamo.exc.Unsupported: Attempt to trace generator
  Explanation: Generators cannot be compiled directly with `torch.compile`.
  Hint: Call a generator from inside of a function.
'''


def test_all_parts():
    """Headline, id, link, place, hint, explanation, the stack without callers of the traced function."""
    traced = TracedCode("/src/net.py", "forward", function=Frame("/src/net.py", 28, "Net.forward"))
    found = parse_break(TEXT, traced=traced, during="c")
    assert found.reason == "Call to `torch._dynamo.graph_break()`"
    assert (found.gb_id, found.link) == ("gb0025", "https://docs.example.org/gb/gb0025.html")
    assert (found.file, found.line, found.function) == ("/src/net.py", 24, "helper")
    assert found.hint == "Remove the `torch._dynamo.graph_break()` call. Or leave it, if you must."
    assert found.explanation == "User-inserted graph break. Message: None"
    assert found.stack == ("net.py:24 in helper", "net.py:30 in forward")
    # Of several files of one name one sees which is meant.
    inside = parse_break(TEXT.replace("/src/net.py", "/src/parts/net.py"), root="/src")
    assert set(inside.stack) >= {"parts/net.py:24 in helper"}
    assert (found.whole_frame, found.during) == (False, "c")


def test_a_break_in_the_traced_function_bears_its_full_name():
    """The stack knows the bare name only."""
    traced = TracedCode("/src/net.py", "forward", function=Frame("/src/net.py", 10, "Net.forward"))
    found = parse_break(TORCH_2_8, traced=traced)
    assert found.function == "Net.forward"


def test_a_backend_that_failed_is_told_as_that_and_at_the_traced_function():
    """The stack is that of whoever called the compiled function: the graph was complete."""
    text = TEXT.replace("Explanation: User-inserted graph break. Message: None",
                        "Explanation: Backend compiler `bad` failed with aten.item. Adding a graph break.")
    traced = TracedCode("/src/model.py", "forward", function=Frame("/src/model.py", 10, "Net.forward"))
    found = parse_break(text, traced=traced)
    assert found.reason == ("the backend failed, and torch ran what it was given eagerly: Backend compiler `bad` "
                            "failed with aten.item.")
    assert (found.file, found.line, found.function) == ("/src/model.py", 10, "Net.forward")
    assert parse_break(text).file == "/src/net.py"


def test_the_traced_function_is_told_from_another_of_its_name():
    """A method and that of its base class are both called forward; the line says which of them is traced."""
    text = TORCH_2_8.partition("User code traceback:")[0] + ('User code traceback:\n  File "/src/net.py", line 12, in '
           'forward\n    super().forward(x)\n  File "/src/net.py", line 4, in forward\n    n = x.item()\n')
    traced = TracedCode("/src/net.py", "forward", 10, 13, Frame("/src/net.py", 10, "B.forward"))
    found = parse_break(text, traced=traced)
    assert (found.line, found.function) == (4, "forward")
    assert found.stack == ("net.py:4 in forward", "net.py:12 in forward")


def test_the_first_message_is_the_cause_and_the_second_says_why_torch_gave_up():
    """Two messages in one record: headline, hint and explanation are those of the first."""
    found = parse_break(SKIPPED)
    assert found.reason == "Data-dependent branching"
    assert (found.hint, found.whole_frame) == ("Use torch.cond.", True)
    assert headlines(SKIPPED.partition("encountered:")[2])[-1] == "graph break in loop"


def test_torch_2_8_has_no_ids():
    """The rest is there."""
    found = parse_break(TORCH_2_8)
    assert (found.gb_id, found.link) == ("", "")
    assert found.reason == "Unsupported Tensor.item() call with capture_scalar_outputs=False"
    assert (found.line, found.hint) == (12, "Set `torch._dynamo.config.capture_scalar_outputs = True`.")
    assert found.same_as == ("/src/net.py", 12, found.reason)


def test_the_format_of_breaks_from_outside_of_tracing():
    """A frame that was refused before it was traced; made only where TORCH_LOGS asks for it."""
    found = parse_break(NOT_LOGGED_BEFORE)
    assert (found.reason, found.file, found.line) == ("Attempt to trace generator", "/src/net.py", 5)
    assert (found.hint, found.whole_frame) == ("Call a generator from inside of a function.", True)


def test_a_break_in_pythons_library_is_at_the_users_line():
    """Nobody can change logging/__init__.py."""
    text = TORCH_2_8.replace('    n = x.item()', '    n = x.item()\n  File "/usr/lib/x/os.py", line 3, in g\n    p')
    import sysconfig

    text = text.replace("/usr/lib/x", sysconfig.get_path("stdlib"))
    found = parse_break(text)
    assert (found.file, found.line, found.owner) == ("/src/net.py", 12, "mine")


def test_a_break_in_torchs_own_frame_is_the_functions_that_it_wraps():
    """Where all frames are torch's, the user's function around them is the place."""
    text = TORCH_2_8.replace("/src/net.py", "/v/site-packages/torch/_dynamo/external_utils.py")
    found = parse_break(text, traced=TracedCode(function=Frame("/src/net.py", 8, "Net.forward")))
    assert (found.file, found.line, found.function, found.owner) == ("/src/net.py", 8, "Net.forward", "mine")
    bare = parse_break(text)
    assert (bare.line, bare.owner) == (12, "torch")


@pytest.mark.parametrize("text", ["", "\n", "a text of torch 3", "Graph Break Reason: ", TEXT[:80]])
def test_any_text_gives_a_break(text):
    """Unknown formats lose parts, never the break."""
    assert parse_break(text).reason


@pytest.mark.parametrize(("text", "limit"), [
    ("Dynamo recompile limit exceeded\n  Explanation: x", True),
    ("Dynamo cache limit exceeded", True),
    ("cache_size_limit reached", True),
    ("Unsupported context manager\n  Hint: raise the recompile limit", False),
])  # fmt: skip
def test_the_recompile_limit_is_no_break(text, limit):
    """Torch reports it as one; only its own headline counts."""
    assert is_limit(text) is limit


@pytest.mark.parametrize(("explanation", "name"), [
    ("Skip calling function `<function dis at 0x7f65>` since it was wrapped with `torch.compiler.disable`", "dis"),
    ("Skip inlining function <function Net.forward at 0x7f> since it was wrapped", "Net.forward"),
    ("Skip calling function `<bound method Net.step of <net.Net object at 0x7f>>` since", "Net.step"),
    ("Skip calling function `<function f.<locals>.g at 0x7f65>` since", "g"),
    ("Something else", ""),
])  # fmt: skip
def test_the_disabled_function_is_named(explanation, name):
    """Its name comes out of the explanation."""
    found = parse_break(TORCH_2_8)
    found.explanation = explanation
    assert disabled_function(found) == name
