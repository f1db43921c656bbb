"""Torch's private names: each is looked up here, so that one that is missing is told in one sentence."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from pytest_torchcompile.errors import InstrumentError

__all__ = ["private_name"]


def private_name(module: str, path: str, purpose: str, consequence: str) -> Any:
    """What torch calls ``module.path``; ``path`` may lead through a class.

    :param purpose: what torch uses it for; ends "which ...".
    :param consequence: what can't be done without it.
    :raises InstrumentError: this torch lacks it.
    """
    try:
        found = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise InstrumentError(f"torch {torch.__version__} has no {module}.{path}, which {purpose}; {consequence} with "
                              "it; please report it with this version") from None
    return found
