"""Dims: which sizes a cell runs, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.dims import Dim, batch_sizes, dim_mistakes, evaluate, first_sizes, names_in
from pytest_torchcompile.errors import UsageError


def test_numbers_and_expressions():
    """A number is itself; an expression follows the dims it uses, in whatever order they are given."""
    dims = {"T": Dim(expression="2*S + 1"), "S": Dim(size=8), "U": Dim(expression="max(T, 3) // 2 % 7")}
    assert batch_sizes(dims) == [{"T": 17, "S": 8, "U": 1}]


def test_no_dims_is_one_batch_without_sizes():
    """A model without dims is still run once."""
    assert batch_sizes({}) == [{}]


def test_lists_step_together_and_shorter_ones_begin_again():
    """The k-th batch takes the k-th size of every list."""
    dims = {"B": Dim(choices=(3, 5)), "S": Dim(buckets=(32, 64, 128)), "T": Dim(expression="S + 1")}
    assert batch_sizes(dims) == [
        {"B": 3, "S": 32, "T": 33},
        {"B": 5, "S": 64, "T": 65},
        {"B": 3, "S": 128, "T": 129},
    ]


def test_single_takes_the_first_bucket():
    """Where one batch is needed it is the first."""
    assert first_sizes({"S": Dim(buckets=(64, 32))}) == {"S": 64}


def test_free_dim_takes_a_middle_size():
    """Bounds only: the multiple next to the middle."""
    assert first_sizes({"H": Dim(min=8, max=24, multiple_of=8)}) == {"H": 16}


def test_free_dim_shuns_the_sizes_of_others():
    """Equal sizes would get one symbol, so the middle gives way: to numbers, buckets, expressions."""
    assert first_sizes({"B": Dim(size=16), "H": Dim(min=8, max=24, multiple_of=8)})["H"] == 24
    assert first_sizes({"S": Dim(buckets=(4, 16)), "H": Dim(min=8, max=24, multiple_of=8)})["H"] == 24
    sizes = first_sizes({"B": Dim(size=6), "S": Dim(min=2, max=8), "T": Dim(expression="S + 1")})
    assert len({*sizes.values()}) == 3


def test_free_dim_shuns_0_and_1():
    """0 and 1 are never dynamic in torch, so another size is taken where there is one."""
    assert first_sizes({"H": Dim(min=0, max=2)}) == {"H": 2}
    assert first_sizes({"H": Dim(min=0, max=1)}) == {"H": 1}


def test_free_dim_that_must_collide_has_a_size_all_the_same():
    """Bounds that leave no room are the user's own wish."""
    assert first_sizes({"A": Dim(size=4), "B": Dim(min=4, max=4)}) == {"A": 4, "B": 4}


@given(
    least=st.integers(0, 40),
    span=st.integers(0, 60),
    step=st.integers(1, 9),
    others=st.lists(st.integers(0, 60), max_size=6),
)
def test_free_dim_property(least, span, step, others):
    """The size is allowed, and it collides or is below 2 only if every allowed size does."""
    free = Dim(min=least, max=least + span, multiple_of=step)
    dims = {"free": free, **{f"d{i}": Dim(size=size) for i, size in enumerate(others)}}
    allowed = [size for size in range(least, least + span + 1) if size % step == 0]
    if not allowed:
        assert dim_mistakes(dims)
        return
    size = first_sizes(dims)["free"]
    assert free.allows(size)
    assert size in allowed
    if {*allowed} - {0, 1, *others}:
        assert size not in {0, 1, *others}


@given(st.lists(st.lists(st.integers(2, 99), min_size=1, max_size=5, unique=True), min_size=1, max_size=4))
def test_every_listed_size_is_run(lists):
    """However lists of different lengths step, each of their sizes occurs in some batch."""
    rows = batch_sizes({f"d{i}": Dim(choices=tuple(sizes)) for i, sizes in enumerate(lists)})
    assert len(rows) == max(map(len, lists))
    for i, sizes in enumerate(lists):
        assert {row[f"d{i}"] for row in rows} == {*sizes}


@given(st.data())
def test_expressions_agree_with_python(data):
    """Our evaluation is Python's, on whatever it accepts."""
    leaf = st.sampled_from(["a", "b", "c"]) | st.integers(0, 20).map(str)
    tree = st.recursive(
        leaf,
        lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ) | inner.map(lambda t: f"(-{t})") | st.tuples(inner, inner).map(lambda t: f"max({t[0]}, {t[1]})"),
        max_leaves=8,
    )
    text = data.draw(tree)
    sizes = {"a": 3, "b": 7, "c": 12}
    try:
        expected = eval(text, {"max": max}, sizes)
    except ZeroDivisionError:
        expected = -1
    if expected < 0:
        with pytest.raises(UsageError, match="gives no size"):
            evaluate(text, sizes)
    else:
        assert evaluate(text, sizes) == expected


def test_names_leave_out_called_functions():
    """`max` is a name only where it is not called."""
    assert names_in("max(S, 2) + max") == {"S", "max"}


def test_long_chain_of_expressions():
    """Thousands of dims that use each other neither overflow nor take long."""
    dims = {"d0": Dim(size=1)} | {f"d{i}": Dim(expression=f"d{i - 1} + 1") for i in range(1, 3000)}
    assert first_sizes(dims)["d2999"] == 3000


MISTAKES = {
    "buckets and choices": (Dim(buckets=(2,), choices=(3,)), "has both buckets and choices; expected one"),
    "no bound": (Dim(min=3), "has no size; expected buckets, choices or max"),
    "outside": (Dim(buckets=(8, 256), max=128), "256 is outside the dim's own min, max or multiple_of"),
    "no multiple": (Dim(min=9, max=15, multiple_of=8), "no multiple of 8 lies between min 9 and max 15"),
    "unknown": (Dim(expression="Sq + 1"), "uses 'Sq', which is not a dim; did you mean 'S'? Known: S, X"),
    "itself": (Dim(expression="X + 1"), "is computed from itself: X -> X"),
    "syntax": (Dim(expression="2S"), "'2S' is not an expression of integers, other dims"),
    "division": (Dim(expression="S / 2"), "'S / 2' divides with '/', which gives no whole number; use '//'"),
    "power": (Dim(expression="S ** 2"), "'S ** 2' uses the operator Pow; allowed are integers"),
    "call": (Dim(expression="abs(S)"), "'abs(S)' uses 'abs(S)'; allowed are"),
    "attribute": (Dim(expression="S.__class__"), "uses 'S.__class__'; allowed are"),
    "float": (Dim(expression="S + 1.5"), "uses '1.5'; allowed are"),
    "bool": (Dim(expression="True"), "uses 'True'; allowed are"),
    "odd literal": (Dim(expression="1(2)"), "uses '1(2)'; allowed are"),
    "parentheses": (Dim(expression="(" * 99 + "S" + ")" * 99 + "+(((1)))"), "at most 200 are read"),
    "null": (Dim(expression="S\0"), "is not an expression of"),
    "no arguments": (Dim(expression="max()"), r"uses 'max()'; allowed are"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    """Each mistake is said in words, for the dim that has it."""
    dim, text = MISTAKES[case]
    ((name, found),) = dim_mistakes({"S": Dim(size=2), "X": dim})
    assert name == "X"
    assert text in found


def test_cycle_is_shown_along_its_way():
    """A cycle of several dims names each of them."""
    dims = {"A": Dim(expression="B"), "B": Dim(expression="C + 1"), "C": Dim(expression="A")}
    ((_, text),) = dim_mistakes(dims)
    shown = text.removeprefix("is computed from itself: ").split(" -> ")
    assert shown[0] == shown[-1]
    assert {*pairwise(shown)} == {("A", "B"), ("B", "C"), ("C", "A")}


def test_bindings_refuse_a_mistake():
    """Without a matrix the mistake is an error that names the dim."""
    with pytest.raises(UsageError, match="dim 'S': has no size; expected buckets, choices or max"):
        batch_sizes({"S": Dim()})


@pytest.mark.parametrize(("text", "given"), [("S - 9", "S = 4"), ("S // (S - 4)", "S = 4"), ("-1", None)])
def test_no_size(text, given):
    """A negative result, or a division by zero, is no size."""
    with pytest.raises(UsageError) as caught:
        batch_sizes({"S": Dim(size=4), "T": Dim(expression=text)})
    assert str(caught.value) == f"{text!r} gives no size" + (f" for {given}" if given else "")
