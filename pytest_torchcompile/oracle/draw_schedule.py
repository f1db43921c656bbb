"""Draw schedule: after how many draws leaves are looked at, and how much noise each has."""

from __future__ import annotations

from typing import Final

__all__ = ["DRAWS", "FEW", "LAUNCHED", "noise_of_draw"]

DRAWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 36)
"""Noise draws of a leaf, each time that it is still suspicious: all of them before a suspicion becomes a verdict."""
LAUNCHED: Final = (1, 4, 12, 36)
"""The same where draws are launches of a graph, which take less time than to measure the leaves once more."""
FEW: Final = 4
"""Draws that a leaf gets before it is left undecided. Of the further ones every other is loud: a loud one among few
would let pass by luck what is off by the limit and half of it."""
# Times the usual noise of a loud draw: decisions that noise flips once in a hundred draws flip there in every third.
# A relu of a unit that is off for the whole batch decides about a row of a gradient, and each program has its own few.
_LOUD: Final = 4.0
# What a loud draw counts for. Where noise moves elements evenly, it is then as a draw of twice the noise.
_SHARE_OF_LOUD: Final = 0.5


def noise_of_draw(number: int) -> tuple[float, float]:
    """How many times its usual noise a program has in a draw, counted from 0, and what the draw counts for."""
    if number >= FEW and number % 2:
        return _LOUD, _SHARE_OF_LOUD
    return 1.0, 1.0
