"""The options of fuzzing: how much, and with which seed. Neither torch nor Hypothesis is loaded to read them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.errors import UsageError

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase

    from pytest_torchcompile.fuzz.search import Budget

__all__ = ["FuzzOptions", "ran_out"]

SECONDS: Final = 60.0
"""Wall seconds for each cell or test, where nobody says."""
_SETTING = re.compile(r"torch(\.\w+)+\.\w+=\S+")
_DIGITS = 18
"""So long may a seed be; Python turns no text of thousands of digits into a number."""


@dataclass(frozen=True)
class FuzzOptions:
    """What ``--compile-fuzz-...`` say."""

    examples: int = 30
    """Sequences drawn for each cell or test."""
    seconds: float | None = None
    """Wall seconds for each, shrinking included; None: nobody said."""
    seed: int = 0
    root: str = ""
    """Folder of the database of failing sequences, ``.hypothesis``; empty: none is kept."""
    settings: tuple[str, ...] = ()
    """Settings of torch that the contract makes around calls, beside its own: ``torch._dynamo.config.name=True``."""

    @classmethod
    def read(cls, examples: str, seconds: str, seed: str, root: Path | None = None,
             settings: str = "") -> FuzzOptions:
        """Make options of what was typed.

        Raises :class:`~pytest_torchcompile.errors.UsageError`, naming the option.
        """
        if not seed.isdecimal() or len(seed) > _DIGITS:
            raise UsageError(f"--compile-fuzz-seed: {seed!r} is no seed; expected a whole number, or random")
        options = cls(
            int(_read_number("examples", examples, "a number of sequences above 0, for example 30", whole=True)),
            seed=int(seed), settings=_read_settings(settings),
        )
        if seconds:
            expected = "a number of seconds above 0, for example 60"
            options = replace(options, seconds=_read_number("seconds", seconds, expected))
        if root is not None:
            options = replace(options, root=str(root))
        return options

    def budget(self) -> Budget:
        """The budget of one search."""
        from pytest_torchcompile.fuzz.search import Budget

        if self.seconds is None:
            return Budget(self.examples, SECONDS)
        return Budget(self.examples, self.seconds)

    def of_cells(self, seconds: float | None, root: Path) -> FuzzOptions:
        """The options of a matrix' cells: where nobody said how long a search may take, as long as the matrix says."""
        if self.seconds is not None:
            seconds = self.seconds
        return replace(self, seconds=seconds, root=str(root))

    def database(self) -> ExampleDatabase | None:
        """Hypothesis' database of failing examples, where its own are too."""
        from hypothesis.database import DirectoryBasedExampleDatabase

        if not self.root:
            return None
        return DirectoryBasedExampleDatabase(Path(self.root) / ".hypothesis" / "examples")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the job of a rank process."""
        return asdict(self)


def ran_out(spent: str) -> str:
    """What is told of a search that the part ``spent`` of its budget ended."""
    text = f"then the {spent} ran out"
    if spent == "seconds":
        text += "; give more: --compile-fuzz-seconds"
    return text


def _read_settings(text: str) -> tuple[str, ...]:
    """The settings in a text, as typed. Whether torch has them is asked where torch is."""
    settings = tuple(part.strip() for part in text.split(",") if part.strip())
    for setting in settings:
        if not _SETTING.fullmatch(setting):
            raise UsageError(f"--compile-fuzz-settings: {setting!r} is no setting; expected a module of torch, a name "
                             "in it and a value, for example torch._dynamo.config.capture_scalar_outputs=True")
    return settings


def _read_number(name: str, text: str, expected: str, whole: bool = False) -> float:
    try:
        number = float(int(text) if whole else text)
    except (ValueError, OverflowError):
        # Falls to the message below, which has the words for every kind of wrong number.
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--compile-fuzz-{name}: {text!r} is not {expected}")
    return number
