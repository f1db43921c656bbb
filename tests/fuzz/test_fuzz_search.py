"""The search for failing sequences, over faults that need no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.fuzz.drawn_call import (
    as_code,
    as_plain,
    call,
    from_plain,
    ordered_sizes,
    shape_sequences,
    sweep,
    telling_sizes,
)
from pytest_torchcompile.fuzz.search import Budget, Examined, Search, SequenceProblem, search
from pytest_torchcompile.fuzz.shrinking import minimal
from pytest_torchcompile.plugin.compile_shapes import compile_shapes, dim

B = {"B": Dim(min=1, max=64)}
HOLDS = Examined(None, 1, 1)
"""What an attempt says of a sequence without a failing."""
BS = {"B": Dim(min=1, max=8), "S": Dim(min=1, max=512, multiple_of=8), "T": Dim(expression="S + 1"), "H": Dim(size=16)}


def sizes(sequence, name="B"):
    return [dict(each.sizes)[name] for each in sequence]


def first(sequence, holds):
    """A fault that shows at the first call for which ``holds(sizes so far)``."""
    at = next((k for k in range(len(sequence)) if holds(sizes(sequence)[:k + 1])), None)
    return Examined(None if at is None else SequenceProblem("wrong", "it is wrong", at), 1, len(sequence))


FAULTS = {
    "odd and more than 16": (lambda seen: seen[-1] % 2 and seen[-1] > 16, [17]),
    "multiple of 8 after two others": (lambda seen: len({*seen}) > 2 and seen[-1] % 8 == 0, [2, 3, 8]),
    "1 after two others": (lambda seen: len({*seen}) > 2 and seen[-1] == 1, [2, 3, 1]),
    "the third call": (lambda seen: len(seen) == 3, [2, 2, 2]),
    "less than before, after more than 8": (lambda seen: len(seen) > 1 and seen[-2] > 8 > seen[-1], [9, 2]),
    "less than before": (lambda seen: len(seen) > 1 and seen[-1] < seen[-2], [3, 2]),
    "more than 50": (lambda seen: seen[-1] > 50, [51]),
    "back to the first": (lambda seen: len({*seen}) == 3 and len(seen) == 4 and seen[-1] == seen[0], [2, 3, 4, 2]),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_shrunk_to_its_minimum(name, seed):
    """Whatever the seed, the same shortest sequence of the simplest sizes comes out."""
    holds, shortest = FAULTS[name]
    result = search(shape_sequences(B), B, lambda s: first(s, holds), Budget(examples=2000), seed=seed)
    assert sizes(result.sequence) == shortest
    assert result.problem
    assert result.problem.at == len(shortest) - 1
    assert not result.spent


def test_no_fault_no_finding():
    """A search that finds nothing runs as many sequences as asked."""
    result = search(shape_sequences(B), B, lambda s: HOLDS, Budget(examples=50))
    assert result.problem is None
    assert 40 <= result.examples <= 50  # Hypothesis may draw one twice


def test_what_eager_refuses_is_not_counted():
    """Sequences count if a call of theirs was compared; refused ones use up the budget, and are found in no number."""
    drawn = []

    def attempt(sequence):
        drawn.append(sequence)
        taken = sum(size % 2 == 0 for size in sizes(sequence))
        return Examined(None, taken, taken, len(sequence) - taken)

    result = search(shape_sequences(B), B, attempt, Budget(examples=40), first=sweep(B, max_calls=1))
    compared = [sequence for sequence in drawn if any(size % 2 == 0 for size in sizes(sequence))]
    assert 0 < len(compared) < len(drawn) <= 40
    assert (result.examples, result.tries) == (len(compared), len(compared))
    assert result.calls == sum(size % 2 == 0 for sequence in drawn for size in sizes(sequence))
    assert result.refused == sum(size % 2 for sequence in drawn for size in sizes(sequence)) > 0
    nothing = search(shape_sequences(B), B, lambda s: Examined(None, 0, 0, len(s)), Budget(examples=9), first=sweep(B))
    assert (nothing.examples, nothing.tries, nothing.calls, nothing.problem) == (0, 0, 0, None)
    assert nothing.refused > 0
    raised = SequenceProblem("error", "eager alone raises", 0)
    wrongly = search(shape_sequences(B), B, lambda s: Examined(raised, 0, 0, len(s)), Budget(examples=9))
    assert wrongly.tries > 0, "a fault that shows in a refused call is no silence"


def test_the_same_seed_draws_the_same_sequences():
    """A run can be repeated; another seed draws others."""
    def drawn(seed):
        seen = []
        search(shape_sequences(BS), BS, lambda s: (seen.append(s), HOLDS)[1], Budget(examples=20), seed=seed)
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


@settings(max_examples=200)
@given(shape_sequences(BS, max_calls=4, flips=True, others=[16]))
def test_drawn_sizes_keep_to_the_dims(sequence):
    """Ranges, multiples, constants and expressions hold in every call."""
    assert 1 <= len(sequence) <= 4
    for each in sequence:
        s = dict(each.sizes)
        assert list(s) == ["B", "S", "T", "H"]
        assert 1 <= s["B"] <= 8
        assert s["S"] % 8 == 0 < s["S"] <= 512
        assert s["T"] == s["S"] + 1
        assert s["H"] == 16


def seen_in(strategy, holds, most=1000):
    found = []
    search(strategy, BS, lambda s: (found.append(s) if holds(s) else None, HOLDS)[1], Budget(examples=most))
    return len(found)


@pytest.mark.parametrize("holds", [
    lambda s: any(dict(c.sizes)["B"] == dict(c.sizes)["S"] for c in s),
    lambda s: any(dict(c.sizes)["S"] == 16 for c in s),
    lambda s: len(s) > 2 and s[-1] == s[0] != s[1],
    lambda s: any(dict(c.sizes)["B"] == 1 for c in s),
    lambda s: any(dict(c.sizes)["S"] == 512 for c in s),
    lambda s: any(c.training is False for c in s) and any(c.training for c in s),
], ids=["equal dims", "equal to a constant", "going back", "size 1", "largest", "flips"])
def test_boundaries_are_favoured(holds):
    """What tends to break compiled code turns up in a thousand sequences, more than once."""
    assert seen_in(shape_sequences(BS, flips=True), holds) >= 5


def test_where_is_a_function():
    """Dims are strings at times, and this is not; told where it is written, not when it is searched."""
    with pytest.raises(UsageError, match=r"where='T > 50'; expected a function of the dims, .* where=lambda T: "):
        compile_shapes(T=dim(1, 8), inputs=len, where="T > 50")


def test_where_is_kept_to():
    """Sizes that do not belong together are never drawn."""
    strategy = shape_sequences(BS, where=lambda B, S, **_: B * S <= 64)
    assert seen_in(strategy, lambda s: any(dict(c.sizes)["B"] * dict(c.sizes)["S"] > 64 for c in s), 50) == 0


def test_simplest_sizes_come_first():
    """2 is the plainest size; 1 and 0 are compiled apart, so they come last."""
    assert ordered_sizes(Dim(min=0, max=5)) == [2, 3, 4, 5, 1, 0]
    assert ordered_sizes(Dim(buckets=(128, 32, 64))) == [32, 64, 128]
    assert telling_sizes(Dim(min=1, max=20), others=[11]) == [2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 20, 1]
    assert len(ordered_sizes(Dim(min=1, max=10**9))) < 10_000


def test_a_relation_without_a_size_is_not_drawn():
    """T = S - 8 has no size below 8, so such S are left out, and shrinking leaves them out too."""
    dims = {"S": Dim(min=1, max=20), "T": Dim(expression="S - 8")}
    wrong = Examined(SequenceProblem("wrong", "", 0), 1, 1)
    result = search(shape_sequences(dims), dims, lambda s: wrong, Budget(examples=200))
    assert sizes(result.sequence, "S") == [8]


def test_dims_without_sizes_are_a_usage_error():
    """A mistake in the dims is told before anything is drawn."""
    with pytest.raises(UsageError, match="dim 'B': has no size; expected buckets, choices or max"):
        shape_sequences({"B": Dim()})


def test_dims_without_freedom_still_give_sequences():
    """With constant sizes only the number of calls is drawn."""
    dims = {"H": Dim(size=16)}
    wrong = SequenceProblem("wrong", "", 2)
    result = search(shape_sequences(dims), dims, lambda s: Examined(wrong if len(s) > 2 else None, 1, len(s)),
                    Budget(examples=50))
    assert sizes(result.sequence, "H") == [16, 16, 16]


def test_a_failing_sequence_is_kept_and_tried_first():
    """Hypothesis' database has the minimal sequence; a later run starts with it, and drops it once it holds."""
    database = InMemoryExampleDatabase()
    holds = FAULTS["more than 50"][0]

    def run(attempt):
        return search(shape_sequences(B), B, attempt, Budget(2000), database=database, key="cell")

    run(lambda s: first(s, holds))
    again = run(lambda s: first(s, holds))
    assert (again.worst.kept, again.examples, sizes(again.sequence)) == (True, 0, [51])
    mended = run(lambda s: Examined(None, 100, 1))
    assert mended.problem is None
    assert not list(database.fetch(b"torchcompile:cell"))


@pytest.mark.parametrize("value", [b"", b"[]", b"[1]", b"\xff", b'[{"sizes": {"Q": 3}, "training": null}]', b"{}"])
def test_a_kept_sequence_that_cannot_be_read_is_dropped(value):
    """The database may hold what an older version or another matrix wrote."""
    database = InMemoryExampleDatabase()
    database.save(b"torchcompile:cell", value)
    result = search(shape_sequences(B), B, lambda s: HOLDS, Budget(examples=3), database=database, key="cell")
    assert result.problem is None
    assert not list(database.fetch(b"torchcompile:cell"))


@pytest.mark.parametrize(("budget", "spent"), [
    (Budget(100, 0.0), "seconds"), (Budget(100, 60, compiles=7), "compiles"),
])
def test_the_budget_ends_the_search(budget, spent):
    """Time and compiles end it, not only the number of examples, and the result says which."""
    result = search(shape_sequences(B), B, lambda s: HOLDS, budget)
    assert result.spent == spent
    assert result.tries <= 7


def test_a_sweep_has_every_telling_size():
    """Each once, with sizes that belong together, however Hypothesis draws; it counts as so many examples."""
    found = sweep(BS, max_calls=4, others=[40])
    assert all(len(sequence) <= 4 for sequence in found)
    for name in ("B", "S"):
        swept = {size for sequence in found for size in sizes(sequence, name)}
        assert swept == set(telling_sizes(BS[name], {40, 16}))
    assert all(dict(each.sizes)["T"] == dict(each.sizes)["S"] + 1 for sequence in found for each in sequence)
    even = sweep(B, where=lambda B: B % 2 == 0)
    assert {size for sequence in even for size in sizes(sequence)} == {s for s in telling_sizes(B["B"]) if s % 2 == 0}
    runs = []
    result = search(shape_sequences(B), B, lambda s: (runs.append(s), HOLDS)[1], Budget(examples=5), first=sweep(B))
    assert runs[:3] == sweep(B)
    assert result.examples == len(runs) <= 5
    runs.clear()
    assert search(shape_sequences(B), B, lambda s: (runs.append(s), HOLDS)[1], Budget(examples=2),
                  first=sweep(B)).examples == 2
    assert runs == sweep(B)[:2]
    result = search(shape_sequences(B), B, lambda s: first(s, lambda seen: seen[-1] == 33), Budget(examples=5),
                    first=sweep(B))
    assert sizes(result.sequence) == [33]


def test_the_budget_ends_the_shrinking():
    """What was found is reported all the same, as far as it was shrunk."""
    runs = []

    def attempt(sequence):
        runs.append(sequence)
        return replace(first(sequence, FAULTS["more than 50"][0]), compiles=10)

    result = search(shape_sequences(B), B, attempt, Budget(2000, 60, compiles=200), seed=3)
    assert result.spent == "compiles"
    assert len(runs) <= 21
    if result.problem:
        assert sizes(result.sequence)[-1] > 50


@settings(max_examples=100)
@given(st.integers(1, 5), st.integers(2, 64), st.data())
def test_the_result_is_minimal(length, least, data):
    """With a call dropped or one size lower, the sequence no longer fails."""
    def fails(sequence):
        return len(sequence) >= length and sizes(sequence)[-1] >= least

    start = data.draw(shape_sequences(B, max_calls=8).filter(fails))
    assert sizes(minimal(start, B, fails)) == [2] * (length - 1) + [least]


def test_shrinking_keeps_to_the_kind_of_fault():
    """A crash is not turned into a recompile on the way down."""
    def attempt(sequence):
        last = sizes(sequence)[-1]
        kind = "crash" if last > 40 else "recompile" if last > 20 else ""
        return Examined(SequenceProblem(kind, "", len(sequence) - 1) if kind else None, 1, len(sequence))

    kinds = {search(shape_sequences(B, 1), B, attempt, Budget(200), seed=s).problem.kind for s in range(20)}
    assert kinds == {"crash", "recompile"}


def breaks_mostly(wrong_at, order=None):
    """What an attempt says of a model that breaks its graph at most sizes, and computes wrongly at few."""
    def attempt(sequence):
        if order is not None:
            order.append(sequence)
        for place, size in enumerate(sizes(sequence)):
            if size == wrong_at:
                return Examined(SequenceProblem("value", "wrong", place), 1, len(sequence))
        for place, size in enumerate(sizes(sequence)):
            if size > 4:
                return Examined(SequenceProblem("graph_breaks", "broken", place, severity=2), 1, len(sequence))
        return HOLDS

    return attempt


@pytest.mark.parametrize("seed", range(5))
def test_wrong_numbers_do_not_hide_behind_a_graph_break(seed):
    """The search goes on after what is mild. Both are told, the worst first, and each is made minimal."""
    result = search(shape_sequences(B), B, breaks_mostly(37), Budget(examples=2000), seed=seed)
    worst, mild = result.worst_first
    assert (worst.problem.kind, sizes(worst.sequence)) == ("value", [37])
    assert (mild.problem.kind, sizes(mild.sequence)) == ("graph_breaks", [5])
    assert (result.problem, result.sequence) == (worst.problem, worst.sequence)


def test_what_is_mild_alone_is_told_when_the_budget_is_spent():
    """As many sequences are run as for a model without any fault, and shrinking comes behind them."""
    order = []
    result = search(shape_sequences(B), B, breaks_mostly(None, order), Budget(examples=50))
    (mild,) = result.failing
    assert (mild.problem.kind, sizes(mild.sequence), mild.cut) == ("graph_breaks", [5], "")
    assert 40 <= result.examples <= 50
    cut = search(shape_sequences(B), B, breaks_mostly(None), Budget(100, 60, compiles=9))
    assert (cut.worst.cut, cut.spent) == ("compiles", "compiles")


def test_what_is_worse_may_turn_up_while_a_mild_fault_is_shrunk():
    """Then it is told first, although no drawn sequence showed it."""
    result = search(shape_sequences(B), B, breaks_mostly(5), Budget(examples=1), first=[(call(B=40), call(B=60))])
    assert [failing.problem.kind for failing in result.worst_first] == ["value", "graph_breaks"]
    assert [sizes(failing.sequence) for failing in result.worst_first] == [[5], [6]]


def test_kept_sequences_are_tried_until_one_shows_the_worst():
    """Both faults are kept, and found again before anything is drawn; what holds again is dropped."""
    database = InMemoryExampleDatabase()

    def run(attempt, examples=2000):
        return search(shape_sequences(B), B, attempt, Budget(examples), database=database, key="cell")

    run(breaks_mostly(37))
    assert len(list(database.fetch(b"torchcompile:cell"))) == 2
    again = run(breaks_mostly(37), 1)
    assert {failing.problem.kind for failing in again.failing if failing.kept} >= {"value"}
    half = run(breaks_mostly(None), 1)
    assert [failing.problem.kind for failing in half.failing if failing.kept] == ["graph_breaks"]
    assert run(lambda sequence: HOLDS, 1).problem is None
    assert not list(database.fetch(b"torchcompile:cell"))


def test_a_mild_kind_that_somebody_has_told_is_not_told_again():
    """What was found with the backend of the first rung."""
    searched = Search(shape_sequences(B), B, breaks_mostly(37), Budget(2000), told=frozenset({"graph_breaks"}))
    searched.find()
    searched.shrink()
    assert [failing.problem.kind for failing in searched.result.failing] == ["value"]


def test_code_and_data_of_a_sequence():
    """A sequence prints as code that makes it, and survives JSON."""
    sequence = (call(B=2, S=8), call(B=3, S=8, training=False))
    assert as_code(sequence) == "[call(B=2, S=8), call(B=3, S=8, training=False)]"
    assert tuple(eval(as_code(sequence), {"call": call})) == sequence
    assert from_plain(as_plain(sequence)) == sequence


@pytest.mark.parametrize("dims", [
    {"B": Dim(min=1, max=32)}, {"B": Dim(min=4, max=50, multiple_of=4)}, {"B": Dim(choices=(2, 4))}, {"B": Dim(size=8)},
])
def test_a_kept_sequence_of_sizes_that_the_dims_no_longer_have(dims):
    """It is dropped, not run: the dims say what the model takes."""
    database = InMemoryExampleDatabase()
    holds = FAULTS["more than 50"][0]
    search(shape_sequences(B), B, lambda s: first(s, holds), Budget(2000), database=database, key="cell")
    result = search(shape_sequences(dims), dims, lambda s: first(s, holds), Budget(20), database=database, key="cell")
    assert result.problem is None
    assert not list(database.fetch(b"torchcompile:cell"))
