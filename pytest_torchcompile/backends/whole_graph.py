"""The whole graph: forward and backward of a model as one graph of ATen operators, passes over it, a compiler last.

Dynamo captures and guards; AOTAutograd makes the joint graph, with a descriptor on each input and result
(``meta["desc"]``) in which parameters and buffers have their names. As torchtitan's compiler toolkit does it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from pytest_torchcompile.backends.decomposition_tables import decomposition_table, needs_table
from pytest_torchcompile.backends.graph_dumps import dump_change, dump_graph
from pytest_torchcompile.backends.graph_halves import put_backward_behind
from pytest_torchcompile.backends.graph_names import name_parameters
from pytest_torchcompile.backends.graph_passes import GraphPass, apply_pass
from pytest_torchcompile.backends.graph_structure import structure_of
from pytest_torchcompile.backends.partitioner import partition_function
from pytest_torchcompile.cell import CAPTURES, COMPILERS
from pytest_torchcompile.errors import InstrumentError, TorchcompileError, UsageError, nearest

__all__ = ["GraphNote", "WholeGraph"]

_ANNOTATION: Final = "compile_with_inductor"


@dataclass(frozen=True)
class GraphNote:
    """What became of one graph."""

    graph: str
    """``joint``, ``forward`` or ``backward``."""
    operators: dict[str, int]
    """How often it calls each operator, before any pass."""
    changed: tuple[str, ...]
    """Names of the passes that changed its code."""
    changed_by: tuple[int, ...]
    """Their numbers, from 1."""
    structures: dict[int, str] = field(default_factory=dict)
    """Its structure behind each pass, by the pass's number; 0: as it was captured."""


@dataclass(frozen=True)
class WholeGraph:
    """How whole graphs are captured and compiled; calling it compiles one graph of Dynamo's.

    Raises :class:`UsageError` for a graph break, with its line, and for what a pass does wrong, and
    :class:`InstrumentError` on a torch that lacks the joint graph with descriptors (before 2.9).
    """

    passes: tuple[GraphPass, ...] = ()
    capture: str = "joint"
    compiler: str = "inductor"
    decompositions: str | Mapping[Any, Callable[..., Any]] | None = None
    recompute: bool = False
    dump: Path | None = None
    root: Path | None = None
    of: int = 0
    """How many passes there are in all, where these are the first of them."""
    notes: list[GraphNote] = field(default_factory=list)
    """What became of each graph; a caller may read it."""

    def __post_init__(self) -> None:
        for what, value, known in (("capture", self.capture, CAPTURES), ("compiler", self.compiler, COMPILERS)):
            if value not in known:
                raise UsageError(f"{what} is {value!r}; {nearest(str(value), known)}")

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        _refuse_break(graph)
        export, finish = _joint_functions()
        compiler = _compiler_of(self, graph, len(inputs))
        with contextlib.ExitStack() as stack:
            for context in compiler.contexts():
                stack.enter_context(context)
            joint = export(stack, graph, tuple(inputs),
                           decompositions=decomposition_table(self.decompositions, self.root),
                           keep_inference_input_mutations=self.compiler == "inductor")
            name_parameters(joint.graph_module, graph)
            # Without a backward pass the one graph is the forward.
            whole = "joint" if compiler.has_backward(joint) else "forward"
            if whole == "joint" and self.capture == "step":
                raise UsageError("capture 'step' takes a step that does its own backward pass, and results of this "
                                 "graph want a gradient: compile it with pytest_torchcompile.oracle.whole_step"
                                 ":compile_step, under torch.no_grad(), or write `capture: joint`")
            if whole == "joint":
                joint.graph_module = self._change("joint", joint.graph_module)[0]

            def compile_forward(module: fx.GraphModule, values: Sequence[Any]) -> Any:
                if whole == "forward" and self.capture != "forward_backward":
                    # Inference, or a step with its backward pass inside: passes of the joint graph have this alone.
                    module, _ = self._change("joint", module)
                module, runner = self._change("forward", module)
                return runner or compiler.compile_graph(module, values, inference=whole == "forward")

            def compile_backward(module: fx.GraphModule, values: Sequence[Any]) -> Any:
                module, runner = self._change("backward", module)
                return runner or compiler.compile_graph(module, values, backward=True)

            compiled: Callable[..., Any] = finish(
                joint, partition_fn=compiler.partition, fw_compiler=compile_forward, bw_compiler=compile_backward)
        return _without_trees(compiled, joint)

    def _change(self, graph: str, module: fx.GraphModule) -> tuple[fx.GraphModule, Callable[..., Any] | None]:
        """A graph after all passes that are for it, and what runs it instead, if the last one says so."""
        operators = _count_operators(module)
        structures = {0: structure_of(module)}
        changed: list[int] = []
        runner = None
        number_of_graph = sum(note.graph == graph for note in self.notes) + 1
        code = ""
        for number, each in enumerate(self.passes, 1):
            if not each.is_for(graph, self.capture):
                continue
            code = code or dump_graph(_taking_plain_inputs(module))
            told = f"pass {number} of {self.of or len(self.passes)} ({each.name})"
            last = number == len(self.passes) and self.compiler == "none"
            found = apply_pass(each, told, module, last=last and graph != "joint")
            if not isinstance(found, fx.GraphModule):
                runner = _boxed(found)
                changed.append(number)
                break
            module, before = found, code
            structures[number] = structure_of(module)
            code = dump_graph(module)
            if code != before:
                changed.append(number)
            if self.dump is not None:
                dump_change(self.dump, f"{graph}-{number_of_graph}", number, each.name, before, code)
        if graph == "joint" and changed:
            put_backward_behind(module)
        names = tuple(self.passes[number - 1].name for number in changed)
        self.notes.append(GraphNote(graph, operators, names, tuple(changed), structures))
        return module, runner


def _taking_plain_inputs(module: fx.GraphModule) -> fx.GraphModule:
    """The graph, which from now on is called with its inputs one by one: ``module(*example_inputs)``.

    A joint graph takes a list of what the model takes and a list of gradients, which would be in the way of a pass that
    runs it.
    """
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module


def _refuse_break(graph: fx.GraphModule) -> None:
    """Raise UsageError if this is the first part of a graph that breaks.

    ``compile_subgraph_reason`` of Dynamo's graphs (torch/_dynamo/output_graph.py, torch 2.8 to 2.15; 2.13 tried).
    """
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return
    place = ""
    if reason.user_stack:
        frame = reason.user_stack[-1]
        place = f" at {frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"
    raise UsageError(f"the toolkit takes the whole model as one graph, and it breaks{place}: "
                     f"{str(reason.reason).splitlines()[0]}")


def _joint_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's functions that make the joint graph, and compile it.

    Experimental: ``aot_export_joint_with_descriptors`` and ``aot_compile_joint_with_descriptors`` in
    torch/_functorch/aot_autograd.py (torch 2.9 to 2.15; 2.13 tried).
    """
    try:
        from torch._functorch.aot_autograd import (
            aot_compile_joint_with_descriptors,
            aot_export_joint_with_descriptors,
        )
    except ImportError:
        raise InstrumentError(f"torch {torch.__version__} cannot export the joint graph of a model with descriptors; "
                              "the toolkit's passes need torch 2.9 or newer") from None
    return aot_export_joint_with_descriptors, aot_compile_joint_with_descriptors


def _without_trees(compiled: Callable[..., Any], joint: Any) -> Callable[..., Any]:
    """What runs a joint graph, called with tensors alone, as Dynamo's graphs are: no tree is taken apart in each call.

    Private: what ``aot_compile_joint_with_descriptors`` has in its closure: ``compiled_fn``, which takes and returns
    flat lists (torch 2.13; an eighth of a step of a small model). Where it is not found, all is as torch has it.
    """
    inner = _closure_of(compiled).get("traceable_fn", compiled)
    flat = _closure_of(inner).get("compiled_fn")
    results: Any = getattr(joint, "out_spec", None)
    if not callable(flat) or results is None or results.num_leaves != results.num_children:
        return compiled

    def run_flat(*tensors: Any) -> tuple[Any, ...]:
        return tuple(flat(list(tensors)))

    return run_flat


def _closure_of(function: Any) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


class _Compiler:
    """The last pass: what makes a graph run. This one runs it as it is, with torch's operators."""

    def __init__(self, choice: WholeGraph) -> None:
        self.choice = choice

    def contexts(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        """What has to hold while a graph is captured and compiled."""
        yield from ()

    @staticmethod
    def has_backward(joint: Any) -> bool:
        """Whether the exported graph has a backward pass: it then takes tangents."""
        placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
        return any(str(node.target).startswith("tangents") for node in placeholders)

    @property
    def partition(self) -> Callable[..., Any]:
        """What splits the joint graph into forward and backward."""
        return partition_function(self.choice.recompute)

    def compile_graph(self, module: fx.GraphModule, values: Sequence[Any], *, inference: bool = False,
                      backward: bool = False) -> Any:
        """The function that runs a graph; takes all inputs in one list."""
        return _boxed(module.forward)


class _Regional(_Compiler):
    """Inductor for the regions that are annotated so, torch's operators for the rest.

    ``torch.fx.passes.regional_inductor`` (torch 2.10 to 2.15; 2.13 tried).
    """

    def compile_graph(self, module: fx.GraphModule, values: Sequence[Any], *, inference: bool = False,
                      backward: bool = False) -> Any:
        try:
            from torch.fx.passes.regional_inductor import regional_inductor
        except ImportError:
            raise InstrumentError(f"torch {torch.__version__} has no torch.fx.passes.regional_inductor; "
                                  "`compiler: regional_inductor` needs torch 2.10 or newer") from None
        marked = [node for node in module.graph.nodes if _ANNOTATION in (node.meta.get("custom") or {})]
        if not marked and not backward:
            raise UsageError("regional_inductor compiles the regions that are annotated, and no operator of the "
                             f'forward graph is: write `with torch.fx.traceback.annotate({{"{_ANNOTATION}": {{}}}}):` '
                             "around them in the model, or set meta['custom'] in a pass")
        found = regional_inductor(module, *values)
        # Where a region was compiled, torch has made the graph take all inputs in one list.
        if isinstance(found.graph._codegen, _boxed_codegen()):
            return found
        return _boxed(found.forward)


class _Inductor(_Compiler):
    """Inductor, as ``torch._inductor.compile_fx`` itself puts its parts together.

    Private: ``create_compiler_config_extra``, ``compile_fx_forward``, ``compile_fx_backward``, ``partition_fn`` and
    ``get_num_model_outputs`` in torch/_inductor/compile_fx.py (torch 2.11 and 2.13).
    """

    def __init__(self, choice: WholeGraph, graph: fx.GraphModule, inputs: int) -> None:
        super().__init__(choice)
        from torch._inductor import compile_fx

        self._parts: Any = compile_fx
        names = ("create_compiler_config_extra", "compile_fx_forward", "compile_fx_backward", "partition_fn",
                 "get_num_model_outputs")
        missing = [name for name in names if not hasattr(compile_fx, name)]
        if missing:
            raise InstrumentError(f"torch {torch.__version__} has no {missing[0]} in torch._inductor.compile_fx, of "
                                  "which the toolkit makes its Inductor; write `compiler: eager`")
        self._inputs, self._results = inputs, compile_fx.get_num_model_outputs(graph)
        self._extra = _inductor_choices(graph)

    def contexts(self) -> Iterator[contextlib.AbstractContextManager[Any]]:
        # As _compile_fx_main in that file has them.
        from torch._dispatch.python import enable_python_dispatcher
        from torch._inductor.virtualized import V

        yield enable_python_dispatcher()
        yield V.set_fake_mode(torch._guards.TracingContext.get().fake_mode)
        yield torch._functorch.config.patch(unlift_effect_tokens=True)

    @property
    def partition(self) -> Callable[..., Any]:
        # It runs Inductor's own passes of the joint graph first.
        return self._parts.partition_fn  # type: ignore[no-any-return]

    def compile_graph(self, module: fx.GraphModule, values: Sequence[Any], *, inference: bool = False,
                      backward: bool = False) -> Any:
        try:
            if backward:
                return self._parts.compile_fx_backward(module, values, compiler_config_extra=self._extra)
            return self._parts.compile_fx_forward(
                module, values, num_orig_model_outputs=self._results, num_example_inputs=self._inputs,
                compiler_config_extra=self._extra, is_inference=inference)
        except TorchcompileError:
            raise
        except Exception as error:
            if sentence := needs_table(error, self.choice.decompositions):
                raise sentence from error
            raise


class _LastPass(_Compiler):
    """None: the last pass is the compiler, and has to return what runs the forward and the backward graph."""

    def compile_graph(self, module: fx.GraphModule, values: Sequence[Any], *, inference: bool = False,
                      backward: bool = False) -> Any:
        raise UsageError(f"with `compiler: none` the last pass has to return the function that runs the "
                         f"{'backward' if backward else 'forward'} graph, and none did; it gets both graphs with "
                         "`capture: forward_backward`")


def _inductor_choices(graph: fx.GraphModule) -> Any:
    """What Inductor decides once for forward and backward, CUDA graphs for one.

    Private: ``create_compiler_config_extra`` in torch/_inductor/compile_fx.py. It takes Inductor's settings in torch
    2.11, and in torch 2.13 the graph, which may say otherwise.
    """
    from torch._inductor import compile_fx, config

    make: Any = compile_fx.create_compiler_config_extra
    takes_settings = "config" in inspect.signature(make).parameters
    return make(config if takes_settings else graph)


def _compiler_of(choice: WholeGraph, graph: fx.GraphModule, inputs: int) -> _Compiler:
    if choice.compiler == "inductor":
        return _Inductor(choice, graph, inputs)
    kinds = {"regional_inductor": _Regional, "eager": _Compiler, "none": _LastPass}
    return kinds[choice.compiler](choice)


def _boxed_codegen() -> type:
    """The mark of graphs that take one list: ``torch.fx.graph._BoxedCodeGen`` (torch 2.10 to 2.15; 2.13 tried)."""
    found: type = vars(torch.fx.graph).get("_BoxedCodeGen", type(None))
    return found


def _boxed(run: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """The same function, taking all inputs in one list."""

    @functools.wraps(run)
    def run_boxed(arguments: list[Any]) -> Any:
        return run(*arguments)

    # The mark that AOTAutograd looks for, torch 2.8 to 2.15.
    run_boxed._boxed_call = True  # type: ignore[attr-defined]
    return run_boxed


def _count_operators(module: fx.GraphModule) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in module.graph.nodes:
        # Which of several results is taken is no operator.
        if isinstance(node.target, torch._ops.OpOverload):
            name = str(node.target)
            counts[name] = counts.get(name, 0) + 1
    return counts
