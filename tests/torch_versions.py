"""What torch does otherwise from version to version, as it was seen in each: data for the tests of the ledger."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version here, as in ``(2, 13)``."""


def since(version, new, old):
    """``new`` from a version of torch on, ``old`` before it."""
    return new if version <= TORCH else old


_SINCE_2_9 = {
    "healthy_numpy_shape": ([("gb0179", 1)], False, 2, []),
    "branch_on_data": ([("", 1)], False, 2, []),
    "assert_with_message": ([("", 2)], False, 2, []),
    "to_bool": ([("gb0059", 1)], False, 2, []),
    "in_own_context": ([("gb0066", 3)], True, 0, ["graph_break"]),
    "in_a_generator": ([("", 1)], True, 0, ["graph_break"]),
    "logs": ([("gb0023", 1), ("", 1)], False, 1, []),
    "hashes_a_tensor": ([("gb0059", 1)], False, 1, []),
    "formats_a_tensor": ([("gb0156", 2)], False, 1, []),
    "requires_grad_inside": ([("gb0125", 1)], False, 2, []),
}
GRAPH_BREAKS = {
    (2, 8): {
        "healthy_numpy_shape": ([("", 1)], False, 2, []),
        "in_a_generator": ([("", 1)], True, 0, ["graph_break"]),
        "hashes_a_tensor": ([("", 1)], False, 1, []),
        "formats_a_tensor": ([("", 2)], False, 1, []),
    },
    (2, 9): _SINCE_2_9,
    (2, 10): {**_SINCE_2_9, "logs": ([("gb0023", 1), ("gb0291", 1)], False, 1, [])},
    (2, 11): {
        "healthy_numpy_shape": ([("gb0179", 1)], False, 2, []),
        "logs": ([("gb0023", 1), ("gb0291", 1)], False, 1, []),
        "hashes_a_tensor": ([("gb0059", 1)], False, 1, []),
        "formats_a_tensor": ([("gb0156", 2)], False, 1, []),
        "requires_grad_inside": ([("gb0125", 1)], False, 2, []),
    },
    (2, 12): {
        "logs": ([("gb0023", 1), ("gb0291", 1)], False, 1, []),
        "hashes_a_tensor": ([("gb0059", 1)], False, 1, []),
    },
    (2, 13): {},
    (2, 14): {
        "draws_a_number": ([], False, 1, []),
        "hashes_a_tensor": ([("gb0055", 1)], True, 0, ["graph_break"]),
    },
    (2, 15): {
        "reads_the_clock": ([("gb9193", 1)], False, 1, []),
        "draws_a_number": ([], False, 1, []),
        "hashes_a_tensor": ([("gb0055", 1)], True, 0, ["graph_break"]),
    },
}
"""By version: the functions of test_graph_breaks.py that break otherwise than in torch 2.13. Each has its places as
there (torch 2.8 gives no ids at all), whether torch gives all of it up, graphs run, and the kinds of its eager frames.
A version that is not here was not measured."""
