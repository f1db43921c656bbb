"""What to try about a recompile: one line that fits its cause and names its own variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pytest_torchcompile.ledger.records import Compile

__all__ = ["advice"]

_SIZE: Final = re.compile(r"^(?P<tensor>.+)\.size\((?P<dim>\d+)\)$")


_LAST_RESORT: Final = "last, and discouraged: dynamic=True, which makes every size dynamic and often the code slower"


def advice(found: Compile, dynamic: bool = False) -> str:
    """What to try; never empty. ``dynamic``: whether it was compiled with ``dynamic=True`` already."""
    text = _BY_CAUSE.get(found.cause, _other)(found)
    return text.removesuffix(f"; {_LAST_RESORT}") if dynamic else text


def _name(found: Compile) -> str:
    """The tensor or object that differed, as the user calls it."""
    what = re.sub(r"^type\((.*)\)$|^dispatch keys of (.*)$", r"\1\2", found.what)
    return re.sub(r"\.(size|stride)\(\d+\)$|\.(dim\(\)|dtype|device|requires_grad|training)$", "", what)


def _shape(found: Compile) -> str:
    if "parameter" in found.advice:
        return f"resize {_name(found)} before the first call, or force_parameter_static_shapes = False"
    if found.resumed_at:  # what the rest of a function is given is made inside
        return (f"pad the input that this size comes from to a few buckets (ShapeStabilizer); or {_mark('it', 'dim')}; "
                f"without the graph break there would be one recompile less; {_LAST_RESORT}")  # fmt: skip
    if match := _SIZE.match(found.what):
        mark = _mark(match["tensor"], match["dim"])
        return f"pad to a few buckets (ShapeStabilizer, shape_buckets); or {mark}; {_LAST_RESORT}"
    return f"give {_name(found) or 'the input'} the same number of dimensions in every call"


def _mark(tensor: str, dim: str) -> str:
    return f"torch._dynamo.mark_dynamic({tensor}, {dim}, min=2, max=your largest) before the first call"


def _symbolic(found: Compile) -> str:
    if "duck" in found.advice or re.search(r"\.size\(\)\[\d+\] == .*\.size\(\)\[\d+\]$", found.reason):
        return ("two sizes were equal in the first call: warm up with sizes that all differ, or set "
                "torch.fx.experimental._config.use_duck_shape = False")  # fmt: skip
    if "dynamo" in found.reason and "present" in found.reason:
        return "mark the same dimensions (mark_dynamic) in every call, from the first one on"
    if (match := _SIZE.match(found.what)) and found.reason.startswith("2 <=") and found.actual in ("0", "1"):
        return ("sizes 0 and 1 are always compiled apart: drop or pad the short batch, or "
                f"torch._dynamo.decorators.mark_unbacked({match['tensor']}, {match['dim']})")  # fmt: skip
    place = f", {found.at}" if found.at else ""
    line = f" ({found.source}{place})" if found.source else ""
    return f"the code decides by a size{line}: keep sizes on one side of it, or decide outside the model"


def _value(found: Compile) -> str:
    if "integer attributes of the nn.Module" in found.advice:
        return (f"register {found.what} as a buffer (a tensor), or set "
                "torch._dynamo.config.allow_unspec_int_on_nn_module = True")  # fmt: skip
    if re.fullmatch(r"-?\d+(\.\d*)?(e[+-]?\d+)?|nan|inf", found.expected):
        return f"pass {found.what or 'the number'} as a tensor, or keep it constant between calls"
    return f"keep {found.what or 'the value'} constant, or compile one callable for each value"


def _type(found: Compile) -> str:
    if found.expected and found.expected == found.actual:
        return (f"{found.expected} is made anew for each module, as parametrize and class factories do: make the class "
                "once, or remove the parametrizations before compiling")
    return f"pass {_name(found) or 'it'} as the same type in every call"


def _closure(found: Compile) -> str:
    name = found.what.split(".")[0] or "it"
    return (f"make the function that holds {name} once and call that one again: functions of one code share "
            "a cache, unless compiled with isolate_recompiles=True")  # fmt: skip


def _other(found: Compile) -> str:
    if found.reason.startswith("Duplicate") or " is " in found.reason:
        return "pass the same tensor twice in every call or in none: clone one of them"
    return found.advice or "TORCH_LOGS=recompiles_verbose lists every guard that failed"


_BY_CAUSE: Final[dict[str, Callable[[Compile], str]]] = {
    "shape": _shape,
    "symbolic": _symbolic,
    "value": _value,
    "closure": _closure,
    "stride": lambda r: f"call {_name(r)}.contiguous() before the model, in every call",
    "dtype": lambda r: f"cast {_name(r)} once before the model, or compile one callable for each dtype",
    "device": lambda r: f"move {_name(r)} to the model's device, or compile one callable for each device",
    "requires_grad": lambda r: f"detach {_name(r)}, or let it require gradients in every call",
    "type": _type,
    "attribute": lambda r: f"set {r.what or 'the attribute'} before the first call and keep it",
    "dict": lambda r: f"give the dict the same keys in every call ({r.what} was {r.expected}, is {r.actual})",
    "length": lambda r: f"keep {r.what} the same, or stack the items into one tensor",
    "none": lambda r: f"pass a tensor for {r.what} in every call (zeros serve), or compile two functions",
    "grad_mode": lambda r: "warm up under the grad mode of later calls, or allow one compile for each mode",
    "autocast": lambda r: "put autocast around the warm-up too, or inside the model",
    "training_mode": lambda r: "call train() or eval() before the first call, or allow one compile for each",
    "global_state": lambda r: f"set {r.what or 'it'} once, before the first call",
    "backward": lambda r: "use the same saved-tensor hooks in every call, or none",
}
