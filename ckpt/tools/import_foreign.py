"""What Accelerate, DeepSpeed and Megatron-Core wrote, as portable state."""

from __future__ import annotations

from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import CkptError
from ckpt.formats.foreign import accelerate, deepspeed, megatron
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.load.accelerate_state import UNKNOWN_PROGRESS, AccelerateState
from ckpt.root.folder import Folder
from ckpt.tools.portable_state import PortableState, encoded

_FEW = 10
_NOT_TAKEN = {
    "lr_scheduler": "DeepSpeed's schedule is not converted: give the manager a scheduler, and set it to the step",
    "loss_scaler": "the factor of the loss is not converted: master weights are trained in fp32",
    "data_sampler": "the position in the data is not converted",
}
_OWN_STATE = "state of the user's own, or of DeepSpeed, which is not converted"


def from_accelerate(folder: Folder) -> PortableState:
    """What `Accelerator.save_state` wrote."""
    foreign = AccelerateState(folder)
    return PortableState(
        origin=accelerate.NAME,
        name=folder.name,
        parts=foreign.parts,
        world_size=foreign.saved.world_size,
        approximated={"progress": UNKNOWN_PROGRESS, **foreign.rank_state(0).get("lacking", {})},
        skipped=foreign.saved.left_out,
        own_state=foreign.rank_state,
    )


def from_deepspeed(folder: FolderReader, name: str) -> PortableState:
    """What an engine's `save_checkpoint` wrote: master weights, and the optimizer's state of each parameter."""
    engine = deepspeed.SavedEngine(folder)
    trees: dict[str, Any] = {"model": engine.master_model()}
    optimizer, facts = engine.optimizer(), engine.facts()
    skipped = {key: _NOT_TAKEN.get(key, _OWN_STATE) for key in facts.others}
    if optimizer is None:
        skipped["optimizer"] = "the save holds none"
    else:
        trees["optimizer"] = optimizer
    return PortableState(
        origin=deepspeed.NAME,
        name=name,
        parts=encoded(trees, folder.where),
        progress=Progress(step=facts.steps, samples=facts.samples),
        approximated=unknown_position("DeepSpeed", "its steps are taken over"),
        skipped=skipped,
    )


def from_megatron(folder: FolderReader, name: str) -> PortableState:
    """The model of a `torch_dist` folder."""
    save = megatron.MegatronSave.opened(folder)
    empty, others = save.extra_state()
    skipped = dict.fromkeys(others[:_FEW], "an object that is no tensor, and is not read")
    if len(others) > _FEW:
        skipped[f"{len(others) - _FEW} more objects"] = "no tensors, either"
    if "optimizer" in save.parts:
        skipped["optimizer"] = (
            "Megatron's optimizer numbers its parameters by rank: it is not converted. ckpt.merge(part='optimizer') "
            "writes its tensors"
        )
    step, told = _iteration(save, skipped)
    return PortableState(
        origin=megatron.NAME,
        name=name,
        parts=encoded({"model": {**save.tensors("model"), **empty}}, folder.where),
        progress=Progress(step=step),
        approximated=unknown_position("Megatron-Core", told),
        skipped=skipped,
    )


def _iteration(save: megatron.MegatronSave, skipped: dict[str, str]) -> tuple[int, str]:
    try:
        step, keys = save.iteration(), save.common_keys()
    except CkptError as error:
        skipped[megatron.COMMON] = f"it was not read: {error}"
        return 0, "the number of its steps was not read, and counting begins at 0"
    for key in keys:
        if key != megatron.ITERATION:
            skipped[f"{megatron.COMMON}: {key}"] = "settings and state of Megatron's own, which are not converted"
    if step is None:
        return 0, f"{megatron.COMMON} has no iteration, and counting begins at 0"
    return step, "its steps are taken over"


def unknown_position(tool: str, steps: str) -> dict[str, str]:
    return {
        "progress": f"{tool} does not save how many epochs and batches were done: {steps}, and the data begins anew. "
        "Set manager.progress before the loop if that matters",
        "rng": f"{tool}'s random generators are not taken over: those here are left as they are",
    }
