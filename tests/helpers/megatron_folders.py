"""Folders of the real Megatron-Core, written and loaded on the CPU by gloo ranks, with tensor parallelism."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import ckpt
from tests.helpers.format_pairs import TARGETS, difference, known
from tests.helpers.training import exact

LAYERS, WORDS = 3, 32


def _gpt(seed: int, tensor_parallel: int) -> Any:
    warnings.simplefilter("ignore")
    # it asks for a GPU where there is nothing to wait for, and for where a number is to be summed up
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(seed)
    sizes = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
    config = TransformerConfig(use_cpu_initialization=True, gated_linear_unit=True, **sizes)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=8)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too: all of them would be equal
            parameter.add_(
                torch.randn(parameter.shape)
                if _is_divided(parameter)
                else torch.linspace(0, seed, parameter.numel()).view(parameter.shape)
            )
    return model


def _is_divided(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def write_theirs(rank: int, folder: str) -> None:
    """On four ranks: two parts of every tensor, each on two of them."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    model = _gpt(5 + rank % 2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    sharded = model.sharded_state_dict()
    numbered = get_param_id_to_sharded_param_map(sharded, iter(optimizer.param_groups[0]["params"]))
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, numbered, exclude_keys=("step",))
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save({**sharded, "optimizer": state, "iteration": 7}, folder)


def compare_alone(rank: int, folder: str) -> None:
    """In one process: what they read is what we read; and a checkpoint of ours becomes a folder of theirs."""
    from megatron.core import dist_checkpointing
    from safetensors.torch import load_file

    theirs, first, second = f"{folder}/theirs", _gpt(1, 1), _gpt(2, 1)
    plain = _tensors(dist_checkpointing.load_plain_tensors(theirs))
    for part in ("model", "optimizer"):
        ckpt.merge(theirs, f"{folder}/{part}.safetensors", part=part)
        ours = _stacked(load_file(f"{folder}/{part}.safetensors"))
        wanted = {
            name: value for name, value in plain.items() if name.startswith("optimizer.") == (part == "optimizer")
        }
        assert wanted
        assert exact(dict(sorted(ours.items()))) == exact(wanted)
    first.load_state_dict(dist_checkpointing.load(first.sharded_state_dict(), theirs), strict=False)
    assert _weights(first) != _weights(second)
    assert not ckpt.load_model(theirs, second)
    assert _weights(first) == _weights(second)
    with ckpt.StateManager(f"{folder}/root", model=second) as manager:
        manager.save_state("first", wait=True)
    converted = ckpt.convert(f"{folder}/root/first", f"{folder}/ours", to="megatron")
    assert converted.parts == ("model",)
    assert "model.decoder" not in str(converted)  # every entry of it has its place
    again = _tensors(dist_checkpointing.load_plain_tensors(f"{folder}/ours"))
    assert exact(again) == exact({name: value for name, value in plain.items() if not name.startswith("optimizer.")})


def convert_to_every_format(rank: int, folder: str) -> None:
    """In one process: each format, read by its own library, has what Megatron itself reads of its folder."""
    from megatron.core import dist_checkpointing

    theirs, model = Path(folder, "theirs"), _gpt(1, 1)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(theirs)), strict=False)
    saved = known(theirs, (_as_stored(model), None, None), build=lambda: (_as_stored(_gpt(2, 1)), None, None), step=7)
    for target, read in TARGETS.items():
        assert difference(saved, read(saved, Path(folder, target)), whole=False) == [], target


def _as_stored(model: Any) -> Any:
    """By the names of its folders, which are those of Transformer Engine: norms are parts of the next linear layer."""
    for layer in model.decoder.layers:
        pairs = (("input_layernorm", layer.self_attention.linear_qkv), ("pre_mlp_layernorm", layer.mlp.linear_fc1))
        for norm, linear in pairs:
            linear.layer_norm_weight, linear.layer_norm_bias = getattr(layer, norm).weight, getattr(layer, norm).bias
            delattr(layer, norm)
    model.output_layer.register_state_dict_post_hook(_leave_out_extra_state)
    return model


def _leave_out_extra_state(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
    """It is None, which Megatron does not store for the last layer, and puts back by itself before it loads."""
    state.pop(f"{prefix}_extra_state", None)


def _tensors(found: Any) -> dict[str, torch.Tensor]:
    """In the order of their names, without what `common.pt` has."""
    return dict(sorted((name, value) for name, value in found.items() if isinstance(value, torch.Tensor)))


def _weights(model: Any) -> str:
    return exact({name: value for name, value in model.state_dict().items() if value is not None})


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of layers as one, as Megatron stores them."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition("decoder.layers.")
        number, _, tail = rest.partition(".")
        if number.isdecimal():
            found.setdefault(f"{head}decoder.layers.{tail}", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return {
        name: torch.stack([value[layer] for layer in range(LAYERS)]) if isinstance(value, dict) else value
        for name, value in found.items()
    }


def load_both(rank: int, folder: str) -> None:
    """On four ranks: what Megatron makes of our folder is what it makes of its own."""
    from megatron.core import dist_checkpointing

    model = _gpt(3, 2)
    found = []
    for name in ("theirs", "ours"):
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), f"{folder}/{name}"), strict=False)
        found.append(_weights(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert found[0] == found[1] != _weights(model)
