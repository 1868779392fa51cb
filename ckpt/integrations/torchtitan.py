"""torchtitan: the checkpointer through which its Trainer saves and resumes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from ckpt.errors import ConfigError, Preempted
from ckpt.export.load_model import load_model
from ckpt.export.merge import merge
from ckpt.export.options import SHARD_SIZE
from ckpt.manager import StateManager
from ckpt.options import ManagerOptions, resolve_options
from ckpt.ranks.consensus import MAIN, run_on_all_ranks
from ckpt.root.retention import Keep
from ckpt.shown import few, shown
from ckpt.state.joined import Joined
from ckpt.util.option_values import names_of, one_of

try:
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.tools import filesystem
    from tyro.conf import Suppress
except ImportError as error:
    raise ImportError(
        f"ckpt.integrations.torchtitan needs torchtitan 0.3, but Python can't import it: {error}. Install it "
        "and its dependencies: pip install 'torchtitan==0.3.*'."
    ) from error

_Own = Annotated[Any, Suppress]  # an object, which torchtitan's command line can't express
_OWN = [name for name in names_of(ManagerOptions) if name != "root"]
_INSTEAD = {
    "initial_load_in_hf": "convert the weights first, and set initial_load_path",
    "last_save_in_hf": "set last_save_model_only, and convert the model afterwards",
    "create_seed_checkpoint": "begin with a model that every job loads, by initial_load_path",
}  # docs/guides/torchtitan.md shows how
_EXCLUDABLE = ("dataloader", "lr_scheduler")


@dataclass(frozen=True, kw_only=True)
class _Options(ManagerOptions):
    """A manager's options, with what is wrong with torchtitan's settings: one error names everything."""

    called = "CkptCheckpointer.Config"
    async_mode: Annotated[str, one_of("disabled", "async", "async_with_pinned_mem")] = "async"
    wrong: tuple[str, ...] = ()

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        return list(self.wrong)


class CkptCheckpointer(BaseCheckpointManager):  # type: ignore[misc]
    """Lets torchtitan's Trainer save and resume through ckpt: in the background, atomically, every byte verified.

        config.checkpoint = CkptCheckpointer.Config(enable=True, interval=500, keep_latest_k=3)     # in your registry

    `Config` takes the settings of torchtitan's own checkpointer, with the same meaning and the same flags
    (`--checkpoint.interval 500`). It also has fields for the options of `StateManager`. `CkptCheckpointer` loads and
    saves whenever torchtitan's Trainer calls its checkpointer, so you don't have to change the Trainer. After SIGTERM,
    all ranks save at the same step, then exit.

    `trainer.checkpointer.manager` is the `StateManager`.

    Args:
        config: These settings differ from torchtitan's: `async_mode` is "async" unless you set it, and both async modes
            mean ckpt's background saves. The last checkpoint is always complete, so that you can extend the run:
            `last_save_model_only=True` also writes the model alone, in `export_dtype`, to the folder
            `checkpoint-model` beside `checkpoint`. `exclude_from_loading` takes only "dataloader" and
            "lr_scheduler". `initial_load_path` is a ckpt checkpoint, or, for the model alone, anything that
            `ckpt.load_model` reads. ckpt's own fields are `save_every` (instead of `interval`), `keep` (instead of
            `keep_latest_k`), `mirror`, `storage_options`, `saving`, `ranks`, `memory` and `signing`.
        **built: What torchtitan's Trainer passes.

    Raises:
        ConfigError: ckpt can't honour some settings; the error names all of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings for checkpoints, and the options of `StateManager`."""

        last_save_model_only: bool = False
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        save_every: _Own = None
        keep: _Own = None
        mirror: _Own = None
        storage_options: _Own = None
        saving: _Own = None
        ranks: _Own = None
        memory: _Own = None
        signing: _Own = None

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            self.own_options()

        def own_options(self) -> dict[str, Any]:
            """The options of the manager: the user's, and those that torchtitan's settings stand for."""
            given = {name: value for name in _OWN if (value := getattr(self, name)) is not None}
            keep = Keep(last=self.keep_latest_k) if self.keep_latest_k else None
            mapped = {"save_every": self.interval, "keep": keep, "async_mode": self.async_mode}
            options: Any = resolve_options({**mapped, **given, "wrong": tuple(self._unsupported())}, _Options)
            saving = replace(options.saving, background=options.saving.background and self.async_mode != "disabled")
            return {**{name: getattr(options, name) for name in _OWN}, "saving": saving}

        def _unsupported(self) -> list[str]:
            wrong = [f"{name}=True is not possible: {what}" for name, what in _INSTEAD.items() if getattr(self, name)]
            if left := [name for name in self.exclude_from_loading if name not in _EXCLUDABLE]:
                wrong.append(f"exclude_from_loading={left} is not possible: only {' and '.join(_EXCLUDABLE)} are")
            return wrong

        def to_dict(self) -> dict[str, Any]:
            """For torchtitan's log, config file and trackers: without keys and credentials."""
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            return {name: shown(repr(value)) if name in _OWN else value for name, value in values.items()}

    def __init__(self, config: Config, **built: Any) -> None:
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        self._config, self._built = config, built
        objects = {"model": Joined(built["model_parts"]), "optimizer": built["optimizers"]}
        objects |= {"scheduler": built["lr_schedulers"], "dataloader": built["dataloader"]}
        root = filesystem.join(built["base_folder"], config.folder)
        self.manager = StateManager(root, **objects, **config.own_options())
        self.manager.register(**built["states"])
        self.manager.session.saves.unmanaged.quiet = config.load_only

    def _load(self, step: int = -1) -> bool:
        schedulers = self._built["lr_schedulers"]
        schedule = copy.deepcopy(schedulers.state_dict())
        if step != -1:
            found = bool(self.manager.load_state(step))
        elif self._config.load_only:  # without the lock: the run that saves there may still be going on
            found = self.manager.session.load(None, strict=True) is not None
        else:
            found = self.manager.resume() is not None
        found = found or self._load_initial()
        if "lr_scheduler" in self._config.exclude_from_loading:
            schedulers.load_state_dict(schedule)
        if "dataloader" in self._config.exclude_from_loading:
            self.manager.session.loop.forget_positions()
        return found

    def _load_initial(self) -> bool:
        """Where the root has no checkpoint: what `initial_load_path` names."""
        root = self.manager.session.storage
        if theirs := {entry.key.partition("/")[0] for entry in root.list() if entry.key.endswith("/.metadata")}:
            raise ConfigError(
                f"{root.url} has torchtitan's own checkpoints ({few(sorted(theirs), 3)}). ckpt can load only the "
                "model from them. To continue training with that model, choose another folder, and set "
                "initial_load_path to one of these checkpoints. To finish that run, use torchtitan's own checkpointer."
            )
        path = self._config.initial_load_path
        if path and self._config.initial_load_model_only:
            options, signing = self._config.storage_options, self.manager.session.options.signing
            keys: Any = {"verify_key": signing.verify_key, "require_signed": bool(signing.required or signing.head)}
            load_model(path, self.manager.unwrap(), storage_options=options, **keys)
        elif path:
            self.manager.load_state(path)
        return bool(path)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._config.load_only:
            return False
        self.manager.progress.step = curr_step - 1  # torchtitan counts, also after an initial load
        try:
            self.manager.step()
            # at once: by the time the Trainer asks for its next batch, it has counted the next step
            self.manager.session.take_due()
        except Preempted:  # torchtitan closes its checkpointer only after an Exception
            self.close()
            raise
        if last_step or (curr_step == 1 and self._config.enable_first_step_checkpoint):
            self.manager.session.saves.end()
        if last_step:
            self.manager.wait()  # torchtitan too ends with a save that training waits for
        saved: bool = self.manager.session.state.is_saved
        if last_step and saved and self._config.last_save_model_only:
            run_on_all_ranks(self.manager.session.ranks, "last_save_model_only", self._write_model)
        return saved

    def _write_model(self) -> None:
        """From the last checkpoint: in a pipeline no rank has the complete model."""
        session, root, config = self.manager.session, self.manager.url.rstrip("/"), self._config
        if session.ranks.rank == MAIN:
            source, folder = f"{root}/{session.state.name}", f"{root}-model/{session.state.name}"
            options: dict[str, Any] = {"dtype": config.export_dtype, "storage_options": config.storage_options}
            merge(source, f"{folder}/model.safetensors", max_shard_size=SHARD_SIZE, **options)

    def _wait_for_saving(self) -> None:
        self.manager.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to wait for: ckpt copies the state before training changes it."""

    def _close(self) -> None:
        self.manager.__exit__(*sys.exc_info())
