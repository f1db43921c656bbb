"""What `module:attribute` names, looked up in a project's own folder; and how a failure there is told. No torch."""

from __future__ import annotations

import sys

import pytest

from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.loading import import_all, kind_of, one_line, resolve

# Names that no other test and no package has: what is imported here is dropped again.
MODULES = ("loading_models", "loading_package", "loading_later")


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [*sys.modules]:
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]


def project(folder, text, name="loading_models.py"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


def test_a_nested_attribute_is_found(tmp_path):
    root = project(tmp_path, "class Nets:\n    @staticmethod\n    def small():\n        return 3\n")
    assert resolve("loading_models:Nets.small", root, "m.yaml:3:5")() == 3


@pytest.mark.parametrize(("reference", "says"), [
    ("loading_models", "'loading_models' names nothing; expected module:attribute"),
    (":make", "':make' names nothing; expected module:attribute"),
    ("loading_models:", "'loading_models:' names nothing; expected module:attribute"),
    ("loading_models:mak", "'loading_models' has no attribute 'mak'; did you mean 'make'? Known: LIMIT, NOTHING, make"),
    ("loading_models:make.deep", "'loading_models' has no attribute 'make.deep'; "),
    ("loading_models:LIMIT", "'loading_models:LIMIT' is an object of type int; expected something callable"),
    ("loading_models:NOTHING", "'loading_models:NOTHING' is None; expected something callable"),
    ("loading_missing:make", "cannot import 'loading_missing': ModuleNotFoundError: No module named 'loading_missing'"),
])
def test_what_names_nothing_callable_is_told_with_its_place(tmp_path, reference, says):
    root = project(tmp_path, "LIMIT = 3\nNOTHING = None\ndef make():\n    return 1\n")
    with pytest.raises(UsageError) as raised:
        resolve(reference, root, "m.yaml:3:5")
    assert str(raised.value).startswith(f"m.yaml:3:5: {says}")


def test_an_instance_of_an_allowed_type_need_not_be_callable(tmp_path):
    root = project(tmp_path, "LIMIT = 3\n")
    assert resolve("loading_models:LIMIT", root, "here", int) == 3


@pytest.mark.parametrize(("text", "says"), [
    ("import sys\nsys.exit(3)\n", "SystemExit: 3 (loading_models.py:2)"),
    ("\nraise ValueError('two\\n  lines')\n", "ValueError: two lines (loading_models.py:2)"),
    ("def f(:\n", "SyntaxError: invalid syntax (loading_models.py:1)"),
    ("import json\n\njson.loads('{')\n", "(loading_models.py:3)"),
])
def test_a_module_that_raises_is_told_with_the_line_of_the_users(tmp_path, text, says):
    """Not with that of a library below it, and a module that exits ends nothing."""
    with pytest.raises(UsageError, match="cannot import 'loading_models': ") as raised:
        resolve("loading_models:make", project(tmp_path, text), "here")
    assert str(raised.value).endswith(says)


def test_what_a_machine_lacks_stays_a_skip(tmp_path):
    """A module may say so when it is imported; that is no mistake of the matrix."""
    root = project(tmp_path, "from pytest_torchcompile.errors import Unavailable\nraise Unavailable('no GPU')\n")
    with pytest.raises(Unavailable, match="no GPU"):
        resolve("loading_models:make", root, "here")


def test_each_root_has_its_own_module_of_a_name(tmp_path):
    """A process serves cells of several matrices, and each folder may have a `models.py`."""
    one = project(tmp_path / "one", "def make():\n    return 'one'\n")
    other = project(tmp_path / "other", "def make():\n    return 'other'\n")
    answers = [resolve("loading_models:make", root, "here")() for root in (one, other, one)]
    assert answers == ["one", "other", "one"]


def test_a_package_of_another_root_goes_with_its_parts(tmp_path):
    """Else a part of the first would be imported beside the second."""
    roots = []
    for name in ("one", "other"):
        root = project(tmp_path / name, "", "loading_package/__init__.py")
        roots.append(project(root, f"def make():\n    return '{name}'\n", "loading_package/nets.py"))
    answers = [resolve("loading_package.nets:make", root, "here")() for root in roots]
    assert answers == ["one", "other"]


def test_a_module_without_a_twin_in_the_new_root_is_kept(tmp_path):
    """It may hold state, such as registered operators, that cannot be made twice."""
    one = project(tmp_path / "one", "def make():\n    return 1\n")
    first = resolve("loading_models:make", one, "here")
    other = project(tmp_path / "other", "from loading_models import make\n", "loading_later.py")
    assert resolve("loading_later:make", other, "here") is first


def test_the_roots_own_module_comes_before_that_of_an_earlier_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(project(tmp_path / "first", "def make():\n    return 'first'\n")))
    root = project(tmp_path / "root", "def make():\n    return 'root'\n")
    assert resolve("loading_models:make", root, "here")() == "root"
    assert sys.path[0] == str(root)


def test_modules_that_cannot_be_imported_end_no_start(tmp_path):
    """They are told later, with their place in the matrix."""
    root = project(tmp_path, "raise ValueError\n")
    project(root, "", "loading_later.py")
    import_all(("loading_models", "loading_missing", "loading_later"), root)
    assert "loading_later" in sys.modules
    assert "loading_models" not in sys.modules


def test_an_error_without_text_or_place_is_its_type():
    assert one_line(ValueError()) == "ValueError"
    assert one_line(KeyError("a\n b")) == r"KeyError: 'a\n b'"


@pytest.mark.parametrize(("value", "kind"), [(None, "None"), (3, "an object of type int")])
def test_what_a_value_is(value, kind):
    assert kind_of(value) == kind
