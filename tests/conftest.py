"""What tests of several rooms share: the choice of those that need no torch, and a project folder for matrices.

``pytest -m "not needs_torch"`` runs the tests that need no torch, also where it is not installed. The others say at
their head ``pytestmark = pytest.mark.needs_torch``, and are not even imported then.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import Matrix, load_matrix

# Hypothesis judges no test by its time: machines are busy.
settings.register_profile("tests", deadline=None,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("tests")

ADDRESS = re.compile(r" at 0x[0-9a-f]{8}")
MARKED = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.needs_torch\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that are marked, as importing them would import torch."""
    if config.option.markexpr != "not needs_torch" or collection_path.suffix != ".py":
        return None
    if MARKED.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse ids that hold an address: each worker of xdist would collect other tests, and none would run."""
    addressed = [item.nodeid for item in items if ADDRESS.search(item.nodeid)]
    if addressed:
        raise pytest.UsageError(f"ids differ from process to process, name them: {', '.join(addressed)}")


ZOO = """
def gpt(width=64, depth=2): ...
def anything(**axes): ...
def batch(**dims): ...
"""
HEAD = "version: 1\nmodels: {gpt: {factory: zoo:gpt, inputs: zoo:batch}}\n"


class Project:
    """A folder with ``zoo.py`` and ``matrix/m.yaml``; texts name the matrix ``m.yaml``."""

    head = HEAD

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "matrix" / "m.yaml"
        self.file.parent.mkdir()
        (root / "zoo.py").write_text(ZOO)

    def load(self, text: str | bytes, **options) -> Matrix:
        """Write the matrix file and load it."""
        self.file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_matrix(self.file, self.root, shown="m.yaml", **options)

    def mistakes(self, text: str | bytes, **options) -> list[str]:
        """The lines of the error that loading raises."""
        with pytest.raises(MatrixError) as caught:
            self.load(text, **options)
        assert caught.value.exit_code == 4
        assert caught.value.__cause__ is None
        return str(caught.value).splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """An empty project."""
    return Project(tmp_path)
