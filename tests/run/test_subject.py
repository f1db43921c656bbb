"""The subject: references to objects, keywords to factories, a cell to torch.compile's arguments."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from pytest_torchcompile import zoo
from pytest_torchcompile.cell import Cell
from pytest_torchcompile.dims import Dim
from pytest_torchcompile.errors import Unavailable, UsageError
from pytest_torchcompile.plan.models import ModelEntry
from pytest_torchcompile.run import subject

# Torch's own, when Dynamo or Inductor is first imported (2.8 to 2.13).
pytestmark = [pytest.mark.needs_torch, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]

HERE = "m.yaml:3:5"
WRITTEN = ("mine", "pack", "broken", "raising", "exiting")


@pytest.fixture(autouse=True)
def _own_path():
    """sys.path is put back, and modules that a test wrote are forgotten."""
    path = sys.path[:]
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] in WRITTEN]:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    """Write modules into the root folder."""

    def write(text, name="mine", folder=tmp_path):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return folder

    return write


def entry(factory="mine:factory", inputs="mine:inputs", loss=None, **dims):
    """A model's entry of the matrix."""
    return ModelEntry("mine", factory, inputs, loss, {n: Dim(size=s) for n, s in dims.items()}, HERE)


def cell(**axes):
    """A cell; axes that the package does not know become the user's."""
    known = {k: v for k, v in axes.items() if hasattr(Cell, k)}
    return Cell(model="mine", **known, user=tuple(sorted((k, v) for k, v in axes.items() if k not in known)))


def fails(text, call, *args):
    """The call raises UsageError with the place in the matrix and then exactly this text."""
    with pytest.raises(UsageError) as raised:
        call(*args)
    assert str(raised.value) == f"{HERE}: {text}"


MODEL = """
    import torch

    def factory(width=3):
        return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))

    def inputs(B, width=3):
        return torch.randn(B, width), torch.arange(B)
"""


def test_resolve_takes_dotted_attributes_and_packages(write, tmp_path):
    """module:attribute, module:Class.attribute and package.module:attribute are found."""
    write("class Model:\n    @staticmethod\n    def build(): return 7\n")
    write("", "__init__", tmp_path / "pack")
    write("def build(): return 8\n", "inner", tmp_path / "pack")
    assert subject.resolve("mine:Model.build", tmp_path, HERE)() == 7
    assert subject.resolve("pack.inner:build", tmp_path, HERE)() == 8


def test_resolve_looks_into_the_root_first(write, tmp_path):
    """A module of the root comes before one of the same name that was on the path already."""
    write("def which(): return 'other'\n", folder=tmp_path / "other")
    write("def which(): return 'root'\n", folder=tmp_path / "root")
    sys.path.insert(0, str(tmp_path / "other"))
    assert subject.resolve("mine:which", tmp_path / "root", HERE)() == "root"
    assert sys.path.count(str(tmp_path / "root")) == 1


def test_two_roots_may_have_modules_of_one_name(write, tmp_path):
    """A rank process that served one matrix does not take its models.py for another matrix' own."""
    for name in ("one", "two"):
        write("from mine.part import which\n", "__init__", tmp_path / name / "mine")
        write(f"def which(): return {name!r}\n", "part", tmp_path / name / "mine")
    found = [subject.resolve("mine:which", tmp_path / name, HERE)() for name in ("one", "two", "two", "one")]
    assert found == ["one", "two", "two", "one"]


def test_two_roots_may_have_folders_of_one_name(write, tmp_path):
    """The same for modules in a folder without an __init__.py."""
    for name in ("one", "two"):
        write(f"def which(): return {name!r}\n", "part", tmp_path / name / "mine")
    found = [subject.resolve("mine.part:which", tmp_path / name, HERE)() for name in ("one", "two", "one")]
    assert found == ["one", "two", "one"]


def test_a_module_that_only_another_root_has_stays(write, tmp_path):
    """What a root does not have is taken from wherever it is, and not imported twice."""
    write("def f(): pass\n", folder=tmp_path / "one")
    first = subject.resolve("mine:f", tmp_path / "one", HERE)
    assert subject.resolve("mine:f", tmp_path / "two", HERE) is first


@pytest.mark.parametrize(("reference", "text"), [
    ("mine", "'mine' names nothing; expected module:attribute"),
    ("mine:", "'mine:' names nothing; expected module:attribute"),
    ("mine:facory", "'mine' has no attribute 'facory'; did you mean 'factory'? Known: factory, number"),
    ("mine:factory.deep", "'mine' has no attribute 'factory.deep'; none are known"),
    ("mine:number", "'mine:number' is an object of type int; expected something callable"),
    ("absent:f", "cannot import 'absent': ModuleNotFoundError: No module named 'absent'"),
    ("broken:f", "cannot import 'broken': SyntaxError: invalid syntax (broken.py:2)"),
    ("raising:f", "cannot import 'raising': ZeroDivisionError: division by zero (raising.py:3)"),
    ("exiting:f", "cannot import 'exiting': SystemExit: 3 (exiting.py:2)"),
])
def test_what_cannot_be_resolved(write, tmp_path, reference, text):
    """One line: the place in the matrix, what was looked for, what is wrong; no traceback."""
    write("def factory(): pass\nnumber = 3\n")
    write("x = 1\nx = = 2\n", "broken")
    write("def f():\n    pass\n1 / 0\n", "raising")
    write("import sys\nsys.exit(3)\n", "exiting")
    fails(text, subject.resolve, reference, tmp_path, HERE)


def test_a_module_may_say_that_it_is_unavailable(write, tmp_path):
    """Unavailable raised by an import stays what it is: a skip."""
    write("from pytest_torchcompile.errors import Unavailable\nraise Unavailable('no such chip')\n")
    with pytest.raises(Unavailable, match=r"^no such chip$"):
        subject.resolve("mine:factory", tmp_path, HERE)


def test_build_seeds_moves_and_sets_the_phase(write, tmp_path):
    """Same seed, same parameters; floats take the cell's dtype, counters do not; phase sets train()."""
    write(MODEL)
    first = subject.build_model(entry(), cell(), tmp_path, 3)
    again = subject.build_model(entry(), cell(), tmp_path, 3)
    other = subject.build_model(entry(), cell(), tmp_path, 4)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert first.training
    half = subject.build_model(entry(), cell(dtype="bfloat16", phase="inference"), tmp_path, 3)
    assert {b.dtype for b in half.buffers()} == {torch.bfloat16, torch.int64}
    assert half[0].weight.dtype == torch.bfloat16
    assert not any(module.training for module in half.modules())


def test_build_hands_over_user_axes_and_the_device(write, tmp_path):
    """User axes are keywords; a parameter called device is told the cell's device."""
    write("import torch\ndef factory(width, device):\n"
          "    assert device == 'cpu'\n    return torch.nn.Linear(width, 1)\n")
    assert subject.build_model(entry(), cell(width=5), tmp_path, 0).in_features == 5


@pytest.mark.parametrize(("source", "axes", "text"), [
    ("def factory(width=3): ...", {"depth": 2},
     "factory 'mine:factory' has no parameter for the axis 'depth'; it takes width"),
    ("def factory(): ...", {"depth": 2},
     "factory 'mine:factory' has no parameter for the axis 'depth'; it takes no parameters"),
    ("def factory(width): ...", {},
     "factory 'mine:factory' cannot be called with the axes (none): missing a required argument: 'width'; "
     "it takes width"),
    ("def factory(**axes): ...", {"depth": 2},
     "factory 'mine:factory' returned None; expected a torch.nn.Module (wrap a function in one)"),
    ("def factory(): return abs", {},
     "factory 'mine:factory' returned an object of type builtin_function_or_method; "
     "expected a torch.nn.Module (wrap a function in one)"),
    ("def factory():\n    raise ValueError('two\\n  lines')", {},
     "factory 'mine:factory' raised ValueError: two lines (mine.py:2)"),
    ("def factory():\n    assert False", {}, "factory 'mine:factory' raised AssertionError (mine.py:2)"),
    ("import torch\ndef factory():\n    return torch.nn.Sequential(3)", {},  # raised in a file of torch's
     "factory 'mine:factory' raised TypeError: int is not a Module subclass (mine.py:3)"),
])
def test_what_cannot_be_built(write, tmp_path, source, axes, text):
    """The factory, and what it does or returns that cannot be used."""
    write(source)
    fails(text, subject.build_model, entry(), cell(**axes), tmp_path, 0)


def test_build_tells_what_this_machine_lacks(write, tmp_path, monkeypatch):
    """A device that is not here is a skip with a reason; a device that torch does not know is a mistake."""
    write(MODEL)
    fails("no device 'gpu': Expected one of cpu",
          _first_words, subject.build_model, entry(), cell(device="gpu"), tmp_path, 0)
    fails("torch has no dtype 'float31'", subject.build_model, entry(), cell(dtype="float31"), tmp_path, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = r"^device 'cuda' is not here: torch.cuda.is_available\(\) is false$"
    with pytest.raises(Unavailable, match=text):
        subject.build_model(entry(), cell(device="cuda"), tmp_path, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Unavailable, match=r"^device 'cuda:2' is not here: this machine has 2 of them$"):
        subject.build_model(entry(), cell(device="cuda:2"), tmp_path, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    with pytest.raises(Unavailable, match=r"^device 'cuda:1' does not compute in bfloat16$"):
        subject.build_model(entry(), cell(device="cuda:1", dtype="bfloat16"), tmp_path, 0)


def _first_words(call, *args):
    """Call, and keep torch's own words as far as they do not change with its version."""
    try:
        call(*args)
    except UsageError as error:
        raise UsageError(re.sub(r"(Expected one of cpu).*", r"\1", str(error))) from None


def test_a_dtype_that_does_not_compute_is_a_skip(write, tmp_path, monkeypatch):
    """Where the small matrix product raises, the text is torch's."""
    write(MODEL)

    def mm(left, right):
        raise RuntimeError('"addmm" not implemented for \'Half\'')

    subject._product_fails.cache_clear()
    monkeypatch.setattr(torch, "mm", mm)
    with pytest.raises(Unavailable, match=r"^device 'cpu' with dtype float16 does not work here: "
                                          r"RuntimeError: \"addmm\" not implemented for 'Half'"):
        subject.build_model(entry(), cell(dtype="float16"), tmp_path, 0)
    subject._product_fails.cache_clear()


def test_batches_of_every_binding(write, tmp_path):
    """One per size, in order, seeded, floats in the cell's dtype; with the user axes that inputs names."""
    write(MODEL)
    stepping = ModelEntry("mine", "mine:factory", "mine:inputs", None, {"B": Dim(choices=(2, 5))}, HERE)
    made = subject.make_batches(stepping, cell(dtype="float64", width=4, depth=1), tmp_path, 3)
    assert [sizes for sizes, _ in made] == [{"B": 2}, {"B": 5}]
    assert [[tuple(t.shape) for t in batch.args] for _, batch in made] == [[(2, 4), (2,)], [(5, 4), (5,)]]
    assert [t.dtype for t in made[0][1].args] == [torch.float64, torch.int64]
    torch.manual_seed(4)
    assert torch.equal(made[1][1].args[0], torch.randn(5, 4).double())


@pytest.mark.parametrize(("source", "text"), [
    ("def inputs(B): ...", "inputs 'mine:inputs' has no parameter for the dim 'S'; it takes B"),
    ("def inputs(B, S, T): ...",
     "inputs 'mine:inputs' cannot be called with the dims B, S: missing a required argument: 'T'; "
     "it takes B, S, T"),
    ("def inputs(B, S):\n    return [][B]",
     "inputs 'mine:inputs' raised IndexError: list index out of range (mine.py:2)"),
    ("def inputs(B, S): B * S",
     "inputs 'mine:inputs' returned None; expected a tensor, a tuple of arguments, a dict of keyword arguments, or "
     "(args, kwargs)"),
])
def test_inputs_that_do_not_fit_the_dims(write, tmp_path, source, text):
    """The inputs function, the dims it was given, and the parameters it has."""
    write(source)
    fails(text, subject.make_batches, entry(B=2, S=3), cell(), tmp_path, 0)


def test_loss(write, tmp_path):
    """Looked up as the others; none if the entry has none."""
    assert subject.loss_function(entry(loss="pytest_torchcompile.zoo:lm_loss"), tmp_path) is zoo.lm_loss
    assert subject.loss_function(entry(), tmp_path) is None
    fails("'pytest_torchcompile.zoo' has no attribute 'lmloss'; did you mean 'lm_loss'?",
          _without_list, subject.loss_function, entry(loss="pytest_torchcompile.zoo:lmloss"), tmp_path)


def _without_list(call, *args):
    """Call, and leave the list of known names out of the text."""
    try:
        call(*args)
    except UsageError as error:
        raise UsageError(str(error).partition(" Known:")[0]) from None


@pytest.mark.parametrize(("axes", "expected"), [
    ({"backend": "eager"}, {"backend": "eager", "dynamic": None}),
    ({"backend": "aot_eager", "dynamic": "static", "mode": "max-autotune"},
     {"backend": "aot_eager", "dynamic": False}),
    ({"mode": "reduce-overhead", "dynamic": "dynamic"},
     {"backend": "inductor", "mode": "reduce-overhead", "dynamic": True}),
])
def test_settings(tmp_path, monkeypatch, axes, expected):
    """The cell's axes as keywords of torch.compile; a mode only where the backend takes one."""
    monkeypatch.setattr(subject, "cxx_compiler", lambda: "g++")
    assert subject.compile_settings(cell(**axes), tmp_path, HERE) == expected


def test_settings_of_the_toolkit(monkeypatch, tmp_path):
    """A whole graph, by the cell's own axes; another backend has no use for them."""
    monkeypatch.setattr(subject, "cxx_compiler", lambda: "g++")
    chosen = cell(backend="toolkit", passes="dead_code", capture="forward_backward")
    found = subject.compile_settings(chosen, tmp_path, HERE)
    toolkit = found["backend"]
    assert found["fullgraph"]
    assert (toolkit.capture, toolkit.compiler, toolkit.decompositions) == ("forward_backward", "inductor", "inductor")
    assert [each.name for each in toolkit.graph_passes] == ["dead_code"]
    eager = subject.compile_settings(cell(backend="toolkit", compiler="eager"), tmp_path, HERE)["backend"]
    assert (eager.compiler, eager.decompositions) == ("eager", "none")
    fails("axis 'compiler' is 'eager', and backend 'inductor' has no use for it, only backend 'toolkit' has; take such "
          "cells out by the rule `- exclude: {backend: inductor, not: {compiler: default}}`, with a reason",
          subject.compile_settings, cell(compiler="eager"), tmp_path, HERE)


def test_settings_look_a_backend_up(write, tmp_path):
    """module:attribute becomes the function itself, and a misspelt one names the matrix."""
    write("def backend(graph, inputs): return graph\n")
    found = subject.compile_settings(cell(backend="mine:backend"), tmp_path, HERE)
    assert found["backend"].__name__ == "backend"
    fails("'mine' has no attribute 'backed'; did you mean 'backend'? Known: backend",
          subject.compile_settings, cell(backend="mine:backed"), tmp_path, HERE)


@pytest.fixture
def cxx(tmp_path, monkeypatch):
    """Set $CXX to a program of a given name that exits with a given status."""

    def cxx(name, status):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        subject.cxx_compiler.cache_clear()
        return str(program)

    yield cxx
    subject.cxx_compiler.cache_clear()


def test_no_compiler_no_inductor_on_the_cpu(tmp_path, monkeypatch, cxx):
    """Inductor cells skip, others do not: no such program, or one that fails."""
    for status in (None, 1):
        if status is None:
            monkeypatch.setenv("CXX", str(tmp_path / "absent-g++"))
            subject.cxx_compiler.cache_clear()
        else:
            cxx("g++", status)
        assert subject.cxx_compiler() is None
        with pytest.raises(Unavailable, match=r"^no C\+\+ compiler found; install g\+\+ or clang$"):
            subject.compile_settings(cell(), tmp_path, HERE)
        assert subject.compile_settings(cell(backend="aot_eager"), tmp_path, HERE)["backend"] == "aot_eager"
        assert subject.compile_settings(cell(device="cuda"), tmp_path, HERE)["backend"] == "inductor"


def test_compiler_is_the_one_that_torch_takes():
    """What torch's own search finds in this environment, if anything."""
    from torch._inductor import cpp_builder, exc

    subject.cxx_compiler.cache_clear()
    try:
        expected = cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        expected = None
    assert subject.cxx_compiler() == expected
    subject.cxx_compiler.cache_clear()


def test_a_compiler_with_a_strange_name_is_warned_of(cxx):
    """torch tells gcc from clang by the name; another name silently costs two thirds of the speed."""
    program = cxx("c++", 0)
    with pytest.warns(RuntimeWarning, match=rf"^CXX={re.escape(program)}: torch knows a compiler by its"):
        assert subject.cxx_compiler() == program
    for name in ("x86_64-linux-gnu-g++-13", "clang++-18", "gcc"):
        program = cxx(name, 0)
        assert subject.cxx_compiler() == program  # a warning would be an error here


def test_arguments_of_the_matrix_reach_factory_and_inputs(write):
    """Beside the user's axes and the dims."""
    root = write("""
        import torch

        def factory(name, width):
            return torch.nn.ModuleDict({name: torch.nn.Linear(width, width)})

        def inputs(B, kind):
            return torch.zeros(B, len(kind))
    """)
    given = replace(entry(B=2), arguments={"factory": {"name": "bert"}, "inputs": {"kind": "text"}})
    model = subject.build_model(given, cell(width=3), root, 0)
    assert list(model) == ["bert"]
    [(sizes, batch)] = subject.make_batches(given, cell(width=3), root, 0)
    assert (sizes, batch.value.shape) == ({"B": 2}, (2, 4))


def test_modules_keep_their_mode_where_the_matrix_says_so(write):
    """Dropout that is on in inference, or a batch norm that is frozen in training."""
    root = write("""
        import torch

        def factory():
            model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(3))
            model[1].eval()
            return model
    """)
    kept = replace(entry(), mode_of_modules="keep")
    for phase in ("training", "inference"):
        assert [module.training for module in subject.build_model(kept, cell(phase=phase), root, 0)] == [True, False]
        plain = subject.build_model(entry(), cell(phase=phase), root, 0)
        assert [module.training for module in plain] == [phase == "training"] * 2
