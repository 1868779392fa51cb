"""A storage on top of an object store, which has neither folders nor locks of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from ckpt.errors import TruncatedError
from ckpt.storage.base import ANY, Buffer, Entry, Interruptible, Objects, Seeking, Unfinished, below, check_key
from ckpt.storage.leases import FOLDER, Leases

_DAY = 24 * 3600.0  # seconds: a younger upload may belong to another writer below the same root


class ObjectStorage:
    """`Objects` as a storage. Locks are leases: objects that name their holder, and are rewritten while it lives."""

    is_local = False

    def __init__(self, objects: Objects, *, allow_unconditional: bool = False) -> None:
        """`allow_unconditional`: use it though the store ignores conditions of writes. There must be one writer."""
        self.allow_unconditional = allow_unconditional
        self._objects = objects
        self._leases = Leases(objects)

    @property
    def url(self) -> str:
        return self._objects.url

    @property
    def progress(self) -> int:
        return self._objects.progress if isinstance(self._objects, Interruptible) else 0

    def giving_up(self) -> AbstractContextManager[None]:
        """Of clients that cannot end a request early, requests go on."""
        return self._objects.giving_up() if isinstance(self._objects, Interruptible) else nullcontext()

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str | None:
        check_key(key)
        self._leases.confirm()
        return self._objects.put(key, pieces, over=over) or None

    def version(self, key: str) -> str | None:
        return self._objects.version(check_key(key))

    def link(self, source: str, target: str) -> None:
        self._leases.confirm()
        self._objects.copy(check_key(source), check_key(target))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._objects.get(check_key(key), start, stop)

    def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers if buffer.nbytes]
        missing = self._objects.fill(check_key(key), start, views)
        if missing:
            raise TruncatedError(f"{self.url}/{key} is {missing} bytes too short.")

    def list(self, prefix: str = "") -> Iterator[Entry]:
        top = prefix and f"{check_key(prefix)}/"
        for entry in self._objects.entries(top):
            if not below(entry.key, FOLDER):
                yield entry

    def skim(self, last: str) -> Iterator[Entry]:
        """What `list()` returns, but of a folder that has `last` perhaps no further objects. Of checkpoints with
        thousands of files each, that takes one answer of the server for each, instead of one for a thousand objects.
        """
        if not isinstance(self._objects, Seeking):
            yield from self.list()
            return
        after, passed = "", f"{FOLDER}/"
        while True:
            page, more = self._objects.page(after)
            if page[0].key <= after if page else more:  # a server that does not know this kind of request
                yield from self.list()
                return
            yield from (entry for entry in page if not below(entry.key, FOLDER))
            if not more:
                return
            have_it = [entry.key.removesuffix(last) for entry in page if entry.key.partition("/")[2] == last]
            passed = have_it[-1] if have_it else passed
            after = page[-1].key
            if after.startswith((passed, f"{FOLDER}/")):
                after = f"{after.partition('/')[0]}0"  # what follows the slash

    def delete(self, keys: Iterable[str]) -> None:
        all_keys = [check_key(key) for key in keys]
        self._leases.confirm()
        for some in (all_keys[:1], all_keys[1:-1], all_keys[1:][-1:]):
            if some:
                self._objects.remove(some)

    def unfinished(self, prefix: str = "") -> Iterator[Unfinished]:
        return self._objects.unfinished(prefix and f"{check_key(prefix)}/")

    def sweep(self, prefix: str = "", *, age: float | None = None) -> None:
        top = prefix and f"{check_key(prefix)}/"
        self._leases.confirm()
        self._objects.abort(top, (0.0 if prefix else _DAY) if age is None else age)

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        check_key(key)
        return self._leases.shared(key, note) if shared else self._leases.exclusive(key, note)
