"""The fingerprint of an observation: one that was damaged or edited later is not judged as if it were the original."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(observation: dict[str, Any]) -> str:
    """SHA-256 of the observation as JSON with sorted keys and no spaces, non-ASCII escaped.

    Raises ValueError for NaN and infinities, which JSON does not have.
    """
    text = json.dumps(observation, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
