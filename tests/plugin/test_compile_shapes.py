"""@compile_shapes in a model repository, each test a pytest run of its own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs_torch
CONFTEST = """
import pytest
import torch
from models import Net

@pytest.fixture
def model():
    return Net()
"""
HEAD = "import pytest, torch\nfrom models import *\nfrom pytest_torchcompile import call, compile_shapes, dim\n"


@pytest.fixture
def tests(repo):
    """Write a test file beside a conftest with a model, and run it."""
    repo.file("conftest.py", CONFTEST)

    def run(text, *args):
        repo.file("test_it.py", HEAD + text)
        # On a busy machine the usual seconds run out before a sequence is as short as it can be.
        return repo.run("-p", "no:cacheprovider", "--compile-fuzz-seconds=600", *args, option="")

    return run


def lines(result, *expected):
    result.stdout.fnmatch_lines([f"*{line}*" for line in expected])


def test_a_sound_model_passes_with_all_fixtures(tests):
    """Batches are drawn, the model is compiled anew for each sequence, and each starts with an empty ledger."""
    result = tests("""
@pytest.mark.compile_limits(recompiles=3)
@pytest.mark.compile_modes(backend="eager", dynamic=["auto", "dynamic"])
@compile_shapes(B=dim(1, 8), C="B + 1", inputs=lambda B, C: torch.randn(B, 6), max_calls=4)
def test_same(compiled_model, model, batches, recompile_counter, graph_breaks):
    assert recompile_counter.count == 0 and not recompile_counter.compiles
    for x in batches:
        torch.testing.assert_close(compiled_model(x), model(x))
    assert recompile_counter.count <= 2, recompile_counter.explain()
    assert not graph_breaks
""", "--compile-fuzz-examples=6")
    result.assert_outcomes(passed=2)


def test_a_failure_is_the_shortest_sequence(tests):
    """The report has the sequence, code to paste, and the test's own assertion; none of our frames."""
    result = tests("""
@compile_shapes(S=dim(1, 64))
def test_sizes(sizes):
    assert all(each["S"] <= 20 for each in sizes), "too long"
""", "--compile-fuzz-examples=50")
    result.assert_outcomes(failed=1)
    lines(result, "AssertionError: too long", "The shortest failing sequence of shapes: [[]call(S=21)]",
          "compile_shapes(..., examples=[[][[]call(S=21)]])",
          "found as [[]call(S=*, with * sequences and * tries in all")
    result.stdout.no_fnmatch_line("*drawn.run*")


def test_examples_come_first_and_alone_decide(tests):
    """A pinned sequence fails without a search."""
    result = tests("""
@compile_shapes(S=dim(1, 64), examples=[[call(S=3)], [call(S=2), call(S=64)]])
def test_sizes(sizes):
    print("ran", sizes)
    assert sizes != [{"S": 2}, {"S": 64}]
""")
    result.assert_outcomes(failed=1)
    lines(result, "ran [[]{'S': 3}]", "ran [[]{'S': 2}, {'S': 64}]")
    result.stdout.no_fnmatch_line("*shortest*")


def test_kept_sequences_and_seeds(tests):
    """A failing sequence is kept in .hypothesis and run first; another seed is named where it is needed."""
    test = """
@compile_shapes(S=dim(1, 64))
def test_sizes(sizes):
    assert all(each["S"] <= 20 for each in sizes)
"""
    tests(test, "--compile-fuzz-examples=50")
    lines(tests(test, "--compile-fuzz-examples=1"), "call(S=21)", "kept from an earlier run in .hypothesis")
    result = tests(test, "--compile-fuzz-seed=random")
    lines(result, "torch.compile fuzzing: --compile-fuzz-seed=*", "seed: --compile-fuzz-seed=*")


def test_state_is_put_back_between_sequences(tests):
    """Parameters, buffers and the training flag are the same at the start of each sequence; flips switch them."""
    result = tests("""
seen = set()

@pytest.mark.compile_modes(backend="eager")
@compile_shapes(B=dim(2, 8), inputs=batch, flips=True)
def test_state(compiled_model, model, batches):
    assert model.training
    assert float(model.inner.weight.detach().max()) < 10
    with torch.no_grad():
        model.inner.weight += 100
    for x in batches:
        seen.add(model.training)
        compiled_model(x)

def test_flipped():
    assert seen == {True, False}
""", "--compile-fuzz-examples=12")
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_limits_are_judged_after_each_sequence(tests):
    """The marker's limits hold for every sequence, not only for the last."""
    result = tests("""
@pytest.mark.compile_limits(recompiles=1)
@pytest.mark.compile_modes(backend="eager")
@compile_shapes(B=dim(1, 8), inputs=batch)
def test_limits(compiled_model, batches):
    for x in batches:
        compiled_model(x)
""", "--compile-fuzz-examples=60")
    result.assert_outcomes(failed=1)
    lines(result, "compile_limits: 2 recompiles, 1 allowed", "[[]call(B=2), call(B=3), call(B=1)]")


def test_a_limit_does_not_hide_what_the_body_asserts(tests):
    """More recompiles than allowed come early; the search goes on, and what is worse is told with both."""
    result = tests("""
@pytest.mark.compile_limits(recompiles=0)
@pytest.mark.compile_modes(backend="eager")
@compile_shapes(B=dim(2, 64), inputs=batch)
def test_limits(compiled_model, batches):
    for x in batches:
        compiled_model(x)
        assert len(x) % 8 != 5 or len(x) < 16, "wrong for some"
""", "--compile-fuzz-examples=60")
    result.assert_outcomes(failed=1)
    lines(result, "AssertionError: wrong for some", "The shortest failing sequence of shapes: [[]call(B=*)]",
          "and, which is milder, after [[]call(B=2), call(B=3)]: compile_limits: 1 recompile")


def test_pytest_fail_is_a_failure_and_a_skip_is_a_skip(tests):
    """What pytest raises is understood, although it is no Exception."""
    result = tests("""
@compile_shapes(S=dim(1, 64))
def test_fails(sizes):
    if sizes[-1]["S"] > 5:
        pytest.fail("larger than 5")

@compile_shapes(S=dim(1, 64))
def test_skips(sizes):
    pytest.skip("not here")
""", "--compile-fuzz-examples=40")
    result.assert_outcomes(failed=1, skipped=1)
    lines(result, "larger than 5")


@pytest.mark.parametrize("outcome", ["skip", "xfail"])
def test_a_failure_is_not_lost_to_a_shorter_sequence_that_is_skipped(tests, outcome):
    """Shrinking goes through sequences that the test does not want to judge; the one that failed is told."""
    result = tests(f"""
@compile_shapes(S=dim(1, 64))
def test_fails(sizes):
    if any(each["S"] > 20 for each in sizes):
        raise AssertionError("larger than 20")
    if any(each["S"] == 20 for each in sizes):
        pytest.{outcome}("not this one")
""", "--compile-fuzz-examples=40")
    result.assert_outcomes(failed=1)
    lines(result, "larger than 20", "The shortest failing sequence of shapes: [[]call(S=21)]")


MISTAKES = {
    "@compile_shapes(B=dim(1, 8))\ndef test_it(): pass":
        "compile_shapes: test_it takes neither `batches` nor `sizes`",
    "@compile_shapes(B=dim(1, 8))\ndef test_it(batches): pass":
        "compile_shapes: test_it takes `batches`, and nothing makes them: give inputs=",
    "@compile_shapes(B=dim())\ndef test_it(sizes): pass":
        "compile_shapes: dim 'B': has no size; expected buckets, choices or max",
    "@compile_shapes(B=dim(1, 8), S='Q + 1')\ndef test_it(sizes): pass":
        "compile_shapes: dim 'S': 'Q + 1' uses 'Q', which is not a dim",
    "@compile_shapes(B=1.5)\ndef test_it(sizes): pass":
        "compile_shapes: B=1.5; expected dim(1, 8), a number, or an expression like 'S + 1'",
    "@compile_shapes(B=4, C='B + 1', D=dim(choices=(8,)))\ndef test_it(sizes): pass":
        "compile_shapes: B=4, C='B + 1', D=dim(choices=(8,)): no dim has more than one size, so no two sequences",
}


def test_mistakes(tests, repo):
    """A mistake in the decorator is told when the file is collected, which others survive."""
    for i, test in enumerate(MISTAKES):
        repo.file(f"test_mistake_{i}.py", HEAD + test)
    result = tests("@compile_shapes(B=dim(1, 8))\ndef test_it(sizes): pass", "--continue-on-collection-errors",
                   "--compile-fuzz-examples=1")
    result.assert_outcomes(errors=len(MISTAKES), passed=1)
    for i, message in enumerate(MISTAKES.values()):
        lines(result, f"ERROR collecting test_mistake_{i}.py", message.replace("[", "[[]"))


@pytest.mark.parametrize("option", [
    "--compile-fuzz-examples=none", "--compile-fuzz-seconds=0", "--compile-fuzz-seed=x",
])
def test_bad_options(repo, option):
    """A bad value of an option is one line that names it, before anything is collected."""
    repo.file("test_it.py", "raise SystemError('collected')")
    result = repo.run(option, option="")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"*ERROR: {option.partition('=')[0]}: '{option.partition('=')[2]}' is n*"])


def test_too_little_time(tests):
    """Nothing was tested, unless examples of one's own were; a test that passed over fewer sequences says so."""
    result = tests("""
@compile_shapes(S=dim(1, 64))
def test_sizes(sizes):
    pass

@compile_shapes(S=dim(1, 64), examples=[[call(S=3)]])
def test_example(sizes):
    pass
""", "--compile-fuzz-seconds=1e-9")
    result.assert_outcomes(passed=1, failed=1, warnings=1)
    lines(result, "compile_shapes: no sequence was run: the seconds ran out before the first; give more: "
                  "--compile-fuzz-seconds",
          "test_it.py:*: FuzzCutShortWarning: test_example: 0 of 30 sequences were run, then the seconds ran out; *")


def test_batches_that_nobody_looks_at(tests):
    """Such a test would pass whatever the model did; one that looks at some sequences only is left alone."""
    result = tests("""
@compile_shapes(B=dim(2, 8), inputs=batch)
def test_forgot(model, batches):
    assert len(batches) >= 1

@compile_shapes(B=dim(2, 8), inputs=batch)
def test_long_ones(model, batches):
    if len(batches) > 2:
        for x in batches:
            model(x)

@compile_shapes(B=dim(2, 8), inputs=batch)
def test_skips(model, batches):
    pytest.skip("not here")
""", "--compile-fuzz-examples=12")
    result.assert_outcomes(failed=1, passed=1, skipped=1)
    lines(result, "AssertionError: compile_shapes: test_forgot takes `batches` and looked at none in * sequences: no "
                  "size that was drawn was run; iterate over it, as in `for batch in batches: ...`")


def test_a_condition_that_nothing_satisfies(tests):
    """Told in our words, with the condition and the dims; where examples or the ends satisfy it, they were run."""
    result = tests("""
def large(B, S): return B * S > 1000

@compile_shapes(B=dim(1, 8), S=dim(buckets=(16, 32)), where=large)
def test_named(sizes):
    pass

@compile_shapes(B=dim(1, 64, multiple_of=2), where=lambda B: B % 2)
def test_lambda(sizes):
    pass

@compile_shapes(B=dim(1, 4), T="B - 9")
def test_expression(sizes):
    pass

@compile_shapes(B=dim(2, 9), where=lambda B: B % 2)
def test_possible(sizes):
    assert all(each["B"] % 2 for each in sizes)
""", "--compile-fuzz-examples=10")
    result.assert_outcomes(failed=3, passed=1)
    lines(result, "compile_shapes: no sequence was run: where=large (test_it.py:*) is true of no sizes that were drawn "
                  "for B=dim(1, 8), S=dim(buckets=(16, 32)); mend the condition, or widen the dims",
          "where=<lambda> (test_it.py:*) is true of no sizes that were drawn for B=dim(1, 64, multiple_of=2); mend",
          "what the dims' expressions ask for is true of no sizes that were drawn for B=dim(1, 4), T='B - 9'; mend")
    result.stdout.no_fnmatch_line("*Unsatisf*")
    result.stdout.no_fnmatch_line("*hypothesis.errors*")
