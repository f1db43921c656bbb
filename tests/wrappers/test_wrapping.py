"""The values of the axis `wrapper`: names, compile orders, numbers of ranks, and what a mistake in one is told."""

from __future__ import annotations

import pytest

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import ORDERS, Wrapping

MATRIX = """
version: 1
models:
  net: {{factory: "pytest_torchcompile.zoo:tiny_head", inputs: "pytest_torchcompile.zoo:vector_batch", dims: {{B: 4}}}}
axes:
  wrapper: ["{}"]
"""


@pytest.mark.parametrize(("value", "expected"), [
    ("none", Wrapping("none")),
    ("ddp", Wrapping("ddp", "compile_then_wrap", 2)),
    ("ddp*3", Wrapping("ddp", "compile_then_wrap", 3)),
    ("ddp*4", Wrapping("ddp", "compile_then_wrap", 4)),
    ("ddp@wrap_then_compile", Wrapping("ddp", "wrap_then_compile", 2)),
    ("fsdp2+tp@inner_blocks*8", Wrapping("fsdp2+tp", "inner_blocks", 8)),
    ("fsdp2+tp*6", Wrapping("fsdp2+tp", "inner_blocks", 6)),
    ("mypkg.parallel:wrap", Wrapping("mypkg.parallel:wrap", "", 1)),
    ("mypkg.parallel:wrap@inner_blocks*3", Wrapping("mypkg.parallel:wrap", "inner_blocks", 3)),
])
def test_values_are_read(value, expected):
    """Name, order and ranks; what is not given is the wrapper's own."""
    assert Wrapping.read(value) == expected


@pytest.mark.parametrize(("value", "text"), [
    ("fsdp3", "'fsdp3' is not a wrapper, nor module:attribute; did you mean 'fsdp"),
    ("ddp@inner_block", "wrapper 'ddp': 'inner_block' is not a compile order; did you mean 'inner_blocks'?"),
    ("tp@compile_then_wrap", "wrapper 'tp' has no compile order 'compile_then_wrap'; it has wrap_then_compile, inner_"),
    ("none@inner_blocks", "wrapper 'none' has no compile order 'inner_blocks'; it has one way only"),
    ("ddp*2@inner_blocks", "'ddp*2@inner_blocks': the order comes before the ranks; write ddp@inner_blocks*2"),
    ("fsdp2*fake8@inner_blocks", "the order comes before the ranks; write fsdp2@inner_blocks*fake8"),
    ("ddp*two", "wrapper 'ddp*two': 'two' is not a number of ranks; expected for example ddp*2"),
    ("ddp*0", "'0' is not a number of ranks"),
    ("ddp*1", "wrapper 'ddp' runs on 2, 3, 4, ... ranks, found *1"),
    ("fsdp2+tp*2", "wrapper 'fsdp2+tp' runs on 4, 6, 8, ... ranks, found *2"),
    ("fsdp2+tp*5", "wrapper 'fsdp2+tp' runs on 4, 6, 8, ... ranks, found *5"),
    ("autocast*2", "wrapper 'autocast' runs in one rank, found *2; take it off"),
])
def test_a_mistake_is_one_line_of_the_matrix(value, text, tmp_path):
    """With its place, what was found, and what is known."""
    path = tmp_path / "matrix.yaml"
    path.write_text(MATRIX.format(value))
    with pytest.raises(MatrixError) as raised:
        load_matrix(path, shown="matrix.yaml")
    assert text in str(raised.value)
    assert str(raised.value).startswith("matrix.yaml:6:13: ")


def test_the_table_agrees_with_itself():
    """Orders are known ones, and only what runs on several ranks has any."""
    for entry in WRAPPERS.values():
        assert set(entry.orders) <= set(ORDERS)
        assert bool(entry.orders) == (entry.ranks > 1)
