"""What came of the graph passes of a toolkit, step by step: plain data, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

__all__ = ["PassStep", "WrongLeaf", "blamed_pass"]

_TOLD_OF_PASS: Final = re.compile(r"pass \d+ of \d+ \((.*)\)")
_BLAMED: Final = re.compile(r"(?:with )?pass \d+ of \d+ \((.*?)\) (?:changed|the model raises|makes another graph) ?")
# Operators that a remark names.
_SHOWN = 6


def blamed_pass(problem: str) -> str:
    """The pass that a :attr:`PassStep.problem` blames, by its name; empty where it blames none."""
    named = _BLAMED.match(problem)
    return named[1] if named else ""


@dataclass(frozen=True)
class WrongLeaf:
    """A value that a step has changed by more than rounding."""

    name: str
    call: str
    text: str
    """The whole sentence about it."""
    noise: float | None
    """Its error in units of the program's rounding noise; None where it is no matter of numbers."""

    @property
    def size(self) -> float:
        """To find the worst by: what is no matter of rounding is worse than any number."""
        return math.inf if self.noise is None or math.isnan(self.noise) else self.noise

    @property
    def how_far(self) -> str:
        """In units of noise, or in words."""
        if self.noise is None:
            return self.text.partition(": ")[2].splitlines()[0]
        return f"{self.noise:.3g} times the rounding noise"


@dataclass(frozen=True)
class PassStep:
    """One step: what it changed in the graphs, and in what they compute."""

    told: str
    """``pass 2 of 3 (fold:fold)``, ``decompositions inductor``, or the capture itself."""
    raised: str = ""
    """What the model raised with it, and did not before."""
    changed: bool = True
    """Did it change the code of any graph?"""
    noise: float = 0.0
    """The largest error of a whole value over its rounding noise."""
    compared: int = 0
    wrong: tuple[WrongLeaf, ...] = ()
    operators: dict[str, int] = field(default_factory=dict)
    """Of a table: by how many each operator became more or fewer in the graphs."""
    vacuous: str = ""
    """Why nothing is proved although nothing is wrong."""
    eager_error: str = ""
    """What the model raises in a call without this step too."""
    unsteady: str = ""
    """A pass before this step's that has made another graph than when it ran for the step before."""

    @property
    def pass_name(self) -> str:
        """``fold:fold`` of ``pass 2 of 3 (fold:fold)``; empty of a step that is no pass."""
        named = _TOLD_OF_PASS.fullmatch(self.told)
        return named[1] if named else ""

    def is_beyond(self, noise: float) -> bool:
        """Whether a value is off by more than so many times its rounding noise."""
        return any(wrong.noise is not None and wrong.noise > noise for wrong in self.wrong)

    @property
    def problem(self) -> str:
        """``pass 2 of 3 (fold:fold) changed gradient of up.weight (310 times the rounding noise)``; empty if right."""
        if self.raised:
            return f"with {self.told} the model raises: {self.raised}"
        if self.wrong:
            # Outputs before gradients: nearer to the cause.
            outputs = [each for each in self.wrong if each.name.startswith("output")]
            worst = max(outputs or self.wrong, key=lambda each: each.size)
            if self.unsteady:
                return (f"{self.unsteady} makes another graph each time that it runs, so {self.told} is not judged: "
                        f"{worst.name} differs ({worst.how_far}), and either may have changed it")
            return f"{self.told} changed {worst.name} ({worst.how_far})"
        if not self.compared:
            because = f": {self.eager_error}" if self.eager_error else ""
            return f"nothing was compared at {self.told}{because}"
        if self.vacuous:
            return f"nothing is proved at {self.told}: {self.vacuous}"
        return ""

    @property
    def remark(self) -> str:
        """What is worth knowing of a right step: how far a table moves numbers, that a pass changed nothing."""
        if self.unsteady:
            return f"{self.unsteady} makes another graph each time that it runs"
        if not self.changed:
            return f"{self.told} changed no graph"
        if not self.operators:
            return ""
        gone = [f"{name} {count:+}" for name, count in self.operators.items() if count < 0]
        listed = ", ".join(gone[:_SHOWN])
        if len(gone) > _SHOWN:
            listed += f" and {len(gone) - _SHOWN} more"
        return f"{self.told} change numbers by up to {self.noise:.3g} times the rounding noise; operators: {listed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        for wrong in plain["wrong"]:
            # JSON has no infinity.
            wrong["noise"] = None if wrong["noise"] is None else repr(wrong["noise"])
        return plain | {"noise": repr(self.noise)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> PassStep:
        """Read :meth:`to_dict` back."""
        wrong = []
        for each in plain["wrong"]:
            noise = each["noise"]
            wrong.append(WrongLeaf(**{**each, "noise": None if noise is None else float(noise)}))
        return cls(**{**plain, "wrong": tuple(wrong), "noise": float(plain["noise"])})
