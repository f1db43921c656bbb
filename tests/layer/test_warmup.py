"""ShapeStabilizer.warmup: every bucket is compiled before serving, and what was compiled is told."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from pytest_torchcompile import ShapeStabilizer, observe

pytestmark = pytest.mark.needs_torch
THREE = ShapeStabilizer((4, 8, 16))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(30, 6), nn.BatchNorm1d(6)

    def forward(self, input_ids, scale=1):
        return self.norm(self.table(input_ids).transpose(1, 2)) * scale


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(B, S):
    return {"input_ids": torch.randint(30, (B, S))}


def compiled(dynamic=None, backend="eager"):
    return torch.compile(Net().eval(), backend=backend, dynamic=dynamic)


def served(model, lengths, sizes=(2,)):
    """Compiles while real requests are served."""
    with observe() as seen, torch.no_grad():
        for size in sizes:
            for length in lengths:
                model(**THREE.bucket_batch(make(size, length)))
    return [compile.kind for compile in seen.compiles]


@pytest.mark.parametrize(("dynamic", "expected"), [(None, [1, 1, 0]), (False, [1, 1, 1]), (True, [1, 0, 0])])
def test_every_bucket_is_compiled(dynamic, expected):
    """Each shape says what was compiled for it; serving then compiles nothing, at any length."""
    model = compiled(dynamic)
    with torch.no_grad():
        warmed = THREE.warmup(model, make)
    assert [len(shape.compiled) for shape in warmed.shapes] == expected
    assert [shape.length for shape in warmed.shapes] == [4, 8, 16]
    assert warmed.ok
    assert all("Net.forward (test_warmup.py:" in shape.compiled[0] for shape in warmed.shapes if shape.compiled)
    assert not served(model, range(2, 17))
    torch.compiler.reset()
    assert served(compiled(dynamic), range(2, 17)), "without a warm-up the requests compile"


def test_what_it_says(caplog):
    """One line for each shape, also in the log; a warning if something is wrong."""
    with caplog.at_level(logging.INFO, "pytest_torchcompile"), torch.no_grad():
        text = str(THREE.warmup(compiled(True), make, batch_sizes=(2, 3)))
    lines = text.splitlines()
    assert lines[0].startswith("length 4, batch size 2: compiled Net.forward (test_warmup.py:")
    assert lines[1] == "length 8, batch size 2: served by what is compiled already"
    assert len(lines) == 6
    assert [record.getMessage() for record in caplog.records][:6] == [f"warm-up: {line}" for line in lines]
    caplog.clear()
    assert not THREE.warmup(Net().eval(), make).ok
    assert "warm-up: length 4, batch size 2: nothing ran compiled" in caplog.text


def test_the_batch_size_meets_no_other_size():
    """Not 0 or 1, no bucket, no other dimension: equal sizes would be one symbol, and recompile once they differ."""
    def wide(B, S):
        return {"input_ids": torch.randint(30, (B, S)), "image": torch.ones(B, 2, 3, 5)}

    asked = []
    ShapeStabilizer((4, 8)).warmup(lambda input_ids, image: asked.append(len(input_ids)), wide)
    assert set(asked) == {6}
    with pytest.raises(ValueError, match="no batch size from 2 to 64 differs from every other dimension"):
        THREE.warmup(Net(), lambda B, S: {"input_ids": torch.ones(B, S).long(), "x": torch.ones(B, B)})


def test_a_size_that_collides_costs_a_compile():
    """What the choice is good for: warmed up with a batch size that equals a length, the next request compiles."""
    model = compiled(True)
    with torch.no_grad():
        warmed = ShapeStabilizer((8,)).warmup(model, make, batch_sizes=(8,))
    assert "a tensor of the shape (8, 8) has equal sizes: torch may take them for one" in str(warmed)
    assert served(model, [16], sizes=(8,)) == ["recompile"]
    torch.compiler.reset()
    model = compiled(True)
    with torch.no_grad():
        warmed = ShapeStabilizer((8,)).warmup(model, make)
    assert not warmed.notes
    assert not served(model, [16], sizes=(8,))


def test_make_batch_by_any_signature():
    """make(S=...), make(length), with a batch size or without."""
    for one in (lambda S: make(2, S), lambda length: make(2, length), lambda S, B=3: make(B, S)):
        assert THREE.warmup(compiled(), one).ok
        torch.compiler.reset()
    with pytest.raises(ValueError, match="batch_sizes are given, and make_batch takes no B"):
        THREE.warmup(compiled(), lambda S: make(2, S), batch_sizes=(2,))


def test_nothing_is_left_but_compiled_code():
    """Running statistics, training flags and random states are as before, and so are batches."""
    net = Net()
    model, state = torch.compile(net, backend="eager"), torch.get_rng_state()
    batch = torch.randint(30, (2, 8))
    torch.set_rng_state(state)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert THREE.warmup(model, lambda S: {"input_ids": batch[:, :S] if S < 8 else batch}).ok
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert net.norm.num_batches_tracked == 0


def test_code_that_never_settles():
    """A model that compiles anew for a Python number of each call is not warm, and the warm-up says so."""
    class Counting(Net):
        calls = 0

        def forward(self, input_ids):
            self.calls += 1
            return super().forward(input_ids, self.calls)

    warmed = ShapeStabilizer((4,)).warmup(torch.compile(Counting().eval(), backend="eager", dynamic=False), make)
    assert not warmed.ok
    assert "compiled again in the last pass: Counting.forward" in str(warmed)


def test_the_models_own_error():
    """Is raised as it is, and the state is put back."""
    with pytest.raises(IndexError):
        THREE.warmup(Net(), lambda S: {"input_ids": torch.full((2, S), 31)})
