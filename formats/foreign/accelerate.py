"""Folders that `Accelerator.save_state` of Hugging Face Accelerate wrote, and checkpoints of Transformers' Trainer.

Most of the files are pickles. They are read as data, with a list of the names that may occur in them: nothing is
executed. Tensors become `PiecedTensor`s, which are read when they are needed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.checks import damage_reported
from ckpt.formats.foreign import dcp
from ckpt.formats.foreign.hf_safetensors import INDEX_SUFFIX, tensors_at
from ckpt.formats.foreign.torch_files import unwrapped
from ckpt.formats.foreign.torch_save import read_file
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.tensors import FolderReader

RNG_DEVICES = ("cuda", "xpu")
_RANDOM, _SAMPLER, _LOADER = "random_states", "sampler", "dataloader"
KINDS = ("model", "optimizer", "scheduler", "scaler", _LOADER, "custom")
_NUMBER = r"(?:_(\d+))?"  # absent for the first of several
_FILES = {
    "model": rf"model{_NUMBER}\.safetensors(?:\.index\.json)?|pytorch_model(?:_fsdp)?{_NUMBER}\.bin"
    r"|pytorch_model_fsdp_(\d+)/.*",
    "optimizer": rf"optimizer{_NUMBER}\.bin|optimizer_(\d+)/.*",
    "scheduler": rf"scheduler{_NUMBER}\.bin",
    "scaler": r"scaler\.pt",
    _LOADER: rf"dl_state_dict{_NUMBER}\.bin",
    _SAMPLER: rf"sampler{_NUMBER}\.bin",
    "custom": r"custom_checkpoint_(\d+)\.pkl",
    _RANDOM: r"random_states_(\d+)\.pkl",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _FILES.items()}
_UNREADABLE = {
    re.compile(r".*_rank\d+\.bin"): "it holds pieces of one rank, in a file of torch.save",
    re.compile(r"pytorch_model(_\d+)?/.*"): "DeepSpeed wrote it (to convert it, give only its folder)",
}
_SPARSE = (_LOADER, _SAMPLER)  # not every loader has a file, so numbers may be missing


@dataclass(frozen=True)
class AccelerateCheckpoint:
    """The state in a folder of Accelerate: parts by kind, in the order in which they were prepared."""

    folder: FolderReader

    @property
    def world_size(self) -> int:
        if not self._paths[_RANDOM]:
            raise _cut_off(self.folder)
        return len(self._paths[_RANDOM])

    @property
    def left_out(self) -> dict[str, str]:
        """Files that are not read, and why."""
        paths = [path for paths in self._paths[_SAMPLER].values() for path in paths]
        return dict.fromkeys(paths, "a sampler that was pickled as an object, with its data: it is not read")

    def parts(self) -> dict[str, dict[int, Any]]:
        """The state of every part by kind and number. That of models is by parameter name, others are as saved."""
        return {kind: {number: self.part(kind, number) for number in self.numbers(kind)} for kind in KINDS}

    def numbers(self, kind: str) -> list[int]:
        """The numbers of the parts of a kind."""
        return sorted(self._paths[kind]) if kind in KINDS else []

    def part(self, kind: str, number: int) -> Any:
        return self._read(kind, self._paths[kind][number])

    def random_states(self, rank: int) -> dict[str, Any]:
        """The states of a rank's random generators, and its accumulation step; that alone where there are none."""
        (path,) = self._paths[_RANDOM][rank]
        found = self._values(path)
        if isinstance(found, dict) and found.keys() == {"step"}:
            return found
        if not isinstance(found, dict) or not {"random_state", "torch_manual_seed"} <= found.keys():
            raise DamagedError(f"{self.folder.where}/{path} does not hold the states of random generators.")
        return {key: in_memory(value) for key, value in found.items()}

    @cached_property
    def _paths(self) -> dict[str, dict[int, list[str]]]:
        """The files of every kind by number."""
        found: dict[str, dict[int, list[str]]] = {kind: defaultdict(list) for kind in _FILES}
        for path in self.folder.files:
            for kind, pattern in _PATTERNS.items():
                if match := pattern.fullmatch(path):
                    number = next((group for group in match.groups() if group), "0")
                    found[kind][int(number)].append(path)
        _check(self.folder, found)
        return found

    def _read(self, kind: str, paths: list[str]) -> Any:
        if "/" in paths[0]:
            tree = self._distributed(paths[0].partition("/")[0], kind)
        elif paths[0].endswith((SUFFIX, INDEX_SUFFIX)):
            tree = tensors_at(self.folder, paths[0])
        else:
            tree = self._values(paths[0])
        return self._named(tree, paths[0]) if kind == "model" else tree

    def _named(self, tensors: Any, path: str) -> dict[str, Any]:
        """A model's tensors by bare names. Accelerate saves models without DDP, so `module.` is part of a name."""
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise DamagedError(f"{self.folder.where}/{path} does not hold the state of a model.")
        bare = unwrapped(tensors, outside=False)
        return {bare[name]: tensor for name, tensor in tensors.items()}

    def _distributed(self, name: str, kind: str) -> Any:
        folder = self.folder.below(f"{name}/")
        contents = dcp.contents_of(folder).of_part(kind)
        folder.check(contents.needed_files())
        tree = contents.tree(folder.opened, folder.where)
        if not isinstance(tree, dict):
            raise DamagedError(f"{folder.where} holds a list of values, not the state of the {kind}.")
        return tree.get(kind, {})

    def _values(self, path: str) -> Any:
        return read_file(self.folder, path)


def rng_key(device: str) -> str:
    """The key of a device's generators in `random_states_N.pkl`."""
    return f"torch_{device}_manual_seed"


def rng_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `random_states_N.pkl`, as `ckpt.state.rng` captures generators."""
    rng = {"python": states["random_state"], "torch": states["torch_manual_seed"]}
    if "numpy_random_seed" in states:
        rng["numpy"] = _numpy_state(states["numpy_random_seed"])
    return rng | {kind: list(states[rng_key(kind)]) for kind in RNG_DEVICES if rng_key(kind) in states}


def _numpy_state(saved: tuple[Any, ...]) -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = saved
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}


def in_memory(value: Any) -> Any:
    """The same value with its `PiecedTensor`s read into memory."""
    if isinstance(value, PiecedTensor):
        return value.read(value.box)
    if isinstance(value, list | tuple):
        return type(value)(map(in_memory, value))
    return {key: in_memory(item) for key, item in value.items()} if isinstance(value, dict) else value


def _check(folder: FolderReader, found: Mapping[str, Mapping[int, list[str]]]) -> None:
    for pattern, why in _UNREADABLE.items():
        foreign = [path for path in folder.files if pattern.fullmatch(path)]
        if foreign:
            raise ConfigError(
                f"ckpt can't read {folder.where}/{foreign[0]}: {why}. Load the checkpoint with Accelerate, then save "
                "it with ckpt or as SHARDED_STATE_DICT."
            )
    in_folders = any("/" in path for paths in found["model"].values() for path in paths)  # these say it themselves
    if not found[_RANDOM] and not in_folders:
        raise _cut_off(folder)
    for kind, numbered in found.items():
        _check_numbers(folder.where, kind, numbered)


def _cut_off(folder: FolderReader) -> DamagedError:
    return DamagedError(
        f"{folder.where}/{_RANDOM}_0.pkl is missing. Accelerate writes this file last, so the save was interrupted."
    )


def _check_numbers(where: str, kind: str, numbered: Mapping[int, list[str]]) -> None:
    missing = [number for number in range(len(numbered)) if number not in numbered]
    if missing and kind not in _SPARSE:
        there = ", ".join(paths[0] for paths in numbered.values())
        raise DamagedError(
            f"{where} is damaged: it has {there}, but {kind} number {', '.join(map(str, missing))} is missing. Copy "
            "every rank's files into that folder."
        )
    for paths in numbered.values():
        if len({path.partition("/")[0] for path in paths}) > 1:
            raise ConfigError(
                f"{where} has files of two saves: {' and '.join(sorted(paths))}. Remove the save that you don't want "
                "to read."
            )


TRAINER_STATE = "trainer_state.json"
_PARTS = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
_RNG = re.compile(r"rng_state(?:_(\d{1,9}))?\.pth")
_LARGEST_STATE = 1 << 28  # bytes: it has a line for every step that was logged
_LEFT_OUT = {
    "training_args.bin": "the arguments of the Trainer, pickled as an object: give them again",
    TRAINER_STATE: "its log and the state of its callbacks, which only the Trainer reads",
}


class TrainerFolder:
    """One checkpoint of the Trainer, except its model."""

    def __init__(self, folder: FolderReader) -> None:
        self._folder = folder
        self._rng = sorted((int(match.group(1) or 0), path) for path in folder.files if (match := _RNG.fullmatch(path)))

    @property
    def world_size(self) -> int:
        """The number of ranks whose generators are there; one, if there are none."""
        return max(1, len(self._rng))

    @property
    def left_out(self) -> dict[str, str]:
        return {path: why for path, why in _LEFT_OUT.items() if path in self._folder.files}

    def parts(self) -> dict[str, Any]:
        """The state of the optimizer, the scheduler and the scaler, where there are files of them."""
        return {key: self._values(path) for key, path in _PARTS.items() if path in self._folder.files}

    def progress(self) -> tuple[int, float]:
        """The steps and the epochs that were done."""
        data = self._folder.opened(TRAINER_STATE).read(0, min(self._folder.files[TRAINER_STATE], _LARGEST_STATE))
        with damage_reported(self._where(TRAINER_STATE), "Trainer state file"):
            found = json.loads(data)
            steps, epochs = int(found["global_step"]), float(found["epoch"] or 0)
            if steps < 0 or not math.isfinite(epochs) or epochs < 0:
                raise ValueError(f"a run can't have {steps} steps and {epochs} epochs")
            return steps, epochs

    def generators(self, rank: int) -> dict[str, Any] | None:
        """A rank's random generators, as `ckpt.state.rng` captures them. None if they were not saved."""
        if not self._rng:
            return None
        ranks = [number for number, _ in self._rng]
        if ranks != list(range(len(ranks))):
            raise DamagedError(f"{self._folder.where} is damaged: only ranks {ranks} have an rng_state file.")
        path = self._rng[rank][1]
        states: Mapping[str, Any] = in_memory(self._values(path))
        with damage_reported(self._where(path), "file of random generator states"):
            found = {"python": states["python"], "torch": states["cpu"], "numpy": _numpy_state(states["numpy"])}
        devices = {device: states[device] for device in RNG_DEVICES if device in states}
        return found | {
            device: list(state) if isinstance(state, list | tuple) else [state] for device, state in devices.items()
        }

    def _values(self, path: str) -> Any:
        return read_file(self._folder, path)

    def _where(self, path: str) -> str:
        return f"{self._folder.where}/{path}"
