"""Torch's settings and random states: what a cell changes is told by name, and put back."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.thread_settings import set_everywhere
from pytest_torchcompile.state import torch_state
from pytest_torchcompile.state.torch_state import (
    SettingsSnapshot,
    forget_compiled,
    isolated,
    own_random_draws,
    same_random_draws,
    seed_everything,
    stance,
)

pytestmark = pytest.mark.needs_torch


def set_config(value):
    torch._dynamo.config.recompile_limit = value


CHANGES = {
    "grad mode: True -> False": lambda: torch.set_grad_enabled(False),
    "autocast on cpu: False -> True": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast dtype on cpu: torch.bfloat16 -> torch.float16": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "default dtype: torch.float32 -> torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms: (False, False) -> (True, True)":
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "float32 matmul precision: highest -> high": lambda: torch.set_float32_matmul_precision("high"),
    "default device: cpu -> meta": lambda: torch.set_default_device("meta"),
    "anomaly mode: False -> True": lambda: torch.set_anomaly_enabled(True),
    "stance: default -> force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "torch._dynamo.config.recompile_limit: 8 -> 99": lambda: set_config(99),
}


@pytest.fixture(autouse=True)
def _as_before():
    """Whatever a test leaves, the next one finds torch as it was."""
    snapshot = SettingsSnapshot()
    yield
    snapshot.restore()


@pytest.mark.parametrize("text", CHANGES)
def test_a_setting_is_told_and_put_back(text):
    """By its name, what it was and what it is."""
    snapshot = SettingsSnapshot()
    assert snapshot.changed() == []
    CHANGES[text]()
    changed = snapshot.changed()
    # Torch may note the same in the settings of Inductor too.
    assert changed[0] == text
    assert all(each.startswith("torch._inductor.config.") for each in changed[1:])
    assert snapshot.restore() == changed
    assert snapshot.changed() == snapshot.restore() == []


def test_several_settings():
    """All of them, and the second restoration finds nothing."""
    snapshot = SettingsSnapshot()
    torch.set_grad_enabled(False)
    set_config(99)
    assert len(snapshot.restore()) == 2
    assert torch.is_grad_enabled()
    assert torch._dynamo.config.recompile_limit == 8


class Refuses:
    """As an array does, whose comparison has no single answer."""

    def __eq__(self, other):
        raise ValueError("the truth value is ambiguous")

    __hash__ = None


@pytest.mark.parametrize(("one", "other", "equal"), [(1, 1, True), (1, 2, False), (Refuses(), 1, False)])
def test_equal_settings(one, other, equal):
    """An object of the user's that refuses to be compared has changed; the same object has not."""
    assert torch_state._is_equal(one, other) is equal
    assert torch_state._is_equal(one, one)


def test_isolated_tells_what_leaks():
    """And leaves neither it nor a random state behind."""
    leaks = ["an earlier one"]
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    with isolated(leaks):
        torch.rand(1)
        random.random()
        set_config(99)
    assert leaks == ["an earlier one", "torch._dynamo.config.recompile_limit: 8 -> 99"]
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_isolated_when_the_block_raises():
    """The settings are put back all the same."""
    leaks = []

    def raises():
        with isolated(leaks):
            set_config(99)
            raise KeyError

    with pytest.raises(KeyError):
        raises()
    assert leaks == ["torch._dynamo.config.recompile_limit: 8 -> 99"]


def test_isolated_has_the_default_stance():
    """The one that was in force is in force again afterwards, and is no leak."""
    leaks = []
    torch.compiler.set_stance("force_eager")
    with isolated(leaks):
        assert stance() == "default"
    assert stance() == "force_eager"
    assert leaks == []


def test_a_torch_without_stances(monkeypatch):
    """One sentence, with the name that is missing."""
    monkeypatch.delattr("torch._dynamo.eval_frame._stance")
    with pytest.raises(InstrumentError, match=r"has no torch\._dynamo\.eval_frame\._stance, which pytest-torchcompile "
                                              "reads; please report it with this version"):
        stance()


def test_compiled_code_is_forgotten():
    """With torch's counters of it."""
    from torch._dynamo.utils import counters

    counters["frames"]["ok"] = 3
    forget_compiled()
    assert not counters["frames"]


def test_seeds():
    """The generators of torch, Python and NumPy draw the same again."""
    numpy = pytest.importorskip("numpy")

    def drawn():
        seed_everything(2**40)
        return torch.rand(1).item(), random.random(), float(numpy.random.rand())

    first = drawn()
    torch.rand(5)
    assert drawn() == first


@pytest.mark.parametrize(("draws", "expected"), [(same_random_draws, True), (own_random_draws, False)])
def test_whose_random_numbers_inductor_draws(draws, expected):
    """For the block; afterwards as before."""
    from torch._inductor import config

    before = config.fallback_random
    with draws():
        assert config.fallback_random is expected
    assert config.fallback_random == before


def test_random_draws_of_a_thread_that_compiles():
    """Autograd compiles the backward of a GPU in a thread of its own, at its first run; there they are eager's too."""
    seen = []

    def noting(module, example_inputs):
        seen.append((threading.current_thread().name, torch._inductor.config.fallback_random))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=noting, bw_compiler=noting)
    with same_random_draws():
        # A backward that needs no symbolic size is compiled when it first runs.
        output = torch.compile(torch.sum, backend=backend)(torch.ones(5, requires_grad=True))
        other = threading.Thread(target=output.backward, name="autograd")
        other.start()
        other.join()
    assert seen == [("MainThread", True), ("autograd", True)]
    assert not torch._inductor.config.fallback_random
    read: list[bool] = []
    thread = threading.Thread(target=lambda: read.append(torch._inductor.config.fallback_random))
    thread.start()
    thread.join()
    assert read == [False]


def test_a_setting_that_torch_no_longer_has():
    told = r"has no torch._inductor.config._config\['gone'\].default, which"
    with pytest.raises(InstrumentError, match=told), set_everywhere("torch._inductor.config", "gone", True):
        pass
