"""The contract: what may a caller legitimately do with a module, and does the compiled one agree with eager?

Histories of calls are drawn, each call with *mutations*: another memory format, inputs that share memory, a frozen
block, autocast, another thread, a module that is changed between calls. What eager refuses is not judged.

Read ``mutation`` (what one is), any file of ``mutations/`` (each needs torch alone, as it goes into scripts),
``history_run`` (one history, both sides), ``worker`` (the process that it runs in, which may die of it),
``contract_search`` (drawing, shrinking) and ``script`` (what is printed in the end). Then the command ``hunt``:
``layer_library`` (its programs), ``hunt`` (the loop over them), ``hunt_report`` and ``hunt_command``.

What the command takes is here, apart from what it does: every command line is read with it.
"""

from __future__ import annotations

import argparse
from typing import Final

__all__ = ["FOLDER_OF_HUNTS", "add_hunt_arguments"]

FOLDER_OF_HUNTS: Final = ".compile-matrix/hunt"
"""Where a hunt keeps what it found, and where it goes on."""


def add_hunt_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hunt` takes."""
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N",
                        help="how long, writing the drafts not counted; default: %(default)g")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of the chains and of the histories; default: %(default)s")
    parser.add_argument("--backend", default="aot_eager", metavar="NAME",
                        help="of torch.compile; default: %(default)s")
    parser.add_argument("--device", default="cpu", metavar="NAME",
                        help="where programs and their batches are, such as cuda; default: %(default)s")
    parser.add_argument("--python", action="append", default=[], metavar="PATH",
                        help="another Python whose torch each script is tried on too; may be given several times; "
                        "default: none")
    parser.add_argument("-o", "--output", default=FOLDER_OF_HUNTS, metavar="FOLDER",
                        help="scripts, drafts and the place where the next run goes on; default: %(default)s")
