"""The seal of a report file: a checksum of its text as it was written, which tells at once that it is whole.

It keeps accidents and careless edits out, not forgers: who can write a report can seal it too. A seal that is there and
wrong says that the file is not as its run wrote it, and the gate does not judge it. A file without a seal is judged by
its evidence and fingerprints, unless a policy says ``sealed: required``.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["SEAL", "is_sealed", "sealed", "unsealed"]

SEAL: Final = "compile_matrix_seal"
"""The key that the seal is, at the top of a report."""

_SEAL: Final = re.compile(rb', "compile_matrix_seal": "([0-9a-f]{64})"\}\s*\Z')
_LENGTH: Final = 110
"""Bytes from the end in which the seal is looked for."""


def sealed(text: str) -> str:
    """The text of a JSON object with one more key at its end: the BLAKE2b (32 bytes) of all that stands before it."""
    body = text.rstrip().removesuffix("}")
    digest = _digest(body.encode("utf-8", errors="backslashreplace"))
    return f'{body}, "compile_matrix_seal": "{digest}"}}\n'


def is_sealed(data: bytes) -> bool:
    """Is the file as :func:`sealed` made it?"""
    found = _SEAL.search(data, max(0, len(data) - _LENGTH))
    return found is not None and _digest(memoryview(data)[:found.start()]) == found[1].decode()


def unsealed(data: bytes) -> tuple[bytes, bool]:
    """The JSON object without its seal, and whether it had one that held. A seal that is wrong stays where it is."""
    found = _SEAL.search(data, max(0, len(data) - _LENGTH))
    if found is None or not is_sealed(data):
        return data.rstrip(), False
    return data[:found.start()] + b"}", True


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()  # half the time of SHA-256 where that has no instructions
