"""The checkpoints of a root: what its listing says of them, the index that spares it their manifests, and its history.

A listing says the version of every manifest. What the index of an object store says counts only for that version; any
other manifest is read. So an index that is old, damaged or gone costs time, and nothing else. Roots with few
checkpoints have none.

The history is what every save's manifest said, also of checkpoints that retention has removed since. One small file,
written before anything is removed: until then the manifests say all of it. It is only for people to read: nothing is
loaded or removed by what it says. Each line has its digest; a line that does not match it is named and passed over.
Roots on the Hub have none. Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import AbsentError, CheckpointError, ConfigError, DamagedError, MissingError, StorageError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, MARKER, Manifest, digest, is_resumed
from ckpt.formats.native.manifest import name_of_step as name_of_step
from ckpt.formats.registry import CKPT, is_checkpoint
from ckpt.root.manifest_files import find_manifest, was_committed, without_manifest
from ckpt.storage import Entry, HubStorage, Staging, Storage, open_storage
from ckpt.storage.base import ROOT_LOCK, read_document
from ckpt.storage.fsspec_stores import ReadOnlyStorage
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_finite, is_mapping, is_moment, is_text, parse_json
from ckpt.util.console import format_age, format_number, format_size, html_table
from ckpt.util.option_values import path_text, settings
from ckpt.util.threads import in_parallel

_NOT_JSON = ("nan", "inf", "-inf")  # numbers that JSON has not
_COUNT = Rule(is_count, "a count")
_TEXT = Rule(is_text, "text")
_RULES = {
    "id": _TEXT,
    "sequence": _COUNT,
    "created": Rule(is_moment, "a time with its zone, in ISO 8601"),
    "run": _TEXT,
    "parent": Rule(lambda value: value is None or is_text(value), "text or null"),
    "step": _COUNT,
    "metrics": Rule(is_mapping(lambda value: value in _NOT_JSON or is_finite(value)), "numbers by name"),
    "world_size": _COUNT,
    "size": _COUNT,
    "contents": _TEXT,
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A committed checkpoint without the list of its files. `contents` is a digest of their paths and sizes."""

    name: str
    id: str
    sequence: int
    created: str
    run: str
    parent: str | None = None
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    size: int = 0
    contents: str = ""

    @classmethod
    def of(cls, manifest: Manifest) -> Summary:
        return cls(
            name=manifest.name,
            id=manifest.id,
            sequence=manifest.sequence,
            created=manifest.created,
            run=manifest.run,
            parent=manifest.parent,
            step=manifest.step,
            metrics=manifest.metrics,
            world_size=manifest.world_size,
            size=manifest.size,
            contents="" if manifest.hosts else contents_digest({file.path: file.size for file in manifest.files}),
        )

    def has_all_of(self, sizes: Mapping[str, int]) -> bool:
        """Whether a folder has just the files of the checkpoint, by path and size. If not, its manifest says more."""
        return self.contents == contents_digest(sizes)

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["name"]
        metrics = {key: value if value - value == 0 else str(value) for key, value in self.metrics.items()}
        return {**fields, "metrics": metrics}

    @classmethod
    def from_json(cls, name: str, fields: Any) -> Summary | None:
        """None if any field is not what it must be."""
        if broken_rules(fields, _RULES):
            return None
        known = {key: fields[key] for key in _RULES}
        return cls(name=name, **{**known, "metrics": {key: float(value) for key, value in known["metrics"].items()}})


def contents_digest(sizes: Mapping[str, int]) -> str:
    """A digest of the paths and sizes of a checkpoint's files; the manifest, its copy and a save marker are none."""
    files = sorted((path, size) for path, size in sizes.items() if path not in (FILE_NAME, COPY_NAME, MARKER))
    return digest(json.dumps(files).encode())


INDEX = ".index.json"
UNINDEXED = 16  # manifests that a listing may have to read: the index is written again when there are more
_VERSION = 1
_log = logging.getLogger("ckpt")


@dataclass
class Index:
    """Summaries by name, each with the version of the manifest that it was made of."""

    entries: dict[str, tuple[str, Summary]] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)  # names of entries that the stored index has not

    @classmethod
    def read(cls, storage: Storage) -> Index:
        """The stored index. One that cannot be read is as good as none."""
        try:
            return cls(_parsed(read_document(storage, INDEX)))
        except (StorageError, DamagedError, ValueError) as error:
            _log.debug("%s/%s is not used, and manifests are read instead: %s", storage.url, INDEX, error)
            return cls()

    def find(self, name: str, version: str | None) -> Summary | None:
        """What the manifest of a checkpoint says, if it has this version."""
        known, summary = self.entries.get(name, (None, None))
        return summary if version is not None and version == known else None

    def add(self, version: str | None, summary: Summary) -> None:
        """Record what a manifest of that version says; nothing if the version is not known."""
        self.entries.pop(summary.name, None)
        if version is not None:
            self.entries[summary.name] = (version, summary)
            self.unwritten.add(summary.name)

    def update(self, storage: Storage, names: set[str]) -> None:
        """Store it for the checkpoints of these names, if a listing would have to read many manifests without it.

        Only the holder of the root's lock calls this."""
        self.entries = {name: entry for name, entry in self.entries.items() if name in names}
        self.unwritten &= names
        if len(self.unwritten) <= UNINDEXED:
            return
        try:
            storage.write(INDEX, [_encoded(self.entries)])
            self.unwritten.clear()
        except StorageError as error:
            _log.debug("%s/%s was not written: %s", storage.url, INDEX, error)


def _encoded(entries: Mapping[str, tuple[str, Summary]]) -> bytes:
    found = {name: {"version": version, **summary.to_json()} for name, (version, summary) in entries.items()}
    text = json.dumps({"format": "ckpt index", "version": _VERSION, "checkpoints": found}).encode()
    return digest(text).encode() + b"\n" + text


def _parsed(data: bytes) -> dict[str, tuple[str, Summary]]:
    claimed, _, text = data.partition(b"\n")
    if digest(text).encode() != claimed:
        raise ValueError("its bytes do not match its digest")
    fields = parse_json(text)
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise ValueError("it is of another version of ckpt")
    listed = fields.get("checkpoints")
    found = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        summary = Summary.from_json(name, entry)
        if summary is not None and is_text(entry.get("version")):
            found[name] = (entry["version"], summary)
    return found


LOCK = ROOT_LOCK  # in a root: locked by the run that writes to it
_READERS = 32  # threads that read manifests from an object store
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it is listed.

    Attributes:
        name: Of its folder.
        url: Where it is.
        manifest: What it says of itself: step, metrics, files. None if it is not committed, or not readable.
        problem: Why there is no manifest.
        flaw: What is wrong with `manifest.json`, if its copy was read in its place.
        indexed: What the index of the root says, where that has spared reading the manifest.
    """

    name: str
    url: str
    manifest: Manifest | None = None
    problem: CheckpointError | None = None
    flaw: str = ""
    indexed: Summary | None = None

    @cached_property
    def summary(self) -> Summary | None:
        """What the manifest says, but for its files."""
        return Summary.of(self.manifest) if self.manifest else self.indexed

    @property
    def committed(self) -> bool:
        return self.summary is not None

    @property
    def was_committed(self) -> bool:
        """Whether it was committed, though its manifest may be damaged or lost."""
        return was_committed(self.problem)

    @property
    def step(self) -> int | None:
        return self.summary.step if self.summary else None

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(self.url, zip(_COLUMNS, _row(self), strict=True))


class Checkpoints(list[Checkpoint]):
    """Checkpoints of a root, newest first: a list, and a table in notebooks."""

    def _repr_html_(self) -> str:
        """For notebooks."""
        right = ("step", "size")
        return html_table(f"{len(self)} checkpoints", map(_row, self), _COLUMNS, right)


_COLUMNS = ("name", "step", "size", "saved", "metrics", "state")


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    found = checkpoint.manifest
    if found is None:
        return checkpoint.name, "", "", "", "", str(checkpoint.problem or "not committed")
    metrics = ", ".join(f"{name} {format_number(value)}" for name, value in found.metrics.items())
    age = f"{format_age(found.created)} ago"
    return checkpoint.name, str(found.step), format_size(found.size), age, metrics, "committed"


def check_name(name: str) -> str:
    """Refuse a name that is not a single path segment: it becomes a folder below the root, and must not lead out."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{name!r} cannot name a checkpoint: use letters, digits and . _ - + = @, starting with a letter, a digit "
            "or '_', without '..' or '/'. For another folder, give StateManager another root."
        )
    return name


def scan(storage: Storage) -> list[Checkpoint]:
    """Every checkpoint of the root, newest commit first; those without a readable manifest come last.

    A folder is a checkpoint if it has a manifest or a copy of one, a save marker, or other files of a checkpoint.
    """
    return Overview.of(storage, known=Index()).checkpoints


def by_folder(entries: Iterable[Entry]) -> dict[str, dict[str, Entry]]:
    """The objects of a root by the first name in their keys, and the rest of these."""
    files: dict[str, dict[str, Entry]] = defaultdict(dict)
    for entry in entries:
        name, _, file = entry.key.partition("/")
        files[name][file] = entry
    return files


def _find_listed(storage: Storage, folders: Mapping[str, Mapping[str, Entry]]) -> list[Checkpoint]:
    """The checkpoints of folders that were just listed. Manifests are read several at a time, unless they are local."""
    committed = [name for name, inside in folders.items() if FILE_NAME in inside or COPY_NAME in inside]
    others = [
        Checkpoint(name, f"{storage.url}/{name}", problem=without_manifest(name, folders[name]))
        for name in folders.keys() - set(committed)
    ]
    threads = 1 if storage.is_local else _READERS
    read = in_parallel(lambda name: _found(storage, name, known=lambda: ""), committed, threads, "ckpt-list")
    return [*read, *others]


def manifests_of_run(storage: Storage, run: str) -> list[Manifest]:
    """The committed checkpoints of a run, as the root lists them now."""
    found = (checkpoint.manifest for checkpoint in scan(storage))
    return [manifest for manifest in found if manifest is not None and manifest.run == run]


def find(storage: Storage, name: str) -> Checkpoint:
    """The checkpoint of that name. Reads its manifest only."""
    return _found(storage, name, known=lambda: _known(storage))


def _found(storage: Storage, name: str, known: Callable[[], str]) -> Checkpoint:
    url = f"{storage.url}/{name}"
    try:
        found = find_manifest(storage, name, known)
    except CheckpointError as error:
        # its traceback would keep the caller's frames alive: a manager, and with it the lock on its root
        return Checkpoint(name, url, problem=error.with_traceback(None))
    return Checkpoint(name, url, found.manifest, flaw=found.flaw)


def read_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint, or, with a warning, what its copy says where it is damaged or missing."""
    return find_manifest(storage, name, lambda: _known(storage)).manifest


def _known(storage: Storage) -> str:
    names = ", ".join(checkpoint.name for checkpoint in scan(storage) if checkpoint.committed)
    return f" There are: {names or 'none'}."


def _commit_order(checkpoint: Checkpoint) -> tuple[int, str, str]:
    """Sorts checkpoints by their commits; those without a readable manifest come first, by name."""
    found = checkpoint.summary
    return (found.sequence, found.created, "") if found else (-1, "", checkpoint.name)


def list_checkpoints(
    root: str | os.PathLike[str] | Storage, *, storage_options: Mapping[str, Any] | None = None
) -> Checkpoints:
    """The checkpoints below a root, newest first. Those without a manifest were never committed and come last.

    Reads manifests only; `verify` reads every byte.

    Args:
        root: A folder or prefix; one in which nothing was saved yet has none.
        storage_options: As for the manager.

    Returns:
        A list, which is a table in notebooks.

    Raises:
        StorageError: A repository of the Hub that does not exist, or that this account may not see.
    """
    storage = open_storage(root, **settings(storage_options))
    found = scan(storage)
    if not found:
        check_exists(storage)
    return Checkpoints(found)


def locate(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Storage, list[str]]:
    """The root at a URL with the names of its checkpoints; for the URL of a checkpoint, its root and its name alone."""
    return resolve(url, storage_options)[:2]


def resolve(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Storage, list[str], bool]:
    """What `locate` returns, and whether the URL is a checkpoint's, which one name alone does not tell."""
    options = settings(storage_options)
    storage = open_storage(url, **options)
    text = path_text(url, "the root")
    files = [entry.key for entry in storage.list()]
    if files:
        if CKPT.sign(files) is None:
            return storage, [checkpoint.name for checkpoint in scan(storage)], False
        if isinstance(storage, ReadOnlyStorage):
            above, name = storage.parent
            return above, [name], True
        text = text if "://" in text else os.path.abspath(text)
    elif isinstance(storage, ReadOnlyStorage):
        return _unlisted(storage)
    root, _, name = text.rstrip("/").rpartition("/")
    if name and not root.endswith(":/"):
        with suppress(ConfigError):  # the URL is a bucket's or a repository's: it has no parent that could be a root
            parent = open_storage(root or ("/" if text.startswith("/") else "."), **options)
            if any(True for _ in parent.list(name)):
                return parent, [name], True
    check_exists(storage)
    raise MissingError(f"there is no checkpoint at {os.fspath(url)}: it is neither a root nor a checkpoint.")


def _unlisted(storage: ReadOnlyStorage) -> tuple[Storage, list[str], bool]:
    """A checkpoint on a server that shows no list of its files: its manifest says what there is."""
    above, name = storage.parent
    try:
        manifest = read_manifest(above, name)
    except (AbsentError, CheckpointError) as error:
        raise MissingError(
            f"{storage.url} shows no list of its files, and no checkpoint's manifest: {error} Give the URL of a "
            "checkpoint itself, or let the server show an index of the folder."
        ) from None
    above.know([f"{name}/{FILE_NAME}", *(f"{name}/{file.path}" for file in manifest.files)])
    return above, [name], True


def check_exists(storage: Storage) -> None:
    """Raise if an empty storage is a repository that does not exist, or that this account may not see."""
    if isinstance(storage, HubStorage):
        storage.repo.head()


@dataclass(frozen=True)
class Overview:
    """The checkpoints of a root, newest first; those without a readable manifest come last.

    Those that the index knows have a summary, and no manifest: it was not read."""

    storage: Storage
    checkpoints: list[Checkpoint]
    index: Index
    files: Mapping[str, Mapping[str, Entry]]  # by folder and path

    @classmethod
    def of(cls, storage: Storage, entries: Iterable[Entry] | None = None, known: Index | None = None) -> Overview:
        """`entries`: what `storage.list()` has just returned, if it was called already. `known`: an index of this
        root that was made a moment ago."""
        files = by_folder(storage.list() if entries is None else entries)
        names = [name for name, inside in files.items() if is_checkpoint(name, inside)]
        index = known or (Index.read(storage) if INDEX in files else Index())
        summaries = {name: index.find(name, _manifest_version(files[name])) for name in names}
        read = _find_listed(storage, {name: files[name] for name in names if summaries[name] is None})
        for checkpoint in read:
            if checkpoint.summary is not None and not checkpoint.flaw:
                index.add(_manifest_version(files[checkpoint.name]), checkpoint.summary)  # listed before it was read
        known_ones = [
            Checkpoint(name, f"{storage.url}/{name}", indexed=summary) for name, summary in summaries.items() if summary
        ]
        return cls(storage, sorted([*known_ones, *read], key=_commit_order, reverse=True), index, files)

    @property
    def entries(self) -> list[Entry]:
        return [entry for inside in self.files.values() for entry in inside.values()]

    @property
    def manifests(self) -> dict[str, Manifest]:
        """By name, those that were read, because the index does not have what they say."""
        return {found.name: found.manifest for found in self.checkpoints if found.manifest is not None}

    @property
    def committed(self) -> list[Summary]:
        return [found.summary for found in self.checkpoints if found.summary is not None]

    @property
    def lost(self) -> dict[str, CheckpointError]:
        """What was committed and cannot be used, since neither the manifest nor its copy is whole; with the reason."""
        lost = (found for found in self.checkpoints if found.summary is None and found.was_committed)
        return {found.name: found.problem for found in lost if found.problem is not None}

    @property
    def to_mend(self) -> list[str]:
        """Names of checkpoints whose manifest is damaged, or whose copy of it is missing or was cut short."""
        readable = (found for found in self.checkpoints if found.summary is not None)
        return [found.name for found in readable if found.flaw or self._lacks_copy(found.name)]

    def _lacks_copy(self, name: str) -> bool:
        first, second = (self.files.get(name, {}).get(file) for file in (FILE_NAME, COPY_NAME))
        return second is None or first is None or first.size != second.size

    def sizes(self, name: str) -> dict[str, int]:
        """The sizes of the files in a checkpoint's folder, by path."""
        return {path: entry.size for path, entry in self.files.get(name, {}).items()}


def _manifest_version(inside: Mapping[str, Entry]) -> str | None:
    entry = inside.get(FILE_NAME)
    return entry.version if entry is not None else None


HISTORY = ".history.jsonl"
MOST = 5_000  # checkpoints: of more, the oldest are left out, and counted
_LARGEST = 16 << 20  # bytes
_NUMBERS = is_mapping(is_finite)
_SAVE_RULES = {
    "name": Rule(is_text, "text"),
    "seconds": Rule(_NUMBERS, "numbers by name"),
    "memory": Rule(_NUMBERS, "numbers by name", required=False),
    "resumed": Rule(is_resumed, "what was loaded, and what was passed over", required=False),
}


@dataclass(frozen=True)
class PastSave:
    """A checkpoint that was committed in the root once, and what its manifest said of its save, where that is known."""

    summary: Summary
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int | float] = field(default_factory=dict)
    resumed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Manifest | Summary) -> PastSave:
        if isinstance(checkpoint, Manifest):
            return cls(Summary.of(checkpoint), checkpoint.seconds, checkpoint.memory, checkpoint.resumed)
        return cls(checkpoint)


@dataclass
class History:
    """What is known of a root's saves, by their ids: as stored, and what this process has learned since."""

    storage: Storage
    left_out: int = 0  # older ones than the file has room for
    _saves: dict[str, PastSave] = field(default_factory=dict)
    _lines: dict[str, bytes] = field(default_factory=dict)  # of the file, by id
    _is_read: bool = False
    _is_ours: bool = True  # not of a newer version of ckpt

    @classmethod
    def of(cls, storage: Storage) -> History:
        """As stored. What cannot be read is named in the log."""
        history = cls(storage)
        history._read()
        return history

    @property
    def saves(self) -> list[PastSave]:
        """Oldest first."""
        return sorted(self._saves.values(), key=lambda save: (save.summary.created, save.summary.sequence))

    def without(self, present: Iterable[Manifest | Summary]) -> list[PastSave]:
        """Those that are not in the root any more, oldest first. `present`: the checkpoints that are."""
        there = {checkpoint.id for checkpoint in present}
        return [save for save in self.saves if save.summary.id not in there]

    def add(self, checkpoint: Manifest | Summary) -> None:
        """Remember a checkpoint. It is stored with the next `store`."""
        save, known = PastSave.of(checkpoint), self._saves.get(checkpoint.id)
        if known is None or (save.seconds and not known.seconds):
            self._saves[checkpoint.id] = save
            self._lines[checkpoint.id] = _line(_fields(save))

    def lacks_save(self, checkpoint: Manifest | Summary) -> bool:
        """Whether nothing is known of how the checkpoint was saved: an earlier process did, and it was only listed."""
        if isinstance(self.storage, Staging):
            return False
        self._read()
        known = self._saves.get(checkpoint.id)
        return known is None or not known.seconds

    def store(self, checkpoints: Iterable[Manifest | Summary]) -> None:
        """Store all that is known, with these checkpoints, before some are removed. A failure is one warning."""
        if isinstance(self.storage, Staging):
            return
        self._read()
        for checkpoint in checkpoints:
            self.add(checkpoint)
        if not self._is_ours or not self._is_read:
            return
        try:
            self.storage.write(HISTORY, [self._encoded()])
        except StorageError as error:  # a disk may be full, and the removal makes room
            _log.warning("%s/%s was not written: %s", self.storage.url, HISTORY, error)

    def _read(self) -> None:
        if self._is_read:
            return
        try:
            if self.storage.version(HISTORY) is not None:
                self._parse(read_document(self.storage, HISTORY, _LARGEST))
        except StorageError as error:  # nothing says that it is damaged: it is not written over, and read again later
            _log.warning("%s/%s cannot be read now, and is left as it is: %s", self.storage.url, HISTORY, error)
            return
        except (DamagedError, ValueError) as error:
            _log.warning("%s/%s: saves before these are not known: %s", self.storage.url, HISTORY, error)
        self._is_read = True

    def _parse(self, data: bytes) -> None:
        first, *lines = data.splitlines() or [b""]
        head = _checked(first)
        if not isinstance(head, dict) or not is_count(head.get("version")) or not is_count(head.get("left_out")):
            raise ValueError("its first line is damaged")
        if head["version"] != _VERSION:
            self._is_ours = False
            raise ValueError("it is of a newer version of ckpt, and is left as it is")
        self.left_out = head["left_out"]
        damaged = 0
        for line in lines:
            save = _save_of(_checked(line))
            if save is None:
                damaged += 1
            elif save.summary.id not in self._saves:
                self._saves[save.summary.id] = save
                self._lines[save.summary.id] = line + b"\n"
        if damaged:
            _log.warning("%s/%s: %d of its lines are damaged, and left out", self.storage.url, HISTORY, damaged)

    def _encoded(self) -> bytes:
        lines = [self._lines[save.summary.id] for save in self.saves]
        kept, room = [], _LARGEST // 2
        for line in reversed(lines[-MOST:]):
            room -= len(line)
            if room < 0:
                break
            kept.append(line)
        left_out = self.left_out + len(lines) - len(kept)
        return b"".join([_line({"format": "ckpt history", "version": _VERSION, "left_out": left_out}), *reversed(kept)])


def _fields(save: PastSave) -> dict[str, Any]:
    known = {"memory": dict(save.memory), "resumed": dict(save.resumed)}
    found = {key: value for key, value in known.items() if value}
    return {"name": save.summary.name, **save.summary.to_json(), "seconds": dict(save.seconds), **found}


def _line(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(fields)
    return json.dumps([digest(text.encode()), text]).encode() + b"\n"


def _checked(line: bytes) -> Any:
    """What a line holds; None if it is not what its digest was made of."""
    try:
        claimed, text = parse_json(line)
        return parse_json(text.encode()) if digest(text.encode()) == claimed else None
    except (ValueError, TypeError, AttributeError):
        return None


def _save_of(fields: Any) -> PastSave | None:
    if broken_rules(fields, _SAVE_RULES):
        return None
    summary = Summary.from_json(fields["name"], fields)
    if summary is None:
        return None
    return PastSave(summary, fields["seconds"], fields.get("memory", {}), fields.get("resumed", {}))
