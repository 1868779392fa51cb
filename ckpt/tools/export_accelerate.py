"""Write portable state as a folder that `accelerator.load_state` reads."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigError
from ckpt.formats.foreign.accelerate_write import file_of, pickled_model, random_states, write_values
from ckpt.formats.foreign.hf_safetensors import plan_files
from ckpt.formats.foreign.tied_weights import same_place
from ckpt.formats.foreign.torch_write import write_file
from ckpt.formats.pieces import PiecedTensor
from ckpt.load.accelerate_state import kind_of
from ckpt.storage import open_storage
from ckpt.tools.portable_state import Outcome, PortableState, position_of

_NO_GENERATORS = "the source has none: Accelerate leaves the generators as they are"


def export(state: PortableState, folder: Path, advance: Callable[[int], None]) -> Outcome:
    """Write the folder. Returns the parts in it, and what it cannot hold, with the reasons."""
    exported = _Export(state, folder, advance)
    exported.parts()
    has_generators = exported.generators()
    return (*state.parts, *(["rng"] if has_generators else [])), exported.skipped


@dataclass
class _Export:
    state: PortableState
    folder: Path
    advance: Callable[[int], None]
    skipped: dict[str, str] = field(default_factory=dict)

    def parts(self) -> None:
        for kind, keys in self._by_kind().items():
            for index, key in enumerate(keys):
                self._write_part(kind, position_of(key) if kind == "dataloader" else index, key)

    def _by_kind(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for key in self.state.parts:
            found[kind_of(key)].append(key)
        if len(found["scaler"]) > 1:
            raise ConfigError(f"{self.state.name} has {len(found['scaler'])} scalers, and Accelerate knows one.")
        return {kind: sorted(keys, key=position_of) for kind, keys in found.items()}

    def _write_part(self, kind: str, number: int, key: str) -> None:
        tree = self.state.numbered(key) if kind == "optimizer" else self.state.tree(key)
        if kind != "model":
            self._write(file_of(kind, number), tree)
        elif isinstance(tree, dict) and all(isinstance(value, PiecedTensor) for value in tree.values()):
            self._stream_model(number, tree)
        else:
            self._write(pickled_model(number), tree)

    def _stream_model(self, number: int, tensors: Mapping[str, PiecedTensor]) -> None:
        (file,) = plan_files(file_of("model", number), tensors, same_place(tensors))
        open_storage(self.folder).write(file.path, file.pieces())
        self.advance(file.size)

    def generators(self) -> bool:
        """Write the generators of every rank; without any, the file says only that the save is complete."""
        for rank in range(self.state.world_size):
            state = self.state.rank_state(rank)
            step = state.get("source", {}).get("step", 0)
            rng = self.state.generators(rank)
            states = {"step": step} if rng is None else random_states(rng, step)
            write_values(os.path.join(self.folder, file_of("random_states", rank)), states)
            self._note_skipped(state, has_generators=rng is not None)
        return "rng" not in self.skipped

    def _note_skipped(self, state: Mapping[str, Any], *, has_generators: bool) -> None:
        if not has_generators:
            self.skipped["rng"] = _NO_GENERATORS
        for key in state.get("values", {}):
            self.skipped[key] = "Accelerate keeps no plain values: register an object that has them"
        for key in state["generators"]:
            self.skipped[key] = "Accelerate keeps no generators but the global ones"
        progress = self.state.progress
        if any(progress.to_json().values()):
            self.skipped["progress"] = (
                f"Accelerate does not keep it: continue with epoch {progress.epoch}, and there with "
                f"accelerator.skip_first_batches(loader, {progress.batch})"
            )

    def _write(self, name: str, tree: Any) -> None:
        write_file(os.path.join(self.folder, name), tree, self.advance)
