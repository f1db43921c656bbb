"""Inductor's numbers: an eager run is given the random numbers that compiled code draws by itself, bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from pytest_torchcompile.gauges.random_seeds import noted_seeds
from pytest_torchcompile.oracle.inductor_numbers import WAYS, Way, given_numbers, philox, uniform_numbers

pytestmark = pytest.mark.needs_torch


def test_philox_gives_its_published_numbers():
    """The first of the known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): all zeros."""
    numbers = philox(torch.tensor(0), torch.zeros(1, dtype=torch.int64))
    assert [f"{int(number):08x}" for number in numbers] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_both_halves_of_a_seed_count():
    places = torch.arange(8)
    lower, higher, neither = (philox(torch.tensor(seed), places)[0] for seed in (5, 5 + (1 << 32), -(1 << 63)))
    assert not torch.equal(lower, higher)
    assert not torch.equal(lower, neither)
    # Inductor's C++ takes the lower half alone.
    assert torch.equal(uniform_numbers(torch.tensor(5), 8), uniform_numbers(torch.tensor(5 + (1 << 32)), 8))


def test_many_numbers_are_made_in_parts(monkeypatch):
    whole = uniform_numbers(torch.tensor(3), 100)
    monkeypatch.setattr("pytest_torchcompile.oracle.inductor_numbers._AT_A_TIME", 7)
    assert torch.equal(uniform_numbers(torch.tensor(3), 100), whole)
    assert 0 <= float(whole.min()) < float(whole.max()) < 1


OF_A_GPU = """
import torch
from pytest_torchcompile.oracle.inductor_numbers import philox
from pytest_torchcompile.oracle.triton_numbers import fill_uniformly

for seed in map(torch.tensor, (0, 3, 5 + (1 << 32), (1 << 62) + 3, -5, -(1 << 63))):
    for count in (1, 7, 1024, 3001):
        for fourfold in (False, True):
            numbers = torch.full([count + 5], -1.0)
            fill_uniformly(numbers[:count], seed, fourfold)
            lanes = torch.stack(philox(seed, torch.arange(count)), 1)
            bits = lanes.flatten()[:count] if fourfold else lanes[:, 0]
            # As numbers with a sign, and -x - 1 of those below zero.
            lower = torch.where(bits < 1 << 31, bits, (1 << 32) - 1 - bits)
            assert torch.equal(numbers[:count], lower.float() * 4.6566127342e-10), (seed, count, fourfold)
            assert (numbers[count:] == -1).all()
print("all numbers are those of Philox")
"""


def test_a_gpu_is_given_the_numbers_of_philox(tmp_path):
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    pytest.importorskip("triton", reason="a CPU build of torch brings no Triton: extra [triton]")
    script = tmp_path / "interpreted.py"
    script.write_text(OF_A_GPU)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "all numbers are those of Philox\n", ended.stderr


def drop(x):
    return functional.dropout(x, 0.3)


def drop_in_place(x):
    return functional.dropout(x * 1, 0.3, inplace=True)


def drop_features(x):
    return functional.dropout2d(x.reshape(4, 8, 4, -1), 0.3), functional.dropout(x, 0.1)


def drop_paths(x):
    """As timm and torchvision do."""
    kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.75)
    return functional.dropout(x * kept.div_(0.75), 0.2)


def drop_turned(x):
    turned = x.transpose(0, 1)
    return functional.dropout(turned, 0.5), functional.dropout(turned.contiguous(), 0.1), functional.dropout(x, 0.2)


def drop_channels_last(x):
    return functional.dropout(x.reshape(4, 8, 4, -1).to(memory_format=torch.channels_last), 0.5)


def drop_half(x):
    return functional.dropout(x.bfloat16().repeat(8, 8), 0.1), functional.dropout(x.half().repeat(8, 8), 0.1)


def drop_attention(x):
    """The first dropout comes before the attention, whose own kernel may ask the generator."""
    query = functional.dropout(x, 0.3).reshape(2, 2, 16, -1)
    attended = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.2)
    return functional.dropout(attended, 0.4)


def drop_between_breaks(x):
    dropped = functional.dropout(x, 0.3)
    torch._dynamo.graph_break()
    return functional.dropout(dropped, 0.3)


def drop_all_or_nothing(x):
    return functional.dropout(x, 1.0), functional.dropout(x, 0.0), drop(x)


def draw(x):
    return torch.rand(5, 3, device=x.device), torch.rand_like(x), functional.dropout(x, 0.5)


PROGRAMS = [drop, drop_in_place, drop_features, drop_paths, drop_turned, drop_channels_last, drop_half, drop_attention,
            drop_between_breaks, drop_all_or_nothing, draw]


def run_both(program, device="cpu", fourfold=False):
    """The outputs of the compiled program, of the eager one that is given its numbers, and whether both drew alike."""
    torch._dynamo.reset()
    x = torch.linspace(1, 2, 64 * 32, device=device).reshape(64, 32)
    torch.manual_seed(3)
    with noted_seeds() as noted:
        compiled = torch.compile(program)(x.clone())
    states = [_state_of(device)]
    torch.manual_seed(3)
    groups = [(seeds.device.type, seeds.numel()) for seeds in noted]
    with given_numbers(groups, Way(fourfold)) as given:
        eager = program(x.clone())
    states.append(_state_of(device))
    alike = given.is_complete and len(noted) == len(given.seeds) and all(map(torch.equal, noted, given.seeds))
    return compiled, eager, alike and torch.equal(*states)


def _state_of(device):
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def tensors_of(output):
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_eager_draws_what_compiled_code_draws(program):
    if program in (drop_paths, drop_half) and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 draws `bernoulli_` and rounds a share in another way on a CPU: cells run twice there")
    compiled, eager, alike = run_both(program)
    assert alike
    for ours, theirs in zip(tensors_of(eager), tensors_of(compiled), strict=True):
        # Which elements are dropped is the same bit by bit; what is kept may be rounded once more.
        assert torch.equal(ours == 0, theirs == 0)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_eager_draws_what_a_gpu_draws(program):
    """From torch 2.13 on kernels of one graph may go both ways: then nothing is given, and nobody is blamed."""
    found = []
    for fourfold in (False, True):
        compiled, eager, alike = run_both(program, "cuda", fourfold)
        assert alike
        pairs = list(zip(tensors_of(eager), tensors_of(compiled), strict=True))
        found.append(all(torch.equal(ours == 0, theirs == 0) for ours, theirs in pairs))
    if torch.__version__ < (2, 13):
        assert found == [True, False]
    elif not any(found):
        pytest.skip("the kernels of this graph go both ways (https://github.com/pytorch/pytorch/issues/198333)")


def test_a_cpu_has_one_way():
    assert WAYS["cpu"] == (Way(),)


def test_another_seed_is_noticed():
    x = torch.ones(64, 32)
    with given_numbers([("cpu", 1)], Way()) as given:
        torch.manual_seed(3)
        first = drop(x)
        torch.manual_seed(4)
        assert not torch.equal(drop(x), first)
    assert given.is_complete
    assert len(given.seeds) == 2


@pytest.mark.parametrize(("groups", "lost"), [
    ([("cpu", 3)], ""), ([], "a draw on cpu"), ([("cuda", 2)], "a draw on cpu"),
])
def test_groups_that_do_not_fit_are_told(groups, lost):
    """One seed too many is left over; without a seed the operator draws as it does."""
    with given_numbers(groups, Way()) as given:
        drop(torch.ones(8))
    assert not given.is_complete
    assert given.lost == lost


def test_an_operator_that_nobody_can_give_is_told():
    with given_numbers([("cpu", 1)], Way()) as given:
        torch.randn(4)
        drop(torch.ones(8))
    assert given.lost == "aten::randn"
    assert given.seeds == []


# Of one of the two layouts torch warns whenever such a tensor is made.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("draw_other", [
    lambda x: torch.rand(4, dtype=torch.bfloat16),
    lambda x: torch.rand_like(x.reshape(2, 2, 2, 2), memory_format=torch.channels_last),
    lambda x: functional.dropout(torch.nested.nested_tensor([x[:5], x[5:]]), 0.5),
    lambda x: functional.dropout(torch.nested.nested_tensor([x[:5], x[5:]], layout=torch.jagged), 0.5),
], ids=["half precision", "an order of its own", "nested", "jagged"])
def test_what_is_filled_in_another_way_is_told(draw_other):
    """Fused code compares numbers that are not rounded; a nested tensor has no strides."""
    with given_numbers([("cpu", 1)], Way()) as given:
        draw_other(torch.ones(16))
    assert given.lost
    assert not given.is_complete


def test_an_error_on_the_way_is_told(monkeypatch):
    monkeypatch.setattr("pytest_torchcompile.oracle.inductor_numbers.uniform_numbers", lambda *_: 1 / 0)
    with given_numbers([("cpu", 1)], Way()) as given:
        drop(torch.ones(16))
    assert given.lost == "aten::bernoulli_: division by zero"


def test_some_numbers_of_one_operator_may_be_changed():
    x = torch.ones(64)
    drawn = []
    for changed in (None, 0, 1):
        torch.manual_seed(0)
        with given_numbers([("cpu", 2)], Way(), changed) as given:
            drawn.append((torch.rand_like(x), torch.rand_like(x)))
        assert given.count == 2
    (first, second), (other, same), (same_first, other_second) = drawn
    assert torch.equal(second, same)
    assert torch.equal(first, same_first)
    assert (first != other).sum() == (second != other_second).sum() == 8
    assert ((first < 0.5) == (other > 0.5))[first != other].all()


def test_a_generator_of_its_own_is_left_alone():
    generator = torch.Generator().manual_seed(7)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(7))
    with given_numbers([("cpu", 1)], Way()) as given:
        assert torch.equal(torch.rand(4, generator=generator), expected)
    assert given.seeds == []
    assert given.is_complete


def test_seeds_of_generated_code_alone_are_noted():
    with noted_seeds() as noted:
        torch.randint(0, 9, [4])
        torch.ops.aten.randint.low_out(0, 9, [4], out=torch.empty(4, dtype=torch.int64))
    assert noted == []
    before = torch.ops.aten.randint.low_out._op
    with pytest.raises(KeyError), noted_seeds():
        raise KeyError
    assert torch.ops.aten.randint.low_out._op is before
