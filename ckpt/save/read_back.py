"""Reads a checkpoint back from the disk after its commit, in the background: see docs/decisions/0021-read-back.md.

That proves the bytes on the disk while the state is still in memory to write them again, and leaves them in the page
cache, where a restart on this machine finds them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.formats.native.manifest import FileRecord
from ckpt.root.catalog import find
from ckpt.root.commit import EarlierFile
from ckpt.root.verified_file import WINDOW
from ckpt.save.committed_files import CommittedFiles, DiskProblem, GoneError, Rewrite
from ckpt.save.memory_limit import available
from ckpt.save.repair_report import Repair, RepairReport, text_of
from ckpt.save.root_writer import RootWriter
from ckpt.storage.base import PageCached
from ckpt.util.console import format_size
from ckpt.util.filesystem import is_on_network
from ckpt.util.fork_safety import OwnerProcess
from ckpt.util.thread_priority import normal_io_priority, work_in_background

_log = logging.getLogger("ckpt")

WORTH_IT = 16 << 20  # bytes
_REMOVAL = 1.0  # seconds within which somebody who removes a folder by hand has removed its manifest too
_PAUSE = 0.1
_TOO_LATE = "a save, a load or close() has come before"
_PATIENCE = 5.0  # seconds that the end of the program waits for a disk that does not answer


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
        """Wait until nothing is being read back: for tests and measurements."""
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
            _log.debug("%s is not read back: %s", self._url, error)

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
            _log.debug("%s is not read back any further", self._url)
        except Exception as error:  # of any kind: the checkpoint is committed, and training continues
            _log.warning("%s is committed, but could not be read back: %s", self._url, text_of(error))
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
        _log.debug("%s is not read back: it is on a network filesystem", self._url)
        return True

    def _is_memory_plentiful(self) -> bool:
        """Whether what the ranks of this host have written takes at most half of the memory that is available."""
        manifest = self._manifest or find(self._storage, self._files.checkpoint).manifest
        size = self._files.size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        size, room = min(size, manifest.size if manifest is not None else size), available() // 2
        if size > room:
            _log.debug("%s is not read back: it has %s, for %s", self._url, format_size(size), format_size(room))
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
        _log.debug("%s was read back: %s", self._url, format_size(self._files.size))

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
        rewrite = self._write_again(record)
        if not rewrite.is_written:
            return Repair(rewrite.problem, is_damage=found.is_damage)
        try:
            problem = None if rewrite.problem else self._problem(record, buffer)
        except _StoppedError:
            return Repair(_TOO_LATE, is_unproven=True)
        except Exception as error:
            return Repair(text_of(error).rstrip("."), is_unproven=True)
        if problem is not None:
            return Repair(f"it was written again, and still {problem.text}", is_damage=problem.is_damage)
        return Repair(rewrite.problem, is_unproven=bool(rewrite.problem))

    def _write_again(self, record: FileRecord) -> Rewrite:
        try:
            with normal_io_priority():
                return self._files.write_again(self._storage, record)
        except GoneError:
            pass
        except Exception as error:
            return Rewrite(False, f"it could not be written again ({text_of(error).rstrip('.')})")
        raise GoneError  # anew: the traceback of the first one refers to the snapshot

    def _distrust(self, record: FileRecord, repair: Repair) -> None:
        """Link no later file to this one; count its checkpoint as damaged, if it is."""
        root, name = self._root(), self._files.checkpoint
        if root is None:
            return
        linkable = root.linkable  # a save may replace it meanwhile
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
