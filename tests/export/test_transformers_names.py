"""Models of Transformers that have other tensors than their files: joined experts, renamed modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def mixtral(seed: int) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=19, num_local_experts=4))


def vit(seed: int) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4))


@pytest.mark.parametrize("build", [mixtral, vit])
@pytest.mark.parametrize("shards", ["5GB", "5kB"])
def test_what_save_pretrained_wrote_is_loaded_as_from_pretrained_would(build: Any, shards: str, tmp_path: Path) -> None:
    saved, model = build(0), build(1)
    saved.save_pretrained(tmp_path / "model", max_shard_size=shards)
    assert ckpt.load_model(tmp_path / "model", model) == {}
    assert exact(model.state_dict()) == exact(saved.state_dict())


def test_what_is_missing_is_named_by_the_name_that_the_model_has(tmp_path: Path) -> None:
    vit(0).save_pretrained(tmp_path / "model")
    with pytest.raises(ckpt.MismatchError, match=r"pooler\.dense\.weight: missing there"):
        ckpt.load_model(tmp_path / "model", vit(1).vit.__class__(vit(1).config))


def load_sharded(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = mixtral(1)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert ckpt.load_model(folder, model) == {}
    found = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert exact(found) == exact(mixtral(0).state_dict())


@pytest.mark.slow
def test_every_rank_of_a_sharded_model_reads_its_piece_of_joined_experts(tmp_path: Path) -> None:
    mixtral(0).save_pretrained(tmp_path / "model")
    assert run_ranks(2, load_sharded, str(tmp_path / "model")) == [0, 0]
