"""Measurement: a computation that has to know some numbers on its way. Those of many are read at once.

A GPU runs behind Python until a number is asked for. Then Python waits until all is done that it was given, and where
several processes share the GPU, for a turn of each.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

import torch

__all__ = ["Measurement", "count_each", "measure_alone", "measure_together", "read_numbers", "read_values", "send"]

Found = TypeVar("Found")

Measurement: TypeAlias = Generator[torch.Tensor, torch.Tensor, Found]
"""Yields a tensor whenever it has to know its values, and is sent them as a tensor of the CPU.

Those of a GPU arrive in float64, so whole numbers only up to 2**53.
"""


def measure_together(measurements: Sequence[Measurement[Found]]) -> list[Found]:
    """Run measurements side by side; what each of them returned. A GPU is waited for once in each round."""
    found: dict[int, Found] = {}
    answers: dict[int, torch.Tensor] = {}
    waiting = list(range(len(measurements)))
    while waiting:
        asked: dict[int, torch.Tensor] = {}
        for place in waiting:
            try:
                if place in answers:
                    asked[place] = measurements[place].send(answers[place])
                else:
                    # It has not begun.
                    asked[place] = next(measurements[place])
            except StopIteration as end:
                found[place] = end.value
        waiting = list(asked)
        answers = dict(zip(asked, read_values(list(asked.values())), strict=True))
    return [found[place] for place in range(len(measurements))]


def measure_alone(measurement: Measurement[Found]) -> Found:
    """Run one measurement."""
    (found,) = measure_together([measurement])
    return found


def read_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the CPU. Those of a GPU arrive in float64, and it is waited for once."""
    values = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            by_device.setdefault(tensor.device, []).append(place)
    for places in by_device.values():
        flat = torch.cat([tensors[place].reshape(-1).double() for place in places]).cpu()
        parts = torch.split(flat, [tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            values[place] = part.view(tensors[place].shape)
    return values


def read_numbers(*numbers: torch.Tensor) -> list[float]:
    """The values of some scalars, of any devices; whole numbers up to 2**53 as they are."""
    return [float(value) for value in read_values(numbers)]


def count_each(numbers: torch.Tensor, end: int) -> torch.Tensor:
    """How often each whole number below ``end`` occurs, as by ``bincount``, which waits for a GPU."""
    numbers = numbers.flatten()
    return numbers.new_zeros(end).index_add_(0, numbers, numbers.new_ones(1).expand_as(numbers))


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on another device. A GPU is not waited for, as it reads from memory that is pinned."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
