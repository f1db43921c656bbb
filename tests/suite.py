"""Runs pytest; a few tests that fail beside others are run once more, alone, and are named at the end.

Many tests here start processes, kill them, or wait for a time-out, on two cores that other workers use too. One that
fails so and passes alone depends on the machine's load and not on the code. It is printed as FLAKY, for somebody to
mend, and does not end the work of all others. More failures than a few, or one that fails alone, are failures.
This is for our own tests only: a verdict about somebody's model is never given a second try.

Usage: ``python tests/suite.py [pytest's arguments]``
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FEW = 3
"""More tests than this do not fail by load alone."""
_SOME_FAILED = 1
"""pytest's exit code for tests that failed; others (2: interrupted, 3: internal error) say that the run did not end."""


def run_suite(arguments: Sequence[str]) -> int:
    """The exit code of the run, or of its few failed tests when they run alone."""
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own: what an earlier run left there would be run again too.
        code = _run_pytest([*arguments, "-o", f"cache_dir={cache}"])
        failed = read_failed(Path(cache))
    if code != _SOME_FAILED or not 1 <= len(failed) <= FEW:
        return code
    print(f"\n{len(failed)} failed beside others and now run alone:", *failed, sep="\n  ", flush=True)
    code = _run_pytest(["-n", "0", *failed])
    if code == 0:
        print("\nFLAKY: each fails beside other tests and passes alone, so it depends on the machine's load:",
              *failed, sep="\n  ", flush=True)
    return code


def read_failed(cache: Path) -> list[str]:
    """The node ids that pytest's cache calls failed."""
    record = cache / "v" / "cache" / "lastfailed"
    if not record.exists():
        return []
    return sorted(json.loads(record.read_text()))


def _run_pytest(arguments: Sequence[str]) -> int:
    # Not `python -m pytest`: it would import the package from this folder and not the one that is installed.
    command = Path(sys.executable).with_name("pytest")
    return subprocess.run([command, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(run_suite(sys.argv[1:]))
