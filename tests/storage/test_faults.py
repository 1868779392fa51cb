"""Whatever a network or a server does to a save: it succeeds by trying again, or fails and says so. Nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer, Storage, open_storage
from tests.helpers.faulty_proxy import FAULTS, NOT_DELETED, FaultyProxy, random_faults
from tests.helpers.places import PassedOn, intact
from tests.helpers.processes import DEADLINE, start_alone
from tests.helpers.seaweed import BUCKET, PART, Server, environment, serving, upload_in_small_parts

pytestmark = pytest.mark.slow

SCHEDULES = int(os.environ.get("CKPT_FAULTS", "2"))
KILLS = int(os.environ.get("CKPT_KILLS", "2"))
LARGE = PART + (1 << 20)  # bytes: an upload in two parts


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    upload_in_small_parts(monkeypatch)


@pytest.fixture
def proxied(server: Server, s3: str) -> Any:
    with FaultyProxy(server.port) as proxy:
        yield proxy


def reached_through(proxy: FaultyProxy, **options: Any) -> dict[str, Any]:
    """Options with patience: where nothing stalls, a machine that is slow must not seem to."""
    return {"endpoint_url": proxy.url, "deadline": 60.0, "stall": 30.0, **options}


def of_step(step: int, size: int = LARGE) -> nn.Linear:
    model = nn.Linear(1, size // 4, bias=False)
    nn.init.constant_(model.weight, float(step))
    return model


def check(root: str, saved: list[int], size: int = LARGE) -> None:
    """What is committed verifies, what was reported as saved is among it, and the newest one loads."""
    found = {checkpoint.name: checkpoint for checkpoint in ckpt.list_checkpoints(root) if checkpoint.committed}
    assert {f"step-{step}" for step in saved} <= set(found)
    assert {name: ckpt.verify(f"{root}/{name}")[name] for name in found} == {name: [] for name in found}
    if found:
        model = of_step(0, size)
        with ckpt.StateManager(root, model=model) as manager:
            restored = manager.load_state()
        assert restored.name == next(iter(found))
        assert torch.equal(model.weight, of_step(int(restored.name[5:]), size).weight)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_of_each_kind_is_overcome(proxied: FaultyProxy, s3: str, fault: str) -> None:
    storage = open_storage(s3, **reached_through(proxied, stall=1.0 if fault == "stall" else 30.0))
    data = os.urandom(LARGE)

    def after(method: str) -> None:
        """Let the next request by that method go wrong."""
        left = [fault]
        proxied.plan = lambda asked, path: left.pop() if asked == method and left else None

    for number, method in enumerate(("PUT", "POST")):
        after(method)
        storage.write(f"large-{number}", [data])
        after(method)
        storage.write(f"small-{number}", [b"small"], over=None)
    after("HEAD")
    assert storage.version("small-0") is not None
    after("GET")
    assert {entry.key for entry in storage.list()} == {"large-0", "small-0", "large-1", "small-1"}
    after("GET")
    buffer = bytearray(len(data))
    storage.read_into("large-1", 0, memoryview(buffer))
    assert buffer == data or fault == "altered"  # which is for the hashes of a checkpoint to notice
    after("GET")
    assert storage.read("small-0") == b"small"
    assert proxied.done[fault] >= 7
    assert storage.read("large-0") == storage.read("large-1") == data


def test_a_conditional_write_whose_answer_was_lost_has_succeeded(proxied: FaultyProxy, s3: str) -> None:
    storage = open_storage(s3, **reached_through(proxied))
    for data, ends in (([b"small"], "PUT"), ([os.urandom(LARGE)], "POST")):
        losses = iter(["answer lost"] * 2)

        def lose(method: str, path: str, ends: str = ends, losses: Iterator[str] = losses) -> str | None:
            return next(losses, None) if method == ends and "uploads" not in path else None

        proxied.plan = lose
        storage.write("object", data, over=None)
        assert storage.read("object") == data[0]
        assert proxied.done["answer lost"] >= 2
        proxied.plan = lambda method, path: None
        with pytest.raises(ckpt.ConflictError):
            storage.write("object", data, over=None)
        storage.delete(["object"])


def test_a_server_that_never_says_100_continue_gets_the_body_all_the_same(proxied: FaultyProxy, s3: str) -> None:
    proxied.says_continue = False
    storage = open_storage(s3, **reached_through(proxied))
    for key, data in (("small", b"small"), ("large", os.urandom(LARGE))):
        storage.write(key, [data])
        assert storage.read(key) == data
    assert set(proxied.done) == {"none"}


def test_a_write_that_a_proxy_repeats_is_no_conflict_with_itself(proxied: FaultyProxy, s3: str) -> None:
    proxied.plan = lambda method, path: "repeated"
    storage = open_storage(s3, **reached_through(proxied))
    for number, data in enumerate((b"small", os.urandom(LARGE))):
        storage.write(f"object-{number}", [data], over=None)
        storage.write(f"object-{number}", [data[::-1]], over=storage.version(f"object-{number}"))
        assert storage.read(f"object-{number}") == data[::-1]
        with pytest.raises(ckpt.ConflictError):
            storage.write(f"object-{number}", [data], over=None)
    with pytest.raises(ckpt.ConflictError):
        storage.write("object-0", [b"other"], over=storage.version("object-1"))
    with pytest.raises(ckpt.ConflictError):
        storage.write("absent", [b"other"], over=storage.version("object-1"))


def test_a_run_whose_every_request_is_repeated_holds_its_lock_saves_and_resumes(proxied: FaultyProxy, s3: str) -> None:
    proxied.plan = lambda method, path: "repeated"
    options = reached_through(proxied)
    for step in (1, 2):
        with ckpt.StateManager(s3, model=nn.Linear(4, 4), storage_options=options) as manager:
            restored = manager.resume()
            assert (restored.step if restored else 0) == step - 1
            manager.step()
            manager.save_state(wait=True)
    assert [found.step for found in ckpt.list_checkpoints(s3)] == [2, 1]
    assert intact(s3)


@pytest.mark.parametrize("file", ["model.safetensors", "rank-00000.json", "state.json"])
def test_an_answer_that_was_altered_on_its_way_is_asked_for_again_and_no_older_checkpoint_is_taken(
    proxied: FaultyProxy, s3: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.StateManager(s3, model=nn.Linear(64, 64)) as manager:
        for name in ("a", "b"):
            manager.save_state(name, wait=True)
    left = ["altered"]
    proxied.plan = lambda method, path: left.pop() if method == "GET" and f"b/{file}" in path and left else None
    options = reached_through(proxied)
    with ckpt.StateManager(s3, model=nn.Linear(64, 64), storage_options=options) as manager:
        restored = manager.load_state()
    assert not left
    assert restored.name == "b"
    assert not restored.passed_over
    assert "the first read returned altered bytes" in caplog.text


def test_what_a_bulk_delete_has_left_is_tried_again(proxied: FaultyProxy, s3: str) -> None:
    storage = open_storage(s3, **reached_through(proxied))
    storage.write("object", [b"x"])
    left = [NOT_DELETED] * 2
    proxied.plan = lambda method, path: left.pop() if "delete" in path and left else None
    storage.delete(["object"])
    assert proxied.done[NOT_DELETED] == 2
    assert list(storage.list()) == []


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_under_a_random_schedule_of_faults_nothing_is_lost(proxied: FaultyProxy, s3: str, seed: int) -> None:
    saved = []
    options = reached_through(proxied, deadline=5.0, stall=1.0)
    with ckpt.StateManager(s3, model=(model := of_step(0)), storage_options=options) as manager:
        manager.resume()
        proxied.plan = random_faults(seed, share=0.05 + 0.1 * (seed % 4))
        for step in (1, 2):
            nn.init.constant_(model.weight, float(step))
            try:
                manager.save_state(f"step-{step}", wait=True)
            except ckpt.StorageError:
                continue
            saved.append(step)
        proxied.plan = lambda method, path: None
    check(s3, saved)


def test_the_newest_checkpoint_is_not_passed_over_because_it_cannot_be_reached(proxied: FaultyProxy, s3: str) -> None:
    options = reached_through(proxied, deadline=1.0)
    with ckpt.StateManager(s3, model=of_step(0, 1 << 20), storage_options=options) as manager:
        for name in ("step-1", "step-2"):
            manager.save_state(name, wait=True)
        proxied.plan = lambda method, path: "slow down" if method == "GET" and "step-2/model" in path else None
        with pytest.raises(ckpt.TransientError, match=r"can't read step-2 now: .*SlowDown.* not load an older one"):
            manager.load_state()
        proxied.plan = lambda method, path: "slow down" if method == "GET" and "step-1/model" in path else None
        assert manager.load_state().name == "step-2"


def test_a_server_that_stays_away_is_a_transient_error_after_the_deadline(proxied: FaultyProxy, s3: str) -> None:
    storage = open_storage(s3, **reached_through(proxied, deadline=1.0))
    storage.write("object", [b"x"])
    proxied.plan = lambda method, path: "slow down"
    with pytest.raises(
        ckpt.TransientError, match=r"could not read .*/object: the server says SlowDown \(503\)\. Tried"
    ):
        storage.read("object")
    proxied.plan = lambda method, path: None
    assert storage.read("object") == b"x"


class _KilledInTheMiddle(PassedOn):
    """The server is killed when two parts of a file of step 2 are on their way, and a third is to come."""

    def __init__(self, root: str, server: Server) -> None:
        super().__init__(root)
        self.inner = open_storage(root, stall=2.0, deadline=60.0)
        self.server = server
        self.killed = threading.Event()

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self.inner.write(key, self._cut_off(pieces) if key == "step-2/model.safetensors" else pieces, over=over)

    def _cut_off(self, pieces: Iterable[Buffer]) -> Iterator[memoryview]:
        whole, sent = b"".join(pieces), 0
        for sent in range(0, len(whole), PART):
            if sent == 2 * PART:
                self.server.kill()
                self.killed.set()
            yield memoryview(whole)[sent : sent + PART]


def test_a_server_that_is_killed_during_a_save_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}/run"
        storage, size = _KilledInTheMiddle(root, server), 3 * PART
        model = of_step(1, size)
        with ckpt.StateManager(storage, model=model) as manager:
            manager.save_state("step-1", wait=True)
            nn.init.constant_(model.weight, 2.0)
            manager.save_state("step-2")
            assert storage.killed.wait(DEADLINE)
            nn.init.constant_(model.weight, 3.0)  # training goes on
            back = threading.Timer(1.0, server.start)
            back.start()
            saved = [1]
            try:
                manager.wait()
                saved.append(2)
            except ckpt.StorageError:
                back.join()
            back.join()
            manager.save_state("step-3", wait=True)
        check(root, [*saved, 3], size)


def _save_forever(rank: int, root: str) -> None:
    upload_in_small_parts(pytest.MonkeyPatch())
    model = of_step(0)
    with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=2)) as manager:
        restored = manager.resume()
        step = int(restored.name[5:]) if restored else 0
        while True:
            step += 1
            nn.init.constant_(model.weight, float(step))
            manager.save_state(f"step-{step}")


def test_after_every_kill_during_an_upload_the_newest_checkpoint_is_whole(
    s3: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moments, reached, storage = random.Random(7), 0, open_storage(s3)
    for _ in range(KILLS):
        job = start_alone(str(tmp_path), _save_forever, s3)
        _await_progress(storage, reached)
        time.sleep(moments.random() * 0.5)
        os.kill(job.pid or 0, signal.SIGKILL)
        job.join(DEADLINE)
        model = of_step(0)
        with ckpt.StateManager(s3, model=model) as manager:
            restored = manager.load_state()
        step = int(restored.name[5:])
        assert step > reached, "a committed checkpoint was lost"
        assert torch.equal(model.weight, of_step(step).weight)
        reached = step
    assert {name: wrong for name, wrong in ckpt.verify(s3).items() if "never committed" not in str(wrong)} == {
        checkpoint.name: [] for checkpoint in ckpt.list_checkpoints(s3) if checkpoint.committed
    }
    capfd.readouterr()


def _await_progress(storage: Storage, reached: int) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        manifests = [entry.key for entry in storage.list() if entry.key.endswith("/manifest.json")]
        if max((int(key[5:].partition("/")[0]) for key in manifests), default=0) > reached:
            return
        time.sleep(0.05)
    raise AssertionError("the process made no progress")
