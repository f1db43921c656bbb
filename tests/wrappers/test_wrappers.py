"""Wrappers: each does what its name says, eagerly and compiled, and leaves the parameters' names alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchcompile import checks, zoo
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.ledger import observe
from pytest_torchcompile.observation import Job
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run.runner import run_cell
from pytest_torchcompile.wrappers import WRAPPERS, pp, tp
from pytest_torchcompile.wrappers import process_group as group
from pytest_torchcompile.wrappers.protocol import Wrapper, in_order, load, repeated_blocks

# Torch's own: when Dynamo is first imported, and Dynamo looking at `.grad` of an input that is no leaf.
pytestmark = [pytest.mark.needs_torch,
              pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
              pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]

HERE = "m.yaml:3:5"
SETTINGS = {"backend": "aot_eager", "dynamic": False}
TANH = torch.ops.aten.tanh.default


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Deep(nn.Module):
    """Three blocks in a ModuleList, one of them twice; counts how often each ran."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        first, second = Counted(), Counted()
        self.blocks = nn.ModuleList([first, second, first])

    def forward(self, x):
        """Stem, then the blocks."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Counted(nn.Module):
    """A layer that notes each of its eager runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), []

    def forward(self, x):
        """Note the run unless it is traced."""
        if not torch.compiler.is_compiling():
            self.runs.append(x.dtype)
        return self.linear(x).tanh()


def cell(wrapper="none", model="deep", device="cpu"):
    """A cell that only its model and wrapper matter of."""
    return Cell(model=model, wrapper=wrapper, device=device)


def model():
    """A model from seed 0."""
    torch.manual_seed(0)
    return Deep()


def step(call, module, x):
    """Output and gradients of one call."""
    module.zero_grad()
    output = call(x)
    output.float().pow(2).sum().backward()
    return [output.detach(), *(p.grad.clone() for p in module.parameters())]


def wrap(name, module, settings):
    """Wrap a module as a cell of that wrapper would."""
    return load(name, Path(), HERE).wrap(module, settings, cell(name))


@pytest.mark.parametrize("name", ["none", "checkpoint", "regional", "autocast"])
def test_wrapped_model_is_the_model(name):
    """Eager twin, compiled model and, but for autocast's rounding, the bare model agree; names stay."""
    bare, twin, inner = model(), model(), model()
    names = [*dict(bare.named_parameters())]
    eager, compiled = wrap(name, twin, None), wrap(name, inner, SETTINGS)
    x = torch.randn(5, 4)
    rounding = 5e-2 if name == "autocast" else 1e-6
    left, right, plain = step(eager, twin, x), step(compiled, inner, x), step(bare, bare, x)
    torch.testing.assert_close(left, right, rtol=rounding, atol=rounding)
    torch.testing.assert_close([t.float() for t in left], plain, rtol=rounding, atol=rounding)
    for wrapped in (twin, inner):
        assert [*dict(wrapped.named_parameters())] == names
        assert [*wrapped.state_dict()] == [*bare.state_dict()]


@pytest.mark.parametrize("name", ["none", "checkpoint", "autocast"])
def test_compiled_whole(name):
    """One graph for the whole model."""
    with observe() as seen:
        wrap(name, model(), SETTINGS)(torch.randn(5, 4))
    assert len(seen.graphs) == 1
    assert not seen.graph_breaks


def test_the_eager_twin_compiles_nothing():
    """settings None: no wrapper calls torch.compile."""
    with observe() as seen:
        for name in ("none", "checkpoint", "regional", "autocast"):
            wrap(name, model(), None)(torch.randn(5, 4))
    assert not seen.compiles


def test_autocast_computes_in_bfloat16():
    """The layers run in bfloat16, parameters and their gradients stay float32, and the unit says so."""
    module = model()
    output = wrap("autocast", module, None)(torch.randn(5, 4))
    assert output.dtype == torch.bfloat16
    assert set(module.blocks[1].runs) == {torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert load("autocast", Path(), HERE).unit == "bfloat16"
    assert not torch.is_autocast_enabled("cpu")


def test_checkpoint_runs_each_block_again_in_backward():
    """Forward runs a block once and backward once more; a call without gradient runs it once."""
    module = model()
    call = wrap("checkpoint", module, None)
    call(torch.randn(5, 4)).sum().backward()
    assert (len(module.blocks[1].runs), len(module.blocks[0].runs)) == (2, 4)
    with torch.no_grad():
        call(torch.randn(5, 4))
    assert (len(module.blocks[1].runs), len(module.blocks[0].runs)) == (3, 6)


def test_checkpoint_recomputes_when_compiled():
    """AOTAutograd is told to recompute: a block's tanh is in the backward graph too."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def recomputed(name):
        torch.compiler.reset()
        graphs = []

        def compiler(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler,
                               partition_fn=min_cut_rematerialization_partition)
        wrap(name, model(), {"backend": backend})(torch.randn(5, 4)).sum().backward()
        _, backward = graphs
        return len(backward.graph.find_nodes(op="call_function", target=TANH))

    assert recomputed("none") == 0
    assert recomputed("checkpoint") >= 1  # not 3: two of them are the next block's input, which is kept


def test_regional_compiles_the_blocks_alone():
    """The stem stays eager, and blocks of one class share one graph."""
    module = model()
    with observe() as seen:
        wrap("regional", module, SETTINGS)(torch.randn(5, 4))
    assert [(graph.runs, graph.ops) for graph in seen.graphs] == [(3, 2)]
    assert {compiled.function for compiled in seen.compiles} == {"Counted.forward"}
    assert load("regional", Path(), HERE).partial


def test_only_regional_is_partial_and_all_need_one_rank():
    """The records of the wrappers in the table."""
    wrappers = {name: load(name, Path(), HERE) for name in ("none", "autocast", "checkpoint", "regional")}
    assert [name for name, found in wrappers.items() if found.partial] == ["regional"]
    assert [name for name, found in wrappers.items() if found.unit] == ["autocast"]
    assert {found.ranks for found in wrappers.values()} == {1}
    assert all(name == found.name for name, found in wrappers.items())


def test_repeated_blocks():
    """Children of the outermost ModuleLists only, each once, in order."""
    module = Deep()
    module.more = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))])
    assert repeated_blocks(module, cell()) == [module.blocks[0], module.blocks[1], module.more[0]]
    assert [type(b).__name__ for b in repeated_blocks(zoo.moe_lite(), cell())] == ["Expert", "Expert"]


@pytest.mark.parametrize("name", ["checkpoint", "regional"])
def test_a_model_without_blocks_is_told_the_rule(name):
    """The text ends with a rule to paste into the matrix."""
    with pytest.raises(UsageError) as raised:
        load(name, Path(), HERE).wrap(zoo.tiny_head(), None, cell(name, "tiny_head"))
    assert str(raised.value) == (
        f"wrapper '{name}' works on the children of an nn.ModuleList, and model 'tiny_head' has none; "
        "leave it out with a rule:\n"
        f"  - exclude: {{model: tiny_head, wrapper: {name}}}\n"
        "    reason: the model has no repeated blocks"
    )


def test_every_wrapper_of_the_table_loads():
    """Each line of WRAPPERS leads to a Wrapper of that name."""
    for name in WRAPPERS:
        assert isinstance(load(name, Path(), HERE), Wrapper)
        found = load(name, Path(), HERE)
        assert (found.name, found.ranks, found.multiple) == (name, WRAPPERS[name].ranks, WRAPPERS[name].multiple)


@pytest.mark.parametrize(("order", "before", "after"), [
    ("compile_then_wrap", ["whole"], False),
    ("inner_blocks", ["block", "block"], False),
    ("wrap_then_compile", [], True),
])
def test_what_is_compiled_when_a_model_is_wrapped(order, before, after):
    """Each order compiles what it says, before the wrapping or what comes of it; an eager twin nothing."""
    for settings in (SETTINGS, None):
        module, seen = model(), []

        def wrapping(inner, module=module, seen=seen):
            assert inner is module
            named = {"whole": [module], "block": repeated_blocks(module, cell())}
            seen += [name for name, parts in named.items() for part in parts if part._compiled_call_impl is not None]
            return nn.Sequential(inner)

        wrapped = in_order(module, settings, cell(f"ddp@{order}"), wrapping)
        assert seen == (before if settings else [])
        assert (type(wrapped).__name__ == "OptimizedModule") is (after and settings is not None)
        with observe() as ledger:
            wrapped(torch.randn(5, 4))
        assert bool(ledger.graphs) is (settings is not None)


@pytest.mark.parametrize("order", ["compile_then_wrap", "wrap_then_compile"])
def test_a_module_of_torchs_own_class_is_compiled(order):
    """Torch compiles an nn.Sequential by torch.compile() only; in place it skips it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    wrapped = in_order(module, SETTINGS, cell(f"ddp@{order}"), lambda inner: lambda x: 2 * inner(x)
                       if order == "compile_then_wrap" else nn.Sequential(inner), in_place=False)
    with observe() as ledger:
        wrapped(torch.randn(5, 4))
    assert any(graph.runs for graph in ledger.graphs)


def test_a_wrapper_of_the_users_own(tmp_path):
    """module:attribute may be a function, or a Wrapper that says more of itself."""
    (tmp_path / "my_wraps.py").write_text(
        "from pytest_torchcompile.wrappers.protocol import Wrapper\n"
        "def double(model, settings, cell):\n    return lambda x: 2 * model(x)\n"
        "FULL = Wrapper('full', double, unit='float16')\nnumber = 3\n")
    path = sys.path[:]
    try:
        found = load("my_wraps:double", tmp_path, HERE)
        assert (found.name, found.unit, found.partial) == ("my_wraps:double", None, False)
        assert found.wrap(lambda x: x + 1, None, cell())(3) == 8
        assert load("my_wraps:FULL", tmp_path, HERE).unit == "float16"
        with pytest.raises(UsageError, match=r"^m.yaml:3:5: 'my_wraps:number' is an object of type int; "
                                             r"expected something callable$"):
            load("my_wraps:number", tmp_path, HERE)
    finally:
        sys.path[:] = path
        sys.modules.pop("my_wraps", None)


OWN = """
import functools
from pytest_torchcompile.wrappers.protocol import Wrapper

def three(model, settings, cell): return "three"

def four(model, settings, cell, mesh): return "four"

def ordered(model, settings, cell, mesh, order="whole"): return order

def nothing(): pass

@functools.wraps(nothing)
def disguised(*args): return "disguised"

class Called:
    def __call__(self, model): pass

called = Called()
SEVERAL = Wrapper("several", four, ranks=2)
PAIRS = Wrapper("pairs", four, ranks=4, axes=("data", "tensor"))
ALONE = Wrapper("alone", three)
"""


@pytest.fixture
def own(tmp_path):
    """Loads a wrapper of a module that has right and wrong ones."""
    (tmp_path / "own_wraps.py").write_text(OWN)
    path = sys.path[:]
    yield lambda value, **how: load(f"own_wraps:{value}", tmp_path, HERE, **how)
    sys.path[:] = path
    sys.modules.pop("own_wraps", None)


@pytest.mark.parametrize(("value", "given", "result"), [
    ("three", 3, "three"), ("four*2", 4, "four"), ("SEVERAL*2", 4, "four"), ("SEVERAL*3", 4, "four"),
    ("PAIRS*6", 4, "four"), ("ordered*2", 4, "whole"),
    ("ordered@inner_blocks*2", 4, "inner_blocks"), ("four*fake8", 4, "four"),
])
def test_how_a_wrapper_of_the_users_own_is_called(own, value, given, result):
    """With a mesh where there are several ranks, real or not; with the order if it has a parameter for it."""
    assert own(value).wrap(*range(given)) == result


@pytest.mark.parametrize(("value", "text"), [
    ("three*2", "'own_wraps:three' is called as wrap(model, settings, cell, mesh), and has the parameters "
                "(model, settings, cell): too many positional arguments (own_wraps.py:5)"),
    ("four", "'own_wraps:four' is called as wrap(model, settings, cell), and has the parameters (model, settings, "
             "cell, mesh): missing a required argument: 'mesh' (own_wraps.py:7); a mesh is for several ranks, and "
             "those are asked for by own_wraps:four*2"),
    ("disguised*2", "has the parameters (): too many positional arguments (own_wraps.py:11)"),
    ("called", "has the parameters (model): too many positional arguments"),
    ("four@inner_blocks*2", "'own_wraps:four' is asked for the order 'inner_blocks' and has no parameter `order` to be "
                            "told it by; give it one, or take @inner_blocks off (own_wraps.py:7)"),
    ("SEVERAL@inner_blocks*2", "is asked for the order 'inner_blocks' and has no parameter `order`"),
    ("PAIRS*5", "'own_wraps:PAIRS' is made for 4, 6, 8, ... ranks, and the matrix gives it 5; write own_wraps:PAIRS*4"),
    ("ALONE*2", "'own_wraps:ALONE' is made for 1 rank, and the matrix gives it 2; write own_wraps:ALONE"),
    ("SEVERAL", "'own_wraps:SEVERAL' is made for 2, 3, 4, ... ranks, and the matrix gives it 1; write "
                "own_wraps:SEVERAL*2"),
])
def test_a_wrapper_of_the_users_own_that_cannot_be_called_so(own, value, text):
    """What it is called with, what it takes, and where it is written."""
    with pytest.raises(UsageError) as raised:
        own(value)
    assert str(raised.value).startswith(f"{HERE}: wrapper 'own_wraps:")
    assert text in str(raised.value)


@pytest.mark.parametrize(("value", "text"), [
    ("SEVERAL", "wrapper 'own_wraps:SEVERAL' needs 2 processes, and a test has one; put it into a matrix"),
    ("four", "a mesh is for several ranks, and a test has one process: put it into a matrix"),
])
def test_in_a_test_there_is_one_process(own, value, text):
    """What a matrix would be told to write can't be written in a marker."""
    with pytest.raises(UsageError) as raised:
        own(value, alone=True)
    assert str(raised.value).endswith(text)


def test_an_unknown_wrapper():
    """The nearest known name, and what else would do."""
    with pytest.raises(UsageError) as raised:
        load("regionl", Path(), HERE)
    text = f"{HERE}: 'regionl' is not a wrapper, nor module:attribute; did you mean 'regional'? "
    assert str(raised.value).startswith(text)


def test_a_wrapper_that_returns_nothing(tmp_path, monkeypatch):
    """It is told of the wrapper, and not as a model that can't be called."""
    (tmp_path / "returns_nothing.py").write_text(
        "import torch\n"
        "def net(): return torch.nn.Linear(4, 2)\ndef rows(B): return torch.randn(B, 4)\n"
        "def wrap(model, settings, cell): model.compile(**settings or {})\n")
    monkeypatch.setattr(sys, "path", sys.path[:])
    entry = ModelEntry("net", "returns_nothing:net", "returns_nothing:rows", dims={"B": Dim(size=3)}, where=HERE)
    how = cell("returns_nothing:wrap", model="net")
    seen, _ = run_cell(Job(how.axes | {"user": {}}, entry.to_dict(), str(tmp_path), ("compiles",)))
    assert (seen["failure"]["kind"], seen["failure"]["message"]) == (
        "usage", f"{HERE}: wrapper 'returns_nothing:wrap' returned None; expected what is called in place of the model")


def test_a_pipeline_without_numpy_is_a_skip(monkeypatch):
    """Its stages tell each other their shapes as objects, and torch sends those with NumPy."""
    monkeypatch.setattr(pp, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"wrapper pp needs NumPy, with which torch.distributed sends objects; pip"):
        group.refuse_unavailable(cell("pp"), load("pp", Path(), HERE), HERE)


@pytest.mark.parametrize(("lacks", "wrapper", "device", "text"), [
    ("distributed.is_available", "ddp", "cpu", "wrapper 'ddp' needs torch.distributed, which this torch is built"),
    ("distributed.is_available", "tp*fake8", "cpu", "wrapper 'tp*fake8' needs torch.distributed, which this torch is"),
    ("distributed.is_gloo_available", "ddp", "cpu", "wrapper 'ddp' on cpu needs gloo, which this torch is built"),
    ("cuda.is_available", "ddp", "cuda", "device 'cuda' is not here: torch.cuda.is_available() is false"),
    ("", "ddp", "meta", "wrapper 'ddp' runs on cpu and cuda, not on meta"),
])
def test_what_a_machine_lacks_for_several_ranks(monkeypatch, lacks, wrapper, device, text):
    """Told before any process group is made, to a cell and to doctor alike."""
    if lacks:
        monkeypatch.setattr(f"torch.{lacks}", lambda: False)
    with pytest.raises(Unavailable) as raised:
        group.refuse_unavailable(cell(wrapper, device=device), load(wrapper, Path(), HERE), HERE)
    assert str(raised.value).startswith(text)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize(("plan", "text"), [
    ({"blocks.*.linear": "colwise_sequense"},
     "tp_plan['blocks.*.linear'] is 'colwise_sequense', which is no style; did you mean 'colwise_sequence'? Known: "
     "colwise, colwise_gather, colwise_sequence, rowwise, rowwise_sequence, sequence"),
    ({"stem": ["rowwise"]}, "tp_plan['stem'] is ['rowwise'], which is no style; did you mean 'rowwise'? Known: "),
    ({"blocks.0.liner": "colwise"},
     "tp_plan names 'blocks.0.liner', and no module is called so; did you mean 'blocks.0.linear'? Known: "),
    ({"stem": "colwise", "st*": "rowwise"}, "tp_plan names stem twice, by 'stem' and by 'st*'; a layer has one style"),
    ({"blocks": "colwise"},
     "tp_plan['blocks'] is 'colwise', for an nn.Linear or an nn.Embedding; blocks is a ModuleList"),
    ({"stem": "sequence"},
     "tp_plan['stem'] is 'sequence', for a layer that is whole on each rank, such as a norm; stem is a Linear"),
])
def test_a_plan_that_does_not_fit(plan, text):
    """What was found, where in the plan, the nearest known name, and all of them."""
    module = model()
    module.tp_plan = plan
    with pytest.raises(UsageError) as raised:
        tp.split_layers(module, cell("tp"), None)
    assert str(raised.value).startswith(f"model 'deep': {text}")


class _Mesh:
    def size(self):
        return 3


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.parametrize(("layer", "style", "feature"), [
    (nn.Linear(6, 16), "colwise", "out_features=16"), (nn.Linear(6, 16), "colwise_sequence", "out_features=16"),
    (nn.Linear(16, 6), "rowwise", "in_features=16"), (nn.Linear(16, 6), "rowwise_sequence", "in_features=16"),
    (nn.Embedding(6, 16), "colwise", "embedding_dim=16"),
])
def test_features_that_the_ranks_do_not_divide(layer, style, feature):
    """Which size, of which layer, how many ranks, and what to do."""
    module = nn.Sequential(layer)
    module.tp_plan = {"0": style}
    with pytest.raises(UsageError) as raised:
        tp.split_layers(module, cell("tp"), _Mesh())
    assert str(raised.value) == (
        f"model 'deep': tp_plan['0'] is '{style}', which splits {feature} of 0 over 3 ranks, and they do not divide "
        "it; run the model on ranks that do (2, 4, 8, 16), give it a size that is a multiple of 3, or leave the layer "
        "out of the plan")


def test_the_docs_name_every_style():
    """A style that nobody knows of is none."""
    page = (Path(__file__).parents[2] / "docs/how-to/several-ranks.md").read_text()
    for style in tp._layer_styles():
        assert f"`{style}`" in page or f'"{style}"' in page, style


@pytest.mark.parametrize("received", [True, False])
def test_pp_gives_the_buffer_its_gradient(received):
    """What a stage has received is where torch reads the gradient for the stage before; the user's input is let be."""
    buffer = torch.ones(2, 3)
    pp._Entered(nn.Linear(3, 1), received=received)(buffer).sum().backward()
    assert (buffer.grad is not None) == buffer.requires_grad == received


class Multiplied(nn.Module):
    """One layer. (B, 64) -> (B, 64)."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        """The layer, and what is made of it."""
        return self.layer(x).square()


@pytest.mark.parametrize(("name", "dtype"), [("autocast", torch.bfloat16), ("autocast@bfloat16", torch.bfloat16),
                                             ("autocast@float16", torch.float16)])
def test_autocast_computes_in_its_dtype(name, dtype):
    cell = Cell(model="m", backend="eager", wrapper=name)
    wrapper = load(name, Path(), HERE)
    assert wrapper.unit == str(dtype).removeprefix("torch.")
    module = Multiplied()
    for settings in (None, {"backend": "eager"}):
        assert wrapper.wrap(module, settings, cell)(torch.randn(2, 64)).dtype is dtype


def test_a_dtype_that_autocast_does_not_have():
    with pytest.raises(UsageError, match="wrapper 'autocast' has no dtype 'float61'; did you mean 'float16'"):
        load("autocast@float61", Path(), HERE)


def slightly_larger(module, inputs):
    """A backend whose first result is larger by a step of bfloat16, which is eight steps of float16."""

    def run(*args):
        first, *others = module(*args)
        return first * (1 + 2**-7), *others

    return run


@pytest.mark.parametrize(("backend", "wrong"), [("eager", False), (f"{__name__}:slightly_larger", True)])
def test_float16_is_judged_by_its_own_noise(backend, wrong):
    entry = ModelEntry("m", f"{__name__}:Multiplied", f"{__name__}:wide_rows", dims={"B": Dim(buckets=(4,))})
    cell = Cell(model="m", backend=backend, wrapper="autocast@float16", phase="inference")
    seen, _ = run_cell(Job(cell.to_dict(), entry.to_dict(), str(Path(__file__).parent), ("equivalence",)))
    assert seen["failure"] is None
    assert bool(list(checks.load("equivalence").judge(seen["sections"]["equivalence"], {}))) == wrong


def wide_rows(B):
    """(B, 64)."""
    return torch.randn(B, 64)
