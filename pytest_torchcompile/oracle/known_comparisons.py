"""KnownComparisons: what an earlier run found when it compared, taken where everything is the same bit by bit.

A comparison rests on two recordings, on what the compiler made, and on the float64 run of the model from its first
state and its batch. The key holds all of these. Of the float64 run it holds the operators that the eager run called, in
their order, with the shapes of their inputs and what they drew: another program has another key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_torchcompile.gauges.generated_code import read_generated_code
from pytest_torchcompile.ledger.records import Text
from pytest_torchcompile.oracle.comparison import compare
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.leaf_limits import Leaf
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.state.torch_state import SettingsSnapshot
from pytest_torchcompile.state.value_digest import Undigestible, ValueDigest
from pytest_torchcompile.state.value_leaves import attribute_tensors, leaves_of

__all__ = ["Basis", "KnownComparisons", "compare_known"]


@dataclass(frozen=True)
class Basis:
    """What a comparison rests on, but for the two recordings."""

    call: str
    """Which of the cell's calls it is."""
    texts: Sequence[Text]
    """What the compiler has written so far."""
    pristine: torch.nn.Module
    """The model in its first state."""
    tape: Tape
    """Of the eager run."""
    batch: Any
    judged: Mapping[str, Leaf] = field(default_factory=dict)
    """As for ``compare``."""
    without: frozenset[str] = frozenset()
    """As for ``compare``; the recordings and the model decide it."""


def compare_known(known: KnownComparisons | None, eager: Recording, compiled: Recording,
                  expected: Callable[[], Reference], basis: Basis) -> list[Leaf]:
    """Compare two recordings, unless an earlier run has compared the very same; ``known`` None: in any case."""
    if known is None:
        return compare(eager, compiled, expected, judged=basis.judged, without=basis.without)
    return known.compare(eager, compiled, expected, basis)


class KnownComparisons:
    """Those of one trial."""

    def __init__(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """``kept``: for each key of an earlier run ``leaves`` as plain data, and ``expected``, a digest of the float64
        run that they rest on; empty where none was asked for."""
        self._kept = kept
        self._code, self._texts_read = "", -1
        self._start = ""
        self.taken: list[str] = []
        """Keys of comparisons that were not made again."""
        self.made: dict[str, dict[str, Any]] = {}
        """Comparisons that were made, for a later run."""

    def compare(self, eager: Recording, compiled: Recording, expected: Callable[[], Reference],
                basis: Basis) -> list[Leaf]:
        """What comparing two recordings finds, or has found in an earlier run."""
        digest = ValueDigest()
        try:
            self._take_program(digest, basis)
            digest.take([basis.call, basis.tape.draws, basis.tape.operators.hexdigest(), eager, compiled])
            digest.take([list(basis.tape.roundings.items()), basis.tape.decisions.taken])
            pairs, structure = leaves_of(basis.batch)
            digest.take([pairs, structure])
            digest.take([leaf.to_dict() for leaf in basis.judged.values()])
        except Undigestible:
            return compare(eager, compiled, expected, judged=basis.judged, without=basis.without)
        key = digest.hexdigest()
        kept = self._kept.get(key)
        # The float64 run is made where the comparison had asked for it: a model may do something else in float64.
        if kept is not None and (not kept["expected"] or kept["expected"] == _digest_of(expected())):
            self.taken.append(key)
            return [Leaf.from_dict(dict(plain)) for plain in kept["leaves"]]
        asked: list[Reference] = []

        def expected_and_noted() -> Reference:
            asked[:] = [expected()]
            return asked[0]

        leaves = compare(eager, compiled, expected_and_noted, judged=basis.judged, without=basis.without)
        plain = [leaf.to_dict() for leaf in leaves]
        known = _digest_of(asked[0]) if asked else ""
        # What can't be written down exactly is not kept.
        if known is not None and [Leaf.from_dict(dict(each)) for each in plain] == leaves:
            self.made[key] = {"leaves": plain, "expected": known}
        return leaves

    def _take_program(self, digest: ValueDigest, basis: Basis) -> None:
        if len(basis.texts) != self._texts_read:
            code = ValueDigest()
            code.take([graph.to_dict() for graph in read_generated_code(basis.texts).graphs])
            self._code, self._texts_read = code.hexdigest(), len(basis.texts)
        if not self._start:
            start, model = ValueDigest(), basis.pristine
            for tensors in (model.named_parameters(), model.named_buffers(), attribute_tensors(model)):
                start.take(list(tensors))
            start.take(sorted(name for name, module in model.named_modules() if module.training))
            self._start = start.hexdigest()
        digest.take([self._code, self._start, SettingsSnapshot().plain_values()])


def _digest_of(reference: Reference) -> str | None:
    """Of the expected values, without noise, which follows from them; None where they can't be told."""
    digest = ValueDigest()
    try:
        digest.take([reference.kind, {name: estimate.value for name, estimate in reference.estimates.items()}])
    except Undigestible:
        return None
    return digest.hexdigest()
