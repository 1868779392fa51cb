"""Repositories as the Hub keeps them, in a folder: blobs by their hashes, commits, and branches that point at them.

Large files come by Xet: the real `hf_xet` client, with a folder as its storage (its `local://`). Where the Hub would
serve them itself, it puts them together from what the client has stored. So does this.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
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


Fields = dict[str, Any]


@dataclass(frozen=True)
class StoredBlob:
    """One file of a commit: the git object's id, its size, and the sha256 of a large file."""

    oid: str
    size: int
    lfs: str | None = None
    xet: str | None = None  # Xet's own hash of a large file that came that way

    def to_json(self, path: str) -> Fields:
        large = {"lfs": {"oid": self.lfs, "size": self.size, "pointerSize": 134}} if self.lfs else {}
        xet = {"xetHash": self.xet} if self.xet else {}
        return {"type": "file", "oid": self.oid, "size": self.size, "path": path, **large, **xet}


class MissingError(Exception):
    """Something is not there: a repository, a revision or an entry."""


class MovedError(Exception):
    """A branch does not point at the parent that a commit was made for."""


class HubStore:
    """What a stand-in for the Hub keeps. All of it lies in files, so that it outlives the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.xet = XetFolder(folder / "cas")
        self._lock = threading.Lock()
        for name in ("repos", "commits", "blobs", "lfs", "parts"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def create(self, repo: str, *, private: bool) -> bool:
        """Make a repository with one empty commit. Returns whether it is new."""
        with self._lock:
            if self._repo_path(repo).exists():
                return False
            first = self._add_commit(None, "initial commit", "", {})
            self._write(self._repo_path(repo), {"private": private, "branches": {"main": first}})
            return True

    def delete(self, repo: str) -> None:
        with self._lock:
            self.repo(repo)
            self._repo_path(repo).unlink()

    def repo(self, repo: str) -> Fields:
        try:
            found: Fields = json.loads(self._repo_path(repo).read_text())
        except FileNotFoundError:
            raise MissingError("RepoNotFound") from None
        return found

    def resolve(self, repo: str, revision: str) -> str:
        """The commit that a branch, or a commit's own id, stands for."""
        branches = self.repo(repo)["branches"]
        if revision in branches:
            return str(branches[revision])
        if len(revision) == 40 and (self.folder / "commits" / revision).exists():
            return revision
        raise MissingError("RevisionNotFound")

    def branch(self, repo: str, name: str, start: str) -> bool:
        with self._lock:
            fields = self.repo(repo)
            if name in fields["branches"]:
                return False
            fields["branches"][name] = self.resolve(repo, start)
            self._write(self._repo_path(repo), fields)
            return True

    def commit(self, repo: str, branch: str, header: Fields, operations: Iterable[Fields]) -> str:
        """Apply operations to the head of a branch, if it is the parent that the header names."""
        with self._lock:
            fields = self.repo(repo)
            if branch not in fields["branches"]:
                raise MissingError("RevisionNotFound")
            head = fields["branches"][branch]
            if header.get("parentCommit") not in (None, head):
                raise MovedError(head)
            files = dict(self.files(head))
            for operation in operations:
                self._apply(files, operation["key"], operation["value"])
            new = self._add_commit(head, header["summary"], header.get("description", ""), files)
            fields["branches"][branch] = new
            self._write(self._repo_path(repo), fields)
            return new

    def squash(self, repo: str, branch: str, message: str) -> None:
        """Let a branch have one commit, with the files of its head."""
        with self._lock:
            fields = self.repo(repo)
            files = self.files(fields["branches"][branch])
            fields["branches"][branch] = self._add_commit(None, message, "", files)
            self._write(self._repo_path(repo), fields)

    def files(self, commit: str) -> dict[str, StoredBlob]:
        return {path: StoredBlob(**fields) for path, fields in self._commit(commit)["files"].items()}

    def history(self, commit: str) -> Iterator[Fields]:
        """A commit and those before it."""
        at: str | None = commit
        while at:
            fields = self._commit(at)
            yield {"id": at, **{key: fields[key] for key in ("title", "message", "date")}, "authors": []}
            at = fields["parent"]

    def content(self, blob: StoredBlob) -> bytes:
        return (self.folder / "lfs" / blob.lfs if blob.lfs else self.folder / "blobs" / blob.oid).read_bytes()

    def has_large(self, oid: str) -> bool:
        return (self.folder / "lfs" / oid).exists()

    def add_large(self, oid: str, data: bytes) -> bool:
        """Keep a large file, if its bytes are what its name says."""
        if hashlib.sha256(data).hexdigest() != oid:
            return False
        self._write(self.folder / "lfs" / oid, data)
        return True

    def add_part(self, oid: str, number: str, data: bytes) -> None:
        self._write(self.folder / "parts" / f"{oid}-{number}", data)

    def join_parts(self, oid: str, numbers: list[int]) -> bool:
        parts = [self.folder / "parts" / f"{oid}-{number:05d}" for number in numbers]
        return self.add_large(oid, b"".join(part.read_bytes() for part in parts))

    def _apply(self, files: dict[str, StoredBlob], kind: str, value: Fields) -> None:
        path = value["path"]
        if kind == "file":
            files[path] = self._add_blob(value["content"])
        elif kind == "lfsFile":
            files[path] = self._large(value["oid"])
        elif kind == "deletedFile":
            if path not in files:
                raise MissingError("EntryNotFound")
            del files[path]
        elif kind == "deletedFolder":
            for key in [key for key in files if key.startswith(path.rstrip("/") + "/")]:
                del files[key]

    def _large(self, oid: str) -> StoredBlob:
        """A large file that was sent by its own, in one way or the other."""
        target, known = self.folder / "lfs" / oid, self.xet.find(oid)
        if known is not None and not target.exists():
            self.xet.put_together(*known, target)
        return StoredBlob(_git_oid(f"pointer to {oid}".encode()), target.stat().st_size, oid, known and known[0])

    def _add_blob(self, data: bytes) -> StoredBlob:
        oid = _git_oid(data)
        self._write(self.folder / "blobs" / oid, data)
        return StoredBlob(oid, len(data))

    def _add_commit(self, parent: str | None, title: str, message: str, files: dict[str, StoredBlob]) -> str:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        listed = {path: asdict(blob) for path, blob in files.items()}
        fields = {"parent": parent, "title": title, "message": message, "date": date, "files": listed}
        salted = json.dumps({**fields, "salt": os.urandom(8).hex()}).encode()
        oid = hashlib.sha1(salted).hexdigest()
        self._write(self.folder / "commits" / oid, fields)
        return oid

    def _commit(self, oid: str) -> Fields:
        found: Fields = json.loads((self.folder / "commits" / oid).read_text())
        return found

    def _repo_path(self, repo: str) -> Path:
        return self.folder / "repos" / (repo.replace("/", "--") + ".json")

    def _write(self, path: Path, data: bytes | Fields) -> None:
        temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
        temporary.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
        os.replace(temporary, path)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
