"""Warm-up: run a compiled model for every bucket, so that no request waits for a compiler, and tell what was made."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.gauges.replays import step_begins
from pytest_torchcompile.layer.compiled_modules import join_modules
from pytest_torchcompile.layer.preservation import preserved
from pytest_torchcompile.ledger import observe

__all__ = ["Warmed", "Warmup", "free_size", "warm_up"]

PASSES: Final = 3
"""Over all shapes: the first compiles, in the second CUDA graphs are recorded, the last must find all done."""
_LOG: Final = logging.getLogger("pytest_torchcompile")


@dataclass(frozen=True)
class Warmed:
    """One shape of a warm-up."""

    length: int
    """The bucket."""
    batch_size: int | None
    """What make_batch was told; None: it was not asked for."""
    seconds: float
    """Wall seconds of the first call."""
    compiled: tuple[str, ...]
    """What was compiled for it, like ``Net.forward (net.py:12)``; empty where an earlier shape's code serves."""
    graphs: int
    """Compiled graphs that ran in its last call."""

    def __str__(self) -> str:
        shape = f"length {self.length}"
        if self.batch_size is not None:
            shape += f", batch size {self.batch_size}"
        if self.compiled:
            return f"{shape}: compiled {', '.join(self.compiled)} in {self.seconds:.1f} s"
        if self.graphs:
            return f"{shape}: served by what is compiled already"
        return f"{shape}: nothing ran compiled"


@dataclass(frozen=True)
class Warmup:
    """What a warm-up did."""

    shapes: tuple[Warmed, ...]
    late: tuple[str, ...] = ()
    """What was still compiled in the last pass: requests of these very shapes will wait for a compiler."""
    notes: tuple[str, ...] = ()
    """Sizes that torch may take for one."""

    @property
    def ok(self) -> bool:
        """Whether compiled code serves every shape, and nothing is left to compile."""
        return all(shape.graphs for shape in self.shapes) and not self.late

    def __str__(self) -> str:
        late = [f"compiled again in the last pass: {function}" for function in self.late]
        return "\n".join([*map(str, self.shapes), *late, *self.notes])


def warm_up(
    model: Callable[..., Any], make_batch: Callable[..., Any], buckets: tuple[int, ...], pad: Callable[[Any], Any],
    batch_sizes: tuple[int, ...] = (),
) -> Warmup:  # fmt: skip
    """Run ``model`` on a batch of each bucket, and of each batch size, three times over.

    Args:
        model: What torch.compile or maybe_compile returned.
        make_batch: ``make_batch(S=length)`` where it has a parameter ``S``, else ``make_batch(length)``; a
            parameter ``B`` is given the batch size. It is not called with a length of 0 or 1.
        buckets: The lengths.
        pad: Applied to each batch.
        batch_sizes: Those that will come, for a ``make_batch`` that takes ``B``. Empty: one that is no 0 or 1 (torch
            compiles for these alone) and equals no other dimension of any batch: sizes that are equal when torch
            compiles are one and the same to it (duck shapes), and it compiles again when they differ.

    Raises what the model raises, and ValueError for batch sizes that ``make_batch`` does not take.
    """
    maker = _BatchMaker(make_batch)
    if batch_sizes and not maker.takes_size:
        raise ValueError("batch_sizes are given, and make_batch takes no B")
    # Torch compiles for sizes of 0 and 1 alone.
    lengths = [length for length in buckets if length > 1] or list(buckets)
    sizes: tuple[int | None, ...] = batch_sizes
    if not sizes:
        sizes = (free_size(maker, lengths, pad) if maker.takes_size else None,)
    wanted = [(length, size) for size, length in itertools.product(sizes, lengths)]
    batches = [Batch.of(pad(maker(length, size))) for length, size in wanted]
    first, last = _all_passes(model, batches)
    shapes = []
    for (length, size), mine, latest in zip(wanted, first, last, strict=True):
        shapes.append(Warmed(length, size, mine.seconds, mine.compiled, latest.graph_runs))
    # In order, and each once.
    late: dict[str, None] = {}
    for run in last:
        late.update(dict.fromkeys(run.compiled))
    notes = dict.fromkeys(_equal_sizes(wanted, batches))
    warmup = Warmup(tuple(shapes), tuple(late), tuple(notes))
    level = logging.INFO if warmup.ok else logging.WARNING
    for line in str(warmup).splitlines():
        _LOG.log(level, "warm-up: %s", line)
    return warmup


def _all_passes(model: Callable[..., Any], batches: list[Batch]) -> tuple[list[_Run], list[_Run]]:
    """Run every batch in each pass; what came of the first and of the last."""
    passes: list[list[_Run]] = []
    with preserved(join_modules(model)):
        for _ in range(PASSES):
            passes.append([_run(model, batch) for batch in batches])
    return passes[0], passes[-1]


def free_size(maker: Callable[[int, int], Any], lengths: list[int], pad: Callable[[Any], Any]) -> int:
    """The least batch size from 2 on that equals no other dimension of any tensor of the padded batches.

    Raises :class:`ValueError` if there is none up to 64.
    """
    # From 2 on, for torch compiles for 0 and 1 alone.
    for size in range(2, 65):
        batches = (Batch.of(pad(maker(length, size))) for length in lengths)
        if not any(size in _other_sizes(batch, size) for batch in batches):
            return size
    raise ValueError("no batch size from 2 to 64 differs from every other dimension of the batches; pass batch_sizes")


class _BatchMaker:
    """``make_batch`` by one signature."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        try:
            names = set(inspect.signature(make).parameters)
        except (TypeError, ValueError):
            # Written in C.
            names = set()
        self.takes_size, self._names_length = "B" in names, "S" in names

    def __call__(self, length: int, size: int | None) -> Any:
        options: dict[str, Any] = {}
        if self.takes_size:
            options["B"] = size
        if self._names_length:
            return self._make(S=length, **options)
        return self._make(length, **options)


def _other_sizes(batch: Batch, size: int) -> set[int]:
    """Sizes of all dimensions but the first, and of the first where it is no batch dimension."""
    sizes: set[int] = set()
    for tensor in batch.tensors():
        sizes.update(tensor.shape[1:])
        if tensor.ndim and tensor.shape[0] != size:
            sizes.add(tensor.shape[0])
    return sizes


def _equal_sizes(wanted: list[tuple[int, int | None]], batches: list[Batch]) -> Iterator[str]:
    """A note on each tensor whose batch size is the length too."""
    for (length, _), batch in zip(wanted, batches, strict=True):
        for tensor in batch.tensors():
            if tensor.ndim > 1 and tensor.shape[0] == tensor.shape[1] == length:
                yield (f"a tensor of the shape {tuple(tensor.shape)} has equal sizes: torch may take them for one, and "
                       "compile again when they differ; warm up with another batch size")


@dataclass(frozen=True)
class _Run:
    """What came of one call."""

    seconds: float
    compiled: tuple[str, ...]
    graph_runs: int


def _run(model: Callable[..., Any], batch: Batch) -> _Run:
    # A model may write to its batch, and every pass must run the same.
    private = batch.clone()
    step_begins()
    with observe() as seen:
        start = time.perf_counter()
        model(*private.args, **private.kwargs)
        if private.is_on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    compiled = tuple(f"{each.function} ({each.file.rpartition('/')[2]}:{each.line})" for each in seen.compiles)
    return _Run(seconds, compiled, seen.graph_runs)
