"""Reads a checkpoint: the documents and trees of its parts at once, their tensors all together.

Tensors are whole in files, in pieces over the files of many ranks, or one rank's own. What a rank has of its own is
checked before live objects are written to.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ckpt.data.repartition import Layout as EpochLayout
from ckpt.errors import DamagedError
from ckpt.formats.checks import damage_reported
from ckpt.formats.layout import Box, Layout, Members, over_all_ranks
from ckpt.formats.native.documents import (
    INLINE,
    STATE,
    Decoder,
    PlacedDocument,
    decode_inline,
    document_places,
    from_json,
    parts_in,
    rank_document,
)
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.native.shard_table import ShardedTensors, ShardTable
from ckpt.formats.native.tensor_file import TensorFile
from ckpt.formats.sharded_tensors import is_sharded, layout_of, local_tensor
from ckpt.formats.tensors import Transfer, same_bytes
from ckpt.load.verified_read import read, read_verified, verify
from ckpt.ranks.consensus import MAIN
from ckpt.root.catalog import FROZEN, main_file, own_key, spread_file, whole_file
from ckpt.root.verify import VerifiedFile
from ckpt.state import rng
from ckpt.state.parts import LEFT, Place, SavedTensor
from ckpt.state.registry import are_plain
from ckpt.storage import Storage
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_list, is_mapping, is_text, joined
from ckpt.util.console import progress_bar

if TYPE_CHECKING:
    from ckpt.load.broadcast import Broadcasts


class PartTensors(Protocol):
    """The saved tensors of a part: dtype and shape at once, the data when all transfers are read.

    `ties`: names of tensors that were one with another when they were saved, each with the other's name.
    """

    @property
    def ties(self) -> Mapping[str, str]: ...

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def tensor(self, name: str) -> torch.Tensor: ...

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None: ...


@dataclass(frozen=True)
class WholeTensors:
    """Tensors that are whole in files. `where` names them in errors."""

    files: list[TensorFile]
    where: str

    @property
    def ties(self) -> Mapping[str, str]:
        return {name: of for file in self.files for name, of in file.ties.items()}

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._file(name).about(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._file(name).tensor(name)

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self._file(name).fill(name, target, box)

    def _file(self, name: str) -> TensorFile:
        for file in self.files:
            if name in file:
                return file
        raise DamagedError(f"no file in {self.where} has the tensor {name!r}.")


@dataclass
class OwnTensors:
    """The tensors of a part as one rank had them: from its own files, and the others from the common ones."""

    plain: frozenset[str]
    files: list[TensorFile]
    pieces: ShardedTensors
    common: Callable[[], PartTensors]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        entry: Mapping[str, Any],
        manifest: Manifest,
        rank: int,
        own_files: Callable[[int], list[TensorFile]],
        piece_files: Callable[[int], list[TensorFile]],
        common: Callable[[], PartTensors],
    ) -> OwnTensors:
        """`own_files` and `piece_files` open the files of a rank; `common` gives the tensors of all ranks."""
        table = ShardTable.from_json(entry["spread"], manifest) if "spread" in entry else ShardTable({})
        pieces = ShardedTensors(table, lambda owner: [*own_files(owner), *piece_files(owner)], rank)
        plain = frozenset(entry.get("plain", ()))
        return cls(plain, own_files(rank) if plain else [], pieces, common, table.aliases)

    @property
    def ties(self) -> Mapping[str, str]:
        own = {name: of for file in self.files for name, of in file.ties.items()} | dict(self.aliases)
        common = {name: of for name, of in self.common().ties.items() if not self.plain & {name, of}}
        return common | own

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._holder(name).about(self._name(name))

    def tensor(self, name: str) -> torch.Tensor:
        return self._holder(name).tensor(self._name(name))

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self._holder(name).fill(self._name(name), target, box)

    def _name(self, name: str) -> str:
        return name if name in self.plain else self.aliases.get(name, name)

    def _holder(self, name: str) -> PartTensors:
        name = self._name(name)
        if name in self.plain:
            return next((file for file in self.files if name in file), None) or self.common()
        return self.pieces if name in self.pieces.table.tensors else self.common()


def _is_start(value: Any) -> bool:
    return value == {} or rng.is_state(value)


def _is_layout(value: Any) -> bool:
    has_numbers = is_mapping(lambda number: number is None or is_count(number))(value)
    known = {known.name for known in fields(EpochLayout)}
    return has_numbers and value.keys() <= known and 0 not in [value[name] for name in value if name != "replica"]


_COUNT = Rule(is_count, "a number, 0 or more", required=False)
_SIZE = Rule(lambda value: value is None or is_count(value), "a number or null", required=False)
_FLAG = Rule(lambda value: isinstance(value, bool), "true or false", required=False)
_TEXT = Rule(is_text, "text", required=False)
_START = Rule(_is_start, "the states of random generators", required=False)
_LIST = Rule(is_list(lambda value: True), "a list", required=False)

POSITION = {
    **dict.fromkeys(("batches", "samples", "start", "ahead", "before", "skipped"), _COUNT),
    **dict.fromkeys(("dataset_size", "sampler_size"), _SIZE),
    **dict.fromkeys(("worn", "done", "exhausted", "trained", "split"), _FLAG),
    **dict.fromkeys(("digest", "indices"), _TEXT),
    **dict.fromkeys(("rng", "rng_ahead"), _START),
    **dict.fromkeys(("generators", "generators_now", "samplers"), _LIST),
    "world_size": Rule(lambda value: is_count(value, 1), "a number, 1 or more", required=False),
    "layout": Rule(_is_layout, "the layout of an epoch", required=False),
    "contents": Rule(is_mapping(is_text), "digests", required=False),
}


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 53)


_REMARKS = Rule(is_mapping(is_text), "reasons by name", required=False)
_STATE = {
    "rng": Rule(rng.is_state, "the states of random generators"),
    "generators": Rule(_is_dict, "a mapping"),
    "loaders": Rule(is_mapping(_is_dict), "positions by loader"),
    "loop": Rule(_is_dict, "a mapping", required=False),
    "source": Rule(_is_dict, "a mapping", required=False),
    "lacking": _REMARKS,
    "values": Rule(are_plain, "plain values by name", required=False),
}
_LOOP = {
    "remarks": _REMARKS,
    "steps_per_epoch": Rule(_is_number_or_none, "a number or null", required=False),
    **dict.fromkeys(("plain_epochs", "per_step", "ahead"), Rule(is_count, "a number, 0 or more", required=False)),
}
_ACCELERATOR = {
    "step": Rule(is_count, "a number, 0 or more"),
    "sync_gradients": Rule(lambda value: isinstance(value, bool), "true or false"),
    "saves": Rule(is_count, "a number, 0 or more"),
    "loaders": Rule(is_mapping(_is_dict), "counters by loader"),
}
_COUNTERS = {
    "iteration": Rule(is_count, "a number, 0 or more"),
    "seeds": Rule(is_list(_is_number_or_none), "a list of seeds"),
    "generators": Rule(is_list(lambda value: True), "a list"),
}


def check_rank_state(state: Any, where: str) -> dict[str, Any]:
    """Return a rank's own state if every field is what it must be; the error names all that are not."""
    if state == {}:  # Lightning's checkpoints keep that elsewhere
        return {}
    problems = broken_rules(state, _rules(state)) or _inner_problems(state)
    if problems:
        raise DamagedError(f"{where} is damaged: {joined(problems)}.")
    checked: dict[str, Any] = state
    return checked


def _rules(state: Any) -> dict[str, Rule]:
    """What must be there. A tool that keeps no generators left them out of what it saved, and the state says so."""
    lacking = state.get("lacking") if isinstance(state, dict) else None
    left_out = isinstance(lacking, dict) and "rng" in lacking and "rng" not in state
    return {key: rule for key, rule in _STATE.items() if key != "rng"} if left_out else _STATE


def _inner_problems(state: dict[str, Any]) -> list[str]:
    problems = broken_rules(state.get("loop", {}), _LOOP, "loop")
    for key, position in state["loaders"].items():
        problems += broken_rules(position, POSITION, key)
    source = state.get("source")
    if source:  # empty without an accelerator
        problems += broken_rules(source, _ACCELERATOR, "source")
        loaders = source["loaders"] if not problems else {}
        problems += [line for key, counters in loaders.items() for line in broken_rules(counters, _COUNTERS, key)]
    return problems


_SLAB = 256 << 20  # bytes of each of two tensors that are compared at a time


class CheckpointReader:
    """A checkpoint as one rank reads it.

    `parts`, `own` and `state` are its documents: the parts of all ranks, the parts of this rank alone, and this rank's
    other state. `ask` registers the tensors of a part; `read_new` and `read_live` read all that were asked for.
    """

    def __init__(self, storage: Storage, manifest: Manifest, rank: int) -> None:
        self._storage = storage
        self.manifest = manifest
        self.rank = rank
        self.members: Members = None  # the numbers in the job of the ranks that load, if they are not all
        self._records = {file.name: file for file in manifest.files}
        self.broadcasts: Broadcasts | None = None  # what ranks of this host read for each other
        self._asked: list[Any] = []  # transfers into new memory
        self._live: list[Any] = []  # transfers into memory that is in use
        self._tensors_of: dict[str, PartTensors] = {}
        self._tables: dict[str, ShardTable] = {}
        self._trees: dict[str, tuple[Any, dict[str, SavedTensor]]] = {}
        self.shares: dict[str, Callable[[Any], Any]] = {}  # by part: reduces its state to what this rank has of it
        self.per_rank = False  # as many ranks load it as saved it: each restores its own state
        self.parts: dict[str, Any] = {}
        self.own: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self._read_documents()

    def _read_documents(self) -> None:
        self.parts = parts_in(self._document(STATE), "parts", self._where(STATE))
        # a rank that was not there when it was saved reads the main rank's document
        was_there = self.rank < self.manifest.world_size
        name = rank_document(self.rank if was_there else 0)
        document = self._document(name)
        self.own = parts_in(document, "own", self._where(name)) if was_there else {}
        self.state = self._decoded_state(document, name)

    def read_own(self, keys: Collection[str], world_size: int) -> None:
        """Add to `own` what other ranks saved for themselves alone under these keys."""
        for rank in range(world_size):
            name = rank_document(rank)
            found = parts_in(self._document(name), "own", self._where(name))
            self.own.update({key: part for key, part in found.items() if key in keys})

    def rank_state(self, rank: int) -> dict[str, Any]:
        """Another rank's own state."""
        name = rank_document(rank)
        return self._decoded_state(self._document(name), name)

    def _decoded_state(self, document: Any, name: str) -> dict[str, Any]:
        where = self._where(name)
        with damage_reported(where, INLINE):
            state = {key: decode_inline(value, where) for key, value in document["state"].items()}
        return check_rank_state(state, where)

    def _where(self, name: str) -> str:
        return f"{self.manifest.name}/{name}"

    def has(self, key: str) -> bool:
        """Whether the checkpoint has such a part for this rank."""
        own = self._own(key)
        return "absent" not in own if own else key in self.parts or key in self.own

    def lacks(self, key: str) -> bool:
        """Whether this rank had no such part, though the main rank had it."""
        return "absent" in self._own(key)

    def differs(self, key: str) -> dict[str, Any]:
        """What differed between ranks in a part; empty where each rank restores its own."""
        found: dict[str, Any] = {} if self.per_rank else self.parts.get(key, {}).get("differs", {})
        return found

    def _own(self, key: str) -> dict[str, Any]:
        """A part as this rank alone had it; empty if it had the same as all ranks."""
        found: dict[str, Any] = self.own.get(own_key(key, self.rank), {}) if self.per_rank else {}
        return found

    def kind(self, key: str) -> str:
        """The class of the object whose state a part is."""
        kind: str = (self._own(key) or self._part(key))["class"]
        return kind

    def tree(self, key: str) -> Any:
        """A part's state, with `SavedTensor`s where tensors are."""
        return self._tree(key)[0]

    def _tree(self, key: str) -> tuple[Any, dict[str, SavedTensor]]:
        """A part's state, and the tensors in it by their names."""
        if key not in self._trees:
            tensors = self._tensors(key)
            found: dict[str, SavedTensor] = {}

            def find(name: str) -> SavedTensor:
                found[name] = SavedTensor(name, *tensors.about(name), partial(self._equal, tensors, name))
                return found[name]

            def unsharded(saved: SavedTensor) -> SavedTensor:
                found[saved.name] = replace(saved, unsharded=True)
                return found[saved.name]

            self._trees[key] = self._decoded(key, find, unsharded), found
        return self._trees[key]

    def ask(self, key: str, place: Place | None = None, *, live: bool = False) -> Callable[[], Any]:
        """Ask for the tensors of a part. The returned function gives its state, once they have been read.

        `place` says which tensor each is read into. With `live`, that memory is in use: see `verify_live`.
        """
        tensors = self._tensors(key)
        before = len(self._asked)
        tensor_by_name: dict[str, Any] = {}
        for name, saved in self._tree(key)[1].items():
            target = place(saved) if place else None
            tensor_by_name[name] = saved if target is LEFT else self._filled(tensors, saved, target)
        if live:
            self._live += self._asked[before:]
            del self._asked[before:]
        return lambda: self._decoded(key, tensor_by_name.__getitem__)

    def ties(self, key: str) -> Mapping[str, str]:
        """Tensors of a part that were one with another when it was saved, each with the other's name."""
        return self._tensors(key).ties if self.has(key) and self.has_tensors(key) else {}

    def _equal(self, tensors: PartTensors, name: str, other: SavedTensor, place: Any) -> bool:
        """Whether what `place` holds of two saved tensors is the same, bit for bit. Tied ones are not read."""
        if tensors.about(name) != (other.dtype, other.shape):
            return False
        if tensors.ties.get(name, name) == tensors.ties.get(other.name, other.name):
            return True
        box = self._box(place, other.shape)
        if box is None or box.is_empty:
            return True
        (start, *_), (rows, *rest) = box.offsets or (0,), box.sizes or (1,)
        step = max(1, _SLAB // max(1, math.prod(rest) * other.dtype.itemsize))
        slabs = (
            Box((start + first, *box.offsets[1:]), (min(step, rows - first), *rest)) if box.sizes else box
            for first in range(0, rows, step)
        )
        return all(same_bytes(*self._read_both(tensors, (name, other.name), other.dtype, slab)) for slab in slabs)

    def _read_both(
        self, tensors: PartTensors, names: tuple[str, str], dtype: torch.dtype, box: Box
    ) -> list[torch.Tensor]:
        before, targets = len(self._asked), [torch.empty(box.sizes, dtype=dtype) for _ in names]
        for name, target in zip(names, targets, strict=True):
            tensors.fill(name, target, box)
        wanted = self._asked[before:]
        del self._asked[before:]
        self._read([wanted], read_verified)
        return targets

    def _box(self, place: Any, shape: tuple[int, ...]) -> Box | None:
        """What of a tensor of this shape a place holds; None if it is sharded over other ranks."""
        if not is_sharded(place):
            return Box((0,) * len(shape), shape)
        layout = layout_of(place, self.members)
        return layout.box(shape, self.rank) if layout.holds(self.rank) else None

    def _filled(self, tensors: PartTensors, saved: SavedTensor, target: Any) -> Any:
        """The target, or new memory, that a tensor will be read into; of a sharded target, this rank's piece."""
        if target is None:
            return tensors.tensor(saved.name)
        box = self._box(target, saved.shape)
        local = local_tensor(target)
        if box is not None and not box.is_empty:
            tensors.fill(saved.name, local.detach() if local.requires_grad else local, box)
        return target

    @property
    def wanted(self) -> tuple[list[Transfer], list[Transfer]]:
        """The transfers that were asked for, in the order of reading: into new memory, and into memory in use."""
        return self._asked, self._live

    def read_all(self) -> None:
        """Read all transfers, into new memory and then into memory in use, verifying them on the way."""
        self._read([self._asked, self._live], read_verified)
        self._asked, self._live = [], []

    def read_new(self) -> None:
        """Read the transfers into new memory, verifying them on the way."""
        self._read([self._asked], read_verified)
        self._asked = []

    def verify_live(self) -> None:
        """Verify the transfers into memory that is in use, without writing to it."""
        shared = self.broadcasts
        mine = [transfer for transfer in self._live if shared is None or shared.reads_here(transfer)]
        with self._bar("verifying", mine) as advance:
            verify(mine, self.manifest.name, advance)

    def read_live(self) -> None:
        """Read the transfers into memory that is in use, which `verify_live` has verified.

        Of what is signed they are verified again: whoever can write to the root may have altered it in between.
        """
        self._read([self._live], read_verified if self.manifest.is_authentic else read)
        self._live = []

    def _read(self, batches: list[list[Transfer]], how: Callable[..., None]) -> None:
        """Read transfers, one batch after the other. If one fails here, other ranks learn of it in the phase."""
        name, shared = self.manifest.name, self.broadcasts
        with self._bar("loading", [*chain(*batches)]) as advance:
            split = [(batch, list[Transfer]()) if shared is None else shared.split(batch) for batch in batches]
            with nullcontext() if shared is None else shared.phase():
                for number, (alone, common) in enumerate(split, 1):
                    if common:
                        how(common, name, advance, threads=1)
                    if number < len(split):
                        how(alone, name, advance)
            how(split[-1][0], name, advance)  # last: no other rank waits for one that fails here

    def _bar(self, verb: str, transfers: list[Transfer]) -> AbstractContextManager[Callable[[float], None]]:
        size = sum(transfer.size for transfer in transfers)
        return progress_bar(f"{verb} {self.manifest.name}", size, in_bytes=True, show=self.rank == MAIN)

    def spread(self, key: str) -> bool:
        """Whether a part was saved in pieces."""
        return "spread" in self._part(key)

    def has_tensors(self, key: str) -> bool:
        """Whether a part has any tensors: an optimizer that has not stepped has none."""
        part = self._part(key)
        return bool(self._table(key).tensors) if "spread" in part else whole_file(key) in self._beside

    def layouts(self, key: str) -> frozenset[Layout]:
        """The layouts in which a part's tensors were sharded; none if it was saved whole."""
        if not self.spread(key):
            return frozenset()
        layouts = {spec.layout for spec in self._table(key).tensors.values() if not spec.layout.is_replicated}
        if not self._part(key).get("united"):
            return frozenset(layouts)
        ranks = tuple(range(self.manifest.world_size))  # live layouts are over all ranks, too
        return frozenset(over_all_ranks(layout, ranks) for layout in layouts)

    def _table(self, key: str) -> ShardTable:
        if key not in self._tables:
            self._tables[key] = ShardTable.from_json(self._part(key)["spread"], self.manifest)
        return self._tables[key]

    def _decoded(
        self, key: str, find: Callable[[str], Any], unsharded: Callable[[Any], Any] = lambda tensor: tensor
    ) -> Any:
        state = (self._own(key) or self._part(key))["state"]
        with damage_reported(self._where(key), "state document"):
            share = self.shares[key](state) if key in self.shares else state
        return Decoder(find, self._where(key), unsharded).decode(share)

    def _part(self, key: str) -> Any:
        """A part as all ranks had it, or the main rank; what no other rank had, as this rank had it."""
        return self.own[key] if key in self.own else self.parts.get(key) or self._own(key)

    def _tensors(self, key: str) -> PartTensors:
        if key not in self._tensors_of:
            self._tensors_of[key] = self._open(key)
        return self._tensors_of[key]

    def _open(self, key: str) -> PartTensors:
        own = self._own(key)
        if own:
            return OwnTensors.of(
                own,
                self.manifest,
                self.rank,
                lambda rank: self._files(whole_file, own_key(key, rank)),
                lambda rank: self._files(spread_file, key, rank),
                functools.cache(lambda: self._open_common(key)),
            )
        return self._open_common(key)

    def _open_common(self, key: str) -> PartTensors:
        if self.spread(key):
            files_of = partial(self._files_of_rank, key)
            return ShardedTensors(self._table(key), files_of, self.rank, lambda rank: self._is_here(key, rank))
        return WholeTensors(self._files(whole_file, key), f"{self.manifest.name}: {key}")

    def _files_of_rank(self, key: str, rank: int) -> list[TensorFile]:
        """The files with a rank's shards of a part. Of a united part they may also be where its own tensors are."""
        shards = self._files(spread_file, key, rank, shared=self._table(key).together > 1)
        if not self._part(key).get("united"):
            return shards
        whole = self._files(whole_file, key) if rank == MAIN else []
        return [*shards, *self._files(whole_file, own_key(key, rank)), *whole]

    def _files(self, name: Callable[..., str], *about: Any, shared: bool = False) -> list[TensorFile]:
        """The file of a name, and those beside it: with frozen tensors, or the items of lists. `shared`: other ranks of
        this host read it, too."""
        main = name(*about)
        return [self._tensor_file(file, shared=shared and file == main) for file in self._beside.get(main, ())]

    @cached_property
    def _beside(self) -> Mapping[str, list[str]]:
        """The names of tensor files, by the main file that each stands beside."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in filter(lambda name: name.endswith(SUFFIX), self._records):
            found[main_file(name)].append(name)
        return found

    def _is_here(self, key: str, rank: int) -> bool:
        """Whether this host has the files that a rank has written of a part: it may have its own ranks' files alone."""
        if not self.manifest.hosts:
            return True
        found = (self._records.get(spread_file(key, rank, aside=aside)) for aside in ("", FROZEN))
        records = [record for record in found if record is not None]
        return all(self._sizes.get(f"{self.manifest.name}/{record.path}") == record.size for record in records)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {entry.key: entry.size for entry in self._storage.list(self.manifest.name)}

    def _tensor_file(self, name: str, *, shared: bool = False) -> TensorFile:
        file = replace(self._file(name), shared=shared)
        return TensorFile.open(file, file.stored.key, file.record.size, self._asked_for)

    def _file(self, name: str) -> VerifiedFile:
        record = self._records[name]
        return VerifiedFile.of(self._storage, self.manifest.name, record, sha256=self.manifest.is_authentic)

    def _asked_for(self, transfer: Transfer) -> None:
        self._asked.append(transfer)

    @cached_property
    def _documents(self) -> dict[str, PlacedDocument]:
        return document_places(file for file in self.manifest.files if not file.name.endswith(SUFFIX))

    def _document(self, name: str) -> Any:
        if name not in self._documents:
            raise DamagedError(f"{self.manifest.name} is damaged: its manifest does not list {name}.")
        record, start, stop = self._documents[name]
        file = self._file(record.name)
        return from_json(file.read(start, stop), file.stored.key)
