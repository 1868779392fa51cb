"""What the files of DeepSpeed's `save_checkpoint` hold, as far as a model and an optimizer need it.

Beside tensors they name classes of DeepSpeed, such as its loss scaler, which remain descriptions: nothing is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import UnsupportedError
from ckpt.formats.damage import damage_reported
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.foreign.pickle_bounds import Described
from ckpt.formats.foreign.torch_values import ALLOWED, read_values
from ckpt.formats.foreign.zero_partitions import Flat, Paddings, Shapes, tensor_at
from ckpt.formats.pieces import Piece, PiecedTensor, Region
from ckpt.formats.strides import Sizes, checked_shape, checked_sizes

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


class _Names:
    """The names that such a file may contain: those of plain data, and the classes of DeepSpeed."""

    def __contains__(self, name: object) -> bool:
        return name in ALLOWED or name == "argparse.Namespace" or str(name).startswith("deepspeed.")


def read_states(folder: FolderReader, path: str) -> Any:
    """The content of a file, with tensors that have not been read."""
    return read_values(folder.opened(path), 0, folder.files[path], f"{folder.where}/{path}", _Names())


@dataclass(frozen=True)
class EngineFacts:
    """What an engine counted, and the keys of other state that was saved with it."""

    steps: int
    samples: int
    others: tuple[str, ...]

    @classmethod
    def described(cls, found: Any) -> EngineFacts:
        done, skipped, samples = checked_sizes([found.get(key) or 0 for key in _COUNTERS])
        others = (_name(key) for key, value in found.items() if key not in _READ and value is not None)
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
            raise UnsupportedError("the checkpoint has experts that DeepSpeed has divided, which ckpt does not read.")
        module = {name: value for name, value in found["module"].items() if isinstance(value, PiecedTensor)}
        groups = tuple(_shapes(group) for group in found.get("param_shapes") or ())
        names = [name for group in groups for name in group]
        if len(set(names)) != len(names):
            raise ValueError("a parameter is in several of its groups")
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
    return {_name(name): checked_shape(shape) for name, shape in found.items()}


def _name(found: Any) -> str:
    if type(found) is not str:
        raise ValueError(f"a {type(found).__name__} stands where a name should")
    return found


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
        raise ValueError(f"a {type(value).__name__} stands where a tensor should")
    return value


def master_weight(found: Any, shape: Sizes | None, where: str) -> PiecedTensor:
    """The tensor in a file of a universal checkpoint, a weight or a moment, which is flat if ZeRO 3 saved it."""
    with damage_reported(where, "part of a universal checkpoint"):
        tensor = tensor_in(found["param"] if isinstance(found, dict) else found)
        if shape is None or tensor.shape == shape:
            return tensor
        flat = Flat.joined([tensor])
        if tensor.size != math.prod(shape):
            raise ValueError(f"{tensor.size} elements are none of shape {list(shape)}")
        return tensor_at(flat.reader, where, flat.dtype, 0, shape)


@dataclass(frozen=True)
class _WidenedRegion(Region):
    """A region whose elements become larger when they are read."""

    stored: Region

    def read_into(self, offsets: Sizes, target: torch.Tensor) -> None:
        read = torch.empty(target.shape, dtype=self.stored.dtype)
        self.stored.read_into(offsets, read)
        target.copy_(read)


def widened(tensor: PiecedTensor) -> PiecedTensor:
    """A tensor of 16 bits in fp32, which has all its numbers; another as it is."""
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    pieces = tuple(Piece(piece.box, _widened_region(piece.region)) for piece in tensor.pieces)
    return PiecedTensor(torch.float32, tensor.shape, pieces)


def _widened_region(stored: Region) -> Region:
    return _WidenedRegion(
        stored.reader, stored.where, torch.float32, stored.start, stored.sizes, stored.strides, stored
    )
