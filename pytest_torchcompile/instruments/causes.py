"""Why a guard failed, as one of the classes that checks and hints speak of."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["CAUSES", "classify"]

CAUSES: Final = (
    "shape", "stride", "dtype", "device", "requires_grad", "value", "type", "attribute", "dict", "length",
    "none", "grad_mode", "autocast", "training_mode", "global_state", "closure", "symbolic", "backward",
    "other",
)  # fmt: skip

_TABLE: Final = (
    (r"size mismatch at index", "shape"),
    (r"rank mismatch", "shape"),
    (r"stride mismatch at index", "stride"),
    (r"dtype mismatch", "dtype"),
    (r"device index mismatch", "device"),
    (r"requires_grad mismatch|requires_grad=", "requires_grad"),
    (r"GLOBAL_STATE changed: grad_mode|grad_mode", "grad_mode"),
    (r"autocast", "autocast"),
    (r"GLOBAL_STATE changed", "global_state"),
    (r"\.training\b", "training_mode"),
    (r"\.size\(\)\[|\.stride\(\)\[|Eq\(|Ne\(|<=|>=", "symbolic"),
    (r"\bis None\b|is not None", "none"),
    (r"\blen\(", "length"),
    (r"___check_type_id|expected type of", "type"),
    (r"hasattr", "attribute"),
    (r"__closure__|cell_contents", "closure"),
    (r"==", "value"),
)
_PATTERNS: Final = tuple((re.compile(p), cause) for p, cause in _TABLE)


def classify(reason: str) -> str:
    """Class of a failed guard's text, one of :data:`CAUSES`; a text that we do not know is ``other``."""
    return next((cause for pattern, cause in _PATTERNS if pattern.search(reason)), "other")
