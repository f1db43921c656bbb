"""A failed guard taken apart: what was compared, what was expected, what came instead, for which line.

Texts: ``get_guard_fail_reason_helper`` and ``get_verbose_code_part`` (torch/_dynamo/guards.py, 2.8 to 2.15).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Reason", "read_reason", "split_reasons", "user_expression"]

_PREFIX: Final = re.compile(r"^(!?[\d/]+): ?")
_COMMENT: Final = re.compile(r"\s{2,}# ")
_PLACE: Final = re.compile(r"(?:^|\s*# )([^#]*?:\d+) in \S+")
_STACK: Final = re.compile(r'^  File "(.+?)", line (\d+)', re.M)
_ADVICE: Final = re.compile(r"^\(?(?:HINT: )?(.*?)\)?$", re.S)
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
_HELD: Final = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_FROM_NUMPY: Final = re.compile(r"___from_numpy\((.*?)\)")
_GLOBAL: Final = re.compile(r"\bG\['(\w+)'\]")
_KEYS: Final = re.compile(r"DispatchKeySet\((.*)\)")
_EMPTY: Final = re.compile(r"^not (?P<what>\S+)$")


@dataclass(frozen=True)
class Reason:
    """One failed guard."""

    guard: str
    """In torch's words, without the line of source and without advice."""
    what: str = ""
    """What was compared, as an expression of the function's own names; empty where that is not known."""
    expected: str = ""
    actual: str = ""
    """Empty where torch does not say it (:mod:`.values` may find it)."""
    source: str = ""
    """The line of code that the guard comes from."""
    at: str = ""
    """``file:line`` of that line; torch may shorten the path."""
    advice: str = ""
    """What torch itself advises."""
    entry: str = ""
    """Compile id of the cached entry."""


def split_reasons(payload: str | None) -> tuple[str, ...]:
    """Failed guards out of a ``recompile_reasons`` record, a JSON list, or a bare text where there is one.

    Each begins with the compile id of its entry.
    """
    try:
        found = json.loads(payload or "")
    except ValueError:
        found = payload or ""
    texts = [found] if isinstance(found, str) else list(found)
    return tuple(t for t in (str(t).strip() for t in texts) if _PREFIX.sub("", t))


def read_reason(text: str) -> Reason:
    """Take one text of :func:`split_reasons` apart; parts that it does not have are empty, never an error.

    >>> reason = read_reason("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    >>> reason.what, reason.expected, reason.actual
    ('x.size(0)', '3', '4')
    >>> read_reason("o.k == 2    # return x * o.k  # app/net.py:7 in forward").at
    'app/net.py:7'
    """
    prefix = _PREFIX.match(text)
    main, _, stack = _PREFIX.sub("", text).partition("\nUser stack trace:")
    guard, comment = [*_COMMENT.split(main, maxsplit=1), ""][:2]
    guard, _, hint = guard.partition(" (HINT: ")  # torch 2.8 writes no comment, but hints
    guard, _, tail = (" ".join(guard.split())).partition(". Guard failed on ")
    place = _PLACE.search(comment)
    source = comment[: place.start()] if place else ""
    advice = hint or (comment[place.end() :] if place else comment)
    if tail:
        advice = f"Guard failed on {tail}"
    frames = _STACK.findall(stack)
    at = f"{frames[-1][0]}:{frames[-1][1]}" if frames else place[1].strip() if place else ""
    return Reason(guard, *_compared(guard), " ".join(source.split()), at, _advice(advice), prefix[1] if prefix else "")


def _advice(text: str) -> str:
    match = _ADVICE.match(" ".join(text.split()))
    found = match[1] if match else ""
    return "" if found.startswith(("_dynamo/", "torch/", "type ")) else found


def _compared(guard: str) -> tuple[str, str, str]:
    """What was compared, what was expected, what came."""
    if match := _TENSOR.match(guard):
        return _tensor(**match.groupdict())
    if match := _FOUND.match(guard):
        was = _short(match["was"] or "Tensor").replace("Tensor", "a tensor")
        return match["what"], was, _short(match["is"]).replace("NoneType", "None")
    if match := _CLASS.match(guard):
        what = f"type({match['what']})" if match["kind"] == "type" else match["what"]
        return what, _short(match["is"] or ""), ""
    if match := _PRESENT.match(guard):
        what = f"{match['of']}.{match['name']}" if match["of"] else f"{match['dict']}[{match['key']}]"
        if "set.__contains__" in guard:
            what = f"{match['dict']} in {match['key']}"  # torch gives the set first
        return (what, "absent", "present") if match["no"] else (what, "present", "absent")
    if match := _MISSING.match(guard):
        return match["what"], "present", "absent"
    if match := _NAN.match(guard):
        return match["what"], "nan", ""
    if match := _EMPTY.match(guard):
        return f"len({match['what']})", "0", ""
    if match := _EQUALS.match(guard) or _DIFFERS.match(guard):
        return match["what"], match["expected"], ""
    if match := _SIZE.search(guard):
        return match["what"], guard, ""
    return "", "", ""


def _tensor(what: str, kind: str, at: str | None, expected: str, actual: str | None) -> tuple[str, str, str]:
    names = {"rank": f"{what}.dim()", "size": f"{what}.size({at})", "stride": f"{what}.stride({at})"}
    name = names.get(kind) or f"{what}.{kind.replace(' ', '_')}"
    if kind == "requires_grad":
        return (name, "True", "False") if expected in ("1", "True") else (name, "False", "True")
    if kind == "dispatch key set":
        return _dispatch(what, expected, actual or "")
    return name, expected.strip(), (actual or "").strip()


def _dispatch(what: str, expected: str, actual: str) -> tuple[str, str, str]:
    """Of two key sets, what differs; the first key is that of the device."""
    before, now = _keys(expected), _keys(actual)
    if before[0] != now[0]:
        return f"{what}.device", before[0], now[0]
    gone, new = [k for k in before if k not in now], [k for k in now if k not in before]
    return f"dispatch keys of {what}", " ".join(gone) or "none more", " ".join(new) or "none more"


def _keys(text: str) -> list[str]:
    match = _KEYS.search(text)
    return [key.strip() for key in match[1].split(",")] if match else [text]


def user_expression(what: str) -> str:
    """An expression as its author would write it.

    >>> user_expression("fn._modules['0']._parameters['bias']")
    'fn[0].bias'
    """
    what = _FROM_NUMPY.sub(r"\1", what)
    what = _HELD.sub(lambda m: f"[{m[1]}]" if m[1].isdigit() else f".{m[1]}", what)
    what = re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", re.sub(r"\._modules\b", "", what))
    return _GLOBAL.sub(r"\1", what)


def _short(name: str) -> str:
    """``Linear`` for ``torch.nn.modules.linear.Linear``."""
    return name.rsplit(".", 1)[-1]
