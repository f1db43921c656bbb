"""Held outputs: what earlier calls returned must stay as it was while the model is called again.

Outputs of several calls are kept, not of the last one alone: memory that is used again for each size, or for every
second or third call, is written to much later. A backend that replays CUDA graphs by size does so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_torchcompile.oracle.leaf_limits import Leaf, problem
from pytest_torchcompile.oracle.properties import alias_pairs
from pytest_torchcompile.oracle.recording import Recording, run_theirs
from pytest_torchcompile.state.tensor_forms import same_bits
from pytest_torchcompile.state.value_leaves import leaves_of

__all__ = ["Held", "HeldName", "held_leaves", "overwritten_outputs"]

# Calls whose outputs are kept at most, and their bytes; those of the last call are kept whatever they take.
_MOST_CALLS, _MOST_BYTES = 16, 1 << 28


class HeldName(NamedTuple):
    """One output of one call."""

    call: str
    output: str


@dataclass(frozen=True, eq=False)
class _HeldTensor:
    """An output as the call returned it, and a copy of what it was then."""

    name: HeldName
    tensor: torch.Tensor
    value: Any

    @property
    def nbytes(self) -> int:
        """Of its elements; a sparse tensor refuses to say ``tensor.nbytes``."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_unchanged(self) -> bool:
        try:
            return not isinstance(self.value, torch.Tensor) or same_bits(self.tensor, self.value)
        except RuntimeError:  # an output of a CUDA graph that has run again: torch refuses to read it
            return True


class Held:
    """Keeps the outputs of the last calls, and asks after each further call what became of them."""

    def __init__(self) -> None:
        self._calls: deque[list[_HeldTensor]] = deque(maxlen=_MOST_CALLS)
        self._new: list[tuple[str, torch.Tensor]] = []

    def keep_outputs(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` itself, with its output kept."""

        def holding(*args: Any, **kwargs: Any) -> Any:
            self._new = []
            output = run_theirs(call, *args, **kwargs)
            for path, leaf in leaves_of(output)[0]:
                if isinstance(leaf, torch.Tensor):
                    self._new.append((f"output{path}", leaf.detach()))
            return output

        return holding

    def changes_by(self, recording: Recording, label: str) -> dict[HeldName, str]:
        """What the recorded call did to outputs of the calls before it: their names to a key of ``_TEXTS``.

        ``label`` names the recorded call.
        """
        changes: dict[HeldName, str] = {}
        before = {str(number): held for number, held in enumerate(self._held_tensors())}
        others = [(number, held.tensor) for number, held in before.items()]
        for _, other in alias_pairs(self._new, others):
            # An output is paired with other new outputs too.
            if other in before:
                changes[before[other].name] = "shared"
        for held in before.values():
            if not held.is_unchanged:
                changes[held.name] = "changed"
        # What is changed is told once.
        for number, kept in enumerate(self._calls):
            self._calls[number] = [held for held in kept if changes.get(held.name) != "changed"]
        self._keep_new(recording, label)
        return changes

    def _held_tensors(self) -> Iterator[_HeldTensor]:
        # The last call first: what shares memory with several is said of the one before.
        for kept in reversed(self._calls):
            yield from kept

    def _keep_new(self, recording: Recording, label: str) -> None:
        new = []
        for name, tensor in self._new:
            item = recording.outputs.get(name)
            if item is not None:
                new.append(_HeldTensor(HeldName(label, name), tensor, item.value))
        self._calls.append(new)
        self._new = []
        size = sum(held.nbytes for held in self._held_tensors())
        while size > _MOST_BYTES and len(self._calls) > 1:
            size -= sum(held.nbytes for held in self._calls.popleft())


_TEXTS = {
    "changed": "is overwritten by a later call ({}), {} only: who has kept it reads other values then",
    "shared": "shares its memory with an output of a later call ({}), {} only",
}


def held_leaves(eager: Mapping[HeldName, str], compiled: Mapping[HeldName, str],
                after: str) -> Iterator[tuple[str, Leaf]]:
    """Leaves about held outputs, each with the label of its call, once the call ``after`` has run."""
    if eager == compiled:
        yield after, Leaf("held outputs", "alias", bitwise=True)
        return
    for name in sorted({*eager, *compiled}):
        for where, mine, other in (("compiled", compiled, eager), ("in eager", eager, compiled)):
            if name in mine and other.get(name) != mine[name]:
                yield name.call, Leaf(name.output, "alias", message=_TEXTS[mine[name]].format(after, where))


def overwritten_outputs(eager: Mapping[HeldName, str], compiled: Mapping[HeldName, str], after: str) -> list[str]:
    """A line for each held output that the call ``after`` has overwritten, compiled only.

    Memory that is only shared is no fault yet: a constant may be handed out again and again.
    """
    changed = {name: what for name, what in compiled.items() if what == "changed"}
    eager_too = {name: what for name, what in changed.items() if eager.get(name) == what}
    texts = [problem(leaf) for _, leaf in held_leaves(eager_too, changed, after)]
    return [text for text in texts if text is not None]
