"""A failed guard taken apart: what was compared, what was expected, what came instead, for which line.

And why it failed, as one of the classes that checks and hints speak of (:data:`CAUSES`).

Texts: ``get_guard_fail_reason_helper`` and ``get_verbose_code_part`` (torch/_dynamo/guards.py, 2.8 to 2.15).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from pytest_torchcompile.ledger.records import GuardFacts

__all__ = ["CAUSES", "TABLE", "Pattern", "Reason", "classify_guard", "read_reason", "split_reasons", "user_expression"]

_PREFIX: Final = re.compile(r"^(!?[\d/]+): ?")
_COMMENT: Final = re.compile(r"\s{2,}# ")
_PLACE: Final = re.compile(r"(?:^|\s*# )([^#]*?:\d+) in \S+")
_TORCH_PLACE: Final = re.compile(r"^\(([^#()]*?:\d+) in (\w+)\)?")
"""Where none of the user's lines ran, torch names its own, in brackets: ``(_inductor/kernel/conv.py:1091 in ...)``."""
_LOWERING: Final = re.compile(r"\b_inductor/kernel/|\b_inductor/lowering")
"""Code of torch's that is an operator's own; elsewhere the function says nothing to a user."""
_STACK: Final = re.compile(r'^  File "(.+?)", line (\d+)', re.M)
_ADVICE: Final = re.compile(r"^\(?(?:HINT: )?(.*?)\)?$", re.S)

# One pattern for each form that guards have; the functions below read them in this order.
_TENSOR: Final = re.compile(
    r"^tensor '(?P<what>.*)' (?P<kind>[\w ]+) mismatch(?: at index (?P<at>\d+))?\. expected "
    r"(?:requires_grad=)?(?P<expected>.+?)(?:, actual (?P<actual>.+))?$", re.S)
_FOUND: Final = re.compile(
    r"^expected type of '(?P<what>.*)' to be (?:a tensor type|<class '(?P<was>.+)'>),.*<class '(?P<is>.+)'>")
_CLASS: Final = re.compile(
    r"^___check_(?P<kind>type|obj)_id\((?P<what>.*), \d+\)(?:, type=<class '(?P<is>.+)'>)?")
_PRESENT: Final = re.compile(
    r"^(?P<no>not )?(?:hasattr\((?P<of>.+), '(?P<name>\w+)'\)"
    r"|(?:___dict_contains|set\.__contains__)\((?P<key>.+), (?P<dict>.+)\))$")
_MISSING: Final = re.compile(r"^(?:Key|Attribute|Index)Error on (?P<what>.+)$")
_EQUALS: Final = re.compile(r"^(?P<what>[^<>]+?) (?:==|is(?= \S+$)) (?P<expected>.+)$", re.S)
_DIFFERS: Final = re.compile(r"^(?P<what>len\(.+\)) != (?P<expected>.+)$")
_NAN: Final = re.compile(r"^(?:\(type\(.+\) is (?:float|complex) and )?__(?:math|numpy)_isnan\((?P<what>.*?)\)+$")
_SIZE: Final = re.compile(r"(?P<what>[\w.\[\]'\"]+\.(?:size|stride)\(\)\[\d+\])")
_EMPTY: Final = re.compile(r"^not (?P<what>\S+)$")

_MODULE_TABLE: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_FROM_NUMPY: Final = re.compile(r"___from_numpy\((.*?)\)")
_GLOBAL: Final = re.compile(r"\bG\['(\w+)'\]")
_KEYS: Final = re.compile(r"DispatchKeySet\((.*)\)")


@dataclass
class Reason(GuardFacts):
    """One failed guard."""

    guard: str
    """In torch's words, without the line of source and without advice."""
    entry: str = ""
    """Compile id of the cached entry."""


class _Comparison(NamedTuple):
    """What a guard compared, what it expected, what came; empty texts where it does not say."""

    what: str
    expected: str
    actual: str


def split_reasons(payload: str | None) -> tuple[str, ...]:
    """Failed guards out of a ``recompile_reasons`` record; each begins with the compile id of its entry.

    Torch 2.8 writes a JSON list; torch 2.13 to 2.15 write the bare text where there is one reason.
    """
    try:
        reasons = json.loads(payload or "")
    except ValueError:
        reasons = payload or ""
    if isinstance(reasons, str):
        reasons = [reasons]
    texts = [str(reason).strip() for reason in reasons]
    return tuple(text for text in texts if _PREFIX.sub("", text))


def read_reason(text: str) -> Reason:
    """Take one text of :func:`split_reasons` apart; parts that it does not have are empty, never an error.

    >>> reason = read_reason("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    >>> reason.what, reason.expected, reason.actual
    ('x.size(0)', '3', '4')
    >>> read_reason("o.k == 2    # return x * o.k  # app/net.py:7 in forward").at
    'app/net.py:7'
    """
    prefix = _PREFIX.match(text)
    entry = prefix[1] if prefix else ""
    main, _, stack = _PREFIX.sub("", text).partition("\nUser stack trace:")
    guard, *comments = _COMMENT.split(main, maxsplit=1)
    comment = "".join(comments)
    # torch 2.8 writes no comment, but hints
    guard, _, hint = guard.partition(" (HINT: ")
    guard, _, tail = " ".join(guard.split()).partition(". Guard failed on ")
    source, at, remark = _read_comment(comment)
    advice = hint or remark
    if tail:
        advice = f"Guard failed on {tail}"
    # The stack has the whole path; a comment may shorten it.
    if frames := _STACK.findall(stack):
        file, line = frames[-1]
        at = f"{file}:{line}"
    compared = _read_comparison(guard)
    return Reason(guard, entry, what=compared.what, expected=compared.expected, actual=compared.actual, source=source,
                  at=at, advice=_read_advice(advice))


def _read_comment(comment: str) -> tuple[str, str, str]:
    """The line of source, where it stands, and what follows; a comment without a place is a remark as a whole.

    Where torch names a place of its own, the function of an operator stands for the line:
    ``convolution_backward_lowering``.
    """
    if torchs := _TORCH_PLACE.match(comment):
        function = torchs[2] if _LOWERING.search(torchs[1]) else ""
        return function, torchs[1], comment[torchs.end():]
    place = _PLACE.search(comment)
    if place is None:
        return "", "", comment
    source = " ".join(comment[: place.start()].split())
    return source, place[1].strip(), comment[place.end() :]


def _read_advice(text: str) -> str:
    match = _ADVICE.match(" ".join(text.split()))
    if match is None or match[1].startswith(("_dynamo/", "torch/", "type ")):  # torch's own place, not advice
        return ""
    return match[1]


def _read_comparison(guard: str) -> _Comparison:
    # The order matters: later patterns are wider, and take what earlier ones are meant for.
    if match := _TENSOR.match(guard):
        return _compare_tensors(**match.groupdict())
    if match := _FOUND.match(guard):
        was = _last_name(match["was"] or "Tensor").replace("Tensor", "a tensor")
        return _Comparison(match["what"], was, _last_name(match["is"]).replace("NoneType", "None"))
    if match := _CLASS.match(guard):
        what = f"type({match['what']})" if match["kind"] == "type" else match["what"]
        return _Comparison(what, _last_name(match["is"] or ""), "")
    if match := _PRESENT.match(guard):
        what = _presence_of(match)
        if match["no"]:
            return _Comparison(what, "absent", "present")
        return _Comparison(what, "present", "absent")
    if match := _MISSING.match(guard):
        return _Comparison(match["what"], "present", "absent")
    if match := _NAN.match(guard):
        return _Comparison(match["what"], "nan", "")
    if match := _EMPTY.match(guard):
        return _Comparison(f"len({match['what']})", "0", "")
    if match := _EQUALS.match(guard) or _DIFFERS.match(guard):
        return _Comparison(match["what"], match["expected"], "")
    if match := _SIZE.search(guard):
        return _Comparison(match["what"], guard, "")
    return _Comparison("", "", "")


def _presence_of(match: re.Match[str]) -> str:
    """The attribute, the key or the member that is there or not."""
    if match["of"]:
        return f"{match['of']}.{match['name']}"
    if "set.__contains__" in match.string:
        return f"{match['dict']} in {match['key']}"  # torch gives the set first
    return f"{match['dict']}[{match['key']}]"


def _compare_tensors(what: str, kind: str, at: str | None, expected: str, actual: str | None) -> _Comparison:
    names = {"rank": f"{what}.dim()", "size": f"{what}.size({at})", "stride": f"{what}.stride({at})"}
    name = names.get(kind) or f"{what}.{kind.replace(' ', '_')}"
    # Of a switch torch writes what it expected alone, as a number or as a bool.
    if kind == "requires_grad":
        if expected in ("1", "True"):
            return _Comparison(name, "True", "False")
        return _Comparison(name, "False", "True")
    if kind == "dispatch key set":
        return _compare_dispatch_keys(what, expected, actual or "")
    return _Comparison(name, expected.strip(), (actual or "").strip())


def _compare_dispatch_keys(what: str, expected: str, actual: str) -> _Comparison:
    """Of two key sets, what differs."""
    before, now = _dispatch_keys(expected), _dispatch_keys(actual)
    # The first key is that of the device.
    if before[0] != now[0]:
        return _Comparison(f"{what}.device", before[0], now[0])
    gone = [key for key in before if key not in now]
    new = [key for key in now if key not in before]
    return _Comparison(f"dispatch keys of {what}", " ".join(gone) or "none more", " ".join(new) or "none more")


def _dispatch_keys(text: str) -> list[str]:
    match = _KEYS.search(text)
    return [key.strip() for key in match[1].split(",")] if match else [text]


def user_expression(what: str) -> str:
    """An expression of torch's as its author would write it.

    >>> user_expression("fn._modules['0']._parameters['bias']")
    'fn[0].bias'
    """
    what = _FROM_NUMPY.sub(r"\1", what)
    what = _MODULE_TABLE.sub(_as_access, what)
    what = re.sub(r"\._modules\b", "", what)
    what = re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", what)
    return _GLOBAL.sub(r"\1", what)


def _as_access(match: re.Match[str]) -> str:
    """``[0]`` for a layer of a container, ``.bias`` for anything with a name."""
    return f"[{match[1]}]" if match[1].isdigit() else f".{match[1]}"


def _last_name(name: str) -> str:
    """``Linear`` for ``torch.nn.modules.linear.Linear``."""
    return name.rsplit(".", 1)[-1]


# ------------------------------------------------------------------------------------------------- the class of a cause
# The table holds every text that guards of torch 2.8 to 2.15 make, with the place that makes it. A text that is not in
# it is `other`, and kept: torch may say something new, that is no error of ours.
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
