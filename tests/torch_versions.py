"""What torch does otherwise from version to version, as it was seen in each: data for the tests of the ledger."""

from __future__ import annotations

import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""Its version here, as in ``(2, 13)``."""


def since(version, new, old):
    """``new`` from a version of torch on, ``old`` before it."""
    return new if version <= TORCH else old


GRAPH_BREAKS = {
    (2, 8): {
        "healthy_numpy_shape": ([("", 1)], False, 2, []),
        "explicit": ([("", 2)], False, 2, []),
        "leading": ([("", 1)], False, 1, []),
        "trailing": ([("", 2)], False, 1, []),
        "two_places": ([("", 2), ("", 4)], False, 3, []),
        "printing": ([("", 2)], False, 2, []),
        "branch_on_data": ([("", 1)], False, 2, []),
        "assert_with_message": ([("", 2)], False, 2, []),
        "item": ([("", 1)], False, 2, []),
        "to_int": ([("", 1)], False, 2, []),
        "to_bool": ([("", 1)], False, 2, []),
        "to_list": ([("", 1)], False, 1, []),
        "nonzero": ([("", 1)], False, 1, []),
        "boolean_mask": ([("", 1)], False, 2, []),
        "unique": ([("", 1)], False, 1, []),
        "data_dependent_slice": ([("", 1)], False, 2, []),
        "calls_disabled": ([("", 1)], False, 2, ["disabled"]),
        "inlined_helper": ([("", "breaking_helper")], False, 4, []),
        "helper_called_twice": ([("", "breaking_helper")], False, 7, []),
        "in_a_loop": ([("", 3)], False, 0, ["empty"]),
        "in_try": ([("", -1)], True, 0, ["graph_break"]),
        "in_except": ([("", -1)], True, 0, ["graph_break"]),
        "in_own_context": ([("", -1)], True, 0, ["graph_break"]),
        "in_no_grad": ([("", 3)], False, 2, []),
        "with_lock": ([("", -1)], True, 0, ["graph_break"]),
        "in_a_generator": ([("", 1)], False, 0, ["empty"]),
        "in_a_property": ([("", -1), ("", "Box.value")], False, 0, ["graph_break"]),
        "reads_the_clock": ([("", 1)], False, 1, []),
        "draws_a_number": ([("", 1)], False, 1, []),
        "warns": ([("", 1)], False, 1, []),
        "logs": ([("", 1), ("", 1)], False, 1, []),
        "opens_a_file": ([("", 1), ("", -1)], True, 0, ["graph_break"]),
        "counts_references": ([("", 1)], False, 1, []),
        "hashes_a_tensor": ([("", 1)], False, 1, []),
        "formats_a_tensor": ([("", 2)], False, 1, []),
        "requires_grad_inside": ([("", 1)], False, 2, []),
    },
    (2, 12): {
        "logs": ([("gb0023", 1), ("gb0291", 1)], False, 1, []),
        "hashes_a_tensor": ([("gb0059", 1)], False, 1, []),
    },
    (2, 13): {},
    (2, 14): {},
    (2, 15): {
        "reads_the_clock": ([("gb9193", 1)], False, 1, []),
        "draws_a_number": ([], False, 1, []),
        "hashes_a_tensor": ([("gb0055", 1)], True, 0, ["graph_break"]),
    },
}
"""By version: the functions of test_graph_breaks.py that break otherwise than in torch 2.13. Each has its places as
there (torch 2.8 gives no ids), whether torch gives all of it up, graphs run, and the kinds of its eager frames.
A version that is not here was not measured."""
