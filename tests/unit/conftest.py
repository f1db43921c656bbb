"""A project folder for matrices: write a file, load it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchcompile.errors import MatrixError
from pytest_torchcompile.plan.matrix import Matrix, load_matrix

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
