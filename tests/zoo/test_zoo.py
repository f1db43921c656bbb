"""The zoo: each model is deterministic, finite, does what its name says, and can be captured."""

from __future__ import annotations

import importlib.util
import os
import sys
import types

import pytest
import torch
from torch import nn

from pytest_torchcompile import zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.ledger import observe

# Torch's own: when Dynamo is first imported, and Dynamo looking at `.grad` of an input that is no leaf.
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]

SIZES = {
    "tiny_head": (zoo.tiny_head, lambda k: zoo.vector_batch(B=(4, 7)[k])),
    "mini_gpt": (zoo.mini_gpt, lambda k: zoo.token_batch(B=3, S=(8, 12)[k])),
    "conv_net": (zoo.conv_net, lambda k: zoo.image_batch(B=(4, 6)[k])),
    "encoder": (zoo.encoder, lambda k: zoo.padded_batch(B=4, S=(8, 12)[k])),
    "feed_forward": (zoo.feed_forward, lambda k: zoo.vector_batch(B=(8, 12)[k])),
    "residual_outside": (zoo.residual_outside, lambda k: zoo.vector_batch(B=(8, 12)[k])),
    "moe_lite": (zoo.moe_lite, lambda k: zoo.vector_batch(B=(24, 40)[k], hidden=32)),
}
CAPTURED = [name for name in SIZES if name != "moe_lite"]
each = pytest.mark.parametrize("name", SIZES)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def made(name, k=0):
    """A model and a batch from seed 0."""
    factory, inputs = SIZES[name]
    torch.manual_seed(0)
    return factory(), Batch.of(inputs(k))


def run(model, batch):
    """One training call from seed 1: output, and the gradient of every parameter."""
    torch.manual_seed(1)
    output = model(*batch.args, **batch.kwargs)
    model.zero_grad()
    output.float().pow(2).mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters())]


def equal(left, right):
    """Are two lists of tensors bitwise equal?"""
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.skipif(not hasattr(torch.fx.traceback, "annotate"), reason="torch annotates operators from 2.9 on")
def test_an_annotation_changes_nothing():
    """The region computes what the same model without it does."""
    model, batch = made("tiny_head")
    annotated = zoo.annotated_head()
    annotated.load_state_dict(model.state_dict())
    assert all(map(torch.equal, run(annotated, batch), run(model, batch)))


@each
def test_same_seed_same_model_and_batch(name):
    """What a factory and an inputs function return depends on the global seed, and on nothing else."""
    (first, batch), (second, again) = made(name), made(name)
    assert equal(list(first.state_dict().values()), list(second.state_dict().values()))
    assert equal(batch.tensors(), again.tensors())
    torch.manual_seed(5)
    other = SIZES[name][0]()
    assert not equal(list(first.state_dict().values()), list(other.state_dict().values()))


@each
def test_on_the_cpu_in_float32(name):
    """Factories leave device and dtype to the runner."""
    model, batch = made(name)
    floats = [t for t in [*model.parameters(), *batch.tensors()] if t.is_floating_point()]
    assert {(t.dtype, t.device.type) for t in floats} == {(torch.float32, "cpu")}


@each
def test_deterministic_finite_and_not_zero(name):
    """Two training calls from one state are bitwise equal, and every gradient is finite and not all zero."""
    model, batch = made(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    first = run(model, batch)
    model.load_state_dict(state)
    assert equal(first, run(model, batch))
    assert all(torch.isfinite(t).all() for t in first)
    assert all(t.any() for t in first)


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_whole(name):
    """fullgraph finds nothing to complain of, at a second size too, and computes the same."""
    compiled_model, _ = made(name)
    compiled = torch.compile(compiled_model, backend="eager", fullgraph=True)
    for k in range(2):
        model, batch = made(name, k)
        compiled_model.load_state_dict(model.state_dict())
        expected = run(model, batch)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(*batch.args, **batch.kwargs).detach(), expected[0])


def test_moe_lite_breaks_in_three_places():
    """A branch and two sizes that depend on the data: exactly three places, all in forward."""
    model, batch = made("moe_lite")
    compiled = torch.compile(model, backend="eager")
    with observe() as seen:
        compiled(*batch.args)
    assert {found.file for found in seen.graph_breaks} == {zoo.__file__}
    assert len({found.line for found in seen.graph_breaks}) == 3


def test_moe_lite_sends_each_row_to_its_expert():
    """Row by row: the row plus its expert's output, weighted with the router's probability."""
    model, batch = made("moe_lite")
    (x,) = batch.args
    weights, choices = model.router(x).softmax(-1).max(-1)
    assert set(choices.tolist()) == {0, 1}
    rows = [row + weight * model.experts[choice](row[None])[0]
            for row, weight, choice in zip(x, weights, choices.tolist(), strict=True)]
    torch.testing.assert_close(model(x), torch.stack(rows))


def test_moe_lite_sends_all_rows_to_one_expert():
    """The other side of the branch, for rows that the router is sure of."""
    model, _ = made("moe_lite")
    rows = model.router.weight.data[0].sign()[None].expand(4, -1)
    model.router.weight.data[1] = -1e3 * rows[0]
    torch.testing.assert_close(model(rows), rows + model.experts[0](rows))


def test_mini_gpt_sees_no_later_token():
    """Changing the last token changes the last position's logits only."""
    model, batch = made("mini_gpt")
    (ids,) = batch.args
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % zoo.VOCABULARY
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert (before[:, -1] - after[:, -1]).abs().amax() > 1e-3


def test_lm_loss_by_hand():
    """The mean of -log p(next token), over all positions but the last."""
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, zoo.VOCABULARY), zoo.token_batch(B=2, S=5)
    by_hand = [-logits[b, s].log_softmax(-1)[ids[b, s + 1]] for b in range(2) for s in range(4)]
    torch.testing.assert_close(zoo.lm_loss(logits, ids), torch.stack(by_hand).mean())


@pytest.mark.parametrize("name", ["mini_gpt", "conv_net"])
def test_trains(name):
    """Some steps of SGD on one batch lower the loss by more than a tenth."""
    model, batch = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        output = model(*batch.args)
        loss = zoo.lm_loss(output, batch.value) if name == "mini_gpt" else output.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_conv_net_has_state_and_randomness():
    """train(): running statistics move and dropout draws; eval(): neither."""
    model, batch = made("conv_net")

    def call():
        before = model.blocks[0].norm.running_mean.clone()
        output = model(*batch.args)
        return output, not torch.equal(before, model.blocks[0].norm.running_mean)

    (first, moved), (second, _) = call(), call()
    assert moved
    assert not torch.equal(first, second)
    model.eval()
    (first, moved), (second, _) = call(), call()
    assert not moved
    assert torch.equal(first, second)


def test_padded_batch_has_every_length():
    """From a full row down to one that is all padding; padding ids are 0."""
    batch = zoo.padded_batch(B=4, S=12)
    assert batch["attention_mask"].sum(dim=1).tolist() == [12, 8, 4, 0]
    assert not batch["ids"][batch["attention_mask"] == 0].any()
    assert zoo.padded_batch(B=1, S=6)["attention_mask"].tolist() == [[0] * 6]


def test_encoder_ignores_padding():
    """Ids under the mask change nothing, and the row that is all padding gives the head's bias, not NaN."""
    model, batch = made("encoder")
    ids, mask = batch.kwargs["ids"], batch.kwargs["attention_mask"]
    before = model(ids, mask)
    torch.testing.assert_close(model(torch.where(mask.bool(), ids, 7), mask), before)
    torch.testing.assert_close(before[-1], model.head.bias)
    assert not torch.allclose(model(torch.where(mask.bool(), 7, ids), mask)[:3], before[:3])


def test_where_the_residual_is_added_makes_no_difference():
    """Inside of the blocks or outside: one function, with the same parameters."""
    (inside, batch), (outside, _) = made("feed_forward"), made("residual_outside")
    assert equal(run(inside, batch), run(outside, batch))
    assert inside.blocks[0](batch.args[0]).sub(outside.blocks[0](batch.args[0])).allclose(batch.args[0], atol=1e-6)


def test_factories_take_user_axes():
    """Sizes can be axes of a matrix: the factory takes them as keywords, and so does the inputs function."""
    assert zoo.tiny_head(hidden=8, classes=5)(zoo.vector_batch(B=3, hidden=8)).shape == (3, 5)
    assert len(zoo.mini_gpt(width=32, heads=2, layers=3).blocks) == 3


def test_triton_op_names_what_is_missing(monkeypatch):
    """Four reasons: the cell's device, the GPU, Triton, and NumPy for the interpreter."""
    text = r"^triton_op is a Triton kernel for GPUs and CPUs, and this cell runs on 'meta'$"
    with pytest.raises(Unavailable, match=text):
        zoo.triton_op(device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = r"^triton_op needs a GPU on device cuda, and torch.cuda.is_available\(\) is false$"
    with pytest.raises(Unavailable, match=text):
        zoo.triton_op()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    text = r"^triton_op needs Triton, which is not installed \(pip install triton\)$"
    with pytest.raises(Unavailable, match=text):
        zoo.triton_op(device="cuda:0")
    with pytest.raises(Unavailable, match=text):
        zoo.triton_op(device="cpu")
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "numpy", None)
    text = r"^triton_op needs NumPy on a CPU, for Triton's interpreter \(pip install numpy\)$"
    with pytest.raises(Unavailable, match=text):
        zoo.triton_op(device="cpu")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_op_on_a_cpu(monkeypatch):
    """Triton's interpreter computes silu(x) * y and its gradient, eager and captured; the setting ends with it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch.manual_seed(0)
    model = zoo.triton_op(device="cpu")
    assert "TRITON_INTERPRET" not in os.environ
    x = zoo.vector_batch(B=5)
    expected = nn.functional.silu(model.left(x)) * model.right(x)
    wanted = torch.autograd.grad(expected.pow(2).sum(), [x, *model.parameters()])
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        output = call(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.pow(2).sum(), [x, *model.parameters()]), wanted)

    from pytest_torchcompile.zoo import gated_unit

    assert type(gated_unit._ON_CPU).__name__ == "InterpretedFunction"
    assert type(gated_unit._ON_GPU).__name__ == "JITFunction"
    torch.library.opcheck(gated_unit.gate, (x, x.flip(0).detach().requires_grad_()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_triton_op_computes_and_differentiates():
    """On a GPU: silu(x) * y and its gradient, eager and captured whole, and torch's own check of the op."""
    torch.manual_seed(0)
    model = zoo.triton_op().cuda()
    plain = nn.Sequential()  # only to hold the same layers
    plain.left, plain.right = model.left, model.right
    x = zoo.vector_batch(B=5).detach().cuda().requires_grad_()
    expected = nn.functional.silu(plain.left(x)) * plain.right(x)
    wanted = torch.autograd.grad(expected.pow(2).sum(), [x, *model.parameters()])
    for call in (model, torch.compile(model, fullgraph=True)):
        output = call(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.pow(2).sum(), [x, *model.parameters()]), wanted)

    from pytest_torchcompile.zoo.gated_unit import gate

    torch.library.opcheck(gate, (x, x.flip(0).detach().requires_grad_()))
