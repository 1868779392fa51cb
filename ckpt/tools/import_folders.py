"""What torch.distributed.checkpoint, the Trainer of Transformers and save_pretrained wrote, as portable state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError
from ckpt.export.folders import belongs_beside
from ckpt.export.source import open_source
from ckpt.formats.damage import damage_reported
from ckpt.formats.foreign import dcp, deepspeed, trainer
from ckpt.formats.foreign.accelerate import in_memory
from ckpt.formats.foreign.torch_files import SavedDict, is_name_of_part, sorted_out
from ckpt.load.rank_state import check_rank_state
from ckpt.root.folder import Folder
from ckpt.tools.import_foreign import from_deepspeed, unknown_position
from ckpt.tools.model_about import ADAPTER_ALONE, about_model, is_adapter
from ckpt.tools.portable_state import PortableState, encoded

DCP, HUGGING_FACE = "dcp", "hf"
_LARGEST_METADATA = 1 << 30  # bytes
_BESIDE = (".json", ".txt", ".model", ".jinja")
_MODEL_ALONE = "the source holds a model and nothing else: its training begins anew"


def from_dcp(folder: Folder) -> PortableState:
    """A folder of torch.distributed.checkpoint, with whatever its state dict was called."""
    where = f"{folder.where}/{dcp.METADATA}"
    contents = dcp.read_metadata(folder.document(dcp.METADATA, _LARGEST_METADATA), where)
    folder.check(contents.needed_files())
    tree = contents.tree(folder.opened, folder.where)
    if not isinstance(tree, dict):
        raise ConfigError(f"{folder.where} holds a {type(tree).__name__}, and no state of a training.")
    return from_saved_dict(sorted_out(_outermost(tree), folder.where, DCP), folder.name, "torch.distributed.checkpoint")


def _outermost(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict itself: many save it below a single key of their own (`app`)."""
    while len(tree) == 1:
        ((key, inner),) = tree.items()
        if is_name_of_part(key) or not isinstance(inner, dict) or {"state", "param_groups"} <= inner.keys():
            break
        if not any(isinstance(value, dict) for value in inner.values()):
            break
        tree = inner
    return tree


def from_saved_dict(saved: SavedDict, name: str, tool: str) -> PortableState:
    """What one dict holds: of `torch.save`, of Lightning, of torch.distributed.checkpoint."""
    counters = ", ".join(key for key in saved.counters if key != "batch")  # in the epoch, the data begins anew
    told = f"what it counts is taken over ({counters})" if counters else "counting begins at 0"
    approximated = unknown_position(tool, told)
    rng = None if saved.rng is None else _generators(saved.rng, name)
    if rng is not None:
        approximated.pop("rng")
    return PortableState(
        origin=saved.origin,
        name=name,
        parts=encoded(saved.parts, name),
        progress=Progress(**{key: value for key, value in saved.counters.items() if key != "batch"}),
        approximated=approximated,
        skipped=saved.skipped,
        own_state=None if rng is None else lambda rank: _rank_state(rng, approximated, name),
    )


def _generators(saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The states of generators as ckpt writes them into one file: NumPy's as a list of numbers."""
    found: dict[str, Any] = in_memory(dict(saved))
    with damage_reported(where, "states of random generators"):
        if isinstance(found.get("numpy"), dict):
            import numpy as np

            inner = found["numpy"]["state"]
            found["numpy"] = {**found["numpy"], "state": {**inner, "key": np.asarray(inner["key"], dtype=np.uint32)}}
    return found


def _rank_state(rng: Mapping[str, Any], approximated: Mapping[str, str], where: str) -> dict[str, Any]:
    state = {"rng": dict(rng), "generators": {}, "loaders": {}, "source": {}, "lacking": dict(approximated)}
    return check_rank_state(state, where)


def from_trainer(folder: Folder) -> PortableState:
    """A `checkpoint-500` of the Trainer; its model may be whole, sharded by FSDP, or of DeepSpeed."""
    own = trainer.TrainerFolder(folder)
    steps, epochs = own.progress()
    told = f"step {steps} and epoch {int(epochs)} of {epochs:g} are taken over"
    approximated = unknown_position("The Trainer", told)
    beside = _beside(folder)
    if is_adapter(beside):
        approximated["model"] = ADAPTER_ALONE
    rng = own.generators(0)
    if rng is not None:
        approximated.pop("rng")

    def own_state(rank: int) -> dict[str, Any]:
        return _rank_state(own.generators(rank) or {}, approximated, folder.where)

    engine = deepspeed.save_in(folder)
    if engine is not None:
        found = from_deepspeed(engine, folder.name)
        parts, skipped = found.parts, {**found.skipped, **own.left_out}
    else:
        with open_source(folder.where, "model") as model:
            trees = {"model": model.tensors, **_sharded_optimizer(folder), **own.parts()}
        parts, skipped = encoded(trees, folder.where), own.left_out
    return PortableState(
        origin=trainer.NAME,
        name=folder.name,
        parts=parts,
        progress=Progress(step=steps, epoch=int(epochs)),
        world_size=own.world_size,
        approximated=approximated,
        skipped=skipped,
        own_state=None if rng is None else own_state,
        beside=beside,
        about=about_model(beside, parts["model"].tensors),
    )


def _sharded_optimizer(folder: Folder) -> dict[str, Any]:
    """The optimizer that FSDP sharded, in the folder that Accelerate wrote for it."""
    below = folder.below("optimizer_0/")
    if dcp.METADATA not in below.files:
        return {}
    contents = dcp.read_metadata(below.document(dcp.METADATA, _LARGEST_METADATA), f"{below.where}/{dcp.METADATA}")
    below.check(contents.needed_files())
    tree = contents.tree(below.opened, below.where)
    return {"optimizer": tree.get("optimizer", tree)}


def from_model(source: str, name: str) -> PortableState:
    """A model alone: as save_pretrained writes it, one file of safetensors, or of a format that was installed."""
    with open_source(source, "model") as model:
        return PortableState(
            origin=HUGGING_FACE,
            name=name,
            parts=encoded({"model": model.tensors}, source),
            approximated={
                **({"model": ADAPTER_ALONE} if is_adapter(model.beside) else {}),
                **dict.fromkeys(("progress", "rng"), _MODEL_ALONE),
            },
            beside=model.beside,
            about=about_model(model.beside, model.tensors),
        )


def _beside(folder: Folder) -> dict[str, Any]:
    """What save_pretrained writes beside a model: its configuration, its tokenizer."""
    named = [path for path in folder.files if belongs_beside(path) and path.endswith(_BESIDE)]
    return {path: folder.reader(path) for path in named if path != trainer.STATE}
