"""The index of a root in an object store: a listing reads few manifests, and is never wrong for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from benchmarks.shared.counted_objects import CountedObjects
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME
from ckpt.root.catalog import INDEX, MARKER, UNINDEXED, Overview, Summary
from ckpt.storage.clouds.s3 import S3Client
from ckpt.storage.object_storage import ObjectStorage

MANY = 2 * (UNINDEXED + 1)  # checkpoints, all of which the index has


@pytest.fixture
def objects() -> CountedObjects:
    return CountedObjects("bucket/run")


def manager(root: object, **options: object) -> ckpt.StateManager:
    return ckpt.StateManager(root, model=torch.nn.Linear(2, 2), **options)  # type: ignore[arg-type]


def save(root: object, first: int, last: int, **options: object) -> None:
    with manager(root, **options) as run:
        run.resume()
        for number in range(first, last):
            run.save_state(f"step-{number:04d}", wait=True, metrics={"loss": float(number)})


def overview(objects: CountedObjects) -> Overview:
    return Overview.of(ObjectStorage(objects))


def reads_of(objects: CountedObjects) -> int:
    objects.requests.clear()
    overview(objects)
    return objects.requests["get"]


def alter(objects: CountedObjects, at: int = -10) -> None:
    altered = bytearray(objects.content[INDEX])
    altered[at] ^= 1
    objects.content[INDEX] = bytes(altered)


class TestIndex:
    def test_a_listing_reads_the_index_and_no_manifest(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        assert reads_of(objects) == 1
        assert [found.name for found in overview(objects).committed] == [f"step-{n:04d}" for n in range(MANY)][::-1]

    def test_it_says_what_the_manifests_say(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        told = overview(objects).committed
        objects.content.pop(INDEX)
        assert told == overview(objects).committed
        assert told == [
            Summary.of(found.manifest) for found in ckpt.list_checkpoints(objects_root(objects)) if found.manifest
        ]

    def test_few_checkpoints_have_none(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, UNINDEXED)
        assert INDEX not in objects.content
        assert reads_of(objects) == UNINDEXED

    def test_a_folder_has_none(self, tmp_path: Path) -> None:
        save(tmp_path, 0, MANY)
        assert not (tmp_path / INDEX).exists()

    def test_a_manifest_that_was_written_since_is_read(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        save(objects_root(objects), 5, 6)  # replaces one
        assert reads_of(objects) == 2
        newest = overview(objects).committed[0]
        assert (newest.name, newest.sequence) == ("step-0005", MANY + 1)

    def test_a_folder_that_was_copied_counts_for_what_its_manifest_says(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        for key in [key for key in objects.content if key.startswith("step-0003/")]:
            objects.content[key.replace("step-0003", "zz-copy")] = objects.content[key]
        names = [found.name for found in overview(objects).committed]
        assert names[0] == f"step-{MANY - 1:04d}"
        assert set(names[-5:-3]) == {"step-0003", "zz-copy"}

    def test_a_manifest_that_is_gone_is_noticed(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        for name in (FILE_NAME, COPY_NAME):
            objects.content.pop(f"step-0007/{name}")
        found = {outline.name: outline for outline in overview(objects).checkpoints}
        assert found["step-0007"].summary is None
        assert found["step-0007"].was_committed

    @pytest.mark.parametrize("at", [0, 40, -10])
    def test_a_flipped_bit_makes_it_useless_and_the_listing_right(self, objects: CountedObjects, at: int) -> None:
        save(objects_root(objects), 0, MANY)
        before = overview(objects).committed
        alter(objects, at)
        assert reads_of(objects) == 1 + MANY
        assert overview(objects).committed == before

    def test_retention_removes_what_the_index_alone_knows(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        save(objects_root(objects), MANY, MANY + 1, keep=ckpt.Keep(last=2, best=1, metric="loss"))
        assert {found.name for found in overview(objects).committed} == {
            "step-0000",
            f"step-{MANY - 1:04d}",
            f"step-{MANY:04d}",
        }
        assert {key.partition("/")[0] for key in objects.content if "step-" in key} == {
            found.name for found in overview(objects).committed
        }

    def test_one_whose_manifest_is_damaged_is_kept_by_retention_with_a_warning(
        self, objects: CountedObjects, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(objects_root(objects), 0, MANY)
        with manager(objects_root(objects), keep=ckpt.Keep(last=MANY - 1)) as run:
            run.resume()
            objects.content[f"step-0000/{FILE_NAME}"] = objects.content[f"step-0000/{COPY_NAME}"] = b"x"
            run.save_state("newest", wait=True)
        assert f"step-0000/{FILE_NAME}" in objects.content
        assert f"step-0001/{FILE_NAME}" not in objects.content
        assert "step-0000, which has a manifest that ckpt can't read" in caplog.text


class TestResume:
    """A remote root is listed once, under its lock, and what was read then is not read again."""

    def test_every_manifest_is_read_once_where_there_is_no_index_and_none_where_there_is(
        self, objects: CountedObjects
    ) -> None:
        save(objects_root(objects), 0, MANY)
        del objects.content[INDEX]
        unindexed, indexed = self._requests_of_a_resume(objects), self._requests_of_a_resume(objects)
        assert INDEX in objects.content
        assert indexed["get"] == unindexed["get"] - MANY + 1  # the index, which the first has written
        assert indexed["list"] == unindexed["list"]

    def test_twice_as_many_objects_take_one_page_more(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, 1)
        few = self._requests_of_a_resume(objects)["list"]
        for number in range(1000):
            objects.content[f"notes/{number}"] = b"x"
        assert self._requests_of_a_resume(objects)["list"] == few + 1

    def test_leftovers_are_swept_all_the_same(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, MANY)
        objects.content[f"step-9999/{MARKER}"] = b'{"files": ["x"], "replaces": []}'
        objects.content["step-9999/x"] = b"left"
        with manager(objects_root(objects)) as run:
            restored = run.resume()
            assert restored is not None
            assert restored.name == f"step-{MANY - 1:04d}"
        assert not [key for key in objects.content if key.startswith("step-9999")]

    def test_one_that_another_run_holds_is_refused_before_anything_is_loaded(self, objects: CountedObjects) -> None:
        save(objects_root(objects), 0, 2)
        with manager(objects_root(objects)) as run:
            run.resume()
            other = manager(objects_root(objects))
            before = [parameter.clone() for parameter in other.session.registry.tensors()]
            with pytest.raises(ckpt.LockedError):
                other.resume()
            assert all(map(torch.equal, before, other.session.registry.tensors()))
            other.close()

    def test_a_load_that_fails_gives_the_root_up(
        self, objects: CountedObjects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(objects_root(objects), 0, 1)

        def away(prefix: str) -> None:
            raise ckpt.TransientError("away")

        with manager(objects_root(objects)) as run:
            monkeypatch.setattr(objects, "entries", away)
            with pytest.raises(ckpt.TransientError):
                run.resume()
            monkeypatch.undo()
            save(objects_root(objects), 1, 2)  # by another manager, which can lock it

    @staticmethod
    def _requests_of_a_resume(objects: CountedObjects) -> dict[str, int]:
        with manager(objects_root(objects)) as run:
            objects.requests.clear()
            restored = run.resume()
            assert restored is not None
            return dict(objects.requests)


def objects_root(objects: CountedObjects) -> ObjectStorage:
    return ObjectStorage(objects)


class Requests:
    """Counts what is sent to S3, but for locks: a lease is renewed after a time, so that a slow run sends more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        send = S3Client.send

        async def counted(client: S3Client, method: str, **arguments: object) -> object:
            self.count += "/.locks/" not in f"{arguments.get('Key')}{arguments.get('Prefix')}{arguments.get('Delete')}"
            return await send(client, method, **arguments)

        monkeypatch.setattr(S3Client, "send", counted)


@pytest.mark.slow
def test_a_resume_from_s3_takes_as_many_requests_beside_twice_as_many_checkpoints(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch)
    needed = []
    for count in (MANY, 2 * MANY):
        save(s3, count - MANY, count)
        with manager(s3) as run:
            requests.count = 0
            run.resume()
            resumed = requests.count
        requests.count = 0
        Overview.of(ckpt.storage.open_storage(s3))
        needed.append((resumed, requests.count))
    assert needed[0] == needed[1]
    assert needed[1][1] == 2  # a page, and the index
