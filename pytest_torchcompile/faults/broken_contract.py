"""Planted faults that show only where a caller does something that he may do, and that no plain call does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from pytest_torchcompile.faults.contract_programs import CELL, CELL_ON_CPU, DROPPED, PROGRAM, ROWS, WEIGHTED
from pytest_torchcompile.faults.fault_parts import Case, Program, named_backend
from pytest_torchcompile.fuzz.drawn_call import DrawnCall, call

__all__ = ["BROKEN_CONTRACT", "KEPT_CONTRACT"]

Arguments = tuple[Any, ...]
Condition = Callable[[Arguments], bool]


def _wrong_where(condition: Condition) -> Any:
    """A backend whose first result is off by one where a condition holds of the arguments of a graph."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            first, *others = module(*arguments)
            if condition(arguments):
                first = first + 1
            return first, *others

        return run

    return compile_graph


def _tensors_in(arguments: Arguments) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor)]


def _inputs_in(arguments: Arguments) -> list[Tensor]:
    return [each for each in _tensors_in(arguments) if not isinstance(each, nn.Parameter)]


def _channels_last(arguments: Arguments) -> bool:
    for each in _inputs_in(arguments):
        # With one channel, or a single pixel, both layouts are the same memory.
        if each.ndim == 4 and not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last):
            return True
    return False


def _at_an_offset(arguments: Arguments) -> bool:
    return any(each.storage_offset() for each in _inputs_in(arguments))


def _with_gaps(arguments: Arguments) -> bool:
    return any(each.numel() and each.stride(-1) == 2 for each in _inputs_in(arguments))


def _sharing_memory(arguments: Arguments) -> bool:
    pointers = [each.untyped_storage().data_ptr() for each in _inputs_in(arguments)]
    return any(one == other for one, other in combinations(pointers, 2))


def _one_for_two(arguments: Arguments) -> bool:
    # Dynamo hands a tensor on once, however often it is given.
    return len(_inputs_in(arguments)) == 1


def _wanting_a_gradient(arguments: Arguments) -> bool:
    return any(each.requires_grad for each in _inputs_in(arguments))


def _frozen(arguments: Arguments) -> bool:
    return any(isinstance(each, nn.Parameter) and not each.requires_grad for each in arguments)


def _without_gradients(arguments: Arguments) -> bool:
    return not torch.is_grad_enabled()


def _in_inference_mode(arguments: Arguments) -> bool:
    return torch.is_inference_mode_enabled()


def _under_autocast(arguments: Arguments) -> bool:
    return any(torch.is_autocast_enabled(each.device.type) for each in _inputs_in(arguments))


def _with_nan(arguments: Arguments) -> bool:
    return any(bool(each.isnan().any()) for each in _inputs_in(arguments))


def _all_zero(arguments: Arguments) -> bool:
    return any(not bool(each.any()) for each in _inputs_in(arguments))


def _with_gradients(arguments: Arguments) -> bool:
    return torch.is_grad_enabled()


def _autocast_of_backward_off(arguments: Arguments) -> bool:
    # Asked where the backend runs, as one asks that reads torch's settings too late.
    return bool(torch._functorch.config.backward_pass_autocast == "off")


def _without_epilogues(arguments: Arguments) -> bool:
    return not torch._inductor.config.epilogue_fusion


def _in_another_thread(arguments: Arguments) -> bool:
    return threading.current_thread() is not threading.main_thread()


def _of_three_rows(arguments: Arguments) -> bool:
    return any(each.shape[0] == 3 for each in _inputs_in(arguments) if each.ndim == 4)


def _row_for_nothing() -> Any:
    """A backend whose results have a row where there is none, as one that rounds sizes up."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            first, *others = module(*arguments)
            if not first.numel():
                first = torch.cat([first, first.new_zeros(1, *first.shape[1:])])
            return first, *others

        return run

    return compile_graph


def _without_autocast_inside() -> Any:
    """A backend that drops the autocast which the module enters itself."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        for node in reversed(module.graph.nodes):
            if node.target in (torch.amp.autocast_mode._exit_autocast, torch.amp.autocast_mode._enter_autocast):
                module.graph.erase_node(node)
        module.recompile()
        return module.forward

    return compile_graph


def _without_hooks() -> Any:
    """A backend that takes the hooks off parameters before it runs, so that nothing clips their gradients."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            for each in arguments:
                if isinstance(each, nn.Parameter) and each._backward_hooks:
                    each._backward_hooks.clear()
            return module(*arguments)

        return run

    return compile_graph


def _first_graph_for_ever() -> Any:
    """A backend that goes on with the first graph, whatever Python values later ones have."""
    first: list[fx.GraphModule] = []

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        first.append(module)
        return first[0].forward

    return compile_graph


def _first_values_for_ever() -> Any:
    """A backend that has copied the parameters when it compiled, as constants are folded."""

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        kept: dict[int, Tensor] = {}

        def run(*arguments: Any) -> Any:
            folded = []
            for place, each in enumerate(arguments):
                if isinstance(each, nn.Parameter):
                    # The value of the first run, with this one's gradient.
                    each = each + (kept.setdefault(place, each.detach().clone()) - each).detach()
                folded.append(each)
            return module(*folded)

        return run

    return compile_graph


def _wrong_for_another_module() -> Any:
    """A backend that is right for the parameters that it saw first alone."""
    seen: list[Tensor] = []

    def is_another(arguments: Arguments) -> bool:
        parameters = [each for each in arguments if isinstance(each, nn.Parameter)]
        if not seen:
            seen.append(parameters[0])
        return parameters[0] is not seen[0]

    return _wrong_where(is_another)


def _wrong_in_evaluation() -> Any:
    """A backend whose second graph is off: that of the other mode."""
    graphs: list[fx.GraphModule] = []

    def compile_graph(module: fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(module)
        late = len(graphs) > 1
        return _wrong_where(lambda _: late)(module, example_inputs)

    return compile_graph


PLAIN: Final = call(B=2)


def _broken(name: str, says: str, backend: Callable[[], Any], program: Program = PROGRAM, *history: DrawnCall,
            kind: str = "value") -> Case:
    where = {"gradient": "gradient of mixed.weight", "error": "error"}.get(kind, "output")
    # Each Python value is a constant of the graph, so that another one needs another graph.
    return Case(name, says, program, kind, backend, where, check="contract", dynamic=False, history=history)


def _where(condition: Condition) -> Callable[[], Any]:
    return partial(_wrong_where, condition)


def _mutated(**mutations: str) -> DrawnCall:
    return DrawnCall((("B", 2),), mutations=tuple(mutations.items()))


BROKEN_CONTRACT: Final = (
    _broken("channels last", "wrong where an input has its channels last", _where(_channels_last), PROGRAM,
            PLAIN, _mutated(memory_format="channels_last 0")),
    _broken("storage offset", "wrong where memory begins elsewhere", _where(_at_an_offset), PROGRAM,
            PLAIN, _mutated(strides="offset 0")),
    _broken("gaps", "wrong where an input has gaps", _where(_with_gaps), PROGRAM, _mutated(strides="sliced 1")),
    _broken("one tensor twice", "wrong where two inputs are one", _where(_one_for_two), PROGRAM,
            PLAIN, _mutated(aliasing="same 0 1")),
    _broken("views of one base", "wrong where two inputs share memory", _where(_sharing_memory), PROGRAM,
            PLAIN, _mutated(aliasing="views 0 1")),
    _broken("input with a gradient", "wrong where an input wants one", _where(_wanting_a_gradient), PROGRAM,
            PLAIN, _mutated(requires_grad="flipped 0")),
    _broken("frozen parameters", "wrong where some are frozen", _where(_frozen), PROGRAM,
            PLAIN, _mutated(frozen="first")),
    _broken("no_grad", "wrong without gradients", _where(_without_gradients), PROGRAM,
            PLAIN, _mutated(grad_mode="no_grad")),
    _broken("inference mode", "wrong in it", _where(_in_inference_mode), PROGRAM, _mutated(grad_mode="inference_mode")),
    _broken("autocast outside", "wrong under it", _where(_under_autocast), PROGRAM,
            PLAIN, _mutated(autocast="bfloat16")),
    _broken("NaN", "wrong where an input has one", _where(_with_nan), PROGRAM, PLAIN, _mutated(special_values="nan 1")),
    _broken("zeros", "wrong where an input is zero", _where(_all_zero), PROGRAM,
            PLAIN, _mutated(special_values="negative_zero 0")),
    _broken("number of a call", "stays at its first value", _first_graph_for_ever, PROGRAM,
            PLAIN, _mutated(python_values="half factor")),
    _broken("flag of a call", "stays at its first value", _first_graph_for_ever, PROGRAM,
            PLAIN, _mutated(python_values="flip added")),
    _broken("weights loaded", "the old ones are used", _first_values_for_ever, PROGRAM,
            PLAIN, _mutated(module_change="load")),
    _broken("weight replaced", "the old one is used", _first_values_for_ever, PROGRAM,
            PLAIN, _mutated(module_change="replace stem.weight")),
    _broken("batch without rows", "has one", _row_for_nothing, ROWS,
            PLAIN, DrawnCall((("B", 2),), False, (("empty_batch", "rows 0"),)), kind="shape"),
    _broken("gradients where nobody wants them", "wrong with them in evaluation", _where(_with_gradients), ROWS,
            call(B=2, training=False), DrawnCall((("B", 2),), False, (("grad_mode", "enable_grad"),))),
    _broken("setting of torch's", "wrong under it", _where(_autocast_of_backward_off), PROGRAM,
            PLAIN, _mutated(torch_settings="torch._functorch.config.backward_pass_autocast=off")),
    _broken("option of the backend", "wrong under it", _where(_without_epilogues), PROGRAM,
            PLAIN, _mutated(backend_options="epilogue_fusion=False")),
    _broken("member of an enum", "stays at its first value", _first_graph_for_ever, WEIGHTED,
            PLAIN, _mutated(structured_values="member 1")),
    _broken("field of a dataclass", "stays at its first value", _first_graph_for_ever, WEIGHTED,
            PLAIN, _mutated(structured_values="field 2.scale")),
    _broken("autocast inside", "is left out", _without_autocast_inside, ROWS,
            PLAIN, _mutated(inner_autocast="bfloat16"), kind="dtype"),
    _broken("hook of a parameter", "does not run", _without_hooks, ROWS,
            PLAIN, _mutated(hooks="gradient mixed.weight"), kind="gradient"),
    _broken("backward under the caller's autocast", "torch's own: in which that of an LSTM's cell raises",
            named_backend("aot_eager"), CELL_ON_CPU,
            PLAIN, _mutated(autocast="bfloat16", inner_autocast="float16"), kind="error"),
    _broken("another thread", "wrong in it", _where(_in_another_thread), PROGRAM, PLAIN, _mutated(thread="other")),
    _broken("second copy", "wrong for it", _wrong_for_another_module, PROGRAM, PLAIN, _mutated(second_copy="copy")),
    _broken("size in a history", "wrong for three rows", _where(_of_three_rows), PROGRAM, PLAIN, call(B=3)),
    _broken("evaluation after training", "wrong in it", _wrong_in_evaluation, DROPPED,
            PLAIN, call(B=2, training=False)),
)

_KEPT_HISTORY: Final = (
    PLAIN, _mutated(memory_format="channels_last 0"), _mutated(strides="offset 0", aliasing="views 0 1"),
    _mutated(requires_grad="flipped 0", frozen="first"), _mutated(grad_mode="inference_mode", thread="other"),
    _mutated(autocast="bfloat16", python_values="half factor"), _mutated(special_values="nan 1", module_change="load"),
    _mutated(second_copy="copy", module_change="replace stem.weight"), call(B=3, training=False),
)

_KEPT_ROWS: Final = (
    PLAIN, _mutated(empty_batch="rows 0"), _mutated(hooks="gradient mixed.weight"), _mutated(hooks="forward mixed"),
    DrawnCall((("B", 2),), False, (("grad_mode", "enable_grad"),)), _mutated(backend_options="epilogue_fusion=False"),
    _mutated(inner_autocast="float16"),
)
_KEPT_CELL: Final = (
    # With this setting the backward is computed as eager computes it.
    _mutated(autocast="bfloat16", inner_autocast="float16",
             torch_settings="torch._functorch.config.backward_pass_autocast=off"),
)
_KEPT_WEIGHTED: Final = (PLAIN, _mutated(structured_values="member 1"), _mutated(structured_values="field 2.scale"),
                         _mutated(structured_values="field 2.added"))
_KEPT: Final = (
    ("a module", PROGRAM, _KEPT_HISTORY), ("dropout", DROPPED, _KEPT_HISTORY),
    ("a layer", ROWS, _KEPT_ROWS), ("Python objects", WEIGHTED, _KEPT_WEIGHTED), ("a cell", CELL, _KEPT_CELL),
)

KEPT_CONTRACT: Final = tuple(
    Case(f"contract of {model} kept by {backend}", "nothing", program, backend=named_backend(backend), check="contract",
         dynamic=None, history=history, control=True)
    for backend in ("eager", "aot_eager")
    for model, program, history in _KEPT
)
