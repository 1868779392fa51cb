"""Models: their parameters and buffers, also of models that are still on the meta device when they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt.errors import MismatchError
from ckpt.formats.layout import Layout, Members
from ckpt.formats.native.tensor_file import dtype_name
from ckpt.formats.sharded_tensors import divided, is_sharded, local_tensor
from ckpt.state.division import without
from ckpt.state.parts import (
    LEFT,
    TIED_HERE,
    UNKNOWN,
    Notes,
    Read,
    Replication,
    SavedTensor,
    Unmarked,
    marks_in,
)
from ckpt.state.unwrap import clean_names, has_replicas, parameters_in, parts_of, unwrap


@dataclass
class ModelPart:
    """Parameters and buffers by names without wrappers' prefixes, and the extra state of modules.

    Models under FSDP 1 and DeepSpeed have parts of their own: `ckpt/state/registry.py` chooses.
    """

    key: str
    model: nn.Module
    same_class: bool = False
    can_be_sharded: bool = True
    is_collective: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return type(unwrap(parts_of(unwrap(self.model))[0])).__name__

    @property
    def other_kinds(self) -> tuple[str, ...]:
        return ()

    def capture(self) -> dict[str, Any]:
        """The state with the live parameters and buffers. Tied tensors are one object, on every rank."""
        return self._state()

    def places(self) -> dict[str, Any]:
        """The tensors to read a state into, before `load` is called with them."""
        return self._state()

    def _state(self) -> dict[str, Any]:
        module = unwrap(self.model)
        state = module.state_dict(keep_vars=True)
        return self._marks().in_state({clean: state[name] for name, clean in clean_names(module, state).items()})

    def _marks(self) -> Unmarked:
        return marks_in([self.model])

    def frozen(self) -> frozenset[str]:
        """Parameters that do not require gradients, under all their names."""
        module = unwrap(self.model)
        if all(parameter.requires_grad for parameter in parameters_in(module)):
            return frozenset()
        named = module.named_parameters(remove_duplicate=False)
        names = (name for name, parameter in named if not parameter.requires_grad)
        return frozenset(clean_names(module, names).values())

    def about(self, state: Any) -> dict[str, Any]:
        """The configuration from which Hugging Face's tools build such a model, if it has one."""
        if not {"transformers", "peft"} & sys.modules.keys():
            return {}
        from ckpt.state.model_config import describe

        return describe(unwrap(self.model), list(tensors_in(state)))

    def replication(self, state: Mapping[str, Any], members: Members) -> Replication:
        if not has_replicas([self.model]):
            return UNKNOWN
        from ckpt.state.ddp import broadcast_buffers, equal_parameters

        equal, broadcast = equal_parameters([self.model], members), broadcast_buffers(self.model, members)
        return Replication(
            frozenset(name for name, value in state.items() if id(value) in equal),
            frozenset(name for name, value in state.items() if id(value) in broadcast),
        )

    def names(self) -> frozenset[str] | None:
        return frozenset(self._state())

    def share(self, state: Any, elsewhere: Collection[str]) -> Any:
        return without(state, elsewhere)

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        """Parameters. Buffers (running statistics) of another rank are acceptable: they come from other samples."""
        module = unwrap(self.model)
        buffers = set(clean_names(module, (name for name, _ in module.named_buffers())).values())
        return {name: name for name in names if name not in buffers}

    def is_sharded(self) -> bool:
        return any(map(is_sharded, parameters_in(unwrap(self.model)))) or bool(self._marks())

    def layouts(self, members: Members) -> frozenset[Layout]:
        return divided(map(self._marks().whole, unwrap(self.model).parameters()), members)

    def check(self, saved: Mapping[str, Any]) -> dict[str, str]:
        live = self.places()
        # of a tied tensor, any of its names is enough
        there = {_memory(value) for name, value in live.items() if name in saved}
        missing = [name for name in live.keys() - saved.keys() if _memory(live[name]) not in there]
        unfit = dict.fromkeys(missing, "missing in the checkpoint")
        unfit |= dict.fromkeys(saved.keys() - live.keys(), "unexpected: the model has no such key")
        for name in live.keys() & saved.keys():
            if problem := _compare(live[name], saved[name]):
                unfit[name] = problem
        return unfit | _contradictions({name: live[name] for name in live if name not in unfit}, saved)

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        self.materialise(set(saved) - unfit.keys())
        live = self.places()
        fitting = {name for name in live if name not in unfit or _fits_when_cast(live[name], saved.get(name))}
        # a tied tensor is read under the first of its names that was saved and fits
        owners: dict[Any, str] = {}
        for name, value in live.items():
            if name in saved and name in fitting:
                owners.setdefault(_memory(value), name)
        places = {
            tensor.name: live[name] if name in fitting and owners[_memory(live[name])] == name else LEFT
            for name, tensor in saved.items()
            if isinstance(tensor, SavedTensor)
        }
        values = read(lambda tensor: places.get(tensor.name), live=True)  # a tensor without a place is in extra state
        for name, why in unfit.items():
            (notes.approximated if name in fitting else notes.skipped)[f"{self.key}.{name}"] = why

        def load() -> None:
            known = values()
            extra = {name: known[name] for name in fitting if not isinstance(live[name], torch.Tensor)}
            self.load({**live, **extra}, left=live.keys() - (fitting & saved.keys()))

        return load

    def materialise(self, filled: Collection[str]) -> None:
        """Give a model on the meta device memory for what is filled; refused where that is not all of it."""
        module = unwrap(self.model)
        raw = clean_names(module, module.state_dict(keep_vars=True))
        materialise(self.key, module, [name for name, clean in raw.items() if clean in filled])

    def load(self, state: dict[str, Any], left: Collection[str] = ()) -> None:
        """Load a state whose tensors are those of `places`, already filled, except the names in `left`."""
        # tensors are filled in place already, and copying one onto itself is free: this is for hooks and extra state
        module = unwrap(self.model)
        live = module.state_dict(keep_vars=True)
        raw = clean_names(module, live)
        marks = self._marks()  # a marked parameter is filled already, through the DTensor around it
        there = {name: live[name] if marks.has(live[name]) else state[clean] for name, clean in raw.items()}
        module.load_state_dict(there, strict=False)


def _memory(value: Any) -> Any:
    """The same for tied tensors: one object, or two in the same memory. Empty ones have no memory to compare."""
    piece = local_tensor(value)
    if not isinstance(piece, torch.Tensor) or is_lazy(piece) or piece.is_meta or not piece.numel():
        return id(value)
    return piece.device, piece.data_ptr(), piece.dtype, tuple(value.size()), piece.stride()


def _contradictions(live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Names that are one tensor here, and have different values in the checkpoint: it could hold only one of them."""
    first: dict[Any, str] = {}
    found = {}
    for name, value in live.items():
        if isinstance(saved.get(name), SavedTensor):
            kept = first.setdefault(_memory(value), name)
            if kept != name and not saved[name].equals(saved[kept], value):
                found[name] = f"its values in the checkpoint differ from those of {kept}, {TIED_HERE}"
    return found


def tensors_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a model's state, without extra state."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) or is_sharded(value)}


def _compare(live: Any, saved: Any) -> str | None:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, SavedTensor):
        both = isinstance(live, torch.Tensor) == isinstance(saved, SavedTensor)
        return None if both else "a tensor on one side only"
    if is_lazy(live):
        return "not initialised here yet: run one forward pass first"
    if tuple(live.size()) != saved.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(live.size())} here"
    if live.dtype != saved.dtype:
        return f"dtype {dtype_name(saved.dtype)} in the checkpoint, {dtype_name(live.dtype)} here"
    return None


def _fits_when_cast(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, SavedTensor) or is_lazy(live):
        return False
    return tuple(live.size()) == saved.shape and live.dtype != saved.dtype


# -- models on the meta device get memory for what a checkpoint fills --------------------------------------------------

_LISTED = 10


def is_on_meta(tensor: Any) -> bool:
    """Whether a tensor has no memory."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"


def any_on_meta(parts: Iterable[Any]) -> bool:
    """Whether the model of a part has a parameter without memory."""
    models = (getattr(part, "model", None) for part in parts)
    return any(is_on_meta(one) for model in models if isinstance(model, nn.Module) for one in model.parameters())


def materialise(key: str, module: nn.Module, filled: Collection[str]) -> None:
    """Give every tensor of a model that has none its memory: a shard where its mesh is, others on the default device.

    They remain the same objects, which an optimizer may hold already. `filled`: the names, as `state_dict` has them, of
    those that are read from the checkpoint. Refused where others have no memory either: nobody would give them values.
    """
    named = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    empty = {name: tensor for name, tensor in named.items() if is_on_meta(tensor)}
    ours = {id(named[name]) for name in filled if name in named}
    left = [name for name, tensor in empty.items() if id(tensor) not in ours]
    if left:
        more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
        raise MismatchError(
            f"{key} is on the meta device, but the checkpoint has no values for {', '.join(left[:_LISTED])}{more}. "
            "Call to_empty(device=...) on the model, set these values, then load."
        )
    for tensor in {id(tensor): tensor for tensor in empty.values()}.values():
        torch.utils.swap_tensors(tensor, _with_memory(tensor))  # type: ignore[no-untyped-call]


def _with_memory(tensor: Any) -> Any:
    device = tensor.device_mesh.device_type if is_sharded(tensor) else torch.get_default_device()
    found = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(found, requires_grad=tensor.requires_grad)
    return found.requires_grad_(tensor.requires_grad)
