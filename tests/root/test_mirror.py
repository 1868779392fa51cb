"""A second home: what is committed in the root is copied to a mirror, and either brings the run back."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer, LocalStorage, Storage, open_storage
from tests.helpers.places import intact
from tests.helpers.processes import DEADLINE, run_ranks, start_alone
from tests.helpers.seaweed import BUCKET, environment, serving
from tests.helpers.second_process import slow_where

KILLS = int(os.environ.get("CKPT_KILLS", "3"))


class Counting(LocalStorage):
    """A mirror that counts how often each object was written, and can be told to fail or to wait."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.down = False
        self.failing = 0  # so many writes

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self.open.wait()
        if self.down or self.failing:
            self.failing = max(0, self.failing - 1)
            raise ckpt.TransientError(f"{key}: the mirror is down")
        self.written.append(key)
        super().write(key, pieces, over=over)

    def sent(self, name: str) -> list[str]:
        return [key for key in self.written if key.startswith(f"{name}/") and key.endswith(".safetensors")]


def steps(root: str | Path | Storage) -> list[int | None]:
    return [checkpoint.step for checkpoint in ckpt.list_checkpoints(root) if checkpoint.committed]


def weights(step: float) -> nn.Linear:
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, step)
    return model


@contextmanager
def managed(root: Path, mirror: object, model: nn.Module, **options: object) -> Iterator[ckpt.StateManager]:
    for name, option in {"bandwidth": "bandwidth", "backlog": "backlog", "mirror_keep": "keep"}.items():
        if name in options:
            mirror = mirror if isinstance(mirror, ckpt.Mirror) else ckpt.Mirror(mirror)  # type: ignore[arg-type]
            mirror = dataclasses.replace(mirror, **{option: options.pop(name)})  # type: ignore[arg-type]
    with ckpt.StateManager(root, model=model, mirror=mirror, **options) as manager:  # type: ignore[arg-type]
        manager.resume()
        yield manager


def run(root: Path, mirror: object, *numbers: int, **options: object) -> None:
    """Save these steps, with weights that say which."""
    model = weights(0)
    with managed(root, mirror, model, **options) as manager:
        for number in numbers:
            nn.init.constant_(model.weight, number)
            manager.progress.step = number
            manager.save_state(wait=True)


def resumed(root: Path, mirror: object) -> tuple[ckpt.Restored, float]:
    model = weights(-1)
    with ckpt.StateManager(root, model=model, mirror=mirror) as manager:  # type: ignore[arg-type]
        restored = manager.load_state()
    return restored, model.weight[0, 0].item()


def test_a_file_that_a_power_failure_has_cut_in_the_mirror_is_sent_again(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    run(root, mirror, 1)
    for name in ("manifest.json", "manifest.copy.json"):
        (mirror / "step-00000001" / name).unlink()
    os.truncate(mirror / "step-00000001" / "model.safetensors", 0)
    run(root, mirror)
    assert steps(mirror) == [1]
    assert intact(mirror)


class TestCopies:
    @pytest.fixture(params=slow_where("s3", ["local", "memory", "s3"]))
    def mirror(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param == "s3":
            return str(request.getfixturevalue("s3"))
        return f"memory://{tmp_path.name}" if request.param == "memory" else str(tmp_path / "mirror")

    def test_a_lost_root_is_made_up_for_by_the_mirror(self, tmp_path: Path, mirror: str) -> None:
        root = tmp_path / "root"
        run(root, mirror, 1, 2)
        assert steps(root) == steps(mirror) == [2, 1]
        assert intact(mirror)
        shutil.rmtree(root)
        restored, value = resumed(root, mirror)
        assert (restored.step, value) == (2, 2.0)
        assert restored.url.startswith(mirror)
        run(root, mirror, 3)
        assert (steps(root), steps(mirror)) == ([3], [3, 2, 1])  # and is the newest, though the root was empty

    def test_a_copy_has_the_names_and_the_bytes_of_the_original(self, tmp_path: Path, mirror: str) -> None:
        root = tmp_path / "root"
        run(root, mirror, 1)
        here, there = LocalStorage(root), open_storage(mirror)
        keys = sorted(entry.key for entry in here.list("step-00000001"))
        assert "step-00000001/model.safetensors" in keys
        assert keys == sorted(entry.key for entry in there.list("step-00000001"))
        assert all(here.read(key) == there.read(key) for key in keys)

    def test_a_checkpoint_that_is_replaced_is_replaced_there(self, tmp_path: Path, mirror: str) -> None:
        model = weights(0)
        with managed(tmp_path / "root", mirror, model) as manager:
            for number in (1.0, 2.0, 3.0):
                nn.init.constant_(model.weight, number)
                manager.save_state("best", wait=True)
        shutil.rmtree(tmp_path / "root")
        assert resumed(tmp_path / "root", mirror)[1] == 3.0
        with managed(tmp_path / "root", mirror, model) as manager:  # where the root knows nothing of the older one
            nn.init.constant_(model.weight, 4.0)
            manager.save_state("best")
        shutil.rmtree(tmp_path / "root")
        assert resumed(tmp_path / "root", mirror)[1] == 4.0
        [copied] = ckpt.list_checkpoints(mirror)
        assert copied.manifest is not None
        listed = {"manifest.json", "manifest.copy.json", *(file.path for file in copied.manifest.files)}
        assert {entry.key for entry in open_storage(mirror).list("best")} == {f"best/{path}" for path in listed}


class TestChoosing:
    def test_the_newest_of_both_is_taken_and_the_roots_own_where_both_have_it(self, tmp_path: Path) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        run(root, mirror, 1, 2)
        assert resumed(root, mirror)[0].url == f"{root}/step-00000002"
        shutil.rmtree(root / "step-00000002")
        restored, value = resumed(root, mirror)
        assert (restored.url, value) == (f"{mirror}/step-00000002", 2.0)
        shutil.rmtree(mirror / "step-00000002")
        assert resumed(root, mirror)[0].url == f"{root}/step-00000001"

    def test_what_is_damaged_in_the_root_is_read_from_the_mirror(self, tmp_path: Path) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        run(root, mirror, 1, 2)
        _flip(root / "step-00000002" / "model.safetensors")
        restored, value = resumed(root, mirror)
        assert (restored.url, value) == (f"{mirror}/step-00000002", 2.0)
        assert "altered" in restored.passed_over["step-00000002"]
        _flip(mirror / "step-00000002" / "model.safetensors")
        restored, value = resumed(root, mirror)
        assert (restored.url, value) == (f"{root}/step-00000001", 1.0)
        assert str(mirror) in restored.passed_over["step-00000002"]

    def test_what_is_damaged_in_the_root_is_not_linked_into_the_next_checkpoint(self, tmp_path: Path) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 1))
        with managed(root, mirror, model) as manager:
            manager.save_state("one", wait=True)
        _flip(root / "one" / "model+frozen.safetensors")
        with managed(root, mirror, model) as manager:
            assert manager.restored is not None
            assert manager.restored.url == f"{mirror}/one"
            manager.save_state("two", wait=True)
        assert ckpt.verify(root / "two") == {"two": []}
        assert ckpt.verify(mirror / "two") == {"two": []}

    def test_by_name_from_either(self, tmp_path: Path) -> None:
        run(tmp_path / "root", tmp_path / "mirror", 1, 2, keep=ckpt.Keep(last=1), mirror_keep=ckpt.Keep(last=5))
        model = weights(-1)
        with ckpt.StateManager(tmp_path / "root", model=model, mirror=tmp_path / "mirror") as manager:
            assert manager.load_state("step-00000001").step == 1
            with pytest.raises(ckpt.MissingError, match="step-00000007"):
                manager.load_state("step-00000007")

    @pytest.mark.slow
    def test_all_ranks_take_the_same_tier(self, tmp_path: Path) -> None:
        run(tmp_path / "root", tmp_path / "mirror", 1, 2)
        _flip(tmp_path / "root" / "step-00000002" / "model.safetensors")
        assert run_ranks(2, _resume_and_save, str(tmp_path)) == [0, 0]
        assert steps(tmp_path / "mirror") == [3, 2, 1]

    def test_a_run_that_has_not_resumed_is_not_put_before_what_the_mirror_has(self, tmp_path: Path) -> None:
        run(tmp_path / "root", tmp_path / "mirror", 1)
        shutil.rmtree(tmp_path / "root")
        manager = ckpt.StateManager(tmp_path / "root", model=weights(0), mirror=tmp_path / "mirror")
        with manager, pytest.raises(ckpt.ConfigError, match="not resumed"):
            manager.save_state(wait=True)


def _resume_and_save(rank: int, folder: str) -> None:
    model = weights(-1)
    with ckpt.StateManager(f"{folder}/root", model=model, mirror=f"{folder}/mirror") as manager:
        restored = manager.resume()
        assert restored is not None
        assert restored.url == f"{folder}/mirror/step-00000002"
        assert model.weight[0, 0].item() == 2.0
        manager.progress.step = 3
        manager.save_state()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class TestTrouble:
    def test_what_does_not_match_its_hashes_is_not_copied(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror = Counting(tmp_path / "mirror")
        model = weights(1)
        with managed(tmp_path / "root", mirror, model) as manager:
            mirror.open.clear()
            manager.save_state("one", wait=True)
            _flip(tmp_path / "root" / "one" / "model.safetensors")
            mirror.open.set()
        assert steps(tmp_path / "mirror") == []
        assert isinstance(manager.mirror_error, ckpt.DamagedError)
        assert "one is not copied" in caplog.text

    def test_while_the_mirror_is_down_training_goes_on_and_the_next_save_tries_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is said once, however long it lasts."""
        caplog.set_level(logging.INFO, logger="ckpt")
        mirror = Counting(tmp_path / "mirror")
        mirror.down = True
        with managed(tmp_path / "root", mirror, weights(1)) as manager:
            for name in ("one", "two"):
                manager.save_state(name, wait=True)
                _until(lambda: manager.mirror_error is not None)
                assert manager.session.mirror is not None
                assert manager.session.mirror._background.done_within(DEADLINE)
            mirror.down = False
            manager.save_state("three", wait=True)
            _until(lambda: manager.mirror_error is None and (tmp_path / "mirror" / "three" / "manifest.json").exists())
        assert intact(tmp_path / "mirror")
        assert caplog.text.count("the mirror is down") == 1
        assert caplog.text.count("can be written again") == 1

    def test_what_is_saved_while_a_copy_fails_is_the_next_one_that_tries_again(self, tmp_path: Path) -> None:
        mirror = _FailsOnce(tmp_path / "mirror")
        with managed(tmp_path / "root", mirror, weights(1)) as manager:
            mirror.open.clear()
            manager.save_state("one", wait=True)
            _until(lambda: manager.session.mirror is not None and manager.session.mirror._current is not None)
            manager.save_state("two", wait=True)
            mirror.open.set()
            _until(lambda: len(steps(tmp_path / "mirror")) == 2)
        assert not mirror.down
        assert intact(tmp_path / "mirror")

    def test_what_fails_while_the_run_ends_is_tried_once_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror = Counting(tmp_path / "mirror")
        with managed(tmp_path / "root", mirror, weights(1)) as manager:
            assert manager.session.mirror is not None
            working = manager.session.mirror._background
            mirror.open.clear()
            mirror.failing = 1
            manager.save_state("one", wait=True)
            joined = working.done_within

            def wait(seconds: float) -> bool:  # the end has begun: now the attempt under way goes on, and fails
                mirror.open.set()
                return joined(seconds)

            monkeypatch.setattr(working, "done_within", wait)
        assert "the mirror is down" in caplog.text
        assert manager.mirror_error is None
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(mirror)] == ["one"]
        assert intact(tmp_path / "mirror")

    @pytest.mark.slow
    def test_a_server_that_is_killed_and_comes_back_gets_what_it_has_missed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving(tmp_path) as server:
            for name, value in environment(server.url).items():
                monkeypatch.setenv(name, value)
            mirror = f"s3://{BUCKET}/copies"
            with managed(tmp_path / "root", mirror, weights(1), storage_options={"deadline": 1.0}) as manager:
                manager.save_state("one", wait=True)
                _await_copy("one", mirror)
                server.kill()
                manager.save_state("two", wait=True)
                _until(lambda: manager.mirror_error is not None)
                server.start()
                manager.save_state("three", wait=True)
            assert manager.mirror_error is None
            assert list(ckpt.verify(mirror).items()) == [("three", []), ("two", []), ("one", [])]

    def test_what_could_not_be_copied_the_next_run_copies(self, tmp_path: Path) -> None:
        mirror = Counting(tmp_path / "mirror")
        mirror.down = True
        run(tmp_path / "root", mirror, 1, 2, 3, keep=ckpt.Keep(last=1))
        assert steps(mirror) == []
        mirror.down = False
        run(tmp_path / "root", mirror)
        assert steps(mirror) == [3, 2]  # as many as may wait

    def test_a_fresh_start_is_refused_while_the_mirror_cannot_be_looked_at(self, tmp_path: Path) -> None:
        run(tmp_path / "root", tmp_path / "mirror", 1)
        mirror = _Unlisted(tmp_path / "mirror")
        assert resumed(tmp_path / "root", mirror)[0].step == 1
        shutil.rmtree(tmp_path / "root")
        manager = ckpt.StateManager(tmp_path / "root", model=weights(0), mirror=mirror)
        with manager, pytest.raises(ckpt.StorageError, match="out of reach"):
            manager.resume()

    def test_older_ones_that_wait_are_left_out_but_never_the_newest(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror = Counting(tmp_path / "mirror")
        with managed(
            tmp_path / "root", mirror, weights(1), keep=ckpt.Keep(last=1), mirror_keep=ckpt.Keep(last=9)
        ) as manager:
            mirror.open.clear()
            for name in ("one", "two", "three", "four", "five"):  # of the two that are skipped one is said
                manager.save_state(name, wait=True)
                if name == "one":
                    _until(lambda: manager.session.mirror is not None and manager.session.mirror._current is not None)
            mirror.open.set()
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "mirror")] == ["five", "four", "one"]
        assert caplog.text.count("skips the copy of") == 1
        assert "skips the copy of two" in caplog.text
        assert intact(tmp_path / "mirror")  # what waits is not removed by retention

    def test_two_runs_do_not_copy_to_one_mirror(self, tmp_path: Path) -> None:
        other = ckpt.StateManager(tmp_path / "b", model=weights(1), mirror=tmp_path / "mirror")
        refused = pytest.raises(ckpt.LockedError, match=f"another run writes to {tmp_path}/mirror")
        with managed(tmp_path / "a", tmp_path / "mirror", weights(1)), other, refused:
            other.resume()

    def test_bytes_in_a_second_are_bounded(self, tmp_path: Path) -> None:
        began = time.monotonic()
        run(tmp_path / "root", tmp_path / "mirror", 1, bandwidth=40_000)
        took = time.monotonic() - began
        [copied] = ckpt.list_checkpoints(tmp_path / "mirror")
        assert copied.manifest is not None
        assert took >= copied.manifest.size / 40_000 > 0.2  # it may take longer, never less

    def test_each_place_keeps_what_its_own_rule_says(self, tmp_path: Path) -> None:
        options = {"keep": ckpt.Keep(last=1), "mirror_keep": ckpt.Keep(last=1, every=2)}
        run(tmp_path / "root", tmp_path / "mirror", 1, 2, 3, 4, 5, backlog=9, **options)
        assert (steps(tmp_path / "root"), steps(tmp_path / "mirror")) == ([5], [5, 4, 2])
        run(tmp_path / "other", tmp_path / "copy", 1, 2, 3, keep=ckpt.Keep(last=2), backlog=9)
        assert steps(tmp_path / "copy") == [3, 2]  # the same, where nothing else is said

    def test_what_had_to_stay_until_it_was_copied_goes_at_the_end(self, tmp_path: Path) -> None:
        mirror = Counting(tmp_path / "mirror")
        with managed(tmp_path / "root", mirror, weights(1), keep=ckpt.Keep(last=1)) as manager:
            mirror.open.clear()
            for name in ("one", "two"):
                manager.save_state(name, wait=True)
            assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "root")] == ["two", "one"]
            mirror.open.set()
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "root")] == ["two"]

    def test_a_run_that_saves_nothing_removes_nothing(self, tmp_path: Path) -> None:
        run(tmp_path / "root", tmp_path / "mirror", 1, 2)
        run(tmp_path / "root", tmp_path / "mirror", keep=ckpt.Keep(last=1))
        assert steps(tmp_path / "root") == [2, 1]

    @pytest.mark.parametrize(
        "wrong", [{"backlog": 0}, {"bandwidth": -1}, {"bandwidth": "fast"}, {"keep": 3}, {"storage_options": "x"}]
    )
    def test_options_that_make_no_sense_are_refused(self, tmp_path: Path, wrong: dict[str, Any]) -> None:
        with pytest.raises(ckpt.ConfigError, match=f"^Mirror: {next(iter(wrong))}="):
            ckpt.Mirror(tmp_path, **wrong)

    def test_the_root_itself_is_no_mirror(self, tmp_path: Path) -> None:
        with pytest.raises(ckpt.ConfigError, match="is the same place as the root"):
            ckpt.StateManager(str(tmp_path), model=weights(0), mirror=str(tmp_path))

    def test_what_a_yaml_file_says(self, tmp_path: Path) -> None:
        (tmp_path / "ckpt.yaml").write_text(
            f"root: {tmp_path}/root\nkeep: {{last: 1}}\nmirror: {{url: {tmp_path}/mirror, keep: {{last: 2}}}}\n"
        )
        with ckpt.StateManager.from_config(tmp_path / "ckpt.yaml", model=weights(1)) as manager:
            for name in ("one", "two", "three"):
                manager.save_state(name, wait=True)
                _await_copy(name, tmp_path / "mirror")
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "mirror")] == ["three", "two"]

    def test_frozen_weights_are_sent_once(self, tmp_path: Path) -> None:
        head = nn.Linear(600, 1)
        model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), head)
        mirror = Counting(tmp_path / "mirror")
        with managed(tmp_path / "root", mirror, model) as manager:
            for name in ("one", "two"):
                nn.init.constant_(head.weight, len(name))
                manager.save_state(name, wait=True)
                _await_copy(name, mirror)
        assert "one/model+frozen.safetensors" in mirror.written
        assert "two/model+frozen.safetensors" not in mirror.written
        assert intact(tmp_path / "mirror")


class _FailsOnce(Counting):
    """A mirror that is down for the first write."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.down = True

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        try:
            super().write(key, pieces, over=over)
        finally:
            self.down = False


class _Unlisted(LocalStorage):
    def list(self, prefix: str = "") -> Iterator[ckpt.storage.Entry]:
        raise ckpt.TransientError("the mirror is out of reach")


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def _await_copy(name: str, mirror: str | Path | Storage) -> None:
    there = open_storage(mirror)
    _until(lambda: name in {checkpoint.name for checkpoint in ckpt.list_checkpoints(there) if checkpoint.committed})


def _await_step_beyond(reached: int, place: str, job: BaseProcess, folder: Path) -> None:
    """A job that has died says of what, and one that makes no progress what it does."""
    end = time.monotonic() + DEADLINE
    there = open_storage(place)  # once: a client of S3 takes longer to make than the job to save
    while max((step or 0 for step in steps(there)), default=0) <= reached:
        assert job.is_alive(), (folder / "failure-0").read_text()
        if time.monotonic() > end:
            os.kill(job.pid or 0, signal.SIGUSR1)
            time.sleep(1.0)
            raise AssertionError((folder / "job.log").read_text())
        time.sleep(0.02)


def _train(rank: int, root: str, mirror: str) -> None:
    """Save forever, to a mirror that takes its time."""
    log = (Path(root).parent / "job.log").open("w")
    logging.basicConfig(stream=log, force=True)
    faulthandler.register(signal.SIGUSR1, log)
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    storage = open_storage(mirror) if "://" in mirror else mirror
    with ckpt.StateManager(
        root, model=model, save_every=1, keep=ckpt.Keep(last=2), mirror=ckpt.Mirror(storage, bandwidth=300_000)
    ) as manager:
        manager.resume()
        while True:
            with torch.no_grad():
                model.weight += 1
            manager.step()
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "s3"])
def test_after_every_kill_both_places_hold_a_whole_checkpoint(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    root, mirror = tmp_path / "root", str(request.getfixturevalue("s3") if kind == "s3" else tmp_path / "mirror")
    moments = random.Random(2025)
    reached = 0
    for _ in range(KILLS):
        job = start_alone(str(tmp_path), _train, str(root), mirror)
        _await_step_beyond(reached, mirror, job, tmp_path)
        time.sleep(moments.random() * 0.2)
        os.kill(job.pid or 0, signal.SIGKILL)
        job.join(DEADLINE)
        for place in (root, mirror):
            newest = next(found for found in ckpt.list_checkpoints(place) if found.committed)
            assert ckpt.verify(newest.url)[newest.name] == []
            model = nn.Linear(64, 64, bias=False)
            with ckpt.StateManager(place, model=model) as manager:
                restored = manager.load_state()
            assert torch.equal(model.weight, torch.full((64, 64), float(restored.step)))
        assert restored.step > reached
        reached = restored.step


@pytest.mark.slow
def test_a_copy_that_was_cut_off_goes_on_and_sends_no_file_twice(tmp_path: Path) -> None:
    """The copy of step 1 is cut off in its second file, as by SIGKILL: nothing is cleaned up."""
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    job = start_alone(str(tmp_path), _save_once_to_a_mirror_that_gets_stuck, str(root), str(mirror))
    _until(lambda: (mirror / "stuck").exists())
    os.kill(job.pid or 0, signal.SIGKILL)
    job.join(DEADLINE)
    assert steps(mirror) == []
    assert list(mirror.rglob(".*ckpt-tmp"))
    [there] = (path.name for path in (mirror / "step-00000001").glob("[!.]*.safetensors"))
    again = Counting(mirror)
    with ckpt.StateManager(root, model=_parts(), mirror=again) as manager:
        manager.resume()
    assert steps(mirror) == [1]
    assert f"step-00000001/{there}" not in again.written
    assert len(again.sent("step-00000001")) == 2
    assert intact(mirror)
    assert not list(mirror.rglob(".*ckpt-tmp"))


def _parts() -> dict[str, nn.Module]:
    return {name: nn.Linear(100, 100) for name in ("a", "b", "c")}


class _Stuck(Counting):
    """A mirror that takes one file of tensors, and of the next one the beginning alone."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        second = key.endswith(".safetensors") and bool(self.sent("step-00000001"))
        super().write(key, self._begun(pieces) if second else pieces, over=over)

    def _begun(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        yield next(iter(pieces))
        Path(self.url, "stuck").touch()
        threading.Event().wait()


def _save_once_to_a_mirror_that_gets_stuck(rank: int, root: str, mirror: str) -> None:
    with ckpt.StateManager(root, model=_parts(), mirror=_Stuck(Path(mirror))) as manager:
        manager.resume()
        manager.progress.step = 1
        manager.save_state(wait=True)
