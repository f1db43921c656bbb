"""Shared memory: which outputs share it with inputs, parameters, buffers or each other; and whether outputs that
somebody keeps stay what they were while the model is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.ownership import run_theirs
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.state.paths import leaves_of
from pytest_torchcompile.state.tensor_values import same_bits

__all__ = ["Held", "alias_pairs", "held_leaves"]

# Bytes of memory up to which it is looked at element by element; beyond that two interleaved tensors share it.
_LARGEST = 1 << 24
_BEFORE = " before"


def alias_pairs(
    outputs: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]
) -> frozenset[tuple[str, str]]:
    """Pairs ``(output, other name)`` that share elements: a write to one is seen in the other.

    An output is paired with the first of the others that it overlaps, and with the first output before it. Two parts
    of one allocation that have no element in common are none. Empty tensors have no memory to share.
    """
    owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in others:
        if address := _storage_address(tensor):
            owners.setdefault(address, []).append((name, tensor))
    pairs = set()
    before: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in outputs:
        address = _storage_address(tensor)
        if not address:
            continue
        for candidates in (owners.get(address, ()), before.get(address, ())):
            if (other := _first_overlapping(tensor, candidates)) is not None:
                pairs.add((name, other))
        before.setdefault(address, []).append((name, tensor))
    return frozenset(pairs)


def _first_overlapping(tensor: torch.Tensor, candidates: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    for name, other in candidates:
        if _have_common_bytes(tensor, other):
            return name
    return None


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors of one storage."""
    (start, end), (low, high) = _byte_range(one), _byte_range(other)
    if start >= high or low >= end:
        return False
    first, size = min(start, low), max(end, high) - min(start, low)
    if size > _LARGEST:
        return True
    # The ranges overlap, and still columns of one matrix have no byte in common: mark the bytes of one, look for them
    # in the other.
    taken = torch.zeros(size, dtype=torch.bool)
    _bytes_of(one, taken, first).fill_(True)
    return bool(_bytes_of(other, taken, first).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    start = tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start * tensor.itemsize), int((start + last + 1) * tensor.itemsize)


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """The bytes of a tensor in a map of the memory that begins with the byte ``first``."""
    sizes, strides = [], []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        # a stride of 0 reads the same bytes again, and torch refuses to write to such a view
        if stride == 0:
            size = 1
        sizes.append(size)
        strides.append(stride * tensor.itemsize)
    offset = tensor.storage_offset() * tensor.itemsize - first
    return memory.as_strided((*sizes, tensor.itemsize), (*strides, 1), offset)


def _storage_address(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor begins; 0 where it has none that could be shared."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel() or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # subclasses without a storage of their own
        return 0


class Held:
    """Keeps the outputs of the last call, and asks after each further call what became of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor]] = []
        self._values: dict[str, Any] = {}
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

    def changes_by(self, recording: Recording) -> dict[str, str]:
        """What the recorded call did to the outputs of the one before: name to a key of ``_TEXTS``."""
        changes = {}
        before = [(name + _BEFORE, tensor) for name, tensor in self._kept]
        for _, other in alias_pairs(self._new, before):
            # An output is paired with other new outputs too.
            if other.endswith(_BEFORE):
                changes[other.removesuffix(_BEFORE)] = "shared"
        for name, tensor in self._kept:
            if not _is_unchanged(tensor, self._values[name]):
                changes[name] = "changed"
        self._kept, self._new = self._new, []
        self._values = {name: item.value for name, item in recording.outputs.items()}
        return changes


def _is_unchanged(tensor: torch.Tensor, value: Any) -> bool:
    try:
        return not isinstance(value, torch.Tensor) or same_bits(tensor, value)
    except RuntimeError:  # an output of a CUDA graph that has run again: torch refuses to read it, nobody is misled
        return True


_TEXTS = {
    "changed": "is overwritten by the call after it ({}), {} only: who has kept it reads other values then",
    "shared": "shares its memory with an output of the call after it ({}), {} only",
}


def held_leaves(eager: dict[str, str], compiled: dict[str, str], after: str) -> Iterator[Leaf]:
    """Leaves about the held outputs of a call, once the call ``after`` has run."""
    if eager == compiled:
        yield Leaf("held outputs", "alias", bitwise=True)
        return
    for name in sorted({*eager, *compiled}):
        for where, mine, other in (("compiled", compiled, eager), ("in eager", eager, compiled)):
            if name in mine and other.get(name) != mine[name]:
                yield Leaf(name, "alias", message=_TEXTS[mine[name]].format(after, where))
