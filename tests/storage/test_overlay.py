"""Storages over others: what is read elsewhere is listed where it belongs."""

from __future__ import annotations

from ckpt.storage import MemoryStorage, Patched, Place
from tests.helpers.storage_contract import sizes


def test_an_object_that_is_read_elsewhere_is_listed_in_its_folder_with_the_size_that_it_has_there() -> None:
    first, other = MemoryStorage("overlay-first"), MemoryStorage("overlay-other")
    first.write("step-1/model", [b"cut"])
    first.write("step-1/config", [b"{}"])
    first.write("step-2/model", [b"another"])
    other.write("set-aside/model", [b"all of it"])
    storage = Patched(first, {"step-1/model": Place(other, "set-aside/model", 9)})
    assert storage.read("step-1/model") == b"all of it"
    assert sizes(storage) == {"step-1/model": 9, "step-1/config": 2, "step-2/model": 7}
    assert {entry.key: entry.size for entry in storage.list("step-1")} == {"step-1/model": 9, "step-1/config": 2}
    assert [entry.key for entry in storage.list("step-2")] == ["step-2/model"]
