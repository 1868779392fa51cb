"""The state of a training as every format is converted from and to: parts, counters, the state of each rank.

`open_state` reads it from every format: checkpoints of ours, and what other tools wrote. Nothing is executed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import CkptError, ConfigError, DamagedError
from ckpt.export.save_model import ADAPTER_CONFIG, CONFIG, GENERATION, about_model, is_adapter
from ckpt.export.source import beside, open_checkpoint, open_foreign
from ckpt.formats.checks import damage_reported
from ckpt.formats.foreign import accelerate, dcp, deepspeed, megatron, torch_files
from ckpt.formats.foreign.accelerate import in_memory
from ckpt.formats.foreign.torch_files import SavedDict, is_name_of_part, sorted_out
from ckpt.formats.native.documents import Decoder, refuse
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import (
    ACCELERATE,
    CKPT,
    DCP,
    DEEPSPEED,
    HF,
    INDEX_SUFFIX,
    MEGATRON,
    OLD_WEIGHTS,
    PEFT,
    TORCH,
    TRAINER,
    named,
)
from ckpt.load.accelerate import CUSTOM, UNKNOWN_PROGRESS, AccelerateState, ForeignPart, encoded_part, kind_of
from ckpt.load.reader import CheckpointReader, check_rank_state
from ckpt.root.catalog import own_key, read_manifest
from ckpt.root.folder import Folder, OneCheckpoint, Place
from ckpt.root.signing import BELIEVES_ALL, Trust
from ckpt.root.verify import size_problems
from ckpt.state.objects import KINDS, is_part_name
from ckpt.state.optimizer import by_name, by_number, nameless
from ckpt.state.parts import ENGINE
from ckpt.state.registry import RESERVED
from ckpt.storage import Storage

_OPTIMIZER = "optimizer state"
Outcome = tuple[tuple[str, ...], dict[str, str]]  # the parts that were written; what was not, with the reasons


@dataclass(frozen=True, kw_only=True)
class PortableState:
    """What a save holds, whoever wrote it. Tensors are read when they are written.

    `approximated` and `skipped` say what is not exact, and what was left out when it was read. `own_state` gives the
    state of a rank; a format that has none leaves it out. `beside` are other files: a configuration, a tokenizer.
    `about` describes the only model: its configuration, or its adapters.
    """

    origin: str
    name: str
    parts: Mapping[str, ForeignPart]
    progress: Progress = field(default_factory=Progress)
    world_size: int = 1
    approximated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    own_state: Callable[[int], dict[str, Any]] | None = None
    beside: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    is_authentic: bool = False  # it is signed by a key that is trusted

    @property
    def written(self) -> tuple[str, ...]:
        return (*self.parts, "rng") if self.generators(0) is not None else tuple(self.parts)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's own state, as a manager saves it. What is approximated, a manager says again when it loads it."""
        if self.own_state is not None:
            return self.own_state(rank)
        state = {"generators": {}, "loaders": {}, "source": {}, "lacking": dict(self.approximated)}
        return check_rank_state(state, self.origin)

    def generators(self, rank: int) -> dict[str, Any] | None:
        """The global random generators of a rank. None where the format keeps none."""
        return self.own_state(rank).get("rng") if self.own_state else None

    def of_kind(self, kind: str) -> list[str]:
        """The keys of the parts of a kind: `model`, or `model.0` and `model.1`."""
        return [key for key in self.parts if kind_of(key) == kind]

    def tree(self, key: str) -> Any:
        """The state of a part, with `PiecedTensor`s where tensors are; tensors of special kinds are read."""
        part = self.parts[key]
        return _LazyDecoder(part.tensors.__getitem__, f"{self.name}: {key}").decode(part.values)

    def named(self, key: str) -> dict[str, Any]:
        """The state of a part for formats that know each tensor by its name."""
        tree = self.tree(key)
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{self.name}: the state of {key} is a {type(tree).__name__}, and this format needs a dict of tensors. "
                "Convert it with to='torch', which keeps a state of any shape."
            )
        return tree

    def numbered(self, key: str) -> Any:
        """The state of an optimizer as torch's `state_dict` has it: parameters by number."""
        values = self.tree(key)
        if not _is_of_torch(values):
            return values
        with damage_reported(f"{self.name}: {key}", _OPTIMIZER):
            return by_number(values)

    def has_names(self, key: str) -> bool:
        """Whether the parameters of an optimizer are known by name: many formats number them."""
        values = self.tree(key)
        if not _is_of_torch(values):
            return True
        with damage_reported(f"{self.name}: {key}", _OPTIMIZER):
            names = [str(name) for group in values["param_groups"] for name in group["params"]]
            return not any(name.startswith(nameless("")) for name in names)

    def size(self, key: str) -> int:
        """The bytes of a part's tensors."""
        part = self.parts[key]
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in map(part.about, part.tensors))

    def the_model(self) -> str:
        """The key of the only model, for formats that hold one."""
        keys = self.of_kind("model")
        if len(keys) != 1:
            named = f"{len(keys)} models ({', '.join(keys)})" if keys else "no model"
            raise ConfigError(f"{self.name} has {named}, but this format needs exactly one model.")
        return keys[0]


class _LazyDecoder(Decoder):
    """Leaves tensors where they are; those of special kinds, and arrays of NumPy, are read."""

    def _numpy(self, tag: str, inner: Mapping[str, Any], depth: int) -> Any:
        return self._reading()._numpy(tag, inner, depth)

    def _packed(self, inner: Mapping[str, Any], depth: int) -> Any:
        return self._reading()._packed(inner, depth)

    def _reading(self) -> Decoder:
        return Decoder(lambda name: _read(self.tensor(name)), self.where)


def position_of(key: str) -> int:
    """The number at the end of a key, by which parts of a kind are ordered; 0 if there is none."""
    number = key.rpartition(".")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


def plain_generators(rng: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators without arrays of NumPy, which `torch.load(weights_only=True)` would refuse."""
    numpy = rng.get("numpy")
    if numpy is None:
        return dict(rng)
    inner = {**numpy["state"], "key": [int(word) for word in numpy["state"]["key"]], "pos": int(numpy["state"]["pos"])}
    return {**rng, "numpy": {**numpy, "state": inner}}


def _read(tensor: Any) -> Any:
    return tensor.read(tensor.box) if isinstance(tensor, PiecedTensor) else tensor


def encoded(trees: Mapping[str, Any], where: str) -> dict[str, ForeignPart]:
    """The parts of these states. The error names every value that a checkpoint cannot hold."""
    problems: list[str] = []
    named = {key: _named(tree, where) if kind_of(key) == "optimizer" else tree for key, tree in trees.items()}
    found = {key: encoded_part(key, tree, problems) for key, tree in named.items()}
    refuse(problems)
    return found


def _named(tree: Any, where: str) -> Any:
    """The state of an optimizer by parameter name; numbers become keys of their own."""
    if not _is_of_torch(tree):
        return tree
    with damage_reported(where, _OPTIMIZER):
        return by_name(tree)


def _is_of_torch(tree: Any) -> bool:
    """Whether it is the state of an optimizer of torch; others are kept as they are."""
    return isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys()


_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 100  # a file is named after it


def with_part_names(found: PortableState) -> PortableState:
    """The same state under names that a manager can register and a file can have. Those that changed are told."""
    names: dict[str, str] = {key: key for key in found.parts if _is_usable(key)}
    for key in found.parts:
        if key not in names:
            names[key] = _usable(key, names.values())
    told = {
        new: f"{key!r} in the source, which is not a valid part name: register it as {new!r}"
        for key, new in names.items()
        if new != key
    }
    parts = {names[key]: part for key, part in found.parts.items()}
    return replace(found, parts=parts, approximated={**found.approximated, **told})


def _is_usable(key: str) -> bool:
    head = key.partition(".")[0]
    free = head in (*KINDS, CUSTOM) if "." in key else key in KINDS
    return all(map(is_part_name, key.split("."))) and len(key) <= _LONGEST and (free or head not in RESERVED)


def _usable(key: str, taken: Collection[str]) -> str:
    stem = ".".join(_UNUSABLE.sub("_", word) or "_" for word in key[: _LONGEST // 2].split("."))
    flat = stem.replace(".", "_")
    tries = (stem, flat, *(f"{flat}_{number}" for number in range(1, len(taken) + 2)))
    return next(name for name in tries if name not in taken and _is_usable(name))


ADAPTER_ALONE = (
    "a PEFT adapter, under its file's names: the model that it adapts is not in the source, and a manager of the "
    "adapted model cannot resume from it. ckpt.load_model loads the source itself"
)
NO_CONFIG = "the source has none, and from_pretrained needs it: save the model's config beside it"


def files_left(beside: Iterable[str], kept: Mapping[str, Any]) -> dict[str, str]:
    """The files beside a model that only `hf` keeps; `kept` is what a checkpoint of ours has of them."""
    inside = {CONFIG, GENERATION, ADAPTER_CONFIG} if kept else set()
    left = sorted(path for path in beside if path not in inside)
    return {", ".join(left): "beside the model: only hf keeps such files"} if left else {}


_FEW = 10
_BESIDE = (".json", ".txt", ".model", ".jinja")
_MODEL_ALONE = "the source has only a model, so its training starts over"
_NOT_TAKEN = {
    "lr_scheduler": "DeepSpeed's schedule is not converted: give the manager a scheduler, and set it to the step",
    "loss_scaler": "the factor of the loss is not converted: master weights are trained in fp32",
    "data_sampler": "the position in the data is not converted",
}
_OWN_STATE = "state of the user's own, or of DeepSpeed, which is not converted"
_ENGINE = "DeepSpeed reads no files but its own: its optimizer starts over, from the model's weights"
_OWN_GRADIENTS = "gradients of an accumulation window, which starts over"
_OWN_PART = "held by single ranks: it is not converted"


@contextmanager
def open_state(
    source: str | os.PathLike[str], format: str | None = None, trust: Trust = BELIEVES_ALL
) -> Iterator[PortableState]:
    """The checkpoint at a path or URL, of any format that is read; of a root, its newest."""
    place = Place.at(source, format=format)
    if place.is_ours:
        with _open_native(place.checkpoint(trust).tell(), trust) as found:
            yield found
    else:
        trust.refuse_unsigned(os.fspath(source))
        yield foreign_state(place)


def foreign_state(place: Place) -> PortableState:
    """What another tool has saved."""
    return (_model_alone if place.format is None else _READERS[place.format.name])(place)


@contextmanager
def _open_native(checkpoint: OneCheckpoint, trust: Trust) -> Iterator[PortableState]:
    """A checkpoint of ours, verified, and locked while it is read."""
    with _locked_checkpoint(checkpoint, trust) as (storage, manifest), ExitStack() as opened:
        told = replace(trust, keys=()) if not manifest.is_authentic else trust  # the warning was given
        reader = CheckpointReader(storage, manifest, 0)
        skipped = {key: _ENGINE for key in reader.parts if key.partition(".")[0] == ENGINE}
        parts: dict[str, ForeignPart] = {}
        about: dict[str, Mapping[str, Any]] = {}
        for key, part in reader.parts.items():
            if key not in skipped:
                has = reader.has_tensors(key)
                tensors = opened.enter_context(open_checkpoint(checkpoint, key, told)).tensors if has else {}
                parts[key] = ForeignPart(part["state"], tensors)
                if kind_of(key) == "model" and part.get("about"):  # an optimizer has one of its own
                    about[key] = part["about"]
        yield PortableState(
            origin=CKPT.name,
            name=manifest.name,
            parts=parts,
            progress=Progress.from_json(manifest.progress),
            world_size=manifest.world_size,
            skipped=skipped | _of_single_ranks(reader, storage, manifest),
            own_state=reader.rank_state if "rng" in reader.state else None,
            approximated=reader.state.get("lacking", {}),
            about=next(iter(about.values())) if len(about) == 1 else {},
            is_authentic=manifest.is_authentic,
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
def _locked_checkpoint(checkpoint: OneCheckpoint, trust: Trust) -> Iterator[tuple[Storage, Manifest]]:
    """The root and the manifest of a checkpoint whose files are all there."""
    storage, name = checkpoint.root, checkpoint.name
    with storage.lock(name, shared=True):  # retention of a running job must not remove what is being read
        manifest = trust.accepted(read_manifest(storage, name))
        wrong = size_problems(storage, manifest)
        if wrong:
            raise DamagedError(f"{manifest.name} is damaged: {'; '.join(wrong)}. Convert another checkpoint.")
        yield storage, manifest


def _from_accelerate(place: Place) -> PortableState:
    """What `Accelerator.save_state` wrote."""
    foreign = AccelerateState(place.folder)
    return PortableState(
        origin=ACCELERATE.name,
        name=place.folder.name,
        parts=foreign.parts,
        world_size=foreign.saved.world_size,
        approximated={"progress": UNKNOWN_PROGRESS, **foreign.rank_state(0).get("lacking", {})},
        skipped=foreign.saved.left_out,
        own_state=foreign.rank_state,
    )


def _from_deepspeed(place: Place) -> PortableState:
    """What an engine's `save_checkpoint` wrote: master weights, and the optimizer's state of each parameter."""
    folder = deepspeed.save_in(place.folder)
    engine = deepspeed.SavedEngine(folder)
    trees: dict[str, Any] = {"model": engine.master_model()}
    optimizer, facts = engine.optimizer(), engine.facts()
    skipped = {key: _NOT_TAKEN.get(key, _OWN_STATE) for key in facts.others}
    if optimizer is None:
        skipped["optimizer"] = "the save holds none"
    else:
        trees["optimizer"] = optimizer
    return PortableState(
        origin=DEEPSPEED.name,
        name=place.folder.name,
        parts=encoded(trees, folder.where),
        progress=Progress(step=facts.steps, samples=facts.samples),
        approximated=_unknown_position("DeepSpeed", "its steps are carried over"),
        skipped=skipped,
    )


def _from_megatron(place: Place) -> PortableState:
    """The model of a `torch_dist` folder."""
    folder = megatron.save_in(place.folder)
    save = megatron.MegatronSave.opened(folder)
    empty, others = save.extra_state()
    skipped = dict.fromkeys(others[:_FEW], "an object that is not a tensor: ckpt does not read it")
    if len(others) > _FEW:
        skipped[f"{len(others) - _FEW} more objects"] = "not tensors either"
    if "optimizer" in save.parts:
        skipped["optimizer"] = (
            "Megatron's optimizer numbers its parameters by rank: it is not converted. ckpt.merge(part='optimizer') "
            "writes its tensors"
        )
    step, told = _iteration(save, skipped)
    return PortableState(
        origin=MEGATRON.name,
        name=place.folder.name,
        parts=encoded({"model": {**save.tensors("model"), **empty}}, folder.where),
        progress=Progress(step=step),
        approximated=_unknown_position("Megatron-Core", told),
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
    return step, "its steps are carried over"


def _unknown_position(tool: str, steps: str) -> dict[str, str]:
    return {
        "progress": f"{tool} does not save how many epochs and batches were done: {steps}, and the data starts over. "
        "Set manager.progress before the loop if that matters",
        "rng": f"{tool}'s random generators are not restored, so this run's generators are left as they are",
    }


def _from_dcp(place: Place) -> PortableState:
    """A folder of torch.distributed.checkpoint, with whatever its state dict was called."""
    folder = place.folder
    tree = _dcp_tree(folder)
    if not isinstance(tree, dict):
        raise ConfigError(f"{folder.where} contains a {type(tree).__name__}, not the state of a training run.")
    return _from_saved_dict(sorted_out(_outermost(tree), folder.where, DCP.name), folder.name, DCP.tool)


def _dcp_tree(folder: Folder) -> Any:
    contents = dcp.contents_of(folder)
    folder.check(contents.needed_files())
    return contents.tree(folder.opened, folder.where)


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


def _from_saved_dict(saved: SavedDict, name: str, tool: str) -> PortableState:
    """What one dict holds: of `torch.save`, of Lightning, of torch.distributed.checkpoint."""
    counters = ", ".join(key for key in saved.counters if key != "batch")  # in the epoch, the data begins anew
    told = f"its counters are carried over ({counters})" if counters else "counting begins at 0"
    approximated = _unknown_position(tool, told)
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
    with damage_reported(where, "file of random generator states"):
        if isinstance(found.get("numpy"), dict):
            import numpy as np

            inner = found["numpy"]["state"]
            found["numpy"] = {**found["numpy"], "state": {**inner, "key": np.asarray(inner["key"], dtype=np.uint32)}}
    return found


def _rank_state(rng: Mapping[str, Any], approximated: Mapping[str, str], where: str) -> dict[str, Any]:
    state = {"rng": dict(rng), "generators": {}, "loaders": {}, "source": {}, "lacking": dict(approximated)}
    return check_rank_state(state, where)


def _from_trainer(place: Place) -> PortableState:
    """A `checkpoint-500` of the Trainer; its model may be whole, sharded by FSDP, or of DeepSpeed."""
    folder = place.folder
    own = accelerate.TrainerFolder(folder)
    steps, epochs = own.progress()
    told = f"step {steps} and epoch {int(epochs)} of {epochs:g} are carried over"
    approximated = _unknown_position("The Trainer", told)
    others = _beside(folder)
    if is_adapter(others):
        approximated["model"] = ADAPTER_ALONE
    rng = own.generators(0)
    if rng is not None:
        approximated.pop("rng")

    def own_state(rank: int) -> dict[str, Any]:
        return _rank_state(own.generators(rank) or {}, approximated, folder.where)

    if DEEPSPEED.sign(folder.files):
        found = _from_deepspeed(place)
        parts, skipped = found.parts, {**found.skipped, **own.left_out}
    else:
        model = open_foreign(place, "model")
        trees = {"model": model.tensors, **_sharded_optimizer(folder), **own.parts()}
        parts, skipped = encoded(trees, folder.where), own.left_out
    return PortableState(
        origin=TRAINER.name,
        name=folder.name,
        parts=parts,
        progress=Progress(step=steps, epoch=int(epochs)),
        world_size=own.world_size,
        approximated=approximated,
        skipped=skipped,
        own_state=None if rng is None else own_state,
        beside=others,
        about=about_model(others, parts["model"].tensors),
    )


def _sharded_optimizer(folder: Folder) -> dict[str, Any]:
    """The optimizer that FSDP sharded, in the folder that Accelerate wrote for it."""
    below = folder.below("optimizer_0/")
    if dcp.METADATA not in below.files:
        return {}
    tree = _dcp_tree(below)
    return {"optimizer": tree.get("optimizer", tree)}


def _from_file(place: Place) -> PortableState:
    """A file of `torch.save`, or of Lightning."""
    folder, path = place.folder, place.file or OLD_WEIGHTS
    saved = torch_files.read_file(folder.opened(path), folder.files[path], f"{folder.where}/{path}")
    return _from_saved_dict(saved, path.rpartition(".")[0] or path, named(saved.origin).tool)


def _model_alone(place: Place) -> PortableState:
    """A model alone: as save_pretrained writes it, one file of safetensors, or of a format that was installed."""
    model = open_foreign(place, "model")
    return PortableState(
        origin=HF.name,
        name=_stem(place.file) if place.file else place.folder.name,
        parts=encoded({"model": model.tensors}, place.where),
        approximated={
            **({"model": ADAPTER_ALONE} if is_adapter(model.beside) else {}),
            **dict.fromkeys(("progress", "rng"), _MODEL_ALONE),
        },
        beside=model.beside,
        about=about_model(model.beside, model.tensors),
    )


def _stem(path: str) -> str:
    path = path.removesuffix(INDEX_SUFFIX)
    return path.rpartition(".")[0] or path


def _beside(folder: Folder) -> dict[str, Any]:
    """What save_pretrained writes beside a model: its configuration, its tokenizer."""
    return {
        path: read
        for path, read in beside(folder).items()
        if path.endswith(_BESIDE) and path != accelerate.TRAINER_STATE
    }


_READERS: dict[str, Callable[[Place], PortableState]] = {
    HF.name: _model_alone,
    PEFT.name: _model_alone,
    DCP.name: _from_dcp,
    ACCELERATE.name: _from_accelerate,
    TRAINER.name: _from_trainer,
    DEEPSPEED.name: _from_deepspeed,
    MEGATRON.name: _from_megatron,
    TORCH.name: _from_file,
}
