"""The checkpoints of a root: their manifests, what a listing says, the index that spares it manifests, and a history.

A listing says the version of every manifest. What the index of an object store says counts only for that version; any
other manifest is read. So an index that is old, damaged or gone costs time, and nothing else. Roots with few
checkpoints have none.

The history is what every save's manifest said, also of checkpoints that retention has removed since, and how each
attempt of the run went, with its metrics by step. One small file, written after saves, before anything is removed, and
when an attempt ends. It is only for people to read: nothing is loaded or removed by what it says. Each line has its
digest; a line that does not match it is named and passed over. Roots on the Hub have none.

`manifest.json` is the commit. `manifest.copy.json` has the same bytes. It is written right after the commit and, where
a checkpoint is replaced, deleted right before it, so that a copy always says what the last commit there said. A damaged
or missing manifest is read from its copy, with a warning, and the next run that locks the root writes it again.

`.saving` lists the files that a crash would leave behind, and keeps saves and removals of one checkpoint apart. Imports
no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    ConfigError,
    ConflictError,
    DamagedError,
    LockedError,
    MissingError,
    StorageError,
    VersionError,
)
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest, digest, is_resumed
from ckpt.formats.native.manifest import MARKER as MARKER
from ckpt.formats.registry import CKPT, FILE_SUFFIXES, is_checkpoint
from ckpt.storage import Entry, HubStorage, ObjectStorage, Staging, Storage, open_storage
from ckpt.storage.base import ROOT_LOCK, read_document
from ckpt.storage.fsspec_stores import ReadOnlyStorage
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
)
from ckpt.util.console import format_age, format_duration, format_number, format_size, html_table, utc_now
from ckpt.util.option_values import path_text, settings
from ckpt.util.threads import in_parallel, is_identity, process_identity, start_time

_log = logging.getLogger("ckpt")
_PATIENCE = 60.0  # seconds that a save waits for a removal of the checkpoint that it replaces
_PAUSE = 0.05
_ATTEMPTS = 20  # to write a marker while other processes write one
DAY = 24 * 3600.0
_LARGEST_DOCUMENT = 16 << 20  # bytes: the names of a hundred thousand files
_KEYS = Rule(is_list(is_key), "a list of relative paths, without '..'")
_MARKER_RULES = {
    "files": _KEYS,
    "replaces": _KEYS,
    "id": Rule(is_text, "text", required=False),
    "since": Rule(lambda value: value == "" or is_moment(value), "a time with its zone, in ISO 8601", required=False),
    "removing": Rule(lambda value: isinstance(value, bool), "true or false", required=False),
    "writer": Rule(is_identity, "the identity of a process", required=False),
}


@dataclass(frozen=True)
class SaveMarker:
    """What a save or a removal has announced: the files that it writes and replaces, and the checkpoint's id.

    A removal sets `removing`. Each is written over the version of the marker that was read, so that only one of the
    two is under way: a removal never deletes what a save is writing, and a save never begins in the middle of a
    removal.
    """

    files: tuple[str, ...]
    id: str = ""
    since: str = ""
    removing: bool = False
    writer: tuple[str | int | None, ...] = ()  # the identity of its process; empty in those of older versions

    @property
    def age(self) -> float:
        """Seconds since it was written, by this host's clock; infinite if it does not say when."""
        if not self.since:
            return math.inf
        return (datetime.now(timezone.utc) - datetime.fromisoformat(self.since)).total_seconds()

    @property
    def under_way(self) -> bool:
        """Whether its writer may still be at work. A writer on another machine counts as alive for a day."""
        if not self.writer or not _own_identity():
            return False
        alive = _is_alive(self.writer)
        return self.age < DAY if alive is None else alive


def mark_save(storage: Storage, name: str, files: Iterable[str], replaces: Iterable[str], id: str) -> None:
    """Announce a save in a checkpoint's folder, so that the next save can remove what a crash of this one leaves.

    Waits while another process removes the checkpoint of that name. Once the marker is written, none removes it.
    """
    new, old = dict.fromkeys(files), list(replaces)
    for _ in range(_ATTEMPTS):
        left, version = marker_and_version(storage, name)  # of an attempt whose files could not be removed yet
        if left is not None and left.removing:
            _wait_for_removal(storage, name)
        older = [path for path in dict.fromkeys([*old, *(left.files if left else ())]) if path not in new]
        with suppress(ConflictError):  # another process has written or removed a marker since it was read: try again
            _write(storage, name, version, files=list(new), replaces=older, id=id, removing=False)
            return
    raise ConflictError(f"other processes keep writing {storage.url}/{name}/{MARKER}. Save again.")


def mark_removal(storage: Storage, name: str, paths: Iterable[str], id: str, *, over: str | None) -> None:
    """Announce a removal over the `over` version of the marker. A save that has begun since raises a ConflictError."""
    _write(storage, name, over, files=[], replaces=list(dict.fromkeys(paths)), id=id, removing=True)


def _write(storage: Storage, name: str, over: str | None, **said: Any) -> None:
    by = {"process": os.getpid(), "host": socket.gethostname(), "writer": _own_identity()}
    storage.write(f"{name}/{MARKER}", [json.dumps({**said, "since": utc_now(), **by}).encode()], over=over)


def marker_and_version(storage: Storage, name: str) -> tuple[SaveMarker | None, str | None]:
    """The marker in a checkpoint's folder, and the version to write over: None if there is none."""
    key = f"{name}/{MARKER}"
    try:
        read_document(storage, key, _LARGEST_DOCUMENT)
    except AbsentError:  # the usual case, for which one request is enough
        return None, None
    except DamagedError:
        pass
    version = storage.version(key)  # before the content: the write then notices a change in between
    return read_marker(storage, name), version


def read_marker(storage: Storage, name: str) -> SaveMarker | None:
    """The marker in a checkpoint's folder; None if there is none, or none that ckpt wrote."""
    where = f"{name}/{MARKER}"
    try:
        marker = parse_json(read_document(storage, where, _LARGEST_DOCUMENT))
        problems = broken_rules(marker, _MARKER_RULES)
    except AbsentError:
        return None
    except (ValueError, DamagedError) as error:
        problems = [str(error)]
    if problems:
        _log.warning(
            "ckpt can't read the save marker %s/%s: %s. ckpt keeps the files that the marker may list.",
            storage.url, where, joined(problems).rstrip("."),
        )  # fmt: skip
        return None
    return SaveMarker(
        (*marker["files"], *marker["replaces"]),
        id=marker.get("id", ""),
        since=marker.get("since", ""),
        removing=marker.get("removing", False),
        writer=tuple(marker.get("writer", ())),
    )


def marked_names(entries: Iterable[Entry]) -> list[str]:
    """The names of the checkpoints whose folders have a marker."""
    keys = (entry.key for entry in entries)
    return [key.partition("/")[0] for key in keys if key.count("/") == 1 and key.endswith(f"/{MARKER}")]


def _wait_for_removal(storage: Storage, name: str) -> None:
    """Return when no process holds the folder's exclusive lock: its removal has finished, or its process is dead."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            with storage.lock(name, shared=True):
                return
        except AbsentError:
            return
        except LockedError as error:
            if time.monotonic() > deadline:
                raise LockedError(f"another process is removing {storage.url}/{name}: {error}") from error
            time.sleep(_PAUSE)


def _own_identity() -> tuple[str | int | None, ...]:
    return tuple(process_identity(os.getpid()))


def _is_alive(writer: Sequence[str | int | None]) -> bool | None:
    """Whether a process is still there; None if it is on another machine, or is not named."""
    if not writer or tuple(writer[:2]) != _own_identity()[:2]:
        return None
    return start_time(int(writer[2] or 0)) == writer[3]


_warned: set[tuple[str, str]] = set()
_REPLACED = 5  # times in a row that a checkpoint may be replaced while its two manifests are compared
_REPAIR = "The next run in this root repairs it, or: ckpt verify --repair."
COPY_IS_USED = f"Its copy {COPY_NAME} is used. {_REPAIR}"


class UncommittedError(DamagedError):
    """There are files of a checkpoint whose save or removal was cut off: nothing that was committed is lost."""


def was_committed(problem: CheckpointError | None) -> bool:
    """Whether a checkpoint with that problem was committed, though its manifest may be damaged or lost."""
    return not isinstance(problem, MissingError | UncommittedError)


def without_manifest(name: str, paths: Collection[str]) -> DamagedError:
    """What is wrong with a folder that has neither a manifest nor a copy of one.

    A save writes its marker before any other file and removes it after the commit; a removal does the same. So files
    without a marker were committed once.
    """
    if MARKER in paths:
        return UncommittedError(
            f"{name} was never committed: its save was interrupted before the manifest was written."
        )
    return DamagedError(
        f"{name} has lost {FILE_NAME} and {COPY_NAME}: its other files are there, and nothing says what they must be. "
        "Restore either from a backup, or move the folder away."
    )


@dataclass(frozen=True)
class FoundManifest:
    """The manifest of a checkpoint. `flaw`: what is wrong with `manifest.json`, if its copy was read in its place."""

    manifest: Manifest
    flaw: str = ""


def find_manifest(storage: Storage, name: str, known: Callable[[], str] = lambda: "") -> FoundManifest:
    """Read the manifest, or its copy where that is damaged or missing. `known`: names others if there is none."""
    try:
        return FoundManifest(_parsed_manifest(storage, name, FILE_NAME))
    except AbsentError as error:
        paths = {entry.key.removeprefix(f"{name}/") for entry in storage.list(name)}
        if not paths and isinstance(error, ConfigError):  # the folder is a link that leads out of the root
            raise MissingError(str(error)) from None
        if not paths:
            newest = " To load the newest one, leave out the name." if name in ("latest", "last", "newest") else ""
            raise MissingError(f"there is no checkpoint {name!r} in {storage.url}.{known()}{newest}") from None
        if FILE_NAME in paths:
            with suppress(AbsentError, DamagedError):  # committed since it was asked for; or it is no file, but a link
                return FoundManifest(_parsed_manifest(storage, name, FILE_NAME))
        if COPY_NAME not in paths or (MARKER in paths and _is_removal(storage, name)):
            raise without_manifest(name, paths) from None
        flaw = f"{name}/{FILE_NAME} is missing."
    except DamagedError as error:
        flaw = str(error)
    try:
        found = FoundManifest(_parsed_manifest(storage, name, COPY_NAME), flaw)
    except AbsentError:  # as of every checkpoint that was written before there were copies
        raise DamagedError(flaw) from None
    except DamagedError as error:
        raise DamagedError(f"{flaw} Its copy is damaged too: {error}") from None
    if (storage.url, flaw) not in _warned:
        _warned.add((storage.url, flaw))
        _log.warning("%s/%s %s", storage.url, flaw, COPY_IS_USED)
    return found


def _parsed_manifest(storage: Storage, name: str, file: str) -> Manifest:
    where = f"{name}/{file}"
    # the folder's name counts: a user may have renamed or copied it
    return replace(Manifest.from_bytes(read_document(storage, where), where), name=name)


def _is_removal(storage: Storage, name: str) -> bool:
    """Whether a removal was cut off there: it deletes the manifest before all else."""
    marker = read_marker(storage, name)
    return marker is not None and marker.removing


def write_copy(storage: Storage, name: str, data: bytes) -> None:
    """Write the copy of a manifest that was just committed."""
    storage.write(f"{name}/{COPY_NAME}", [data])


def delete_copy(storage: Storage, name: str) -> None:
    """Before another manifest is committed over the one that has this copy: it must not outlive its original."""
    storage.delete([f"{name}/{COPY_NAME}"])


def copy_problems(storage: Storage, name: str) -> list[str]:
    """What is wrong with the two files. A checkpoint that has no copy was written before there were any: nothing is."""
    first, second = _both(storage, name)
    for _ in range(_REPLACED):  # a save of the same name may have come between the two reads
        if first == second or (again := _both(storage, name)) == (first, second):
            break
        first, second = again
    if first is None:
        return [f"{FILE_NAME} was altered or is missing; its copy {COPY_NAME} is intact. {_REPAIR}"]
    is_altered = second is not None or storage.version(f"{name}/{COPY_NAME}") is not None
    if first == second or not is_altered or (second is None and _readable(storage, name, COPY_NAME) is not None):
        return []  # the same, or there is none, or one was written just now
    return [f"{COPY_NAME} was altered; {FILE_NAME}, of which it is the copy, is intact. {_REPAIR}"]


def mend(storage: Storage, name: str, *, proven: bool = False) -> dict[str, str]:
    """Write whichever of the two files is missing or damaged from the other. Returns what was written, and its source.

    Where both can be read and differ, somebody has put another manifest there: neither is overwritten, unless the files
    have `proven` that the first is right. The caller holds the checkpoint's lock, so that nobody removes it meanwhile.
    """
    first, second = _both(storage, name)
    if first == second or (first is None and _is_removal(storage, name)):
        return {}
    if first is not None and second is not None and not proven:
        return {}
    bad, good, data = (FILE_NAME, COPY_NAME, second) if first is None else (COPY_NAME, FILE_NAME, first)
    key = f"{name}/{bad}"
    assert data is not None
    if isinstance(storage, Staging):
        storage.publish({key: storage.stage(key, [data])})
    else:
        storage.write(key, [data], over=storage.version(key))
    return {bad: f"{storage.url}/{name}/{good}"}


def are_alike(storage: Storage, name: str) -> bool:
    """Whether the manifest and its copy have the same bytes. Neither is parsed."""
    try:
        return read_document(storage, f"{name}/{FILE_NAME}") == read_document(storage, f"{name}/{COPY_NAME}")
    except (AbsentError, DamagedError):
        return False


def manifest_bytes(storage: Storage, name: str) -> bytes:
    """The bytes of the manifest, of whichever of the two files is whole."""
    found = find_manifest(storage, name)
    return read_document(storage, f"{name}/{COPY_NAME if found.flaw else FILE_NAME}")


def _both(storage: Storage, name: str) -> tuple[bytes | None, bytes | None]:
    return _readable(storage, name, FILE_NAME), _readable(storage, name, COPY_NAME)


def _readable(storage: Storage, name: str, file: str) -> bytes | None:
    """The bytes of the manifest or of its copy; None if they are not what was written. A newer version's are."""
    try:
        data = read_document(storage, f"{name}/{file}")
        Manifest.from_bytes(data, file)
    except VersionError:
        return data
    except (AbsentError, DamagedError):
        return None
    return data


FROZEN = "frozen"  # what stands aside in a file of its own: frozen tensors
_ASIDE = "+"  # no part's name has it
_RANK_SUFFIX = re.compile(rf"[/-](\d{{5}})(?:\+[\w.-]+?)?(?:\.[0-9a-f]{{8}})?{re.escape(SUFFIX)}$")


def whole_file(key: str, *, aside: str = "") -> str:
    """The file with all of a part's tensors: `model.safetensors`. Some may stand aside: `model+frozen.safetensors`."""
    return f"{key}{_ASIDE if aside else ''}{aside}{SUFFIX}"


def spread_file(key: str, rank: int, *, aside: str = "") -> str:
    """The file with a rank's shards of a part: `model/00003.safetensors`."""
    return whole_file(f"{key}/{rank:05d}", aside=aside)


def tensor_files_of(key: str, rank: int) -> tuple[str, str]:
    """The files in which a rank writes tensors of a part alone: its shards, and what not all ranks have."""
    return spread_file(key, rank), whole_file(own_key(key, rank))


def main_file(name: str) -> str:
    """The file that a tensor file stands beside: `model.safetensors` for `model+frozen.safetensors`, and for itself."""
    return whole_file(name.removesuffix(SUFFIX).partition(_ASIDE)[0])


def own_key(key: str, rank: int) -> str:
    """The key, and thereby the file name, of what a rank alone holds of a part whose state differs between ranks."""
    return f"{key}-own-{rank:05d}"


def rank_of(name: str) -> int | None:
    """The rank whose tensors a file holds; None if it holds what all ranks have in common."""
    found = _RANK_SUFFIX.search(name)
    return int(found.group(1)) if found else None


def part_of(name: str) -> str:
    """The part that a tensor file belongs to."""
    return name.partition("/")[0].removesuffix(SUFFIX).partition(_ASIDE)[0]


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
        said = {key: getattr(manifest, key) for key in ("name", *_RULES) if key != "contents"}
        contents = "" if manifest.hosts else contents_digest({file.path: file.size for file in manifest.files})
        return cls(**said, contents=contents)

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
            _log.debug("ckpt can't use %s/%s, and reads the manifests instead: %s", storage.url, INDEX, error)
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
            _log.debug("ckpt could not write %s/%s: %s", storage.url, INDEX, error)


def _encoded(entries: Mapping[str, tuple[str, Summary]]) -> bytes:
    found = {name: {"version": version, **summary.to_json()} for name, (version, summary) in entries.items()}
    return _line({"format": "ckpt index", "version": _VERSION, "checkpoints": found})


def _parsed(data: bytes) -> dict[str, tuple[str, Summary]]:
    fields = _checked(data)
    if not isinstance(fields, dict) or fields.get("version") != _VERSION:
        raise ValueError("the index is damaged, or another version of ckpt wrote it")
    listed = fields.get("checkpoints")
    found = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        summary = Summary.from_json(name, entry)
        if summary is not None and is_text(entry.get("version")):
            found[name] = (entry["version"], summary)
    return found


LOCK = ROOT_LOCK  # in a root: locked by the run that writes to it
_READERS = 32  # threads that read manifests from an object store


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a listing.

    Attributes:
        name: The name of its folder.
        url: Its URL or path.
        manifest: Its manifest, with step, metrics and files; None if the checkpoint is not committed or not readable.
        problem: Why there is no manifest.
        flaw: What is wrong with `manifest.json`, if ckpt read its copy instead.
        indexed: What the index of the root says, if ckpt took that instead of reading the manifest.
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


def scan(storage: Storage) -> list[Checkpoint]:
    """Every checkpoint of the root, newest commit first; those without a readable manifest come last.

    A folder is a checkpoint if it has a manifest or a copy of one, a save marker, or other files of a checkpoint.
    """
    return Overview.of(storage, known=Index()).checkpoints


def skimmed(storage: Storage) -> Iterable[Entry]:
    """The objects of a root, of a checkpoint at least its save marker, its manifest and the copy of that."""
    return storage.skim(FILE_NAME) if isinstance(storage, ObjectStorage) else storage.list()


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
    """List the checkpoints in a root, newest first. Checkpoints that were never committed have no manifest, and come
    last.

    `list_checkpoints` reads only manifests; `verify` reads every byte.

    Args:
        root: A folder or prefix. If nothing was saved there yet, the list is empty.
        storage_options: As for the manager.

    Returns:
        A list of the checkpoints, which notebooks show as a table.

    Raises:
        StorageError: A repository of the Hub does not exist, or this account can't see it.
    """
    storage = open_storage(root, **settings(storage_options))
    found = scan(storage)
    if not found:
        check_exists(storage)
    return Checkpoints(found)


def resolve(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> tuple[Storage, list[str], bool]:
    """The root at a URL with the names of its checkpoints; for the URL of a checkpoint, its root and its name alone,
    and True, which one name alone does not tell."""
    try:
        return _resolved(url, settings(storage_options))
    except (ConfigError, MissingError) as error:
        if not isinstance(url, (str, os.PathLike)) or not os.fspath(url).endswith(FILE_SUFFIXES):
            raise
        raise MissingError(
            f"there is no checkpoint at {os.fspath(url)}: a single file has no manifest with hashes. 'ckpt show' lists "
            "its tensors."
        ) from error


def _resolved(url: str | os.PathLike[str], options: Mapping[str, Any]) -> tuple[Storage, list[str], bool]:
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
    raise MissingError(f"there is no checkpoint at {os.fspath(url)}, which is neither a root nor a checkpoint.")


def _unlisted(storage: ReadOnlyStorage) -> tuple[Storage, list[str], bool]:
    """A checkpoint on a server that shows no list of its files: its manifest says what there is."""
    above, name = storage.parent
    try:
        manifest = read_manifest(above, name)
    except (AbsentError, CheckpointError) as error:
        raise MissingError(
            f"{storage.url} provides neither a list of its files nor a checkpoint's manifest: {error} Give the URL of "
            "a checkpoint itself, or let the server list the folder's files."
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
        """`entries`: what `storage.list()` has just returned, where every file must be known: otherwise, of large
        checkpoints in an object store, those up to the manifest are. `known`: an index of this root that was made a
        moment ago."""
        files = by_folder(skimmed(storage) if entries is None else entries)
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
MOST_ATTEMPTS = 200
MOST_POINTS = 400  # of a metric, in all attempts together
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


ENDS = ("finished", "exited", "stopped", "failed")


def _are_points(value: Any) -> bool:
    """The steps and the values of a metric."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, list) for part in value):
        return False
    steps, values = value
    same = len(steps) == len(values) <= MOST_POINTS
    return same and all(map(is_count, steps)) and all(number in _NOT_JSON or is_finite(number) for number in values)


_ATTEMPT_RULES = {
    "id": _TEXT,
    "run": _TEXT,
    "began": _RULES["created"],
    **dict.fromkeys(("since", "first", "last", "redone"), _COUNT),
    "seconds": Rule(is_mapping(lambda value: is_finite(value) and 0 <= value <= LARGEST_NUMBER), "seconds by name"),
    "ended": Rule(lambda value: value in ("", *ENDS), "a way to end"),
    "reason": _TEXT,
    "resumed": replace(_SAVE_RULES["resumed"], required=True),
    "writer": Rule(is_identity, "the identity of a process"),
    "metrics": Rule(is_mapping(_are_points), "steps and values by name"),
}


@dataclass(frozen=True)
class PastAttempt:
    """One process of a run, from its resume until it ended, or until it last wrote this.

    Attributes:
        since: The sequence number of its first checkpoint; 0 if it has saved none.
        first: The step that it began at.
        last: The last step that it is known to have made.
        redone: Steps that it went back by loads of its own.
        seconds: `total` so far; of those, `ready` until it could train, `waited` for saves. With
            `save_every="auto"`, `slowed`: by how much the steps beside each save took longer.
        ended: One of `ENDS`; empty if it has not said so: it is running, or was killed.
        reason: The signal that stopped it, or its exception.
        resumed: What it was loaded from, as the manifest of its first checkpoint has it.
        metrics: Values by step, evenly thinned.
    """

    id: str
    run: str
    began: str
    since: int = 0
    first: int = 0
    last: int = 0
    redone: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""
    reason: str = ""
    resumed: Mapping[str, Any] = field(default_factory=dict)
    writer: Sequence[str | int | None] = field(default_factory=_own_identity)
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def is_running(self) -> bool | None:
        """None if that can't be known here: its process is on another machine."""
        return False if self.ended else _is_alive(self.writer)

    def to_json(self) -> dict[str, Any]:
        curves = {
            name: [[step for step, _ in curve], [float(f"{x:.6g}") if x - x == 0 else str(x) for _, x in curve]]
            for name, curve in self.metrics.items()
        }
        return {**vars(self), "metrics": curves}

    @classmethod
    def from_json(cls, fields: Any) -> PastAttempt | None:
        """None if any field is not what it must be."""
        if broken_rules(fields, _ATTEMPT_RULES):
            return None
        curves = {
            name: [(step, float(value)) for step, value in zip(*points, strict=True)]
            for name, points in fields["metrics"].items()
        }
        return cls(**{**{key: fields[key] for key in _ATTEMPT_RULES}, "metrics": curves})


def lost_steps(attempts: Sequence[PastAttempt]) -> list[int]:
    """The steps of each attempt, oldest first, that it or a later one made again, from an older checkpoint."""
    found: list[int] = []
    begins = LARGEST_NUMBER  # where the attempt after it began that went back the furthest
    for attempt in reversed(attempts):
        found.append(max(0, attempt.last - max(attempt.first, begins)) + attempt.redone)
        begins = min(begins, attempt.first)
    return found[::-1]


@dataclass(frozen=True)
class Goodput:
    """How a run spent its wall time, in seconds, from its first attempt to the last moment that ckpt knows of.

    An attempt is one process of the run. If an attempt was killed, ckpt knows only what it wrote after its last save:
    the time from then on counts as `down`, and the steps made since then are unknown, so `share` and `lost_steps` are
    lower bounds.

    Attributes:
        training: The time of steps that count. Steps since the newest checkpoint count until an attempt has to repeat
            them.
        repeated: The time of steps that the run had to repeat, at the average speed of their attempt.
        saving: The time that training waited for saves.
        starting: The time from building the manager until the checkpoint was loaded; if an attempt made no step, all of
            its time.
        down: The time between the end of an attempt and the moment when the next one built its manager.
        lost_steps: The number of steps that the run had to repeat.
        attempts: The number of attempts in the history, which keeps the newest 200.
    """

    training: float = 0.0
    repeated: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    down: float = 0.0
    lost_steps: int = 0
    attempts: int = 0

    @classmethod
    def of(cls, attempts: Sequence[PastAttempt]) -> Goodput | None:
        """Of a run's attempts, oldest first; None if there are none."""
        if not attempts:
            return None
        lost = lost_steps(attempts)
        training = repeated = saving = starting = down = 0.0
        for attempt, again, following in zip(attempts, lost, [*attempts[1:], None], strict=True):
            total, ready, waited = (attempt.seconds.get(name, 0.0) for name in ("total", "ready", "waited"))
            made = attempt.last - attempt.first + attempt.redone
            trained = max(0.0, total - ready - waited) if made > 0 else 0.0
            wasted = trained * min(1.0, again / made) if made > 0 else 0.0
            training += trained - wasted
            repeated += wasted
            saving += waited
            starting += max(0.0, total - waited - trained)
            if following is not None:
                began, then = map(datetime.fromisoformat, (attempt.began, following.began))
                down += max(0.0, (then - began).total_seconds() - total)
        return cls(training, repeated, saving, starting, down, sum(lost), len(attempts))

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    @property
    def share(self) -> float:
        """The part of the time in which steps were made that count, from 0 to 1."""
        return self.training / self.seconds if self.seconds else 0.0

    @property
    def parts(self) -> list[tuple[str, float]]:
        """What the time went to, in words, and the seconds."""
        return [
            ("training that counts", self.training),
            ("steps made again", self.repeated),
            ("waiting for saves", self.saving),
            ("starting and loading", self.starting),
            ("down between attempts", self.down),
        ]

    def __str__(self) -> str:
        whole = self.seconds or 1.0
        rest = [f"{seconds / whole:.1%} {label}" for label, seconds in self.parts[1:] if seconds >= whole / 2000]
        wall = format_duration(self.seconds)
        return f"goodput {self.share:.1%} of {wall}" + (f": {', '.join(rest)}" if rest else "")


@dataclass
class History:
    """What is known of a root's saves, by their ids, and of its attempts: as stored, and what this process has learned
    since."""

    storage: Storage
    left_out: int = 0  # older ones than the file has room for
    _saves: dict[str, PastSave] = field(default_factory=dict)
    _lines: dict[str, bytes] = field(default_factory=dict)  # of the file, by id
    _attempts: dict[str, PastAttempt] = field(default_factory=dict)  # oldest first
    _stored: str = ""  # digest
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

    @property
    def is_known(self) -> bool:
        """Whether it was read, or there is none yet."""
        return self._is_read and self._is_ours and not isinstance(self.storage, Staging)

    @property
    def attempts(self) -> list[PastAttempt]:
        """Oldest first."""
        return list(self._attempts.values())

    def note(self, attempt: PastAttempt) -> None:
        """Remember how far an attempt is, in place of what it said before. It is stored with the next `store`."""
        self._attempts[attempt.id] = attempt

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
        data = self._encoded()
        if not self._is_ours or not self._is_read or digest(data) == self._stored:
            return
        try:
            self.storage.write(HISTORY, [data])
            self._stored = digest(data)
        except StorageError as error:  # a disk may be full, and the removal makes room
            _log.warning("ckpt could not write %s/%s: %s", self.storage.url, HISTORY, error)

    def _read(self) -> None:
        if self._is_read:
            return
        try:
            if self.storage.version(HISTORY) is not None:
                self._parse(read_document(self.storage, HISTORY, _LARGEST))
        except StorageError as error:  # nothing says that it is damaged: it is not written over, and read again later
            _log.warning("ckpt can't read %s/%s now, and leaves it unchanged: %s", self.storage.url, HISTORY, error)
            return
        except (DamagedError, ValueError) as error:
            _log.warning("%s/%s lacks earlier saves: %s", self.storage.url, HISTORY, error)
        self._is_read = True

    def _parse(self, data: bytes) -> None:
        first, *lines = data.splitlines() or [b""]
        head = _checked(first)
        if not isinstance(head, dict) or not is_count(head.get("version")) or not is_count(head.get("left_out")):
            raise ValueError("the first line of the history is damaged")
        if head["version"] != _VERSION:
            self._is_ours = False
            raise ValueError("a newer version of ckpt wrote the history, so this version leaves it unchanged")
        self.left_out = head["left_out"]
        damaged, attempts = 0, {}
        for line in lines:
            fields = _checked(line)
            is_attempt = isinstance(fields, dict) and "began" in fields
            found = PastAttempt.from_json(fields) if is_attempt else _save_of(fields)
            if found is None:
                damaged += 1
            elif isinstance(found, PastAttempt):
                attempts[found.id] = found
            elif found.summary.id not in self._saves:
                self._saves[found.summary.id] = found
                self._lines[found.summary.id] = line + b"\n"
        self._attempts = attempts | self._attempts  # what this process has noted comes last
        if damaged:
            _log.warning("%s/%s: ckpt skips damaged lines (%d)", self.storage.url, HISTORY, damaged)

    def _encoded(self) -> bytes:
        lines = [self._lines[save.summary.id] for save in self.saves]
        attempts = [_line(attempt.to_json()) for attempt in _thinned(self.attempts[-MOST_ATTEMPTS:])]
        kept, room = [], _LARGEST // 2 - sum(map(len, attempts))
        for line in reversed(lines[-MOST:]):
            room -= len(line)
            if room < 0:
                break
            kept.append(line)
        left_out = self.left_out + len(lines) - len(kept)
        head = _line({"format": "ckpt history", "version": _VERSION, "left_out": left_out})
        return b"".join([head, *reversed(kept), *attempts])


def _thinned(attempts: list[PastAttempt]) -> list[PastAttempt]:
    """The same, with no more than `MOST_POINTS` of each metric: of the longest curve, every other one goes."""
    for name in {name for attempt in attempts for name in attempt.metrics}:
        curves = [attempt.metrics[name] for attempt in attempts if name in attempt.metrics]
        while sum(map(len, curves)) > MOST_POINTS and len(longest := max(curves, key=len)) > 1:
            longest[:] = longest[::2]
    return attempts


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
