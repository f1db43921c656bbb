"""What the markers may say. Each reader takes a marker's arguments and raises UsageError; no pytest, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from typing import Any, Final

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, installed
from pytest_torchcompile.cell import CAPTURES, DYNAMIC, MODES, Cell, id_word
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.layer.config import BucketConfig
from pytest_torchcompile.wrappers import WRAPPERS

__all__ = ["READERS", "Combination", "MarkerLimits", "PassChoice", "read_bucket_sizes", "read_combinations",
           "read_limits", "read_pass_choice"]


@dataclass(frozen=True, slots=True)
class Combination:
    """One way to compile a model, in the words of a matrix."""

    mode: str = "default"
    dynamic: str = "auto"
    """``auto``, ``static`` or ``dynamic``: ``torch.compile(dynamic=...)`` None, False or True."""
    backend: str | Callable[..., Any] = "inductor"
    """A name, ``module:attribute``, or the backend itself."""
    wrapper: str = "none"
    fullgraph: bool = False

    @property
    def id(self) -> str:
        """The mode, then whatever is not at its default: ``max-autotune-dynamic``, ``default-eager-fullgraph``."""
        plain = Combination()
        words = [self.mode]
        for name in ("dynamic", "backend", "wrapper"):
            value = getattr(self, name)
            if value != getattr(plain, name):
                words.append(id_word(_name_of(value)))
        if self.fullgraph:
            words.append("fullgraph")
        return "-".join(words)

    def cell(self, device: str) -> Cell:
        """The same as a cell, of a model on that device."""
        return Cell(model="model", backend=_name_of(self.backend), mode=self.mode, dynamic=self.dynamic,
                    wrapper=self.wrapper, device=device)


@dataclass(frozen=True, slots=True)
class MarkerLimits:
    """The largest numbers that a test may reach; None: no limit."""

    recompiles: int | None = None
    graph_breaks: int | None = None
    eager_frames: int | None = None


def read_combinations(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Combination, ...]:
    """Read ``compile_modes(*modes, dynamic=..., backend=..., wrapper=..., fullgraph=...)``.

    Each keyword is one value or a list of them; the modes vary slowest. A mode other than ``default`` goes only with
    backends that take modes; a value that is thereby left in no combination is a mistake.
    """
    hint = ""
    if "mode" in kwargs or "modes" in kwargs:
        hint = " (modes are given by place)"
    _refuse_unknown(kwargs, {f.name for f in fields(Combination)} - {"mode"}, hint)
    values = {
        "mode": _read_values("mode", args or ("default",)),
        "dynamic": _read_values("dynamic", kwargs.get("dynamic", "auto")),
        "backend": _read_values("backend", kwargs.get("backend", "inductor")),
        "wrapper": _read_values("wrapper", kwargs.get("wrapper", "none")),
        "fullgraph": _read_values("fullgraph", kwargs.get("fullgraph", False)),
    }
    combinations = []
    for choice in product(*values.values()):
        combination = Combination(**dict(zip(values, choice, strict=True)))
        if combination.mode == "default" or _takes_modes(combination.backend):
            combinations.append(combination)
    for name in ("mode", "backend"):
        # A list, not a set: a backend may be an object without a hash.
        used = [getattr(combination, name) for combination in combinations]
        for value in values[name]:
            if value not in used:
                raise UsageError(_left_out_text(name, value, values))
    return tuple(combinations)


def read_limits(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> MarkerLimits:
    """Read ``compile_limits(recompiles=..., graph_breaks=..., eager_frames=...)``."""
    known = [f.name for f in fields(MarkerLimits)]
    if args:
        raise UsageError(f"{args[0]!r} has no name; expected {known[0]}={args[0]!r} or another of {', '.join(known)}")
    _refuse_unknown(kwargs, known)
    if not kwargs:
        raise UsageError(f"names no limit; expected one or more of {', '.join(known)}")
    for name, value in kwargs.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{name}={value!r}; expected a whole number from 0 on")
    return MarkerLimits(**kwargs)


def read_bucket_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Read ``shape_buckets(128, 256)``."""
    if kwargs:
        raise UsageError(f"unknown argument {next(iter(kwargs))!r}; expected sizes alone, "
                         "as in shape_buckets(128, 256)")
    try:
        # The layer's own reader judges the sizes, so that a marker and a config cannot come to differ.
        return BucketConfig(args).buckets
    except ValueError as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True, slots=True)
class PassChoice:
    """What the fixture ``graph_pass`` judges."""

    passes: tuple[Any, ...] = ()
    """Functions, ``module:function`` or names, in their order."""
    capture: str = "joint"
    decompositions: Any = None
    train: bool = True
    """False: the passes are for the graph of inference."""
    dynamic: bool | None = None


def read_pass_choice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PassChoice:
    """Read ``graph_passes([pass, ...], capture="joint", decompositions=None, train=True, dynamic=None)``; the list may
    be left out.

    But not around a lone function: pytest takes that for the test that is marked.
    """
    if len(args) == 1 and isinstance(args[0], (list, tuple)):
        args = tuple(args[0])
    _refuse_unknown(kwargs, [each.name for each in fields(PassChoice) if each.name != "passes"])
    for each in args:
        if not callable(each) and not isinstance(each, str):
            raise UsageError(f"{each!r} is no pass; expected a function, 'module:function' or a name such as "
                             "'dead_code'")
    capture = kwargs.get("capture", "joint")
    if capture not in CAPTURES:
        raise UsageError(f"unknown capture {capture!r}; {nearest(str(capture), CAPTURES)}")
    for name, known in (("train", (True, False)), ("dynamic", (None, True, False))):
        if kwargs.get(name, known[0]) not in known:
            raise UsageError(f"{name}={kwargs[name]!r}; expected {' or '.join(map(str, known))}")
    if not args and not kwargs:
        raise UsageError("names no pass; expected graph_passes([my_pass]), with one pass or more")
    return PassChoice(args, **kwargs)


READERS: Final = {"compile_modes": read_combinations, "compile_limits": read_limits, "shape_buckets": read_bucket_sizes,
                  "graph_passes": read_pass_choice}
"""Marker to the function that reads its arguments."""


def _refuse_unknown(given: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise UsageError(f"unknown argument {name!r}{hint}; {nearest(name, known)}")


def _read_values(name: str, given: Any) -> list[Any]:
    values = [given]
    if isinstance(given, (list, tuple)):
        values = list(given)
    if not values:
        raise UsageError(f"{name}={given!r} is empty; expected one value or more")
    for index, value in enumerate(values):
        _check_value(name, value)
        if value in values[:index]:
            raise UsageError(f"{name} {value!r} is given twice")
    return values


def _check_value(name: str, value: Any) -> None:
    if name == "fullgraph":
        if not isinstance(value, bool):
            raise UsageError(f"fullgraph={value!r}; expected True or False")
        return
    if name == "dynamic" and (value is None or isinstance(value, bool)):
        word_of = {torch_word: word for word, torch_word in DYNAMIC.items()}
        raise UsageError(f"dynamic={value}; torch.compile(dynamic={value}) is called {word_of[value]!r} here")
    if name == "backend" and callable(value):
        return
    own = name in ("backend", "wrapper")
    or_own = ", or module:attribute of your own" if own else ""
    if not isinstance(value, str):
        or_itself = ", or the backend itself" if name == "backend" else ""
        raise UsageError(f"{name}={value!r}; expected a name{or_own}{or_itself}")
    if own and re.fullmatch(r"[\w.]+:[\w.]+", value):
        return
    if name == "wrapper" and "*" in value:
        raise UsageError(f"wrapper {value!r} asks for several ranks, and a test has one process; put it into a matrix")
    if name == "backend" and value in NOT_ALONE:
        raise UsageError(f"backend {value!r} needs arguments that only torch gives it; name another")
    known: Iterable[str] = {"mode": MODES, "dynamic": DYNAMIC, "backend": BACKENDS, "wrapper": WRAPPERS}[name]
    # Asked last, for it looks at every installed package.
    if value not in known and not (name == "backend" and value in installed()):
        raise UsageError(f"unknown {name} {value!r}; {nearest(value, known)}{or_own}")


def _takes_modes(backend: object) -> bool:
    return isinstance(backend, str) and backend in BACKENDS and BACKENDS[backend].modes


def _name_of(value: Any) -> str:
    """A value as one reads it: of a function its name, of functools.partial that of its function."""
    if isinstance(value, partial):
        return _name_of(value.func)
    if isinstance(value, str):
        return value
    name: str = getattr(value, "__name__", type(value).__name__)
    # Of a lambda: `<lambda>`.
    return name.strip("<>")


def _left_out_text(name: str, value: Any, values: Mapping[str, list[Any]]) -> str:
    if name == "backend":
        return f"backend {_name_of(value)!r} takes no modes, so no combination is left for it; add the mode 'default'"
    taking = ", ".join(record.name for record in BACKENDS.values() if record.modes)
    given = ", ".join(repr(_name_of(backend)) for backend in values["backend"])
    return (f"mode {value!r} is for backends that take modes ({taking}), and here there is only {given}; "
            "leave the mode out, or add one of them")
