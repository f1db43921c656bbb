"""Targets: module:attribute, looked up in source files."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from pytest_torchcompile.plan.targets import Targets

MODULE = '''
import os.path, json as j
from math import sqrt as root, pi
try:
    from fast import gpt as maybe
except ImportError:
    def maybe(width): ...
if True:
    def inside(): ...
for looped in (1,): ...
with open("x") as opened: ...
first, *rest = 1, 2
(walrus := 3)
annotated: int = 3
declared: int
SETTINGS = {"a": 1}
NAME = f"x{1}"
NOTHING = None
later = None
class Model:
    def __init__(self, width, *, depth=1): ...
    @classmethod
    def small(cls): ...
class Bare(Model): ...
class Meta(Model, metaclass=type):
    def __init__(self, width): ...
def gpt(width, /, depth, *args, heads=1): ...
def any_(**axes): ...
@root
def decorated(width): ...
async def slow(): ...
def hidden():
    local = 1
    global later, made
    made = 1
match j:
    case [captured]: ...
'''


@pytest.fixture
def targets(tmp_path):
    """A project with modules of many kinds."""
    (tmp_path / "zoo.py").write_text(MODULE)
    (tmp_path / "open_.py").write_text("from zoo import *\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "injected.py").write_text("globals()['x'] = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\ncaf\xe9 = print\n")
    (tmp_path / "binary.so").write_bytes(b"")
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("def build(): ...\n")
    (tmp_path / "pkg" / "sub" / "deep.py").write_text("def build(): ...\n")
    (tmp_path / "space" / "inner").mkdir(parents=True)
    (tmp_path / "space" / "inner" / "m.py").write_text("def build(): ...\n")
    return Targets(tmp_path)


@pytest.mark.parametrize("name", [
    "os", "j", "root", "pi", "maybe", "inside", "looped", "opened", "first", "rest", "walrus", "later",
    "Model", "Model.small", "gpt", "decorated", "slow", "made", "captured",
])
def test_names_that_a_module_binds(targets, name):
    """Whatever import, def, class, assignment or block binds a name at the top level."""
    assert targets.mistake(f"zoo:{name}") is None


@pytest.mark.parametrize("name", ["local", "declared_not", "json", "path"])
def test_names_that_it_does_not(targets, name):
    """Names inside functions, and what an alias replaces, are not there."""
    assert targets.mistake(f"zoo:{name}").startswith(
        f"'zoo:{name}' cannot be imported: zoo has no attribute {name!r}; "
    )


@pytest.mark.parametrize(("name", "what"), [("SETTINGS", "a dict"), ("NAME", "a text"), ("NOTHING", "None")])
def test_plain_values_are_not_callable(targets, name, what):
    """A name that is only ever a plain value is no factory."""
    assert targets.mistake(f"zoo:{name}") == f"'zoo:{name}' is not callable, it is {what}"


@pytest.mark.parametrize("target", [
    "open_:anything", "lazy:anything", "injected:anything", "binary:f", "latin:café", "pkg:build",
    "pkg.sub.deep:build", "space.inner.m:build", "space:f", "sys:exit", "json:dumps", "os.path:join",
    "_frozen_importlib:f", "yaml:safe_load",
])
def test_what_cannot_be_seen_is_believed(targets, target):
    """Star imports, __getattr__, C extensions and built-in modules; and packages of every kind are found."""
    assert targets.mistake(target) is None


@pytest.mark.parametrize(("target", "text"), [
    ("zooo:gpt", "no module 'zooo'; did you mean 'zoo'? Known: "),
    ("pkg.subb:f", "no module 'subb' in pkg; none are known"),
    ("pkg.sub.dep:f", "no module 'dep' in pkg.sub; did you mean 'deep'? Known: deep"),
    ("zoo.gpt:f", "zoo is a module, not a package"),
])
def test_no_such_module(targets, target, text):
    """The part of the dotted name that is not there, and what is near it."""
    assert targets.mistake(target).startswith(f"{target!r} cannot be imported: {text}")


def test_a_module_of_this_package(tmp_path, monkeypatch):
    """Named without the package, in a project that has none of that name."""
    # The folder of these tests has a `zoo` too.
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if not (Path(folder) / "zoo").exists()])
    told = "'zoo:mini_gpt' cannot be imported: no module 'zoo'; this package's own is 'pytest_torchcompile.zoo'"
    assert Targets(tmp_path).mistake("zoo:mini_gpt") == told


def test_broken_source(targets, tmp_path):
    """A syntax error is told with its place."""
    found = targets.mistake("broken:f")
    assert found.startswith(f"'broken:f' cannot be imported: {tmp_path / 'broken.py'}:1: ")


@pytest.mark.parametrize("target", [
    "zoo", "zoo.gpt", ":gpt", "zoo:", "a b:c", "zoo:1", "../zoo:gpt", "zoo:gpt()", "",
])
def test_no_target(targets, target):
    """What is no module:attribute."""
    assert "names no code; expected module:attribute" in targets.mistake(target)


@pytest.mark.parametrize(("name", "keywords"), [
    ("gpt", {"depth", "heads"}), ("Model", {"width", "depth"}), ("any_", None), ("decorated", None),
    ("Bare", None), ("Meta", None), ("maybe", None), ("root", None), ("Model.small", None), ("absent", None),
])
def test_parameters(targets, name, keywords):
    """Known only where the source leaves no doubt."""
    assert targets.parameters(f"zoo:{name}") == keywords


def test_zip_on_the_path(targets, tmp_path, monkeypatch):
    """A module in a zip archive is believed, not missed."""
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        archive.writestr("zipped_models.py", "def f(): ...")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib.zip")])
    assert targets.mistake("zipped_models:f") is None


def test_nothing_is_imported(targets, tmp_path):
    """Looking a target up does not run its module."""
    (tmp_path / "loud.py").write_text("def f(): ...\nraise SystemExit\n")
    assert targets.mistake("loud:f") is None
    assert "loud" not in sys.modules
    assert "zoo" not in sys.modules
