"""The ledger in training loops: over many steps, one for each epoch, and beside threads that never stop calling."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pytest_torchcompile.ledger import observe

pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def training(seen, epochs, sizes):
    """Train a compiled model, each epoch with a ledger of its own inside the whole run's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    ledgers = []
    for epoch in range(epochs):
        with seen.during(f"epoch {epoch}"), observe() as own:
            for size in sizes[: epoch + 1]:
                optimizer.zero_grad()
                compiled(torch.ones(size, 4)).sum().backward()
                optimizer.step()
        ledgers.append(own)
    return ledgers


def test_each_epoch_has_its_own_part_of_the_whole():
    """Compiles belong to the epoch in which they happened, backward ones too; every run is counted in both."""
    with observe() as seen:
        epochs = training(seen, 3, (2, 3, 4))
    assert [[c.kind for c in own.compiles] for own in epochs] == [
        ["first", "backward"], ["recompile", "backward"], ["recompile", "backward"]]  # fmt: skip
    assert [c.during for c in seen.compiles] == ["epoch 0"] * 2 + ["epoch 1"] * 2 + ["epoch 2"] * 2
    assert [sum(g.runs for g in own.graphs) for own in epochs] == [1, 2, 3]
    assert sum(g.runs for g in seen.graphs) == 6
    assert [*seen.eager_frames, *seen.graph_breaks, *seen.failures, *seen.lost] == []


def test_a_step_that_raises_ends_its_own_ledger_only():
    """The outer ledger goes on; the inner one has what came before."""

    def step():
        compiled(torch.ones(2))
        raise ValueError("mine")

    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with observe() as outer:
        with pytest.raises(ValueError, match="mine"), observe() as inner:
            step()
        compiled(torch.ones(3))
    assert (len(inner.compiles), len(outer.compiles)) == (1, 2)


def test_ledgers_that_are_closed_in_another_order():
    """The one opened first may be closed first; the other still sees everything."""
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    first, second = observe(), observe()
    one, two = first.__enter__(), second.__enter__()
    compiled(torch.ones(2))
    first.__exit__(None, None, None)
    compiled(torch.ones(3))
    second.__exit__(None, None, None)
    assert (len(one.compiles), len(two.compiles)) == (1, 2)
    assert [g.runs for g in two.graphs] == [1, 1]


def test_opening_and_closing_beside_a_thread_that_calls():
    """A call that runs while the hooks go in or out is no alarm, and raises nothing."""
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    stop, failures = threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                compiled(torch.ones(2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        ledgers = []
        for _ in range(100):
            with observe() as seen:
                compiled(torch.ones(2))
            ledgers.append(seen)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert [r for seen in ledgers for r in (*seen.compiles, *seen.eager_frames, *seen.failures, *seen.lost)] == []
    assert all(sum(g.runs for g in seen.graphs) >= 1 for seen in ledgers)
