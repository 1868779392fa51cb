"""A Trainer whose sampler, dataset or collator draws from the global generators: resumed in mid-epoch, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import ckpt
from tests.helpers.training import exact
from tests.integrations.test_transformers import interrupting, kept, logged, with_callbacks

SAMPLES, WORDS = 24, 30
SAVED_AT = (5, 6)  # in the middle of the second epoch of three steps, and at its end

pytestmark = pytest.mark.slow


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": (torch.arange(12) * 7 + index) % (WORDS - 5) + 5}


class Noisy(Sentences):
    """Draws from each of the three global generators for every sample."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = super().__getitem__(index)["input_ids"]
        words[0], words[1] = random.randrange(5, WORDS), int(np.random.randint(5, WORDS))
        words[2] = int(torch.randint(5, WORDS, ()))
        return {"input_ids": words}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (Noisy()[index] for index in range(SAMPLES))


def masked_model() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(1)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **size))


def masking() -> Any:
    """The collator that masks words at random."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    special = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "mask", "cls", "sep", "unk")}
    words = [*special.values(), *(f"w{number}" for number in range(WORDS - len(special)))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    return DataCollatorForLanguageModeling(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))


def trainer(folder: Path, *callbacks: Any, data: Any, sampler: Any = None, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class Recording(Trainer):  # type: ignore[misc]
        seen: list[list[int]]

        def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            self.seen.append(inputs["input_ids"].flatten().tolist())
            return super().training_step(model, inputs, *others, **named)

        def _get_train_sampler(self, *given: Any) -> Any:
            return super()._get_train_sampler(*given) if sampler is None else sampler(self.train_dataset)

    usual = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder / "output"), **{**usual, **arguments})
    built = with_callbacks(Recording(masked_model(), args, train_dataset=data, data_collator=masking()), callbacks)
    built.seen = []
    return built


CASES: dict[str, dict[str, Any]] = {
    "a collator that masks": {"data": Sentences},
    "a dataset that draws": {"data": Noisy},
    "workers": {"data": Noisy, "dataloader_num_workers": 2},
    "a sampler without a generator": {
        "data": Noisy,
        "sampler": RandomSampler,
        "accelerator_config": {"use_seedable_sampler": False},
    },
    "a stream": {"data": Stream, "max_steps": 9},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES)
def test_what_is_drawn_from_global_generators_is_drawn_as_if_there_had_been_no_interruption(
    tmp_path: Path, case: str
) -> None:
    """The first batches after a resume were read before the generators were put back, and with other states."""
    options = {**CASES[case]}
    data = options.pop("data")
    in_turn = {"saving": ckpt.SaveOptions(background=False)}

    def build(root: str, *callbacks: Any, save_steps: int = 100) -> Any:
        ours = kept(tmp_path / root, **in_turn)
        return trainer(tmp_path, ours, *callbacks, data=data(), save_steps=save_steps, **options)

    straight = build("straight")
    straight.train()
    for saved_at in SAVED_AT:
        first = build(f"run-{saved_at}", interrupting(saved_at + 1), save_steps=saved_at)
        with pytest.raises(KeyboardInterrupt):
            first.train()
        again = build(f"run-{saved_at}")
        torch.rand(99)
        np.random.seed(999)
        random.seed(999)
        again.train(resume_from_checkpoint=True)
        assert [*first.seen[: 2 * saved_at], *again.seen] == straight.seen, f"after {saved_at} steps"
        if case != "a stream":  # of which Trainer counts epochs anew
            assert logged(again.state.log_history) == logged(straight.state.log_history)
        assert exact(again.model.state_dict()) == exact(straight.model.state_dict())


def test_data_that_cannot_be_followed_is_named_when_it_is_saved_and_when_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    class Around:
        """A loader that is no DataLoader."""

        def __init__(self, loader: Any) -> None:
            self._loader = loader

        def __getattr__(self, name: str) -> Any:
            return getattr(self._loader, name)

        def __len__(self) -> int:
            return len(self._loader)

        def __iter__(self) -> Any:
            return iter(self._loader)

    def build(*callbacks: Any) -> Any:
        built = trainer(tmp_path, kept(tmp_path / "root"), *callbacks, data=Sentences(), save_steps=2)
        loader = built.get_train_dataloader
        built.get_train_dataloader = lambda: Around(loader())
        return built

    with pytest.raises(KeyboardInterrupt):
        build(interrupting(3)).train()
    assert caplog.text.count("data of this Trainer is a Around, which ckpt can't follow") == 1
    again = build()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 9
    assert "the resumed run is not exact: data: the checkpoint has no position in the data" in capfd.readouterr().err
