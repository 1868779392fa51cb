"""Lightning: a plugin through which its Trainer and Fabric save and load, and a callback for what they leave out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import Callback

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, DamagedError, UnsupportedError
from ckpt.formats.native.documents import decode_inline, encode_inline
from ckpt.formats.native.manifest import Manifest
from ckpt.load.reader import CheckpointReader
from ckpt.load.select import choose
from ckpt.ranks.find import find_ranks
from ckpt.ranks.group import MAIN, Ranks, SingleProcess
from ckpt.root import catalog
from ckpt.root.verify import problems
from ckpt.save.capture import StateCapture
from ckpt.save.captured_state import CapturedState
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver
from ckpt.save.transaction import SaveRequest
from ckpt.state import rng
from ckpt.state.objects import is_part_name
from ckpt.state.parts import ObjectPart, SavedTensor
from ckpt.storage import Storage, open_storage, place_of

_WHOLE = "checkpoint"  # the one part, where entries have names that no file can have
_GENERATORS = "ckpt_generators"
_WEIGHTS, _MODEL = "state_dict", "model"  # where Lightning has a model's weights, and where other tools look for them


class CkptIO(CheckpointIO):  # type: ignore[misc]
    """Checkpoints of Lightning that are atomic, hashed, free of pickles, and written while training goes on.

        Trainer(plugins=[CkptIO()], callbacks=[ModelCheckpoint("checkpoints")])
        trainer.fit(model, ckpt_path=CkptIO.newest("checkpoints"))      # the newest intact one, or a fresh start

        Fabric(plugins=[CkptIO()])

    A checkpoint is a folder at the path that Lightning gives, with `model.safetensors` and JSON: `ckpt ls` and
    `ckpt verify` know it. With `background=False`, training waits until it is durable.
    """

    def __init__(self, *, background: bool = True) -> None:
        self._background = background
        self._savers: dict[str, Saver] = {}
        self._unwanted: list[str] = []  # paths to remove when what replaces them is committed

    @staticmethod
    def newest(folder: str | os.PathLike[str]) -> str | None:
        """The path of the newest checkpoint in a folder that is intact in every byte; none if there is none at all."""
        storage = open_storage(folder)
        with ExitStack() as held:
            choice = choose(
                (storage,), SingleProcess(), None, lambda _, manifest, held: _verify(storage, manifest), held
            )
        return f"{storage.url}/{choice.manifest.name}" if choice else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Take the state as it is now, and write it. What went wrong with the save before is raised here."""
        if storage_options is not None:
            raise ConfigError("CkptIO takes no storage_options: the path says where a checkpoint goes.")
        root, name = _divided(path)
        self._settle()
        facts = {"progress": _progress(checkpoint).to_json(), "metrics": {}}
        request = SaveRequest(catalog.check_name(name), lambda: _captured(checkpoint), frozenset, facts)
        self._saver(root).save(request, wait=not self._background)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as it was given to `save_checkpoint`. No pickle is involved, whatever `weights_only` says."""
        root, name = _divided(path)
        self._settle()
        storage, place = open_storage(root), _placing(map_location)
        with ExitStack() as held:
            choice = choose(
                (storage,),
                SingleProcess(),
                name,
                lambda _, one, held: _loaded(CheckpointReader(storage, one, MAIN), place),
                held,
            )
        assert choice is not None  # one that was named is there, or that is an error
        self._saver(root).root.follow(choice.manifest, ())
        loaded: dict[str, Any] = choice.ready
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; while another is being written, not before that is committed."""
        self._unwanted.append(os.fspath(path))
        if not any(saver.busy for saver in self._savers.values()):
            self._settle()

    def teardown(self) -> None:
        """Return when everything is committed, and let go of the folders."""
        self._settle()
        for saver in self._savers.values():
            saver.close()
        self._savers.clear()

    def _saver(self, root: str) -> Saver:
        storage = open_storage(root)
        place = place_of(storage)
        if place not in self._savers:
            # Lightning says where to go on from, and may begin anew in the same folder; its main rank saves alone
            self._savers[place] = Saver(RootWriter(storage, SingleProcess(), has_resumed=True))
        return self._savers[place]

    def _settle(self) -> None:
        """Wait for what is under way, then remove what it was to replace."""
        for saver in self._savers.values():
            saver.wait()
        unwanted, self._unwanted = self._unwanted, []
        for path in unwanted:
            root, name = _divided(path)
            self._saver(root).root.remove(name)


class CkptGenerators(Callback):  # type: ignore[misc]
    """Keeps the random generators of every rank, as Lightning does not: dropout and shuffling go on exactly.

        Trainer(plugins=[CkptIO()], callbacks=[ModelCheckpoint("checkpoints"), CkptGenerators()])

    In the middle of an epoch that needs a loader that says where it is, such as torchdata's `StatefulDataLoader`.
    """

    def __init__(self, *, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._ranks: Ranks | None = None
        self._waiting: list[str] = []  # of every rank, as they were saved

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        mine = json.dumps(encode_inline(rng.capture(), _GENERATORS, []))
        checkpoint[_GENERATORS] = self._talks().gather("on_save_checkpoint()", mine)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._waiting = checkpoint.get(_GENERATORS, []) if trainer.state.fn == "fit" else []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._restore()  # loaders are asked for the order of an epoch after this

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 0:  # asking for an order that was known already has moved them on
            self._restore()
        self._waiting = []

    def _restore(self) -> None:
        if self._waiting:
            rank = self._talks().rank
            known = rank < len(self._waiting)
            state = decode_inline(json.loads(self._waiting[rank if known else MAIN]))
            rng.restore(state) if known else rng.derive(state, rank)

    def _talks(self) -> Ranks:
        self._ranks = self._ranks or find_ranks(_GENERATORS, self._timeout)
        return self._ranks


@dataclass
class Entry:
    """One entry of a checkpoint of Lightning."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any, /) -> None:
        self.value = state


class Weights(Entry):
    """The model's weights, under another name than Lightning's."""


def _captured(checkpoint: dict[str, Any]) -> CapturedState:
    entries: dict[Any, Entry] = {key: Entry(value) for key, value in checkpoint.items()}
    if _WEIGHTS in checkpoint and _MODEL not in checkpoint:
        entries = {_MODEL if key == _WEIGHTS else key: entry for key, entry in entries.items()}
        entries[_MODEL] = Weights(checkpoint[_WEIGHTS])
    if not all(map(is_part_name, entries)):
        entries = {_WHOLE: Entry(checkpoint)}
    parts = [ObjectPart(key, entry) for key, entry in entries.items()]
    try:
        return StateCapture(SingleProcess(), "full").capture(parts, {}, {})
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error}\nLightning took this from hparams, a callback, or on_save_checkpoint: give plain values there "
            "(str(...), dict(...), OmegaConf.to_container(...)), or save_hyperparameters(ignore=...).",
            error.problems,
        ) from error


def _loaded(opened: CheckpointReader, place: Callable[[SavedTensor], Any]) -> dict[str, Any]:
    values = {key: opened.ask(key, place) for key in opened.parts}
    opened.read_new()
    if values.keys() == {_WHOLE}:
        whole: dict[str, Any] = values[_WHOLE]()
        return whole
    return {_WEIGHTS if opened.kind(key) == Weights.__name__ else key: value() for key, value in values.items()}


def _placing(map_location: Any) -> Callable[[SavedTensor], Any]:
    """Where tensors are read to: memory, or the device that is named. There is no other place that they come from."""
    if not isinstance(map_location, str | torch.device):
        return lambda saved: None
    return lambda saved: torch.empty(saved.shape, dtype=saved.dtype, device=map_location)


def _progress(checkpoint: dict[str, Any]) -> Progress:
    numbers = {key: checkpoint.get(key) for key in ("epoch", "global_step")}
    epoch, step = (value if isinstance(value, int) else 0 for value in numbers.values())
    return Progress(epoch=epoch, step=step)


def _divided(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder of a checkpoint, which is its root, and its name."""
    text = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)
    root, _, name = text.rstrip("/").rpartition("/")
    return root or "/", name


def _verify(storage: Storage, manifest: Manifest) -> None:
    if wrong := problems(storage, manifest, show=True):
        raise DamagedError(f"{manifest.name} is damaged: {'; '.join(wrong)}.")
