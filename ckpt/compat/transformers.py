"""Private names of Hugging Face's Trainer and of TRL's trainers."""

from __future__ import annotations

from typing import Any

from ckpt.compat.private import Private

_TRAINER = "transformers.Trainer"


def _method(name: str, use: str) -> Private:
    return Private(
        f"{_TRAINER}.{name}",
        since="4.56",
        use=use,
        without="CkptCallback refuses the Trainer, and names what it lacks.",
    )


# methods that CkptCallback takes the place of: the Trainer has no public place for them
SAVE = _method("_save_checkpoint", "a save of ckpt in place of the Trainer's own")
LOG_SAVE_EVALUATE = _method("_maybe_log_save_evaluate", "the end of every step, with the loss since the last log")
LOAD_MODEL = _method("_load_from_checkpoint", "a resume of ckpt in place of the Trainer's own")
LOAD_OPTIMIZER = _method("_load_optimizer_and_scheduler", "the same, when all objects are as training uses them")
LOAD_BEST = _method("_load_best_model", "the same, for load_best_model_at_end")

TOTAL_LOSS = Private(
    f"{_TRAINER}._total_loss_scalar",
    since="4.56",
    use="leaves steps of the run before out of the mean loss of this one",
    without="The mean loss that a resumed Trainer reports in the end has some steps of the run before.",
)
LAST_LOGGED = Private(
    f"{_TRAINER}._globalstep_last_logged",
    since="4.56",
    use="logs the first loss after a resume over the same steps as an uninterrupted run",
    without="The first loss that a resumed Trainer logs is over the steps since the resume alone.",
)

# attributes of TRL's trainers, in memory alone
_GRPO = "trl.GRPOTrainer"
_LOGS = "After a resume, TRL's first log has no values of the steps before."
_TRL = (
    Private(
        f"{_GRPO}._step",
        since="0.20",
        use="by which GRPO and RLOO know when to generate",
        without="A resumed GRPO or RLOO run generates at its first step, whether that is due or not.",
    ),
    Private(
        f"{_GRPO}._buffered_inputs",
        since="0.20",
        use="completions that are trained on for several steps",
        without="A resumed GRPO or RLOO run generates its completions again.",
    ),
    Private(f"{_GRPO}._metrics", since="0.20", use="metrics since the last log", without=_LOGS),
    Private(f"{_GRPO}._total_train_tokens", since="0.20", use="tokens so far", without=_LOGS),
    Private(f"{_GRPO}._entropy_window_stats", since="0.20", use="entropies since the last log", without=_LOGS),
)
OF_THESE_RANKS = ("_buffered_inputs",)  # made again where the number of ranks is another


def names_of_subclass(trainer: Any) -> list[str]:
    """The attributes that this trainer's class adds to those of Trainer, and that no checkpoint of it has."""
    return [one.name for one in _TRL if one.name in vars(trainer)]


def last_logged(trainer: Any) -> int:
    """The step of the last log."""
    return int(LAST_LOGGED.of(trainer, trainer.state.global_step))


def continue_log(trainer: Any, since: int, loss: float) -> bool:
    """Let the next log be over the steps since that one, whose loss the run before has. False if it cannot be."""
    if LAST_LOGGED.of(trainer) is None:
        return False
    setattr(trainer, LAST_LOGGED.name, since)
    total = TOTAL_LOSS.of(trainer)
    if total is not None:
        setattr(trainer, TOTAL_LOSS.name, total - loss)
    return True
