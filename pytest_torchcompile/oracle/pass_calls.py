"""The calls by which graph passes are judged: those that were given, another size, then all with other values.

A pass that has put into the graph what was true of the first call computes something else in the others. Eager says
what may change: what it refuses, or makes NaN of, stays as it is, and a remark tells so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import headline
from pytest_torchcompile.oracle.calls import Call, Side
from pytest_torchcompile.oracle.other_state import movable_tensors, move_tensors
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.trial import Trial
from pytest_torchcompile.state.tensor_forms import computable, is_plain, same_bits

__all__ = ["PassCalls", "choose_calls"]

_TRIED_ALONE: Final = 16
"""Tensors that are tried one by one where eager does not take other values for all of them."""
_SHOWN: Final = 4
"""Names that a remark tells."""


@dataclass(frozen=True)
class PassCalls:
    """What is run, in its order, and what that cannot show."""

    calls: tuple[Call, ...]
    given: int
    """How many calls the trial has; those of an index from here on are of a size that nobody has given."""
    remarks: tuple[str, ...] = ()
    """What stayed as it is, and why."""

    def is_added(self, call: Call) -> bool:
        """Whether the call is of a size that nobody has given."""
        return call.index >= self.given

    def without_added(self, remark: str) -> PassCalls:
        """The given ones alone, with a remark that says why."""
        kept = tuple(call for call in self.calls if not self.is_added(call))
        return PassCalls(kept, self.given, (*self.remarks, remark))


def choose_calls(trial: Trial, side: Side) -> PassCalls:
    """Try eagerly what the model takes. ``side``: an eager one."""
    given = list(trial.calls)
    tries = _EagerTries(trial, side)
    added, size_remark = _calls_of_another_size(tries)
    remarks = [size_remark] if size_remark else []
    if not trial.options.varied:
        # Where the model can't be copied no values can be moved; a size of the last call shows in the first.
        again = replace(given[0], suffix=", again")
        return PassCalls((*given, *added, again), len(given), tuple(remarks))
    buffers = tries.written_buffers()
    if buffers and not tries.takes(_others(trial, given, buffers, ())):
        # A position that has come to its end, say: the buffers stay.
        buffers = {}
    moved, left = _choose_moved(tries, buffers)
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        remarks.append(f"{', '.join(left[:_SHOWN])}{more} had the same values in all calls, so values of theirs that a "
                       "pass has put into the graph are not seen")
    first = (*given, *added)
    return PassCalls((*first, *_others(trial, first, buffers, moved)), len(given), tuple(remarks))


def _others(trial: Trial, calls: Sequence[Call], buffers: Mapping[str, torch.Tensor],
            moved: tuple[str, ...]) -> list[Call]:
    """The calls with other values."""
    # References are kept by the seed, and those of the trial are of its own buffers.
    seed = trial.seed + 1 if buffers or moved else trial.seed
    move = functools.partial(move_tensors, names=moved, seed=seed) if moved else None
    return [call.with_other_values(seed, buffers, move) for call in calls]


class _EagerTries:
    """Calls that are run eagerly to see what the model takes."""

    def __init__(self, trial: Trial, side: Side) -> None:
        self.trial, self.side = trial, side
        # What came of the calls with their own values, by their index.
        self._plain: dict[int, Recording] = {}

    def run(self, call: Call) -> Recording:
        """Raises what our own code raises."""
        trial = self.trial
        recording, _ = self.side.run(call, trial.loss, trial.train, trial.seed)
        if recording.error is not None:
            recording.error.raise_own_mistake()
        return recording

    def written_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the calls write to, with what the last one has written."""
        written: dict[str, torch.Tensor] = {}
        self.side.restore()
        before = {name: buffer.detach().clone() for name, buffer in self.side.module.named_buffers()}
        for call in self.trial.calls:
            self._plain[call.index] = self.run(call)
            for name, buffer in self.side.module.named_buffers():
                if name in before and not same_bits(before[name], buffer):
                    written[name] = buffer.detach().clone()
        return written

    def takes(self, calls: Sequence[Call]) -> bool:
        """Whether eager runs calls as it runs them with their own values: no error, and no further NaN."""
        for call in calls:
            found, plain = self.run(call), self._plain[call.index]
            if found.error is not None and plain.error is None:
                return False
            if _count_finite(found) < _count_finite(plain) or (found.all_zero and not plain.all_zero):
                return False
        return True


def _choose_moved(tries: _EagerTries, buffers: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], list[str]]:
    """What gets other values beside parameters and floating buffers, and what does not."""
    trial = tries.trial
    tries.side.restore()
    movable = movable_tensors(tries.side.module)
    # What a call writes to has other values by that.
    for name in buffers:
        movable.pop(f"buffer {name}", None)
    wanted = tuple(name for name, has_other in movable.items() if has_other)

    def takes(names: tuple[str, ...]) -> bool:
        return tries.takes(_others(trial, trial.calls, buffers, names))

    moved = wanted
    if wanted and not takes(wanted):
        moved = tuple(name for name in wanted[:_TRIED_ALONE] if takes((name,)))
        if len(moved) > 1 and not takes(moved):
            moved = moved[:1]
    return moved, [name for name in movable if name not in moved]


def _count_finite(recording: Recording) -> int:
    """Finite elements of the floating outputs."""
    total = 0
    for item in recording.outputs.values():
        if isinstance(item.value, torch.Tensor) and item.value.is_floating_point():
            total += int(computable(item.value).isfinite().sum())
    return total


def _calls_of_another_size(tries: _EagerTries) -> tuple[list[Call], str]:
    """Calls of a size that was not given, where all that were given have one; else none, and why in a remark."""
    trial = tries.trial
    shapes = {tuple(tensor.shape for tensor in call.batch.tensors()) for call in trial.calls}
    if len(shapes) > 1:
        return [], ""
    unseen = "a size that a pass has put into the graph is not seen"
    if trial.settings.get("dynamic") is False:
        return [], "static sizes were asked for: none was tried beside the given one, and passes may rely on that"
    refusals = []
    for sizes in _other_sizes(trial.calls[0].batch):
        calls: list[Call] = []
        for batch, told in sizes:
            calls.append(Call(len(trial.calls) + len(calls), batch, suffix=f" (a size that was tried: {told})",
                              training=trial.calls[0].training))
        errors = [tries.run(call).error for call in calls]
        if not any(errors):
            return calls, ""
        refusals.append(f"{sizes[0][1]}: {headline(str(next(filter(None, errors))))}")
    told = "all calls have the same sizes, and no other was found"
    if refusals:
        # Where several dimensions were tried at once first, the first one alone tells more.
        told = f"the model takes no other size ({refusals[:2][-1]})"
    return [], f"{told}, so {unseen}: give calls of two sizes"


def _other_sizes(batch: Batch) -> Iterator[list[tuple[Batch, str]]]:
    """Batches of other sizes, the most telling first: dimensions that all tensors have in common are one shorter, or
    one longer where they would else be one.

    Each comes as a list: torch makes a graph of its own for a size of one, so that two others are needed beside it.
    """
    tensors = [tensor for tensor in batch.tensors() if tensor.ndim]
    if not all(is_plain(tensor) and not tensor.is_nested for tensor in tensors):
        return
    common = {}
    for dim in (0, 1):
        sizes = {tensor.shape[dim] for tensor in tensors if tensor.ndim > dim}
        if len(sizes) == 1 and 0 not in sizes:
            common[dim] = sizes.pop()
    choices = [tuple(common)] if common else []
    if len(common) > 1:
        choices += [(dim,) for dim in common]
    for dims in choices:
        further = 2 if any(common[dim] == 1 for dim in dims) else 1
        sizes_of_choice = []
        for step in range(1, further + 1):
            new = {dim: _other_size(common[dim], step) for dim in dims}
            told = ", ".join(f"{size} in dimension {dim}" for dim, size in new.items())
            sizes_of_choice.append((batch.with_tensors(functools.partial(_resize, sizes=new)), told))
        yield sizes_of_choice


def _other_size(size: int, step: int) -> int:
    if size > 2:
        return size - 1
    return size + step


def _resize(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    """A copy with other sizes: without its last elements, or with its first ones once more."""
    for dim, size in sizes.items():
        if tensor.ndim > dim:
            places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
            tensor = tensor.index_select(dim, places)
    return tensor.clone()
