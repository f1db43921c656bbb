"""Adoption: the way in for a new user, from a model to a matrix and its first verdicts.

Only ``examination``, ``guesses``, ``library_models`` and ``shape_trial`` touch torch. They run in a process of their
own, so that neither pytest nor a command loads it.

To read in this order: ``guesses`` (which inputs a model may take), ``examination`` (they are tried) and
``example_inputs`` (its other end, and inputs as plain data), ``matrix_text`` (the matrix of such a model, also for
``pytest --compile-model``) and ``init_command`` (``pytest-torchcompile init``) with ``library_models``. Then
``acceptance`` (what a cell needs), ``stale_rules`` (what none needs any more) and ``accept_command``
(``pytest-torchcompile accept``). ``chosen_cell`` is the cell that a command line names, for ``benchmark_command`` and
others. ``shapes_command`` runs ``shape_trial`` in processes.

What commands take is here, apart from what they do: every command line is read with it.
"""

from __future__ import annotations

import argparse
from typing import Final

__all__ = [
    "LEAVE_OUT", "LIBRARIES", "add_accept_arguments", "add_benchmark_arguments", "add_init_arguments",
    "add_model_arguments", "add_shapes_arguments",
]

LIBRARIES: Final = ("transformers", "timm", "torchvision", "diffusers")
"""Libraries whose models `init --from` makes."""
LEAVE_OUT: Final = ("conftest", "workflow", "policy")
"""What `init --without` may name."""


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """What `init` takes."""
    parser.add_argument("model", nargs="?", metavar="MODULE:NAME",
                        help="the model's class, or a function that makes it, called without arguments; default: none, "
                             "the matrix then has a place to fill in")
    parser.add_argument("--factory", metavar="MODULE:NAME",
                        help="a function that makes the model, for a class with arguments; default: the model itself")
    parser.add_argument("--inputs", metavar="MODULE:NAME",
                        help="a function that returns a batch, called with sizes by its parameters' names; default: "
                             "guessed from forward and the first layers, and tried")
    parser.add_argument("--from", dest="source", metavar="LIBRARY:NAME",
                        help=f"a model of {', '.join(LIBRARIES)}, tiny where that can be, with random weights; nothing "
                             "is downloaded; default: none")
    parser.add_argument("--without", metavar="PART", action="append", default=[],
                        help=f"leave a file out: {', '.join(LEAVE_OUT)}; may be repeated; default: all are written")
    parser.add_argument("--no-run", action="store_true",
                        help="do not run the first cells; default: those of eager and aot_eager are run")
    parser.add_argument("--force", action="store_true",
                        help="replace files that are there and yours; default: they are kept, and nothing is written")


def add_accept_arguments(parser: argparse.ArgumentParser) -> None:
    """What `accept` takes."""
    parser.add_argument("reports", nargs="*", metavar="REPORT",
                        help="the JSON report of a run, or of each of its shards; default: .compile-matrix/report.json")
    parser.add_argument("--wrong-numbers", metavar="CELL:CHECK", action="append", default=[],
                        help="accept that this check of this cell computes wrong numbers; may be repeated; default: no "
                             "wrong numbers are accepted")
    parser.add_argument("--since", metavar="OLD",
                        help="the report of an earlier run: take out the expected failures and limits that it needed "
                             "and this run does not, and add none; default: none is taken out")
    parser.add_argument("--dry-run", action="store_true",
                        help="print the edit without writing it; default: it is written and printed")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What commands take that run one cell, or one model without a matrix."""
    parser.add_argument("model", metavar="CELL|MODULE:NAME",
                        help="a cell of a matrix, or the model's class, or a function that makes it")
    parser.add_argument("--inputs", metavar="MODULE:NAME",
                        help="a function that returns a batch for MODULE:NAME; default: guessed, and tried")
    parser.add_argument("--matrix", metavar="MATRIX", help="the matrix of CELL; default: the one of pytest")


def add_benchmark_arguments(parser: argparse.ArgumentParser) -> None:
    """What `benchmark` takes."""
    add_model_arguments(parser)
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of text")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")


def add_shapes_arguments(parser: argparse.ArgumentParser) -> None:
    """What `shapes` takes."""
    add_model_arguments(parser)
    parser.add_argument("--sizes", metavar="SIZES", required=True,
                        help="the sizes that come, in their order, each with its number of calls if it is another than "
                             "--calls: 8,12*50,40; default: none, they have to be given")
    parser.add_argument("--dim", metavar="NAME", help="the dim that varies; default: the one that has several sizes")
    parser.add_argument("--calls", metavar="N", type=int, default=1000,
                        help="calls of each size in the traffic; default: %(default)s")
    parser.add_argument("--buckets", metavar="SIZES",
                        help="what sizes are padded to: 16,64; default: the next power of two of each")
    parser.add_argument("--backend", metavar="NAME", help="what compiles; default: that of the cell, else inductor")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=1800,
                        help="seconds after which the process of a way is stopped; default: %(default)s")
    parser.add_argument("--markdown", action="store_true", help="Markdown instead of text")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")
