"""compare() and problem(): what counts as equal, as noise, as undecidable, as wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.oracle import Leaf, Limits, Tape, compare, note, problem, record, reference
from pytest_torchcompile.state.snapshot import StateSnapshot

pytestmark = pytest.mark.needs_torch


def never():
    """A reference that nobody may ask for."""
    raise AssertionError("asked for a reference although nothing differs")


def with_output(recording, value):
    """The recording with another value of its only output."""
    return replace(recording, outputs={"output": replace(recording.outputs["output"], value=value)})


def judged(function, change, *, batch=None, limits=None):
    """Leaves of a function against its own recording with a changed output, and the changed leaf."""
    batch = batch or Batch.of(torch.linspace(-2, 2, 64))
    eager = record(function, None, batch, train=False)
    changed = with_output(eager, change(eager.outputs["output"].value.clone()))
    changed = replace(changed, loss=eager.loss)
    leaves = compare(eager, changed, lambda: reference(function, batch, train=False), limits=limits)
    return {leaf.name: leaf for leaf in leaves}["output"]


def test_equal_runs_need_no_reference():
    """Bitwise equality is proof enough, and it is free."""
    model, batch = nn.Linear(4, 4), Batch.of(torch.randn(2, 4))
    leaves = compare(record(model, model, batch), record(model, model, batch), never)
    assert all(leaf.bitwise for leaf in leaves)
    assert [leaf.kind for leaf in leaves].count("gradient") == 2
    assert {"structure", "alias", "rng", "value"} <= {leaf.kind for leaf in leaves}


def test_nan_equals_nan_and_zero_equals_minus_zero():
    """Neither is a difference that a program could be blamed for; the sign of a zero is told."""
    value = torch.tensor([float("nan"), 0.0])
    eager = record(lambda x: x, None, Batch.of(value), train=False)
    leaves = compare(eager, with_output(eager, torch.tensor([float("nan"), -0.0])), never)
    by_kind = {leaf.kind: leaf for leaf in leaves if leaf.name == "output"}
    assert by_kind["value"].bitwise
    assert problem(by_kind["zero_sign"]) is None
    assert note(by_kind["zero_sign"]) == "output: 1 zero(s) have another sign: 0.0 in eager, -0.0 compiled at [1]"
    assert not any(leaf.kind == "zero_sign" for leaf in compare(eager, eager, never))


def test_one_rounding_passes_and_a_real_error_does_not():
    """The yardstick is the noise of the very function."""
    assert problem(judged(torch.sin, lambda y: y * (1 + 2**-24))) is None
    assert "times the rounding noise" in problem(judged(torch.sin, lambda y: y * (1 + 2**-18)))


def test_an_ill_conditioned_function_is_given_more_room():
    """The same change is noise where cancellation has amplified rounding, and an error where not."""

    def cancels(x):
        return (x + 1000) - 1000

    assert problem(judged(cancels, lambda y: y + 2e-5)) is None
    assert problem(judged(lambda x: x + 0.5, lambda y: y + 2e-5)) is not None


def test_a_bias_is_seen_where_the_mean_square_hides_it():
    """An error of one sign in many elements, half as large as rounding, in bfloat16."""
    batch = Batch.of(torch.rand(4096, generator=torch.Generator().manual_seed(0)).add(1).bfloat16())

    def shift(y):
        return torch.where(torch.arange(4096) % 3 == 0, y * (1 + 2**-7), y)

    leaf = judged(lambda x: x * 3, shift, batch=batch)
    assert leaf.rms < 4
    assert leaf.peak < 16
    assert "systematic offset" in problem(leaf)


def test_one_wrong_element_is_named():
    """The text has the index, three values, the share of wrong elements and what was measured from."""

    def spoil(y):
        y[5] += 0.01
        return y

    leaf = judged(torch.sin, spoil)
    assert leaf.index == (5,)
    assert leaf.wrong == 1 / 64
    assert leaf.compiled == pytest.approx(leaf.expected + 0.01, rel=1e-5)
    text = problem(leaf)
    assert text.startswith("output: ")
    assert " at [5]: eager " in text
    assert "1.56% of 64 elements wrong (float32; expected comes from a float64 run)" in text


def test_the_peak_alone_is_enough():
    """One element of many, too small for the mean square, and past the first piece that is looked at."""
    batch = Batch.of(torch.linspace(1, 2, 300_000))

    def spoil(y):
        y[250_000] *= 1 + 3e-6
        return y

    leaf = judged(torch.sin, spoil, batch=batch)
    assert leaf.rms < 4
    assert leaf.index == (250_000,)
    assert "one element is" in problem(leaf)
    assert problem(leaf, Limits(peak=1000)) is None


def test_new_nan_and_lost_infinity_are_wrong():
    """NaN where eager has a number, a number where eager and float64 have an infinity."""

    def spoil(y):
        y[3] = float("nan")
        return y

    text = problem(judged(torch.sin, spoil))
    assert "1 of 64 elements are NaN or infinite in eager or compiled alone at [3]" in text

    def log(x):
        return (x.abs() - 2).log()  # minus infinity at both ends, NaN between

    def lose(y):
        y[0] = 0.0
        return y

    assert "NaN or infinite" in problem(judged(log, lose))


def test_an_overflow_that_rounding_decides_is_excused():
    """A value at the end of float16's range may be infinite in one of the two."""

    def large(x):
        return x * 65000

    def overflow(y):
        y[1] = float("inf")
        return y

    batch = Batch.of(torch.tensor([0.5] * 200 + [1.0], dtype=torch.float16).flip(0).roll(1))
    leaf = judged(large, overflow, batch=batch)
    assert leaf.undecidable == 1
    assert problem(leaf) is None
    assert "1 of 201 elements differ and are undecidable: eager itself overflows or rounding decides" in note(leaf)


def test_where_eager_overflows_on_its_way_nothing_is_judged():
    """Eager's NaN with a finite float64 value is no standard, and is told."""

    def detour(x):
        return (x * x) / x

    batch = Batch.of(torch.tensor([300.0] * 10 + [1.5] * 10, dtype=torch.float16))
    leaf = judged(detour, lambda y: torch.where(y.isfinite(), y, 300.0), batch=batch)
    assert leaf.undecidable == leaf.blind == 10
    assert leaf.decided
    assert problem(leaf) is None
    assert "10 of 20 elements differ and are undecidable: eager itself overflows" in note(leaf)


def test_ties_are_undecidable_and_counted():
    """Where rounding alone flips an index, it may differ; where it can't, it may not."""
    near = torch.ones(200, 4)
    near[:, 1] = 2.0
    near[0, 2] = 2.0 + 2e-7  # one row with a tie within rounding
    batch = Batch.of(near)

    def argmax(x):
        return (x * 1.1).argmax(-1)

    def other(row, column):
        def change(y):
            y[row] = column
            return y

        return change

    leaf = judged(argmax, other(0, 1), batch=batch)
    assert leaf.undecidable == leaf.blind == 1
    assert problem(leaf) is None
    assert "1 of 200 elements differ and are undecidable: rounding alone flips them" in note(leaf)
    hard = judged(argmax, other(1, 0), batch=batch)
    assert hard.index == (1,)
    assert "1 of 200 elements differ although rounding can't flip them" in problem(hard)


def test_a_leaf_of_nothing_but_ties_is_undecidable():
    """It is no problem, and it doesn't count as compared."""
    batch = Batch.of(torch.ones(50, 4))

    def argmax(x):
        return (x * torch.tensor([1.1, 1.1, 1.1, 1.1])).argmax(-1)

    leaf = judged(argmax, lambda y: (y + 1) % 4, batch=batch)
    assert problem(leaf) is None
    assert not leaf.decided
    assert "output: undecidable, rounding alone flips all of it" in note(leaf)


def test_more_flips_than_rounding_makes_are_wrong():
    """Each element of a hundred near ties may flip, but not all of them at once."""
    near = torch.ones(1000, 2)
    near[:, 1] += torch.linspace(-3e-7, 3e-7, 1000)
    batch = Batch.of(near)

    def argmax(x):
        return (x * 1.1).argmax(-1)

    leaf = judged(argmax, lambda y: 1 - y, batch=batch)
    assert "elements differ" in problem(leaf)


def test_a_leaf_of_nothing_but_noise_is_undecidable():
    """Total cancellation: zeros would pass as well, so nothing was shown; and it is said."""

    def cancels(x):
        return (x * 1.1 + 1000) - 1000 - x * 1.1

    leaf = judged(cancels, lambda y: torch.where(y == 0, 3e-5, -y))
    assert problem(leaf) is None
    assert not leaf.decided
    assert leaf.blind == leaf.numel == 64
    assert "output: undecidable, its values are no larger than their rounding noise" in note(leaf)
    assert "times the rounding noise" in problem(judged(cancels, lambda y: y + 1e-2))


def test_one_huge_element_does_not_blind_the_others():
    """A masked logit of -1e9 has more noise than all others together; each is judged by its own."""
    x = torch.linspace(-2, 2, 256)
    batch = Batch.of((x, torch.arange(256) == 7))

    def masked(x, mask):
        return torch.sin(x) * 1.1 + mask * -1e9

    def spoil(index, factor):
        def change(y):
            y[index] *= factor
            return y

        return change

    assert problem(judged(masked, spoil(9, 1 + 2e-7), batch=batch)) is None
    assert problem(judged(masked, spoil(7, 1 + 2e-7), batch=batch)) is None
    assert judged(masked, spoil(9, 1.00001), batch=batch).index == (9,)
    assert problem(judged(masked, spoil(9, 1.00001), batch=batch)) is not None
    assert problem(judged(masked, lambda y: y * (1 + 2e-6), batch=batch)) is not None
    most = Batch.of((x, torch.arange(256) % 10 > 0))
    assert problem(judged(masked, spoil(10, 1.00001), batch=most)) is not None
    assert "times the rounding noise" in problem(judged(masked, spoil(slice(0, 256, 10), 1.0001), batch=most))


def test_one_ill_conditioned_row_does_not_blind_the_others():
    """Rows of like size and unlike noise, as where one token has gone to another expert."""

    def row(x):
        return torch.cat([((x[:1] + 1e4) - 1e4), x[1:] * 1.1])

    batch = Batch.of(torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 0.5)

    def spoil(index, error):
        def change(y):
            y[index, 3] += error
            return y

        return change

    assert problem(judged(row, spoil(0, 1e-3), batch=batch)) is None
    assert problem(judged(row, spoil(1, 1e-5), batch=batch)) is not None
    assert problem(judged(row, spoil(0, 1e-1), batch=batch)) is not None


def test_a_decision_that_noise_flips_is_excused_where_it_flips():
    """A router near a tie: the row may go either way, another row may not."""
    x = torch.tensor([[1.0, 1.0], [1.0, 3.0]])

    def route(x):
        y = x * 1.1
        return torch.where((y[:, :1] > y[:, 1:]), torch.full_like(y, 5.0), y)

    batch = Batch.of(x)

    def other(index):
        def change(y):
            y[index] = 5.0
            return y

        return change

    assert problem(judged(route, other(0), batch=batch)) is None
    assert problem(judged(route, other(1), batch=batch)) is not None


def test_python_numbers_are_compared_too():
    """Floats with noise, everything else exactly."""
    assert problem(numbers(3, 3)) is None
    assert "is 3 in eager, 4 compiled" in problem(numbers(3, 4))
    assert problem(numbers(0.1 + 0.2, 0.3)) is None
    assert problem(numbers(0.3, 0.31)) is not None
    x = Batch.of(torch.rand(1000, generator=torch.Generator().manual_seed(0)))

    def total(x):
        return x.sum().item()

    for error, wrong in ((1e-7, False), (1e-4, True)):
        eager = record(total, None, x, train=False)
        found = with_output(eager, eager.outputs["output"].value * (1 + error))
        leaf = compare(eager, found, lambda: reference(total, x, train=False))[-1]
        assert (problem(leaf) is not None) is wrong


def numbers(one, other):
    """The leaf of two returned Python numbers."""
    batch = Batch.of(torch.ones(1))
    mine = record(lambda x: one, None, batch, train=False)
    found = record(lambda x: other, None, batch, train=False)
    return compare(mine, found, lambda: reference(lambda x: one, batch, train=False))[-1]


def raising(error, batch=None):
    """The recording of a function that raises."""

    def function(x):
        raise error

    return record(function, None, batch or Batch.of(torch.ones(1)))


def test_errors_have_to_agree():
    """Eager raises if and only if compiled raises, in the same phase, in the same family of classes."""

    class Mine(ValueError):
        pass

    runs = record(lambda x: x * 2, None, Batch.of(torch.ones(1)))
    (leaf,) = compare(raising(ValueError("planted")), raising(Mine("planted")), never)
    assert problem(leaf) is None
    (leaf,) = compare(raising(ValueError("planted")), raising(TypeError("planted")), never)
    assert "eager raised ValueError in forward: planted, compiled raised TypeError" in problem(leaf)
    (leaf,) = compare(raising(ValueError("planted")), runs, never)
    assert problem(leaf) == "error: eager raised ValueError in forward: planted, compiled ran"
    (leaf,) = compare(runs, raising(ValueError("planted")), never)
    assert "compiled raised ValueError in forward: planted" in problem(leaf)


def test_an_error_in_another_phase_is_another_error():
    """What eager refuses in forward may not wait for backward."""

    def loss(output, value):
        raise ValueError("planted")

    early = raising(ValueError("planted"))
    late = record(lambda x: x * 2, None, Batch.of(torch.ones(1)), loss=loss)
    (leaf,) = compare(early, late, never)
    assert "eager raised ValueError in forward: planted, compiled raised ValueError in loss" in problem(leaf)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_errors_that_torch_wraps_are_the_same_errors(fullgraph):
    """Dynamo's own classes stand for the error that they report."""

    def refuses(x):
        if x.shape[0] == 3:
            raise ValueError("no three")
        return x

    def mismatch(x):
        return x @ torch.ones(4, 4)

    for function in (refuses, mismatch):
        torch.compiler.reset()
        batch = Batch.of(torch.ones(3, 3))
        compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
        (leaf,) = compare(record(function, None, batch), record(compiled, None, batch), never)
        assert problem(leaf) is None
        assert leaf.eager != leaf.compiled or not fullgraph
    torch.compiler.reset()


def test_a_model_that_wavers_is_not_called_miscompiled():
    """Two eager runs that differ are said to differ."""

    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            Counts.calls += 1
            return x * (1 + 0.1 * Counts.calls)

    model, batch = Counts(), Batch.of(torch.ones(4))
    eager, compiled = record(model, model, batch), record(model, model, batch)
    leaves = compare(eager, compiled, lambda: reference(model, batch))
    told = [leaf for leaf in leaves if note(leaf)]
    assert {leaf.kind for leaf in told} == {"nondeterministic"}
    assert "two eager runs from one state and seed differ" in note(told[0])
    assert not any(leaf.decided for leaf in told)
    assert not any(map(problem, leaves))


def test_a_reference_of_another_program_does_not_excuse_anything():
    """Eager far from float64 must not widen the scale: compiled has to be near one of the two."""

    class Precise(nn.Module):
        def forward(self, x):
            return x * (2 if x.dtype == torch.float64 else 1)

    model, batch = Precise(), Batch.of(torch.linspace(1, 2, 64))
    eager = record(model, model, batch, train=False)
    found = reference(model, batch, train=False)

    def text(factor):
        value = eager.outputs["output"].value * factor
        return problem(compare(eager, with_output(eager, value), found)[3])

    assert text(1 + 1e-7) is None
    assert text(2.0) is None
    assert "expected comes from eager itself" in text(1.5)


def test_state_can_be_compared_after_a_restore():
    """The recipe that the runner follows: snapshot, run, restore, run."""
    model, batch = nn.BatchNorm1d(4), Batch.of(torch.randn(8, 4))
    snapshot = StateSnapshot(model)
    eager = record(model, model, batch)
    snapshot.restore()
    again = record(model, model, batch)
    assert all(leaf.bitwise for leaf in compare(eager, again, never))


def test_leaves_survive_json():
    """to_dict is strict JSON, NaN and infinity included, and from_dict reads it back."""
    leaf = Leaf(
        "output['x']", "value", numel=9, dtype="float32", rms=math.inf, bias=0.5, peak=2.0, index=(1, 2),
        eager=math.nan, compiled=-math.inf, expected=3, message="wrong",
    )  # fmt: skip
    plain = json.loads(json.dumps(leaf.to_dict(), allow_nan=False))
    back = Leaf.from_dict({**plain, "of a newer version": 1})
    assert repr(back) == repr(leaf)
    assert Leaf.from_dict(Leaf("output", "value").to_dict()) == Leaf("output", "value")


def test_limits_refuse_nonsense():
    """A limit is a number that is zero or more."""
    with pytest.raises(UsageError, match="limit 'peak' is -1, expected a number that is zero or more"):
        Limits(peak=-1)


def test_a_leaf_of_few_elements_is_judged_by_its_peak():
    """One number is one draw of the noise: its root mean square is no average."""
    one = Leaf("loss", "value", numel=1, rms=15.0, bias=15.0, peak=15.0)
    assert problem(one) is None
    assert "error is 15 times the rounding noise (limit 10)" in problem(replace(one, numel=2))
    assert "error is 17 times the rounding noise (limit 16)" in problem(replace(one, rms=17.0))
    assert Limits().of(1) == (16, 16, 16)
    assert Limits().of(10**9)[0] == pytest.approx(4)


def test_a_stored_leaf_is_judged_by_any_limits():
    """Only numbers depend on limits; what no rounding excuses stays a problem."""
    leaf = Leaf("output", "value", numel=4000, rms=5.0, bias=1.0, peak=5.0)
    assert "error is 5 times the rounding noise (limit 4)" in problem(leaf)
    assert problem(leaf, Limits(rms=6)) is None
    loose = Limits(math.inf, math.inf, math.inf)
    assert problem(Leaf("output", "dtype", message="dtype is a in eager, b compiled"), loose) is not None
    assert problem(replace(leaf, rms=math.nan), loose) is not None


def test_a_structure_that_wavers_is_not_called_miscompiled():
    """A model whose keys change from run to run differs from itself."""
    state = {"calls": 0}

    def fickle(x):
        state["calls"] += 1
        return {f"key {state['calls']}": x * 2}

    batch = Batch.of(torch.ones(4))
    eager, compiled = (record(fickle, None, batch, train=False) for _ in range(2))
    leaves = compare(eager, compiled, lambda: reference(fickle, batch, train=False))
    assert not any(map(problem, leaves))
    assert [leaf.kind for leaf in leaves if note(leaf)] == ["nondeterministic"]


ODD = {
    "complex": (lambda x: torch.complex(x, x * 2) * 1.1, lambda y: y * 1.01),
    "0-d": (lambda x: (x * 1.1).sum(), lambda y: y * 1.01),
    "sparse": (lambda x: (x * 1.1).to_sparse(), lambda y: y * 1.01),
    "sparse rows": (lambda x: (x * 1.1).to_sparse_csr(), lambda y: y * 1.01),
    "nested": (lambda x: torch.nested.nested_tensor([x * 1.1, x[:2] * 1.1], layout=torch.jagged), lambda y: y * 1.01),
    "masked": (lambda x: masked_tensor(x * 1.1, x > 1), lambda y: y * 1.01),
    "other mask": (lambda x: masked_tensor(x * 1.1, x > 1), lambda y: masked_tensor(y.get_data(), ~y.get_mask())),
    "8 bits": (lambda x: (x * 1.1).to(torch.float8_e4m3fn), lambda y: (y.float() * 3).to(torch.float8_e4m3fn)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of (nested tensors|MaskedTensors):UserWarning")
@pytest.mark.parametrize("odd", ODD)
def test_any_kind_of_tensor_is_compared(odd):
    """Right ones pass, wrong ones are found, nothing ends in a traceback."""
    function, spoil = ODD[odd]
    batch = Batch.of(torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) + 0.5)

    def leaves(call):
        eager, other = (record(f, None, batch, train=False) for f in (function, call))
        assert eager.error is None
        return compare(eager, other, lambda: reference(function, batch, train=False))

    assert not any(map(problem, leaves(function)))
    assert next(leaf.name for leaf in leaves(lambda x: spoil(function(x))) if problem(leaf)) == "output"


def test_layouts_and_ragged_sizes_have_to_agree():
    """The same values as a sparse and a dense tensor are not the same."""
    batch = Batch.of(torch.eye(3))
    eager = record(lambda x: x.to_sparse(), None, batch, train=False)
    found = record(lambda x: x * 1.0, None, batch, train=False)
    wrong = [leaf for leaf in compare(eager, found, lambda: reference(lambda x: x.to_sparse(), batch)) if problem(leaf)]
    assert [leaf.kind for leaf in wrong] == ["stride"]
    assert "layout is torch.sparse_coo in eager, torch.strided compiled" in problem(wrong[0])


def test_empty_tensors_are_equal():
    """Nothing to compare is no error."""
    batch = Batch.of(torch.zeros(0, 3, requires_grad=True))
    eager, found = (record(lambda x: x * 2, None, batch) for _ in range(2))
    assert not any(map(problem, compare(eager, found, never)))


class Buckets(nn.Module):
    """Which bucket a number is in: a quotient next to a whole number falls to either side."""

    def forward(self, x):
        """Divide."""
        return torch.floor(x / 0.7)


def test_an_excused_difference_is_told():
    """Rounding decides about a floor, so 31 for 30 is no problem; but it is told. What is equal is not."""
    model, batch = Buckets(), Batch.of(torch.arange(1, 401) * 0.7)
    tape = Tape()
    eager = record(model, model, batch, mode=tape)

    def output_of(call):
        compiled = record(call, model, batch)
        leaves = compare(eager, compiled, lambda: reference(model, batch, tape=tape))
        (leaf,) = [leaf for leaf in leaves if leaf.name == "output"]
        assert problem(leaf) is None
        return leaf

    assert note(output_of(model)) is None
    told = output_of(lambda x: torch.floor(x * (1 / 0.7)))
    assert note(told).startswith("output: eager 30, compiled 31 at [30]: excused, since rounding alone can move it")
    assert Leaf.from_dict(told.to_dict()) == told
