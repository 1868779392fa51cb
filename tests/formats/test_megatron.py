"""Megatron-Core's `torch_dist` folders: read as they are, and written so that Megatron reads them."""

from __future__ import annotations

import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt.cli.main import main
from tests.helpers.format_pairs import TARGETS, Triple, difference, known
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact

QKV, NORM = (
    "decoder.layers.self_attention.linear_qkv.weight",
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
)
EXTRA = "decoder.layers.self_attention.linear_qkv._extra_state"
MOMENT = f"optimizer.state.exp_avg.{QKV}"
CONFIG = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).float().reshape(shape) + sum(shape)


STORED = {"embedding.word_embeddings.weight": _numbers(6, 4), QKV: _numbers(2, 6, 4), NORM: _numbers(2, 4)}


class Layer(nn.Module):
    """As Megatron has it without Transformer Engine: the norm is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(4, bias=False)
        self.self_attention = nn.ModuleDict({"linear_qkv": WithExtra(4, 6, bias=False)})


class WithExtra(nn.Linear):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: None) -> None:
        assert state is None


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(6, 4)})
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(layers))})


def _write(rank: int, folder: str) -> None:
    """With torch's own writer: a layer on each of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = {**STORED, MOMENT: _numbers(2, 6, 4)}
    state: dict[str, Any] = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors.items()}
    objects = {"rng_state/shard_0_1": ["seed"], **{f"{EXTRA}/shard_{layer}_2": [None] for layer in range(2)}}
    save_dcp({**state, **objects}, checkpoint_id=folder)
    if rank == 0:
        metadata: Any = FileSystemReader(folder).read_metadata()
        metadata.planner_data, metadata.all_local_plans = None, [SavePlan([])]
        assert isinstance(metadata.state_dict_metadata[f"{EXTRA}/shard_0_2"], BytesStorageMetadata)
        Path(folder, ".metadata").write_bytes(pickle.dumps(metadata))
        torch.save({"iteration": 7, "args": Namespace(num_layers=2)}, f"{folder}/common.pt")
        Path(folder, "metadata.json").write_text(CONFIG)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "iter_0000007"
    assert run_ranks(2, _write, str(folder)) == [0, 0]
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "save"))


def _by_layer(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in stored.items():
        head, separator, tail = name.partition("decoder.layers.")
        layers = enumerate(tensor) if separator else ()
        found.update({f"{head}{separator}{layer}.{tail}": part for layer, part in layers} or {name: tensor})
    return found


def _as_net(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of `Net`."""
    renamed = {name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm."): value for name, value in
               _by_layer(stored).items()}  # fmt: skip
    return dict(sorted(renamed.items()))


def _weights(net: Net) -> str:
    return exact(dict(sorted((name, value.detach()) for name, value in net.named_parameters())))


@pytest.mark.slow
def test_layers_are_tensors_by_the_names_of_the_module_and_the_optimizer_is_a_part(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for source in (written, written.parent):  # also what the tracker names
        ckpt.merge(source, tmp_path / "model.safetensors")
        found = load_file(tmp_path / "model.safetensors")
        assert exact(dict(sorted(found.items()))) == exact(dict(sorted(_by_layer(STORED).items())))
    assert f"ckpt leaves out 3 objects that are not tensors ({EXTRA}/shard_0_2" in caplog.text
    ckpt.merge(written, tmp_path / "optimizer.safetensors", part="optimizer")
    assert exact(load_file(tmp_path / "optimizer.safetensors")) == exact({MOMENT: _numbers(2, 6, 4)})
    with pytest.raises(ckpt.MissingError, match=r"'scheduler' with tensors\. Parts with tensors: model, optimizer"):
        ckpt.merge(written, tmp_path / "other.safetensors", part="scheduler")


@pytest.mark.slow
def test_a_model_with_norms_of_its_own_is_loaded_and_another_is_refused(written: Path) -> None:
    net = Net()
    assert not ckpt.load_model(written, net)
    assert _weights(net) == exact(_as_net(STORED))
    with pytest.raises(ckpt.MismatchError, match=r"decoder\.layers\.2\.input_layernorm\.weight: missing there"):
        ckpt.load_model(written, Net(layers=3))


@pytest.mark.slow
def test_converted_it_is_a_checkpoint_and_what_is_not_taken_is_named(written: Path, tmp_path: Path) -> None:
    converted = ckpt.convert(written, tmp_path)
    assert converted.parts == ("model",)
    assert converted.skipped.keys() == {"optimizer", "common.pt: args", "rng_state/shard_0_1"}
    assert ckpt.verify(tmp_path) == {"iter_0000007": []}
    (found,) = ckpt.list_checkpoints(tmp_path)
    assert found.manifest is not None
    assert (found.manifest.origin, found.manifest.step) == ("megatron", 7)
    ckpt.merge(tmp_path / "iter_0000007", tmp_path / "model.safetensors")
    found_weights = load_file(tmp_path / "model.safetensors")
    assert exact(dict(sorted(found_weights.items()))) == exact(dict(sorted(_by_layer(STORED).items())))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_its_model_is_converted_to_every_format_in_every_bit(written: Path, target: str, tmp_path: Path) -> None:
    def build() -> Triple:
        net: Any = Net()
        for layer in net.decoder["layers"]:
            layer.self_attention["linear_qkv"].layer_norm_weight = layer.input_layernorm.weight
            del layer.input_layernorm
        return net, None, None

    model = build()[0]
    assert ckpt.load_model(written, model) == {}
    saved = known(written, (model, None, None), build=build, step=7)
    assert difference(saved, TARGETS[target](saved, tmp_path / "out"), whole=False) == []


def test_a_checkpoint_of_ours_becomes_a_folder_as_megatron_writes_it(tmp_path: Path) -> None:
    net = Net()
    with ckpt.StateManager(tmp_path, model=net, optimizer=torch.optim.AdamW(net.parameters())) as manager:
        manager.save_state("first", wait=True)
    converted = ckpt.convert(tmp_path / "first", tmp_path / "out", to="megatron")
    assert converted.parts == ("model",)
    assert converted.skipped.keys() == {"optimizer", "rng"}
    names = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert names.keys() == {*STORED, f"{EXTRA}/shard_0_2", f"{EXTRA}/shard_1_2"}
    state = {name: torch.zeros_like(value) for name, value in STORED.items()}
    with pytest.warns(UserWarning, match="load in a single process"):
        load_dcp(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert exact(_as_net(state)) == _weights(net)
    again = Net()
    assert not ckpt.load_model(tmp_path / "out", again)
    assert _weights(again) == _weights(net)
    assert torch.load(tmp_path / "out" / "common.pt") == {"iteration": 0}
    with pytest.raises(ckpt.ConfigError, match="out already exists"):
        ckpt.convert(tmp_path / "first", tmp_path / "out", to="megatron")


def test_a_model_that_megatron_would_not_find_is_not_written(tmp_path: Path) -> None:
    odd: Any = Net()
    odd.decoder["layers"][1].self_attention = nn.ModuleDict({"linear_qkv": WithExtra(4, 8, bias=False)})
    for name, model, why in (
        ("plain", nn.Linear(2, 2), "does not use Megatron-Core's parameter names"),
        ("odd", odd, r"linear_qkv\.weight in first is not the same in every layer: 2 of 2 layers have it"),
    ):
        with ckpt.StateManager(tmp_path / name, model=model) as manager:
            manager.save_state("first", wait=True)
        with pytest.raises(ckpt.ConfigError, match=why):
            ckpt.convert(tmp_path / name / "first", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.slow
def test_a_save_that_was_cut_off_or_is_of_another_kind_is_refused(copy: Path) -> None:
    (copy / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(ckpt.UnsupportedError, match=r"as 'zarr', but ckpt reads only 'torch_dist'"):
        ckpt.merge(copy, copy / "model.safetensors")
    (copy / "metadata.json").write_text("[]")
    with pytest.raises(ckpt.DamagedError, match="does not say how the tensors are stored"):
        ckpt.merge(copy, copy / "model.safetensors")
    (copy / "metadata.json").unlink()
    with pytest.raises(ckpt.DamagedError, match=r"metadata\.json is missing. Megatron-Core writes this file last"):
        ckpt.merge(copy, copy / "model.safetensors")
    (copy / "metadata.json").write_text(CONFIG)
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(ckpt.DamagedError, match=r"__1_0\.distcp is missing"):
        ckpt.merge(copy, copy / "model.safetensors")


@pytest.mark.slow
def test_what_common_pt_would_execute_is_not_executed_and_named(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.parent)
    torch.save({"iteration": 7, "args": _Runs()}, copy / "common.pt")
    converted = ckpt.convert(copy, copy.parent / "root")
    assert "names 'posix.mkdir'" in converted.skipped["common.pt"]
    assert "counting begins at 0" in converted.approximated["progress"]
    assert not Path("executed").exists()


def test_a_tracker_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../9")
    with pytest.raises(ckpt.MissingError, match=r"names '\.\./9', but there is no Megatron-Core save"):
        ckpt.merge(tmp_path, tmp_path / "model.safetensors")


@pytest.mark.slow
def test_commands_read_it_or_say_what_does(written: Path) -> None:
    for command, told in {
        "show": "saved by  Megatron-Core",
        "ls": "It was written by Megatron-Core: ckpt convert",
        "verify": "It was written by Megatron-Core: ckpt convert",
    }.items():
        result = CliRunner().invoke(main, [command, str(written)])
        assert told in result.output, command
    result = CliRunner().invoke(main, ["diff", str(written), str(written)])
    assert "There is no difference." in result.output


@pytest.mark.slow
def test_the_real_megatron_reads_what_we_write_and_we_read_what_it_writes_bit_for_bit(tmp_path: Path) -> None:
    from tests.helpers.megatron_folders import compare_alone, convert_to_every_format, load_both, write_theirs

    assert run_ranks(4, write_theirs, str(tmp_path / "theirs")) == [0] * 4
    assert run_alone(compare_alone, str(tmp_path)) == 0
    assert run_alone(convert_to_every_format, str(tmp_path)) == 0
    assert run_ranks(4, load_both, str(tmp_path)) == [0] * 4
