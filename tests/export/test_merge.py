"""Sharded checkpoints become one file: ours, those of torch.distributed.checkpoint, and Accelerate's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.cli.main import main
from ckpt.export.options import ExportOptions
from ckpt.formats.foreign.torch_files import unwrapped
from ckpt.formats.pieces import PiecedTensor
from ckpt.root.catalog import read_manifest
from ckpt.storage import open_storage
from tests.helpers.places import Folder, Place, at, copy
from tests.helpers.processes import Script, run_ranks

ACCELERATE = "pytorch_model_fsdp_0"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Net(nn.Module):
    """Odd sizes, a buffer that is an integer, a scalar, and a name that looks like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
        self.module = nn.Linear(3, 3)
        self.scale = nn.Buffer(torch.tensor(0.5))


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and torch.equal(first[key], second[key]) for key in first
    )


def tensors(file: Place | str) -> dict[str, torch.Tensor]:
    """What is in a safetensors file, wherever it lies."""
    return safetensors.torch.load((at(file) if isinstance(file, str) else file).read_bytes())


def save_as_accelerate_does(rank: int, folder: str) -> None:
    model = net()
    fully_shard(model)
    save_dcp({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{ACCELERATE}")


def save_ours(rank: int, root: str) -> None:
    model = net()
    fully_shard(model)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("x")


@pytest.fixture(scope="module", params=[2, 4])
def by_accelerate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """What `save_state` leaves, saved by so many ranks."""
    folder = Folder(tmp_path_factory.mktemp("accelerate"))
    run_ranks(request.param, save_as_accelerate_does, str(folder))
    (folder / "random_states_0.pkl").write_bytes(b"not looked at")
    return folder


@pytest.fixture
def accelerate_folder(by_accelerate: Folder, root: Place) -> Place:
    copy(by_accelerate, root / "accelerate")
    return root / "accelerate"


@pytest.fixture
def dcp(root: Place, tmp_path: Path) -> Place:
    save_dcp({"model": net().state_dict(), "step": 1}, checkpoint_id=tmp_path / "dcp")
    copy(Folder(tmp_path) / "dcp", root / "dcp")
    return root / "dcp"


@pytest.fixture
def ours(root: Place) -> Place:
    with ckpt.StateManager(root / "run", model=net()) as manager:
        manager.save_state("x")
    return root / "run" / "x"


@pytest.mark.slow
class TestAccelerate:
    def test_the_folder_and_the_one_around_it_give_the_model(self, accelerate_folder: Place, root: Place) -> None:
        for source in (accelerate_folder, accelerate_folder / ACCELERATE):
            written = ckpt.merge(source, root / "model.safetensors")
            assert written == [str(root / "model.safetensors")]
            assert same(tensors(written[0]), net().state_dict())

    def test_accelerates_own_merge_gives_the_same(
        self, by_accelerate: Folder, accelerate_folder: Place, root: Place, tmp_path: Path
    ) -> None:
        from accelerate.utils import merge_fsdp_weights

        merge_fsdp_weights(str(by_accelerate / ACCELERATE), str(tmp_path / "theirs"))
        ckpt.merge(accelerate_folder, root / "ours.safetensors")
        assert same(tensors(root / "ours.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))

    def test_one_without_metadata_was_cut_off(self, accelerate_folder: Place, root: Place) -> None:
        (accelerate_folder / ACCELERATE / ".metadata").unlink()
        for source in (accelerate_folder, accelerate_folder / ACCELERATE):
            with pytest.raises(ckpt.DamagedError, match=r"\.metadata is missing\. .*, so the save was interrupted"):
                ckpt.merge(source, root / "model.safetensors")

    def test_a_missing_file_of_a_rank_is_named(self, accelerate_folder: Place, root: Place) -> None:
        (accelerate_folder / ACCELERATE / "__1_0.distcp").unlink()
        with pytest.raises(ckpt.DamagedError, match=r"__1_0\.distcp is missing\. Copy every rank's files"):
            ckpt.merge(accelerate_folder, root / "model.safetensors")
        assert not (root / "model.safetensors").exists()


class TestOurs:
    @pytest.mark.slow
    @pytest.mark.parametrize("world", [2, 4])
    def test_a_sharded_checkpoint_gives_the_model(self, root: Place, world: int) -> None:
        run_ranks(world, save_ours, str(root / "run"))
        ckpt.merge(root / "run" / "x", root / "out" / "model.safetensors")
        assert same(tensors(root / "out" / "model.safetensors"), net().state_dict())

    def test_a_full_one_does_too(self, ours: Place, root: Place) -> None:
        ckpt.merge(ours, root / "model.safetensors")
        assert same(tensors(root / "model.safetensors"), net().state_dict())

    @pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
    def test_a_damaged_one_is_refused(self, ours: Place, root: Place, harm: str) -> None:
        path = ours / "model.safetensors"
        data = path.read_bytes()
        path.unlink() if harm == "remove" else path.write_bytes(data[:-1] + (b"" if harm == "cut" else b"\xff"))
        with pytest.raises(ckpt.DamagedError, match=r"x is damaged: model\.safetensors "):
            ckpt.merge(ours, root / "model.safetensors")

    def test_damage_in_another_part_is_no_hindrance(self, root: Place) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model.model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        with ckpt.StateManager(root / "run", model=model, optimizer=optimizer) as manager:
            manager.save_state("x")
        ckpt.merge(root / "run/x", root / "optimizer.safetensors", part="optimizer")
        names = tensors(root / "optimizer.safetensors").keys()
        assert names
        assert {name.partition(".")[0] for name in names} == {"state"}
        (root / "run" / "x" / "optimizer.safetensors").unlink()
        ckpt.merge(root / "run/x", root / "model.safetensors")

    def test_a_root_stands_for_its_newest_checkpoint(self, ours: Place, root: Place) -> None:
        for source, name in ((ours, "named"), (ours.parent, "newest")):
            ckpt.merge(source, root / f"{name}.safetensors")
        assert (root / "named.safetensors").read_bytes() == (root / "newest.safetensors").read_bytes()

    @pytest.mark.also_on_s3
    def test_a_file_of_a_checkpoint_is_no_model_by_itself(self, ours: Place, root: Place) -> None:
        with pytest.raises(ckpt.ConfigError, match=r"Name the checkpoint itself: .*run/x\."):
            ckpt.merge(ours / "model.safetensors", root / "model.safetensors")

    @pytest.mark.slow
    def test_nor_is_the_piece_of_a_rank(self, tmp_path: Path) -> None:
        run_ranks(2, save_ours, str(tmp_path / "run"))
        piece = tmp_path / "run" / "x" / "model" / "00001.safetensors"
        with pytest.raises(ckpt.ConfigError, match=r"Name the checkpoint itself: .*run/x\."):
            ckpt.load_model(piece, net())

    def test_a_checkpoint_is_never_written_into(self, ours: Place, dcp: Place) -> None:
        before = (ours / "model.safetensors").read_bytes()
        with pytest.raises(ckpt.ConfigError, match="is a checkpoint, and ckpt does not overwrite it"):
            ckpt.merge(dcp, ours / "model.safetensors", dtype="bfloat16")
        assert (ours / "model.safetensors").read_bytes() == before

    @pytest.mark.also_on_s3
    def test_any_storage_serves_on_either_side(self, dcp: Place, ours: Place, root: Place) -> None:
        for source in (ours, dcp):
            for target in (f"{root}/out/model.safetensors", "memory://merge/out/model.safetensors"):
                assert ckpt.merge(source, target) == [target]
                written = open_storage(target.rpartition("/")[0]).read("model.safetensors")
                assert same(safetensors.torch.load(written), net().state_dict())
        back = ckpt.merge("memory://merge/out", root / "back.safetensors")
        assert same(tensors(back[0]), net().state_dict())


class TestOutput:
    def test_floating_point_is_cast_and_nothing_else(self, dcp: Place, root: Place) -> None:
        for dtype in ("bfloat16", torch.float16):
            ckpt.merge(dcp, root / "model.safetensors", dtype=dtype)
            cast = getattr(torch, dtype) if isinstance(dtype, str) else dtype
            wanted = {k: v.to(cast) if v.is_floating_point() else v for k, v in net().state_dict().items()}
            assert wanted["model.1.num_batches_tracked"].dtype == torch.int64
            assert same(tensors(root / "model.safetensors"), wanted)

    def test_beyond_a_size_there_are_shards_and_an_index(self, dcp: Place, root: Place) -> None:
        written = ckpt.merge(dcp, root / "out" / "model.safetensors", max_shard_size=150)
        names = [Path(url).name for url in written]
        count = len(names) - 1
        assert count > 2
        assert names[0] == f"model-00001-of-{count:05d}.safetensors"
        assert names[-1] == "model.safetensors.index.json"
        index = json.loads(at(written[-1]).read_bytes())
        found = {key: value for url in written[:-1] for key, value in tensors(url).items()}
        assert same(found, net().state_dict())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert all(key in tensors(root / "out" / file) for key, file in index["weight_map"].items())
        assert index["weight_map"].keys() == found.keys()
        for url in written[:-1]:
            assert len(tensors(url)) == 1 or sum(tensor.nbytes for tensor in tensors(url).values()) <= 150

    def test_within_the_size_there_is_one_file(self, dcp: Place, root: Place) -> None:
        assert ckpt.merge(dcp, root / "m.safetensors", max_shard_size="5GB") == [str(root / "m.safetensors")]

    def test_shards_are_not_mixed_with_an_older_output(self, dcp: Place, root: Place) -> None:
        target = root / "out" / "model.safetensors"
        ckpt.merge(dcp, target)
        with pytest.raises(ckpt.ConfigError, match=r"out/model\.safetensors together with the new shards"):
            ckpt.merge(dcp, target, max_shard_size=150)
        target.unlink()
        ckpt.merge(dcp, target, max_shard_size=150)
        with pytest.raises(ckpt.ConfigError, match=r"index\.json together with"):
            ckpt.merge(dcp, target, max_shard_size=100)

    def test_an_older_file_is_replaced(self, dcp: Place, root: Place) -> None:
        (root / "model.safetensors").write_bytes(b"old")
        ckpt.merge(dcp, root / "model.safetensors")
        assert same(tensors(root / "model.safetensors"), net().state_dict())

    @pytest.mark.parametrize("limit", [None, 150])
    def test_a_merge_that_fails_leaves_nothing(
        self, dcp: Place, root: Place, monkeypatch: pytest.MonkeyPatch, limit: int | None
    ) -> None:
        whole = PiecedTensor.slabs

        def failing(tensor: PiecedTensor) -> Iterator[torch.Tensor]:
            if tensor.shape == (3, 3):
                raise KeyboardInterrupt
            return whole(tensor)

        monkeypatch.setattr(PiecedTensor, "slabs", failing)
        with pytest.raises(KeyboardInterrupt):
            ckpt.merge(dcp, root / "out" / "model.safetensors", max_shard_size=limit)
        assert (root / "out").files() == {}

    @pytest.mark.slow
    def test_a_killed_merge_leaves_nothing_that_looks_finished(self, dcp: Place, root: Place, tmp_path: Path) -> None:
        code = (
            "import os, sys, ckpt\n"
            "from ckpt.formats.pieces import PiecedTensor\n"
            "whole = PiecedTensor.slabs\n"
            "PiecedTensor.slabs = lambda self: os.kill(os.getpid(), 9) if self.shape == (3, 3) else whole(self)\n"
            "ckpt.merge(sys.argv[1], sys.argv[2], max_shard_size=eval(sys.argv[3]))\n"
        )
        for limit in ("None", "150"):
            target = root / f"out-{limit}" / "model.safetensors"
            with Script("-c", code, str(dcp), str(target), limit, log=tmp_path / "log") as merging:
                assert merging.wait() == -9
            assert not target.parent.files().keys() & {"model.safetensors", "model.safetensors.index.json"}
            ckpt.merge(dcp, target)
            assert same(tensors(target), net().state_dict())


@pytest.mark.not_on_s3("names are the same wherever the files are")
class TestNames:
    def test_a_models_own_word_model_stays(self, tmp_path: Path) -> None:
        save_dcp({"model.layer.weight": torch.ones(2)}, checkpoint_id=tmp_path / "flat")
        save_dcp({"model": {"model.layer.weight": torch.ones(2)}}, checkpoint_id=tmp_path / "nested")
        for source in ("flat", "nested"):
            ckpt.merge(tmp_path / source, tmp_path / "model.safetensors")
            assert load_file(tmp_path / "model.safetensors").keys() == {"model.layer.weight"}

    @pytest.mark.parametrize(
        ("wrapped", "bare"),
        [
            (["module.a", "module.b"], ["a", "b"]),
            (["module.a", "b"], ["module.a", "b"]),
            (["module._orig_mod.a"], ["a"]),
            (["_orig_mod.module.a"], ["a"]),
            (["_fsdp_wrapped_module.x._fsdp_wrapped_module.a"], ["x.a"]),
            (["x._checkpoint_wrapped_module.module.a"], ["x.module.a"]),
            ([], []),
        ],
    )
    def test_prefixes_of_wrappers_go(self, wrapped: list[str], bare: list[str]) -> None:
        assert list(unwrapped(wrapped).values()) == bare

    def test_names_that_would_become_one_are_refused(self) -> None:
        with pytest.raises(ckpt.ConfigError, match=r"some names become the same: a and _orig_mod\.a"):
            unwrapped(["a", "_orig_mod.a"])

    def test_what_is_no_tensor_is_left_out_and_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        save_dcp({"model": {"a": torch.ones(2), "extra": 5}}, checkpoint_id=tmp_path / "dcp")
        ckpt.merge(tmp_path / "dcp", tmp_path / "model.safetensors")
        assert "ckpt leaves out everything that is not a tensor: extra" in caplog.text
        torch.save({"a": torch.ones(2), "_extra_state": {"count": 5}}, tmp_path / "model.pt")
        ckpt.merge(tmp_path / "model.pt", tmp_path / "other.safetensors")
        assert "ckpt leaves out 1 objects that are not tensors (_extra_state)" in caplog.text


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=67, n_positions=16, **options)
    return GPT2LMHeadModel(config).eval()


def save_gpt2(rank: int, folder: str, root: str) -> None:
    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    save_dcp({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/dcp/{ACCELERATE}")
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("x")


@pytest.fixture(scope="module")
def gpt2_folder(new_root: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """GPT-2 under FSDP2 on two ranks: as Accelerate saves it (`dcp`), and as we do (`run/x`)."""
    root, folder = new_root(), Folder(tmp_path_factory.mktemp("gpt2"))
    run_ranks(2, save_gpt2, str(folder), str(root / "run"))
    copy(folder / "dcp", root / "dcp")
    return root


class TestTiedWeights:
    @pytest.mark.slow
    @pytest.mark.parametrize("source", ["dcp", "run/x"])
    @pytest.mark.parametrize("limit", [None, "10KB"])
    def test_transformers_loads_a_tied_model_that_was_written_once(
        self, gpt2_folder: Place, tmp_path: Path, source: str, limit: str | None
    ) -> None:
        from transformers import GPT2LMHeadModel

        model = gpt2()
        written = ckpt.merge(gpt2_folder / source, tmp_path / "model.safetensors", max_shard_size=limit)
        names = {name for url in written if url.endswith(".safetensors") for name in load_file(url)}
        assert names == model.state_dict().keys() - {"lm_head.weight"}
        model.config.save_pretrained(tmp_path)
        loaded, told = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        tokens = torch.arange(12)[None]
        with torch.no_grad():
            assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)

    @pytest.mark.slow
    def test_the_file_says_what_stands_for_what(self, gpt2_folder: Place, tmp_path: Path) -> None:
        ckpt.merge(gpt2_folder / "run/x", tmp_path / "model.safetensors")
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}

    def test_heads_of_their_own_and_equal_biases_are_kept(self, root: Place, tmp_path: Path) -> None:
        model = gpt2(tie_word_embeddings=False)
        save_dcp({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
        copy(Folder(tmp_path) / "dcp", root / "dcp")
        ckpt.merge(root / "dcp", tmp_path / "model.safetensors")
        assert same(load_file(tmp_path / "model.safetensors"), model.state_dict())

    def test_a_layer_that_equals_the_head_is_not_taken_for_its_embedding(self, tmp_path: Path) -> None:
        fresh = {"layer.weight": torch.zeros(4, 4), "lm_head.weight": torch.zeros(4, 4)}
        save_file(fresh, tmp_path / "model.safetensors")
        ckpt.merge(tmp_path / "model.safetensors", tmp_path / "merged.safetensors")
        assert same(load_file(tmp_path / "merged.safetensors"), fresh)

    def test_a_full_checkpoint_keeps_the_embedding(self, root: Place, tmp_path: Path) -> None:
        with ckpt.StateManager(root, model=gpt2()) as manager:
            manager.save_state("x")
        ckpt.merge(root / "x", tmp_path / "model.safetensors")
        assert load_file(tmp_path / "model.safetensors").keys() == gpt2().state_dict().keys() - {"lm_head.weight"}


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (
                {"dtype": "bfloat61"},
                "can't cast a model to dtype='bfloat61'. Choose one of float16, bfloat16",
            ),
            ({"dtype": "int64"}, "can't cast a model to dtype='int64'"),
            ({"dtype": "nn"}, "can't cast a model to dtype='nn'"),
            ({"max_shard_size": "5 apples"}, "max_shard_size='5 apples' is not a size"),
            ({"max_shard_size": 0}, "max_shard_size=0 is not a size"),
            ({"part": "modell"}, "has no part 'modell' with tensors. Parts with tensors: model."),
        ],
    )
    def test_an_option_that_cannot_be_used(self, dcp: Place, tmp_path: Path, options: Any, told: str) -> None:
        with pytest.raises(ckpt.CkptError) as caught:
            ckpt.merge(dcp, tmp_path / "model.safetensors", **options)
        assert told in str(caught.value)

    def test_a_part_that_ours_does_not_have(self, ours: Place, tmp_path: Path) -> None:
        with pytest.raises(ckpt.MissingError, match=r"x has no part 'nets' with tensors\. Parts with tensors: model\."):
            ckpt.merge(ours, tmp_path / "model.safetensors", part="nets")

    @pytest.mark.parametrize(
        ("destination", "told"),
        [
            ("folder", r"folder is a folder. Name a file in that folder: .*folder/model\.safetensors"),
            ("folder/", r"is a folder. Name a file in that folder"),
            ("model.bin", r"can't write to .*model\.bin\. Name a file in a folder, with the suffix \.safetensors"),
        ],
    )
    def test_a_destination_that_is_no_file(self, dcp: Place, tmp_path: Path, destination: str, told: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(ckpt.ConfigError, match=told):
            ckpt.merge(dcp, f"{tmp_path}/{destination}")

    def test_a_destination_that_is_a_folder_of_a_store_without_folders(self, dcp: Place) -> None:
        open_storage("memory://merge/taken").write("model.safetensors/notes.txt", [b"x"])
        with pytest.raises(
            ckpt.ConfigError, match=r"taken/model\.safetensors is a folder\. Name a file in that folder"
        ):
            ckpt.merge(dcp, "memory://merge/taken/model.safetensors")

    def test_a_source_of_no_known_kind(self, root: Place, tmp_path: Path) -> None:
        (root / "folder" / "notes.txt").write_bytes(b"x")
        (root / "old" / "pytorch_model.bin").write_bytes(b"x")
        for source, error in (
            ("folder", ckpt.ConfigError),
            ("none", ckpt.MissingError),
        ):
            with pytest.raises(error, match=r"manifest\.json.*distcp.*pytorch_model_fsdp_0"):
                ckpt.merge(root / source, tmp_path / "model.safetensors")
        with pytest.raises(ckpt.DamagedError, match=r"pytorch_model\.bin has no valid data of torch\.save"):
            ckpt.merge(root / "old" / "pytorch_model.bin", tmp_path / "model.safetensors")

    @pytest.mark.slow
    def test_a_hole_is_named_with_its_tensor_and_its_region(self, root: Place, tmp_path: Path) -> None:
        run_ranks(2, save_ours, str(root))
        storage = open_storage(root)
        manifest = read_manifest(storage, "x")
        kept = tuple(file for file in manifest.files if file.name != "model/00001.safetensors")
        storage.write("x/manifest.json", [replace(manifest, files=kept).to_bytes()])
        with pytest.raises(ckpt.DamagedError, match=r"model\.0\.weight \[5, 7\] lacks \[3:5, 0:7\]"):
            ckpt.merge(root / "x", tmp_path / "model.safetensors")

    def test_a_truncated_file_of_a_rank(self, dcp: Place, tmp_path: Path) -> None:
        path = dcp / "__0_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ckpt.DamagedError, match=r"__0_0\.distcp is .* of .*\d+ bytes"):
            ckpt.merge(dcp, tmp_path / "model.safetensors")


@pytest.mark.not_on_s3("nothing is stored")
@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("7", 7), (8, 8), ("2kb", 2000), ("10B", 10)]
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    assert ExportOptions.parse(None, text).max_shard_size == size


class TestCommand:
    def test_it_merges_and_says_where_to(self, dcp: Place, root: Place) -> None:
        target = root / "out" / "model.safetensors"
        done = CliRunner().invoke(
            main, ["merge", str(dcp), str(target), "--dtype", "bfloat16", "--max-shard-size", "5GB"]
        )
        assert done.output == f"{target}\n"
        assert tensors(target)["scale"].dtype == torch.bfloat16

    def test_an_error_is_one_line(self, root: Place, tmp_path: Path) -> None:
        done = CliRunner().invoke(main, ["merge", str(root / "no"), str(tmp_path / "model.safetensors")])
        assert done.exit_code == 1
        assert done.output.startswith("ckpt: there is nothing at ")


# not with getrusage: a child's ru_maxrss begins with what its parent had
_MEASURE = """
import re, sys, torch, ckpt.export.merge
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
ckpt.export.merge.merge(sys.argv[1], sys.argv[2], dtype=sys.argv[3] or None)
print((peak() - before) // 1024)
"""


def save_large(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    large, turned = torch.rand(320, 1 << 18), torch.rand(1 << 13, 1 << 13)
    state: dict[str, Any] = {"large": distribute_tensor(large, mesh, [Shard(0)])}  # 335 MB in one tensor
    state["columns"] = distribute_tensor(turned, mesh, [Shard(1)])
    save_dcp({"model": state}, checkpoint_id=folder)


@pytest.mark.slow
@pytest.mark.not_on_s3("S3's own is in tests/storage/test_s3.py")
def test_it_holds_less_than_128_mb_whatever_the_size(tmp_path: Path) -> None:
    run_ranks(2, save_large, str(tmp_path / "dcp"))
    torch.manual_seed(0)
    wanted = torch.rand(320, 1 << 18)[159:161]
    for dtype in ("", "bfloat16"):
        merged = tmp_path / f"{dtype}.safetensors"
        command = [sys.executable, "-c", _MEASURE, str(tmp_path / "dcp"), str(merged), dtype]
        # what glibc keeps of freed memory depends on the order in which threads run: 40 to 170 MB beside our own 92
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": f"{1 << 20}"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=200)
        assert 1 < int(done.stdout) < 128, dtype
        with safe_open(merged, "pt") as file:
            assert torch.equal(file.get_slice("large")[159:161], wanted.to(getattr(torch, dtype or "float32"))), dtype
