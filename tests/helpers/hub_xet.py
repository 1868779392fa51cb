"""Xet for the stand-in of the Hub: the real `hf_xet` client, with a folder as its storage (its `local://`).

Where the Hub would serve large files itself, it puts them together from what the client has stored. So does this.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = 48  # bytes of a shard before its first file; files, segments and all that belongs to them have as many
_VERIFIED, _WITH_SHA256 = 1 << 31, 1 << 30


class XetFolder:
    """What the client has stored, by the sha256 that a commit names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def token(self) -> dict[str, Any]:
        """Where the client shall go, and until when."""
        return {"casUrl": f"local://{self.folder}", "exp": int(time.time()) + 3600, "accessToken": "for-xet-alone"}

    def find(self, oid: str) -> tuple[str, int] | None:
        """The hash by which the client knows a file, and its size."""
        shards = sorted((self.folder / "xet" / "xorbs" / "shards").glob("*.mdb"))
        found = (file for shard in shards for file in _files(shard.read_bytes()))
        return next(((known, size) for sha256, known, size in found if sha256 == oid), None)

    def put_together(self, hash: str, size: int, path: Path) -> None:
        from hf_xet import XetFileInfo, XetSession

        token = self.token()
        access = {"token": token["accessToken"], "token_expiry_unix_secs": token["exp"]}
        with XetSession().new_file_download_group(endpoint=token["casUrl"], **access) as group:
            group.start_download_file(XetFileInfo(hash, size), str(path))


def _files(shard: bytes) -> Iterator[tuple[str, str, int]]:
    """The files in a shard: sha256, Xet's hash, and size."""
    at = _HEADER
    while shard[at : at + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", shard, at + 32)
        segments = [at + _HEADER * (1 + index) for index in range(count)]
        size = sum(struct.unpack_from("<I", shard, segment + 36)[0] for segment in segments)
        end = at + _HEADER * (1 + count * (2 if flags & _VERIFIED else 1))
        if flags & _WITH_SHA256:
            yield _hex(shard[end : end + 32]), _hex(shard[at : at + 32]), size
            end += _HEADER
        at = end


def _hex(hash: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", hash))
