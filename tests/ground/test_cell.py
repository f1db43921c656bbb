"""Cell: its id, its axes, and its way through JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchcompile.cell import AXES, DEFAULTS, DYNAMIC, Cell

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def test_id_shows_five_axes():
    """Model, backend, mode, dynamic and wrapper are always shown, in this order."""
    assert Cell(model="mini_gpt").id == "mini_gpt-inductor-default-auto-none"


def test_id_shows_others_where_they_are_not_at_their_default():
    """A further axis is shown if it says something; the user's with their names."""
    cell = Cell(model="m", dtype="bfloat16", device="cuda:1", phase="inference", user=(("a", 1), ("b", None)))
    assert cell.id == "m-inductor-default-auto-none-bfloat16-cuda_1-inference-a=1-b=None"


def test_id_is_one_word_for_pytest():
    """No `::`, slash or blank gets into a node id."""
    cell = Cell(model="m", backend="pkg.mod:mine", user=(("a", "x::y/z [1]"),))
    assert cell.id == "m-pkg.mod_mine-default-auto-none-a=x__y_z__1_"


def test_id_tells_equal_values_of_different_types_apart():
    """1, 1.0 and true are equal in Python, and must not share what was remembered for one of them."""
    ids = [Cell(model="m", user=(("a", value),)).id for value in (1, True, 1.0)]
    assert ids == [f"m-inductor-default-auto-none-a={text}" for text in ("1", "True", "1.0")]


def test_axes_are_the_fields():
    """What a marker selects by: every axis with its value, the user's last."""
    axes = Cell(model="m", user=(("width", 64),)).axes
    assert list(axes) == [*AXES, "width"]
    assert axes == DEFAULTS | {"model": "m", "width": 64}


def test_dynamic_values():
    """The three values of torch.compile's `dynamic`."""
    assert [Cell(model="m", dynamic=word).torch_dynamic for word in DYNAMIC] == [None, False, True]


@given(st.dictionaries(st.text(min_size=1), SCALARS, max_size=4))
def test_way_through_json(user):
    """A cell that went through JSON is the same cell."""
    cell = Cell(model="m", mode="max-autotune", user=tuple(sorted(user.items())))
    again = Cell.from_dict(json.loads(json.dumps(cell.to_dict())))
    assert again == cell
    assert again.id == cell.id


def test_a_cell_of_an_older_version():
    """Axes that it did not have are at their defaults."""
    plain = Cell(model="m", mode="max-autotune").to_dict()
    del plain["compiler"]
    assert Cell.from_dict(plain) == Cell(model="m", mode="max-autotune")
