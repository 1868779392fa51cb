"""A checkpoint of ours, whole or sharded, as portable state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, DamagedError
from ckpt.export.source import open_source
from ckpt.formats.native.manifest import Manifest
from ckpt.load.accelerate_state import ForeignPart
from ckpt.load.reader import CheckpointReader
from ckpt.root.catalog import locate, read_manifest
from ckpt.root.file_names import own_key
from ckpt.root.verify import size_problems
from ckpt.state.deepspeed.engine import KEY
from ckpt.storage import Storage
from ckpt.tools.portable_state import PortableState

NAME = "ckpt"
_ENGINE = "DeepSpeed reads no files but its own: its optimizer starts afresh, from the model's weights"
_OWN_GRADIENTS = "gradients of an accumulation window: it starts afresh"
_OWN_PART = "held by single ranks: it is not converted"


@contextmanager
def open_native(source: str | os.PathLike[str]) -> Iterator[PortableState]:
    """The one checkpoint at a path or URL, verified, and locked while it is read."""
    with locked_checkpoint(source) as (storage, manifest), ExitStack() as opened:
        reader = CheckpointReader(storage, manifest, 0)
        where = f"{storage.url.rstrip('/')}/{manifest.name}"
        skipped = {key: _ENGINE for key in reader.parts if key.partition(".")[0] == KEY}
        parts: dict[str, ForeignPart] = {}
        about: dict[str, Mapping[str, Any]] = {}
        for key, part in reader.parts.items():
            if key not in skipped:
                has = reader.has_tensors(key)
                tensors = opened.enter_context(open_source(where, key)).tensors if has else {}
                parts[key] = ForeignPart(part["state"], tensors)
                about |= {key: part["about"]} if part.get("about") else {}
        yield PortableState(
            origin=NAME,
            name=manifest.name,
            parts=parts,
            progress=Progress.from_json(manifest.progress),
            world_size=manifest.world_size,
            skipped=skipped | _of_single_ranks(reader, storage, manifest),
            own_state=reader.rank_state if "rng" in reader.state else None,
            approximated=reader.state.get("lacking", {}),
            about=next(iter(about.values())) if len(about) == 1 else {},
        )


def _of_single_ranks(reader: CheckpointReader, storage: Storage, manifest: Manifest) -> dict[str, str]:
    """What other ranks held differently, which no single state has."""
    found = {
        f"{key} of other ranks": "their state differs: the main rank's is written"
        for key, part in reader.parts.items()
        if "differs" in part
    }
    others = (CheckpointReader(storage, manifest, rank).own for rank in range(1, manifest.world_size))
    known = {own_key(key, rank) for key in reader.parts for rank in range(manifest.world_size)}
    for key in dict.fromkeys(key for own in (reader.own, *others) for key in own if key not in known):
        name = "gradients" if key.startswith("gradients") else key
        found[name] = _OWN_GRADIENTS if name == "gradients" else _OWN_PART
    return found


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
