"""Folders that DeepSpeed's `save_checkpoint` wrote, with ZeRO 0 to 3, and universal ones: model, optimizer, counters.

Trained parameters are the master weights of ZeRO, as `zero_to_fp32.py` of DeepSpeed gives them. Others, and buffers,
come from the states of the model. The files are pickles, which are read as data: nothing is executed.

ZeRO keeps the elements of parameters in flat partitions without names, one set of them for each rank. Stages 1 and 2
put all parameters of a group one behind the other, and give each rank an equal part of that. Stage 3 divides every
parameter by itself: each rank has as many of its elements as the others, and the last ones are padding.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ckpt.errors import DamagedError, MissingError, UnsupportedError
from ckpt.formats.checks import Sizes, checked_shape, checked_sizes, damage_reported, dense_strides, of_type
from ckpt.formats.foreign.torch_files import unwrapped
from ckpt.formats.foreign.torch_save import Described, NamesOf, read_file
from ckpt.formats.layout import Box
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.registry import is_engine_save
from ckpt.formats.tensors import ByteReader, FolderReader


class Stretch(NamedTuple):
    """Consecutive bytes of a file."""

    reader: ByteReader
    start: int
    length: int


class JoinedReader:
    """The bytes of several stretches in their order. It has their readers, and none of their bytes."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = [stretch for stretch in stretches if stretch.length]
        self._ends = list(accumulate(stretch.length for stretch in self._stretches))

    @property
    def length(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> bytes:
        found = bytearray(max(0, min(stop, self.length) - start))
        self.read_into(start, memoryview(found))
        return bytes(found)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            self._fill(start, buffer)
            start += len(buffer)

    def _fill(self, start: int, buffer: memoryview) -> None:
        number = bisect_right(self._ends, start)
        while buffer:
            stretch = self._stretches[number]
            skipped = start - (self._ends[number] - stretch.length)
            count = min(len(buffer), stretch.length - skipped)
            stretch.reader.read_into(stretch.start + skipped, buffer[:count])
            buffer, start, number = buffer[count:], start + count, number + 1


Shapes = Mapping[str, Sizes]  # of the parameters in a group, in their order
Paddings = Sequence[Sequence[int]]  # elements behind each parameter, by group


@dataclass(frozen=True)
class Flat:
    """Elements in a row, in one file or several."""

    reader: JoinedReader
    dtype: torch.dtype

    @classmethod
    def joined(cls, tensors: Sequence[PiecedTensor]) -> Flat:
        """Flat tensors one behind the other."""
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or any(len(tensor.shape) != 1 for tensor in tensors):
            raise ValueError("ZeRO's partitions are not flat, or have several dtypes")
        regions = [piece.region for tensor in tensors for piece in tensor.pieces]
        if any(region.strides != (1,) for region in regions):
            raise ValueError("ZeRO's partitions are not contiguous")
        stretches = (Stretch(region.reader, region.start, region.nbytes) for region in regions)
        return cls(JoinedReader(stretches), dtypes.pop() if dtypes else torch.float32)

    @property
    def count(self) -> int:
        return self.reader.length // self.dtype.itemsize

    def stretch(self, start: int, count: int) -> Stretch:
        """The bytes of some elements."""
        return Stretch(self.reader, start * self.dtype.itemsize, count * self.dtype.itemsize)


def tensor_at(reader: JoinedReader, where: str, dtype: torch.dtype, start: int, shape: Sizes) -> PiecedTensor:
    """The tensor whose elements follow each other from a byte on. `where` and that byte tell it from others."""
    region = Region(reader, where, dtype, start, shape, dense_strides(shape))
    whole = Box((0,) * len(shape), shape)
    return PiecedTensor(dtype, shape, () if whole.is_empty else (Piece(whole, region),))


def share_of(count: int, world_size: int) -> int:
    """The elements that each rank has of a parameter under ZeRO 3, with padding."""
    return -(-count // world_size)


def by_group(
    groups: Sequence[Shapes], ranks: Sequence[Sequence[PiecedTensor]], paddings: Paddings | None, where: str
) -> Iterator[tuple[str, PiecedTensor]]:
    """The parameters under ZeRO 1 and 2. `ranks` has the partitions of each rank, by group."""
    for number, shapes in enumerate(groups):
        flat = Flat.joined([partitions[number] for partitions in ranks])
        behind = paddings[number] if paddings is not None else [0] * len(shapes)
        start = stop = 0
        for (name, shape), padding in zip(shapes.items(), behind, strict=True):
            first, stop = start, start + math.prod(shape)
            start = stop + padding
            at = first * flat.dtype.itemsize
            yield name, tensor_at(flat.reader, f"{where}: group {number}", flat.dtype, at, shape)
        if stop > flat.count or _aligned(start, len(ranks)) != _aligned(flat.count, len(ranks)):
            raise ValueError(f"parameter group {number} has {flat.count} elements, but its parameters have {start}")


def _aligned(count: int, world_size: int) -> int:
    """Groups are padded so that every rank has an even number of elements, and the last one may leave that out."""
    return share_of(count, 2 * world_size) * 2 * world_size


def by_parameter(
    groups: Sequence[Shapes], ranks: Sequence[Sequence[PiecedTensor]], where: str
) -> Iterator[tuple[str, PiecedTensor]]:
    """The parameters under ZeRO 3. `ranks` has the partitions of each rank, which together are its shares."""
    flats = [Flat.joined(partitions) for partitions in ranks]
    shares = [share_of(math.prod(shape), len(ranks)) for shapes in groups for shape in shapes.values()]
    if {flat.count for flat in flats} != {sum(shares)} or len({flat.dtype for flat in flats}) > 1:
        raise ValueError(f"ranks have {[flat.count for flat in flats]} elements, but each should have {sum(shares)}")
    start = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        yield name, from_shares(flats, start, shape, f"{where}: {name}")
        start += share_of(math.prod(shape), len(ranks))


def from_shares(flats: Sequence[Flat], start: int, shape: Sizes, where: str) -> PiecedTensor:
    """A parameter of which every rank has a share, from an element of its row on. The padding is left out."""
    count = math.prod(shape)
    share = share_of(count, len(flats))
    held = (max(0, min(share, count - rank * share)) for rank in range(len(flats)))
    reader = JoinedReader(flat.stretch(start, length) for flat, length in zip(flats, held, strict=True))
    return tensor_at(reader, where, flats[0].dtype, 0, shape)


_STATES = "optimizer_state_dict"
_PARTITIONS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_INNER = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}  # by stage
_COUNTERS = ("global_steps", "skipped_steps", "global_samples")
_READ = frozenset(  # of the states of a model: what is read, or only describes the rest
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "shared_params", *_COUNTERS),
        *("frozen_param_shapes", "frozen_param_fragments", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    )
)
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def read_states(folder: FolderReader, path: str) -> Any:
    """The content of a file, with tensors that have not been read."""
    return read_file(folder, path, NamesOf("deepspeed."))


@dataclass(frozen=True)
class EngineFacts:
    """What an engine counted, and the keys of other state that was saved with it."""

    steps: int
    samples: int
    others: tuple[str, ...]

    @classmethod
    def described(cls, found: Any) -> EngineFacts:
        done, skipped, samples = checked_sizes([found.get(key) or 0 for key in _COUNTERS])
        others = (of_type(str, key) for key, value in found.items() if key not in _READ and value is not None)
        return cls(max(0, done - skipped), samples, tuple(others))


@dataclass(frozen=True)
class ModelStates:
    """The states of a model: its tensors as the engine computes with them, and the shapes of what ZeRO has divided."""

    module: Mapping[str, PiecedTensor]
    buffers: tuple[str, ...]
    groups: tuple[Shapes, ...]  # trained parameters by group
    frozen: Shapes
    fragments: Mapping[str, PiecedTensor]  # of frozen parameters
    shared: Mapping[str, str]  # names of tied parameters, with the name that is saved
    optimizer: Any  # its state where ZeRO has not divided it
    facts: EngineFacts

    @classmethod
    def described(cls, found: Any) -> ModelStates:
        if any(found.get(key) for key in _EXPERTS):
            raise UnsupportedError(
                "ckpt can't read this checkpoint, because DeepSpeed has divided its experts across ranks."
            )
        module = {name: value for name, value in found["module"].items() if isinstance(value, PiecedTensor)}
        groups = tuple(_shapes(group) for group in found.get("param_shapes") or ())
        names = [name for group in groups for name in group]
        if len(set(names)) != len(names):
            raise ValueError("a parameter is in several parameter groups")
        return cls(
            module=module,
            buffers=tuple(name for name in found.get("buffer_names") or () if name in module),
            groups=groups,
            frozen=_shapes(found.get("frozen_param_shapes") or {}),
            fragments=dict(found.get("frozen_param_fragments") or {}),
            shared=dict(found.get("shared_params") or {}),
            optimizer=found.get("optimizer"),
            facts=EngineFacts.described(found),
        )

    @property
    def shapes(self) -> Shapes:
        return {name: shape for group in self.groups for name, shape in group.items()}

    def buffer(self, name: str) -> PiecedTensor:
        """A buffer, of 16 bits in fp32, as DeepSpeed gives it beside master weights."""
        return widened(self.module[name])


def _shapes(found: Mapping[str, Any]) -> dict[str, Sizes]:
    return {of_type(str, name): checked_shape(shape) for name, shape in found.items()}


@dataclass(frozen=True)
class ZeroStates:
    """A rank's partitions of master weights, by group, and how many ranks have such."""

    stage: int
    world_size: int
    partitions: tuple[PiecedTensor, ...]
    paddings: Paddings | None  # behind each parameter, by group
    inner: Any  # the state of the optimizer that ZeRO wraps
    is_scaled: bool  # the loss, by a factor that changes

    @classmethod
    def described(cls, found: Any) -> ZeroStates:
        states = found[_STATES]
        stage, count, paddings = (
            _plain(states.get("zero_stage", 1)),
            states["partition_count"],
            "param_alignment_paddings",
        )
        if stage not in _PARTITIONS:
            raise ValueError(f"ZeRO has no stage {stage}")
        return cls(
            stage=stage,
            world_size=max(count) if isinstance(count, list) else count,
            partitions=tuple(map(tensor_in, states[_PARTITIONS[stage]])),
            paddings=[checked_sizes(group) for group in states[paddings]] if states.get(paddings) else None,
            inner=states.get(_INNER[stage]),
            is_scaled=bool(states.get("dynamic_loss_scale")),
        )


def _plain(value: Any) -> Any:
    """The number of a member of an enumeration."""
    return value.arguments[0] if isinstance(value, Described) else value


def tensor_in(value: Any) -> PiecedTensor:
    if not isinstance(value, PiecedTensor):
        raise ValueError(f"expected a tensor, found a {type(value).__name__}")
    return value


def master_weight(found: Any, shape: Sizes | None, where: str) -> PiecedTensor:
    """The tensor in a file of a universal checkpoint, a weight or a moment, which is flat if ZeRO 3 saved it."""
    with damage_reported(where, "part of a universal checkpoint"):
        tensor = tensor_in(found["param"] if isinstance(found, dict) else found)
        if shape is None or tensor.shape == shape:
            return tensor
        flat = Flat.joined([tensor])
        if tensor.size != math.prod(shape):
            raise ValueError(f"{tensor.size} elements can't form a tensor of shape {list(shape)}")
        return tensor_at(flat.reader, where, flat.dtype, 0, shape)


def widened(tensor: PiecedTensor) -> PiecedTensor:
    """A tensor of 16 bits in fp32, which has all its numbers, cast as it is read; another as it is."""
    return replace(tensor, dtype=torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


_FILE = re.compile(r"zero/(?P<name>[^/]+)/(?P<key>[^/]+)\.pt")
_COMMON = "zero/optimizer_state.pt"
_MASTER_KEYS, _STEP = "fp32", "step"
_WAY_OUT = "To read only the model, use ckpt.merge."

States = dict[str, dict[str, Any]]  # by parameter name


def divided(groups: Sequence[Shapes], ranks: Sequence[ZeroStates], where: str) -> dict[str, Any]:
    """The state that ZeRO divided over ranks."""
    inner = [_torch_state(states.inner, where) for states in ranks]
    of_partition = _groups_of(inner[0]["param_groups"], len(groups), where)
    _require_equal_keys(inner, len(groups))
    state: States = {name: {} for group in groups for name in group}
    for number, shapes in enumerate(groups):
        for key, value in dict(inner[0]["state"].get(number, {})).items():
            held = [found["state"][number][key] for found in inner]
            at = f"{where}: {key} of group {number}"
            if not isinstance(value, PiecedTensor) or not value.shape:
                for name in shapes:
                    state[name][key] = _own(value)
                continue
            _require_by_element(key, held, [states.partitions[number] for states in ranks], where)
            for name, tensor in _cut(shapes, held, number, ranks[0], at):
                state[name][key] = tensor
    return _named(state, inner[0]["param_groups"], groups, of_partition)


def _require_equal_keys(inner: Sequence[Mapping[str, Any]], count: int) -> None:
    """What one rank alone keeps has no place in the state of a parameter, and must not get lost."""
    kept = [{number: set(found) for number, found in states["state"].items() if found} for states in inner]
    for rank, keys in enumerate(kept):
        if keys != kept[0] or not keys.keys() <= set(range(count)):
            raise ValueError(f"rank {rank}'s optimizer has the state {keys}, but rank 0's has {kept[0]}")


def _cut(
    shapes: Shapes, held: list[Any], number: int, states: ZeroStates, where: str
) -> list[tuple[str, PiecedTensor]]:
    """The parameters of a partition, from what each rank has of it."""
    parts = [[tensor_in(value)] for value in held]
    if states.stage == 3:
        return list(by_parameter([shapes], parts, where))
    paddings = [states.paddings[number]] if states.paddings is not None else None
    return list(by_group([shapes], parts, paddings, where))


def _require_by_element(key: str, held: Sequence[Any], masters: Sequence[PiecedTensor], where: str) -> None:
    """Moments may be padded where master weights are not."""
    for value, master in zip(held, masters, strict=True):
        if len(tensor_in(value).shape) != 1 or value.shape[0] < master.shape[0]:
            raise UnsupportedError(
                f"{where}: the optimizer's {key} does not have one value per element (its shape is "
                f"{list(value.shape)}, but the weights have shape {list(master.shape)}), so ckpt can't split it up "
                f"by parameter. {_WAY_OUT}"
            )


def universal(folder: FolderReader, groups: Sequence[Shapes]) -> dict[str, Any] | None:
    """The state of a universal checkpoint, which has a file for each tensor of a parameter."""
    if _COMMON not in folder.files:
        return None
    common = read_states(folder, _COMMON)
    listed, where = common["param_groups"], f"{folder.where}/{_COMMON}"
    of_partition = _groups_of(listed, len(groups), where)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    state: States = {name: {} for name in shapes}
    for match in filter(None, map(_FILE.fullmatch, folder.files)):
        name, key, path = match["name"], match["key"], match.string
        if name in shapes and key != _MASTER_KEYS:
            found = read_states(folder, path)
            is_tensor = isinstance(found, dict) or (isinstance(found, PiecedTensor) and bool(found.shape))
            at = f"{folder.where}/{path}"
            state[name][key] = master_weight(found, shapes[name], at) if is_tensor else _own(found)
    steps = common.get("optimizer_state_dict", {}).get("state", {})  # stage 3 has them there alone
    for number, group in enumerate(groups):
        for name in group:
            if state[name] and _STEP not in state[name] and _STEP in steps.get(number, {}):
                state[name][_STEP] = _own(steps[number][_STEP])
    return _named(state, listed, groups, of_partition)


def undivided(found: Any, where: str) -> dict[str, Any] | None:
    """The state of an optimizer that computes with the parameters themselves, by their numbers."""
    return None if found is None else dict(_torch_state(found, where))


def _torch_state(found: Any, where: str) -> Mapping[str, Any]:
    if isinstance(found, dict) and {"state", "param_groups"} <= found.keys():
        return found
    kind = "an elastic checkpoint" if isinstance(found, list) else "an optimizer in DeepSpeed's own format"
    raise UnsupportedError(f"{where} has {kind}, which ckpt can't read. {_WAY_OUT}")


def _groups_of(listed: Sequence[Mapping[str, Any]], count: int, where: str) -> list[int]:
    """For each partition the number of the optimizer's group that it belongs to."""
    found = [(number, index) for number, group in enumerate(listed) for index in group["params"]]
    if [index for _, index in found] != list(range(count)):
        raise UnsupportedError(
            f"{where} has {len(found)} partitions of an optimizer for {count} parameter groups, so ckpt can't tell "
            f"which partition belongs to which group. {_WAY_OUT}"
        )
    return [number for number, _ in found]


def _named(
    state: States, listed: Sequence[Mapping[str, Any]], groups: Sequence[Shapes], of_partition: Sequence[int]
) -> dict[str, Any]:
    """The state and the groups by name. A step that a group counts, as fused optimizers do, becomes its parameters'."""
    names: dict[int, list[str]] = defaultdict(list)
    for number, shapes in zip(of_partition, groups, strict=True):
        names[number] += shapes
    param_groups = []
    for number, group in enumerate(listed):
        counted = group.get(_STEP)
        lacking = [name for name in names[number] if state[name] and _STEP not in state[name]]
        if isinstance(counted, int) and lacking:
            group = {key: value for key, value in group.items() if key != _STEP}
            for name in lacking:
                state[name][_STEP] = torch.tensor(float(counted))
        param_groups.append({**group, "params": names[number]})
    return {"state": {name: found for name, found in state.items() if found}, "param_groups": param_groups}


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state with other names for its parameters."""
    groups = [
        {**group, "params": [names.get(name, name) for name in group["params"]]} for group in state["param_groups"]
    ]
    return {"state": {names.get(name, name): found for name, found in state["state"].items()}, "param_groups": groups}


def _own(value: Any) -> Any:
    """A value for one parameter: a tensor in memory of its own, as an optimizer changes it in place."""
    return value.read(value.box) if isinstance(value, PiecedTensor) else value


_LATEST = ("latest", "latest_universal")  # name the folder of the newest save
_LONGEST_TAG = 4096  # bytes
_FEW = 10
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d{1,9})_)?mp_rank_(?P<part>\d\d(?:_\d{3})?)_model_states\.pt")
_ZERO = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d{1,9})_mp_rank_(?P<part>\d\d(?:_\d{3})?)_optim_states\.pt")
_MASTER = re.compile(r"zero/(?P<name>[^/]+)/fp32\.pt")
_LAYERS = re.compile(r"layer_\d.*-?model_states\.pt|expp_rank_.*\.pt")
_WHAT = "DeepSpeed checkpoint"


def save_in(folder: FolderReader) -> FolderReader:
    """The folder of one save: this one, or the one below it that `latest` names."""
    if is_engine_save(folder.files):
        return folder
    pointer = next(name for name in _LATEST if name in folder.files)
    tag = folder.opened(pointer).read(0, min(folder.files[pointer], _LONGEST_TAG)).decode("utf-8", "replace").strip()
    found = folder.below(f"{tag}/")
    if not tag or not is_engine_save(found.files):
        raise MissingError(
            f"{folder.where}/{pointer} names {tag!r}, but DeepSpeed saved nothing there. Give the folder of one save."
        )
    return found


@dataclass(frozen=True)
class SavedEngine:
    """One save of an engine: the files with the states of its model, and with the partitions of each rank."""

    folder: FolderReader

    def model(self) -> dict[str, PiecedTensor]:
        """The tensors of the model by their names without wrappers."""
        with damage_reported(self.folder.where, _WHAT):
            found = self._tensors()
            names = unwrapped(found)
            return {names[name]: tensor for name, tensor in found.items()}

    def master_model(self) -> dict[str, PiecedTensor]:
        """The same to go on training with: beside master weights, other parameters are in fp32, too."""
        found = self.model()
        return {name: widened(tensor) for name, tensor in found.items()} if self._models[0].groups else found

    def optimizer(self) -> dict[str, Any] | None:
        """The optimizer's state by parameter name, as torch's `state_dict` has it by number. None if it has none."""
        with damage_reported(self.folder.where, _WHAT):
            self._refuse_unfit()
            found = self._optimizer()
            if found is None or not self._models[0].groups:
                return found
            names = unwrapped(self._tensors())
            return renamed(found, names)

    def _optimizer(self) -> dict[str, Any] | None:
        states, where = self._models[0], self.folder.where
        if any(map(_MASTER.fullmatch, self.folder.files)):
            return universal(self.folder, states.groups)
        if not states.groups:
            return undivided(states.optimizer, where)
        return divided(states.groups, self._zero(), where)

    def facts(self) -> EngineFacts:
        """What the engine counted, and the names of other state that it saved."""
        with damage_reported(self.folder.where, _WHAT):
            self._refuse_unfit()
            facts = self._models[0].facts
            is_scaled = any(states.is_scaled for states in self._read_zero)
            return replace(facts, others=(*facts.others, "loss_scaler")) if is_scaled else facts

    def _tensors(self) -> dict[str, PiecedTensor]:
        self._refuse_unfit()
        states = self._models[0]
        found = {name: states.buffer(name) for name in states.buffers}
        found = {**self._whole(), **found, **dict(self._frozen())}
        found |= dict(self._trained())
        found |= {name: found[first] for name, first in states.shared.items() if first in found}
        missing = [name for name in states.module if name not in found]
        if missing:
            raise DamagedError(f"{self.folder.where} is incomplete. Missing: {', '.join(missing[:_FEW])}.")
        return found

    def _whole(self) -> Mapping[str, PiecedTensor]:
        """The tensors that are in the states of the model as a whole: under ZeRO 3 its parameters are empty there."""
        divided = any(match["rank"] for path in self.folder.files if (match := _MODEL.fullmatch(path)))
        return {} if divided else self._models[0].module

    def _refuse_unfit(self) -> None:
        parts = {match["part"] for path in self.folder.files if (match := _MODEL.fullmatch(path))}
        layers = next((path for path in self.folder.files if _LAYERS.fullmatch(path)), None)
        if layers or parts != {"00"}:
            why = layers or f"mp_rank_{max(parts)}"
            raise UnsupportedError(
                f"DeepSpeed wrote {self.folder.where} with pipeline, tensor or expert parallelism ({why}), which ckpt "
                "can't read. Load the checkpoint with DeepSpeed, and save the model with save_16bit_model()."
            )

    @cached_property
    def _models(self) -> list[ModelStates]:
        """The states of the model by rank: stage 3 has a file of each rank, and the others one of all ranks."""
        return [ModelStates.described(read_states(self.folder, path)) for path in self._ranked(_MODEL)]

    def _ranked(self, pattern: re.Pattern[str]) -> list[str]:
        """The files of a kind in the order of their ranks, each of which must be there."""
        matches = [match for path in self.folder.files if (match := pattern.fullmatch(path))]
        found = {int(match["rank"] or 0): match.string for match in matches}
        missing = [rank for rank in range(len(found)) if rank not in found]
        if missing or len(found) != len(matches):
            raise DamagedError(
                f"{self.folder.where} is damaged: each of the {len(found)} ranks should have exactly one file such as "
                f"{matches[0].string}, but rank {', '.join(map(str, missing[:_FEW])) or 0} does not. Copy all files of "
                "one save into that folder."
            )
        return [found[rank] for rank in range(len(found))]

    def _trained(self) -> Iterator[tuple[str, PiecedTensor]]:
        if any(map(_MASTER.fullmatch, self.folder.files)):
            self._ranked(_ZERO)
            return self._universal()
        return self._partitioned(self._zero())

    @cached_property
    def _read_zero(self) -> list[ZeroStates]:
        return [ZeroStates.described(read_states(self.folder, path)) for path in self._ranked(_ZERO)]

    def _universal(self) -> Iterator[tuple[str, PiecedTensor]]:
        shapes = self._models[0].shapes
        for match in filter(None, map(_MASTER.fullmatch, self.folder.files)):
            name, path = match["name"], match.string
            yield name, master_weight(read_states(self.folder, path), shapes.get(name), f"{self.folder.where}/{path}")

    def _zero(self) -> list[ZeroStates]:
        """What ZeRO divided, by rank; nothing if it was trained without."""
        ranks = self._read_zero
        if not ranks and not self._models[0].groups:
            return []
        if {states.world_size for states in ranks} != {len(ranks)} or len({states.stage for states in ranks}) > 1:
            wrote = ranks[0].world_size if ranks else "several"
            raise DamagedError(
                f"{self.folder.where} has *_optim_states.pt files of {len(ranks)} ranks, but {wrote} ranks wrote the "
                "save. These files hold the master weights: copy all files of one save into that folder."
            )
        return ranks

    def _partitioned(self, ranks: list[ZeroStates]) -> Iterator[tuple[str, PiecedTensor]]:
        if not ranks:
            return iter(())
        where, groups = self.folder.where, self._models[0].groups
        partitions = [states.partitions for states in ranks]
        if ranks[0].stage == 3:
            return by_parameter(groups, partitions, where)
        if {len(found) for found in partitions} != {len(groups)}:
            raise ValueError(
                f"the save has partitions of {len(partitions[0])} parameter groups, but describes {len(groups)} groups"
            )
        return by_group(groups, partitions, ranks[0].paddings, where)

    def _frozen(self) -> Iterator[tuple[str, PiecedTensor]]:
        """Parameters that are not trained, of which each rank has a share under ZeRO 3."""
        for name, shape in self._models[0].frozen.items():
            held = [states.fragments[name] for states in self._models]
            yield name, _joined(held, shape, f"{self.folder.where}: {name}")


def _joined(held: list[PiecedTensor], shape: Sizes, where: str) -> PiecedTensor:
    if len(held) == 1 and held[0].shape == shape:
        return held[0]
    flats = [Flat.joined([share]) for share in held]
    share = share_of(math.prod(shape), len(held))
    if {flat.count for flat in flats} != {share} or len({flat.dtype for flat in flats}) > 1:
        raise ValueError(
            f"the ranks' shares of {[flat.count for flat in flats]} elements can't form a tensor of shape {list(shape)}"
        )
    return from_shares(flats, 0, shape, where)
