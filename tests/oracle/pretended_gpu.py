"""The oracle with tensors on a device that is none: a program of its own, as a process has one such device for good.

    python tests/oracle/pretended_gpu.py

CI has no GPU. So tensors of the CPU pass for those of another device: whatever mixes the two raises, as it does on a
GPU. Each comparison is made on the CPU first; on the device it has to find the same. What was wrong is printed.
Private: ``torch.utils.backend_registration._setup_privateuseone_for_python_backend`` (torch 2.10 to 2.15).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle import Limits, Recording, compare, problem, record, reference, same_values
from pytest_torchcompile.oracle import estimate as estimates
from pytest_torchcompile.oracle.judged_calls import JudgedCalls
from pytest_torchcompile.oracle.recording import Item
from pytest_torchcompile.oracle.reference_runs import _Runs
from pytest_torchcompile.oracle.transcript import Transcript

NAME = "pretended"
# Elements up to which a leaf comes to the CPU: matrices stay on the device, or come too.
SIZES = (40, 600)
# These may have their indices on the CPU, or copy from there.
MIXING = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::_index")


# A GPU has none of these where deterministic algorithms are asked for.
REFUSED = ("aten::nanmedian.dim", "aten::median.dim", "aten::kthvalue")
# Operators that wait for a GPU: so often each was run.
WAITS: Counter[str] = Counter()


class Pretended(torch.Tensor):
    """A tensor of the CPU that says to be on the device."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=f"{NAME}:0"
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        """Its values."""
        WAITS["tolist"] += 1
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


def run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the CPU; raises where it is given tensors of both devices."""
    name = func.name()
    given = tree_leaves((args, kwargs))
    mine = [each for each in given if isinstance(each, Pretended)]
    others = [each for each in given if isinstance(each, torch.Tensor) and not isinstance(each, Pretended)]
    if mine and any(other.ndim for other in others) and not name.startswith(MIXING):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    if mine and name.startswith(REFUSED):
        raise RuntimeError(f"{name} does not have a deterministic implementation")
    stays = bool(mine)
    to_cpu = name.startswith("aten::_to_copy") and str(kwargs.get("device")) == "cpu"
    if mine and (to_cpu or name.startswith(("aten::_local_scalar_dense", "aten::equal", "aten::bincount"))):
        WAITS[name] += 1
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": "cpu"}
    elif name.startswith(("aten::copy_", "aten::index_put_")):
        stays = isinstance(args[0], Pretended)

    def raw(value: Any) -> Any:
        return value.raw if isinstance(value, Pretended) else value

    returned = func(*tree_map(raw, args), **tree_map(raw, kwargs))

    def on_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # What was written to is given back as it is.
        for each in given:
            if raw(each) is value:
                return each
        return Pretended(value) if stays else value

    return tree_map(on_device, returned)


def comes_to_cpu(size: int) -> None:
    """Leaves up to a size do."""
    estimates._belongs_on_cpu = lambda each: isinstance(each, Pretended) and each.numel() <= size


def pretend() -> None:
    """Make the device, and have the oracle take it for a GPU."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: run_operator(func, args, kwargs), "PrivateUse1")
    globals()["LIBRARY"] = library
    make = torch.tensor

    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Made on the CPU first: the device has no memory of its own."""
        made = make(*args, **kwargs)
        return made if device is None else made.to(device)

    torch.tensor = tensor
    plain = estimates.is_plain
    same_values._is_on_gpu = lambda each: isinstance(each, Pretended)
    for module in (estimates, same_values):
        module.is_plain = lambda each: isinstance(each, Pretended) or plain(each)


def moved(value: Any) -> Any:
    """A value on the device."""
    if isinstance(value, torch.Tensor):
        return Pretended(value.detach().clone())
    if isinstance(value, Item):
        return replace(value, value=moved(value.value))
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    return value


def moved_recording(recording: Recording) -> Recording:
    """A recording whose values are on the device."""
    return replace(recording, outputs=moved(recording.outputs), loss=moved(recording.loss),
                   mutated=moved(recording.mutated), buffers=moved(recording.buffers),
                   gradients=moved(recording.gradients))


class Moved(_Runs):
    """A reference whose runs are made on the CPU, and come to the device."""

    def _run_with(self, noise: float, rest: bool = True, listener: Transcript | None = None) -> Recording:
        return moved_recording(super()._run_with(noise, rest, listener))

    def _run_again(self, transcript: Transcript, noise: float, rest: bool) -> dict[str, Any]:
        return moved(super()._run_again(transcript, noise, rest))

    @classmethod
    def put_on(cls, expected: Any) -> None:
        """Move the further runs of a reference there."""
        expected.__class__ = cls
        noisy = expected._noisy_runs
        noisy._run, noisy._run_again = expected._run_with, expected._run_again


class Net(torch.nn.Module):
    """Leaves of many sizes, three of each: matrices, biases before a norm, and units that noise turns on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(24) for _ in range(3))
        self.wide, self.last = torch.nn.Linear(24, 64), torch.nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.last(self.wide(x))


class Lengths(torch.nn.Module):
    """Gradients of so many lengths."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 30 + number) for number in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers])


def noisy(recording: Recording, share: float) -> Recording:
    """The same values with other roundings, as of another compiler."""
    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value * (1 + share * torch.randn_like(value))
        if isinstance(value, Item):
            return replace(value, value=changed(value.value))
        if isinstance(value, dict):
            return {name: changed(each) for name, each in value.items()}
        return value

    return replace(recording, outputs=changed(recording.outputs), gradients=changed(recording.gradients),
                   buffers=changed(recording.buffers))


def broken(recording: Recording, name: str) -> Recording:
    """One element of a gradient is wrong."""
    gradients = {key: value.clone() for key, value in recording.gradients.items()}
    gradients[name].view(-1)[3] += 0.5 * gradients[name].abs().amax() + 1e-3
    return replace(recording, gradients=gradients)


def near(one: Any, other: Any) -> bool:
    """Whether two numbers of a leaf are the same, but for the order of sums."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)
    return bool(one == other)


def differences(one: list[Any], other: list[Any]) -> list[str]:
    """What two lists of leaves do not have in common."""
    found = []
    if [(leaf.name, leaf.kind) for leaf in one] != [(leaf.name, leaf.kind) for leaf in other]:
        return [f"{[leaf.name for leaf in one]} and {[leaf.name for leaf in other]}"]
    for mine, theirs in zip(one, other, strict=True):
        plain, again = mine.to_dict(), theirs.to_dict()
        for key in {*plain, *again}:
            if not near(plain.get(key), again.get(key)):
                found.append(f"{mine.name}: {key} is {plain.get(key)} on the CPU, {again.get(key)} on the device")
    return found


def compared_twice(title: str, model: torch.nn.Module, batch: Batch, eager: Recording, compiled: Recording,
                   limits: Limits | None = None) -> list[str]:
    """A comparison on the CPU, and then on the device; and once more by what was found."""
    expected = [reference(model, batch, draw=False) for _ in range(2)]
    for each in expected:
        each.__class__ = _Runs
    on_cpu = compare(eager, compiled, expected[0], limits=limits)
    Moved.put_on(expected[1])
    expected[1]._expect_values(moved_recording(_Runs._run_with(expected[1], 0.0)))
    twin = moved_recording(expected[1].program.run_eager())
    expected[1]._twin, expected[1]._twins = twin, [twin]
    one, other = moved_recording(eager), moved_recording(compiled)
    on_device = compare(one, other, expected[1], limits=limits)
    found = differences(on_cpu, on_device)
    judged = JudgedCalls()
    judged.keep((0, None), one, other, on_device)
    again = compare(one, other, expected[1], limits=limits, judged=judged.leaves_of((0, None), one, other))
    found += differences(on_device, again)
    measured = [leaf for leaf in on_device if leaf.numerical]
    drawn = max((leaf.draws for leaf in measured), default=0)
    print(f"{title}: {len(on_device)} leaves, {len(measured)} measured, {drawn} draws, {len(found)} wrong")
    return [f"{title}: {text}" for text in found]


def waits_of(count: int, drawn: bool, size: int) -> str:
    """How often a comparison of gradients of so many lengths waits for the device."""
    model, batch = Lengths(count), Batch.of(torch.randn(16, 24))
    eager = record(model, model, batch)
    expected = reference(model, batch, draw=False)
    Moved.put_on(expected)
    expected._expect_values(moved_recording(_Runs._run_with(expected, 0.0)))
    one, other = moved_recording(eager), moved_recording(noisy(eager, 2.0**-24))
    WAITS.clear()
    if drawn:
        expected.more()
    leaves = compare(one, other, expected)
    assert not any(problem(leaf) for leaf in leaves), "these are right"
    assert {leaf.draws for leaf in leaves if leaf.numerical} == {1 + drawn}
    told = "after a draw" if drawn else "before any draw"
    return f"{count} layers, {told}, leaves up to {size} at hand: {WAITS.total()} waits"


def main() -> None:
    """Compare, and end with 1 where something differs."""
    warnings.simplefilter("ignore")
    pretend()
    torch.manual_seed(0)
    model, batch = Net(), Batch.of(torch.randn(16, 24))
    eager = record(model, model, batch)
    for norm in model.norms:
        norm.reset_running_stats()
    wrong = []
    for size in SIZES:
        comes_to_cpu(size)
        for share in (2.0**-24, 2.0**-22, 2.0**-19):
            wrong += compared_twice(f"rounding of {share:.0e}", model, batch, eager, noisy(eager, share))
        for name in ("gradient of layers.1.weight", "gradient of layers.1.bias", "gradient of wide.weight"):
            compiled = broken(noisy(eager, 2.0**-24), name)
            wrong += compared_twice(f"{name} is broken", model, batch, eager, compiled)
        strict = Limits(rms=0.5, bias=0.5, peak=1.0)
        wrong += compared_twice("strict limits", model, batch, eager, noisy(eager, 2.0**-23), strict)
        for drawn in (False, True):
            for count in (3, 30):
                print(waits_of(count, drawn, size))
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
