"""Batch: how a factory's return value becomes arguments, and what a copy keeps."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from pytest_torchcompile.batch import Batch, KeptBatch, source_of

pytestmark = pytest.mark.needs_torch


def test_a_tensor_is_one_argument():
    """A tensor becomes the only positional argument."""
    x = torch.ones(2)
    batch = Batch.of(x)
    assert batch.args == (x,)
    assert batch.kwargs == {}
    assert batch.value is x


def test_a_tuple_or_list_holds_the_arguments():
    """Tuples and lists are spread over the positional arguments; the loss gets them as they were."""
    x, y = torch.ones(2), torch.zeros(2)
    for value in ((x, y), [x, y]):
        batch = Batch.of(value)
        assert [id(a) for a in batch.args] == [id(x), id(y)]
        assert batch.kwargs == {}
        assert batch.value is value


def test_a_dict_holds_keyword_arguments():
    """A dict is spread over the keyword arguments, and so is what HF tokenizers return."""
    x = torch.ones(2)
    for value in ({"ids": x}, UserDict({"ids": x})):
        batch = Batch.of(value)
        assert batch.args == ()
        assert batch.kwargs["ids"] is x


def test_a_pair_of_sequence_and_dict_holds_both():
    """(args, kwargs) is told from two positional arguments."""
    x, y = torch.ones(2), torch.zeros(2)
    batch = Batch.of(((x,), {"y": y}))
    assert batch.args[0] is x
    assert batch.kwargs["y"] is y
    assert Batch.of((x, {"y": y})).args[1] == {"y": y}


def test_what_a_loss_is_given():
    """The value as it was returned; a tuple that only makes a dict one argument is taken off."""
    x = torch.ones(2)
    for kind in (dict, UserDict):
        given = kind(ids=x)
        assert Batch.of((given,)).for_loss is given
        assert Batch.of((given,)).args == (given,)
        assert Batch.of([given]).clone().for_loss["ids"].equal(x)
    for value in (x, (x,), (x, x), {"ids": x}, ((x,), {"y": x}), (x, {"y": x})):
        assert Batch.of(value).for_loss is value


def test_anything_else_is_one_argument():
    """An object that is no container is handed over whole."""
    thing = object()
    assert Batch.of(thing).args == (thing,)


@pytest.mark.parametrize("offset", [0, 3, 64])
def test_a_clone_is_no_view_and_as_aligned(offset):
    """Dynamo guards what a view is a view of: such a batch would be compiled for anew where its like has been."""
    tensor = torch.arange(80.0)[offset:offset + 6].view(2, 3)
    copy = Batch.of(tensor).clone().args[0]
    assert torch.equal(copy, tensor)
    assert not copy._is_view()
    assert copy.storage_offset() == offset % 64


def test_a_clone_has_new_memory_and_the_same_values():
    """Writing to a clone leaves the original alone."""
    batch = Batch.of((torch.ones(3), {"y": torch.ones(2)}))
    copy = batch.clone()
    copy.args[0].mul_(5)
    assert batch.args[0].tolist() == [1, 1, 1]
    assert copy.args[0].tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:3],
        lambda x: x[::2],
        lambda x: x[0].expand(5, 4),
        lambda x: x[1:],
    ],
    ids=["transposed", "gaps", "steps", "expanded", "offset"],
)
def test_a_clone_keeps_strides(view):
    """Strides survive, also those of views with gaps and of stride 0, which Tensor.clone would drop."""
    x = view(torch.arange(16.0).view(4, 4))
    copy = Batch.of(x).clone().args[0]
    assert copy.stride() == x.stride()
    assert torch.equal(copy, x)
    assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_clone_keeps_sharing():
    """One tensor given twice stays one tensor, and views of one storage still overlap."""
    x = torch.arange(6.0)
    copy = Batch.of(((x, x[2:]), {"again": x})).clone()
    assert copy.args[0] is copy.kwargs["again"]
    assert copy.args[0] is copy.value[0][0]
    copy.args[0][2] = 40
    assert copy.args[1][0] == 40
    assert x[2] == 2


def test_a_clone_keeps_requires_grad_and_what_is_a_leaf():
    """requires_grad is kept, the graph behind an input is not, nor is its gradient."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    x.grad = torch.ones(2)
    copy = Batch.of((x, y, torch.ones(2))).clone()
    assert [a.requires_grad for a in copy.args] == [True, True, False]
    assert [a.is_leaf for a in copy.args] == [True, False, True]
    assert all(source_of(a).is_leaf and source_of(a).grad is None for a in copy.args)
    copy.args[1].sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert source_of(copy.args[1]).grad.tolist() == [1, 1]


def test_a_clone_drops_torchs_notes_and_keeps_the_users_marks():
    """What torch wrote on a tensor in an earlier call would change what a later one compiles."""
    x = torch.ones(4)
    x._dynamo_propagated_dynamic_indices = {0}
    torch._dynamo.mark_dynamic(x, 0)
    copy = Batch.of(x).clone().args[0]
    assert not hasattr(copy, "_dynamo_propagated_dynamic_indices")
    assert copy._dynamo_dynamic_indices == {0}
    assert copy._dynamo_dynamic_indices is not x._dynamo_dynamic_indices


def test_to_changes_the_dtype_of_floating_tensors_alone():
    """Integers and booleans stay, complex tensors get the complex dtype of that precision."""
    value = (torch.ones(2), torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64), True)
    wide = Batch.of(value).to(dtype=torch.float64)
    assert [a.dtype for a in wide.args[:3]] == [torch.float64, torch.int32, torch.complex128]
    assert wide.args[3] is True


def test_to_keeps_strides_and_sharing():
    """A change of dtype copies the shared memory once."""
    x = torch.arange(8.0)
    wide = Batch.of((x, x[1::2])).to(dtype=torch.float64)
    assert wide.args[1].stride() == (2,)
    wide.args[0][1] = 7.5
    assert wide.args[1][0] == 7.5


def test_objects_are_copied_and_modules_are_not():
    """A mutable object is private to its call; a module or function given as an input is itself."""

    class Cache:
        def __init__(self):
            self.seen = []

    cache, module = Cache(), torch.nn.Linear(2, 2)
    copy = Batch.of((cache, module, len)).clone()
    copy.args[0].seen.append(1)
    assert cache.seen == []
    assert copy.args[1] is module
    assert copy.args[2] is len


def test_a_batch_is_refilled_in_place():
    """The tensors are the same ones, with the other batch's values; sharing stays."""
    kept = Batch.of(({"x": torch.ones(2, 3), "n": 4}, torch.zeros(2, requires_grad=True)))
    tensors = kept.tensors()
    other = Batch.of(({"x": torch.full((2, 3), 7.0), "n": 4}, torch.ones(2, requires_grad=True)))
    assert kept.refill(other)
    assert all(one is same for one, same in zip(kept.tensors(), tensors, strict=True))
    assert [tensor.tolist() for tensor in tensors] == [[[7.0] * 3] * 2, [1.0, 1.0]]


def test_a_refilled_batch_has_no_note_of_torchs():
    """It is about the call before, and changes what the next one compiles."""
    kept = KeptBatch(Batch.of(torch.ones(2)))
    (tensor,) = kept.batch.tensors()
    tensor._dynamo_propagated_dynamic_indices = {0}
    assert kept.refill(Batch.of(torch.zeros(2)))
    assert not hasattr(tensor, "_dynamo_propagated_dynamic_indices")


def test_a_refilled_batch_has_no_gradients():
    """As a clone has none: a model that calls backward() would add to what is there."""
    kept = Batch.of(torch.ones(2, requires_grad=True))
    kept.args[0].grad = torch.ones(2)
    assert kept.refill(Batch.of(torch.zeros(2, requires_grad=True)))
    assert kept.args[0].grad is None


def test_what_a_model_has_put_in_place_of_an_input_is_not_written_to():
    """Another tensor in a dict, or other memory behind the same one: a buffer of the model, perhaps."""
    for put in (lambda inputs, own: inputs.update(x=own), lambda inputs, own: inputs["x"].set_(own)):
        other, own = Batch.of(({"x": torch.ones(2)},)), torch.zeros(2)
        kept = KeptBatch(other)
        put(kept.batch.args[0], own)
        assert not kept.refill(other)
        assert own.tolist() == [0.0, 0.0]
    kept = KeptBatch(other)
    assert kept.refill(Batch.of(({"x": torch.full((2,), 7.0)},)))
    assert kept.batch.args[0]["x"].tolist() == [7.0, 7.0]


def _with_a_hook():
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: gradient)
    return tensor


def _with_a_late_hook():
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda tensor: None)
    return tensor


def _with_an_attribute():
    tensor = torch.ones(2)
    tensor.seen = 1
    return tensor


@pytest.mark.parametrize(("kept", "other"), [
    (torch.ones(2), torch.ones(3)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2, 2), torch.ones(2, 2).t()),
    (torch.ones(2), torch.ones(2, requires_grad=True)),
    (torch.ones(1).expand(2), torch.ones(1).expand(2)),
    (_with_a_hook(), torch.ones(2, requires_grad=True)),
    (_with_a_late_hook(), torch.ones(2, requires_grad=True)),
    (_with_an_attribute(), torch.ones(2)),
    (torch.ones(2, requires_grad=True) * 2, torch.ones(2, requires_grad=True)),
    ((torch.ones(2), 3), (torch.ones(2), 4)),
    ((torch.ones(2), [torch.ones(2)]), (torch.ones(2), [])),
    ((torch.ones(2), object()), (torch.ones(2), object())),
    (torch.ones(2).to_sparse(), torch.ones(2).to_sparse()),
], ids=["shape", "dtype", "strides", "requires_grad", "expanded", "hook", "late hook", "attribute", "no leaf", "number",
        "structure", "object", "sparse"])
def test_what_can_not_be_refilled_stays(kept, other):
    kept, other = Batch.of(kept), Batch.of(other)
    before = [tensor.detach().to_dense().clone() for tensor in kept.tensors()]
    assert not kept.refill(other)
    assert [tensor.detach().to_dense().tolist() for tensor in kept.tensors()] == [each.tolist() for each in before]
