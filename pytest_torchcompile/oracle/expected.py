"""Reference: the expected values of a run with the size of their noise."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from pytest_torchcompile.oracle.estimate import Estimate

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.recording import Recording

__all__ = ["WIDER", "Reference"]

WIDER: Final = frozenset({"float64", "float32"})
"""Kinds of references that are wider than eager: its own error from them is a measure of rounding."""

_ENDLESS = float("inf")


class Reference:
    """Expected values with their noise, by the names of a :class:`Recording`.

    ``kind`` says how they were made:

    ==================  ====================================================================================
    ``float64``         a float64 run of the program; noise by Monte-Carlo arithmetic at every operator
    ``same-precision``  the model is float64 already: a run of it, noise of one unit in the last place
    ``float32``         half precision where float64 can't be had: the same in float32
    ``float64-inputs``  float64 without a look at the operators; noise by perturbed parameters and inputs
    ``eager-draws``     spread over ranks, or nothing wider runs: eager itself; perturbed parameters and inputs
    ``eager-only``      nothing wider can be had: eager itself, and a scale made from its dtype
    ==================  ====================================================================================
    """

    def __init__(self, recording: Recording) -> None:
        """Take a recording itself for what is expected, without any noise draw: the kind ``eager-only``."""
        self.kind = "eager-only"
        self.why = ""
        """Why it is not ``float64``."""
        self.unit = 0.0
        """Of a scale made from the dtype: the unit roundoff of a narrower dtype in which parts are known to run."""
        self.draws = 0
        """How many noise draws the estimate with the most of them holds."""
        self.estimates: dict[str, Estimate] = {}
        self._recording = recording
        self._expect(recording)

    def _expect(self, recording: Recording, ranges: dict[str, float] | None = None) -> None:
        ends = ranges or {}
        self.estimates = {n: Estimate(value, ends.get(n, _ENDLESS)) for n, _, value in recording.values()}

    def more(self, names: Collection[str] | None = None) -> bool:
        """Draw more noise for some leaves, or for all; whether there was more to draw."""
        return False

    def twin(self) -> Recording:
        """A second eager run from the same state and seed: what differs is not deterministic."""
        return self._recording

    def twins(self) -> list[Recording]:
        """Several of them; of a recording that nobody can repeat just itself."""
        return [self.twin()]

    def repeats(self, name: str) -> bool:
        """Whether a second float64 run gives this leaf again, up to rounding: then only rounding wavers."""
        return False

    @property
    def nbytes(self) -> int:
        """Memory of the estimates; it does not grow with the number of draws."""
        return sum(estimate.nbytes for estimate in self.estimates.values())
