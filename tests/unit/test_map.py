"""The map: the picture of the rooms is of this code, and every file that the map names is there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from unit.rooms import MODULES, PACKAGE, PICTURE, ROOMS, picture

from pytest_torchcompile.checks import CHECKS

ROOT = Path(__file__).parents[2]
MAPS = ("ARCHITECTURE.md", "CONTRIBUTING.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "pytest_torchcompile").glob("*/README.md")))
NAMED = re.compile(r"`([\w/]+(?:\.py|/))`")
"""A file or a folder in code style."""


def unknown_names(text: str, folder: Path) -> list[str]:
    """Files and folders that the text names, and that are neither in the repository, the package nor the folder."""
    places = (ROOT, PACKAGE, folder)
    return [name for name in NAMED.findall(text)
            if "NAME" not in name and not any((place / name).exists() for place in places)]


@pytest.mark.parametrize("name", MAPS)
def test_what_the_map_names_is_there(name):
    """Also after a file has moved."""
    path = ROOT / name
    assert unknown_names(path.read_text(), path.parent) == []


def test_a_file_that_is_gone_is_seen():
    """The twin, which shows that the test above can fail."""
    assert unknown_names("`run/runner.py`, `run/gone.py` and `nowhere/`", ROOT) == ["run/gone.py", "nowhere/"]


def test_the_picture_is_of_this_code():
    """`python tests/unit/rooms.py` draws it again."""
    assert PICTURE.read_text() == picture()


def test_every_room_is_on_the_map():
    """In the table of rooms, and no room that is gone."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## A cell's journey")[0]
    for room in set(ROOMS) - {"ground", "cli"}:
        assert f"`{room}/`" in table
    folders = {module.partition("/")[0] for module in MODULES if "/" in module}
    assert folders == set(ROOMS) - {"ground", "cli"}


def names_used_twice(modules: Iterable[str]) -> list[str]:
    """Names of files that stand in two folders, but for a check's own file, which is called as the check is."""
    folders: dict[str, list[str]] = {}
    for module in modules:
        folder, _, name = module.rpartition("/")
        if not (folder == "checks" and name in CHECKS):
            folders.setdefault(name, []).append(folder)
    # The package and its rooms are listed by their folders, without `__init__`.
    return sorted(name for name, places in folders.items() if len(places) > 1 and name not in ROOMS)


def test_a_file_name_stands_in_one_room():
    """So that who reads it in a message knows the file. Only a check may be called as the gauge that it asks."""
    assert names_used_twice(MODULES) == []


@pytest.mark.parametrize(("modules", "expected"), [
    (["gauges/memory", "checks/memory"], []),
    (["gauges/memory", "report/memory"], ["memory"]),
    (["checks/severity", "report/severity"], ["severity"]),
    (["gate", "gate/finding", "report/finding"], ["finding"]),
])
def test_a_name_that_is_used_twice_is_seen(modules, expected):
    """The twin. A file of `checks/` that is no check's own has no such right."""
    assert names_used_twice(modules) == expected
