"""Resume from memory: the newest intact of memory, root and mirror, and as if memory had never been where it is not."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.formats.native.manifest import Manifest
from ckpt.memory.place import MemoryPlace
from ckpt.root.catalog import scan
from ckpt.root.signing import new_key
from ckpt.storage import LocalStorage
from ckpt.tools.report.facts import gather
from ckpt.tools.report.page import MARKDOWN, page
from tests.helpers.forgery import write_manifest

pytestmark = pytest.mark.usefixtures("memory")


class DiedError(Exception):
    """Training ends in the middle."""


class Training:
    """A model that is trained step by step. What it has become after a step tells the step."""

    def __init__(self, root: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {"save_every": 10, "memory": 3, **options}
        self.manager = ckpt.StateManager(root, model=self.model, optimizer=self.optimizer, **options)

    def to(self, last: int, die: bool = True) -> str:
        """Train up to a step. Returns a digest of the state there."""
        try:
            with self.manager as manager:
                manager.resume()
                while manager.progress.step < last:
                    self.one_step()
                if die:
                    raise DiedError
        except DiedError:
            pass
        return self.digest

    def one_step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 40)).pow(2).mean().backward()
        self.optimizer.step()
        self.manager.step()
        self.manager.wait()
        if self.manager.session.memory is not None:
            self.manager.session.memory.wait()

    @property
    def digest(self) -> str:
        return repr([value.tolist() for value in self.model.state_dict().values()])

    @property
    def restored(self) -> ckpt.Restored:
        assert self.manager.restored is not None
        return self.manager.restored


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Training(tmp_path_factory.mktemp("straight"), memory=None).to(25)


def snapshots(memory: Path) -> list[str]:
    return sorted(path.parent.name for path in memory.glob("ckpt-*/slots/*/manifest.json"))


def damage(folder: Path, name: str = "model.safetensors") -> None:
    """Flip one bit in the tensors of a checkpoint, or in another of its files; of a manifest, in its copy too."""
    for file in [folder / name, *([folder / "manifest.copy.json"] if name == "manifest.json" else [])]:
        data = bytearray(file.read_bytes())
        data[-3] ^= 4
        file.write_bytes(data)


def frozen(root: Path) -> Training:
    """With weights that are not trained, in a file of their own."""
    training = Training(root)
    training.manager.register(table=nn.Embedding(8000, 40).requires_grad_(False))
    return training


def slot(memory: Path, name: str) -> Path:
    return next(memory.glob(f"ckpt-*/slots/{name}"))


def test_a_run_that_died_resumes_from_memory(
    tmp_path: Path, memory: Path, straight: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Training(tmp_path / "root").to(17)
    assert snapshots(memory) == ["step-00000012", "step-00000015"]
    again = Training(tmp_path / "root")
    capsys.readouterr()
    assert again.to(25) == straight
    said = capsys.readouterr().err
    assert "resumed from memory: step 15 (root has step 10)\n" in said
    assert "a crash at step 17 cost 2 steps instead of 7\n" in said
    assert (again.restored.from_memory, again.restored.step) == (True, 15)


def test_snapshots_of_a_run_that_signs_are_signed(tmp_path: Path, memory: Path, straight: str) -> None:
    key = str(tmp_path / "key.pem")
    new_key(key)
    signed: dict[str, Any] = {"signing": ckpt.Signing(key=key, required=True)}
    Training(tmp_path / "root", **signed).to(17)
    newest = slot(memory, "step-00000015") / "manifest.json"
    found = Manifest.from_bytes(newest.read_bytes(), "newest")
    unsigned = dataclasses.replace(found, signature=None)  # somebody else's, for all one knows
    write_manifest(newest.parent, unsigned.to_bytes())
    again = Training(tmp_path / "root", **signed)
    assert again.to(25) == straight
    assert (again.restored.from_memory, again.restored.step) == (True, 12)
    assert "is not signed" in again.restored.passed_over["step-00000015 in memory"]


def test_the_report_says_what_memory_cost_and_saved(tmp_path: Path) -> None:
    Training(tmp_path / "root").to(17)
    Training(tmp_path / "root").to(25, die=False)
    text = page([gather(tmp_path / "root")], {}, MARKDOWN)
    assert re.search(r"(?m)^\| memory \| 4 snapshots, training waited \d+\.\d\d s in all \|$", text), text
    assert "a crash at step 17 cost 2 steps instead of 7, thanks to snapshots in memory\n" in text


def test_a_run_without_memory_has_nothing_of_it_in_its_manifests(tmp_path: Path) -> None:
    Training(tmp_path / "root", memory=None).to(10)
    assert '"memory"' not in (tmp_path / "root" / "step-00000010" / "manifest.json").read_text()
    assert "| memory |" not in page([gather(tmp_path / "root")], {}, MARKDOWN)


def test_after_a_resume_from_the_root_memory_is_the_newest_again(tmp_path: Path, memory: Path, straight: str) -> None:
    Training(tmp_path / "root").to(11)
    shutil.rmtree(next(memory.iterdir()))
    Training(tmp_path / "root").to(17)
    again = Training(tmp_path / "root")
    assert again.to(25) == straight
    assert (again.restored.from_memory, again.restored.step) == (True, 15)


def test_before_the_first_checkpoint_too(tmp_path: Path, straight: str, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path / "root").to(7)
    assert Training(tmp_path / "root").to(25) == straight
    said = capsys.readouterr().err
    assert "resumed from memory: step 6 (root has no checkpoint)" in said
    assert "a crash at step 7 cost 1 step instead of 7" in said


def test_the_roots_checkpoint_is_taken_where_it_is_newer(tmp_path: Path, memory: Path, straight: str) -> None:
    Training(tmp_path / "root").to(11)
    again = Training(tmp_path / "root")
    assert again.to(25) == straight
    assert (again.restored.from_memory, again.restored.step) == (False, 10)
    assert again.restored.passed_over == {}


def test_a_step_that_is_saved_to_the_root_is_not_taken_into_memory(tmp_path: Path, memory: Path) -> None:
    Training(tmp_path / "root", save_every=6).to(14)
    assert snapshots(memory) == ["step-00000003", "step-00000009"]


def test_nothing_is_left_when_the_run_has_ended(tmp_path: Path, memory: Path) -> None:
    Training(tmp_path / "root").to(17, die=False)
    assert list(memory.iterdir()) == []
    assert not (tmp_path / "root" / ".memory").exists()


def test_nor_when_it_has_ended_after_a_resume(tmp_path: Path, memory: Path) -> None:
    Training(tmp_path / "root").to(17)
    Training(tmp_path / "root").to(20, die=False)
    assert list(memory.iterdir()) == []


def test_they_stay_when_the_last_save_of_a_run_fails(tmp_path: Path, memory: Path) -> None:
    training = Training(tmp_path / "root")
    manager = training.manager
    manager.resume()
    for _ in range(4):
        training.one_step()
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").write_text("in the way")
    with pytest.raises(ckpt.CkptError), contextlib.closing(manager):
        manager.save_state(wait=False)
    assert snapshots(memory) == ["step-00000003"]


def test_there_are_two_snapshots_at_most_and_no_more_memory_than_they_take(tmp_path: Path, memory: Path) -> None:
    Training(tmp_path / "root", memory=1, save_every=None).to(9)
    assert snapshots(memory) == ["step-00000008", "step-00000009"]
    files = [path for path in memory.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files if path.name != ".lock"} == {0o600}
    assert not [path for path in files if path.name.endswith(".ckpt-tmp")]


class TestDamage:
    def test_a_flipped_bit_makes_the_older_snapshot_the_newest(
        self, tmp_path: Path, memory: Path, straight: str
    ) -> None:
        Training(tmp_path / "root").to(17)
        damage(slot(memory, "step-00000015"))
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert (again.restored.from_memory, again.restored.step) == (True, 12)
        assert list(again.restored.passed_over) == ["step-00000015 in memory"]
        assert "step-00000015" in str(again.restored)

    def test_a_flipped_bit_in_the_manifest_is_named_with_the_steps_that_it_costs(
        self, tmp_path: Path, memory: Path, straight: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        Training(tmp_path / "root").to(17)
        damage(slot(memory, "step-00000015"), "manifest.json")
        again = Training(tmp_path / "root")
        assert again.to(18)
        assert (again.restored.from_memory, again.restored.step) == (True, 12)
        assert list(again.restored.passed_over) == ["step-00000015 in memory"]
        lost = [record.message for record in caplog.records if "and loses" in record.message]
        assert len(lost) == 1
        assert "had reached step 17; it continues from step 12 and loses 5 steps." in lost[0]
        assert snapshots(memory) == ["step-00000015", "step-00000018"]
        last = Training(tmp_path / "root")
        assert last.to(25) == straight
        assert (last.restored.from_memory, last.restored.step, last.restored.passed_over) == (True, 18, {})

    @pytest.mark.parametrize("file", ["manifest.json", "model.safetensors"])
    def test_the_damaged_snapshot_makes_room_for_the_next_and_the_intact_one_stays(
        self, tmp_path: Path, memory: Path, file: str
    ) -> None:
        Training(tmp_path / "root").to(17)
        damage(slot(memory, "step-00000015"), file)
        Training(tmp_path / "root", memory=4).to(17)
        assert snapshots(memory) == ["step-00000012", "step-00000016"]

    def test_with_nothing_in_the_root_damaged_manifests_are_named_before_the_run_begins_afresh(
        self, tmp_path: Path, memory: Path, straight: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        Training(tmp_path / "root").to(8)
        for name in snapshots(memory):
            damage(slot(memory, name), "manifest.json")
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert again.manager.restored is None
        assert "ckpt skips step-00000006 in memory: " in caplog.text
        assert "ckpt skips step-00000003 in memory: " in caplog.text

    def test_with_both_damaged_the_roots_is_taken(self, tmp_path: Path, memory: Path, straight: str) -> None:
        Training(tmp_path / "root").to(17)
        for name in snapshots(memory):
            damage(slot(memory, name))
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert (again.restored.from_memory, again.restored.step) == (False, 10)
        assert list(again.restored.passed_over) == ["step-00000015 in memory", "step-00000012 in memory"]

    def test_with_nothing_in_the_root_the_run_begins_afresh(
        self, tmp_path: Path, memory: Path, straight: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        Training(tmp_path / "root").to(8)
        for name in snapshots(memory):
            damage(slot(memory, name))
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert again.manager.restored is None
        assert "ckpt skips step-00000006 in memory: " in caplog.text

    @pytest.mark.parametrize("name", ["model.safetensors", "state.json", "rank-00000.json"])
    def test_so_does_a_file_that_is_gone(self, tmp_path: Path, memory: Path, straight: str, name: str) -> None:
        Training(tmp_path / "root").to(17)
        (slot(memory, "step-00000015") / name).unlink()
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert again.restored.step == 12

    def test_a_damaged_checkpoint_of_the_root_is_passed_over_for_an_older_one_in_memory(
        self, tmp_path: Path, straight: str
    ) -> None:
        Training(tmp_path / "root", keep=ckpt.Keep(last=1)).to(11)
        damage(tmp_path / "root" / "step-00000010")
        again = Training(tmp_path / "root")
        assert again.to(25) == straight
        assert (again.restored.from_memory, again.restored.step) == (True, 9)


class TestAsIfItHadNeverBeen:
    def resumed_from(self, root: Path, **options: Any) -> ckpt.Restored | None:
        training = Training(root, **options)
        training.to(25)
        return training.manager.restored

    @pytest.mark.parametrize("fact", ["boot", "versions", "uid"])
    def test_after_a_reboot_and_with_other_code(self, tmp_path: Path, memory: Path, fact: str) -> None:
        Training(tmp_path / "root").to(17)
        (place,) = MemoryPlace.list_places()
        (place.path / "run.json").write_text(json.dumps({**place.facts, fact: "another"}))
        restored = self.resumed_from(tmp_path / "root")
        assert restored is not None
        assert (restored.from_memory, restored.step) == (False, 10)

    def test_on_another_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Training(tmp_path / "root").to(17)
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "other"))
        restored = self.resumed_from(tmp_path / "root")
        assert restored is not None
        assert restored.step == 10

    def test_where_the_root_was_removed_and_made_anew(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(7)
        (tmp_path / "root").rename(tmp_path / "elsewhere")
        assert self.resumed_from(tmp_path / "root") is None

    def test_where_somebody_removed_the_newest_checkpoint_to_go_back(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(24)
        (tmp_path / "root" / "step-00000020").rename(tmp_path / "elsewhere")
        restored = self.resumed_from(tmp_path / "root")
        assert restored is not None
        assert restored.step == 10
        assert restored.passed_over == {
            f"step-000000{step} in memory": "it continues from a checkpoint that is no longer in the root."
            for step in ("21", "24")
        }

    def test_in_another_root(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(17)
        assert self.resumed_from(tmp_path / "another") is None

    def test_without_the_option(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(17)
        restored = self.resumed_from(tmp_path / "root", memory=None)
        assert restored is not None
        assert restored.step == 10

    def test_where_a_checkpoint_is_named(self, tmp_path: Path, memory: Path) -> None:
        Training(tmp_path / "root").to(17)
        training = Training(tmp_path / "root")
        with training.manager as manager:
            assert manager.load_state("step-00000010").step == 10
            manager.save_state("back", wait=True)
        again = Training(tmp_path / "root")
        again.to(11)
        assert (again.restored.from_memory, again.restored.name) == (False, "back")

    @pytest.mark.parametrize("resumes_first", [False, True])
    def test_where_training_went_back_and_crashed_before_the_next_snapshot(
        self, tmp_path: Path, memory: Path, resumes_first: bool
    ) -> None:
        Training(tmp_path / "root").to(17)
        training = Training(tmp_path / "root", memory=3)
        with contextlib.suppress(DiedError), training.manager as manager:
            if resumes_first:
                assert manager.resume()
            manager.load_state(10)
            training.one_step()
            assert not (tmp_path / "root" / ".memory").exists()  # from here on, wherever it is killed
            assert snapshots(memory) == []
            raise DiedError
        again = Training(tmp_path / "root")
        again.to(17)
        assert (again.restored.from_memory, again.restored.step) == (False, 10)
        last = Training(tmp_path / "root")
        last.to(17)
        assert (last.restored.from_memory, last.restored.step) == (True, 15)


class TestLineage:
    def manifests(self, root: Path) -> dict[int, Any]:
        found = (checkpoint.manifest for checkpoint in scan(LocalStorage(root)))
        return {manifest.step: manifest for manifest in found if manifest is not None}

    def test_a_checkpoint_after_a_resume_from_memory_continues_from_the_roots_before(self, tmp_path: Path) -> None:
        Training(tmp_path / "root").to(17)
        Training(tmp_path / "root").to(20)
        found = self.manifests(tmp_path / "root")
        assert found[20].parent == found[10].id
        assert found[20].run == found[10].run
        assert found[20].sequence > found[10].sequence + 2

    def test_memory_and_root_share_one_sequence(self, tmp_path: Path, memory: Path) -> None:
        Training(tmp_path / "root").to(14)
        in_memory = {}
        for path in memory.glob("ckpt-*/slots"):
            in_memory = self.manifests(path)
        sequences = {step: found.sequence for step, found in (self.manifests(tmp_path / "root") | in_memory).items()}
        assert sequences == {9: 3, 10: 4, 12: 5}
        assert in_memory[12].parent == self.manifests(tmp_path / "root")[10].id

    def test_no_file_of_the_root_is_a_link_to_memory(self, tmp_path: Path, memory: Path) -> None:
        frozen(tmp_path / "root").to(17)
        frozen(tmp_path / "root").to(21)
        for path in memory.rglob("*"):
            if path.is_file():
                path.write_bytes(bytes(path.stat().st_size))
        assert ckpt.verify(tmp_path / "root") == {"step-00000020": [], "step-00000010": []}

    def frozen_files(self, root: Path) -> list[Path]:
        return [root / f"step-000000{step}" / "table.safetensors" for step in (10, 20, 30)]

    def test_frozen_weights_are_linked_to_the_roots_last_checkpoint_after_a_resume_from_memory(
        self, tmp_path: Path, memory: Path
    ) -> None:
        frozen(tmp_path / "root").to(17)
        again = frozen(tmp_path / "root")
        again.to(31)
        assert again.restored.from_memory
        assert len({path.stat().st_ino for path in self.frozen_files(tmp_path / "root")}) == 1
        in_memory = {path.stat().st_ino for path in memory.rglob("table.safetensors")}
        assert len(in_memory) == 1
        assert ckpt.verify(tmp_path / "root") == {f"step-000000{step}": [] for step in (30, 20, 10)}

    def test_frozen_weights_that_are_damaged_in_the_root_are_written_again_and_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        frozen(tmp_path / "root").to(17)
        damage(tmp_path / "root" / "step-00000010", "table.safetensors")
        again = frozen(tmp_path / "root")
        again.to(31)
        assert again.restored.from_memory
        found = ckpt.verify(tmp_path / "root")
        assert [name for name, problems in found.items() if problems] == ["step-00000010"]
        first, second, third = (path.stat().st_ino for path in self.frozen_files(tmp_path / "root"))
        assert first != second == third
        assert "step-00000020/table.safetensors again, because the earlier file is not intact: " in caplog.text

    def test_a_run_that_resumes_at_its_last_step_saves_it_to_the_root(self, tmp_path: Path, memory: Path) -> None:
        data: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=1)

        def run(die_at: int) -> None:
            model = nn.Linear(1, 1)
            with ckpt.StateManager(tmp_path / "root", model=model, save_every=10, memory=4) as manager:
                for _ in manager.epochs(1):
                    for _ in manager.batches(data):
                        manager.step()
                    if manager.progress.step == die_at:
                        assert manager.session.memory is not None
                        manager.session.memory.wait()
                        raise DiedError

        with pytest.raises(DiedError):
            run(12)
        run(0)
        assert self.manifests(tmp_path / "root")[12].name == "step-00000012"
        assert list(memory.iterdir()) == []


def test_the_snapshots_of_a_run_with_a_mirror_come_before_both(tmp_path: Path, straight: str) -> None:
    Training(tmp_path / "root", mirror=tmp_path / "mirror").to(17)
    again = Training(tmp_path / "root", mirror=tmp_path / "mirror")
    assert again.to(25) == straight
    assert (again.restored.from_memory, again.restored.step) == (True, 15)


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_commit_that_is_cut_off_leaves_the_snapshot_before(
    tmp_path: Path, memory: Path, straight: str, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """The process dies before the manifest of the third snapshot, or while its files are written."""
    Training(tmp_path / "root", save_every=None).to(6)
    training = Training(tmp_path / "root", save_every=None)
    named = itertools.count()

    def cut_off(own: Callable[..., None], source: Any, target: Any, **folders: Any) -> None:
        folder = os.readlink(f"/proc/self/fd/{folders['dst_dir_fd']}") if "dst_dir_fd" in folders else str(target)
        if folder.startswith(str(memory)) and next(named) >= when:
            raise OSError(5, "Input/output error")
        own(source, target, **folders)

    with monkeypatch.context() as patched:
        for name in ("replace", "link"):
            patched.setattr(os, name, partial(cut_off, getattr(os, name)))
        training.to(9)
    assert "step-00000006" in snapshots(memory)
    again = Training(tmp_path / "root")
    assert again.to(25) == straight
    assert again.restored.step == 6
