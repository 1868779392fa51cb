"""Which checkpoint to load: the same on every rank, and intact on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt import catalog
from ckpt.agreement import Outcome, agree
from ckpt.errors import AbsentError, DamagedError, LockedError, MissingError, StorageError, VersionError
from ckpt.formats.manifest import Manifest
from ckpt.ranks import Ranks
from ckpt.storage import Storage
from ckpt.taking_over import folder_of, foreign_names, read_any

_RESCANS = 5


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons."""

    manifest: Manifest
    url: str
    ready: Any
    passed_over: dict[str, str] = field(default_factory=dict)


def choose(
    storage: Storage,
    ranks: Ranks,
    name: str | None,
    prepare: Callable[[Manifest, ExitStack], Any],
    held: ExitStack,
    *,
    foreign: bool = False,
) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    With `foreign`, where there is none of ours, the newest that Accelerate wrote.

    `prepare` reads it, on all ranks together; a `DamagedError` from it means the next one. The checkpoint, and what
    `prepare` puts on its stack, is kept until `held` is left. None if nothing was ever committed.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    for _ in range(_RESCANS):
        offer = agree(ranks, call, Outcome(), lambda _: _offer(storage, name, foreign=foreign))
        search = _Search(storage, ranks, call, prepare, held, offer["passed_over"])
        choice = search.first_intact(offer["names"])
        if choice is not None:
            return choice
        if not offer["names"]:
            return None
        if not search.vanished:  # a run that goes on meanwhile has newer ones by now
            break
    raise DamagedError(_nothing_intact(storage, name, search.passed_over))


def _nothing_intact(storage: Storage, name: str | None, passed_over: Mapping[str, str]) -> str:
    if name:
        return f"{passed_over[name]} Load another one, or load_state() without a name for the newest intact one."
    lines = "\n  ".join(passed_over.values())
    return (
        f"no checkpoint in {storage.url} is intact, so nothing was loaded:\n  {lines}\n"
        "Restore one from a backup, or start anew in another root."
    )


@dataclass
class _Search:
    """Goes through checkpoints until one is intact on every rank."""

    storage: Storage
    ranks: Ranks
    call: str
    prepare: Callable[[Manifest, ExitStack], Any]
    held: ExitStack
    passed_over: dict[str, str]
    vanished: bool = False

    def first_intact(self, names: list[str]) -> Choice | None:
        for name in names:
            with ExitStack() as mine:
                try:
                    manifest = self._inspected(name, mine)
                    ready = self.prepare(manifest, mine)
                except (DamagedError, StorageError) as error:
                    self.passed_over[name] = str(error)
                    continue
                self.held.push(mine.pop_all())
                return Choice(manifest, folder_of(self.storage, manifest), ready, self.passed_over)
        return None

    def _inspected(self, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it."""
        found: list[Manifest] = []
        verdict = Outcome.of(lambda: _inspect(self.storage, name, held, found))
        problem = agree(self.ranks, self.call, verdict, _joined)
        if problem:
            self.vanished = self.vanished or problem["vanished"]
            raise DamagedError(problem["text"])
        return found[0]


def _joined(verdicts: list[Any]) -> Any:
    bad = [verdict for verdict in verdicts if verdict]
    return {"text": bad[0]["text"], "vanished": any(one["vanished"] for one in bad)} if bad else None


def _offer(storage: Storage, name: str | None, *, foreign: bool) -> dict[str, Any]:
    """On the main rank: the names to try, in order, and those that need no trying."""
    if name is not None:
        read_any(storage, name and catalog.check_name(name))
        return {"names": [name], "passed_over": {}}
    found = catalog.scan(storage)
    for one in found:
        if isinstance(one.problem, VersionError):
            raise one.problem
    passed_over = {one.name: str(one.problem) for one in found if not one.committed}
    names = [one.name for one in found if one.committed]
    return {"names": names or (foreign_names(storage) if foreign else []), "passed_over": passed_over}


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
