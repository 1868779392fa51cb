"""Reads a checkpoint back from the disk after its commit, in the background: see docs/decisions/0021-read-back.md.

That proves the bytes on the disk while the state is still in memory to write them again, and leaves them in the page
cache, where a restart on this machine finds them.
"""

from __future__ import annotations

import atexit
import errno
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt.errors import AbsentError, CkptError, DamagedError, NotDurableError, StorageError, shows_damage
from ckpt.formats.native.manifest import BLOCK_SIZE, FILE_NAME, BlockHasher, FileRecord, Manifest
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.find import ranks_per_host
from ckpt.root.catalog import find, scan
from ckpt.root.verify import WINDOW, VerifiedFile, lock_patiently
from ckpt.root.write_link_commit import EarlierFile
from ckpt.save.root_writer import RootWriter
from ckpt.storage.base import PageCached
from ckpt.util.console import format_size
from ckpt.util.filesystem import count_names, is_on_network
from ckpt.util.memory_limit import spare
from ckpt.util.threads import OwnerProcess, normal_io_priority, work_in_background

_log = logging.getLogger("ckpt")

WORTH_IT = 16 << 20  # bytes
_REMOVAL = 1.0  # seconds within which somebody who removes a folder by hand has removed its manifest too
_PAUSE = 0.1
_TOO_LATE = "a save, a load or close() has come before"
_PATIENCE = 5.0  # seconds that the end of the program waits for a disk that does not answer
_FAILING_DISK = {
    getattr(errno, name, errno.EIO) for name in ("EIO", "EREMOTEIO", "EBADMSG", "EUCLEAN")
}  # as far as the system has them


class ReadBack:
    """Reads back the newest checkpoint of a manager, at most one at a time.

    `wanted`: True for every checkpoint, False for none, None for those of which this rank has written 16 MB and more,
    when memory is plentiful and the root is not on a network filesystem.
    """

    def __init__(self, root: RootWriter, wanted: bool | None = None) -> None:
        self._root = root
        self._wanted = wanted
        self._owner = OwnerProcess()
        self._reading: _Reading | None = None
        self._proven: frozenset[str] = frozenset()  # versions of files that were read back: linked ones are not again

    @property
    def busy(self) -> bool:
        """Whether files are being read back."""
        return self._reading is not None and not self._reading.done.is_set()

    def start(self, files: CommittedFiles) -> None:
        """Begin to read these files back, if that is wanted. Not while the program ends."""
        self.stop()
        storage = self._root.storage
        if self._wanted is False or not isinstance(storage, PageCached) or not threading.main_thread().is_alive():
            return
        if self._wanted or files.size >= WORTH_IT:
            self._reading = _Reading(self._root, storage, files, self._proven, always=bool(self._wanted))
            self._reading.start()

    def stop(self) -> None:
        """End the reading under way without waiting for it, except for the repair of a file."""
        if self._reading is not None and self._owner.is_here:
            self._reading.stop()
            self._proven, self._reading = self._reading.proven, None

    def wait(self) -> None:
        """Wait until ckpt has read back all files. Only tests and measurements need this."""
        if self._reading is not None and self._owner.is_here:
            self._reading.done.wait()


class _StoppedError(Exception):
    """The reading has been stopped."""


class _Reading:
    """One checkpoint that is being read back, on a thread of its own.

    It takes no lock while it reads: a removal in between is recognised by the manifest. Once it has been stopped it
    changes nothing any more; `stop` waits for a change that is under way.
    """

    def __init__(
        self, root: RootWriter, storage: PageCached, files: CommittedFiles, proven: frozenset[str], *, always: bool
    ) -> None:
        self.done = threading.Event()
        self.proven = proven
        self._root = weakref.ref(root)  # or a manager that was dropped would live, and hold its root, until the end
        self._storage = storage
        self._files = files
        self._manifest = root.committed_as(files.checkpoint)
        self._always = always
        self._url = f"{storage.url}/{files.checkpoint}"
        self._owner = OwnerProcess()
        self._stopped = threading.Event()
        self._turn = threading.Condition()
        self._changing = False

    def start(self) -> None:
        # A daemon: a program that ends does not wait for it, and stops it in `_stop_all`.
        thread = threading.Thread(target=self._run, name="ckpt-read-back", daemon=True)
        _under_way.add(self)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: the checkpoint is committed all the same
            self._end()
            _log.debug("can't read %s back: %s", self._url, error)

    def stop(self) -> None:
        """Stop, and free the snapshot: the thread would otherwise be the last to refer to it.

        A daemon thread that frees tensors while the interpreter finalizes aborts the process.
        """
        if not self._owner.is_here:  # a forked child has no such thread, and perhaps a copy of a lock that it held
            return
        with self._turn:
            self._stopped.set()
            self._turn.wait_for(lambda: not self._changing)
        self._files.free_memory()

    def finish(self) -> None:
        """Stop, and wait until the thread is done with its files, unless its disk does not answer."""
        self.stop()
        if self._owner.is_here:
            self.done.wait(_PATIENCE)

    def _run(self) -> None:
        try:
            work_in_background()
            if self._always or (not self._is_on_network() and self._is_memory_plentiful()):
                self._read_all()
        except (_StoppedError, GoneError):
            _log.debug("ckpt stopped reading %s back", self._url)
        except Exception as error:  # of any kind: the checkpoint is committed, and training continues
            _log.warning("ckpt committed %s, but could not read it back: %s", self._url, text_of(error))
        finally:
            self._end()

    def _end(self) -> None:
        self._files.free_memory()  # or the snapshot would live until the next save
        _under_way.discard(self)  # only now: the end of the program waits until the memory is freed
        self.done.set()

    def _is_on_network(self) -> bool:
        place = getattr(self._storage, "place", None)
        if place is None or not is_on_network(place):
            return False
        _log.debug("ckpt does not read %s back, because it is on a network filesystem", self._url)
        return True

    def _is_memory_plentiful(self) -> bool:
        """Whether what the ranks of this host have written fits into the memory that can be spared."""
        manifest = self._manifest or find(self._storage, self._files.checkpoint).manifest
        size = self._files.size * (ranks_per_host() or 1)
        size, room = min(size, manifest.size if manifest is not None else size), spare()
        if size > room:
            sizes = format_size(size), format_size(room)
            _log.debug("ckpt does not read %s back: it takes up %s, and only %s of memory is free", self._url, *sizes)
        return size <= room

    def _read_all(self) -> None:
        if self._manifest is not None and self._manifest.id == self._files.id:
            self._files = self._files.with_manifest(self._manifest)
        versions = {record: self._storage.version(self._files.key(record)) for record in self._files.records}
        self.proven &= frozenset(filter(None, versions.values()))
        buffer = memoryview(bytearray(WINDOW))
        for record, version in versions.items():
            self._check_stopped()
            if version is None or version not in self.proven:
                self._read(record, version, buffer)
        _log.debug("read %s back: %s", self._url, format_size(self._files.size))

    def _read(self, record: FileRecord, version: str | None, buffer: memoryview) -> None:
        problem = self._problem(record, buffer)
        if problem is not None:
            self._answer(record, problem, buffer)
        elif version is not None:
            self.proven |= {version}

    def _check_stopped(self, _: float = 0) -> None:
        if self._stopped.is_set() or self._root() is None:
            raise _StoppedError

    def _problem(self, record: FileRecord, buffer: memoryview) -> DiskProblem | None:
        return self._files.problem(self._storage, record, buffer, self._check_stopped)

    def _answer(self, record: FileRecord, problem: DiskProblem, buffer: memoryview) -> None:
        """Report a file that is not what was written, and repair it."""
        self._check_present(record)
        with self._change() as may_change:
            report = RepairReport.begin(self._storage, self._files, record, problem)
            too_late = Repair(_TOO_LATE, is_damage=problem.is_damage)
            repair = self._repair(record, problem, buffer) if may_change else too_late
            report.end(repair, self._root())
            if repair.why:
                self._distrust(record, repair)
            if repair.is_unproven or not repair.why:
                self._mirror_again()

    def _check_present(self, record: FileRecord) -> None:
        """Raise if the checkpoint was removed or replaced. A removal deletes the manifest first, unless by hand."""
        missing = self._storage.version(self._files.key(record)) is None
        deadline = time.monotonic() + (_REMOVAL if missing else 0.0)
        while self._files.is_current(self._storage):
            if time.monotonic() > deadline or self._stopped.wait(_PAUSE):
                return
        raise GoneError

    @contextmanager
    def _change(self) -> Iterator[bool]:
        """Whether anything may be changed: not once the reading was stopped. `stop` waits until this context ends."""
        with self._turn:
            self._changing = not self._stopped.is_set()
        try:
            yield self._changing
        finally:
            with self._turn:
                self._changing = False
                self._turn.notify_all()

    def _repair(self, record: FileRecord, found: DiskProblem, buffer: memoryview) -> Repair:
        """Write a file again and read it back."""
        written = self._write_again(record, found)
        if written.why:
            return written
        try:
            problem = self._problem(record, buffer)
        except _StoppedError:
            return Repair(_TOO_LATE, is_unproven=True)
        except Exception as error:
            return Repair(text_of(error).rstrip("."), is_unproven=True)
        if problem is not None:
            return Repair(f"it was written again, and still {problem.text}", is_damage=problem.is_damage)
        return written

    def _write_again(self, record: FileRecord, found: DiskProblem) -> Repair:
        try:
            with normal_io_priority():
                return self._files.write_again(self._storage, record, found)
        except GoneError:
            pass
        except Exception as error:
            return Repair(f"it could not be written again ({text_of(error).rstrip('.')})", is_damage=found.is_damage)
        raise GoneError  # anew: the traceback of the first one refers to the snapshot

    def _distrust(self, record: FileRecord, repair: Repair) -> None:
        """Link no later file to this one; count its checkpoint as damaged, if it is."""
        root, name = self._root(), self._files.checkpoint
        if root is None:
            return
        linkable = root.links.files  # a save may replace it meanwhile
        if linkable.get(record.name) == EarlierFile(name, record):
            linkable.pop(record.name, None)
        if repair.is_damage:
            root.damaged.add(name)
            if not self._files.is_current(self._storage):  # a save has replaced it: that one is not damaged
                root.damaged.discard(name)

    def _mirror_again(self) -> None:
        """Copy the checkpoint to the mirror, which may have refused it because of the damage."""
        root = self._root()
        if root is not None and root.mirror is not None and self._manifest is not None:
            root.mirror.enqueue(self._manifest)


_under_way: set[_Reading] = set()


@atexit.register
def _stop_all() -> None:
    for started in list(_under_way):
        started.finish()


# The files of a checkpoint: what the disk returns for them, writing one again, and what the log says of it.


class DiskProblem(NamedTuple):
    """What is wrong with a file: bytes that differ or are missing (`is_damage`), or a disk that cannot read them."""

    text: str
    is_damage: bool


class Repair(NamedTuple):
    """How a repair has ended. `why`: why the file is not known to be intact now; "" if it is.

    `is_unproven`: it was written again, and nothing is known to be wrong since. `is_damage`: bytes differ or are
    missing.
    """

    why: str = ""
    is_unproven: bool = False
    is_damage: bool = False


class GoneError(Exception):
    """The checkpoint was removed, or replaced by another one of its name."""


@dataclass(frozen=True)
class CommittedFiles:
    """The files of a committed checkpoint that this rank has written or linked.

    `in_memory`: those whose bytes are still in memory, by name, until `free_memory`. They are valid until the next
    snapshot is taken.
    """

    checkpoint: str
    id: str
    records: tuple[FileRecord, ...]
    in_memory: dict[str, FilePlan]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.records)

    def with_manifest(self, manifest: Manifest) -> CommittedFiles:
        """The same, with the manifest, which this rank has written too."""
        plan = FilePlan.of(FILE_NAME, manifest.to_bytes())
        record = FileRecord(name=FILE_NAME, path=FILE_NAME, size=plan.size, blocks=_blocks_of(plan))
        self.in_memory[FILE_NAME] = plan
        return replace(self, records=(*self.records, record))

    def free_memory(self) -> None:
        """Free what is in memory, on the calling thread. Nothing may be writing it."""
        self.in_memory.clear()

    def key(self, record: FileRecord) -> str:
        return f"{self.checkpoint}/{record.path}"

    def is_current(self, storage: PageCached) -> bool:
        """Whether the checkpoint is still this one, by its manifest or the copy of it. Where both were altered it is:
        nobody else writes there."""
        try:
            found = find(storage, self.checkpoint)
        except StorageError as error:
            if not _is_failing_disk(error):
                raise
            return self._has(storage, FILE_NAME)
        if found.manifest is not None:
            return found.manifest.id == self.id
        return self._has(storage, FILE_NAME) and isinstance(found.problem, DamagedError)

    def _has(self, storage: PageCached, path: str) -> bool:
        return storage.version(f"{self.checkpoint}/{path}") is not None

    def problem(
        self, storage: PageCached, record: FileRecord, buffer: memoryview, advance: Callable[[float], None]
    ) -> DiskProblem | None:
        """Read a file from the disk, into the page cache. None if it has the bytes that were written."""
        file = VerifiedFile.of(storage, self.checkpoint, record)
        try:
            storage.evict(file.stored.key)
            for index in range(len(record.blocks)):
                altered = file.verify_block(index, buffer, advance)
                if altered:
                    return DiskProblem(altered, is_damage=True)
        except (DamagedError, StorageError) as error:
            if shows_damage(error) or _is_failing_disk(error):
                return DiskProblem(str(error).rstrip("."), is_damage=shows_damage(error))
            raise
        return None

    def write_again(self, storage: PageCached, record: FileRecord, found: DiskProblem) -> Repair:
        """Replace a file by the same bytes, from memory. What was found is still there if that cannot be done.

        The manifest lists them already, and is not changed. While the checkpoint's shared lock is held, no process
        removes it.
        """
        plan = self.in_memory.get(record.name)
        if plan is None:
            return Repair("its bytes are no longer in memory", is_damage=found.is_damage)
        if _blocks_of(plan, record.block_size) != record.blocks:
            return Repair("what is in memory does not match its hashes either", is_damage=found.is_damage)
        try:
            with ExitStack() as held:
                self._lock(storage, held)
                if not self.is_current(storage):
                    raise GoneError
                pieces = list(plan.pieces()) if plan.in_memory else plan.pieces()
                storage.write(self.key(record), pieces, over=storage.version(self.key(record)))
        except NotDurableError as error:
            return Repair(str(error).rstrip("."), is_unproven=True)
        except StorageError as error:
            return Repair(f"it could not be written again ({str(error).rstrip('.')})", is_damage=found.is_damage)
        return Repair()

    def _lock(self, storage: PageCached, held: ExitStack) -> None:
        try:
            lock_patiently(storage, self.checkpoint, held)
        except AbsentError:
            raise GoneError from None


def _is_failing_disk(error: BaseException) -> bool:
    return getattr(error.__cause__, "errno", None) in _FAILING_DISK


def _blocks_of(plan: FilePlan, block_size: int = BLOCK_SIZE) -> tuple[str, ...]:
    hasher = BlockHasher(block_size)
    for piece in plan.pieces():
        hasher.update(piece)
    return hasher.digests


@dataclass(frozen=True)
class RepairReport:
    """The messages about one file. To be made before the repair, which gives a linked file an inode of its own."""

    storage: PageCached
    files: CommittedFiles
    record: FileRecord
    is_shared: bool

    @classmethod
    def begin(
        cls, storage: PageCached, files: CommittedFiles, record: FileRecord, problem: DiskProblem
    ) -> RepairReport:
        """Log what was found."""
        place = getattr(storage, "place", None)
        is_shared = place is not None and count_names(f"{place}/{files.key(record)}") > 1
        report = cls(storage, files, record, is_shared)
        _log.error(
            "the disk does not return what ckpt wrote to %s: %s. ckpt found the damage when it read the checkpoint "
            "back.",
            report._url, problem.text,
        )  # fmt: skip
        return report

    @property
    def _url(self) -> str:
        return f"{self.storage.url}/{self.files.checkpoint}"

    def end(self, repair: Repair, root: RootWriter | None) -> None:
        """Log how the repair has ended."""
        where = f"{self._url}/{self.record.path}"
        if not repair.why:
            _log.warning("ckpt wrote %s again, and it is intact now. Check the disk.%s", where, self._shared())
        elif repair.is_unproven:
            _log.warning(
                "ckpt wrote %s again, but has not read it back: %s. Check the disk, and run `ckpt verify %s`.%s",
                where, repair.why, self._url, self._shared(),
            )  # fmt: skip
        else:
            advice = self._advice(repair, root)
            _log.error("ckpt could not repair %s: %s. %s%s", where, repair.why, advice, self._shared())

    def _shared(self) -> str:
        if not self.is_shared:
            return ""
        return (
            " Older checkpoints share the file that the disk did not return, and are as damaged as before: run "
            f"`ckpt verify {self.storage.url}`."
        )

    def _advice(self, repair: Repair, root: RootWriter | None) -> str:
        """What a resume will do, and what the user should do."""
        if not repair.is_damage:
            return (
                f"A resume that reaches {self._url} stops as long as ckpt can't read it: save again, check the disk, "
                "or move that folder away."
            )
        is_mirrored = root is not None and root.mirror is not None and root.mirror.newest is not None
        if is_mirrored or self._has_other_checkpoint(root.damaged if root is not None else set()):
            return f"A resume skips {self._url} and takes the newest intact checkpoint: save again, and check the disk."
        return "No other checkpoint is known to this process: save again now, and check the disk."

    def _has_other_checkpoint(self, damaged: set[str]) -> bool:
        """Whether the root has another one that is not known to be damaged."""
        try:
            names = {checkpoint.name for checkpoint in scan(self.storage) if checkpoint.committed}
        except CkptError:  # there may be some that cannot be read now
            return True
        return bool(names - damaged - {self.files.checkpoint})


def text_of(error: Exception) -> str:
    """The message of an error, with its type if it is none of ckpt's."""
    return str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
