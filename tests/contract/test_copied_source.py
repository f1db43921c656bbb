"""Pieces of files that a script is made of: whole, each once, in an order that Python can run. No torch."""

from __future__ import annotations

import importlib.util
import itertools

import pytest

from pytest_torchcompile.contract.copied_source import Source, copied_source

NUMBERS = itertools.count()


@pytest.fixture
def module_of(tmp_path):
    """A module of a text; its file lies on the disk, for its source is read from there."""
    def make(text):
        name = f"copied_from_{next(NUMBERS)}"
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return make


def run(text):
    """What a script defines. `import torch` is in each of them, and nothing here needs it."""
    names = {}
    exec(compile(text.replace("import torch\n", ""), "script", "exec"), names)
    return names


def test_what_a_function_uses_comes_before_it(module_of):
    """In its file a constant may stand below: a script runs from the top."""
    module = module_of("def make():\n    return Net(WIDTH)\n\n\nclass Base:\n    pass\n\n\nclass Net(Base):\n"
                       "    size = 2 * 3\n\n    def __init__(self, width):\n        self.width = width\n\n\nWIDTH = 5\n"
                       "UNUSED = 1 / 2\n")
    text = copied_source(module.make)
    assert run(text)["make"]().width == 5
    assert "UNUSED" not in text


def test_functions_that_use_each_other_end(module_of):
    module = module_of("def even(n):\n    return n == 0 or odd(n - 1)\n\n\n"
                       "def odd(n):\n    return n > 0 and even(n - 1)\n")
    text = copied_source(module.even)
    assert text.count("def even") == text.count("def odd") == 1
    assert run(text)["even"](4)


def test_a_piece_that_two_functions_use_is_there_once(module_of):
    module = module_of("WIDTH = 5\n\n\ndef one():\n    return WIDTH\n\n\ndef other():\n    return one() + WIDTH\n")
    source = Source()
    assert [source.add(module.one), source.add(module.other)] == ["one", "other"]
    text = "\n".join(source.lines())
    assert text.count("WIDTH = 5") == 1
    assert run(text)["other"]() == 10


@pytest.mark.parametrize("line", [
    "import math", "import math as numbers", "from math import floor", "from math import floor as down",
    "import os.path", "from os import path, sep as between",
])
def test_an_import_is_copied_as_far_as_it_is_used(module_of, line):
    """Under the name that the code uses; its neighbours on the line are left."""
    used = line.rpartition(" ")[2].partition(".")[0]
    module = module_of(f"import json\n{line}\n\n\ndef use():\n    return {used}\n")
    text = copied_source(module.use)
    assert run(text)["use"]() is not None
    assert "json" not in text
    if "," in line:
        assert "import path" not in text


def test_several_names_of_one_assignment_bring_all_of_it(module_of):
    module = module_of("WIDTH, DEPTH = 5, 2\nNAMED: int = 3\n\n\ndef use():\n    return DEPTH + NAMED\n")
    assert run(copied_source(module.use))["use"]() == 5


def test_a_method_brings_its_class_with_the_class_decorator(module_of):
    """A dataclass without its decorator could not be made."""
    module = module_of("from dataclasses import dataclass\n\n\n@dataclass\nclass Net:\n    width: int = 5\n\n"
                       "    def wide(self):\n        return self.width\n")
    assert run(copied_source(module.Net.wide))["Net"](7).wide() == 7


def test_decorators_and_imports_of_ours_are_left(module_of):
    """A script has to run where this package is not installed."""
    module = module_of("from pytest_torchcompile.quantity import count\n\n\ndef ours(f):\n    return f\n\n\n"
                       "@ours\ndef make():\n    return 3\n\n\ndef tell():\n    return count(2, 'cell')\n")
    text = copied_source(module.make)
    assert "ours" not in text
    assert run(text)["make"]() == 3
    assert "pytest_torchcompile" not in copied_source(module.tell)


def test_what_only_annotations_name_is_not_copied(module_of):
    """It may be there for types alone, and be costly to import."""
    module = module_of("from __future__ import annotations\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
                       "    from costly import Thing\n\n\ndef make(width: Thing = 3) -> Thing:\n    return width\n")
    text = copied_source(module.make)
    assert "costly" not in text
    assert run(text)["make"]() == 3


def test_lines_of_a_function_bring_what_they_use_without_the_function(module_of):
    module = module_of("import math\n\nTABLE = {'a': math.pi}\nOTHER = 2\n\n\ndef act(choice):\n    if choice:\n"
                       "        return TABLE[choice]\n    return OTHER\n")
    source = Source()
    source.add_used(module.act, ["return TABLE['a']"])
    text = "\n".join(source.lines())
    assert run(text)["TABLE"]["a"] > 3
    assert "OTHER" not in text
    assert "def act" not in text
