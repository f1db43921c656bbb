"""Covered calls: the share of a trial's operator calls that ran inside compiled graphs, call by call."""

from __future__ import annotations

import traceback

import torch

from pytest_torchcompile.errors import TorchcompileError
from pytest_torchcompile.gauges.coverage import measure_coverage
from pytest_torchcompile.ledger import Ledger
from pytest_torchcompile.oracle.calls import Call, Side
from pytest_torchcompile.oracle.recording import Fault
from pytest_torchcompile.oracle.trial_account import TrialAccount

__all__ = ["cover_calls"]


def cover_calls(trial: TrialAccount, eager: Side, compiled: Side, ledger: Ledger) -> Fault | None:
    """Measure the coverage of each call into ``trial.compiled.coverage``; returns what one of them raised."""
    for call in trial.calls:
        with ledger.during(f"{call.label}, once more"):
            if error := _cover_call(trial, eager, compiled, call):
                return error
    return None


def _cover_call(trial: TrialAccount, eager: Side, compiled: Side, call: Call) -> Fault | None:
    torch.manual_seed(trial.seed + call.index)
    try:
        with torch.set_grad_enabled(trial.train):
            measured = measure_coverage(eager.prepare_forward(call), compiled.prepare_forward(call))
    except TorchcompileError:
        raise
    except Exception as error:
        return Fault(type(error).__name__, str(error), "forward, in a later call", traceback.format_exc())
    trial.compiled.coverage.append({"call": call.label, **measured.to_dict()})
    return None
