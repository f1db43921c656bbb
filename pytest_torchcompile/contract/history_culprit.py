"""The operator to blame for what a history shows: its graphs are captured with the inputs of the last call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_torchcompile.contract.history_run import Program, run_history
from pytest_torchcompile.culprit.captured_graph import CapturedGraph, GraphCatcher
from pytest_torchcompile.culprit.culprit_search import find_graphs_culprit
from pytest_torchcompile.culprit.graph_trial import signs_of
from pytest_torchcompile.fuzz.drawn_call import Sequence

__all__ = ["history_culprit"]


def history_culprit(program: Program, history: Sequence, without: tuple[str, ...], backend: str,
                    told: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """A :class:`~pytest_torchcompile.culprit.culprit_record.Culprit` as plain data.

    Args:
        program: What the history calls.
        history: It shows something in its last call that ran.
        without: What stands in for submodules, as in ``stand_in.py``.
        backend: The first stage that shows it.
        told: ``kind`` and ``message`` of what it shows.
        seconds: Budget of wall time; one compile may exceed it.

    What surrounds a graph, such as an autocast, is no part of it: then nobody is accused.
    """
    def capture() -> Iterator[CapturedGraph]:
        catcher = GraphCatcher(latest=True)
        # Each size a graph of its own, whose inputs are tensors.
        fixed = replace(program, settings={**program.settings, "dynamic": False})
        run_history(fixed, history, lambda index, side: None, without, catcher)
        # The call that shows it is the last.
        yield from reversed(catcher.graphs)

    raised = re.search(r"compiled raised (\S+)", told["message"])
    signs = signs_of([told["kind"]], raised[1] if raised else "")
    dynamic = program.settings.get("dynamic")
    settings = {} if dynamic is None else {"dynamic": dynamic}
    return find_graphs_culprit(capture, backend, signs, seconds, settings, str(Path.cwd())).to_dict()
