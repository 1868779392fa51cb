"""Folders that somebody has made so that a merge would come out wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt
from ckpt.errors import CkptError, DamagedError
from ckpt.formats.foreign.torch_files import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def merged(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    (folder.parent / "out").mkdir(exist_ok=True)
    out = folder.parent / "out" / "model.safetensors"
    ckpt.merge(folder, out, **options)
    return safetensors.torch.load_file(out)


def refused(folder: Path, why: str) -> None:
    with pytest.raises(CkptError, match=why):
        merged(folder)
    assert not list((folder.parent / "out").iterdir())


class TestShardsWithAnIndex:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two shards that both have `b`, of which the index names the first."""
        folder = tmp_path / "model"
        folder.mkdir()
        safetensors.torch.save_file({"a": torch.ones(2), "b": torch.ones(2)}, folder / "1.safetensors")
        safetensors.torch.save_file({"b": torch.full((2,), 7.0), "c": torch.ones(2)}, folder / "2.safetensors")
        self._write(folder, {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"})
        return folder

    @staticmethod
    def _write(folder: Path, weight_map: Any) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def test_a_tensor_in_two_of_them_is_that_of_the_file_which_the_index_names(self, folder: Path) -> None:
        assert merged(folder)["b"].tolist() == [1.0, 1.0]
        self._write(folder, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"})
        assert merged(folder)["b"].tolist() == [7.0, 7.0]
        model = nn.ParameterDict({name: torch.zeros(2) for name in "abc"})
        ckpt.load_model(folder, model)
        assert model["b"].tolist() == [7.0, 7.0]

    def test_without_an_index_it_is_refused(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        refused(folder, "several files with the same tensors, and no index says which file to use: b")

    def test_so_is_one_that_the_index_leaves_out(self, folder: Path) -> None:
        self._write(folder, {"a": "1.safetensors", "c": "2.safetensors"})
        refused(folder, "several files with the same tensors, and no index says which file to use: b")

    @pytest.mark.parametrize(
        ("weight_map", "why"),
        [
            ({"a": "2.safetensors"}, "names tensors that its files lack: a in 2.safetensors"),
            ({"a": "1.safetensors", "d": "1.safetensors"}, "names tensors that its files lack: d"),
            ({"a": "../other.safetensors"}, "names files that are missing"),
            ({"a": 5}, "is not a valid index of safetensors files"),
            ({"a": ["1.safetensors"]}, "is not a valid index of safetensors files"),
            (["1.safetensors"], "is not a valid index of safetensors files"),
            (None, "is not a valid index of safetensors files"),
        ],
    )
    def test_an_index_that_is_wrong_is_refused(self, folder: Path, weight_map: Any, why: str) -> None:
        self._write(folder, weight_map)
        refused(folder, why)

    @pytest.mark.parametrize("text", ["", "[]", "5", "{}", "[" * 100_000, '{"weight_map": {}, "weight_map": {}}'])
    def test_so_is_one_that_is_none(self, folder: Path, text: str) -> None:
        (folder / "model.safetensors.index.json").write_text(text)
        refused(folder, "is not a valid index of safetensors files")


@pytest.mark.parametrize("left", [".saving", "state.json"])
def test_a_checkpoint_that_was_never_committed_is_refused(tmp_path: Path, left: str) -> None:
    with ckpt.StateManager(tmp_path / "root", model=nn.Linear(2, 2)) as manager:
        manager.save_state("a")
    folder = tmp_path / "root" / "a"
    for name in ("manifest.json", "manifest.copy.json", "state.json", "rank-00000.json"):
        (folder / name).unlink()
    (folder / left).write_text("{}")
    why = "was never committed" if left == ".saving" else "has lost manifest.json"
    with pytest.raises(DamagedError, match=why):
        ckpt.merge(folder, tmp_path / "model.safetensors")
    with pytest.raises(DamagedError, match=why):
        ckpt.load_model(folder, nn.Linear(2, 2))
    assert not (tmp_path / "model.safetensors").exists()


class TestFoldersOfDcp:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        state = {"w": torch.arange(12.0).view(3, 4), "v": torch.ones(5), "__metadata__": torch.ones(1)}
        save_dcp({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        return tmp_path / "dcp"

    @staticmethod
    def _alter(folder: Path, change: Callable[[Any], None]) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    @staticmethod
    def _drop_metadata(metadata: Any) -> None:
        del metadata.state_dict_metadata["model.__metadata__"]

    def test_a_tensor_that_no_safetensors_file_can_hold_is_named(self, folder: Path) -> None:
        refused(folder, "a tensor is named '__metadata__', which safetensors reserves")
        self._alter(folder, self._drop_metadata)
        assert merged(folder)["w"].tolist() == torch.arange(12.0).view(3, 4).tolist()

    @pytest.mark.parametrize(
        ("offsets", "sizes", "shape"),
        [
            ([0, 0], [3, 4], [2, 4]),
            ([0, 0], [3, 4], [3, 4, 1]),
            ([0, 0], [3, 4], [4, 4]),
            ([1, 0], [3, 4], [3, 4]),
            ([1 << 62, 0], [3, 4], [3, 4]),
            ([0, 0], [3], [3, 4]),
            ([0, 0], [3, 4], [1 << 50, 4]),
            ([0, 0], [3, 4], [1 << 62, 1 << 62]),
        ],
    )
    def test_a_chunk_lies_in_its_tensor(
        self, folder: Path, offsets: list[int], sizes: list[int], shape: list[int]
    ) -> None:
        def alter(metadata: Any) -> None:
            self._drop_metadata(metadata)
            entry = metadata.state_dict_metadata["model.w"]
            entry.size = torch.Size(shape)
            entry.chunks[0] = replace(entry.chunks[0], offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for index in list(metadata.storage_data):
                if index.fqn == "model.w":
                    moved = replace(index, offset=torch.Size(offsets))
                    metadata.storage_data[moved] = metadata.storage_data.pop(index)

        self._alter(folder, alter)
        refused(folder, r"w \[.*\] (has a piece outside it|lacks)|is not a valid metadata file of torch|does not match")

    def test_the_same_bytes_are_not_many_tensors(self, folder: Path) -> None:
        def alter(metadata: Any) -> None:
            self._drop_metadata(metadata)
            (index,) = (index for index in metadata.storage_data if index.fqn == "model.w")
            for n in range(1000):
                name = f"model.w{n}"
                metadata.state_dict_metadata[name] = metadata.state_dict_metadata["model.w"]
                metadata.planner_data[name] = ("model", f"w{n}")
                metadata.storage_data[replace(index, fqn=name)] = metadata.storage_data[index]

        self._alter(folder, alter)
        refused(folder, "its tensors claim .* bytes, far more than the files have")

    @pytest.mark.parametrize(
        "change",
        [
            lambda metadata: metadata.planner_data.update({"model.w": ("model",) * 1000}),
            lambda metadata: metadata.planner_data.update({"model.w": ("model", ("w",))}),
            lambda metadata: metadata.planner_data.update({"model.w": ("model", "v")}),
            lambda metadata: metadata.planner_data.update({"model.w": 5}),
            lambda metadata: setattr(metadata, "storage_data", []),
            lambda metadata: setattr(metadata, "state_dict_metadata", None),
            lambda metadata: metadata.storage_data.update({"x": 5}),
        ],
    )
    def test_metadata_that_are_none_are_refused(self, folder: Path, change: Callable[[Any], None]) -> None:
        self._alter(folder, self._drop_metadata)
        self._alter(folder, change)
        refused(folder, "is not a valid metadata file of torch|gives several values")

    @pytest.mark.parametrize("field", ["offset", "length", "relative_path"])
    @pytest.mark.parametrize("value", [-1, 1 << 70, 1.5, None, [], "../x", "/etc/passwd", 5])
    def test_a_chunk_lies_in_a_file_of_the_folder(self, folder: Path, field: str, value: Any) -> None:
        def alter(metadata: Any) -> None:
            self._drop_metadata(metadata)
            for index, info in list(metadata.storage_data.items()):
                metadata.storage_data[index] = replace(info, **{field: value})

        self._alter(folder, alter)
        refused(folder, ".")


def test_names_of_many_wrappers_are_unwrapped_at_once() -> None:
    deep = "module." * 100_000
    assert unwrapped([f"{deep}a", f"{deep}module.b"]) == {f"{deep}a": "a", f"{deep}module.b": "module.b"}
    assert unwrapped(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}


def test_names_that_all_could_be_tied_are_not_compared_forever(tmp_path: Path) -> None:
    names = [f"m{n}.{kind}.weight" for n in range(1000) for kind in ("embed", "lm_head")]
    (tmp_path / "model").mkdir()
    safetensors.torch.save_file({name: torch.zeros(0, 2) for name in names}, tmp_path / "model" / "model.safetensors")
    assert len(merged(tmp_path / "model")) == 2000
