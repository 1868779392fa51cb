"""A live model becomes a folder that other tools read, however it is wrapped or spread over ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt
from tests.helpers.places import intact
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, plain

WAYS = ("fsdp2", "hsdp", "tp", "fsdp2-tp", "fsdp1", "fsdp1-flat", "ddp")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Stubborn:
    """What belongs to a model, but cannot be written."""

    def save_pretrained(self, folder: Any) -> None:
        raise OSError(28, "No space left on device")


def _save_in_every_way(rank: int, folder: str) -> None:
    for way in WAYS:
        with ckpt.StateManager(f"{folder}/runs/{way}", model=MODELS[way](6)) as manager:
            manager.save_model(f"{folder}/{way}", max_shard_size=500)
        other = MODELS[way](7)
        assert ckpt.load_model(f"{folder}/{way}", other) == {}
        with ckpt.StateManager(f"{folder}/runs/{way}", model=other) as manager:
            manager.save_model(f"{folder}/{way}-again")


@pytest.mark.slow
def test_every_way_of_spreading_gives_the_same_whole_files_and_loads_them(tmp_path: Path) -> None:
    assert run_ranks(4, _save_in_every_way, str(tmp_path)) == [0] * 4
    expected = plain(6).state_dict()
    for way in WAYS:
        shards = sorted((tmp_path / way).glob("model-*-of-*.safetensors"))
        assert len(shards) > 1
        found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        assert found.keys() == expected.keys(), way
        assert all(torch.equal(found[name], expected[name]) for name in found), way
        again = load_file(tmp_path / f"{way}-again" / "model.safetensors")
        assert all(torch.equal(again[name], expected[name]) for name in expected), way


def _fail_on_the_main_rank(rank: int, folder: str) -> None:
    Path(folder, "file").touch()
    with ckpt.StateManager(f"{folder}/run", model=MODELS["fsdp2"](6)) as manager:
        with pytest.raises(ckpt.ConfigError, match="is a link, or is not a folder"):
            manager.save_model(f"{folder}/file")
        with pytest.raises(Exception, match="No space left"):
            manager.save_model(f"{folder}/out", tokenizer=Stubborn())
        manager.save_model(f"{folder}/good")


@pytest.mark.slow
def test_what_fails_on_the_main_rank_is_raised_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, _fail_on_the_main_rank, str(tmp_path)) == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"file", "good"}


def test_the_folder_is_replaced_as_a_whole_and_files_of_the_users_own_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ckpt.StateManager(tmp_path / "run", model=plain(1)) as manager:
        manager.save_model(out, max_shard_size=500)
        (out / "notes.txt").write_text("mine")
        with pytest.raises(OSError, match="No space left"):
            manager.save_model(out, processor=Stubborn())
        assert len(list(out.glob("model-*"))) > 1
        manager.save_model(out)
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_what_cannot_be_removed_of_the_folder_before_is_left_and_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refusing(path: Any, **options: Any) -> None:
        if path == "model.safetensors":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **options)

    with ckpt.StateManager(tmp_path / "run", model=plain(1)) as manager:
        manager.save_model(tmp_path / "out")
        monkeypatch.setattr(os, "unlink", refusing)
        manager.save_model(tmp_path / "out", max_shard_size=500)
    assert len(list((tmp_path / "out").glob("model-*"))) > 1
    assert [path.name for path in tmp_path.glob(".out.old.*/*")] == ["model.safetensors"]


def test_what_a_kill_left_is_cleared_away_and_a_folder_that_was_aside_comes_back(tmp_path: Path) -> None:
    new, old = (tmp_path / f".out{kind}.{'0' * 12}.ckpt-tmp" for kind in ("", ".old"))
    (new / "below").mkdir(parents=True)
    (new / "below" / "half").touch()
    old.mkdir()
    (old / "notes.txt").write_text("mine")
    (old / "elsewhere").symlink_to(tmp_path)
    with ckpt.StateManager(tmp_path / "run", model=plain(1)) as manager:
        manager.save_model(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "notes.txt", "elsewhere"}
    assert (tmp_path / "out" / "elsewhere").readlink() == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("given", [{"tokenizer": "gpt2"}, {"processor": {"a": 1}}])
def test_what_cannot_write_itself_is_refused_before_anything_is_written(tmp_path: Path, given: Any) -> None:
    with ckpt.StateManager(tmp_path / "run", model=plain(1)) as manager:
        for call in (manager.save_model, manager.push_to_hub):
            with pytest.raises(ckpt.ConfigError, match="give an object that has save_pretrained"):
                call("me/out", **given)
    assert not Path("me").exists()


def test_a_folder_with_checkpoints_is_left_alone(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path / "run", model=plain(1)) as manager:
        manager.save_state("x", wait=True)
        for place in ("run", "run/x"):
            with pytest.raises(ckpt.ConfigError, match="contains checkpoints, which ckpt does not overwrite"):
                manager.save_model(tmp_path / place)
    assert intact(tmp_path / "run")


def test_tied_and_buffered_and_odd_tensors_are_as_they_were(tmp_path: Path) -> None:
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    embed.weight.data = embed.weight.data.t().contiguous().t()  # not dense
    model = nn.ModuleDict({"embed": embed, "lm_head": head, "n": nn.BatchNorm1d(4)})
    with ckpt.StateManager(tmp_path / "run", model=model) as manager:
        manager.save_model(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in found
    assert torch.equal(found["embed.weight"], embed.weight)
    assert found["n.num_batches_tracked"].dtype == torch.int64


_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {**_SMALL, "num_hidden_layers": 1, "tie_word_embeddings": True}),
        ("Mixtral", {**_SMALL, "num_hidden_layers": 1, "num_local_experts": 4}),
        ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}),
    ],
)
def test_transformers_reads_models_of_several_kinds(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **options)
    head = "ConditionalGeneration" if kind == "T5" else "CausalLM"
    model = getattr(transformers, f"{kind}For{head}")(config).eval()
    with ckpt.StateManager(tmp_path / "run", model=model) as manager:
        manager.save_model(tmp_path / "out", max_shard_size="20kB")
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    inputs = {"input_ids": torch.arange(8)[None]} | (
        {"decoder_input_ids": torch.arange(4)[None]} if kind == "T5" else {}
    )
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_a_part_that_is_no_model_is_refused(tmp_path: Path) -> None:
    models = {"critic": plain(1), "generator": plain(2)}
    with ckpt.StateManager(tmp_path / "run", model=models) as manager:
        with pytest.raises(
            ckpt.ConfigError, match=r"has no model named 'model'.*It has: model\.critic, model\.generator"
        ):
            manager.save_model(tmp_path / "out")
        manager.save_model(tmp_path / "out", part="model.critic")
    assert (tmp_path / "out" / "model.safetensors").exists()
