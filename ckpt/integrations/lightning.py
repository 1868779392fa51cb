"""Lightning: a plugin through which Trainer and Fabric save and load, and a callback for the random generators, the
order of the data, and strategies that shard the model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from ckpt.compat.lightning import begin_data
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, DamagedError, MismatchError, UnsupportedError
from ckpt.export.load_model import load_model
from ckpt.formats.checkpoint_name import check_name
from ckpt.formats.native.documents import decode_inline, encode_inline
from ckpt.formats.native.manifest import Manifest
from ckpt.load.reader import CheckpointReader
from ckpt.load.select import Candidate, Choice, Selection, choose
from ckpt.manager import StateManager
from ckpt.options import RankOptions, SaveOptions
from ckpt.ranks.consensus import MAIN, Ranks, SingleProcess
from ckpt.ranks.find import find_ranks
from ckpt.root.verify import problems
from ckpt.save.capture import LiveState, StateCapture
from ckpt.save.root_writer import Lineage, RootWriter
from ckpt.save.saver import Saver
from ckpt.save.transaction import SaveRequest
from ckpt.shown import Lines
from ckpt.state import rng
from ckpt.state.objects import is_part_name
from ckpt.state.parts import ObjectPart, SavedTensor
from ckpt.storage import Storage, open_storage, place_of

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class LoaderPosition:
    """Where the loaders were that save their position: `epoch` is the one to go on with, from its start or within."""

    epoch: int
    is_new: bool  # whether the epoch begins
    states: list[dict[str, Any]]  # of the loaders

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> LoaderPosition | None:
        """That of a checkpoint of Lightning; None if it has none."""
        fit: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
        states = fit.get("state_dict", {}).get("combined_loader")
        begun = fit.get("epoch_progress", {}).get("current", {}).get("started")
        if not states or not begun:
            return None
        batches = fit.get("epoch_loop.batch_progress", {})
        if batches.get("is_last_batch") or not batches.get("current", {}).get("processed"):
            return cls(begun, True, [_at_the_last_batch(state) for state in states])
        return cls(begun - 1, False, states)

    def go_there(self, trainer: Trainer, restore_generators: Callable[[], None]) -> None:
        """Draw the order of the epoch again, and go to the position.

        Lightning has done so already, but before it tells samplers the epoch: in the order of the first one. And of a
        checkpoint after the last batch of an epoch it takes a loader that has nothing left for the next epoch.
        """
        loaders = _loaders(trainer)
        for sampler in (sampler for loader in loaders for sampler in _samplers(loader)):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(self.epoch)
        for loader, state in zip(filter(_has_state, loaders), self.states, strict=True):
            loader.load_state_dict(state)
        begin_data(trainer)
        if self.is_new:  # that was the end of the epoch before, from which a sampler's own generator goes on
            restore_generators()
            begin_data(trainer)


def _at_the_last_batch(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader that has given its last batch: torchdata begins a new epoch where it was asked for more."""
    return {**state, "_iterator_finished": False} if "_iterator_finished" in state else state


def warn_of_unknown_order(trainer: Trainer) -> None:
    """Name a loader that has a position, in an order that is saved nowhere."""
    samplers = [sampler for loader in _loaders(trainer) if _has_state(loader) for sampler in _samplers(loader)]
    wrapped = any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)
    if wrapped and trainer.is_global_zero:
        _log.warning(
            "a resume within an epoch would read the data in a different order: Lightning divides a sampler's samples "
            "among the ranks, and saves the position but not the order. Give the loader a sampler whose order "
            "depends on seed and epoch: sampler=torch.utils.data.DistributedSampler(dataset).",
        )


def _loaders(trainer: Trainer) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader).flattened)


def _has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _samplers(loader: Any) -> list[Any]:
    """A loader's own sampler, and that of its batches; the same one once."""
    found = [getattr(place, "sampler", None) for place in (loader, getattr(loader, "batch_sampler", None))]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


_SINGLE = "checkpoint"  # a single part, where entries have names that no file can have
_GENERATORS = "ckpt_generators"
_WEIGHTS = "state_dict"  # the key of a model's weights in Lightning's checkpoints
_MODEL = "model"  # the part in which other tools expect them
_BESIDE = "lightning"  # the part beside a sharded model and its optimizers: everything else in Lightning's checkpoint


_savers: WeakSet[Saver] = WeakSet()  # of every CkptIO in this process


def _await_saves(storage: Storage) -> None:
    """Wait for the saves of every Trainer in this process, which look cut off until they are committed."""
    for saver in [*_savers]:
        if saver.busy and saver.owner.is_here and place_of(saver.root.storage) == place_of(storage):
            saver.wait()


class CkptIO(CheckpointIO):  # type: ignore[misc]
    """Makes Lightning's checkpoints atomic, hashed and free of pickles, and writes them while training continues.

        Trainer(plugins=[CkptIO()], callbacks=[ModelCheckpoint("checkpoints")])
        trainer.fit(model, ckpt_path=CkptIO.newest("checkpoints"))      # the newest intact one, or a fresh start

        Fabric(plugins=[CkptIO()])

    Each checkpoint is a folder at the path that Lightning chooses. It contains `model.safetensors` and JSON files.
    `ckpt ls` and `ckpt verify` accept it.

    Args:
        background: False: training waits until a checkpoint is durable.
    """

    def __init__(self, *, background: bool = True) -> None:
        self._background = background
        self._savers: dict[str, Saver] = {}
        self._managers: dict[str, tuple[StateManager, Beside]] = {}  # under a strategy that shards the model
        self._to_remove: list[str] = []  # checkpoints to remove once their replacement is committed

    def __getstate__(self) -> dict[str, Any]:
        none: dict[str, Any] = {"_savers": {}, "_managers": {}, "_to_remove": []}
        return {**vars(self), **none}  # a copy of a Trainer has no saves under way

    @staticmethod
    def newest(folder: str | os.PathLike[str]) -> str | None:
        """Return the path of the newest intact checkpoint in a folder, every byte verified; None if it has none."""
        storage = open_storage(folder)
        _await_saves(storage)
        with ExitStack() as held:
            choice = choose(
                Selection(
                    tiers=(storage,),
                    ranks=SingleProcess(),
                    prepare=lambda candidate: verify(storage, candidate.manifest),
                ),
                held,
            )
        return f"{storage.url}/{choice.manifest.name}" if choice else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Capture the state and write it. An error of the previous save is raised here."""
        _refuse_storage_options(storage_options)
        root, name = _split_path(path)
        self._finish_saves()
        request = request_of(check_name(name), checkpoint)
        _remove_link(path)  # `save_last="link"` of an earlier run: a save must not go where it leads
        is_handed_over = _is_handed_over(path)
        with advised():
            self.saver_of(open_storage(root)).save(request, wait=is_handed_over or not self._background)
        _make_folder(root, name)
        if is_handed_over:
            self.teardown()  # this process ends

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as it was given to `save_checkpoint`. No pickle is involved, whatever `weights_only` says."""
        root, name = _split_path(path)
        self._finish_saves()
        storage, place = open_storage(root), _allocator(map_location)
        choice = _choose(storage, name, lambda reader: _read(reader, place), sharded=False)
        self.saver_of(storage).root.follow(choice.manifest, ())
        return choice.ready

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; while another is being written, only after that is committed."""
        self._to_remove.append(os.fspath(path))
        if not any(saver.busy for saver in self._savers.values()):
            self._finish_saves()
        if _is_handed_over(path):
            self.teardown()  # training has ended, in other processes

    def teardown(self) -> None:
        """Wait until everything is committed, and release the roots."""
        self._finish_saves()
        for place, saver in self._savers.items():
            (self._managers[place][0] if place in self._managers else saver).close()
        self._savers.clear()
        self._managers.clear()

    def saver_of(self, storage: Storage) -> Saver:
        """The saver of a folder of checkpoints, of which there is one."""
        place = place_of(storage)
        if place not in self._savers:
            # Lightning decides what to resume from, and may start afresh in the same folder; only its main rank saves
            self._savers[place] = Saver(RootWriter(storage, SingleProcess(), lineage=Lineage(has_resumed=True)))
            _savers.add(self._savers[place])
        return self._savers[place]

    def sharded(self, root: str, strategy: Strategy) -> tuple[StateManager, Beside]:
        """The manager of a folder's checkpoints, for what a strategy has sharded; and what else they hold."""
        self._finish_saves()
        storage = open_storage(root)
        place = place_of(storage)
        if place not in self._managers:
            optimizers, beside = strategy.optimizers, Beside({})
            manager = StateManager(
                storage,
                model=strategy.model,
                optimizer=optimizers[0] if len(optimizers) == 1 else optimizers,
                saving=SaveOptions(background=self._background),
                ranks=RankOptions(handle_sigterm=False),  # Lightning answers it
            )
            manager.register(**{_BESIDE: beside})
            manager.session.saves.unmanaged.quiet = manager.session.loop.quiet = True  # Lightning decides when to save
            self._managers[place], self._savers[place] = (manager, beside), manager.session.saver
            self._savers[place].root.lineage.has_resumed = True  # as in `saver_of`
            _savers.add(self._savers[place])
        return self._managers[place]

    def _finish_saves(self) -> None:
        """Wait for saves under way, then remove the checkpoints that they replace."""
        for saver in self._savers.values():
            saver.wait()
        paths, self._to_remove = self._to_remove, []
        for path in paths:
            if not _remove_link(path):
                root, name = _split_path(path)
                self.saver_of(open_storage(root)).root.remove(name)


class CkptGenerators(Callback):  # type: ignore[misc]
    """Saves every rank's random generators, which Lightning does not save, so that dropout and shuffling resume
    exactly. `FSDPStrategy` and `ModelParallelStrategy` bypass `CkptIO`, unless you add this callback: each rank then
    saves its own shards.

        Trainer(plugins=[CkptIO()], callbacks=[ModelCheckpoint("checkpoints"), CkptGenerators()])

    To resume exactly within an epoch, use a loader with a `state_dict`, such as torchdata's `StatefulDataLoader`. On
    several ranks, give this loader a `DistributedSampler`. If a loader can't resume exactly, ckpt names it in a
    warning.

    Args:
        timeout: Seconds to wait for a rank that gives no sign of life.
    """

    def __init__(self, *, timeout: float = 300.0) -> None:
        self._timeout = timeout
        self._ranks: Ranks | None = None
        self._to_restore: list[str] = []  # the saved generators of every rank
        self._position: LoaderPosition | None = None  # to go to

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ranks": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy, own = trainer.strategy, type(trainer.strategy)
        shards = issubclass(own, FSDPStrategy | ModelParallelStrategy) and not issubclass(own, ShardedStrategy)
        if shards and isinstance(strategy.checkpoint_io, CkptIO):  # which it would save through at most, and never load
            described = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
            strategy.__class__ = type(own.__name__, (ShardedStrategy, own), described)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        mine = json.dumps(encode_inline(rng.capture(), _GENERATORS, []))
        checkpoint[_GENERATORS] = self._group().gather("on_save_checkpoint()", mine)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        fits = trainer.state.fn == "fit"
        self._to_restore = checkpoint.get(_GENERATORS, []) if fits else []
        self._position = LoaderPosition.of(checkpoint) if fits else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()  # before loaders draw the order of an epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        warn_of_unknown_order(trainer)
        if self._position is not None:
            self._position.go_there(trainer, self._restore)
        self._position = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx > 0:  # drawing again the order of an epoch in its middle has advanced them
            self._restore()
        self._to_restore = []

    def _restore(self) -> None:
        if self._to_restore:
            rank = self._group().rank
            known = rank < len(self._to_restore)
            state = decode_inline(json.loads(self._to_restore[rank if known else MAIN]))
            rng.restore(state) if known else rng.derive(state, rank)

    def _group(self) -> Ranks:
        self._ranks = self._ranks or find_ranks(_GENERATORS, self._timeout)
        return self._ranks


@dataclass
class Entry:
    """An entry of Lightning's checkpoint, with the interface of a stateful object."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any, /) -> None:
        self.value = state


class Beside(Entry):
    """What Lightning's checkpoint has beside a sharded model and its optimizers. Lightning takes rank 0's, too."""

    of_main_rank = True


class ShardedStrategy(Strategy):  # type: ignore[misc]
    """Put before the class of a strategy that shards the model and bypasses its `CheckpointIO`: a manager saves and
    loads the live model and optimizers, and beside them what else Lightning's checkpoint has.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # Lightning's own gathers the model, or copies it while training waits

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        _refuse_storage_options(storage_options)
        if "optimizer_states" not in checkpoint:
            raise ConfigError(
                f"under {type(self).__name__}, CkptIO always saves everything, so save_weights_only=True has no "
                "effect. Leave it out, and get the model from a checkpoint with `ckpt merge`."
            )
        root, name = _split_path(self.broadcast(filepath))
        manager, beside = self.checkpoint_io.sharded(root, self)
        if self.is_global_zero:
            _remove_link(filepath)
        beside.value = {key: value for key, value in checkpoint.items() if key not in (_WEIGHTS, "optimizer_states")}
        progress = _progress(checkpoint)
        manager.progress.step, manager.progress.epoch = progress.step, progress.epoch
        with advised():
            manager.save_state(name)
        if self.is_global_zero:
            _make_folder(root, name)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load into the live objects, and return what Lightning itself restores."""
        path, module = self.broadcast(checkpoint_path), self.lightning_module
        root, name = _split_path(path)
        choice = _choose(open_storage(root), name, _read_beside, sharded=True)
        if module.trainer.state.fn == "fit":
            self.checkpoint_io.sharded(root, self)[0].load_state(name, strict=module.strict_loading)
        else:
            load_model(path, self.model, strict=module.strict_loading)
        return choice.ready

    def teardown(self) -> None:
        self.checkpoint_io.teardown()
        super().teardown()


class Weights(Entry):
    """The model's weights: the name of this class in a manifest marks a part to be renamed on load."""


def request_of(name: str, checkpoint: dict[str, Any]) -> SaveRequest:
    """The save of one of Lightning's checkpoints under a name."""
    facts = {"progress": _progress(checkpoint).to_json(), "metrics": {}}
    return SaveRequest(name, lambda: _capture(checkpoint), facts)


def _capture(checkpoint: dict[str, Any]) -> LiveState:
    entries: dict[Any, Entry] = {key: Entry(value) for key, value in checkpoint.items()}
    if _WEIGHTS in checkpoint and _MODEL not in checkpoint:
        entries = {_MODEL if key == _WEIGHTS else key: entry for key, entry in entries.items()}
        entries[_MODEL] = Weights(checkpoint[_WEIGHTS])
    if not all(map(is_part_name, entries)):
        entries = {_SINGLE: Entry(checkpoint)}
    parts = [ObjectPart(key, entry) for key, entry in entries.items()]
    return StateCapture(SingleProcess(), "full").capture(parts, {}, {})


@contextmanager
def advised() -> Iterator[None]:
    """Say where a value that cannot be held comes from."""
    try:
        yield
    except UnsupportedError as error:
        advice = (
            "Lightning took this from hparams, a callback, or on_save_checkpoint: give plain values there (str(...), "
            "dict(...), OmegaConf.to_container(...)), or save_hyperparameters(ignore=...)."
        )
        raise UnsupportedError(Lines.of([str(error), advice]), error.problems) from error


def _refuse_storage_options(given: Any) -> None:
    if given is not None:
        raise ConfigError("CkptIO accepts no storage_options: it saves to the path that Lightning passes.")


def _choose(
    storage: Storage, name: str, read: Callable[[CheckpointReader], dict[str, Any]], *, sharded: bool
) -> Choice[dict[str, Any]]:
    """The checkpoint of that name, and what is read of it. Refuses one of strategies that save in another way."""

    def prepare(candidate: Candidate) -> dict[str, Any]:
        reader = CheckpointReader(storage, candidate.manifest, MAIN)
        if sharded is not (_BESIDE in reader.parts and reader.kind(_BESIDE) == Beside.__name__):
            kinds = ("FSDPStrategy or ModelParallelStrategy", "a strategy that does not shard the model")
            saved, here = kinds if not sharded else kinds[::-1]
            raise MismatchError(
                f"{name} was saved under {saved}, and this run is under {here}. Resume with the strategy that saved "
                f"it, or load only the model: ckpt.load_model({f'{storage.url}/{name}'!r}, model)."
            )
        return read(reader)

    _await_saves(storage)
    with ExitStack() as held:
        choice = choose(Selection(tiers=(storage,), ranks=SingleProcess(), prepare=prepare, name=name), held)
    assert choice is not None  # with a name, a missing checkpoint is an error
    return choice


def _read_beside(reader: CheckpointReader) -> dict[str, Any]:
    value = reader.ask(_BESIDE)
    reader.read_new()
    found: dict[str, Any] = value()
    return found


def _read(reader: CheckpointReader, place: Callable[[SavedTensor], Any]) -> dict[str, Any]:
    values = {key: reader.ask(key, place) for key in reader.parts}
    reader.read_new()
    if values.keys() == {_SINGLE}:
        single: dict[str, Any] = values[_SINGLE]()
        return single
    return {_WEIGHTS if reader.kind(key) == Weights.__name__ else key: value() for key, value in values.items()}


def _allocator(map_location: Any) -> Callable[[SavedTensor], Any]:
    """Allocates the tensor to read into, on the device that `map_location` names; in host memory otherwise."""
    if not isinstance(map_location, str | torch.device):
        return lambda saved: None
    return lambda saved: torch.empty(saved.shape, dtype=saved.dtype, device=map_location)


def _progress(checkpoint: dict[str, Any]) -> Progress:
    numbers = {key: checkpoint.get(key) for key in ("epoch", "global_step")}
    epoch, step = (value if isinstance(value, int) else 0 for value in numbers.values())
    return Progress(epoch=epoch, step=step)


_HANDED_OVER = ".temp.ckpt"  # weights from a process that Lightning launched (ddp_spawn, ddp_notebook) to its parent


def _is_handed_over(path: str | os.PathLike[str]) -> bool:
    return os.path.basename(path) == _HANDED_OVER


def _split_path(path: str | os.PathLike[str]) -> tuple[str, str]:
    """The root, which is the parent folder, and the name of a checkpoint."""
    text = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)
    root, _, name = text.rstrip("/").rpartition("/")
    return root or "/", name.lstrip(".") if name == _HANDED_OVER else name


def _make_folder(root: str, name: str) -> None:
    """Show that a save is under way: `ModelCheckpoint` looks for the name before it gives it to another save."""
    if "://" not in root:
        os.makedirs(f"{root}/{name}", exist_ok=True)


def _remove_link(path: str | os.PathLike[str]) -> bool:
    """Remove a link to a checkpoint, and not the checkpoint, and return whether it is one."""
    is_link = os.path.islink(path)
    if is_link:
        os.unlink(path)
    return is_link


def verify(storage: Storage, manifest: Manifest) -> None:
    """Raise an error if a checkpoint is damaged."""
    if wrong := problems(storage, manifest, show=True):
        raise DamagedError(f"{manifest.name} is damaged: {'; '.join(wrong)}.")
