"""module_change: what is done to a module between two calls: weights loaded, replaced, tied, adapted.

Hooks are left out: torch documents that compiled code does not see those that are registered later.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchcompile.contract.mutation import Mutation

__all__ = ["MUTATION"]


def module_change(model: torch.nn.Module, choice: str) -> None:
    """``load``: half of every value by ``load_state_dict``; ``convert``: to float64 and back; and so on."""
    kind, _, name = choice.partition(" ")
    first, _, name = name.rpartition(" ")
    owner, _, last = name.rpartition(".")
    if kind == "attribute":
        vars(model)["noted_by_caller"] = vars(model).get("noted_by_caller", 0) + 1
    elif kind == "load":
        state = model.state_dict()
        for key, value in state.items():
            # A module may keep other things there: see `get_extra_state`.
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value / 2
        model.load_state_dict(state)
    elif kind == "convert":
        dtype = next(model.parameters()).dtype
        model.to(torch.float64).to(dtype)
    elif kind == "replace":
        part = model.get_submodule(owner)
        old = getattr(part, last)
        setattr(part, last, torch.nn.Parameter(old.detach() * 0.5, requires_grad=old.requires_grad))
    elif kind == "refill":
        part = model.get_submodule(owner)
        part.register_buffer(last, getattr(part, last).clone(), persistent=last not in part._non_persistent_buffers_set)
    elif kind == "adapt":
        part = model.get_submodule(owner)
        old = getattr(part, last)
        if isinstance(old, torch.nn.Linear):
            setattr(part, last, torch.nn.Sequential(old, torch.nn.Tanh()))
    elif kind == "parametrize":
        old = model.get_submodule(name)
        if not torch.nn.utils.parametrize.is_parametrized(old):
            torch.nn.utils.parametrize.register_parametrization(old, "weight", torch.nn.Tanh())
    else:
        setattr(model.get_submodule(owner), last, model.get_parameter(first))


def _choices(module: Any, batch: Any) -> list[str]:
    offered = ["attribute", "load"]
    parameters = [(name, each) for name, each in module.named_parameters() if name.rpartition(".")[2].isidentifier()]
    if parameters:
        offered += ["convert", f"replace {parameters[0][0]}"]
    offered += [f"refill {name}" for name, _ in list(module.named_buffers())[:1]]
    linears = [name for name, part in module.named_modules() if name and type(part) is torch.nn.Linear]
    # One that is shared by its parent's code as `.weight` would be refused by eager.
    for name in linears[:1]:
        offered += [f"adapt {name}", f"parametrize {name}"]
    for first, one in parameters:
        same = [second for second, other in parameters if other is not one and other.shape == one.shape]
        if same:
            offered.append(f"tie {first} {same[0]}")
            break
    return offered


MUTATION = Mutation("module_change", "weights loaded, replaced, tied, adapted", "module", _choices, module_change)
