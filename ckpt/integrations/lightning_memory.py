"""Lightning: snapshots in host memory between the checkpoints of a Trainer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from ckpt.errors import ConfigError
from ckpt.formats.native.manifest import Manifest
from ckpt.integrations.lightning import CkptIO, request_of, verify
from ckpt.load.select import Choice, Selection, choose
from ckpt.memory.session_tier import build_tier, find_snapshots
from ckpt.memory.tier import MemoryTier
from ckpt.ranks.group import SingleProcess
from ckpt.root.catalog import name_of_step
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver
from ckpt.storage import open_storage


class CkptMemory(Callback):  # type: ignore[misc]
    """Takes the state into host memory every so many steps: a restart on the same machine loses that many at most.

        memory = CkptMemory("checkpoints", every=10)        # the folder of the ModelCheckpoint
        callbacks = [ModelCheckpoint("checkpoints"), CkptGenerators(), memory]
        Trainer(plugins=[CkptIO()], callbacks=callbacks).fit(model, ckpt_path=memory.newest())

    The ranks must be on one host: Lightning has its checkpoints from the first of them.

    Args:
        folder: That of the ModelCheckpoint.
        every: Steps between snapshots.
        rescue: Save the newest to the folder when nobody restarts the run.

    Raises:
        ConfigError: `every` is no number of steps.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int, rescue: bool = False) -> None:
        if every < 1:
            raise ConfigError(f"CkptMemory: every={every!r} must be a number of steps, 1 or more.")
        self._storage = open_storage(folder)
        self._options: dict[str, Any] = {"every": every, "storage_options": None, "rescue": rescue, "replicas": 0}
        self._chosen: Manifest | None = None  # the snapshot in memory that training continues from
        self.tier: MemoryTier | None = None  # on the first rank, while it trains

    def newest(self) -> str | None:
        """The path of the newest intact snapshot or checkpoint, every byte verified; None if there is none."""
        tier = self._build(Saver(RootWriter(self._storage, SingleProcess())))
        with ExitStack() as held:
            held.callback(lambda: tier.close(keep=True))
            choice: Choice[None] | None = choose(
                Selection(
                    tiers=(self._storage,),
                    ranks=SingleProcess(),
                    prepare=lambda candidate: verify(candidate.storage, candidate.manifest),
                    memory=find_snapshots(tier),
                ),
                held,
            )
        self._chosen = choice.manifest if choice is not None and choice.in_memory else None
        return choice.url if choice is not None else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_hosts(trainer)
        if not isinstance(trainer.strategy.checkpoint_io, CkptIO):
            raise ConfigError("CkptMemory needs the plugin that saves the checkpoints: Trainer(plugins=[CkptIO()]).")
        if trainer.is_global_zero:
            self.tier = self._take_over(trainer.strategy.checkpoint_io.saver_of(self._storage))

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        step = trainer.global_step
        if self.tier is not None:
            self.tier.stepped(step)
        if step and step % self._options["every"] == 0:
            self._take(trainer, step)

    def _take(self, trainer: Trainer, step: int) -> None:
        """Let Lightning make a checkpoint, on every rank, and take it into memory where the plugin would write it."""

        def take(checkpoint: dict[str, Any]) -> None:
            if self.tier is not None and self.tier.is_due(step):
                self.tier.save(request_of(name_of_step(step), checkpoint), step)

        plugin: CkptIO = trainer.strategy.checkpoint_io
        plugin.take = take
        try:
            trainer.save_checkpoint(name_of_step(step), weights_only=False)
        finally:
            plugin.take = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(keep=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close(keep=False)

    def _close(self, *, keep: bool) -> None:
        tier, self.tier = self.tier, None
        if tier is not None:
            tier.close(keep=keep)

    def _build(self, saver: Saver) -> MemoryTier:
        tier = build_tier(saver, **self._options)
        assert tier is not None
        return tier

    def _take_over(self, saver: Saver) -> MemoryTier:
        """The tier of this run, which continues from what is in memory or has it removed with its first snapshot."""
        tier = self._build(saver)
        tier.find()
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            saver.root.follow(chosen, (), tier=-1)
        tier.loaded([] if chosen is not None else None)
        return tier


def _refuse_hosts(trainer: Trainer) -> None:
    if trainer.num_nodes > 1 or int(os.environ.get("LOCAL_WORLD_SIZE", trainer.world_size)) < trainer.world_size:
        raise ConfigError(
            "CkptMemory: the ranks are on several hosts, and only the first has Lightning's checkpoints in its memory. "
            "Leave it out, or write the loop with StateManager(memory=ckpt.Memory(replicas=1))."
        )
