"""Models: what a matrix says of the modules under test, as plain data; nothing is imported from here."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import yaml

from pytest_torchcompile.dims import Dim, bindings, mistakes
from pytest_torchcompile.errors import UsageError
from pytest_torchcompile.targets import Targets
from pytest_torchcompile.yamlnodes import kind
from pytest_torchcompile.yamlreader import Reader

__all__ = ["DIM_KEYS", "MODEL_KEYS", "ModelEntry", "read_models"]

MODEL_KEYS: Final = {
    "factory": "module:attribute, called with the cell's user axes as keywords; returns a torch.nn.Module",
    "inputs": "module:attribute, called with the dims as keywords; returns the arguments of one call",
    "loss": "module:attribute, called with output and batch; default: weighted mean of y^2 + y over every float output",
    "dims": "the named sizes that inputs are made for",
}
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` takes, also after a way through JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelEntry:
        """Make an entry from what :meth:`to_dict` returned."""
        dims = {name: Dim(**_tuples(dim)) for name, dim in data["dims"].items()}
        return cls(**{f.name: data[f.name] for f in fields(cls)} | {"dims": dims})


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


def read_models(reader: Reader, node: yaml.Node, targets: Targets) -> dict[str, ModelEntry]:
    """Read the section ``models``; entries with mistakes are left out."""
    before = len(reader.problems)
    models = {name: entry for name, key, value in reader.entries(node, "models")
              if (entry := _model(reader, name, key, value, targets)) is not None}
    if not models and len(reader.problems) == before:
        reader.wrong(node, "models: there is none; expected at least one model with factory and inputs")
    return models


def _model(reader: Reader, name: str, key: yaml.Node, node: yaml.Node, targets: Targets) -> ModelEntry | None:
    before = len(reader.problems)
    if not re.fullmatch(MODEL_NAME, name):
        reader.wrong(key, f"{name!r} cannot name a model; expected letters, digits and _ . + -")
    what = f"model {name!r}"
    found = reader.fields(node, what, MODEL_KEYS, REQUIRED)
    code = {}
    for each in ("factory", "inputs", "loss"):
        if each in found and (target := reader.text(found[each], f"{each} of {what}")) is not None:
            code[each] = target
            if mistake := targets.mistake(target):
                reader.wrong(found[each], f"{each} of {what}: {mistake}")
    dims = _dims(reader, found["dims"], what) if "dims" in found else {}
    if len(reader.problems) > before:
        return None
    where = f"{reader.where(key)}:{key.start_mark.column + 1}"
    return ModelEntry(name, code["factory"], code["inputs"], code.get("loss"), dims, where)


def _dims(reader: Reader, node: yaml.Node, what: str) -> dict[str, Dim]:
    """Read the dims of one model, and try whether every batch has its sizes."""
    before = len(reader.problems)
    dims: dict[str, Dim] = {}
    nodes = {}
    for name, key, value in reader.entries(node, f"dims of {what}"):
        if not name.isidentifier() or keyword.iskeyword(name):
            reader.wrong(key, f"{name!r} cannot name a dim, a keyword for inputs; expected a Python name")
        elif (dim := _dim(reader, value, f"dim {name!r}")) is not None:
            dims[name], nodes[name] = dim, value
    if len(reader.problems) == before:
        for name, text in mistakes(dims):
            reader.wrong(nodes[name], f"dim {name!r}: {text}")
    if len(reader.problems) == before:
        try:
            bindings(dims)
        except UsageError as error:
            reader.wrong(node, f"dims of {what}: {error}")
    return dims


def _dim(reader: Reader, node: yaml.Node, what: str) -> Dim | None:
    if isinstance(node, yaml.MappingNode):
        return _free_dim(reader, node, what)
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and not node.style:
        size = reader.integer(node, what)
        return None if size is None else Dim(size=size)
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str"):
        return Dim(expression=node.value)
    expected = f"a size, an expression of other dims such as S + 1, or a mapping of {', '.join(DIM_KEYS)}"
    reader.wrong(node, f"{what}: found {kind(node)}, expected {expected}")
    return None


def _free_dim(reader: Reader, node: yaml.Node, what: str) -> Dim | None:
    before = len(reader.problems)
    found: dict[str, Any] = {}
    for name, value in reader.fields(node, what, DIM_KEYS).items():
        if name in ("choices", "buckets"):
            found[name] = _sizes(reader, value, f"{name} of {what}")
        else:
            least = 1 if name == "multiple_of" else 0
            found[name] = reader.integer(value, f"{name} of {what}", least=least)
    return Dim(**found) if len(reader.problems) == before else None


def _sizes(reader: Reader, node: yaml.Node, what: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for item in reader.items(node, what):
        size = reader.integer(item, what)
        if size in sizes:
            reader.wrong(item, f"{what}: {size} is listed twice")
        elif size is not None:
            sizes.append(size)
    return tuple(sizes)
