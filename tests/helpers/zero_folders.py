"""Folders that DeepSpeed's own `save_checkpoint` writes, and universal ones, from real engines on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.engines import WORDS, build

STAGES = (1, 2, 3)
WORLD_SIZE = 2
TAG = "global_step2"


def write_folders(rank: int, folder: str) -> None:
    """On each of the ranks: a folder for every stage of ZeRO, one of DeepSpeed's other optimizer, and `llama`."""
    for stage in STAGES:
        _write(f"{folder}/zero-{stage}", build(), stage, rank, _loss_of_net)
    types = {"data_types": {"grad_accum_dtype": "fp32"}}
    _write(f"{folder}/fp32-gradients", build(), 1, rank, _loss_of_net, **types)
    _write(f"{folder}/llama", llama(), 3, rank, _loss_of_llama)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=19, tie_word_embeddings=True, **sizes))
    return model


def words() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4)


def _loss_of_net(engine: Any) -> torch.Tensor:
    loss: torch.Tensor = engine(torch.arange(4) % WORDS, torch.ones(4))
    return loss


def _loss_of_llama(engine: Any) -> torch.Tensor:
    loss: torch.Tensor = engine(input_ids=words(), labels=words()).loss
    return loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, with and without weight decay."""
    flat = [parameter for parameter in model.parameters() if parameter.dim() == 1 and parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 1 and parameter.requires_grad]
    return [{"params": others}, {"params": flat, "weight_decay": 0.0}]


def start(
    model: nn.Module, stage: int, rank: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any
) -> Any:
    """An engine of DeepSpeed's on the CPU, with two groups of parameters."""
    os.environ.update({"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank)})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10, "sub_group_size": 100}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, **more}
    optimizer = kind(groups_of(model), lr=0.01)  # type: ignore[call-arg]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _write(folder: str, model: nn.Module, stage: int, rank: int, loss: Any, **more: Any) -> None:
    engine = start(model, stage, rank, **more)
    for _ in range(2):
        engine.backward(loss(engine))
        engine.step()
    engine.save_checkpoint(folder, client_state={"client": "the user's own"})
    assert Path(folder, "latest").read_text() == TAG
    engine.destroy()
