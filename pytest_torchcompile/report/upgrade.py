"""Upgrades: a block of an earlier minor version of the schema, brought up to this one, a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["STEPS", "upgraded"]


def upgraded(block: dict[str, Any], minor: int) -> dict[str, Any]:
    """Return the block as the current version has it; one of the current or a later minor is returned as it is.

    Raises ValueError for a block that has keys which its own version did not have.
    """
    for step in STEPS[minor:]:
        block = {**step(block), "schema_version": f"1.{len(STEPS)}"}
    return block


def _from_1_0(block: dict[str, Any]) -> dict[str, Any]:
    """1.1 brought ``run``, what was planned for each cell, and fingerprints; a 1.0 report can't tell them."""
    new = {"planned": None, "evidence_sha256": None}
    cells = [cell for cell in block.get("cells", ()) if isinstance(cell, dict)]
    if "run" in block or any(key in cell for cell in cells for key in new):
        raise ValueError("says that it is of schema 1.0, but has keys of a later one")
    return {**block, "run": None, "cells": [{**cell, **new} for cell in cells]}


def _from_1_1(block: dict[str, Any]) -> dict[str, Any]:
    """1.2 brought the tests that use our fixtures."""
    if "tests" in block or "tests_planned" in block:
        raise ValueError("says that it is of schema 1.1 or older, but has keys of a later one")
    return {**block, "tests_planned": [], "tests": []}


def _from_1_2(block: dict[str, Any]) -> dict[str, Any]:
    """1.3 brought a fingerprint of environment, run and matrix, and verdicts that are kept from an earlier run."""
    cells = [cell for cell in block.get("cells", ()) if isinstance(cell, dict)]
    if "head_sha256" in block or "tests_kept" in block or any("kept" in cell for cell in cells):
        raise ValueError("says that it is of schema 1.2 or older, but has keys of a later one")
    return {**block, "head_sha256": None}


STEPS: Final[tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]] = (_from_1_0, _from_1_1, _from_1_2)
"""Step k takes a block from minor k to minor k + 1."""
