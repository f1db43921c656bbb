"""Are explanations true? Models are explained, and each claim is held against something that knows nothing of it.

- Kernels: what each reads and writes, against the generated code: the memory that it is given, shapes, dtypes, bytes.
- Decompositions: operators before them, against a second capture without any.
- The exported graph: run in a process of its own, it has to return what the compiled graph returned.

    python benchmarks/explain_models.py matrix/real.yaml bert gpt2 --phase inference
    python benchmarks/explain_models.py matrix/gpu.yaml mini_gpt --device cuda --output found.json --pages pages

What is wrong is listed behind each row; it ends with 1 then. The file has each model as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
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
from pytest_torchcompile.explain.explanation_text import explanation_lines
from pytest_torchcompile.explain.page import explanation_page
from pytest_torchcompile.explain.roofline import Roofline
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


@dataclass
class Checked:
    """One model: how much was held against something else, and what is wrong."""

    model: str
    frames: int
    calls: int
    generated: int
    reads_and_writes: int
    taken_apart: int
    programs: int
    seconds: float
    wrong: list[str]

    def row(self) -> str:
        """The figures."""
        return (f"{self.model:12} {self.frames:3} frames {self.calls:4} calls {self.generated:4} generated "
                f"{self.reads_and_writes:5} reads and writes {self.taken_apart:4} taken apart {self.programs:3} "
                f"programs {len(self.wrong):3} wrong {self.seconds:6.1f} s")


def check_model(matrix: Matrix, cell: Cell, pages: Path | None) -> Checked:
    """Explain a model, hold it against the rest, and write its page."""
    begun = time.perf_counter()
    explained = explain_cell(matrix, PlannedCell(cell))
    seconds = time.perf_counter() - begun
    generated = [kernel for kernel in explained.kernels if kernel.source]
    bare = [kernel.name for kernel in generated if not (kernel.operators and kernel.writes)]
    # Kernels of a GPU are not timed one by one, which is said of each model.
    lost = [text for text in explained.lost if not text.startswith("seconds of single kernels on a GPU")]
    wrong = [*lost, *differences(explained), *(f"{name}: no operators or writes" for name in bare)]
    if explained.error:
        wrong.append(f"it raised {explained.error}")
    apart, mistaken = wrong_decompositions(matrix, cell)
    programs, failed = runs_again(explained)
    wrong += [*mistaken, *failed]
    if pages is not None:
        pages.mkdir(parents=True, exist_ok=True)
        roofline = Roofline.of(explained, cell.device)
        (pages / f"{cell.model}.html").write_text(explanation_page(explained, roofline), encoding="utf-8")
        text = "\n".join([*explanation_lines(explained), "", *roofline.lines()])
        (pages / f"{cell.model}.txt").write_text(text + "\n", encoding="utf-8")
    tensors = sum(len(kernel.reads) + len(kernel.writes) for kernel in explained.kernels)
    return Checked(cell.model, len(explained.compile_ids), len(explained.kernels), len(generated), tensors, apart,
                   programs, seconds, wrong)


def main() -> None:
    """Explain and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--phase", choices=("inference", "training"), default="training")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="write what was found as JSON")
    parser.add_argument("--pages", type=Path, help="write each page and text into this folder")
    given = parser.parse_args()
    matrix = load_matrix(given.matrix)
    done: list[Checked] = []
    for name in given.models:
        torch.manual_seed(0)
        try:
            checked = check_model(matrix, Cell(model=name, phase=given.phase, device=given.device), given.pages)
        except Unavailable as why:
            print(f"{name:12} skipped: {why}")
            continue
        print(checked.row(), flush=True)
        for text in checked.wrong[:10]:
            print(f"    {text}", flush=True)
        done.append(checked)
        if given.output:
            given.output.write_text(json.dumps([asdict(each) for each in done], indent=1), encoding="utf-8")
    sys.exit(not done or any(checked.wrong for checked in done))


if __name__ == "__main__":
    main()
