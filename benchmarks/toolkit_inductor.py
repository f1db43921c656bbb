"""The toolkit that ends in Inductor, beside ``backend: inductor``: the same numbers, and the same speed?

Each model is compiled both ways, from the same state and for the same batch. Output and gradients are compared bit by
bit; where bits differ, the error is told beside those of Inductor to itself and to eager. Then both are run in turn,
and Inductor compiled once more beside them: the ratio of seconds within a round is told, with the 99 % interval of its
median, and the same of Inductor to itself, which should be 1. A model that breaks is told with its line.

All of these are compiled with ``fullgraph=True``, as cells of the toolkit are. What torch itself takes for that in each
call is told as well: Inductor with it over Inductor without it.

    python benchmarks/toolkit_inductor.py matrix/default.yaml                        the zoo: these three
    python benchmarks/toolkit_inductor.py matrix/gpu.yaml mini_gpt conv_net
    python benchmarks/toolkit_inductor.py matrix/toolkit.yaml annotated_head
    python benchmarks/toolkit_inductor.py matrix/real.yaml bert gpt2 --phase inference --device cuda --json rows.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
FEWEST_STEPS, MOST_STEPS = 5, 200
"""Timed steps of a side in a round."""
ROUND = 0.01
"""Seconds that a side takes in a round, at least, where its steps are not too many."""
_USAGE = re.compile(r"UsageError: (.*)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
TOOLKIT = Toolkit(compiler="inductor", decompositions="inductor")


@dataclass(frozen=True)
class Side:
    """A model made to run one way."""

    step: Callable[[], Any]
    """One step, as a user has it: forward, and in training loss and backward; returns the output."""
    start_anew: Callable[[], None]
    """Puts buffers and random numbers back to where they were in the beginning."""
    gradients: Callable[[], list[torch.Tensor]]

    def numbers(self) -> list[torch.Tensor]:
        """Output leaves and gradients of a first step."""
        self.start_anew()
        leaves = torch.utils._pytree.tree_leaves(self.step())
        return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)] + self.gradients()


@dataclass(frozen=True)
class Ratio:
    """The median ratio of two sides in one round, with the ends of its 99 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Row:
    """What was found of one model."""

    leaves: int
    numbers: str
    """``bitwise equal``, or by how much leaves differ."""
    milliseconds: float
    """Of a step of Inductor."""
    toolkit: Ratio
    inductor: Ratio
    """Inductor to itself: what this machine and this way of measuring can tell."""
    fullgraph: Ratio
    """Inductor with ``fullgraph=True`` to Inductor without it."""

    def __str__(self) -> str:
        return (f"{self.numbers}; {self.leaves} leaves; {self.milliseconds:.3f} ms a step; toolkit over Inductor "
                f"{self.toolkit}, Inductor over Inductor {self.inductor}; within {LIMIT:.0%}: {within(self.toolkit)}; "
                f"fullgraph over none {self.fullgraph}")


def make_side(matrix: Matrix, cell: Cell, **settings: Any) -> Side:
    """The model of a cell for its first batch: eager, or compiled with ``settings``."""
    entry, root = matrix.models[cell.model], Path(matrix.root)
    model = subject.build_model(entry, cell, root, SEED)
    _sizes, batch = subject.make_batches(entry, cell, root, SEED)[0]
    train = cell.phase == "training"
    loss = loss_of_step(model, subject.loss_function(entry, root), train=train)
    run = torch.compile(model, **settings) if settings else model
    buffers = copy.deepcopy(dict(model.named_buffers()))

    def step() -> Any:
        if loss is None:
            with torch.no_grad():
                return run(*batch.args, **batch.kwargs)
        model.zero_grad(set_to_none=True)
        output = run(*batch.args, **batch.kwargs)
        loss(output, batch.value).backward()
        return output

    def start_anew() -> None:
        # Or running statistics would tell the sides apart.
        seed_everything(SEED)
        for name, buffer in model.named_buffers():
            buffer.detach().copy_(buffers[name])

    def gradients() -> list[torch.Tensor]:
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return Side(step, start_anew, gradients)


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative error of a whole leaf: root of squares over root of squares."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            size = float(other.double().norm())
            largest = max(largest, float((one.double() - other.double()).norm()) / (size or 1.0))
    return largest


def seconds_of(sides: list[Side], rounds: int, device: str) -> tuple[int, list[list[float]]]:
    """Steps in a round, and the seconds of each side's steps in each. The sides take turns, and the order turns too.

    CPU seconds on a CPU; on a GPU those of a clock on the wall, until the GPU has done all of them.
    """
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if cuda else time.process_time

    def timed(side: Side, steps: int) -> float:
        begun = clock()
        for _ in range(steps):
            side.step()
        if cuda:
            torch.cuda.synchronize()
        return clock() - begun

    for side in sides:
        side.start_anew()
        timed(side, FEWEST_STEPS)
    one_step = min(timed(sides[0], FEWEST_STEPS) for _ in range(3)) / FEWEST_STEPS
    steps = min(max(math.ceil(ROUND / one_step), FEWEST_STEPS), MOST_STEPS)
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        turn = number % len(sides)
        for index in [*range(turn, len(sides)), *range(turn)]:
            # Untimed: Dynamo looks through the entries of one code for the one that it ran last, first.
            timed(sides[index], 1)
            found[index].append(timed(sides[index], steps))
    return steps, found


def ratio_of(slow: list[float], fast: list[float]) -> Ratio:
    """The median ratio of two sides in one round, and its interval by order statistics."""
    ratios = sorted(one / other for one, other in zip(slow, fast, strict=True))
    # Normal approximation of the binomial: the median's rank is off by at most 2.58 standard deviations.
    reach = 2.58 * math.sqrt(len(ratios)) / 2
    low = max(0, math.floor(len(ratios) / 2 - reach))
    high = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach))
    return Ratio(median(ratios), ratios[low], ratios[high])


def within(ratio: Ratio) -> str:
    """Whether the interval says that the one is not slower than the other by more than the limit."""
    if ratio.high <= 1 + LIMIT:
        return "yes"
    return "no" if ratio.low > 1 + LIMIT else "not told"


def why_refused(text: str) -> str:
    """The first line of an error, or what the toolkit said, with the line of the user's code that Dynamo names."""
    said = _USAGE.search(text)
    places = _PLACE.findall(text.partition("from user code")[2])
    first = said.group(1) if said else text.splitlines()[0]
    return f"{first} at {places[-1][0]}:{places[-1][1]}" if places else first


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Wait until no other of these holds the lock: many may compile at once, and one is timed."""
    if lock is None:
        yield
        return
    import fcntl

    with lock.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def judge_model(matrix: Matrix, cell: Cell, rounds: int, lock: Path | None) -> Row | str:
    """What was found of a model, or why it was refused."""
    torch.compiler.reset()
    eager = make_side(matrix, cell).numbers()
    toolkit = make_side(matrix, cell, backend=TOOLKIT, fullgraph=True)
    try:
        found = toolkit.numbers()
    except Exception as error:
        return f"refused: {why_refused(str(error))}"
    inductor, again = (make_side(matrix, cell, backend="inductor", fullgraph=True) for _ in range(2))
    expected, repeated = inductor.numbers(), again.numbers()
    plain = make_side(matrix, cell, backend="inductor")
    plain.numbers()
    numbers = "bitwise equal"
    if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
        numbers = (f"differs by {error_of(found, expected):.1e}, Inductor from itself by "
                   f"{error_of(repeated, expected):.1e}, from eager by {error_of(expected, eager):.1e}")
    print(f"{cell.model:16} compiled", file=sys.stderr, flush=True)
    with alone(lock):
        steps, seconds = seconds_of([toolkit, inductor, again, plain], rounds, cell.device)
    return Row(len(found), numbers, 1000 * median(seconds[1]) / steps, ratio_of(seconds[0], seconds[1]),
               ratio_of(seconds[2], seconds[1]), ratio_of(seconds[1], seconds[3]))


def main() -> None:
    """Go through the models of a matrix and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--phase", choices=["training", "inference"], default="training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--lock", type=Path, help="a file: of all that are given it, one is timed at a time")
    parser.add_argument("--json", type=Path, help="a file to which each row is added as a line of JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    matrix = load_matrix(given.matrix)
    for name in given.models or matrix.models:
        cell = Cell(model=name, phase=given.phase, device=given.device)
        row: dict[str, Any] = {"matrix": given.matrix.name, "model": name, "phase": given.phase,
                               "device": given.device, "torch": torch.__version__}
        try:
            told = judge_model(matrix, cell, given.rounds, given.lock)
            row |= {"told": told} if isinstance(told, str) else {**asdict(told), "within": within(told.toolkit)}
        except Unavailable as why:
            row["told"] = told = f"not run: {why}"
        print(f"{name:16} {told}", flush=True)
        if given.json is not None:
            with given.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
