"""The options of fuzzing: how much, and with which seed. Neither torch nor Hypothesis is loaded to read them."""

from __future__ import annotations

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

    @classmethod
    def read(cls, examples: str, seconds: str, seed: str, root: Path | None = None) -> FuzzOptions:
        """Make options of what was typed.

        Raises :class:`~pytest_torchcompile.errors.UsageError`, naming the option.
        """
        if not seed.isdecimal() or len(seed) > _DIGITS:
            raise UsageError(f"--compile-fuzz-seed: {seed!r} is no seed; expected a whole number, or random")
        return cls(
            int(_number("examples", examples, "a number of sequences above 0, for example 30", whole=True)),
            _number("seconds", seconds, "a number of seconds above 0, for example 60") if seconds else None,
            int(seed),
            "" if root is None else str(root),
        )

    def budget(self) -> Budget:
        """The budget of one search."""
        from pytest_torchcompile.fuzz.search import Budget

        return Budget(self.examples, SECONDS if self.seconds is None else self.seconds)

    def of_cells(self, seconds: float | None, root: Path) -> FuzzOptions:
        """The options of a matrix' cells: where nobody said how long a search may take, as long as the matrix says."""
        return replace(self, seconds=seconds if self.seconds is None else self.seconds, root=str(root))

    def database(self) -> ExampleDatabase | None:
        """Hypothesis' database of failing examples, where its own are too."""
        from hypothesis.database import DirectoryBasedExampleDatabase

        return DirectoryBasedExampleDatabase(Path(self.root) / ".hypothesis" / "examples") if self.root else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the job of a rank process."""
        return asdict(self)


def ran_out(spent: str) -> str:
    """What is told of a search that the part ``spent`` of its budget ended."""
    return f"then the {spent} ran out" + ("; give more: --compile-fuzz-seconds" if spent == "seconds" else "")


def _number(name: str, text: str, expected: str, whole: bool = False) -> float:
    try:
        found = float(int(text) if whole else text)
    except (ValueError, OverflowError):
        found = 0.0
    if not 0 < found < float("inf"):
        raise UsageError(f"--compile-fuzz-{name}: {text!r} is not {expected}")
    return found
