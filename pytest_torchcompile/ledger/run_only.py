"""Frames that torch runs from what is compiled already, or else eagerly, without a word.

So it treats a function that has hit the recompile limit, every frame under the stance ``eager_on_recompile``, and what
``torch._dynamo.run`` runs: it looks into the cache, and where nothing fits it does not call Dynamo's callback. While a
ledger is open it has one to call, which notes the frame and leaves it as eager as it would have been.

``ConvertFrameReturn`` (torch/_dynamo/types.py), ``_FrameAction``, ``_FrameExecStrategy`` and ``set_code_exec_strategy``
(torch._C._dynamo.eval_frame), ``input_codes`` (convert_frame.py): seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pytest_torchcompile.ledger import decisions
from pytest_torchcompile.ledger.entries import cache_entries

if TYPE_CHECKING:
    from pytest_torchcompile.ledger.watch import LedgerWatch

__all__ = ["answer_for", "asked_again", "install_hook", "refraining_callback"]


@contextlib.contextmanager
def install_hook(watch: LedgerWatch) -> Iterator[None]:
    """Have torch ask for functions over their limit too; afterwards it does so no more."""
    watch.limited = {id(code): code for code in _still_over_their_limit()}
    _set_action(watch.limited.values(), "DEFAULT")
    try:
        yield
    finally:
        from torch._dynamo.convert_frame import input_codes

        # Where torch.compiler.reset() has forgotten a code, it has forgotten that it was over its limit.
        limited = [code for code in watch.limited.values() if code in input_codes]
        _set_action(limited, "RUN_ONLY")
        watch.limited = {}


def refraining_callback(watch: LedgerWatch) -> Callable[..., Any]:
    """What stands in for ``False``, torch's word for running only what is compiled."""
    from torch._dynamo.types import ConvertFrameReturn

    def refrain(frame: Any, *args: Any, **kwargs: Any) -> Any:
        watch.run_guarded(decisions.enter_refrained_frame, watch, frame)
        return ConvertFrameReturn(frame_exec_strategy=_strategy_of("DEFAULT"), apply_to_code=False)

    # With these an entry of any backend fits, as it does for False (`get_backend` in csrc/dynamo).
    refrain._torchdynamo_orig_backend = refrain._torchdynamo_orig_callable = False  # type: ignore[attr-defined]
    return refrain


def answer_for(watch: LedgerWatch, code: types.CodeType, result: Any) -> Any:
    """What to return for Dynamo's ``result``: over its limit, a code is asked for again, to be counted again."""
    if result.guarded_code is not None or result.frame_exec_strategy.cur_action != _action_named("RUN_ONLY"):
        return result
    watch.limited[id(code)] = code
    _remember_limited(code)
    return dataclasses.replace(result, apply_to_code=False)


def asked_again(watch: LedgerWatch, code: types.CodeType) -> Any:
    """The answer for a code that is known to be over its limit; None for any other."""
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.types import ConvertFrameReturn

    if watch.limited.get(id(code)) is not code:
        return None
    if code not in input_codes:  # torch.compiler.reset() was called
        del watch.limited[id(code)]
        return None
    return ConvertFrameReturn(frame_exec_strategy=_strategy_of("RUN_ONLY"), apply_to_code=False)


_over: dict[int, tuple[weakref.ref[types.CodeType], weakref.ref[Any]]] = {}
"""Code that hit its limit under some observation, by its identity, and the guards of an entry that it has."""


def _remember_limited(code: types.CodeType) -> None:
    entries = cache_entries(code)
    if entries:
        # Weakly: a ledger that is closed keeps nothing of the user's alive.
        _over[id(code)] = weakref.ref(code), weakref.ref(entries[0].guard_manager)


def _still_over_their_limit() -> Iterator[types.CodeType]:
    """Codes that hit their limit in an earlier observation.

    Torch can't be asked. That the very same entry is still there tells that no ``torch.compiler.reset()``
    has come between: names and numbers of compiles begin anew with it.
    """
    for key, (code_reference, manager_reference) in list(_over.items()):
        code, manager = code_reference(), manager_reference()
        if code is not None and any(entry.guard_manager is manager for entry in cache_entries(code)):
            yield code
        else:
            del _over[key]


def _set_action(codes: Iterable[types.CodeType], action: str) -> None:
    from torch._C._dynamo import eval_frame

    for code in codes:
        eval_frame.set_code_exec_strategy(code, _strategy_of(action))


def _strategy_of(action: str) -> Any:
    """What torch shall do with a frame, and with those that it calls."""
    from torch._C._dynamo.eval_frame import _FrameExecStrategy

    return _FrameExecStrategy(_action_named(action), _action_named(action))


def _action_named(name: str) -> Any:
    from torch._C._dynamo.eval_frame import _FrameAction

    return getattr(_FrameAction, name)
