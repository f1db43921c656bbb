"""False alarms where noise flips decisions: ``python benchmarks/oracle_null.py --seeds 80``.

No compiler takes part. A program is run twice in float64, each time with noise of its own, and the two runs are
compared as if one were eager and the other compiled. Both are what they are held to be, so each alarm is false.

The programs round the inputs of their products to TF32, as convolutions on CUDA do by default. So relus and
hardsigmoids flip in each run, and each flip moves all gradients behind it. ``--steps`` also trains for three steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Limits, compare, problem, reference, reference_runs
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.noise import Wide
from pytest_torchcompile.oracle.operator_rounding import FLOAT32_UNIT
from pytest_torchcompile.oracle.program import Program
from pytest_torchcompile.oracle.recording import Item, Recording
from pytest_torchcompile.oracle.training import Training, no_loss, steps_of

_TF32 = dict.fromkeys(("convolution", "convolution_backward"), 2.0**-11)
_CLASSES = 100
_RATE = 0.01
# Far from each other, and from the seeds of the reference.
_EAGER, _COMPILED = 1_000_000, 2_000_000


class Squeeze(nn.Module):
    """Scales channels by what a bottleneck makes of their means: few units, each of which decides about a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, max(8, width // 4), 1), nn.Conv2d(max(8, width // 4), width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        means = nn.functional.adaptive_avg_pool2d(x, 1)
        return x * nn.functional.hardsigmoid(self.fc2(self.fc1(means).relu()))


class Block(nn.Module):
    """An inverted residual block, as of mobilenet_v3."""

    def __init__(self, width: int, out: int, stride: int, activation: type[nn.Module]) -> None:
        super().__init__()
        inner = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), activation(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), activation(),
            Squeeze(inner), nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.is_residual = width == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Images."""
        y: Tensor = self.body(x)
        return x + y if self.is_residual else y


def mobile() -> nn.Module:
    """Five such blocks."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(),
        Block(16, 16, 1, nn.ReLU), Block(16, 24, 2, nn.ReLU), Block(24, 24, 1, nn.Hardswish),
        Block(24, 40, 2, nn.Hardswish), Block(40, 40, 1, nn.Hardswish),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 128), nn.Hardswish(), nn.Linear(128, _CLASSES),
    )  # fmt: skip


def residual() -> nn.Module:
    """Plain convolutions with relus, as of resnet18."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    for width, out in ((32, 64), (64, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(width, out, 3, 1 + (width != out), 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, _CLASSES))


PROGRAMS: dict[str, Callable[[], nn.Module]] = {"mobile": mobile, "residual": residual}


def classes_loss(output: Tensor, _: Any) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(output, torch.arange(len(output)) % _CLASSES)


@dataclass(frozen=True)
class Outcome:
    """What came of one comparison."""

    alarms: list[str]
    draws: int
    seconds: float


def images(size: int) -> Batch:
    """A batch of so many."""
    return Batch.of(torch.randn(size, 3, 64, 64))


def judge(name: str, seed: int, steps: bool) -> Outcome:
    """Compare two runs with noise."""
    torch.manual_seed(seed)
    model = PROGRAMS[name]().train()
    batch, loss = images(6), classes_loss
    if steps:
        batch = steps_of([batch, images(4), images(6)])
        model, loss = Training(model, None, classes_loss, _RATE, accumulated=True), no_loss
    start = time.perf_counter()
    program = Program.of(model, batch, loss=loss, train=True, seed=seed, tape=None).copied()
    eager, compiled = (noisy_run(program, seed + apart) for apart in (_EAGER, _COMPILED))
    expected = reference(model, batch, loss=loss, seed=seed, draw=False)
    leaves = compare(eager, compiled, expected)
    limits = Limits().over(leaves)
    texts = [problem(leaf, limits) for leaf in leaves]
    return Outcome([text for text in texts if text], expected.draws, time.perf_counter() - start)


def noisy_run(program: Program, seed: int) -> Recording:
    """A float64 run with noise, and what it gives rounded to float32."""
    mode = Wide(torch.float64, None, dice=Dice(seed), factor=1.0, unit=FLOAT32_UNIT, accumulator=FLOAT32_UNIT,
                inputs=_TF32, by_operator=False)
    wide = program.run_wide(torch.float64, mode)
    if wide.error is not None:
        raise SystemExit(f"the program raised {wide.error}")
    outputs = {name: narrow_item(item) for name, item in wide.outputs.items()}
    tables = {name: narrow_table(getattr(wide, name)) for name in ("mutated", "buffers", "gradients")}
    return replace(wide, outputs=outputs, loss=narrow(wide.loss), **tables)


def narrow_item(item: Item) -> Item:
    """With a value in float32."""
    return replace(item, value=narrow(item.value))


def narrow_table(table: dict[str, Any]) -> dict[str, Any]:
    """With values in float32."""
    return {name: narrow(value) for name, value in table.items()}


def narrow(value: Any) -> Any:
    """A float64 tensor in float32, all else as it is."""
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return value.float()
    return value


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--steps", action="store_true", help="three training steps, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The precision of products is a setting of CUDA; here all programs have it.
    reference_runs.input_units = lambda tensors, unit: _TF32
    lengths = [False, True] if args.steps else [False]
    for name in args.programs:
        for steps in lengths:
            outcomes = []
            for seed in range(args.seeds):
                outcomes.append(judge(name, seed, steps))
                for text in outcomes[-1].alarms:
                    print(f"  {name}, seed {seed}: {text}", flush=True)
            alarmed = sum(bool(outcome.alarms) for outcome in outcomes)
            draws = statistics.mean(outcome.draws for outcome in outcomes)
            seconds = statistics.median(outcome.seconds for outcome in outcomes)
            length = "three steps" if steps else "one call"
            print(f"{name}, {length}: {alarmed} of {len(outcomes)} comparisons alarmed, {draws:.1f} draws on average, "
                  f"{seconds:.1f} s each", flush=True)


if __name__ == "__main__":
    main()
