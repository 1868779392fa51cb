"""The manifest: versioned JSON that lists every file with its hashes. Writing it commits the checkpoint.

Its first lines are fixed, so that any changed byte is detected; that of the signature is there if it is signed:

    {
     "digest": "xxh3-128:<of every byte after this line>",
     "signature": "ed25519:<public key, 64 hex digits>:<signature, 128 hex digits>",
     "format": "ckpt",
     ...

A reader refuses a version newer than its own, and ignores fields it does not know. Within a version fields are added,
never removed or given another meaning. A field that is added gets a line in the tables of rules,
which are checked when a manifest is read.

Every block of a file has a hash, so that a ranged read can verify what it read, and blocks can be hashed in parallel.
xxh3-128 finds damage, and is as fast as memory. SHA-256 also withstands an attacker, where a signature covers it.

What is signed is `CONTEXT` followed by every byte after the signature's line, so that no signature of another kind of
document fits. Nothing here computes or verifies one: see `ckpt.root.signing`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol

import xxhash

from ckpt.errors import DamagedError, UnsupportedError, VersionError
from ckpt.util.checked_json import (
    LARGEST_NUMBER,
    Rule,
    broken_rules,
    is_count,
    is_finite,
    is_key,
    is_list,
    is_mapping,
    is_moment,
    is_text,
    joined,
    parse_json,
    shown,
)

ALGORITHM = "xxh3-128"
BLOCK_SIZE = 32 << 20


class Hash(Protocol):
    """A hash of a stream, as hashlib's and xxhash's are."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash of a block, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def xxh3_128() -> Hash:
    """The hash of a block that is still to come."""
    return xxhash.xxh3_128()


def sha256(data: bytes | bytearray | memoryview) -> str:
    """The SHA-256 of a block, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digests_of_every(
    pieces: Iterable[memoryview], first: int, step: int, new: Callable[[], Hash], block_size: int = BLOCK_SIZE
) -> dict[int, str]:
    """The digests of the blocks `first`, `first + step` and so on: so that threads share a file.

    `new`: makes the hash of a block, `xxh3_128` or `hashlib.sha256`.
    """
    found: dict[int, str] = {}
    open_hash, at = new(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            room, index = block_size - at % block_size, at // block_size
            part, view = view[:room], view[room:]
            at += len(part)
            if index % step == first:
                open_hash.update(part)
                found[index] = ""
                if len(part) == room:
                    found[index], open_hash = open_hash.hexdigest(), new()
    return {index: block or open_hash.hexdigest() for index, block in found.items()}


class BlockHasher:
    """Hashes a stream: a digest for every `BLOCK_SIZE` bytes, and one for the remainder; SHA-256 too, if asked for."""

    def __init__(self, block_size: int = BLOCK_SIZE, *, sha256: bool = False) -> None:
        self.size = 0
        self._block_size = block_size
        self._done: list[str] = []
        self._open = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._sha256_done: list[str] = []
        self._room = block_size

    def through(self, pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        """Yield the pieces unchanged, having hashed each."""
        for piece in pieces:
            view = memoryview(piece)
            self.update(view)
            yield view

    def update(self, view: memoryview) -> None:
        view = view.cast("B")
        self.size += len(view)
        if len(view) < self._room:  # the common case
            self._add(view)
            return
        while view:
            part, view = view[: self._room], view[self._room :]
            self._add(part)
            if not self._room:
                self._close_block()

    def _add(self, part: memoryview) -> None:
        self._open.update(part)
        if self._sha256 is not None:
            self._sha256.update(part)
        self._room -= len(part)

    @property
    def digests(self) -> tuple[str, ...]:
        partial = self._room < self._block_size
        return (*self._done, self._open.hexdigest()) if partial else tuple(self._done)

    @property
    def sha256_digests(self) -> tuple[str, ...]:
        """The same in SHA-256; none if it was not asked for."""
        if self._sha256 is None or self._room == self._block_size:
            return tuple(self._sha256_done)
        return (*self._sha256_done, self._sha256.hexdigest())

    def _close_block(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open = xxhash.xxh3_128()
        if self._sha256 is not None:
            self._sha256_done.append(self._sha256.hexdigest())
            self._sha256 = hashlib.sha256()
        self._room = self._block_size


CONTEXT = b"ckpt manifest 1\n"

_LINE = re.compile(rb' "signature": "ed25519:([0-9a-f]{64}):([0-9a-f]{128})",\n')


@dataclass(frozen=True)
class Signature:
    """Who signed a manifest, and its bytes as they were signed, from which copies of it are written.

    `name` is the checkpoint's in those bytes: its folder may be called otherwise by now. `verified`: a key that is
    trusted has made it, as `ckpt.root.signing.Trust` found.
    """

    key: str
    value: str
    text: bytes = field(repr=False)
    name: str = ""
    verified: bool = False

    @property
    def message(self) -> bytes:
        return CONTEXT + self.text

    @property
    def line(self) -> bytes:
        return f' "signature": "ed25519:{self.key}:{self.value}",\n'.encode()


def split_signature(lines: bytes) -> tuple[Signature | None, bytes]:
    """The signature of a manifest's lines, if they begin with one, and the lines after it."""
    found = _LINE.match(lines)
    if found is None:
        return None, lines
    text = lines[found.end() :]
    return Signature(found[1].decode(), found[2].decode(), text), text


def short(key: str) -> str:
    """A public key as it is shown: its first 16 digits."""
    return key[:16]


LARGEST_SEQUENCE = LARGEST_NUMBER
LARGEST_VERSION = 999_999
LARGEST_BLOCK = 1 << 30  # bytes
_LARGEST_FILE = (1 << 63) - 1
_MOST_RANKS = 1 << 24
_NO_FILES = ("manifest.json", "manifest.copy.json", ".saving")  # the manifest itself, its copy, the save marker
_HASH = re.compile(r"[0-9a-f]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_JSON = ("nan", "inf", "-inf")  # numbers that JSON has not


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_file(value: Any) -> bool:
    return is_key(value) and value not in _NO_FILES


def _is_head(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and len(value) == 2 and is_count(value[0], 1))


def _is_metric(value: Any) -> bool:
    return value in _NOT_JSON if isinstance(value, str) else is_finite(value)


def _is_measure(value: Any) -> bool:
    return is_finite(value) and abs(value) <= LARGEST_NUMBER


def _is_rank(value: Any) -> bool:
    return is_count(value, 0, _MOST_RANKS)


def is_resumed(value: Any) -> bool:
    """What was loaded before a checkpoint: its name, id and step, where it was, and what was passed over and why."""
    return isinstance(value, dict) and (not value or not broken_rules(value, _RESUMED))


_RESUMED = {
    "name": Rule(is_text, "text"),
    "id": Rule(is_text, "text"),
    "step": Rule(is_count, "a whole number, 0 or more"),
    "found_in": Rule(is_text, "text"),
    "passed_over": Rule(is_mapping(is_text), "names with text"),
    "more": Rule(is_count, "a whole number, 0 or more", required=False),
}
_TEXT = Rule(is_text, "text", required=False)
_SECONDS = Rule(is_mapping(_is_measure), "names with numbers that can be summed up", required=False)

MANIFEST = {
    "name": Rule(is_text, "text"),
    "id": Rule(_is_id, "up to 64 letters, digits, - and _"),
    "sequence": Rule(is_count, "a whole number, 0 or more"),
    "created": Rule(is_moment, "a time with its zone, in ISO 8601"),
    "run": Rule(is_text, "text"),
    "files": Rule(is_list(lambda file: isinstance(file, dict)), "a list of files"),
    "world_size": Rule(lambda value: is_count(value, 1, _MOST_RANKS), "a number of ranks", required=False),
    "layout": _TEXT,
    "parent": Rule(lambda value: value is None or is_text(value), "text or null", required=False),
    "origin": _TEXT,
    "progress": Rule(is_mapping(is_count), "names with whole numbers, 0 or more", required=False),
    "metrics": Rule(is_mapping(_is_metric), "names with numbers", required=False),
    "versions": Rule(is_mapping(is_text), "names with text", required=False),
    "hardware": _TEXT,
    "seconds": _SECONDS,
    "hosts": Rule(is_list(lambda host: isinstance(host, dict)), "a list of hosts", required=False),
    "memory": _SECONDS,
    "resumed": Rule(is_resumed, "what was loaded, and what was passed over", required=False),
}
FILE = {
    "name": Rule(_is_file, "a relative path, without '..'"),
    "path": Rule(_is_file, "a relative path, without '..'"),
    "size": Rule(lambda value: is_count(value, 0, _LARGEST_FILE), "a number of bytes, 0 or more"),
    "blocks": Rule(is_list(_is_hash), "a list of hashes"),
    "block_size": Rule(lambda value: is_count(value, 1, LARGEST_BLOCK), "a number of bytes, 1 or more", required=False),
    "head": Rule(_is_head, "a length and a hash, or null", required=False),
    "sha256": Rule(is_list(_is_sha256), "a list of SHA-256", required=False),
    "head_sha256": Rule(lambda value: value == "" or _is_sha256(value), "a SHA-256", required=False),
}
HOST = {
    "name": Rule(is_text, "text"),
    "ranks": Rule(is_list(_is_rank), "a list of ranks"),
}


def manifest_problems(fields: Any, block_size: int) -> list[str]:
    """Everything that is wrong with the fields of a manifest. `block_size` is that of files which do not say theirs."""
    problems = broken_rules(fields, MANIFEST)
    if problems:
        return problems
    for number, file in enumerate(fields["files"]):
        problems += _file_problems(file, f"file {shown(file.get('path', number))}", block_size)
    for number, host in enumerate(fields.get("hosts", ())):
        problems += broken_rules(host, HOST, f"host {number}")
    return problems or [*_repeated(fields["files"], "name"), *_repeated(fields["files"], "path")]


def _file_problems(file: dict[str, Any], of: str, block_size: int) -> list[str]:
    problems = broken_rules(file, FILE, of)
    if problems:
        return problems
    size, blocks, head = file["size"], len(file["blocks"]), file.get("head")
    needed = -(-size // file.get("block_size", block_size))
    if blocks != needed:
        problems.append(f"{of}: {size} bytes have {needed} blocks, and there are {blocks} hashes")
    if len(file.get("sha256", ())) not in (0, blocks):
        problems.append(f"{of}: it has {blocks} blocks, and the SHA-256 of {len(file['sha256'])}")
    if head is not None and (head[0] > size or not _is_hash(head[1])):
        problems.append(f"{of}: head is not a length up to {size} with a hash")
    return problems


def _repeated(files: Iterable[dict[str, Any]], field: str) -> list[str]:
    counted = Counter(file[field] for file in files)
    return [f"{shown(value)} is the {field} of {count} files" for value, count in counted.items() if count > 1]


FILE_NAME = "manifest.json"
COPY_NAME = "manifest.copy.json"  # the same bytes, written right after the commit
MARKER = ".saving"  # in a checkpoint's folder while it is being saved or removed
STATE = "state.json"  # everything but tensors, of all ranks
FORMAT = "ckpt"
VERSION = 1

_HEAD = f'{{\n "digest": "{ALGORITHM}:'.encode()
_HEAD_END = b'",\n'
_HEX = 32
_VERSION = re.compile(r"[\w.+-]{1,40}")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: its name, path and size, and a hash for each of its blocks.

    `name` says what it holds (`model.safetensors`). `path` equals it, except in a checkpoint that has replaced another
    one of the same name.
    """

    name: str
    path: str
    size: int
    blocks: tuple[str, ...]
    block_size: int = BLOCK_SIZE
    head: tuple[int, str] | None = None  # length and hash of the header, which readers fetch separately
    sha256: tuple[str, ...] = ()  # of each block, if SHA-256 was asked for or the manifest is signed
    head_sha256: str = ""

    @property
    def has_sha256(self) -> bool:
        """Whether every byte is covered by a SHA-256."""
        return len(self.sha256) == len(self.blocks) and (bool(self.sha256) or not self.size)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FileRecord:
        known = {key: value for key, value in fields.items() if key in cls.__dataclass_fields__}
        head = tuple(known["head"]) if known.get("head") is not None else None
        sha256 = tuple(known.get("sha256", ()))
        return cls(**{**known, "blocks": tuple(known["blocks"]), "head": head, "sha256": sha256})

    def to_json(self) -> dict[str, Any]:
        fields = vars(self)  # not asdict, which copies every hash: there may be a hundred thousand files
        return {key: value for key, value in fields.items() if value or key not in ("sha256", "head_sha256")}


@dataclass(frozen=True)
class Host:
    """A host with a root of its own, which holds the files of its ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without opening its other files."""

    is_foreign: ClassVar[bool] = False  # whether it stands for the manifest of a folder that has none

    name: str
    id: str
    sequence: int
    created: str
    run: str
    files: tuple[FileRecord, ...]
    world_size: int = 1
    layout: str = "full"
    parent: str | None = None
    origin: str = ""  # the tool that wrote it, if it was converted
    progress: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()  # empty if all share one root
    memory: Mapping[str, int | float] = field(default_factory=dict)  # what the memory tier cost and saved before this
    resumed: Mapping[str, Any] = field(default_factory=dict)  # of the first one after a load: what was loaded
    signature: Signature | None = None

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def step(self) -> int:
        return self.progress.get("step", 0)

    @property
    def is_authentic(self) -> bool:
        """Whether a key that is trusted has signed it. Then every byte of its files is compared by SHA-256."""
        return self.signature is not None and self.signature.verified

    def to_bytes(self) -> bytes:
        """The file. One that is signed is written as it was signed, whatever was replaced in this object since."""
        signed = self.signature
        lines = self.unsigned_bytes() if signed is None else signed.line + signed.text
        return _HEAD + digest(lines).encode() + _HEAD_END + lines

    def unsigned_bytes(self) -> bytes:
        """What a signature covers: the lines after the digest's."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(replace(self, files=(), signature=None))}
        fields["files"] = [file.to_json() for file in self.files]
        fields["metrics"] = {str(key): _json_number(value) for key, value in self.metrics.items()}
        del fields["signature"]
        for key in ("memory", "resumed"):
            if not fields[key]:
                del fields[key]
        if wrong := manifest_problems(fields, BLOCK_SIZE):  # it would be committed, and refused by every reader
            raise UnsupportedError(f"{self.name} cannot be saved: {joined(wrong)}.", tuple(wrong))
        files = [json.dumps(file, allow_nan=False) for file in fields.pop("files")]  # a line each: indenting is slow
        text = json.dumps(fields, indent=1, allow_nan=False).removesuffix("\n}")
        listed = ",\n  ".join(files)
        return f'{text},\n "files": [\n  {listed}\n ]\n}}'.encode().removeprefix(b"{\n")

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read a manifest. `where` names it in errors."""
        start = len(_HEAD) + _HEX + len(_HEAD_END)
        claimed, lines = data[len(_HEAD) : start - len(_HEAD_END)], data[start:]
        if data[:start] != _HEAD + claimed + _HEAD_END or digest(lines).encode() != claimed:
            raise DamagedError(f"{where} was altered: its bytes do not match its digest.")
        try:
            signature, lines = split_signature(lines)
            fields = parse_json(b"{" + lines)
            _check_version(fields, where)
            _refuse(manifest_problems(fields, BLOCK_SIZE))
        except ValueError as error:
            raise DamagedError(f"{where} is not a valid manifest: {error}.") from error
        fields["signature"] = replace(signature, name=fields["name"]) if signature is not None else None
        return cls(**_known(cls, fields))


def _check_version(fields: Mapping[str, Any], where: str) -> None:
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is {shown(fields.get('format'))}")
    version: Any = fields.get("version")
    versions = fields.get("versions")
    if not is_count(version, 1, LARGEST_VERSION):
        raise ValueError(f"its version is {shown(version)}")
    if version > VERSION:
        writer = versions.get("ckpt") if isinstance(versions, dict) else None
        raise VersionError(
            f"{where} has format version {version}, written by ckpt {writer if _is_version(writer) else '?'}, but this "
            f"version of ckpt reads formats only up to version {VERSION}. Upgrade with 'pip install -U torch-ckpt', or "
            "load an older checkpoint by its name."
        )


def _is_version(text: object) -> bool:
    return isinstance(text, str) and _VERSION.fullmatch(text) is not None


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError(joined(problems))


def _known(cls: type[Manifest], fields: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in fields.items() if key in cls.__dataclass_fields__}
    known["files"] = tuple(FileRecord.from_json(file) for file in known["files"])
    known["hosts"] = tuple(Host(host["name"], tuple(host["ranks"])) for host in known.get("hosts", ()))
    known["metrics"] = {key: float(value) for key, value in known.get("metrics", {}).items()}
    return known


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no infinities: those are written as the strings that float() reads."""
    return value if value - value == 0 else str(value)
