"""Disturbed runs: the rounding noise of a program that can be run again, and neither copied nor widened.

A model that is spread over ranks is such a one. It is run with each parameter, buffer and input changed by about one
rounding: every operator behind rounds anew, and what that does to the results is their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pytest_torchcompile.oracle.dice import DRAWS, FEW, noise_of_draw
from pytest_torchcompile.oracle.draw_rows import add_draw
from pytest_torchcompile.oracle.expected import Reference
from pytest_torchcompile.oracle.recording import Recording

__all__ = ["DisturbedRuns", "disturb"]

_SEED_STRIDE = 7919
"""Between the seeds of two tensors; a prime, so that those of another draw are others."""


class DisturbedRuns(Reference):
    """Eager itself, and noise drawn by disturbed eager runs.

    ``run(seed, factor)`` makes one, with ``factor`` times the noise of one rounding; with 0 it is the plain run again.
    It is collective, so draws are made when all ranks ask for them, not when a comparison does.
    """

    def __init__(self, eager: Recording, run: Callable[[int, float], Recording]) -> None:
        """Make the first :data:`FEW` draws: after one alone, each further one would need a vote of all ranks."""
        super().__init__(eager)
        self.kind, self.why = "eager-draws", "the model is spread over ranks"
        self._run = run
        # Undisturbed: what it does otherwise than the first run is no noise of rounding.
        self._twin = run(0, 0.0)
        self._draw(range(FEW))

    def draw_further(self) -> None:
        """Draw more, and every other loud, so that decisions on a knife's edge are seen to flip."""
        self._draw(range(FEW, DRAWS[-1]))

    def twin(self) -> Recording:
        """A second eager run from the same state and seed."""
        return self._twin

    def _draw(self, numbers: range) -> None:
        for number in numbers:
            noise, share = noise_of_draw(number)
            # The seed 0 is the plain run's.
            drawn = self._run(number + 1, noise)
            # A draw that raises says nothing of the noise.
            if drawn.error is not None:
                continue
            values = drawn.values_by_name()
            add_draw([(estimate, values.get(name)) for name, estimate in self.estimates.items()], share)
        self.draws += len(numbers)


@torch.no_grad()
def disturb(tensors: Iterable[torch.Tensor], seed: int, unit: float) -> None:
    """Multiply each element by a factor within ``2 * unit`` of 1, in place; one unit would be rounded away.

    What is replicated on several ranks stays equal on them: the factors depend on the seed, a tensor's number and its
    shape. Of a distributed tensor the local part is changed.
    """
    for number, tensor in enumerate(tensors):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if not _can_be_disturbed(local):
            continue
        generator = torch.Generator(local.device).manual_seed(seed + _SEED_STRIDE * number)
        dtype = local.dtype.to_real() if local.is_complex() else local.dtype
        factor = torch.rand(local.shape, generator=generator, device=local.device, dtype=dtype)
        local.mul_(factor.mul_(4).sub_(2).mul_(unit).add_(1))


def _can_be_disturbed(tensor: torch.Tensor) -> bool:
    """Numbers with a fraction, of more than one byte: narrower ones have no kernels for this."""
    if tensor.layout is not torch.strided or tensor.dtype.itemsize == 1:
        return False
    return tensor.is_floating_point() or tensor.is_complex()
