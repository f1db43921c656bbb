"""Torch's config modules as one thread has them: since torch 2.12 what a thread sets there holds in that thread alone.

Before, a setting held in all threads. So whoever raises a limit in the main thread, and has another one compile, has
not raised it there; and nothing says so.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from pytest_torchcompile.errors import InstrumentError

__all__ = ["CONFIGS", "Settings", "copied_settings", "missed_settings", "own_settings", "set_everywhere"]

CONFIGS: Final = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    # Symbolic shapes.
    "torch.fx.experimental._config",
)

Settings = Mapping[str, Mapping[str, Any]]
"""By config module and key."""


def copied_settings() -> dict[str, dict[str, Any]]:
    """All keys of each config module, in this thread; 0.3 ms.

    ``torch/utils/_config_module.py: get_config_copy``, torch 2.8 to 2.15. Raises InstrumentError where it is missing.
    """
    copied: dict[str, dict[str, Any]] = {}
    for name in CONFIGS:
        module: Any = importlib.import_module(name)
        try:
            copied[name] = dict(module.get_config_copy())
        except AttributeError:
            raise InstrumentError(f"torch {torch.__version__} has no {name}.get_config_copy, which pytest-torchcompile "
                                  "reads; please report it with this version") from None
    return copied


def own_settings() -> dict[str, dict[str, Any]]:
    """What this thread has set for itself alone: what a new thread has otherwise. Nothing before torch 2.12."""
    others: dict[str, dict[str, Any]] = {}
    thread = threading.Thread(target=lambda: others.update(copied_settings()), name="settings of a new thread")
    thread.start()
    thread.join()
    own: dict[str, dict[str, Any]] = {}
    for name, settings in copied_settings().items():
        changed = {}
        for key, value in settings.items():
            if not _is_equal(value, others.get(name, {}).get(key, value)):
                changed[key] = value
        if changed:
            own[name] = changed
    return own


def missed_settings(elsewhere: Settings) -> Iterator[str]:
    """What of :func:`own_settings` of another thread this one does not have: ``name is 8 here, 99 ...``."""
    here = copied_settings()
    for name, theirs in elsewhere.items():
        for key, value in theirs.items():
            own = here[name].get(key)
            if not _is_equal(own, value):
                yield f"{name}.{key} is {own!r} here, {value!r} where the observation began"


@contextlib.contextmanager
def set_everywhere(name: str, key: str, value: Any) -> Iterator[None]:
    """Set a key of a config module for a block, in all threads that have set nothing themselves.

    Autograd compiles the backward of a GPU in a thread of its own, where ``config.patch`` of this thread does not hold.
    ``torch/utils/_config_module.py: ConfigModule._config`` and its entries' ``default``, torch 2.8 to 2.15. Before 2.12
    what one thread sets holds in all. Raises InstrumentError where they are missing.
    """
    module: Any = importlib.import_module(name)
    try:
        entry = module._config[key]
        before = entry.default
    except (AttributeError, KeyError):
        raise InstrumentError(f"torch {torch.__version__} has no {name}._config[{key!r}].default, which "
                              "pytest-torchcompile sets; please report it with this version") from None
    with module.patch({key: value}):
        entry.default = value
        try:
            yield
        finally:
            entry.default = before


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    # An object of the user's with an __eq__ that can't answer.
    except Exception:
        return False
