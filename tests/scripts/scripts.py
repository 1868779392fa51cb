"""The scripts: where each comes from, the lines that its user adds for ckpt, and the small data that it trains on."""

from __future__ import annotations

import importlib
import json
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Source:
    """A repository, at the commit that was tried."""

    repository: str
    commit: str
    packages: str = ""  # the folder in it that Python imports from

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]


NANOGPT = Source(repository="karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
ACCELERATE = Source(repository="huggingface/accelerate", commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
TRANSFORMERS = Source(repository="huggingface/transformers", commit="d56c55bf564ddb176759eb6ec199442682564916")
DIFFUSERS = Source(
    repository="huggingface/diffusers", commit="58eb52c0803ea9af3abec60841c2a093bdf1f951", packages="src"
)
TRL = Source(repository="huggingface/trl", commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8")
PYTORCH = Source(repository="pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8")


@dataclass(frozen=True)
class Change:
    """Lines of ours before or after a line of the script or in its place, indented as it is, or `deeper`."""

    where: Literal["before", "after", "instead of"]
    line: str
    ours: str
    deeper: int = 0

    def apply(self, text: str) -> str:
        lines = text.split("\n")
        found = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(found) != 1:
            raise ValueError(f"the script has {len(found)} lines {self.line!r}")
        theirs = lines[found[0]]
        margin = " " * (len(theirs) - len(theirs.lstrip()) + self.deeper)
        ours = textwrap.indent(textwrap.dedent(self.ours).strip(), margin)
        both = {"before": [ours, theirs], "after": [theirs, ours], "instead of": [ours]}
        lines[found[0] : found[0] + 1] = both[self.where]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, run in a copy of its folder, so that paths in its arguments are those of its data."""

    source: Source
    path: str
    changes: tuple[Change, ...]
    arguments: str
    data: Callable[[Path], None]
    resume: str = ""  # the argument that takes a checkpoint's folder; else the script finds it, or ckpt does
    root: str = "runs"
    needs: tuple[str, ...] = ()  # modules that ckpt's own tests do without
    kills: tuple[tuple[int, float], ...] = ((5, 0), (6, 0.01), (7, 0.04))  # steps of each attempt, and seconds after

    @property
    def name(self) -> str:
        return f"{self.source.name}: {self.path}"


def _words(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices("abcdefgh", k=count))


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *"abcdefgh"])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="<eos>", model_max_length=32,
    ).save_pretrained(folder)  # fmt: skip


def _bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    shape = BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(shape).save_pretrained(folder)
    _tokenizer(folder)


def _gpt2(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=5, eos_token_id=5)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    _tokenizer(folder)


def _pairs(path: Path, count: int, seed: int) -> None:
    rows = [
        {"sentence1": _words(5, seed + n), "sentence2": _words(7, seed - n), "label": n % 2, "idx": n}
        for n in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def _texts(path: Path, count: int, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"text": _words(20, seed + n)}) for n in range(count)))


def mrpc(folder: Path) -> None:
    """By the names that Accelerate's examples have: a folder comes before the Hub."""
    _bert(folder / "bert-base-cased")
    _pairs(folder / "nyu-mll/glue/train.jsonl", 96, 1000)
    _pairs(folder / "nyu-mll/glue/validation.jsonl", 16, 2000)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation"))
    (folder / "nyu-mll/glue/README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


def pairs_of_sentences(folder: Path) -> None:
    _bert(folder / "model")
    _pairs(folder / "data/train.json", 64, 1000)
    _pairs(folder / "data/validation.json", 16, 2000)


def texts(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        make(folder / "model")
        _texts(folder / "data/train.json", 80, 1000)
        _texts(folder / "data/validation.json", 16, 2000)

    return write


def tokens(folder: Path) -> None:
    import pickle

    import numpy as np

    (folder / "data/letters").mkdir(parents=True)
    (folder / "data/letters/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 16}))
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 16, 4000, dtype=np.uint16).tofile(folder / f"data/letters/{split}.bin")


def a_corpus(folder: Path) -> None:
    (folder / "data/small").mkdir(parents=True)
    for seed, split in enumerate(("train", "valid", "test")):
        (folder / f"data/small/{split}.txt").write_text("\n".join(_words(20, seed + n) for n in range(40)))


def images(folder: Path) -> None:
    import numpy as np

    image = importlib.import_module("PIL.Image")  # in no extra

    (folder / "images").mkdir()
    for number in range(24):
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        image.fromarray(pixels).save(folder / f"images/{number}.png")
    shape = {
        "_class_name": "UNet2DModel", "sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1,
        "block_out_channels": [8, 8], "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"], "norm_num_groups": 4, "attention_head_dim": 4,
    }  # fmt: skip
    (folder / "unet").mkdir()
    (folder / "unet/config.json").write_text(json.dumps(shape))


def nothing(folder: Path) -> None:
    """The stand-in of torchvision has images of its own."""
    (folder / "results").mkdir(exist_ok=True)


_ATTACH = """
from ckpt.integrations.accelerate import attach
attach(accelerator, args.output_dir)
"""
_LETTERS = (
    "--train_file data/train.json --validation_file data/validation.json --model_name_or_path model --output_dir out"
)
_SMALL = "--per_device_train_batch_size 4 --num_train_epochs 2 --checkpointing_steps 3 --seed 1 --output_dir out"
_TPU = "if accelerator.distributed_type == DistributedType.{}:"
_NO_TPU = (Change("instead of", _TPU.format("TPU"), _TPU.format("XLA")),)  # Accelerate calls it XLA
_EPOCHS = "for epoch in range(1, args.epochs + 1):"

SCRIPTS = (
    Script(
        source=NANOGPT,
        path="train.py",
        changes=(
            Change("before", "t0 = time.time()", """
                import ckpt
                ahead = torch.nn.Module()
                ahead.register_buffer("X", X)
                ahead.register_buffer("Y", Y)
                manager = ckpt.StateManager("runs", model=model, optimizer=optimizer, save_every=4)
                manager.register(ahead=ahead)
                if manager.resume():
                    iter_num, X, Y = manager.progress.step, ahead.X, ahead.Y
            """),
            Change("after", "local_iter_num += 1", """
                ahead.X, ahead.Y = X, Y
                manager.step()
            """),
        ),
        arguments="--dataset=letters --device=cpu --compile=False --dtype=float32 --n_layer=1 --n_head=2 --n_embd=16 "
        "--block_size=16 --batch_size=4 --dropout=0.1 --gradient_accumulation_steps=2 --max_iters=30 "
        "--eval_interval=10 --eval_iters=2 --learning_rate=0.01 --warmup_iters=5 --lr_decay_iters=30",
        data=tokens,
    ),
    Script(
        source=ACCELERATE,
        path="examples/nlp_example.py",
        changes=(
            Change("instead of", "for epoch in range(num_epochs):", """
                import ckpt
                manager = ckpt.StateManager("runs", accelerator=accelerator, save_every=4)
                for epoch in manager.epochs(num_epochs):
            """),
            Change(
                "instead of",
                "for step, batch in enumerate(train_dataloader):",
                "for step, batch in manager.enumerate(train_dataloader):",
            ),
            Change("after", "optimizer.zero_grad()", "manager.step()"),
        ),
        arguments="--cpu",
        data=mrpc,
    ),
    Script(
        source=ACCELERATE,
        path="examples/complete_nlp_example.py",
        changes=(
            Change("before", 'if hasattr(args.checkpointing_steps, "isdigit"):', _ATTACH),
            # it counts from the epoch that it resumed in, and later takes those names for steps since the beginning
            Change("after", "overall_step += resume_step", "overall_step += starting_epoch * len(train_dataloader)"),
        ),
        arguments="--cpu --checkpointing_steps 4 --output_dir out",
        data=mrpc,
        resume="--resume_from_checkpoint",
        root="out",
    ),
    *(
        Script(
            source=TRANSFORMERS,
            path=f"examples/pytorch/{path}_no_trainer.py",
            changes=(
                Change("before", "# Make one log on every process with the configuration for debugging.", _ATTACH),
                *changes,
            ),
            arguments=f"{_LETTERS} {_SMALL} {more}",
            data=data,
            resume="--resume_from_checkpoint",
            root="out",
        )
        for path, data, more, changes in (
            ("text-classification/run_glue", pairs_of_sentences, "", ()),
            ("language-modeling/run_clm", texts(_gpt2), "--gradient_accumulation_steps 2 --block_size 16", _NO_TPU),
            ("language-modeling/run_mlm", texts(_bert), "--gradient_accumulation_steps 2 --max_seq_length 16", _NO_TPU),
        )
    ),
    Script(
        source=DIFFUSERS,
        path="examples/unconditional_image_generation/train_unconditional.py",
        changes=(
            Change("before", "# `accelerate` 0.16.0 will have better support for customized saving", _ATTACH),
        ),
        arguments="--train_data_dir images --model_config_name_or_path unet --resolution 16 --output_dir out "
        "--train_batch_size 4 --num_epochs 4 --checkpointing_steps 4 --use_ema --random_flip "
        "--resume_from_checkpoint latest --ddpm_num_inference_steps 2 --eval_batch_size 1",
        data=images,
        root="out",
        needs=("PIL", "tensorboard"),
    ),
    Script(
        source=TRL,
        path="trl/scripts/sft.py",
        changes=(
            Change("instead of", "trainer.train()", """
                from ckpt.integrations.transformers import CkptCallback
                CkptCallback("runs").attach(trainer)
                trainer.train(resume_from_checkpoint=True)
            """),
        ),
        arguments="--dataset_name data --model_name_or_path model --output_dir out --max_steps 30 --save_steps 4 "
        "--per_device_train_batch_size 4 --use_cpu --bf16 False --gradient_checkpointing False --report_to none "
        "--max_length 16",
        data=texts(_gpt2),
        needs=("trl",),
    ),
    Script(
        source=PYTORCH,
        path="mnist/main.py",
        changes=(
            Change("instead of", _EPOCHS, """
                import ckpt
                global manager
                options = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "save_every": 3}
                manager = ckpt.StateManager("runs", **options)
                for epoch in manager.epochs(args.epochs):
            """),
            Change(
                "instead of",
                "for batch_idx, (data, target) in enumerate(train_loader):",
                "for batch_idx, (data, target) in manager.enumerate(train_loader):",
            ),
            Change("after", "optimizer.step()", "manager.step()"),
        ),
        arguments="--batch-size 8 --epochs 4",
        data=nothing,
    ),
    Script(
        source=PYTORCH,
        path="vae/main.py",
        changes=(
            Change("instead of", _EPOCHS, """
                import ckpt
                manager = ckpt.StateManager("runs", model=model, optimizer=optimizer, save_every=3)
                for epoch in manager.epochs(args.epochs):
            """),
            Change(
                "instead of",
                "for batch_idx, (data, _) in enumerate(train_loader):",
                "for batch_idx, (data, _) in manager.enumerate(train_loader):",
            ),
            Change("after", "optimizer.step()", "manager.step()"),
        ),
        arguments="--batch-size 8 --epochs 4",
        data=nothing,
    ),
    Script(
        source=PYTORCH,
        path="dcgan/main.py",
        changes=(
            Change("instead of", "for epoch in range(opt.niter):", """
                import ckpt
                both = {"model": {"G": netG, "D": netD}, "optimizer": {"G": optimizerG, "D": optimizerD}}
                manager = ckpt.StateManager("runs", **both, save_every=4)
                for epoch in manager.epochs(opt.niter):
            """),
            Change(
                "instead of",
                "for i, data in enumerate(dataloader, 0):",
                "for i, data in manager.enumerate(dataloader):",
            ),
            Change("after", "optimizerG.step()", "manager.step()"),
        ),
        arguments="--dataset fake --batchSize 8 --ngf 4 --ndf 4 --nz 8 --niter 4 --workers 0 --manualSeed 1",
        data=nothing,
        kills=((10, 0), (12, 0.01), (14, 0.04)),  # two optimizers: twice the steps
    ),
    Script(
        source=PYTORCH,
        path="word_language_model/main.py",
        changes=(
            Change("instead of", "for epoch in range(1, args.epochs+1):", """
                import ckpt
                manager = ckpt.StateManager("runs", model=model, optimizer=optimizer, save_every=1)
                manager.register(lr=lr, best_val_loss=best_val_loss)
                for epoch in manager.epochs(args.epochs):
                    lr, best_val_loss = manager.values["lr"], manager.values["best_val_loss"]
            """),
            Change(
                "before",
                "except KeyboardInterrupt:",
                "manager.values.update(lr=lr, best_val_loss=best_val_loss)\nmanager.step()",
                deeper=8,
            ),
        ),
        arguments="--data data/small --model LSTM --emsize 8 --nhid 8 --batch_size 4 --bptt 35 --epochs 8 --lr 0.01 "
        "--use-optimizer",
        data=a_corpus,
        kills=((14, 0), (16, 0.01), (15, 0.04)),
    ),
)  # fmt: skip
