"""What torch does otherwise from version to version, as it was seen in each: data for the tests of the ledger."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version here, as in ``(2, 13)``."""


def since(version, new, old):
    """``new`` from a version of torch on, ``old`` before it."""
    return new if version <= TORCH else old


GRAPH_BREAKS = {
    (2, 13): {},
    (2, 14): {},
    (2, 15): {
        "reads_the_clock": ([("gb9193", 1)], False, 1),
        "draws_a_number": ([], False, 1),
        "hashes_a_tensor": ([("gb0055", 1)], True, 0),
    },
}
"""By version: the functions of test_graph_breaks.py that break otherwise than in torch 2.13. Each has its places as
there, whether torch gives all of it up, and graphs run. A version that is not here was not measured."""
