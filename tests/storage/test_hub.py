"""Checkpoints on the Hub: the real client, against a server that stands in for it."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root.signing import new_key
from ckpt.storage import HubStorage, Storage, open_storage
from ckpt.storage.hub.download import _is_intact
from ckpt.storage.hub.repo import HubFile, translated_errors
from tests.helpers.hostile_bucket import Reply
from tests.helpers.hub_server import HubServer, connect
from tests.helpers.places import intact
from tests.helpers.processes import DEADLINE, run_alone, run_ranks, start_alone
from tests.helpers.sharded import fsdp2, plain, whole
from tests.helpers.storage_contract import StorageContract, sizes

REPO = "me/runs"
ROOT = f"hub://{REPO}/mrpc"

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning", "ignore:torch.distributed is")


@pytest.mark.slow
class TestHubStorage(StorageContract):
    @pytest.fixture
    def storage(self, hub: HubServer) -> Storage:
        return HubStorage("me/runs@some-branch/some/path", interval=0)

    def test_the_repository_is_made_private(self, hub: HubServer, storage: Storage) -> None:
        assert sizes(storage) == {}
        assert not hub.sent("POST")
        storage.write("x", [b"x"])
        assert hub.store.repo("me/runs")["private"]
        assert hub.files("me/runs", "some-branch") == {"some/path/x": b"x"}
        assert hub.files("me/runs") == {}

    def test_listings_of_many_pages_are_whole(self, hub: HubServer, storage: Storage) -> None:
        hub.page = 2
        assert isinstance(storage, HubStorage)
        storage.publish({f"folder/{index}": storage.stage("x", [b"x"]) for index in range(5)})
        assert set(sizes(storage)) == {f"folder/{index}" for index in range(5)}

    def test_a_link_moves_no_bytes(self, hub: HubServer, storage: Storage) -> None:
        storage.write("a/weights.safetensors", [bytes(100_000)])
        before = len(hub.requests)
        storage.link("a/weights.safetensors", "b/weights.safetensors")
        assert sum(request.size for request in hub.requests[before:]) < 2000
        assert storage.read("b/weights.safetensors") == bytes(100_000)

    def test_of_a_large_file_only_what_is_asked_for_is_fetched(self, hub: HubServer, storage: Storage) -> None:
        storage.write("large.bin", [bytes(range(256)) * 100])
        served: list[int] = []
        answer = hub.answer

        def counted(*call: Any) -> Any:
            found = answer(*call)
            served.append(len(found.body))
            return found

        hub.answer = counted  # type: ignore[method-assign, assignment]
        assert storage.read("large.bin", 1000, 1010) == (bytes(range(256)) * 100)[1000:1010]
        assert sum(served) < 2000

    def test_bytes_of_a_server_that_knows_no_ranges_are_not_taken_for_others(
        self, hub: HubServer, storage: Storage
    ) -> None:
        storage.write("large.bin", [bytes(range(256)) * 100])
        answer = hub.answer
        hub.answer = lambda method, target, body, headers: answer(method, target, body, {})  # type: ignore[method-assign]
        with pytest.raises(ckpt.StorageError, match="asked for 10 bytes, and the Hub sent 25600"):
            storage.read("large.bin", 1000, 1010)

    def test_a_listing_has_what_is_committed_while_it_is_made(self, hub: HubServer) -> None:
        storage = HubStorage("me/runs", interval=3600)
        storage.write("a", [b"a"])
        storage.publish({"b": storage.stage("b", [b"b"])})  # waits for the next commit

        def gate(method: str, path: str) -> None:
            if "/tree/" in path:
                hub.gate = lambda method, path: None
                storage.settle()

        hub.gate = gate
        assert set(sizes(storage)) == {"a", "b"}
        assert len(hub.commits("me/runs")) == 2

    def test_what_comes_after_settle_waits_for_the_next_commit_again(self, hub: HubServer) -> None:
        storage = HubStorage("me/runs", interval=3600)
        receipts = {key: storage.stage(key, [b"x"]) for key in ("a", "b", "c")}
        storage.publish({"a": receipts["a"]})  # is committed at once
        storage.publish({"b": receipts["b"]})
        with storage._pending._guard:  # the thread that would commit b is told, and comes when c is there too
            storage.settle()
            storage.publish({"c": receipts["c"]})
        while storage._pending._wake.is_set():
            time.sleep(0.01)  # until the thread that commits has looked
        assert set(hub.files("me/runs")) == {"a", "b"}
        storage.settle()
        assert set(hub.files("me/runs")) == {"a", "b", "c"}


@pytest.mark.parametrize("url", ["hub://", "hub://me", "hub://me/runs@/x", "hub://me/runs/../x", "hub://a b/c"])
def test_what_names_no_repository_is_refused(url: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=r"names no repository|is not a key"):
        open_storage(url)


def test_a_url_names_a_repository_a_revision_and_a_path() -> None:
    storage = open_storage("hub://me/runs@refs%2Fpr%2F1/a/b/")
    assert isinstance(storage, HubStorage)
    assert (storage.repo.id, storage.repo.revision, storage.folder) == ("me/runs", "refs/pr/1", "a/b")
    assert storage.url == "hub://me/runs@refs%2Fpr%2F1/a/b"


def test_options_are_checked_and_a_token_is_one() -> None:
    storage = open_storage("hub://me/runs", token="hf_x", interval=5)
    assert isinstance(storage, HubStorage)
    assert storage.repo.token == "hf_x"
    with pytest.raises(
        ckpt.ConfigError, match="accepts the storage_options deadline, interval, stall, token, but not profile"
    ):
        open_storage("hub://me/runs", token="hf_x", profile="me")
    with pytest.raises(ckpt.ConfigError, match="interval=-1 must be the number of seconds"):
        open_storage("hub://me/runs", interval=-1)


def _write_large(rank: int, home: str, url: str) -> None:
    connect(url, home)
    tempfile.tempdir = home
    HubStorage(REPO).write("large.bin", [bytes(1 << 20), b"x"])


@pytest.mark.slow
def test_a_write_that_is_killed_leaves_no_file_behind(hub: HubServer, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    job = start_alone(str(tmp_path), _write_large, str(home), hub.url)

    def gate(method: str, path: str) -> None:
        if method == "PUT":
            os.kill(job.pid or 0, signal.SIGKILL)

    hub.gate = gate
    job.join(DEADLINE)
    assert job.exitcode == -signal.SIGKILL
    assert [path for path in home.iterdir() if path.is_file()] == []
    hub.gate = lambda method, path: None
    assert run_alone(_write_large, str(home), hub.url) == 0
    assert hub.files(REPO)["large.bin"] == bytes(1 << 20) + b"x"


@pytest.mark.slow
def test_a_gated_repository_is_not_taken_for_an_empty_one(hub: HubServer) -> None:
    hub.fail("/api/models/", 403, X_Error_Code="GatedRepo", times=99)
    for look in (ckpt.list_checkpoints, lambda url: ckpt.load_model(url, model_of(0.0))):
        with pytest.raises(ckpt.DeniedError, match="Ask for access on its page"):
            look(ROOT)


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(8, 8, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def manager_for(root: Any, model: nn.Module, **options: Any) -> ckpt.StateManager:
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0, momentum=0.9
    )
    return ckpt.StateManager(root, model=model, optimizer=optimizer, **options)


def advance(manager: ckpt.StateManager, value: float) -> None:
    with torch.no_grad():
        next(manager.unwrap().parameters()).fill_(value)
    manager.step(metrics={"loss": 1 / value})


def _train(rank: int, home: str, url: str, token: str, steps: int) -> None:
    connect(url, home, token)
    model = model_of(0.0)
    with manager_for(ROOT, model, save_every=2) as manager:
        restored = manager.resume()
        assert (restored.step if restored else 0) == steps - 4
        assert torch.equal(model.weight, torch.full((8, 8), float(steps - 4)))
        for step in range(steps - 3, steps + 1):
            advance(manager, float(step))


@pytest.mark.slow
def test_a_run_goes_on_in_a_new_process_from_a_private_repository(hub: HubServer, tmp_path: Path) -> None:
    hub.token = "hf_private"
    for steps in (4, 8):
        assert run_alone(_train, str(tmp_path / "home"), hub.url, hub.token, steps) == 0
    saved = {path.split("/")[1] for path in hub.files(REPO)}
    assert saved == {f"step-{step:08d}" for step in (2, 4, 6, 8)}
    assert len(hub.commits(REPO)) == 4  # in each run the first save, and all others when it ended


@pytest.mark.slow
def test_a_private_repository_without_a_token_is_not_taken_for_an_empty_one(hub: HubServer) -> None:
    with manager_for(ROOT, model_of(1.0)) as manager:
        manager.save_state("x", wait=True)
    hub.token = "hf_private"
    with pytest.raises(ckpt.StorageError, match=r"401 .*token is missing or invalid"):
        manager_for(ROOT, model_of(0.0)).resume()


@pytest.mark.slow
class TestCommits:
    def test_a_checkpoint_is_one_commit_and_is_verified_when_read(self, hub: HubServer, tmp_path: Path) -> None:
        with manager_for(ROOT, model_of(1.0)) as manager:
            manager.save_state("first", wait=True)
            advance_to(manager, 2.0)
            manager.save_state("second", wait=True)
        assert len(hub.commits(REPO)) == 2
        weights = hub.store.files(hub.head(REPO))["mrpc/second/model.safetensors"].lfs
        damage(hub.store.folder / "lfs" / str(weights))
        assert set(ckpt.verify(ROOT)["second"]) != set()
        model = model_of(0.0)
        with manager_for(ROOT, model) as manager:
            assert manager.load_state().name == "first"
        assert torch.equal(model.weight, torch.full((8, 8), 1.0))

    def test_saves_soon_after_a_commit_share_the_next_one(self, hub: HubServer) -> None:
        storage = HubStorage(f"{REPO}/mrpc", interval=3600)
        with manager_for(storage, model_of(0.0), save_every=1, keep=ckpt.Keep(last=2)) as manager:
            manager.resume()
            for step in range(1, 6):
                advance(manager, float(step))
            manager.session.saver._queue.wait()
            assert {key.partition("/")[0] for key in sizes(storage)} == {"step-00000004", "step-00000005"}
            assert {path.split("/")[1] for path in hub.files(REPO)} == {"step-00000001"}
            manager.wait()
            assert {path.split("/")[1] for path in hub.files(REPO)} == {"step-00000004", "step-00000005"}
        assert len(hub.commits(REPO)) == 2

    def test_a_save_that_is_waited_for_is_committed_at_once(self, hub: HubServer) -> None:
        with manager_for(HubStorage(f"{REPO}/mrpc", interval=3600), model_of(0.0)) as manager:
            for name in ("a", "b", "c"):
                manager.save_state(name, wait=True)
                assert f"mrpc/{name}/manifest.json" in hub.files(REPO)

    def test_what_waits_is_committed_when_the_program_ends_and_lost_when_it_is_killed(
        self, hub: HubServer, tmp_path: Path
    ) -> None:
        assert run_alone(_save_twice_and_end, str(tmp_path), hub.url, "end") == 0
        assert {path.split("/")[1] for path in hub.files(REPO)} == {"end-1", "end-2"}
        assert run_alone(_save_twice_and_end, str(tmp_path), hub.url, "killed", dies=True) == -signal.SIGKILL
        assert {path.split("/")[1] for path in hub.files(REPO)} == {"end-1", "end-2", "killed-1"}
        assert intact(ROOT)

    def test_a_replaced_checkpoint_leaves_nothing_of_the_older_one(self, hub: HubServer) -> None:
        model = model_of(1.0)
        with manager_for(ROOT, model) as manager:
            for value in (1.0, 2.0, 3.0):
                nn.init.constant_(model.weight, value)
                manager.save_state("best", wait=True)
        assert len(hub.commits(REPO)) == 3
        assert sum(path.endswith(".safetensors") for path in hub.files(REPO)) == 1
        assert intact(ROOT)

    def test_frozen_weights_are_sent_once(self, hub: HubServer) -> None:
        frozen, trained = nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 2)
        with manager_for(ROOT, nn.Sequential(frozen, trained)) as manager:
            manager.save_state("a", wait=True)
            nn.init.zeros_(trained.weight)
            manager.save_state("b", wait=True)
        large = [request.size for request in hub.sent("PUT /lfs/") if request.size > 1_000_000]
        assert len(large) == 1
        assert intact(ROOT)

    def test_a_token_that_may_not_make_a_repository_may_write_to_one_that_is_there(self, hub: HubServer) -> None:
        hub.fail("/api/repos/create", 403, times=99)

        def write() -> None:
            storage = HubStorage(REPO, interval=0)
            storage.write("a", [b"a"])
            storage.settle()

        with pytest.raises(ckpt.DeniedError):
            write()
        hub.store.create(REPO, private=True)
        write()
        assert hub.files(REPO) == {"a": b"a"}

    def test_two_writers_at_once_both_commit_one_on_top_of_the_other(self, hub: HubServer) -> None:
        hub.store.create(REPO, private=True)
        meeting = threading.Barrier(2)
        left = [2]

        def gate(method: str, path: str) -> None:
            if "/commit/" in path and left[0]:
                left[0] -= 1
                meeting.wait(120)  # both have seen the same head

        hub.gate = gate
        writers = [threading.Thread(target=_save_alone, args=(name,)) for name in ("a", "b")]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert len(hub.sent("/commit/")) == 3
        assert len(hub.commits(REPO)) == 2
        for name in ("a", "b"):
            assert intact(f"hub://{REPO}/{name}")

    @pytest.mark.usefixtures("impatient")
    def test_a_commit_whose_answer_was_lost_is_not_made_twice(self, hub: HubServer) -> None:
        with manager_for(ROOT, model_of(1.0)) as manager:
            hub.fail("/commit/", cut="after")
            manager.save_state("a", wait=True)
        assert len(hub.commits(REPO)) == 1

    @pytest.mark.usefixtures("impatient", "impatient_client")
    def test_a_commit_that_was_made_while_nobody_could_be_asked_is_not_made_again(self, hub: HubServer) -> None:
        storage = HubStorage(REPO, interval=3600)
        storage.write("a", [b"a"])
        storage.publish({"b": storage.stage("b", [b"b"]), "c.bin": storage.stage("c.bin", [b"c"])}, gone=["a"])
        hub.fail("/commit/", cut="after")
        hub.fail("/commits/", 503, times=99)
        with pytest.raises(ckpt.TransientError):
            storage.settle()
        hub.faults.clear()
        storage.settle()
        assert len(hub.commits(REPO)) == 2
        assert hub.files(REPO) == {"b": b"b", "c.bin": b"c"}

    def test_a_commit_that_fails_is_told_and_made_up_for_by_the_next(self, hub: HubServer) -> None:
        with manager_for(ROOT, model_of(1.0)) as manager:
            manager.save_state("a", wait=True)
            hub.fail("/commit/", 403)
            with pytest.raises(ckpt.StorageError, match="the token may not do that"):
                manager.save_state("b", wait=True)
            assert {path.split("/")[1] for path in hub.files(REPO)} == {"a"}
            manager.save_state("c", wait=True)
        assert {path.split("/")[1] for path in hub.files(REPO)} == {"a", "b", "c"}
        assert len(hub.commits(REPO)) == 2
        assert intact(ROOT)

    def test_a_first_save_that_fails_is_told_and_leaves_nothing(self, hub: HubServer) -> None:
        with manager_for(ROOT, model_of(1.0)) as manager:
            hub.fail("/commit/", 403)
            with pytest.raises(ckpt.StorageError, match="the token may not do that"):
                manager.save_state("a", wait=True)
            manager.save_state("b", wait=True)
        assert {path.split("/")[1] for path in hub.files(REPO)} == {"b"}


def advance_to(manager: ckpt.StateManager, value: float) -> None:
    with torch.no_grad():
        next(manager.unwrap().parameters()).fill_(value)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _save_alone(name: str) -> None:
    with manager_for(f"hub://{REPO}/{name}", model_of(1.0)) as manager:
        manager.save_state("x", wait=True)


def _save_twice_and_end(rank: int, home: str, url: str, word: str) -> None:
    connect(url, home)
    manager = manager_for(HubStorage(f"{REPO}/mrpc", interval=3600), model_of(1.0))
    manager.resume()
    for name in (f"{word}-1", f"{word}-2"):
        manager.save_state(name)
    manager.session.saver._queue.wait()
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def _save_sharded(rank: int, home: str, url: str) -> None:
    connect(url, home)
    model = fsdp2(seed=4)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(ROOT, model=model, optimizer=optimizer) as manager:
        manager.progress.step = 7
        manager.save_state("step-00000007", wait=True)
    other = fsdp2(seed=5)
    assert ckpt.load_model(f"{ROOT}/step-00000007", other) == {}
    _compare(whole(other.state_dict()), plain(4).state_dict())


def _compare(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def sharded(hub: HubServer, tmp_path: Path) -> HubServer:
    """A checkpoint of two ranks: each has sent its own pieces, and one of them has committed."""
    assert run_ranks(2, _save_sharded, str(tmp_path / "home"), hub.url) == [0, 0]
    assert len(hub.commits(REPO)) == 1
    return hub


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_sharded_checkpoint_is_one_commit_and_comes_back_in_every_way(
    sharded: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = plain(5)
    ckpt.load_model(ROOT, model)
    _compare(model.state_dict(), plain(4).state_dict())
    ckpt.push_to_hub(f"{ROOT}/step-00000007", "me/published")
    again = plain(5)
    ckpt.load_model("hub://me/published", again)
    _compare(again.state_dict(), plain(4).state_dict())
    pulled = CliRunner().invoke(main, ["pull", REPO, str(tmp_path / "back"), "--step", "7"])
    assert pulled.exit_code == 0, pulled.output
    assert intact(tmp_path / "back")
    listed = CliRunner().invoke(main, ["ls", ROOT])
    assert "step-00000007" in listed.output
    missing = CliRunner().invoke(main, ["pull", REPO, str(tmp_path / "back"), "--step", "8"])
    assert missing.exit_code == 1
    assert "has no checkpoint for step 8. It has: mrpc/step-00000007" in missing.output
    sharded.close()
    _without_network(tmp_path, capfd)


def _without_network(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    model = plain(5)
    ckpt.load_model("hub://me/published", model)
    _compare(model.state_dict(), plain(4).state_dict())
    assert "of hub://me/published from the cache" in capfd.readouterr().err
    ckpt.load_model(f"{ROOT}/step-00000007", again := plain(5))
    _compare(again.state_dict(), plain(4).state_dict())
    assert "from the cache" in capfd.readouterr().err
    assert ckpt.pull(REPO, tmp_path / "offline", step=7) == str(tmp_path / "offline" / "step-00000007")
    assert "from the cache" in capfd.readouterr().err
    assert intact(tmp_path / "offline")
    with pytest.raises(ckpt.TransientError, match="The cache has no complete copy of hub://me/other either"):
        ckpt.pull("me/other", tmp_path / "other")


@pytest.mark.slow
def test_a_whole_repository_is_pulled_and_what_was_altered_in_the_cache_is_named(
    hub: HubServer, tmp_path: Path
) -> None:
    with manager_for(tmp_path / "run", plain(3)) as manager:
        manager.push_to_hub("me/published", dtype="bfloat16")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes.txt").write_text("mine")
    assert ckpt.pull("hub://me/published", tmp_path / "back") == str(tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"README.md", "model.safetensors", "notes.txt"}
    at = hub.head("me/published")
    hub.store.commit("me/published", "main", {"summary": "x"}, [{"key": "deletedFile", "value": {"path": "README.md"}}])
    ckpt.pull("me/published", tmp_path / "older", revision=at)
    assert (tmp_path / "older" / "README.md").exists()
    with pytest.raises(ckpt.MissingError, match="there is nothing to pull at hub://me/published/absent"):
        ckpt.pull("hub://me/published/absent", tmp_path / "absent")
    model = plain(4)
    ckpt.load_model(tmp_path / "back", model)
    assert all(
        torch.equal(loaded, two.bfloat16().float())
        for loaded, two in zip(model.parameters(), plain(3).parameters(), strict=True)
    )
    blob = next(path for path in (tmp_path / "hf-cache").rglob("blobs/*") if len(path.name) == 64)
    damage(blob)
    with pytest.raises(ckpt.DamagedError, match=f"{blob.name}.* Remove these files, and ckpt fetches them again"):
        ckpt.pull("me/published", tmp_path / "more")
    assert not (tmp_path / "more").exists()


@pytest.mark.slow
def test_what_is_not_there_is_told_by_its_kind(hub: HubServer, tmp_path: Path) -> None:
    with manager_for(tmp_path / "run", plain(3)) as manager:
        manager.push_to_hub("me/published")
    for where, kind, what in (
        ("hub://me/typo", ckpt.AbsentError, "there is no such repository, or the token may not see it"),
        ("hub://me/published@typo", ckpt.AbsentError, "the repository has no such revision"),
        ("hub://me/published/typo", ckpt.MissingError, "there is nothing at hub://me/published/typo"),
    ):
        with pytest.raises(kind, match=what):
            ckpt.load_model(where, plain(4))
        if kind is ckpt.AbsentError:
            with pytest.raises(kind, match=what):
                ckpt.verify(where)
            assert what in CliRunner().invoke(main, ["ls", where]).output


@pytest.mark.slow
def test_a_model_is_loaded_with_a_token_and_nothing_else_is_fetched(
    hub: HubServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.token = "hf_private"
    with manager_for(tmp_path / "run", plain(3)) as manager:
        manager.push_to_hub("me/published", token="hf_private")
    other = {"key": "file", "value": {"path": "pytorch_model.bin", "content": b"the same once more"}}
    hub.store.commit("me/published", "main", {"summary": "x"}, [other])
    model = plain(4)
    ckpt.load_model("hub://me/published", model, storage_options={"token": "hf_private"})
    _compare(model.state_dict(), plain(3).state_dict())
    assert not hub.sent("pytorch_model.bin")
    assert "loaded model of hub://me/published\n" in capfd.readouterr().err


@pytest.mark.slow
def test_a_root_that_a_run_writes_to_is_not_pulled_into(hub: HubServer, tmp_path: Path) -> None:
    with manager_for(ROOT, model_of(1.0)) as manager:
        manager.progress.step = 1
        manager.save_state("step-00000001", wait=True)
    with manager_for(tmp_path / "run", model_of(1.0)) as manager:
        manager.save_state("mine", wait=True)
        for step in (None, 1):
            with pytest.raises(ckpt.LockedError, match="another run writes to"):
                ckpt.pull(ROOT, tmp_path / "run", step=step)
    ckpt.pull(ROOT, tmp_path / "run")
    assert ckpt.verify(tmp_path / "run") == {"mine": [], "step-00000001": []}


@pytest.mark.slow
def test_what_is_signed_is_pulled_and_loaded_and_nothing_else_where_that_is_required(
    hub: HubServer, tmp_path: Path
) -> None:
    required: dict[str, Any] = {"verify_key": new_key(tmp_path / "key.pem"), "require_signed": True}
    for name, value, sign in (("signed", 2.0, tmp_path / "key.pem"), ("unsigned", 3.0, False)):
        model = nn.Linear(8, 8, bias=False)
        with manager_for(ROOT, model, signing=ckpt.Signing(key=sign)) as manager:
            manager.resume()
            nn.init.constant_(model.weight, value)
            manager.progress.step = int(value)
            manager.save_state(name, wait=True)
    model = model_of(0.0)
    ckpt.load_model(ROOT, model, **required)
    assert torch.equal(model.weight, model_of(2.0).weight)
    assert ckpt.pull(ROOT, tmp_path / "step", step=2, **required) == str(tmp_path / "step" / "signed")
    with pytest.raises(ckpt.DamagedError, match="refuses unsigned: it is not signed"):
        ckpt.pull(ROOT, tmp_path / "all", **required)
    for folder in ("step", "all"):
        assert ckpt.verify(tmp_path / folder, verify_key=required["verify_key"]) == {"signed": []}


@pytest.mark.slow
def test_pull_of_a_step_goes_by_the_manifest_on_the_hub_as_elsewhere(hub: HubServer, tmp_path: Path) -> None:
    places = (ROOT, str(tmp_path / "local"))
    for root in places:
        with manager_for(root, model_of(1.0)) as manager:
            for step, name in ((5, "best"), (6, "step-00000005"), (7, "step-00000007"), (7, "final")):
                manager.progress.step = step
                manager.save_state(name, wait=True)
    for step, name in ((5, "best"), (6, "step-00000005"), (7, "final")):
        for number, source in enumerate(places):
            target = tmp_path / f"pulled-{step}-{number}"
            assert ckpt.pull(source, target, step=step) == str(target / name)
            assert ckpt.verify(target) == {name: []}
    with pytest.raises(ckpt.MissingError, match=r"has no checkpoint for step 8\. It has: .*best"):
        ckpt.pull(ROOT, tmp_path / "none", step=8)


def test_a_model_that_does_not_fit_stays_as_it_was(tmp_path: Path) -> None:
    with manager_for(tmp_path / "run", plain(3)) as manager:
        manager.save_model(tmp_path / "out")
    first = nn.Linear(6, 16)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 11))
    before = first.weight.detach().clone()
    with pytest.raises(ckpt.MismatchError) as raised:
        ckpt.load_model(tmp_path / "out", model)
    assert torch.equal(first.weight, before)
    assert "2.weight: shape [10, 16] there, [11, 16] here" in raised.value.problems
    assert "4.bias: unexpected: the model has no such tensor" in raised.value.problems
    left_out = ckpt.load_model(tmp_path / "out", model, strict=False)
    assert set(left_out) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    assert torch.equal(first.weight, next(plain(3).parameters()))


@pytest.mark.slow
def test_what_is_on_the_hub_is_read_through_fsspec_too_but_not_written(hub: HubServer, tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with ckpt.StateManager(ROOT, model=model) as manager:
        manager.save_state("a", wait=True)
    root = ROOT.replace("hub://", "hf://")
    assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(root)] == ["a"]
    assert ckpt.verify(root) == {"a": []}
    ckpt.load_model(f"{root}/a", other)
    assert torch.equal(model.weight, other.weight)
    before, requests = hub.commits(REPO), len(hub.requests)
    with pytest.raises(ckpt.DeniedError, match=r"is read-only.*for the Hub, hub://"):
        ckpt.StateManager(root, model=model)
    with pytest.raises(ckpt.DeniedError, match=r"is read-only"):
        ckpt.StateManager(tmp_path / "run", model=model, mirror=root)
    gc.collect()  # a file of fsspec's would be completed now
    assert hub.commits(REPO) == before
    assert {request.method for request in hub.requests[requests:]} <= {"GET", "HEAD"}


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_is_cut_off_ends_neither_a_resume_nor_verify(hub: HubServer) -> None:
    with manager_for(ROOT, model_of(1.0)) as manager:
        manager.save_state("a", wait=True)
    cut: set[str] = set()

    def bend(method: str, path: str, reply: Reply) -> Reply:
        if method != "GET" or path in cut or not reply.body:
            return reply
        cut.add(path)
        return replace(reply, body=reply.body[: len(reply.body) // 2], announced=len(reply.body))

    hub.bend = bend
    assert ckpt.verify(ROOT) == {"a": []}
    assert any("/resolve/" in path for path in cut)
    cut.clear()
    with manager_for(ROOT, model := model_of(0.0)) as manager:
        assert manager.load_state().name == "a"
    assert torch.equal(model.weight, model_of(1.0).weight)


@pytest.mark.slow
def test_a_repository_that_does_not_exist_is_not_listed_as_an_empty_one(hub: HubServer) -> None:
    with pytest.raises(ckpt.StorageError, match=r"hub://me/typo"):
        ckpt.list_checkpoints("hub://me/typo")


def test_an_error_that_the_client_wraps_is_told_by_its_cause() -> None:
    from huggingface_hub.errors import HfHubHTTPError

    answer: Any = SimpleNamespace(
        status_code=403, headers={}, request=None
    )  # of whichever HTTP library the client uses
    denied = HfHubHTTPError("no", response=answer)
    with pytest.raises(ckpt.DeniedError, match="the token may not do that"), translated_errors("upload", ROOT):
        raise RuntimeError("Error while uploading 'model.safetensors'") from denied
    with pytest.raises(ckpt.StorageError, match="RuntimeError: of its own"), translated_errors("upload", ROOT):
        raise RuntimeError("of its own")


def test_a_bar_counts_the_bytes_that_are_verified(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    intact = HubFile("file", 5, hashlib.sha256(b"bytes").hexdigest())
    counted: list[float] = []
    assert _is_intact(tmp_path / "file", intact, counted.append)
    assert sum(counted) == 5
