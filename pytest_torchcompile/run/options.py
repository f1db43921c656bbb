"""OPTIONS: every setting of a matrix run, declared once; parser, ini keys, help and reference are made from it."""

from __future__ import annotations

from typing import Final, NamedTuple

from pytest_torchcompile.plan.matrix_path import DEFAULT

__all__ = ["OPTIONS", "REUSES", "Option"]

REUSES: Final = ("results", "code")
"""What may be taken of earlier runs; ``code`` takes results too."""


class Option(NamedTuple):
    """One setting: ``--compile-NAME`` on the command line, ``compile_NAME`` in the ini file."""

    name: str
    help: str
    default: str = ""
    metavar: str = ""
    """Empty: a flag."""
    optional: bool = False
    """May the option be given without a value?"""
    bare: str = ""
    """What it is then; empty: what the ini file says."""

    @property
    def flag(self) -> str:
        """``--compile-name``."""
        return f"--compile-{self.name}"

    @property
    def help_with_default(self) -> str:
        """As ``pytest --help`` shows it: with the default, unless the text tells it."""
        if not self.default or self.default in self.help:
            return self.help
        return f"{self.help} (default: {self.default})"

    @property
    def ini(self) -> str:
        """``compile_name``."""
        return f"compile_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("matrix", "Run the cells of a matrix file, or of a shipped one (shipped:smoke); without FILE, the ini "
           "key's or matrix/default.yaml", DEFAULT, "FILE", optional=True),
    Option("model", "Run a model without a matrix file: MODULE:NAME is a class, or a function that makes it, called "
           "without arguments; by eager, aot_eager and inductor, with up to three sizes", "", "MODULE:NAME",
           optional=True),
    Option("inputs", "The function MODULE:NAME that makes a batch for --compile-model, called with sizes by its own "
           "parameters' names; default: guessed from forward and the first layers", "", "MODULE:NAME"),
    Option("checks", "Judge only these checks, separated by commas (default: those of the matrix)", "", "NAMES"),
    Option("shard", "Run one of N parts of the matrix, for example 2/8", "", "I/N"),
    Option("baseline", "Print at the end what differs from an earlier report; 'last': the newest of another commit "
           "that is kept in .compile-matrix/runs", "", "REPORT"),
    Option("keep-runs", "Reports of whole runs that are kept, each in .compile-matrix/runs/DATE-COMMIT; 0: none", "10",
           "N"),
    Option("folder", "The folder that gets .compile-matrix, with all files that a run writes and looks for (default: "
           "pytest's root folder); another one leaves report and journal of other runs alone", "", "FOLDER"),
    Option("timeout", "Seconds that one cell may take before its process is stopped", "300", "SECONDS"),
    Option("isolation", "'rank': processes are reused between cells; 'cell': a fresh one for each", "rank", "WHAT"),
    Option("workers-per-gpu", "Cells that may run on one GPU at a time, if its memory is enough for so many; a cell "
           "that is timed (check worth) has it alone", "1", "N"),
    Option("ranks", "'here': the ranks of a cell are processes of this machine; 'torchrun': torchrun has started one "
           "pytest for each, on any number of machines", "here", "WHERE"),
    Option("selftest", "Run no tests, but planted faults, and say which our checks catch on this torch; WORDS: only "
           "those of these kinds, or with these words in their names, separated by commas", "", "WORDS", optional=True),
    Option("selftest-device", "Where the planted faults run, for example cuda", "cpu", "DEVICE"),
    Option("fuzz-examples", "Sequences of shapes that are drawn for each fuzzed cell or test", "30", "N"),
    Option("fuzz-seconds", "Seconds that fuzzing one cell or test may take, shrinking included (default: those of the "
           "matrix, else 60)", "", "SECONDS"),
    Option("fuzz-seed", "Seed of the drawn sequences; 'random': another one each run, printed", "0", "SEED"),
    Option("fuzz-settings", "Settings of torch that the check contract makes around calls too, separated by commas: "
           "torch._dynamo.config.capture_scalar_outputs=True", "", "SETTINGS"),
    Option("reuse", "Take the result of an earlier run for a cell that passed and of which nothing has changed; "
           "'code': of a cell that has changed take the comparisons, where it compiles to the same code and computes "
           "the same values", "", "WHAT", optional=True, bare="results"),
    Option("resume", "Go on with a run that was interrupted: cells that its report has verdicts of are not run again"),
    Option("logs", "Channels of TORCH_LOGS, separated by commas: what torch logs in them of each cell is printed at "
           "the end and kept in .compile-matrix/logs; 'trace' writes a file for tlparse", "", "CHANNELS"),
    Option("culprit", "Of each failing cell whose stage of the compiler is found name the operator to blame, its line "
           "and a script that needs torch alone; takes up to so many seconds more for each", "", "SECONDS",
           optional=True, bare="120"),
    Option("inprocess", "Run cells in pytest's own process, for debuggers: a crash then ends pytest"),
)
