"""Export a checkpoint of ours as a folder that `accelerator.load_state` reads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError, DamagedError
from ckpt.export.folders import atomic_folder
from ckpt.export.source import open_source
from ckpt.formats.damage import damage_reported
from ckpt.formats.foreign.accelerate_write import file_of, pickled_model, random_states, write_values
from ckpt.formats.foreign.hf_safetensors import plan_files
from ckpt.formats.foreign.tied_weights import same_place
from ckpt.formats.native.manifest import Manifest
from ckpt.load.accelerate_state import kind_of
from ckpt.load.reader import CheckpointReader
from ckpt.root.catalog import locate, read_manifest
from ckpt.root.verify import size_problems
from ckpt.state.deepspeed.engine import KEY
from ckpt.state.optimizer import by_number
from ckpt.state.parts import SavedTensor
from ckpt.storage import Storage, open_storage
from ckpt.util.console import progress_bar
from ckpt.util.option_values import path_text


def export(
    source: str | os.PathLike[str], destination: str | os.PathLike[str]
) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Write the folder. Returns its path, the parts in it, and what it cannot hold, with the reasons."""
    path = path_text(destination, "the destination")
    if "://" in path:
        raise ConfigError(f"{path} is no path: Accelerate reads folders on a disk.")
    with locked_checkpoint(source) as (storage, manifest), atomic_folder(path) as folder:
        exported = _Export(storage, manifest, os.fspath(folder))
        exported.parts()
        exported.generators()
    return path, (*(key for key in exported.reader.parts if key not in exported.skipped), "rng"), exported.skipped


@contextmanager
def locked_checkpoint(source: str | os.PathLike[str]) -> Iterator[tuple[Storage, Manifest]]:
    """The storage and the manifest of the one checkpoint at a path or URL, whose files are all there."""
    storage, names = locate(source)
    if len(names) != 1:
        listed = f"Name the one to convert: {storage.url}/{names[0]}." if names else "There is none to convert."
        raise ConfigError(f"{os.fspath(source)} holds {len(names)} checkpoints. {listed}")
    with storage.lock(names[0], shared=True):  # retention of a running job must not remove what is being read
        manifest = read_manifest(storage, names[0])
        wrong = size_problems(storage, manifest)
        if wrong:
            raise DamagedError(f"{manifest.name} is damaged: {'; '.join(wrong)}. Convert another checkpoint.")
        yield storage, manifest


@dataclass
class _Export:
    """Writes a checkpoint into a folder. Everything that is read is verified."""

    storage: Storage
    manifest: Manifest
    folder: str
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = CheckpointReader(self.storage, self.manifest, 0)

    def parts(self) -> None:
        with progress_bar(f"converting {self.manifest.name}", len(self.reader.parts)) as advance:
            for kind, keys in self._by_kind().items():
                for index, key in enumerate(keys):
                    self._write_part(kind, _position(key) if kind == "dataloader" else index, key)
                    advance(1)

    def _by_kind(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for key in self.reader.parts:
            found[kind_of(key)].append(key)
        for key in found.pop(KEY, ()):
            self.skipped[key] = (
                "DeepSpeed reads no files but its own: its optimizer starts afresh, from the model's weights"
            )
        if len(found["scaler"]) > 1:
            raise ConfigError(f"{self.manifest.name} has {len(found['scaler'])} scalers, and Accelerate knows one.")
        return {kind: sorted(keys, key=_position) for kind, keys in found.items()}

    def _write_part(self, kind: str, number: int, key: str) -> None:
        tree = self.reader.tree(key)
        if (
            kind == "model"
            and isinstance(tree, dict)
            and all(isinstance(value, SavedTensor) for value in tree.values())
        ):
            self._stream_model(number, key)
        elif kind == "model":
            self._write(pickled_model(number), self._values(key))
        else:
            self._write(file_of(kind, number), self._numbered(key) if kind == "optimizer" else self._values(key))

    def _numbered(self, key: str) -> Any:
        values = self._values(key)
        if not isinstance(values, dict) or not {"state", "param_groups"} <= values.keys():
            return values  # not of torch.optim
        with damage_reported(f"{self.manifest.name}: {key}", "state of an optimizer"):
            return by_number(values)

    def _stream_model(self, number: int, key: str) -> None:
        with open_source(f"{self.storage.url.rstrip('/')}/{self.manifest.name}", key) as source:
            (file,) = plan_files(file_of("model", number), source.tensors, same_place(source.tensors))
            open_storage(self.folder).write(file.path, file.pieces())

    def _values(self, key: str) -> Any:
        values = self.reader.ask(key)
        self.reader.read_new()
        return values()

    def generators(self) -> None:
        for rank in range(self.manifest.world_size):
            state = self.reader.rank_state(rank)
            if "rng" not in state:
                raise ConfigError(
                    f"{self.manifest.name} was converted from {self.manifest.origin} without random generators, and "
                    "Accelerate asks for them. Resume from it, save, and convert that."
                )
            step = state.get("source", {}).get("step", 0)
            self._write(file_of("random_states", rank), random_states(state["rng"], step))
            self._note_skipped(state)

    def _note_skipped(self, state: Mapping[str, Any]) -> None:
        for key, part in self.reader.parts.items():
            if "differs" in part:
                self.skipped[f"{key} of other ranks"] = "their state differs: the main rank's is written"
        if any(key.startswith("gradients") for key in self.reader.own):
            self.skipped["gradients"] = "Accelerate keeps none: the accumulation window starts afresh"
        for key in state.get("values", {}):
            self.skipped[key] = "Accelerate keeps no plain values: register an object that has them"
        for key in state["generators"]:
            self.skipped[key] = "Accelerate keeps no generators but the global ones"
        progress = self.manifest.progress
        if any(progress.values()):
            self.skipped["progress"] = (
                f"Accelerate does not keep it: continue with epoch {progress.get('epoch', 0)}, and there with "
                f"accelerator.skip_first_batches(loader, {progress.get('batch', 0)})"
            )

    def _write(self, name: str, values: Any) -> None:
        write_values(os.path.join(self.folder, name), values)


def _position(key: str) -> int:
    """The number at the end of a key, by which parts of a kind are ordered; 0 if there is none."""
    number = key.rpartition(".")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0
