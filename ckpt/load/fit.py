"""Whether a checkpoint fits the live objects: every difference, in one error, before anything is changed.

The ranks of a pipeline have different layers, and each loads its own: what a rank lacks, another one may have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import MismatchError
from ckpt.formats.native import documents
from ckpt.formats.native.manifest import digest
from ckpt.load.reader import CheckpointReader
from ckpt.ranks.consensus import Result, decide_together, first_of_each
from ckpt.ranks.group import Ranks
from ckpt.shown import Lines
from ckpt.state.model import ModelPart
from ckpt.state.parts import TIED_HERE, WHOLE_PART, Part, naming_part


@dataclass(frozen=True)
class Elsewhere:
    """What only other ranks have: by part the names of tensors or parameters, and the keys of parts."""

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    parts: frozenset[str] = frozenset()


def find_elsewhere(ranks: Ranks, call: str, parts: Mapping[str, Part]) -> Elsewhere:
    """Compare what the ranks have, by digests; only where these differ, by names. Every rank makes this call."""
    if ranks.world_size == 1:
        return Elsewhere()
    mine = Result.capture(lambda: _names(parts))
    digests = mine.then(lambda names: digest(documents.to_json(names)))
    speakers = decide_together(ranks, f"{call} (names)", digests, first_of_each)
    if len(speakers) == 1:
        return Elsewhere()
    said = Result(mine.value if ranks.rank in speakers else {})
    everywhere = decide_together(ranks, f"{call} (all names)", said, _together)
    return Elsewhere(
        {key: frozenset(names).difference(mine.value.get(key, ())) for key, names in everywhere.items()},
        frozenset(everywhere) - mine.value.keys(),
    )


def _names(parts: Mapping[str, Part]) -> dict[str, list[str]]:
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
            what = ", ".join(taken[:_NAMED]) or "values"
            more = f" and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
            way_out = _EQUAL_BUFFERS if isinstance(part, ModelPart) else "or register it with per_rank=True"
            found[key] = (
                f"each of the {saved_by} ranks that saved it had its own {what}{more}; every rank has the main rank's "
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
        where: f"{_OWN} {saved_by} ranks that saved it had its own {name}, and there are not as many here"
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
            advice += "a mean over what a rank has, as Adafactor keeps along the marked dimension, fits as many ranks."
        if any(why.endswith(TIED_HERE) for keys in misfits.values() for why in keys.values()):
            advice += " What is tied here can have one value only: untie it (Transformers: tie_word_embeddings=False), "
            advice += "or let strict=False take that of the first name."
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
