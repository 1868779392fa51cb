"""Which checkpoint to load: the same on every rank, and intact on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt import catalog
from ckpt.agreement import Outcome, agree
from ckpt.catalog import Checkpoint
from ckpt.errors import AbsentError, DamagedError, LockedError, MissingError, StorageError, VersionError
from ckpt.formats.manifest import Manifest
from ckpt.ranks import Ranks
from ckpt.storage import Storage
from ckpt.taking_over import foreign_names, read_any

_log = logging.getLogger("ckpt")
_RESCANS = 5


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons."""

    manifest: Manifest
    url: str
    ready: Any
    passed_over: dict[str, str] = field(default_factory=dict)


Prepare = Callable[[Storage, Manifest, ExitStack], Any]


def choose(
    tiers: Sequence[Storage], ranks: Ranks, name: str | None, prepare: Prepare, held: ExitStack
) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    `tiers` are where they may be; of two copies the first tier's comes first. `prepare` reads it, on all ranks
    together; a `DamagedError` from it means the next one. The checkpoint, and what `prepare` puts on its stack, is kept
    until `held` is left. None if nothing was ever committed.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    for _ in range(_RESCANS):
        offer = agree(ranks, call, Outcome(), lambda _: _offer(tiers, name))
        search = _Search(tiers, ranks, call, prepare, held, offer["passed_over"])
        choice = search.first_intact(offer["found"])
        if choice is not None:
            return choice
        if not offer["found"]:
            return None
        if not search.vanished:  # a run that goes on meanwhile has newer ones by now
            break
    raise DamagedError(_nothing_intact(tiers, name, search.passed_over))


def _nothing_intact(tiers: Sequence[Storage], name: str | None, passed_over: Mapping[str, str]) -> str:
    if name:
        return f"{passed_over[name]} Load another one, or load_state() without a name for the newest intact one."
    lines = "\n  ".join(passed_over.values())
    return (
        f"no checkpoint in {' or '.join(one.url for one in tiers)} is intact, so nothing was loaded:\n  {lines}\n"
        "Restore one from a backup, or start anew in another root."
    )


@dataclass
class _Search:
    """Goes through checkpoints until one is intact on every rank."""

    tiers: Sequence[Storage]
    ranks: Ranks
    call: str
    prepare: Prepare
    held: ExitStack
    passed_over: dict[str, str]
    vanished: bool = False

    def first_intact(self, found: list[tuple[int, str]]) -> Choice | None:
        for tier, name in found:
            storage = self.tiers[tier]
            with ExitStack() as mine:
                try:
                    manifest = self._inspected(storage, name, mine)
                    ready = self.prepare(storage, manifest, mine)
                except (DamagedError, StorageError) as error:
                    self._pass_over(name, f"in {storage.url}: {error}" if tier else str(error))
                    continue
                self.held.push(mine.pop_all())
                url = f"{storage.url}/{name}" if name else storage.url
                return Choice(manifest, url, ready, self.passed_over)
        return None

    def _pass_over(self, name: str, why: str) -> None:
        known = self.passed_over.get(name)
        self.passed_over[name] = f"{known} {why}" if known else why

    def _inspected(self, storage: Storage, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it."""
        found: list[Manifest] = []
        verdict = Outcome.of(lambda: _inspect(storage, name, held, found))
        problem = agree(self.ranks, self.call, verdict, _joined)
        if problem:
            self.vanished = self.vanished or problem["vanished"]
            raise DamagedError(problem["text"])
        return found[0]


def _joined(verdicts: list[Any]) -> Any:
    bad = [verdict for verdict in verdicts if verdict]
    return {"text": bad[0]["text"], "vanished": any(one["vanished"] for one in bad)} if bad else None


def _offer(tiers: Sequence[Storage], name: str | None) -> dict[str, Any]:
    """On the main rank: what to try, in order, each with the number of its tier; and what needs no trying."""
    found = _look(tiers, name)
    committed = [(tier, one.manifest) for tier, one in found if one.manifest is not None]
    committed.sort(key=lambda found: (found[1].sequence, found[1].created, -found[0]), reverse=True)
    order = [(tier, manifest.name) for tier, manifest in committed]
    if name is not None:
        if not order:
            read_any(tiers[0], name)  # another tool wrote it, or there is none
        return {"found": order or [(0, name)], "passed_over": {}}
    for _, one in found:
        if isinstance(one.problem, VersionError):
            raise one.problem
    passed_over = {one.name: str(one.problem) for tier, one in found if tier == 0 and not one.committed}
    return {"found": order or [(0, foreign) for foreign in foreign_names(tiers[0])], "passed_over": passed_over}


def _look(tiers: Sequence[Storage], name: str | None) -> list[tuple[int, Checkpoint]]:
    """The checkpoints of all tiers, or those of one name. A tier that cannot be reached is done without, if it can be.

    Where no other has anything, that is an error: a fresh start must not come before what is there.
    """
    found: list[tuple[int, Checkpoint]] = []
    for tier, storage in enumerate(tiers):
        try:
            here = catalog.scan(storage) if name is None else [catalog.find(storage, catalog.check_name(name))]
        except StorageError as error:
            if not any(one.committed for _, one in found):
                raise
            _log.warning("%s cannot be looked at, and may have newer checkpoints: %s", storage.url, error)
        else:
            found += [(tier, one) for one in here]
    return found


def _inspect(storage: Storage, name: str, held: ExitStack, found: list[Manifest]) -> Any:
    """What is wrong with a checkpoint, as this rank sees it without reading its files; None if nothing is."""
    try:
        if name:
            held.enter_context(storage.lock(name, shared=True))
        manifest = read_any(storage, name)
        wrong = catalog.size_problems(storage, manifest)
    except (DamagedError, StorageError) as error:
        gone = isinstance(error, AbsentError | LockedError)  # removed since it was listed, or just being
        return {"text": str(error), "vanished": gone}
    except MissingError as error:
        return {"text": str(error), "vanished": True}
    found.append(manifest)
    return {"text": f"{name} is damaged: {'; '.join(wrong)}.", "vanished": False} if wrong else None
