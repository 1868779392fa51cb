"""Checkpoints that somebody has altered, and sealed again: sizes and hashes go with the altered bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, BlockHasher, FileRecord, Manifest, digest


def write_manifest(checkpoint: Path, data: bytes) -> None:
    """Write the manifest, and its copy."""
    for name in (FILE_NAME, COPY_NAME):
        (checkpoint / name).write_bytes(data)


def reseal(checkpoint: Path) -> None:
    """Write a manifest that goes with the files as they are now."""
    manifest = Manifest.from_bytes((checkpoint / FILE_NAME).read_bytes(), "manifest")
    files = tuple(_sealed(checkpoint, file) for file in manifest.files)
    write_manifest(checkpoint, replace(manifest, files=files).to_bytes())


def _sealed(checkpoint: Path, file: FileRecord) -> FileRecord:
    data = (checkpoint / file.path).read_bytes()
    hasher = BlockHasher(file.block_size)
    hasher.update(memoryview(data))
    head = None
    if file.path.endswith(SUFFIX) and len(data) >= 8:
        length = min(len(data), 8 + struct.unpack_from("<Q", data)[0])
        head = (length, digest(data[:length]))
    return replace(file, size=len(data), blocks=hasher.digests, head=head)


def alter_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON of a document in place, and seal the checkpoint in whose folder it is."""
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))
    reseal(path.parent)


def alter_header(path: Path, change: Callable[[dict[str, Any]], Any], checkpoint: Path | None = None) -> None:
    """Change the header of a safetensors file, and seal its checkpoint: that in whose folder it is, unless given."""
    header, data = split(path.read_bytes())
    change(header)
    path.write_bytes(joined(header, data))
    reseal(checkpoint or path.parent)


def split(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    (length,) = struct.unpack_from("<Q", file)
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def joined(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    """A safetensors file of a header and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
