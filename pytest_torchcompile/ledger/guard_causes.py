"""Why a guard failed, as one of the classes that checks and hints speak of.

The table holds every text that guards of torch 2.8 to 2.15 make, with the place that makes it. A text that is
not in it is `other`, and kept: torch may say something new, that is no error of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

__all__ = ["CAUSES", "TABLE", "Pattern", "classify_guard"]

CAUSES: Final = (
    "shape", "stride", "dtype", "device", "requires_grad", "value", "type", "attribute", "dict", "length",
    "none", "grad_mode", "autocast", "training_mode", "global_state", "closure", "symbolic", "backward",
    "other",
)  # fmt: skip


class Pattern(NamedTuple):
    """One text, what it means, who makes it."""

    text: str
    """Regular expression, searched in the guard without comment and prefix."""
    cause: str
    origin: str
    """Function of torch/_dynamo/guards.py, or the C++ guard of torch/csrc/dynamo/guards.cpp."""


TABLE: Final = (
    # TensorCheck::check_verbose in guards.cpp
    Pattern(r"^tensor '.*' (size|rank) mismatch", "shape", "TENSOR_MATCH"),
    Pattern(r"^tensor '.*' stride mismatch", "stride", "TENSOR_MATCH"),
    Pattern(r"^tensor '.*' dtype mismatch", "dtype", "TENSOR_MATCH"),
    Pattern(r"^tensor '.*' requires_grad mismatch", "requires_grad", "TENSOR_MATCH"),
    Pattern(r"device index mismatch", "device", "TENSOR_MATCH"),
    # The first key of a set is that of the device. Other keys say conjugate, sparse, under vmap, ...
    Pattern(r"key set mismatch\. expected DispatchKeySet\((\w+)[,)].*actual DispatchKeySet\((?!\1\b)",
            "device", "TENSOR_MATCH"),
    Pattern(r"dispatch key set mismatch", "type", "TENSOR_MATCH"),
    Pattern(r"^expected type of '.*' to be .*found <class 'NoneType'", "none", "TENSOR_MATCH"),
    Pattern(r"^expected type of '.*' to be ", "type", "TENSOR_MATCH"),
    # A tensor that mark_dynamic and its kin have marked otherwise than in the first call.
    Pattern(r"_dynamo\w*_(indices|dim_marking|hint_overrides|range)\b", "symbolic", "TENSOR_MATCH"),
    # The same facts where Dynamo writes them as Python expressions.
    Pattern(r"\bstr\(.*\.(dtype|layout)\) ==|\.dtype ==", "dtype", "TENSOR_MATCH"),
    Pattern(r"\bstr\(.*\.device\) ==|\.device(\.index)? ==", "device", "TENSOR_MATCH"),
    Pattern(r"\.requires_grad ==", "requires_grad", "TENSOR_MATCH"),
    Pattern(r"\.ndimension\(\) ==", "shape", "TENSOR_MATCH"),
    Pattern(r"___get_current_stream", "global_state", "CURRENT_STREAM"),
    Pattern(r"^Duplicate tensors? found|^\S+ is (not )?(?!None\b)\S+$", "other", "DUPLICATE_INPUT"),
    # GlobalStateGuard in guards.cpp, and guards on other state of the process
    Pattern(r"^GLOBAL_STATE changed:.*\bgrad_mode", "grad_mode", "GLOBAL_STATE"),
    Pattern(r"^GLOBAL_STATE changed:.*\bautocast", "autocast", "GLOBAL_STATE"),
    Pattern(r"^GLOBAL_STATE changed|___check_global_state", "global_state", "GLOBAL_STATE"),
    Pattern(r"___check_torch_function_mode_stack", "global_state", "TORCH_FUNCTION_STATE"),
    Pattern(r"CURRENT_DEVICE ==", "global_state", "DEFAULT_DEVICE"),
    Pattern(r"compare_functorch_state", "global_state", "FUNCTORCH_STACK_MATCH"),
    Pattern(r"forward_ad\._current_level", "global_state", "DUAL_LEVEL"),
    Pattern(r"top_saved_tensors_hooks", "backward", "AUTOGRAD_SAVED_TENSORS_HOOKS"),
    # Python objects. "Dict contains" of an object's __dict__ is hasattr, so it comes before that of a dict.
    Pattern(r"\.training == ", "training_mode", "EQUALS_MATCH"),
    Pattern(r"^not ___dict_contains\(.*\.__dict__\)|^(not )?hasattr\(", "attribute", "HASATTR"),
    Pattern(r"^KeyError on .*\]$|___dict_(contains|version)|set\.__contains__", "dict", "DICT_CONTAINS"),
    Pattern(r"^list\(.*keys\(", "dict", "DICT_KEYS_MATCH"),
    Pattern(r"^(KeyError|AttributeError|IndexError) on ", "attribute", "GuardAccessor::check_verbose"),
    Pattern(r"\blen\(|__len__\(|_(iterator|reverseiterator)_len\(|^not [^ ]+$", "length", "SEQUENCE_LENGTH"),
    # By the id of an object torch guards functions, classes, modules, None and enum members alike: the type tells.
    Pattern(r"___check_obj_id\(.*type=<class '(\w+\.)*(code|\w*function\w*|\w*method\w*)'>", "closure",
            "FUNCTION_MATCH"),
    Pattern(r"___check_obj_id\(.*type=<class '(type|module)'>", "type", "CLASS_MATCH, MODULE_MATCH"),
    Pattern(r"___check_obj_id\(.*type=<class 'NoneType'>", "none", "ID_MATCH"),
    Pattern(r"___check_obj_id\(", "value", "ID_MATCH"),
    Pattern(r"___check_type_id|___check_fake_script_type|^type\(", "type", "TYPE_MATCH"),
    Pattern(r"___check_metadata|__dtensor_spec|___check_opaque_guard_fn|raw_repr\(\)|___cow_tensor_matches",
            "type", "TENSOR_SUBCLASS_METADATA_MATCH, DTENSOR_SPEC_MATCH, DISPATCH_KEY_SET_MATCH"),
    Pattern(r" is (not )?None$", "none", "NONE_MATCH, NOT_NONE_MATCH"),
    Pattern(r"__closure__|cell_contents|__code__|__defaults__", "closure", "CLOSURE_MATCH"),
    Pattern(r"isnan\(", "value", "EQUALS_MATCH"),
    # Relations between sizes: ShapeEnv.produce_guards (torch/fx/experimental/symbolic_shapes.py)
    Pattern(r"\.(size|stride)\(\)\[|\.storage_offset\(\)", "symbolic", "SHAPE_ENV"),
    Pattern(r"\b(Eq|Ne|Mod|PythonMod|FloorDiv|Max|Min)\(", "symbolic", "SHAPE_ENV"),
    Pattern(r" (<=?|>=?|!=) | % | // ", "symbolic", "SHAPE_ENV"),
    # Last, since most of the texts above compare too.
    Pattern(r"___normalize_(range|count)_iter|==", "value", "EQUALS_MATCH"),
)
"""In the order in which they are tried."""

_COMPILED: Final = tuple((re.compile(p.text), p.cause) for p in TABLE)
_NAME: Final = re.compile(r"^(?:not )?([^\W\d]\w*) ==")


def classify_guard(guard: str, freevars: Iterable[str] = (), actual: str = "") -> str:
    """Class of a failed guard, one of :data:`CAUSES`.

    :param guard: the guard in torch's words, without comment (:func:`..reasons.read_reason`).
    :param freevars: names that the function takes from an enclosing function: a value of one of these differs
        because another closure of the same code was called.
    :param actual: what the guard met (:func:`..guard_values.shown_value`); torch 2.8 names no type beside an
        object's id.

    >>> classify_guard("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    'shape'
    >>> classify_guard("k == 1"), classify_guard("k == 1", freevars=("k",))
    ('value', 'closure')
    """
    cause = _first_match(guard)
    if cause != "value":
        return cause
    # Closures of one factory share a code object and its cache: the second one's first call is a recompile.
    name = _NAME.match(guard)
    if name is not None and name[1] in tuple(freevars):
        return "closure"
    if "___check_obj_id" in guard and actual.startswith(("function ", "code ")):
        return "closure"
    return "value"


def _first_match(guard: str) -> str:
    for pattern, cause in _COMPILED:
        if pattern.search(guard):
            return cause
    return "other"
