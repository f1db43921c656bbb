"""A torch that lacks a private name, as our look-ups see it: torch itself needs most of them."""

from __future__ import annotations

from pytest_torchcompile.ledger import torch_internals


class _Without:
    """A module or a class, but for one name in it."""

    def __init__(self, whole, parts):
        self._whole, self._parts = whole, parts

    def __getattr__(self, asked):
        if self._parts == (asked,):
            raise AttributeError(asked)
        found = getattr(self._whole, asked)
        return _Without(found, self._parts[1:]) if self._parts[:1] == (asked,) else found


def lacking(monkeypatch, module, owner, name):
    """Have ``module.owner.name`` missing; without ``owner`` it is the module's own."""
    real = torch_internals.import_module

    def import_module(wanted):
        found = real(wanted)
        return _Without(found, tuple(filter(None, (owner, name)))) if wanted == module else found

    monkeypatch.setattr(torch_internals, "import_module", import_module)
