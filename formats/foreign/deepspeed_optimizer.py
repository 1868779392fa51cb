"""The optimizer's state in folders that DeepSpeed wrote: by parameter name, from flat partitions or universal files.

ZeRO gives the optimizer that it wraps a flat partition for each group of parameters, and stage 3 several for a group.
What the optimizer keeps by element is cut into parameters as the master weights are; a number of the partition (`step`)
is that of each of its parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt.errors import UnsupportedError
from ckpt.formats.foreign import zero_partitions
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.foreign.deepspeed_states import ZeroStates, master_weight, read_states, tensor_in
from ckpt.formats.foreign.zero_partitions import Shapes
from ckpt.formats.pieces import PiecedTensor

_FILE = re.compile(r"zero/(?P<name>[^/]+)/(?P<key>[^/]+)\.pt")
_COMMON = "zero/optimizer_state.pt"
_MASTER, _STEP = "fp32", "step"
_WAY_OUT = "For the model alone, see ckpt.merge."

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
            raise ValueError(f"the optimizer of rank {rank} keeps {keys}, and that of rank 0 {kept[0]}")


def _cut(
    shapes: Shapes, held: list[Any], number: int, states: ZeroStates, where: str
) -> list[tuple[str, PiecedTensor]]:
    """The parameters of a partition, from what each rank has of it."""
    parts = [[tensor_in(value)] for value in held]
    if states.stage == 3:
        return list(zero_partitions.by_parameter([shapes], parts, where))
    paddings = [states.paddings[number]] if states.paddings is not None else None
    return list(zero_partitions.by_group([shapes], parts, paddings, where))


def _require_by_element(key: str, held: Sequence[Any], masters: Sequence[PiecedTensor], where: str) -> None:
    """Moments may be padded where master weights are not."""
    for value, master in zip(held, masters, strict=True):
        if len(tensor_in(value).shape) != 1 or value.shape[0] < master.shape[0]:
            raise UnsupportedError(
                f"{where}: {key} of the optimizer is not kept by element ({list(value.shape)} for "
                f"{list(master.shape)}), so that it cannot be divided by parameter. {_WAY_OUT}"
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
        if name in shapes and key != _MASTER:
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
    kind = "elastic checkpoints" if isinstance(found, list) else "an optimizer in a form of its own"
    raise UnsupportedError(
        f"{where} has {kind} of DeepSpeed, which ckpt does not read: there is no 'state' with 'param_groups'. "
        f"{_WAY_OUT}"
    )


def _groups_of(listed: Sequence[Mapping[str, Any]], count: int, where: str) -> list[int]:
    """For each partition the number of the optimizer's group that it belongs to."""
    found = [(number, index) for number, group in enumerate(listed) for index in group["params"]]
    if [index for _, index in found] != list(range(count)):
        raise UnsupportedError(
            f"{where} has an optimizer of {len(found)} partitions, and {count} groups of parameters: it does not say "
            f"which belong together. {_WAY_OUT}"
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
