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
from ckpt.errors import ConfigError, MissingError
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
from ckpt.root.catalog import Goodput
from ckpt.root.retention import Keep
from ckpt.save.saver import SaveReport
from ckpt.session import Session
from ckpt.state.registry import PlainValues, find_source, refuse_unnamed
from ckpt.state.unwrap import unwrap
from ckpt.storage import Storage, disk_path
from ckpt.util.console import html_table, say, say_how_to_see_more
from ckpt.util.threads import refuse_copy

if TYPE_CHECKING:
    from ckpt.export.push import Card

_log = logging.getLogger("ckpt")
T = TypeVar("T")


class StateManager:
    """Saves the complete state of a training run atomically, and resumes the run exactly.

        with ckpt.StateManager("runs/x", model=model, optimizer=optimizer, save_every=500) as manager:
            for epoch in manager.epochs(3):
                for batch in manager.batches(loader):
                    loss = train_step(batch)
                    manager.step(metrics={"loss": loss})

    If training runs in several processes, every process must build the manager and make the same calls. Rank 0 writes
    the manifest.

    Args:
        root: The place for the checkpoints: a path, a URL or a storage. ckpt connects to a remote root at once.
        accelerator: A Hugging Face `Accelerator`, instead of the objects below: ckpt keeps everything that the
            accelerator prepares or registers, including what you add later. Its project sets the folder, the naming and
            the limit, unless you set others.
        model: The model: one object, a sequence, or a dict of named objects. The next four options accept the same;
            `register` adds other objects.
        optimizer: The optimizer.
        scheduler: The LR scheduler.
        scaler: The GradScaler.
        dataloader: The training loader. After `resume`, a plain `for` loop over it continues at the checkpoint's
            position. You don't need to pass loaders here that you give to `batches`.
        save_every: Steps between saves, or a time, such as `"10min"`; `"auto"` chooses the interval that loses the
            least time. `Every` has more options: the end of an epoch, an exception.
        keep: Rules for which checkpoints to keep; None keeps all.
        mirror: A path, URL, storage or `Mirror`. ckpt copies every committed checkpoint there in the background, and a
            load takes the newest intact checkpoint from either place. If a copy fails, training continues:
            `mirror_error` has the error, and ckpt tries again.
        storage_options: Credentials, endpoint and the like for a URL, as its fsspec filesystem takes them.
        saving: How ckpt captures and writes checkpoints.
        ranks: How the ranks of a job find each other, and how they stop.
        memory: Steps or time between snapshots in the hosts' memory, `"auto"`, or a `Memory`. A restart on the same
            machines resumes from these snapshots.
        signing: The key that signs checkpoints, and the keys to trust; None takes them from the environment.
    """

    def __init__(
        self, root: str | os.PathLike[str] | Storage | None = None, *unnamed: Any, accelerator: Any = None,
        model: Any = None, optimizer: Any = None, scheduler: Any = None, scaler: Any = None, dataloader: Any = None,
        save_every: int | str | Every | None = None, keep: Keep | None = None,
        mirror: str | os.PathLike[str] | Storage | Mirror | None = None,
        storage_options: Mapping[str, Any] | None = None, saving: SaveOptions | None = None,
        ranks: RankOptions | None = None, memory: int | str | Memory | None = None, signing: Signing | None = None,
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
        weakref.finalize(self, session.state.attempt.dropped)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **objects: Any) -> StateManager:
        """Build a manager for these objects with the options in a YAML file (`root`, `save_every`, `keep`, ...)."""
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
            self._session.close(error)
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
        """The URL or path of the root."""
        return self._session.storage.url

    @property
    def progress(self) -> Progress:
        """The current epoch, batch and step, and the number of samples so far."""
        self._session.loop.note_asked()
        return self._session.loop.progress

    @property
    def run(self) -> str:
        """The id of the run, for trackers. The id stays the same after a resume. Read the id on the main rank, after
        `resume`."""
        return self._session.saver.root.lineage.run

    def goodput(self) -> Goodput | None:
        """Report where this run's time went, over all its attempts so far: `print(manager.goodput())`.

        `share` is the fraction of the wall time that the run spent on steps that count. The rest of the time went to
        steps repeated after a crash, waiting for saves, starting and loading, and downtime between attempts. If an
        attempt was killed, ckpt knows only what it wrote after its last save, so `share` is a lower bound.

        Each call reads the history in the root, a small file, so call `goodput` now and then, not after every step.
        Only the main rank knows the history: the others get None, and so does the main rank if the history can't be
        read, or if the root is on the Hub and has no history.
        """
        return self._session.saver.root.goodput()

    @property
    def mirror_error(self) -> Exception | None:
        """The error of the last copy to the mirror, on the main rank; None if that copy succeeded."""
        mirror = self._session.mirror
        return mirror.error if mirror is not None else None

    @property
    def values(self) -> PlainValues:
        """A dict for your own numbers, text, lists and dicts, which ckpt saves and loads.

        For example, `manager.values["best_loss"] = 0.3`."""
        self._session.loop.note_asked()  # its epoch may be among them
        return self._session.registry.values

    @property
    def restored(self) -> Restored | None:
        """The result of the last load; None if this run started from scratch."""
        return self._session.restored

    def register(
        self, *unnamed: Any, per_rank: bool | Any = False, chunked: bool | Any = False, **objects: Any
    ) -> None:  # Any: for **named_objects
        """Add more objects to the manager, each under its own name. Every rank must make this call.

        ckpt saves each rank's own generators (torch, NumPy, Python). If an object's state differs between ranks, ckpt
        saves each rank's own state of the object. If you resume with the same number of ranks, each rank gets its own
        state back. If the number of ranks differs, all ranks get the main rank's state.

        Args:
            per_rank: Keep each rank's own state on any number of ranks. The objects of new ranks keep their state; ckpt
                does not load the state of ranks that are gone. The report names both.
            chunked: Write each item of a list in the object's state into a file of its own, if the item's tensors take
                a megabyte or more. Later saves link the items that have not changed, and write only the others. Use it
                for a replay buffer, as the guide to reinforcement learning shows.
            **objects: Anything with `state_dict` and `load_state_dict`, or a generator. A number or text, as in
                `best_loss=1e9`, sets the first value in `values`, until a load or your script changes it.
        """
        self._session.registry.register(objects, unnamed, per_rank=per_rank, chunked=chunked)

    def unwrap(self, model: nn.Module | None = None) -> nn.Module:
        """Return a model without the wrappers of DDP, FSDP 1, DataParallel and torch.compile.

        Without an argument, unwrap the manager's model.
        """
        models = list(self._session.registry.models.values())
        if model is None and len(models) != 1:
            raise ConfigError(f"this manager has {len(models)} models. Pass a model: unwrap(model).")
        return unwrap(models[0] if model is None else model)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs up to `total`: from where the last run stopped, or from the first epoch.

        If `save_every` has steps or a time, ckpt saves the final state after the last epoch, under a name such as
        `step-00001000`. If the last step already has a checkpoint, ckpt updates that checkpoint with whatever the end
        of the epoch has changed. With `Every(epoch_end=True)`, ckpt also saves at the end of every epoch, before the
        next one begins.
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
        """Say that all epochs are done: otherwise the run would end silently, as if it had failed to start."""
        at, restored = self._session.loop.progress, self._session.restored
        if restored is None or not isinstance(total, int) or total > at.epoch or self._session.ranks.rank != MAIN:
            return
        say(
            f"{self.url} is complete: {restored.name} has all {total} epochs, at step {at.step:,}. Nothing is left to "
            f"train. To train on, ask for more: manager.epochs({at.epoch + 1}). For a new run, choose another root."
        )

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """Iterate over the remaining batches of this epoch, in the same order as in an uninterrupted run.

        `len()` of the result is the length of the epoch. To let a progress bar continue in the middle of the epoch,
        write `tqdm(manager.batches(loader), initial=manager.progress.batch)`.

        If you leave the loop with `break`, the next run continues with the following batch. To use a prefetcher, write
        `batches(Prefetcher(loader))`. With `Prefetcher(batches(loader))`, every resume would lose the batches that the
        prefetcher has read ahead.
        """
        return self._session.loop.batches(loader, self._start)

    def enumerate(self, loader: Iterable[T], start: int = 0) -> Batches[tuple[int, T]]:
        """Iterate like `batches`, and yield each batch with its number in the epoch. After a resume, the numbering
        continues where it stopped."""
        return self._session.loop.batches(loader, self._start, start)

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Count a training step. Saves if a save is due, and ends training if a signal asked the process to stop.

        Saving and stopping happen at the end of the iteration: when the loop asks for its next batch, or when the
        epoch, the loop or the manager ends. It doesn't matter what else you do in the iteration, before or after this
        call. If ckpt follows none of your loop's loaders, `step` saves immediately: make it the last call in the
        iteration.

        If metrics are tensors, ckpt reads them only when it saves a checkpoint.

        Raises:
            Preempted: A signal asked the process to terminate, and ckpt has saved the state. If ckpt follows the
                loader, this is raised where the loop asks for the next batch.
        """
        self._session.step(metrics)

    def every(self, steps: int) -> bool:
        """Return True if the current step is a multiple of `steps`. The result is the same on all ranks, and after a
        resume."""
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"every({steps!r}) needs a number of steps, 1 or more.")
        step = self._session.loop.progress.step
        return step > 0 and step % steps == 0

    def told_to_stop(self) -> bool:
        """Return True if a signal asked the process to terminate. In loops that don't call `step`, call this after
        every training step.

        Set `progress.step` first. All ranks get True at the same step, so that every rank saves and stops there.
        """
        return self._session.due.preemption.due(self._session.loop.progress.step)

    def save_state(
        self, name: str | None = None, *, metrics: Mapping[str, Any] | None = None, wait: bool | None = None
    ) -> str | None:
        """Save everything. Every rank must make this call.

        `save_state` returns when ckpt has copied the state; ckpt writes the copy while training continues. If the write
        fails, the next call raises the error. If a checkpoint of the same name exists, ckpt keeps it until the new
        one replaces it.

        `save_state` saves immediately, even in the middle of an iteration: a resume continues with the next batch, and
        does not repeat the code that follows this call in the iteration. Make `save_state` the last call in the
        iteration, or use `save_every`, which waits for the end of the iteration. If you call `save_state` after the
        inner loop, make it the last call in the epoch: a resume begins with the next epoch.

        Args:
            name: The checkpoint's name; by default `step-00001000` and so on.
            metrics: A dict of numbers by name, for `Keep`, listings and reports.
            wait: Return only when the checkpoint is committed and durable; None: as `SaveOptions.background` says.

        Returns:
            The checkpoint's name; None if `SaveOptions(when_busy="skip")` or `on_nan="skip"` skipped the save.

        Raises:
            ConfigError: The root has checkpoints that this run has not resumed from.
            UnsupportedError: The state has values that ckpt can't save; it names each by its path.
            StorageError: ckpt could not write the checkpoint: `FullError` and others say why.
            RanksError: Some ranks did not answer, or made different calls.
        """
        return self._session.saves.to_root(name, metrics, wait)

    def load_state(self, name: str | int | None = None, *, strict: bool = True) -> Restored:
        """Load a checkpoint, and print where training continues. Every rank must make this call.

        Args:
            name: The checkpoint's name; None for the newest intact one. A number is a step: 1000 is `step-00001000`. A
                path is a checkpoint in another local folder. Folders of Accelerate's `save_state` work too: by name or
                path, or, if the root has nothing else, without a name (then the highest number counts).
            strict: Everything must fit, or nothing is changed. Otherwise ckpt restores what fits and skips the rest.

        Returns:
            What ckpt restored, approximated and left out, and which newer checkpoints it skipped.

        Raises:
            MissingError: No checkpoint has that name, or there is no checkpoint at all.
            DamagedError: The named checkpoint is damaged, or none is intact.
            MismatchError: The checkpoint does not fit; the error lists all differences.
            StorageError: ckpt can't read the checkpoint now, and loads no older one instead.
        """
        named: Any = name_of_step(name) if type(name) is int and name >= 0 else name
        restored = self._session.load(named, strict=strict)
        if restored is None:
            raise MissingError(f"there is no checkpoint in {self.url}. resume() would start from scratch instead.")
        return restored

    def resume(self, *, strict: bool = True) -> Restored | None:
        """Lock the root for this run, and load its newest intact checkpoint as `load_state` does.

        Returns None if the root has no checkpoint.

        Raises:
            LockedError: Another run writes to the root.
        """
        session = self._session
        session.due.start()
        restored = session.resume(strict=strict)
        if session.memory is not None:
            session.memory.settle()
        if session.ranks.rank == MAIN:
            if restored is None:
                say(f"No checkpoint in {self.url} yet; starting from scratch.")
            say_how_to_see_more()
        return restored

    def fingerprint(self) -> dict[str, str]:
        """Return a dict that maps the name of each part of the current state to its hash: 128 bits in hexadecimal.

        If two runs have the same fingerprints at a step, they have been identical up to that step, bit for bit: log the
        fingerprints, or compare them in a test of your training loop. `"rng"` stands for this rank's random generators,
        `"data"` for its position in the data. ckpt hashes tensors on their device, which takes milliseconds on a GPU.
        If a part is sharded, ckpt hashes only this rank's shards, so compare a rank only with the same rank of a run
        that has the same number of ranks. Call `fingerprint` on every rank: with some kinds of sharding, ckpt can read
        the state only if all ranks take part.
        """
        return self._session.fingerprint()

    def rewind_rng(self) -> None:
        """Set the random generators back to the state that the last load restored.

        Use this if your loop itself skips to its place in the data, and draws random numbers while it skips.
        """
        self._session.loop.rewind_rng()

    def on_save(self, callback: Callable[[SaveReport], object]) -> Callable[[SaveReport], object]:
        """Call a function with a `SaveReport` after every committed checkpoint. `on_save` also works as a decorator.

        ckpt calls the function on the main rank: at the end of a `save_state` that waits, otherwise at the next `step`,
        `save_state`, `wait` or `close`. If the function raises an error, ckpt logs the error and continues.
        """
        if not callable(callback):
            raise ConfigError(f"on_save needs a function that takes a SaveReport, not {callback!r}.")
        self._session.saver.reports.callbacks.append(callback)
        return callback

    def wait(self) -> None:
        """Wait until every save is committed and every push is done. If a save or a push failed, raise its error.

        Only `close` waits for copies to the mirror.
        """
        self._session.wait()

    def close(self) -> None:
        """Finish saves and copies to the mirror, and release the root, the loaders and the SIGTERM handler.

        `close` removes the snapshots in memory. If an exception ends the run, `close` leaves the snapshots for a
        restart, even if you call it in `finally` or `except`. If you write `with ckpt.StateManager(...)`, you don't
        need to call `close`. In a forked child, `close` does nothing, because the manager belongs to the parent
        process.
        """
        error = sys.exc_info()[1]
        self._session.end_loop(error)
        self._session.close(error)

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
        """Write the model for `from_pretrained`: `model.safetensors`, or shards and an index, and the config.

        If the model has PEFT adapters, ckpt writes only the adapters, as PEFT does. ckpt writes the full model even if
        yours is wrapped, compiled or sharded, and gathers it tensor by tensor. A new folder appears once all files are
        complete; in an existing folder, ckpt keeps your own files. Every rank must make this call; the main rank
        writes.

        Args:
            directory: The folder. Its parent need not exist.
            max_shard_size: The largest size of a file, in bytes or as `"5GB"`; a larger model becomes several files.
            dtype: The dtype to cast floating point tensors to.
            tokenizer: A tokenizer to save with the model.
            processor: A processor to save with the model: anything with `save_pretrained`.
            part: The model to write, if there are several: `"model.generator"`.
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

        Every rank must make this call; only the main rank talks to the Hub. Without `wait`, the call returns None and
        ckpt pushes while training continues. If the push fails, the next push, or `wait()` on the main rank, raises the
        error.
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
    """Release the signals of a manager that is gone. If it was not closed, a save that was due is lost."""
    preemption.close()
    schedule.close()
    if "save" in due:
        _log.warning(
            "ckpt could not make the last save to %s: it was due at the end of an iteration, but your program "
            "dropped the manager before that. Write `with ckpt.StateManager(...) as manager:`, or call "
            "manager.close() after the loop.",
            url,
        )
