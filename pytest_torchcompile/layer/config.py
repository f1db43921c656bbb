"""What the production layer is told: frozen, validated when made. Plain data, no torch."""

from __future__ import annotations

import json
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Final

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, installed
from pytest_torchcompile.cell import DYNAMIC, MODES
from pytest_torchcompile.errors import nearest

__all__ = ["FAIL_POLICIES", "BucketConfig", "CompileConfig"]

FAIL_POLICIES: Final = ("fallback_eager", "raise")
_STEPS: Final = range(1, 4)


@dataclass(frozen=True)
class CompileConfig:
    """How :func:`~pytest_torchcompile.maybe_compile` compiles a model, and what it does when that fails.

    Raises :class:`ValueError`, naming the field, its value and what is allowed.

    >>> CompileConfig(enabled=True, mode="max-autotune").settings()
    {'backend': 'inductor', 'dynamic': None, 'fullgraph': False, 'mode': 'max-autotune'}
    """

    enabled: bool = False
    """Nothing is compiled unless this is set."""
    mode: str = "default"
    """``torch.compile(mode=...)``; handed only to backends that may take modes."""
    dynamic: bool | None = None
    """``torch.compile(dynamic=...)``: None decides by what varies, False never, True at once."""
    backend: str | Callable[..., Any] = "inductor"
    """A name that torch knows, ``module:attribute``, or the backend itself."""
    fullgraph: bool = False
    """A graph break is an error."""
    options: Mapping[str, Any] | None = field(default=None, hash=False)
    """``torch.compile(options=...)``; torch takes it only without a mode."""
    allowlist: tuple[str, ...] = ()
    """What is compiled: glob patterns of qualified names (``encoder.layers.*``) or class names; empty: all of it."""
    blocklist: tuple[str, ...] = ()
    """What inside of it is not: patterns as in ``allowlist``."""
    healthcheck: bool = True
    """Run the smoketest, if there is a sample batch, before the compiled model is handed out."""
    fail_policy: str = "fallback_eager"
    """``fallback_eager``: a failure is logged and the model runs eagerly; ``raise``: it is raised."""
    smoketest_steps: int = 3
    """Training steps of the smoketest, 1 to 3."""
    blocklist_recursive: bool = True
    """False: of a module in ``blocklist`` only its own ``forward`` is not compiled; the modules that it calls are."""

    min_speedup: float | None = None
    """How many times as fast as eager it must be on the sample batch, else it runs eagerly; None: nothing is timed."""

    def __post_init__(self) -> None:
        for name in ("enabled", "fullgraph", "healthcheck", "blocklist_recursive"):
            _refuse_other(name, getattr(self, name), (True, False))
        _refuse_other("mode", self.mode, MODES)
        _refuse_other("dynamic", self.dynamic, (None, True, False))
        _refuse_other("fail_policy", self.fail_policy, FAIL_POLICIES)
        _refuse_other("smoketest_steps", self.smoketest_steps, tuple(_STEPS))
        _check_backend(self.backend)
        _check_min_speedup(self.min_speedup, self.healthcheck)
        # The class is frozen; what was given is put into its own form once, here.
        object.__setattr__(self, "options", _checked_options(self.options, self.mode))
        for name in ("allowlist", "blocklist"):
            object.__setattr__(self, name, _checked_patterns(name, getattr(self, name)))
        both = sorted({*self.allowlist} & {*self.blocklist})
        if both:
            raise ValueError(f"allowlist and blocklist both have {both[0]!r}: it would be compiled and not; "
                             "leave it in one of them")

    def settings(self) -> dict[str, Any]:
        """The keyword arguments of ``torch.compile``: a new dict each time, because torch takes keys out of it.

        Raises :class:`ValueError` for a backend ``module:attribute`` that cannot be looked up.
        """
        backend = self.backend
        settings: dict[str, Any] = {"backend": backend, "dynamic": self.dynamic, "fullgraph": self.fullgraph}
        if isinstance(backend, str) and ":" in backend:
            settings["backend"] = _look_up(backend)
        if self.options:
            settings["options"] = dict(self.options)
        elif self.mode != "default" and _may_take_modes(backend):
            settings["mode"] = self.mode
        return settings

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes; a backend that is a function is named ``module:attribute``.

        Raises :class:`ValueError` if that name does not lead back to it (a lambda, a nested function, an object).
        """
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        if not isinstance(self.backend, str):
            data["backend"] = _name_of(self.backend)
        if self.options is not None:
            data["options"] = dict(self.options)
        data["allowlist"], data["blocklist"] = list(self.allowlist), list(self.blocklist)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileConfig:
        """Make one from keyword arguments, such as a section of a YAML or JSON file.

        Raises :class:`ValueError` for an unknown key, naming the nearest known one.
        """
        return cls(**_known_fields(cls, data))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CompileConfig:
        """Make one from ``TORCHCOMPILE_ENABLED``, ``TORCHCOMPILE_MODE``, ...: the fields in capitals.

        Flags are 1/0, true/false, yes/no, on/off; ``TORCHCOMPILE_DYNAMIC`` is auto, static or dynamic (or none, false,
        true); lists are separated by commas; ``TORCHCOMPILE_OPTIONS`` is a JSON object. An empty variable is none.
        Raises :class:`ValueError` for a value that can't be read, and for an unknown ``TORCHCOMPILE_...`` variable.
        """
        return cls(**_environment_fields(environ, "compile"))


@dataclass(frozen=True)
class BucketConfig:
    """The lengths that batches are padded to, so that a compiled model meets few shapes.

    Raises :class:`ValueError`, naming the field, its value and what is allowed.

    >>> BucketConfig((128, 256)).bucket(130)
    256
    """

    buckets: tuple[int, ...] = (256, 512, 1024, 2048)
    """Lengths in tokens, each larger than the one before."""
    pad_token_id: int = 0
    """What token ids are padded with."""

    def __post_init__(self) -> None:
        given: Any = self.buckets
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise ValueError(f"buckets={given!r}: expected lengths, for example (128, 256)")
        buckets = tuple(given)
        if not buckets:
            raise ValueError(f"buckets={given!r}: expected at least one length, for example (128, 256)")
        for size in buckets:
            if not _is_whole_number(size) or size < 1:
                raise ValueError(f"buckets={buckets!r}: {size!r} is no length; expected whole numbers from 1 on")
        for size, after in pairwise(buckets):
            if after <= size:
                raise ValueError(f"buckets={buckets!r}: {after} comes after {size}; "
                                 "expected each larger than the one before")
        object.__setattr__(self, "buckets", buckets)
        if not _is_whole_number(self.pad_token_id) or self.pad_token_id < 0:
            raise ValueError(f"pad_token_id={self.pad_token_id!r}: expected a token id, a whole number from 0 on")

    def bucket(self, length: int, what: str = "the batch") -> int:
        """The smallest bucket that ``length`` fits into.

        Raises :class:`ValueError` where it fits into none, naming ``what``, the length and the largest bucket.
        """
        for size in self.buckets:
            if length <= size:
                return size
        raise ValueError(f"{what} has length {length}, longer than the largest bucket, {self.buckets[-1]}; "
                         "cut it, or add a bucket")

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return {"buckets": list(self.buckets), "pad_token_id": self.pad_token_id}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BucketConfig:
        """Make one from keyword arguments. Raises :class:`ValueError` for an unknown key, naming the nearest known."""
        return cls(**_known_fields(cls, data))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> BucketConfig:
        """Make one from ``TORCHCOMPILE_BUCKETS`` (lengths separated by commas) and ``TORCHCOMPILE_PAD_TOKEN_ID``.

        Raises :class:`ValueError` as :meth:`CompileConfig.from_env` does.
        """
        return cls(**_environment_fields(environ, "buckets"))


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_other(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    for each in allowed:
        # Of the very type: 1 == True, and is no flag.
        if value is each or (type(value) is type(each) and value == each):
            return
    # A name that is nearly right gets the right one shown.
    if isinstance(value, str) and isinstance(allowed[0], str):
        raise ValueError(f"{name}={value!r}: {nearest(value, allowed)}")
    raise ValueError(f"{name}={value!r}: expected {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")


def _known_fields(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{cls.__name__}: found {type(data).__name__}, expected a mapping of its fields")
    names = [field.name for field in fields(cls)]
    for key in data:
        if key not in names:
            raise ValueError(f"{cls.__name__} has no field {key!r}; {nearest(str(key), names)}")
    return dict(data)


def _check_min_speedup(wanted: Any, healthcheck: bool) -> None:
    if wanted is None:
        return
    is_number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
    if not is_number or not 0 < wanted < math.inf:
        raise ValueError(f"min_speedup={wanted!r}: expected a number above 0, such as 1.1, or None")
    if not healthcheck:
        raise ValueError(f"min_speedup={wanted!r} needs healthcheck=True: wrong numbers that come fast are no gain")


def _check_backend(backend: Any) -> None:
    if callable(backend):
        return
    if not isinstance(backend, str):
        raise ValueError(f"backend={backend!r}: expected a name, module:attribute, or something callable")
    if re.fullmatch(r"[\w.]+:[\w.]+", backend):
        return
    if backend in NOT_ALONE:
        raise ValueError(f"backend={backend!r}: it needs arguments that only torch gives it; name another")
    # Entry points of packages are read only for a name that is not in our table.
    if backend not in BACKENDS and backend not in installed() and backend not in _registered_backends():
        raise ValueError(f"backend={backend!r}: no such backend is registered; {nearest(backend, BACKENDS)}, "
                         "or module:attribute of your own")


def _registered_backends() -> list[str]:
    """What the program has registered by ``torch._dynamo.register_backend``; torch is not loaded for this."""
    if "torch._dynamo" not in sys.modules:
        return []
    torch: Any = sys.modules["torch"]
    return list(torch.compiler.list_backends(exclude_tags=()))


def _may_take_modes(backend: str | Callable[..., Any]) -> bool:
    return not isinstance(backend, str) or backend not in BACKENDS or BACKENDS[backend].modes


def _look_up(backend: str) -> Any:
    try:
        function = pkgutil.resolve_name(backend)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"backend={backend!r} cannot be looked up: {error}") from error
    if not callable(function):
        raise ValueError(f"backend={backend!r} is of type {type(function).__name__}; expected something callable")
    return function


def _name_of(backend: Callable[..., Any]) -> str:
    name = f"{getattr(backend, '__module__', '')}:{getattr(backend, '__qualname__', '')}"
    try:
        named = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        named = None
    # A lambda, a nested function or an object may have a name that leads elsewhere.
    if named is not backend:
        raise ValueError(f"backend={backend!r} has no name as module:attribute that leads back to it; "
                         "put it at the top of a module, or register it with torch._dynamo.register_backend")
    return name


def _checked_options(options: Any, mode: str) -> dict[str, Any] | None:
    if options is None:
        return None
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise ValueError(f"options={options!r}: expected a mapping of option names to values")
    if options and mode != "default":
        raise ValueError(f"mode={mode!r} and options={dict(options)!r}: torch.compile takes one or the other; "
                         "torch._inductor.list_mode_options() shows what a mode stands for")
    return dict(options) or None


def _checked_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, (str, bytes)) or not isinstance(patterns, Iterable):
        raise ValueError(f"{name}={patterns!r}: expected a list of patterns, for example ('encoder.*', 'Attention')")
    checked = tuple(patterns)
    for pattern in checked:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{name}={checked!r}: {pattern!r} is no pattern; expected names such as 'encoder.*'")
    return checked


# TORCHCOMPILE_... environment variables

_PREFIX: Final = "TORCHCOMPILE_"
_FLAGS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_DYNAMIC: Final = {**DYNAMIC, "none": None, "true": True, "false": False}


def _read_flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def _read_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _read_lengths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _read_list(text))


def _read_options(text: str) -> dict[str, Any]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError
    return options


def _read_dynamic(text: str) -> bool | None:
    return _DYNAMIC[text.lower()]


_A_FLAG: Final = (_read_flag, ", ".join(_FLAGS))
_A_LIST: Final = (_read_list, "names separated by commas")
_A_RATIO: Final = (float, "a number")
_A_NUMBER: Final = (int, "a whole number")
_A_WORD: Final = (str, "a word")
_VARIABLES: Final[dict[str, dict[str, tuple[Callable[[str], Any], str]]]] = {
    "compile": {
        "enabled": _A_FLAG, "mode": _A_WORD, "dynamic": (_read_dynamic, ", ".join(_DYNAMIC)), "backend": _A_WORD,
        "fullgraph": _A_FLAG, "options": (_read_options, "a JSON object"), "allowlist": _A_LIST, "blocklist": _A_LIST,
        "healthcheck": _A_FLAG, "fail_policy": _A_WORD, "smoketest_steps": _A_NUMBER,
        "blocklist_recursive": _A_FLAG, "min_speedup": _A_RATIO,
    },
    "buckets": {"buckets": (_read_lengths, "lengths separated by commas"), "pad_token_id": _A_NUMBER},
}
"""Config to field to (reader, what it expects). All configs share one prefix, so each knows the others' names."""


def _environment_fields(environ: Mapping[str, str] | None, config: str) -> dict[str, Any]:
    """The fields of one config that the environment sets; ``None``: the environment of the process.

    Raises :class:`ValueError` for an unknown variable with our prefix and for a value that can't be read.
    """
    if environ is None:
        environ = os.environ
    given = {name: text for name, text in environ.items() if name.startswith(_PREFIX)}
    # All configs share the prefix, so each has to know the others' names.
    known: set[str] = set()
    for variables in _VARIABLES.values():
        known.update(f"{_PREFIX}{field.upper()}" for field in variables)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown environment variable {name}; {nearest(name, known)}")
    values: dict[str, Any] = {}
    for option, (reader, expected) in _VARIABLES[config].items():
        name = f"{_PREFIX}{option.upper()}"
        text = given.get(name, "").strip()
        if not text:
            continue
        try:
            values[option] = reader(text)
        except (KeyError, ValueError):
            raise ValueError(f"{name}={text!r}: expected {expected}") from None
    return values
