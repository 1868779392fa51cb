"""TRL's trainers with `CkptCallback`, on tiny models: killed, resumed, and compared. Skipped without TRL."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.helpers.processes import run_ranks, seed_everything
from tests.helpers.training import exact
from tests.integrations.test_transformers import kept, logged, signalling, with_callbacks

pytest.importorskip("trl")

WORDS = [f"w{number}" for number in range(40)]
STEPS = 8
KILLED_AT = 6  # of five steps saved; between two logs, and, with GRPO, between two generations

pytestmark = pytest.mark.slow


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    words = Tokenizer(WordLevel({word: number for number, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def save_model(folder: Path) -> str:
    """A model on disk, from which a reference model is made as well."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": len(WORDS) + 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    Qwen2ForCausalLM(Qwen2Config(**size, **heads, **ends)).save_pretrained(folder / "model")
    return str(folder / "model")


def sentence(number: int, length: int = 6) -> str:
    return " ".join(WORDS[(number * 7 + position * 3) % len(WORDS)] for position in range(length))


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def trainer(kind: str, folder: Path) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(save_model(folder))
    usual = {
        "output_dir": str(folder / "output"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1}
    prompts = [sentence(number, 4) for number in range(20)]
    common = {"processing_class": tokenizer()}
    if kind == "SFT":
        data = Dataset.from_dict({"text": [sentence(number, 3 + number % 5) for number in range(20)]})
        return trl.SFTTrainer(model, trl.SFTConfig(**usual), train_dataset=data, **common)
    if kind == "DPO":
        answers = {"chosen": [sentence(n + 1) for n in range(20)], "rejected": [sentence(n + 2) for n in range(20)]}
        data = Dataset.from_dict({"prompt": prompts, **answers})
        return trl.DPOTrainer(model, args=trl.DPOConfig(**usual, **synced), train_dataset=data, **common)
    data = Dataset.from_dict({"prompt": prompts})
    sampled = {"num_generations": 4, "max_completion_length": 6, "steps_per_generation": 4, "num_iterations": 2}
    if kind == "RLOO":
        args = trl.RLOOConfig(**usual, **synced, **sampled)
        return trl.RLOOTrainer(model, reward, args=args, train_dataset=data, **common)
    args = trl.GRPOConfig(**usual, **synced, **sampled)
    return trl.GRPOTrainer(model, reward, args=args, train_dataset=data, **common)


def train(rank: int, kind: str, folder: str, killed_at: int) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")
    ours = kept(Path(folder, "root"), saving=ckpt.SaveOptions(background=False))
    run = with_callbacks(trainer(kind, Path(folder)), [ours, signalling(killed_at, signal.SIGKILL)])
    run.train(resume_from_checkpoint=True)
    lines = [{key: value for key, value in line.items() if "time" not in key} for line in logged(run.state.log_history)]
    Path(folder, "log").write_text(json.dumps(lines, sort_keys=True, indent=1))
    Path(folder, "weights").write_text(exact(run.model.state_dict()))
    if getattr(run, "ref_model", None) is not None:
        Path(folder, "reference").write_text(exact(run.ref_model.state_dict()))


def train_and_be_killed(rank: int, kind: str, straight: str, killed: str) -> None:
    train(rank, kind, straight, -1)
    seed_everything(rank)
    train(rank, kind, killed, KILLED_AT)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO", "RLOO"])
def test_a_trainer_of_trl_that_was_killed_and_resumes_equals_one_that_was_not(tmp_path: Path, kind: str) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert run_ranks(1, train_and_be_killed, kind, str(straight), str(killed), dies=True) == [-signal.SIGKILL]
    assert ckpt.list_checkpoints(killed / "root")[0].name == f"step-{KILLED_AT - 1:08d}"
    assert run_ranks(1, train, kind, str(killed), -1) == [0]
    for name in ("log", "weights", *([] if kind == "SFT" else ["reference"])):
        assert (killed / name).read_text() == (straight / name).read_text(), name
