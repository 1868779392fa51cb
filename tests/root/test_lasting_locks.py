"""Locks that must last: as long as a checkpoint is read, nobody removes it; as long as a run goes on, none joins it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer, open_storage
from tests.helpers.places import PassedOn, Place, committed


class _Watched(PassedOn):
    """Calls back whenever bytes of a tensor file are read."""

    def __init__(self, root: Place, when_read: Callable[[str], None]) -> None:
        super().__init__(root)
        self.when_read = when_read

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.when_read(key)
        super().read_into(key, start, *buffers, again=again)


def save(root: Place, *names: str) -> nn.Linear:
    model = nn.Linear(2, 2)
    with ckpt.StateManager(root, model=model) as manager:
        manager.resume()
        for name in names:
            manager.save_state(name, wait=True)
    return model


@pytest.mark.also_on_s3
def test_a_checkpoint_that_is_being_loaded_cannot_be_locked_by_whoever_would_remove_it(root: Place) -> None:
    saved, tried = save(root, "a"), list[str]()

    def try_to_remove(key: str) -> None:
        tried.append(key)
        with pytest.raises(ckpt.LockedError), open_storage(root).lock("a"):
            pass

    model = nn.Linear(2, 2)
    with ckpt.StateManager(_Watched(root, try_to_remove), model=model) as manager:
        manager.load_state("a")
        assert tried
        assert torch.equal(model.weight, saved.weight)
        with open_storage(root).lock("a"):  # and when it has been read, it can
            pass


def test_retention_of_a_run_does_not_remove_what_another_is_just_loading(root: Place) -> None:
    saved, removed = save(root, "old"), list[str]()

    def retain(key: str) -> None:
        if not removed:
            removed.append(key)
            with ckpt.StateManager(root, model=nn.Linear(2, 2), keep=ckpt.Keep(last=1)) as running:
                running.resume()
                running.save_state("new", wait=True)

    model = nn.Linear(2, 2)
    with ckpt.StateManager(_Watched(root, retain), model=model) as manager:
        assert manager.load_state("old").name == "old"
    assert removed
    assert torch.equal(model.weight, saved.weight)
    assert committed(root) == {"old", "new"}


def test_verify_holds_what_it_looks_at(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.root import verify

    save(root, "a")
    problems, tried = verify.problems, []

    def looked_at(*args: object, **options: object) -> list[str]:
        tried.append(True)
        with pytest.raises(ckpt.LockedError), open_storage(root).lock("a"):
            pass
        return problems(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "problems", looked_at)
    assert ckpt.verify(root) == {"a": []}
    assert tried


def test_files_of_a_replaced_checkpoint_stay_while_somebody_reads_them_and_go_afterwards(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("latest", wait=True)
        before = set((root / "latest").files()) - {"manifest.json", "manifest.copy.json"}
        with open_storage(root).lock("latest", shared=True):  # as a reader in another process does
            manager.save_state("latest", wait=True)
            assert before <= set((root / "latest").files())
        manager.save_state("latest", wait=True)
        assert not before & set((root / "latest").files()) or ckpt.verify(root) == {"latest": []}
        left = set((root / "latest").files())
    (found,) = ckpt.list_checkpoints(root)
    assert found.manifest is not None
    assert left == {file.path for file in found.manifest.files} | {"manifest.json", "manifest.copy.json"}


def test_a_run_holds_its_root_from_its_first_save_to_its_close(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        for name in ("a", "b"):
            manager.save_state(name, wait=True)
            with pytest.raises(ckpt.LockedError), open_storage(root).lock(".lock"):
                pass
        manager.load_state("a")
        with pytest.raises(ckpt.LockedError), open_storage(root).lock(".lock"):
            pass
    with open_storage(root).lock(".lock"):
        pass


class _Slow(PassedOn):
    """A mirror to which nothing comes until the gate is open."""

    def __init__(self, root: Place) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self.gate.wait(60)
        super().write(key, pieces, over=over)


def test_a_checkpoint_that_waits_to_be_copied_is_not_removed_before_it_has_been(root: Place) -> None:
    mirror = _Slow(root / "mirror")
    with ckpt.StateManager(root / "run", model=nn.Linear(2, 2), mirror=mirror, keep=ckpt.Keep(last=1)) as manager:
        for name in ("one", "two"):
            manager.save_state(name, wait=True)
        left = committed(root / "run")
        mirror.gate.set()
    assert left == {"one", "two"}
    assert committed(root / "run") == {"two"}
    assert "two" in committed(root / "mirror")
