"""What is inside of a value: paths as a user writes them."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn

from pytest_torchcompile.state import value_leaves
from pytest_torchcompile.state.value_leaves import (
    attribute_tensors,
    containers_in,
    inner_attributes,
    leaves_of,
    own_attributes,
    tensors_of,
)

pytestmark = pytest.mark.needs_torch

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple = ()


class Cache:
    """An object that nobody has registered, as libraries have."""

    def __init__(self, **held):
        vars(self).update(held)


def ones(*shape):
    return torch.ones(*shape)


def paths(value):
    return [path for path, _ in leaves_of(value)[0]]


# paths and structures


@pytest.mark.parametrize(("value", "expected"), [
    (ones(2), [""]),
    ((ones(2), [3, {"a": ones(1)}]), ["[0]", "[1][0]", "[1][1]['a']"]),
    (Pair(ones(1), None), [".left", ".right"]),
    (OrderedDict(b=ones(1), a=2), ["['b']", "['a']"]),
    (Output(ones(1), (ones(1), 2)), [".logits", ".hidden[0]", ".hidden[1]"]),
    ({"out": Output(ones(1))}, ["['out'].logits"]),
    (Cache(keys=[ones(1)], length=3), [".keys[0]", ".length"]),
    ([Cache(inner=Cache(x=ones(1)))], ["[0].inner.x"]),
], ids=["tensor", "nested", "named tuple", "ordered", "dataclass", "inside", "object", "objects"])
def test_paths(value, expected):
    """As a user would write them after the value's name."""
    assert paths(value) == expected


def test_an_object_without_tensors_is_one_leaf():
    """It is compared as the object that it is; of a dataclass the fields are compared, tensors or not."""
    assert paths([Cache(length=3)]) == ["[0]"]
    assert paths(Output("text")) == [".logits"]


def test_an_object_that_holds_itself_ends():
    """It is a leaf where it comes round."""
    cache = Cache(x=ones(1))
    cache.owner = cache
    assert paths(cache) == [".x", ".owner"]


def test_objects_are_opened_to_a_depth():
    """Six of them; below, an object is a leaf, and so it holds no tensor for those above."""
    def nested(depth):
        return Cache(inner=nested(depth - 1)) if depth else ones(1)

    assert paths(nested(6)) == [".inner" * 6]
    assert paths(nested(7)) == [""]


@pytest.mark.parametrize(("one", "other", "same"), [
    ((1, 2), (3, 4), True), ((1, 2), [1, 2], False), ((1,), (1, 2), False), ({"a": 1}, {"b": 1}, False),
    (Output(ones(1)), Output(ones(3)), True), (Output(ones(1)), (ones(1), ()), False),
    (Cache(x=ones(1)), Cache(y=ones(1)), False), (None, (), False),
])
def test_structures(one, other, same):
    """Equal texts mean equal structures."""
    assert (leaves_of(one)[1] == leaves_of(other)[1]) is same


def test_the_text_of_a_structure_is_python():
    """With a star for each leaf."""
    assert leaves_of({"a": (1, [2, 3]), "b": (4,)})[1] == "{'a': (*, [*, *]), 'b': (*,)}"
    assert leaves_of(Output(ones(1)))[1] == "* with Output(logits=*, hidden=())"


def test_tensors_of():
    """Only tensors, with the same paths."""
    assert [path for path, _ in tensors_of([1, ones(1), {"a": "text", "b": ones(2)}])] == ["[1]", "[2]['b']"]


def error_with_tracer():
    """As Dynamo raises them: it leads to all that was traced. A model that kept one took minutes to look through."""
    error = RuntimeError("did not compile")
    error.tracer = {"graph": ones(1)}
    return error


@pytest.mark.parametrize("value", [
    nn.Linear(1, 1), ones(1), torch, type, torch.float32, threading.Lock(), len, 3, "text", error_with_tracer(),
], ids=["module", "tensor", "package", "class", "dtype", "lock", "function", "number", "text", "exception"])
def test_what_is_never_opened(value):
    """Modules are walked by themselves, and the others belong to the process."""
    assert inner_attributes(value) is None


# attributes of modules


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", ones(2))
        self.cache = ones(3)
        self.table = {"keys": [ones(1), 2]}
        self.again = self.cache
        self.calls = 0
        self.inner.scale = ones(1)


def test_tensors_in_attributes():
    """Neither parameters nor buffers; each once, under the first of its names."""
    assert [name for name, _ in attribute_tensors(Held())] == ["cache", "table['keys'][0]", "inner.scale"]
    assert list(attribute_tensors(None)) == []


class Settings:
    """What all modules of a model hold, as a configuration of a library."""

    def __init__(self):
        self.scale, self.names = torch.ones(2), ["a"]


class Configured(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings, self.kernel, self.sizes = settings, (3, 3), [1, None, "same"]
        self.mixed = (1, torch.ones(1))


def test_what_modules_share_is_taken_apart_once(monkeypatch):
    """And what holds numbers and texts alone not at all: else a look at a model costs more than a step of it."""
    settings, opened = Settings(), []
    model = nn.Sequential(*(Configured(settings) for _ in range(20)))

    def counted(value, find=value_leaves.leaves_of):
        opened.append(value)
        return find(value)

    monkeypatch.setattr(value_leaves, "leaves_of", counted)
    names = [name for name, _ in attribute_tensors(model)]
    assert names == ["0.settings.scale", *(f"{number}.mixed[1]" for number in range(20))]
    assert opened.count(settings) == 1
    assert not [value for value in opened if value == (3, 3) or value == [1, None, "same"]]


def test_own_attributes():
    """What torch has made in each module is no attribute of the user's."""
    assert sorted(own_attributes(Held())) == ["again", "cache", "calls", "table"]
    assert sorted(own_attributes(nn.Linear(1, 2))) == ["in_features", "out_features"]


def test_containers():
    """All that can be refilled, the outer before the inner; a tuple leads to what is in it."""
    inner = [1]
    value = {"a": (inner, deque([2])), "b": {3}}
    assert [name for name, _ in containers_in([("v", value)])] == ["v", "v['b']", "v['a'][0]", "v['a'][1]"]


def test_containers_are_met_once():
    """Also one that holds itself, and what an earlier walk has seen."""
    loop = [1]
    loop.append(loop)
    seen = set()
    assert [name for name, _ in containers_in([("x", loop), ("y", loop)], seen=seen)] == ["x"]
    assert list(containers_in([("z", loop)], seen=seen)) == []


def test_containers_of_objects():
    """The namespace of an object is a container, if the caller opens it."""
    cache = Cache(items=[1])
    assert [name for name, _ in containers_in([("c", cache)])] == ["c", "c.items"]
    assert list(containers_in([("c", cache)], lambda value: False)) == []


def test_the_key_of_another_type_is_told_by_its_type():
    """The text of an object may change from run to run."""
    assert [name for name, _ in containers_in([("v", {Cache(): [1]})])] == ["v", "v[Cache]"]


def test_a_class_registered_without_keys(monkeypatch):
    """As those of diffusers are: its children have indices."""
    value = {"a": [ones(1), ones(1)]}
    real = value_leaves.pytree.tree_flatten_with_path

    def refuses(tree, is_leaf=None):
        if isinstance(tree, list):
            raise ValueError("Did not find a flatten_with_keys_fn for type")
        return real(tree, is_leaf=is_leaf)

    monkeypatch.setattr(value_leaves.pytree, "tree_flatten_with_path", refuses)
    assert paths(value) == ["['a'][0]", "['a'][1]"]
