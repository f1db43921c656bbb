"""Axes: which values each axis of a matrix takes, the user's own axes included."""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import yaml

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, installed
from pytest_torchcompile.cell import AXES, DEVICES, DYNAMIC, Scalar, id_word
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.plan.nodes import describe_node
from pytest_torchcompile.plan.reader import MISSING, Missing, Reader
from pytest_torchcompile.plan.targets import Targets
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["DEVICE", "Axes", "read_axes", "value_key"]

Axes = dict[str, tuple[Scalar, ...]]
"""The values of every axis: first those that the package knows, then the user's, by name."""

DEVICE: Final = rf"({'|'.join(DEVICES)})(:\d+)?"
_RESERVED: Final = ("user", "id", "axes", "check", "checks")
_TORCH_WORDS: Final = {"true": "dynamic", "false": "static", "null": "auto", "none": "auto"}


def value_key(value: Scalar) -> tuple[str, Scalar]:
    """A key that tells 1, 1.0 and true apart, which are equal in Python."""
    return type(value).__name__, value


def read_axes(reader: Reader, node: yaml.Node | None, models: Mapping[str, ModelEntry],
              own: Mapping[str, yaml.Node], targets: Targets) -> tuple[Axes, dict[str, Axes]]:
    """Read the section ``axes``, and the key ``axes`` of each model (``own``), which goes before it.

    Returns every value of each axis, and the values of each model. An axis of ours that is not given has its default
    as its only value; an axis of the user's that only some models have is no axis of the others.
    """
    values = _Values(reader, targets)
    given = _given(values, node, models) if node is not None else {}
    usual: Axes = {name: (axis.default,) for name, axis in AXES.items() if name != "model"}
    usual |= {name: found for name, found in given.items() if found}
    axes_of: dict[str, Axes] = {}
    for name, entry in models.items():
        replaced = _given(values, own[name], {name: entry}) if name in own else {}
        merged: Axes = {"model": (name,)} | usual | {axis: found for axis, found in replaced.items() if found}
        axes_of[name] = _in_order(merged)
    return _every_value(usual, axes_of), axes_of


def _in_order(axes: Axes) -> Axes:
    """Ours as the cell has them, then the user's by name."""
    ours = {name: axes[name] for name in AXES}
    return ours | {name: axes[name] for name in sorted(axes) if name not in AXES}


def _every_value(usual: Axes, axes_of: Mapping[str, Axes]) -> Axes:
    """The values of each axis over all models: those of the matrix first, then what a model adds."""
    every: Axes = {"model": tuple(axes_of)} | usual
    for axes in axes_of.values():
        for name, values in axes.items():
            known = {value_key(value) for value in every.get(name, ())}
            every[name] = every.get(name, ()) + tuple(value for value in values if value_key(value) not in known)
    return _in_order(every)


def _given(values: _Values, node: yaml.Node, models: Mapping[str, ModelEntry]) -> Axes:
    """Read a mapping of axes that holds for these models."""
    reader, targets = values.reader, values.targets
    given: Axes = {}
    for name, key, value in reader.entries(node, "axes"):
        if name == "model":
            reader.wrong(key, "axis 'model' is given by the keys of models, and cannot be given again")
        elif name in AXES:
            given[name] = values.of_axis(name, value)
        elif _may_be_axis(reader, name, key):
            given[name] = values.of_axis(name, value)
            _check_factories(reader, name, key, models, targets)
    return given


def _may_be_axis(reader: Reader, name: str, key: yaml.Node) -> bool:
    """A name close to one of ours is more likely misspelt than new."""
    if close := difflib.get_close_matches(name.lower(), AXES, n=1, cutoff=0.8):
        reader.wrong(key, f"unknown axis {name!r}; did you mean {close[0]!r}? Known: {', '.join(AXES)}")
    elif not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED:
        reader.wrong(key, f"{name!r} cannot name an axis: the factory gets it as a keyword; expected a "
                          f"Python name other than {', '.join(_RESERVED)}")
    else:
        return True
    return False


def _check_factories(reader: Reader, name: str, key: yaml.Node, models: Mapping[str, ModelEntry],
                     targets: Targets) -> None:
    for model in models.values():
        if name in model.arguments_of("factory"):
            reader.wrong(key, f"axis {name!r} is an argument of the factory of model {model.name!r} too; "
                              "take it out of one of them")
            return
        taken = targets.parameters(model.factory)
        if taken is not None and name not in taken:
            reader.wrong(key, f"unknown axis {name!r}, and the factory of model {model.name!r} takes no such "
                              f"keyword; {nearest(name, {*taken, *AXES})}")
            return


@dataclass
class _Values:
    """Reads the values of one axis after the other."""

    reader: Reader
    targets: Targets

    def of_axis(self, axis: str, node: yaml.Node) -> tuple[Scalar, ...]:
        """Return the values of an axis, those without mistakes."""
        found: dict[Scalar, yaml.Node] = {}
        words: dict[str, yaml.Node] = {}
        for item in self.reader.items(node, f"axis {axis!r}"):
            value = self._value(axis, item)
            if isinstance(value, Missing):
                continue
            # A cell cannot tell 1, 1.0 and true apart, its id not 1 and '1', nor 'a b' and 'a_b'.
            if first := found.get(value) or words.get(id_word(value)):
                alike = "equals" if value in found else "has the same word in cell ids as"
                line = first.start_mark.line + 1
                self.reader.wrong(item, f"axis {axis!r}: {describe_node(item)} {alike} {describe_node(first)} "
                                        f"in line {line}")
            found.setdefault(value, item)
            words.setdefault(id_word(value), item)
        return tuple(found)

    def _value(self, axis: str, node: yaml.Node) -> Scalar | Missing:
        if axis not in AXES:
            return self.reader.scalar(node, f"axis {axis!r}")
        if (closed := AXES[axis].values) is not None:
            return self._closed(axis, node, closed)
        text = self.reader.text(node, f"axis {axis!r}")
        if text is None:
            return MISSING
        mistake = None
        if axis == "device":
            mistake = self._device(text)
        elif axis in ("backend", "wrapper"):
            mistake = self._code(axis, text)
        if mistake:
            self.reader.wrong(node, mistake)
            return MISSING
        return text

    def _closed(self, axis: str, node: yaml.Node, closed: tuple[str, ...]) -> Scalar | Missing:
        if axis == "dynamic" and isinstance(node, yaml.ScalarNode) and node.value.lower() in _TORCH_WORDS:
            word = _TORCH_WORDS[node.value.lower()]
            self.reader.wrong(node, f"axis 'dynamic': found {node.value}, expected auto, static or dynamic; "
                                    f"torch.compile(dynamic={DYNAMIC[word]}) is called {word} here")
            return MISSING
        found = self.reader.name(node, f"a value of axis {axis!r}", closed)
        return MISSING if found is None else found

    def _device(self, text: str) -> str | None:
        if re.fullmatch(DEVICE, text):
            return None
        near = nearest(text.partition(":")[0], DEVICES)
        return f"{text!r} is not a device, such as cuda or cuda:1; {near}"

    def _code(self, axis: str, text: str) -> str | None:
        """A backend or wrapper: a name that is known, or ``module:attribute``."""
        if axis == "wrapper":
            try:
                text = Wrapping.read(text).name
            except ValueError as why:
                return str(why)
            if text in WRAPPERS:
                return None
        if ":" in text:
            mistake = self.targets.mistake(text)
            return f"{axis}: {mistake}" if mistake else None
        if text in NOT_ALONE:
            return f"backend {text!r} is for torch's own use: it needs arguments that no cell gives"
        if text in (table := {*BACKENDS, *installed()}):
            return None
        return f"{text!r} is not a {axis}, nor module:attribute; {nearest(text, table)}"
