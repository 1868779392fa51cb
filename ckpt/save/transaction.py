"""A save, on all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpt.errors import RanksError, StorageError
from ckpt.formats.native.documents import rank_document
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable, disagreements
from ckpt.formats.state import FilePlan
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN
from ckpt.root.commit import Attempt, EarlierFile, WrittenFile
from ckpt.save.capture import CapturedState
from ckpt.save.own_state import with_own_state
from ckpt.save.rank_differences import Description, Verdict, agree_outlines, listed
from ckpt.save.snapshot import Snapshot

if TYPE_CHECKING:
    from ckpt.save.saver import Saver

_log = logging.getLogger("ckpt")


@dataclass
class Save:
    """One save: the ranks agree on it, write, and agree that it is written."""

    saver: Saver
    name: str
    facts: Mapping[str, Any]
    captured: Result = field(default_factory=Result)
    snapshot: Snapshot | None = None
    started: float = field(default_factory=time.monotonic)
    blocked: float | None = None  # seconds that training waited
    seconds: dict[str, float] = field(default_factory=dict)
    documents: list[FilePlan] = field(default_factory=list)  # all that are JSON, on the main rank
    written: list[FileRecord] = field(default_factory=list)
    attended: bool = False  # training waits for it, so that live tensors are still those that were captured
    _description: Description | None = None
    _take: Callable[[], CapturedState] | None = None

    @property
    def detached(self) -> bool:
        """Whether training may go on: nothing that it changes is still needed."""
        return self.snapshot is not None

    def prepare(
        self, take: Callable[[], CapturedState], optimized: Callable[[], frozenset[int]], *, snapshot: bool
    ) -> None:
        """Take the state as it is now."""
        self._take = take
        self.captured = Result.capture(take)
        captured = self.captured.value
        if captured is not None and not captured.gathered and (snapshot or captured.on_device):
            found = self.captured.then(lambda one: self.saver.snapshots.take(one.copied_images, optimized))
            self.snapshot, self.captured = found.value, Result(captured, found.error)
        if self.snapshot is not None:
            self.blocked = time.monotonic() - self.started

    def run(self) -> str:
        if self.snapshot is not None:
            snapshot = self.snapshot
            self.captured = self.captured.then(lambda one: _arrived(one, snapshot))
        self.seconds["copied"] = time.monotonic() - self.started
        plan = self._agree(self.captured.then(self._hello), self._plan)
        if plan is None:
            plan = self._keep_apart()
        elif self.captured.value is not None:
            self.saver.compared.agreed(self.captured.value)
        begun = self._begun(Attempt(**plan["attempt"]), plan)
        written = Result.capture(lambda: self._write(begun))
        done = self._agree(written, lambda files: self._commit(begun, files), " (files written)")
        if self._keeps_another_root:
            self._put(begun, Manifest.from_bytes(done["manifest"].encode(), self.name))
        self.saver.earlier = {file.name: EarlierFile(self.name, file) for file in self.written}
        identity: str = done["id"]
        return identity

    @property
    def _keeps_another_root(self) -> bool:
        return self.saver.keeps and self.saver.ranks.rank != MAIN

    def _begun(self, attempt: Attempt, plan: Mapping[str, Any]) -> Attempt:
        """Where hosts have roots of their own, the save is begun in all of them before any file is written."""
        if not self.saver.hosts.separate_roots:
            return attempt
        if self._keeps_another_root:
            self.documents = [FilePlan.of(path, text.encode()) for path, text in plan["documents"].items()]
        join = Result.capture(lambda: self.saver.join(attempt, plan["paths"]) if self._keeps_another_root else attempt)
        self._agree(Result(error=join.error), lambda _: None, " (begun everywhere)")
        begun: Attempt = join.value
        return begun

    def _put(self, attempt: Attempt, manifest: Manifest) -> None:
        """The main rank has committed it already: a manifest that is missing here is made up for by the next load."""
        try:
            self.saver.put(attempt, manifest, {})
        except StorageError as error:
            _log.warning("%s was committed, but its manifest could not be written here: %s", self.name, error)

    @property
    def _copies(self) -> Mapping[str, FilePlan]:
        return self.snapshot.images if self.snapshot is not None else {}

    def _described(self, captured: CapturedState) -> Description:
        if self._description is None:
            self._description = Description(captured, self._copies)
        return self._description

    def _keep_apart(self) -> dict[str, Any]:
        """The ranks hold different state: each keeps what is its own, or all refuse, before anything is written."""
        captured: CapturedState = self.captured.value
        mine = Result.capture(lambda: {**self._described(captured).details, "attended": self.attended})
        verdict = self._agree(mine, self._judge, " (state compared)")
        if self.saver.compared.doubt(verdict["doubted"]) and verdict["attended"] and self._take is not None:
            self.captured, self.snapshot, self._description = Result.capture(self._take), None, None
            again: dict[str, Any] | None = self._agree(self.captured.then(self._hello), self._plan, " (taken anew)")
            return again or self._keep_apart()
        refuse_to_mix(verdict["problems"])
        own = Result.capture(lambda: with_own_state(captured, verdict["own"][captured.rank], self._copies))
        self.captured = own.then(
            lambda one: replace(captured, document=one[0], kept=one[1], differs=verdict["differs"])
        )
        self._tell_apart(verdict["differs"])
        compared = self.captured.then(lambda one: self._hello(one, compare=False))
        plan: dict[str, Any] = self._agree(compared, self._plan, " (kept apart)")
        self.saver.compared.agreed(captured)
        return plan

    def _judge(self, details: list[Any]) -> dict[str, Any]:
        ways = [{key: (one["how"], told["tables"].get(key, {}).get("written")) for key, one in told["parts"].items()}
                for told in details]  # fmt: skip
        mixed = sorted({key for told in ways for key, way in told.items() if ways[MAIN].get(key, way) != way})
        if mixed:
            refuse_to_mix([line for key in mixed for line in _disagreements(key, [one["tables"] for one in details])])
        return {**Verdict.on(details).to_json(), "attended": all(one["attended"] for one in details)}

    def _tell_apart(self, differs: Mapping[str, Any]) -> None:
        """Once for each part, on the main rank."""
        new = [key for key in differs if key not in self.saver.compared.told]
        self.saver.compared.told.update(new)
        if new and self.saver.ranks.rank == MAIN:
            _log.warning(
                "ranks hold different state, and each keeps its own: %s. It comes back as it was to %d ranks alone.",
                "; ".join(f"{key} ({_few(list(differs[key]['tensors']))})" for key in new),
                self.saver.ranks.world_size,
            )

    def _hello(self, captured: CapturedState, *, compare: bool = True) -> dict[str, Any]:
        several = compare and self.saver.ranks.world_size > 1
        return {
            "document": captured.document.decode(),
            "paths": [image.path for image in (*captured.own_images, *captured.kept)],
            "outline": self._described(captured).outline if several else {},
            "there": self.saver.there(self.name) if self._keeps_another_root else [],
        }

    def _agree(self, mine: Result, decide: Callable[[list[Any]], Any], phase: str = "") -> Any:
        return decide_together(self.saver.talks, f"save_state({self.name!r}){phase}", mine, decide)

    def _plan(self, hellos: list[Any]) -> dict[str, Any] | None:
        """On the main rank: how the files will be named; None if the ranks hold different state."""
        if hellos[MAIN]["outline"] and not agree_outlines([one["outline"] for one in hellos]):
            return None
        own = [FilePlan.of(rank_document(rank), one["document"].encode()) for rank, one in enumerate(hellos)]
        self.documents = [self.captured.value.values, *own]
        shared = [image.path for image in [*self.captured.value.images, *self.documents]]
        paths = [*shared, *(path for one in hellos for path in one["paths"])]
        attempt = self.saver.begin(self.name, paths, {path for one in hellos for path in one["there"]})
        plan: dict[str, Any] = {"attempt": asdict(attempt)}
        if self.saver.hosts.separate_roots:
            texts = {one.path: b"".join(one.pieces()).decode() for one in self.documents}
            plan |= {"paths": paths, "documents": texts}
        return plan

    def _write(self, attempt: Attempt) -> list[dict[str, Any]]:
        captured: CapturedState = self.captured.value
        if not captured.keeps:
            captured.help_to_gather()
        files = [*captured.all_images, *(self.documents if captured.keeps else ())]
        images = [*(self._copies.get(file.path, file) for file in files), *captured.kept]
        began = time.monotonic()
        stored = attempt.write(self.saver.storage, images, self.saver.earlier, show=captured.rank == MAIN)
        self.seconds["written"] = time.monotonic() - began
        self.written = [one.file for one in stored]
        return [asdict(one) for one in stored]

    def _commit(self, attempt: Attempt, reports: list[Any]) -> dict[str, str]:
        stored = self._stored(reports)
        total = time.monotonic() - self.started
        facts = {
            **self.facts,
            "layout": "sharded" if self.captured.value.spread else "full",
            "seconds": {"blocked": total if self.blocked is None else self.blocked, **self.seconds, "total": total},
        }
        manifest = self.saver.commit(attempt, stored, facts)
        return {"id": manifest.id, "manifest": manifest.to_bytes().decode() if self.saver.hosts.separate_roots else ""}

    def _stored(self, reports: list[Any]) -> list[WrittenFile]:
        """All files, once each. Where hosts have roots of their own, their copies must be the same."""
        stored: dict[str, WrittenFile] = {}
        other: dict[str, int] = {}
        for rank, report in enumerate(reports):
            for one in report:
                record = FileRecord.from_json(one["file"])
                if stored.setdefault(record.name, WrittenFile(record, one["receipt"])).file != record:
                    other.setdefault(record.name, rank)
        if other:
            listed = ", ".join(f"{name} on rank {rank}" for name, rank in other.items())
            raise RanksError(
                f"these are not the main rank's: {listed}. Hosts with roots of their own keep a copy each of what is "
                "not spread over ranks, so it must be the same on all of them. Make it so, or use a shared root."
            )
        return list(stored.values())


def _few(names: list[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "values"


def refuse_to_mix(problems: list[str]) -> None:
    if problems:
        raise RanksError(
            f"the ranks disagree, so nothing was saved:\n  {listed(problems)}\nBuild the same model on every rank, "
            "spread in the same way, and give every rank the same layout=. What DistributedDataParallel keeps the "
            "same must not differ on any rank (if it is meant to, save with wait=True: each rank then keeps its own), "
            "nor must that which hosts with roots of their own have a copy each of."
        )


def _arrived(captured: CapturedState, snapshot: Snapshot) -> CapturedState:
    snapshot.wait()
    return captured


def _disagreements(key: str, tables: list[Any]) -> list[str]:
    """What ranks say differently about a part: how it is written, its tensors, or how those are spread."""
    written = [one[key]["written"] if key in one else "whole or not there" for one in tables]
    if len(set(written)) > 1:
        said = (
            f"{how} on rank {', '.join(str(r) for r, one in enumerate(written) if one == how)}"
            for how in dict.fromkeys(written)
        )
        return [f"{key}: {'; '.join(said)}"]
    seen = {rank: ShardTable.from_json(one[key]) for rank, one in enumerate(tables)}
    lines = [f"{key}.{name}: {'; '.join(said)}" for name, said in disagreements(seen)]
    differs = any(one[key] != tables[0][key] for one in tables)
    return lines or ([f"{key}: how its tensors are spread over the ranks"] if differs else [])
