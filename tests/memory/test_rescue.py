"""The newest snapshot of a dead run is saved to the root: whole or not at all, and never over something newer."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Host, Manifest
from ckpt.memory import keeper, rescue
from ckpt.memory.keeper_process import last_log_line, start_keeper
from ckpt.memory.place import TOKEN, MemoryPlace, write_token
from ckpt.memory.rescue import GivesWayError, LateError, RefusedError, Rescue, rescue_settings
from ckpt.memory.slot_storage import slot_storage
from ckpt.root.catalog import find, read_manifest, scan
from ckpt.root.lock import lock_root
from ckpt.root.signing import find_signing_key, new_key
from ckpt.root.verify import problems, verify
from ckpt.root.write_link_commit import Attempt
from ckpt.storage import ANY, Buffer, HubStorage, LocalStorage, MemoryStorage, Storage, open_storage
from tests.helpers import byte_checkpoints
from tests.helpers.byte_checkpoints import cut_off_at_every_call, keys, save, tensor_file
from tests.memory.deserted import FILES, create_place, kill, no_keeper_left, snapshot, start_run, wait_until

AT_ONCE = {"after": 0.0}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    monkeypatch.setenv("CKPT_MEMORY_KEEPER", "on")
    with no_keeper_left(folder):
        yield folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The root of the run."""
    return tmp_path / "root"


def deserted(root: Path, *snapshots: int, **settings: Any) -> MemoryPlace:
    """A place with these snapshots in which nobody lives."""
    place = create_place(root, rescue=settings)
    for sequence in snapshots:
        snapshot(place, f"step-{sequence}", sequence=sequence)
    place.release()
    return place


def run(place: MemoryPlace) -> str:
    return Rescue(place, place.facts["rescue"]).run()


def steps(root: Path | str) -> list[str]:
    """The intact checkpoints of a root, newest first. There must be no others, and no leftovers."""
    storage = open_storage(str(root))
    found = scan(storage)
    manifests = [checkpoint.manifest for checkpoint in found if checkpoint.manifest is not None]
    assert len(manifests) == len(found)
    listed = {f"{manifest.name}/{path}" for manifest in manifests for path in _paths(manifest)}
    assert keys(storage) - {".lock", TOKEN} == listed
    assert [problems(storage, manifest) for manifest in manifests] == [[] for _ in manifests]
    return [manifest.name for manifest in manifests]


def _paths(manifest: Manifest) -> list[str]:
    return [FILE_NAME, COPY_NAME, *(file.path for file in manifest.files)]


class TestRescue:
    def test_the_newest_snapshot_becomes_a_checkpoint_like_any_other(self, folder: Path) -> None:
        save(LocalStorage(folder), "step-5", sequence=5)
        place = deserted(folder, 8, 9)
        assert run(place).startswith("rescued step-9 (step 0) to ")
        assert steps(folder) == ["step-9", "step-5"]
        assert read_manifest(LocalStorage(folder), "step-9") == read_manifest(slot_storage(place), "step-9")
        assert run(place).startswith("nothing to rescue")

    def test_a_root_without_any_gets_it_too(self, folder: Path) -> None:
        run(deserted(folder, 9))
        assert steps(folder) == ["step-9"]

    def test_a_root_that_has_something_as_new_is_left_as_it_is(self, folder: Path) -> None:
        save(LocalStorage(folder), "step-9b", sequence=9)
        assert "step-9b, which is as new" in run(deserted(folder, 8, 9))
        assert steps(folder) == ["step-9b"]

    def test_a_place_without_a_snapshot_has_nothing_to_rescue(self, folder: Path) -> None:
        assert run(deserted(folder)) == "nothing to rescue: no snapshot was committed"
        assert steps(folder) == []

    def test_the_roots_older_checkpoint_of_that_name_is_replaced_though_its_files_have_the_same_sizes(
        self, folder: Path
    ) -> None:
        root = LocalStorage(folder)
        save(root, "step-9", {name: data[::-1] for name, data in FILES.items()}, sequence=5)
        root.write("step-9/notes.txt", [b"of the user"])
        run(deserted(folder, 9))
        manifest = read_manifest(root, "step-9")
        assert problems(root, manifest) == []
        read = {file.name: root.read(f"step-9/{file.path}") for file in manifest.files}
        assert read == FILES
        assert keys(root) == {".lock", TOKEN, "step-9/notes.txt", *(f"step-9/{path}" for path in _paths(manifest))}

    def test_a_signed_snapshot_is_a_signed_checkpoint_though_nobody_has_the_key_here(
        self, folder: Path, tmp_path: Path
    ) -> None:
        place, public = self.signed_place(folder, tmp_path)
        assert run(place).startswith("rescued step-9")
        assert verify(folder, verify_key=public) == {"step-9": []}

    def test_a_signed_snapshot_whose_paths_are_taken_is_refused(self, folder: Path, tmp_path: Path) -> None:
        place, _ = self.signed_place(folder, tmp_path)
        save(LocalStorage(folder), "step-9", sequence=5)  # with a state.json too
        with pytest.raises(RefusedError, match="a signed snapshot keeps its paths"):
            run(place)
        assert read_manifest(LocalStorage(folder), "step-9").sequence == 5

    def signed_place(self, folder: Path, tmp_path: Path) -> tuple[MemoryPlace, str]:
        """A place with a signed snapshot, and the public key."""
        public = new_key(tmp_path / "key.pem")
        signing = find_signing_key(tmp_path / "key.pem")
        assert signing is not None
        place = create_place(folder, rescue={})
        storage, attempt = slot_storage(place), Attempt("step-9", sha256=True)
        written = byte_checkpoints.begin_and_write(storage, attempt, {"state.json": b"{}"})
        attempt.commit(storage, signing.sign(byte_checkpoints.manifest_of(attempt, written, sequence=9)), {})
        place.release()
        return place, public

    def test_a_damaged_snapshot_is_passed_over_and_named(self, folder: Path) -> None:
        place = deserted(folder, 8, 9)
        path = place.slots / "step-9/model.safetensors"
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        said = run(place)
        assert said.startswith("step-9 is damaged: model.safetensors was altered")
        assert "rescued step-8" in said
        assert steps(folder) == ["step-8"]

    def test_where_none_is_intact_none_is_saved(self, folder: Path) -> None:
        place = deserted(folder, 8, 9)
        for name in ("step-8", "step-9"):
            (place.slots / name / "model.safetensors").write_bytes(b"short")
        with pytest.raises(RefusedError, match=r"step-9 is damaged.*step-8 is damaged.*None is intact"):
            run(place)
        assert steps(folder) == []

    def test_a_root_that_another_run_writes_to_is_left_alone(self, folder: Path) -> None:
        place = deserted(folder, 9)
        with ExitStack() as held:
            lock_root(LocalStorage(folder), held)
            with pytest.raises(LockedError, match="another run writes to"):
                run(place)
        assert steps(folder) == []
        run(place)
        assert steps(folder) == ["step-9"]

    @pytest.mark.parametrize("separate_roots", [False, True])
    def test_a_root_that_was_removed_is_not_made_again(self, folder: Path, separate_roots: bool) -> None:
        folder.mkdir()
        place = deserted(folder, 9, separate_roots=separate_roots)
        shutil.rmtree(folder)
        with pytest.raises(RefusedError, match="was removed, and the keeper does not create it again"):
            run(place)
        assert not folder.exists()

    def test_a_root_that_was_made_anew_is_left_as_it_is(self, folder: Path) -> None:
        place = deserted(folder, 9)
        shutil.rmtree(folder)
        write_token(LocalStorage(folder))
        with pytest.raises(RefusedError, match="was replaced, or another run has ended there"):
            run(place)
        assert steps(folder) == []

    def test_what_continues_from_a_removed_checkpoint_is_not_saved(self, folder: Path) -> None:
        root = LocalStorage(folder)
        save(root, "step-4", sequence=4)
        last = save(root, "step-5", sequence=5)
        place = deserted(folder, 9)
        storage = slot_storage(place)
        manifest = replace(read_manifest(storage, "step-9"), parent=last.id)
        storage.write(f"step-9/{FILE_NAME}", [manifest.to_bytes()])
        shutil.rmtree(folder / "step-5")
        with pytest.raises(RefusedError, match="continues from a checkpoint that is no longer in"):
            run(place)
        assert steps(folder) == ["step-4"]

    def test_what_continues_from_a_checkpoint_whose_manifest_is_damaged_is_saved(self, folder: Path) -> None:
        root = LocalStorage(folder)
        save(root, "step-4", sequence=4)
        last = save(root, "step-5", sequence=5)
        place = deserted(folder, 9)
        storage = slot_storage(place)
        manifest = replace(read_manifest(storage, "step-9"), parent=last.id)
        storage.write(f"step-9/{FILE_NAME}", [manifest.to_bytes()])
        for name in (FILE_NAME, COPY_NAME):
            (folder / "step-5" / name).write_text("{")
        assert run(place).startswith("rescued step-9 ")
        assert problems(root, read_manifest(root, "step-9")) == []

    def test_a_root_of_a_newer_ckpt_is_left_as_it_is(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = deserted(folder, 9)
        with monkeypatch.context() as newer:
            newer.setattr("ckpt.formats.native.manifest.VERSION", 2)
            save(LocalStorage(folder), "step-3", sequence=3)
        with pytest.raises(RefusedError, match="checkpoints of a newer ckpt"):
            run(place)

    def test_what_a_killed_save_left_in_the_root_makes_room(self, folder: Path) -> None:
        root = LocalStorage(folder)
        attempt = byte_checkpoints.attempt_at(root, "step-9")
        byte_checkpoints.begin_and_write(root, attempt)
        run(deserted(folder, 9))
        assert steps(folder) == ["step-9"]


class TestGivingUp:
    def test_it_gives_way_to_a_process_of_the_run(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rescue, "_LOOK", 0.0)
        place = deserted(folder, 9)
        living = MemoryPlace.open(place.path)
        assert living is not None
        hold = living.hold

        class Root(LocalStorage):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if key.endswith(".safetensors"):
                    hold()
                super().write(key, pieces, over=over)

        monkeypatch.setattr(rescue, "open_storage", Root)
        with pytest.raises(GivesWayError):
            run(place)
        assert steps(folder) == []
        living.release()

    def test_what_is_late_is_not_visible(self, folder: Path) -> None:
        place = deserted(folder, 9, deadline=-1.0)
        with pytest.raises(LateError):
            run(place)
        assert steps(folder) == []

    def test_cut_off_at_any_moment_it_is_there_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        roots = iter(tmp_path / f"root-{number}" for number in range(1000))
        place = deserted(tmp_path / "root", 9, separate_roots=True)  # whose tokens are not compared

        def prepare() -> Storage:
            storage = LocalStorage(next(roots))
            save(storage, "step-9", sequence=5)
            return storage

        def rescue_to(storage: Storage) -> None:
            monkeypatch.setattr(rescue, "open_storage", lambda _: storage)
            run(place)

        left = []
        for storage in cut_off_at_every_call(prepare, rescue_to):
            manifest = find(storage, "step-9").manifest
            assert manifest is not None
            assert problems(storage, manifest) == []
            left.append(manifest.sequence)
        assert left == sorted(left)
        assert set(left) == {5, 9}

    def test_a_full_root_is_left_as_it_was(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full(LocalStorage):
            def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
                if key.endswith("state.json"):
                    raise StorageError("no space left")
                super().write(key, pieces, over=over)

        place = deserted(folder, 9)
        monkeypatch.setattr(rescue, "open_storage", Full)
        with pytest.raises(StorageError, match="no space left"):
            run(place)
        assert steps(folder) == []


class TestHosts:
    """Each host's memory has the files of its own ranks."""

    def place(self, folder: Path, **settings: Any) -> MemoryPlace:
        place = create_place(folder, rescue=settings)
        files = {
            "model.safetensors": tensor_file(b"all"),
            "optimizer/00000.safetensors": tensor_file(b"mine"),
            "optimizer/00001.safetensors": tensor_file(b"another host's"),
        }
        snapshot(place, "step-9", sequence=9, files=files)
        storage = slot_storage(place)
        hosts = (Host("a", (0,)), Host("b", (1,)))
        manifest = replace(read_manifest(storage, "step-9"), world_size=2, hosts=hosts)
        storage.write(f"step-9/{FILE_NAME}", [manifest.to_bytes()])
        place.release()
        return place

    def test_a_host_with_some_files_refuses_a_shared_root(self, folder: Path) -> None:
        place = self.place(folder)
        slot_storage(place).delete(["step-9/optimizer/00001.safetensors"])
        with pytest.raises(RefusedError, match=r"several hosts \(a, b\), and this one has 2 of 3"):
            run(place)
        assert steps(folder) == []

    def test_a_host_with_some_files_saves_them_to_its_own_root(self, folder: Path) -> None:
        place = self.place(folder, separate_roots=True)
        slot_storage(place).delete(["step-9/optimizer/00001.safetensors"])
        run(place)
        root = LocalStorage(folder)
        assert read_manifest(root, "step-9") == read_manifest(slot_storage(place), "step-9")
        assert keys(root, "step-9") == {
            f"step-9/{name}" for name in (FILE_NAME, COPY_NAME, "model.safetensors", "optimizer/00000.safetensors")
        }

    def test_a_host_with_all_files_saves_them_to_a_shared_root(self, folder: Path) -> None:
        run(self.place(folder))
        assert steps(folder) == ["step-9"]
        assert read_manifest(LocalStorage(folder), "step-9").hosts == ()


class TestSettings:
    def test_they_are_the_root_and_times(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_RESCUE_AFTER", "5")
        assert rescue_settings(LocalStorage(folder)) == {
            "root": str(folder), "was_there": False, "separate_roots": False, "after": 5.0, "deadline": 600.0,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("root", "options", "reason"),
        [
            (MemoryStorage("x"), None, "it ends with the process"),
            (HubStorage("user/repo"), None, "takes commits of the run alone"),
            ("s3://bucket/x", {"secret": "hunter2", "key": "me"}, r"storage_options \(key, secret\) may be secret"),
        ],
    )
    def test_what_cannot_be_rescued_to_is_said_without_secrets(
        self, root: Any, options: dict[str, str] | None, reason: str
    ) -> None:
        with pytest.raises(ConfigError, match=reason) as raised:
            rescue_settings(open_storage(root, **(options or {})), options)
        assert "hunter2" not in str(raised.value)

    def test_a_root_that_no_other_process_can_open_is_refused(self, folder: Path) -> None:
        class Own(LocalStorage):
            pass

        class Unknown(LocalStorage):
            url = "unknown://folder"

        for root in (Own(folder), Unknown(folder)):
            with pytest.raises(ConfigError, match="another process cannot open it"):
                rescue_settings(root)


class TestMain:
    def test_its_status_says_what_has_become_of_it(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place = deserted(folder, 9)
        with ExitStack() as held:
            lock_root(LocalStorage(folder), held)
            assert rescue.main(str(place.path)) == rescue.LATER
        assert rescue.main(str(place.path)) == keeper.DONE
        assert rescue.main(str(folder)) == keeper.REFUSED
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[1] for line in lines] == ["not rescued now", f"rescued step-9 (step 0) to {folder}"]

    def test_a_run_waits_for_it(self, folder: Path) -> None:
        with ExitStack() as held, ExitStack() as run:
            lock_root(LocalStorage(folder), held, to_rescue=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ckpt.root.lock.time.sleep", lambda _: held.close())
                lock_root(LocalStorage(folder), run)


@pytest.mark.slow
class TestProcesses:
    """Real runs, killed and not restarted."""

    @pytest.mark.parametrize("held", [False, True])
    def test_the_root_has_the_step_of_a_killed_run(self, folder: Path, memory: Path, held: bool) -> None:
        save(LocalStorage(folder), "step-5", sequence=5)
        job, place, _ = start_run(memory, folder, rescue=AT_ONCE, held=held)
        kill(job)
        wait_until(lambda: "rescued step-9" in last_log_line(place), "it is rescued")
        assert steps(folder) == ["step-9", "step-5"]
        assert (place.path / keeper.LOG).stat().st_mode & 0o777 == 0o600
        place.hold()  # the memory is still there, and a restart may use it
        assert keys(slot_storage(place), "step-9")

    def test_where_the_keeper_is_killed_too_the_root_has_its_last(self, folder: Path, memory: Path) -> None:
        save(LocalStorage(folder), "step-5", sequence=5)
        job, _, found = start_run(memory, folder, rescue={"after": 1.0})
        os.kill(found.process, signal.SIGKILL)
        kill(job)
        assert found.wait(10.0)
        assert steps(folder) == ["step-5"]

    def test_after_the_time_nothing_but_the_root_is_left(self, folder: Path, memory: Path) -> None:
        job, _, found = start_run(memory, folder, rescue={"after": 100.0}, linger=1.0)
        kill(job)
        assert found.wait(60.0)
        assert list(memory.iterdir()) == []
        assert steps(folder) == ["step-9"]

    def test_sigterm_hastens_it_and_does_not_tear_it(self, folder: Path, memory: Path) -> None:
        job, _, found = start_run(memory, folder, rescue={"after": 1000.0})
        kill(job)
        os.kill(found.process, signal.SIGTERM)
        children = Path(f"/proc/{found.process}/task/{found.process}/children")
        wait_until(lambda: not found.is_alive or _terminate_all(children), "the rescue has begun")
        assert found.wait(60.0)
        assert steps(folder) == ["step-9"]
        assert list(memory.iterdir()) == []  # it is saved, and the keeper was told to end

    def test_a_restart_in_time_is_not_rescued(self, folder: Path, memory: Path) -> None:
        job, place, found = start_run(memory, folder, rescue={"after": 1.5})
        kill(job)
        place.hold()
        assert not found.wait(2.5)
        assert steps(folder) == []

    def test_a_restart_may_change_the_settings(self, folder: Path, memory: Path) -> None:
        job, place, _ = start_run(memory, folder)
        kill(job)
        place.hold()
        place.record(rescue={**rescue_settings(LocalStorage(folder)), **AT_ONCE})
        assert start_keeper(place) is not None
        place.release()
        wait_until(lambda: "rescued step-9" in last_log_line(place), "it is rescued")

    def test_a_remote_root_is_reached_with_the_environment(self, s3: str, memory: Path) -> None:
        place = create_place(s3, rescue=AT_ONCE)
        assert start_keeper(place) is not None
        snapshot(place, "step-9", sequence=9)
        written = json.dumps(place.facts)
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in written
        place.release()
        wait_until(lambda: "rescued step-9" in last_log_line(place), "it is rescued")
        storage = open_storage(s3)
        assert problems(storage, read_manifest(storage, "step-9")) == []

    @pytest.mark.parametrize(("number", "said"), [(0, []), (9, ["the rescue was ended by signal 9"])])
    def test_the_keeper_logs_one_that_was_killed(self, folder: Path, number: int, said: list[str]) -> None:
        place, log = deserted(folder, 9, **AT_ONCE), list[str]()
        settings = {"library": str(Path(keeper.__file__).parents[2]), "linger": 10.0}
        watching: Any = SimpleNamespace(
            path=str(place.path), settings=settings, facts=lambda: place.facts, log=log.append
        )
        process = keeper.RescueProcess(watching)
        assert process.tend(1.0, hurry=False)
        assert process._child is not None
        os.kill(process._child, number)
        wait_until(lambda: not process.tend(1.0, hurry=False), "it has ended")
        assert log == said
        assert process.has_saved is (number == 0)

    def test_damage_is_in_the_log(self, folder: Path, memory: Path) -> None:
        place = deserted(folder, 9, **AT_ONCE)
        (place.slots / "step-9/state.json").write_bytes(b"{}")
        assert start_keeper(place) is not None
        wait_until(lambda: "not rescued: step-9 is damaged" in last_log_line(place), "it is logged")


def _terminate_all(children: Path) -> bool:
    """SIGTERM to every child of a process. Returns whether there was one."""
    try:
        found = [int(word) for word in children.read_text().split()]
    except OSError:
        return False
    for child in found:
        os.kill(child, signal.SIGTERM)
    return bool(found)
