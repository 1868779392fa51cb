"""From a checkpoint to live objects: check on every rank that all of it fits, read it, then set the state.

Every difference is in one error, before anything is changed. The ranks of a pipeline have different layers, and each
loads its own: what a rank lacks, another one may have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ckpt.errors import MismatchError
from ckpt.formats.layout import Layout
from ckpt.formats.native import documents
from ckpt.formats.native.manifest import Manifest, digest
from ckpt.formats.registry import ACCELERATE
from ckpt.load.reader import CheckpointReader
from ckpt.load.select import Candidate, Rider
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.ranks.store_and_heartbeats import format_ranks
from ckpt.root.catalog import own_key
from ckpt.shown import Lines, few
from ckpt.state import rng
from ckpt.state.division import under_all_names
from ckpt.state.model import ModelPart, any_on_meta
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import HOOKS, TIED_HERE, WHOLE_PART, GradientsPart, Notes, OwnPart, Part, Place, naming_part
from ckpt.state.registry import StateRegistry
from ckpt.state.unwrap import walked_once
from ckpt.storage import Storage


@dataclass(frozen=True)
class Elsewhere:
    """What only other ranks have: by part the names of tensors or parameters, and the keys of parts."""

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LiveNames:
    """The names that this rank has: of all ranks with the same digest, one tells them to the others."""

    names: Mapping[str, list[str]]
    digest: str

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> LiveNames:
        names = _names(parts)
        return cls(names, digest(documents.to_json(names)))

    def said(self, ranks: Ranks) -> dict[str, Any]:
        return {"digest": self.digest, "names": self.names if ranks.speaks_for(self.digest) else {}}

    @staticmethod
    def join(said: list[dict[str, Any] | None]) -> dict[str, Any] | None:
        """On the main rank: the names of all ranks; none if all have the same. None if a rank does not know its own."""
        told = [one for one in said if one is not None]
        if len(told) < len(said):
            return None
        alike = len({one["digest"] for one in told}) == 1
        return {} if alike else _together([one["names"] for one in told])

    def elsewhere(self, everywhere: Mapping[str, Any]) -> Elsewhere:
        """What only other ranks have. `everywhere`: what `join` returned."""
        return Elsewhere(
            {key: frozenset(found).difference(self.names.get(key, ())) for key, found in everywhere.items()},
            frozenset(everywhere) - self.names.keys(),
        )


def _names(parts: Mapping[str, Part]) -> dict[str, list[str]]:
    with walked_once():
        found = {key: part.names() for key, part in parts.items()}
    return {key: sorted(names) for key, names in found.items() if names is not None}


def _together(said: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    found: dict[str, dict[str, Any]] = {}
    for names_of in said:
        for key, names in names_of.items():
            found.setdefault(key, {}).update(dict.fromkeys(names))
    return {key: list(names) for key, names in found.items()}


_NAMED = 3  # tensors in a note
_EQUAL_BUFFERS = "or have one for all (SyncBatchNorm, DistributedDataParallel with broadcast_buffers=True)"
_OWN = "each of the"

Misfits = Mapping[str, Mapping[str, str]]  # what does not fit and why, by part and key; WHOLE_PART for all of a part


def find_misfits(reader: CheckpointReader, parts: Mapping[str, Part], *, strict: bool) -> Misfits:
    """What does not fit. Reads no tensor and changes nothing; with `strict`, raises one error for all of it."""
    found = {key: misfits for key, part in parts.items() if (misfits := _misfits(reader, parts, key, part))}
    if strict:
        _require_fit(reader, found)
    return found


def from_main_rank(reader: CheckpointReader, parts: Mapping[str, Part]) -> dict[str, str]:
    """The parts whose state differed between the ranks that saved it, and is the main rank's now on all ranks."""
    found = {}
    for key, part in parts.items():
        differs = reader.differs(key)
        names = differs.get("tensors", {})
        bound = set(part.tied_to_ranks(names).values()) if names else set()
        taken = [name for name in names if name not in bound]
        if taken or differs.get("values"):
            saved_by = reader.manifest.world_size
            what = few(taken, _NAMED) or "values"
            way_out = _EQUAL_BUFFERS if isinstance(part, ModelPart) else "or register it with per_rank=True"
            found[key] = (
                f"each of the {saved_by} ranks that saved it had its own {what}; every rank has the main rank's "
                f"now. Resume with {saved_by} ranks to keep them apart, {way_out}"
            )
    return found


def _misfits(reader: CheckpointReader, parts: Mapping[str, Part], key: str, part: Part) -> dict[str, str]:
    if not reader.has(key):
        return {WHOLE_PART: f"missing: the checkpoint has no such part{_counts(reader, parts, key)}"}
    kinds = ("", part.kind, *part.other_kinds)  # not every format records the class
    if part.same_class and reader.kind(key) not in kinds:
        return {WHOLE_PART: f"a {reader.kind(key)} in the checkpoint, a {part.kind} here"}
    with naming_part(key):
        bound = _bound_to_ranks(reader, key, part)
        return bound if WHOLE_PART in bound else {**part.check(reader.tree(key)), **bound}


def _bound_to_ranks(reader: CheckpointReader, key: str, part: Part) -> dict[str, str]:
    """What each of the saving ranks had of its own, where another number of ranks loads it."""
    differs = reader.differs(key).get("tensors", {})
    saved_by = reader.manifest.world_size
    return {
        where: f"{_OWN} {saved_by} ranks that saved it had its own {name}, and this job has a different number"
        for where, name in part.tied_to_ranks(differs).items()
    }


def _counts(reader: CheckpointReader, parts: Mapping[str, Part], key: str) -> str:
    """Where checkpoint and live objects have different numbers of parts of that kind: both numbers."""
    kind = key.partition(".")[0]
    saved, live = (sum(other.partition(".")[0] == kind for other in keys) for keys in (reader.parts, parts))
    return f" (it has {saved} of kind {kind!r}, and there are {live} here)" if saved and saved != live else ""


def _require_fit(reader: CheckpointReader, misfits: Misfits) -> None:
    problems = [_where(part, key) + why for part, keys in misfits.items() for key, why in sorted(keys.items())]
    if problems:
        head = f"{reader.manifest.name} does not fit the live objects; nothing was changed:"
        advice = "Build the objects as they were when it was saved, or use strict=False to restore what fits."
        if any(why.startswith(_OWN) for keys in misfits.values() for why in keys.values()):
            advice += " Experts, and other shards, fit any number of ranks if ckpt.mark_sharded says so at the save; "
            advice += "a mean over one rank's shard, as Adafactor keeps along the marked dimension, fits only the same "
            advice += "number of ranks."
        if any(why.endswith(TIED_HERE) for keys in misfits.values() for why in keys.values()):
            advice += " Tied values can have only one value: untie them (Transformers: tie_word_embeddings=False), "
            advice += "or let strict=False take the value of the first name."
        advice = f"{_prefixes(misfits)}{advice}"
        raise MismatchError(Lines.listing(head, problems, advice), tuple(problems))


def _prefixes(misfits: Misfits) -> str:
    """What all names of a part have before them on one side only, as after a model was wrapped: `module.`, say."""
    for part, keys in misfits.items():
        here = sorted(key for key, why in keys.items() if why.startswith("missing"))
        there = sorted(key for key, why in keys.items() if why.startswith("unexpected"))
        if here and len(here) == len(there):
            for more, less, where in ((here, there, "here"), (there, here, "in the checkpoint")):
                prefix = more[0].removesuffix(less[0])
                if prefix and more == [f"{prefix}{key}" for key in less]:
                    return (
                        f"All {len(more)} names of {part} begin with {prefix!r} {where}, and are the same otherwise. "
                    )
    return ""


def _where(part: str, key: str) -> str:
    return f"{part}: " if key == WHOLE_PART else f"{part}: {key}: "


_log = logging.getLogger("ckpt")
_UNMANAGED = "in the checkpoint, but not managed here"


@dataclass(frozen=True, kw_only=True)
class RestoreRequest:
    """What to restore into, and how.

    `strict`: whether everything must fit. `verify_before_overwrite`: write nothing to live tensors before all of the
    checkpoint has been verified on every rank; for objects fresh from their constructors, tensors are read straight
    into them and verified on the way. `broadcast`: whether ranks of a host read for each other, or those of the
    "job"; if None, those of a host where the storage is not local. `on_first_write` is called with the checkpoint's
    name before the first write to a live tensor, `check` with its reader before any tensor is read.
    """

    ranks: Ranks
    registry: StateRegistry
    strict: bool
    verify_before_overwrite: bool
    broadcast: bool | str | None = None
    on_first_write: Callable[[str], None] = lambda name: None
    check: Callable[[CheckpointReader], None] = lambda reader: None


@dataclass
class Restoring:
    """One load on all ranks, as a `Selection` carries it out: `opening`, `check`, `prepare`, then `finish` of what that
    returns. Each takes one exchange, or rides on one.

    `before`: what comes first on each rank. `refresh` finds the objects to load into, `find_objects` those for a
    checkpoint, of which hooks of the user's may load some themselves.
    """

    request: RestoreRequest
    before: Callable[[], object] = lambda: None
    refresh: Callable[[], None] = lambda: None
    find_objects: Callable[[Candidate], None] = lambda candidate: None
    _names: LiveNames | None = None
    _told: LiveNames | None = None  # the names that this rank has told the others when they listed
    _checked: Restoration | None = None

    @property
    def opening(self) -> Rider:
        return Rider(self._open, LiveNames.join)

    @property
    def check(self) -> Rider:
        return Rider(self._check, _joint_check)

    def _open(self) -> dict[str, Any] | None:
        self.before()
        with suppress(Exception):  # it is raised if there is something to load: `find_objects` does the same then
            self.refresh()
            if not self._is_collective:
                self._names = LiveNames.of(self.request.registry.parts)
        self._told = self._names
        return None if self._names is None else self._names.said(self.request.ranks)

    def _check(self, candidate: Candidate) -> dict[str, Any]:
        """Check that the checkpoint fits, unless hooks of the user's have changed what there is to load into.

        A rank that finds the checkpoint damaged does not get here. So nothing collective may be called: the other
        ranks would wait for that rank. `prepare` does it once all ranks know that the checkpoint is complete.
        """
        if self._is_collective:
            return {"changed": True, "collective": True}
        self.find_objects(candidate)
        self._names = LiveNames.of(self.request.registry.parts)
        if candidate.told is None or self._told != self._names:
            return {"changed": True}
        return self._fitted(candidate, candidate.told)

    @property
    def _is_collective(self) -> bool:
        return any(part.is_collective for part in self.request.registry.parts.values())

    def _find(self, candidate: Candidate) -> None:
        self.find_objects(candidate)
        self._names = LiveNames.of(self.request.registry.parts)

    def _fitted(self, candidate: Candidate, everywhere: Mapping[str, Any]) -> dict[str, Any]:
        assert self._names is not None
        elsewhere = self._names.elsewhere(everywhere)
        with walked_once():
            self._checked = Restoration.checked(candidate, self._request_for(candidate), elsewhere)
        if not _uses_broadcast(candidate.storage, self.request):
            return {"reads": None}
        from ckpt.load.broadcast import described_reads

        once_per_job = self.request.broadcast == "job"
        return {"reads": described_reads(*self._checked.reader.wanted, once_per_job=once_per_job)}

    def _request_for(self, candidate: Candidate) -> RestoreRequest:
        """Objects that hold parts of a damaged checkpoint could not begin afresh."""
        return replace(self.request, verify_before_overwrite=True) if candidate.or_afresh else self.request

    def prepare(self, candidate: Candidate) -> Restoration:
        """Read the checkpoint, on all ranks together. What must last until `finish` goes to `candidate.held`.

        Without `verify_before_overwrite`, live tensors have been written when this returns or raises.
        """
        call, checked, ranks = f"load_state({candidate.manifest.name!r})", candidate.checked, self.request.ranks
        if "collective" in checked:
            run_on_all_ranks(ranks, f"{call} (objects)", lambda: self._find(candidate))
        if "changed" in checked:
            names = Result.capture(lambda: self._names.said(ranks) if self._names is not None else None)
            everywhere = decide_together(ranks, f"{call} (names)", names, LiveNames.join) or {}
            fitted = Result.capture(lambda: self._fitted(candidate, everywhere))
            checked = decide_together(ranks, call, fitted, _joint_check)
        assert self._checked is not None
        self._checked.read(call, checked["plan"], candidate.held)
        return self._checked


def _joint_check(said: list[dict[str, Any]]) -> dict[str, Any]:
    """On the main rank: whether to check again, with the names of all ranks; else who reads what for others."""
    changed: dict[str, Any] = {word: True for one in said for word in ("changed", "collective") if word in one}
    if changed:
        return changed
    if said[MAIN]["reads"] is None:
        return {"plan": None}
    from ckpt.load.broadcast import plan_reads

    return {"plan": plan_reads([one["reads"] for one in said])}


@dataclass
class Restoration:
    """A checkpoint that fits the live objects and is intact, on every rank; `finish` sets their state.

    `setters` has, for each part that fits, the function that sets its state once its tensors have been read.
    """

    reader: CheckpointReader
    request: RestoreRequest
    parts: Mapping[str, Part]
    notes: Notes
    setters: Mapping[str, Callable[[], None]]

    @classmethod
    def checked(cls, candidate: Candidate, request: RestoreRequest, elsewhere: Elsewhere) -> Restoration:
        """Open the checkpoint, check that it fits, and ask for the tensors of what does. Reads no tensor."""
        manifest, ranks, registry = candidate.manifest, request.ranks, request.registry
        notes = Notes()
        if manifest.origin == ACCELERATE.name:
            from ckpt.load.accelerate import UNKNOWN_PROGRESS

            notes.approximated["progress"] = UNKNOWN_PROGRESS
        reader = _opened(candidate, ranks.rank, registry.parts)
        reader.members = ranks.members
        reader.shares = _shares(reader, registry.parts, elsewhere)
        request.check(reader)
        notes.approximated.update(reader.state.get("lacking", {}))
        parts = {**registry.parts, **_own_parts(reader, request, notes)}
        reader.per_rank = manifest.world_size == ranks.world_size
        misfits = find_misfits(reader, parts, strict=request.strict)
        notes.approximated.update(from_main_rank(reader, parts))
        had_no_memory = any_on_meta(parts.values())
        setters = _ask(reader, parts, misfits, notes)
        for key in sorted(reader.parts.keys() - parts.keys() - elsewhere.parts):
            if not reader.lacks(key):
                notes.skipped[key] = _UNMANAGED
        if had_no_memory:  # it has some now, without values until they are read
            request.on_first_write(manifest.name)
        return cls(reader, request, parts, notes, setters)

    def read(self, call: str, plan: list[Any] | None, held: ExitStack) -> None:
        """Read the tensors that go into new memory; verify, or read, those that go into live memory.

        `plan`: what the ranks of each host read for each other.
        """
        ranks, reader = self.request.ranks, self.reader
        if plan is not None:
            from ckpt.load.broadcast import planned_broadcasts

            reader.broadcasts = held.enter_context(planned_broadcasts(ranks, plan))
        if not self.request.verify_before_overwrite:
            self.request.on_first_write(reader.manifest.name)
        run_on_all_ranks(ranks, call, self._read_or_verify)

    def _read_or_verify(self) -> None:
        if self.request.verify_before_overwrite:
            self.reader.read_new()
            self.reader.verify_live()
        else:
            self.reader.read_all()

    def finish(self, then: Callable[[], None] = lambda: None) -> list[str]:
        """Set the state of all parts, and return their keys. `then`: what else a rank does before all are done."""
        name = self.reader.manifest.name
        if self.request.verify_before_overwrite:
            self.request.on_first_write(name)
        ranks, call = self.request.ranks, f"load_state({name!r})"
        reads = self.reader.read_live if self.request.verify_before_overwrite else None
        if reads is not None and any(self.parts[key].is_collective for key in self.setters):
            run_on_all_ranks(ranks, call, reads)  # if a rank can't read, the others must not wait for it in a setter
            reads = None
        run_on_all_ranks(ranks, call, lambda: self._set_all(reads, then))
        return list(self.setters)

    def _set_all(self, reads: Callable[[], None] | None, then: Callable[[], None]) -> None:
        if reads is not None:
            reads()
        self._set()
        restored = {key: self.parts[key] for key in self.setters}
        self._name_other_rates(restored)
        if not any(isinstance(part, GradientsPart) for part in restored.values()):
            self.request.registry.leave_windows()
        self.notes.resharded.update(_resharded(self.reader, restored))
        then()

    def _name_other_rates(self, restored: Mapping[str, Part]) -> None:
        """A script that was given another learning rate has the checkpoint's now: say so, or it trains on unnoticed."""
        for key, part in restored.items():
            if isinstance(part, OptimizerPart):
                text = part.adopt_rates(self.reader.parts.get(key, {}).get("about", {}))
                if text is not None and self.request.ranks.rank == MAIN:
                    _log.warning("%s", text)

    def _set(self) -> None:
        for key, set_state in self.setters.items():
            with naming_part(key):
                set_state()


def _opened(candidate: Candidate, rank: int, live: Mapping[str, Part]) -> CheckpointReader:
    if not candidate.manifest.is_foreign:
        return CheckpointReader(candidate.storage, candidate.manifest, rank)
    from ckpt.load.accelerate import open_foreign

    return open_foreign(candidate.manifest, rank, live)


def rewinder(reader: CheckpointReader, ranks: Ranks, generators: Mapping[str, Any], notes: Notes) -> Callable[[], None]:
    """The function that restores this rank's generators, the registered ones too; on a new rank it seeds them."""
    saved_by, now, rank, state = reader.manifest.world_size, ranks.world_size, ranks.rank, reader.state.get("rng")
    if saved_by != now and state is not None:
        notes.approximated["rng"] = _changed_ranks(saved_by, now, "seeded")
    saved = reader.state["generators"]
    notes.skipped.update({key: "the checkpoint has no such generator" for key in generators if key not in saved})

    def rewind() -> None:
        if state is None:
            pass  # converted from what keeps none, as `lacking` says
        elif rank < saved_by:
            rng.restore(state)
        else:
            rng.derive(state, rank)
        for key, generator in generators.items():
            if key in saved:
                rng.restore_one(generator, saved[key])

    return rewind


def _uses_broadcast(storage: Storage, request: RestoreRequest) -> bool:
    if request.ranks.world_size == 1:
        return False
    is_local = getattr(storage, "is_local", True)
    return not is_local if request.broadcast is None else bool(request.broadcast)


def _changed_ranks(saved_by: int, now: int, new: str) -> str:
    """Which ranks are gone, or are there for the first time; `new` says what was done with these."""
    changed = [*range(min(saved_by, now), max(saved_by, now))]
    which = f"{format_ranks(changed)} {'is' if len(changed) == 1 else 'are'}"
    return f"saved by {saved_by} ranks, resumed by {now}: {which} {'gone' if now < saved_by else f'new and {new}'}"


def _own_parts(reader: CheckpointReader, request: RestoreRequest, notes: Notes) -> Mapping[str, OwnPart]:
    """The parts that each rank saves for itself alone. Those that the checkpoint has not for these ranks are noted."""
    manifest, ranks = reader.manifest, request.ranks
    own = request.registry.own_parts_to_load(ranks.rank, reader.own)
    diverged = {own_key(key, ranks.rank) for key in (*reader.parts, *request.registry.parts)}
    for key in sorted(reader.own.keys() - own.keys() - diverged):
        if key.startswith(f"{HOOKS}-") and _has_buckets_alone(reader.tree(key)):
            continue  # nobody misses them where gradients are summed in another way
        notes.skipped[f"{key.rpartition('-')[0]} (each rank's own)"] = _UNMANAGED
    why = _why_none_of_its_own(manifest, ranks)
    for key, hooks in request.registry.hooks(ranks.rank).items():
        if key not in own:
            hooks.missed(why or "the checkpoint has no state of theirs", notes, strict=request.strict)
    if why is None:
        return own
    was_there = ranks.rank < manifest.world_size and not manifest.origin
    kept: dict[str, OwnPart] = {}
    for key, part in own.items():
        if part.for_any_ranks and was_there:
            kept[key] = part
            change = _changed_ranks(manifest.world_size, ranks.world_size, "not restored")
            notes.approximated[key.rpartition("-")[0]] = change
        elif regrouped := _of_other_ranks(part, reader):
            kept |= regrouped
        else:
            part.missed(why, notes, strict=request.strict)
    return kept


def _has_buckets_alone(saved: Any) -> bool:
    from ckpt.state.ddp import has_hook_state

    return not has_hook_state(saved)


def _of_other_ranks(part: OwnPart, reader: CheckpointReader) -> Mapping[str, OwnPart]:
    """Parts that load what the ranks that saved had, where state can be divided anew: partitions of ZeRO."""
    manifest = reader.manifest
    if manifest.origin or manifest.hosts:
        return {}
    found = part.of_other_ranks(manifest.world_size)
    if found:
        reader.read_own(found, manifest.world_size)
    return found if found.keys() <= reader.own.keys() else {}


def _why_none_of_its_own(manifest: Manifest, ranks: Ranks) -> str | None:
    """Why a checkpoint has nothing that would be this rank's alone: other ranks saved it, or another tool."""
    if manifest.world_size != ranks.world_size:
        separate = " with separate roots" if manifest.hosts else ""
        return (
            f"saved by a different number of ranks ({manifest.world_size}, and there are {ranks.world_size} here)"
            f"{separate}"
        )
    return f"{manifest.origin} keeps none" if manifest.origin else None


def _shares(
    reader: CheckpointReader, parts: Mapping[str, Part], elsewhere: Elsewhere
) -> dict[str, Callable[[Any], Any]]:
    """By part, the function that turns its saved state into what this rank has of it: without what only other ranks
    have, and with the state of optimizers under all names that a tied parameter had."""

    def shared(part: Part, names: frozenset[str], state: Any) -> Any:
        ties = _ties(reader, parts, part) if isinstance(part, OptimizerPart) else {}
        return part.share(under_all_names(state, ties) if ties else state, names)

    return {
        key: partial(shared, part, elsewhere.names.get(key, frozenset()))
        for key, part in parts.items()
        if elsewhere.names.get(key) or isinstance(part, OptimizerPart)
    }


def _ties(reader: CheckpointReader, parts: Mapping[str, Part], part: OptimizerPart) -> dict[str, str]:
    """Of the parameters of an optimizer: which were tied when the checkpoint was saved, by the optimizer's names."""
    models = {id(other.model): key for key, other in parts.items() if isinstance(other, ModelPart)}
    prefixes = {f"{name}." if name else "": models.get(id(model)) for name, model in part.models.items()}
    ties = {
        f"{prefix}{name}": f"{prefix}{first}"
        for prefix, key in prefixes.items()
        if key is not None
        for name, first in reader.ties(key).items()
    }
    return ties if ties and part.names() is not None else {}  # FSDP 1 has names of its own


@torch.no_grad()  # a piece of a DTensor is then the piece itself
def _ask(
    reader: CheckpointReader, parts: Mapping[str, Part], misfits: Misfits, notes: Notes
) -> dict[str, Callable[[], None]]:
    """Ask for the tensors of what fits, and note the rest. Returns each part's setter, for when they have been read."""
    setters = {}
    for key, part in parts.items():
        unfit = misfits.get(key, {})
        if WHOLE_PART in unfit:
            notes.skipped[key] = unfit[WHOLE_PART]
        else:
            setters[key] = _ask_for_part(reader, key, part, unfit, notes)
    return setters


def _ask_for_part(
    reader: CheckpointReader, key: str, part: Part, unfit: Mapping[str, str], notes: Notes
) -> Callable[[], None]:
    def read(place: Place | None = None, *, live: bool = False) -> Callable[[], Any]:
        return reader.ask(key, place, live=live)

    with naming_part(key):
        return part.restore(reader.tree(key), read, unfit, notes)


def _resharded(reader: CheckpointReader, parts: Mapping[str, Part]) -> dict[str, str]:
    """The parts that are sharded in another way than when they were saved."""
    layouts = {
        key: (reader.layouts(key), part.layouts(reader.members))
        for key, part in parts.items()
        if reader.has_tensors(key)
    }
    return {
        key: f"{_layout_text(saved)} -> {_layout_text(live)}" for key, (saved, live) in layouts.items() if saved != live
    }


def _layout_text(layouts: frozenset[Layout]) -> str:
    """`4 ranks: S0`, `2x2 ranks: R,S0`, or `whole`."""
    texts = sorted(f"{'x'.join(map(str, layout.mesh))} ranks: {','.join(layout.placements)}" for layout in layouts)
    return "; ".join(dict.fromkeys(texts)) or "whole"
