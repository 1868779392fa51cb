"""What macOS lacks, hidden: `pytest -p tests.helpers.macos` runs tests of one process as that system would.

There is no Mac behind this: what Linux has beyond POSIX is taken away before ckpt is imported, and `F_FULLFSYNC`, which
only macOS has, syncs as `fsync` does. Other libraries keep all of it, as they know that system by themselves.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

for name in (  # they ask for the system as they are imported
    "accelerate", "datasets", "huggingface_hub.hf_api", "numpy", "peft", "psutil", "rich.console", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.utils.data", "transformers.modeling_utils", "truststore",
):  # fmt: skip
    import_module(name)

_OF_OS = (
    "O_DIRECT", "O_TMPFILE", "O_PATH", "memfd_create", "MFD_CLOEXEC", "posix_fallocate", "posix_fadvise",
    "POSIX_FADV_DONTNEED", "sched_getaffinity", "sched_setaffinity", "fdatasync", "copy_file_range", "eventfd",
    "pidfd_open", "splice",
)  # fmt: skip
_OF_MMAP = ("MADV_HUGEPAGE", "MADV_DONTFORK", "MAP_POPULATE")
_OF_ERRNO = ("EREMOTEIO", "EUCLEAN", "EBADFD", "ENOMEDIUM")
_OF_LIBC = {"fallocate", "sync_file_range", "syscall", "memfd_create", "posix_fadvise"}
_FOLDERS = re.compile(r"/(proc|sys|dev/shm)(/|$)")
FULL_SYNC = 51  # F_FULLFSYNC
full_syncs = 0  # how often the disk was told to empty its own cache


def _hidden(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of paths for which some folders are not there, if ckpt asks."""

    def call(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and _FOLDERS.match(os.fspath(path)) and _asks_for_itself():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return own(path, *args, **options)

    return call


def _asks_for_itself() -> bool:
    frame = sys._getframe(2)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("ckpt."):
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("psutil", "torch", "_pytest", "tests"):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _control(descriptor: Any, command: int, *args: Any) -> Any:
    global full_syncs
    if command != FULL_SYNC:
        return _fcntl(descriptor, command, *args)
    full_syncs += 1
    os.fsync(descriptor)
    return 0


_fcntl = fcntl.fcntl
_get_function = ctypes.CDLL.__getattr__


def _function(library: ctypes.CDLL, name: str) -> Any:
    if name in _OF_LIBC and library._name is None:
        raise AttributeError(name)
    return _get_function(library, name)


def hide() -> None:
    """Take away what macOS does not have, in this process."""
    if any(name == "ckpt" or name.startswith("ckpt.") for name in sys.modules):
        raise RuntimeError("ckpt is imported already: what it found of Linux cannot be taken away.")
    for module, names in ((os, _OF_OS), (mmap, _OF_MMAP), (errno, _OF_ERRNO)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    sysconfig.get_config_vars()  # reads a module that is named after the system
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    fcntl.F_FULLFSYNC = FULL_SYNC  # type: ignore[attr-defined]
    fcntl.fcntl = _control
    ctypes.CDLL.__getattr__ = _function  # type: ignore[method-assign]
    builtins.open = io.open = _hidden(io.open)
    for name in ("open", "stat", "lstat", "readlink", "listdir", "scandir", "mkdir", "statvfs", "access"):
        setattr(os, name, _hidden(getattr(os, name)))


hide()
