"""What stands in for parts that a finding does without, and which side a finding says has moved."""

from __future__ import annotations

import math

import contract_programs
import pytest
import torch

from pytest_torchcompile.contract.contract_search import search_contract
from pytest_torchcompile.contract.finding_text import finding_record, finding_text
from pytest_torchcompile.contract.history_run import moved_side
from pytest_torchcompile.contract.script import Shown, written_script
from pytest_torchcompile.contract.stand_in import code_of, linear_stand_ins, path_of, put_in, stand_in_words
from pytest_torchcompile.contract.worker import ProgramSource
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.fuzz.search import Budget
from pytest_torchcompile.oracle.leaf_limits import Leaf

pytestmark = [pytest.mark.needs_torch, pytest.mark.usefixtures("warm_spawn")]


def test_a_stand_in_is_a_text():
    assert (path_of("a.b=Linear(6, 9)"), path_of("a.b")) == ("a.b", "a.b")
    assert (code_of("a.b=Linear(6, 9)"), code_of("a.b")) == ("torch.nn.Linear(6, 9)", "torch.nn.Identity()")
    assert stand_in_words(["a", "b=Linear(6, 9)"]) == "an Identity instead of a, a Linear(6, 9) instead of b"


def test_stand_ins_are_put_in():
    module = contract_programs.widening()
    put_in(module, ["0=Linear(6, 9)", "1"])
    assert repr(module[0]) == "Linear(in_features=6, out_features=9, bias=True)"
    assert isinstance(module[1], torch.nn.Identity)
    assert module(torch.randn(2, 6)).shape == (2, 9)


def test_a_linear_fits_where_the_last_size_alone_changes():
    """A Linear needs none, and a convolution changes other sizes."""
    program = contract_programs.wrong_widening({})
    found = linear_stand_ins(program.make_model(), program.batch({"B": 2}, program.seed))
    assert found == {"0": "0=Linear(6, 9)", "0.1": "0.1=Linear(9, 9)", "1": "1=Linear(9, 9)"}


@pytest.mark.slow
def test_a_part_that_changes_sizes_is_left_out_too():
    source = ProgramSource("contract_programs:wrong_widening", {}, ("strides",), {"B": 2})
    (finding,) = search_contract(source, {"B": Dim(min=2, max=4)}, Budget(examples=2, seconds=300)).findings
    assert finding.without == ("0=Linear(6, 9)", "1")
    assert finding.told.moved == "compiled"
    script = written_script(Shown("value: output: off", contract_programs.widening, contract_programs.images, None,
                                  finding.failing.sequence, {"backend": "eager"}, without=finding.without))
    assert "module.set_submodule('0', torch.nn.Linear(6, 9))" in script
    evidence = finding_text(finding_record(finding, [("0.0", "Linear"), ("1", "LayerNorm")], script)).evidence
    assert "with a Linear(6, 9) instead of 0, an Identity instead of 1 it is the same" in evidence
    assert "the compiled side moved: eager is what is expected, or nearer to it" in evidence


@pytest.mark.parametrize(("eager", "compiled", "expected", "against", "side"), [
    (1.0, 1.5, 1.0, "float64", "compiled"),
    (1.5, 1.0, 1.0, "float64", "eager"),
    (1.5, 1.0, 1.0, "eager-draws", "compiled"),
    (math.nan, 0.0, math.nan, "float64", "compiled"),
    (math.nan, math.inf, math.inf, "float64", "eager"),
    ("float32", "float64", None, "eager", "compiled"),
])
def test_the_side_that_moved(eager, compiled, expected, against, side):
    leaf = Leaf("output", "value", eager=eager, compiled=compiled, expected=expected, against=against)
    assert moved_side(leaf) == side
