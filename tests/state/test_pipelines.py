"""Pipelines: every rank has its own stages, and any other split loads what they saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.save import capture
from tests.helpers.pipelines import LAYERS, WAYS, Block, Job, Net, digest, missing, read, without_layer, write
from tests.helpers.processes import run_ranks
from tests.save.test_handover import as_if_many, tensor_files

pytestmark = pytest.mark.slow

RANKS = ckpt.RankOptions(timeout=100)
SAVED = ("pp", "pp2", "pp2-fsdp", "pp2-tp", "pp2-interleaved-fsdp")


def _manager(root: str, job: Job) -> ckpt.StateManager:
    if len(job.parts) == 1:
        return ckpt.StateManager(root, model=job.parts[0], optimizer=job.optimizers[0], ranks=RANKS)
    model, optimizer = ckpt.Joined(job.parts), ckpt.Joined(job.optimizers)
    return ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=RANKS)


def _save(rank: int, folder: str, hosts_of: int = 1) -> None:
    if hosts_of > 1:
        as_if_many(hosts_of)
    for way in SAVED:
        job = WAYS[way](1)
        with _manager(f"{folder}/{way}", job) as manager:
            job.step(0)
            manager.save_state("saved", wait=False)
            write(folder, way, job.digests())
            job.step(1)
            write(folder, f"{way}-later", job.digests())


def _load(rank: int, folder: str, ways: dict[str, str]) -> None:
    """`ways`: into what every checkpoint is loaded."""
    for saved, way in ways.items():
        job = WAYS[way](2)
        with _manager(f"{folder}/{saved}", job) as manager:
            manager.load_state("saved")
            assert not missing(job.digests(), read(folder, saved)), (saved, way)
            if saved == way:
                job.step(1)
                assert not missing(job.digests(), read(folder, f"{saved}-later")), saved


def _save_with_other_options(rank: int, folder: str) -> None:
    """Optimizers of stages that contradict each other: each rank keeps its own."""
    job = WAYS["pp2-fsdp"](1)
    job.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * (rank // 2)
    with _manager(f"{folder}/run", job) as manager:
        job.step(0)
        manager.save_state("saved")
        before = job.digests()
        job.step(1)
        manager.load_state("saved")
        assert job.digests() == before


def test_stages_whose_optimizers_contradict_each_other_keep_their_own(tmp_path: Path) -> None:
    run_ranks(4, _save_with_other_options, str(tmp_path))
    job = WAYS["whole"](1)
    with (
        _manager(str(tmp_path / "run"), job) as manager,
        pytest.raises(ckpt.MismatchError, match="missing in the checkpoint"),
    ):
        manager.load_state("saved")


def _save_whole(rank: int, folder: str) -> None:
    job = WAYS["fsdp"](1)
    with _manager(f"{folder}/run", job) as manager:
        job.step(0)
        manager.save_state("saved")
    write(folder, "run", job.digests())


def _save_twice(rank: int, folder: str) -> None:
    job = WAYS["pp2"](1)
    with _manager(f"{folder}/run", job) as manager:
        for number in range(2):
            job.step(number)
            manager.save_state("saved")
        with pytest.raises(ckpt.UnsupportedError, match="but other ranks have tensors that rank 0 lacks"):
            manager.save_model(f"{folder}/model")
    write(folder, "run", job.digests())


def test_a_pipeline_that_was_saved_again_under_its_name_is_merged(tmp_path: Path) -> None:
    run_ranks(2, _save_twice, str(tmp_path))
    ckpt.merge(tmp_path / "run" / "saved", tmp_path / "merged.safetensors")
    merged = {name: digest(tensor) for name, tensor in load_file(tmp_path / "merged.safetensors").items()}
    assert len(merged) == 4 * LAYERS
    assert not missing(merged, read(str(tmp_path), "run"))


def _lacks_a_layer(rank: int, folder: str) -> None:
    job = WAYS["pp2"](1)
    if rank == 1:
        job = Job([without_layer(job.parts[0], "7")], job.train)
    with _manager(f"{folder}/run", job) as manager:
        with pytest.raises(ckpt.MismatchError, match=r"layers\.7\.up\.weight: unexpected") as caught:
            manager.load_state("saved")
        assert "layers.0" not in str(caught.value)
        assert "layers.4" not in str(caught.value)


def test_what_no_stage_has_is_refused_by_name_and_what_another_stage_has_is_not(tmp_path: Path) -> None:
    run_ranks(2, _save_whole, str(tmp_path))
    run_ranks(2, _load, str(tmp_path), {"run": "pp2"})
    run_ranks(2, _lacks_a_layer, str(tmp_path))


def test_a_pipeline_is_loaded_into_any_other_split(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path))
    run_ranks(4, _load, str(tmp_path), {way: way for way in SAVED})
    interleaved = "pp2-interleaved-fsdp"
    run_ranks(4, _load, str(tmp_path), {"pp": interleaved, interleaved: "fsdp", "pp2": "pp", "pp2-tp": "pp2"})
    run_ranks(2, _load, str(tmp_path), {"pp": "pp2", "pp2-fsdp": "pp2", "pp2-tp": "fsdp"})
    run_ranks(8, _load, str(tmp_path), {"pp2-fsdp": "pp2-tp", "pp": "pp2-fsdp"})
    _load(0, str(tmp_path), dict.fromkeys(SAVED, "whole"))
    ckpt.merge(tmp_path / "pp2-fsdp" / "saved", tmp_path / "merged.safetensors")
    merged = {name: digest(tensor) for name, tensor in load_file(tmp_path / "merged.safetensors").items()}
    assert len(merged) == 4 * LAYERS
    assert not missing(merged, read(str(tmp_path), "pp2-fsdp"))


@pytest.mark.parametrize("hosts_of", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_ranks_of_a_host_write_one_file_for_each_part_whatever_their_stages_are(
    tmp_path: Path, hosts_of: int
) -> None:
    run_ranks(4, _save, str(tmp_path), hosts_of)
    for way in SAVED:
        files = tensor_files(str(tmp_path / way), "saved")
        hosts, stage = (
            range(0, 4, hosts_of),
            {"pp": 1, "pp2": 2}.get(way, 0),
        )  # ranks of the first stage, if it is whole
        writers = [first for first in hosts if first + hosts_of > stage]
        spread = [f"{part}/{rank:05d}.safetensors" for part in ("model", "optimizer") for rank in writers]
        whole = ["model.safetensors", "optimizer.safetensors"] if stage else []
        assert sorted(files) == sorted([*spread, *whole]), way
        assert ckpt.verify(tmp_path / way) == {"saved": []}
    run_ranks(4, _load, str(tmp_path), {way: way for way in SAVED})
    run_ranks(2, _load, str(tmp_path), {"pp": "pp2", "pp2-fsdp": "pp2", "pp2-tp": "fsdp"})
    _load(0, str(tmp_path), dict.fromkeys(SAVED, "whole"))
    for way in ("pp", "pp2-fsdp"):
        ckpt.merge(tmp_path / way / "saved", tmp_path / f"{way}.safetensors")
        merged = {name: digest(tensor) for name, tensor in load_file(tmp_path / f"{way}.safetensors").items()}
        assert len(merged) == 4 * LAYERS
        assert not missing(merged, read(str(tmp_path), way))


def _save_apart(rank: int, folder: str, how: str) -> None:
    as_if_many(2)
    part = Net(1).part(rank % 2, 2)
    for layer in part.layers.values():
        assert isinstance(layer, Block)
        if how == "tied":
            layer.down.weight = layer.up.weight
        else:
            layer.register_buffer("seen", torch.full((3,), rank))
    job = Job([part], lambda inputs, targets: torch.autograd.backward(part(inputs).mean()))
    with _manager(folder, job) as manager:
        job.step(0)
        manager.save_state("saved", wait=False)
        before = job.digests()
        job.step(1)
        manager.load_state("saved")
        assert job.digests() == before


@pytest.mark.parametrize("how", ["tied", "different"])
def test_a_part_whose_tensors_share_memory_or_differ_between_ranks_stays_in_files_of_each_rank(
    tmp_path: Path, how: str
) -> None:
    root = str(tmp_path / "run")
    run_ranks(4, _save_apart, root, how)
    of_model = [path for path in tensor_files(root, "saved") if path.startswith("model")]
    assert of_model[:2] == [
        "model-own-00001.safetensors",
        f"model-own-0000{2 if how == 'different' else 3}.safetensors",
    ]
    assert not [path for path in of_model if path.startswith("model/")]
    written = ["optimizer.safetensors", "optimizer/00000.safetensors", "optimizer/00002.safetensors"]
    assert [path for path in tensor_files(root, "saved") if path.startswith("optimizer")] == written
    assert ckpt.verify(root) == {"saved": []}


def _save_full(rank: int, folder: str) -> None:
    as_if_many(2)
    job = WAYS["pp2-fsdp"](1)
    options = ckpt.SaveOptions(layout="full")
    model, optimizer = job.parts[0], job.optimizers[0]
    with ckpt.StateManager(f"{folder}/run", model=model, optimizer=optimizer, ranks=RANKS, saving=options) as manager:
        job.step(0)
        manager.save_state("saved")
        write(folder, "run", job.digests())


def test_in_a_gather_nobody_hands_over_for_all_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(4, _save_full, str(tmp_path))
    assert not [path for path in tensor_files(str(tmp_path / "run"), "saved") if "/" in path]
    run_ranks(2, _load, str(tmp_path), {"run": "pp2"})


def _save_frozen_stage(rank: int, folder: str) -> None:
    as_if_many(2)
    capture._WORTH_A_FILE = 64
    job = WAYS["pp2-fsdp"](1)
    with _manager(f"{folder}/run", job) as manager:
        job.step(0)
        job.parts[0].requires_grad_(rank // 2 != 0)
        for name in ("saved", "later"):
            manager.save_state(name)
        write(folder, "run", job.digests())


def test_a_stage_that_is_frozen_is_written_once_by_its_ranks_and_linked(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(4, _save_frozen_stage, str(tmp_path))
    for rank in (0, 1):
        path = f"model/0000{rank}.safetensors"
        assert (root / "saved" / path).samefile(root / "later" / path)
    optimizer = [path for path in tensor_files(str(root), "later") if path.startswith("optimizer")]
    assert optimizer == ["optimizer/00000.safetensors", "optimizer/00002.safetensors"]
    run_ranks(2, _load, str(tmp_path), {"run": "pp2"})
