"""Whether a checkpoint is complete as every rank sees it: its manifest, and the sizes of its files.

No file but the manifest is read. Hashes are compared later, while tensors are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TypedDict

from ckpt.errors import (
    AbsentError,
    CheckpointError,
    DamagedError,
    LockedError,
    MissingError,
    StorageError,
    TransientError,
    UntrustedError,
    shows_damage,
)
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.load import per_host
from ckpt.load.accelerate_reader import read_any
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import Hosts
from ckpt.root.manifest_files import manifest_bytes
from ckpt.root.trust import Trust
from ckpt.root.verify import size_problems
from ckpt.storage import Storage


class Verdict(TypedDict):
    """Why a checkpoint cannot be used: gone since it was listed, unreadable now, locked by another process, not signed
    by a key that is trusted, or, if none of these, damaged."""

    text: str
    vanished: bool
    unreached: bool
    busy: bool
    untrusted: bool


@dataclass
class Inspection:
    """Inspects checkpoints on all ranks together. `vanished`: whether any was removed since it was listed."""

    ranks: Ranks
    call: str
    trust: Trust = field(default_factory=Trust)
    vanished: bool = field(default=False, init=False)

    def complete(self, storage: Storage, name: str, held: ExitStack) -> Manifest:
        """The manifest of a checkpoint whose files are all there, with their sizes, as every rank sees it.

        `held` receives its lock, against removal.
        """
        found: list[Manifest] = []
        lists = storage.is_local or self.ranks.rank == MAIN  # an object store shows every rank the same
        verdict = Result.capture(lambda: _inspect(storage, name, held, found, self.trust, lists=lists))
        problem: Verdict | None = decide_together(self.ranks, self.call, verdict, _joined)
        if problem is None:
            return found[0]
        self.vanished = self.vanished or problem["vanished"]
        if problem["unreached"]:
            raise TransientError(problem["text"])
        damaged = UntrustedError if problem["untrusted"] else DamagedError
        raise (LockedError if problem["busy"] else damaged)(problem["text"])

    def complete_per_host(
        self, tiers: Sequence[Storage], hosts: Hosts, name: str, held: ExitStack
    ) -> tuple[Manifest, Storage]:
        """A manifest that some host has, and the storage in which this rank finds the files that it needs."""
        keeps = hosts.owns_root(self.ranks.rank)
        text = Result.capture(lambda: _manifest_text(tiers[0], name) if keeps else None)
        found = Manifest.from_bytes(decide_together(self.ranks, self.call, text, _newest).encode(), name)
        checked = Result.capture(lambda: self.trust.checked(replace(found, name=name)))
        storage = checked.then(lambda manifest: per_host.storage_for_rank(tiers, manifest, self.ranks, held))
        missing = storage.then(lambda found: found if isinstance(found, list) else [])
        problem = decide_together(self.ranks, self.call, missing, lambda each: per_host.problem(name, hosts, each))
        if problem:
            raise DamagedError(problem)
        return checked.value, storage.value


def _inspect(
    storage: Storage, name: str, held: ExitStack, found: list[Manifest], trust: Trust, *, lists: bool
) -> Verdict | None:
    """What is wrong with a checkpoint, as this rank sees it; None if nothing is, and its manifest is in `found`."""
    try:
        if name:
            held.enter_context(storage.lock(name, shared=True))
        manifest = trust.checked(read_any(storage, name))
        wrong = size_problems(storage, manifest) if lists else []
    except LockedError as error:
        return _verdict(f"{name} is being removed or cleaned up by another process: {error}", busy=True)
    except UntrustedError as error:
        return _verdict(str(error), untrusted=True)
    except (DamagedError, StorageError) as error:
        gone = isinstance(error, AbsentError)  # removed since it was listed
        return _verdict(str(error), vanished=gone, unreached=not shows_damage(error))
    except MissingError as error:
        return _verdict(str(error), vanished=True)
    found.append(manifest)
    return _verdict(f"{name} is damaged: {'; '.join(wrong)}.") if wrong else None


def _verdict(
    text: str, *, vanished: bool = False, unreached: bool = False, busy: bool = False, untrusted: bool = False
) -> Verdict:
    return {"text": text, "vanished": vanished, "unreached": unreached, "busy": busy, "untrusted": untrusted}


def _joined(verdicts: list[Verdict | None]) -> Verdict | None:
    """On the main rank: one verdict for all. What a rank cannot read, or cannot lock, decides over damage."""
    bad = [verdict for verdict in verdicts if verdict]
    if not bad:
        return None
    decisive = max(bad, key=lambda verdict: (verdict["unreached"], verdict["busy"]))
    return {
        "text": decisive["text"],
        "vanished": any(verdict["vanished"] for verdict in bad),
        "unreached": any(verdict["unreached"] for verdict in bad),
        "busy": any(verdict["busy"] for verdict in bad),
        "untrusted": all(verdict["untrusted"] for verdict in bad),
    }


def _manifest_text(root: Storage, name: str) -> str | None:
    """The bytes of the manifest in this host's root, as text; None if there is none, or a damaged one."""
    try:
        return manifest_bytes(root, name).decode()
    except (CheckpointError, AbsentError):
        return None


def _newest(texts: list[str | None]) -> str:
    """On the main rank: of the manifests that hosts have, the newest."""
    there = [text for text in texts if text is not None]
    if not there:
        raise DamagedError("its manifest was removed just now.")
    return max(there, key=lambda text: Manifest.from_bytes(text.encode(), FILE_NAME).sequence)
