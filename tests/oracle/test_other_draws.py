"""Models that draw other random numbers when they are compiled: told apart from compilers that compute wrongly."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import compare as compare_recordings
from pytest_torchcompile.oracle import problem, record, reference
from pytest_torchcompile.oracle.dice import FEW
from pytest_torchcompile.oracle.trial import Trial

pytestmark = pytest.mark.needs_torch

CONFIG = CompileConfig(enabled=True, backend="aot_eager")


class OtherDraws(nn.Module):
    """Asks the generator for one number more when it is compiled, as libraries do that take another operator then."""

    def __init__(self, share=0.25, wrong_share=None, factor=1.0, count=1.0):
        super().__init__()
        self.register_buffer("calls", torch.ones(3))
        self.count = count
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.share = share
        # What goes wrong in the compiled program alone.
        self.compiled_share = share if wrong_share is None else wrong_share
        self.factor = factor

    def forward(self, x):
        hidden = self.first(x).relu()
        share = self.share
        if torch.compiler.is_compiling():
            share = self.compiled_share
            hidden = hidden * self.factor
            if self.training:
                hidden = hidden + 0 * torch.rand((), device=x.device)
                self.calls.mul_(self.count)
        return self.second(nn.functional.dropout(hidden, share, self.training))


def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 16), torch.randn(12, 16)]


def test_other_draws_are_undecided_and_not_wrong():
    """Values of such calls are noted; what decides are the distributions and the calls in evaluation."""
    found = compare(OtherDraws(), batches(), CONFIG, steps=2)
    assert found.ok, found
    [told] = [note for note in found.notes if note.startswith("random generator: the compiled run draws other random")]
    assert "over 64 seeds its distribution is eager's, and in evaluation all values agree" in told
    decided = [leaf for label, leaf in found.leaves if label.endswith(", in evaluation") and leaf.decided]
    assert {"gradient of first.weight", "loss"} <= {leaf.name for leaf in decided}


def test_other_draws_cost_no_further_ones():
    """Values that depend on other random numbers stay apart, however much noise is drawn."""
    found = compare(OtherDraws(), batches(), CONFIG, steps=2)
    own_calls = [leaf for label, leaf in found.leaves if "evaluation" not in label and leaf.numerical]
    apart = [leaf for leaf in own_calls if leaf.far_off]
    assert len(apart) > 10
    # Eager's own error counts as one draw.
    assert {leaf.draws for leaf in apart} <= {1, 2}


class Deep(nn.Module):
    """Dropout behind each of several layers; compiled it draws once more before the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        if torch.compiler.is_compiling() and self.training:
            x = x + 0 * torch.rand((), device=x.device)
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(4 * layer(x)), 0.25, self.training)
        return x


def test_where_noise_is_wide_other_draws_cost_no_further_ones_either():
    """In half precision other numbers are no hundred times the noise: it is enough that most leaves are off."""
    torch.manual_seed(0)
    found = compare(Deep().bfloat16(), [torch.randn(8, 32, dtype=torch.bfloat16)], CONFIG, locate=False)
    assert found.ok, found
    own_calls = [leaf for label, leaf in found.leaves if "evaluation" not in label and "seeds" not in label]
    apart = [leaf for leaf in own_calls if leaf.numerical and leaf.wrong > 1 / 2]
    assert len(apart) >= 8
    assert sum(leaf.far_off for leaf in apart) < len(apart) / 2
    # Eager's own error counts as one draw.
    assert max(leaf.draws for leaf in own_calls) == FEW + 1


def many_dropped(x, rows, compiled=False):
    """Nine outputs behind dropout, for which ``compiled`` asks once more, and a sum that no random number reaches."""
    if compiled:
        torch.rand(())
    dropped = nn.functional.dropout(x, 0.5, True)
    return ((rows * 1.1).sum(1), *[dropped * (number + 1.3) for number in range(9)])


def words(x, compiled=False):
    """Twenty tables of words, most of which do not occur: their rows are zero."""
    if compiled:
        torch.rand(())
    dropped = nn.functional.dropout(x, 0.5, True)
    tables = []
    for number in range(20):
        table = torch.zeros(64, x.shape[0]).index_put((torch.arange(8),), dropped * (number + 1.3))
        tables.append(table)
    return tuple(tables)


def recorded_words():
    torch.manual_seed(0)
    batch = Batch.of(torch.randn(256))
    eager = record(words, None, batch, train=False)
    compiled = record(functools.partial(words, compiled=True), None, batch, train=False)
    return batch, eager, compiled


def test_of_a_table_of_words_those_count_that_occur():
    """An eighth of its rows: each of them is far off, and no noise is drawn further for that."""
    batch, eager, compiled = recorded_words()
    wide = reference(words, batch, train=False, draw=False)
    leaves = [leaf for leaf in compare_recordings(eager, compiled, wide) if leaf.numel > 1]
    assert len(leaves) == 20
    assert all(problem(leaf) and leaf.wrong <= 1 / 8 and not leaf.far_off for leaf in leaves)
    # Eager's own error counts as one.
    assert {leaf.draws for leaf in leaves} == {2}


def test_what_was_judged_before_says_too_that_most_is_off():
    """A leaf that is off, and not by far, gets one draw among others far off that an earlier comparison has judged."""
    torch.manual_seed(0)
    batch = Batch.of((torch.randn(256), torch.randn(4096, 256)))
    eager = record(many_dropped, None, batch, train=False)
    compiled = record(functools.partial(many_dropped, compiled=True), None, batch, train=False)
    wide = reference(many_dropped, batch, train=False, draw=False)
    name, others = "output[0]", {}
    for leaf in compare_recordings(eager, compiled, wide):
        if leaf.numerical and leaf.name not in (name, "loss"):
            others |= {f"{leaf.name} {copy}": replace(leaf, name=f"{leaf.name} {copy}") for copy in range(3)}
    assert len(others) == 27

    def repeated(recording):
        """Each output three times: more leaves than few."""
        outputs = {name: recording.outputs[name]}
        for other, item in recording.outputs.items():
            outputs |= {f"{other} {copy}": item for copy in range(3) if other != name}
        return replace(recording, outputs=outputs, loss=None)

    # In half of its elements off by 40 times the noise.
    noise = wide.estimates[name].value.abs().mean() * 2.0**-22
    value = eager.outputs[name].value.clone()
    value[::2] += 40 * noise
    one, other = repeated(eager), repeated(compiled)
    other = replace(other, outputs={**other.outputs, name: replace(other.outputs[name], value=value)})
    fresh = reference(many_dropped, batch, train=False, draw=False)
    [leaf] = [leaf for leaf in compare_recordings(one, other, fresh, judged=others) if leaf.name == name]
    assert problem(leaf)
    assert not leaf.far_off
    assert fresh.draws == 1


def test_where_most_is_off_a_leaf_that_no_random_number_reaches_gets_its_draws():
    """One element of it is off by its own noise, where eager and the first draw are near by luck."""
    torch.manual_seed(0)
    rows = torch.randn(4096, 256)
    half = 300 * torch.randn(400, 128)
    # These cancel: more noise than others of their size have.
    rows[:400] += torch.cat([half, -half.flip(1)], 1)
    batch, name = Batch.of((torch.randn(256), rows)), "output[0]"
    eager = record(many_dropped, None, batch, train=False)
    compiled = record(functools.partial(many_dropped, compiled=True), None, batch, train=False)
    known = reference(many_dropped, batch, train=False)
    estimate = known.estimates[name]
    seen = estimate.spread[:400].double() + (eager.outputs[name].value[:400] - estimate.value[:400]).abs()
    while known.more([name]):
        pass
    noise = estimate.spread[:400].double() / estimate.draws**0.5
    place = int((seen / noise).argmin())
    value = eager.outputs[name].value.clone()
    value[place] = estimate.value[place] + 2 * noise[place]
    compiled = replace(compiled, outputs={**compiled.outputs, name: replace(compiled.outputs[name], value=value)})
    leaves = compare_recordings(eager, compiled, reference(many_dropped, batch, train=False, draw=False))
    [leaf] = [leaf for leaf in leaves if leaf.name == name]
    assert problem(leaf) is None
    assert leaf.draws > 2
    assert {f"output[{number}]" for number in range(1, 10)} == {leaf.name for leaf in leaves if leaf.far_off} - {"loss"}


class Cancelling(OtherDraws):
    """Beside a dropout a product that no random number reaches. It wants several noise draws: some of its rows cancel,
    and compiled code adds them up the other way round."""

    def __init__(self, draws_first=True):
        super().__init__()
        weights = torch.rand(256) + 0.5
        self.register_buffer("weights", weights + weights.flip(0))
        self.draws_first = draws_first

    def forward(self, x, rows):
        compiling = torch.compiler.is_compiling()
        if not self.training:
            rows = rows.clamp(-2, 2)
        if compiling and self.training and self.draws_first:
            x = x + 0 * torch.rand((), device=x.device)
        # Where it does not draw first, a random number reaches the product as well.
        share = nn.functional.dropout(torch.ones_like(rows[:, :1]), 0.25, self.training and not self.draws_first)
        rows = rows * share
        product = rows.flip(1) @ self.weights.flip(0) if compiling else rows @ self.weights
        y = nn.functional.dropout(self.first(x), self.share, self.training and self.draws_first)
        if compiling and not self.draws_first:
            y = y + 0 * torch.rand((), device=x.device)
        return y, product

    @staticmethod
    def batches():
        torch.manual_seed(1)
        calls = []
        for size in (8, 12):
            rows = torch.randn(50 * size, 256)
            loud = rows[::31]
            half = 300 * torch.randn(len(loud), 128)
            loud += torch.cat([half, -half.flip(1)], 1)
            calls.append((torch.randn(size, 16), rows))
        return calls


def test_values_that_no_random_number_reaches_get_their_draws():
    found = compare(Cancelling(), Cancelling.batches(), CONFIG, locate=False)
    assert found.ok, found
    products = [leaf for label, leaf in found.leaves if "evaluation" not in label and leaf.name == "output[1]"]
    # Eager's own error counts as one draw.
    assert max(leaf.draws for leaf in products) > 1


def test_values_that_want_draws_do_not_excuse_a_generator_that_is_elsewhere():
    """All values are eager's but for rounding, so nothing was done with the number that was drawn."""
    found = compare(Cancelling(draws_first=False), Cancelling.batches(), CONFIG, locate=False)
    assert not found.ok
    assert {problem.where for problem in found.problems} == {"random generator"}


class KeyBias(OtherDraws):
    """A bias in front of a softmax: its gradient is zero in exact arithmetic, so it is noise."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        shares = (self.query(x) @ self.key(x).T).softmax(-1)
        return super().forward(shares @ x)


def test_rounding_noise_has_no_distribution_to_compare():
    """Of a gradient that is only noise nothing is asked, neither here nor over many seeds."""
    found = compare(KeyBias(), batches(), CONFIG)
    assert found.ok, found
    sampled = [leaf.name for label, leaf in found.leaves if label.endswith("over 64 seeds")]
    assert "mean of gradient of key.weight" in sampled
    assert "mean of gradient of key.bias" not in sampled


@pytest.mark.parametrize(("fault", "told"), [
    pytest.param({"wrong_share": 0.5}, "standard errors apart", id="drops too much"),
    pytest.param({"wrong_share": 0.0}, "standard errors apart", id="drops nothing"),
    pytest.param({"factor": 1 + 1e-4}, "times the rounding noise", id="off by a ten-thousandth"),
])
def test_a_wrong_program_that_draws_other_numbers_is_found(fault, told):
    """Distributions find a wrong share of zeros, the calls in evaluation an error that no distribution shows."""
    found = compare(OtherDraws(**fault), batches(), CONFIG, locate=False)
    assert not found.ok
    # What was found at first is not taken back.
    assert any(problem.kind == "rng" and problem.where == "random generator" for problem in found.problems)
    assert any(told in problem.message for problem in found.problems), found


def test_what_nothing_random_reaches_is_still_compared_number_by_number():
    """A buffer that counts calls is no draw: its error of a hundred-thousandth is found."""
    found = compare(OtherDraws(count=1 + 1e-5), batches(), CONFIG, locate=False)
    assert {problem.where for problem in found.problems} == {"buffer calls"}


def test_a_model_that_only_draws_when_compiled_is_wrong():
    """Eager draws nothing, so there is no distribution to go by."""
    found = compare(OtherDraws(share=0.0), batches(), CONFIG, locate=False)
    assert [problem.where for problem in found.problems] == ["random generator"]


class AlwaysDraws(OtherDraws):
    """Draws in evaluation too."""

    def forward(self, x):
        if torch.compiler.is_compiling():
            x = x + 0 * torch.rand((), device=x.device)
        return self.second(nn.functional.dropout(self.first(x), self.share, training=True))


def test_other_draws_in_evaluation_too_stay_a_problem():
    """Nothing is compared number by number then, so nothing excuses what was found."""
    found = compare(AlwaysDraws(), batches(), CONFIG, locate=False)
    [told] = [problem.message for problem in found.problems if problem.where == "random generator"]
    assert "nothing is proved: it draws other random numbers there too, and values differ" in told


class OneMoreDraw(OtherDraws):
    """Draws once more at its end when it is compiled: all values are eager's, and the generator is not."""

    def forward(self, x):
        y = self.second(nn.functional.dropout(self.first(x), self.share, self.training))
        if torch.compiler.is_compiling():
            y = y + 0 * torch.rand((), device=x.device)
        return y


def test_a_generator_that_alone_is_elsewhere_stays_a_problem():
    """No value needs an excuse, so none is given for the draw."""
    found = compare(OneMoreDraw(), batches(), CONFIG, locate=False)
    [told] = [problem.message for problem in found.problems]
    assert told.startswith("random generator: its state after the call differs")


class IdleDraws(OtherDraws):
    """Draws a number in evaluation too when it is compiled, and throws it away."""

    def forward(self, x):
        if torch.compiler.is_compiling():
            x = x + 0 * torch.rand((), device=x.device)
        return super().forward(x)


def test_a_number_drawn_in_evaluation_and_thrown_away_excuses_no_values_and_accuses_none():
    """A fused attention moves the generator for a dropout of zero."""
    found = compare(IdleDraws(), batches(), CONFIG, steps=2)
    assert found.ok, found
    found = compare(IdleDraws(factor=1 + 1e-4), batches(), CONFIG, locate=False)
    assert any("times the rounding noise" in problem.message for problem in found.problems), found
    assert any(problem.where == "random generator" for problem in found.problems)


class PadsByArithmetic(nn.Module):
    """Computes paddings in floating point, as encodec does: one frame more would be one sample of padding more."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(1, 1, 7, stride=4) for _ in range(12))
        self.register_buffer("kernel", torch.tensor(7))
        self.register_buffer("stride", torch.tensor(4))

    def forward(self, x):
        total = 0.0
        for conv in self.convs:
            frames = (x.shape[-1] - self.kernel) / self.stride + 1
            padding = (torch.ceil(frames).to(torch.int64) - 1) * self.stride + self.kernel - x.shape[-1]
            # Adding raises where the frames are not of one number.
            total = total + conv(nn.functional.pad(x, (0, int(padding))))
        return total


def test_sizes_computed_in_floating_point_take_no_noise():
    """A ceiling of a whole number would be one more under noise: every draw raised, and no float64 run was left."""
    from pytest_torchcompile.batch import Batch
    from pytest_torchcompile.oracle.reference_runs import reference

    torch.manual_seed(2)
    # 7 frames of 31 samples, without padding
    found = reference(PadsByArithmetic(), Batch.of(torch.randn(2, 1, 31)))
    assert found.kind == "float64", found.why
    assert found.draws


@pytest.mark.parametrize(("module", "draws"), [
    (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), True), (nn.Linear(4, 4), False),
])  # fmt: skip
def test_whether_a_model_draws_is_known(module, draws, monkeypatch):
    """In the second call too, which begins with another seed."""
    found = []
    run = Trial.run

    def watched(self):
        run(self)
        found.append(self.draws)

    monkeypatch.setattr(Trial, "run", watched)
    compare(module, [torch.randn(2, 4), torch.randn(3, 4)], CompileConfig(backend="eager"))
    assert found[0] == draws
