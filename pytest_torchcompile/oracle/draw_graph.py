"""DrawGraph: a noisy run of a program on a GPU, recorded as CUDA graphs, which each draw launches again.

Python takes some ten times as long to launch the operators of a draw as a GPU takes to run them. A graph launches all
at once. Its dice have a pool of numbers that stays where it is in memory; before each launch the pool is filled anew.

While a run is recorded no operator runs. So a program that looks at a number in Python can't be recorded, and is run
itself (:attr:`DrawGraph.why`). What it reads or writes without an operator shows when the graph is launched a few
times: without noise it has to give the values of the exact run each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from pytest_torchcompile.gauges.graph_recording import has_failed_on, recorded
from pytest_torchcompile.oracle.dice import FixedDice
from pytest_torchcompile.oracle.gpu_waits import tensors_in
from pytest_torchcompile.oracle.properties import storage_address
from pytest_torchcompile.oracle.tape import Tape, written_tensors
from pytest_torchcompile.oracle.transcript_memory import bytes_of
from pytest_torchcompile.oracle.transcript_steps import Listener
from pytest_torchcompile.state.torch_state import seed_everything

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.call_watch import Watch
    from pytest_torchcompile.oracle.transcript_steps import Performer

__all__ = ["DrawGraph", "new_graph"]


@dataclass
class _Pass:
    """A forward and a backward pass."""

    seed: int
    graph: torch.cuda.CUDAGraph
    results: dict[str, Any] = field(default_factory=dict)
    """By name; tensors are where each launch leaves them."""


class DrawGraph(Listener):
    """Is told of a run while it is recorded, as a ``Transcript`` is, and launches it as often as is asked for."""

    is_graph: Literal[True] = True

    def __init__(self, device: torch.device, wide: torch.dtype) -> None:
        """``wide``: the dtype that the program runs in."""
        self.why = ""
        """Why there is no graph; empty where there is one."""
        self.dice = FixedDice(device, wide)
        self._device = device
        # All passes have one: what a later one takes from an earlier one stays where it is.
        self._memory = torch.cuda.graph_pool_handle()
        self._passes: list[_Pass] = []
        # By address, all memory from before the run that it reads: it must not go. And that which it writes to, with a
        # copy, for each launch has to find it as it was.
        self._outer: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written: set[int] = set()
        # Of memory that the run takes itself.
        self._own: set[int] = set()

    # -------------------------------------------------------------------------------------------------- it is recorded

    def refuse(self, why: str) -> None:
        """The run can't be recorded."""
        self.why = self.why or why
        self._passes, self._before, self._outer = [], {}, {}

    def begin_pass(self, seed: int, watch: Watch) -> None:
        """A forward and a backward pass begin; random generators are seeded already."""
        if self.why:
            return
        self._passes.append(_Pass(seed, torch.cuda.CUDAGraph()))
        with self._refusing():
            for _, tensor in watch.named_tensors():
                self._note_outer(tensor)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs, and launch it once at the end: only then are there values."""
        if self.why or not self._passes:
            yield
            return
        graph, recording = self._passes[-1].graph, ExitStack()
        with self._refusing():
            recording.enter_context(recorded(graph, self._device, self._memory))
        try:
            yield
        finally:
            with self._refusing():
                recording.close()
        if not self.why:
            with self._refusing(), torch.no_grad():
                self._copy_what_is_written()
                graph.replay()

    def note(self, performer: Performer, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator, and remember which memory it reads, takes and writes to."""
        with self._refusing():
            for tensor in tensors_in((*args, *kwargs.values())):
                self._note_outer(tensor)
            # Of running statistics no operator says that it writes to them.
            running = [args[place] for place in call.about.running if place < len(args)]
            for tensor in (*running, *written_tensors(call.about, args, kwargs)):
                if tensor is not None:
                    self._written.add(storage_address(tensor))
        out = performer.perform(call, args, kwargs)
        with self._refusing():
            self._own.update(map(storage_address, tensors_in(out)))
        return out

    def _note_outer(self, tensor: torch.Tensor) -> None:
        address = storage_address(tensor)
        if address and address not in self._own and address not in self._outer:
            self._outer[address] = bytes_of(tensor)

    def _copy_what_is_written(self) -> None:
        """Nothing has run yet, so memory from before the run is as it was."""
        for address in self._written - self._before.keys():
            if address in self._outer:
                self._before[address] = self._outer[address], self._outer[address].clone()

    def keep(self, name: str, value: Any) -> None:
        """Remember one of the pass' results."""
        if not self.why:
            self._passes[-1].results[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def note_kept(self, tensor: torch.Tensor) -> None:
        """A tensor that the pass has left alone, or has written to what was there: a launch does the same."""

    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that it keeps, but for the graphs' own memory."""
        return [before for _, before in self._before.values()]

    # --------------------------------------------------------------------------------------------------- it runs again

    def launch(self, seed: int, noise: float, rest: bool) -> dict[str, Any]:
        """Run it again with so many times its usual noise; ``rest``: as for ``record``. Returns the values by name."""
        self.dice.fill(seed, noise)
        values = {}
        with torch.no_grad():
            for memory, before in self._before.values():
                memory.copy_(before)
            for each in self._passes if rest else self._passes[:1]:
                seed_everything(each.seed)
                each.graph.replay()
                for name, value in each.results.items():
                    # The next launch writes to it.
                    values[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return values

    def release(self) -> None:
        """Give its memory back to the GPU. It can't be launched any more."""
        self.refuse("it was released")
        # Torch keeps the memory of a graph that is gone for nobody else.
        torch.cuda.empty_cache()


def new_graph(tensors: Iterable[torch.Tensor], tape: Tape | None, wide: torch.dtype) -> DrawGraph | None:
    """An empty one for a program, by its tensors and the tape of its eager run; None where none is tried."""
    devices = {tensor.device for tensor in tensors}
    # AMD's graphs were never tried.
    if {device.type for device in devices} != {"cuda"} or len(devices) > 1 or torch.version.hip is not None:
        return None
    # What Python asks for is not there yet while operators are recorded.
    if tape is None or not tape.is_recordable:
        return None
    # Other ranks would have to record at the same time.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    (device,) = devices
    if has_failed_on(device) or not _has_room(device):
        return None
    return DrawGraph(device, wide)


def _has_room(device: torch.device) -> bool:
    """Whether there is room for another run: graphs have memory of their own, as much as a run takes."""
    if _free_beyond_reserved(device) < 0:
        torch.cuda.empty_cache()
    return _free_beyond_reserved(device) >= 0


def _free_beyond_reserved(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free - torch.cuda.memory_reserved(device)
