"""Which checkpoint to load: the same on every rank, and intact on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpt import catalog
from ckpt.agreement import Outcome, agree
from ckpt.errors import AbsentError, DamagedError, MissingError, VersionError
from ckpt.formats.manifest import Manifest
from ckpt.ranks import MAIN, Ranks
from ckpt.storage import Storage


@dataclass
class Choice:
    """The checkpoint that all ranks will load, and the newer ones that were passed over, with the reasons."""

    manifest: Manifest
    passed_over: dict[str, str] = field(default_factory=dict)


def choose(storage: Storage, ranks: Ranks, name: str | None, held: ExitStack) -> Choice | None:
    """The checkpoint to load, the same on every rank: the one by that name, or the newest that is intact everywhere.

    It is kept from being removed until `held` is left. None if nothing was ever committed.
    """
    call = f"load_state({name!r})" if name else "load_state()"
    offer = agree(ranks, call, Outcome(), lambda _: _offer(storage, name))
    passed_over: dict[str, str] = offer["passed_over"]
    for candidate in offer["names"]:
        found: list[Manifest] = []
        verdict = Outcome.of(lambda: _inspect(storage, candidate, ranks, held, found))  # noqa: B023
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


def _inspect(storage: Storage, name: str, ranks: Ranks, held: ExitStack, found: list[Manifest]) -> str:
    """What is wrong with a checkpoint, as this rank sees it; empty if nothing is. The ranks share out its files."""
    with ExitStack() as mine:
        try:
            mine.enter_context(storage.lock(name, shared=True))
            manifest = catalog.read_manifest(storage, name)
            my_turn = {file.path for file in manifest.files[ranks.rank :: ranks.world_size]}
            catalog.require_intact(storage, manifest, only=my_turn.__contains__, show=ranks.rank == MAIN)
        except (DamagedError, MissingError, AbsentError) as error:
            return str(error)
        found.append(manifest)
        held.push(mine.pop_all())
    return ""
