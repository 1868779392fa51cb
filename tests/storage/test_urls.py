from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.errors import ConfigError, SchemeError
from ckpt.storage import LocalStorage, MemoryStorage, Storage, disk_path, open_storage


def written_at(root: str | os.PathLike[str], path: Path) -> bool:
    """Whether what is written to the storage of `root` arrives below `path`."""
    open_storage(root).write("folder/object", [b"x"])
    return (path / "folder" / "object").is_file()


def test_a_plain_path_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert written_at(f"{tmp_path}/absolute", tmp_path / "absolute")
    assert written_at("relative/deeper", tmp_path / "relative" / "deeper")
    assert written_at("slash/", tmp_path / "slash")


def test_a_path_object_is_a_directory(tmp_path: Path) -> None:
    assert written_at(tmp_path / "runs", tmp_path / "runs")
    assert open_storage(tmp_path / "runs").url == str(tmp_path / "runs")


def test_a_plain_path_is_taken_literally(tmp_path: Path) -> None:
    for name in ("50%25", "a b", "a:b", "s3:", "http:x", "a?b#c"):
        assert written_at(f"{tmp_path}/{name}", tmp_path / name)


@pytest.mark.parametrize("start", ["file://", "FILE://", "file://localhost"])
def test_a_file_url_is_a_directory(tmp_path: Path, start: str) -> None:
    storage = open_storage(f"{start}{tmp_path}/runs")
    assert isinstance(storage, LocalStorage)
    assert written_at(f"{start}{tmp_path}/runs", tmp_path / "runs")


@pytest.mark.parametrize(
    ("written", "name"),
    [("my%20runs", "my runs"), ("50%25", "50%"), ("%E2%80%A6", "…"), ("a%23b", "a#b"), ("a b", "a b")],
)
def test_a_file_url_is_percent_decoded_once(tmp_path: Path, written: str, name: str) -> None:
    assert written_at(f"file://{tmp_path}/{written}", tmp_path / name)
    assert written_at(f"file://{tmp_path}/{written.replace('%', '%25')}", tmp_path / written)


@pytest.mark.parametrize("url", ["file://runs", "file://host/runs", "file://", "file://./runs"])
def test_a_file_url_without_an_absolute_path_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"Write file:///absolute/path, or a plain path"):
        open_storage(url)


def test_a_memory_url_names_a_space() -> None:
    storage = open_storage("memory://test-urls/one")
    storage.write("object", [b"x"])
    assert isinstance(storage, MemoryStorage)
    assert storage.url == "memory://test-urls/one"
    assert open_storage("MEMORY://test-urls/one/").read("object") == b"x"
    assert not list(open_storage("memory://test-urls/two").list())


def test_a_storage_is_itself(tmp_path: Path) -> None:
    for storage in (LocalStorage(tmp_path), MemoryStorage("test-urls")):
        assert open_storage(storage) is storage


def test_an_unknown_scheme_is_refused_with_the_known_ones_and_the_way_to_add_one() -> None:
    with pytest.raises(SchemeError) as raised:
        open_storage("gopher://host/runs")
    message = str(raised.value)
    assert "ckpt has no storage for gopher:// (in 'gopher://host/runs')" in message
    assert all(known in message for known in ("a plain path", "file://", "memory://"))
    assert "entry point group 'ckpt.storage'" in message


def test_an_installed_package_adds_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shouting_storage.py").write_text(
        "from ckpt.storage import MemoryStorage\n\ndef open_shouting(rest):\n    return MemoryStorage(rest.upper())\n"
    )
    distribution = tmp_path / "shouting-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[ckpt.storage]\nshout = shouting_storage:open_shouting\n")
    monkeypatch.syspath_prepend(tmp_path)
    storage: Storage = open_storage("shout://quiet")
    assert storage.url == "memory://QUIET"
    with pytest.raises(SchemeError, match="shout://"):
        open_storage("gopher://host")


@pytest.mark.parametrize("root", ["", b"bytes"])
def test_what_is_neither_a_path_nor_a_url_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="must be a path or a URL"):
        open_storage(root)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("s3:bucket/run", "s3://bucket/run"), ("HUB:me/run", "HUB://me/run"), ("file:/runs/a", "file:///runs/a")],
)
def test_a_url_without_its_slashes_is_refused_with_the_line_to_write(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"'{meant}'"):
        open_storage(written)


@pytest.mark.parametrize("url", ["s3://bucket/a/../run", "gs://bucket/./run", "az://container/a/..", "s3://bucket/."])
def test_dots_in_the_url_of_an_object_store_are_refused_with_what_they_may_mean(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"contains '\.' or '\.\.'.* Did you mean '\w+://(bucket|container)(/run)?'\?"
    ):
        open_storage(url)


def test_what_is_written_to_a_disk_alone_takes_a_path_or_a_file_url(tmp_path: Path) -> None:
    assert disk_path(tmp_path, "a model") == str(tmp_path)
    assert disk_path("./s3:bucket", "a model") == "./s3:bucket"
    assert disk_path("file:///my%20runs", "a model") == disk_path("FILE://localhost/my runs", "a model") == "/my runs"


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "zip::run.zip", "https://host/run"])
def test_what_is_written_to_a_disk_alone_takes_no_other_url(url: str) -> None:
    with pytest.raises(ConfigError, match=f"{url} is a URL, but ckpt writes a model only to a disk"):
        disk_path(url, "a model")
    with pytest.raises(ConfigError, match=r"lost a slash|is no URL|is a URL"):
        disk_path(Path(url), "a model")
