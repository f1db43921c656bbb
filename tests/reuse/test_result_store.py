"""The store: torn and edited entries are none, two runs at once do no harm, and it stays within its bounds."""

from __future__ import annotations

import os
import time

from pytest_torchcompile.reuse.cell_reuse import ResultStore


def names_in(store, folder="cell"):
    return [entry["name"] for entry in store.entries(folder)]


def test_what_is_kept_is_found_again(tmp_path):
    """The last used comes first; another store on the same folder finds it too."""
    store = ResultStore(tmp_path)
    for age, name in ((20, "old"), (10, "new")):
        assert store.keep("cell", {"name": name})
        for file in tmp_path.glob("cell/*"):
            if file.stat().st_mtime > time.time() - 5:
                os.utime(file, (time.time() - age, time.time() - age))
    assert names_in(store) == ["new", "old"]
    store.mark_used(list(store.entries("cell"))[1])
    assert names_in(ResultStore(tmp_path)) == ["old", "new"]
    assert names_in(store, "another cell") == []


def test_a_torn_or_edited_entry_is_none(tmp_path):
    """Each length that a write may be ended at, and each byte changed."""
    store = ResultStore(tmp_path)
    store.keep("cell", {"name": "a"})
    (file,) = tmp_path.glob("cell/*.entry")
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert names_in(store) == []
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
        assert names_in(store) == []
    file.write_bytes(whole)
    assert names_in(store) == ["a"]


def test_a_folder_that_can_not_be_written(tmp_path):
    """Nothing is kept, and nothing is raised."""
    (tmp_path / "file").write_text("")
    store = ResultStore(tmp_path / "file")
    assert not store.keep("cell", {"name": "a"})
    assert store.keep_list(["a"]) == ""
    assert names_in(store) == []
    assert store.tidy() == 0


def test_a_list_is_shared(tmp_path):
    """By its content; one that is gone is None."""
    store = ResultStore(tmp_path)
    name = store.keep_list(["a", "b"])
    assert store.keep_list(["a", "b"]) == name
    assert ResultStore(tmp_path).read_list(name) == ["a", "b"]
    for file in tmp_path.glob("lists/*"):
        file.unlink()
    assert ResultStore(tmp_path).read_list(name) is None


def test_it_stays_within_its_bounds(tmp_path):
    """What was used longest ago goes first; what was not used for long goes in any case."""
    store = ResultStore(tmp_path)
    for age, name in enumerate(("new", "middle", "old")):
        store.keep(name, {"name": name, "text": os.urandom(2000).hex()})
        (file,) = tmp_path.glob(f"{name}/*")
        os.utime(file, (time.time() - 100 * age, time.time() - 100 * age))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.entry"))
    assert store.tidy(largest=size - 1) == 1
    assert [names_in(store, name) for name in ("new", "middle", "old")] == [["new"], ["middle"], []]
    assert store.tidy(oldest=50) == 1
    assert names_in(store, "new") == ["new"]
