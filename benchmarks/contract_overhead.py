"""What a history costs over a plain loop of its calls: ``python benchmarks/contract_overhead.py [BACKEND] [EACH]``.

The plain loop has the same modules, mutations and batches, eager and compiled, forward, loss and backward, and looks at
nothing. Both take turns, so that what else the machine does meets both.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from contract_clean import mutated_histories, programs, source_of
from torch.utils import _pytree as pytree

from pytest_torchcompile.contract.changed_batch import changed_batch
from pytest_torchcompile.contract.history_run import Program, offered_choices, run_history
from pytest_torchcompile.contract.hunt import program_of
from pytest_torchcompile.contract.mutation import in_order
from pytest_torchcompile.fuzz.drawn_call import Sequence
from pytest_torchcompile.state.torch_state import forget_compiled, isolated, same_random_draws

WANTED = ("Linear(6, 5)", "Conv2d(4, 6, 3, padding=1)", "BatchNorm2d(4)", "LSTMCell(6, 5)", "chain 3", "chain 8",
          "mini_gpt")


def call_once(module: Any, compile: Callable[..., Any] | None, batch: Any, changes: dict[str, str], seed: int) -> None:
    """One call on one side; what it raises is nobody's business here."""
    module.zero_grad()
    mutations = in_order(changes)
    function = module if compile is None else compile(module)
    batch = changed_batch(batch, changes)
    if batch is None:
        return
    for each, choice in mutations:
        if each.kind == "call":
            module, function = each.act(module, compile, choice)
    torch.manual_seed(seed)
    try:
        with ExitStack() as stack:
            for each, choice in mutations:
                if each.kind == "around":
                    stack.enter_context(each.act(choice, "cpu"))
            output = function(*batch.args, **batch.kwargs)
        floats = [y for y in pytree.tree_leaves(output) if isinstance(y, torch.Tensor) and y.is_floating_point()]
        loss = sum(y.float().square().mean() for y in floats)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
    except Exception:  # what eager refuses both loops try
        return


def plain_loop(program: Program, history: Sequence) -> float:
    """Seconds of the calls alone."""
    forget_compiled()
    start = time.perf_counter()
    sides = [(program.make_model(), None), (program.make_model(), functools.cache(
        functools.partial(torch.compile, **program.settings)))]
    for index, drawn in enumerate(history):
        changes = dict(drawn.mutations)
        batch = program.batch(dict(drawn.sizes), program.seed + index)
        for module, compile in sides:
            for each, choice in in_order(changes):
                if each.kind == "module":
                    each.act(module, choice)
            if drawn.training is not None:
                module.train(drawn.training)
            call_once(module, compile, batch, changes, index)
    return time.perf_counter() - start


def main() -> None:
    backend, each_program = "aot_eager", "12"
    if len(sys.argv) > 1:
        backend = sys.argv[1]
    if len(sys.argv) > 2:
        each_program = sys.argv[2]
    folder = Path(".compile-matrix/contract_overhead")
    folder.mkdir(parents=True, exist_ok=True)
    ratios, ours, theirs = [], 0.0, 0.0
    with isolated([]), same_random_draws():
        for name, text, about in programs(False):
            if about not in WANTED:
                continue
            source, dims = source_of(name, text, folder, backend, "cpu")
            program = program_of(source.data)
            offered = offered_choices(program.make_model(), program.batch(source.sizes, 0), source.names)
            for number, history in enumerate(mutated_histories(dims, offered, int(each_program), 1)):
                came = run_history(program, history, lambda index, side: None)
                # What raises in the middle makes both shorter, and not alike.
                if came.refused or came.problem is not None:
                    continue
                seconds = plain_loop(program, history)
                came = run_history(program, history, lambda index, side: None)
                if number:
                    ratios.append(came.seconds / seconds)
                    ours, theirs = ours + came.seconds, theirs + seconds
            print(f"{about}: {len(ratios)} so far, median {statistics.median(ratios):.2f}", flush=True)
    print(f"{backend}: {len(ratios)} histories, median {statistics.median(ratios):.2f}, sum {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
