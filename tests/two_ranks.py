"""Processes that are the ranks of one model: warm, each test in a process group of its own, with a time limit.

What a rank does is a function of these tests, named ``module:function``; it is called with the rank's number and
returns plain data. A rank that raises, dies or does not come back fails the test, with the stacks of all ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path

LIMIT = 120.0
"""Seconds for what a test does on all ranks; far more than it takes on a loaded machine."""
COLLECTIVE = 60.0
"""Seconds after which gloo gives up waiting for another rank, so that nothing is left behind."""


class Ranks:
    """``world`` processes; :meth:`run` does the same thing in each. On ``cuda`` each has a GPU of its own."""

    def __init__(self, world: int, folder: Path, device: str = "cpu") -> None:
        self.world, self.folder, self.count, self.device = world, folder, 0, device
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "two_ranks"])
        self.processes, self.pipes = [], []

    def run(self, function: str, **given: object) -> list[object]:
        """What ``function(rank, **given)`` returns on each rank."""
        if not self.processes:
            self.start()
        self.count += 1
        store = tempfile.mktemp(prefix=f"store{self.count}-", dir=self.folder)
        for pipe in self.pipes:
            pipe.send((function, store, given))
        found, waiting = {}, dict(zip(self.pipes, range(self.world), strict=True))
        while waiting and (ready := wait(list(waiting), LIMIT)):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except EOFError:
                    found[rank] = ("died", f"exit code {self.processes[rank].exitcode}")
            if any(kind == "died" for kind, _ in found.values()):
                break
        if waiting or any(kind == "died" for kind, _ in found.values()):
            self.stop(signal.SIGABRT)
        for rank in waiting.values():
            found[rank] = ("hung" if len(found) == self.world - len(waiting) else "lost", self.stack(rank))
        bad = {rank: text for rank, (kind, text) in sorted(found.items()) if kind != "ok"}
        assert not bad, "\n".join(f"--- rank {rank}: {found[rank][0]}\n{text}" for rank, text in bad.items())
        return [found[rank][1] for rank in range(self.world)]

    def start(self) -> None:
        for rank in range(self.world):
            mine, its = self.context.Pipe()
            given = rank, self.world, its, str(self.folder), self.device
            process = self.context.Process(target=serve, args=given, daemon=True)
            process.start()
            its.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def stop(self, how: int = signal.SIGKILL) -> None:
        """End the processes; SIGABRT lets each write its stack."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, how)
        for process in self.processes:
            process.join(20)
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def stack(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.stack").read_text()


def serve(rank: int, world: int, pipe: object, folder: str, device: str) -> None:
    """What a rank's process does until it is ended."""
    stack = open(f"{folder}/rank{rank}.stack", "w")  # noqa: SIM115 - it is open for as long as the process lives
    faulthandler.enable(stack, all_threads=True)
    import torch
    import torch.distributed as dist

    # Graphs of its own, for names of process groups are in them; C++ kernels are built once for all ranks.
    torch.compiler.config.cache_key_tag = f"{folder}/rank{rank}"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    while True:
        try:
            function, store, given = pipe.recv()
        except EOFError:  # whoever asked is gone
            os._exit(0)
        try:
            dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world,
                                    store=dist.FileStore(store, world),
                                    timeout=datetime.timedelta(seconds=COLLECTIVE))
            module, name = function.split(":")
            found = ("ok", getattr(importlib.import_module(module), name)(rank, **given))
        except BaseException:
            found = ("raised", traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        pipe.send(found)
