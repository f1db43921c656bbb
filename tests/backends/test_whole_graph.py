"""Whole graphs: passes see forward and backward with names, a compiler is last, and every mistake is one sentence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pytest_torchcompile.backends import PASS_NAMES, cuda_graphs, graph_passes, whole_graph
from pytest_torchcompile.backends.toolkit import Toolkit
from pytest_torchcompile.errors import InstrumentError, UsageError

pytestmark = pytest.mark.needs_torch
aten = torch.ops.aten
Failed = torch._dynamo.exc.BackendCompilerFailed


EXACT = [name for name in PASS_NAMES if name not in ("bf16_islands", "cuda_graphs")]
"""Passes that change no value beyond the last bit, on any device."""


class Net(nn.Module):
    """A buffer that is written to, a layer norm that a table takes apart, and something said twice."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = self.norm(self.block(x))
        return hidden.tanh() * 2 + hidden.tanh() * 2


class Breaks(nn.Module):
    """Breaks in the middle."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        torch._dynamo.graph_break()
        return y + 1


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outcome(backend=None, train=True, sizes=(3,), model=Net):
    """Output, gradients and buffers of a call of each size."""
    torch.manual_seed(0)
    net = model().train(train)
    call = net if backend is None else torch.compile(net, backend=backend)
    values = []
    for size in sizes:
        x = torch.randn(size, 4, requires_grad=train)
        with torch.set_grad_enabled(train):
            y = call(x)
        if train:
            y.square().sum().backward()
            values.append(x.grad)
        values.append(y.detach())
    return [*values, *(p.grad for p in net.parameters() if train), *net.buffers()]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("capture", ["joint", "forward_backward"])
def test_all_known_passes_leave_what_the_model_computes(capture, train):
    """In one graph or two, for several sizes, with a buffer written to."""
    backend = Toolkit(capture=capture, passes=EXACT)
    assert_close(outcome(backend, train, (3, 5, 7)), outcome(None, train, (3, 5, 7)))
    changed = {name for note in backend.notes for name in note.changed}
    assert "common_subexpressions" in changed


def test_inductor_comes_last():
    """The same values through Inductor, its table and a pass before it."""
    backend = Toolkit(compiler="inductor", decompositions="inductor", passes=["common_subexpressions"])
    assert_close(outcome(backend), outcome())
    joint = backend.notes[0]
    assert joint.changed == ("common_subexpressions",)
    assert "aten.native_layer_norm.default" not in joint.operators


def test_parameters_and_buffers_have_their_names():
    """On inputs, gradients and new values of buffers; the pass that wants them gets example inputs."""
    seen = {}

    def look(module: fx.GraphModule, inputs):
        placeholders = module.graph.find_nodes(op="placeholder")
        assert len(inputs) == len(placeholders)
        seen["inputs"] = [node.meta["desc"].expr() for node in placeholders]
        output = module.graph.output_node()
        seen["results"] = [each.expr() for each in output.meta["desc"] if each is not None]

    outcome(Toolkit(passes=[look]))
    assert "self.get_parameter('block.0.weight')" in seen["inputs"]
    assert "self.get_buffer('norm.running_mean')" in seen["inputs"]
    gradients = [each for each in seen["results"] if "block.1.bias" in each]
    written = [each for each in seen["results"] if "norm.running_var" in each]
    assert len(gradients) == 1
    assert len(written) == 1


def test_a_pass_may_be_for_one_graph():
    """``backward=...`` is run on the backward graph alone."""
    graphs = []

    def look(module):
        names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
        graphs.append(any(name.startswith("tangents") for name in names))

    outcome(Toolkit(passes=[graph_passes.GraphPass("look", look, "backward")]))
    assert graphs == [True]
    assert graph_passes.read_passes("backward=dead_code, dead_code")[0].graph == "backward"


def test_new_nodes_need_no_values_noted():
    """A pass puts in an operator; the partitioner and Inductor get to know its shape."""

    def twice_and_half(module):
        for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
            with module.graph.inserting_after(node):
                half = module.graph.call_function(aten.mul.Tensor, (node, 0.5))
            with module.graph.inserting_after(half):
                twice = module.graph.call_function(aten.mul.Tensor, (half, 2.0))
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, half=half: user is not half)

    assert_close(outcome(Toolkit(passes=[twice_and_half])), outcome())


def test_with_no_compiler_the_last_pass_runs_the_graph():
    """It returns what runs the forward and the backward."""
    runs = []

    def interpret(module):
        def run(*inputs):
            runs.append(len(inputs))
            return fx.Interpreter(module).run(*inputs)
        return run

    backend = Toolkit(capture="forward_backward", compiler="none", passes=["dead_code", interpret])
    assert_close(outcome(backend), outcome())
    assert len(runs) == 2


def test_regions_alone_go_to_inductor():
    """What is annotated; a model without any region is told how to name one."""

    class Region(Net):
        def forward(self, x):
            with torch.fx.traceback.annotate({"compile_with_inductor": {}}):
                hidden = self.block(x)
            return self.norm(hidden)

    found = outcome(Toolkit(compiler="regional_inductor"), model=Region)
    assert_close(found, outcome(model=Region))
    with pytest.raises(Failed, match=r"no operator of the forward graph is: write `with torch\.fx"):
        outcome(Toolkit(compiler="regional_inductor"))


def test_a_graph_break_is_an_error_with_its_line():
    """The toolkit takes a model whole or not at all."""
    line = Breaks.forward.__code__.co_firstlineno + 2
    text = rf"it breaks at .*test_whole_graph\.py:{line} \(torch\._dynamo\.graph_break\(\)\)"
    with pytest.raises(Failed, match=text):
        outcome(Toolkit(capture="joint"), model=Breaks)


def test_a_missing_table_is_one_sentence_with_the_fix():
    """Torch says only: both a fallback and a decomp for same op."""
    with pytest.raises(Failed, match=r"Inductor cannot compile aten\.\S+ as it is: .* here they are none; write "
                                     r"`decompositions: inductor`, or `compiler: eager`"):
        outcome(Toolkit(compiler="inductor", decompositions="none"))


def puts_in_a_cast(module):
    for node in module.graph.find_nodes(op="call_function", target=aten.tanh.default):
        with module.graph.inserting_after(node):
            cast = module.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float32})
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)


def test_what_a_pass_puts_in_has_to_be_for_inductor():
    """The table was used before: torch says `both a fallback and a decomp` of an operator that is not in the model."""
    with pytest.raises(Failed, match=r"Inductor cannot compile aten\._to_copy\.default as it is, and a pass has put it "
                                     r"in: .* have the pass put in what they make of it"):
        outcome(Toolkit(compiler="inductor", decompositions="inductor", passes=[puts_in_a_cast]))


def test_islands_before_inductor():
    """Its casts are those of Inductor's table."""
    backend = Toolkit(compiler="inductor", decompositions="inductor", passes="bf16_islands")
    # The output alone: behind a batch norm gradients are what is left of larger numbers.
    torch.testing.assert_close(outcome(backend)[1], outcome()[1], rtol=0.1, atol=0.1)
    assert backend.notes[0].changed == ("bf16_islands",)


def raising(module):
    raise KeyError("mm")


def losing(module):
    output = module.graph.output_node()
    output.args = (output.args[0][:-1],)


def broken(module):
    first, *_, last = module.graph.find_nodes(op="call_function", target=aten.tanh.default)
    first.args = (last,)


@pytest.mark.parametrize(("function", "text"), [
    (raising, r"pass 2 of 2 \(raising\) raised KeyError: 'mm' \(test_whole_graph\.py:\d+\)"),
    (lambda module: 3, r"pass 2 of 2 \(.*lambda.*\) returned an object of type int; expected the GraphModule, or None"),
    (losing, r"pass 2 of 2 \(losing\) left a graph with \d+ inputs and \d+ results, where there were \d+ and \d+"),
    (broken, r"pass 2 of 2 \(broken\) left a broken graph: "),
])
def test_what_a_pass_does_wrong_is_told_with_its_number(function, text):
    """One sentence each."""
    with pytest.raises(Failed, match=text):
        outcome(Toolkit(passes=["dead_code", function]))


@pytest.mark.parametrize(("settings", "text"), [
    ({"capture": "jiont"}, "capture is 'jiont'; did you mean 'joint'?"),
    ({"compiler": "inducter"}, "compiler is 'inducter'; did you mean 'inductor'?"),
    ({"passes": ["dead_cod"]}, "no pass is called 'dead_cod'; expected module:function, or did you mean 'dead_code'?"),
    ({"passes": [3]}, "a pass is 3; expected a function, module:function, or a name of dead_code"),
    ({"passes": ["front=dead_code"]}, "is for a graph 'front'; "),
    ({"passes": ["dead_code"], "forward": print}, "a Toolkit takes one or the other"),
    ({"decompositions": "indctor"}, "decompositions 'indctor' names no table; expected module:table, or did you mean "
                                    "'inductor'?"),
    ({"decompositions": 3}, "decompositions is 3; expected inductor, core_aten, none, module:table, or a mapping of "
                            "operators to functions"),
    ({"decompositions": f"{__name__}:TABEL"}, "did you mean 'TABLE'?"),
])
def test_mistakes_are_told_where_they_are_made(settings, text):
    """Not by torch's compile error."""
    with pytest.raises(UsageError, match=re.escape(text)):
        Toolkit(**settings)


def run_anew(module, inputs):
    """A graph traced again, whose inputs have other names, and no notes."""
    return make_fx(module)(*inputs)


def rebuilt(module):
    """Node by node, without any notes."""
    return fx.Transformer(module).transform()


@pytest.mark.parametrize("capture", ["joint", "forward_backward"])
@pytest.mark.parametrize("function", [run_anew, rebuilt])
def test_a_graph_that_was_made_anew(function, capture):
    """It gets the names and notes of inputs and results again, so that torch can split it, and other passes read it."""
    names = []

    def note_names(module):
        # What a backward graph has from its forward has no descriptor.
        described = [node.meta.get("desc") for node in module.graph.find_nodes(op="placeholder")]
        names.extend(each.expr() for each in described if each is not None)

    backend = Toolkit(passes=[function, note_names, "dead_code"], capture=capture)
    assert_close(outcome(backend), outcome())
    assert "self.get_parameter('block.0.weight')" in names


def test_a_graph_made_anew_with_other_inputs():
    """One sentence."""
    def with_one_more(module, inputs):
        return make_fx(lambda *given: module(*given[:-1]))(*inputs, torch.ones(()))

    with pytest.raises(Failed, match=r"pass 1 of 1 \(.*\) left a graph with \d+ inputs and \d+ results, where"):
        outcome(Toolkit(passes=[with_one_more]))


def test_a_dump_folder_as_text(tmp_path):
    """As a path."""
    outcome(Toolkit(passes=["dead_code"], dump=str(tmp_path / "graphs")))
    assert (tmp_path / "graphs" / "joint-1.1-dead_code.diff").exists()


def test_a_table_of_ones_own():
    """``module:table``, a mapping or a function; what is none is told."""
    backend = Toolkit(decompositions=f"{__name__}:TABLE")
    assert_close(outcome(backend), outcome())
    assert "aten.tanh.default" not in backend.notes[0].operators
    with pytest.raises(Failed, match="gave an object of type int; expected a mapping of operators"):
        outcome(Toolkit(decompositions=f"{__name__}:no_table"))


TABLE = {aten.tanh.default: lambda x: 2 * torch.sigmoid(2 * x) - 1}


def no_table():
    return 3


def test_core_aten_takes_less_apart_than_inductor():
    """Each table is another graph."""
    layer_norm = {}
    for table in ("none", "core_aten", "inductor"):
        backend = Toolkit(decompositions=table)
        assert_close(outcome(backend), outcome())
        layer_norm[table] = backend.notes[0].operators
    assert "aten.t.default" in layer_norm["none"]
    assert "aten.t.default" not in layer_norm["core_aten"]
    assert layer_norm["core_aten"] != layer_norm["inductor"]


def test_no_tree_is_taken_apart_in_a_call(monkeypatch):
    """Torch's own function does so with all parameters; where its inside is not known it is called as it is."""
    calls = []
    flatten = torch.utils._pytree.tree_flatten

    def count(*args, **kwargs):
        calls.append(args)
        return flatten(*args, **kwargs)

    def flattened():
        torch.compiler.reset()
        net = torch.nn.Linear(4, 4)
        call = torch.compile(net, backend=Toolkit(capture="joint"))
        call(torch.randn(2, 4))
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.utils._pytree, "tree_flatten", count)
            found = call(torch.ones(2, 4))
        torch.testing.assert_close(found, net(torch.ones(2, 4)))
        return len(calls)

    assert flattened() == 0
    monkeypatch.setattr(whole_graph, "_closure_of", lambda function: {})
    assert flattened() > 0


def test_an_older_torch_is_told_so(monkeypatch):
    """Before 2.9 there are no descriptors."""
    monkeypatch.delattr(torch._functorch.aot_autograd, "aot_export_joint_with_descriptors")
    with pytest.raises(InstrumentError, match=r"the toolkit's passes need torch 2\.9 or newer"):
        whole_graph._joint_functions()


def test_dumps_before_and_after_each_pass(tmp_path):
    """Readable code with the names of parameters, and a diff."""
    outcome(Toolkit(passes=["common_subexpressions"], dump=tmp_path))
    names = sorted(file.name for file in tmp_path.iterdir())
    stem = "joint-1.1-common_subexpressions"
    assert names == [f"{stem}.after.py", f"{stem}.before.py", f"{stem}.diff"]
    before = (tmp_path / f"{stem}.before.py").read_text()
    assert "is self.get_parameter('block.0.weight')" in before
    assert before.count("aten.tanh.default(") == 2
    assert any(line.startswith("-") and "tanh" in line for line in (tmp_path / f"{stem}.diff").read_text().splitlines())


def test_the_names_are_those_of_the_passes():
    """The list that needs no torch, and the functions."""
    assert tuple(graph_passes.PASSES) == PASS_NAMES


def early(module):
    """A gradient is doubled and halved where it comes in, before all of the forward."""
    tangent = next(node for node in module.graph.find_nodes(op="placeholder") if "tangents" in str(node.target))
    with module.graph.inserting_after(tangent):
        twice = module.graph.call_function(aten.mul.Tensor, (tangent, 2.0))
    with module.graph.inserting_after(twice):
        once = module.graph.call_function(aten.mul.Tensor, (twice, 0.5))
    tangent.replace_all_uses_with(once, delete_user_cb=lambda user: user is not twice)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_pass_may_put_the_backward_first(compiler):
    """Torch's default_partition ended in `Node mul was invalid, but is output`."""
    backend = Toolkit(passes=[early], compiler=compiler, decompositions="inductor")
    assert_close(outcome(backend), outcome())


def test_cuda_graphs_is_for_a_gpu_and_for_graphs_that_repeat():
    """One sentence each: another device, sizes that vary, random numbers."""

    settings = {"passes": ["dead_code", "cuda_graphs"], "compiler": "none"}
    with pytest.raises(Failed, match=r"pass 2 of 2 \(cuda_graphs\): cuda_graphs records what runs on a GPU, and \w+ of "
                                     "this graph is on cpu; write `device: cuda`, or leave the pass out"):
        outcome(Toolkit(**settings))
    with pytest.raises(UsageError, match=r"aten\.rand\.default of this graph draws random numbers anew"):
        cuda_graphs.cuda_graphs(drawing())
    with pytest.raises(UsageError, match="cuda_graphs records one set of sizes, and x of this graph is a size"):
        cuda_graphs.cuda_graphs(sized())


@pytest.mark.parametrize(("dropout", "refused"), [((), False), ((0.0,), False), ((0.1,), True)])
def test_cuda_graphs_of_attention(dropout, refused):
    """Its operators may draw; with a dropout of 0, which is their default, they do not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    flash = aten._scaled_dot_product_flash_attention.default
    graph.output((graph.call_function(flash, (x, x, x, *dropout)),))
    module = fx.GraphModule(nn.Module(), graph)
    if refused:
        with pytest.raises(UsageError, match=r"flash_attention\.default of this graph draws random numbers anew"):
            cuda_graphs.cuda_graphs(module)
    else:
        assert callable(cuda_graphs.cuda_graphs(module))


def drawing():
    graph = fx.Graph()
    graph.output((graph.call_function(aten.rand.default, ([2],)),))
    return fx.GraphModule(nn.Module(), graph)


def sized():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = ShapeEnv().create_unbacked_symint()
    graph.output((x,))
    return fx.GraphModule(nn.Module(), graph)


def on_gpu(backend=None):
    """As :func:`outcome` of three calls with other numbers, on a GPU; parameters are moved after the first."""
    torch.manual_seed(0)
    net = Net().cuda()
    call = net if backend is None else torch.compile(net, backend=backend, dynamic=False)
    values = []
    for number in range(3):
        x = torch.randn(3, 4, device="cuda", requires_grad=True)
        y = call(x)
        y.square().sum().backward()
        values += [y.detach(), x.grad]
        if not number:
            net.block[0].weight.data = net.block[0].weight.data.clone() * 1.5
    return [*values, *(p.grad for p in net.parameters()), *net.buffers()]


def test_inductor_of_a_torch_that_asks_for_settings(monkeypatch):
    """torch 2.11 takes Inductor's settings where torch 2.13 takes the graph."""
    from torch._inductor import compile_fx
    from torch._inductor import config as settings

    made = whole_graph._inductor_choices(fx.GraphModule(nn.Module(), fx.Graph()))
    given = []

    def older(config):
        given.append(config)
        return made

    def passing(module):
        return None

    monkeypatch.setattr(compile_fx, "create_compiler_config_extra", older)
    assert_close(outcome(Toolkit(passes=[passing], compiler="inductor", decompositions="inductor")), outcome())
    assert [config is settings for config in given] == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: a CPU has no CUDA graphs")
def test_cuda_graphs_replay():
    """Forward and backward; results of the call before are left alone, and moved parameters are noticed."""
    backend = Toolkit(passes=["common_subexpressions", "cuda_graphs"], compiler="none")
    assert_close(on_gpu(backend), on_gpu())
    assert ["cuda_graphs" in note.changed for note in backend.notes] == [False, True, True]
