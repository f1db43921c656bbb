"""Axes: which values each axis of a matrix takes, the user's own axes included."""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import yaml

from pytest_torchcompile.backends import BACKENDS, NOT_ALONE, PASS_NAMES, TABLES, installed
from pytest_torchcompile.cell import AXES, DEVICES, DYNAMIC, Scalar, id_word
from pytest_torchcompile.errors import nearest
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.plan.nodes import describe_node
from pytest_torchcompile.plan.reader import MISSING, Missing, Reader
from pytest_torchcompile.plan.targets import Targets
from pytest_torchcompile.wrappers import WRAPPERS
from pytest_torchcompile.wrappers.wrapping import Wrapping

__all__ = ["DEVICE", "Axes", "read_axes", "value_key", "value_keys"]

Axes = dict[str, tuple[Scalar, ...]]
"""The values of every axis: first those that the package knows, then the user's, by name."""

DEVICE: Final = rf"({'|'.join(DEVICES)})(:\d+)?"
_RESERVED: Final = ("user", "id", "axes", "check", "checks")
_TORCH_WORDS: Final = {"true": "dynamic", "false": "static", "null": "auto", "none": "auto"}


def value_key(value: Scalar) -> tuple[str, Scalar]:
    """A key that tells 1, 1.0 and true apart, which are equal in Python."""
    return type(value).__name__, value


def value_keys(values: Iterable[Scalar]) -> set[tuple[str, Scalar]]:
    """The keys of several values."""
    return set(map(value_key, values))


def read_axes(reader: Reader, node: yaml.Node | None, models: Mapping[str, ModelEntry],
              own: Mapping[str, yaml.Node], targets: Targets) -> tuple[Axes, dict[str, Axes]]:
    """Read the section ``axes``, and the key ``axes`` of each model (``own``), which goes before it.

    Returns every value of each axis, and the values of each model. An axis of ours that is not given has its default
    as its only value; an axis of the user's that only some models have is no axis of the others.
    """
    values = _AxisValues(reader, targets)
    usual: Axes = {name: (axis.default,) for name, axis in AXES.items() if name != "model"}
    if node is not None:
        usual |= _read_section(values, node, models)
    axes_of: dict[str, Axes] = {}
    for name, entry in models.items():
        axes: Axes = {"model": (name,)} | usual
        # What a model says of an axis goes before what the matrix says of it.
        if name in own:
            axes |= _read_section(values, own[name], {name: entry})
        axes_of[name] = _in_order(axes)
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
            known = every.get(name, ())
            keys = value_keys(known)
            every[name] = known + tuple(value for value in values if value_key(value) not in keys)
    return _in_order(every)


def _read_section(values: _AxisValues, node: yaml.Node, models: Mapping[str, ModelEntry]) -> Axes:
    """Read a mapping of axes that holds for these models; axes all of whose values are mistakes are left out."""
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
    return {name: axis_values for name, axis_values in given.items() if axis_values}


def _may_be_axis(reader: Reader, name: str, key: yaml.Node) -> bool:
    # A name close to one of ours is more likely misspelt than new.
    close = difflib.get_close_matches(name.lower(), AXES, n=1, cutoff=0.8)
    if close:
        reader.wrong(key, f"unknown axis {name!r}; did you mean {close[0]!r}? Known: {', '.join(AXES)}")
    elif not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED:
        reader.wrong(key, f"{name!r} cannot name an axis: the factory gets it as a keyword; expected a "
                          f"Python name other than {', '.join(_RESERVED)}")
    else:
        return True
    return False


def _check_factories(reader: Reader, name: str, key: yaml.Node, models: Mapping[str, ModelEntry],
                     targets: Targets) -> None:
    """Every factory is called with the axis as a keyword, so each of them has to take it."""
    for model in models.values():
        if name in model.arguments_of("factory"):
            reader.wrong(key, f"axis {name!r} is an argument of the factory of model {model.name!r} too; "
                              "take it out of one of them")
            return
        taken = targets.parameters(model.factory)
        # None: its source cannot be read without running it, so nothing is said.
        if taken is not None and name not in taken:
            reader.wrong(key, f"unknown axis {name!r}, and the factory of model {model.name!r} takes no such "
                              f"keyword; {nearest(name, {*taken, *AXES})}")
            return


@dataclass
class _AxisValues:
    """Reads the values of one axis after the other."""

    reader: Reader
    targets: Targets

    def of_axis(self, axis: str, node: yaml.Node) -> tuple[Scalar, ...]:
        """Return the values of an axis, those without mistakes."""
        places: dict[Scalar, yaml.Node] = {}
        places_of_words: dict[str, yaml.Node] = {}
        for item in self.reader.items(node, f"axis {axis!r}"):
            value = self._read_value(axis, item)
            if isinstance(value, Missing):
                continue
            # A cell cannot tell 1, 1.0 and true apart, its id not 1 and '1', nor 'a b' and 'a_b'.
            word = id_word(value)
            if value in places:
                self._note_alike(axis, item, "equals", places[value])
            elif word in places_of_words:
                self._note_alike(axis, item, "has the same word in cell ids as", places_of_words[word])
            # A value with another's word is kept all the same: a rule that names it is no mistake of its own.
            places.setdefault(value, item)
            places_of_words.setdefault(word, item)
        return tuple(places)

    def _note_alike(self, axis: str, item: yaml.Node, alike: str, first: yaml.Node) -> None:
        line = first.start_mark.line + 1
        self.reader.wrong(item, f"axis {axis!r}: {describe_node(item)} {alike} {describe_node(first)} in line {line}")

    def _read_value(self, axis: str, node: yaml.Node) -> Scalar | Missing:
        # An axis of the matrix' own: any value, which the factory is called with.
        if axis not in AXES:
            return self.reader.scalar(node, f"axis {axis!r}")
        closed = AXES[axis].values
        if closed is not None:
            return self._read_known_value(axis, node, closed)
        text = self.reader.text(node, f"axis {axis!r}")
        if text is None:
            return MISSING
        mistake = None
        if axis == "device":
            mistake = _device_mistake(text)
        elif axis == "wrapper":
            mistake = self._wrapper_mistake(text)
        elif axis == "backend":
            mistake = self._backend_mistake(text)
        elif axis == "passes":
            mistake = self._passes_mistake(text)
        elif axis == "decompositions" and text != "default":
            mistake = self._named_or_target_mistake("decompositions", text, TABLES)
        if mistake:
            self.reader.wrong(node, mistake)
            return MISSING
        return text

    def _read_known_value(self, axis: str, node: yaml.Node, closed: tuple[str, ...]) -> Scalar | Missing:
        if axis == "dynamic" and isinstance(node, yaml.ScalarNode) and node.value.lower() in _TORCH_WORDS:
            word = _TORCH_WORDS[node.value.lower()]
            self.reader.wrong(node, f"axis 'dynamic': found {node.value}, expected auto, static or dynamic; "
                                    f"torch.compile(dynamic={DYNAMIC[word]}) is called {word} here")
            return MISSING
        value = self.reader.name(node, f"a value of axis {axis!r}", closed)
        if value is None:
            return MISSING
        return value

    def _wrapper_mistake(self, text: str) -> str | None:
        try:
            name = Wrapping.read(text).name
        except ValueError as why:
            return str(why)
        # A name that is neither known nor module:attribute has raised above.
        if name in WRAPPERS:
            return None
        return self._target_mistake("wrapper", name)

    def _backend_mistake(self, name: str) -> str | None:
        if ":" in name:
            return self._target_mistake("backend", name)
        if name in NOT_ALONE:
            return f"backend {name!r} is for torch's own use: it needs arguments that no cell gives"
        known = {*BACKENDS, *installed()}
        if name in known:
            return None
        return f"{name!r} is not a backend, nor module:attribute; {nearest(name, known)}"

    def _passes_mistake(self, text: str) -> str | None:
        if text == "none":
            return None
        for word in text.split(","):
            # What stands before the sign is the graph that it is for.
            mistake = self._named_or_target_mistake("passes", word.rpartition("=")[2].strip(), PASS_NAMES)
            if mistake is not None:
                return mistake
        return None

    def _named_or_target_mistake(self, axis: str, name: str, known: tuple[str, ...]) -> str | None:
        if ":" in name:
            return self._target_mistake(axis, name)
        if name in known:
            return None
        return f"{axis}: {name!r} is neither a name nor module:attribute; {nearest(name, known)}"

    def _target_mistake(self, axis: str, target: str) -> str | None:
        mistake = self.targets.mistake(target)
        if mistake is None:
            return None
        return f"{axis}: {mistake}"


def _device_mistake(text: str) -> str | None:
    if re.fullmatch(DEVICE, text):
        return None
    near = nearest(text.partition(":")[0], DEVICES)
    return f"{text!r} is not a device, such as cuda or cuda:1; {near}"
