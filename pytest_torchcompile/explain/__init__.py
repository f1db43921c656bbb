"""What the compiler made of a model: every stage of it, every kernel, and the lines of the user that they come from.

To read in this order: ``graph_texts`` has stages out of the ledger's texts, as plain data. What is known of a kernel is
in the room ``lowering``. ``guards``, ``dynamo_hooks`` and ``decompositions`` have guards,
bytecode and ATen operators that were taken apart. ``explanation`` is all of it, and ``capture`` runs the model.
``explanation_text`` writes it as text, ``page`` and ``columns`` as a page, ``files`` each piece as a file.
``command`` is ``pytest-torchcompile explain``.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pytest_torchcompile import on_first_use
from pytest_torchcompile.adoption import add_model_arguments

if TYPE_CHECKING:
    from pytest_torchcompile.explain.capture import explain
    from pytest_torchcompile.explain.explanation import Explanation
    from pytest_torchcompile.explain.explanation_text import explanation_lines
    from pytest_torchcompile.explain.files import write_files

__all__ = ["Explanation", "add_explain_arguments", "explain", "explanation_lines", "write_files"]


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """What `explain` takes."""
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text")


_EXPORTS = {"explain": "capture", "Explanation": "explanation", "explanation_lines": "explanation_text",
            "write_files": "files"}
__getattr__, __dir__ = on_first_use(__name__, globals(), _EXPORTS)
