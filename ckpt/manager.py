"""`StateManager`: the one object that a training loop touches."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ckpt.config import read_config
from ckpt.data.loop import Batches
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, MissingError, Preempted
from ckpt.export.options import SHARD_SIZE, ExportOptions
from ckpt.formats.checkpoint_name import name_of_step
from ckpt.load.load_state import Restored
from ckpt.options import (
    Every,
    Memory,
    Mirror,
    RankOptions,
    SaveOptions,
    Signing,
    required_root,
    resolve_options,
)
from ckpt.ranks.consensus import MAIN
from ckpt.ranks.schedule_and_signals import Preemption, SaveSchedule
from ckpt.root.retention import Keep
from ckpt.save.saver import SaveReport
from ckpt.session import Session
from ckpt.state.registry import PlainValues, find_source, refuse_unnamed
from ckpt.state.unwrap import unwrap
from ckpt.storage import Storage, disk_path
from ckpt.util.console import html_table, say
from ckpt.util.threads import refuse_copy

if TYPE_CHECKING:
    from ckpt.export.push import Card

_log = logging.getLogger("ckpt")
T = TypeVar("T")


class StateManager:
    """Keeps the whole state of a training run: saves it atomically, and resumes it exactly.

        with ckpt.StateManager("runs/x", model=model, optimizer=optimizer, save_every=500) as manager:
            for epoch in manager.epochs(3):
                for batch in manager.batches(loader):
                    loss = train_step(batch)
                    manager.step(metrics={"loss": loss})

    With several processes, every one of them builds the manager and makes the same calls; rank 0 writes the manifest.

    Args:
        root: Where checkpoints are kept: a path, a URL or a storage. A remote one is tried out at once.
        accelerator: Stands for all objects: whatever it has prepared or will prepare, and what is registered with it.
            The folder, naming and limit of its project hold where nothing else is said.
        model: One object, a sequence, or a dict of named objects. So are the next four; `register` adds others.
        optimizer: What trains the model.
        scheduler: Of the learning rate.
        scaler: A GradScaler.
        dataloader: What the loop trains from. A plain `for` over it then continues where the checkpoint was, after
            `resume`; loaders that go through `batches` need not be given.
        save_every: Steps between saves, or the time, as `"10min"`; `Every` has more: the end of an epoch, an exception.
        keep: Which checkpoints are kept; None: all.
        mirror: A path, URL, storage or `Mirror` to which every committed checkpoint is copied in the background. Loads
            take the newest intact one of the two. An error is in `mirror_error`, and tried again: it stops nothing.
        storage_options: Credentials, endpoint and the like for a URL, as its fsspec filesystem takes them.
        saving: How checkpoints are captured and written.
        ranks: How the ranks of a job meet, and stop.
        memory: Steps between snapshots in the hosts' memory, from which a restart on the same machines resumes, or a
            `Memory`.
        signing: Which key signs the checkpoints, and whose signatures are believed; None: as the environment says.
    """

    def __init__(
        self, root: str | os.PathLike[str] | Storage | None = None, *unnamed: Any, accelerator: Any = None,
        model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, dataloader: Any = None,
        save_every: int | str | Every | None = None, keep: Keep | None = None,
        mirror: str | os.PathLike[str] | Storage | Mirror | None = None,
        storage_options: Mapping[str, Any] | None = None, saving: SaveOptions | None = None,
        ranks: RankOptions | None = None, memory: int | Memory | None = None, signing: Signing | None = None,
        **unknown: Any,
    ) -> None:  # fmt: skip
        refuse_unnamed(root, unnamed)
        given: dict[str, Any] = {
            "root": root,
            "save_every": save_every,
            "keep": keep,
            "mirror": mirror,
            "saving": saving,
        }
        given |= {"storage_options": storage_options, "ranks": ranks, "memory": memory, "signing": signing}
        objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        objects["dataloader"] = dataloader
        options = resolve_options({**given, **unknown}, objects=("accelerator", *objects))
        source = find_source(accelerator, **objects)
        where = required_root(source.root if root is None else root)
        self._session = session = Session(where, source, options)
        is_main = session.ranks.rank == MAIN
        due = session.due
        weakref.finalize(self, _drop, due.preemption, due.schedule, due.what if is_main else set(), self.url)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **objects: Any) -> StateManager:
        """A manager with the options of a YAML file (`root`, `save_every`, `keep`, ...) for these objects."""
        return cls(**{**read_config(path), **objects})

    def __repr__(self) -> str:
        registry = self._session.registry
        return f"StateManager({self.url!r}, parts={[*registry.parts, *registry.generators]})"

    __reduce__ = refuse_copy

    def _repr_html_(self) -> str:
        """For notebooks."""
        at, registry = self._session.loop.progress, self._session.registry
        parts, values = ", ".join([*registry.parts, *registry.generators]) or "nothing", dict(registry.values)
        rows = [("manages", parts), ("step", str(at.step)), ("epoch", str(at.epoch)), ("values", str(values or "none"))]
        return html_table(f"StateManager of {self.url}", rows)

    def __enter__(self) -> StateManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session.end_loop(error)
            if error is not None and not isinstance(error, SystemExit | GeneratorExit):
                self._session.saves.after_exception(error)
        finally:
            self._close_after(error)

    def _close_after(self, error: BaseException | None) -> None:
        try:
            self._session.close(for_restart=_is_failure(error))
        except Exception as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # what went wrong in the loop comes first

    @property
    def session(self) -> Session:
        """What the manager consists of: for integrations. Users need none of it, and it may change."""
        return self._session

    @property
    def url(self) -> str:
        """Where the checkpoints are kept."""
        return self._session.storage.url

    @property
    def progress(self) -> Progress:
        """Epoch, batch, step and samples so far."""
        self._session.loop.note_asked()
        return self._session.loop.progress

    @property
    def run(self) -> str:
        """The run's identity, the same over all its resumes: after `resume`, on the main rank, for trackers."""
        return self._session.saver.root.lineage.run

    @property
    def mirror_error(self) -> Exception | None:
        """What went wrong with the last copy to the mirror, on the main rank; none once a copy has succeeded again."""
        mirror = self._session.mirror
        return mirror.error if mirror is not None else None

    @property
    def values(self) -> PlainValues:
        """Numbers, text, lists and dicts of the script's (`manager.values["best_loss"] = 0.3`), saved and loaded."""
        self._session.loop.note_asked()  # its epoch may be among them
        return self._session.registry.values

    @property
    def restored(self) -> Restored | None:
        """What the last load brought back; none if this run began afresh."""
        return self._session.restored

    def register(self, *unnamed: Any, per_rank: bool | Any = False, **objects: Any) -> None:  # Any: for **named_objects
        """Manage more objects, each under its name. Every rank must make this call.

        Generators (of torch, NumPy or Python) are kept for every rank. So are other objects whose state differs between
        ranks; as many ranks have it back, and any other number of them the main rank's.

        Args:
            per_rank: The state is each rank's own at any number of ranks: new ranks keep what their objects have, and
                what ranks that are gone had is not loaded; the report names both.
            **objects: Anything with `state_dict` and `load_state_dict`, or a generator. A number or text, as in
                `best_loss=1e9`, is what `values` has there until a load or the script sets it.
        """
        self._session.registry.register(objects, unnamed, per_rank=per_rank)

    def unwrap(self, model: nn.Module | None = None) -> nn.Module:
        """The model, or the managed one, without what DDP, FSDP 1, DataParallel and torch.compile wrap around it."""
        models = list(self._session.registry.models.values())
        if model is None and len(models) != 1:
            raise ConfigError(f"this manager has {len(models)} models: say which, unwrap(model).")
        return unwrap(models[0] if model is None else model)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left of `total`. Goes on where the last run stopped, or starts afresh.

        When they are done and `save_every` is set, the final state is saved: as `step-00001000`, or, where the last
        step was saved already, as `step-00001000-end`, with what the end of the epoch has changed. With
        `Every(epoch_end=True)`, so is the state at the end of every epoch, before the next one begins.
        """
        self._start()
        session, when = self._session, self._session.options.save_every
        ended = False
        self._say_if_complete(total)
        for epoch in session.loop.epochs(total):
            if ended and when.epoch_end:
                session.saves.end()
            yield epoch
            ended = True
        session.due.preemption.close()
        if when.period or when.epoch_end:
            session.saves.end()

    def _say_if_complete(self, total: int) -> None:
        """A run that has all its epochs already would end without a word, as if it had failed to start."""
        at, restored = self._session.loop.progress, self._session.restored
        if restored is None or not isinstance(total, int) or total > at.epoch or self._session.ranks.rank != MAIN:
            return
        say(
            f"{self.url} is complete: {restored.name} has all {total} epochs, at step {at.step:,}. Nothing is left to "
            f"train. To train on, ask for more: manager.epochs({at.epoch + 1}). For a new run, choose another root."
        )

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """The batches of this epoch that are left, in the same order as ever; `len()` of it is how many.

        A loop that was left with `break` is not done: the next run continues with the batch after. Whatever reads ahead
        belongs inside: `batches(Prefetcher(loader))`, or the batches that it has read are lost at every resume.
        """
        return self._session.loop.batches(loader, self._start)

    def enumerate(self, loader: Iterable[T], start: int = 0) -> Batches[tuple[int, T]]:
        """The same, each with its number in the epoch: after a resume it counts on from where it stopped."""
        return self._session.loop.batches(loader, self._start, start)

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """A step of training is done: count it, and find out whether a save is due, or the process was told to stop.

        Both wait for the boundary of the iteration: when the loop asks for its next batch, or the epoch, the loop or
        the manager ends. So it doesn't matter what else you do in the iteration, before or after this call. Only in a
        loop without a loader that ckpt follows does this call save at once: let it come last there.

        Tensors among the metrics are looked at only when a checkpoint is saved.

        Raises:
            Preempted: The process was told to terminate, and the state has been saved. With a followed loader it is
                raised where the loop asks for the next batch.
        """
        self._session.step(metrics)

    def every(self, steps: int) -> bool:
        """Whether the step that was counted last is one of every so many: the same after a resume, and on all ranks."""
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"every({steps!r}): give a number of steps, 1 or more.")
        step = self._session.loop.progress.step
        return step > 0 and step % steps == 0

    def told_to_stop(self) -> bool:
        """Whether the process was told to terminate: for loops that do not call `step`, to ask after every step.

        `progress.step` must have been set to that step. All ranks are told at the same one, where they save and stop.
        """
        return self._session.due.preemption.due(self._session.loop.progress.step)

    def save_state(
        self, name: str | None = None, *, metrics: Mapping[str, Any] | None = None, wait: bool | None = None
    ) -> str | None:
        """Save everything. Every rank must make this call.

        When it returns the state has been copied, and training may go on while it is written. What goes wrong meanwhile
        is raised by the next call. A checkpoint of the same name is replaced, and stands until the new one is there.

        It saves at once, in the middle of an iteration too: a resume continues with the next batch, and what follows
        this call in the iteration is not done again. So let it come last in the iteration, or use `save_every`, which
        waits for the boundary. After the inner loop the next run begins with the next epoch: let the save be the last
        thing in the epoch.

        Args:
            name: `step-00001000` if none is given.
            metrics: Numbers by name, for `Keep`, listings and reports.
            wait: Return when it is committed and durable; None: as `SaveOptions.background` says.

        Returns:
            Its name; None where it was left out, by `SaveOptions(when_busy="skip")` or `on_nan="skip"`.

        Raises:
            ConfigError: The root has checkpoints that this run has not resumed from.
            UnsupportedError: Values that no file can hold, each by its path.
            StorageError: It could not be written: `FullError` and others say why.
            RanksError: Ranks did not answer, or make other calls.
        """
        return self._session.saves.to_root(name, metrics, wait)

    def load_state(self, name: str | int | None = None, *, strict: bool = True) -> Restored:
        """Load a checkpoint, and print what was restored. Every rank must make this call.

        Args:
            name: None: the newest intact one. A number is a step: 1000 is `step-00001000`. A path is a checkpoint in
                another local folder. What Accelerate's `save_state` wrote is as good: by its name or path, or, where
                the root has nothing else, without either: the one with the highest number.
            strict: Everything must fit, or nothing is changed. Otherwise what fits is restored, the rest skipped.

        Returns:
            What was restored, approximated, skipped and passed over.

        Raises:
            MissingError: There is none by that name, or none at all.
            DamagedError: The named one is damaged, or none is intact.
            MismatchError: It does not fit; all differences are listed.
            StorageError: It could not be read now: no older one is taken in its place.
        """
        named: Any = name_of_step(name) if type(name) is int and name >= 0 else name
        restored = self._session.load(named, strict=strict)
        if restored is None:
            raise MissingError(f"there is no checkpoint in {self.url}. resume() starts afresh where there is none.")
        return restored

    def resume(self, *, strict: bool = True) -> Restored | None:
        """Take the root for this run, and load its newest intact checkpoint as `load_state` does; None if it has none.

        Raises:
            LockedError: Another run writes to the root.
        """
        session = self._session
        session.due.start()
        with session.saver.root.taking():
            restored = session.load(None, strict=strict)
            session.saver.root.hold()
        if session.memory is not None:
            session.memory.settle()
        if restored is None and session.ranks.rank == MAIN:
            say(f"no checkpoint in {self.url}: starting afresh")
        return restored

    def fingerprint(self) -> dict[str, str]:
        """128 bits of each part of the state as it is now, in hexadecimal, by the part's name.

        Two runs with the same fingerprints at a step have been the same up to it, bit for bit: log them, or compare
        them in a test of your training loop. `"rng"` is the random number generators of this rank, `"data"` its
        position in the data. Tensors are hashed where they are, on a GPU in milliseconds. Of sharded parts it is the
        shards of this rank, so compare the same rank of as many ranks. Call it on every rank: some ways of sharding
        need all of them to describe their state.
        """
        return self._session.fingerprint()

    def rewind_rng(self) -> None:
        """Put the generators back once more as the last load did: for loops that find their place in the data alone,
        and draw numbers on the way."""
        self._session.loop.rewind_rng()

    def on_save(self, callback: Callable[[SaveReport], object]) -> Callable[[SaveReport], object]:
        """Have a function called with a `SaveReport` of every checkpoint that is committed. Also a decorator.

        On the main rank: before a `save_state` that waits returns, else at the next `step`, `save_state`, `wait` or
        `close`. Its errors are logged, and stop nothing.
        """
        if not callable(callback):
            raise ConfigError(f"on_save takes a function of one SaveReport, not {callback!r}.")
        self._session.saver.reports.callbacks.append(callback)
        return callback

    def wait(self) -> None:
        """Return when every save is committed, and every push done. Raises what went wrong, if nobody has been told.

        Copies to the mirror are not waited for: `close` does that.
        """
        self._session.wait()

    def close(self) -> None:
        """Finish what is under way, copies to the mirror too, and let go of the root, the loaders and SIGTERM.

        Snapshots in memory are removed; those of a run that an exception ends, also where `finally` or `except` closes
        it, are left for a restart. A manager that is used as a context does this itself. In a forked child it does
        nothing: all is the parent's.
        """
        error = sys.exc_info()[1]
        self._session.end_loop(error)
        self._session.close(for_restart=_is_failure(error))

    def save_model(
        self,
        directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str | None = SHARD_SIZE,
        dtype: str | torch.dtype | None = None,
        tokenizer: Any = None,
        processor: Any = None,
        part: str = "model",
    ) -> None:
        """Write the model as `from_pretrained` reads it: `model.safetensors`, or shards and an index, and its config.

        Of a model with PEFT adapters, those are written, as PEFT does. Wrapped, compiled or sharded models are whole
        there, gathered tensor by tensor. The folder appears when it is complete; files of yours in it stay. Every rank
        must make this call; the main one writes.

        Args:
            directory: The folder. Its parent need not exist.
            max_shard_size: Bytes, or `"5GB"`, beyond which there are several files.
            dtype: What floating point tensors are cast to.
            tokenizer: Saved beside the model, and so is the `processor`.
            processor: Anything with `save_pretrained`.
            part: Which model, where there are several: `"model.generator"`.
        """
        from ckpt.export.save_model import check_processors, save_live

        self._session.loader.refuse_half_loaded()
        model, wanted = self._session.registry.model_part(part), ExportOptions.parse(dtype, max_shard_size)
        beside = check_processors(tokenizer=tokenizer, processor=processor)
        folder = disk_path(directory, "the folder of the model")
        save_live(f"save_model({folder!r})", folder, model, self._session.ranks, wanted, beside)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None,
        commit_message: str | None = None, create_pr: bool = False, token: str | None = None,
        max_shard_size: int | str | None = SHARD_SIZE, dtype: str | torch.dtype | None = None, card: Card = True,
        tokenizer: Any = None, processor: Any = None, part: str = "model", wait: bool = True,
    ) -> str | None:  # fmt: skip
        """Publish the model as it is now, in one commit, and return the commit's URL (see `ckpt.push_to_hub`).

        Every rank must make this call; the main one alone talks to the Hub. Without `wait` it does so while training
        continues, and returns None; what goes wrong is raised by the next push, or on the main rank by `wait()`.
        """
        from ckpt.export.push import HubTarget
        from ckpt.export.save_model import check_processors

        session = self._session
        session.saves.require_usable("push_to_hub()")
        target = HubTarget.of(repo_id, revision, token, private, commit_message, card, create_pr)
        model, wanted = session.registry.model_part(part), ExportOptions.parse(dtype, max_shard_size)
        beside = check_processors(tokenizer=tokenizer, processor=processor)
        return session.pusher.push(model, target, wanted, beside, session.training_facts, wait=wait)

    def _start(self) -> None:
        self._session.saves.require_usable("epochs() or batches()")
        self._session.loop.refuse_released("epochs() or batches()")
        if not self._session.due.started:
            self.resume()


def _drop(preemption: Preemption, schedule: SaveSchedule, due: set[str], url: str) -> None:
    """A manager is gone, by whatever way: signals are left to others. Without `close()`, what was due is lost."""
    preemption.close()
    schedule.close()
    if "save" in due:
        _log.warning(
            "the last save to %s was due at the end of an iteration, and this manager was dropped before it: that step "
            "is not saved. Write `with ckpt.StateManager(...) as manager:`, or call manager.close() after the loop.",
            url,
        )


def _is_failure(error: BaseException | None) -> bool:
    """Whether a run that ends with this exception is one to restart."""
    return error is not None and not isinstance(error, Preempted)
