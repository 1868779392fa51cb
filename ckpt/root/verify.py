"""Verifies checkpoints against their manifests, says what condition they are in, and repairs them from intact copies.

`VerifiedFile` reads a file against the hashes in the manifest, `StoredFile` as it is. To repair, a file may be intact
in the root, in another home of the same checkpoint, such as the mirror, or in another checkpoint that has the same
bytes. Every byte is compared with the manifest's hashes before it is taken, and again while it is written. Works on a
root that a run is writing to. Imports no torch: `ckpt verify` and `ckpt ls` start without it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    DamagedError,
    LockedError,
    StorageError,
    TruncatedError,
    UntrustedError,
    shows_damage,
)
from ckpt.formats.native.header import SUFFIX, Header
from ckpt.formats.native.manifest import FILE_NAME, BlockHasher, FileRecord, Host, Manifest, digest, sha256
from ckpt.root import catalog
from ckpt.root.catalog import (
    COPY_IS_USED,
    Checkpoint,
    Overview,
    copy_problems,
    manifest_bytes,
    mend,
    rank_of,
    read_marker,
)
from ckpt.root.signing import BELIEVES_ALL, KeySource, Trust, open_trust
from ckpt.storage import Staging, Storage
from ckpt.util.console import format_size, html_table, one_line, progress_bar
from ckpt.util.threads import CORES_OF_RANK, in_parallel

WINDOW = 8 << 20  # bytes: small enough to be hashed while they are in the processor's cache


@dataclass(frozen=True)
class StoredFile:
    """One object of a storage, for formats, which know no storage. Nothing is verified."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, *buffers: memoryview, again: bool = False) -> None:
        self.storage.read_into(self.key, start, *buffers, again=again)


@dataclass(frozen=True)
class VerifiedFile:
    """A file of a checkpoint with its record in the manifest. `read` and `pieces` verify; `read_into` does not.

    `sha256`: whether its SHA-256 is compared too. Then nothing that was verified is read again: it may be altered in
    between. `shared`: other ranks of this host read other bytes of the same blocks.
    """

    stored: StoredFile
    record: FileRecord
    sha256: bool = False
    shared: bool = False
    _intact: set[int] = field(default_factory=set)  # blocks that were verified
    _heads: list[bytes] = field(default_factory=list)  # the file's head, once it was read and verified

    @classmethod
    def of(cls, storage: Storage, checkpoint: str, record: FileRecord, *, sha256: bool = False) -> VerifiedFile:
        """The file that a record in a checkpoint's manifest describes."""
        return cls(StoredFile(storage, f"{checkpoint}/{record.path}"), record, sha256)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`, after the head or the blocks that hold them were verified."""
        head = self.record.head if self.record.head_sha256 or not self.sha256 else None
        if head is not None and stop <= head[0]:
            return self._head()[start:stop]
        blocks = range(start // self.record.block_size, -(-min(stop, self.record.size) // self.record.block_size))
        if self.sha256:
            return self._read_once(blocks, start, stop)
        for index in sorted(set(blocks) - self._intact):
            problem = self.verify_block(index, memoryview(bytearray(WINDOW)))
            if problem:
                self._refuse(problem)
            self._intact.add(index)
        return self.stored.read(start, stop)

    def read_all(self) -> bytes:
        return self.read(0, self.record.size)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers with the bytes from `start`, without verifying them."""
        self.stored.read_into(start, *buffers, again=self.shared)

    def pieces(self) -> Iterator[memoryview]:
        """The whole file, verified, each piece valid until the next is requested.

        A block's hash is known only after its last piece was yielded: an altered block raises before the next one, so
        whatever consumes the pieces must publish nothing before the iterator has ended.
        """
        buffer = memoryview(bytearray(min(WINDOW, self.record.size)))
        for index in range(len(self.record.blocks)):
            hasher = self.hasher()
            yield from hasher.through(self._block_pieces(index, buffer))
            problem = self.hash_problem(index, hasher)
            if problem:
                self._refuse(problem)

    def span(self, index: int) -> tuple[int, int]:
        """The offsets at which a block begins and ends."""
        start = index * self.record.block_size
        return start, min(self.record.size, start + self.record.block_size)

    def verify_block(
        self, index: int, buffer: memoryview, advance: Callable[[float], None] = lambda size: None
    ) -> str | None:
        """Read a block through `buffer`. Returns what is wrong with it; None if it matches its hash."""
        hasher = self.hasher()
        for piece in hasher.through(self._block_pieces(index, buffer, again=True)):
            advance(len(piece))
        return self.hash_problem(index, hasher)

    def hasher(self) -> BlockHasher:
        """What the bytes of a block go through."""
        return BlockHasher(self.record.block_size, sha256=self.sha256)

    def hash_problem(self, index: int, hasher: BlockHasher) -> str | None:
        """What is wrong with a block whose bytes went through `hasher`; None if they match the manifest's hash."""
        start, stop = self.span(index)
        same = hasher.digests == (self.record.blocks[index],)
        same = same and (not self.sha256 or hasher.sha256_digests == (self.record.sha256[index],))
        return None if same else f"{self.record.path} was altered (bytes {start} to {stop})"

    def _head(self) -> bytes:
        assert self.record.head is not None
        if not self._heads:
            size, expected = self.record.head
            found = self.stored.read(0, size)
            if digest(found) != expected:
                self._refuse(f"{self.record.path} was altered (bytes 0 to {size})")
            if self.sha256 and sha256(found) != self.record.head_sha256:
                self._refuse(f"{self.record.path} was altered (bytes 0 to {size}): its SHA-256 differs")
            self._heads.append(found)
        return self._heads[0]

    def _read_once(self, blocks: range, start: int, stop: int) -> bytes:
        """Read whole blocks, verify them, and return of the same bytes those that are asked for."""
        first, last = blocks.start * self.record.block_size, min(blocks.stop * self.record.block_size, self.record.size)
        found = memoryview(bytearray(last - first))
        self.stored.read_into(first, found)
        for index in blocks:
            begin, end = self.span(index)
            hasher = self.hasher()
            hasher.update(found[begin - first : end - first])
            if problem := self.hash_problem(index, hasher):
                self._refuse(problem)
        return bytes(found[start - first : stop - first])

    def _block_pieces(self, index: int, buffer: memoryview, *, again: bool = False) -> Iterator[memoryview]:
        start, stop = self.span(index)
        while start < stop:
            piece = buffer[: stop - start]
            try:
                self.stored.read_into(start, piece, again=again)
            except (AbsentError, TruncatedError) as error:
                self._refuse(f"{self.record.path} is missing or cut short: {str(error).rstrip('.')}")
            yield piece
            start += len(piece)

    def _refuse(self, problem: str) -> NoReturn:
        raise DamagedError(f"{self.stored.key.partition('/')[0]} is damaged: {problem}.")


class AuthenticFile:
    """A file of a signed checkpoint whose every read is of bytes that were verified in memory, block by block.

    `last` is the block that was read last, of all files that share it: no more is kept in memory.
    """

    def __init__(self, file: VerifiedFile, last: dict[tuple[str, int], memoryview]) -> None:
        self._file, self._last = file, last

    def read(self, start: int, stop: int) -> bytes:
        found = bytearray(max(0, min(stop, self._file.record.size) - start))
        self.read_into(start, memoryview(found))
        return bytes(found)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for view in (memoryview(buffer).cast("B") for buffer in buffers):
            while view:
                index, at = divmod(start, self._file.record.block_size)
                piece = self._block(index)[at : at + len(view)]
                if not piece:
                    raise TruncatedError(f"{self._file.stored.key} is {len(view)} bytes too short.")
                view[: len(piece)] = piece
                view, start = view[len(piece) :], start + len(piece)

    def _block(self, index: int) -> memoryview:
        wanted = self._file.stored.key, index
        found = self._last.get(wanted)
        if found is None:
            self._last.clear()
            found = self._last[wanted] = memoryview(self._file.read(*self._file.span(index)))
        return found


INTACT = "intact"
DAMAGED = "DAMAGED"
UNTRUSTED = "UNTRUSTED"
UNREADABLE = "UNREADABLE"
UNDER_WAY = "under way"
REMOVED = "removed"

_PATIENCE = 10.0  # seconds to wait for a removal or a cleanup by another process
_PAUSE = 0.1
_MOST_THREADS = 16
_THREADS = min(_MOST_THREADS, max(2, CORES_OF_RANK))


@dataclass(frozen=True)
class Verification:
    """The state of a checkpoint, one of the six above, and the problems that were found.

    `under way`: a process is saving or removing it now. `removed`: it was listed, and is gone. Neither is a fault.
    """

    name: str
    state: str
    problems: tuple[str, ...] = ()
    manifest: Manifest | None = None
    error: StorageError | None = None  # why it is unreadable

    @property
    def is_fault(self) -> bool:
        return self.state in (DAMAGED, UNTRUSTED, UNREADABLE)


class Verified(dict[str, list[str]]):
    """The problems of each checkpoint, by name: a dict, and a table in notebooks."""

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = [(name, "; ".join(problems) or "none: every byte is intact") for name, problems in self.items()]
        return html_table("verified", rows, ("name", "problems"))


def verify(
    url: str | os.PathLike[str],
    *,
    verify_key: KeySource | None = None,
    require_signed: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Verified:
    """Find what is wrong with a checkpoint, or with each checkpoint of a root.

    `verify` reads every file and compares it with the hashes in its manifest. If hosts have separate roots, `verify`
    reads only the files in this root. A run may use the root at the same time: `verify` skips checkpoints that the run
    is saving or removing.

    Args:
        url: A root or a checkpoint.
        verify_key: As in `Signing`: if none of these keys has signed a checkpoint, that counts as a problem too.
        require_signed: As `required` of `Signing`. A key implies True.
        storage_options: As for the manager.

    Returns:
        The problems of each checkpoint, by name; an empty list means that the checkpoint is intact. Notebooks show this
        dict as a table.

    Raises:
        MissingError: The URL is neither a root nor a checkpoint.
    """
    trust = required_by(verify_key, require_signed)
    storage, names, is_checkpoint = catalog.resolve(url, storage_options)
    found = [verify_checkpoint(storage, name, trust) for name in names]
    told = [each for each in found if is_checkpoint or each.is_fault or each.state == INTACT]
    return Verified({each.name: list(each.problems) for each in told})


def required_by(verify_key: KeySource | None, require_signed: bool | str) -> Trust:
    """Whom to believe where a key says that signatures matter: the caller's, or that of the environment."""
    return replace(trust := open_trust(verify_key, required=require_signed), required=bool(trust.keys))


def verify_checkpoint(storage: Storage, name: str, trust: Trust = BELIEVES_ALL) -> Verification:
    """Verify one checkpoint. Tries again, for a while, when another process has changed it meanwhile."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        found, is_final = _verify_once(storage, name, trust)
        if is_final or time.monotonic() > deadline:
            return found
        time.sleep(_PAUSE)


def _verify_once(storage: Storage, name: str, trust: Trust) -> tuple[Verification, bool]:
    """The state that was found, and whether it is final: a second try would find the same."""
    manifest: Manifest | None = None
    try:
        with storage.lock(name, shared=True):  # or a run could remove it while it is being read
            manifest = catalog.read_manifest(storage, name)
            manifest = trust.checked(manifest)
            wrong = copy_problems(storage, name) + problems(storage, without_other_hosts(storage, manifest), show=True)
        if not wrong:
            return Verification(name, INTACT, (), manifest), True
        return _diagnose(storage, name, manifest, tuple(wrong))
    except LockedError as error:
        return Verification(name, UNDER_WAY, (f"another process is saving or removing it: {error}",)), False
    except StorageError as error:
        if not shows_damage(error):
            return Verification(name, UNREADABLE, (str(error),), manifest, error), True
        return _diagnose(storage, name, manifest, (str(error),))
    except UntrustedError as error:
        return Verification(name, UNTRUSTED, (str(error),), manifest), True
    except CheckpointError as error:
        return _diagnose(storage, name, manifest, (str(error),))


def _diagnose(
    storage: Storage, name: str, manifest: Manifest | None, problems: tuple[str, ...]
) -> tuple[Verification, bool]:
    """Tell damage from a checkpoint that was replaced, is being saved, or was removed while it was being verified."""
    present = {entry.key.removeprefix(f"{name}/") for entry in storage.list(name)}
    if not present:
        return Verification(name, REMOVED, problems), True
    current = catalog.find(storage, name).manifest
    if current is not None and (manifest is None or current.id != manifest.id):
        return Verification(name, DAMAGED, problems, current), False  # committed meanwhile: verify that one
    marker = read_marker(storage, name) if current is None and FILE_NAME not in present else None
    if marker is not None and marker.under_way:
        return Verification(name, UNDER_WAY, problems), True
    gone_since = manifest is not None and current is None and FILE_NAME not in present
    return Verification(name, DAMAGED, problems, manifest), not gone_since


@contextmanager
def reading(storage: Storage, name: str) -> Iterator[Manifest | None]:
    """Hold the checkpoint's shared lock, so that no process removes it. None if it does not exist or is not committed.

    Waits while another process removes it or cleans it up.
    """
    with ExitStack() as held:
        try:
            lock_patiently(storage, name, held)
        except AbsentError:
            yield None
        else:
            yield catalog.find(storage, name).manifest


def lock_patiently(storage: Storage, name: str, held: ExitStack) -> None:
    """Hold the checkpoint's shared lock in `held`. Waits while another process removes it or cleans it up."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            held.enter_context(storage.lock(name, shared=True))
            return
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def problems(storage: Storage, manifest: Manifest, *, show: bool = False, threads: int | None = None) -> list[str]:
    """Everything that is wrong with a checkpoint's files: sizes, then every byte against its hash, and against its
    SHA-256 where it has one, then headers.

    Every thread holds a buffer of a few megabytes; None means as many threads as suit the storage.
    """
    wrong = size_problems(storage, manifest)
    if wrong:
        return wrong
    files = [VerifiedFile.of(storage, manifest.name, file, sha256=bool(file.sha256)) for file in manifest.files]
    blocks = [(file, index) for file in files for index in range(len(file.record.blocks))]
    with progress_bar(f"verifying {manifest.name}", manifest.size, in_bytes=True, show=show) as advance:
        return altered_blocks(blocks, advance, threads) or header_problems(files)


def header_problems(files: Iterable[VerifiedFile]) -> list[str]:
    """Files whose headers claim other bytes than they have: whoever alters a file can make its hashes anew."""
    wrong = []
    for file in files:
        if file.record.name.endswith(SUFFIX):
            try:
                Header.read(file.stored, file.stored.key, file.record.size)
            except DamagedError as error:
                wrong.append(str(error).rstrip("."))
    return wrong


def size_problems(storage: Storage, manifest: Manifest, sizes: Mapping[str, int] | None = None) -> list[str]:
    """Files that are missing, or whose size differs from the manifest's. Reads no file.

    `sizes`: those of the files in its folder, by path, if it was listed already."""
    found = _sizes(storage, manifest) if sizes is None else sizes
    problems = []
    for file in manifest.files:
        if file.path not in found:
            host = _host_of(file, manifest)
            problems.append(f"{file.path} is missing" + (f" ({host.name} saved it)" if host else ""))
        elif found[file.path] != file.size:
            problems.append(
                f"{file.path} is {format_size(found[file.path])} of {format_size(file.size)} ({found[file.path]} bytes)"
            )
    return problems


def altered_blocks(
    blocks: list[tuple[VerifiedFile, int]], advance: Callable[[float], None], threads: int | None = None
) -> list[str]:
    """Read blocks of files in several threads. Returns what is wrong with those that do not match their hashes."""
    buffers = threading.local()

    def verify_block(block: tuple[VerifiedFile, int]) -> str | None:
        if not hasattr(buffers, "own"):
            buffers.own = memoryview(bytearray(WINDOW))
        file, index = block
        return file.verify_block(index, buffers.own, advance)

    threads = threads or reader_threads(file.stored.storage for file, _ in blocks)
    return [problem for problem in in_parallel(verify_block, blocks, threads, "ckpt-verify") if problem]


def reader_threads(storages: Iterable[Storage]) -> int:
    """How many threads read at a time: for local storages one per core, for others more, since they mostly wait."""
    return _THREADS if all(storage.is_local for storage in storages) else _MOST_THREADS


def files_on_other_hosts(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """The files that other hosts keep in separate roots, each with the name of its host.

    A host is another one if this root has none of its files. If the root has no host's files, all are missing here.
    """
    if not manifest.hosts:
        return {}
    found = _sizes(storage, manifest)
    hosts: dict[int | None, Host] = {rank: host for host in reversed(manifest.hosts) for rank in host.ranks}
    holders = {file.path: host for file in manifest.files if (host := hosts.get(rank_of(file.name)))}
    here = {id(host) for path, host in holders.items() if path in found}
    return {path: host.name for path, host in holders.items() if here and id(host) not in here}


def without_other_hosts(storage: Storage, manifest: Manifest) -> Manifest:
    """The manifest without the files that other hosts keep in separate roots."""
    others = files_on_other_hosts(storage, manifest)
    return replace(manifest, files=tuple(file for file in manifest.files if file.path not in others))


def _sizes(storage: Storage, manifest: Manifest) -> dict[str, int]:
    return {entry.key.partition("/")[2]: entry.size for entry in storage.list(manifest.name)}


def _host_of(file: FileRecord, manifest: Manifest) -> Host | None:
    """The host that keeps a file in a separate root; None if every host has it."""
    rank = rank_of(file.name)
    return next((host for host in manifest.hosts if rank in host.ranks), None)


UNCOMMITTED = "uncommitted"
COMPLETE = "complete"  # all files are there, by size: no byte of them was read


@dataclass(frozen=True)
class Condition:
    """`intact` where every byte was read, `complete` where sizes were compared, `DAMAGED`, `UNREADABLE` or
    `uncommitted`; what is wrong; and the files that other hosts keep, with their hosts."""

    state: str
    problems: tuple[str, ...] = ()
    other_hosts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, as far as it was read."""
        return self.state in (COMPLETE, INTACT)


def condition(found: Overview, checkpoint: Checkpoint, *, verify: bool = False) -> Condition:
    """What the listing says, if it has just the files of the checkpoint; else what the manifest says.

    With `verify` every byte is read.
    """
    storage, summary = found.storage, checkpoint.summary
    if summary is None:
        state = DAMAGED if checkpoint.was_committed else UNCOMMITTED
        return Condition(state, (one_line(str(checkpoint.problem)),))
    if checkpoint.flaw and not verify:
        return Condition(DAMAGED, (f"{one_line(checkpoint.flaw)} {COPY_IS_USED}",))
    if not verify and summary.has_all_of(found.sizes(summary.name)):
        return Condition(COMPLETE)
    find_problems = _every_byte if verify else size_problems
    try:
        manifest = catalog.read_manifest(storage, summary.name)
        others = files_on_other_hosts(storage, manifest)
        wrong = find_problems(storage, without_other_hosts(storage, manifest))
    except (StorageError, CheckpointError) as error:
        gone = isinstance(error, CheckpointError) or shows_damage(error)
        return Condition(DAMAGED if gone else UNREADABLE, (one_line(str(error)),))
    return Condition(DAMAGED if wrong else INTACT if verify else COMPLETE, tuple(wrong), others)


def _every_byte(storage: Storage, manifest: Manifest) -> list[str]:
    return copy_problems(storage, manifest.name) + problems(storage, manifest, show=True)


@dataclass(frozen=True)
class FoundAt:
    """Where a file is whole: the number of the home, and the key there."""

    home: int
    key: str


@dataclass(frozen=True)
class WholeFiles:
    """A checkpoint, the home whose manifest of it is whole, and where each file is, by path. `lost` are nowhere."""

    manifest: Manifest
    manifest_home: int
    places: dict[str, FoundAt] = field(default_factory=dict)
    lost: tuple[str, ...] = ()

    @property
    def elsewhere(self) -> dict[str, FoundAt]:
        """The files that the first home has not, or not whole."""
        name = self.manifest.name
        return {path: place for path, place in self.places.items() if place != FoundAt(0, f"{name}/{path}")}


@dataclass(frozen=True)
class Repaired:
    """What a repair has done: the files it has written, each with where it was whole, and those whole nowhere."""

    name: str
    written: dict[str, str]
    lost: tuple[str, ...] = ()


def find_whole_files(
    homes: Sequence[Storage], name: str, trust: Trust = BELIEVES_ALL, *, links: bool = True, show: bool = False
) -> WholeFiles:
    """Read every byte of a checkpoint in the first home, and what is damaged there in the others.

    `links`: whether files that are whole in no home of this checkpoint are looked for in other checkpoints. A home that
    cannot be read is an error: what is said to be lost must be.
    """
    manifest, home = _whole_manifest(homes, name, trust)
    wanted = without_other_hosts(homes[0], manifest).files if home == 0 else manifest.files
    search = _Search(homes, manifest)
    with progress_bar(f"looking for intact files of {name}", manifest.size, in_bytes=True, show=show) as advance:
        places = {file.path: place for file in wanted if (place := search.in_homes(file, advance))}
        if links:
            missing = [file for file in wanted if file.path not in places]
            places |= {file.path: place for file in missing if (place := search.in_links(file))}
    return WholeFiles(manifest, home, places, tuple(file.path for file in wanted if file.path not in places))


def repair(storage: Storage, name: str, others: Sequence[Storage] = (), trust: Trust = BELIEVES_ALL) -> Repaired:
    """Write back the damaged files of a checkpoint, and its manifest, from where they are whole.

    A run may use the root meanwhile: a file is replaced at once by the bytes that its manifest names, or not at all.
    Nothing is written where a file is whole nowhere: the checkpoint would remain damaged.
    """
    homes = (storage, *others)
    with ExitStack() as held:
        lock_patiently(storage, name, held)
        for other in others:
            with suppress(AbsentError):
                lock_patiently(other, name, held)
        whole = find_whole_files(homes, name, trust, show=True)
        if whole.lost:
            return Repaired(name, {}, whole.lost)
        written = _write_back(homes, whole) | mend(storage, name, proven=True)
    if isinstance(storage, Staging) and written:
        storage.settle()
    return Repaired(name, written)


def _write_back(homes: Sequence[Storage], whole: WholeFiles) -> dict[str, str]:
    storage, name = homes[0], whole.manifest.name
    records = {file.path: file for file in whole.manifest.files}
    written, staged = {}, dict[str, str]()
    for path, place in whole.elsewhere.items():
        source, key = homes[place.home], f"{name}/{path}"
        if isinstance(storage, Staging):
            staged[key] = storage.stage(key, _pieces(source, place.key, records[path]))
        elif place.home == 0:
            storage.link(place.key, key)
        else:
            storage.write(key, _pieces(source, place.key, records[path]))
        written[path] = f"{source.url}/{place.key}"
    if whole.manifest_home:
        key, source = f"{name}/{FILE_NAME}", homes[whole.manifest_home]
        data = [manifest_bytes(source, name)]
        if isinstance(storage, Staging):
            staged[key] = storage.stage(key, data)
        else:
            storage.write(key, data)
        written[FILE_NAME] = f"{source.url}/{key}"
    if isinstance(storage, Staging) and staged:
        storage.publish(staged)
    return written


def _pieces(source: Storage, key: str, record: FileRecord) -> Iterator[memoryview]:
    return _file(source, key, record).pieces()


def _file(storage: Storage, key: str, record: FileRecord) -> VerifiedFile:
    return VerifiedFile(StoredFile(storage, key), record, sha256=bool(record.sha256))


def _whole_manifest(homes: Sequence[Storage], name: str, trust: Trust) -> tuple[Manifest, int]:
    """The first home's manifest, or that of another home where it is missing or damaged."""
    problem: Exception | None = None
    for number, storage in enumerate(homes):
        try:
            return trust.checked(catalog.read_manifest(storage, name)), number
        except StorageError as error:
            if not shows_damage(error):
                raise
            problem = problem or error
        except CheckpointError as error:
            problem = problem or error
    raise DamagedError(f"{name} has no intact manifest in {' or '.join(home.url for home in homes)}: {problem}")


class _Search:
    def __init__(self, homes: Sequence[Storage], manifest: Manifest) -> None:
        self._homes = homes
        self._manifest = manifest
        name = manifest.name
        self._sizes = [{entry.key: entry.size for entry in home.list(name)} for home in homes]
        self._linked: dict[tuple[int, tuple[str, ...]], list[FoundAt]] | None = None

    def in_homes(self, file: FileRecord, advance: Callable[[float], None]) -> FoundAt | None:
        """The first home in which this checkpoint's file is whole."""
        key = f"{self._manifest.name}/{file.path}"
        for home, sizes in enumerate(self._sizes):
            if sizes.get(key) == file.size and self._is_whole(FoundAt(home, key), file, advance):
                return FoundAt(home, key)
        return None

    def in_links(self, file: FileRecord) -> FoundAt | None:
        """A file of another checkpoint, in any home, that has these bytes."""
        if self._linked is None:
            self._linked = self._files_by_content()
        places = self._linked.get((file.size, file.blocks), [])
        return next((place for place in places if self._is_whole(place, file, lambda _: None)), None)

    def _is_whole(self, place: FoundAt, file: FileRecord, advance: Callable[[float], None]) -> bool:
        found = _file(self._homes[place.home], place.key, file)
        try:
            wrong = altered_blocks([(found, index) for index in range(len(file.blocks))], advance)
            return not (wrong or header_problems([found]))
        except DamagedError:
            return False
        except StorageError as error:
            if not shows_damage(error):
                raise
            return False

    def _files_by_content(self) -> dict[tuple[int, tuple[str, ...]], list[FoundAt]]:
        found: dict[tuple[int, tuple[str, ...]], list[FoundAt]] = {}
        own = self._manifest.name
        for home, storage in enumerate(self._homes):
            manifests = (checkpoint.manifest for checkpoint in catalog.scan(storage))
            for manifest in (each for each in manifests if each is not None):
                for file in manifest.files:
                    if manifest.name != own and file.size:
                        place = FoundAt(home, f"{manifest.name}/{file.path}")
                        found.setdefault((file.size, file.blocks), []).append(place)
        return found
