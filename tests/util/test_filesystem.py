"""The filesystem below a path, from the list of mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.errors import ConfigError
from ckpt.util.filesystem import count_names, expand_home, filesystem_type, is_on_network, why_not_creatable

MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:40 / /data rw - nfs4 server:/data rw
23 22 8:2 / /data/local rw - xfs /dev/sdb1 rw
24 21 0:41 / /with\040space rw - fuse.sshfs me@there: rw
25 21 8:3 / /covered rw - ext4 /dev/sdc1 rw
27 21 0:43 / /virtual rw - overlay overlay rw
26 25 0:42 / /covered rw master:2 propagate_from:3 - lustre mgs@tcp:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "expected", "network"),
    [
        ("/runs/1", "ext4", False),
        ("/data", "nfs4", True),
        ("/data/run", "nfs4", True),
        ("/database", "ext4", False),
        ("/data/local/run", "xfs", False),
        ("/with space/run", "fuse.sshfs", True),
        ("/covered/run", "lustre", True),
        ("/virtual", "overlay", False),
    ],
)
def test_the_deepest_mount_counts(tmp_path: Path, path: str, expected: str, network: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert filesystem_type(path, mounts) == expected
    assert is_on_network(path, mounts) == network


def test_a_type_with_a_long_name_hides_no_mount_with_a_short_one(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /d rw - xfs /dev/sda rw\n")
    assert filesystem_type("/d/run", tmp_path / "mounts") == "xfs"


def test_a_system_without_such_a_list_counts_as_local(tmp_path: Path) -> None:
    assert not is_on_network("/", tmp_path / "none")


def test_the_names_of_a_file_are_counted(tmp_path: Path) -> None:
    assert count_names(str(tmp_path / "a")) == 0
    (tmp_path / "a").touch()
    os.link(tmp_path / "a", tmp_path / "b")
    assert count_names(str(tmp_path / "a")) == 2


def test_a_tilde_is_the_home_folder_unless_there_is_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = ["~", "~/run", "a/~/b", "/~", "s3://b/~x"]
    assert [expand_home(path) for path in given] == ["/home/me", "/home/me/run", "a/~/b", "/~", "s3://b/~x"]
    with pytest.raises(ConfigError, match="~nobody-x/run: there is no user 'nobody-x' with a home folder"):
        expand_home("~nobody-x/run")
    (tmp_path / "~").mkdir()
    (tmp_path / "~nobody-x").symlink_to("nowhere")
    assert [expand_home(path) for path in ("~/run", "~nobody-x/run")] == ["~/run", "~nobody-x/run"]


def test_why_a_folder_cannot_be_made_is_known_before_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to(tmp_path)
    reasons = {
        "": "", "new": "", "a/b/c": "", "linked/a": "",
        "file": f"{tmp_path}/file is no folder",
        "file/a": f"{tmp_path}/file/a: Not a directory",
        "dangling/a": f"{tmp_path}/dangling is a link to nowhere, which does not exist (create that folder, or remove "
        "the link)",
    }  # fmt: skip
    assert {below: why_not_creatable(os.path.join(tmp_path, below).rstrip("/")) for below in reasons} == reasons
    assert why_not_creatable("/proc/runs") == "/proc is on proc, which shows the kernel and keeps no files"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)  # permissions do not bind root
    assert why_not_creatable(str(tmp_path / "new")) == f"{tmp_path} is not writable for this user"
    assert why_not_creatable(str(tmp_path)) == ""  # it is there: it may be read
