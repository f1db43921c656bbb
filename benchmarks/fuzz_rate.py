"""How many drawn sequences a second fuzzing runs: ``python benchmarks/fuzz_rate.py``.

For each backend the same sequences of shapes, each from a fresh compiler state, in turn by the check ``fuzz`` (every
call compared by the oracle, forward and backward; the ledger judged) and by a plain loop that resets, compiles, calls
eager and compiled, runs both backward and compares gradients with ``assert_close``. Medians over the sequences;
Inductor's caches are warm for both after a first round that is not counted.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time
import warnings

import torch

from pytest_torchcompile import zoo
from pytest_torchcompile.batch import Batch
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.fuzz.drawn_call import shape_sequences
from pytest_torchcompile.fuzz.sequence_run import Attempts
from pytest_torchcompile.oracle.calls import Side
from pytest_torchcompile.oracle.training import default_loss
from pytest_torchcompile.state.torch_state import same_random_draws

MODELS = {
    "tiny_head": (zoo.tiny_head, zoo.vector_batch, {"B": Dim(min=1, max=64)}),
    "mini_gpt": (zoo.mini_gpt, zoo.token_batch, {"B": Dim(min=1, max=8), "S": Dim(min=2, max=64)}),
}


def sequences(dims, count: int) -> list:
    """The first sequences that the check would draw."""
    import hypothesis

    drawn: list = []

    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(shape_sequences(dims))
    def draw(sequence) -> None:
        drawn.append(sequence)

    draw()
    return drawn[:count]


def attempts(model, inputs, backend: str) -> Attempts:
    """What the check runs."""
    def make(settings):
        module = copy.deepcopy(model)
        return Side(module if settings is None else torch.compile(module, **settings), module)

    def batch(sizes, seed):
        torch.manual_seed(seed)
        return Batch.of(inputs(**sizes))

    return Attempts(make, model, {"backend": backend, "dynamic": None}, batch)


def plain(model, inputs, backend: str):
    """The loop that one would write by hand."""
    def run(sequence) -> None:
        torch.compiler.reset()
        compiled = torch.compile(copy.deepcopy(model), backend=backend)
        for k, each in enumerate(sequence):
            torch.manual_seed(k)
            batch = Batch.of(inputs(**dict(each.sizes)))
            for call in (model, compiled):
                call.zero_grad()
                default_loss(call(*batch.args, **batch.kwargs)).backward()
            for mine, found in zip(model.parameters(), compiled.parameters(), strict=True):
                torch.testing.assert_close(found.grad, mine.grad, rtol=1e-3, atol=1e-4)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=12)
    parser.add_argument("--backends", nargs="*", default=("eager", "aot_eager", "inductor"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    print("| model | backend | sequences a second | plain loop | our seconds over its |\n|---|---|---|---|---|")
    with same_random_draws():
        for name, (factory, inputs, dims) in MODELS.items():
            torch.manual_seed(0)
            model = factory().train()
            drawn = sequences(dims, options.examples)
            for backend in options.backends:
                ways = {"ours": attempts(model, inputs, backend), "plain": plain(model, inputs, backend)}
                taken: dict[str, list[float]] = {way: [] for way in ways}
                for counted in (False, True):
                    for sequence in drawn:
                        for way, run in ways.items():
                            start = time.perf_counter()
                            run(sequence)
                            if counted:
                                taken[way].append(time.perf_counter() - start)
                ours, loop = (statistics.median(taken[way]) for way in ways)
                ratio = statistics.median(a / b for a, b in zip(*taken.values(), strict=True))
                print(f"| {name} | {backend} | {1 / ours:.2f} | {1 / loop:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
