"""Upgrade: what becomes of the models with another version of torch, or of any package: one page before it is taken.

The same matrix is run with the old version and with the new one, in turn and more than once. What differs in all pairs
of runs is told; what one version's own runs differ in is said to waver. No torch here: other processes run the cells.

To read in this order: ``environments`` (a folder for each version, kept for reuse), ``matrix_runs`` (pytest in one of
them), ``paired_reports`` (what is worse and what got better; it asks the function that baseline and page ask; whether
figures differ by more than noise ``run_noise`` says),
``outline`` (the same in sections, which page, Markdown and JSON show), ``upgrade_page``, ``upgrade_command``. Then
``bisection`` (a pure search with three answers) and ``first_bad`` (which asks it of real versions). ``cell_history``
follows one cell through the runs that were kept (``pytest-torchcompile history``).

What the commands take is here, apart from what they do: every command line is read with it.
"""

from __future__ import annotations

import argparse
from typing import Final

from pytest_torchcompile.report.kept_runs import RUNS

__all__ = ["FOLDER_OF_UPGRADES", "add_history_arguments", "add_upgrade_arguments"]

FOLDER_OF_UPGRADES: Final = ".compile-matrix/upgrade"
"""Where environments and runs are kept."""


def add_upgrade_arguments(parser: argparse.ArgumentParser) -> None:
    """What `upgrade` takes."""
    parser.add_argument("versions", nargs="*", metavar="VERSION",
                        help="the old and the new version of torch, such as 2.12.1 2.13.0")
    parser.add_argument("--package", nargs=2, metavar=("NAME==OLD", "NEW"),
                        help="another package than torch, such as transformers==5.20 5.23; default: torch")
    parser.add_argument("--matrix", metavar="MATRIX", help="the file, or shipped:NAME; default: the one of pytest")
    parser.add_argument("--runs", metavar="N", type=int, default=2,
                        help="runs of each version, in turn; with 1 no figure is compared, as nothing tells its noise; "
                             "default: %(default)s")
    parser.add_argument("-k", dest="words", metavar="WORDS", default="",
                        help="only the cells that pytest chooses by these words; default: all of the matrix")
    parser.add_argument("-m", dest="marks", metavar="MARKS", default="",
                        help="only the cells with these marks, such as \"compile_cell(backend='eager')\"; default: all")
    parser.add_argument("--checks", metavar="NAMES", default="",
                        help="only these checks, separated by commas; default: those of the matrix")
    parser.add_argument("--bisect", action="store_true",
                        help="look for the first version that has each new failure, among those that the index has")
    parser.add_argument("--pre", action="store_true", help="bisect among nightlies and other pre-releases too")
    parser.add_argument("--environments", metavar="FOLDER",
                        help=f"where environments are kept; default: {FOLDER_OF_UPGRADES}/environments")
    parser.add_argument("-o", "--output", metavar="FOLDER",
                        help="where page, Markdown and JSON are written; default: a folder of the two versions in "
                             f"{FOLDER_OF_UPGRADES}")
    parser.add_argument("--dry-run", action="store_true",
                        help="say what would be made and run, how much disk it takes, and do nothing")
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and were not written by pytest-torchcompile")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")


def add_history_arguments(parser: argparse.ArgumentParser) -> None:
    """What `history` takes."""
    parser.add_argument("cell", metavar="CELL", help="the cell's name, as `pytest-torchcompile cells` prints it")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", default=RUNS,
                        help="a folder of reports; default: %(default)s, where pytest keeps them")
    parser.add_argument("--rerun", metavar="N", type=int, default=0,
                        help="run the cell so many times more, here and now; default: it is not run")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")
