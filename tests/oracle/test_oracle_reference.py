"""reference(): how expected values and their noise are made, and what it falls back to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Tape, compare, problem, record, reference
from pytest_torchcompile.oracle.operator_rounding import EMULATED, count_terms, operator_facts
from pytest_torchcompile.oracle.wide_operators import _VERSIONS, wide_version
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = pytest.mark.needs_torch


def stacked(dtype=torch.float32, depth=3):
    """A few layers with a norm; returns the model and a batch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*layers).to(dtype), Batch.of(torch.randn(16, 32, dtype=dtype))


def drawn(estimate):
    """The noise of a leaf as root mean square of its draws."""
    return float(estimate.spread.double().square().mean() / estimate.draws) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_noise_model_predicts_eagers_own_error(dtype):
    """Eager is at most three times as far from float64 as the draws are, and not eight times nearer."""
    model, batch = stacked(dtype)
    eager = record(model, model, batch)
    expected = reference(model, batch)
    assert expected.kind == "float64"
    for name, _, value in eager.values():
        estimate = expected.estimates[name]
        error = (value.double() - estimate.value).square().mean().sqrt()
        assert error / drawn(estimate) < 3, name
        assert error / drawn(estimate) > 1 / 8 or value.numel() == 1, name


def test_the_model_is_not_touched():
    """Parameters, buffers, gradients, training flags, default dtype: all as before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reference(model, Batch.of(torch.randn(8, 4)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_the_same_seed_gives_the_same_numbers():
    """A verdict can be repeated."""
    model, batch = stacked()
    one, two = reference(model, batch), reference(model, batch)
    assert all(one.estimates[name].noise == two.estimates[name].noise for name in one.estimates)


def test_memory_does_not_grow_with_draws():
    """Draws are folded into sums: 36, and there are no more, take the room of one, and of a transcript's inputs."""
    model, batch = stacked()
    expected = reference(model, batch)
    before, draws = expected.nbytes, [expected.draws]
    while expected.more():
        draws.append(expected.draws)
    assert draws == [1, 2, 3, 4, 6, 8, 12, 16, 24, 36]
    inputs = sum(tensor.nbytes for tensor in batch.tensors()) * 2  # in float64
    assert before < expected.nbytes <= before + 2 * inputs


def test_narrow_casts_inside_the_model_are_widened():
    """A model that casts to float32 on the way is still computed in float64."""

    class Casts(nn.Module):
        def forward(self, x):
            table = torch.linspace(0, 1, 8, dtype=torch.float32).exp()
            return (x.float() * table).to(x.dtype).softmax(-1, dtype=torch.float32)

    batch = Batch.of(torch.randn(4, 8, dtype=torch.bfloat16))
    found = reference(Casts(), batch).estimates["output"]
    x = batch.args[0].double()
    exact = (x * torch.linspace(0, 1, 8, dtype=torch.float64).exp()).softmax(-1)
    assert found.value.dtype is torch.float64
    assert torch.allclose(found.value, exact, rtol=1e-12, atol=0)


def test_masked_attention_stays_finite():
    """Infinities in a mask survive the noise without turning into NaN."""

    def attend(x):
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return (x @ x.t()).masked_fill(mask, float("-inf")).softmax(-1)

    found = reference(attend, Batch.of(torch.randn(6, 6)), train=False).estimates["output"]
    assert all(0 < mean < 100 for mean in found.noise.mean_squares)


def test_dropout_is_replayed_from_the_tape():
    """The float64 run drops what eager dropped, also through rand_like and bernoulli."""

    class Random(nn.Module):
        def forward(self, x):
            y = nn.functional.dropout(x, 0.5, True) + torch.rand_like(x)
            return y * torch.bernoulli(torch.full_like(x, 0.5))

    model, batch, tape = Random(), Batch.of(torch.randn(64)), Tape()
    eager = record(model, model, batch, mode=tape)
    exact = reference(model, batch, tape=tape).estimates["output"].value
    assert torch.allclose(eager.outputs["output"].value.double(), exact, rtol=1e-6)
    without = reference(model, batch).estimates["output"].value
    assert not torch.allclose(eager.outputs["output"].value.double(), without, rtol=1e-2)


def test_the_unit_is_that_of_the_narrowest_dtype():
    """Parameters, buffers and inputs decide; a tape also sees an autocast; a given unit wins."""
    model, batch = stacked()
    assert reference(model, batch).unit == 2**-24
    assert reference(model, batch.to(dtype=torch.bfloat16)).unit == 2**-8
    assert reference(model, batch, unit=2**-11).unit == 2**-11
    tape = Tape()
    with torch.autocast("cpu", torch.bfloat16):
        record(model, model, batch, mode=tape)
    assert reference(model, batch, tape=tape).unit == 2**-8


def test_a_float64_model_says_that_nothing_more_precise_was_there():
    """Kind same-precision; noise of about one unit in the last place, not zero."""
    model, batch = stacked(torch.float64)
    found = reference(model, batch)
    assert found.kind == "same-precision"
    estimate = found.estimates["output"]
    assert 0.1 < drawn(estimate) / float(estimate.value.square().mean() ** 0.5) / 2**-53 < 100
    again = record(model, model, batch)
    assert not any(map(problem, compare(again, scaled(again, 1 + 2**-52), found)))
    assert any(map(problem, compare(again, scaled(again, 1 + 1e-9), found)))


def scaled(recording, factor):
    """The recording with its output multiplied."""
    from dataclasses import replace

    item = recording.outputs["output"]
    return replace(recording, outputs={"output": replace(item, value=item.value * factor)})


def test_a_complex_model_is_run_in_complex128():
    """Complex parameters keep their imaginary part, and noise is drawn in both parts."""

    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))

        def forward(self, x):
            return x * self.turn

    model, batch = Rotates(), Batch.of(torch.randn(3, 4, dtype=torch.complex64))
    found = reference(model, batch)
    assert found.kind == "float64"
    eager = record(model, model, batch)
    assert found.estimates["output"].value.shape == (3, 4, 2)
    assert not any(map(problem, compare(eager, scaled(eager, 1 + 1e-7), found)))
    assert any(map(problem, compare(eager, scaled(eager, 1 + 1e-4j), found)))


class NoWide(nn.Module):
    """Refuses float64, as a custom kernel might; and float32 if it is told to."""

    def __init__(self, *refused):
        super().__init__()
        self.refused = refused

    def forward(self, x):
        """Double the input."""
        if x.dtype in self.refused:
            raise TypeError(f"no kernel for {x.dtype}")
        return x * 2 + 1


def test_half_precision_falls_back_to_float32():
    """Where float64 can't be had float32 is wide enough for bfloat16, and the reference says so."""
    found = reference(NoWide(torch.float64), Batch.of(torch.randn(8, dtype=torch.bfloat16)))
    assert found.kind == "float32"
    assert "no kernel for torch.float64" in found.why


def test_the_last_resort_is_eager_and_says_so():
    """Without anything wider eager is run with disturbed inputs, and every leaf names it."""
    model, batch = NoWide(torch.float64), Batch.of(torch.randn(8))
    found = reference(model, batch)
    assert found.kind == "eager-draws"
    assert "no kernel for torch.float64" in found.why
    assert found.why.endswith("; noise is what disturbed parameters and inputs make of eager itself")
    eager = record(model, model, batch)
    near = compare(eager, scaled(eager, 1 + 1e-6), found)
    assert not any(map(problem, near))
    assert {leaf.against for leaf in near if leaf.numerical} == {"eager-draws"}
    far = [leaf for leaf in compare(eager, scaled(eager, 1 + 1e-3), found) if problem(leaf)]
    assert [leaf.name for leaf in far] == ["output"]
    assert "expected comes from eager itself" in problem(far[0])


def test_a_model_that_cannot_be_copied_is_its_own_reference():
    """deepcopy may fail; the model is run as it is then, and its state put back."""

    class Stuck(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("holds a socket")

    model = Stuck(3, 3)
    found = reference(model, Batch.of(torch.ones(1, 3)))
    assert found.kind == "eager-only"
    assert "holds a socket" in found.why
    assert model.weight.grad is None


def test_a_function_around_a_compiled_module_is_copied_with_the_module():
    """Names are those of the module; the function, with what torch.compile made, runs the copy, uncompiled."""

    def around(model):
        call = torch.compile(model, backend=lambda graph, example: lambda *args: [graph(*args)[0] + 1])
        return lambda x: 2 * call(x)

    model, batch = nn.Linear(3, 3), Batch.of(torch.ones(1, 3))
    found = reference(model, batch, call=around(model))
    assert found.kind == "float64"
    assert torch.allclose(found.estimates["output"].value, 2 * model(*batch.args).double())
    assert torch.equal(found.twin().outputs["output"].value, 2 * model(*batch.args))
    assert found.twin().gradients["gradient of weight"] is not None
    assert model.weight.grad is None


def test_operators_beyond_dispatch_are_judged_by_perturbed_inputs():
    """A function that no dispatch mode may enter still gets a float64 run, with noise on what it is given."""

    class Closed(nn.Module):
        def forward(self, x):
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise NotImplementedError("no rule for this mode")
            return x.exp()

    batch = Batch.of(torch.randn(16))
    found = reference(Closed(), batch)
    assert found.kind == "float64-inputs"
    assert torch.equal(found.estimates["output"].value, batch.args[0].double().exp())
    assert all(mean > 0 for mean in found.estimates["output"].noise.mean_squares)


def test_written_parameters_do_not_leak_into_the_next_draw():
    """Copies share parameters; a model that writes to one gets fresh ones."""

    class Grows(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    model = Grows(4, 4)
    batch = Batch.of(torch.randn(2, 4))
    snapshot = StateSnapshot(model)
    eager = record(model, model, batch)
    snapshot.restore()
    found = reference(model, batch)
    assert drawn(found.estimates["output"]) < 1e-5
    assert not any(map(problem, compare(eager, scaled(eager, 1 + 1e-7), found)))


def test_operators_are_read_from_their_schema():
    """What rounds, what accumulates and over how many terms."""
    aten = torch.ops.aten
    assert operator_facts(aten.transpose.int).exact
    assert operator_facts(aten.cat.default).exact
    assert not operator_facts(aten.add.Tensor).accumulates
    assert operator_facts(aten.add_.Tensor).writes == {0: "self"}
    assert operator_facts(aten.native_batch_norm.default).running == (3, 4)
    assert operator_facts(aten.bernoulli.default).random
    a, b = torch.ones(2, 7), torch.ones(7, 3)
    assert count_terms("mm", (a, b)) == 7
    assert count_terms("addmm", (torch.ones(3), a, b)) == 7
    assert count_terms("sum", (a,)) == 14
    assert count_terms("sum", (a, [1])) == 7
    assert count_terms("native_layer_norm", (a, [7], None, None, 1e-5)) == 7
    assert count_terms("convolution", (torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3))) == 27


def test_the_reason_of_a_fallback_is_in_the_leaf():
    """Also why every run with noise raised, and who reads the leaf is told."""

    class Shy(nn.Module):
        def forward(self, x):
            if x.dtype == torch.float64 and torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise NotImplementedError("no rule for this mode")
            return x.exp()

    model, batch = Shy(), Batch.of(torch.randn(16))
    eager = record(model, model, batch)
    leaves = compare(eager, scaled(eager, 1 + 1e-7), reference(model, batch))
    assert {leaf.why for leaf in leaves if leaf.numerical} == {
        "float64: NotImplementedError in forward: no rule for this mode"
    }
    assert not any(leaf.why for leaf in compare(eager, scaled(eager, 1 + 1e-7), reference(nn.Identity(), batch))[:-2])


def test_a_part_in_float32_is_not_given_the_noise_of_bfloat16():
    """The tape has seen how each operator rounds; a unit for the whole program would hide an error of a thousandth."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.Linear(16, 16).bfloat16()

        def forward(self, x):
            return self.narrow(x.bfloat16()).float(), x.square().sum(-1).log()

    model, batch, tape = Mixed(), Batch.of(torch.randn(8, 16)), Tape()
    record(model, model, batch, mode=tape)
    by_operator, by_program = reference(model, batch, tape=tape), reference(model, batch, unit=2.0**-8)
    assert drawn(by_operator.estimates["output[1]"]) < 1e-5
    assert drawn(by_program.estimates["output[1]"]) > 1e-3
    near, whole = (drawn(r.estimates["output[0]"]) for r in (by_operator, by_program))
    assert 1 / 4 < near / whole < 4


def test_casts_of_an_autocast_are_noise_of_its_inputs():
    """Autocast rounds what a product is given; float64 shows no such cast, the tape does."""
    model, batch, tape = nn.Linear(64, 64, bias=False), Batch.of(torch.randn(32, 64)), Tape()
    with torch.autocast("cpu", torch.bfloat16):
        eager = record(model, model, batch, mode=tape)
    found = reference(model, batch, tape=tape).estimates["output"]
    error = float((eager.outputs["output"].value.double() - found.value).square().mean() ** 0.5)
    assert 1 / 3 < error / drawn(found) < 3
    assert any(rounding.inputs for rounding in tape.roundings.values())


def test_a_cast_to_a_narrower_dtype_rounds():
    """There and back again: the noise of bfloat16 in a float32 program."""
    batch, tape = Batch.of(torch.randn(256)), Tape()

    def through(x):
        return x.bfloat16().float() * 1.0

    eager = record(through, None, batch, mode=tape)
    found = reference(through, batch, tape=tape).estimates["output"]
    error = float((eager.outputs["output"].value.double() - found.value).square().mean() ** 0.5)
    assert 1 / 4 < error / drawn(found) < 4


class Narrow(torch.autograd.Function):
    """A product that exists in float32 alone, as grouped_mm of a mixture of experts does."""

    @staticmethod
    def forward(ctx, x, w):
        if x.dtype == torch.float64:
            raise RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double")
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.mT, x.mT @ gradient


def test_an_ill_conditioned_program_without_float64_is_given_its_room():
    """The dtype alone knows nothing of cancellation: disturbed inputs show it."""
    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return (Narrow.apply(x, self.w) + 1000) - 1000

    # Of disturbed inputs nearly all rounds away: with three seeds of 40 the first draw moves nothing.
    torch.manual_seed(1)
    model, batch = Cancels(), Batch.of(torch.randn(16, 8))
    eager, found = record(model, model, batch), reference(model, batch)
    assert found.kind == "eager-draws"
    value = eager.outputs["output"].value

    def moved(error):
        output = replace(eager.outputs["output"], value=value + error)
        leaves = compare(eager, replace(eager, outputs={"output": output}), found)
        return [problem(leaf) for leaf in leaves if leaf.name == "output"]

    assert moved(3e-5 * torch.sin(torch.arange(128.0)).view(16, 8)) == [None]
    assert "expected comes from eager itself" in moved(1e-2)[0]


@pytest.mark.parametrize("shapes", [((8, 16), (2, 16, 8)), ((2, 8, 16), (16, 8)), ((8, 16), (16, 8)),
                                    ((2, 8, 16), (2, 16, 8))])
def test_grouped_products_have_a_float64_run(shapes):
    """Experts' products are written out in wide precision, in the shapes that torch takes them in."""
    torch.manual_seed(0)
    one, other = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else torch.tensor([4, 8], dtype=torch.int32)
    wide = wide_version("_grouped_mm", None)(one, other, ends)
    narrow = torch._grouped_mm(one.float(), other.float(), offs=ends)
    torch.testing.assert_close(wide.float(), narrow)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_convolutions_of_images_with_channels_last_are_those_of_torch(groups):
    """In wide runs their channels come first, which takes a sixth of the time; values and layout stay."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, 12, 10, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    w = torch.randn(16, 16 // groups, 3, 3, dtype=torch.float64)
    rest = ([2, 2], [1, 1], [1, 1], False, [0, 0], groups)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    expected = convolution(x, w, None, *rest)
    found = wide_version("convolution", convolution)(x, w, None, *rest)
    gradient = torch.randn(expected.shape, dtype=torch.float64)
    arguments = (gradient, x, w, [0], *rest, [True, True, False])
    pairs = [(expected, found)]
    pairs += zip(backward(*arguments)[:2], wide_version("convolution_backward", backward)(*arguments)[:2], strict=True)
    for one, other in pairs:
        torch.testing.assert_close(other, one)
    assert [other.stride() for _, other in pairs[:2]] == [one.stride() for one, _ in pairs[:2]]


def test_a_mixture_of_experts_is_measured_from_float64():
    """Forward and backward."""
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.linear = nn.Parameter(torch.randn(2, 16, 8)), nn.Linear(16, 16)

        def forward(self, x):
            return torch._grouped_mm(self.linear(x), self.w, offs=torch.tensor([4, 8], dtype=torch.int32))

    model, batch, tape = Experts(), Batch.of(torch.randn(8, 16)), Tape()
    eager = record(model, model, batch, mode=tape)
    found = reference(model, batch, tape=tape)
    assert (found.kind, found.why) == ("float64", "")
    assert eager.gradients.keys() <= found.estimates.keys()


def test_what_runs_in_place_of_an_operator_is_asked_for():
    """Only for these names the module that has it is loaded."""
    assert _VERSIONS.keys() == EMULATED
