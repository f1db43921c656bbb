"""Does a call draw random numbers? One answer for all who ask, held against the generator itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pytest_torchcompile
from pytest_torchcompile.state.random_operators import call_draws, node_draws

pytestmark = pytest.mark.needs_torch
X = torch.ones(1, 2, 8, 8)
ASKED = "nondeterministic_seeded"


class Asked(TorchDispatchMode):
    """What is said of the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.draws = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws = self.draws or call_draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def attention(share):
    return lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=share)


CALLS = {
    "attention": (attention(0.5), True), "attention without dropout": (attention(0.0), False),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5), True),
    "dropout not in training": (lambda x: torch.native_dropout(x, 0.5, False)[0], False),
    "rrelu": (lambda x: torch.rrelu(-x, training=True), True),
    "rrelu not in training": (lambda x: torch.rrelu(-x, training=False), False),
    "rand_like": (torch.rand_like, True), "bernoulli": (lambda x: torch.bernoulli(x * 0.5), True),
    "arithmetic": (lambda x: x * 2 + 1, False),
}


@pytest.mark.parametrize(("call", "draws"), CALLS.values(), ids=CALLS)
def test_it_is_what_the_generator_says(call, draws):
    """Where the generator's state has moved numbers were drawn, and nowhere else."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with Asked() as asked:
        call(X)
    moved = not torch.equal(before, torch.get_rng_state())
    assert (asked.draws, moved) == (draws, draws)
    graph = make_fx(call)(X).graph
    assert any(map(node_draws, graph.nodes)) == draws


def test_what_is_no_operator_draws_nothing():
    assert not call_draws(len, ([],), {})
    assert not node_draws(torch.fx.Graph().placeholder("x"))


def test_nobody_asks_torchs_tag_himself():
    """But for the oracle, which is told of operators before they are called, and of draws by their results."""
    package = Path(pytest_torchcompile.__file__).parent
    asking = {file.relative_to(package).as_posix() for file in package.rglob("*.py") if ASKED in file.read_text()}
    assert asking == {"state/random_operators.py", "oracle/operator_rounding.py", "oracle/tape.py",
                      "culprit/wrong_operator.py"}
