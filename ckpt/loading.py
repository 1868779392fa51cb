"""A load, on all ranks together: find the newest intact checkpoint, check that all of it fits, then take it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt import catalog
from ckpt.agreement import Outcome, agree
from ckpt.errors import AbsentError, DamagedError, MismatchError, MissingError, StateError, StorageError, VersionError
from ckpt.formats.documents import STATE, decode_inline, from_json, rank_document
from ckpt.formats.manifest import Manifest
from ckpt.formats.native import SUFFIX, TensorFile
from ckpt.formats.values import Decoder
from ckpt.parts import Notes, Part
from ckpt.ranks import Ranks
from ckpt.storage import Storage


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons."""

    manifest: Manifest
    passed_over: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reader:
    """One file of a checkpoint, for a format that knows no storage."""

    storage: Storage
    key: str

    def read(self, start: int, stop: int) -> bytes:
        return self.storage.read(self.key, start, stop)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.storage.read_into(self.key, start, buffer)


@dataclass(frozen=True)
class _Saved:
    """A tensor of a checkpoint, read when it is asked for."""

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        return self.file.tensor(self.name)

    def read_into(self, target: torch.Tensor) -> None:
        self.file.read_into(self.name, target)


class Opened:
    """A checkpoint that is being read: the values of its parts, and their tensors when they are wanted."""

    def __init__(self, storage: Storage, manifest: Manifest, rank: int) -> None:
        self._storage = storage
        self.manifest = manifest
        self.rank = rank
        self._paths = {file.name: file.path for file in manifest.files}
        self.parts: dict[str, Any] = self._document(STATE)["parts"]
        # ranks that were not there when it was saved look at the main rank's document
        document = self._document(rank_document(rank if rank < manifest.world_size else 0))
        self.own: dict[str, Any] = document["own"] if rank < manifest.world_size else {}
        self.state: dict[str, Any] = {key: decode_inline(value) for key, value in document["state"].items()}

    def rank_state(self, rank: int) -> dict[str, Any]:
        """What another rank had as its own."""
        return {key: decode_inline(value) for key, value in self._document(rank_document(rank))["state"].items()}

    def has(self, key: str) -> bool:
        return key in self.parts or key in self.own

    def tree(self, key: str) -> Any:
        """A part's state, with `SavedTensor`s where tensors are."""
        file = self._file(key)

        def look(name: str) -> _Saved:
            if file is None:
                raise DamagedError(f"{self.manifest.name} refers to tensor {name!r} of {key}, but has no file of them.")
            return _Saved(file, name, *file.about(name))

        return self._decoded(key, look)

    def read(self, key: str) -> Any:
        """A part's state, its tensors read."""
        file = self._file(key)
        return self._decoded(key, lambda name: file.tensor(name) if file else None)

    def _decoded(self, key: str, tensor: Callable[[str], Any]) -> Any:
        return Decoder(tensor).decode(self.own[key] if key in self.own else self.parts[key])

    def _file(self, key: str) -> TensorFile | None:
        path = self._paths.get(key + SUFFIX)
        if path is None:
            return None
        where = f"{self.manifest.name}/{path}"
        return TensorFile.open(_Reader(self._storage, where), where)

    def _document(self, name: str) -> Any:
        where = f"{self.manifest.name}/{self._paths.get(name, name)}"
        return from_json(self._storage.read(where), where)


def choose(storage: Storage, ranks: Ranks, name: str | None, held: ExitStack) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    It is kept from being removed until `held` is left. None if nothing was ever committed.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    offer = agree(ranks, call, Outcome(), lambda _: _offer(storage, name))
    passed_over: dict[str, str] = offer["passed_over"]
    for candidate in offer["names"]:
        found: list[Manifest] = []
        verdict = Outcome.of(lambda: _inspect(storage, candidate, ranks.rank, held, found))  # noqa: B023
        problem = agree(ranks, call, verdict, lambda verdicts: next((text for text in verdicts if text), ""))
        if not problem:
            return Choice(found[0], passed_over)
        passed_over[candidate] = problem
        if name:
            raise DamagedError(f"{problem} Load another one, or load_state() without a name for the newest intact one.")
    if offer["names"]:
        lines = "\n  ".join(passed_over.values())
        raise DamagedError(
            f"no checkpoint in {storage.url} is intact, so nothing was loaded:\n  {lines}\n"
            "Restore one from a backup, or start anew in another root."
        )
    return None


def _offer(storage: Storage, name: str | None) -> dict[str, Any]:
    """On the main rank: the names to try, in order, and those that need no trying."""
    if name is not None:
        catalog.read_manifest(storage, catalog.check_name(name))
        return {"names": [name], "passed_over": {}}
    found = catalog.scan(storage)
    for one in found:
        if isinstance(one.problem, VersionError):
            raise one.problem
    passed_over = {one.name: str(one.problem) for one in found if not one.committed}
    return {"names": [one.name for one in found if one.committed], "passed_over": passed_over}


def _inspect(storage: Storage, name: str, rank: int, held: ExitStack, found: list[Manifest]) -> str:
    """What is wrong with a checkpoint, as this rank sees it; empty if nothing is."""
    with ExitStack() as mine:
        try:
            mine.enter_context(storage.lock(name, shared=True))
            manifest = catalog.read_manifest(storage, name)
            catalog.require_intact(storage, manifest, only=lambda file: _concerns(file, rank), show=rank == 0)
        except (DamagedError, MissingError, AbsentError) as error:
            return str(error)
        found.append(manifest)
        held.push(mine.pop_all())
    return ""


def _concerns(file: str, rank: int) -> bool:
    """Whether a rank reads a file. The main rank looks at all of them."""
    return rank == 0 or not _OF_A_RANK.search(file) or f"-{rank:05d}." in file


_OF_A_RANK = re.compile(r"-\d{5}\.")


def check(opened: Opened, parts: Mapping[str, Part]) -> dict[str, dict[str, str]]:
    """What does not fit, by part and key. Reads no tensor and changes nothing."""
    unfit = {}
    for key, part in parts.items():
        if not opened.has(key):
            unfit[key] = {"": "missing: the checkpoint has no such part"}
        elif problems := part.check(opened.tree(key)):
            unfit[key] = problems
    return unfit


def require_fit(opened: Opened, unfit: Mapping[str, Mapping[str, str]]) -> None:
    """One error for everything that does not fit."""
    problems = [_where(part, key) + why for part, keys in unfit.items() for key, why in sorted(keys.items())]
    if problems:
        lines = "\n  ".join(problems)
        raise MismatchError(
            f"{opened.manifest.name} does not fit the live objects; nothing was changed:\n  {lines}\n"
            "Build the objects as they were when it was saved, or use strict=False to restore what fits.",
            tuple(problems),
        )


def _where(part: str, key: str) -> str:
    return f"{part}: {key}: " if key else f"{part}: "


def restore(
    opened: Opened, parts: Mapping[str, Part], unfit: Mapping[str, Mapping[str, str]], notes: Notes
) -> list[str]:
    """Take back what fits, and return the keys of the parts that were."""
    done = []
    for key, part in parts.items():
        if opened.has(key):
            _restore_one(opened, key, part, unfit.get(key, {}), notes)
            done.append(key)
        else:
            notes.skipped[key] = "the checkpoint has no such part"
    for key in opened.parts.keys() - parts.keys():
        notes.skipped[key] = "in the checkpoint, but not managed here"
    return done


def _restore_one(opened: Opened, key: str, part: Part, unfit: Mapping[str, str], notes: Notes) -> None:
    try:
        part.restore(opened.tree(key), lambda: opened.read(key), unfit, notes)
    except (StorageError, DamagedError):
        raise
    except Exception as error:
        raise StateError(f"{key} did not take its state back: {type(error).__name__}: {error}") from error
