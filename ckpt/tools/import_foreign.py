"""What Accelerate, DeepSpeed and Megatron-Core wrote, as the parts of a checkpoint of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import CkptError, ConfigError, MissingError
from ckpt.formats.foreign import accelerate, deepspeed, megatron
from ckpt.formats.foreign.accelerate import FolderReader
from ckpt.formats.native.json_values import refuse
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.load.accelerate_state import UNKNOWN_PROGRESS, AccelerateState, ForeignPart, encoded_part
from ckpt.load.rank_state import check_rank_state
from ckpt.root.folder import Folder
from ckpt.state.optimizer import by_name

_FEW = 10
_NOT_TAKEN = {
    "lr_scheduler": "DeepSpeed's schedule is not converted: give the manager a scheduler, and set it to the step",
    "loss_scaler": "the factor of the loss is not converted: master weights are trained in fp32",
    "data_sampler": "the position in the data is not converted",
}
_OWN_STATE = "state of the user's own, or of DeepSpeed, which is not converted"


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The parts of a foreign save, and what a manager is to be told when it loads them."""

    origin: str
    parts: Mapping[str, ForeignPart]
    progress: Progress = field(default_factory=Progress)
    world_size: int = 1
    approximated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    own_state: Callable[[int], dict[str, Any]] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        return (*self.parts, "rng") if self.own_state else tuple(self.parts)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's own state, as a manager saves it. What is approximated, a manager says again when it loads it."""
        if self.own_state is not None:
            return self.own_state(rank)
        state = {"generators": {}, "loaders": {}, "source": {}, "lacking": dict(self.approximated)}
        return check_rank_state(state, self.origin)


def import_from(folder: Folder) -> Imported:
    """What is in a folder, whoever wrote it."""
    if not folder.files:
        raise MissingError(f"there is nothing at {folder.where}. Give a folder that Accelerate's save_state wrote, or "
                           "DeepSpeed, or Megatron-Core.")  # fmt: skip
    if FILE_NAME in folder.files:
        raise ConfigError(f"{folder.where} is a checkpoint of ckpt already. For another kind, say to='accelerate'.")
    if accelerate.is_accelerate(folder.files):
        return _from_accelerate(folder)
    if (engine := deepspeed.save_in(folder)) is not None:
        return _from_deepspeed(engine)
    if (written := megatron.save_in(folder)) is not None:
        return _from_megatron(written)
    raise ConfigError(
        f"{folder.where} is not what Accelerate's save_state writes: there is no random_states_0.pkl in it. Nor is it "
        "of DeepSpeed's save_checkpoint, or of Megatron-Core. For model weights alone, see ckpt.merge."
    )


def _from_accelerate(folder: Folder) -> Imported:
    foreign = AccelerateState(folder)
    return Imported(
        origin=accelerate.NAME,
        parts=foreign.parts,
        world_size=foreign.saved.world_size,
        approximated={"progress": UNKNOWN_PROGRESS},
        skipped=foreign.saved.left_out,
        own_state=foreign.rank_state,
    )


def _from_deepspeed(folder: FolderReader) -> Imported:
    engine = deepspeed.SavedEngine(folder)
    trees: dict[str, Any] = {"model": engine.master_model()}
    optimizer, facts = engine.optimizer(), engine.facts()
    skipped = {key: _NOT_TAKEN.get(key, _OWN_STATE) for key in facts.others}
    if optimizer is None:
        skipped["optimizer"] = "the save holds none"
    else:
        trees["optimizer"] = by_name(optimizer)
    return Imported(
        origin=deepspeed.NAME,
        parts=_encoded(trees),
        progress=Progress(step=facts.steps, samples=facts.samples),
        approximated=_unknown("DeepSpeed", "its steps are taken over"),
        skipped=skipped,
    )


def _from_megatron(folder: FolderReader) -> Imported:
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
    return Imported(
        origin=megatron.NAME,
        parts=_encoded({"model": {**save.tensors("model"), **empty}}),
        progress=Progress(step=step),
        approximated=_unknown("Megatron-Core", told),
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


def _unknown(tool: str, steps: str) -> dict[str, str]:
    return {
        "progress": f"{tool} does not save how many epochs and batches were done: {steps}, and the data begins anew. "
        "Set manager.progress before the loop if that matters",
        "rng": f"{tool}'s random generators are not taken over: those here are left as they are",
    }


def _encoded(trees: Mapping[str, Any]) -> dict[str, ForeignPart]:
    problems: list[str] = []
    found = {key: encoded_part(key, tree, problems) for key, tree in trees.items()}
    refuse(problems)
    return found
