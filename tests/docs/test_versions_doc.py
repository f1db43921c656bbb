"""docs/versions.md has a row for every torch that tox has an environment for."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/versions.md").read_text(encoding="utf-8")


def environment():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    (name,) = (name for name in tox.sections() if name.startswith("testenv:torch{"))
    return name, tox[name]


def test_a_row_for_every_version():
    """The same versions, in the same builds, in tox.ini and in the table."""
    name, settings = environment()
    versions = re.search(r"\{(.*)\}", name)[1].split(",")
    pinned = dict(re.findall(r"^torch([\d.]+): torch===(\S+)$", settings["deps"], re.MULTILINE))
    assert list(pinned) == versions
    assert all(build.startswith(f"{version}.") for version, build in pinned.items())
    rows = re.findall(r"^\| (2\.\d+\.\d+)(?:\+cu\d+)? \|(.*)\|$", DOC, re.MULTILINE)
    assert {build for build, _ in rows} == set(pinned.values())
    columns = {row.count("|") for _, row in rows}
    assert len(columns) == 1


def test_the_doc_names_what_is_run():
    """Each file that an environment runs stands in the text, or is one of a group that does."""
    _, settings = environment()
    files = re.findall(r"tests/\S+\.py", settings["commands"])
    assert files
    assert all((ROOT / file).is_file() for file in files)
    for part in ("matrix/smoke.yaml", "pytest-torchcompile gates", "test_readme_example.py", "test_graph_breaks.py"):
        assert part in DOC


def is_taken_for_a_python(environment_name):
    """Whether tox (4.67) reads a part of the name as the version of a Python, and looks for that one."""
    return any(re.fullmatch(r"[\d.]+", part) for part in environment_name.split("-"))


def test_tox_takes_no_name_for_a_python():
    """Nobody has a Python 2.15, so no such environment could be made."""
    name, _ = environment()
    before, versions = re.fullmatch(r"testenv:(\w+)\{(.*)\}", name).groups()
    assert not any(is_taken_for_a_python(before + version) for version in versions.split(","))
    assert is_taken_for_a_python("torch-2.15")
