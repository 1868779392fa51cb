"""`StateManager`: the one object that a training loop touches."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from ckpt.config import read_config
from ckpt.data import loader_hook
from ckpt.data.batches import Batches
from ckpt.data.loop import Loop
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, MissingError, Preempted, StorageError
from ckpt.export.card import Training, curves
from ckpt.export.hub_commit import Card, Target
from ckpt.export.push import Pusher
from ckpt.export.save_model import SHARD_SIZE, Wanted, belongings, save_live
from ckpt.load.load_state import LiveObjects, StateLoader
from ckpt.load.locations import Locations
from ckpt.load.restored import Restored
from ckpt.metrics import as_numbers, checked_metrics
from ckpt.options import check_mirror, check_options, required_root
from ckpt.ranks.consensus import run_on_all_ranks
from ckpt.ranks.group import MAIN, find_ranks
from ckpt.ranks.hosts import find_hosts, may_differ
from ckpt.ranks.preemption import EXIT_STATUS, Preemption
from ckpt.root.catalog import check_name
from ckpt.root.copy import Copies
from ckpt.root.mirror import Mirror
from ckpt.root.open import open_tiers, refuse_checkpoint, try_out_tiers
from ckpt.root.retention import Keep
from ckpt.save.capture import Capture, CapturedState
from ckpt.save.environment import device_name, versions
from ckpt.save.saver import Saver
from ckpt.state import rng
from ckpt.state.objects import KINDS, find_source
from ckpt.state.registry import StateRegistry
from ckpt.state.unmanaged import UnmanagedWatch, weakly
from ckpt.state.unwrap import unwrap
from ckpt.storage import MemoryStorage, Storage, place_of
from ckpt.util.console import say

_log = logging.getLogger("ckpt")
T = TypeVar("T")


class StateManager:
    """Keeps the whole state of a training run: saves it atomically, and resumes it exactly.

        with ckpt.StateManager("runs/x", model=model, optimizer=optimizer, save_every=500) as manager:
            for epoch in manager.epochs(3):
                for batch in manager.batches(loader):
                    loss = train_step(batch)
                    manager.step(metrics={"loss": loss})

    `root` is a path, a URL or a storage. `model`, `optimizer`, `scheduler`, `scaler` and `dataloader` are one object
    each, a sequence, or a dict of named objects; `register` adds others. With several processes, every one of them
    builds the manager and makes the same calls; the main one writes.

    `accelerator` stands for all of them: whatever it has prepared or will prepare, and what is registered with it, is
    managed. The folder, naming and limit of its project hold where nothing else is said. A plain `for` over its loaders
    goes on where it stopped, after `resume` or `load_state`.

    `save_every`: steps between saves. `keep`: which checkpoints stay (all, if none). `layout`: "auto" saves what is
    sharded in pieces, each rank its own, and the rest whole; "full" gathers everything into whole files; "sharded"
    shares out also what every rank has. `gradients`: also save gradients, so that a save in the middle of an
    accumulation window resumes exactly; if none, where such a window is open, or an accelerator accumulates.
    `broadcast`: when loading, read what all ranks of a host need once, and pass it on among them; if none, where the
    root is far away. `background`: whether
    training goes on while a checkpoint is written, unless a save says otherwise. `when_busy`: whether a save that comes
    while another is being written waits for it ("wait") or is left out ("skip"). `host_memory`: bytes that copies of
    the state may take; where that is not enough, training waits until a checkpoint is written. `timeout`: seconds to
    wait for a rank that does not answer. `handle_sigterm`: save and stop when the process is told to terminate.
    `storage_options`: credentials, endpoint and the like for a root that is a URL, as fsspec's filesystem for it takes
    them; what the environment or a profile says need not be given. A root far away is tried out at once, by writing a
    few bytes and removing them.

    `mirror`: a path, URL or storage to which every committed checkpoint is copied in the background, for instance an
    object store behind a local disk. Loads take the newest intact checkpoint of the two, the root's where both have it.
    `mirror_keep`: which checkpoints stay there (as `keep`, if none). `mirror_bandwidth`: bytes in a second that copying
    may take. `mirror_backlog`: how many checkpoints may wait to be copied; older ones are left out. What goes wrong
    with copies is logged, in `mirror_error`, and tried again: it never stops the training.

    `shared`: whether all hosts see the same root. If none, that is tried out where torchrun has started several; if
    false, always. Hosts that do not share it keep what their ranks save, each in its own root, and load it from there;
    what a host lacks is read from the mirror.

    `follow`: whether a plain `for` over a DataLoader that the training takes its batches from goes on where it stopped,
    after `resume` or `load_state`. Say false where the script finds its place in the data itself.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage | None = None,
        *,
        accelerator: Any = None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        save_every: int | None = None,
        keep: Keep | None = None,
        layout: str = "auto",
        gradients: bool | None = None,
        broadcast: bool | None = None,
        background: bool = True,
        when_busy: str = "wait",
        host_memory: int | None = None,
        timeout: float = 300.0,
        handle_sigterm: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | Storage | None = None,
        mirror_keep: Keep | None = None,
        mirror_bandwidth: float | None = None,
        mirror_backlog: int = 2,
        shared: bool | None = None,
        follow: bool = True,
    ) -> None:
        check_options(save_every=save_every, keep=keep, layout=layout, timeout=timeout, when_busy=when_busy)
        self._source = find_source(
            accelerator, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, dataloader=dataloader
        )
        where = required_root(self._source.root if root is None else root)
        self._tiers = open_tiers(where, mirror, storage_options)
        check_mirror(self._tiers[1:], keep=mirror_keep, bandwidth=mirror_bandwidth, backlog=mirror_backlog)
        self._storage = self._tiers[0]
        own_root = may_differ(self._storage, shared=shared)
        self._ranks = find_ranks(place_of(self._storage), timeout, own_root=own_root)
        if self._ranks.world_size > 1 and any(isinstance(one, MemoryStorage) for one in self._tiers):
            raise ConfigError("memory:// is in one process, and this job has several. Give it a root that all can see.")
        try_out_tiers(*self._tiers)
        refuse_checkpoint(self._storage)
        keep = self._source.keep if keep is None else keep
        hosts = find_hosts(self._ranks, self._storage, shared=shared)
        self._mirror: Mirror | None = None
        if mirror is not None:
            copies = Copies(
                self._storage,
                self._tiers[1],
                keep=keep if mirror_keep is None else mirror_keep,
                bandwidth=mirror_bandwidth,
                alone=not hosts.apart,
                leads=self._ranks.rank == MAIN,
            )
            self._mirror = Mirror(copies, mirror_backlog)
        self._saver = Saver(self._storage, self._ranks, keep, self._mirror, hosts, host_memory=host_memory)
        self._background = background
        self._pusher = Pusher(self._ranks)
        self._when_busy = when_busy
        self._save_every = save_every
        self._keep = keep
        self._layout = layout
        self._loop = Loop(self._ranks, self._source.loaders, follow=follow, others=accelerator is None)
        self._managed = StateRegistry(
            self._source.find,
            (self._saver.snapshots.watch, self._loop.watch),
            gradients=(self._source.gradients or None) if gradients is None else gradients,
        )
        self._loading = StateLoader(
            self._ranks,
            Locations(self._tiers, hosts, storage_options),
            LiveObjects(self._source, self._managed, self._loop),
            broadcast,
            self._saver.snapshots.paused,
            self._saver.follow,
        )
        self._managed.look()
        self._follow_loaders(follow=follow)
        self._oversights = UnmanagedWatch(self._managed, self._loop.habits.remarks, save_every)
        self._loop.on_training = weakly(self._oversights.trained)
        self._metrics: dict[str, Any] = {}
        self._warned: set[str] = set()
        self._restored: Restored | None = None
        self._started = False
        self._saved_at: tuple[int, int] | None = None
        self._handle_sigterm = handle_sigterm
        self._preemption = Preemption(self._ranks)
        devices = {one.device for one in self._managed.tensors() if not (one.is_cpu or one.is_meta)}
        self._saver.snapshots.meet(devices)
        if devices and all(one.state for one in self._managed.optimizers):
            self._make_memory_ready()  # to pin it takes long; other memory is made ready from the first step on
        weakref.finalize(self, self._preemption.close)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **objects: Any) -> StateManager:
        """A manager with the options of a YAML file (`root`, `save_every`, `keep`, ...) for these objects."""
        known = inspect.signature(cls.__init__).parameters.keys() - {"self", "accelerator", *KINDS}
        options = read_config(path, known)
        return cls(options.pop("root"), **{**options, **objects})

    def __repr__(self) -> str:
        return f"StateManager({self._storage.url!r}, parts={[*self._managed.parts, *self._managed.generators]})"

    def __enter__(self) -> StateManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # what went wrong in the loop comes first

    @property
    def url(self) -> str:
        """Where the checkpoints are kept."""
        return self._storage.url

    @property
    def progress(self) -> Progress:
        """Epoch, batch, step and samples so far."""
        self._loop.habits.note_asked()
        return self._loop.progress

    @property
    def run(self) -> str:
        """The run's identity, the same over all its resumes: after `resume`, on the main rank, for trackers."""
        return self._saver.run

    @property
    def mirror_error(self) -> Exception | None:
        """What went wrong with the last copy to the mirror, on the main rank; none once a copy has succeeded again."""
        return self._mirror.error if self._mirror is not None else None

    @property
    def restored(self) -> Restored | None:
        """What the last load brought back; none if this run began afresh."""
        return self._restored

    def register(self, **objects: Any) -> None:
        """Manage more objects, each under its name: anything with `state_dict` and `load_state_dict`, or a generator.

        Generators (of torch, NumPy or Python) are kept for every rank. So are other objects whose state differs between
        ranks; as many ranks have it back, and any other number of them the main rank's.
        """
        self._managed.register(objects)

    def unwrap(self, model: nn.Module | None = None) -> nn.Module:
        """The model, or the managed one, without what DDP, FSDP 1, DataParallel and torch.compile wrap around it."""
        models = list(self._managed.models.values())
        if model is None and len(models) != 1:
            raise ConfigError(f"this manager has {len(models)} models: say which, unwrap(model).")
        return unwrap(models[0] if model is None else model)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are left of `total`. Goes on where the last run stopped, or starts afresh.

        When they are done and `save_every` is set, the final state is saved: as `step-00001000`, or, where the last
        step was saved already, as `step-00001000-end`, with what the end of the epoch has changed.
        """
        self._start()
        yield from self._loop.epochs(total)
        self._preemption.close()
        if self._save_every and self._saved_at != self._where():
            saved_in_loop = self._saved_at is not None and self._saved_at[0] == self._loop.progress.step
            name = f"{self._default_name()}-end" if saved_in_loop and not self._source.name() else None
            self._save(name, skip=False)

    def batches(self, loader: Iterable[T]) -> Batches[T]:
        """The batches of this epoch that are left, in the same order as ever; `len()` of it is how many.

        A loop that was left with `break` is not done: the next run goes on with the batch after. Whatever reads ahead
        belongs inside: `batches(Prefetcher(loader))`, or the batches that it has read are lost at every resume.
        """
        return self._loop.batches(loader, self._start, lambda number, batch: batch)

    def enumerate(self, loader: Iterable[T], start: int = 0) -> Batches[tuple[int, T]]:
        """The same, each with its number in the epoch: after a resume it goes on counting where it stopped."""
        return self._loop.batches(loader, self._start, lambda number, batch: (start + number, batch))

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """A step of training is done: count it, save when that is due, and stop if the process was told to.

        Tensors among the metrics are looked at only when a checkpoint is saved.
        """
        self._saver.owner.require("step()")
        self._loading.refuse_half_loaded()
        if not self._started:  # loading now would undo the step that was just made
            raise ConfigError(
                "step() came before the state was resumed. Go through manager.epochs(...) or manager.batches(...), or "
                "call manager.resume() before the loop."
            )
        if self._ranks.world_size == 1:  # ranks would learn of it at different steps: they are told where they meet
            self._saver.check()
        self._managed.look()
        self._make_memory_ready()
        self._loop.stepped()
        self._oversights.stepped()
        self._metrics = checked_metrics(metrics)
        stop = self.told_to_stop()  # from the first step on: only then is there somebody to answer it
        if stop or self._is_due():
            self.save_state(wait=True if stop else None)
        if stop:
            self._stop()

    def told_to_stop(self) -> bool:
        """Whether the process was told to terminate: for loops that do not call `step`, to ask after every step.

        `progress.step` must have been set to that step. All ranks are told at the same one, where they save and stop.
        """
        if self._handle_sigterm:
            self._preemption.listen()
        return self._preemption.due(self._loop.progress.step)

    def save_state(
        self, name: str | None = None, *, metrics: Mapping[str, Any] | None = None, wait: bool | None = None
    ) -> str | None:
        """Save everything, and return the checkpoint's name (`step-00001000` if none is given).

        When it returns the state has been copied, and training may go on while it is written; with `wait`, or after
        `wait()`, the checkpoint is committed and durable. What goes wrong meanwhile is raised by the next call. While
        an earlier save is under way, this one waits for it, or, with `when_busy="skip"`, is left out: None is returned.

        A checkpoint of the same name is replaced, and stands until the new one is committed. Every rank must make this
        call.

        Inside `batches` the next run goes on with the batch after this one: save when it has been used. After the inner
        loop the next run begins with the next epoch: let the save be the last thing in the epoch.
        """
        return self._save(name, metrics, wait, skip=self._when_busy == "skip")

    def load_state(self, name: str | None = None, *, strict: bool = True) -> Restored:
        """Load a checkpoint: the one by that name, or the newest that is intact. Prints and returns what was restored.

        A folder that Accelerate's `save_state` wrote is as good: by its name, or by its path, wherever it is. Without
        either, where there is no other checkpoint in the root, it is the one with the highest number.

        With `strict` everything must fit, or nothing is changed and one error lists what does not. Without it, what
        fits is restored, and the rest is listed as skipped.
        """
        restored = self._load(name, strict=strict)
        if restored is None:
            raise MissingError(
                f"there is no checkpoint in {self._storage.url}. resume() starts afresh where there is none."
            )
        return restored

    def resume(self, *, strict: bool = True) -> Restored | None:
        """Take the root for this run, and load the newest intact checkpoint if there is one; none if there is not."""
        self._saver.owner.require("resume()")
        self._set_started()
        restored = self._load(None, strict=strict)
        self._saver.hold()
        if restored is None and self._ranks.rank == MAIN:
            say(f"no checkpoint in {self._storage.url}: starting afresh")
        return restored

    def rewind_rng(self) -> None:
        """Put the generators back once more as the last load did: for loops that find their place in the data alone,
        and draw numbers on the way."""
        self._loop.rewind_rng()

    def wait(self) -> None:
        """Return when every save is committed, and every push done. Raises what went wrong, if nobody has been told.

        Copies to the mirror are not waited for: `close` does that.
        """
        try:
            self._saver.wait()
        finally:
            self._pusher.wait()

    def close(self) -> None:
        """Finish what is under way, copies to the mirror too, and let go of the root, the loaders and SIGTERM.

        A manager that is used as a context does this itself. In a forked child it does nothing: all is the parent's.
        """
        if not self._saver.owner.is_here:
            return
        try:
            self.wait()
        finally:
            loader_hook.end(self._loop)
            self._loop.release()
            self._managed.release()
            self._oversights.close()
            self._preemption.close()
            self._saver.close()
            self._ranks.linger()

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
        """
        self._loading.refuse_half_loaded()
        model, wanted = self._managed.model_part(part), Wanted.of(dtype, max_shard_size)
        beside = belongings(tokenizer=tokenizer, processor=processor)
        save_live(f"save_model({os.fspath(directory)!r})", directory, model, self._ranks, wanted, beside)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | None = None,
        max_shard_size: int | str | None = SHARD_SIZE,
        dtype: str | torch.dtype | None = None,
        card: Card = True,
        tokenizer: Any = None,
        processor: Any = None,
        part: str = "model",
        wait: bool = True,
    ) -> str | None:
        """Publish the model as it is now, in one commit, and return the commit's URL (see `ckpt.push_to_hub`).

        Every rank must make this call; the main one alone talks to the Hub. Without `wait` it does so while training
        goes on, and None is returned; what goes wrong is raised by the next push, or on the main rank by `wait()` and
        `close()`.
        """
        self._saver.owner.require("push_to_hub()")
        self._loading.refuse_half_loaded()
        target = Target.of(repo_id, revision, token, private, commit_message, card)
        model, wanted = self._managed.model_part(part), Wanted.of(dtype, max_shard_size)
        beside = belongings(tokenizer=tokenizer, processor=processor)
        return self._pusher.push(model, target, wanted, beside, self._training_facts, wait=wait)

    def _training_facts(self) -> Training:
        """What a model card can say of this run."""
        return Training(
            progress=self._loop.progress.to_json(),
            metrics=as_numbers(self._metrics),
            versions=versions(),
            hardware=device_name(),
            world_size=self._ranks.world_size,
            lineage={"run": self._saver.run},
            curves=curves(self._saver.manifests_of_run()),
        )

    def _start(self) -> None:
        self._saver.owner.require("epochs() or batches()")
        self._loading.refuse_half_loaded()
        if not self._started:
            self.resume()

    def _set_started(self) -> None:
        self._started = True
        loader_hook.patch()
        self._loop.start()

    def _follow_loaders(self, *, follow: bool) -> None:
        managed = weakref.ref(self._managed)
        self._loop.models = lambda: found.models.values() if (found := managed()) is not None else ()
        self._loop.has_data = lambda: bool((found := managed()) is not None and found.generators)
        if not follow:
            return
        method = weakref.WeakMethod(self._managed.look)  # loaders, which the loop follows, may outlive the manager

        def look() -> None:
            found = method()
            if found is not None:
                found()

        self._loop.before_pass = look
        loader_hook.begin(self._loop)

    def _default_name(self) -> str:
        return self._source.name() or f"step-{self._loop.progress.step:08d}"

    def _folder(self, name: str) -> str:
        return f"{self._storage.url}/{name}"

    def _is_due(self) -> bool:
        """Whether this step is one to save, and has not been: attached, several batches may make one step."""
        step = self._loop.progress.step
        return bool(self._save_every and step and step % self._save_every == 0 and self._saved_at != self._where())

    def _where(self) -> tuple[int, int]:
        return self._loop.progress.step, self._loop.progress.epoch

    def _stop(self) -> None:
        if self._ranks.rank == MAIN:
            say(f"told to terminate: saved step {self._loop.progress.step} in {self._storage.url}, stopping")
        raise Preempted(EXIT_STATUS)

    def _save(
        self, name: str | None, metrics: Mapping[str, Any] | None = None, wait: bool | None = None, *, skip: bool
    ) -> str | None:
        """`skip`: whether it may be left out while another one is under way."""
        self._saver.owner.require(f"save_state({name!r})" if name else "save_state()")
        self._loading.refuse_half_loaded()
        wait = not self._background if wait is None else wait
        name = check_name(name) if name is not None else self._default_name()
        numbers = as_numbers(self._metrics if metrics is None else metrics)
        facts = {"progress": self._loop.saved_progress().to_json(), "metrics": numbers}
        if skip and not wait and self._saver.is_busy_anywhere(name):
            return None
        self._source.before_save(self._folder(name))
        self._managed.look()
        self._oversights.saving()
        self._loop.habits.remarks.tell_lasting()
        self._saver.save(name, lambda: self._capture(name, numbers), self._managed.optimized, facts, wait=wait)
        self._source.after_save()
        self._set_started()
        self._saved_at = self._where()
        return name

    def _capture(self, name: str, metrics: Mapping[str, float]) -> CapturedState:
        if self._keep is not None:
            self._keep.check(metrics, name)
        generators = {key: rng.capture_one(one) for key, one in self._managed.generators.items()}
        own, lacking = self._managed.own_now(self._ranks.rank)
        self._warn(lacking)
        rank_state = {
            "rng": rng.capture(),
            "generators": generators,
            "loaders": self._loop.state(),
            "loop": self._loop.seen(),
            "source": self._source.state(),
            "lacking": lacking,
        }
        parts = self._managed.parts.values()
        capture = Capture(self._ranks, self._layout, self._saver.hosts, self._saver.compared)
        return capture.take(parts, own, rank_state)

    def _warn(self, lacking: Mapping[str, str]) -> None:
        """What checkpoints lack is said once, at the first that lacks it, and in `Restored.approximated`."""
        new = {what: why for what, why in lacking.items() if what not in self._warned}
        self._warned |= new.keys()
        for what, why in new.items() if self._ranks.rank == MAIN else ():
            _log.warning("what is saved is not all there is: %s: %s", what, why)

    def _load(self, name: str | None, *, strict: bool) -> Restored | None:
        self._saver.owner.require("load_state()")
        run_on_all_ranks(self._ranks, "load_state() (saves done)", self.wait)
        trained = self._saved_at is not None or self._loop.progress.step > 0
        try:
            restored = self._loading.load(name, strict=strict, verify_before_overwrite=trained)
        except StorageError as error:
            self._saver.failed_load = str(error)  # what could not be looked at must not be overtaken by a save
            raise
        if restored is not None:
            self._set_started()
            self._saved_at = self._where()
            self._restored = restored
            self._oversights.resumed_from = restored.name
        return restored

    def _make_memory_ready(self) -> None:
        self._saver.make_memory_ready(self._managed.tensors, for_devices_only=not self._background)
