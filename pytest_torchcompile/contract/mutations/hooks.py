"""hooks: of parameters, at any time; of modules, where the caller has everything compiled anew after it.

Torch documents that compiled code does not see a module's hook that is registered later.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def hooks(model: torch.nn.Module, choice: str) -> None:
    """``gradient weight``: half of its gradient; ``accumulated weight``: half of what ``.grad`` has then;

    ``forward 0`` and ``before 0``: a layer's outputs, its inputs, are doubled.
    """
    kind, _, name = choice.partition(" ")
    # Torch refuses hooks of what is frozen: then eager does, and the call is not judged.
    if kind == "gradient":
        model.get_parameter(name).register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    elif kind == "accumulated":
        parameter: Any = model.get_parameter(name)
        parameter.register_post_accumulate_grad_hook(lambda held: setattr(held, "grad", held.grad * 0.5))
    elif kind == "before":
        model.get_submodule(name).register_forward_pre_hook(lambda part, given: tuple(each * 2 for each in given))
        torch.compiler.reset()
    else:
        model.get_submodule(name).register_forward_hook(lambda part, given, output: output * 2)
        torch.compiler.reset()


def _choices(module: Any, batch: Any) -> list[str]:
    offered = []
    for name, _ in list(module.named_parameters())[:1]:
        offered += [f"gradient {name}", f"accumulated {name}"]
    # The layers that have nothing but weights take and give one tensor.
    layers = [name for name, part in module.named_modules() if type(part) in (torch.nn.Linear, torch.nn.Conv2d)]
    for name in layers[:1]:
        offered += [f"forward {name}", f"before {name}"]
    return offered


MUTATION = Mutation("hooks", "hooks of parameters and of modules", "module", _choices, hooks)
