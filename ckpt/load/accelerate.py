"""Folders that Accelerate wrote, read like checkpoints: with a manifest, under the keys of a manager's parts.

Where loaders were, the `dl_state_dict.bin` of `use_stateful_dataloader=True` says: it becomes a position of ckpt's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from ckpt.data.loader_info import goes_by_index, keeper_of, only_counts, size_of
from ckpt.data.progress import Progress
from ckpt.data.tracked_loader import reads_per_batch
from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.foreign import accelerate
from ckpt.formats.layout import Box
from ckpt.formats.native.documents import Encoder, refuse
from ckpt.formats.native.manifest import Manifest, digest
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import ACCELERATE, claims
from ckpt.formats.tensors import copy_into, narrowed
from ckpt.load.reader import CheckpointReader, PartTensors, check_rank_state
from ckpt.ranks.consensus import Ranks
from ckpt.root.folder import ROOT_ITSELF, Folder
from ckpt.state import samplers
from ckpt.state.objects import KINDS
from ckpt.state.optimizer import by_name
from ckpt.state.parts import ENGINE, Notes
from ckpt.storage import Storage
from ckpt.util.checked_json import is_count

CUSTOM = "custom"  # objects of the user's own
UNKNOWN_PROGRESS = (
    "Accelerate does not save how many epochs, batches and steps were done: counting begins at 0. If they matter, set "
    "manager.progress before the loop"
)
NO_GENERATORS = "no random generators were saved, so this run's generators are left as they are"
_NUMBER = re.compile(r"(.*?)(\d+)\D*")


@dataclass(frozen=True)
class ForeignPart:
    """The state of a part: values with references to tensors, and the tensors, not read yet."""

    values: Any
    tensors: Mapping[str, PiecedTensor | torch.Tensor]

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it."""
        tensor = self.tensors[name]
        if isinstance(tensor, PiecedTensor):
            return tensor.read(box or tensor.box)
        return narrowed(tensor, box.ranges) if box else tensor


class AccelerateState:
    """The state in a folder of Accelerate.

    `live` are the keys of a manager's parts: the first model of the folder is its first model, and so on. Without them
    the keys are `model`, or `model.0`, `model.1` where there are several.
    """

    def __init__(self, folder: Folder, live: Iterable[str] = ()) -> None:
        self.saved = accelerate.AccelerateCheckpoint(folder)
        self.name = folder.name
        found = _keyed(self.saved.parts(), list(live))
        with _damage_named(folder.where, "an optimizer"):
            _name_parameters(found)
        problems: list[str] = []
        self.parts = {key: encoded_part(key, tree, problems) for key, tree in found.items()}
        refuse(problems)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's own state, as a manager saves it."""
        states = self.saved.random_states(rank)
        _, number = split_name(self.name)
        saves = 0 if number is None else 1 + number
        source = {"step": states.get("step", 0), "sync_gradients": True, "saves": saves, "loaders": {}}
        state = {"generators": {}, "loaders": {}, "source": source}
        if "random_state" not in states:
            return check_rank_state({**state, "lacking": {"rng": NO_GENERATORS}}, self.name)
        with _damage_named(self.name, "random generators"):
            rng = accelerate.rng_states(states)
        return check_rank_state({"rng": rng, **state}, self.name)


def kind_of(key: str) -> str:
    """`model` for `model.0`; `custom` for what was registered under a name of its own."""
    head = key.partition(".")[0]
    return head if head in (*KINDS, ENGINE) else CUSTOM


def _keyed(found: Mapping[str, Mapping[int, Any]], live: list[str]) -> dict[str, Any]:
    parts = {}
    for kind, trees in found.items():
        live_keys = dict(enumerate(key for key in live if kind_of(key) == kind))
        several = len(trees) > 1 or kind in (CUSTOM, "dataloader")
        for number, tree in trees.items():
            parts[live_keys.get(number, f"{kind}.{number}" if several else kind)] = tree
    return parts


def _name_parameters(parts: dict[str, Any]) -> None:
    """Key the state of optimizers by parameter name. Of several models under FSDP, each optimizer's gives a prefix."""
    models = [key for key in parts if kind_of(key) == "model"]
    optimizers = [key for key in parts if kind_of(key) == "optimizer"]
    for number, key in enumerate(optimizers):
        if not {"state", "param_groups"} <= parts[key].keys():
            continue  # not the state of an optimizer of torch
        prefix = f"{models[number].partition('.')[2]}." if 1 < len(models) > number else ""
        parts[key] = by_name(parts[key], prefix)


@contextmanager
def _damage_named(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"{where} is not the state of {what} ({type(error).__name__}: {error}). Load another save."
        ) from error


def encoded_part(key: str, tree: Any, problems: list[str]) -> ForeignPart:
    """The state of a part as a checkpoint has it. Values that no file can hold are added to the problems."""
    encoder = Encoder(prefix=key, problems=problems)
    return ForeignPart(encoder.encode(tree), encoder.tensors)


def split_name(name: str) -> tuple[str, int | None]:
    """A folder's name before its last number, and that number, if there is one: the highest is the newest."""
    match = _NUMBER.fullmatch(name)
    return (match.group(1), int(match.group(2))) if match else (name, None)


@dataclass(frozen=True, kw_only=True)
class ForeignManifest(Manifest):
    """Stands for the manifest of a folder that has none."""

    is_foreign: ClassVar[bool] = True
    folder: Folder


def foreign_manifest(storage: Storage, name: str) -> ForeignManifest:
    """What stands for the manifest of a folder that Accelerate wrote; the root itself has no name."""
    folder = Folder.of_checkpoint(storage, name)
    return ForeignManifest(
        name=folder.name,
        id=f"{ACCELERATE.name}:{folder.name}",
        run=digest(folder.where.encode()),
        sequence=0,
        created="",
        files=(),
        world_size=accelerate.AccelerateCheckpoint(folder).world_size,
        progress=Progress().to_json(),
        origin=ACCELERATE.name,
        folder=folder,
    )


def foreign_folder(manifest: Manifest) -> str:
    """The path or URL of what Accelerate wrote."""
    assert isinstance(manifest, ForeignManifest)
    return manifest.folder.where


def foreign_names(storage: Storage) -> list[str]:
    """The folders in the root that Accelerate wrote, the newest first; the name of the root itself is empty."""
    files: dict[str, list[str]] = defaultdict(list)
    for entry in storage.list():
        name, _, rest = entry.key.partition("/")
        files[ROOT_ITSELF].append(entry.key)
        files[name].append(rest)
    if ACCELERATE.name in claims(files[ROOT_ITSELF]):
        return [ROOT_ITSELF]
    found = sorted(name for name, inside in files.items() if ACCELERATE.name in claims(inside))
    if len({split_name(name)[0] for name in found}) > 1:
        raise ConfigError(
            f"{storage.url} has Accelerate saves ({', '.join(found)}), but their names don't show which is the newest. "
            f"Name the save to load: load_state({found[-1]!r})."
        )
    return sorted(found, key=lambda name: split_name(name)[1] or 0, reverse=True)


def open_foreign(manifest: Manifest, rank: int, live: Iterable[str]) -> CheckpointReader:
    """The reader of what Accelerate wrote. `live` are the keys of the parts to load it into."""
    assert isinstance(manifest, ForeignManifest)
    return _AccelerateReader(AccelerateState(manifest.folder, live), manifest, rank)


@dataclass(frozen=True)
class _DeferredRead:
    """A tensor to be read when all have been asked for."""

    size: int
    read: Callable[[], Any]


@dataclass(frozen=True)
class _ForeignTensors:
    """The tensors of a part, read from foreign files straight into their targets."""

    part: ForeignPart
    want: Callable[[_DeferredRead], None]
    ties: Mapping[str, str] = field(default_factory=dict)  # such folders do not say which are tied

    def about(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        return self.part.about(name)

    def tensor(self, name: str) -> torch.Tensor:
        dtype, shape = self.about(name)
        target = torch.empty(shape, dtype=dtype)
        self.fill(name, target, Box((0,) * len(shape), shape))
        return target

    def fill(self, name: str, target: torch.Tensor, box: Box) -> None:
        self.want(_DeferredRead(target.nbytes, lambda: copy_into(self.part.read(name, box), target.detach())))


class _AccelerateReader(CheckpointReader):
    """Reads a folder of Accelerate, which has no hashes to verify."""

    def __init__(self, foreign: AccelerateState, manifest: ForeignManifest, rank: int) -> None:
        self._foreign = foreign
        super().__init__(manifest.folder.storage, manifest, rank)

    def _read_documents(self) -> None:
        self.parts = {key: {"class": "", "state": part.values} for key, part in self._foreign.parts.items()}
        self.own = {}
        self.state = self.rank_state(self.rank if self.rank < self.manifest.world_size else 0)

    def rank_state(self, rank: int) -> dict[str, Any]:
        return self._foreign.rank_state(rank)

    def has_tensors(self, key: str) -> bool:
        return bool(self._foreign.parts[key].tensors)

    @property
    def wanted(self) -> tuple[list[Any], list[Any]]:
        """No transfers: ranks do not read for each other here."""
        return [], []

    def verify_live(self) -> None:
        """There are no hashes to compare with."""

    def _open(self, key: str) -> PartTensors:
        return _ForeignTensors(self._foreign.parts[key], self._asked.append)

    def _read(self, batches: list[list[Any]], how: Callable[..., None]) -> None:
        transfers = [*chain(*batches)]
        with self._bar("loading", transfers) as advance, torch.no_grad():
            for deferred in transfers:
                deferred.read()
                advance(deferred.size)


_IN_ORDER = (SequentialSampler, BatchSampler)
_UNSAID = "what {origin} saved does not say where every loader was"


def foreign_positions(
    reader: CheckpointReader, loaders: Mapping[str, Any], ranks: Ranks, notes: Notes
) -> dict[str, dict[str, Any]]:
    """The positions of loaders that another tool has saved; of the others, and of what is not exact, a note each."""
    positions = {}
    for key, loader in loaders.items():
        notes.skipped.pop(key, None)
        state = _state(reader, key) if key in reader.parts else None
        done, finished = _progress(state, f"{reader.manifest.name}: {key}") if state is not None else (None, False)
        why = _why_not(reader, loader, ranks, done=done)
        if why:
            skipped = "those that were done" if done is None else done
            notes.approximated[key] = (
                f"its epoch starts over, because {why}. To continue in the middle, call "
                f"accelerator.skip_first_batches(loader, {skipped})"
            )
        elif done and not finished:  # at the end of an epoch such a loader begins the next one
            positions[key] = {"batches": done, "world_size": ranks.world_size, "state": state}
            if remark := _order(loader, state, done):
                notes.approximated[key] = remark
    return positions


def _state(reader: CheckpointReader, key: str) -> Any:
    """A loader's state, with its tensors read."""
    read = reader.ask(key)
    reader.read_new()
    return read()


def _progress(state: Any, where: str) -> tuple[int | None, bool]:
    """How many batches were handed out, and whether the epoch was over. With workers, it is counted in two places."""
    if not isinstance(state, Mapping):
        raise DamagedError(f"{where} is not the state of a loader.")
    done = state.get("_num_yielded")
    if done is None and isinstance(snapshot := state.get("_snapshot"), Mapping):
        counts = (snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot"))
        done = sum(counts) if all(map(is_count, counts)) else None  # type: ignore[arg-type]
    return (done if is_count(done) else None), state.get("_iterator_finished") is True


def _why_not(reader: CheckpointReader, loader: Any, ranks: Ranks, *, done: int | None) -> str | None:
    """Why a position cannot be taken over, if it cannot."""
    if done is None:
        return _UNSAID.format(origin=reader.manifest.origin)
    if reader.manifest.world_size != ranks.world_size:
        return f"{reader.manifest.world_size} ranks saved it, and {ranks.world_size} load it"
    if ranks.world_size > 1 and reads_per_batch(loader, ranks.rank) != 1:
        return "rank 0 reads for all ranks, and each of them has written this one file"
    size = size_of(loader)
    if size is not None and done > size:
        return f"it says that {done} batches were done, and the loader has {size}"
    base = samplers.reader(loader)
    if not goes_by_index(base) and keeper_of(base) is not base:
        return "the loader keeps no state of its own here, or its stream's state drops samples"
    return None


def _order(loader: Any, state: Any, done: int) -> str | None:
    """What is not said of the order of the epoch, of which `done` batches are skipped."""
    if only_counts(state):
        return (
            f"{done} batches of a stream without a state are read again, and skipped: as torchdata counted them, which "
            "is too many if that run had itself been resumed in this epoch"
        )
    if not goes_by_index(samplers.reader(loader)):
        return None  # the state has it
    drawn = [sampler for sampler in samplers.samplers(loader) if not _keeps_order(sampler)]
    if not drawn:
        return None
    if any(hasattr(sampler, "initial_seed") for sampler in drawn):
        return (
            f"{done} batches are skipped in the order of epoch {loader.iteration}: which one it was is not saved. Call "
            "loader.set_epoch(epoch) before the loop if it was another"
        )
    return (
        f"{done} batches are skipped, in an order that {type(drawn[-1]).__name__} draws again: the old order is not "
        "saved. With use_seedable_sampler=True it would be the same"
    )


def _keeps_order(sampler: Any) -> bool:
    ours = type(sampler).__module__.startswith("accelerate.") and not hasattr(sampler, "initial_seed")
    return type(sampler) in _IN_ORDER or ours
