"""What maybe_compile refuses before it does anything: arguments, models and configs that cannot be used."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from pytest_torchcompile.layer.compiled_modules import is_compiled_module
from pytest_torchcompile.layer.config import CompileConfig

__all__ = ["refuse_mistaken", "refuse_unusable"]


def refuse_mistaken(cfg: Any, logger: Any) -> None:
    """Raise TypeError for what is no config or no logger."""
    if not isinstance(cfg, CompileConfig):
        hint = "; CompileConfig.from_dict makes one of a dict" if isinstance(cfg, Mapping) else ""
        raise TypeError(f"maybe_compile: cfg is of type {type(cfg).__name__}; expected a CompileConfig{hint}")
    # Asked for `warning`, because a tensor has a `log` too.
    if logger is not None and not callable(getattr(logger, "warning", None)):
        raise TypeError(f"maybe_compile: logger is of type {type(logger).__name__}; expected a logging.Logger or None "
                        "(the sample batch is the argument after it)")


def refuse_unusable(model: Any, cfg: CompileConfig, sample_batch: Any) -> None:
    """Raise ValueError for a model, or a config, that cannot be used."""
    if cfg.min_speedup is not None and sample_batch is None:
        raise ValueError(f"min_speedup={cfg.min_speedup:g} is measured on a sample batch, and maybe_compile was given "
                         "none; give it sample_batch, or leave min_speedup out")
    if is_compiled_module(model) or hasattr(model, "_torchdynamo_orig_callable"):
        raise ValueError(f"{type(model).__name__} is compiled already; give maybe_compile the original "
                         "(a compiled module keeps it as _orig_mod)")
    if not isinstance(model, nn.Module):
        if not isinstance(model, (types.FunctionType, types.MethodType)):
            raise ValueError(f"an object of type {type(model).__name__} cannot be compiled; expected a module "
                             "or a function")
        if cfg.allowlist or cfg.blocklist:
            raise ValueError(f"allowlist and blocklist choose parts of a module, and {model.__name__} is a function")
