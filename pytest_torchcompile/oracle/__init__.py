"""Is it the same computation? Eager and compiled runs, compared in units of the program's own rounding noise.

``record`` runs a model once and keeps everything observable, ``reference`` runs it in float64 with and
without rounding noise, ``compare`` makes ``Leaf`` records of the differences and ``problem`` judges one.
Names are loaded on first use: ``Leaf``, ``Limits`` and ``problem`` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchcompile import on_first_use

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.comparison import compare as compare
    from pytest_torchcompile.oracle.expected import Reference as Reference
    from pytest_torchcompile.oracle.leaf_limits import Leaf as Leaf
    from pytest_torchcompile.oracle.leaf_limits import Limits as Limits
    from pytest_torchcompile.oracle.leaf_limits import note as note
    from pytest_torchcompile.oracle.leaf_limits import problem as problem
    from pytest_torchcompile.oracle.recorder import record as record
    from pytest_torchcompile.oracle.recording import Fault as Fault
    from pytest_torchcompile.oracle.recording import Item as Item
    from pytest_torchcompile.oracle.recording import Recording as Recording
    from pytest_torchcompile.oracle.reference_runs import reference as reference
    from pytest_torchcompile.oracle.tape import Tape as Tape
    from pytest_torchcompile.oracle.training import default_loss as default_loss

_EXPORTS = {
    "Fault": "recording",
    "Item": "recording",
    "Leaf": "leaf_limits",
    "Limits": "leaf_limits",
    "Recording": "recording",
    "Reference": "expected",
    "Tape": "tape",
    "compare": "comparison",
    "default_loss": "training",
    "note": "leaf_limits",
    "problem": "leaf_limits",
    "record": "recorder",
    "reference": "reference_runs",
}
__all__ = [
    "Fault",
    "Item",
    "Leaf",
    "Limits",
    "Recording",
    "Reference",
    "Tape",
    "compare",
    "default_loss",
    "note",
    "problem",
    "record",
    "reference",
]
__getattr__, __dir__ = on_first_use(__name__, globals(), _EXPORTS)
