"""`near`, the former name of `Storage.is_local`: what was written with it works for one more version, and warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.storage import HubStorage, LocalStorage, MemoryStorage, Storage, Tiers, open_storage
from tests.helpers.places import PassedOn


def without_is_local(storage: PassedOn) -> None:
    del storage.is_local


class SetsNear(PassedOn):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        without_is_local(self)
        self.near = False


class DeclaresNear(PassedOn):
    near = False

    def __init__(self, root: str) -> None:
        super().__init__(root)
        without_is_local(self)


class ComputesNear(DeclaresNear):
    @property
    def near(self) -> bool:  # type: ignore[override]
        return False


class OverridesNear(LocalStorage):
    near = False


WRITTEN_BEFORE: list[Callable[[str], Any]] = [SetsNear, DeclaresNear, ComputesNear, OverridesNear]


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> type:
    """A class that no test has used before."""
    return type(request.param.__name__, (request.param,), {})


@pytest.mark.parametrize("kind", WRITTEN_BEFORE, indirect=True)
def test_a_storage_with_near_alone_is_accepted_with_a_warning_that_names_is_local(tmp_path: Path, kind: type) -> None:
    old = kind(str(tmp_path))
    with pytest.warns(DeprecationWarning, match=rf"{kind.__name__} defines `near`, which is `is_local` now") as warned:
        storage = open_storage(old)
    assert storage is old
    assert storage.is_local is False
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_storage(old).is_local is False  # a class is warned of once
    assert open_storage(str(tmp_path)).is_local is True


@pytest.mark.parametrize("kind", WRITTEN_BEFORE, indirect=True)
def test_a_run_saves_and_loads_through_a_storage_with_near_alone(tmp_path: Path, kind: type) -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match="is_local") as warned:
        manager = ckpt.StateManager(kind(str(tmp_path)), model=model, optimizer=None, mirror=str(tmp_path / "mirror"))
    assert [warning.filename for warning in warned] == [__file__]  # not a line of ours
    with manager:
        manager.save_state()
        before = model.weight.detach().clone()
        model.weight.data.zero_()
        manager.load_state()
    assert model.weight.equal(before)


def test_a_storage_with_both_names_is_taken_by_the_new_one_without_a_warning(tmp_path: Path) -> None:
    class Both(PassedOn):
        near = True

        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.is_local = False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_storage(Both(str(tmp_path))).is_local is False


def of_ours(tmp_path: Path) -> list[Storage]:
    local = LocalStorage(tmp_path)
    return [local, MemoryStorage("near"), HubStorage("user/repo"), open_storage("local:///x"), Tiers(local, local)]


def test_near_of_a_built_in_storage_is_its_is_local(tmp_path: Path) -> None:
    for storage in of_ours(tmp_path):
        with pytest.warns(DeprecationWarning, match=rf"{type(storage).__name__}\.near is is_local now") as warned:
            assert storage.near == storage.is_local  # type: ignore[attr-defined]
        assert warned[0].filename == __file__


def test_setting_near_of_a_built_in_storage_sets_is_local(tmp_path: Path) -> None:
    for storage in of_ours(tmp_path):
        expected = not storage.is_local
        with pytest.warns(DeprecationWarning, match=r"near is is_local now: set that"):
            storage.near = expected  # type: ignore[attr-defined]
        assert storage.is_local is expected
