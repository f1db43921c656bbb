"""Is it the same computation? Eager and compiled runs, compared in units of the program's own rounding noise.

``record`` runs a model once and keeps everything observable, ``reference`` runs it in float64 with and
without rounding noise, ``compare`` makes ``Leaf`` records of the differences and ``problem`` judges one.
These names are all that the smoketest takes. They are loaded on first use: ``Leaf``, ``Limits`` and ``problem`` need
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchcompile import on_first_use

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.calls import other_values as other_values
    from pytest_torchcompile.oracle.comparison import compare as compare
    from pytest_torchcompile.oracle.disturbed_runs import DisturbedRuns as DisturbedRuns
    from pytest_torchcompile.oracle.disturbed_runs import disturb as disturb
    from pytest_torchcompile.oracle.eager_errors import given_text as given_text
    from pytest_torchcompile.oracle.eager_errors import whose_code as whose_code
    from pytest_torchcompile.oracle.expected import Reference as Reference
    from pytest_torchcompile.oracle.held import Held as Held
    from pytest_torchcompile.oracle.held import HeldName as HeldName
    from pytest_torchcompile.oracle.held import overwritten_outputs as overwritten_outputs
    from pytest_torchcompile.oracle.leaf_limits import Leaf as Leaf
    from pytest_torchcompile.oracle.leaf_limits import Limits as Limits
    from pytest_torchcompile.oracle.leaf_limits import note as note
    from pytest_torchcompile.oracle.leaf_limits import problem as problem
    from pytest_torchcompile.oracle.mean_comparison import Means as Means
    from pytest_torchcompile.oracle.mean_comparison import compare_means as compare_means
    from pytest_torchcompile.oracle.operator_rounding import program_unit as program_unit
    from pytest_torchcompile.oracle.properties import has_drawn as has_drawn
    from pytest_torchcompile.oracle.recorder import record as record
    from pytest_torchcompile.oracle.recording import Fault as Fault
    from pytest_torchcompile.oracle.recording import Item as Item
    from pytest_torchcompile.oracle.recording import Recording as Recording
    from pytest_torchcompile.oracle.reference_runs import reference as reference
    from pytest_torchcompile.oracle.tape import Tape as Tape
    from pytest_torchcompile.oracle.training import default_loss as default_loss

_EXPORTS = {
    "DisturbedRuns": "disturbed_runs",
    "Fault": "recording",
    "Held": "held",
    "HeldName": "held",
    "Item": "recording",
    "Leaf": "leaf_limits",
    "Limits": "leaf_limits",
    "Means": "mean_comparison",
    "Recording": "recording",
    "Reference": "expected",
    "Tape": "tape",
    "compare": "comparison",
    "compare_means": "mean_comparison",
    "default_loss": "training",
    "disturb": "disturbed_runs",
    "given_text": "eager_errors",
    "has_drawn": "properties",
    "note": "leaf_limits",
    "other_values": "calls",
    "overwritten_outputs": "held",
    "problem": "leaf_limits",
    "program_unit": "operator_rounding",
    "record": "recorder",
    "reference": "reference_runs",
    "whose_code": "eager_errors",
}
__all__ = [
    "DisturbedRuns",
    "Fault",
    "Held",
    "HeldName",
    "Item",
    "Leaf",
    "Limits",
    "Means",
    "Recording",
    "Reference",
    "Tape",
    "compare",
    "compare_means",
    "default_loss",
    "disturb",
    "given_text",
    "has_drawn",
    "note",
    "other_values",
    "overwritten_outputs",
    "problem",
    "program_unit",
    "record",
    "reference",
    "whose_code",
]
__getattr__, __dir__ = on_first_use(__name__, globals(), _EXPORTS)
