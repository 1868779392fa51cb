"""Bad input gets one clear error, and nothing that was committed is lost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.native import manifest as manifest_format
from tests.helpers.places import Place, intact
from tests.helpers.processes import run_alone, start_alone


def _saved(root: Place | Path) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("good")


def _intact(root: Place | Path) -> bool:
    return ckpt.verify(root).get("good") == []


@pytest.mark.not_on_s3("an object store has no files where folders should be")
def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ckpt.ConfigError, match=r"is a file, but a root must be a folder"):
        ckpt.StateManager(tmp_path / "file", model=nn.Linear(1, 1))


@pytest.mark.not_on_s3("nothing is stored")
def test_an_unknown_scheme() -> None:
    with pytest.raises(ckpt.SchemeError, match=r"ckpt has no storage for ftp://.*file://.*memory://.*s3://.*install"):
        ckpt.StateManager("ftp://host/x", model=nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "", ".hidden", "a\\b", "a\0b", "x" * 300, "a..b", "-x", 7.5])
def test_a_name_that_would_leave_the_root_or_cannot_be_a_folder(root: Place, name: Any) -> None:
    _saved(root / "run")
    with ckpt.StateManager(root / "run", model=nn.Linear(2, 2)) as manager:
        with pytest.raises(ckpt.ConfigError, match="is not a valid checkpoint name"):
            manager.save_state(name)
        with pytest.raises(ckpt.ConfigError, match=r"is not a valid checkpoint name|is neither the name"):
            manager.load_state(name)
    assert {file.partition("/")[0] for file in root.files()} == {"run"}
    assert _intact(root / "run")


def test_a_manifest_of_a_newer_version_is_not_passed_over(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(root)
    monkeypatch.setattr(manifest_format, "VERSION", 2)
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.load_state("good")
        manager.save_state("newer")
    monkeypatch.setattr(manifest_format, "VERSION", 1)
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        with pytest.raises(ckpt.VersionError, match=r"format version 2.*pip install -U torch-ckpt"):
            manager.resume()
        assert manager.load_state("good").name == "good"
        manager.save_state("again")  # sweeping leaves the newer one alone
        with pytest.raises(ckpt.VersionError, match="format version 2"):
            manager.save_state("newer", wait=True)
    assert (root / "newer" / "model.safetensors").exists()


def test_a_checkpoint_of_another_model(root: Place) -> None:
    _saved(root)
    with (
        ckpt.StateManager(root, model=nn.Conv2d(1, 1, 3)) as manager,
        pytest.raises(ckpt.MismatchError, match="good does not fit the live objects; nothing was changed"),
    ):
        manager.resume()
    assert _intact(root)


def test_a_checkpoint_that_is_not_there_names_those_that_are(root: Place) -> None:
    _saved(root)
    with (
        ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager,
        pytest.raises(ckpt.MissingError, match=r"no checkpoint 'bad' in .* There are: good"),
    ):
        manager.load_state("bad")


def test_nothing_to_load(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        with pytest.raises(ckpt.MissingError, match="there is no checkpoint in"):
            manager.load_state()
        assert manager.resume() is None


def test_a_metric_that_is_nan_is_refused_before_anything_is_written(root: Place) -> None:
    _saved(root)
    with ckpt.StateManager(root, model=nn.Linear(2, 2), keep=ckpt.Keep(best=1, metric="loss")) as manager:
        manager.resume()
        with pytest.raises(ckpt.MetricError, match="metric 'loss' is NaN at bad, and Keep"):
            manager.save_state("bad", metrics={"loss": torch.tensor(float("nan"))})
        with pytest.raises(ckpt.MetricError, match="one number for each name"):
            manager.save_state("bad", metrics={"loss": torch.ones(3)})
        assert _intact(root)
        manager.save_state("other", metrics={"accuracy": float("nan")})  # nothing is ranked by it
    assert [one.name for one in ckpt.list_checkpoints(root)] == ["other", "good"]  # none has it, so none goes


@pytest.mark.also_on_s3
def test_two_managers_in_one_process_on_one_root(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as first:
        first.save_state("good", wait=True)
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as second:
            with pytest.raises(ckpt.LockedError, match=rf"another run writes to .*process {os.getpid()}.*close\(\)"):
                second.save_state("bad", wait=True)
            assert second.load_state().name == "good"  # reading is free
        first.save_state("more")
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as third:
        third.resume()
        third.save_state("later")
    assert len(ckpt.list_checkpoints(root)) == 3


def _hold(rank: int, root: str, ready: str) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.save_state("theirs", wait=True)
        Path(ready).write_text("")
        time.sleep(600)  # until it is killed


@pytest.mark.slow
@pytest.mark.also_on_s3
def test_two_processes_on_one_root(root: Place, tmp_path: Path) -> None:
    job = start_alone(str(tmp_path), _hold, str(root), str(tmp_path / "ready"))
    try:
        while not (tmp_path / "ready").exists():
            assert job.is_alive()
            time.sleep(0.01)
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            with pytest.raises(ckpt.LockedError, match=f"process {job.pid} on"):
                manager.resume()
            job.kill()
            job.join()
            manager.resume()  # a killed process holds nothing
            manager.save_state("ours")
    finally:
        job.kill()
        job.join()
    assert {one.name for one in ckpt.list_checkpoints(root)} == {"theirs", "ours"}


def test_a_root_that_a_manager_no_longer_uses_is_free_without_close(root: Place) -> None:
    ckpt.StateManager(root, model=nn.Linear(2, 2)).save_state("one", wait=True)
    ckpt.StateManager(root, model=nn.Linear(2, 2)).resume()


@pytest.mark.also_on_s3
def test_a_fresh_start_is_not_saved_before_what_another_run_has_saved(root: Place) -> None:
    _saved(root)
    with ckpt.StateManager(root, model=nn.Linear(2, 2), keep=ckpt.Keep(last=1)) as manager:
        with pytest.raises(ckpt.ConfigError, match=r"good is the newest\) that this run has not resumed from"):
            manager.save_state("init", wait=True)
        manager.resume()
        manager.save_state("after")
    assert [one.name for one in ckpt.list_checkpoints(root)] == ["after"]


@pytest.mark.parametrize(
    "mark", ["", "{}", "[]", '{"files": ["../../x"], "replaces": []}', '{"files": 3, "replaces": 4}']
)
def test_a_mark_that_is_not_ours_blocks_nothing_and_removes_nothing(root: Place, mark: str) -> None:
    _saved(root / "run")
    mine = [root / "x", root / "run" / "other" / "notes.txt"]
    for file in mine:
        file.write_bytes(b"mine")
    (root / "run" / "other" / ".saving").write_bytes(mark.encode())
    with ckpt.StateManager(root / "run", model=nn.Linear(2, 2)) as manager:
        manager.resume()
        manager.save_state("more")
    assert all(file.read_bytes() == b"mine" for file in mine)
    assert _intact(root / "run")


def test_an_optimizer_with_odd_state_comes_back(root: Place) -> None:
    def make() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters())

    model, optimizer = make()
    optimizer.state[model.weight] = {"sum": 1.5, "exp_avg": None, "momentum_buffer": torch.ones(7)}
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.save_state("odd")
    other, resumed = make()
    with ckpt.StateManager(root, model=other, optimizer=resumed) as manager:
        manager.load_state()
    assert resumed.state[other.weight]["sum"] == 1.5
    assert torch.equal(resumed.state[other.weight]["momentum_buffer"], torch.ones(7))


def test_a_model_that_is_not_initialised_yet_is_told_so(root: Place) -> None:
    _saved(root)
    with (
        ckpt.StateManager(root, model=nn.LazyLinear(2)) as manager,
        pytest.raises(ckpt.MismatchError, match="weight: not initialised here yet: run one forward pass first"),
    ):
        manager.load_state()


@pytest.mark.not_on_s3("nothing is stored")
def test_no_password_is_repeated() -> None:
    with pytest.raises(ckpt.SchemeError) as caught:
        ckpt.StateManager("ftp://user:secret@host/x", model=nn.Linear(1, 1))
    assert "secret" not in str(caught.value)


def _as_nobody(rank: int, root: str) -> None:
    os.setgid(65534)
    os.setuid(65534)
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        assert manager.load_state().name == "good"
        with pytest.raises(ckpt.StorageError, match=r"could not lock .*Permission denied.*writable"):
            manager.save_state("bad", wait=True)


@pytest.mark.slow
@pytest.mark.not_on_s3("permissions of files; those of S3 are in tests/storage/test_s3.py")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write")
def test_a_root_that_cannot_be_written_can_still_be_read(tmp_path: Path) -> None:
    _saved(tmp_path / "run")
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == 0 and folder != Path("/tmp"):  # pytest's folders are closed to others
            folder.chmod(folder.stat().st_mode | 0o055)
    assert run_alone(_as_nobody, str(tmp_path / "run")) == 0
    assert _intact(tmp_path / "run")


def _fill(rank: int, root: str) -> None:
    model = nn.Linear(300, 300)  # 360 kB
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("good")
        manager.save_state("fine")
        nn.init.ones_(model.weight)
        with pytest.raises(ckpt.FullError, match=r"is free there.*Nothing was written.*Free some space"):
            manager.save_state("bad", wait=True)
        assert manager.load_state().name == "fine"
        (Path(root) / "ballast").unlink()
        manager.save_state("better")  # and when there is room again it goes on


@pytest.mark.slow
@pytest.mark.not_on_s3("a disk that is full")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)], check=True)
    try:
        (disk / "ballast").write_bytes(bytes(700_000))
        assert run_alone(_fill, str(disk)) == 0
        assert ckpt.verify(disk).keys() == {"good", "fine", "better"}
        assert intact(disk)
        assert not (disk / "bad").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_values_that_cannot_be_held_are_refused_by_path_all_at_once(root: Place) -> None:
    class Scheduler:
        def state_dict(self) -> dict[str, Any]:
            return {"lr_lambdas": [lambda epoch: 1], "owner": self, "fine": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with (
        ckpt.StateManager(root, model=nn.Linear(1, 1), scheduler=Scheduler()) as manager,
        pytest.raises(ckpt.UnsupportedError, match="nothing was saved") as caught,
    ):
        manager.save_state()
    assert caught.value.problems[0] == "scheduler.lr_lambdas[0]: a function"
    assert caught.value.problems[1].startswith("scheduler.owner: a tests.guarantees.test_bad_input.")
    assert not any("/" in name for name in root.files() if not name.startswith(".locks/"))


@pytest.mark.not_on_s3("nothing is stored")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ckpt.StateManager("memory://x", save_every=0), "save_every=0 must be"),
        (lambda: ckpt.StateManager("memory://x", keep=3), "must be a ckpt.Keep"),  # type: ignore[arg-type]
        (lambda: ckpt.StateManager("memory://x", ranks=ckpt.RankOptions(timeout=-1)), "timeout=-1 must be"),
        (lambda: ckpt.StateManager("memory://x", model=3), "model is a int, not a torch.nn.Module"),
        (lambda: ckpt.StateManager("memory://x", scheduler=3), "scheduler is a int, which has no state_dict"),
        (lambda: ckpt.StateManager("memory://x", model={"a/b": nn.Linear(1, 1)}), "is not a valid part name"),
        (lambda: ckpt.StateManager("memory://x").register(model=nn.Linear(1, 1)), "a part of that name already exists"),
        (lambda: ckpt.StateManager("memory://x").register(a={1}, b=[2]), "a: a set has no state_dict.*; b: a list"),
        (lambda: ckpt.StateManager("memory://x").unwrap(), "0 models. Pass a model"),
        (lambda: ckpt.StateManager("memory://x").step(), r"call manager\.resume\(\) before the loop"),
        (lambda: ckpt.StateManager(""), "must be a path, a URL"),
        (lambda: ckpt.StateManager(), "needs a root"),
        (
            lambda: ckpt.StateManager("memory://x", saving=ckpt.SaveOptions(layout="flat")),
            "layout='flat' must be one of auto, full, sharded",
        ),
        (lambda: list(ckpt.StateManager("memory://x").epochs("3")), "number of epochs"),  # type: ignore[arg-type]
        (lambda: list(ckpt.StateManager("memory://x").batches(None)), "is not iterable"),  # type: ignore[arg-type]
        (lambda: ckpt.Keep(last=0), "the newest checkpoint is never removed"),
        (lambda: ckpt.Keep(best=1, mode="up"), r"mode='up' must be .*needs metric="),
        (lambda: ckpt.Keep(every=0), "every=0"),
    ],
)
def test_options_that_make_no_sense_are_refused_when_they_are_given(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=message):
        build()


@pytest.mark.not_on_s3("nothing is stored")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "root: x\nsave_evry: 3\nkeeep: 1",
            r"ckpt.yaml has no option 'save_evry' \(did you mean 'save_every'\?\), 'keeep' \(did you mean 'keep'\?\)",
        ),
        ("root: x\nkeep: {lst: 3}", r"keep has no option 'lst' \(did you mean 'last'\?\)"),
        ("root: x\nkeep: 3", "'keep' must be a mapping"),
        ("save_every: 3", "at least 'root"),
        ("{{", "is not YAML"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ckpt.yaml").write_text(text)
    with pytest.raises(ckpt.ConfigError, match=message):
        ckpt.StateManager.from_config(tmp_path / "ckpt.yaml")


@pytest.mark.not_on_s3("nothing is stored")
def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ckpt.ConfigError, match="cannot be read: No such file"):
        ckpt.StateManager.from_config(tmp_path / "none.yaml")
