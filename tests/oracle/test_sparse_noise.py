"""Sparse tensors round as others do: sparse gradients of embeddings, and graphs as sparse matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_torchcompile import CompileConfig, compare
from pytest_torchcompile.oracle.calls import vary_parameters
from pytest_torchcompile.oracle.dice import Dice
from pytest_torchcompile.oracle.operator_rounding import count_terms
from pytest_torchcompile.oracle.recording import Item
from pytest_torchcompile.run.subject import cxx_compiler
from pytest_torchcompile.state.tensor_forms import dense_form, stored_numbers

pytestmark = pytest.mark.needs_torch
needs_cxx = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler found; install g++ or clang")
DENSE = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.0, 4.0], [5.0, 6.0, 0.0, 7.0], [0.0, 8.0, 9.0, 0.0]])
FORMS = {
    "coo": DENSE.to_sparse,
    "coo, twice the same place": lambda: sparse_coo([[0, 0, 2], [1, 1, 3]], torch.ones(3)),
    "coo of rows": lambda: sparse_coo([[0, 0, 2]], torch.ones(3, 4)),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
}


def sparse_coo(places, values):
    """(4, 4), checked."""
    return torch.sparse_coo_tensor(torch.tensor(places), values, (4, 4), check_invariants=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_a_disturbed_copy_of_a_sparse_tensor(form):
    """Each number moves, by no more than the unit; what is zero everywhere, and the original, stay."""
    tensor = FORMS[form]()
    before = tensor.to_dense()
    copy = Dice(0).disturbed_copy(tensor, 2.0**-10)
    assert copy.layout == tensor.layout
    ratio = stored_numbers(copy) / stored_numbers(tensor)
    is_zero = stored_numbers(tensor) == 0
    assert (((ratio != 1) & ((ratio - 1).abs() <= 2.0**-10)) | is_zero).all()
    assert torch.equal(copy.to_dense() == 0, before == 0)
    assert torch.equal(tensor.to_dense(), before)


class Looked(nn.Module):
    """A table whose gradient is sparse. (B, S) whole numbers -> (B, S, 4)."""

    def __init__(self, make_table, wrong=0.0):
        super().__init__()
        self.table, self.layer, self.wrong = make_table(), nn.Linear(40, 4), wrong

    def forward(self, x):
        found = self.layer(self.table(x))
        if torch.compiler.is_compiling():
            found = found * (1 + self.wrong)
        return torch.tanh(found)


TABLES = {
    "embedding": lambda: nn.Embedding(300, 40, sparse=True),
    "bag": lambda: nn.EmbeddingBag(300, 40, sparse=True, mode="mean"),
}


def ids():
    return torch.randint(0, 300, (30, 50))


@pytest.mark.parametrize("table", TABLES)
def test_small_errors_beside_sparse_gradients_are_seen(table):
    """And noise is drawn at every operator, of which nothing is noted."""
    torch.manual_seed(0)
    found = compare(Looked(TABLES[table], 1e-4), [ids()], CompileConfig(enabled=True, backend="aot_eager"))
    assert {problem.where for problem in found.problems} >= {"output", "loss", "gradient of table.weight"}
    assert "not at every operator" not in str(found)


@needs_cxx
def test_a_right_compiler_is_not_accused_beside_sparse_gradients():
    """Found as a false alarm: no draw could be made, so noise was that of inputs alone, and Inductor's sum of a bias
    gradient was more than it."""
    for seed in range(3):
        torch.manual_seed(seed)
        found = compare(Looked(TABLES["embedding"]), [ids(), ids()], CompileConfig(enabled=True, backend="inductor"),
                        steps=2)
        assert found.ok, str(found)


class Convolved(nn.Module):
    """Two layers on a graph that is a sparse matrix. (nodes, 8) -> (nodes, 3)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        edges = (torch.rand(20, 20) < 0.2).nonzero().T
        self.register_buffer("edges", edges)
        self.weights = nn.Parameter(torch.rand(edges.shape[1]))

    def graph(self):
        """Its edges have numbers to learn. (nodes, nodes)."""
        return torch.sparse_coo_tensor(self.edges, torch.sigmoid(self.weights), (20, 20), check_invariants=True)

    def forward(self, x):
        graph = self.graph()
        hidden = torch.relu(torch.sparse.mm(graph, self.first(x)))
        return slightly_wrong(torch.sparse.mm(graph, self.second(hidden)))


class ConvolvedByRows(Convolved):
    """The same with a graph that stays as it is, kept by rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", super().graph().detach().to_dense().to_sparse_csr())

    def graph(self):
        """From the buffer."""
        return self.rows


def slightly_wrong(found):
    """A frame of its own: one that is given a sparse tensor runs eagerly."""
    return found * 1.0001 if torch.compiler.is_compiling() else found


@pytest.mark.parametrize("model", [Convolved, ConvolvedByRows])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_small_errors_beside_a_sparse_matrix_are_seen(model):
    torch.manual_seed(0)
    found = compare(model(), [torch.randn(20, 8)], CompileConfig(enabled=True, backend="aot_eager"))
    assert {problem.where for problem in found.problems} >= {"output", "loss", "gradient of first.weight"}
    assert "not at every operator" not in str(found)
    assert "ran on one object" not in str(found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:Sparse [A-Z]{3} tensor support is in beta state:UserWarning")
def test_a_sparse_tensor_is_disturbed_in_place(form):
    """As of buffers and inputs of a run in the model's own precision."""
    tensor = FORMS[form]()
    before = stored_numbers(tensor).clone()
    Dice(0).disturb(tensor, 2.0**-10)
    after = stored_numbers(tensor)
    assert torch.allclose(after, before, rtol=2.0**-10, atol=0)
    assert not torch.equal(after, before)


def test_terms_of_a_sparse_product():
    """The numbers in the fullest row, and not its length."""
    for factor in (DENSE.to_sparse(), DENSE.to_sparse_csr()):
        assert count_terms("mm", (factor, torch.ones(4, 2))) == 3
    empty = sparse_coo([[], []], torch.ones(0))
    assert count_terms("_sparse_addmm", (torch.ones(4, 2), empty, torch.ones(4, 2))) == 1


def bent(x):
    """A frame of its own, which has no sparse tensor and is compiled."""
    return torch.tanh(x)


class OfGraph(nn.Module):
    """Gives a graph to what is done with it, in a frame of its own. (4, 8) -> (4, 3)."""

    def __init__(self, graph, product, last=bent):
        super().__init__()
        self.layer, self.product, self.last = nn.Linear(8, 3), product, last
        self.keep(graph)

    def keep(self, graph):
        self.register_buffer("graph", graph)

    def forward(self, x):
        return self.last(self.product(self.graph, self.layer(x)))


class OfAttribute(OfGraph):
    def keep(self, graph):
        self.graph = graph


class OfParameter(OfGraph):
    def keep(self, graph):
        self.graph = nn.Parameter(graph, requires_grad=False)


def normalised(graph, x):
    """Divided by whole numbers: how many edges a node has."""
    return (graph @ x) / (graph @ torch.ones(4, 1)).clamp(min=1)


def product(graph, x):
    return graph @ x


@pytest.mark.parametrize("kind", [OfGraph, OfAttribute, OfParameter])
@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.parametrize("of_graph", [normalised, product])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_graphs_wherever_they_are_kept(kind, form, of_graph):
    """Compared in float64 and in steps of training, and small errors are seen. Several of these ended by an exception
    of ours, or had no float64 run."""
    torch.manual_seed(0)
    graph = FORMS[form]()
    right = compare(kind(graph, of_graph), [torch.randn(4, 8)], CompileConfig(enabled=True, backend="aot_eager"),
                    steps=2)
    assert right.ok, str(right)
    assert any("training steps" in label for label, _ in right.leaves)
    wrong = compare(kind(graph, of_graph, slightly_wrong), [torch.randn(4, 8)],
                    CompileConfig(enabled=True, backend="aot_eager"), locate=False)
    assert {problem.where for problem in wrong.problems} >= {"output", "loss"}
    assert "float64:" not in str(wrong)
    assert "not at every operator" not in str(wrong)


class Writes(OfParameter):
    """A call writes to the sparse parameter, otherwise where it is compiled."""

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            self.graph.mul_(self.factor)
        return hidden

    def first(self, x):
        self.factor = 2.0 if torch.compiler.is_compiling() else 1.5
        return self.layer(x)


@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_what_a_call_writes_to_a_sparse_parameter_is_compared(form):
    found = compare(Writes(FORMS[form](), product), [torch.randn(4, 8)],
                    CompileConfig(enabled=True, backend="aot_eager"), locate=False)
    assert [problem.where for problem in found.problems] == ["graph after the call"]


def test_sparse_gradients_of_half_precision_are_compared_in_training():
    """Torch adds up none of them, so the last step of training adds to none."""
    model = Looked(TABLES["embedding"]).half()
    found = compare(model, [ids()], CompileConfig(enabled=True, backend="aot_eager"), steps=2)
    assert found.ok, str(found)
    assert any("training steps" in label for label, _ in found.leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_our_own_sum_of_a_gradients_rows_rounds_once(dtype):
    """One by one in half precision it would stop at 256, or at 2048."""
    rows = torch.ones(4097, 2, dtype=dtype)
    tensor = torch.sparse_coo_tensor(torch.zeros(1, 4097, dtype=torch.int64), rows, (2, 2), check_invariants=True)
    assert dense_form(tensor).tolist() == [[4096.0, 4096.0], [0.0, 0.0]]


def test_a_gradient_is_told_as_sparse_and_no_more():
    """Whether its places are there once hangs on who else holds it."""
    graph = FORMS["coo"]().requires_grad_()
    found = compare(Summed(), [graph], CompileConfig(enabled=True, backend="aot_eager"))
    assert found.ok, str(found)
    assert "differ by more than rounding" not in str(found)


class Summed(nn.Module):
    """Of a sparse input. (4, 4) -> (4, 3)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, graph):
        return self.last(torch.sparse.mm(graph, self.weight))

    def last(self, x):
        return bent(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_large_sparse_buffer_is_recorded_by_what_it_stores(layout):
    """Other places are another layout, and other numbers another value."""
    graph = torch.eye(1025).to_sparse(layout=layout)
    item = Item.of_state(graph)
    assert item.value.tolist() == [1.0] * 1025
    assert item.layout == Item.of_state(graph * 2).layout
    assert item.layout.startswith(f"{layout}, 1025 numbers at places ")
    assert item.layout != Item.of_state(torch.eye(1025).flip(0).to_sparse(layout=layout)).layout
    assert Item.of_state(torch.eye(3).to_sparse(layout=layout)).value.shape == (3, 3)


class Counted(OfGraph):
    """A call writes other numbers to its graph where it is compiled."""

    def forward(self, x):
        hidden = self.first(x)
        self.graph.mul_(self.factor)
        return hidden

    def first(self, x):
        self.factor = 2.0 if torch.compiler.is_compiling() else 1.5
        return self.layer(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_what_a_call_writes_to_a_large_sparse_buffer_is_compared(layout):
    model = Counted(torch.eye(1025).to_sparse(layout=layout), product)
    found = compare(model, [torch.randn(4, 8)], CompileConfig(enabled=True, backend="aot_eager"), locate=False)
    assert [(problem.kind, problem.where) for problem in found.problems] == [("buffer", "buffer graph")]


@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_other_values_reach_what_a_sparse_tensor_stores(form):
    """Else a result that was kept would be a right one in the second pass."""
    model = OfGraph(FORMS[form](), product)
    vary_parameters(model, 1)
    shrunk = stored_numbers(model.graph) / stored_numbers(FORMS[form]())
    assert ((shrunk < 1) & (shrunk > 15 / 16)).all()
