from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import boto3
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.root.catalog import HISTORY
from ckpt.storage import ObjectStorage, Storage, leases, open_storage
from ckpt.storage.clouds.s3 import S3Objects
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.processes import DEADLINE, Script
from tests.helpers.seaweed import BUCKET, KEY, SECRET, Server, environment, upload_in_small_parts
from tests.helpers.storage_contract import StorageContract, sizes

MB = 1 << 20


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    upload_in_small_parts(monkeypatch)


@pytest.mark.slow
class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3: str) -> Storage:
        return open_storage(s3)


class AnsweredError(Exception):
    """As clients of some servers raise them: no error of the system, but a status."""

    def __init__(self, code: int) -> None:
        super().__init__("with a text that nobody has looked at")
        self.code = code


@pytest.mark.on_disk  # a tmpfs may list no name for one that is being replaced
class TestFilesystem(StorageContract):
    """Any filesystem of fsspec. Its own of local files is one that is there."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return open_storage(f"local://{tmp_path}/made/when/needed")

    @pytest.mark.parametrize(
        ("failure", "kind"),
        [
            (ConnectionResetError(), ckpt.TransientError),
            (aiohttp.ServerDisconnectedError(), ckpt.TransientError),
            (AnsweredError(503), ckpt.TransientError),
            (AnsweredError(403), ckpt.DeniedError),
            (AnsweredError(400), ckpt.StorageError),
            (ZeroDivisionError(), ZeroDivisionError),
        ],
    )
    def test_what_may_pass_is_told_from_what_will_not(
        self, storage: Storage, failure: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any) -> None:
            raise failure

        storage.write("object", [b"x"])
        monkeypatch.setattr(storage._objects._fs, "cat_file", fail)  # type: ignore[attr-defined]
        with pytest.raises(kind) as raised:
            storage.read("object")
        assert raised.type is kind


def client(server: Server) -> Any:
    """Another client of the same server, to look at what is there."""
    return boto3.client("s3", endpoint_url=server.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET)


def uploads(server: Server, root: str) -> list[str]:
    """The keys of unfinished uploads below a root."""
    prefix = root.removeprefix(f"s3://{BUCKET}/") + "/"
    found = client(server).list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ())
    return [entry["Key"].removeprefix(prefix) for entry in found]


def unfinished(root: str, key: str, log: Path) -> None:
    """Leave an upload behind, as one who is killed does."""
    script = """
import os, signal, sys
from ckpt.storage import open_storage
def pieces():
    for _ in range(40):  # two parts of 16 MB
        yield b"x" * (1 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
open_storage(sys.argv[1]).write(sys.argv[2], pieces())
"""
    assert Script("-c", script, root, key, log=log).wait() == -signal.SIGKILL


def begin_upload(server: Server, root: str, key: str, parts: int) -> None:
    """An upload of which so many parts of 5 MiB have arrived."""
    where = {"Bucket": BUCKET, "Key": f"{root.removeprefix(f's3://{BUCKET}/')}/{key}"}
    s3 = client(server)
    upload = s3.create_multipart_upload(**where)["UploadId"]
    for number in range(parts):
        s3.upload_part(**where, UploadId=upload, PartNumber=number + 1, Body=bytes(5 * MB))


@pytest.mark.slow
class TestLargeObjects:
    def test_a_large_object_is_written_in_parts_whatever_its_pieces(self, s3: str) -> None:
        storage = open_storage(s3)
        data = os.urandom(MB) * 22 + b"the end"
        view = memoryview(data)
        storage.write("list", [view[:5], view[5 : 18 * MB], b"", view[18 * MB :]])
        storage.write("iterator", (view[at : at + 3 * MB] for at in range(0, len(data), 3 * MB)))
        assert sizes(storage) == {"list": len(data), "iterator": len(data)}
        assert storage.read("list") == storage.read("iterator") == data
        tail, buffers = len(data) - 20 * MB, [bytearray(9 * MB + 1), bytearray(11 * MB - 1)]
        storage.read_into("list", tail, *(memoryview(buffer) for buffer in buffers))
        assert b"".join(buffers) == data[tail:]

    def test_a_large_object_must_be_new_or_of_the_version_it_was(self, s3: str) -> None:
        storage = open_storage(s3)
        data = [os.urandom(MB) * 7]
        storage.write("object", data, over=None)
        with pytest.raises(ckpt.ConflictError):
            storage.write("object", [bytes(7 * MB)], over=None)
        version = storage.version("object")
        storage.write("object", [b"other"])
        with pytest.raises(ckpt.ConflictError):
            storage.write("object", data, over=version)
        assert storage.read("object") == b"other"

    def test_a_server_may_say_404_of_a_version_that_was_removed(self, server: Server, s3: str) -> None:
        with FaultyProxy(server.port, lambda method, path: "no key") as proxy, pytest.raises(ckpt.ConflictError):
            open_storage(s3, endpoint_url=proxy.url).write("object", [b"x"], over='"of an object that was there"')

    def test_a_link_to_a_large_object_is_copied_by_the_server_in_parts(
        self, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt.storage.clouds.s3.COPIED_AT_ONCE", 6 * MB)
        storage = open_storage(s3)
        data = os.urandom(MB) * 7
        storage.write("a", [data])
        storage.link("a", "b")
        storage.delete(["a"])
        assert storage.read("b") == data

    def test_a_write_that_fails_in_the_middle_leaves_no_upload(self, server: Server, s3: str) -> None:
        def pieces() -> Iterator[bytes]:
            for _ in range(12):
                yield bytes(MB)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            open_storage(s3).write("object", pieces())
        assert uploads(server, s3) == []

    def test_little_memory_is_held(self, s3: str) -> None:
        script = """
import re, sys
from ckpt.storage import multipart, open_storage
multipart.split_into_parts.__defaults__ = (5 << 20,)
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
storage = open_storage(sys.argv[1])
storage.write("small", [b"x"])
storage.read("small")
data = bytearray(64 << 20)
before = peak()
storage.write("list", [data])
listed = peak() - before
del data
buffer = memoryview(bytearray(32 << 20))
storage.read_into("list", 0, buffer)
read = peak() - before
storage.write("iterator", (bytes(1 << 20) for _ in range(96)))
print(listed, read, peak() - before - 32)
"""
        done = subprocess.run([sys.executable, "-c", script, s3], check=True, capture_output=True, text=True)
        listed, read, iterated = map(int, done.stdout.split())
        assert listed < 32  # MB: it is sent from where it lies
        assert read < 32
        assert iterated < 64


@pytest.mark.slow
def test_what_stands_for_a_folder_is_no_object(server: Server, s3: str, tmp_path: Path) -> None:
    for name in ("", "sub/", "sub/file"):
        where = f"{s3.removeprefix(f's3://{BUCKET}/')}/{name}"
        client(server).put_object(Bucket=BUCKET, Key=where, Body=b"x" if name.endswith("file") else b"")
    assert sizes(open_storage(s3)) == {"sub/file": 1}
    ckpt.pull(s3, tmp_path / "copy")
    assert (tmp_path / "copy" / "sub" / "file").read_bytes() == b"x"


@pytest.mark.slow
class TestLeftovers:
    def test_an_upload_that_was_cut_off_is_swept(self, server: Server, s3: str, tmp_path: Path) -> None:
        unfinished(s3, "step-1/model", tmp_path / "log")
        for key in ("step-10/model", "other/model"):
            begin_upload(server, s3, key, 2)
        storage = open_storage(s3)
        assert sorted(uploads(server, s3)) == ["other/model", "step-1/model", "step-10/model"]
        assert sizes(storage) == {}
        storage.sweep("step-1")
        assert sorted(uploads(server, s3)) == ["other/model", "step-10/model"]
        storage.sweep()  # these may be others' who are at work just now
        assert sorted(uploads(server, s3)) == ["other/model", "step-10/model"]
        assert {upload.key for upload in storage.unfinished()} == {"other/model", "step-10/model"}
        assert all(0 <= upload.age < 600 for upload in storage.unfinished())
        assert [upload.key for upload in storage.unfinished("step-10")] == ["step-10/model"]
        storage.sweep("other", age=3600)
        assert len(uploads(server, s3)) == 2
        storage.sweep(age=0)
        assert uploads(server, s3) == []

    def test_uploads_that_end_while_they_are_looked_at_are_no_error(
        self, server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        objects = S3Objects(BUCKET, s3.removeprefix(f"s3://{BUCKET}/"), {})
        begin_upload(server, s3, "a/model", 1)
        [listed] = objects._uploads(f"{s3.removeprefix(f's3://{BUCKET}/')}/")
        objects.abort("", 0.0)
        monkeypatch.setattr(objects, "_uploads", lambda top: iter([listed]))  # as it was a moment ago
        assert list(objects.unfinished("")) == []
        objects.abort("", 0.0)

    def test_what_has_arrived_of_an_upload_is_counted(self, server: Server, s3: str) -> None:
        begin_upload(server, s3, "a/model", 2)
        assert [(upload.key, upload.size) for upload in open_storage(s3).unfinished()] == [("a/model", 10 * MB)]


HOLD = """
import sys
from ckpt.storage import open_storage
with open_storage(sys.argv[1]).lock(".lock", note="process 17 on some host.", shared=len(sys.argv) > 2):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(log: Path, root: str, *arguments: str) -> Script:
    process = Script("-c", HOLD, root, *arguments, log=log)
    end = time.monotonic() + DEADLINE
    while "held" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


@pytest.mark.slow
class TestLocks:
    def test_a_holder_that_is_killed_is_gone_at_once_for_this_machine(self, s3: str, tmp_path: Path) -> None:
        with holder(tmp_path / "log", s3) as process:
            with pytest.raises(ckpt.LockedError, match="process 17 on some host"), open_storage(s3).lock(".lock"):
                pass
            process.kill()
            with open_storage(s3).lock(".lock", note="the next one"):
                pass

    def test_a_reader_that_is_killed_is_in_nobodys_way(self, s3: str, tmp_path: Path) -> None:
        with holder(tmp_path / "log", s3, "shared") as process:
            with pytest.raises(ckpt.LockedError, match="process 17 on some host"), open_storage(s3).lock(".lock"):
                pass
            with open_storage(s3).lock(".lock", shared=True):
                pass
            process.kill()
            with open_storage(s3).lock(".lock"):
                pass

    @pytest.fixture
    def elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if every other holder were on another machine: nobody can be looked up. And lives are short."""
        monkeypatch.setattr(leases, "has_ended", lambda record: None)
        monkeypatch.setattr(leases, "_POLL", 0.1)
        monkeypatch.setattr(leases, "EXPIRY", 3.0)

    @pytest.mark.usefixtures("elsewhere")
    def test_a_holder_elsewhere_is_gone_when_it_gives_no_sign_of_life(self, s3: str, tmp_path: Path) -> None:
        with holder(tmp_path / "log", s3) as process:
            process.kill()
            with open_storage(s3).lock(".lock", note="the next one"):
                pass

    @pytest.mark.usefixtures("elsewhere")
    def test_a_holder_elsewhere_that_lives_is_known_by_its_signs(
        self, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases, "RENEWAL", 0.5)
        monkeypatch.setattr(leases, "EXPIRY", 60.0)  # it is not waited for, and a slow machine must not seem dead
        first, second = open_storage(s3), open_storage(s3)
        with first.lock(".lock", note="alive"), pytest.raises(ckpt.LockedError, match="alive"), second.lock(".lock"):
            pass

    def test_who_was_taken_for_gone_writes_no_more(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        storage = open_storage(s3)
        storage.write("object", [b"before"])
        with storage.lock(".lock", note="the first"):
            monkeypatch.setattr(leases, "has_ended", lambda record: True)
            with open_storage(s3).lock(".lock", note="the second"):
                monkeypatch.setattr(leases, "EXPIRY", 0.0)
                refused = pytest.raises(ckpt.LockedError, match=r"another run took over .*\.lock, .*the second")
                with refused:
                    storage.write("object", [b"after"])
                with refused:
                    storage.delete(["object"])
                with refused:
                    storage.link("object", "other")
        assert sizes(storage) == {"object": 6}

    def test_what_was_held_without_a_sign_of_life_for_long_is_let_go_if_nobody_took_it(self, s3: str) -> None:
        storage = ObjectStorage(objects := S3Objects(BUCKET, s3.removeprefix(f"s3://{BUCKET}/"), {}))
        with storage.lock(".lock", note="asleep"):
            storage._leases._held[0].renewed -= 2 * leases.EXPIRY
        assert list(objects.entries(leases.FOLDER)) == []

    def test_what_is_left_of_a_lock_and_says_nothing_is_nobodys(self, s3: str) -> None:
        objects = S3Objects(BUCKET, s3.removeprefix(f"s3://{BUCKET}/"), {})
        for name in (f"{leases.FOLDER}/alone/x", f"{leases.FOLDER}/shared/x/reader"):
            objects.put(name, [b""])
        storage = ObjectStorage(objects)
        with storage.lock("x"):
            pass
        with storage.lock("x", shared=True):
            pass
        assert list(objects.entries(leases.FOLDER)) == []

    def test_a_forked_child_leaves_the_lock_to_its_parent(self, s3: str, tmp_path: Path) -> None:
        script = f"""
import os, sys
from ckpt.storage import open_storage
from ckpt.errors import LockedError
with open_storage({s3!r}).lock(".lock", note="the parent"):
    if (forked := os.fork()):
        assert os.waitpid(forked, 0)[1] == 0
        try:
            open_storage({s3!r}).lock(".lock").__enter__()
        except LockedError as error:
            print(error)
"""
        assert "the parent" in Script("-c", script, log=tmp_path / "log").run()


@pytest.mark.slow
class TestWrongRoots:
    @pytest.mark.parametrize(
        ("fault", "kind", "said"),
        [
            (
                "no bucket",
                ckpt.StorageError,
                r"there is no bucket 'ckpt'\. Create it, or check its name and the endpoint",
            ),
            ("denied", ckpt.DeniedError, r"AccessDenied\): .*Check the credentials .*that they may list, read, write"),
            ("not implemented", ckpt.StorageError, r"NotImplemented, .*ckpt needs conditional writes"),
        ],
    )
    def test_what_will_not_pass_is_not_tried_again(
        self, server: Server, s3: str, fault: str, kind: type[Exception], said: str
    ) -> None:
        with FaultyProxy(server.port, lambda method, path: fault) as proxy, pytest.raises(kind, match=said):
            ckpt.StateManager(s3, model=nn.Linear(1, 1), storage_options={"endpoint_url": proxy.url})
        assert proxy.done == {fault: 1}

    def test_who_may_only_read_lists_verifies_and_merges(self, server: Server, s3: str, tmp_path: Path) -> None:
        with ckpt.StateManager(s3, model=nn.Linear(1, 1)) as manager:
            manager.save_state("a", wait=True)
        with FaultyProxy(server.port, lambda method, path: None if method in ("GET", "HEAD") else "denied") as proxy:
            options = {"endpoint_url": proxy.url}
            assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3, storage_options=options)] == ["a"]
            assert ckpt.verify(s3, storage_options=options) == {"a": []}
            ckpt.merge(f"{s3}/a", tmp_path / "model.safetensors", storage_options=options)
            assert proxy.done["denied"] > 0

    @pytest.mark.parametrize(("name", "value"), [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "wrong")])
    def test_wrong_credentials(self, s3: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(ckpt.DeniedError, match=r"could not write s3://.*Check the credentials"):
            ckpt.StateManager(s3, model=nn.Linear(1, 1))

    def test_no_credentials(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        with pytest.raises(ckpt.DeniedError, match=r"the credentials are missing"):
            ckpt.StateManager(s3, model=nn.Linear(1, 1))

    def test_an_endpoint_where_nobody_answers(self, s3: str) -> None:
        options = {"endpoint_url": "http://127.0.0.1:9", "deadline": 1.0}
        with pytest.raises(ckpt.TransientError, match=r"no server answers\. Check the endpoint"):
            ckpt.StateManager(s3, model=nn.Linear(1, 1), storage_options=options)

    def test_an_endpoint_that_cannot_be_trusted_is_told_so_soon(
        self, server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt.storage.retry.FIRST_CONTACT", 0.0)
        options = {"endpoint_url": server.url.replace("http:", "https:")}
        with pytest.raises(ckpt.TransientError, match=r"no secure connection\. Check .*AWS_CA_BUNDLE.* Tried 1 times"):
            ckpt.StateManager(s3, model=nn.Linear(1, 1), storage_options=options)

    def test_a_server_that_answers_is_not_taken_for_a_misspelt_one(
        self, server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt.storage.retry.FIRST_CONTACT", 0.0)
        busy = iter(["slow down"] * 3)
        with FaultyProxy(server.port, lambda method, path: next(busy, None)) as proxy:
            open_storage(s3, endpoint_url=proxy.url).write("object", [b"x"])
            assert proxy.done["slow down"] == 3

    def test_options_that_nobody_takes(self, s3: str, tmp_path: Path) -> None:
        with pytest.raises(ckpt.ConfigError, match="max_concurrency"):
            open_storage(s3, max_concurrency=0)
        for root in (str(tmp_path), f"file://{tmp_path}", "memory://x"):
            with pytest.raises(ckpt.ConfigError, match="accepts no storage_options, but you gave key"):
                open_storage(root, key="x")
        with pytest.raises(ckpt.ConfigError, match="names no bucket"):
            open_storage("s3://")


@pytest.mark.slow
class TestCredentials:
    def test_they_come_from_options_a_profile_or_a_config(
        self, server: Server, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in environment(server.url):
            monkeypatch.delenv(name)
        secrets = tmp_path / "credentials"
        secrets.write_text(f"[trainer]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
        explicit = {"key": KEY, "secret": SECRET, "endpoint_url": server.url}
        open_storage(s3, **explicit).write("object", [b"x"])
        assert open_storage(s3, profile="trainer", endpoint_url=server.url).read("object") == b"x"
        config = tmp_path / "ckpt.yaml"
        config.write_text(f"root: {s3}\nstorage_options: {{profile: trainer, endpoint_url: '{server.url}'}}\n")
        with ckpt.StateManager.from_config(config, model=nn.Linear(1, 1)) as manager:
            manager.save_state("a", wait=True)
        assert ckpt.verify(s3, storage_options=explicit) == {"a": []}
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3, storage_options=explicit)] == ["a"]
        ckpt.merge(f"{s3}/a", f"{s3}-out/model.safetensors", storage_options=explicit)
        ckpt.merge(f"{s3}/a", tmp_path / "model.safetensors", storage_options=explicit)
        merged = open_storage(f"{s3}-out", **explicit).read("model.safetensors")
        assert merged == (tmp_path / "model.safetensors").read_bytes()

    def test_a_secret_is_shown_nowhere(
        self, server: Server, s3: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        caplog.set_level(logging.DEBUG)
        said = []
        with_secret = f"http://user:{SECRET}@127.0.0.1:9"
        for root, options in (
            (s3, {"key": KEY, "secret": SECRET}),
            (f"s3://{KEY}:{SECRET}@{BUCKET}/x", {}),
            (s3, {"endpoint_url": with_secret, "deadline": 0.5}),
            (s3, {"key": "unknown", "secret": SECRET}),
            ("s3://no-such/x", {"key": KEY, "secret": SECRET}),
            (s3, {"key": KEY, "secret": SECRET, "config_kwargs": {"nonsense": SECRET}}),
        ):
            try:
                with ckpt.StateManager(root, model=nn.Linear(1, 1), storage_options=options) as manager:
                    manager.save_state("a", wait=True)
                    said += [repr(manager), repr(manager.session.storage), manager.session.storage.url]
            except ckpt.CkptError as error:
                said += ["".join(traceback.format_exception(error)), repr(error), *_chained(error)]
        for entry in open_storage(s3).list():
            said.append(open_storage(s3).read(entry.key).decode(errors="replace"))
        assert len(said) > 15
        everything = [*said, caplog.text, *capfd.readouterr()]
        assert not [text for text in everything if SECRET in text]


def _chained(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        error = error.__cause__ or error.__context__
        yield repr(error)


@pytest.mark.slow
class TestManager:
    def test_it_saves_replaces_resumes_and_retains(self, s3: str) -> None:
        model = nn.Linear(3, 3)
        with ckpt.StateManager(s3, model=model, keep=ckpt.Keep(last=2)) as manager:
            manager.resume()
            for name in ("a", "b", "c", "c"):
                nn.init.constant_(model.weight, float(ord(name)))
                manager.save_state(name, wait=True)
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3)] == ["c", "b"]
        assert ckpt.verify(s3) == {"c": [], "b": []}
        assert {key.partition("/")[0] for key in sizes(open_storage(s3))} == {"b", "c", HISTORY}
        other = nn.Linear(3, 3)
        with ckpt.StateManager(s3, model=other) as manager:
            restored = manager.resume()
        assert restored is not None
        assert restored.url == f"{s3}/c"
        assert torch.equal(other.weight, model.weight)

    def test_another_run_is_refused_and_told_who(self, s3: str) -> None:
        with ckpt.StateManager(s3, model=nn.Linear(1, 1)) as first:
            first.save_state("a", wait=True)
            with ckpt.StateManager(s3, model=nn.Linear(1, 1)) as second:
                second.load_state()
                with pytest.raises(ckpt.LockedError, match=rf"another run writes to .*process {os.getpid()} on"):
                    second.save_state("b", wait=True)

    def test_of_two_writers_of_one_name_one_wins_and_the_other_is_told(
        self, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases.Leases, "exclusive", leases.Leases.shared)  # as if there were no locks
        with (
            ckpt.StateManager(s3, model=nn.Linear(2, 2)) as first,
            ckpt.StateManager(s3, model=nn.Linear(2, 2)) as second,
        ):
            first.resume()
            second.resume()
            first.save_state("latest", wait=True)
            with pytest.raises(ckpt.ConflictError, match=r"another run has saved .*/latest in the meantime"):
                second.save_state("latest", wait=True)
            assert ckpt.verify(s3) == {"latest": []}
            first.save_state("latest", wait=True)
        assert ckpt.verify(s3) == {"latest": []}

    def test_a_program_that_ends_finishes_its_save(self, server: Server, s3: str) -> None:
        script = """
import sys, torch, ckpt
model = torch.nn.Linear(1, 3 << 20)
manager = ckpt.StateManager(sys.argv[1], model=model, storage_options={"endpoint_url": sys.argv[2]})
manager.save_state("a")
"""
        endpoint = f"http://localhost:{server.port}"  # a name, which is looked up for every new connection
        subprocess.run([sys.executable, "-c", script, s3, endpoint], check=True, timeout=120)
        assert ckpt.verify(s3) == {"a": []}

    def test_a_checkpoint_that_is_read_is_not_removed(self, s3: str) -> None:
        with ckpt.StateManager(s3, model=nn.Linear(1, 1), keep=ckpt.Keep(last=1)) as manager:
            manager.save_state("a", wait=True)
            with open_storage(s3).lock("a", shared=True):
                manager.save_state("b", wait=True)
                assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3)] == ["b", "a"]
            manager.save_state("c", wait=True)
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(s3)] == ["c"]

    def test_options_are_for_all_that_is_loaded_by_its_url(
        self, server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in environment(server.url):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        options = {"endpoint_url": server.url, "key": KEY, "secret": SECRET}
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
        with ckpt.StateManager(s3, model=model, storage_options=options) as manager:
            manager.save_state("a", wait=True)
            with pytest.raises(ckpt.ConfigError, match="nor a folder that Accelerate saved"):
                manager.load_state(f"{s3}-others/elsewhere")
            with pytest.raises(ckpt.MissingError, match="no checkpoint 'elsewhere' in"):
                manager.load_state(f"{s3}/elsewhere")
            assert manager.load_state(f"{s3}/a").name == "a"
        ckpt.load_model(f"{s3}/a", other, storage_options=options)
        assert torch.equal(model.weight, other.weight)
        assert ckpt.prune(s3, storage_options=options).kept == ("a",)

    def test_the_command_lists_verifies_and_merges(self, s3: str, tmp_path: Path) -> None:
        model = nn.Linear(3, 3)
        with ckpt.StateManager(s3, model=model) as manager:
            manager.save_state("a", wait=True)
        for arguments, said in (
            (["ls", s3], "complete"),
            (["verify", f"{s3}/a"], "intact"),
            (["merge", f"{s3}/a", f"{s3}-out/model.safetensors"], f"{s3}-out/model.safetensors"),
        ):
            done = CliRunner().invoke(main, arguments)
            assert done.exit_code == 0, done.output
            assert said in done.stdout
        import safetensors.torch

        merged = safetensors.torch.load(open_storage(f"{s3}-out").read("model.safetensors"))
        assert torch.equal(merged["weight"], model.weight)


@pytest.mark.slow
class TestDeadlines:
    def test_without_time_to_try_again_there_is_one_try(self, s3: str) -> None:
        storage = open_storage(s3, deadline=0)
        storage.write("object", [b"x"])
        assert storage.read("object") == b"x"


def test_a_body_reads_like_a_file_and_iterates_like_a_stream() -> None:
    from ckpt.storage.multipart import Body

    data = os.urandom(1000)
    body, file = (
        Body([memoryview(data)[:10], memoryview(data)[10:700], memoryview(data)[700:]]),
        io.BytesIO(data),
    )
    for size in (5, 6, 0, 900, None, 3):
        assert body.read(size) == file.read(size)
        assert body.tell() == file.tell()
    for offset, whence in ((3, 0), (4, 1), (-5, 2), (0, 2)):
        assert body.seek(offset, whence) == file.seek(offset, whence)
        assert body.read(2) == file.read(2)
    assert len(body) == 1000
