"""Checkpoints written by the real libraries, and what each of them reads of what `ckpt.convert` wrote."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from tests.helpers.processes import run_ranks

Triple = tuple[nn.Module, torch.optim.Optimizer | None, Any]
WORDS, LENGTH = 17, 6


@dataclass(frozen=True)
class Written:
    """A checkpoint at `path`, what it holds, and what builds the same objects anew, with other values."""

    path: Path
    model: Mapping[str, torch.Tensor]
    build: Callable[[], Triple]
    optimizer: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    step: int = 0
    named: bool = False  # whether it has the names of the optimizer's parameters


def gpt(seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": WORDS, "n_positions": LENGTH}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))
    return model


def texts() -> torch.Tensor:
    return torch.arange(12 * LENGTH).reshape(12, LENGTH) % WORDS


def build(seed: int = 7) -> Triple:
    model = gpt(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def trained() -> Triple:
    model, optimizer, scheduler = build(seed=0)
    assert optimizer is not None
    for batch in torch.split(texts(), 4):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def known(path: Path, parts: Triple, **more: Any) -> Written:
    model, optimizer, scheduler = parts
    return Written(
        path,
        copy.deepcopy(dict(model.state_dict())),
        more.pop("build", build),
        optimizer.state_dict() if optimizer else None,
        scheduler.state_dict() if scheduler else None,
        **more,
    )


def by_ckpt(folder: Path) -> Written:
    model, optimizer, scheduler = trained()
    with ckpt.StateManager(folder, model=model, optimizer=optimizer, scheduler=scheduler) as manager:
        manager.progress.step = 3
        manager.save_state("step-3")
    return known(folder / "step-3", (model, optimizer, scheduler), step=3, named=True)


def by_ckpt_on_two_ranks(folder: Path) -> Written:
    assert run_ranks(2, _save_sharded, str(folder)) == [0, 0]
    model, optimizer, _ = _without_scheduler()
    with ckpt.StateManager(folder, model=model, optimizer=optimizer) as manager:
        manager.load_state("step-1")
    return known(folder / "step-1", (model, optimizer, None), build=_without_scheduler, step=1, named=True)


def _without_scheduler() -> Triple:
    model = gpt(7)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02), None


def _save_sharded(rank: int, root: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = gpt()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = texts()[rank * 6 : rank * 6 + 6]
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.progress.step = 1
        manager.save_state("step-1")


def by_transformers(folder: Path) -> Written:
    model = gpt()
    model.save_pretrained(folder)  # type: ignore[operator]
    return known(folder, (model, None, None))


def by_transformers_in_shards(folder: Path) -> Written:
    model = gpt()
    model.save_pretrained(folder, max_shard_size="2kB")  # type: ignore[operator]
    assert (folder / "model.safetensors.index.json").exists()
    return known(folder, (model, None, None))


def by_dcp(folder: Path) -> Written:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer, scheduler = trained()
    assert optimizer is not None
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer, "step": 3, "scheduler": scheduler.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"app": state}, checkpoint_id=folder, no_dist=True)
    return known(folder, (model, optimizer, scheduler), step=3, named=True)


def by_accelerate(folder: Path) -> Written:
    with accelerator() as acc:
        parts = trained()
        acc.prepare(*parts)
        acc.save_state(str(folder))
        return known(folder, parts)


@contextlib.contextmanager
def accelerator() -> Iterator[Any]:
    """One on the CPU; Accelerate keeps its state for the whole process, and it is removed."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        yield Accelerator(cpu=True)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def by_torch(folder: Path) -> Written:
    folder.mkdir()
    model, optimizer, scheduler = trained()
    assert optimizer is not None
    state = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": 2, "step": 3, "loss": 0.5}, folder / "last.pt")
    return known(folder / "last.pt", (model, optimizer, scheduler), step=3)


def by_lightning(folder: Path) -> Written:
    model, optimizer, scheduler = build(seed=0)
    module = as_lightning(model, optimizer, scheduler)
    trainer = fitted(module, 3)
    trainer.save_checkpoint(folder / "last.ckpt")
    return known(folder / "last.ckpt", (module, optimizer, scheduler), step=3, build=built_by_lightning)


def built_by_lightning() -> Triple:
    model, optimizer, scheduler = build()
    return as_lightning(model, optimizer, scheduler), optimizer, scheduler


def as_lightning(model: nn.Module, optimizer: Any, scheduler: Any, started: Callable[[], None] | None = None) -> Any:
    """A module of Lightning's whose state has the names that the model's has."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, child in model.named_children():
                setattr(self, name, child)
            for name, parameter in model.named_parameters(recurse=False):
                self.register_parameter(name, parameter)
            for name, buffer in model.named_buffers(recurse=False):
                self.register_buffer(name, buffer)

        def on_train_start(self) -> None:
            if started:
                started()

        def training_step(self, batch: Any, number: int) -> Any:
            return sum(parameter.pow(2).sum() for parameter in self.parameters())

        def configure_optimizers(self) -> Any:
            return ([optimizer], [scheduler]) if scheduler else optimizer

    return Module()


def fitted(module: Any, steps: int, **more: Any) -> Any:
    import lightning

    quiet = dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", devices=1, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(texts()), batch_size=4), **more)
    return trainer


def by_trainer(folder: Path) -> Written:
    trainer = _trainer(folder, gpt())
    trainer.train()
    parts = (trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return known(folder / "checkpoint-3", parts, step=3, build=lambda: _built_by_trainer(folder))


def _trainer(folder: Path, model: nn.Module) -> Any:
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(folder), max_steps=3, save_steps=3, per_device_train_batch_size=4, use_cpu=True, **quiet
    )
    rows = [{"input_ids": text, "labels": text} for text in texts()]
    return Trainer(model, arguments, train_dataset=rows)


def _built_by_trainer(folder: Path) -> Triple:
    trainer = _trainer(folder, gpt(7))
    trainer.create_optimizer_and_scheduler(3)
    return trainer.model, trainer.optimizer, trainer.lr_scheduler


SOURCES: dict[str, Callable[[Path], Written]] = {
    "ckpt": by_ckpt,
    "ckpt-sharded": by_ckpt_on_two_ranks,
    "hf": by_transformers,
    "hf-shards": by_transformers_in_shards,
    "dcp": by_dcp,
    "accelerate": by_accelerate,
    "torch": by_torch,
    "lightning": by_lightning,
    "trainer": by_trainer,
}


def read_by_ckpt(written: Written, out: Path) -> Triple:
    ckpt.convert(written.path, out, name="it")
    assert ckpt.verify(out) == {"it": []}
    model, optimizer, scheduler = written.build()
    given = {"optimizer": optimizer, "scheduler": scheduler} if written.optimizer else {}
    with ckpt.StateManager(out, model=model, **{key: part for key, part in given.items() if part}) as manager:
        restored = manager.load_state("it")
        assert restored.progress.step == written.step
    return model, optimizer, scheduler


def read_by_transformers(written: Written, out: Path) -> Triple:
    from safetensors.torch import load_file

    ckpt.convert(written.path, out, to="hf")
    model = written.build()[0]
    tensors = load_file(out / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    live = model.state_dict()
    loaded = {live[name].data_ptr() for name in tensors}  # of tied weights, the file has one
    lacking = [name for name in missing if not name.endswith("_extra_state") and live[name].data_ptr() not in loaded]
    assert [*lacking, *unexpected] == []
    return model, None, None


def read_by_dcp(written: Written, out: Path) -> Triple:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    ckpt.convert(written.path, out, to="dcp")
    model, optimizer, scheduler = written.build()
    state: dict[str, Any] = {"model": model.state_dict()}
    if written.optimizer and optimizer:
        _take_a_step(model, optimizer)  # DCP reads into state that is there
        named = get_optimizer_state_dict(model, optimizer) if written.named else optimizer.state_dict()
        state["optimizer"] = named
        if scheduler:
            state["scheduler"] = scheduler.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(state, checkpoint_id=out, no_dist=True)
    model.load_state_dict(state["model"])
    if written.optimizer and optimizer:
        if written.named:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        else:
            optimizer.load_state_dict(state["optimizer"])
        if scheduler:
            scheduler.load_state_dict(state["scheduler"])
    return model, optimizer, scheduler


def _take_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def read_by_accelerate(written: Written, out: Path) -> Triple:
    ckpt.convert(written.path, out, to="accelerate")
    with accelerator() as acc:
        parts = written.build()
        acc.prepare(*filter(None, parts if written.optimizer else parts[:1]))
        acc.load_state(str(out))
        return parts


def read_by_torch(written: Written, out: Path) -> Triple:
    ckpt.convert(written.path, out, to="torch")
    saved = torch.load(out, weights_only=True)
    model, optimizer, scheduler = written.build()
    model.load_state_dict(saved["model"])
    if written.optimizer and optimizer:
        optimizer.load_state_dict(saved["optimizer"])
        if scheduler:
            scheduler.load_state_dict(saved["scheduler"])
    assert saved["step"] == written.step
    return model, optimizer, scheduler


def read_by_lightning(written: Written, out: Path) -> Triple:
    """What Lightning has restored when its loop begins."""
    ckpt.convert(written.path, out, to="lightning")
    model, optimizer, scheduler = written.build()
    if not written.optimizer:
        saved = torch.load(out, weights_only=True)
        module = as_lightning(model, torch.optim.SGD(model.parameters()), None)
        module.load_state_dict(saved["state_dict"])
        return module, None, None
    found: list[Triple] = []
    module = as_lightning(
        model, optimizer, scheduler, lambda: found.append(copy.deepcopy((model, optimizer, scheduler)))
    )
    trainer = fitted(module, written.step + 1, ckpt_path=str(out), weights_only=True)
    assert trainer.global_step == written.step + 1
    return found[0]


TARGETS: dict[str, Callable[[Written, Path], Triple]] = {
    "ckpt": read_by_ckpt,
    "hf": read_by_transformers,
    "dcp": read_by_dcp,
    "accelerate": read_by_accelerate,
    "torch": read_by_torch,
    "lightning": read_by_lightning,
}
KEEPS_THE_OPTIMIZER = TARGETS.keys() - {"hf"}


def difference(written: Written, found: Triple, *, whole: bool) -> list[str]:
    """What differs from what was saved, in any bit; nothing is the aim."""
    model, optimizer, scheduler = found
    wrong = _unequal(dict(written.model), model.state_dict(), "model")
    if whole and written.optimizer:
        assert optimizer is not None
        wrong += _unequal(written.optimizer, optimizer.state_dict(), "optimizer")
        wrong += _unequal(written.scheduler, scheduler.state_dict() if scheduler else None, "scheduler")
    return wrong


def _unequal(first: Any, second: Any, where: str) -> list[str]:
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{where}: {first.keys() ^ second.keys()}"]
        return [line for key in first for line in _unequal(first[key], second[key], f"{where}.{key}")]
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=True)
        return [line for index, pair in enumerate(pairs) for line in _unequal(*pair, f"{where}[{index}]")]
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
    else:
        same = first == second
    return [] if same else [f"{where}: {first} became {second}"]
