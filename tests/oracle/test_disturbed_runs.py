"""Noise of a program that can't be copied, and what is asked of recordings besides: answers, overwritten outputs."""

from __future__ import annotations

import pytest
import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import (
    DisturbedRuns,
    Fault,
    HeldName,
    Item,
    Recording,
    compare,
    disturb,
    other_values,
    overwritten_outputs,
    problem,
    program_unit,
)

pytestmark = pytest.mark.needs_torch

EPS = torch.finfo(torch.float32).eps


def recorded(value, **rest):
    return Recording(outputs={"output": Item.of(torch.as_tensor(value))}, **rest)


# disturb


def test_each_element_moves_by_about_a_rounding():
    """By two units at most, and hardly one stays."""
    tensor = torch.ones(1000)
    disturb([tensor], 1, EPS)
    apart = (tensor - 1).abs()
    assert 0 < apart.max() <= 2 * EPS + EPS
    assert (apart > 0).float().mean() > 0.5


def test_zeros_and_infinities_stay():
    """A factor leaves them; a summand would not."""
    tensor = torch.tensor([0.0, float("inf"), float("-inf")])
    disturb([tensor], 1, EPS)
    assert tensor.tolist() == [0.0, float("inf"), float("-inf")]


def test_replicas_stay_equal():
    """The factors depend on the seed, the number and the shape of a tensor, and on nothing else."""
    one, other = [torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(4)]
    disturb(one, 3, 0.1)
    disturb(other, 3, 0.1)
    assert torch.equal(torch.stack(one), torch.stack(other))
    assert not torch.equal(one[0], one[1])
    again = [torch.ones(4)]
    disturb(again, 4, 0.1)
    assert not torch.equal(again[0], one[0])


@pytest.mark.parametrize("tensor", [
    torch.arange(3), torch.ones(2, dtype=torch.float8_e4m3fn), torch.eye(2).to_sparse(), torch.tensor([True]),
], ids=["whole numbers", "8 bits", "sparse", "booleans"])
def test_what_is_not_disturbed(tensor):
    """Numbers without a fraction, and what has no kernels for it."""
    before = tensor.clone()
    disturb([tensor], 1, 0.1)
    assert torch.equal(tensor.float() if tensor.dtype.itemsize == 1 else tensor.to_dense(),
                       before.float() if before.dtype.itemsize == 1 else before.to_dense())


def test_complex_numbers_and_half_precision():
    """Both are disturbed."""
    for dtype in (torch.complex64, torch.bfloat16):
        tensor = torch.ones(100, dtype=dtype)
        disturb([tensor], 1, 0.1)
        assert not torch.equal(tensor, torch.ones(100, dtype=dtype))


# DisturbedRuns


class Program:
    """Sums its inputs, each of which rounds; ``failing`` draws raise."""

    def __init__(self, failing=()):
        self.made, self.failing = [], failing

    def run(self, seed, factor):
        self.made.append((seed, factor))
        if seed in self.failing:
            return Recording(error=Fault("ValueError", "planted", "forward"))
        values = torch.linspace(1, 2, 64)
        if factor:
            disturb([values], seed, factor * EPS)
        return recorded(values * 3)


def test_draws_are_made_together():
    """The plain run first, then a few draws of plain noise; further ones only when they are asked for."""
    program = Program()
    runs = DisturbedRuns(program.run(0, 0.0), program.run)
    assert program.made[1:] == [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert (runs.kind, runs.draws) == ("eager-draws", 4)
    assert not runs.more(["output"])
    runs.draw_further()
    assert runs.draws == 36
    assert {factor for _, factor in program.made[6:]} == {1.0, 4.0}
    assert len({seed for seed, _ in program.made}) == 37


def test_noise_excuses_what_noise_explains():
    """A difference of a rounding, and none that is a thousand times as large."""
    program = Program()
    eager = program.run(0, 0.0)
    runs = DisturbedRuns(eager, program.run)
    runs.draw_further()
    value = eager.outputs["output"].value
    rounded, wrong = recorded(value * (1 + EPS)), recorded(value * (1 + 1000 * EPS))
    assert not any(map(problem, compare(eager, rounded, runs)))
    assert any(map(problem, compare(eager, wrong, runs)))


def test_a_draw_that_raises_says_nothing():
    """The others are the noise."""
    program = Program(failing=(2,))
    runs = DisturbedRuns(program.run(0, 0.0), program.run)
    assert runs.draws == 4
    assert runs.estimates["output"].draws == 3


def test_the_twin_is_a_plain_run():
    """What it does otherwise than the first is no noise of rounding."""
    program = Program()
    eager = program.run(0, 0.0)
    assert torch.equal(DisturbedRuns(eager, program.run).twin().outputs["output"].value, eager.outputs["output"].value)


def test_the_unit_of_a_program():
    """The coarsest of its tensors and of what its operators were seen to round by."""
    single, half = torch.ones(1), torch.ones(1, dtype=torch.float16)
    assert program_unit([single], None) == EPS / 2
    assert program_unit([single, half], None) == torch.finfo(torch.float16).eps / 2
    assert program_unit([single], torch.finfo(torch.bfloat16).eps / 2) == torch.finfo(torch.bfloat16).eps / 2
    assert program_unit([torch.arange(2)], None) == EPS / 2


# answers


@pytest.mark.parametrize(("recording", "answers"), [
    (recorded([0.0, 1.0]), True), (recorded([0.0, 0.0]), False), (recorded([float("nan")]), False),
    (recorded([0, 0]), True), (recorded([False]), True), (recorded(torch.ones(0, dtype=torch.int64)), False),
    (Recording(outputs={"output": Item.of(3)}), True), (Recording(outputs={"output": Item.of(None)}), False),
    (Recording(), False), (recorded([0.0], gradients={"w": torch.ones(1)}), True),
    (recorded([0.0], gradients={"w": torch.zeros(1), "b": None}), False),
], ids=["a number", "zeros", "nan", "whole zeros", "false", "nothing", "Python", "None", "no output", "a gradient",
        "gradients of zero"])
def test_answers(recording, answers):
    """A zero among whole numbers is an answer like any other; floating zeros may just be memory."""
    assert recording.has_answers is answers


def test_values_by_name():
    """Everything that has a value, as a report names it."""
    recording = recorded([1.0], loss=torch.tensor(2.0), buffers={"mean": torch.zeros(1)})
    assert list(recording.values_by_name()) == ["output", "loss", "mean"]


# overwritten outputs

FIRST = HeldName("step 1", "output")


@pytest.mark.parametrize(("eager", "compiled", "told"), [
    ({}, {}, 0), ({}, {FIRST: "changed"}, 1), ({FIRST: "changed"}, {FIRST: "changed"}, 0),
    # A constant may be handed out again and again.
    ({}, {FIRST: "shared"}, 0), ({FIRST: "changed"}, {}, 0), ({FIRST: "shared"}, {FIRST: "changed"}, 1),
])
def test_overwritten_outputs(eager, compiled, told):
    """Those that eager leaves alone."""
    texts = overwritten_outputs(eager, compiled, "step 2")
    assert len(texts) == told
    assert all("is overwritten by a later call (step 2), compiled only" in text for text in texts)


# other values


def test_other_values_of_a_batch():
    """Samples change places, and what has a fraction shrinks by a sixteenth at most; the batch itself stays."""
    x, ids = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1, 2], [3, 4]])
    other = other_values(Batch.of((x, ids)), 2)
    values, others = other.args
    rolled = x.roll(1, 0)
    assert bool((values <= rolled).all())
    assert bool((values >= rolled * 15 / 16).all())
    assert others.tolist() == [[3, 4], [1, 2]]
    assert x.tolist() == [[1.0, 2.0], [3.0, 4.0]]
