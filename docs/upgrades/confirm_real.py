"""Confirms the pages of real.yaml with torch alone: run it by the Python of each environment, with names of models.

Only models and batches come from the package. Graph breaks are those of ``torch._dynamo.explain``, compiles those of
``get_compilation_metrics``. ``confirm_kernels.py`` is for the kernels.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics, set_compilation_metrics_limit

from pytest_torchcompile.batch import Batch
from pytest_torchcompile.dims import batch_sizes
from pytest_torchcompile.loading import resolve
from pytest_torchcompile.plan.matrix import load_matrix

matrix = load_matrix("matrix/real.yaml")


def build(name: str) -> tuple[torch.nn.Module, list[Batch]]:
    """The model in evaluation mode, and its batches."""
    entry = matrix.models[name]
    torch.manual_seed(0)
    model = resolve(entry.factory, matrix.root, "the factory")(**entry.arguments_of("factory")).eval()
    inputs = resolve(entry.inputs, matrix.root, "the inputs")
    return model, [Batch.of(inputs(**entry.arguments_of("inputs"), **sizes)) for sizes in batch_sizes(entry.dims)]


def main(names: list[str]) -> None:
    """Print what torch says of each model."""
    # Torch keeps 64 by default, and forgets the first ones.
    set_compilation_metrics_limit(100_000)
    print("torch", torch.__version__)
    for name in names:
        model, batches = build(name)
        with torch.no_grad():
            report = torch._dynamo.explain(model)(*batches[0].args, **batches[0].kwargs)
            places = Counter(f"{reason.user_stack[-1].filename.rpartition('/')[2]}:{reason.user_stack[-1].lineno}"
                             for reason in report.break_reasons)
            print(name, "graph breaks of the first batch:", sorted(places.items()))
            torch._dynamo.reset()
            clear_compilation_metrics()
            compiled = torch.compile(model, backend="aot_eager")
            # Twice, as a cell calls it: once every size was met, it is called with each of them again.
            for batch in [*batches, *batches]:
                compiled(*batch.args, **batch.kwargs)
        print_compiles(name)
        torch._dynamo.reset()


def print_compiles(name: str) -> None:
    """Where functions resume after a graph break, and what was compiled again, for which reasons."""
    resumed: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for each in get_compilation_metrics():
        function, _, line = each.co_name.removeprefix("torch_dynamo_resume_in_").partition("_at_")
        if line:
            resumed[f"{function}:{line}"] += 1
        if int(each.compile_id.partition("/")[2].partition("_")[0] or 0) > 0:
            again[f"{function}: {reason_of(each)}"] += 1
    print(name, "resumes at:", sorted(resumed.items()))
    for text, times in sorted(again.items()):
        print(name, f"compiled again, {times} times:", text)


def reason_of(compiled: Any) -> str:
    """The first guard that failed, without the number of the entry that it is a guard of."""
    line = (compiled.recompile_reason or "").strip().partition("\n")[0]
    return line.partition(": ")[2][:100]


if __name__ == "__main__":
    main(sys.argv[1:])
