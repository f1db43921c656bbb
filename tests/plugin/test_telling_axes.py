"""What failing cells have in common, as the page's map has it."""

from __future__ import annotations

import itertools

import pytest

from pytest_torchcompile.plugin.telling_axes import telling_axes


def cells(**statuses):
    """Eight cells of three axes; a status of a cell by its id."""
    made = []
    for values in itertools.product(("net", "gpt"), ("eager", "inductor"), ("auto", "static")):
        name = "_".join(values)
        made.append({"id": name, "axes": dict(zip(("model", "backend", "dynamic"), values, strict=True)),
                     "status": statuses.get(name, "pass")})
    return made


@pytest.mark.parametrize(("failing", "words"), [
    (lambda cell: cell["axes"]["backend"] == "inductor", "backend inductor"),
    (lambda cell: cell["id"].startswith("gpt_inductor"), "model gpt, backend inductor"),
    (lambda cell: True, ""),
    (lambda cell: False, ""),
])
def test_the_axes_that_tell(failing, words):
    every = cells()
    assert telling_axes(every, {cell["id"] for cell in every if failing(cell)}) == words


def test_cells_without_a_result_tell_nothing():
    """Of backend inductor only one was run: whether the others would fail nobody knows."""
    skipped = dict.fromkeys(("net_eager_auto", "gpt_eager_auto", "gpt_eager_static"), "skip")
    every = cells(**skipped)
    inductor = {cell["id"] for cell in every if cell["axes"]["backend"] == "inductor"}
    assert telling_axes(every, inductor) == "backend inductor"


def test_no_cells_at_all():
    assert telling_axes([], []) == ""
