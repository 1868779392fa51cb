"""A save, on all ranks together."""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ckpt import commit
from ckpt.agreement import Outcome, agree
from ckpt.capture import Captured
from ckpt.commit import Attempt
from ckpt.console import size
from ckpt.errors import LockedError, StorageError
from ckpt.formats.documents import rank_document
from ckpt.formats.manifest import FileRecord, Manifest
from ckpt.formats.state import Image
from ckpt.ranks import MAIN, Ranks
from ckpt.retention import Keep
from ckpt.storage import Storage
from ckpt.version import __version__

_log = logging.getLogger("ckpt")
LOCK = ".lock"


@dataclass
class Saver:
    """Writes checkpoints into one root, for one manager.

    The main rank holds the root from `hold` or the first save until `close`, and knows the checkpoints that are there.
    """

    storage: Storage
    ranks: Ranks
    keep: Keep | None = None
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    damaged: set[str] = field(default_factory=set)
    _committed: list[Manifest] | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    def hold(self) -> None:
        """Take the root for this run, and clear away what a crashed one left. Refused if another run has it."""
        agree(self.ranks, "resume()", Outcome(), lambda _: self._hold())

    def save(self, name: str, take: Callable[[], Captured], facts: Mapping[str, Any]) -> None:
        """Capture, write and commit on all ranks, or raise on all."""
        call = f"save_state({name!r})"
        started = time.monotonic()
        documents: list[Image] = []

        def plan(hellos: list[Any]) -> dict[str, Any]:
            documents.extend(Image.of(rank_document(r), one["document"].encode()) for r, one in enumerate(hellos))
            return asdict(
                self._begin(name, captured.value, documents, [path for one in hellos for path in one["paths"]])
            )

        def write(attempt: Attempt) -> list[dict[str, Any]]:
            shared = [*captured.value.images, *documents] if self.ranks.rank == MAIN else []
            return [
                asdict(record)
                for record in attempt.write(self.storage, [*shared, *captured.value.own_images], self.ranks.alive)
            ]

        def decide(reports: list[Any]) -> str:
            files = [FileRecord(**record) for report in reports for record in report]
            return self._commit(attempt.get(), files, {**facts, "seconds": {"total": time.monotonic() - started}})

        captured = Outcome.of(take)
        hello = captured.then(lambda it: {"document": it.document.decode(), "paths": [i.path for i in it.own_images]})
        try:
            attempt = Outcome(Attempt(**agree(self.ranks, call, hello, plan)))
            self.parent = agree(self.ranks, call, attempt.then(write), decide)
        except Exception:
            if self.ranks.rank == MAIN:
                self._clean_up(name)
            raise
        self._retain()

    def follow(self, manifest: Manifest, damaged: Iterable[str]) -> None:
        """What is saved from here on goes on from this checkpoint."""
        self.run, self.parent = manifest.run, manifest.id
        self.damaged |= set(damaged)

    def close(self) -> None:
        """Let go of the root."""
        self._held.close()
        self._committed = None

    def _hold(self) -> None:
        if self._committed is not None:
            return
        note = f"process {os.getpid()} on {socket.gethostname()}, since {commit.now()}."
        try:
            self._held.enter_context(self.storage.lock(LOCK, note=note))
        except LockedError as error:
            raise LockedError(
                f"another run writes to {self.storage.url}: {error} Wait until it has ended or stop it, or give this "
                "run another root. Within one process, close() the other StateManager first."
            ) from None
        found = commit.sweep(self.storage)
        self._committed = [one.manifest for one in found if one.manifest is not None]

    def _begin(self, name: str, captured: Captured, documents: list[Image], own: list[str]) -> Attempt:
        self._hold()
        older = next((one for one in self._committed or () if one.name == name), None)
        attempt = Attempt(name, tuple(file.path for file in older.files) if older else ())
        attempt.begin(self.storage, [*(image.path for image in [*captured.images, *documents]), *own])
        return attempt

    def _commit(self, attempt: Attempt, files: list[FileRecord], facts: Mapping[str, Any]) -> str:
        assert self._committed is not None
        manifest = Manifest(
            name=attempt.name,
            id=attempt.id,
            sequence=1 + max((one.sequence for one in self._committed), default=0),
            created=commit.now(),
            run=self.run,
            parent=self.parent,
            files=tuple(sorted(files, key=lambda file: file.path)),
            world_size=self.ranks.world_size,
            versions={"ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()},
            **facts,
        )
        attempt.commit(self.storage, manifest)
        self._committed = [manifest, *(one for one in self._committed if one.name != attempt.name)]
        self.damaged.discard(attempt.name)
        waited = facts["seconds"]["total"]
        _log.info("saved %s/%s: %s in %.2f s", self.storage.url, attempt.name, size(manifest.size), waited)
        return attempt.id

    def _retain(self) -> None:
        if self.keep is None or self._committed is None:
            return
        try:
            self._committed = commit.retain(self.keep, self.storage, self._committed, self.damaged)
        except StorageError as error:  # the save stands; what could not be removed is tried again after the next one
            _log.warning("old checkpoints were not removed: %s", error)

    def _clean_up(self, name: str) -> None:
        """After a failure. What cannot be removed now is swept before a later save."""
        with suppress(StorageError):
            if self._committed is not None:
                commit.clean(self.storage, name)
