"""Each mutation does what its name says, to the values too, and says what it is for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.contract.changed_batch import changed_batch
from pytest_torchcompile.contract.mutation import NAMES, chosen_names, mutation
from pytest_torchcompile.contract.script import copied_source
from pytest_torchcompile.errors import UsageError

pytestmark = pytest.mark.needs_torch


def changed(value, **mutations):
    """The tensors of a batch after mutations."""
    return changed_batch(Batch.of(value), mutations).tensors()


@pytest.mark.parametrize("name", NAMES)
def test_its_source_needs_torch_alone(name):
    """It goes into scripts."""
    source = copied_source(mutation(name).act)
    imported = [line.split()[1].partition(".")[0] for line in source.splitlines()
                if line.startswith(("import ", "from "))]
    assert set(imported) <= {"__future__", "ast", "torch", "typing", "functools", "contextvars", "threading", "copy",
                             "importlib"}
    known: dict[str, object] = {}
    exec(source, known)
    assert callable(known[name])


@pytest.mark.parametrize("choice", ["transposed 0", "sliced 0", "offset 0"])
def test_other_memory_holds_the_same_values(choice):
    x = torch.randn(3, 4)
    (other,) = changed(x, strides=choice)
    assert torch.equal(other, x)
    assert other.stride() != x.stride() or other.storage_offset() == 1


def test_special_values_of_inputs_that_are_not_contiguous():
    """Such an input is no reason to leave the call out."""
    (other,) = changed(torch.randn(3, 4), strides="transposed 0", special_values="nan 0")
    assert other.stride() == (1, 3)
    assert other.isnan().sum() == 1


def test_mixed_special_values_fill_a_tensor():
    """Each of them more than once, so that a vectorised loop and its rest both meet it."""
    (other,) = changed(torch.randn(2, 37), special_values="mixed 0")
    largest = torch.finfo(torch.float32).max
    found = [int(count) for count in (other.isnan().sum(), (other == largest).sum(), (other == 2.0**31).sum())]
    assert min(found) >= 3
    assert other.isinf().any()


def test_an_expanded_input_is_one_row():
    (other,) = changed(torch.randn(3, 4), strides="expanded 0")
    assert other.stride() == (0, 1)


def test_what_a_copy_keeps():
    """A mutated batch is copied for each side, with its strides, its offset and its sharing."""
    (other,) = changed_batch(Batch.of(torch.randn(3, 4)), {"strides": "offset 0"}).clone().tensors()
    assert other.storage_offset() == 1
    two = Batch.of((torch.randn(3), torch.randn(3)))
    first, second = changed_batch(two, {"aliasing": "views 0 1"}).clone().tensors()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    first, second = changed_batch(two, {"aliasing": "same 0 1"}).clone().tensors()
    assert first is second


def test_arguments_in_another_order():
    batch = changed_batch(Batch.of({"x": torch.ones(1), "scale": 2.0, "on": True}), {"python_values": "order"})
    assert list(batch.kwargs) == ["on", "scale", "x"]
    assert changed_batch(batch, {"python_values": "half scale"}).kwargs["scale"] == 1.0


def test_what_does_not_go_with_a_batch():
    """One tensor can't share memory with a second one."""
    assert changed_batch(Batch.of(torch.randn(3, 4)), {"aliasing": "same 0 1"}) is None


def test_what_is_offered():
    module, batch = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Batch.of(torch.randn(3, 4))
    assert mutation("memory_format").choices(module, batch) == []
    assert mutation("aliasing").choices(module, batch) == []
    assert mutation("module_change").choices(module, batch) == [
        "attribute", "load", "convert", "replace 0.weight", "refill 1.running_mean", "adapt 0", "parametrize 0",
        "tie 0.bias 1.weight"]


@pytest.mark.parametrize("choice", ["attribute", "load", "convert", "replace 0.weight", "refill 1.running_mean",
                                    "adapt 0", "parametrize 0", "tie 0.bias 1.weight"])
def test_a_changed_module_still_runs(choice):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    mutation("module_change").act(module, choice)
    assert module(torch.randn(3, 4)).shape == (3, 4)


def test_an_unknown_mutation():
    with pytest.raises(UsageError, match="'stride' is no mutation of the contract; did you mean 'strides'"):
        chosen_names(["stride"])


@pytest.mark.parametrize(("value", "expected"), [("7", 7), ("False", False), ("None", None), ("cpp", "cpp")])
def test_values_of_settings(value, expected):
    with mutation("torch_settings").act(f"torch._inductor.config.cpu_backend={value}", "cpu"):
        assert torch._inductor.config.cpu_backend == expected


def test_another_text():
    batch = changed_batch(Batch.of({"x": torch.ones(1), "how": "sum"}), {"python_values": "text how"})
    assert batch.kwargs["how"] == "sum_"
    assert mutation("python_values").choices(nn.Identity(), batch) == ["text how", "none how", "order"]
