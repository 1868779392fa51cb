"""From a checkpoint to live objects: check that all of it fits, on every rank, then take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import CkptError, MismatchError, StateError
from ckpt.formats.layout import Layout
from ckpt.formats.native.manifest import Manifest
from ckpt.load.accelerate_reader import open_any
from ckpt.load.accelerate_state import UNKNOWN_PROGRESS
from ckpt.load.broadcast import sharing
from ckpt.load.reader import CheckpointReader
from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.ranks.group import Ranks
from ckpt.state import rng
from ckpt.state.parts import WHOLE_PART, GradientsPart, Notes, Part, Place
from ckpt.state.registry import StateRegistry
from ckpt.storage import Storage

Unfit = Mapping[str, Mapping[str, str]]  # what does not fit and why, by part and key


@dataclass
class Restoration:
    """A checkpoint on its way into live objects.

    `prepare` checks that all of it fits, on every rank, and that all of it is intact. Where the live objects are
    `precious`, nothing is written to them before that is known. Where they are fresh from their constructors, tensors
    are read straight into them, and verified on the way: `touch` is called before the first.
    """

    opened: CheckpointReader
    ranks: Ranks
    parts: Mapping[str, Part]
    notes: Notes
    precious: bool
    touch: Callable[[], None]
    leave_windows: Callable[[], None]
    takers: dict[str, Callable[[], None]] = field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        storage: Storage,
        manifest: Manifest,
        ranks: Ranks,
        managed: StateRegistry,
        held: ExitStack,
        *,
        strict: bool,
        share: bool,
        precious: bool,
        touch: Callable[[], None],
    ) -> Restoration:
        """Everything that can fail, on all ranks together. What must last until `finish` is put into `held`."""
        call = f"load_state({manifest.name!r})"
        notes = Notes()
        if manifest.origin:
            notes.approximated["progress"] = UNKNOWN_PROGRESS
        why = _missed(manifest, ranks)
        parts = dict(managed.parts)

        def look() -> tuple[CheckpointReader, dict[str, Callable[[], None]]]:
            opened = open_any(storage, manifest, ranks.rank, managed.parts)
            notes.approximated.update(opened.state.get("lacking", {}))
            own = managed.own_parts_to_load(ranks.rank, opened.own)
            if why is not None:
                for part in own.values():
                    part.missed(why, notes, strict=strict)
            else:
                parts.update(own)
            opened.as_then = manifest.world_size == ranks.world_size
            unfit = _check(opened, parts, strict=strict)
            notes.approximated.update(_taken_from_main(opened, parts))
            return opened, _ask(opened, parts, unfit, notes)

        opened, takers = run_on_all_ranks(ranks, call, look)
        if share and ranks.world_size > 1:
            opened.sharing = held.enter_context(sharing(ranks, call, *opened.wanted))
        run_on_all_ranks(ranks, call, opened.read_new)
        if precious:
            run_on_all_ranks(ranks, call, opened.verify_live)
        else:
            touch()
            run_on_all_ranks(ranks, call, lambda: opened.read_live(verified=False))
        return cls(opened, ranks, parts, notes, precious, touch, managed.leave_windows, takers)

    def finish(self) -> list[str]:
        """Let all parts take their state, and return their keys."""
        call = f"load_state({self.opened.manifest.name!r})"
        if self.precious:
            self.touch()
            run_on_all_ranks(self.ranks, call, lambda: self.opened.read_live(verified=True))
        run_on_all_ranks(self.ranks, call, lambda: _take(self.takers))
        if not any(isinstance(self.parts[key], GradientsPart) for key in self.takers):
            self.leave_windows()
        self.notes.resharded.update(_resharded(self.opened, {key: self.parts[key] for key in self.takers}))
        return list(self.takers)


def _missed(manifest: Manifest, ranks: Ranks) -> str | None:
    """Why a checkpoint has nothing that would be this rank's alone: other ranks saved it, or another tool."""
    if manifest.world_size != ranks.world_size:
        return f"saved by another number of ranks ({manifest.world_size}, and there are {ranks.world_size} here)"
    return f"{manifest.origin} keeps none" if manifest.origin else None


def rewinder(opened: CheckpointReader, ranks: Ranks, generators: Mapping[str, Any], notes: Notes) -> Callable[[], None]:
    """What puts this rank's generators back as they were, the registered ones too; for a new rank, what seeds them."""
    then, now, rank, state = opened.manifest.world_size, ranks.world_size, ranks.rank, opened.state["rng"]
    if then != now:
        gone, new = f"ranks {now} to {then - 1} are gone", f"ranks {then} to {now - 1} are new and seeded"
        change = gone if now < then else new
        notes.approximated["rng"] = f"saved by {then} ranks, resumed by {now}: {change}"
    saved = opened.state["generators"]
    notes.skipped.update({key: "the checkpoint has no such generator" for key in generators if key not in saved})

    def rewind() -> None:
        if rank < then:
            rng.restore(state)
        else:
            rng.derive(state, rank)
        for key, generator in generators.items():
            if key in saved:
                rng.restore_one(generator, saved[key])

    return rewind


def _check(opened: CheckpointReader, parts: Mapping[str, Part], *, strict: bool) -> Unfit:
    """What does not fit. Reads no tensor and changes nothing; with `strict`, raises one error for all of it."""
    unfit: dict[str, dict[str, str]] = {}
    for key, part in parts.items():
        if not opened.has(key):
            unfit[key] = {WHOLE_PART: f"missing: the checkpoint has no such part{_numbers(opened, parts, key)}"}
        elif part.same_class and opened.kind(key) not in ("", part.kind):  # not every format tells the class
            unfit[key] = {WHOLE_PART: f"a {opened.kind(key)} in the checkpoint, a {part.kind} here"}
        elif problems := _explained(key, lambda: _misfits(opened, key, part)):  # noqa: B023
            unfit[key] = problems
    if strict:
        _require_fit(opened, unfit)
    return unfit


def _misfits(opened: CheckpointReader, key: str, part: Part) -> dict[str, str]:
    apart = _apart(opened, key, part)
    return apart if WHOLE_PART in apart else {**part.check(opened.tree(key)), **apart}


def _apart(opened: CheckpointReader, key: str, part: Part) -> dict[str, str]:
    """What each rank had of its own, so that other ranks have none."""
    differs = opened.differs(key).get("tensors", {})
    then = opened.manifest.world_size
    return {
        where: f"each of the {then} ranks that saved it had its own {name}, and there are not as many here"
        for where, name in part.tied_to_ranks(differs).items()
    }


def _taken_from_main(opened: CheckpointReader, parts: Mapping[str, Part]) -> dict[str, str]:
    """What differed between ranks, and is the main rank's now on all of them."""
    found = {}
    for key, part in parts.items():
        differs = opened.differs(key)
        names = differs.get("tensors", {})
        taken = len(names) - len(part.tied_to_ranks(names)) if names else 0
        if taken or differs.get("values"):
            then = opened.manifest.world_size
            found[key] = f"each of the {then} ranks that saved it had its own; all have the main rank's now"
    return found


def _numbers(opened: CheckpointReader, parts: Mapping[str, Part], key: str) -> str:
    """Where the checkpoint has another number of parts of that kind, if it has any: how many."""
    kind = key.partition(".")[0]
    then, now = (sum(one.partition(".")[0] == kind for one in keys) for keys in (opened.parts, parts))
    return f" (it has {then} of kind {kind!r}, and there are {now} here)" if then and then != now else ""


def _require_fit(opened: CheckpointReader, unfit: Unfit) -> None:
    problems = [_where(part, key) + why for part, keys in unfit.items() for key, why in sorted(keys.items())]
    if problems:
        lines = "\n  ".join(problems)
        raise MismatchError(
            f"{opened.manifest.name} does not fit the live objects; nothing was changed:\n  {lines}\n"
            "Build the objects as they were when it was saved, or use strict=False to restore what fits.",
            tuple(problems),
        )


def _where(part: str, key: str) -> str:
    return f"{part}: " if key == WHOLE_PART else f"{part}: {key}: "


@torch.no_grad()  # a piece of a DTensor is then the piece itself
def _ask(
    opened: CheckpointReader, parts: Mapping[str, Part], unfit: Unfit, notes: Notes
) -> dict[str, Callable[[], None]]:
    """Ask for what fits. Returns, for each part, what takes it when it has been read."""
    takers = {}
    for key, part in parts.items():
        misfits = unfit.get(key, {})
        if WHOLE_PART in misfits:
            notes.skipped[key] = misfits[WHOLE_PART]
        else:
            takers[key] = _ask_for(opened, key, part, misfits, notes)
    for key in sorted(key for key in opened.parts.keys() - parts.keys() if not opened.lacks(key)):
        notes.skipped[key] = "in the checkpoint, but not managed here"
    return takers


def _take(takers: Mapping[str, Callable[[], None]]) -> None:
    for key, take in takers.items():
        _explained(key, take)


def _resharded(opened: CheckpointReader, parts: Mapping[str, Part]) -> dict[str, str]:
    """The parts that are spread over ranks in another way than when they were saved."""
    both = {key: (opened.layouts(key), part.layouts()) for key, part in parts.items() if opened.has_tensors(key)}
    return {key: f"{_spelled(then)} -> {_spelled(now)}" for key, (then, now) in both.items() if then != now}


def _spelled(layouts: frozenset[Layout]) -> str:
    """`4 ranks: S0`, `2x2 ranks: R,S0`, or `whole`."""
    texts = sorted(f"{'x'.join(map(str, one.mesh))} ranks: {','.join(one.placements)}" for one in layouts)
    return "; ".join(dict.fromkeys(texts)) or "whole"


def _ask_for(
    opened: CheckpointReader, key: str, part: Part, unfit: Mapping[str, str], notes: Notes
) -> Callable[[], None]:
    def read(place: Place | None = None, *, live: bool = False) -> Callable[[], Any]:
        return opened.ask(key, place, live=live)

    take: Callable[[], None] = _explained(key, lambda: part.restore(opened.tree(key), read, unfit, notes))
    return take


def _explained(key: str, do: Callable[[], Any]) -> Any:
    """Objects of others raise what they like; the part that did it is named."""
    try:
        return do()
    except CkptError:
        raise
    except Exception as error:
        raise StateError(f"{key} did not take its state back: {type(error).__name__}: {error}") from error
