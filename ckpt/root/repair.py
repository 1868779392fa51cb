"""Finds each file of a checkpoint wherever it is whole, and writes back what is damaged.

A file may be whole in the root, in another home of the same checkpoint, such as the mirror, or in another checkpoint
that has the same bytes. Every byte is compared with the manifest's hashes before it is taken, and again while it is
written. Imports no torch: the command `ckpt verify` starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from ckpt.errors import AbsentError, CheckpointError, DamagedError, StorageError, shows_damage
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest
from ckpt.root import catalog
from ckpt.root.manifest_files import manifest_bytes, mend
from ckpt.root.trust import BELIEVES_ALL, Trust
from ckpt.root.verified_file import StoredFile, VerifiedFile
from ckpt.root.verify import altered_blocks, header_problems, lock_patiently, without_other_hosts
from ckpt.storage import Staging, Storage
from ckpt.util.console import progress_bar


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
    with progress_bar(f"looking for whole files of {name}", manifest.size, in_bytes=True, show=show) as advance:
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
    raise DamagedError(f"{name} has no whole manifest in {' or '.join(home.url for home in homes)}: {problem}")


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
