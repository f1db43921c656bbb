"""An instrument of the ledger is a file with a hook and a record of its own, and its name in one list."""

from __future__ import annotations

import contextlib
import importlib
import json
from dataclasses import dataclass

import pytest

from pytest_torchcompile.ledger import process_watch
from pytest_torchcompile.ledger.ledger import Ledger
from pytest_torchcompile.ledger.records import LedgerRecord
from pytest_torchcompile.ledger.watch import LedgerWatch

pytestmark = pytest.mark.needs_torch


@dataclass
class Pin(LedgerRecord):
    """A record that the ledger knows nothing of; a place is told once."""

    list_name = "pins"

    place: str
    during: str = ""

    @property
    def same_as(self):
        """Each place once."""
        return self.place


@contextlib.contextmanager
def install_hook(watch):
    """Where an instrument begins to listen, and ends."""
    yield


def test_its_records_are_entered_written_and_read():
    """In every open ledger under the label of its own, in a list that is made when the first record comes."""
    watch, outer, inner = LedgerWatch([install_hook]), Ledger(), Ledger()
    watch.open(outer, None)
    watch.open(inner, None)
    with inner.during("call 1"):
        watch.add(Pin("a"))
        watch.add(Pin("a"))
        watch.add(Pin("b"))
    watch.close(inner)
    watch.close(outer)
    assert inner.more == {"pins": [Pin("a", "call 1"), Pin("b", "call 1")]}
    assert outer.more == {"pins": [Pin("a"), Pin("b")]}
    written = json.loads(json.dumps(inner.to_dict()))
    assert Ledger.from_dict(written).to_dict() == written
    assert Ledger.from_dict(written).more == inner.more
    inner.clear()
    assert inner.to_dict() == Ledger().to_dict()


def test_what_no_kind_is_known_for_is_dropped():
    """A ledger written with an instrument that is not here is read without it."""
    read = Ledger.from_dict({"of a newer version": [{"x": 1}], "raised": 2})
    assert read.to_dict() == Ledger(raised=2).to_dict()


def test_each_name_in_the_list_is_a_file_with_a_hook():
    """And the process' watch has the hooks in that order."""
    modules = [importlib.import_module(f"pytest_torchcompile.ledger.{name}") for name in process_watch._INSTRUMENTS]
    assert process_watch.watch.hooks == tuple(module.install_hook for module in modules)
