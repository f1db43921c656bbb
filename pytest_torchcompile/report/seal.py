"""The seal of a report file: a checksum of its text as it was written, which tells at once that it is whole.

It keeps accidents out, not forgers. A file without a seal, or whose text was formatted anew by another program, is read
all the same; each of its verdicts is then held against the evidence beside it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

__all__ = ["is_sealed", "sealed"]

_SEAL: Final = re.compile(rb', "compile_matrix_sha256": "([0-9a-f]{64})"\}\s*\Z')
_LENGTH: Final = 110
"""Bytes from the end in which the seal is looked for."""


def sealed(text: str) -> str:
    """The text of a JSON object with one more key at its end: the SHA-256 of all that stands before it."""
    body = text.rstrip().removesuffix("}")
    digest = hashlib.sha256(body.encode("utf-8", errors="backslashreplace")).hexdigest()
    return f'{body}, "compile_matrix_sha256": "{digest}"}}\n'


def is_sealed(data: bytes) -> bool:
    """Is the file as :func:`sealed` made it?"""
    found = _SEAL.search(data, max(0, len(data) - _LENGTH))
    return found is not None and hashlib.sha256(memoryview(data)[:found.start()]).hexdigest() == found[1].decode()
