"""One save on all ranks: capture, agree on the file names, write, agree that all is written, commit."""

from __future__ import annotations

import base64
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ckpt.errors import FullError, RanksError, StorageError
from ckpt.formats.layout import Members
from ckpt.formats.native.documents import LONGEST_JOINED, joined_file, joined_name, rank_document
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable
from ckpt.formats.tensors import FilePlan
from ckpt.ranks.consensus import MAIN, Other, Ranks, Result, Value, decide_together
from ckpt.ranks.store_and_heartbeats import format_ranks
from ckpt.root import deletion
from ckpt.root.catalog import Summary, spread_file, tensor_files_of
from ckpt.root.write_link_commit import Attempt, WrittenFile
from ckpt.save.capture import CapturedState, ComparisonHistory, LiveState, with_diverged_state
from ckpt.save.rank_description import RankDescription, SplitDetails, join_details, outlines_match
from ckpt.save.rank_differences import Verdict, judge, refuse_to_mix
from ckpt.save.root_writer import HeldRoot, RootWriter
from ckpt.save.snapshot.snapshots import Snapshot, Snapshots
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies
from ckpt.storage import Reserving, Staging
from ckpt.storage.local.storage import LocalStorage
from ckpt.util.checked_json import joined
from ckpt.util.console import format_size, progress_bar
from ckpt.util.filesystem import filesystem_type
from ckpt.util.threads import gc_paused

_log = logging.getLogger("ckpt")

# Room on the disk of a local root: checked before a checkpoint is written, and made by what goes anyway.
_COMPRESSING = ("btrfs", "zfs", "bcachefs")  # more may fit than is free


def make_room(root: RootWriter, name: str, facts: Mapping[str, Any], size: int) -> None:
    """Refuse a checkpoint of so many bytes that the disk has no room for, before anything of it is written.

    If the checkpoints that `Keep` does not keep beside the new one make the room, they are removed first, but never the
    newest intact one. Where the root is not local, not held yet, or each host has its own, nothing is done.
    """
    held, storage = root.held, root.storage
    if not size or held is None or not isinstance(storage, LocalStorage) or root.hosts.separate_roots:
        return
    free = _free(storage.place)
    if free is None or size <= free:
        return
    oldest_first = _removable(root, held, name, facts)
    freed = sum(_own_bytes(Path(storage.place, summary.name)) for summary in oldest_first)
    if size <= free + freed:
        left = _remove(held, storage, oldest_first, size, name)
        more, outcome = f", and ckpt could not make room: {left}", "Nothing was written."
        if not left:
            return
    else:
        more = f", and {format_size(freed)} in checkpoints that Keep would remove" if freed else ""
        outcome = "Nothing was written or removed."
    if filesystem_type(storage.place) not in _COMPRESSING:
        raise FullError(
            f"{storage.url}/{name} needs {format_size(size)}, but only {format_size(free)} is free there{more}. "
            f"{outcome} Free some space, or keep fewer checkpoints: keep=ckpt.Keep(last=...)."
        )


def _free(path: str) -> int | None:
    """Free bytes of the filesystem that a path is on; None if it does not say."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _removable(root: RootWriter, held: HeldRoot, name: str, facts: Mapping[str, Any]) -> list[Summary]:
    """What is not kept once this checkpoint is there, oldest first."""
    others = [summary for summary in held.committed if summary.name != name]
    newest = next((summary.name for summary in others if summary.name not in root.damaged), None)
    if root.keep is None or newest is None:
        return []
    step, metrics = facts["progress"]["step"], facts["metrics"]
    number = max(summary.sequence for summary in held.committed) + 1
    new = Summary(name=name, id="", sequence=number, created="", run=root.lineage.run, step=step, metrics=metrics)
    names = {*root.keep.removable([new, *others], root.damaged)} - {newest}
    return [summary for summary in reversed(others) if summary.name in names]


def _own_bytes(folder: Path) -> int:
    """What removing a checkpoint frees: files that other checkpoints link to stay."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:  # removed meanwhile
            continue
        total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def _remove(held: HeldRoot, storage: LocalStorage, oldest_first: list[Summary], size: int, name: str) -> str:
    """Remove so many that there is room. Returns why some are left, if there is none."""
    held.history.store(held.committed)
    left = []
    for summary in oldest_first:
        if size <= (_free(storage.place) or 0):
            return ""
        why = deletion.remove(storage, summary)
        if why:
            left.append(f"{summary.name} {why}")
        else:
            held.discard(summary.name)
            _log.info("removed %s/%s to make room for %s", storage.url, summary.name, name)
    return "" if size <= (_free(storage.place) or 0) else "; ".join(left)


# The reports of all ranks on the files that they have written, joined on the main rank.


def merge_reports(reports: list[list[dict[str, Any]]]) -> list[WrittenFile]:
    """The files that ranks report, each once. Where hosts have roots of their own, their copies must be the same."""
    stored: dict[str, WrittenFile] = {}
    other: dict[str, int] = {}
    for rank, report in enumerate(reports):
        for entry in report:
            record = FileRecord.from_json(entry["file"])
            written = WrittenFile(record, entry["receipt"], entry.get("linked", False))
            if stored.setdefault(record.name, written).file != record:
                other.setdefault(record.name, rank)
    if other:
        named = joined([f"{name} on rank {rank}" for name, rank in other.items()])
        raise RanksError(
            f"some hosts have files that differ from the main rank's: {named}. With separate roots, each host saves a "
            "copy of everything that is not sharded, and all copies must be equal. Make the state that is not "
            "sharded equal on all hosts, or use a shared root."
        )
    return list(stored.values())


_MUCH = 10.0  # seconds that a rank takes longer than most others, and three times as long, before the log names it


def name_straggler(name: str, seconds: list[float], members: Members) -> tuple[int, float]:
    """The rank that took longest to write its files, by its number in the job, and its seconds.

    If that is much longer than most ranks took, one warning names it: a slow disk or host holds up every save."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    number, usual = slowest if members is None else members[slowest], median(seconds)
    if seconds[slowest] > max(3 * usual, usual + _MUCH):
        _log.warning(
            "%s: rank %d took %.1f s to write its files, but half of the %d ranks took at most %.1f s. Every save "
            "waits for the slowest rank: look at its disk, its network and what else runs on its host.",
            name, number, seconds[slowest], len(seconds), usual,
        )  # fmt: skip
    return number, seconds[slowest]


# Ranks' documents: of few ranks, each is a file; of more, a line of a file with those of many. See decision 0042.
ALONE = 8  # ranks
IN_A_FILE = 8192  # documents
_TAKEN_AT_ONCE = 256  # documents
TOGETHER = 64  # ranks, of which each writes its own shards; of more, those of a host write together
LEFT = "document"


def _packed(document: bytes) -> str:
    """For the store, through which the documents of thousands of ranks go: less than half as long."""
    return base64.b64encode(zlib.compress(document, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def left_documents(channel: Ranks, ranks: range) -> Iterator[bytes]:
    """Those that these ranks have left for the one that writes them: they are gone from the store then."""
    for first in range(0, len(ranks), _TAKEN_AT_ONCE):
        yield from map(_unpacked, channel.take(LEFT, [*ranks[first : first + _TAKEN_AT_ONCE]]))


@dataclass(frozen=True)
class SaveRequest:
    """What to save, and as what."""

    name: str
    capture: Callable[[], LiveState]
    facts: Mapping[str, Any]  # of the manifest: progress and metrics
    check_room: bool = False  # on the disk of the root, before anything is written
    amends: bool = False  # the checkpoint of this name, if anything has changed since it was saved


@dataclass
class SaveTransaction:
    """One save. Every rank runs the same transaction; all of them commit, or all raise the same error."""

    root: RootWriter
    snapshots: Snapshots
    channel: Ranks
    compared: ComparisonHistory
    request: SaveRequest
    captured: Result[CapturedState] = field(default_factory=Result)
    snapshot: Snapshot | None = None
    copies: TensorCopies | None = None  # of the captured tensors, until the snapshot is taken from them
    started: float = field(default_factory=time.monotonic)
    blocked: float | None = None  # seconds that training waited
    seconds: dict[str, float] = field(default_factory=dict)
    documents: list[FilePlan] = field(default_factory=list)  # all that are JSON, on the main rank
    written: list[FileRecord] = field(default_factory=list)
    linked: int = 0  # bytes of files that were there already, of all ranks, on the main one
    slowest: tuple[int, float] = (MAIN, 0.0)  # the rank that took longest to write, and its seconds, on the main one
    attended: bool = False  # training waits for it, so that live tensors are still those that were captured
    is_awaited: Callable[[], bool] = bool  # or whether training has begun to wait since
    is_saved: bool = True  # False: nothing had changed, so that the checkpoint which it was to amend is as it was
    number: int = 0  # in the sequence of all that the run captures, for its root and for memory
    _live: Result[LiveState] = field(default_factory=Result)
    _description: RankDescription | None = None
    _tables: Mapping[str, ShardTable] = field(default_factory=dict)  # of the parts that ranks may write together

    @property
    def detached(self) -> bool:
        """Whether training may continue: nothing that it changes is still needed."""
        return self.snapshot is not None or self.copies is not None

    @property
    def copied_at(self) -> float:
        """When the state had been copied to host memory."""
        return self.started if self.snapshot is None else self.snapshot.arrival.at

    def capture(self) -> None:
        """Capture the state as it is now."""
        self.number = self.root.reserve()
        self._live = Result.capture(self.request.capture)

    def take_snapshot(self, *, wanted: bool) -> None:
        """Copy what was captured, if that is wanted, or if some of it is on a device.

        If copies of all tensors can be made at once, the snapshot is taken from them when the save is run.
        """
        label = f"copying {self.root.label(self.request.name)}"
        with progress_bar(label, None, show=self.root.ranks.rank == MAIN):
            self._copy(wanted=wanted)
        if self.detached:
            self.blocked = time.monotonic() - self.started
            self.trace("copied; training continues")

    def _copy(self, *, wanted: bool) -> None:
        if wanted or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # it hashes copies: the host need not
            self._live = prepared = self._live.then(lambda live: live.prepared())
            copied = prepared.then(lambda live: self._copied(live.leaves, wanted=wanted))
            self.copies = copied.value
            self._live = prepared if copied.error is None else Result(error=copied.error)
        if self.copies is None:
            self.captured = self._live.then(lambda state: state.encode())
            self._take_encoded(wanted=wanted)

    def trace(self, done: str) -> None:
        """Log at level DEBUG what is done, and how long after the call: the last line says where a save hangs."""
        if self.root.ranks.rank == MAIN:
            seconds = time.monotonic() - self.started
            _log.debug("%s +%.3f s: %s", self.root.label(self.request.name), seconds, done)

    def _copied(self, leaves: Leaves | None, *, wanted: bool) -> TensorCopies | None:
        return self.snapshots.copy(leaves) if leaves is not None and (wanted or leaves.on_device) else None

    def _take_encoded(self, *, wanted: bool) -> None:
        captured = self.captured.value
        if captured is not None and not captured.gathered and (wanted or captured.devices):
            copied = self.captured.then(lambda state: self.snapshots.take(state.snapshot_files))
            self.snapshot, self.captured = copied.value, Result(captured, copied.error)
        if self.snapshot is None:
            self.captured = self.captured.then(_settled)

    def _take_from_copies(self, copies: TensorCopies) -> None:
        """Encode the state with the copies in place of live tensors, and take the snapshot from them."""
        if not self.attended:
            copies.let_training_go_ahead()
        with gc_paused():
            with self.snapshots.beside_training(copies):
                self.captured = encoded = self._live.then(lambda live: live.encode(copies))
            taken = encoded.then(lambda state: self._taken(state, copies))
        self._live, captured = Result(), self.captured.value
        self.snapshot, self.captured = taken.value, Result(captured, taken.error)
        if self.snapshot is None:
            copies.release()

    def _taken(self, state: CapturedState, copies: TensorCopies) -> Snapshot | None:
        earlier = {path: found.file for path, found in self.root.links.files.items()}
        return self.snapshots.take(state.snapshot_files, copies, self.root.storage, earlier)

    def discard(self) -> None:
        """Give up what was captured: it will not be written."""
        if self.snapshot is not None:
            self.snapshot.release()
        elif self.copies is not None:
            self.copies.release()

    def run(self) -> None:
        """Write and commit the captured state."""
        copies, self.copies = self.copies, None
        if copies is not None:
            self._take_from_copies(copies)
        plan = None
        if not self.compared.differed:
            plan = self._agree(self.captured.then(self._proposal), self._plan)
        if plan is None:
            plan = self._save_differences()
        begun = self._begun(Attempt(**plan["attempt"]), plan)
        written = Result.capture(lambda: self._write(begun, plan))
        try:
            done = self._agree(written, lambda files: self._commit(begun, files), " (files written)")
        except Exception:
            if "together" in plan and self.root.ranks.rank == MAIN:  # whatever it was: the next save does without
                self.root.hands_over = False
                _log.warning(
                    "the ranks of each host were to write %s together, and that failed. From now on, each rank writes "
                    "files of its own.", self.request.name,
                )  # fmt: skip
            raise
        self.is_saved = done["is_saved"]
        if not self.is_saved:
            if self.root.owns_root:  # what was written in vain, and the marker
                deletion.clean_up_failed(self.root.storage, begun.name)
            return
        if self._owns_another_root:
            self._commit_here(begun, Manifest.from_bytes(done["manifest"].encode(), self.request.name))
        self.root.advance(self.request.name, done["id"], self.written)

    @property
    def _own_documents(self) -> list[FilePlan]:
        """This rank's document, if it writes it itself: one of many that is no line does, if it writes files anyway."""
        captured = self.captured.get()
        writes = captured.rank_files or captured.diverged_files  # those are all that most ranks of a pipeline write
        alone = writes and self._joins and not self._is_joined(captured)
        return [FilePlan.of(rank_document(captured.rank), captured.document)] if alone else []

    @property
    def _joins(self) -> bool:
        """Whether the documents of many ranks are in one file. A host with a root of its own has each in its own."""
        return self.root.ranks.world_size > ALONE and not self.root.hosts.separate_roots

    def _is_joined(self, captured: CapturedState) -> bool:
        return self._joins and len(captured.document) < LONGEST_JOINED

    @property
    def _owns_another_root(self) -> bool:
        return self.root.owns_root and self.root.ranks.rank != MAIN

    def _begun(self, attempt: Attempt, plan: Mapping[str, Any]) -> Attempt:
        """Where hosts have roots of their own, begin in all of them before any file is written."""
        if not self.root.hosts.separate_roots:
            return attempt
        if self._owns_another_root:
            self.documents = [FilePlan.of(path, text.encode()) for path, text in plan["documents"].items()]
        join = Result.capture(lambda: self.root.join(attempt, plan["paths"]) if self._owns_another_root else attempt)
        self._agree(Result[None](error=join.error), lambda _: None, " (begun everywhere)")
        return join.get()

    def _commit_here(self, attempt: Attempt, manifest: Manifest) -> None:
        """The main rank has committed: if the manifest cannot be written here, the next load writes it."""
        try:
            self.root.commit_manifest(attempt, manifest, {})
        except StorageError as error:
            _log.warning(
                "%s is committed, but ckpt could not write its manifest on this host: %s", manifest.name, error
            )

    @property
    def _snapshot_files(self) -> Mapping[str, FilePlan]:
        return self.snapshot.files if self.snapshot is not None else {}

    def _described(self, captured: CapturedState) -> RankDescription:
        if self._description is None:
            self._description = RankDescription(captured)
        return self._description

    def _save_differences(self) -> dict[str, Any]:
        """The ranks hold different state: each saves what is its own, or all refuse, before anything is written."""
        mine = self.captured.then(lambda captured: SplitDetails.of(self._described(captured).details))
        judged: list[Verdict] = []  # on the main rank

        def decide(answers: list[dict[str, Any]]) -> dict[str, Any]:
            judged.append(judge(join_details(answers)))
            united = judged[0].united if self._may_write_together and self.root.hands_over else {}
            return {**judged[0].to_json(), "tables": {key: part.by_others.to_json() for key, part in united.items()}}

        said = mine.then(
            lambda split: split.answer(speaks=self.channel.speaks_for(split.digest), attended=self.attended)
        )
        verdict = self._agree(said, decide, " (state compared)")
        captured, self.compared.differed = self.captured.get(), True
        if verdict["doubted"]:
            self.compared.distrust()
            if verdict["attended"]:
                return self._capture_again()
        refuse_to_mix(verdict["problems"], verdict["drifted"])
        own, writes = verdict["own"][captured.rank], verdict["writes"][captured.rank]
        united = {key: part.to_json() for key, part in judged[0].united.items()} if judged else {}
        diverged = Result.capture(lambda: with_diverged_state(captured, own, writes, self._snapshot_files))
        self.captured = diverged.then(lambda state: state.but(differs=verdict["differs"], united=united))
        self._report_differences(verdict["differs"])
        tables = captured.joinable | {key: ShardTable.from_json(table) for key, table in verdict["tables"].items()}
        self._tables = {key: table for key, table in tables.items() if key not in verdict["differs"]}
        proposal = self.captured.then(lambda state: self._proposal(state, compare=False))
        plan = self._agree(proposal, self._plan, " (differences saved)")
        assert plan is not None  # nothing is compared any more
        return plan

    def _capture_again(self) -> dict[str, Any]:
        """Training waits, so the state is unchanged: capture it again, with replicas of what has come into doubt."""
        self.discard()
        self.captured = Result.capture(self.request.capture).then(lambda state: state.encode())
        self.snapshot, self._description = None, None
        plan = self._agree(self.captured.then(self._proposal), self._plan, " (captured again)")
        return plan or self._save_differences()

    def _report_differences(self, differs: Mapping[str, Any]) -> None:
        """Log them on the main rank, once for each part."""
        new = [key for key in differs if key not in self.compared.reported]
        self.compared.reported.update(new)
        if new and self.root.ranks.rank == MAIN:
            _log.warning(
                "%sranks hold different state, so ckpt saves each rank's own state: %s. Only a job of %d ranks "
                "can restore that state exactly.",
                "" if self.compared.trusted else "replicas that should be equal have drifted apart: ",
                "; ".join(_described(key, differs[key]) for key in new),
                self.root.ranks.world_size,
            )

    def _proposal(self, captured: CapturedState, *, compare: bool = True) -> dict[str, Any]:
        """What the main rank must know of this rank to plan the save."""
        several = compare and self.root.ranks.world_size > 1
        if compare:
            self._tables = captured.joinable
        own, is_joined = self._own_documents, self._is_joined(captured)
        if self._joins:  # before this rank answers, so that it is there when the plan is made
            self.channel.leave(LEFT, _packed(captured.document if is_joined else b""))
        return {
            "document": None if own or is_joined else captured.document.decode(),
            "line": len(captured.document) + 1 if is_joined else 0,
            "paths": [file.path for file in (*own, *captured.rank_files, *captured.diverged_files)],
            "outline": self._described(captured).outline if several else {},
            "size": captured.unlinked_size(self.root.links.sizes) if self.request.check_room else 0,
            **self._offer(captured),
            "present": self.root.files_of(self.request.name) if self._owns_another_root else [],
        }

    def _agree(self, mine: Result[Value], decide: Callable[[list[Value]], Other], phase: str = "") -> Other:
        return decide_together(self.channel, f"save_state({self.request.name!r}){phase}", mine, decide)

    def _plan(self, proposals: list[dict[str, Any]]) -> dict[str, Any] | None:
        """On the main rank: begin the save under names for all files; None if the ranks hold different state."""
        if proposals[MAIN]["outline"] and not outlines_match([proposal["outline"] for proposal in proposals]):
            return None
        together = self._plan_together(proposals)
        if together:
            sizes = dict.fromkeys(together["parts"], together["together"])
            self.captured = self.captured.then(lambda state: state.but(together=sizes))
        captured = self.captured.get()
        texts = ((rank_document(rank), proposal["document"]) for rank, proposal in enumerate(proposals))
        sent = [FilePlan.of(path, text.encode()) for path, text in texts if text is not None]
        self.documents = [captured.values_file, *sent]
        shared = [file.path for file in [*captured.common_files, *self.documents]]
        joined = self._plan_joined(proposals)
        shared += [joined_name(ranks) for ranks in self._groups] if joined else []
        paths = [*shared, *_paths_of_ranks(proposals, together)]
        present = {path for proposal in proposals for path in proposal["present"]}
        if not self.request.amends or self.root.committed_as(self.request.name) is None:  # most of it stays, else
            make_room(self.root, self.request.name, self.request.facts, sum(proposal["size"] for proposal in proposals))
        attempt = self.root.begin(self.request.name, paths, present, self.number)
        attempt = replace(attempt, amends=self.request.amends and bool(attempt.replaces))
        self.trace(f"agreed on {len(paths)} files" + (f" of {len(proposals)} ranks" if len(proposals) > 1 else ""))
        plan: dict[str, Any] = {"attempt": asdict(attempt), "unread": self.root.unread_newest, **joined, **together}
        if self.root.hosts.separate_roots:
            documents = {file.path: b"".join(file.pieces()).decode() for file in self.documents}
            plan |= {"paths": paths, "documents": documents}
        return plan

    @property
    def _may_write_together(self) -> bool:
        root = self.root
        is_apart = root.hosts.separate_roots or root.ranks.members is not None
        return root.ranks.world_size > TOGETHER and not is_apart and not isinstance(root.storage, Staging | Reserving)

    def _offer(self, captured: CapturedState) -> dict[str, Any]:
        """What this rank could write together with others of its host, and who these are."""
        if not self._may_write_together or captured.gathered:  # in a gather, all ranks wait for each other
            return {}
        from ckpt.save.handover import offer  # a job of few ranks needs none of it

        return offer(captured, self._tables, self.root.ranks.world_size)

    def _plan_together(self, proposals: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.root.hands_over or not all("near" in proposal for proposal in proposals):
            return {}
        from ckpt.save.handover import plan_together

        return plan_together(proposals)

    @contextmanager
    def _together(self, plan: Mapping[str, Any]) -> Iterator[list[FilePlan]]:
        """The files that this rank writes for others of its host, too; while they hand their shards over, or while it
        has handed over its own."""
        if "together" not in plan:
            yield []
            return
        from ckpt.save import handover

        captured, ranks = self.captured.get(), self.root.ranks
        tables = {key: self._tables[key] for key in plan["parts"]}
        handing = handover.Handover(
            self.channel,
            handover.group_of(ranks.rank, plan["together"], ranks.world_size),
            tables,
            {
                key: handover.WrittenShards.of(captured, key, table, self._snapshot_files)
                for key, table in tables.items()
            },
            plan["token"],
            f"save_state({self.request.name!r})",
        )
        with handing.files() as files:
            yield files

    @property
    def _groups(self) -> list[range]:
        """The ranks whose documents are in one file each."""
        size = self.root.ranks.world_size
        return [range(first, min(first + IN_A_FILE, size)) for first in range(0, size, IN_A_FILE)]

    def _plan_joined(self, proposals: list[dict[str, Any]]) -> dict[str, Any]:
        """How long the lines of joined documents are, and who writes each file: of its ranks the last that writes files
        in any case, or else the main rank, which has most to do. Empty if no documents are joined."""
        length = max(proposal["line"] for proposal in proposals)
        if not length:
            return {}
        writers = [next((rank for rank in reversed(each) if proposals[rank]["paths"]), MAIN) for each in self._groups]
        return {"line": length, "writers": writers}

    def _joined_files(self, plan: Mapping[str, Any]) -> list[FilePlan]:
        """The files of documents that this rank writes for others."""
        written = zip(self._groups, plan.get("writers", ()), strict=False)  # none, if no documents are joined
        mine = [ranks for ranks, writer in written if writer == self.root.ranks.rank]
        return [joined_file(ranks, left_documents(self.channel, ranks), plan["line"]) for ranks in mine]

    def _write(self, attempt: Attempt, plan: Mapping[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        with self._together(plan) as for_host:  # first: others of the host wait in it
            stored = self._write_files(attempt, plan, for_host)
        self.seconds["copied"] = self.copied_at - self.started
        self.seconds["written"] = time.monotonic() - began
        self.written = [entry.file for entry in stored]
        wrote, linked = ([entry.file.size for entry in stored if entry.linked is linked] for linked in (False, True))
        self.trace(f"wrote {_files(wrote)}" + (f", linked {_files(linked)}" if linked else ""))
        return {"files": [asdict(entry) for entry in stored], "seconds": self.seconds["written"]}

    def _write_files(self, attempt: Attempt, plan: Mapping[str, Any], for_host: list[FilePlan]) -> list[WrittenFile]:
        captured, unread = self.captured.get(), plan["unread"]
        if unread is not None and any(file.likely_unchanged for file in captured.files):
            self.root.links.follow_unread(self.root.storage, unread)
        if not captured.writes_common:
            captured.join_gathers()
        mine = [*self._own_documents, *self._joined_files(plan)]
        self.documents = [*self.documents, *mine]
        live = [*captured.files, *(self.documents if captured.writes_common else mine)]
        handed_over = {path for key in plan.get("parts", ()) for path in tensor_files_of(key, captured.rank)}
        files = [*(self._snapshot_files.get(file.path, file) for file in live), *captured.diverged_files]
        files = [file for file in files if file.path not in handed_over]
        return attempt.write(self.root.storage, [*for_host, *files], self.root.links.files, show=self._shows)

    def _shows(self) -> bool:
        """Whether a progress bar is drawn: not beside training, which may have bars of its own."""
        return self.root.ranks.rank == MAIN and (self.attended or self.is_awaited())

    def _blocked_of(self, total: float) -> float:
        return total if self.attended or self.blocked is None else self.blocked

    def _commit(self, attempt: Attempt, reports: list[dict[str, Any]]) -> dict[str, Any]:
        stored = merge_reports([report["files"] for report in reports])
        older = self.root.committed_as(attempt.name) if attempt.amends else None
        if older is not None and _has_all_of(older, stored, self.request.facts):
            return {"id": older.id, "is_saved": False}
        seconds = [report["seconds"] for report in reports]
        self.slowest = name_straggler(self.request.name, seconds, self.root.ranks.members)
        self.linked = sum(entry.file.size for entry in stored if entry.linked)
        number, longest = self.slowest
        last = f" by rank {number}, the slowest, in {longest:.2f} s" if len(seconds) > 1 else ""
        self.trace(f"all files are written{last}; committing")
        total = time.monotonic() - self.started
        facts = {
            **self.request.facts,
            "layout": "sharded" if self.captured.get().sharded else "full",
            "seconds": {"blocked": self._blocked_of(total), **self.seconds, "total": total},
        }
        manifest = self.root.commit(attempt, stored, facts)
        text = manifest.to_bytes().decode() if self.root.hosts.separate_roots else ""
        return {"id": manifest.id, "is_saved": True, "manifest": text}


def _paths_of_ranks(proposals: list[dict[str, Any]], together: Mapping[str, Any]) -> list[str]:
    """The paths of the files that ranks write, each its own or one of them for all of its host."""
    paths = [path for proposal in proposals for path in proposal["paths"]]
    size, there = together.get("together", 1), {*paths}
    for key in together.get("parts", ()):
        own = {path: rank for rank in range(len(proposals)) for path in tensor_files_of(key, rank) if path in there}
        paths = [path for path in paths if path not in own]
        paths += dict.fromkeys(spread_file(key, rank - rank % size) for rank in own.values())
    return paths


def _has_all_of(older: Manifest, stored: list[WrittenFile], facts: Mapping[str, Any]) -> bool:
    """Whether every file stayed where it was: one with the same bytes that was written again replaces a damaged one."""
    kept = {file.name: (file.path, file.blocks) for file in older.files}
    same = kept == {each.file.name: (each.file.path, each.file.blocks) for each in stored}
    return same and (older.progress, older.metrics) == (facts["progress"], facts["metrics"])


def _files(sizes: list[int]) -> str:
    return f"{len(sizes)} files ({format_size(sum(sizes))})"


def _settled(captured: CapturedState) -> CapturedState:
    """Wait until devices have done all their work: live tensors are read now, and other streams may be writing them."""
    for device in captured.devices:
        torch.accelerator.synchronize(device)
    return captured


def _described(key: str, differs: Mapping[str, Any]) -> str:
    names, ranks = list(differs["tensors"]), {*chain(differs["values"], *differs["tensors"].values())}
    few = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])]) or "values"
    return f"{key} ({few} on {format_ranks(sorted(ranks))})"
