"""Fuzzing guided by coverage, where Atheris is installed (`pip install atheris`): `python -m tests.fuzz.guided [PART]`.

For the readers of single files, in this process: libFuzzer keeps every input that reaches new lines, and stops at the
first error that is no `CkptError`. Its own options follow the part: `python -m tests.fuzz.guided pickle -runs=100000`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class _Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, start: int, stop: int) -> bytes:
        return self._data[start:stop]

    @property
    def size(self) -> int:
        return len(self._data)


def _manifest(data: bytes) -> None:
    from ckpt.formats.native.manifest import ALGORITHM, Manifest, digest

    Manifest.from_bytes(f'{{\n "digest": "{ALGORITHM}:{digest(data)}",\n'.encode() + data, "it")


def _header(data: bytes) -> None:
    from ckpt.formats.native.header import outlines

    reader: Any = _Bytes(data)
    outlines(reader, "it", len(data))


def _pickle(data: bytes) -> None:
    from ckpt.formats.foreign.torch_save import ALLOWED, read_pickle

    read_pickle(data, ALLOWED, "it")


def _metadata(data: bytes) -> None:
    from ckpt.formats.foreign.dcp import read_metadata

    read_metadata(data, "it")


def _archive(data: bytes) -> None:
    from ckpt.formats.foreign.torch_save import read_values

    reader: Any = _Bytes(data)
    read_values(reader, 0, len(data), "it")


PARTS: dict[str, Callable[[bytes], None]] = {
    "manifest": _manifest,
    "header": _header,
    "pickle": _pickle,
    "metadata": _metadata,
    "archive": _archive,
}


def main(arguments: list[str]) -> None:
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        sys.exit("Atheris is not installed: pip install atheris, where there is a wheel for this Python.")
    part, *options = arguments or ["manifest"]
    with atheris.instrument_imports(include=["ckpt"]), suppress(Exception):
        PARTS[part](b"")  # imports what it needs
    from ckpt.errors import CkptError

    def test(data: bytes) -> None:
        with suppress(CkptError):
            PARTS[part](data)

    atheris.Setup([sys.argv[0], *options], test)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
