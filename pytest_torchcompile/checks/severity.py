"""Severity: how bad it is when a check does not hold, and how one says so of a model in a headline.

A check's record has one :class:`Effect`; where the check can fail in several ways, each is told by the words that its
problems hold (:class:`Way`). So what a report holds already says how bad it is, also one of an older version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from pytest_torchcompile.observation import RAISED

# And the effects, one constant each.
__all__ = ["BESIDE_BREAKS", "EMPTY", "NUMBERS_OF_TESTS", "SLOW_GUARDS", "TEST_CHECK", "UNCOVERED", "Effect", "Severity",
           "Way", "without_ranks"]

EMPTY: Final = "nothing to judge"
"""How a check begins that has nothing to say; mostly because another one of the cell failed."""
SLOW_GUARDS: Final = "the guards of"
UNCOVERED: Final = "of the model's operator calls ran inside compiled graphs"
"""How `compiles` says that too little was compiled; where a graph breaks, that comes of it."""
BESIDE_BREAKS: Final = "beside graph breaks that are allowed"
"""How it says that torch told why: a limit allows the break, and torch gave up whole frames because of it."""
TEST_CHECK: Final = "test"
"""Where a cell has the verdicts of checks, a test has one, under this name."""
NUMBERS_OF_TESTS: Final = "equivalence"
"""The check whose name an entry of a policy gives, so that it allows wrong numbers in a test."""

_RANKS: Final = re.compile(r"^(?:every rank|ranks? \d+(?:, \d+)*): ")
"""Which ranks of a cell have a problem (:mod:`pytest_torchcompile.run.verdicts`)."""


def without_ranks(message: str) -> str:
    """A problem's message without the ranks that have it."""
    return _RANKS.sub("", message)


class Severity(IntEnum):
    """How bad it is: the larger the worse. Findings are told in this order, in every place."""

    COSMETIC = 1
    SLOW = 2
    UNSTABLE = 3
    SILENTLY_EAGER = 4
    CRASH = 5
    """Also a hang, no memory left, and everything else that ends without a result."""
    WRONG_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Effect:
    """What becomes of a model whose check does not hold."""

    severity: Severity
    one: str
    """``has graph breaks``: what one says of one model."""
    many: str
    """``have graph breaks``: what one says of several."""

    def of(self, models: int) -> str:
        """What one says of so many models."""
        if models == 1:
            return self.one
        return self.many


@dataclass(frozen=True, slots=True)
class Way:
    """One of several ways in which a check fails."""

    words: str
    """A regular expression for the message of its problems."""
    effect: Effect
    follows: str = ""
    """The check of the same cell that it only follows from, where that one fails too."""

    def matches(self, message: str) -> bool:
        """Is this the way in which the check failed?"""
        return re.search(self.words, message) is not None



# From the worst to the mildest.
WRONG: Final = Effect(Severity.WRONG_NUMBERS, "computes wrong numbers", "compute wrong numbers")
OTHER_MEMORY: Final = Effect(Severity.WRONG_NUMBERS, "shares memory unlike eager", "share memory unlike eager")
OTHER_CHANCES: Final = Effect(Severity.WRONG_NUMBERS, "draws wrong random numbers", "draw wrong random numbers")
CORRUPTED: Final = Effect(Severity.WRONG_NUMBERS, "is corrupted by falling back", "are corrupted by falling back")
CRASHES: Final = Effect(Severity.CRASH, "crashes", "crash")
HANGS: Final = Effect(Severity.CRASH, "runs out of time", "run out of time")
RAISES: Final = Effect(Severity.CRASH, "raises when compiled", "raise when compiled")
UNJUDGED: Final = Effect(Severity.CRASH, "could not be judged", "could not be judged")
EAGER: Final = Effect(Severity.SILENTLY_EAGER, "silently runs eagerly", "silently run eagerly")
UNPROVEN: Final = Effect(Severity.SILENTLY_EAGER, "is unproven", "are unproven")
RECOMPILES: Final = Effect(Severity.UNSTABLE, "recompiles too often", "recompile too often")
DIVERGES: Final = Effect(Severity.UNSTABLE, "compiles otherwise on some ranks", "compile otherwise on some ranks")
OTHER_LAYOUT: Final = Effect(Severity.UNSTABLE, "returns other strides", "return other strides")
ZEROS: Final = Effect(Severity.UNSTABLE, "fills in gradients of zeros", "fill in gradients of zeros")
UNLOGGED: Final = Effect(Severity.UNSTABLE, "falls back otherwise than promised", "fall back otherwise than promised")
LEAKS: Final = Effect(Severity.UNSTABLE, "loses memory with every step", "lose memory with every step")
OTHER_CODE: Final = Effect(Severity.UNSTABLE, "compiles to other code each time", "compile to other code each time")
BREAKS: Final = Effect(Severity.SLOW, "has graph breaks", "have graph breaks")
PARTLY_EAGER: Final = Effect(Severity.SLOW, "runs more eagerly than is allowed", "run more eagerly than is allowed")
NO_REPLAY: Final = Effect(Severity.SLOW, "runs without CUDA graphs", "run without CUDA graphs")
SLOWER: Final = Effect(Severity.SLOW, "is slower compiled", "are slower compiled")
TOO_MUCH: Final = Effect(Severity.SLOW, "goes over a limit", "go over a limit")
# Of a test, which may look at anything.
FAILS: Final = Effect(Severity.CRASH, "fails", "fail")
STALE: Final = Effect(Severity.COSMETIC, "passes unexpectedly", "pass unexpectedly")

STRIDES: Final = Way(r": (?:stride|layout) is [^:]+ in eager, [^:]+ compiled(?: \(.*\))?$", OTHER_LAYOUT)
OF_HISTORIES: Final = (
    Way("^crash: ", CRASHES),
    Way("^hang: ", HANGS),
    Way("^graph_breaks: ", BREAKS),
    Way("^recompiles: ", RECOMPILES),
    Way("^(eager|vacuous): ", EAGER),
    Way("^error: .*the compiled call raised", RAISES),
    Way("^error: .*compiled raised", RAISES),
    Way("^alias: ", OTHER_MEMORY),
    Way("^stride: ", OTHER_LAYOUT),
)
"""Of drawn sequences of calls: their problems begin with a kind."""
# Where our own words stand: names of the user's outputs and parameters are neither at a start nor at an end.
_STARTS: Final = (rf"^(?:{EMPTY}|nothing (?:was|is) (?:compared|proved|proven)|no sequence was run|no step was made|"
                  r"\d+ training steps were compared)")
_ENDS: Final = rf"(?:nothing is proved|(?:proves?|says?) nothing|there is {EMPTY})(?: \([^()]*\))?$"
OF_EVERY_CHECK: Final = (
    Way(f"^{EMPTY}: (?:{RAISED}|no graph|no compiled|no rank has compiled|every output|rank .* has recorded nothing)",
        UNPROVEN, follows="compiles"),
    Way(f"{_STARTS}|{_ENDS}", UNPROVEN),
)
"""What is said where green would mean nothing."""


def _says_false(*reasons: str) -> str:
    """A regular expression for what the smoketest says, with one of these reasons at its start."""
    return f"^the smoketest says False: (?:{'|'.join(reasons)})"


OF_THE_SMOKETEST: Final = (
    Way(r"^\d+ compile\(s\) in the smoketest of a model that was warm", RECOMPILES),
    Way(_says_false("it did not compile and ran eagerly", "a part silently ran eagerly", "nothing was compiled",
                    "after the last step nothing ran compiled"), EAGER),
    Way(_says_false("the model raises", "compiled it raises", "the optimiser raises [^,]+, eagerly too",
                    r"ranks? [\d, and]+ (?:did not end|had to leave) the same call", "not enough memory for the test"),
        RAISES),
    Way(_says_false("what ran compiled could not be told", "the test itself failed",
                    "it has parameters that are not initialised yet", "the loss does not depend on"), UNPROVEN),
    STRIDES,
)
"""By the words after "says False" alone: a reason may begin with the user's own name of an output."""
_ASSERTION: Final = r"^(?:in its \w+: )?AssertionError: "
_NUMBER_KINDS: Final = "value|gradient|buffer|mutation|dtype|shape|alias|requires_grad|structure|rng"
OF_TESTS: Final = (
    Way(r"\bnot equivalent \(wrong numbers\)", WRONG),  # compare() and assert_equivalent()
    Way(rf"{_ASSERTION}\S+: (?:{_NUMBER_KINDS}): ", WRONG),  # assert_calls()
    # torch.testing.assert_close (torch/testing/_comparison.py, torch 2.8 to 2.13), and NumPy's.
    Way(rf"{_ASSERTION}[A-Z][\w -]* are not (?:close|equal)!", WRONG),
    Way(rf"{_ASSERTION}The values for attribute '(?:shape|dtype)' do not match", WRONG),
    Way(rf"{_ASSERTION}(?:Not equal to tolerance|Arrays are not (?:almost )?equal)", WRONG),
    # Bare asserts of torch.allclose(), torch.equal() and compare(), as pytest explains them.
    Way(r" where False = <built-in method (?:allclose|equal) of type object", WRONG),
    Way(rf"\bDiscrepancy\(kind='(?:{_NUMBER_KINDS})'", WRONG),
)
"""Ways in which a test's body fails by numbers; all else that fails in it may be anything."""
