"""Fingerprints of what a report holds as evidence: what was damaged or edited later is not judged as the original."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["EVIDENCE", "HEAD", "evidence", "fingerprint", "head_fingerprint"]

EVIDENCE: Final = ("axes", "planned", "seconds", "observation")
"""The keys of a cell that verdicts are made from. (What they were found to be can be told again from these.)"""

HEAD: Final = ("run", "environment", "matrix", "shard", "finished")
"""The keys of a block that say what its verdicts hold for."""


def head_fingerprint(block: Mapping[str, Any]) -> str:
    """The fingerprint of what the verdicts hold for: environment, run, matrix, and the runs of kept verdicts."""
    kept = {cell["id"]: cell["kept"] for cell in block["cells"] if "kept" in cell}
    head = {key: block.get(key) for key in HEAD}
    return fingerprint({**head, "kept": kept, "tests_kept": block.get("tests_kept", [])})


def evidence(cell: Mapping[str, Any]) -> str:
    """The fingerprint of a cell's evidence."""
    return fingerprint({key: cell[key] for key in EVIDENCE})


def fingerprint(value: Mapping[str, Any]) -> str:
    """SHA-256 of a value as JSON with sorted keys and no spaces, non-ASCII escaped.

    Raises ValueError for NaN and infinities, which JSON does not have.
    """
    return hashlib.sha256(_ENCODER.encode(value).encode("ascii")).hexdigest()


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)
