"""The filesystem below a path, from the list of mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.util.filesystem import count_names, filesystem_type, is_on_network

MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:40 / /data rw - nfs4 server:/data rw
23 22 8:2 / /data/local rw - xfs /dev/sdb1 rw
24 21 0:41 / /with\040space rw - fuse.sshfs me@there: rw
25 21 8:3 / /covered rw - ext4 /dev/sdc1 rw
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
    ],
)
def test_the_deepest_mount_counts(tmp_path: Path, path: str, expected: str, network: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert filesystem_type(path, mounts) == expected
    assert is_on_network(path, mounts) == network


def test_a_system_without_such_a_list_counts_as_local(tmp_path: Path) -> None:
    assert not is_on_network("/", tmp_path / "none")


def test_the_names_of_a_file_are_counted(tmp_path: Path) -> None:
    assert count_names(str(tmp_path / "a")) == 0
    (tmp_path / "a").touch()
    os.link(tmp_path / "a", tmp_path / "b")
    assert count_names(str(tmp_path / "a")) == 2
