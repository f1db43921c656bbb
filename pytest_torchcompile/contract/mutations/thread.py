"""thread: the forward runs in another thread."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def thread(model: Any, compile: Any, choice: str) -> Any:
    """The thread has the settings and the grad mode of the one that starts it."""
    call = model if compile is None else compile(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        came: dict[str, Any] = {}

        def work(grad: bool, inference: bool, autocast: Any) -> None:
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad), autocast:
                    came["output"] = call(*args, **kwargs)
            except BaseException as error:
                came["error"] = error

        tensors = [*model.parameters()]
        tensors += [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
        other = threading.Thread(target=contextvars.copy_context().run, args=(work, *state))
        other.start()
        other.join()
        if "error" in came:
            raise came["error"]
        return came["output"]

    return model, run


def _choices(module: Any, batch: Any) -> list[str]:
    return ["other"]


MUTATION = Mutation("thread", "the forward in another thread", "call", _choices, thread)
