"""What may be a root, and that every spelling of it is the same one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import ckpt
from ckpt.integrations.accelerate import attach
from ckpt.ranks import hosts
from ckpt.storage import ObjectStorage, open_storage, place_of
from tests.helpers.places import Place, Prefix
from tests.helpers.processes import run_alone, run_ranks

SPELLINGS = [
    "runs/x",
    "./runs/x",
    "runs/x/",
    "runs//x",
    "runs/./x",
    "runs/y/../x",
    "{here}/runs/x",
    "file://{here}/runs/x",
]


def saved(root: Place | Path | str, name: str = "step-00000100") -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state(name)


class TestACheckpointGivenAsTheRoot:
    @pytest.mark.also_on_s3
    def test_it_is_refused_with_the_line_to_write_instead(self, root: Place) -> None:
        saved(root)
        before = root.files()
        with pytest.raises(ckpt.ConfigError) as caught:
            ckpt.StateManager(root / "step-00000100", model=nn.Linear(2, 2))
        assert f"{root}/step-00000100 is a checkpoint, not a root" in str(caught.value)
        line = f"StateManager({str(root)!r}, ...); manager.load_state('step-00000100')"
        assert line in str(caught.value)
        assert {name for name in root.files() if not name.startswith(".locks")} == {
            name for name in before if not name.startswith(".locks")
        }
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:  # that line
            assert manager.load_state("step-00000100").name == "step-00000100"

    @pytest.mark.not_on_s3("a path that is relative")
    def test_the_line_is_right_where_the_path_is_only_a_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved(tmp_path, "a")
        for folder, path in ((tmp_path, "a"), (tmp_path, "./a/"), (tmp_path / "a", ".")):
            monkeypatch.chdir(folder)
            with pytest.raises(
                ckpt.ConfigError, match=rf"StateManager\('{tmp_path}', ...\); manager.load_state\('a'\)"
            ):
                ckpt.StateManager(path, model=nn.Linear(2, 2))

    @pytest.mark.not_on_s3("a checkpoint is damaged by hand")
    def test_a_damaged_one_is_refused_as_well(self, tmp_path: Path) -> None:
        saved(tmp_path, "a")
        (tmp_path / "a" / "manifest.json").write_bytes(b"{")
        with pytest.raises(ckpt.ConfigError, match="is a checkpoint, not a root"):
            ckpt.StateManager(tmp_path / "a", model=nn.Linear(2, 2))

    @pytest.mark.not_on_s3("a file of the user's own")
    def test_a_manifest_of_something_else_is_no_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "manifest.json").write_text(json.dumps({"name": "a web page", "icons": []}))
        saved(tmp_path, "a")
        assert ckpt.verify(tmp_path / "a") == {"a": []}

    @pytest.mark.not_on_s3("Accelerate saves to folders")
    def test_a_folder_of_accelerate_is_loaded_but_never_saved_into(self, tmp_path: Path) -> None:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(str(tmp_path / "checkpoints" / "checkpoint_3"))
        before = sorted(tmp_path.rglob("*"))
        with ckpt.StateManager(tmp_path / "checkpoints" / "checkpoint_3", model=model) as manager:
            assert manager.load_state().name == "checkpoint_3"
            with pytest.raises(ckpt.ConfigError, match=r"checkpoints', ...\); manager.load_state\('checkpoint_3'\)"):
                manager.save_state("mine", wait=True)
        assert [path for path in sorted(tmp_path.rglob("*")) if path.name != ".lock"] == before
        with ckpt.StateManager(tmp_path / "checkpoints", model=model) as manager:
            manager.load_state("checkpoint_3")
            manager.save_state("mine", wait=True)


@pytest.mark.not_on_s3("local paths")
def _saves_at_its_own_spelling(rank: int, folder: str) -> None:
    os.chdir(folder)
    root = f"{folder}/runs/x" if rank else "./runs/x"
    with ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=60, shared=True)) as manager:
        manager.resume()
        manager.save_state("step-1", wait=True)


@pytest.mark.slow
def test_ranks_that_spell_a_shared_root_differently_meet(tmp_path: Path) -> None:
    assert run_ranks(2, _saves_at_its_own_spelling, str(tmp_path)) == [0, 0]
    assert ckpt.verify(tmp_path / "runs" / "x") == {"step-1": []}


class TestSpellings:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        (tmp_path / "link").symlink_to("runs")
        return tmp_path

    @pytest.mark.parametrize("spelling", [*SPELLINGS, "link/x"])
    def test_every_spelling_is_one_root(self, spelling: str, here: Path) -> None:
        assert place_of(open_storage(spelling.format(here=here))) == place_of(open_storage("runs/x"))
        assert place_of(open_storage(spelling.format(here=here))) != place_of(open_storage("runs/xy"))

    def test_a_url_is_shown_without_what_means_nothing(self) -> None:
        assert [open_storage(path).url for path in ("./runs/x", "runs//x/", "runs/x")] == ["runs/x"] * 3

    @pytest.mark.parametrize("spelling", [*SPELLINGS, "link/x"])
    def test_a_mirror_that_is_the_root_itself_is_refused(self, spelling: str, here: Path) -> None:
        with pytest.raises(ckpt.ConfigError, match="is the same place as the root"):
            ckpt.StateManager("runs/x", model=nn.Linear(2, 2), mirror=spelling.format(here=here))

    @pytest.mark.parametrize("spelling", [path for path in [*SPELLINGS, "link/x"] if "://" not in path])
    def test_a_checkpoint_is_loaded_by_its_path_into_the_root(self, spelling: str, here: Path) -> None:
        saved("runs/x", "step-1")
        path = os.path.join(spelling.format(here=here), "step-1")
        with ckpt.StateManager("./runs/x", model=nn.Linear(2, 2)) as manager:
            assert manager.load_state(path).name == "step-1"
        assert ckpt.verify(path) == {"step-1": []}

    @pytest.mark.parametrize("root", ["runs/x", "./runs/x/", "{here}/runs/x", "link/x"])
    def test_an_attached_accelerator_loads_and_saves_by_any_path_into_the_root(self, root: str, here: Path) -> None:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(2, 2))
        attach(accelerator, root.format(here=here))
        accelerator.save_state("./runs/x/step-1")
        with torch.no_grad():
            model.weight.zero_()
        for path in ("./runs/x/step-1", "runs/x/step-1/", f"{here}/runs/x/step-1", "link/x/step-1"):
            accelerator.load_state(path)
        assert bool(model.weight.any())
        accelerator.end_training()
        assert ckpt.verify("runs/x") == {"step-1": []}

    def test_a_path_to_another_root_is_loaded_and_nothing_of_that_name_here_is_taken_for_it(self) -> None:
        models = []
        for root in ("runs/x", "runs/y"):
            models.append(nn.Linear(2, 2).requires_grad_(False))  # frozen: linked from one checkpoint to the next
            with ckpt.StateManager(root, model=models[-1]) as manager:
                manager.save_state("step-1")
        live = nn.Linear(2, 2).requires_grad_(False)
        with ckpt.StateManager("runs/y", model=live) as manager:
            manager.load_state("runs/x/step-1")
            manager.save_state("step-2")
        again = nn.Linear(2, 2)
        ckpt.load_model("runs/y/step-2", again)
        assert torch.equal(live.weight, models[0].weight)
        assert torch.equal(again.weight, models[0].weight)

    def test_a_path_to_no_checkpoint_is_refused(self) -> None:
        saved("runs/x", "step-1")
        with (
            ckpt.StateManager("runs/y", model=nn.Linear(2, 2)) as manager,
            pytest.raises(ckpt.ConfigError, match="give that root to StateManager"),
        ):
            manager.load_state("runs/x/step-2")

    def test_a_tilde_is_the_users_home_unless_a_folder_has_that_name(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(here / "home"))
        assert place_of(open_storage("~/runs")) == str(here / "home" / "runs")
        (here / "~").mkdir()
        assert place_of(open_storage("~/runs")) == str(here / "~" / "runs")


def _killed_while_it_looks_for_hosts(rank: int, root: str) -> None:
    """Both ranks leave their marks, and are killed before they have read each other's."""
    hosts._first_seen = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    ckpt.StateManager(root, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(shared=False, timeout=60))


@pytest.mark.slow
@pytest.mark.not_on_s3("hosts are looked for on a filesystem")
def test_what_a_job_left_that_was_killed_while_it_looked_for_hosts_is_swept_by_the_next(root: Place) -> None:
    assert run_ranks(2, _killed_while_it_looks_for_hosts, str(root), dies=True) == [-signal.SIGKILL] * 2
    assert sum(name.startswith(".host-") for name in root.files()) == 2
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.resume()
    assert not [name for name in root.files() if name.startswith(".host-")]


def _killed_while_it_tries_the_root(rank: int, root: str) -> None:
    ObjectStorage.delete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    ckpt.StateManager(root, model=nn.Linear(2, 2))


@pytest.mark.slow
def test_what_a_job_left_that_was_killed_while_it_tried_its_root_is_swept_by_the_next(s3: str) -> None:
    root = Prefix(s3)
    (root / ".try-notes").write_bytes(b"of a user")
    assert run_alone(_killed_while_it_tries_the_root, s3, dies=True) == -signal.SIGKILL
    assert sum(name.startswith(".try-") for name in root.files()) == 2
    with ckpt.StateManager(s3, model=nn.Linear(2, 2)) as manager:
        manager.resume()
        assert [name for name in root.files() if name.startswith(".try-")] == [".try-notes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two//slashes", "back\\slash"])
def test_a_root_whose_name_the_server_spells_otherwise_is_refused_at_the_start(s3: str, name: str) -> None:
    with pytest.raises(ckpt.UnsupportedError, match=r"the server does not list the object.*give the root another name"):
        ckpt.StateManager(f"{s3}/{name}", model=nn.Linear(2, 2))
