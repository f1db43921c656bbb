"""Confirms the page torch-2-12-1-to-2-13-0-real.md with torch alone: run it by the Python of each environment.

Only models and batches come from the package. Graph breaks are those of ``torch._dynamo.explain``, compiles those of
``get_compilation_metrics``, kernels those of ``run_and_get_code``.
"""

import sys
from collections import Counter

import torch
from torch._dynamo.utils import get_compilation_metrics
from torch._inductor.utils import run_and_get_code

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


print("torch", torch.__version__)
for name in sys.argv[1:]:
    model, batches = build(name)
    with torch.no_grad():
        report = torch._dynamo.explain(model)(*batches[0].args, **batches[0].kwargs)
        places = Counter(f"{reason.user_stack[-1].filename.rpartition('/')[2]}:{reason.user_stack[-1].lineno}"
                         for reason in report.break_reasons)
        print(name, "graph breaks of the first batch:", sorted(places.items()))
        torch._dynamo.reset()
        before = len(get_compilation_metrics())
        compiled = torch.compile(model, backend="aot_eager")
        for batch in batches:
            compiled(*batch.args, **batch.kwargs)
        again = Counter(each.co_name for each in get_compilation_metrics()[before:]
                        if int(each.compile_id.partition("/")[2].partition("_")[0] or 0) > 0)
        print(name, "compiled again:", sum(again.values()), sorted(again.items()))
        torch._dynamo.reset()
        if name == "gpt2":
            _, codes = run_and_get_code(torch.compile(model), *batches[0].args, **batches[0].kwargs)
            text = "\n".join(codes)
            print(name, "generated lines:", len(text.splitlines()), "with integer_div_error:",
                  text.count("integer_div_error_flag = &"), "kernels:", text.count('extern "C"'))
