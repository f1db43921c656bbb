"""Transcript steps: what a transcript is made of. Each makes tensors again, by their numbers, of earlier ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from pytest_torchcompile.oracle.tape import as_sequence
from pytest_torchcompile.state.torch_state import seed_everything

__all__ = ["CallStep", "Listener", "Number", "Performer", "SeedStep", "Step", "ViewStep", "put_argument"]

Place: TypeAlias = "int | str"
"""Of an argument: its position, or its name."""


class Performer(Protocol):
    """What runs a call of an operator as was decided: :class:`~pytest_torchcompile.oracle.noise.Wide`."""

    def perform(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""


class Listener:
    """What is told each call while a program runs, so that the run can be made again: a transcript, or a graph."""

    def refuse(self, why: str) -> None:
        """The run can't be made again."""
        raise NotImplementedError

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What is raised here is no error of the program."""
        try:
            yield
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Number:
    """Stands for a tensor: its number."""

    number: int


@dataclass
class CallStep:
    """One call of an operator."""

    call: Any
    args: list[Any]
    """Without tensors."""
    kwargs: dict[str, Any]
    tensors: list[tuple[Place, int]] = field(default_factory=list)
    """The place of each tensor among the arguments, with its number."""
    lists: list[tuple[Place, list[Any]]] = field(default_factory=list)
    """Likewise lists of tensors, with a :class:`Number` for each."""
    results: list[int | None] = field(default_factory=list)
    """The numbers of what it returns."""
    done: list[int] = field(default_factory=list)
    """The numbers of tensors that no later step needs."""

    def run(self, performer: Performer, tensors: list[Any]) -> None:
        """Run the operator on the tensors of these numbers, and put there what it returns."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, number in self.tensors:
            put_argument(args, kwargs, place, tensors[number])
        for place, values in self.lists:
            given = [tensors[value.number] if type(value) is Number else value for value in values]
            put_argument(args, kwargs, place, given)
        out = performer.perform(self.call, tuple(args), kwargs)
        for result_number, result in zip(self.results, as_sequence(out), strict=True):
            if result_number is not None:
                tensors[result_number] = result

    def numbers(self) -> Iterator[int]:
        """Of all tensors that it is given."""
        for _, number in self.tensors:
            yield number
        for _, values in self.lists:
            for value in values:
                if type(value) is Number:
                    yield value.number

    def made(self) -> Iterator[int]:
        """The numbers of what it returns."""
        for number in self.results:
            if number is not None:
                yield number


@dataclass
class ViewStep:
    """Makes a tensor again which autograd has kept: another view of the memory of one that is known."""

    number: int
    owner: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    done: list[int] = field(default_factory=list)

    def run(self, performer: Performer, tensors: list[Any]) -> None:
        """Make the view."""
        tensors[self.number] = tensors[self.owner].as_strided(self.shape, self.strides, self.offset)

    def numbers(self) -> Iterator[int]:
        """Of the tensor whose memory it is."""
        yield self.owner

    def made(self) -> Iterator[int]:
        """Its own number."""
        yield self.number


@dataclass
class SeedStep:
    """Seeds the random generators, as before each pass."""

    seed: int
    done: list[int] = field(default_factory=list)

    def run(self, performer: Performer, tensors: list[Any]) -> None:
        """Seed them."""
        seed_everything(self.seed)

    def numbers(self) -> Iterator[int]:
        """None."""
        yield from ()

    def made(self) -> Iterator[int]:
        """None."""
        yield from ()


Step: TypeAlias = "CallStep | ViewStep | SeedStep"


def put_argument(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    """Give a call an argument."""
    if isinstance(place, int):
        args[place] = value
    else:
        kwargs[place] = value
