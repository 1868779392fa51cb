"""`TrainingArguments(push_to_hub=True)`: the model is published by ckpt, in one commit, while training continues."""

from __future__ import annotations

import logging

from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy

from ckpt.errors import CkptError, ConfigError
from ckpt.manager import StateManager
from ckpt.ranks.consensus import MAIN, Result, decide_together, run_on_all_ranks
from ckpt.storage.hub.repo import require_client

_log = logging.getLogger("ckpt")
_WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class TrainerPush:
    """Publishes the model after saves, as `hub_strategy` says. What goes wrong with the Hub does not end the training.

    Like Trainer, it leaves a save out while the push before it is under way, unless `hub_always_push` is set; but the
    last one is made up for when training ends.
    """

    def __init__(self, trainer: Trainer) -> None:
        args = trainer.args
        self._trainer = trainer
        self._is_on = bool(args.push_to_hub) and args.hub_strategy != HubStrategy.END
        self._left_out = False
        if args.push_to_hub and args.hub_strategy in _WITH_CHECKPOINTS:
            raise ConfigError(
                f"hub_strategy={args.hub_strategy.value!r} pushes the Trainer's own checkpoint files, which "
                "CkptCallback does not write. To push the model, use hub_strategy='every_save'. For checkpoints on "
                "the Hub, use CkptCallback('hub://user/name')."
            )
        if self._is_on:
            require_client()

    def after_save(self, manager: StateManager) -> None:
        """Publish what was just saved, in the background."""
        if not self._is_on:
            return
        state = self._trainer.state
        by_step = self._trainer.args.save_strategy == SaveStrategy.STEPS
        at = f"step {state.global_step}" if by_step else f"epoch {int(state.epoch)}"
        self._push(manager, f"Training in progress, {at}", always=bool(self._trainer.args.hub_always_push))

    def finish(self, manager: StateManager, *, in_haste: bool) -> None:
        """Wait for what is under way, and publish the last save if it was left out or failed, unless `in_haste`."""
        if not self._is_on:
            return
        self._settle(manager)
        if self._left_out and not in_haste:
            self._push(manager, "End of training", always=True)
            self._settle(manager)

    def settle(self, manager: StateManager) -> None:
        """Wait for what is under way: from here on nothing waits for it that would raise what went wrong."""
        if self._is_on:
            self._settle(manager)

    def _push(self, manager: StateManager, message: str, *, always: bool) -> None:
        session, args, mine = manager.session, self._trainer.args, self._trainer.hub_model_id
        facts = Result([mine, session.pusher.is_busy])
        repo, busy = decide_together(session.ranks, "push_to_hub (target)", facts, lambda each: each[0])
        if busy and not always:
            self._left_out = True
            return
        self._settle(manager)
        try:
            manager.push_to_hub(
                repo,
                private=args.hub_private_repo,
                revision=getattr(args, "hub_revision", None),
                commit_message=message,
                token=args.hub_token,
                processor=self._trainer.processing_class,
                wait=False,
            )
            self._left_out = False
        except CkptError as error:
            self._report(manager, error)

    def _settle(self, manager: StateManager) -> None:
        session = manager.session
        try:
            run_on_all_ranks(session.ranks, "push_to_hub (wait)", session.pusher.wait)
        except CkptError as error:
            self._report(manager, error)

    def _report(self, manager: StateManager, error: CkptError) -> None:
        self._left_out = True
        if manager.session.ranks.rank == MAIN:
            _log.warning("ckpt could not push the model to the Hub; training continues: %s", error)
