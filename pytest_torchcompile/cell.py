"""Cell: one point of the matrix. One field is one axis."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Final, TypeAlias

__all__ = ["AXES", "CAPTURES", "COMPILERS", "DEFAULTS", "DEVICES", "DYNAMIC", "MODES", "SHOWN", "TOOLKIT", "Axis",
           "Cell", "Scalar", "file_word", "id_word"]

Scalar: TypeAlias = "str | int | float | bool | None"

MODES: Final = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DYNAMIC: Final[dict[str, bool | None]] = {"auto": None, "static": False, "dynamic": True}
"""The values of the axis ``dynamic`` and what each passes to ``torch.compile(dynamic=...)``."""
CAPTURES: Final = ("joint", "forward_backward", "step")
COMPILERS: Final = ("inductor", "regional_inductor", "eager", "none")
"""What the backend ``toolkit`` gives its passes, and what it hands the graphs to after them."""
TOOLKIT: Final = ("capture", "passes", "compiler", "decompositions")
"""The axes that only the backend ``toolkit`` has a use for."""
DEVICES: Final = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "npu")
"""The device types that torch.compile makes code for; each may carry an index, as in ``cuda:1``."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What is known about one axis: its closed list of values (none: open), and its default."""

    name: str
    help: str
    values: tuple[str, ...] | None
    default: str


def _axis_field(help: str, default: str, values: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "values": values, "default": default})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the matrix. Every field but ``user`` is an axis: add a field to add an axis.

    Values are plain strings, so that a cell can be named, printed and sent to another process.
    ``user`` holds the axes that the package does not know, sorted by name; they are handed to
    the model's factory as keyword arguments.
    """

    model: str = field(metadata={"help": "The model under test: a key of `models`", "values": None, "default": ""})
    backend: str = _axis_field("What torch.compile hands the graphs to", "inductor")
    mode: str = _axis_field("torch.compile(mode=...)", "default", MODES)
    dynamic: str = _axis_field("torch.compile(dynamic=...): auto = None, static = False, dynamic = True", "auto",
                               tuple(DYNAMIC))
    wrapper: str = _axis_field("How the model is wrapped or made parallel", "none")
    dtype: str = _axis_field("Floating dtype of parameters and inputs", "float32",
                             ("float32", "bfloat16", "float16", "float64"))
    device: str = _axis_field("Device of parameters and inputs", "cpu")
    phase: str = _axis_field("training: train() with backward; inference: eval() under no_grad", "training",
                             ("training", "inference"))
    capture: str = _axis_field("backend toolkit: the graphs that passes get; default: joint",
                               "default", ("default", *CAPTURES))
    passes: str = _axis_field("backend toolkit: graph passes, names or module:function, with commas between",
                              "none")
    compiler: str = _axis_field("backend toolkit: what runs the graphs after the passes; default: inductor",
                                "default", ("default", *COMPILERS))
    decompositions: str = _axis_field("backend toolkit: inductor, core_aten, none or module:table; default: inductor "
                                      "before Inductor, else none", "default")
    user: tuple[tuple[str, Scalar], ...] = ()

    @property
    def axes(self) -> dict[str, Scalar]:
        """Axis name to value, the user's axes last."""
        return {name: getattr(self, name) for name in AXES} | dict(self.user)

    @property
    def id(self) -> str:
        """``mini_gpt-inductor-default-auto-none``, then each further axis that is not at its default.

        Known axes show their value, the user's show ``name=value``; unique within a matrix.
        """
        words = [id_word(getattr(self, name)) for name in SHOWN]
        for name in HIDDEN:
            value = getattr(self, name)
            if value != DEFAULTS[name]:
                words.append(id_word(value))
        # A value of the user's says little without the name of its axis.
        words += [f"{name}={id_word(value)}" for name, value in self.user]
        return "-".join(words)

    @property
    def torch_dynamic(self) -> bool | None:
        """What ``torch.compile(dynamic=...)`` is called with."""
        return DYNAMIC[self.dynamic]

    @property
    def toolkit(self) -> dict[str, Any]:
        """What the backend ``toolkit`` is made with: what its axes leave open is as for Inductor."""
        compiler, capture = self.compiler, self.capture
        if compiler == "default":
            compiler = "inductor"
        decompositions = self.decompositions
        if decompositions == "default":
            decompositions = "inductor" if compiler == "inductor" else "none"
        if capture == "default":
            capture = "joint"
        return {"passes": self.passes, "capture": capture, "compiler": compiler, "decompositions": decompositions}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes."""
        return {name: getattr(self, name) for name in AXES} | {"user": dict(self.user)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        """Make a cell from what :meth:`to_dict` returned."""
        # What an older version wrote knows fewer axes.
        known = {name: data.get(name, DEFAULTS[name]) for name in AXES}
        return cls(**known, user=tuple(sorted(data.get("user", {}).items())))


# Cached, for every cell of a matrix asks for the same few words. Typed: 1, 1.0 and True are equal, their words not.
@lru_cache(maxsize=4096, typed=True)
def id_word(value: Scalar) -> str:
    """The value as one word of a node id: no colon, slash, bracket or blank."""
    return re.sub(r"[^\w.+-]", "_", str(value))


def file_word(name: str) -> str:
    """The id of a cell, or the name of a model, as the name of a file or a folder.

    >>> file_word("net:Model")
    'net_Model'
    """
    return re.sub(r"[^\w.=+@*-]", "_", name)


SHOWN: Final = ("model", "backend", "mode", "dynamic", "wrapper")
"""The axes that every id shows, in this order."""
AXES: Final[dict[str, Axis]] = {
    f.name: Axis(f.name, f.metadata["help"], f.metadata["values"], str(f.metadata["default"]))
    for f in fields(Cell)
    if f.name != "user"
}
HIDDEN: Final = tuple(name for name in AXES if name not in SHOWN)
DEFAULTS: Final = {name: axis.default for name, axis in AXES.items()}
