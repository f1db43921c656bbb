"""How the leaves of a training are named."""

from __future__ import annotations

import pytest

from pytest_torchcompile.oracle.leaf import Leaf
from pytest_torchcompile.oracle.training import rename_steps, role_of


@pytest.mark.parametrize(("name", "kind", "expected"), [
    ("output['step 2']['gradient of up.weight']", "value", ("step 2: gradient of up.weight", "gradient")),
    ("output['step 1'][\"gradient of input['x']\"]", "value", ("step 1: gradient of input['x']", "gradient")),
    ("output['step 1'][\"output['gradient of x']\"]", "value", ("step 1: output['gradient of x']", "value")),
    ("output['step 1']['gradient of a'] and output['step 1']['gradient of b']", "alias",
     ("step 1: gradient of a and step 1: gradient of b", "alias")),
    ("up.weight after the call", "value", ("up.weight after 3 steps", "value")),
])
def test_names(name, kind, expected):
    """A step comes first; a leaf of two gradients names both, whatever quotes their names bring."""
    (leaf,) = rename_steps([Leaf(name, role_of(name, kind))], 3)
    assert (leaf.name, leaf.kind) == expected
