"""`ckpt pull` between any two storages: checkpoints are verified on their way, and appear whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import LocalStorage, open_storage
from tests.cli.test_main import flip_a_bit, truncate
from tests.helpers.hub_server import HubServer

_CUT_OFF = """
import os, signal, sys
import ckpt
from ckpt.storage import LocalStorage
write = LocalStorage.write
def killed(self, key, pieces, **options):
    if key.endswith("state.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, key, pieces, **options)
LocalStorage.write = killed
ckpt.pull(*sys.argv[1:])
"""

_PEAK = """
import resource, sys
import ckpt.tools.pull, ckpt.storage.clouds.s3
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ckpt.tools.pull.pull(*sys.argv[1:])
assert "torch" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def save(root: str | Path, steps: int = 2, size: int = 300) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(size, 100)
    with ckpt.StateManager(root, model=model, save_every=1) as manager:
        manager.resume()
        for _ in range(steps):
            nn.init.normal_(model.weight)
            manager.step()
    return model


def pull(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pull", *map(str, arguments)])


def loaded(root: str | Path) -> Any:
    model = nn.Linear(300, 100)
    restored = ckpt.StateManager(root, model=model).resume()
    assert restored is not None
    return restored.name, model.weight


@pytest.mark.slow
def test_a_checkpoint_comes_from_s3_into_a_root_to_resume_from(s3: str, tmp_path: Path) -> None:
    model = save(s3)
    result = pull(f"{s3}/step-00000002", tmp_path / "back")
    assert result.stdout == f"{tmp_path}/back/step-00000002\n"
    name, weight = loaded(tmp_path / "back")
    assert name == "step-00000002"
    assert torch.equal(weight, model.weight)
    before = open_storage(s3).read("step-00000002/manifest.json")
    assert (tmp_path / "back" / "step-00000002" / "manifest.json").read_bytes() == before


@pytest.mark.slow
def test_a_whole_root_goes_from_s3_to_s3(s3: str) -> None:
    save(s3, 3)
    other = f"{s3}-other"
    assert ckpt.pull(s3, other) == other
    assert ckpt.verify(other) == {f"step-{step:08d}": [] for step in (3, 2, 1)}
    assert ckpt.pull(s3, other) == other  # all of it is there


@pytest.mark.slow
def test_a_large_one_passes_through_little_memory_and_without_torch(s3: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, size=750_000)  # 300 MB
    command = [sys.executable, "-c", _PEAK, f"{tmp_path}/run/step-00000001", s3]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=170)
    assert int(done.stdout) < 256_000  # kB
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3)] == ["step-00000001"]


def test_of_a_root_the_checkpoint_of_a_step_is_taken(tmp_path: Path) -> None:
    save(tmp_path / "run", 3)
    assert pull(tmp_path / "run", tmp_path / "back", "--step", 2).exit_code == 0
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "back")] == ["step-00000002"]
    result = pull(tmp_path / "run", tmp_path / "back", "--step", 7)
    assert result.exit_code == 1
    assert (
        "no checkpoint for step 7. It has: step-00000003 (step 3), step-00000002 (step 2), step-00000001 (step 1)"
        in result.output
    )


def test_a_folder_that_is_there_is_not_taken_for_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ckpt.StateManager("runs/x", model=nn.Linear(2, 2)) as manager:
        manager.save_state("a", wait=True)
    ckpt.pull("runs/x", "back")
    assert ckpt.verify("back") == {"a": []}


@pytest.mark.slow
def test_what_was_cut_off_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1)
    there, back = tmp_path / "run", tmp_path / "back"
    command = [sys.executable, "-c", _CUT_OFF, str(there), str(back)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [checkpoint.committed for checkpoint in ckpt.list_checkpoints(back)] == [False]
    sent = []
    write = LocalStorage.write

    def noted(self: LocalStorage, key: str, pieces: Any, **options: Any) -> None:
        sent.append(key)
        write(self, key, pieces, **options)

    monkeypatch.setattr(LocalStorage, "write", noted)
    ckpt.pull(there, back)
    assert "step-00000001/model.safetensors" not in sent
    assert "step-00000001/state.json" in sent
    assert ckpt.verify(back) == {"step-00000001": []}


def test_a_damaged_one_is_named_and_not_copied_and_the_others_are(tmp_path: Path) -> None:
    save(tmp_path / "run", 3)
    flip_a_bit(tmp_path / "run" / "step-00000002" / "model.safetensors")
    with pytest.raises(ckpt.DamagedError, match=r"step-00000002 is damaged: model\.safetensors was altered"):
        ckpt.pull(tmp_path / "run", tmp_path / "back")
    assert ckpt.verify(tmp_path / "back") == {"step-00000003": [], "step-00000001": []}
    assert not (tmp_path / "back" / "step-00000002").exists()


@pytest.mark.parametrize("hurt", [truncate, Path.unlink])
def test_one_that_lacks_bytes_is_named_and_the_others_are_copied(
    tmp_path: Path, hurt: Callable[[Path], object]
) -> None:
    save(tmp_path / "run", 3)
    hurt(tmp_path / "run" / "step-00000002" / "model.safetensors")
    with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors is missing or cut short"):
        ckpt.pull(tmp_path / "run", tmp_path / "back")
    assert ckpt.verify(tmp_path / "back") == {"step-00000003": [], "step-00000001": []}


def test_another_checkpoint_of_that_name_stays(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    save(tmp_path / "other", 1)
    before = (tmp_path / "other" / "step-00000001" / "manifest.json").read_bytes()
    with pytest.raises(
        ckpt.ConfigError, match="a different checkpoint named 'step-00000001', which ckpt does not overwrite"
    ):
        ckpt.pull(tmp_path / "run", tmp_path / "other")
    assert (tmp_path / "other" / "step-00000001" / "manifest.json").read_bytes() == before


def test_files_of_another_are_not_taken_for_the_checkpoints_own(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    strange = tmp_path / "back" / "step-00000001" / "model.safetensors"
    strange.parent.mkdir(parents=True)
    strange.write_bytes(bytes((tmp_path / "run" / "step-00000001" / "model.safetensors").stat().st_size))
    with pytest.raises(ckpt.ConfigError, match="has files that do not belong to this checkpoint"):
        ckpt.pull(tmp_path / "run", tmp_path / "back")
    assert set(strange.parent.iterdir()) == {strange}


def test_a_root_that_a_run_writes_to_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    with ckpt.StateManager(tmp_path / "other", model=nn.Linear(1, 1)) as manager:
        manager.save_state("a", wait=True)
        with pytest.raises(ckpt.LockedError, match="another run writes to"):
            ckpt.pull(tmp_path / "run", tmp_path / "other")


@pytest.mark.slow
def test_plain_files_come_too(s3: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    ckpt.merge(tmp_path / "run" / "step-00000001", f"{s3}/model.safetensors")
    ckpt.pull(s3, tmp_path / "out")
    ckpt.pull(tmp_path / "out", f"{s3}-again")
    assert open_storage(f"{s3}-again").read("model.safetensors") == (tmp_path / "out/model.safetensors").read_bytes()
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_plain_files_go_where_a_file_url_says(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("x")
    assert ckpt.pull(tmp_path / "files", f"file://localhost{tmp_path}/a%20b") == f"{tmp_path}/a b"
    assert (tmp_path / "a b" / "notes.txt").read_text() == "x"


@pytest.mark.slow
class TestToTheHub:
    def test_all_of_a_root_arrives_with_its_bytes_each_checkpoint_in_one_commit(
        self, s3: str, hub: HubServer, tmp_path: Path
    ) -> None:
        save(s3, 2)
        assert ckpt.pull(s3, "hub://me/run") == "hub://me/run"
        here, there = open_storage(s3), open_storage("hub://me/run")
        keys = sorted(entry.key for entry in here.list() if "/" in entry.key)
        assert sorted(entry.key for entry in there.list()) == keys
        assert all(here.read(key) == there.read(key) for key in keys)
        assert ckpt.verify("hub://me/run") == {"step-00000002": [], "step-00000001": []}
        commits = len(hub.commits("me/run"))
        ckpt.pull(s3, "hub://me/run")  # nothing is left to be copied
        assert len(hub.commits("me/run")) == commits

    def test_one_checkpoint_goes_there_and_comes_back(self, hub: HubServer, tmp_path: Path) -> None:
        save(tmp_path / "run", 2)
        assert ckpt.pull(tmp_path / "run", "hub://me/run", step=2) == "hub://me/run/step-00000002"
        ckpt.pull("hub://me/run/step-00000002", tmp_path / "back")
        assert ckpt.verify(tmp_path / "back") == {"step-00000002": []}

    def test_what_is_damaged_is_named_and_not_published(self, hub: HubServer, tmp_path: Path) -> None:
        save(tmp_path / "run", 2)
        flip_a_bit(tmp_path / "run" / "step-00000001" / "model.safetensors")
        with pytest.raises(ckpt.DamagedError, match="step-00000001 is damaged"):
            ckpt.pull(tmp_path / "run", "hub://me/run")
        assert ckpt.verify("hub://me/run") == {"step-00000002": []}

    def test_credentials_of_the_hub_and_of_s3_each_go_to_their_own_side(
        self, s3: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(s3, 1)
        given = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"], "deadline": 60}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        hub.token = "hf_of_the_hub"
        ckpt.pull(s3, "hub://me/run", storage_options=given, token=hub.token)
        assert any(path.endswith("/manifest.json") for path in hub.files("me/run"))

    @pytest.mark.parametrize("destination", ["s3:/bucket/run", "zip::run.zip", Path("s3://bucket/run")])
    def test_what_comes_from_it_goes_into_no_folder_named_like_a_url(
        self, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: str | Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        save("run", 1)
        ckpt.pull("run", "hub://me/run")
        with pytest.raises(ckpt.ConfigError, match=r"lost a slash|is a URL"):
            ckpt.pull("hub://me/run", destination)
        with pytest.raises(ckpt.ConfigError, match="lost a slash"):
            ckpt.pull(Path("hub://me/run"), "back")
        assert not [name for name in os.listdir(tmp_path) if ":" in name or name == "back"]

    def test_of_a_root_that_comes_from_it_the_damaged_one_is_named_and_no_other_is_overwritten(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        from huggingface_hub import HfApi

        save(tmp_path / "run", 2)
        flip_a_bit(tmp_path / "run" / "step-00000002" / "model.safetensors")
        HfApi().create_repo("me/run")
        HfApi().upload_folder(repo_id="me/run", folder_path=tmp_path / "run")
        for _ in range(2):  # the second finds its own copy there
            with pytest.raises(
                ckpt.DamagedError, match=r"could not copy all of hub://me/run: step-00000002 is damaged"
            ):
                ckpt.pull("hub://me/run", tmp_path / "back")
            assert ckpt.verify(tmp_path / "back") == {"step-00000001": []}
        save(tmp_path / "other", 1)
        [mine] = ckpt.list_checkpoints(tmp_path / "other")
        with pytest.raises(
            ckpt.ConfigError, match="a different checkpoint named 'step-00000001', which ckpt does not overwrite"
        ):
            ckpt.pull("hub://me/run", tmp_path / "other")
        assert ckpt.list_checkpoints(tmp_path / "other") == [mine]

    def test_another_checkpoint_of_that_name_stays(self, hub: HubServer, tmp_path: Path) -> None:
        save(tmp_path / "run", 1)
        save(tmp_path / "other", 1)
        ckpt.pull(tmp_path / "other", "hub://me/run")
        with pytest.raises(
            ckpt.ConfigError, match="a different checkpoint named 'step-00000001', which ckpt does not overwrite"
        ):
            ckpt.pull(tmp_path / "run", "hub://me/run")


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ("/nothing/here", "back", "there is no checkpoint at /nothing/here"),
        ("files", "hub://me/repo", "does not copy other files"),
    ],
)
def test_what_makes_no_sense_is_refused(source: str, destination: str, said: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("x")
    where = destination if "://" in destination else tmp_path / destination
    with pytest.raises(ckpt.CkptError, match=said):
        ckpt.pull(tmp_path / source, where)
    with pytest.raises(ckpt.ConfigError, match="are for the Hub"):
        ckpt.pull(tmp_path / "run", tmp_path / "back", revision="main")
