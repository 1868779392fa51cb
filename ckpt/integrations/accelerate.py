"""Accelerate: `accelerator.save_state()` and `accelerator.load_state()` save and load with ckpt.

Whoever saves under `if accelerator.is_main_process` calls it between two batches. So the other ranks are asked before
they read the next batch of a prepared loader, and where they wait for everyone: there, each has the state of the same
step, and has drawn and read nothing since. To know that no save is coming, they wait until the main rank is there too.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ckpt.errors import CheckpointError, ConfigError, RanksError
from ckpt.manager import StateManager
from ckpt.ranks.consensus import MAIN, Ranks, Result, decide_together, run_on_all_ranks
from ckpt.root.deletion import set_aside_uncommitted, was_cut_off
from ckpt.save.root_writer import writer_at
from ckpt.storage import Storage, open_storage, place_of

_KEY = "state"
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two polls
_PATIENCE = 1800.0  # seconds for what the main rank does alone, such as validation: as long as torch's collectives wait


class MainProcessSaves:
    """Meetings of all ranks, numbered in the same order on each, and the saves that the main rank calls between them.

    `join` saves on a rank that did not call it, given what the main rank was called with. `place` says where a rank is
    in its training: it must be the same on all ranks.
    """

    def __init__(self, ranks: Ranks, join: Callable[[str | None], object], place: Callable[[], list[Any]]) -> None:
        self._ranks = ranks.channel("main-process-saves")
        self._join = join
        self._place = place
        self._met = 0
        self._saves = 0  # announced, on the main rank; joined, on the others
        self._is_saving = False

    @contextmanager
    def announced(self, output_dir: str | None) -> Iterator[None]:
        """On the main rank: tell the others of a save, and make it."""
        self._saves += 1
        key = _save_key(self._saves)  # of its own: this rank may be at the next save before others have read of this
        self._ranks.publish(key, json.dumps({"at": [self._met + 1, *self._place()], "output_dir": output_dir}))
        self._publish()
        try:
            with self._saving():
                yield
        except BaseException:
            self._ranks.publish(key, json.dumps({}))  # whoever has not joined it must not begin to
            raise

    def meet(self) -> None:
        """Join the saves that the main rank has called since the last meeting."""
        if self._is_saving:  # a hook of the save waits for everyone
            return
        if self._ranks.rank != MAIN:
            while self.join_next():
                pass
        self._met += 1
        if self._ranks.rank == MAIN:
            self._publish()

    def join_next(self) -> bool:
        """Wait for the main rank, and join the save that it calls. False if it has come to the next meeting instead."""
        save = self._next()
        if save is None:
            return False
        self._require_same_place(save["at"])
        self._saves += 1
        with self._saving():
            self._join(save["output_dir"])
        return True

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _publish(self) -> None:
        self._ranks.publish(_KEY, json.dumps({"met": self._met, "saves": self._saves}))

    def _next(self) -> dict[str, Any] | None:
        """The save to be joined now; None when the main rank has come to this meeting as well."""
        pause, until = _SHORTEST, time.monotonic() + max(_PATIENCE, self._ranks.timeout)
        while time.monotonic() < until:
            said = json.loads(self._ranks.published(_KEY) or '{"met": 0, "saves": 0}')
            if said["saves"] > self._saves:
                save: dict[str, Any] = json.loads(self._ranks.published(_save_key(self._saves + 1)) or "{}")
                if not save:
                    self._refuse_failed()
                if save["at"][0] <= self._met + 1:
                    return save
            if said["met"] > self._met:  # whatever is announced by now belongs to a later meeting
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)
        raise RanksError(
            f"for {_PATIENCE:g} s, rank 0 has neither read its next batch nor called wait_for_everyone(). Rank 0 may "
            "have died: look at its log. With main_process_saves=True, every rank must iterate over the same prepared "
            "loaders."
        )

    def _refuse_failed(self) -> NoReturn:
        raise RanksError(
            "a save on rank 0 failed before this rank could join it: see rank 0's error. With "
            "main_process_saves=True, every rank must iterate over the same prepared loaders."
        )

    def _require_same_place(self, theirs: list[Any]) -> None:
        mine = [self._met + 1, *self._place()]
        if theirs != mine:
            raise RanksError(
                "rank 0 called save_state() at a point that this rank has already passed, so their saved states "
                f"would not match. The call's number, epoch, batch, step and accelerator.step are {theirs} on rank 0, "
                f"but {mine} on this rank. Make save_state() the last call for a batch, or call it on every rank."
            )


def _save_key(number: int) -> str:
    return f"save-{number}"


_log = logging.getLogger("ckpt")
_ATTACHED = "_ckpt_attached"


def attach(
    accelerator: Any,
    root: str | os.PathLike[str] | Storage | None = None,
    *,
    main_process_saves: bool = False,
    **options: Any,
) -> StateManager:
    """Let an accelerator save and load its state through ckpt, and return the manager.

        manager = attach(accelerator, "runs/mrpc")
        restored = manager.resume()         # the newest intact checkpoint, if there is one
        ...
        accelerator.save_state()            # as before
        accelerator.load_state()

    The rest of your script stays the same: a `for` loop over a prepared loader continues where it stopped, and
    `accelerator.skip_first_batches` takes that into account. If you attach again, ckpt closes the previous manager.

    Args:
        accelerator: The accelerator; ckpt replaces its `save_state` and `load_state`.
        root: The place for the checkpoints. You can leave it out if the accelerator's project has a `project_dir`.
        main_process_saves: For scripts that call `save_state` under `if accelerator.is_main_process`. The other ranks
            join that save before they read their next batch of a prepared loader, or in `wait_for_everyone()`. At these
            points, every rank asks the main rank, which costs a request to the store for each batch.
        **options: Options of `StateManager`.
    """
    if not isinstance(main_process_saves, bool):
        raise ConfigError(f"main_process_saves={main_process_saves!r} must be True or False.")
    previous: _Attached | None = vars(accelerator).get(_ATTACHED)
    if previous is not None:
        previous.detach()
    manager = StateManager(root, accelerator=accelerator, **options)
    writer = manager.session.saver.root
    aside = (lambda: set_aside_uncommitted(writer.storage)) if writer.owns_root else (list)
    cut_off = run_on_all_ranks(writer.ranks, "attach()", aside)  # before any rank looks for the newest folder
    _Attached(accelerator, manager, frozenset(cut_off), main_process_saves=main_process_saves)
    return manager


class _Method:
    """A method of an attached accelerator. Pickled with it, it is Accelerate's own again."""

    def __init__(self, attached: _Attached, name: str) -> None:
        self._attached = attached
        self._name = name
        functools.update_wrapper(self, getattr(attached, name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(self._attached, self._name)(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._attached.accelerator, self._name)  # of a copy that has no attributes yet


class _Attached:
    """Replaces methods of an accelerator, with the same signatures.

    A copy of the accelerator, by pickle, is not attached: only one of them can write to the root.
    """

    def __init__(
        self, accelerator: Any, manager: StateManager, cut_off: frozenset[str], *, main_process_saves: bool
    ) -> None:
        self.accelerator = accelerator
        self._manager = manager
        self._cut_off = cut_off  # names of saves that were never committed, and are removed
        self._has_met = False  # all ranks, in a save
        self._saved: Path | str | None = None
        self._alone: MainProcessSaves | None = None
        if main_process_saves and manager.session.ranks.world_size > 1:
            self._alone = MainProcessSaves(manager.session.ranks, self._save, self._place)
            manager.session.loop.before_fetch = self._alone.meet
        manager.session.loop.counts_updates = True
        vars(accelerator).update({_ATTACHED: self, **{name: _Method(self, name) for name in _METHODS}})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def detach(self) -> None:
        """Restore the accelerator's own methods, and close the manager."""
        for name in (_ATTACHED, *_METHODS):
            vars(self.accelerator).pop(name, None)
        self._manager.close()

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | str | None:
        """Save everything. `output_dir` is a checkpoint's name, or a folder in the root or elsewhere on a local disk.

        Returns None if `SaveOptions(when_busy="skip")` or `SaveOptions(on_nan="skip")` skips the save.
        """
        self._warn_of_unused({"safe_serialization": safe_serialization is False, **save_model_func_kwargs})
        given = None if output_dir is None else os.fspath(output_dir)
        if self._alone is None:
            return self._save(given)
        if self._manager.session.ranks.rank == MAIN:
            with self._alone.announced(given):
                return self._save(given)
        if not self._alone.join_next():
            raise RanksError(
                f"this rank called save_state({given!r}), but rank 0 continued without a save. Call save_state() only "
                "on the main process, or on every rank."
            )
        return self._saved

    def _save(self, output_dir: str | None) -> Path | str | None:
        self._meet_once()
        self._saved = self._saved_at(output_dir)
        return self._saved

    def _saved_at(self, output_dir: str | None) -> Path | str | None:
        named = self.accelerator.project_configuration.automatic_checkpoint_naming
        if named or output_dir is None:
            return self._saved_in_root(None)
        path = _plain(output_dir)
        name = self._name_in_root(path)
        return self._saved_elsewhere(path) if name is None else self._saved_in_root(name)

    def _place(self) -> list[Any]:
        progress = self._manager.session.loop.progress
        return [progress.epoch, progress.batch, progress.step, self.accelerator.step]

    def wait_for_everyone(self) -> None:
        """As ever; and ranks join here what the main process alone has saved."""
        if self._alone is not None:
            self._alone.meet()
        type(self.accelerator).wait_for_everyone(self.accelerator)

    def _meet_once(self) -> None:
        """Before the first save, wait for all ranks: one under `is_main_process` fails here, and not at the second."""
        if not self._has_met:
            self._has_met = True
            try:
                run_on_all_ranks(self._manager.session.ranks, "save_state() (the first)", lambda: None)
            except RanksError as error:
                hint = (
                    "" if self._alone else " Or give attach(..., main_process_saves=True): the other ranks then join."
                )
                raise RanksError(f"{error}{hint}") from error

    def _saved_in_root(self, name: str | None) -> Path | str | None:
        saved = self._manager.save_state(name)
        return None if saved is None else _created(f"{self._manager.url}/{saved}")

    def _saved_elsewhere(self, path: str) -> Path | str | None:
        """Save to a folder that is not directly below the root: deeper in it, or outside."""
        session = self._manager.session
        writer = writer_at(path, session.saver.root)
        saved = session.saves.to_root(writer.storage.name, at=writer)
        return None if saved is None else _created(path)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a checkpoint by its name or its folder in the root. Without `input_dir`, load the newest intact
        checkpoint.

        You can also give a folder outside the root that `save_state` or Accelerate itself wrote. If a crash interrupted
        the save of a checkpoint in the root, ckpt warns you and loads the newest intact checkpoint instead.
        """
        self._warn_of_unused({**(load_kwargs or {}), **load_model_func_kwargs})
        name = None if input_dir is None else self._name_or_path(input_dir)
        try:
            self._manager.load_state(name)
        except CheckpointError:
            if name is None or "/" in name or not self._was_cut_off(name):
                raise
            if self._manager.session.load(None, strict=True) is None:
                raise
            self._say_instead(name)
        self._manager.session.loop.leave_place_to_script()

    def _warn_of_unused(self, options: dict[str, Any]) -> None:
        given = [name for name, value in options.items() if value]
        if given:
            text = f"{', '.join(given)}: not used, because ckpt reads and writes checkpoints in its own format."
            self._manager.session.loop.caveats.tell(f"unused/{given}", text)

    def _was_cut_off(self, name: str) -> bool:
        session = self._manager.session
        call = f"load_state({name!r}) (never committed?)"
        here = lambda _: name in self._cut_off or was_cut_off(session.storage, name)  # noqa: E731
        return bool(decide_together(session.ranks, call, Result(), here))

    def _say_instead(self, name: str) -> None:
        session = self._manager.session
        restored, step = session.restored, session.loop.progress.step
        if restored is not None and session.ranks.rank == MAIN:
            _log.warning(
                "%s was never committed, so ckpt loaded the newest intact checkpoint, %s. Training is now at step %d, "
                "even if your script reads another step from the checkpoint's name.", name, restored.name, step,
            )  # fmt: skip

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader itself: its next pass begins after so many batches, or at the loaded checkpoint's position."""
        loop = self._manager.session.loop
        if not loop.owns(dataloader):
            return type(self.accelerator).skip_first_batches(self.accelerator, dataloader, num_batches)
        done = loop.saved_batches(dataloader)
        loop.skip(dataloader, num_batches if done is None else None)
        if done not in (None, num_batches) and self._manager.session.ranks.rank == MAIN:
            _log.warning(
                "skip_first_batches(%d): the checkpoint says that %d batches of this loader are done, so ckpt skips "
                "that many.", num_batches, done,
            )  # fmt: skip
        return dataloader

    def end_training(self) -> None:
        """Finish the save that is under way, before the process group is destroyed."""
        if self._alone is not None:
            self._alone.meet()  # and nobody may end before all have come by: the main process may host the store
            run_on_all_ranks(self._manager.session.ranks, "end_training()", lambda: None)
        self.detach()
        self.accelerator.end_training()

    def _name_or_path(self, folder: str | os.PathLike[str]) -> str:
        """The name of a checkpoint in the root, or the path of a folder elsewhere."""
        path = _plain(folder)
        if "/" in path:
            return self._name_in_root(path) or path
        elsewhere = os.path.abspath(path)  # where Accelerate, which has no root, saves
        self._manager.wait()  # a checkpoint that is being saved is not listed yet
        in_root = any(True for _ in self._manager.session.storage.list(path))
        return elsewhere if not in_root and os.path.isdir(elsewhere) else path

    def _name_in_root(self, path: str) -> str | None:
        parent, _, name = path.rpartition("/")
        return name if not parent or place_of(open_storage(parent)) == place_of(self._manager.session.storage) else None


_METHODS = ("save_state", "load_state", "skip_first_batches", "wait_for_everyone", "end_training")


def _plain(folder: str | os.PathLike[str]) -> str:
    return os.path.expanduser(os.fspath(folder)).rstrip("/")


def _created(folder: str) -> Path | str:
    """The checkpoint's folder, created before the save is done: scripts put files of their own into it."""
    if "://" in folder:
        return folder
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
