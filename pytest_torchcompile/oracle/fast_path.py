"""The fast path of torch's attention modules: is it to blame? The trial again without it, before anybody is advised.

In evaluation without gradients ``nn.TransformerEncoder`` and its parts run one fused operator in eager. With a padding
mask that is a nested tensor, which comes back with zeros at padded positions. Dynamo traces neither as eager runs it
(torch 2.8 to 2.15): compiled numbers differ there, and Inductor may refuse the operator's strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_torchcompile.oracle.discrepancies import find_discrepancies
from pytest_torchcompile.state.torch_state import forget_compiled

if TYPE_CHECKING:
    from pytest_torchcompile.oracle.trial import Trial

__all__ = ["SWITCH", "fast_path_off", "may_take_fast_path", "names_fast_path", "try_without_fast_path"]

SWITCH: Final = "torch.backends.mha.set_fastpath_enabled(False)"
_OPERATORS: Final = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_nested_tensor_from_mask")
"""What the fast path runs."""
_MODULES: Final = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)


def may_take_fast_path(trial: Trial) -> bool:
    """Whether eager can run it: such a module, in evaluation, and nobody has switched it off."""
    if trial.train or not torch.backends.mha.get_fastpath_enabled():
        return False
    return any(isinstance(module, _MODULES) for module in trial.pristine.modules())


def names_fast_path(graph_break: Mapping[str, Any]) -> bool:
    """Whether a graph break is told with an operator of the fast path."""
    texts = [str(graph_break.get(key) or "") for key in ("reason", "explanation", "hint")]
    return any(name in text for name in _OPERATORS for text in texts)


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Switch it off for a block, in this process."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def try_without_fast_path(trial: Trial) -> str:
    """Run a trial that has failed once more without the fast path, if its model can take it.

    Returns what to do, where the compiled run then raises nothing and computes what eager computes; else an empty
    text: what does not help is no advice. Everything compiled is forgotten.
    """
    if not may_take_fast_path(trial):
        return ""
    forget_compiled()
    other = trial.again(trial.settings)
    # Eager is another program then: the references of the first must not be taken for its own.
    other.options = replace(other.options, key=(*other.options.key, "no fast path"))
    try:
        with fast_path_off():
            other.run()
    except Exception:  # a remedy that cannot be tried says nothing of the model
        return ""
    if other.compiled.error or find_discrepancies([*other.leaves, *other.trained]):
        return ""
    advice = (f"{SWITCH}, called where the model is made, was tried: compiled code agrees with eager with it. Torch's "
              "attention modules then run the same operators in evaluation as in training")
    if find_discrepancies(trial.leaves):
        advice += "; eager's outputs at padded positions, which the fast path leaves zero, are computed then"
    return advice
