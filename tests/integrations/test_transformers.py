"""Hugging Face Trainer with `CkptCallback`, in real processes: killed, resumed, and compared."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import ckpt
from ckpt.root.catalog import History
from ckpt.root.signing import new_key
from ckpt.storage import open_storage
from tests.helpers.processes import run_here, run_ranks, seed_everything
from tests.helpers.training import exact
from tests.helpers.variations import cells

STEPS = 21  # three epochs of seven
VARIES = ("runtime", "per_second", "train_loss", "total_flos")

pytestmark = pytest.mark.slow


class Sentences(Dataset[Any]):
    """Random words, and whether their sum is odd."""

    def __init__(self, count: int) -> None:
        self._words = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = self._words[index]
        return {"input_ids": words, "labels": words.sum() % 2}


def classifier() -> Any:
    """A BERT with dropout, too small to be good."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **size))


def write_llama(folder: Path) -> None:
    """Weights for `sharded_classifier`."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(1)
    size = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=50, num_labels=2, pad_token_id=0, attention_dropout=0.1, **size)
    LlamaForSequenceClassification(config).save_pretrained(folder)


def sharded_classifier(folder: Path) -> Any:
    """A model that transformers shards with FSDP 2 as it loads it: what there is of FSDP for a Trainer on CPUs."""
    from transformers import DistributedConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))


def trainer(folder: Path, *callbacks: Any, world_size: int = 1, model: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    usual = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_steps": 3,  # between two logs, every other time
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder / "output"), **{**usual, **arguments})
    data = {"train_dataset": Sentences(56), "eval_dataset": Sentences(16)}
    return with_callbacks(Trainer(classifier() if model is None else model, args, **data), callbacks)


def with_callbacks(built: Any, callbacks: Iterable[Any]) -> Any:
    from ckpt.integrations.transformers import CkptCallback

    for callback in callbacks:
        if isinstance(callback, CkptCallback):
            callback.attach(built)
        else:
            built.add_callback(callback)
    return built


def kept(root: Path | str, **options: Any) -> Any:
    from ckpt.integrations.transformers import CkptCallback

    return CkptCallback(root, **options)


def signalling(step: int, number: int) -> Any:
    from transformers import TrainerCallback

    class Signalling(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                os.kill(os.getpid(), number)

    return Signalling()


def interrupting(step: int) -> Any:
    """Not by SIGINT: whoever starts the tests in the background has it ignored."""
    from transformers import TrainerCallback

    class Interrupting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise KeyboardInterrupt

    return Interrupting()


def logged(history: Any) -> list[dict[str, float]]:
    """What was logged, but for what depends on how fast it went and on where this run began."""
    kept = [{key: v for key, v in line.items() if not any(word in key for word in VARIES)} for line in history]
    return [line for line in kept if line.keys() - {"step", "epoch"}]


def names(root: Path) -> list[str]:
    return [found.name for found in ckpt.list_checkpoints(root) if found.committed]


def killed_with(callback: Any, step: int) -> Any:
    """Killed after a step. Every snapshot is waited for."""
    from transformers import TrainerCallback

    class Killed(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Path(args.output_dir, "..", "began").write_text(str(state.global_step))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            callback._manager.session.memory.wait()  # none is left out
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killed()


def record_losses(run: Any, file: Path) -> None:
    """Append the loss of every batch, with the step before it and its number in the step."""
    compute, count = run.compute_loss, itertools.count()

    def recorded(model: Any, *given: Any, **named: Any) -> Any:
        loss = compute(model, *given, **named)
        if model.training:
            with file.open("a") as lines:
                lines.write(f"{run.state.global_step}.{next(count) % 2} {loss.item().hex()}\n")
        return loss

    run.compute_loss = recorded


def train(rank: int, folder: str, world_size: int, killed_at: int, sharded: bool = False, **options: Any) -> None:
    """Train, resuming if there is something to resume, until the end or the kill."""
    if world_size > 1:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        # without a number of threads, Accelerate gives each rank all cores
        os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    evaluated: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    ours = kept(Path(folder, "root"), ranks=ckpt.RankOptions(timeout=60), **options)
    killed = killed_with(ours, killed_at) if options else signalling(killed_at, signal.SIGKILL)
    if sharded:
        evaluated |= {"model": sharded_classifier(Path(folder, "..", "llama")), "save_only_model": True}
    run = trainer(Path(folder), ours, killed, world_size=world_size, **evaluated)
    run.args.save_only_model = False  # a Trainer can't resume such a model, so that it is built with nothing else
    record_losses(run, Path(folder, f"losses-{rank}"))
    run.train(resume_from_checkpoint=True)
    Path(folder, f"log-{rank}").write_text(json.dumps(logged(run.state.log_history), sort_keys=True))
    Path(folder, f"weights-{rank}").write_text(exact(run.model.state_dict()))


def train_and_be_killed(rank: int, straight: str, killed: str, world_size: int, sharded: bool) -> None:
    """Both in the same process: to import transformers takes longer than to train with it."""
    train(rank, straight, world_size, -1, sharded)
    seed_everything(rank)
    train(rank, killed, world_size, 11, sharded)


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (2, False), (2, True)])
def test_a_trainer_that_was_killed_and_resumes_equals_one_that_was_not(
    tmp_path: Path, world_size: int, sharded: bool
) -> None:
    if sharded:
        from transformers.distributed import DistributedConfig

        if not hasattr(DistributedConfig, "fsdp_size"):
            pytest.skip("this version of Trainer keeps every model on every rank, where there is no GPU")
        write_llama(tmp_path / "llama")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    both = (str(straight), str(killed), world_size, sharded)
    assert run_ranks(world_size, train_and_be_killed, *both, dies=True) == [-signal.SIGKILL] * world_size
    assert names(killed / "root")[0] in ("step-00000006", "step-00000009")
    again = (train, str(killed), world_size, -1, sharded)
    assert (run_ranks(world_size, *again) if world_size > 1 else [run_here(*again)]) == [0] * world_size
    results = [f"{kind}-{rank}" for kind in ("log", "weights") for rank in range(world_size)]
    assert [name for name in results if (killed / name).read_bytes() != (straight / name).read_bytes()] == []
    for rank in range(world_size):
        losses = [last_of_each(folder / f"losses-{rank}") for folder in (straight, killed)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == STEPS * 2
    tensors = [tensors_of(folder / "root" / f"step-{STEPS:08d}") for folder in (straight, killed)]
    assert tensors[0] == tensors[1]
    assert len(tensors[0]) == (2 * world_size if sharded else 2)  # the model's and the optimizer's
    assert list((killed / "output").glob("*")) == []  # the Trainer wrote nothing of its own


def last_of_each(losses: Path) -> dict[str, str]:
    """The loss of each batch: after a resume, that of the resumed run."""
    return dict(line.split() for line in losses.read_text().splitlines())


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*.safetensors")}


def train_in_memory(rank: int, folder: str, world_size: int, killed_at: int) -> None:
    os.environ["CKPT_MEMORY_DIR"] = folder
    train(rank, folder, world_size, killed_at, memory=2)


def train_in_memory_and_be_killed(rank: int, straight: str, killed: str, world_size: int) -> None:
    train_in_memory(rank, straight, world_size, -1)
    seed_everything(rank)
    train_in_memory(rank, killed, world_size, 11)


@pytest.mark.parametrize("world_size", cells([1, 2], often=[1]))
def test_one_that_was_killed_resumes_from_memory_as_if_it_were_not(tmp_path: Path, world_size: int) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    both = (str(straight), str(killed), world_size)
    assert run_ranks(world_size, train_in_memory_and_be_killed, *both, dies=True) == [-signal.SIGKILL] * world_size
    assert names(killed / "root")[0] in ("step-00000006", "step-00000009")
    assert run_ranks(world_size, train_in_memory, str(killed), world_size, -1) == [0] * world_size
    assert (killed / "began").read_text() == "10"
    results = [f"{kind}-{rank}" for kind in ("log", "weights") for rank in range(world_size)]
    assert [name for name in results if (killed / name).read_bytes() != (straight / name).read_bytes()] == []
    assert not list(tmp_path.glob("*/ckpt-*")), "something is left in memory"


def test_a_fresh_start_beside_what_is_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
    assert run_ranks(1, train_in_memory_alone, str(tmp_path), dies=True) == [-signal.SIGKILL]
    with pytest.raises(
        ckpt.ConfigError, match=r"left a snapshot in memory \(step-00000002\), but this run starts from"
    ):
        trainer(tmp_path, kept(tmp_path / "root", memory=2)).train()


def train_in_memory_alone(rank: int, folder: str) -> None:
    os.environ["CKPT_MEMORY_DIR"] = folder
    ours = kept(Path(folder, "root"), memory=2)
    trainer(Path(folder), ours, killed_with(ours, 3), save_steps=100).train()


@pytest.fixture
def scored() -> Any:
    """A score at each evaluation: the second is the best."""
    scores = iter([0.1, 0.9, 0.5, 0.9, 0.2, 0.3, 0.4])
    return lambda prediction: {"score": next(scores)}


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path: Path, scored: Any) -> None:
    from safetensors.torch import load_file

    best: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    run = trainer(tmp_path, kept(tmp_path / "root"), metric_for_best_model="score", **best)
    run.compute_metrics = scored
    run.train()
    assert names(tmp_path / "root") == ["step-00000021", "step-00000006"]
    assert run.state.best_model_checkpoint == f"{tmp_path}/root/step-00000006"
    assert exact(run.model.state_dict()) == exact(load_file(tmp_path / "root" / "step-00000006" / "model.safetensors"))
    metrics = {item.name: item.manifest.metrics for item in ckpt.list_checkpoints(tmp_path / "root") if item.manifest}
    assert metrics["step-00000006"]["eval_score"] == 0.9
    assert metrics["step-00000006"].keys() >= {"loss", "grad_norm", "learning_rate"}


@pytest.mark.parametrize("logs", [True, False])
def test_the_best_that_the_trainer_chose_is_kept_whatever_is_better_or_logged(tmp_path: Path, logs: bool) -> None:
    best: dict[str, Any] = {"eval_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 2}
    run = trainer(
        tmp_path,
        kept(tmp_path / "root"),
        metric_for_best_model="score",
        eval_steps=3,
        save_steps=6,
        max_steps=18,
        **best,
    )
    scores = iter([0.1, 0.8, 0.9, 0.85, 0.2, 0.3])  # the best of all, at step 9, is not saved
    own = run.evaluate
    if logs:
        run.compute_metrics = lambda prediction: {"score": next(scores)}
    else:
        run.evaluate = lambda *given, **named: {**own(*given, **named), "eval_score": next(scores)}
    run.train()
    assert names(tmp_path / "root") == ["step-00000018", "step-00000006"]
    assert run.state.best_model_checkpoint == f"{tmp_path}/root/step-00000006"


def test_after_a_save_the_trainers_state_has_that_of_its_callbacks(tmp_path: Path, straight: Any) -> None:
    run = trainer(tmp_path, kept(tmp_path / "root"))
    run.train()
    assert run.state.stateful_callbacks == straight.state.stateful_callbacks
    assert run.state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"save_strategy": "epoch"}, [21, 14, 7]),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 3}, [6, 3]),
        ({"save_strategy": "no"}, []),
        ({"save_total_limit": 1}, [21]),
    ],
)
def test_it_saves_when_the_arguments_say_so(
    tmp_path: Path, scored: Any, strategy: dict[str, Any], expected: list[int]
) -> None:
    run = trainer(tmp_path, kept(tmp_path / "root"), metric_for_best_model="score", **strategy)
    run.compute_metrics = scored
    run.train()
    assert names(tmp_path / "root") == [f"step-{step:08d}" for step in expected]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training that was not interrupted, by the Trainer alone."""
    run = trainer(tmp_path_factory.mktemp("straight"))
    run.train()
    return run


def assert_same(run: Any, other: Any) -> None:
    assert logged(run.state.log_history) == logged(other.state.log_history)
    assert exact(run.model.state_dict()) == exact(other.model.state_dict())


def test_told_to_terminate_it_saves_that_step_and_the_next_run_goes_on_from_there(
    tmp_path: Path, straight: Any
) -> None:
    with pytest.raises(ckpt.Preempted) as stopped:
        trainer(tmp_path, kept(tmp_path / "root"), signalling(10, signal.SIGTERM)).train()
    assert stopped.value.code == 128 + signal.SIGTERM
    assert names(tmp_path / "root")[0] in ("step-00000010", "step-00000011")
    run = trainer(tmp_path, kept(tmp_path / "root"))
    run.train(resume_from_checkpoint=True)
    assert_same(run, straight)
    first, second = History.of(open_storage(tmp_path / "root")).attempts
    assert (first.ended, first.reason, second.ended) == ("stopped", "SIGTERM", "finished")
    assert len(second.metrics["loss"]) > 1


def test_sigusr1_saves_that_step_and_training_goes_on(tmp_path: Path, straight: Any) -> None:
    asked = kept(tmp_path / "root", ranks=ckpt.RankOptions(save_on_sigusr1=True))
    run = trainer(tmp_path, asked, signalling(10, signal.SIGUSR1))
    run.train()
    assert {"step-00000010", "step-00000011"} & set(names(tmp_path / "root"))
    assert_same(run, straight)


def test_weights_that_are_dead_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(tmp_path, kept(tmp_path / "root", saving=ckpt.SaveOptions(on_nan="skip")))
    torch.nn.init.constant_(next(run.model.parameters()), float("nan"))
    run.train()
    assert names(tmp_path / "root") == []
    assert "because these parameters are NaN or infinite" in caplog.text


def test_a_damaged_checkpoint_is_passed_over_and_a_named_one_is_taken(
    tmp_path: Path, straight: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, kept(tmp_path / "root")).train()
    damaged = tmp_path / "root" / f"step-{STEPS:08d}" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    run = trainer(tmp_path, kept(tmp_path / "root"))
    run.train(resume_from_checkpoint=True)
    assert f"resumed from {tmp_path}/root/step-00000018" in capfd.readouterr().err
    assert_same(run, straight)
    again = trainer(tmp_path, kept(tmp_path / "root"))
    again.train(resume_from_checkpoint=str(tmp_path / "root" / "step-00000015"))  # logged before, and after
    assert f"resumed from {tmp_path}/root/step-00000015" in capfd.readouterr().err
    assert_same(again, straight)


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_that_a_trainer_wrote_is_taken_over(tmp_path: Path, straight: Any, named: bool) -> None:
    usual = trainer(tmp_path, interrupting(12), save_steps=6)
    with pytest.raises(KeyboardInterrupt):
        usual.train()
    run = trainer(tmp_path, kept(tmp_path / "root"), save_steps=6)
    run.train(resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-6") if named else True)
    assert exact(run.model.state_dict()) == exact(straight.model.state_dict())
    assert names(tmp_path / "root") == [f"step-{step:08d}" for step in (21, 18, 12)]
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["checkpoint-6"]


def test_a_folder_that_a_trainer_wrote_is_left_alone_where_one_checkpoint_is_to_be_kept(
    tmp_path: Path, scored: Any
) -> None:
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "score"}
    root = f"memory://{tmp_path.name}"  # no folder: the Trainer would look for it
    for steps, callbacks in ((3, []), (9, [kept(root)])):
        run = trainer(tmp_path, *callbacks, max_steps=steps, save_total_limit=1, load_best_model_at_end=True, **best)
        run.compute_metrics = scored
        run.train(resume_from_checkpoint=steps > 3)
    assert run.state.best_model_checkpoint == f"{root}/step-00000006"
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["checkpoint-3"]


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, kept(tmp_path / "root"), max_steps=3).train()
    with pytest.raises(ckpt.MissingError, match=r"no checkpoint 'step-9' in .* There are: step-00000003"):
        trainer(tmp_path, kept(tmp_path / "root")).train(resume_from_checkpoint="step-9")
    with pytest.raises(ckpt.ConfigError, match=r"other/step-9 is neither a checkpoint in .*root nor"):
        trainer(tmp_path, kept(tmp_path / "root")).train(resume_from_checkpoint=str(tmp_path / "other" / "step-9"))


def test_a_fresh_start_where_checkpoints_are_is_refused_before_training(tmp_path: Path) -> None:
    trainer(tmp_path, kept(tmp_path / "root"), max_steps=3).train()
    run = trainer(tmp_path, kept(tmp_path / "root"), max_steps=3)
    with pytest.raises(ckpt.ConfigError, match=r"step-00000003 is the newest.*resume_from_checkpoint=True"):
        run.train()
    assert run.state.global_step == 0


def test_a_callback_that_was_not_attached_says_so(tmp_path: Path) -> None:
    from transformers import Trainer

    run = trainer(tmp_path, max_steps=3)
    with pytest.raises(ckpt.ConfigError, match=r"CkptCallback\(root\)\.attach\(Trainer\(\.\.\.\)\)"):
        Trainer(run.model, run.args, callbacks=[kept(tmp_path / "root")])
    run.add_callback(kept(tmp_path / "root"))
    with pytest.raises(ckpt.ConfigError, match=r"attach\(Trainer"):
        run.train()


def test_no_name_of_transformers_is_replaced_for_other_trainers(tmp_path: Path) -> None:
    import transformers

    before, other = dict(vars(transformers.trainer)), dict(vars(transformers.Trainer))
    run = trainer(tmp_path, kept(tmp_path / "root"), interrupting(2))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert dict(vars(transformers.trainer)) == before
    assert dict(vars(transformers.Trainer)) == other
    assert isinstance(run, transformers.Trainer)


def test_options_that_are_the_arguments_to_say_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ckpt.ConfigError, match=r"no option save_every\. Its options are .*TrainingArguments"):
        kept(tmp_path, save_every=3)
    with pytest.raises(ckpt.ConfigError, match=r"^CkptCallback: memory=True must be a number of steps"):
        kept(tmp_path, memory=True)


def test_a_checkpoint_of_another_loop_is_refused_by_name(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path / "root", model=torch.nn.Linear(1, 1)) as manager:
        manager.save_state("mine")
    with pytest.raises(ckpt.MismatchError, match="mine has no trainer_state"):
        trainer(tmp_path, kept(tmp_path / "root")).train(resume_from_checkpoint=True)


def test_checkpoints_are_signed_and_what_is_not_is_no_place_to_resume_from(tmp_path: Path) -> None:
    public = new_key(tmp_path / "key.pem")
    signing = ckpt.Signing(key=tmp_path / "key.pem", required=True)
    trainer(tmp_path, kept(tmp_path / "root", signing=signing)).train()
    assert set(map(tuple, ckpt.verify(tmp_path / "root", verify_key=public).values())) == {()}
    other = ckpt.Signing(verify_key=new_key(tmp_path / "other.pem"), required=True)
    with pytest.raises(ckpt.UntrustedError, match="you require a signature by"):
        trainer(tmp_path, kept(tmp_path / "root", signing=other)).train(resume_from_checkpoint=True)


def test_going_back_by_replay_is_refused_as_by_a_manager(tmp_path: Path) -> None:
    new_key(tmp_path / "key.pem")
    root, head = tmp_path / "root", tmp_path / "head"
    signing = ckpt.Signing(key=tmp_path / "key.pem", head=head)

    def train(resume: Any = True, **options: Any) -> None:
        given = {"max_steps": 4, "save_steps": 2, **options}
        trainer(tmp_path, kept(root, signing=signing), **given).train(resume_from_checkpoint=resume)

    train(resume=None)
    names = sorted(found.name for found in ckpt.list_checkpoints(root))
    assert head.read_text().strip().endswith(f":{len(names)}")
    shutil.copytree(root, tmp_path / "copy")
    shutil.rmtree(root / names[-1])  # somebody removes the newest
    with pytest.raises(ckpt.UntrustedError, match="removed newer ones"):
        train()
    train(str(root / names[0]), max_steps=6)  # on purpose
    assert int(head.read_text().rpartition(":")[2]) > len(names)
    for there in (True, False):  # an older root is put back, or none at all
        shutil.rmtree(root)
        if there:
            shutil.copytree(tmp_path / "copy", root)
        with pytest.raises(
            ckpt.UntrustedError, match="removed newer ones" if there else "this run loaded none of them"
        ):
            train()
    with pytest.raises(ckpt.UntrustedError, match="this run loaded none of them"):
        train(resume=None)


def test_a_folder_that_a_trainer_itself_wrote_is_refused_where_signatures_are_required(tmp_path: Path) -> None:
    public = new_key(tmp_path / "key.pem")
    trainer(tmp_path, max_steps=2, save_steps=2).train()
    for resume in (True, str(tmp_path / "output" / "checkpoint-2")):
        signing = ckpt.Signing(verify_key=public, required=True)
        with pytest.raises(ckpt.UntrustedError, match=r"checkpoint-2: you require a signature"):
            trainer(tmp_path, kept(tmp_path / "root", signing=signing)).train(resume_from_checkpoint=resume)
