"""Are explanations true? Models are explained, and each claim is held against something that knows nothing of it.

- Kernels: what each reads and writes, against the generated code: the memory that it is given, shapes, dtypes, bytes.
- Decompositions: operators before them, against a second capture without any.
- The exported graph: run in a process of its own, it has to return what the compiled graph returned.

    python benchmarks/explain_models.py matrix/real.yaml bert gpt2 --phase inference
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch._inductor.decomposition import select_decomp_table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from explain.captures import operators_of, without_code
from explain.generated_code import differences

from pytest_torchcompile.cell import Cell
from pytest_torchcompile.errors import Unavailable
from pytest_torchcompile.explain import Explanation
from pytest_torchcompile.explain.command import explain_cell
from pytest_torchcompile.explain.runnable import write_runnables
from pytest_torchcompile.plan.expansion import PlannedCell
from pytest_torchcompile.plan.matrix import Matrix, load_matrix

# Backends of this module, by name: they trace, and generate no code.
plain = without_code({})
whole = without_code(select_decomp_table())


def runs_again(explained: Explanation) -> tuple[int, list[str]]:
    """How many exported graphs there are, and what those say that do not return what they should."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        programs = [name for name in write_runnables(explained, Path(folder)) if name.endswith(".py")]
        for name in programs:
            done = subprocess.run([sys.executable, Path(folder) / name], capture_output=True, text=True, check=False)
            if done.returncode:
                wrong.append(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    return len(programs), wrong


def wrong_decompositions(matrix: Matrix, cell: Cell) -> tuple[int, list[str]]:
    """How many operators were taken apart, and where the explanation and the second capture disagree."""
    with_table = explain_cell(matrix, PlannedCell(replace(cell, backend="explain_models:whole")))
    without = explain_cell(matrix, PlannedCell(replace(cell, backend="explain_models:plain")))
    said: Counter[str] = Counter(operator.operator for operator in with_table.operators)
    there: Counter[str] = Counter()
    for stage in without.traced_graphs:
        there += operators_of(stage)
    wrong = [f"operator {name}: {said[name]} explained, {there[name]} captured" for name in said | there
             if said[name] != there[name]]
    return sum(bool(operator.by) for operator in with_table.operators), wrong


def check_model(matrix: Matrix, cell: Cell) -> tuple[str, list[str]]:
    """A row of figures, and what is wrong."""
    begun = time.perf_counter()
    explained = explain_cell(matrix, PlannedCell(cell))
    seconds = time.perf_counter() - begun
    generated = [kernel for kernel in explained.kernels if kernel.source]
    bare = [kernel.name for kernel in generated if not (kernel.operators and kernel.writes)]
    wrong = [*explained.lost, *differences(explained), *(f"{name}: no operators or writes" for name in bare)]
    if explained.error:
        wrong.append(f"it raised {explained.error}")
    apart, mistaken = wrong_decompositions(matrix, cell)
    programs, failed = runs_again(explained)
    wrong += [*mistaken, *failed]
    tensors = sum(len(kernel.reads) + len(kernel.writes) for kernel in explained.kernels)
    return (f"{cell.model:12} {len(explained.compile_ids):3} frames {len(explained.kernels):4} calls "
            f"{len(generated):4} generated {tensors:5} reads and writes {apart:4} taken apart {programs:3} programs "
            f"{len(wrong):3} wrong {seconds:6.1f} s"), wrong


def main() -> None:
    """Explain and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--phase", choices=("inference", "training"), default="training")
    given = parser.parse_args()
    matrix = load_matrix(given.matrix)
    failed = False
    for name in given.models:
        torch.manual_seed(0)
        try:
            row, wrong = check_model(matrix, Cell(model=name, phase=given.phase))
        except Unavailable as why:
            print(f"{name:12} skipped: {why}")
            continue
        print(row, flush=True)
        for text in wrong[:10]:
            print(f"    {text}")
        failed = failed or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
