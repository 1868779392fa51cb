"""`ckpt prune`: old checkpoints and leftovers of crashed saves go, and nothing else does."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import LocalStorage, open_storage
from tests.cli.test_main import flip_a_bit, truncate
from tests.helpers.hub_server import HubServer
from tests.helpers.places import intact
from tests.helpers.seaweed import Server
from tests.storage.test_s3 import begin_upload, unfinished, uploads

DAY = 24 * 3600.0

_SAVE = """
import os, signal, sys
from ckpt.root.lock import lock_root
from ckpt.root.write_link_commit import Attempt
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.storage import LocalStorage, open_storage
from contextlib import ExitStack

held = ExitStack()
root, how = open_storage(sys.argv[1]), sys.argv[2]
lock_root(root, held)
attempt = Attempt("step-00000009")
attempt.begin(root, ["model.safetensors", "state.json"])
root.write("step-00000009/state.json", [b"{}"])

def pieces():
    for _ in range(40):
        yield bytes(1 << 20)
    print("in the middle", flush=True)
    sys.stdin.readline()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

root.write("step-00000009/model.safetensors", pieces())
print("written", flush=True)
sys.stdin.readline()
held.close()
"""

_REMOVE = """
import os, signal, sys
from ckpt.root import catalog, deletion
from ckpt.storage import LocalStorage, open_storage

root = open_storage(sys.argv[1])
delete = root.delete

def cut_off(keys):
    delete(list(keys)[:1])
    os.kill(os.getpid(), signal.SIGKILL)

root.delete = cut_off
deletion.remove(root, catalog.read_manifest(root, "step-00000001"))
"""


def save(root: str | Path, losses: list[float]) -> None:
    with ckpt.StateManager(root, model=nn.Linear(100, 10), save_every=1) as manager:
        manager.resume()
        for loss in losses:
            manager.step(metrics={"loss": loss})


def steps(root: str | Path) -> list[int | None]:
    return [checkpoint.step for checkpoint in ckpt.list_checkpoints(root)]


def keys(root: str | Path) -> set[str]:
    return {entry.key for entry in open_storage(str(root)).list()}


def prune(*arguments: object, yes: bool = True) -> Result:
    return CliRunner().invoke(main, ["prune", *map(str, arguments), *(["--yes"] if yes else [])])


@contextmanager
def saving(root: str, how: str = "to the end") -> Iterator[subprocess.Popen[str]]:
    """A process that has the root and is in the middle of a save."""
    command = [sys.executable, "-c", _SAVE, root, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def crash(root: str) -> None:
    with saving(root, "killed") as process:
        tell(process)
        assert process.wait(60) == -signal.SIGKILL


class TestRetention:
    def test_what_keep_lets_go_goes(self, root: str) -> None:
        save(root, [3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
        manifests = [checkpoint.manifest for checkpoint in ckpt.list_checkpoints(root)]
        size = sum(manifest.size for manifest in manifests if manifest and manifest.step in (1, 3))
        done = ckpt.prune(root, keep=ckpt.Keep(last=2, best=1, metric="loss", every=4))
        assert steps(root) == [6, 5, 4, 2]
        assert list(done.removed) == ["step-00000003", "step-00000001"]
        assert done.size == size
        assert set(done.kept) == {f"step-{step:08d}" for step in (2, 4, 5, 6)}
        assert intact(root)

    def test_without_keep_all_stay(self, root: str) -> None:
        save(root, [1.0] * 3)
        assert ckpt.prune(root, grace=0).size == 0
        assert steps(root) == [3, 2, 1]

    def test_a_dry_run_removes_nothing_and_says_what_would_go(self, root: str) -> None:
        save(root, [1.0] * 3)
        before = keys(root)
        assert list(ckpt.prune(root, keep=ckpt.Keep(last=1), dry_run=True).removed) == [
            "step-00000002",
            "step-00000001",
        ]
        assert keys(root) == before

    def test_the_last_intact_one_stays_whatever_the_newer_ones_look_like(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0] * 4)
        flip_a_bit(tmp_path / "step-00000004" / "model.safetensors")
        truncate(tmp_path / "step-00000003" / "model.safetensors")
        done = ckpt.prune(tmp_path, keep=ckpt.Keep(last=1))
        assert list(done.removed) == ["step-00000001"]
        assert done.damaged.keys() == {"step-00000003", "step-00000004"}
        assert ckpt.verify(tmp_path)["step-00000002"] == []

    def test_where_none_is_intact_all_stay(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0] * 2)
        for step in (1, 2):
            flip_a_bit(tmp_path / f"step-0000000{step}" / "model.safetensors")
        assert ckpt.prune(tmp_path, keep=ckpt.Keep(last=1)).size == 0
        assert steps(tmp_path) == [2, 1]

    def test_without_verifying_sizes_alone_are_compared(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0] * 3)
        flip_a_bit(tmp_path / "step-00000003" / "model.safetensors")
        ckpt.prune(tmp_path, keep=ckpt.Keep(last=1), verify=False)
        assert steps(tmp_path) == [3]

    def test_one_that_is_being_read_stays_and_is_named(self, root: str) -> None:
        save(root, [1.0] * 3)
        with open_storage(root).lock("step-00000001", shared=True):
            done = ckpt.prune(root, keep=ckpt.Keep(last=1))
        assert list(done.removed) == ["step-00000002"]
        assert done.spared == {"step-00000001": "is being read"}
        assert steps(root) == [3, 1]

    def test_while_a_run_goes_on_old_ones_can_be_removed(self, root: str) -> None:
        model = nn.Linear(4, 4)
        with ckpt.StateManager(root, model=model, save_every=1) as manager:
            manager.resume()
            for _ in range(4):
                manager.step()
            manager.wait()
            ckpt.prune(root, keep=ckpt.Keep(last=2))
            manager.step()
        assert steps(root) == [5, 4, 3]
        assert intact(root)

    @pytest.mark.slow
    def test_a_removal_that_was_cut_off_is_finished_by_the_next(self, root: str) -> None:
        save(root, [1.0] * 2)
        assert subprocess.run([sys.executable, "-c", _REMOVE, root], check=False).returncode == -signal.SIGKILL
        assert steps(root) == [2, None]
        done = ckpt.prune(root, grace=0)
        assert list(done.swept) == ["step-00000001"]
        assert {key.partition("/")[0] for key in keys(root)} - {".lock", ".history.jsonl"} == {"step-00000002"}


class TestLeftovers:
    @pytest.mark.slow
    @pytest.mark.parametrize("place", ["root", "s3"])
    def test_a_crashed_save_is_swept_after_the_grace_period(self, request: pytest.FixtureRequest, place: str) -> None:
        root = request.getfixturevalue(place)
        save(root, [1.0])
        before = keys(root)
        crash(root)
        early = ckpt.prune(root, grace=DAY)
        assert early.swept == {}
        assert re.fullmatch(r"was left \d+ (s|min) ago, which is less than \d+ \w+", early.spared["step-00000009"])
        assert "step-00000009/state.json" in keys(root)
        done = ckpt.prune(root, grace=0)
        assert done.swept.keys() == {"step-00000009"}
        assert keys(root) == before
        assert list(open_storage(root).unfinished()) == []

    @pytest.mark.slow
    def test_uploads_outside_of_any_checkpoint_are_swept_too(self, server: Server, s3: str) -> None:
        save(s3, [1.0])
        begin_upload(server, s3, "export/model.safetensors", 1)
        assert ckpt.prune(s3).swept == {}
        assert uploads(server, s3) == ["export/model.safetensors"]
        done = ckpt.prune(s3, grace=0)
        assert done.swept == {"export/model.safetensors": 5 << 20}
        assert uploads(server, s3) == []

    @pytest.mark.slow
    def test_a_save_under_way_is_never_touched(self, root: str, tmp_path: Path) -> None:
        save(root, [1.0])
        with saving(root) as process:
            unfinished(root, "export/model.safetensors", tmp_path / "log")
            done = ckpt.prune(root, grace=0)
            assert done.swept == {}
            assert "another run writes to" in done.spared["step-00000009"]
            assert any(name.startswith("export/") for name in done.spared)
            tell(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
        assert {"step-00000009/state.json", "step-00000009/model.safetensors"} <= keys(root)

    def test_what_somebody_else_has_put_there_stays(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0])
        (tmp_path / "step-00000005").mkdir()
        (tmp_path / "step-00000005" / "state.json").write_text("{}")
        (tmp_path / "notes.txt").write_text("mine")
        ckpt.prune(tmp_path, keep=ckpt.Keep(last=1), grace=0)
        assert (tmp_path / "step-00000005" / "state.json").exists()
        assert (tmp_path / "notes.txt").exists()


class TestCommand:
    def test_it_shows_what_goes_and_how_much(self, root: str) -> None:
        save(root, [2.0, 1.0, 3.0, 4.0])
        result = prune(root, "--keep-last", 1, "--keep-best", 1, "--metric", "loss")
        lines = result.output.splitlines()
        assert [line.split()[:2] for line in lines[1:5]] == [
            ["remove", "step-00000003"],
            ["remove", "step-00000001"],
            ["keep", "step-00000004"],
            ["keep", "step-00000002"],
        ]
        assert re.fullmatch(r"removed 2 checkpoints, \d+\.\d kB", lines[-1])
        assert steps(root) == [4, 2]

    def test_it_goes_on_where_one_cannot_be_removed_and_ends_with_status_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(tmp_path, [1.0, 1.0, 1.0])
        delete = LocalStorage.delete

        def refusing(storage: LocalStorage, keys: Iterable[str]) -> None:
            there = list(keys)
            if any(key.startswith("step-00000002/") for key in there):
                raise ckpt.StorageError("not permitted")
            delete(storage, there)

        monkeypatch.setattr(LocalStorage, "delete", refusing)
        result = prune(tmp_path, "--keep-last", 1)
        assert result.exit_code == 1
        assert "step-00000002, which could not be removed: not permitted" in caplog.text
        assert "step-00000002 is kept" not in result.output
        assert "removed 1 checkpoint, " in result.output
        assert steps(tmp_path) == [3, 2]

    @pytest.mark.slow
    def test_leftovers_that_are_too_young_are_named_with_their_age(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0])
        crash(str(tmp_path))
        result = prune(tmp_path)
        assert re.search(r"(?m)^leave +step-00000009 +was left \d+ s ago, which is less than 24 h$", result.output)
        assert "There is nothing to remove." in result.output
        assert prune(tmp_path, "--grace", "0s").output.splitlines()[-1].startswith("removed 1 leftover, ")

    @pytest.mark.slow
    @pytest.mark.parametrize(("answer", "left"), [("n", [3, 2, 1]), ("y", [3])])
    def test_on_a_terminal_it_asks(self, tmp_path: Path, answer: str, left: list[int]) -> None:
        save(tmp_path, [1.0] * 3)
        main_end, child_end = pty.openpty()
        command = [sys.executable, "-m", "ckpt", "prune", str(tmp_path), "--keep-last", "1"]
        with subprocess.Popen(command, stdin=child_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            os.write(main_end, f"{answer}\n".encode())
            _, asked = process.communicate(timeout=60)
        os.close(main_end)
        os.close(child_end)
        assert b"Remove 2 checkpoints, " in asked
        assert steps(tmp_path) == left

    def test_without_a_terminal_and_without_yes_it_refuses(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0] * 3)
        result = prune(tmp_path, "--keep-last", 1, yes=False)
        assert result.exit_code == 2
        assert re.search(r"nothing was removed, .* remove 2 checkpoints, .*add --yes.*add --dry-run", result.output)
        assert steps(tmp_path) == [3, 2, 1]
        assert prune(tmp_path, "--keep-last", 3, yes=False).exit_code == 0  # there is nothing to ask for

    def test_a_typo_in_the_metric_removes_nothing_and_names_those_there_are(self, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path, model=nn.Linear(4, 4), save_every=1) as manager:
            manager.resume()
            for loss in range(10):
                manager.step(metrics={"loss": loss, "acc": 1.0})
        result = prune(tmp_path, "--keep-best", 2, "--metric", "los")
        assert result.exit_code == 1
        assert "no checkpoint has a metric 'los'; there are: loss, acc. Nothing was removed." in result.output
        with pytest.raises(ckpt.MetricError, match="no checkpoint has a metric 'los'"):
            ckpt.prune(tmp_path, keep=ckpt.Keep(best=2, metric="los"))
        assert len(steps(tmp_path)) == 10

    def test_dry_run_neither_asks_nor_removes(self, tmp_path: Path) -> None:
        save(tmp_path, [1.0] * 2)
        assert "remove" in prune(tmp_path, "--keep-last", 1, "--dry-run").output
        assert steps(tmp_path) == [2, 1]

    @pytest.mark.parametrize(
        ("options", "code", "said"),
        [
            (["--grace", "soon"], 2, "is not a duration"),
            (["--keep-last", "0"], 1, "the newest checkpoint is never removed"),
            (["--metric", "loss"], 1, "needs best=1"),
        ],
    )
    def test_nonsense_is_refused(self, tmp_path: Path, options: list[str], code: int, said: str) -> None:
        save(tmp_path, [1.0] * 2)
        result = prune(tmp_path, *options)
        assert result.exit_code == code
        assert said in result.output
        assert steps(tmp_path) == [2, 1]

    def test_where_there_is_nothing_it_says_so(self, tmp_path: Path) -> None:
        result = prune(tmp_path / "absent")
        assert result.exit_code == 1
        assert "there is nothing at" in result.output
        assert not (tmp_path / "absent").exists()


@pytest.mark.slow
def test_on_the_hub_the_history_is_forgotten_with_what_was_removed(hub: HubServer, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ckpt.StateManager("hub://me/run", model=model, storage_options={"interval": 0}) as manager:
        for name in ("a", "b"):
            manager.save_state(name, wait=True)
    assert len(hub.commits("me/run")) >= 2
    command = ["prune", "hub://me/run", "--keep-last", "1", "--squash"]
    assert CliRunner().invoke(main, command).exit_code == 2  # nobody can be asked
    done = CliRunner().invoke(main, [*command, "--yes"])
    assert done.exit_code == 0, done.output
    assert "has one commit now" in done.output
    assert hub.commits("me/run") == []  # but the one that every repository has
    assert ckpt.verify("hub://me/run") == {"b": []}
    done = CliRunner().invoke(main, ["prune", str(tmp_path), "--squash"])
    assert done.exit_code == 2
    assert "--squash works only on the Hub" in done.output
