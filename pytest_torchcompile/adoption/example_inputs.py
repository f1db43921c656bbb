"""Example inputs as plain data: what each argument of ``forward`` is given, as a text that a matrix can hold.

``float32[B, 16]`` are normal numbers, ``int64[B, S] 3..99`` whole ones from 3 to 99, ``int64[B, S] ones`` ones, and
``bool[B, S] ones`` all true. Names are dims. ``default`` leaves an optional argument out. :func:`batch` makes them;
torch is imported when it is called. Matrices name it, so its place is public.

An examiner finds them: it has a model examined in a process of its own, so that this one needs no torch and survives a
crash.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pytest_torchcompile.adoption import LIBRARIES
from pytest_torchcompile.errors import UsageError

__all__ = ["BATCH", "LEFT_OUT", "Examined", "ExampleTensor", "Request", "batch", "examine_apart"]

BATCH: Final = "pytest_torchcompile.adoption.example_inputs:batch"
"""What a matrix names as ``inputs`` where there is no file with code."""
LEFT_OUT: Final = "default"
"""What stands in place of a tensor for an argument that is not given."""
_FORM: Final = re.compile(r"(?P<dtype>float32|int64|bool)\[(?P<shape>[\w, ]*)\](?: (?P<fill>ones|\d+\.\.\d+))?")


@dataclass(frozen=True)
class ExampleTensor:
    """One tensor argument. ``shape``: sizes, and names of dims; ``fill``: empty (drawn), ``ones``, or ``LOW..HIGH``."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    fill: str = ""

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.dtype}[{shape}] {self.fill}".rstrip()

    @classmethod
    def read(cls, name: str, text: str) -> ExampleTensor:
        """Read what :meth:`__str__` wrote. Raises :class:`UsageError` for anything else."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise UsageError(f"input {name!r}: {text!r} is no tensor; expected a text such as 'float32[B, 16]' or "
                             "'int64[B, S] 0..99'")
        words = [word.strip() for word in form["shape"].split(",") if word.strip()]
        return cls(name, form["dtype"], tuple(map(_read_size, words)), form["fill"] or "")

    @property
    def dims(self) -> list[str]:
        """The dims that the shape names, in order."""
        return [size for size in self.shape if isinstance(size, str)]

    def code(self) -> str:
        """Python that makes it, with the dims as variables."""
        shape = "(" + ", ".join(map(str, self.shape)) + ("," if len(self.shape) == 1 else "") + ")"
        if self.fill == "ones":
            return f"torch.ones({shape}, dtype=torch.{self.dtype})"
        if self.fill:
            low, high = self.bounds
            return f"torch.randint({low}, {high + 1}, {shape})"
        return f"torch.randn({shape})"

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest of whole numbers that are drawn."""
        low, _, high = self.fill.partition("..")
        return int(low), int(high)

    def tensor(self, sizes: Mapping[str, int]) -> Any:
        """The tensor, drawn from torch's own generator, for these sizes of the dims.

        Raises :class:`UsageError` for a dim that has no size.
        """
        import torch

        missing = [name for name in self.dims if name not in sizes]
        if missing:
            raise UsageError(f"input {self.name!r}: {self} names the dim {missing[0]!r}, which has no size; add it to "
                             "dims")
        shape = []
        for size in self.shape:
            # A dim by its name, or a number that never changes.
            shape.append(sizes[size] if isinstance(size, str) else size)
        if self.fill == "ones":
            return torch.ones(shape, dtype=getattr(torch, self.dtype))
        if self.fill:
            low, high = self.bounds
            return torch.randint(low, high + 1, shape)
        return torch.randn(shape)


def _read_size(word: str) -> int | str:
    """A number, or else the name of a dim."""
    return int(word) if word.isdigit() else word


def batch(**given: int | str) -> dict[str, Any]:
    """One batch, as keyword arguments of ``forward``: numbers are sizes of dims, texts are inputs."""
    sizes = {name: value for name, value in given.items() if isinstance(value, int)}
    tensors = {}
    for name, text in given.items():
        if isinstance(text, str) and text != LEFT_OUT:
            tensors[name] = ExampleTensor.read(name, text).tensor(sizes)
    return tensors


# --------------------------------------------------------------------------------------------------------- the examiner
SECONDS: Final = 180.0
"""A model that takes longer to make and to call a few times is too large to begin with."""
_MODULE: Final = "pytest_torchcompile.adoption.examination"
# The error of a traceback and the frame that raised it.
_LAST_LINES: Final = 5


@dataclass(frozen=True)
class Request:
    """What is to be examined. ``where``, ``where_inputs``: what errors begin with; ``*_option``: what they advise."""

    root: str
    factory: str
    inputs: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Keywords that the factory is called with."""
    dims: Mapping[str, list[int]] = field(default_factory=dict)
    """The sizes of inputs that are known; else they are found out."""
    where: str = "init"
    where_inputs: str = "--inputs"
    factory_option: str = "by --factory module:function"
    inputs_option: str = "--inputs module:function"


@dataclass(frozen=True)
class Examined:
    """What a model takes."""

    factory: str
    inputs: str
    """``module:function`` that the user has named; empty: :attr:`tensors` were guessed."""
    tensors: tuple[ExampleTensor, ...]
    dims: dict[str, list[int]]
    """A dim to its sizes; one alone is fixed."""
    phase: str
    """``training`` where a backward pass works, else ``inference``."""
    code: str = ""
    """Of a model of a library: Python of a function ``model`` that makes it."""
    left_out: tuple[str, ...] = ()
    """Optional arguments that guessed inputs leave at their default."""
    inputs_beside: str = ""
    """``module:function`` that may make inputs, beside a model whose inputs were guessed."""

    @property
    def name(self) -> str:
        """A name for the model in a matrix: ``my_net`` of ``pkg.models:MyNet``."""
        attribute = self.factory.rpartition(":")[2].rpartition(".")[2]
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", attribute)
        return words.lower()


def examine_apart(request: Request) -> Examined:
    """Examine a model. Raises :class:`UsageError` in one sentence for one that can't be made, called or guessed."""
    asked = {**asdict(request), "path": [request.root, *sys.path], "libraries": LIBRARIES}
    try:
        done = subprocess.run([sys.executable, "-m", _MODULE], input=json.dumps(asked), capture_output=True, text=True,
                              timeout=SECONDS, check=False, cwd=request.root)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{request.where}: {request.factory} was neither made nor called within {SECONDS:g} s; begin "
                         f"with a smaller one, named {request.factory_option}") from None
    if not done.stdout:
        last = " / ".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
        raise UsageError(f"{request.where}: the process that tried {request.factory} ended with {done.returncode}: "
                         f"{last or 'it said nothing'}")
    return _read_answer(request, json.loads(done.stdout))


def _read_answer(request: Request, answer: Mapping[str, Any]) -> Examined:
    if "error" in answer:
        raise UsageError(answer["error"])
    tensors = tuple(ExampleTensor.read(name, text) for name, text in answer["tensors"].items())
    return Examined(request.factory, request.inputs, tensors, answer["dims"], answer["phase"],
                    answer["code"], tuple(answer["left_out"]), answer["inputs_beside"])
