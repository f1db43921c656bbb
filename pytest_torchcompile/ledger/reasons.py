"""A failed guard taken apart: what was compared, what was expected, what came instead, for which line.

Texts: ``get_guard_fail_reason_helper`` and ``get_verbose_code_part`` (torch/_dynamo/guards.py, 2.8 to 2.15).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["Reason", "read_reason", "split_reasons", "user_expression"]

_PREFIX: Final = re.compile(r"^(!?[\d/]+): ?")
_COMMENT: Final = re.compile(r"\s{2,}# ")
_PLACE: Final = re.compile(r"(?:^|\s*# )([^#]*?:\d+) in \S+")
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


@dataclass(frozen=True)
class Reason:
    """One failed guard."""

    guard: str
    """In torch's words, without the line of source and without advice."""
    what: str = ""
    """What was compared, as an expression of the function's own names; empty where that is not known."""
    expected: str = ""
    actual: str = ""
    """Empty where torch does not say it (:mod:`.guard_values` may find it)."""
    source: str = ""
    """The line of code that the guard comes from."""
    at: str = ""
    """``file:line`` of that line; torch may shorten the path."""
    advice: str = ""
    """What torch itself advises."""
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
    return Reason(guard, *_read_comparison(guard), source, at, _read_advice(advice), entry)


def _read_comment(comment: str) -> tuple[str, str, str]:
    """The line of source, where it stands, and what follows; a comment without a place is a remark as a whole."""
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
