"""The process that histories run in. Eager may end it: that is a finding, and the next history gets a new one."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from pytest_torchcompile.contract.mutations.torch_settings import setting_value
from pytest_torchcompile.contract.stand_in import linear_stand_ins
from pytest_torchcompile.culprit.culprit_record import Culprit
from pytest_torchcompile.errors import UsageError, nearest
from pytest_torchcompile.fuzz.drawn_call import Sequence, as_plain, from_plain

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from pytest_torchcompile.contract.history_run import Program

__all__ = ["NotLoaded", "OwnFailure", "ProgramSource", "Told", "Worker", "ended_in_words", "own_failure_text"]

START_SECONDS: Final = 600.0
"""Importing torch, building the model."""
HISTORY_SECONDS: Final = 600.0
"""After so long a history counts as hanging."""


class OwnFailure(RuntimeError):
    """Running or comparing a history failed by a mistake of this package: nobody's model, and no finding."""


class NotLoaded(UsageError):
    """What a program is made of is there, and cannot be loaded: no mistake in the user's own functions."""


def own_failure_text() -> str:
    """What is said of the exception that is handled just now, where it is of this package's own making."""
    return f"pytest-torchcompile itself failed, not the model:\n{traceback.format_exc()}"


def ended_in_words(code: int | None) -> str:
    """How a process ended, by its exit code; a negative one is the signal that ended it."""
    if not code or code > 0:
        return f"ended its process with exit code {code or 0}"
    name = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return f"ended its process by signal {name}"


@dataclass(frozen=True)
class ProgramSource:
    """Where a worker gets its program from: plain data, so that it can be sent."""

    target: str
    """``module:function``, called with ``data``; returns a :class:`~.history_run.Program`."""
    data: Mapping[str, Any]
    names: tuple[str, ...]
    """The mutations that are on."""
    sizes: Mapping[str, int]
    """Those of the batch by which it is found out which mutations the program has a use for."""
    settings: tuple[str, ...] = ()
    """Settings of torch that the mutation ``torch_settings`` makes too; see :class:`~.fuzz_options.FuzzOptions`."""

    def load(self) -> Program:
        """Make the program, in the worker."""
        module, _, name = self.target.partition(":")
        program: Program = getattr(importlib.import_module(module), name)(self.data)
        return program


@dataclass(frozen=True)
class Told:
    """What became of one history, as plain data."""

    kind: str = ""
    """Of the problem: a kind of discrepancy, ``crash`` or ``hang``; empty: nothing is wrong."""
    where: str = ""
    message: str = ""
    at: int = -1
    moved: str = ""
    """The side that moved: ``eager`` or ``compiled``."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """``calls, refused, mute, graphs, hits, misses, seconds, in_calls``."""


_FAILURES: Final[Mapping[str, type[Exception]]] = {"failed": UsageError, "not_loaded": NotLoaded, "own": OwnFailure}
"""What is raised where the other side has no program, by its first word."""


class Worker:
    """The owner's side. Close it in the end."""

    def __init__(self, source: ProgramSource) -> None:
        """Start the process.

        Raises :class:`UsageError` where it can't make the program, of which :class:`NotLoaded` is one kind; and
        :class:`OwnFailure` where that is our mistake.
        """
        self.source = source
        self.started = 0
        """How many processes it took."""
        try:
            self._start()
        except (UsageError, OwnFailure):
            self.close()
            raise

    def _start(self) -> None:
        # Not fork: torch's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # No daemon: such a one may start no processes, as Inductor does to compile. It ends with its connection.
        self._process: SpawnProcess = context.Process(target=serve, args=(theirs, self.source))
        self._process.start()
        theirs.close()
        self.started += 1
        self._wait_until_ready()

    def load(self, source: ProgramSource) -> None:
        """Go on with another program, in the same process. Raises UsageError where it can't be made; then too."""
        self.source = source
        self._connection.send(("load", source))
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        if not self._connection.poll(START_SECONDS):
            self.close()
            raise NotLoaded(f"the process for histories has not answered in {START_SECONDS:g} s")
        try:
            kind, value = self._connection.recv()
        except EOFError:
            self.close()
            # Nothing was raised: what is loaded has ended it, rather than the user's own function.
            raise NotLoaded(f"the process for histories {self._end()} while it made the program") from None
        if kind in _FAILURES:
            raise _FAILURES[kind](value)
        self.offered: dict[str, list[str]] = value[0]
        self.paths: list[str] = value[1]
        """Of all submodules."""

    def run(self, history: Sequence, without: tuple[str, ...] = (), backend: Any = None) -> Told:
        """Run a history there; ``without`` and ``backend`` as for :func:`~.history_run.run_history`."""
        self._connection.send(("run", (as_plain(history), without, backend)))
        index, side = 0, "eager"
        while True:
            try:
                if not self._connection.poll(HISTORY_SECONDS):
                    message = f"the {side} side has not come back in {HISTORY_SECONDS:g} s"
                    self._start_again()
                    return Told("hang", side, message, index, side)
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                self._process.join(START_SECONDS)
                message = f"the {side} side {self._end()}"
                self._start_again()
                # Our own comparing is no side of the user's.
                if side == "comparing":
                    raise OwnFailure(f"comparing a call, the process for histories {self._end()}") from None
                return Told("crash", side, message, index, side)
            if kind == "at":
                index, side = value
            elif kind == "failed":
                raise OwnFailure(value)
            else:
                return Told(**value)

    def culprit(self, history: Sequence, without: tuple[str, ...], backend: str, told: Told,
                seconds: float) -> dict[str, Any]:
        """The operator to blame, as :func:`~.history_culprit.history_culprit` has it; it ends the process at worst."""
        about = {"kind": told.kind, "message": told.message}
        self._connection.send(("culprit", (as_plain(history), without, backend, about, seconds)))
        why = f"the search has not come back in {seconds + HISTORY_SECONDS:g} s"
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(seconds + HISTORY_SECONDS):
                kind, value = self._connection.recv()
                if kind == "culprit":
                    return dict(value)
                raise OwnFailure(value)
        if not self._process.is_alive():
            why = f"the search {self._end()}"
        self._start_again()
        return Culprit(backend, why_not=why).to_dict()

    def linear_stand_ins(self) -> dict[str, str]:
        """By path of a part the Linear that fits in its place; none where eager does not take a plain call."""
        self._connection.send(("linear_stand_ins", dict(self.source.sizes)))
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll(HISTORY_SECONDS):
                _, value = self._connection.recv()
                return dict(value)
        self._start_again()
        return {}

    def _end(self) -> str:
        return ended_in_words(self._process.exitcode)

    def _start_again(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(connection: Connection, source: ProgramSource) -> None:
    """The worker's side: make the program, then run histories until the other side closes."""
    from pytest_torchcompile.state.torch_state import isolated, same_random_draws

    program, answer = _made_program(source)
    if program is None:
        connection.send(answer)
        return
    with isolated([]), same_random_draws():
        connection.send(answer)
        for answer in _answers(connection, program):
            connection.send(answer)


def _ask_for_settings(settings: Iterable[str]) -> None:
    """Raises NotLoaded for a setting that this torch does not have, or that has values of another kind."""
    for setting in settings:
        path, _, value = setting.partition("=")
        module, _, name = path.rpartition(".")
        try:
            known = importlib.import_module(module).get_config_copy()
        except (ImportError, AttributeError):
            raise NotLoaded(f"--compile-fuzz-settings: {module} is no module of settings in this torch; expected one "
                            "such as torch._dynamo.config") from None
        if name not in known:
            raise NotLoaded(f"--compile-fuzz-settings: this torch has no setting {module}.{name}; "
                            f"{nearest(name, known)}")
        # Any text would count as true.
        if isinstance(known[name], bool) and not isinstance(setting_value(value), bool):
            raise NotLoaded(f"--compile-fuzz-settings: {module}.{name} is {known[name]} in this torch; {value!r} is "
                            "none of its values, expected True or False")


def _made_program(source: ProgramSource) -> tuple[Program | None, tuple[str, Any]]:
    """The program, and what is said of it: what it offers, or why there is none."""
    from pytest_torchcompile.contract.history_run import offered_choices

    try:
        program = source.load()
        module, batch = program.make_model(), program.batch(source.sizes, program.seed)
        _ask_for_settings(source.settings)
    except NotLoaded as error:
        return None, ("not_loaded", str(error))
    except OwnFailure as error:
        return None, ("own", str(error))
    except Exception as error:
        return None, ("failed", f"{type(error).__name__}: {error}")
    try:
        offered = offered_choices(module, batch, source.names)
        if "torch_settings" in offered:
            offered["torch_settings"] += source.settings
        paths = [path for path, _ in module.named_modules() if path]
    except Exception:
        # No function of the user's runs here.
        return None, ("own", own_failure_text())
    return program, ("ready", (offered, paths))


def _answers(connection: Connection, program: Program) -> Iterator[tuple[str, Any]]:
    from pytest_torchcompile.contract.history_run import run_history

    def tell(index: int, side: str) -> None:
        connection.send(("at", (index, side)))

    while True:
        try:
            order, given = connection.recv()
        except (EOFError, OSError):
            return
        if order == "load":
            made, answer = _made_program(given)
            program = made or program
            yield answer
            continue
        if order == "culprit":
            yield _culprit_answer(program, given)
            continue
        if order == "linear_stand_ins":
            found: dict[str, str] = {}
            # What eager raises on a plain call is told elsewhere.
            with contextlib.suppress(Exception):
                found = linear_stand_ins(program.make_model(), program.batch(given, program.seed))
            yield "linear_stand_ins", found
            continue
        plain, without, backend = given
        try:
            outcome = run_history(program, from_plain(plain), tell, without, backend)
        except Exception:
            # Of ours: what the model raises is recorded.
            yield "failed", own_failure_text()
            continue
        counts = {name: getattr(outcome, name)
                  for name in ("calls", "refused", "mute", "graphs", "hits", "misses", "seconds", "in_calls")}
        problem = outcome.problem
        if problem is None:
            yield "done", {"counts": counts}
        else:
            yield "done", {"kind": problem.kind, "where": problem.where, "message": problem.message, "at": outcome.at,
                           "moved": outcome.moved, "counts": counts}


def _culprit_answer(program: Program, given: tuple[Any, ...]) -> tuple[str, Any]:
    # Here, for few histories show anything.
    from pytest_torchcompile.contract.history_culprit import history_culprit

    plain, without, backend, about, seconds = given
    try:
        return "culprit", history_culprit(program, from_plain(plain), without, backend, about, seconds)
    except Exception:
        return "failed", own_failure_text()
