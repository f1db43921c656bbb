"""torch_settings: a setting of torch's compiler that the caller has changed around the call."""

from __future__ import annotations

import ast
import importlib
from typing import Any

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION", "setting_value"]


def setting_value(text: str) -> Any:
    """What a setting is set to: a number, True, False or None as Python writes them, else the word itself.

    >>> setting_value("True"), setting_value("-1"), setting_value("0.5"), setting_value("off")
    (True, -1, 0.5, 'off')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def torch_settings(choice: str, device: str) -> Any:
    """``torch._dynamo.config.specialize_float=True``, around the forward; a torch that lacks it goes without."""
    name, _, value = choice.partition("=")
    module, _, key = name.rpartition(".")
    settings: Any = importlib.import_module(module)
    return settings.patch({key: setting_value(value)} if hasattr(settings, key) else {})


_HARMLESS = (
    "torch._dynamo.config.assume_static_by_default=False", "torch._dynamo.config.automatic_dynamic_shapes=False",
    "torch._dynamo.config.specialize_float=True", "torch._dynamo.config.capture_scalar_outputs=True",
    "torch._functorch.config.backward_pass_autocast=off", "torch._functorch.config.cse=False",
    "torch._functorch.config.donated_buffer=False", "torch._functorch.config.aggressive_recomputation=True",
    "torch._functorch.config.treat_parameters_as_free_to_save=False",
)  # fmt: skip
"""Settings of which none may change a result; each as it is not by default."""


def _choices(module: Any, batch: Any) -> list[str]:
    return list(_HARMLESS)


MUTATION = Mutation("torch_settings", "a setting of torch's compiler around the call", "around", _choices,
                    torch_settings)
