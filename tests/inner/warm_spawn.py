"""``multiprocessing``, whose processes of the context "spawn" are forked from a warm interpreter.

See :mod:`warm_python` for what such an interpreter is, and for which processes a new one is started after all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import popen_spawn_posix, resource_tracker, util
from typing import Any

import pytest
import warm_python

__all__ = ["warm_popen"]


def warm_popen(address: str) -> type[popen_spawn_posix.Popen]:
    """What starts a spawned process: a fork of the interpreter with this address."""

    class WarmPopen(popen_spawn_posix.Popen):
        def _launch(self, process_obj: Any) -> None:
            # Otherwise it would be started by the function below, and end with its interpreter.
            resource_tracker.ensure_running()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(util, "spawnv_passfds", self._start)
                super()._launch(process_obj)

        def _start(self, path: bytes, args: Sequence[bytes | str], passfds: Sequence[int]) -> int:
            # The warm one writes no bytecode either.
            words = [word for word in map(os.fsdecode, args) if word != "-B"]
            with open(1, closefd=False) as stdout, open(2, closefd=False) as stderr:
                self._process = warm_python.start_python(address, words, stdout=stdout, stderr=stderr,
                                                         pass_fds=passfds)
            return self._process.pid

        def poll(self, flag: int = os.WNOHANG) -> int | None:
            # It is no child of this process, which cannot wait for it.
            if self.returncode is None:
                self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
            return self.returncode

    return WarmPopen
