"""Two copies that are damaged in different files: each file is taken from where it is whole, and written back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root.verify import repair
from ckpt.storage import HubStorage, MemoryStorage, Storage, open_storage
from tests.helpers.hub_server import HubServer
from tests.helpers.places import intact
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

NAME = "step-00000002"
MODEL, OPTIMIZER = f"{NAME}/model.safetensors", f"{NAME}/optimizer.safetensors"


def flip(storage: Storage, key: str) -> None:
    data = bytearray(storage.read(key))
    data[-1] ^= 1
    storage.write(key, [data])


def cut(storage: Storage, key: str) -> None:
    storage.write(key, [storage.read(key)[:-1]])


def remove(storage: Storage, key: str) -> None:
    storage.delete([key])


DAMAGE = {"a flipped bit": flip, "a cut file": cut, "a missing file": remove}


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 8))
    return model, torch.optim.Adam(model[1].parameters())


def train(root: str, mirror: str, steps: int = 2) -> list[str]:
    """Two checkpoints. Returns the final state, in a form that can be compared."""
    model, optimizer = objects()
    with ckpt.StateManager(root, model=model, optimizer=optimizer, mirror=mirror) as manager:
        for step in range(1, steps + 1):
            model(torch.full((2, 600), float(step))).sum().backward()
            optimizer.step()
            manager.progress.step = step
            manager.save_state(wait=True)
    return [exact(model.state_dict()), exact(optimizer.state_dict())]


def resume(root: str, mirror: str) -> tuple[ckpt.Restored, list[str]]:
    model, optimizer = objects()
    with ckpt.StateManager(root, model=model, optimizer=optimizer, mirror=mirror) as manager:
        restored = manager.load_state()
    return restored, [exact(model.state_dict()), exact(optimizer.state_dict())]


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "root"), f"memory://{tmp_path.name}-mirror"


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
class TestLoading:
    def test_takes_each_file_from_the_copy_that_has_it_whole(
        self,
        urls: tuple[str, str],
        damage: Callable[[Storage, str], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        root, mirror = urls
        saved = train(root, mirror)
        damage(open_storage(root), MODEL)
        damage(open_storage(mirror), OPTIMIZER)
        restored, found = resume(root, mirror)
        assert (restored.step, found) == (2, saved)
        assert "so ckpt reads each file from an intact copy: 1 of" in caplog.text
        assert f"ckpt verify {root}/{NAME} --repair --from {mirror}" in caplog.text

    def test_goes_back_to_an_older_one_where_a_file_is_whole_in_neither(
        self, urls: tuple[str, str], damage: Callable[[Storage, str], None]
    ) -> None:
        root, mirror = urls
        train(root, mirror)
        for url in urls:
            damage(open_storage(url), MODEL)
        damage(open_storage(mirror), OPTIMIZER)
        restored, _ = resume(root, mirror)
        assert restored.step == 1
        assert f"{NAME} has no intact copy of model.safetensors in" in restored.passed_over[NAME]


def test_a_damaged_manifest_in_the_root_and_a_damaged_file_in_the_mirror(urls: tuple[str, str]) -> None:
    root, mirror = urls
    saved = train(root, mirror)
    for name in ("manifest.json", "manifest.copy.json"):
        cut(open_storage(root), f"{NAME}/{name}")
    flip(open_storage(mirror), OPTIMIZER)
    restored, found = resume(root, mirror)
    assert (restored.step, found) == (2, saved)


def test_what_is_saved_after_such_a_load_links_no_damaged_file(urls: tuple[str, str]) -> None:
    root, mirror = urls
    train(root, mirror)
    flip(open_storage(root), f"{NAME}/model+frozen.safetensors")
    flip(open_storage(mirror), OPTIMIZER)
    model, optimizer = objects()
    with ckpt.StateManager(root, model=model, optimizer=optimizer, mirror=mirror) as manager:
        assert manager.load_state().step == 2
        manager.progress.step = 3
        manager.save_state("next", wait=True)
    assert ckpt.verify(f"{root}/next") == {"next": []}


def _resumed_by_rank(rank: int, root: str, mirror: str, expected: list[str]) -> None:
    assert resume(root, mirror)[1] == expected


@pytest.mark.slow
def test_all_ranks_read_from_the_same_places(tmp_path: Path) -> None:
    root, mirror = str(tmp_path / "root"), str(tmp_path / "mirror")
    saved = train(root, mirror)
    flip(open_storage(root), MODEL)
    remove(open_storage(mirror), OPTIMIZER)
    assert run_ranks(2, _resumed_by_rank, root, mirror, saved) == [0, 0]


class TestVerifyRepair:
    def test_writes_back_what_another_home_has(self, urls: tuple[str, str]) -> None:
        root, mirror = urls
        saved = train(root, mirror)
        flip(open_storage(root), MODEL)
        remove(open_storage(root), OPTIMIZER)
        done = CliRunner().invoke(main, ["verify", root, "--repair", "--from", mirror])
        assert done.exit_code == 0, done.output
        assert f"model.safetensors from {mirror}/{MODEL}" in done.output
        assert ckpt.verify(root) == {NAME: [], "step-00000001": []}
        assert resume(root, f"{mirror}-none")[1] == saved

    def test_mends_a_mirror_from_its_root(self, urls: tuple[str, str]) -> None:
        root, mirror = urls
        train(root, mirror)
        flip(open_storage(mirror), MODEL)
        for name in ("manifest.json", "manifest.copy.json"):
            cut(open_storage(mirror), f"{NAME}/{name}")
        done = repair(open_storage(mirror), NAME, [open_storage(root)])
        assert set(done.written) == {"model.safetensors", "manifest.json", "manifest.copy.json"}
        assert intact(mirror)

    @pytest.mark.slow
    def test_mends_a_repository_on_the_hub_in_one_commit(self, tmp_path: Path, hub: HubServer) -> None:
        root, mirror = "hub://me/run", str(tmp_path / "mirror")
        train(root, mirror)
        storage = HubStorage("me/run")
        flip(storage, MODEL)
        remove(storage, OPTIMIZER)
        storage.settle()
        before = len(hub.commits("me/run"))
        done = repair(storage, NAME, [open_storage(mirror)])
        assert set(done.written) == {"model.safetensors", "optimizer.safetensors"}
        assert len(hub.commits("me/run")) == before + 1
        assert intact(root)

    def test_takes_a_file_from_a_checkpoint_that_links_it(self, tmp_path: Path) -> None:
        root = f"memory://{tmp_path.name}"  # links are copies here, as on object stores
        train(root, f"{root}-mirror")
        storage = open_storage(root)
        flip(storage, f"{NAME}/model+frozen.safetensors")
        done = repair(storage, NAME)
        assert done.written == {"model+frozen.safetensors": f"{root}/step-00000001/model+frozen.safetensors"}
        assert intact(root)

    def test_writes_nothing_where_a_file_is_whole_nowhere(self, urls: tuple[str, str]) -> None:
        root, mirror = urls
        train(root, mirror)
        flip(open_storage(root), MODEL)
        flip(open_storage(root), OPTIMIZER)
        flip(open_storage(mirror), MODEL)
        before = {entry.key: open_storage(root).read(entry.key) for entry in open_storage(root).list(NAME)}
        done = CliRunner().invoke(main, ["verify", root, "--repair", "--from", mirror])
        assert done.exit_code == 1
        assert "ckpt found no intact copy of model.safetensors; nothing was written" in done.output
        assert before == {entry.key: open_storage(root).read(entry.key) for entry in open_storage(root).list(NAME)}

    def test_a_home_that_cannot_be_read_is_an_error_and_not_a_loss(self, urls: tuple[str, str]) -> None:
        root, mirror = urls
        train(root, mirror)
        flip(open_storage(root), MODEL)

        class Away(MemoryStorage):
            def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
                raise ckpt.TransientError(f"{key}: no answer")

        with pytest.raises(ckpt.TransientError, match="no answer"):
            repair(open_storage(root), NAME, [Away(mirror.removeprefix("memory://"))])

    def test_sources_are_for_repairs(self, urls: tuple[str, str]) -> None:
        train(*urls)
        done = CliRunner().invoke(main, ["verify", urls[0], "--from", urls[1]])
        assert done.exit_code == 2
        assert "add --repair" in done.output
