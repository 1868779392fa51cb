"""Local files: made durable, the type of the filesystem that a path lies on, and how many names a file has."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path

from ckpt.errors import ConfigError

_NETWORK = re.compile(r"nfs4?|lustre|cifs|smb\w*|fuse(\..*)?|ceph|gpfs|beegfs\w*|9p|virtiofs|afs|glusterfs|wekafs")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_MOUNTS = Path("/proc/self/mountinfo")

_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_NO_FULL_SYNC = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS}


def sync(descriptor: int) -> None:
    """Return when the disk has the bytes of an open file, or the names in an open folder.

    On macOS `fsync` stops at the disk's own cache, which a power loss empties: `F_FULLFSYNC` goes on from there. Some
    filesystems refuse that, those of a network for instance; they get `fsync`.
    """
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, _FULL_SYNC)
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
        else:
            return
    os.fsync(descriptor)


def is_on_network(path: str, mounts: Path = _MOUNTS) -> bool:
    """Whether a path lies on a network filesystem, or on one in user space. False where the system does not say."""
    return _NETWORK.fullmatch(filesystem_type(path, mounts)) is not None


_OF_THE_KERNEL = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "devpts", "bpf", "pstore")
)


def filesystem_type(path: str, mounts: Path = _MOUNTS) -> str:
    """The type of the filesystem that a path lies on, as it was mounted (`ext4`, `nfs4`); "" if that is not known."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, found = os.path.realpath(path), ("", "")
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = _ESCAPE.sub(lambda code: chr(int(code[1], 8)), mount.split(" ")[4])
        if _is_below(real, point) and len(point) >= len(found[0]):  # of two on the same point, the later covers it
            found = point, source.split(" ")[0]
    return found[1]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def expand_home(path: str) -> str:
    """A path with `~` replaced by the home folder, unless a folder of that name exists: earlier versions made one."""
    first = path.partition("/")[0]
    if not first.startswith("~") or os.path.lexists(first):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        raise ConfigError(
            f"{path}: there is no user {first[1:]!r} with a home folder. For a file or folder of that name, write "
            f"./{path}."
        )
    return expanded


def why_not_creatable(path: str) -> str:
    """Why a folder that is not there cannot be made; empty if it is there, or probably can be."""
    above = path
    while True:
        try:
            status = os.stat(above)
            break
        except FileNotFoundError:
            if os.path.islink(above):
                target = os.readlink(above)
                return f"{above} is a link to {target}, which does not exist (create that folder, or remove the link)"
            above = os.path.dirname(above)
        except OSError as error:
            return f"{above}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{above} is no folder"
    if (kind := filesystem_type(above)) in _OF_THE_KERNEL:
        return f"{above} is on {kind}, which shows the kernel and keeps no files"
    if above != path and not os.access(above, os.W_OK | os.X_OK):
        return f"{above} is not writable for this user"
    return ""


def count_names(path: str) -> int:
    """How many hard links a file has; 0 if there is none."""
    try:
        return os.stat(path).st_nlink
    except OSError:
        return 0
