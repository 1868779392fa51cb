"""A Trainer whose sampler draws the order of an epoch from a generator: resumed, it sees every sample once."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import ckpt
from tests.data.test_repartition import flat
from tests.helpers.processes import run_ranks
from tests.helpers.seaweed import KEY, SECRET, Server
from tests.helpers.training import exact
from tests.integrations.test_transformers import classifier, interrupting, kept, with_callbacks

SAMPLES = 64
PER_EPOCH = 16

pytestmark = pytest.mark.slow
KEEPS_THE_BATCH_SIZE = int(version("transformers").partition(".")[0]) < 5  # that of the checkpoint


class Ragged(Dataset[Any]):
    """Sentences of different lengths that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= SAMPLES:
            raise IndexError(index)  # the sampler measures all samples by going through them
        words = torch.arange(index, index + 2 + index * 7 % 13) % 50
        return {"input_ids": words, "labels": index % 2, "which": index}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    words = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {
        "input_ids": words,
        **{key: torch.tensor([sample[key] for sample in samples]) for key in ("labels", "which")},
    }


def trainer(folder: Path, *callbacks: Any, sampler: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    by_length: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if not hasattr(TrainingArguments, "train_sampling_strategy"):  # its name in earlier versions
        by_length = {"group_by_length": True}

    class Recording(Trainer):  # type: ignore[misc]
        """Notes which samples each step was given, and may have a sampler of its own."""

        seen: list[list[int]]

        def training_step(self, model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> Any:
            self.seen.append(inputs.pop("which").tolist())
            return super().training_step(model, inputs, *others, **named)

        def _get_train_sampler(self, *given: Any) -> Any:
            return super()._get_train_sampler(*given) if sampler is None else sampler

    usual = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 12,
        "logging_steps": 2,
        **by_length,
        "remove_unused_columns": False,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder / "output"), **{**usual, **arguments})
    built = with_callbacks(Recording(classifier(), args, train_dataset=Ragged(), data_collator=collate), callbacks)
    built.seen = []
    return built


def _sampled_by_its_own_generator() -> Any:
    from torch.utils.data import SubsetRandomSampler

    return SubsetRandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3))


SAMPLERS: dict[str, Any] = {"group_by_length": lambda: None, "a generator of its own": _sampled_by_its_own_generator}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """A model this small is slower with more, and the sums of one training must be those of another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trainings that were not interrupted, by the Trainer alone."""
    trained = {}
    for name, make in SAMPLERS.items():  # one after the other: to build one seeds all generators
        trained[name] = trainer(tmp_path_factory.mktemp("straight"), sampler=make())
        trained[name].train()
    return trained


@pytest.mark.parametrize(
    ("sampler", "saved_at"),
    [("group_by_length", 12), ("group_by_length", 16), ("group_by_length", 24), ("a generator of its own", 24)],
)
def test_a_trainer_that_resumes_in_mid_epoch_sees_all_samples_that_its_sampler_draws(
    tmp_path: Path, straight: dict[str, Any], sampler: str, saved_at: int
) -> None:
    """Of 64 samples 16 were lost: the generators were restored before the sampler had drawn its order from them."""
    first = trainer(
        tmp_path, kept(tmp_path / "root"), interrupting(saved_at + 1), sampler=SAMPLERS[sampler](), save_steps=saved_at
    )
    with pytest.raises(KeyboardInterrupt):
        first.train()
    torch.manual_seed(999)
    again = trainer(tmp_path, kept(tmp_path / "root"), sampler=SAMPLERS[sampler](), save_steps=saved_at)
    again.train(resume_from_checkpoint=True)
    seen = first.seen[:saved_at] + again.seen
    for epoch in range(2):
        batches = seen[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH]
        assert sorted(flat(batches)) == list(range(SAMPLES)), f"epoch {epoch}"
    assert seen == straight[sampler].seen
    assert exact(again.model.state_dict()) == exact(straight[sampler].model.state_dict())


def _interrupted_equals_straight(rank: int, folder: str) -> None:
    """All in the same processes: to import transformers takes longer than to train with it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ["OMP_NUM_THREADS"] = "1"

    def build(name: str, *callbacks: Any) -> Any:
        callback = kept(
            Path(folder, name), ranks=ckpt.RankOptions(timeout=60), saving=ckpt.SaveOptions(background=False)
        )
        # four steps in an epoch
        return trainer(Path(folder), callback, *callbacks, per_device_train_batch_size=8, save_steps=3)

    straight = build("straight")
    straight.train()
    first = build("run", interrupting(7))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    torch.manual_seed(999 + rank)
    again = build("run")
    again.train(resume_from_checkpoint=True)
    assert first.seen[:6] + again.seen == straight.seen
    assert exact(again.model.state_dict()) == exact(straight.model.state_dict())
    Path(folder, f"seen-{rank}").write_text(json.dumps(straight.seen))


def test_two_ranks_that_group_by_length_go_on_with_the_same_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, _interrupted_equals_straight, str(tmp_path)) == [0, 0]
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    assert sorted(flat([*seen[0][:4], *seen[1][:4]])) == list(range(SAMPLES))
    alone = trainer(tmp_path, kept(tmp_path / "run"), per_device_train_batch_size=16)
    alone.train(resume_from_checkpoint="step-00000006")  # in the middle of the second epoch
    if not KEEPS_THE_BATCH_SIZE:
        assert "lengths were grouped for 8 samples and are for 16 now" in capfd.readouterr().err


@pytest.mark.skipif(KEEPS_THE_BATCH_SIZE, reason="this version of Trainer keeps the size of the checkpoint")
def test_another_number_of_samples_in_a_step_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, kept(tmp_path / "root"), interrupting(13)).train()
    other = trainer(tmp_path, kept(tmp_path / "root"), per_device_train_batch_size=8, max_steps=14)
    other.train(resume_from_checkpoint=True)
    assert "a step had 4 samples and has 8 now" in capfd.readouterr().err


def test_storage_options_of_the_callback_reach_its_storage(
    tmp_path: Path, s3: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were accepted and ignored: the root was opened with what the environment said, or not at all."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    options = {"key": KEY, "secret": SECRET, "endpoint_url": server.url}
    trainer(tmp_path, kept(s3, storage_options=options), max_steps=12).train()
    assert [found.name for found in ckpt.list_checkpoints(s3, storage_options=options)] == ["step-00000012"]
    again = trainer(tmp_path, kept(s3, storage_options=options), max_steps=14)
    again.train(resume_from_checkpoint=f"{s3}/step-00000012")
    assert len(again.seen) == 2
    with pytest.raises(ckpt.ConfigError, match="a plain path accepts no storage_options, but you gave endpoint_url"):
        kept(tmp_path / "root", storage_options={"endpoint_url": "http://127.0.0.1:9"})
