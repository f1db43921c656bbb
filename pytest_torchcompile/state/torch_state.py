"""Torch's process-wide state: what a cell changes must not reach the next one.

``torch.compiler.reset()`` drops compiled code, but not counters, the stance, or any setting; and most of
these settings are guards, so a leaked one makes the next cell recompile, or pass without compiling at all.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pytest_torchcompile.errors import InstrumentError
from pytest_torchcompile.ledger.thread_settings import copied_settings, set_everywhere

__all__ = ["SettingsSnapshot", "forget_compiled", "isolated", "own_random_draws", "same_random_draws",
           "seed_everything", "stance"]


def stance() -> str:
    """Name of the stance in force (``torch/_dynamo/eval_frame.py: _stance``, torch 2.8 to 2.15)."""
    from torch._dynamo import eval_frame

    try:
        return str(eval_frame._stance.stance)
    # Torch keeps it in a private place, which may move in any version; the message names it.
    except AttributeError:
        raise _missing("torch._dynamo.eval_frame._stance") from None


def _set_stance(name: str) -> None:
    torch.compiler.set_stance(name)


@contextlib.contextmanager
def _default_stance() -> Iterator[None]:
    """Stance ``default`` in the block; afterwards the one before, with all that was set with it (``DynamoStance``)."""
    from torch._dynamo import eval_frame

    if stance() == "default":
        yield
        return
    before = eval_frame._stance
    _set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance(before.stance, skip_guard_eval_unsafe=before.skip_guard_eval_unsafe)


def _set_default_device(device: torch.device) -> None:
    """Take off what was set; where that is not enough, the device before had been set too."""
    torch.set_default_device(None)
    if torch.get_default_device() != device:
        torch.set_default_device(device)


def _missing(name: str) -> InstrumentError:
    return InstrumentError(f"torch {torch.__version__} has no {name}, which pytest-torchcompile reads; "
                           "please report it with this version")


@dataclass(frozen=True)
class _Setting:
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _get_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _autocast_settings(device: str) -> list[_Setting]:
    def enable(on: bool) -> None:
        torch.set_autocast_enabled(device, on)

    def set_dtype(dtype: torch.dtype) -> None:
        torch.set_autocast_dtype(device, dtype)

    return [
        _Setting(f"autocast on {device}", partial(torch.is_autocast_enabled, device), enable),
        _Setting(f"autocast dtype on {device}", partial(torch.get_autocast_dtype, device), set_dtype),
    ]


# Times one it is zero only where denormal numbers are flushed; torch has no question for that.
_DENORMAL = torch.tensor(1e-310, dtype=torch.float64)


def _flushes_denormal() -> bool:
    return not _DENORMAL * 1


_SETTINGS = [
    _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    *_autocast_settings("cpu"),
    *_autocast_settings("cuda"),
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("deterministic algorithms", _get_deterministic, _set_deterministic),
    _Setting("float32 matmul precision", torch.get_float32_matmul_precision,
             torch.set_float32_matmul_precision),
    _Setting("default device", torch.get_default_device, _set_default_device),
    _Setting("flush denormal", _flushes_denormal, torch.set_flush_denormal),
    _Setting("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    _Setting("stance", stance, _set_stance),
]


def _config_module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


class SettingsSnapshot:
    """A snapshot of every setting that outlives a cell."""

    def __init__(self) -> None:
        self._settings = {setting.name: setting.get() for setting in _SETTINGS}
        self._configs = copied_settings()

    def plain_values(self) -> dict[str, str]:
        """Settings as texts, without those of torch's config modules that are no plain values, such as functions."""
        values = {name: str(value) for name, value in self._settings.items()}
        for name, config in self._configs.items():
            for key, value in config.items():
                if isinstance(value, (bool, int, float, str, type(None))):
                    values[f"{name}.{key}"] = repr(value)
        return values

    def changed(self) -> list[str]:
        """What differs from the snapshot now, as ``name: then -> now``."""
        return [text for text, _ in self._differences()]

    def restore(self) -> list[str]:
        """Put back what differs and return what that was."""
        differences = self._differences()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # writing back a deprecated key warns
            for _, put_back in differences:
                put_back()
        return [text for text, _ in differences]

    def _differences(self) -> list[tuple[str, Callable[[], object]]]:
        """What differs, each with the function that puts it back."""
        differences: list[tuple[str, Callable[[], object]]] = []
        for setting in _SETTINGS:
            before, now = self._settings[setting.name], setting.get()
            if before != now:
                differences.append((f"{setting.name}: {before} -> {now}", partial(setting.set, before)))
        for name, current in copied_settings().items():
            for key, now in current.items():
                before = self._configs[name].get(key)
                if not _is_equal(before, now):
                    put_back = partial(setattr, _config_module(name), key, before)
                    differences.append((f"{name}.{key}: {before!r} -> {now!r}", put_back))
        return differences


def _is_equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # an object of the user's with an __eq__ that can't answer
        return False


def forget_compiled() -> None:
    """Drop compiled code, counters and metrics, as in a fresh process.

    ``torch._dynamo.utils.counters``, ``clear_compilation_metrics``, ``torch._inductor.metrics.reset``:
    torch 2.8 to 2.15. The collection of garbage is left to Python: it takes half a second.
    """
    import torch._dynamo.utils as dynamo_utils
    import torch._inductor.metrics as inductor_metrics

    torch.compiler.reset()
    dynamo_utils.counters.clear()
    dynamo_utils.clear_compilation_metrics()
    inductor_metrics.reset()


@contextlib.contextmanager
def isolated(leaks: list[str]) -> Iterator[None]:
    """Run a block as in a fresh process: nothing compiled before, stance ``default``, state put back after.

    A stance that was in force before is in force again afterwards. What the block changed and left changed is appended
    to ``leaks``, one text a key. Random states of torch, every device and Python are put back too, but are no leak:
    every run draws.
    """
    forget_compiled()
    with _default_stance():
        state = SettingsSnapshot()
        python_rng = random.getstate()
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        # A CUDA that nobody has started has no random state to put back.
        devices = list(range(torch.cuda.device_count())) if started else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            leaks += state.restore()
            random.setstate(python_rng)
            forget_compiled()


def seed_everything(seed: int) -> None:
    """Seed torch's generators of every device, Python's, and NumPy's if somebody has loaded it."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Only a model that has imported it can draw from it.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def same_random_draws() -> Iterator[None]:
    """Have Inductor draw the random numbers that eager draws, so that dropout can be compared."""
    with _fallback_random(True):
        yield


@contextlib.contextmanager
def own_random_draws() -> Iterator[None]:
    """Have Inductor draw random numbers of its own, as it does unless it is told otherwise."""
    with _fallback_random(False):
        yield


def _fallback_random(eager: bool) -> contextlib.AbstractContextManager[None]:
    # torch/_inductor/config.py: torch 2.8 to 2.15. A backward may be compiled in a thread of autograd's.
    return set_everywhere("torch._inductor.config", "fallback_random", eager)
