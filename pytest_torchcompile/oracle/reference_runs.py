"""reference(): what the program computes without rounding, and how much rounding moves it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.oracle.estimate import Estimate
from pytest_torchcompile.oracle.noise import Dice, Wide
from pytest_torchcompile.oracle.precision import input_units
from pytest_torchcompile.oracle.recorder import record
from pytest_torchcompile.oracle.recording import Recording
from pytest_torchcompile.oracle.state import StateSnapshot
from pytest_torchcompile.oracle.tape import Tape
from pytest_torchcompile.oracle.units import FLOAT32_UNIT, narrowest_unit, unit_of, widened

__all__ = ["DRAWS", "FURTHER_DRAWS", "Reference", "reference"]

DRAWS = 4
FURTHER_DRAWS = 32
_FLOAT64_UNIT = unit_of(torch.float64)


class Reference:
    """Expected values with their noise, by the names of a ``Recording``.

    ``kind`` says how they were made:

    ==================  ==================================================================================
    ``float64``         a float64 run of the program; noise by Monte-Carlo arithmetic at every operator
    ``same-precision``  the model is float64 already: a run of it, noise of one or two units in the last place
    ``float32``         for half precision where float64 can't be had: the same in float32
    ``float64-inputs``  a float64 run without a look at its operators; noise by perturbed parameters and inputs
    ``eager-only``      nothing wider can be had: eager itself, and a scale made from its dtype
    ==================  ==================================================================================
    """

    def __init__(
        self,
        module: torch.nn.Module | Callable[..., Any],
        batch: Batch,
        *,
        loss: Callable[[Any, Any], Any] | None,
        train: bool,
        seed: int,
        tape: Tape | None,
        unit: float | None,
    ) -> None:
        self._batch = batch.clone()
        self._loss, self._train, self._seed, self._tape = loss, train, seed, tape
        self._twin: Recording | None = None
        self._dice = Dice(seed + 1000)
        self.kind = "eager-only"
        self.why = ""
        """Why it is not ``float64``."""
        self.estimates: dict[str, Estimate] = {}
        self.draws = 0
        whole = module if isinstance(module, torch.nn.Module) else _Function(module)
        self.unit: float = unit or _unit(whole, self._batch, tape)
        try:
            self._module = copy.deepcopy(whole)
        except Exception as error:
            self.why = f"the model can't be copied ({type(error).__name__}: {error})"
            self._twin = self._in_place(whole)
            self._stay()
        else:
            self._climb()

    def more(self) -> None:
        """Draw 32 more, half of them with twice the noise, so that knife-edge decisions are seen to flip; once."""
        if self.kind != "eager-only" and self.draws <= DRAWS:
            for number in range(FURTHER_DRAWS):
                self._draw(1.0 + number % 2)

    def twin(self) -> Recording:
        """A second eager run from the same state and seed: what differs from the first is not deterministic."""
        if self._twin is None:
            self._twin = self._in_place(copy.deepcopy(self._module))
        return self._twin

    def _in_place(self, module: torch.nn.Module) -> Recording:
        before = StateSnapshot(module)
        with _quiet():
            seen = record(module, module, self._batch, loss=self._loss, train=self._train, seed=self._seed)
        before.restore()
        return seen

    def _stay(self) -> None:
        self.kind, self.draws = "eager-only", 0
        self.estimates = {name: Estimate(value) for name, _, value in self.twin().values()}

    def _climb(self) -> None:
        """Take the first kind of reference that this program can run as."""
        same = self.unit <= _FLOAT64_UNIT
        kinds = ["same-precision"] if same else ["float64", *(["float32"] if self.unit > FLOAT32_UNIT else []), "float64-inputs"]
        reasons = []
        for kind in kinds:
            self.kind, self.estimates, self.draws = kind, {}, 0
            exact = self._run(0.0)
            if exact.error is None:
                self.estimates = {name: Estimate(value) for name, _, value in exact.values()}
                for _ in range(DRAWS):
                    self._draw(1.0)
                if self.draws:
                    break
            reasons.append(f"{kind}: {exact.error or 'every noise draw raised'}")
        else:
            self._stay()
        self.why = "; ".join(reasons)

    def _draw(self, noise: float) -> None:
        drawn = self._run(noise)
        if drawn.error is not None:
            return
        self.draws += 1
        values = {name: value for name, _, value in drawn.values()}
        for name, estimate in self.estimates.items():
            estimate.add(values.get(name))

    def _run(self, noise: float) -> Recording:
        wide = torch.float32 if self.kind == "float32" else torch.float64
        module, batch = _widened(copy.deepcopy(self._module), wide), self._batch.to(dtype=wide)
        mode = None
        if self.kind == "float64-inputs":
            _perturb(module, batch, self._dice, noise * self.unit)
        else:
            # one rounding of float64 itself can't be drawn with less than a unit in the last place
            unit = noise * (2 * self.unit if self.kind == "same-precision" else self.unit)
            mode = Wide(
                wide,
                self._tape,
                dice=self._dice,
                unit=unit,
                accumulator=noise * (2 * _FLOAT64_UNIT if self.kind == "same-precision" else FLOAT32_UNIT),
                inputs=input_units(self._batch, self._module, self.unit) if noise else None,
            )
        with _quiet(), _default_dtype(wide):
            return record(module, module, batch, loss=self._loss, train=self._train, seed=self._seed, mode=mode)


class _Function(torch.nn.Module):
    """A model that is a plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def reference(
    module: torch.nn.Module | Callable[..., Any],
    batch: Batch,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    train: bool = True,
    seed: int = 0,
    tape: Tape | None = None,
    unit: float | None = None,
) -> Reference:
    """Run copies of ``module`` in float64, once exactly and four times with rounding noise.

    Args:
        module: The eager model in the state from which the recordings started; copied, never changed.
        batch: What the recordings were made with.
        loss: As for ``record``.
        train: As for ``record``.
        seed: As for ``record``; the noise is drawn from it too, so that a verdict can be repeated.
        tape: Of the eager recording, so that dropout and its kin draw the same numbers.
        unit: The unit roundoff to assume; ``None``: the tape's, else the one of the narrowest floating dtype among
            parameters, buffers and inputs.
    """
    return Reference(module, batch, loss=loss, train=train, seed=seed, tape=tape, unit=unit)


def _unit(module: torch.nn.Module, batch: Batch, tape: Tape | None) -> float:
    tensors = [*module.parameters(), *module.buffers(), *batch.tensors()]
    units = [narrowest_unit(tensors), tape.unit if tape is not None else None]
    return max((u for u in units if u is not None), default=unit_of(torch.get_default_dtype()))


def _widened(module: torch.nn.Module, wide: torch.dtype) -> torch.nn.Module:
    """Widen parameters and buffers in place; complex ones stay complex, unlike with ``Module.to``."""
    done: dict[int, torch.Tensor] = {}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(widened(parameter.dtype, wide))
        parameter.grad = None
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = done.setdefault(id(buffer), buffer.to(widened(buffer.dtype, wide)))
    return module


def _perturb(module: torch.nn.Module, batch: Batch, dice: Dice, unit: float) -> None:
    if unit:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *batch.tensors()):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.addcmul_(tensor, dice.throw(tensor), value=unit)


@contextmanager
def _default_dtype(wide: torch.dtype) -> Iterator[None]:
    """Float64 by default; attention written out, so that its inner roundings are drawn; nothing compiled inside."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """The eager run has said its warnings already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
