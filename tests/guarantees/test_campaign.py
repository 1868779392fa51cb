"""A slice of `make campaign`, and that it finds what it is there to find."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.crashed_disk import Disk, Record

_ROOT = Path(__file__).parents[2]
_SHIM = {"kill-call", "save-call", "resume-call", "rank-call", "power"}
_OTHERS = {
    "kill", "kill-ddp", "kill-fsdp", "kill-host", "damage", "damage-all", "memory", "keeper", "mirror", "hub",
    "rank-killed", "rank-stopped", "sigterm", "sigint", "fork", "prune", "verify", "pull",
}  # fmt: skip

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


def _campaign(report: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "tests.campaign", "--report", str(report), "--scratch", str(report.parent)]
    done = subprocess.run([*command, *options], cwd=_ROOT, capture_output=True, text=True, timeout=800)
    assert report.exists(), done.stderr[-4000:]
    return done.returncode, json.loads(report.with_suffix(".json").read_text()), report.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slice_of_the_campaign_loses_nothing_and_loads_nothing_wrong(tmp_path: Path) -> None:
    status, told, text = _campaign(tmp_path / "report.md", "--trials", "30", "--seed", "14")
    kinds = {one["kind"] for one in told["verdicts"]}
    assert kinds >= _OTHERS
    assert kinds >= _SHIM or "no C compiler" in text
    assert status == 0, text
    assert str(tmp_path) not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]


@pytest.mark.slow
@pytest.mark.long
@needs_compiler
@pytest.mark.timeout(900)
def test_the_campaign_finds_writes_that_are_not_synced_and_bytes_that_are_not_compared(tmp_path: Path) -> None:
    planted = ("--plant", "no-fsync", "no-hash", "--only", "power", "damage")
    status, told, text = _campaign(tmp_path / "report.md", "--trials", "24", "--seed", "3", *planted)
    found = Counter((one["kind"], one.get("fault")) for one in told["verdicts"])
    assert status == 1
    assert found["power", "lost"] > 0, text
    assert found["damage", "silently wrong"] > 0, text
    assert "--only power --index" in text


def _record(name: str, path: str, *, fd: int = 3, offset: int = 0, data: bytes = b"", other: str = "") -> Record:
    return Record(name, 1, fd, 0, offset, len(data), path, other, data)


def _crashes(folder: Path, *records: Record) -> set[tuple[tuple[str, bytes], ...]]:
    """The files that are there after a power failure, in many trials."""
    seen = set()
    for number in range(60):
        disk = Disk()
        for record in records:
            disk.apply(record)
        target = folder / f"crash-{number}"
        disk.crash(target, random.Random(number))
        seen.add(tuple(sorted((path.name, path.read_bytes()) for path in target.iterdir())))
    return seen


_WRITTEN = (_record("open", "a.tmp", offset=-1), _record("write", "a.tmp", data=b"x" * 1024))
_SYNCED = (*_WRITTEN, _record("fsync", "a.tmp"))
_NAMED = _record("rename", "a", other="a.tmp")
_FOLDER = (_record("open", ".", fd=4, offset=-1), _record("fsync", ".", fd=4))


def test_what_was_synced_with_its_folder_is_there_after_every_power_failure(tmp_path: Path) -> None:
    assert _crashes(tmp_path, *_SYNCED, _NAMED, *_FOLDER) == {(("a", b"x" * 1024),)}


def test_a_name_whose_folder_was_not_synced_may_be_lost_or_be_the_old_one(tmp_path: Path) -> None:
    found = _crashes(tmp_path, *_SYNCED, _NAMED)
    assert found == {(), (("a.tmp", b"x" * 1024),), (("a", b"x" * 1024),)}


def test_bytes_that_were_not_synced_may_be_missing_or_torn(tmp_path: Path) -> None:
    found = _crashes(tmp_path, *_WRITTEN, _NAMED, *_FOLDER)
    assert found == {(("a", b""),), (("a", b"x" * 512),), (("a", b"x" * 1024),)}
