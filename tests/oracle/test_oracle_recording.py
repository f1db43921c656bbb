"""record() and StateSnapshot: what is kept of a call, and that it can be repeated."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle import default_loss, record
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = pytest.mark.needs_torch


class Model(nn.Module):
    """A linear layer with batch norm; also writes to its second input."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x, cache):
        """Return a dict with a view of an input, a scalar and a mask."""
        cache.add_(1)
        y = self.norm(self.linear(x))
        return {"y": y, "view": cache[1:], "count": 3, "mask": y.detach() > 0}


def model_and_batch():
    """A model and its inputs; the first requires grad."""
    torch.manual_seed(0)
    return Model(), Batch.of((torch.randn(8, 4, requires_grad=True), torch.zeros(3)))


def test_everything_observable_is_kept():
    """Outputs by path, loss, changed inputs, buffers, gradients, shared memory."""
    model, batch = model_and_batch()
    seen = record(model, model, batch)
    assert seen.error is None
    assert list(seen.outputs) == ["output['y']", "output['view']", "output['count']", "output['mask']"]
    assert seen.structure == "{'y': *, 'view': *, 'count': *, 'mask': *}"
    assert list(seen.mutated) == ["input[1] after the call"]
    assert seen.mutated["input[1] after the call"].tolist() == [1, 1, 1]
    assert "buffer norm.num_batches_tracked" in seen.buffers
    assert "gradient of linear.weight" in seen.gradients
    assert "gradient of input[0]" in seen.gradients
    assert "gradient of input[1]" not in seen.gradients
    assert seen.aliases == {("output['view']", "input[1]")}
    assert seen.loss is not None
    assert seen.backward
    assert seen.outputs["output['y']"].requires_grad
    assert not seen.outputs["output['mask']"].requires_grad


def test_the_callers_batch_is_left_alone():
    """The call writes to a private copy."""
    model, batch = model_and_batch()
    record(model, model, batch)
    assert batch.args[1].tolist() == [0, 0, 0]
    assert batch.args[0].grad is None


def test_copies_survive_a_later_overwrite():
    """What a later call writes into the same memory does not change an earlier recording."""
    memory = torch.zeros(3)
    seen = record(lambda x: memory.add_(x), None, Batch.of(torch.ones(3)), train=False)
    record(lambda x: memory.add_(x), None, Batch.of(torch.ones(3)), train=False)
    assert seen.outputs["output"].value.tolist() == [1, 1, 1]


def test_without_train_nothing_requires_grad():
    """train=False runs under no_grad: no gradients, no graph."""
    model, batch = model_and_batch()
    seen = record(model, model, batch, train=False)
    assert not seen.backward
    assert seen.gradients == {}
    assert not seen.outputs["output['y']"].requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
def test_an_error_names_its_phase(phase):
    """An exception is recorded, not raised, and says where it came from."""

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("planted in backward")

    def forward(x):
        if phase == "forward":
            raise ValueError("planted in forward")
        return Refuses.apply(x) if phase == "backward" else x * 2

    def loss(output, value):
        if phase == "loss":
            raise ValueError("planted in loss")
        return output.sum()

    seen = record(forward, None, Batch.of(torch.ones(2, requires_grad=True)), loss=loss)
    assert seen.error is not None
    assert (seen.error.type, seen.error.phase) == ("ValueError", phase)
    assert f"planted in {phase}" in str(seen.error)


def test_a_loss_that_is_no_scalar_is_a_usage_error():
    """The text names the loss, what it returned and what to do."""
    batch = Batch.of(torch.ones(2, requires_grad=True))
    with pytest.raises(UsageError, match=r"per_row.* shape \(2,\), expected .* one element: reduce it"):
        record(lambda x: x, None, batch, loss=per_row)


def per_row(output, value):
    """A loss nobody has reduced."""
    return output * 2


def test_a_loss_gets_output_and_batch():
    """loss(output, value), with the private copy of what the factory returned."""
    seen = record(
        lambda x, target: x * 3, None, Batch.of((torch.ones(2), torch.ones(2))),
        loss=lambda output, value: (output - value[1]).sum(), train=False,
    )  # fmt: skip
    assert seen.loss == 4


def test_the_same_seed_draws_the_same_numbers():
    """torch's and Python's generators are seeded before the call."""
    batch = Batch.of(torch.ones(64))
    runs = [record(nn.functional.dropout, None, batch, seed=s).outputs["output"].value for s in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_the_default_loss_reaches_what_lies_before_a_norm():
    """The plain mean square of a normalised output is constant, so no gradient would pass through it."""
    x = torch.randn(16, 32, requires_grad=True)
    y = nn.functional.layer_norm(x, (32,))
    (plain,) = torch.autograd.grad(y.square().mean(), x, retain_graph=True)
    (ours,) = torch.autograd.grad(default_loss(y), x)
    assert plain.abs().max() < 1e-3 * ours.abs().max()


def test_the_default_loss_has_a_gradient_at_zero():
    """Of every element, whatever its dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        y = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        default_loss(y).backward()
        assert (torch.view_as_real(y.grad) if dtype.is_complex else y.grad).all()


def test_the_default_loss_skips_what_is_not_finite():
    """Masked logits must not turn every gradient into NaN."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    default_loss(torch.cat([x, torch.tensor([float("-inf")])])).backward()
    assert x.grad.isfinite().all()
    assert default_loss({"ids": torch.ones(2, dtype=torch.int64)}) is None


def test_unregistered_dataclasses_are_opened():
    """Tensors inside a dataclass that pytree doesn't know have a name of their own."""

    @dataclass
    class Output:
        logits: torch.Tensor
        parts: dict

    seen = record(lambda x: Output(x, {"a": x + 1}), None, Batch.of(torch.ones(1)), train=False)
    assert list(seen.outputs) == ["output.logits", "output.parts['a']"]


def test_a_written_parameter_is_noticed():
    """A call that changes a weight shows it, one that doesn't keeps no copy."""

    class Clamps(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(max=0.1)
            return super().forward(x)

    model = Clamps(3, 3)
    seen = record(model, model, Batch.of(torch.ones(1, 3)))
    assert list(seen.mutated) == ["weight after the call"]


def test_all_zero_outputs_are_told():
    """A call that returns nothing but zeros proves nothing."""
    batch = Batch.of(torch.ones(2))
    assert record(lambda x: x * 0, None, batch).all_zero
    assert not record(lambda x: x * 2, None, batch).all_zero


def test_a_snapshot_restores_values_in_place():
    """Values, running statistics and training flags return; the tensor objects are the same ones."""
    model, batch = model_and_batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    snapshot = StateSnapshot(model)
    record(model, model, batch)
    with torch.no_grad():
        model.linear.weight.add_(1)
    model.norm.eval()
    snapshot.restore()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters()} == objects
    assert model.norm.training
    assert all(p.grad is None for p in model.parameters())


def test_a_snapshot_returns_replaced_and_added_buffers():
    """A buffer that a call has exchanged or added gives way to what was there."""
    model, _ = model_and_batch()
    original = model.norm.running_mean
    snapshot = StateSnapshot(model)
    model.norm.running_mean = torch.full((4,), 9.0)
    model.register_buffer("extra", torch.ones(1))
    snapshot.restore()
    assert model.norm.running_mean is original
    assert model.norm.running_mean.tolist() == [0, 0, 0, 0]
    assert "extra" not in dict(model.named_buffers())


def test_restoring_compiles_nothing_again():
    """Compiled code stays valid after a restore."""
    model, batch = model_and_batch()
    compiles = []
    compiled = torch.compile(model, backend=lambda graph, inputs: compiles.append(graph) or graph.forward)
    snapshot = StateSnapshot(model)
    for _ in range(3):
        record(compiled, model, batch)
        snapshot.restore()
    torch._dynamo.reset()
    assert len(compiles) == 1


def test_a_parameter_written_with_its_own_values_is_unchanged():
    """What cannot be seen is no mutation; elements that change places are one."""

    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.copy_(self.weight.flip(0) if x.sum() > 0 else self.weight.clone())
            return super().forward(x)

    model = Writes(3, 3)
    assert record(model, model, Batch.of(-torch.ones(1, 3))).mutated == {}
    assert list(record(model, model, Batch.of(torch.ones(1, 3))).mutated) == ["weight after the call"]


class Keeps(nn.Module):
    """Writes to tensors that no register knows: an attribute, a list, an object in a dict."""

    class Cache:
        """An object that holds a tensor."""

        def __init__(self):
            self.keys, self.calls = torch.zeros(2), 0

    def __init__(self):
        super().__init__()
        self.last, self.seen, self.caches, self.count = None, [torch.zeros(2)], {"a": self.Cache()}, 0

    def forward(self, x):
        """Write everywhere."""
        self.last = x.detach() * 2
        self.seen[0] = x.detach() + 1
        self.seen.append(x.detach())
        self.caches["a"].keys.add_(1)
        self.count += 1
        return x * 3


def test_tensors_in_attributes_are_seen():
    """By the path that a user would write."""
    model = Keeps()
    found = record(model, model, Batch.of(torch.ones(2)), train=False).buffers
    assert {name: value.tolist() for name, value in found.items()} == {
        "attribute last": [2, 2], "attribute seen[0]": [2, 2], "attribute seen[1]": [1, 1],
        "attribute caches['a'].keys": [1, 1],
    }  # fmt: skip


def test_a_snapshot_puts_attributes_back():
    """Objects, contents and values; what counts calls goes on counting."""
    model = Keeps()
    before, cache = model.seen[0], model.caches["a"]
    snapshot = StateSnapshot(model)
    record(model, model, Batch.of(torch.ones(2)), train=False)
    snapshot.restore()
    assert model.last is None
    assert len(model.seen) == 1
    assert model.seen[0] is before
    assert model.caches["a"] is cache
    assert cache.keys.tolist() == [0, 0]
    assert model.count == 1


def test_objects_that_hold_tensors_are_opened():
    """A cache or a distribution has leaves; an object without tensors is one."""
    x = torch.zeros(2)
    seen = record(lambda x: (Keeps.Cache(), torch.distributions.Normal(x, 1.0), object()), None, Batch.of(x))
    assert {"output[0].keys", "output[0].calls", "output[1].loc", "output[2]"} <= set(seen.outputs)
    assert "Cache(keys=*, calls=*)" in seen.structure


def test_outputs_that_the_loss_leaves_out_have_a_backward_pass():
    """Two heads, a loss over one of them: the gradients of the other are looked at as well."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return {"one": self.one(x), "other": self.other(x), "mask": x > 0}

    model, batch = Heads(), Batch.of(torch.ones(2, 3))
    seen = record(model, model, batch, loss=lambda output, value: output["one"].sum())
    assert seen.left_out == ("output['other']",)
    assert seen.gradients["gradient of other.weight"] is None
    assert seen.gradients["gradient of other.weight by outputs that the loss leaves out"].abs().sum() > 0
    assert seen.gradients["gradient of one.weight by outputs that the loss leaves out"] is None
    whole = record(model, model, batch)
    assert whole.left_out == ()
    assert len(whole.gradients) == 4


def test_an_output_that_feeds_another_one_is_left_out_too():
    """Compiled, its gradient takes a way of its own."""

    class Deep(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x)
            return hidden.tanh(), hidden

    model, batch = Deep(3, 3), Batch.of(torch.ones(2, 3))
    for call in (model, torch.compile(model, backend="aot_eager")):
        assert record(call, model, batch, loss=lambda output, value: output[0].sum()).left_out == ("output[1]",)
    torch.compiler.reset()


def test_strides_of_gradients_and_buffers_are_kept():
    """As those of outputs."""
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model.register_buffer("table", torch.zeros(2, 3).t())
    x = torch.randn(1, 2, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    items = {name: item for name, _, item in record(model, model, Batch.of(x)).items()}
    assert items["gradient of weight"].stride == (18, 1, 6, 2)
    assert items["gradient of input[0]"].stride == (1, 10, 2)
    assert items["buffer table"].stride == (1, 3)


def test_gradients_that_share_memory_are_seen():
    """Somebody who scales one in place scales both."""

    class Ties(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            return gradient, gradient

    def shares(x, y):
        return Ties.apply(x, y)

    def once(x, y):
        x.grad = y.grad = torch.zeros(2)
        return x + y

    batch = Batch.of((torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)))
    assert not any("gradient" in name for pair in record(shares, None, batch).aliases for name in pair)
    assert ("gradient of input[1]", "gradient of input[0]") in record(once, None, batch).aliases
