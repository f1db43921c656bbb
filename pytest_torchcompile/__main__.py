"""``python -m pytest_torchcompile`` is ``pytest-torchcompile``."""

from __future__ import annotations

import sys

from pytest_torchcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
