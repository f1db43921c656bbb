"""Graph trial: one graph, run as it is and compiled, judged by the oracle as a whole model is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.culprit.captured_graph import leaf_copies
from pytest_torchcompile.ledger.process_watch import eager_on_purpose
from pytest_torchcompile.oracle import compare, record, reference
from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.state.torch_state import forget_compiled

__all__ = ["NUMBERS", "GraphTrial", "signs_of"]

NUMBERS: Final = "numbers"
"""The sign of wrong values, wherever they are: a gradient of the model may be an output of a part of it."""
_NUMERIC: Final = frozenset({"value", "gradient", "buffer", "mutation"})
_UNPROVEN: Final = frozenset({"vacuous", "nondeterministic"})


def signs_of(kinds: Iterable[str], error: str = "") -> frozenset[str]:
    """What tells one fault from another: numbers, another kind of discrepancy, or the type of what was raised."""
    signs = set()
    for kind in kinds:
        if kind in _NUMERIC:
            signs.add(NUMBERS)
        elif kind not in (*_UNPROVEN, "error"):
            signs.add(kind)
    if error:
        signs.add(f"raises {error}")
    return frozenset(signs)


@dataclass
class GraphTrial:
    """A graph with its inputs. The eager side and the reference are run once, whatever number of backends is asked."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    grad: bool = True
    """Whether there is a backward pass."""
    _eager: Recording | None = field(default=None, init=False)
    _tape: Tape = field(default_factory=Tape, init=False)
    _reference: Reference | None = field(default=None, init=False)

    def signs(self, backend: Any, **settings: Any) -> frozenset[str]:
        """What is wrong with the graph under a backend; empty where it agrees, or where eager does not take it.

        ``settings``: of ``torch.compile`` beside it.
        """
        eager = self._eager_side()
        if eager.error is not None:
            return frozenset()
        forget_compiled()
        compiled = self._record(torch.compile(self.module, backend=backend, **settings))
        if compiled.error is not None:
            return signs_of((), compiled.error.type)
        leaves = [("", leaf) for leaf in compare(eager, compiled, self._expected)]
        return signs_of(each.kind for each in find_discrepancies(leaves))

    def _eager_side(self) -> Recording:
        if self._eager is None:
            with eager_on_purpose():
                self._eager = self._record(self.module, self._tape)
        return self._eager

    def _record(self, call: Any, tape: Tape | None = None) -> Recording:
        return record(call, self.module, self._batch(), train=self.grad, mode=tape)

    def run_once(self, call: Any, mode: Any = None) -> Recording:
        """Run it by ``call``, from its own inputs, in a mode if one is given."""
        return self._record(call, mode)

    def _batch(self) -> Batch:
        return Batch.of((leaf_copies(self.inputs), {}))

    def _expected(self) -> Reference:
        if self._reference is None:
            self._reference = reference(self.module, self._batch(), train=self.grad, tape=self._tape, draw=False)
        return self._reference
