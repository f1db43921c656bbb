"""Models: what a matrix says of the modules under test, as plain data; nothing is imported from here."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import yaml

from pytest_torchcompile.cell import Scalar
from pytest_torchcompile.dims import Dim, batch_sizes, dim_mistakes
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.plan.nodes import describe_node
from pytest_torchcompile.plan.reader import Missing, Reader
from pytest_torchcompile.plan.targets import Targets

__all__ = ["CALL", "DIM_KEYS", "MODEL_KEYS", "MODES_OF_MODULES", "ModelEntry", "read_models"]

MODEL_KEYS: Final = {
    "factory": "module:attribute, called with the cell's user axes as keywords; returns a torch.nn.Module. "
               "{call: module:attribute, NAME: VALUE} hands it more keywords",
    "inputs": "module:attribute, called with the dims as keywords; returns the arguments of one call. "
              "{call: module:attribute, NAME: VALUE} hands it more keywords",
    "loss": "module:attribute, called as loss(output, batch) with the batch as `inputs` returned it; returns a tensor "
            "of one element; default: weighted mean of y^2 + y over every float output",
    "dims": "the named sizes that inputs are made for",
    "axes": "axis to the values it takes for this model, instead of those of the key `axes`",
    "mode_of_modules": "phase (default): train() or eval() of the whole model, as the axis phase says; keep: each "
                       "module stays in the mode that the factory left it in",
}
MODES_OF_MODULES: Final = ("phase", "keep")
CALL: Final = "call"
"""The key of a factory or inputs that names the code; all others are its arguments."""
REQUIRED: Final = ("factory", "inputs")
DIM_KEYS: Final = {
    "min": "least size",
    "max": "greatest size",
    "multiple_of": "every size is a multiple of this",
    "choices": "the sizes that occur",
    "buckets": "the sizes that inputs are padded to",
}
MODEL_NAME: Final = r"[A-Za-z_][\w.+-]*"


@dataclass(frozen=True)
class ModelEntry:
    """One entry of ``models``: targets as ``module:attribute``, dims, and where it is written."""

    name: str
    factory: str
    inputs: str
    loss: str | None = None
    dims: dict[str, Dim] = field(default_factory=dict)
    where: str = ""
    """``file:line:column``"""
    arguments: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    """For ``factory`` and ``inputs``, the keywords that the matrix itself hands them."""
    mode_of_modules: str = "phase"
    """``keep``: the cell's phase leaves train() and eval() of the modules alone."""

    def arguments_of(self, role: str) -> dict[str, Scalar]:
        """The keywords that the matrix hands to ``factory`` or ``inputs``."""
        return self.arguments.get(role, {})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes, also after a way through JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelEntry:
        """Make an entry from what :meth:`to_dict` returned."""
        values = {f.name: data[f.name] for f in fields(cls)}
        values["dims"] = {name: _dim_of(dim) for name, dim in data["dims"].items()}
        return cls(**values)


def _dim_of(data: Mapping[str, Any]) -> Dim:
    # JSON has made lists of the tuples.
    sizes = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return Dim(**{**data, **sizes})


def read_models(reader: Reader, node: yaml.Node,
                targets: Targets) -> tuple[dict[str, ModelEntry], dict[str, yaml.Node]]:
    """Read the section ``models``; entries with mistakes are left out.

    Returns the entries, and for each model that has the key ``axes`` what stands there.
    """
    before = len(reader.mistakes)
    models: dict[str, ModelEntry] = {}
    axes: dict[str, yaml.Node] = {}
    for name, key, value in reader.entries(node, "models"):
        before_this = len(reader.mistakes)
        keys = reader.fields(value, f"model {name!r}", MODEL_KEYS, REQUIRED)
        entry = _read_model(reader, name, key, keys, targets)
        # A model with mistakes is left out: what follows from them would only be told as well.
        if entry is not None and len(reader.mistakes) == before_this:
            models[name] = entry
        if "axes" in keys:
            axes[name] = keys["axes"]
    if not models and len(reader.mistakes) == before:
        reader.wrong(node, "models: there is none; expected at least one model with factory and inputs")
    return models, axes


def _read_model(reader: Reader, name: str, key: yaml.Node, keys: Mapping[str, yaml.Node],
                targets: Targets) -> ModelEntry | None:
    before = len(reader.mistakes)
    if not re.fullmatch(MODEL_NAME, name):
        # Not returned at once: all mistakes of a model are told in one go.
        reader.wrong(key, f"{name!r} cannot name a model; expected letters, digits and _ . + -")
    what = f"model {name!r}"
    code: dict[str, str] = {}
    arguments: dict[str, dict[str, Scalar]] = {}
    for role in ("factory", "inputs", "loss"):
        if role in keys:
            code[role], given = _read_code(reader, keys[role], f"{role} of {what}", targets, role != "loss")
            if given:
                arguments[role] = given
    mode = "phase"
    if "mode_of_modules" in keys:
        mode = reader.name(keys["mode_of_modules"], f"a mode_of_modules of {what}", MODES_OF_MODULES) or mode
    dims: dict[str, Dim] = {}
    if "dims" in keys:
        dims = _read_dims(reader, keys["dims"], what)
    for argument in arguments.get("inputs", {}):
        # Both would reach the function under one name, and Python raises far from here.
        if argument in dims:
            reader.wrong(keys["inputs"], f"inputs of {what}: {argument!r} is a dim too; take it out of one of them")
    if len(reader.mistakes) > before or not {*REQUIRED} <= code.keys():
        return None
    where = f"{reader.where(key)}:{key.start_mark.column + 1}"
    return ModelEntry(name, code["factory"], code["inputs"], code.get("loss"), dims, where, arguments, mode)


def _read_code(reader: Reader, node: yaml.Node, what: str, targets: Targets,
               with_arguments: bool) -> tuple[str, dict[str, Scalar]]:
    """Read ``module:attribute``, or a mapping of it and the keywords that it is called with."""
    given = []
    if with_arguments and isinstance(node, yaml.MappingNode):
        called = None
        for entry in reader.entries(node, what):
            if entry[0] == CALL:
                called = entry[2]
            else:
                given.append(entry)
        if called is None:
            hint = f"; {nearest(given[0][0], (CALL,))}" if given else ""
            reader.wrong(node, f"{what}: key {CALL!r} is missing, the code that gets the other keys as keywords{hint}")
            return "", {}
        node = called
    target = reader.text(node, what)
    if target is None:
        return "", {}
    mistake = targets.mistake(target)
    if mistake:
        reader.wrong(node, f"{what}: {mistake}")
        return target, {}
    # None where the source does not tell which keywords it takes: then any may be right.
    taken = targets.parameters(target)
    arguments: dict[str, Scalar] = {}
    for name, key, item in given:
        if not name.isidentifier() or keyword.iskeyword(name):
            reader.wrong(key, f"{name!r} cannot name an argument of {what}; expected a Python name")
        elif taken is not None and name not in taken:
            reader.wrong(key, f"{what}: {target} takes no keyword {name!r}; {nearest(name, taken)}")
        else:
            value = reader.scalar(item, f"argument {name!r} of {what}")
            if not isinstance(value, Missing):
                arguments[name] = value
    return target, arguments


def _read_dims(reader: Reader, node: yaml.Node, what: str) -> dict[str, Dim]:
    """Read the dims of one model, and try whether every batch has its sizes."""
    before = len(reader.mistakes)
    dims: dict[str, Dim] = {}
    nodes = {}
    for name, key, value in reader.entries(node, f"dims of {what}"):
        if not name.isidentifier() or keyword.iskeyword(name):
            reader.wrong(key, f"{name!r} cannot name a dim, a keyword for inputs; expected a Python name")
            continue
        dim = _read_dim(reader, value, f"dim {name!r}")
        if dim is not None:
            dims[name], nodes[name] = dim, value
    if len(reader.mistakes) == before:
        # Only where every dim could be read: an expression may name one that could not.
        for name, text in dim_mistakes(dims):
            reader.wrong(nodes[name], f"dim {name!r}: {text}")
    if len(reader.mistakes) == before:
        try:
            batch_sizes(dims)
        except UsageError as error:
            reader.wrong(node, f"dims of {what}: {error}")
    return dims


def _read_dim(reader: Reader, node: yaml.Node, what: str) -> Dim | None:
    if isinstance(node, yaml.MappingNode):
        return _read_free_dim(reader, node, what)
    # Not in quotes: a quoted number is a text, and so an expression.
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and not node.style:
        size = reader.integer(node, what)
        if size is None:
            return None
        return Dim(size=size)
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str"):
        return Dim(expression=node.value)
    expected = f"a size, an expression of other dims such as S + 1, or a mapping of {', '.join(DIM_KEYS)}"
    reader.wrong(node, f"{what}: found {describe_node(node)}, expected {expected}")
    return None


def _read_free_dim(reader: Reader, node: yaml.Node, what: str) -> Dim | None:
    before = len(reader.mistakes)
    values: dict[str, Any] = {}
    for name, value in reader.fields(node, what, DIM_KEYS).items():
        if name in ("choices", "buckets"):
            values[name] = _read_sizes(reader, value, f"{name} of {what}")
        else:
            least = 1 if name == "multiple_of" else 0
            values[name] = reader.integer(value, f"{name} of {what}", least=least)
    if len(reader.mistakes) > before:
        return None
    return Dim(**values)


def _read_sizes(reader: Reader, node: yaml.Node, what: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for item in reader.items(node, what):
        size = reader.integer(item, what)
        if size in sizes:
            reader.wrong(item, f"{what}: {size} is listed twice")
        elif size is not None:
            sizes.append(size)
    return tuple(sizes)
