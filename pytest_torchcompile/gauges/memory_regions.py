"""Memory regions: which bytes of a storage a call reads and writes, so that what several views share counts once.

Where an operator looks rows up or writes some, nobody knows which; then their number is known, and no place. What is
told of a storage is never more than what was really touched, so that a least time that follows is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["LOOKS_UP", "LOOKS_UP_ROWS", "Regions", "Traffic", "tensors_in", "traffic_of"]

LOOKS_UP: Final = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Operators that read as much of their first tensor as they return."""
LOOKS_UP_ROWS: Final = frozenset({"_embedding_bag", "_embedding_bag_forward_only"})
"""Operators that read one row of their first tensor for each number of their second."""
_OVERWRITES: Final = frozenset({"copy_", "fill_", "zero_"})
"""Operators that write all of their first tensor, and read nothing of it."""
_FROM_SOURCE: Final = {"index_copy_": 3, "index_add_": 3, "index_reduce_": 3, "put_": 2, "scatter_": 2,
                       "scatter_add_": 2, "scatter_reduce_": 2}
"""Operators that write a part of their first tensor: which argument has as many elements as they write."""
_PUTS: Final = frozenset({"index_put_", "_index_put_impl_"})
_ADDS: Final = frozenset({"index_add_", "index_reduce_", "scatter_add_", "scatter_reduce_"})
"""Of those the ones that read first what they write."""


@dataclass(frozen=True)
class _Rows:
    """Runs of bytes at equal distances: what a dense view is, with one run, and a slice of columns, with many."""

    first: int
    """Bytes from the storage's begin to the first run."""
    length: int
    """Of each run."""
    step: int
    """From the begin of one run to the next."""
    count: int


@dataclass
class Regions:
    """Bytes of one storage."""

    dense: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of parts without a gap."""
    columns: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)
    """By step, count and first row: begin and end within a row."""
    least: int = 0
    """The most that was touched at once of what has no known place."""

    @property
    def bytes(self) -> int:
        """At least as many were touched."""
        in_columns = [count * _length_of(parts) for (_step, count, _row), parts in self.columns.items()]
        return max([_length_of(self.dense), self.least, *in_columns])

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """All elements of a tensor in this storage."""
        rows = _rows_of(tensor)
        if rows is None:
            self.least = max(self.least, _bytes_of(tensor))
        elif rows.count == 1:
            self.dense.append((rows.first, rows.first + rows.length))
        else:
            row, within = divmod(rows.first, rows.step)
            self.columns.setdefault((rows.step, rows.count, row), []).append((within, within + rows.length))

    def add(self, other: Regions) -> None:
        """What another call touched of the same storage."""
        self.dense = _joined([*self.dense, *other.dense])
        for rows, parts in other.columns.items():
            self.columns[rows] = _joined([*self.columns.get(rows, ()), *parts])
        self.least = max(self.least, other.least)


@dataclass
class Traffic:
    """What one call touches, by the address of the storage."""

    read: dict[int, Regions]
    written: dict[int, Regions]
    partly: frozenset[int]
    """Storages that were there before, and of which it writes a part."""
    elements: int
    """As many it computes."""


def traffic_of(name: str, args: Sequence[Any], kwargs: Any, result: Any) -> Traffic:
    """The traffic of a call of the ATen operator ``name``."""
    taken, returned = list(tensors_in((args, kwargs))), list(tensors_in(result))
    elements = returned[0].numel() if returned else 0
    put = _elements_put(name, args)
    if put is not None:
        put = elements = min(put, elements)
    of_first = put
    if put is not None and not _adds(name, args, kwargs):
        of_first = 0
    read = _regions_read(name, taken, returned, of_first)
    written = _regions_written(taken, returned, put)
    return Traffic(read, written, _partly_written(taken, written), elements)


def _regions_written(
    taken: Sequence[torch.Tensor], returned: Iterable[torch.Tensor], put: int | None
) -> dict[int, Regions]:
    """By storage what is returned; of an operator that puts elements into its first tensor those alone."""
    written: dict[int, Regions] = {}
    for tensor in returned:
        written.setdefault(_place_of(tensor), Regions()).add_tensor(tensor)
    if put is not None:
        written[_place_of(taken[0])] = Regions(least=put * taken[0].element_size())
    return written


def _regions_read(
    name: str, taken: Sequence[torch.Tensor], returned: Sequence[torch.Tensor], of_first: int | None
) -> dict[int, Regions]:
    """By storage what is read of the arguments.

    Args:
        name: The operator.
        taken: Tensors among its arguments.
        returned: Its results.
        of_first: Elements of the first tensor, where the operator writes a part of it; None for any other.
    """
    read: dict[int, Regions] = {}
    for number, tensor in enumerate(taken):
        regions = read.setdefault(_place_of(tensor), Regions())
        if number == 0 and of_first is not None:
            regions.least = of_first * tensor.element_size()
        elif number == 0 and name in LOOKS_UP and returned:
            regions.least = max(regions.least, min(_bytes_of(tensor), _bytes_of(returned[0])))
        elif number == 0 and name in LOOKS_UP_ROWS and len(taken) > 1:
            row = tensor.element_size() * tensor.shape[1:].numel()
            regions.least = max(regions.least, min(_bytes_of(tensor), taken[1].numel() * row))
        elif number > 0 or name not in _OVERWRITES:
            regions.add_tensor(tensor)
    return {place: regions for place, regions in read.items() if regions.bytes}


def _partly_written(taken: Iterable[torch.Tensor], written: Mapping[int, Regions]) -> frozenset[int]:
    """Storages that were there before, and of which less than all is written."""
    partly = set()
    for tensor in taken:
        place = _place_of(tensor)
        if place in written and written[place].bytes < tensor.untyped_storage().nbytes():
            partly.add(place)
    return frozenset(partly)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All of arguments or results."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _adds(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether it reads what it writes a part of."""
    if name in _PUTS:
        return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    return name in _ADDS or "reduce" in kwargs


def _elements_put(name: str, args: Sequence[Any]) -> int | None:
    """Elements that it writes of its first tensor; None where that is all, or another operator."""
    number = _FROM_SOURCE.get(name)
    if number is not None and number < len(args):
        return int(args[number].numel())
    if name in _PUTS and len(args) > 2:
        return _elements_indexed(args[0], args[1])
    if name == "index_fill_":
        row = args[0].numel() // max(1, args[0].size(args[1]) if args[0].dim() else 1)
        return int(row * args[2].numel())
    return None


def _elements_indexed(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int:
    """Elements of ``tensor[indices]``; a mask has as many as are true."""
    left, at = tensor.numel(), 0
    shapes: list[torch.Size] = []
    for index in indices:
        dims = 1
        if index is not None:
            masks = index.dtype in (torch.bool, torch.uint8)
            dims = index.dim() if masks else 1
            left //= max(1, tensor.shape[at:at + dims].numel())
            shapes.append(torch.Size([int(index.count_nonzero())]) if masks else index.shape)
        at += dims
    together: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return left * together.numel()


def _bytes_of(tensor: torch.Tensor) -> int:
    """What is in memory of it: an expanded tensor has less than its shape says."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())


def _place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _rows_of(tensor: torch.Tensor) -> _Rows | None:
    """The runs that a tensor is; None where it is none of equal distances."""
    item = tensor.element_size()
    dims = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and stride:
            dims.append((stride, size))
    dims.sort()
    length = min(1, tensor.numel())
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    step, count = length, 1
    for stride, size in dims:
        if count > 1 and stride != step * count:
            return None
        step = step if count > 1 else stride
        count *= size
    first = int(tensor.storage_offset())
    # A run that reaches into the next row, or the next run, is none of a column.
    if count > 1 and first % step + length > step:
        return None
    return _Rows(first * item, length * item, step * item, count)


def _joined(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes without overlaps."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(parts):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _length_of(parts: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in _joined(parts))
