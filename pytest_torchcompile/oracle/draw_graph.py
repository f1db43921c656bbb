"""DrawGraph: a noisy run of a program on a GPU, recorded as CUDA graphs, which each draw launches again.

Python takes some ten times as long to launch the operators of a draw as a GPU takes to run them. A graph launches all
at once. Its dice have a pool of numbers that stays where it is in memory; before each launch the pool is filled anew.

While a run is recorded no operator runs. So a program that looks at a number in Python can't be recorded, and is run
itself (:attr:`DrawGraph.why`). What it reads without an operator shows when the graph is launched without noise, and
compared to the exact run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchcompile.oracle.dice import FixedDice
from pytest_torchcompile.oracle.tape import Tape, written_tensors
from pytest_torchcompile.oracle.transcript_memory import bytes_of
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


class DrawGraph:
    """Is told of a run while it is recorded, as a ``Transcript`` is, and launches it as often as is asked for."""

    def __init__(self, device: torch.device, wide: torch.dtype) -> None:
        """``wide``: the dtype that the program runs in."""
        self.why = ""
        """Why there is no graph; empty where there is one."""
        self.is_graph = True
        self.dice = FixedDice(device, wide)
        self._device, self._generator = device, torch.cuda.default_generators[device.index or 0]
        # All passes have one: what a later one takes from an earlier one stays where it is.
        self._memory = torch.cuda.graph_pool_handle()
        self._passes: list[_Pass] = []
        # Memory from before the run, which each launch has to find as it was: by its address, with a copy.
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Tensors from before the run, with whether each is a parameter. The graph reads them, so they must not go.
        self._seen: list[tuple[torch.Tensor, bool]] = []
        self._written: set[int] = set()

    # -------------------------------------------------------------------------------------------------- it is recorded

    def refuse(self, why: str) -> None:
        """The run can't be recorded."""
        self.why = self.why or why
        self._passes, self._before, self._seen = [], {}, []

    def begin_pass(self, seed: int, watch: Watch) -> None:
        """A forward and a backward pass begin; random generators are seeded already."""
        if self.why:
            return
        self._passes.append(_Pass(seed, torch.cuda.CUDAGraph()))
        parameters = {id(parameter) for _, parameter in watch.parameters}
        self._seen += [(tensor.detach(), id(tensor) in parameters) for _, tensor in watch.named_tensors()]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs, and launch it once at the end: only then are there values."""
        if self.why or not self._passes:
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        # The default stream can't be recorded.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(outside)
        graph, state = self._passes[-1].graph, self._generator.get_state()
        with torch.cuda.stream(side), self._recorded(graph):
            yield
        outside.wait_stream(side)
        self._end_recording(graph, state)

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        with self._refusing():
            # A kernel that runs for the first time is loaded then, and other threads may call CUDA.
            graph.capture_begin(pool=self._memory, capture_error_mode="relaxed")
        try:
            yield
        finally:
            with self._refusing():
                graph.capture_end()

    def _end_recording(self, graph: torch.cuda.CUDAGraph, state: torch.Tensor) -> None:
        """Launch it, or leave the generator as it was."""
        if self.why:
            self._mend_generator()
            self._generator.set_state(state)
            return
        with self._refusing(), torch.no_grad():
            self._copy_what_is_written()
            graph.replay()

    def _mend_generator(self) -> None:
        """Give the generator a state that belongs to no graph, where a recording that failed has left it in one.

        ``CUDAGraph::capture_end`` raises before it tells the generator (seen in torch 2.11). Whoever draws a random
        number next would get an error.
        """
        try:
            torch.rand(1, device=self._device)
        except RuntimeError:
            self._generator.graphsafe_set_state(torch.Generator(self._device).graphsafe_get_state())

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What is raised here is no error of the program."""
        try:
            yield
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}")

    def _copy_what_is_written(self) -> None:
        """Nothing has run yet, so tensors from before the run are as they were."""
        for tensor, is_parameter in self._seen:
            address = tensor.untyped_storage().data_ptr()
            # Of running statistics no operator says that it writes to them.
            if address not in self._before and (address in self._written or not is_parameter):
                self._before[address] = bytes_of(tensor), bytes_of(tensor).clone()

    def note(self, performer: Performer, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of an operator, and remember what it writes to."""
        for tensor in written_tensors(call.about, args, kwargs):
            self._written.add(tensor.untyped_storage().data_ptr())
        return performer.perform(call, args, kwargs)

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


def new_graph(tensors: Iterable[torch.Tensor], tape: Tape | None, wide: torch.dtype) -> DrawGraph | None:
    """An empty one for a program, by its tensors and the tape of its eager run; None where none is tried."""
    devices = {tensor.device for tensor in tensors}
    if {device.type for device in devices} != {"cuda"} or len(devices) > 1:
        return None
    # A number that Python asks for is not there yet while operators are recorded.
    if tape is None or "cuda" in tape.asked_on:
        return None
    # Other ranks would have to record at the same time.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    (device,) = devices
    free, _ = torch.cuda.mem_get_info(device)
    # The graphs have memory of their own, as much as a run takes.
    if free < torch.cuda.memory_reserved(device):
        return None
    return DrawGraph(device, wide)
