"""A snapshot takes no memory that the machine, or the container, does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.util import memory_limit
from ckpt.util.memory_limit import available, reserve, spare

GB = 1 << 30


def files(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Of a machine that has 100 GB left."""
    files(tmp_path / "proc", meminfo=f"MemTotal: 1 kB\nMemAvailable: {100 * GB // 1024} kB")
    return tmp_path / "proc"


def test_this_machine_has_some() -> None:
    assert available() > 0


def test_without_control_groups_the_machine_says_it(proc: Path, tmp_path: Path) -> None:
    assert available(proc, tmp_path) == 100 * GB


def test_the_tightest_limit_of_the_groups_around_holds_and_cached_files_make_room(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    files(proc / "self", cgroup="0::/pod/con:tainer")
    cached = f"anon 7\ninactive_file {GB}\nactive_file {2 * GB}"
    files(groups / "pod", memory__max=16 * GB, memory__current=10 * GB, memory__stat=cached)
    files(groups / "pod" / "con:tainer", memory__max="max")
    assert available(proc, groups) == 9 * GB
    (groups / "pod" / "memory.stat").write_text("not a table")  # a system that says it in another way
    assert available(proc, groups) == 100 * GB
    (groups / "pod" / "memory.stat").write_text("anon 7")
    assert available(proc, groups) == 6 * GB
    files(groups / "pod" / "con:tainer", memory__max=GB, memory__current=2 * GB, memory__stat="anon 7")
    assert available(proc, groups) == 0


@pytest.mark.parametrize("path", ["/", "/docker/the-hosts-name-for-it"])
def test_the_first_version_of_control_groups_counts_too(proc: Path, tmp_path: Path, path: str) -> None:
    groups = tmp_path / "groups"
    files(proc / "self", cgroup=f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/")
    files(groups / "memory", memory__limit_in_bytes=(1 << 63) - 4096)
    assert available(proc, groups) == 100 * GB
    files(groups / "memory", memory__limit_in_bytes=8 * GB, memory__usage_in_bytes=6 * GB)
    files(groups / "memory", memory__stat=f"inactive_file 5\ntotal_inactive_file {GB}")
    assert available(proc, groups) == 3 * GB


def test_a_fifth_is_left_to_training_but_no_more_than_eight_gibibytes_or_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = {(10, 0): 2, (40 * GB, 0): 8 * GB, (100 * GB, 0): 8 * GB, (20 * GB, 5 * GB): 5 * GB, (20 * GB, 1): 4 * GB}
    assert {case: reserve(*case) for case in cases} == cases
    monkeypatch.setattr(memory_limit, "available", lambda: 20 * GB)
    assert spare() == 16 * GB


def test_a_machine_that_does_not_say_has_none(tmp_path: Path) -> None:
    files(tmp_path / "proc", meminfo="MemTotal: 1 kB")
    assert available(tmp_path / "proc", tmp_path) == 0
