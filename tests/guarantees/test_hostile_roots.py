"""One bad checkpoint never disables a root: everything continues with the others, whatever somebody has put there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from tests.helpers.forgery import write_manifest

pytestmark = pytest.mark.timeout(60)  # where it would wait for the other end of a pipe
Harm = Callable[[Path], None]


def reseal(folder: Path, **fields: Any) -> None:
    """Alter fields of a manifest, and make its digest anew."""
    text = (folder / FILE_NAME).read_bytes().split(b"\n", 2)[2]
    seal(folder, json.dumps({**json.loads(b"{" + text), **fields}).encode().removeprefix(b"{"))


def reseal_file(folder: Path, **fields: Any) -> None:
    """The same with the fields of its first file."""
    files = [dataclasses.asdict(file) for file in Manifest.from_bytes((folder / FILE_NAME).read_bytes(), "").files]
    reseal(folder, files=[{**files[0], **fields}, *files[1:]])


def seal(folder: Path, lines: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(lines).encode()
    write_manifest(folder, b'{\n "digest": "xxh3-128:' + digest + b'",\n' + lines)


def mark(folder: Path, **fields: Any) -> None:
    """A save marker beside the manifest of the newest checkpoint."""
    (folder / ".saving").write_text(json.dumps({"files": [], "replaces": [], **fields}))


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


MANIFESTS: dict[str, Harm] = {
    "a sequence that is text": lambda folder: reseal(folder, sequence="a"),
    "a sequence beyond all numbers": lambda folder: reseal(folder, sequence=10**300),
    "a time that is none": lambda folder: reseal(folder, created="yesterday"),
    "a time without its zone": lambda folder: reseal(folder, created="2025-01-01"),
    "a step that is text": lambda folder: reseal(folder, progress={"step": "5"}),
    "a metric that is a list": lambda folder: reseal(folder, metrics={"loss": []}),
    "seconds that are null": lambda folder: reseal(folder, seconds={"total": None}),
    "versions that are a list": lambda folder: reseal(folder, versions=["torch"]),
    "blocks of -1 bytes": lambda folder: reseal_file(folder, block_size=-1),
    "blocks of 0 bytes": lambda folder: reseal_file(folder, block_size=0),
    "no hashes": lambda folder: reseal_file(folder, blocks=[]),
    "a negative size": lambda folder: reseal_file(folder, size=-1),
    "a path that leads out": lambda folder: reseal_file(folder, path="../../victim"),
    "a path with NUL": lambda folder: reseal_file(folder, path="a\0b"),
    "a path that is too long": lambda folder: reseal_file(folder, path="a" * 3000),
    "JSON that is deep": lambda folder: seal(folder, b'"a": ' + b"[" * 100_000),
}
MARKERS: dict[str, Harm] = {
    "a time that is none": lambda folder: mark(folder, since="yesterday"),
    "a time that is a number": lambda folder: mark(folder, since=5),
    "a writer that is no process": lambda folder: mark(folder, writer=["boot", 1, "x", None]),
    "a writer with too little": lambda folder: mark(folder, writer=["boot"]),
    "files that lead out": lambda folder: mark(folder, files=["../../victim"]),
    "the manifest of a committed one": lambda folder: mark(folder, files=[FILE_NAME]),
    "JSON that is deep": lambda folder: write(folder / ".saving", b"[" * 100_000),
}


def replace_by(make: Callable[[Path], None], name: str) -> Harm:
    """Put something else in place of a file of the newest checkpoint."""

    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def listen(path: Path) -> None:
    """A socket in the file system, which is left there when it is closed."""
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/{path.name}")  # a path may be too long for an address
        os.close(here)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def lead_out(path: Path) -> None:
    path.symlink_to(path.parents[2] / "victim")


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": listen,
    "a folder": Path.mkdir,
    "a link to itself": loop,
    "a link that leads out": lead_out,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
}


class Root:
    """A root with an intact checkpoint, `old`, and a newer one, `new`, that somebody has harmed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        self.victim = folder / "victim"
        self.victim.write_bytes(b"mine")
        self.model = nn.Linear(2, 2)
        with ckpt.StateManager(self.path, model=self.model) as manager:
            manager.resume()
            for name in ("old", "new"):
                manager.step(metrics={"loss": 1.0})
                manager.save_state(name, wait=True)

    def run(self, *command: str) -> str:
        done = CliRunner().invoke(main, [command[0], str(self.path), *command[1:]])
        assert done.exit_code in (0, 1), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.output

    def check(self, tmp_path: Path, *, usable: str = "old") -> None:
        """Every reader continues with what is intact, and nothing outside the root was touched."""
        self.check_readers()
        ckpt.pull(self.path, tmp_path / "pulled", step=1)
        assert ckpt.verify(tmp_path / "pulled") == {"old": []}
        self.check_writers(tmp_path, usable)
        assert self.victim.read_bytes() == b"mine"

    def check_readers(self) -> None:
        assert "old" in self.run("ls")
        assert "old" in self.run("ls", "--verify")
        assert "at step " in self.run("report")
        assert ckpt.verify(self.path)["old"] == []
        self.run("verify")
        self.run("show")
        assert {"old"} <= {found.name for found in ckpt.list_checkpoints(self.path) if found.committed}

    def check_writers(self, tmp_path: Path, usable: str) -> None:
        ckpt.prune(self.path, keep=ckpt.Keep(last=1), dry_run=True)
        other = nn.Linear(2, 2)
        with ckpt.StateManager(self.path, model=other, mirror=tmp_path / "mirror") as manager:
            resumed = manager.resume()
            assert resumed is not None
            assert resumed.name == usable
            assert torch.equal(other.weight, self.model.weight)
            manager.save_state("more", wait=True)
        assert ckpt.verify(tmp_path / "mirror")["more"] == []
        ckpt.prune(self.path, keep=ckpt.Keep(last=2))
        assert ckpt.verify(self.path)["more"] == []


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_somebody_has_altered_and_sealed_again(tmp_path: Path, kind: str) -> None:
    root = Root(tmp_path)
    MANIFESTS[kind](root.path / "new")
    root.check(tmp_path)


@pytest.mark.parametrize("kind", MARKERS)
def test_a_save_marker_that_somebody_has_written(tmp_path: Path, kind: str) -> None:
    root = Root(tmp_path)
    MARKERS[kind](root.path / "new")
    root.check(tmp_path, usable="new")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((FILE_NAME, kind) for kind in NO_FILES),
        *((name, "a named pipe") for name in ("state.json", "model.safetensors", "rank-00000.json")),
        ("model.safetensors", "a link that leads out"),
    ],
)
def test_something_that_is_no_file_in_place_of_a_file(tmp_path: Path, name: str, kind: str) -> None:
    root = Root(tmp_path)
    replace_by(NO_FILES[kind], name)(root.path / "new")
    root.check(tmp_path, usable="new" if name == FILE_NAME else "old")  # the manifest has a copy


@pytest.mark.parametrize("kind", NO_FILES)
def test_something_that_is_no_file_in_place_of_a_manifest_and_of_its_copy(tmp_path: Path, kind: str) -> None:
    root = Root(tmp_path)
    for name in (FILE_NAME, COPY_NAME):
        replace_by(NO_FILES[kind], name)(root.path / "new")
    root.check(tmp_path)


@pytest.mark.parametrize("kind", NO_FILES)
def test_something_that_is_no_file_in_place_of_a_save_marker(tmp_path: Path, kind: str) -> None:
    root = Root(tmp_path)
    replace_by(NO_FILES[kind], ".saving")(root.path / "new")
    root.check(tmp_path, usable="new")


@pytest.mark.parametrize("kind", NO_FILES)
def test_something_that_is_no_folder_in_place_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    root = Root(tmp_path)
    shutil.rmtree(root.path / "new")
    NO_FILES[kind](root.path / "new")
    root.check(tmp_path)
    with ckpt.StateManager(root.path, model=nn.Linear(2, 2)) as manager, pytest.raises(ckpt.CkptError):
        manager.load_state("new")


@pytest.mark.parametrize("name", ["a\\b", "\udce9", "with\nlines", "x" * 255, "..x", " ", "-rf"])
def test_names_that_no_checkpoint_has(tmp_path: Path, name: str) -> None:
    root = Root(tmp_path)
    os.rename(root.path / "new", root.path / name)
    root.run("ls")
    found = {checkpoint.name for checkpoint in ckpt.list_checkpoints(root.path) if checkpoint.committed}
    assert "old" in found
    with ckpt.StateManager(root.path, model=nn.Linear(2, 2)) as manager:
        assert manager.resume() is not None


def test_of_a_manifest_with_too_many_bytes_a_bounded_part_is_read(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for name in (FILE_NAME, COPY_NAME):
        with open(root.path / "new" / name, "r+b") as file:
            file.truncate(1 << 40)  # a hole
    assert [found.name for found in ckpt.list_checkpoints(root.path) if found.committed] == ["old"]


def test_a_flipped_byte_is_found_though_the_manifest_lists_no_hashes(tmp_path: Path) -> None:
    root = Root(tmp_path)
    path = root.path / "new" / Manifest.from_bytes((root.path / "new" / FILE_NAME).read_bytes(), "").files[0].path
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    reseal_file(root.path / "new", blocks=[])
    assert "hashes" in ckpt.verify(root.path)["new"][0]


def test_the_last_of_all_numbers_keeps_nobody_from_saving(tmp_path: Path) -> None:
    root = Root(tmp_path)
    reseal(root.path / "new", sequence=2**53 - 1)
    for name in ("more", "most"):
        with ckpt.StateManager(root.path, model=nn.Linear(2, 2)) as manager:
            manager.resume()
            manager.save_state(name, wait=True)
        assert next(found.name for found in ckpt.list_checkpoints(root.path)) == name
