"""Places that are only read from: a web server with and without an index and ranges, and a zip file."""

from __future__ import annotations

import http.server
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import open_storage, retry
from ckpt.storage.fsspec_stores import ReadOnlyStorage

NAME = "step-00000002"


class _Server(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP. The standard library's handler knows no ranges."""

    protocol_version = "HTTP/1.1"
    has_index = has_ranges = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def list_directory(self, path: Any) -> Any:
        if self.has_index:
            return super().list_directory(path)
        self.send_error(404)
        return None

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not (asked and self.has_ranges and path.is_file()):
            return super().do_GET()
        data = path.read_bytes()
        start, stop = int(asked[1]), min(len(data), int(asked[2] or len(data)) + 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start:stop])
        return None

    def end_headers(self) -> None:
        if self.has_ranges:
            self.send_header("Accept-Ranges", "bytes")
        super().end_headers()


@contextmanager
def serving(folder: Path, **behaviour: bool) -> Iterator[str]:
    kind = type("Server", (_Server,), behaviour)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(40, 30)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    with ckpt.StateManager(root, model=model()) as manager:
        for step in (1, 2):
            manager.progress.step = step
            manager.save_state(wait=True)
    return root


@pytest.fixture(params=["ranges", "no ranges", "zip stored", "zip deflated"])
def source(request: pytest.FixtureRequest, run: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of the root."""
    if request.param.startswith("zip"):
        how = zipfile.ZIP_STORED if "stored" in request.param else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(tmp_path / "run.zip", "w", how) as archive:
            for path in sorted(run.rglob("*")):
                archive.write(path, Path("exported", path.relative_to(run)))
        yield f"zip://exported::{tmp_path / 'run.zip'}"
        return
    with serving(tmp_path, has_ranges=request.param == "ranges") as url:
        yield f"{url}/run"


def _inside(source: str, name: str) -> str:
    folder, chain, archive = source.partition("::")
    return f"{folder}/{name}{chain}{archive}"


def test_everything_that_reads_takes_it(source: str, run: Path, tmp_path: Path) -> None:
    assert [found.name for found in ckpt.list_checkpoints(source)] == [NAME, "step-00000001"]
    assert ckpt.verify(source) == {NAME: [], "step-00000001": []}
    assert ckpt.verify(_inside(source, NAME)) == {NAME: []}
    loaded = model(1)
    ckpt.load_model(_inside(source, NAME), loaded)
    assert torch.equal(loaded.weight, model().weight)
    ckpt.load_model(source, loaded := model(1))
    assert torch.equal(loaded.weight, model().weight)
    ckpt.merge(_inside(source, NAME), tmp_path / "model.safetensors")
    ckpt.merge(run / NAME, tmp_path / "expected.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert ckpt.pull(source, tmp_path / "back") == str(tmp_path / "back")
    assert ckpt.verify(tmp_path / "back") == {NAME: [], "step-00000001": []}
    for command in ("ls", "show", "verify"):
        done = CliRunner().invoke(main, [command, source])
        assert done.exit_code == 0, done.output
        assert NAME in done.output


def test_nothing_is_written_there(source: str) -> None:
    with pytest.raises(ckpt.DeniedError, match="is read-only: you can load, verify, show, merge and pull from it"):
        ckpt.StateManager(source, model=model())
    with pytest.raises(ckpt.DeniedError, match="is read-only"):
        open_storage(source).write("a", [b"x"])
    with pytest.raises(ckpt.DeniedError, match="is read-only"):
        open_storage(source).delete(["a"])
    with pytest.raises(ckpt.DeniedError, match="is read-only"):
        open_storage(source).sweep()


def test_damage_is_noticed_there_too(run: Path, tmp_path: Path) -> None:
    path = run / NAME / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with serving(tmp_path) as url, pytest.raises(ckpt.DamagedError, match="was altered"):
        ckpt.load_model(f"{url}/run/{NAME}", model())


def test_a_checkpoint_on_a_server_without_an_index_is_found_by_its_manifest(run: Path, tmp_path: Path) -> None:
    with serving(tmp_path, has_index=False) as url:
        assert ckpt.verify(f"{url}/run/{NAME}") == {NAME: []}
        ckpt.load_model(f"{url}/run/{NAME}", loaded := model(1))
        assert torch.equal(loaded.weight, model().weight)
        ckpt.pull(f"{url}/run/{NAME}", tmp_path / "back")
        with pytest.raises(ckpt.MissingError, match="provides neither a list of its files"):
            ckpt.verify(f"{url}/run")
        (run / NAME / "model.safetensors").unlink()
        assert ckpt.verify(f"{url}/run/{NAME}") == {NAME: ["model.safetensors is missing"]}
    assert ckpt.verify(tmp_path / "back") == {NAME: []}


def test_a_server_that_is_away_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_CONTACT", 0.2)
    with pytest.raises(ckpt.CkptError, match=r"http://127\.0\.0\.1:9/run"):
        ckpt.verify("http://127.0.0.1:9/run")


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1/run", "zip::http://me:secret@127.0.0.1/run.zip"])
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ckpt.ConfigError, match="credentials") as caught:
        ckpt.verify(url)
    assert "secret" not in str(caught.value)


def test_an_archive_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StorageError, match=r"none\.zip"):
        ckpt.verify(f"zip::{tmp_path / 'none.zip'}")
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(ckpt.StorageError, match=r"text\.zip cannot be opened"):
        ckpt.verify(f"zip::{tmp_path / 'text.zip'}")


def test_an_archive_with_the_files_of_a_checkpoint_but_not_its_folder_is_refused(run: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "files.zip", "w") as archive:
        for path in (run / NAME).iterdir():
            archive.write(path, path.name)
    with pytest.raises(ckpt.StorageError, match=r"at its top level, .*\. Put the checkpoint's folder"):
        ckpt.verify(f"zip::{tmp_path / 'files.zip'}")


def test_a_bit_that_flipped_in_an_archive_is_damage_of_the_one_checkpoint(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = tmp_path / "run.zip"
    with zipfile.ZipFile(where, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(run.rglob("*")):
            archive.write(path, path.relative_to(tmp_path))
        flipped = archive.getinfo(f"run/{NAME}/model.safetensors")
    data = bytearray(where.read_bytes())
    data[flipped.header_offset + 30 + len(flipped.filename) + flipped.compress_size // 2] ^= 1
    where.write_bytes(data)
    problems = ckpt.verify(f"zip://run::{where}")
    assert {name for name, found in problems.items() if found} == {NAME}
    assert "cannot be unpacked: the archive is damaged" in problems[NAME][0]
    with pytest.raises(ckpt.DamagedError, match="cannot be unpacked"):
        ckpt.load_model(f"zip://run/{NAME}::{where}", model())
    ckpt.load_model(f"zip://run::{where}", model())  # an older one, which is said
    assert f"ckpt skips the newer checkpoint {NAME}: " in caplog.text


def test_a_range_of_a_copy_is_read_by_one_thread_at_a_time(tmp_path: Path) -> None:
    storage: Any = ReadOnlyStorage(f"file://{tmp_path}", {})
    seen: list[bool] = []

    class File(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            seen.append(storage._guard.locked())
            return super().read(size)

    storage._whole["a"] = File(b"0123456789")
    assert storage._range("a", 2, 5) == b"234"
    assert seen == [True]
    assert not storage._guard.locked()
