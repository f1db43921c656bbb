"""Fingerprints and the seal: what was damaged or edited later is not judged as the original.

Fingerprints are over what a report holds as evidence. The seal of a report file is a checksum of its text as it was
written, which tells at once that it is whole. It keeps accidents and careless edits out, not forgers: who can write a
report can seal it too. A seal that is there and wrong says that the file is not as its run wrote it, and the gate does
not judge it. A file without a seal is judged by its fingerprints, unless a policy says ``sealed: required``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["EVIDENCE", "HEAD", "SEAL", "add_seal", "cell_fingerprint", "fingerprint", "head_fingerprint",
           "is_sealed", "remove_seal"]

EVIDENCE: Final = ("axes", "planned", "seconds", "observation")
"""The keys of a cell that verdicts are made from. (What they were found to be can be told again from these.)"""

HEAD: Final = ("run", "environment", "matrix", "shard", "finished")
"""The keys of a block that say what its verdicts hold for."""


def head_fingerprint(block: Mapping[str, Any]) -> str:
    """The fingerprint of what the verdicts hold for: environment, run, matrix, and the runs of kept verdicts."""
    kept = {cell["id"]: cell["kept"] for cell in block["cells"] if "kept" in cell}
    head = {key: block.get(key) for key in HEAD}
    return fingerprint({**head, "kept": kept, "tests_kept": block.get("tests_kept", [])})


def cell_fingerprint(cell: Mapping[str, Any]) -> str:
    """The fingerprint of a cell's evidence."""
    return fingerprint({key: cell[key] for key in EVIDENCE})


def fingerprint(value: Mapping[str, Any]) -> str:
    """SHA-256 of a value as JSON with sorted keys and no spaces, non-ASCII escaped.

    Raises ValueError for NaN and infinities, which JSON does not have.
    """
    return hashlib.sha256(_ENCODER.encode(value).encode("ascii")).hexdigest()


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False)


SEAL: Final = "compile_matrix_seal"
"""The key that the seal is, at the top of a report."""

_SEAL: Final = re.compile(rb', "compile_matrix_seal": "([0-9a-f]{64})"\}\s*\Z')
_LENGTH: Final = 110
"""Bytes from the end in which the seal is looked for."""


def add_seal(text: str) -> str:
    """The text of a JSON object with one more key at its end: the BLAKE2b (32 bytes) of all that stands before it."""
    body = text.rstrip().removesuffix("}")
    digest = _digest_of(body.encode("utf-8", errors="backslashreplace"))
    return f'{body}, "compile_matrix_seal": "{digest}"}}\n'


def is_sealed(data: bytes) -> bool:
    """Is the file as :func:`add_seal` made it?"""
    seal = _SEAL.search(data, max(0, len(data) - _LENGTH))
    # A view, because a report may have hundreds of megabytes.
    return seal is not None and _digest_of(memoryview(data)[:seal.start()]) == seal[1].decode()


def remove_seal(data: bytes) -> tuple[bytes, bool]:
    """The JSON object without its seal, and whether it had one that held. A seal that is wrong stays where it is."""
    seal = _SEAL.search(data, max(0, len(data) - _LENGTH))
    if seal is None or not is_sealed(data):
        return data.rstrip(), False
    return data[:seal.start()] + b"}", True


def _digest_of(data: bytes | memoryview) -> str:
    # BLAKE2b takes half the time of SHA-256 where the processor has no instructions for that.
    return hashlib.blake2b(data, digest_size=32).hexdigest()
