"""What is said where a worker has no program: whose mistake that is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract import history_run
from pytest_torchcompile.contract.history_run import Program
from pytest_torchcompile.contract.worker import ProgramSource, _made_program

pytestmark = pytest.mark.needs_torch
SOURCE = ProgramSource(f"{__name__}:program_of", {}, ("strides",), {"B": 2})


def program_of(data):
    """A program; ``make`` in the data takes the place of its factory."""
    return Program(data.get("make", lambda: nn.Linear(4, 4)), {"backend": "eager"},
                   lambda sizes, seed: Batch.of(torch.ones(sizes["B"], 4)), None, False, 0)


def raises(*_):
    raise ValueError("planted")


def test_a_program():
    program, (word, _) = _made_program(SOURCE)
    assert isinstance(program, Program)
    assert word == "ready"


def test_a_factory_that_raises():
    """The user's."""
    source = ProgramSource(SOURCE.target, {"make": raises}, SOURCE.names, SOURCE.sizes)
    assert _made_program(source) == (None, ("failed", "ValueError: planted"))


def test_a_mutation_that_raises(monkeypatch):
    """Ours: no function of the user's runs where choices are looked for."""
    monkeypatch.setattr(history_run, "mutation", raises)
    program, (word, text) = _made_program(SOURCE)
    assert program is None
    assert word == "own"
    assert text.startswith("pytest-torchcompile itself failed, not the model:\n")
    assert "ValueError: planted" in text


def with_settings(*settings):
    """A program of which the user names settings."""
    return ProgramSource(SOURCE.target, {}, ("torch_settings",), SOURCE.sizes, settings)


def test_settings_that_the_user_names_are_tried():
    _, (word, (offered, _)) = _made_program(with_settings("torch._dynamo.config.recompile_limit=9"))
    assert word == "ready"
    assert offered["torch_settings"][-1] == "torch._dynamo.config.recompile_limit=9"


@pytest.mark.parametrize(("setting", "says"), [
    ("torch._dynamo.config.recompile_limits=9",
     "--compile-fuzz-settings: this torch has no setting torch._dynamo.config.recompile_limits; did you mean "
     "'recompile_limit'?"),
    ("torch._nowhere.config.x=9", "--compile-fuzz-settings: torch._nowhere.config is no module of settings in this "
                                  "torch; expected one such as torch._dynamo.config"),
    ("torch._dynamo.config.specialize_float=false",
     "--compile-fuzz-settings: torch._dynamo.config.specialize_float is False in this torch; 'false' is none of its "
     "values, expected True or False"),
    ("torch.nn.functional.relu=9", "--compile-fuzz-settings: torch.nn.functional is no module of settings"),
])
def test_a_setting_that_this_torch_does_not_have(setting, says):
    program, (word, text) = _made_program(with_settings(setting))
    assert (program, word) == (None, "not_loaded")
    assert text.startswith(says)
