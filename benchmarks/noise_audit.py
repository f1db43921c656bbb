"""Where the oracle's noise is no measure of rounding: ``python benchmarks/noise_audit.py --out audit.jsonl``.

Nothing is compiled. Each program runs eagerly and as its reference with four noise draws, forward and backward, and its
leaves are asked three things. Told is what a comparison would suffer from:

* ``blunt``: noise of a leaf is 300 times eager's own error and a thousandth of its values: errors pass there;
* ``sharp``: eager's own error is 16 times the noise: a right compiler would be accused;
* ``nan``: a draw is NaN or infinite where the value is not: what rounding decides, or an operator that is not known.

Programs: models of ``matrix/real.yaml`` that are installed, layers, operators and chains of the contract's hunt.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.contract.layer_library import LAYERS, chain_source, layer_source
from pytest_torchcompile.contract.operator_library import OPERATORS, operator_source
from pytest_torchcompile.oracle import Tape, record, reference
from pytest_torchcompile.oracle.estimate import Estimate, as_real
from pytest_torchcompile.oracle.operator_rounding import unit_of
from pytest_torchcompile.plan.matrix import load_matrix
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run import subject
from pytest_torchcompile.state.snapshot import StateSnapshot

BLUNT, LOUD, SHARP = 300.0, 1e-3, 16.0
DRAWS = 4
Made = tuple[Callable[[], Any], Callable[[], Any]]


def small_programs(chains: int) -> Iterator[tuple[str, Made]]:
    """Name, and what makes the model and its batch."""
    for number, (layer, _) in enumerate(LAYERS):
        yield layer, _made_from(layer_source(number))
    for number, operator in enumerate(OPERATORS):
        yield operator[0], _made_from(operator_source(number))
    for seed in range(chains):
        yield f"chain {seed}", _made_from(chain_source(seed))


def _made_from(source: str) -> Made:
    names: dict[str, Any] = {}
    exec(source, names)
    return names["model"], lambda: names["inputs"](3)


def leaves_off(make: Callable[[], Any], given: Any, loss: Any, train: bool) -> dict[str, str]:
    """Each leaf of which something is told, and what."""
    model = make()
    batch, tape = Batch.of(given), Tape()
    snapshot = StateSnapshot(model)
    eager = record(model, model, batch, loss=loss, train=train, mode=tape)
    snapshot.restore()
    if eager.error is not None:
        return {"": f"eager raises {eager.error}"}
    found = reference(model, batch, loss=loss, train=train, tape=tape)
    while found.draws < DRAWS and found.more():
        pass
    told = {}
    if found.kind != "float64":
        told[""] = f"reference is {found.kind}: {found.why}"
    values = eager.values_by_name()
    for name, estimate in found.estimates.items():
        text = _text_of(values.get(name), estimate)
        if text:
            told[name] = text
    return told


def _text_of(eager: Any, estimate: Estimate) -> str:
    if not isinstance(eager, torch.Tensor) or not estimate.continuous or estimate.spread is None or not eager.numel():
        return ""
    mine = as_real(eager.detach()).double().flatten()
    value = estimate.value.double().flatten()
    if mine.shape != value.shape:
        return "another shape"
    if estimate.brink is not None:
        return f"nan: {int(estimate.brink.sum())} of {value.numel()} elements"
    finite = mine.isfinite() & value.isfinite()
    if not bool(finite.any()):
        return ""
    size = _mean(value[finite])
    own = _mean((mine - value)[finite])
    noise = _mean(estimate.spread[finite].double()) / max(1, estimate.draws) ** 0.5
    rounding = max(own, unit_of(eager.dtype) * size)
    if noise > BLUNT * rounding and noise > LOUD * size:
        return f"blunt: noise {noise:.1e}, eager's error {own:.1e}, values {size:.1e}"
    floor = unit_of(eager.dtype) * size
    if own > SHARP * max(noise, floor):
        return f"sharp: noise {noise:.1e}, eager's error {own:.1e}, values {size:.1e}"
    return ""


def _mean(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def real_programs() -> Iterator[tuple[str, Made, Any]]:
    """Those of ``matrix/real.yaml`` that can be made here, in training, with their loss, at the first size."""
    matrix = load_matrix(Path(__file__).parent.parent / "matrix" / "real.yaml")
    root, chosen = Path(matrix.root), dict[str, Cell]()
    for planned in matrix.cells:
        cell = planned.cell
        if cell.device == "cpu" and cell.phase == "training":
            chosen.setdefault(cell.model, cell)
    for name, cell in chosen.items():
        entry = matrix.models[name]
        yield (name, (partial(subject.build_model, entry, cell, root, 0), partial(_first_batch, entry, cell, root)),
               subject.loss_function(entry, root))


def _first_batch(entry: ModelEntry, cell: Cell, root: Path) -> Any:
    return subject.make_batches(entry, cell, root, 0)[0][1].value


def with_ties(batch: Any) -> Any:
    """The batch with its numbers rounded to halves, so that many are equal, and some zero."""
    return pytree.tree_map_only(torch.Tensor, lambda x: (x * 2).round() / 2 if x.is_floating_point() else x, batch)


def main() -> None:
    """Audit all programs, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chains", type=int, default=100)
    parser.add_argument("--only", default="", help="names that have this in them")
    parser.add_argument("--ties", action="store_true", help="inputs rounded to halves: equal numbers, and zeros")
    parser.add_argument("--real", action="store_true", help="models of matrix/real.yaml alone")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    programs = [(*each, None) for each in small_programs(options.chains)]
    if options.real:
        programs = list(real_programs())
    asked = told = 0
    for name, (make, inputs), loss in programs:
        if options.only not in name:
            continue
        asked += 1
        try:
            torch.manual_seed(0)
            batch = inputs()
            if options.ties:
                batch = with_ties(batch)
            found = leaves_off(make, batch, loss, train=True)
        except Exception as error:
            found = {"": f"{type(error).__name__}: {error}"[:200]}
        told += bool(found)
        for leaf, text in found.items():
            print(f"{name}: {leaf or 'all'}: {text}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({"program": name, "told": found}) + "\n")
    print(f"{asked} programs, {told} of which something is told")


if __name__ == "__main__":
    main()
