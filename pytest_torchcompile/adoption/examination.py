"""Examination: a model is made and tried eagerly, to learn which inputs and sizes it takes and whether it trains.

Runs in a process of its own (``python -m pytest_torchcompile.adoption.examination``): it reads a request as JSON from
stdin and answers by one line of JSON. What the model prints goes to stderr. :mod:`.example_inputs` is its other end.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pytest_torchcompile.adoption.example_inputs import ExampleTensor
from pytest_torchcompile.adoption.guesses import (
    Guess,
    guesses,
    left_out_parameters,
    needed_parameters,
    sizes_of_parameters,
)
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.errors import TorchcompileError, UsageError
from pytest_torchcompile.loading import kind_of, one_line, resolve
from pytest_torchcompile.oracle import Fault, given_text
from pytest_torchcompile.state.value_leaves import tensors_of

__all__ = ["examine"]

DEADLINE: Final = 40.0
"""Seconds after which no more guesses are tried."""
# None is 0 or 1, which torch compiles apart. The first three that are no size of a parameter are taken.
_BATCHES: Final = (4, 6, 10, 5, 7, 9, 11, 13, 14, 15)
# Other numbers than those of a batch: two dims of one size would be one symbol (duck shapes).
_LENGTHS: Final = (12, 20, 28, 18, 22, 26, 13, 17, 19, 23)
_LONG_LENGTHS: Final = ((128, 192, 256, 320, 384, 448), (512, 768, 1024, 1280, 1536, 1792),
                        (2048, 3072, 4096, 5120, 6144, 7168), (8192, 12288, 16384, 20480, 24576, 28672))
"""For models that take no short ones, as those of sound: a layer that sums up hundreds of samples."""
_OF_BATCH: Final = ("B", "N", "b", "n", "batch", "batch_size", "rows", "bs")
"""Names of dims that say how many samples a batch has."""
_NAMES_OF_INPUTS: Final = ("batch", "inputs", "make_batch", "make_inputs", "example_inputs", "sample_inputs",
                           "dummy_inputs")
"""Functions that make inputs are called so."""
_OF_IMAGE: Final = ("H", "W", "h", "w", "height", "width", "image_size", "resolution")

Dims = dict[str, list[int]]
"""A dim to its sizes; one alone is fixed."""


@dataclass
class _Model:
    """The model under examination, and what became of the calls so far."""

    module: nn.Module
    began: float = field(default_factory=time.monotonic)
    first_error: str = ""

    def takes(self, make: Callable[[Mapping[str, int]], Any], dims: Dims) -> bool:
        """Does it return tensors for a batch of each of the sizes?"""
        for sizes in _rows(dims):
            value: Any = None
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    value = make(sizes)
                    output = self.call(value)
            except Exception as error:
                self.first_error = self.first_error or _told_error(error, sizes, value)
                return False
            if not any(tensors_of(output)):
                self.first_error = self.first_error or f"forward returned {kind_of(output)}, without a tensor in it"
                return False
        return True

    def call(self, value: Any) -> Any:
        batch = Batch.of(value)
        return self.module(*batch.args, **batch.kwargs)

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() - self.began > DEADLINE


def _told_error(error: Exception, sizes: Mapping[str, int], value: Any) -> str:
    """What a model or an inputs function raised, with which sizes; and what a batch means that does not fit."""
    text = one_line(error)
    if sizes:
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        text = f"{text} with {shown}"
    if given := given_text(Fault.of(error, "forward"), Batch.of(value)):
        text = f"{text}; {given}"
    return text


def examine(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request (:class:`~pytest_torchcompile.adoption.example_inputs.Request`, as plain data).

    Returns ``tensors`` (name to text, empty where inputs were named), ``left_out`` (optional arguments that guessed
    inputs do not give), ``dims``, ``phase``, ``code`` of a model of a library, and ``inputs_beside``, a
    function beside the model that seems to make inputs.
    Raises :class:`UsageError` for a model that can't be made or called, or whose inputs can't be guessed.
    """
    root = Path(request["root"])
    model = _Model(_make_module(request, root))
    if request["inputs"]:
        tensors: Guess = ()
        inputs_beside = ""
        make, dims = _with_named_inputs(model, request, root)
    else:
        tensors, dims = _with_guessed_inputs(model, request)
        inputs_beside = _inputs_beside(request["factory"])
        make = _maker_of(tensors)
    return {
        "tensors": {tensor.name: str(tensor) for tensor in tensors},
        "left_out": left_out_parameters(model.module, tensors) if tensors else [],
        "dims": dims,
        "phase": _phase_of(model, make, dims),
        "code": _code_of(request["arguments"]),
        "inputs_beside": inputs_beside,
    }


def _inputs_beside(factory: str) -> str:
    """``module:function`` beside the factory that makes inputs, by its name; empty where there is none."""
    module = factory.partition(":")[0]
    for name in _NAMES_OF_INPUTS:
        function = getattr(sys.modules.get(module), name, None)
        # One that is imported there, as a helper, is about something else.
        if inspect.isfunction(function) and function.__module__ == module:
            return f"{module}:{name}"
    return ""


def _make_module(request: Mapping[str, Any], root: Path) -> nn.Module:
    """Call the factory. Raises :class:`UsageError` where it has arguments without a default, or makes no module."""
    target, where = request["factory"], request["where"]
    factory = resolve(target, root, where)
    if isinstance(factory, nn.Module):
        raise UsageError(f"{where}: {target} is a module that is made already; name its class, or a function that "
                         "makes one")
    given = request["arguments"]
    if missing := _arguments_without_default(factory, given):
        library = target.partition(":")[0].partition(".")[0]
        # Their models take a configuration, of which init makes a tiny one.
        if library in request["libraries"]:
            raise UsageError(f"{where}: {target} takes {', '.join(missing)}; `pytest-torchcompile init --from "
                             f"{library}:{target.rpartition(':')[2]}` makes a tiny one with random weights")
        raise UsageError(f"{where}: {target} takes {', '.join(missing)}, without a default; write a function without "
                         f"arguments that makes one, and name it {request['factory_option']}")
    _seed()
    try:
        module = factory(**given)
    # Ours already says what is wrong, and where.
    except TorchcompileError:
        raise
    # A factory that parses a command line ends the process where it finds pytest's options.
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: {target} raised {one_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{where}: {target} made {kind_of(module)}; expected a torch.nn.Module (wrap a function in "
                         "one)")
    # As cells have it, wherever and in whatever precision the factory has made it.
    return module.to(device="cpu", dtype=torch.float32).eval()


def _code_of(arguments: Mapping[str, str]) -> str:
    if "source" not in arguments:
        return ""
    from pytest_torchcompile.adoption.library_models import find_model

    return find_model(arguments["source"]).code


def _arguments_without_default(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty and p.name not in given]


# inputs that the user has named

def _with_named_inputs(model: _Model, request: Mapping[str, Any],
                       root: Path) -> tuple[Callable[[Mapping[str, int]], Any], Dims]:
    """The sizes that the user's function and the model take."""
    target, where = request["inputs"], request["where_inputs"]
    function = resolve(target, root, where)
    names = _arguments_without_default(function, {})

    def make(sizes: Mapping[str, int]) -> Any:
        return function(**sizes)

    dims: Dims | None = request["dims"]
    if not dims:
        dims = _fitting_sizes(model, make, names)
    elif not model.takes(make, dims):
        dims = None
    if dims is not None:
        return make, dims
    raise UsageError(f"{where}: {request['factory']} does not take what {target} returns: {model.first_error}")


# inputs that are guessed

def _with_guessed_inputs(model: _Model, request: Mapping[str, Any]) -> tuple[Guess, Dims]:
    """The first guess that the model takes, with as many sizes as it takes."""
    where, option = request["where"], request["inputs_option"]
    advice = f"write a function that returns a batch, and name it by {option}"
    if needed_parameters(model.module) is None:
        raise UsageError(f"{where}: forward of {request['factory']} has arguments without names, so its inputs can't "
                         f"be guessed; {advice}")
    tried: list[str] = []
    for guess in guesses(model.module):
        # A call that has begun cannot be stopped, so the time is asked between them.
        if model.out_of_time:
            break
        # Noted before it is tried: the first of them is told where none fits.
        tried.append(", ".join(f"{tensor.name}: {tensor}" for tensor in guess))
        names = list(dict.fromkeys(itertools.chain.from_iterable(tensor.dims for tensor in guess)))
        dims = _fitting_sizes(model, _maker_of(guess), names, long=any(map(_is_signal, guess)))
        if dims is not None:
            return guess, dims
    if not tried:
        raise UsageError(f"{where}: forward of {request['factory']} takes no argument, so there is nothing to guess; "
                         f"{advice}")
    raise UsageError(f"{where}: no inputs could be guessed for {request['factory']}, whose forward is "
                     f"{inspect.signature(model.module.forward)}; {advice} ({len(tried)} tried; the first, {tried[0]}: "
                     f"{model.first_error})")


def _maker_of(guess: Sequence[ExampleTensor]) -> Callable[[Mapping[str, int]], Any]:
    def make(sizes: Mapping[str, int]) -> Any:
        return {tensor.name: tensor.tensor(sizes) for tensor in guess}

    return make


def _is_signal(tensor: ExampleTensor) -> bool:
    """Whether it may hold samples over time, of which a model may need many: numbers whose last dim is a length."""
    return tensor.dtype == "float32" and tensor.shape[-1:] == ("S",)


def _fitting_sizes(model: _Model, make: Callable[[Mapping[str, int]], Any], names: Sequence[str],
                   long: bool = True) -> Dims | None:
    """Sizes for dims that the model takes: three of each, then fewer dims that vary, then lengths of some parameter.

    None equals a size of a parameter where that can be avoided: torch gives equal sizes one symbol. ``long``: whether
    lengths of hundreds and thousands are tried too. Returns None where the model takes none of them.
    """
    lengths_of_parameters = sizes_of_parameters(model.module)
    taken = set(lengths_of_parameters)
    batches = _three_of(_BATCHES, taken)
    lengths = _three_of(_LENGTHS, taken | set(batches))
    # Multiples of 16 next, for layers that divide a length; last one length alone, for models that take no other.
    short = [_named_sizes(names, batches, lengths, [32]), _named_sizes(names, batches, [16, 32, 48]),
             _named_sizes(names, batches, lengths[:1])]
    long_ones = []
    if long:
        long_ones = [_named_sizes(names, batches, _three_of(sizes, taken)) for sizes in _LONG_LENGTHS]
    # Positions of a fixed number want exactly so many.
    fixed = [size for size in lengths_of_parameters if 2 <= size <= 1024]
    others = [_named_sizes(names, batches, [size]) for size in dict.fromkeys([*fixed[:8], 32, 64, 128])]
    others.append(_named_sizes(names, batches[:1], lengths[:1], [32]))
    tried: list[Dims] = []
    for dims in (*short, *long_ones, *others):
        # Of dims that are no lengths the sizes are the same each time.
        if dims in tried:
            continue
        tried.append(dims)
        if model.takes(make, dims):
            return _roomier(model, make, dims, long_ones)
    return None


def _roomier(model: _Model, make: Callable[[Mapping[str, int]], Any], dims: Dims, long_ones: Sequence[Dims]) -> Dims:
    """Of long sizes the next ones: of the shortest a layer may leave a single step, which torch compiles apart."""
    if dims in long_ones[:-1]:
        longer = long_ones[long_ones.index(dims) + 1]
        if model.takes(make, longer):
            return longer
    return dims


def _named_sizes(names: Sequence[str], batches: list[int], others: list[int], images: list[int] | None = None) -> Dims:
    """Sizes for each dim, by what its name says it is; no two dims have the same ones. ``images``: else ``others``."""
    dims: Dims = {}
    for name in names:
        if name in _OF_BATCH:
            dims[name] = batches
        elif name in _OF_IMAGE:
            dims[name] = images or others
        else:
            dims[name] = others
    return _apart(dims)


def _apart(dims: Dims) -> Dims:
    """Two dims of the same sizes would be one symbol: the second has larger ones."""
    used: list[list[int]] = []
    result: Dims = {}
    for name, sizes in dims.items():
        own = sizes
        while len(own) > 1 and own in used:
            own = [size + 1 for size in own]
        used.append(own)
        result[name] = own
    return result


def _three_of(sizes: Sequence[int], taken: set[int]) -> list[int]:
    free = [size for size in sizes if size not in taken]
    return sorted((free + list(sizes))[:3])


def _rows(dims: Dims) -> Iterator[dict[str, int]]:
    """The sizes of each batch, as a matrix steps through them (:func:`pytest_torchcompile.dims.batch_sizes`)."""
    count = max(map(len, dims.values()), default=1)
    for number in range(count):
        yield {name: sizes[number % len(sizes)] for name, sizes in dims.items()}


def _phase_of(model: _Model, make: Callable[[Mapping[str, int]], Any], dims: Dims) -> str:
    """``training`` where a backward pass works, else ``inference``."""
    module = model.module.train()
    try:
        output = model.call(make(next(_rows(dims))))
        losses = []
        for _, tensor in tensors_of(output):
            # Torch makes no gradient of a complex number without being told of which part.
            if tensor.requires_grad and not tensor.is_complex():
                losses.append(tensor.sum())
        if not losses or not any(parameter.requires_grad for parameter in module.parameters()):
            return "inference"
        torch.autograd.backward(losses)
    except Exception:
        return "inference"
    return "training"


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def _main() -> None:
    request = json.load(sys.stdin)
    # The answer's own line: whatever a model prints goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = request["path"]
    warnings.simplefilter("ignore")
    # Small models gain nothing by more threads, and on a shared machine many threads wait for each other.
    torch.set_num_threads(min(4, torch.get_num_threads()))
    try:
        answer = examine(request)
    except TorchcompileError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    with contextlib.closing(answers):
        json.dump(answer, answers)


if __name__ == "__main__":
    _main()
