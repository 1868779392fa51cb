"""A pytest plugin for the tests of transformers itself: every `Trainer` that they build is attached to ckpt.

`make test-transformers TRANSFORMERS=path/to/a/checkout` loads it, and runs those tests that save or resume, twice: with
saves in the foreground, and with `--background` as ckpt saves by itself.

The tests look for folders `checkpoint-N` in `output_dir`, and resume from them. ckpt saves to a root. After training,
each checkpoint in the root therefore gets a folder with what the tests read: the model as `ckpt convert` exports it,
its configuration, and the Trainer's state. A resume from such a folder is one from the checkpoint in the root.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, Wav2Vec2FeatureExtractor

import ckpt
from ckpt.formats.checkpoint_name import name_of_step
from ckpt.integrations.transformers import CkptCallback

pytest_plugins = ["chosen_tests"]
CHOSEN = {"test_trainer_checkpointing.py": (), "test_trainer_callback.py": ("stateful", "persist", "duplicate_save")}
CANNOT_APPLY = {
    "The checkpoint has no tokenizer: `trainer.save_model` and pushes to the Hub write it.": (
        "test_save_collator_tokenizer_by_default",
    ),
    "It rewrites the Trainer's files in a checkpoint as shards. ckpt's files never change, and have hashes.": (
        "test_resume_training_with_shard_checkpoint",
        "test_resume_training_with_checkpoint",
    ),
    "At its end, it expects errors in the Trainer's words, and resume_from_checkpoint=True to fail without a "
    "checkpoint. ckpt starts from scratch then.": ("test_can_resume_training",),
    "Its model resizes a buffer in load_state_dict. ckpt compares all shapes with the live model first, and refuses.": (
        "test_resume_batch_order",
    ),
    "With save_total_limit=1, the Trainer removes the newest checkpoint at the end, and keeps the best one. ckpt keeps "
    "both, so that the run can go on.": ("test_best_model_checkpoint_behavior",),
    "It needs mpi4py, and fails without ckpt too. It saves nothing.": ("test_auto_batch_size_with_deepspeed",),
}
_LLAMA = "hf-internal-testing/tiny-random-LlamaForCausalLM"
_WORDS = ["[UNK]", "[PAD]", "[EOS]", "this", "is", "a", "test", "sentence"]
_build = Trainer.__init__
_background = False
_roots: dict[str, str] = {}  # by the `output_dir` of the run


class _Attached:
    """A Trainer's own way to train, with ckpt's root behind its folders."""

    def __init__(self, trainer: Any) -> None:
        output_dir = trainer.args.output_dir
        self._root = _roots[output_dir] = _roots.get(output_dir) or tempfile.mkdtemp()
        self._callback = CkptCallback(self._root, saving=ckpt.SaveOptions(background=_background))
        self._trainer = self._callback.attach(trainer)
        self._train = trainer.train
        trainer.train = self.train

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        try:
            return self._train(self._in_root(resume_from_checkpoint), *others, **named)
        finally:
            self._show()

    def _in_root(self, resume: Any) -> Any:
        """The checkpoint in the root that a folder stands for. That of another root is copied here."""
        folder, name = os.path.split(resume) if isinstance(resume, str) else ("", "")
        step = re.fullmatch(r"checkpoint-(\d+)", name)
        if not step or folder not in _roots:
            return resume
        ours = name_of_step(int(step[1]))
        if _roots[folder] != self._root:
            ckpt.convert(f"{_roots[folder]}/{ours}", self._root)
        return ours

    def _show(self) -> None:
        """Make the folders that the tests look at, in place of those of the training before."""
        output, state = Path(self._trainer.args.output_dir), self._trainer.state
        for folder in output.glob("checkpoint-*"):
            shutil.rmtree(folder)
        for found in ckpt.list_checkpoints(self._root):
            folder = output / f"checkpoint-{found.step}"
            ckpt.convert(f"{self._root}/{found.name}", folder, to="hf")
            if config := getattr(self._trainer.model, "config", None):
                config.save_pretrained(folder)
            with ExitStack() as stack:
                shown = self._callback._source.choose(found.name, str(output), stack)
                self._callback._source.release()
                shutil.copytree(str(shown), folder, dirs_exist_ok=True)
        if state.best_model_checkpoint:
            step = int(state.best_model_checkpoint.rpartition("-")[2])
            state.best_model_checkpoint = str(output / f"checkpoint-{step}")


def _build_attached(self: Any, *args: Any, **options: Any) -> None:
    _build(self, *args, **options)
    _Attached(self)


def _check_saved_checkpoints(test: Any, output_dir: str, freq: int, total: int, *_: Any, **__: Any) -> None:
    """In place of a look for the Trainer's files: whether the root has these checkpoints, intact."""
    wrong = ckpt.verify(_roots[output_dir])
    for step in range(freq, total, freq):
        assert Path(output_dir, f"checkpoint-{step}").is_dir()
        assert wrong[name_of_step(step)] == []


def _refuse_to_rewrite(test: Any, folder: str) -> None:
    pytest.fail(f"{folder} is a copy, so ckpt would not see what becomes of it")


def pytest_configure(config: pytest.Config) -> None:
    global _background
    _background = config.getoption("--background")
    Trainer.__init__ = _build_attached


@pytest.fixture(scope="session", autouse=True)
def _checks() -> None:
    common = importlib.import_module("tests.trainer.trainer_test_utils").TrainerIntegrationCommon
    common.check_saved_checkpoints = _check_saved_checkpoints
    common.convert_to_sharded_checkpoint = _refuse_to_rewrite


@pytest.fixture(scope="session", autouse=True)
def _models(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Small ones at relative paths that are their names on the Hub: transformers takes such a folder first."""
    os.chdir(tmp_path_factory.mktemp("hub"))
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token=_WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(zip(("unk_token", "pad_token", "eos_token"), _WORDS, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **special)
    for name in ("bert-base-uncased", "google-bert/bert-base-uncased", _LLAMA):
        tokenizer.save_pretrained(name)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(_WORDS), **sizes)).save_pretrained(_LLAMA)
    Wav2Vec2FeatureExtractor().save_pretrained("facebook/wav2vec2-base-960h")


def pytest_unconfigure() -> None:
    for root in _roots.values():
        shutil.rmtree(root)
