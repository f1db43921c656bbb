"""What a call means where its name alone does not tell."""

from __future__ import annotations

import ast

import pytest

from pytest_torchcompile.reuse.definitions import read_module
from pytest_torchcompile.reuse.syntax import WAYS_THROUGH_LINKS, way_through_links


@pytest.mark.parametrize(("code", "way"), [
    ("os.path.realpath('weights/latest.pt')", "realpath()"),
    ("realpath(path)", "realpath()"),
    ("Path('weights/latest.pt').resolve()", "resolve()"),
    ("path.resolve(strict=True)", "resolve()"),
    ("Path(__file__).resolve().parent", ""),
    ("os.path.realpath(os.path.dirname(__file__))", ""),
    ("OmegaConf.resolve(settings)", ""),
    ("path.resolve", ""),
    ("resolved()", ""),
])
def test_ways_through_links(code, way):
    """What is opened then has the name that the link had led to, so a link that is set anew would not be seen."""
    found = {way_through_links(node) for node in ast.walk(ast.parse(code))}
    assert found <= {"", *WAYS_THROUGH_LINKS}
    assert (found - {""} or {""}) == {way}


def test_a_definition_knows_its_ways(tmp_path):
    """They are among its names."""
    file = tmp_path / "models.py"
    file.write_text("def net(path):\n    return load(path.resolve())\n")
    (net,) = read_module(file).named["net"]
    assert "resolve()" in net.identifiers
