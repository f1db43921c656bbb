"""The toolkit that ends in Inductor, beside ``backend: inductor``: the same numbers, and the same speed?

Each model is compiled both ways, from the same state and for the same batch. Output and gradients are compared bit by
bit; where bits differ, the error is told as a multiple of how far Inductor itself lies from eager. Then both are run
in turn, and Inductor compiled once more beside them: the ratio of CPU seconds within a round is told, with the 99 %
interval of its median, and the same of Inductor to itself, which should be 1. A model that breaks is told with its
line.

    python benchmarks/toolkit_inductor.py matrix/default.yaml
    python benchmarks/toolkit_inductor.py matrix/real.yaml bert gpt2 --phase inference
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.layer.training_step import loss_of_step
from pytest_torchcompile.plan.matrix import Matrix, load_matrix
from pytest_torchcompile.run import subject
from pytest_torchcompile.state.torch_state import seed_everything

SEED = 7
LIMIT = 0.05
STEPS = 5
"""Timed steps of a side in a round."""
_USAGE = re.compile(r"UsageError: (.*)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
TOOLKIT = Toolkit(compiler="inductor", decompositions="inductor")


@dataclass(frozen=True)
class Side:
    """A model made to run one way: ``step()`` gives output leaves and gradients."""

    step: Callable[[], list[torch.Tensor]]


def make_side(matrix: Matrix, cell: Cell, backend: Any) -> Side:
    """The model of a cell, eager or compiled for its first batch."""
    torch.compiler.reset()
    entry, root = matrix.models[cell.model], Path(matrix.root)
    model = subject.build_model(entry, cell, root, SEED)
    _sizes, batch = subject.make_batches(entry, cell, root, SEED)[0]
    train = cell.phase == "training"
    loss = loss_of_step(model, subject.loss_function(entry, root), train=train)
    run = model
    if backend is not None:
        run = torch.compile(model, backend=backend, fullgraph=backend is TOOLKIT)
    gradients = contextlib.nullcontext() if train else torch.no_grad()
    # Each step begins with the same buffers, or running statistics would tell the sides apart.
    buffers = copy.deepcopy(dict(model.named_buffers()))

    def step() -> list[torch.Tensor]:
        seed_everything(SEED)
        for name, buffer in model.named_buffers():
            buffer.detach().copy_(buffers[name])
        model.zero_grad(set_to_none=True)
        with gradients:
            output = run(*batch.args, **batch.kwargs)
        if loss is not None:
            loss(output, batch.value).backward()
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        return [leaf.detach() for leaf in leaves] + [p.grad for p in model.parameters() if p.grad is not None]

    return Side(step)


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a whole leaf: root of squares over root of squares."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            size = float(other.double().norm())
            largest = max(largest, float((one.double() - other.double()).norm()) / (size or 1.0))
    return largest


def seconds_of(sides: list[Side], rounds: int) -> list[list[float]]:
    """CPU seconds of each side's steps in each round. The sides take turns, and the order turns too."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        turn = number % len(sides)
        for index in [*range(turn, len(sides)), *range(turn)]:
            # Untimed: Dynamo looks through the entries of one code for the one that it ran last, first.
            sides[index].step()
            begun = time.process_time()
            for _ in range(STEPS):
                sides[index].step()
            found[index].append(time.process_time() - begun)
    return found


def ratio_of(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """The median ratio of two sides in one round, with the ends of its 99 % interval (order statistics)."""
    ratios = sorted(one / other for one, other in zip(slow, fast, strict=True))
    # Normal approximation of the binomial: the median's rank is off by at most 2.58 standard deviations.
    reach = 2.58 * math.sqrt(len(ratios)) / 2
    low = max(0, math.floor(len(ratios) / 2 - reach))
    high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach))
    return median(ratios), ratios[low], ratios[high]


def told_ratio(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.3f} ({ratio[1]:.3f} to {ratio[2]:.3f})"


def within(ratio: tuple[float, float, float]) -> str:
    """Whether the interval says that the one is not slower than the other by more than the limit."""
    if ratio[2] <= 1 + LIMIT:
        return "yes"
    return "no" if ratio[1] > 1 + LIMIT else "not told"


def why_refused(text: str) -> str:
    """The first line of an error, or what the toolkit said, with the line of the user's code that Dynamo names."""
    said = _USAGE.search(text)
    places = _PLACE.findall(text.partition("from user code")[2])
    first = said.group(1) if said else text.splitlines()[0]
    return f"{first} at {places[-1][0]}:{places[-1][1]}" if places else first


def judge_model(matrix: Matrix, cell: Cell, rounds: int) -> str:
    """One row of the list."""
    eager = make_side(matrix, cell, None).step()
    inductor = make_side(matrix, cell, "inductor")
    whole = inductor.step()
    try:
        toolkit = make_side(matrix, cell, TOOLKIT)
        found = toolkit.step()
    except Exception as error:
        return f"refused: {why_refused(str(error))}"
    equal = all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    numbers = "bitwise equal"
    if not equal:
        numbers = f"differs by {error_of(found, whole):.1e}, Inductor from eager by {error_of(whole, eager):.1e}"
    again = make_side(matrix, cell, "inductor")
    for side in (toolkit, inductor, again):
        # Making a side has dropped what the others had compiled.
        side.step()
    seconds = seconds_of([toolkit, inductor, again], rounds)
    ratio, null = ratio_of(seconds[0], seconds[1]), ratio_of(seconds[2], seconds[1])
    step = median(seconds[1]) / STEPS
    return (f"{numbers}; {len(found)} leaves; {1000 * step:.2f} ms a step; toolkit over Inductor {told_ratio(ratio)}, "
            f"Inductor over Inductor {told_ratio(null)}; within {LIMIT:.0%}: {within(ratio)}")


def main() -> None:
    """Go through the models of a matrix and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--phase", choices=["training", "inference"], default="training")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    matrix = load_matrix(given.matrix)
    for name in given.models or matrix.models:
        try:
            told = judge_model(matrix, Cell(model=name, phase=given.phase), given.rounds)
        except Unavailable as why:
            told = f"not run: {why}"
        print(f"{name:16} {told}", flush=True)


if __name__ == "__main__":
    main()
