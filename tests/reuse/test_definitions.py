"""Which definitions of a module a cell rests on, and which edits change their hash."""

from __future__ import annotations

import pytest

from pytest_torchcompile.reuse.definitions import use_of_sources

MODELS = '''
"""Two models."""
import torch

SCALE = 2
__all__ = ["net", "other"]


class Net(torch.nn.Module):
    """A net."""

    def forward(self, x):
        return scale(x)  # twice


def scale(x):
    return x * SCALE


class Other(Net):
    def forward(self, x):
        return x.sin()


def net():
    """Make a net."""
    return Net()


def other():
    return Other()
'''


def digest_of(tmp_path, text, *names, **more):
    file = tmp_path / "models.py"
    file.write_text(text)
    return use_of_sources({"models": file}, names, **more).digest


@pytest.mark.parametrize(("before", "after", "changes"), [
    ("# twice", "# two times", False),
    ('"""A net."""', '"""Another\n    text."""', False),
    ('def scale(x):', 'def scale(x):\n    """Another."""', False),
    ("\n\n\n", "\n", False),
    ("x.sin()", "x.cos()", False),
    ("return Other()", "return Other().eval()", False),
    ('"other"]', '"other", "more"]', True),
    ("x * SCALE", "x + SCALE", True),
    ("SCALE = 2", "SCALE = 3", True),
    ("return Net()", "return Net().eval()", True),
    ("import torch\n", "import torch\nprint()\n", True),
], ids=["comment", "docstring", "new docstring", "blank lines", "another model", "another factory", "exported names",
        "a function", "a constant", "its factory", "a statement"])
def test_an_edit_changes_the_hash_of_what_it_is_in(tmp_path, before, after, changes):
    """An edit that changes no code of the model changes no hash."""
    assert before in MODELS
    first = digest_of(tmp_path, MODELS, "net")
    assert (digest_of(tmp_path, MODELS.replace(before, after), "net") != first) == changes


@pytest.mark.parametrize("reached", [
    "def net():\n    return globals()[name]()",
    "def net():\n    return getattr(module, 'Ot' + end)()",
    "def net():\n    return find(getattr)",
    "def net():\n    return registry['Other']()",
    "def net():\n    return __import__('models').Other",
    "import sys\ndef net():\n    return vars(sys.modules['models'])",
    "TABLE = {'a': Other}\ndef net():\n    return TABLE['a']()",
    "class Base:\n    def __init_subclass__(cls): pass\ndef net():\n    return Base",
    "def register(kind): return kind\ndef net():\n    pass\n@register\nclass Wrapped(Other): pass",
    "def cache(kind):\n    KINDS.append(kind)\n@cache\nclass Wrapped: pass\ndef net():\n    return KINDS[0]",
    "from elsewhere import vars as look\ndef net():\n    return look()",
    "def net(kind=Other()):\n    pass",
    "def __getattr__(name):\n    return Other",
], ids=["globals", "computed name", "getattr handed on", "text", "import by name", "modules", "table", "subclasses",
        "decorator", "decorator of a known name", "renamed", "default value", "module's getattr"])
def test_what_is_reached_in_another_way_counts(tmp_path, reached):
    """Where a definition could be come to by its name as a text, or when the module is imported, its edit counts."""
    text = f"{reached}\nclass Other:\n    size = 1\n"
    first = digest_of(tmp_path, text, "net")
    assert digest_of(tmp_path, text.replace("size = 1", "size = 2"), "net") != first


KERNEL = """import triton.language as tl
def kernel(x):
    return tl.load(x)
def net():
    return kernel
class Other:
    size = 1
"""


@pytest.mark.parametrize(("before", "after", "changes"), [
    ("", "", False),
    ("triton.language", "pickle", True),
    ("def kernel(x)", "def kernel(x, tl=None)", True),
    ("    return tl.load(x)", "    tl = x\n    return tl.load(x)", True),
    ("import triton.language as tl\n", "import triton.language as tl\nimport pickle as tl\n", True),
    ("import triton.language as tl\n", "import triton.language as tl\ndef tl(x): pass\n", True),
    ("tl.load(x)", "tl.loads(x)", True),
    ("tl.load(x)", "tl.other.load(x)", True),
], ids=["kernel", "pickle", "parameter", "other name", "imported again", "function", "loads", "of another"])
def test_a_kernel_that_reads_memory_reads_no_file(tmp_path, before, after, changes):
    """``tl.load`` finds no class by its name, where ``tl`` is Triton's language and nothing else in the module."""
    assert before in KERNEL
    text = KERNEL.replace(before, after, 1) if before else KERNEL
    first = digest_of(tmp_path, text, "net")
    assert (digest_of(tmp_path, text.replace("size = 1", "size = 2"), "net") != first) == changes


def test_code_that_reads_its_own_text_has_its_text_in_the_hash(tmp_path):
    """Who reads a docstring may do another thing after an edit of it."""
    text = MODELS.replace("return Net()", "return Net(net.__doc__)")
    first = digest_of(tmp_path, text, "net")
    assert digest_of(tmp_path, text.replace("Make a net.", "Build a net."), "net") != first


def test_definitions_of_other_modules_count_by_their_names(tmp_path):
    """What a model imports from elsewhere in the project counts, what else is there does not."""
    file = tmp_path / "layers.py"
    models = tmp_path / "models.py"
    models.write_text("from layers import Block\n\ndef net():\n    return Block()\n")

    def digest(text):
        file.write_text(text)
        return use_of_sources({"models": models, "layers": file}, ["net"]).digest

    first = digest("class Block:\n    a = 1\n\nclass Unused:\n    b = 1\n")
    assert digest("class Block:\n    a = 1\n\nclass Unused:\n    b = 2\n") == first
    assert digest("class Block:\n    a = 2\n\nclass Unused:\n    b = 1\n") != first


def test_names_that_the_cell_begins_with_are_texts(tmp_path):
    """One may be that of an environment variable, which the factory is handed."""
    file = tmp_path / "models.py"
    file.write_text("def net(variable):\n    return os.environ[variable]\n")
    assert "JOB_SIZE" in use_of_sources({"models": file}, {"net", "JOB_SIZE"}).texts
