"""Folders of torch.distributed.checkpoint, read without executing what is in them."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt.errors import DamagedError
from ckpt.formats.foreign.dcp import METADATA, Contents, _with_optimizers, needed_files, read_metadata
from ckpt.formats.foreign.torch_save import find_tensor, read_pickle
from ckpt.formats.pieces import PiecedTensor
from ckpt.root.verify import StoredFile
from ckpt.storage import LocalStorage
from tests.helpers.processes import run_ranks

SHAPES = {"even": (8, 6), "uneven": (7, 5), "few": (1, 3), "wide": (3, 16), "line": (10,), "bricks": (4, 6, 5)}


def whole(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values in every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def save_everything(rank: int, folder: str) -> None:
    """Every kind of placement there is, nested under `model` as Accelerate does."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {"scalar": torch.tensor(2.5), "plain": whole("even"), "count": torch.tensor([7])}
    state["empty"] = torch.empty(0, 3)
    for name in SHAPES:
        dtype = torch.bfloat16 if name == "few" else torch.float32
        state[name] = distribute_tensor(whole(name, dtype), mesh, [Shard(0)])
        state[f"{name}.copied"] = distribute_tensor(whole(name), mesh, [Replicate()])
    for name in ("even", "wide", "bricks"):
        state[f"{name}.columns"] = distribute_tensor(whole(name), mesh, [Shard(1)])
    save_dcp({"model": state, "steps": 3}, checkpoint_id=folder)


def expected(name: str) -> torch.Tensor:
    fixed = {"scalar": torch.tensor(2.5), "count": torch.tensor([7]), "empty": torch.empty(0, 3)}
    if name in fixed:
        return fixed[name]
    shape = "even" if name == "plain" else name.partition(".")[0]
    return whole(shape, torch.bfloat16 if name == "few" else torch.float32)


def contents(folder: Path) -> Contents:
    return read_metadata((folder / METADATA).read_bytes(), METADATA)


def opened(folder: Path) -> dict[str, PiecedTensor]:
    storage = LocalStorage(folder)
    found = contents(folder).of_part("model").tensors
    return {
        name: tensor.pieced(name, lambda path: StoredFile(storage, path), str(folder)) for name, tensor in found.items()
    }


def read(tensor: PiecedTensor) -> torch.Tensor:
    return tensor.read(tensor.box)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_placement_is_read_whole_without_holes(tmp_path: Path, world: int) -> None:
    run_ranks(world, save_alone if world == 1 else save_everything, str(tmp_path))
    tensors = opened(tmp_path)
    assert len(tensors) == (5 if world == 1 else 4 + 2 * len(SHAPES) + 3)
    for name, tensor in tensors.items():
        wanted = odd_tensors()[name] if world == 1 else expected(name)
        assert tensor.fault() is None
        assert tensor.dtype == wanted.dtype
        found = read(tensor)
        assert found.shape == wanted.shape
        assert torch.equal(found.flatten().view(torch.uint8), wanted.flatten().view(torch.uint8)), name


def save_alone(rank: int, folder: str) -> None:
    save_dcp({"model": odd_tensors()}, checkpoint_id=Path(folder))  # a path: it is pickled into the metadata


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "turned": whole("uneven").t(),
        "channels": whole("bricks").reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "float8": whole("line").to(torch.float8_e4m3fn),
        "words": torch.arange(5, dtype=torch.int32).to(torch.uint16),
        "part": whole("even")[2:5, 1:3],
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_contiguous_come_out_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone(0, str(tmp_path))
    for slab in (8 << 20, 16, 4):  # also where a row does not fit
        monkeypatch.setattr("ckpt.formats.pieces.SLAB", slab)
        tensors = opened(tmp_path)
        assert tensors.keys() == odd_tensors().keys()
        for name, tensor in tensors.items():
            wanted = odd_tensors()[name]
            together = torch.cat([part.flatten().view(torch.uint8) for part in tensor.slabs()])
            assert torch.equal(together, wanted.contiguous().flatten().view(torch.uint8)), name
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, tuple(wanted.shape))


def save_fsdp2(rank: int, folder: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(torch.bfloat16)
    Path(folder).mkdir(exist_ok=True)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/whole.pt")
    fully_shard(model)
    state = get_model_state_dict(model)
    assert isinstance(state["0.weight"], DTensor)
    save_dcp(state, checkpoint_id=f"{folder}/dcp")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_an_fsdp2_model_with_uneven_shards_is_read_whole(tmp_path: Path, world: int) -> None:
    run_ranks(world, save_fsdp2, str(tmp_path))
    wanted = torch.load(tmp_path / "whole.pt")
    storage = LocalStorage(tmp_path / "dcp")
    found = contents(tmp_path / "dcp")
    assert found.parts() == []
    assert found.tensors.keys() == wanted.keys()
    for name, stored in found.tensors.items():
        tensor = stored.pieced(name, lambda path: StoredFile(storage, path), "dcp")
        assert torch.equal(read(tensor), wanted[name])


@pytest.mark.filterwarnings("ignore")
class TestMetadata:
    def test_the_names_below_a_part_are_told_from_names_with_dots(self, tmp_path: Path) -> None:
        model = {"model.layer.weight": torch.ones(2), "layer": torch.ones(3)}
        save_dcp({"model": model, "optimizer": {"state": {"0": torch.ones(1)}}, "step": 4}, checkpoint_id=tmp_path)
        found = contents(tmp_path)
        assert found.parts() == ["model", "optimizer"]
        assert found.of_part("model").tensors.keys() == model.keys()
        assert found.of_part("optimizer").tensors.keys() == {"state.0"}
        assert found.of_part("step").tensors == {}
        assert {name: value.keys for name, value in found.others.items()} == {"step": ("step",)}

    def test_it_knows_which_files_it_needs_and_how_long_they_are(self, tmp_path: Path) -> None:
        save_dcp({"a": torch.ones(100)}, checkpoint_id=tmp_path)
        needed = needed_files(contents(tmp_path).tensors.values())
        assert needed == {path.name: path.stat().st_size for path in tmp_path.glob("*.distcp")}

    @pytest.mark.parametrize("at", [0, 1, 10, 200, -1])
    def test_a_truncated_one_is_refused(self, tmp_path: Path, at: int) -> None:
        save_dcp({"a": torch.ones(100)}, checkpoint_id=tmp_path)
        with pytest.raises(DamagedError, match=r"^here is not a valid "):
            read_metadata((tmp_path / METADATA).read_bytes()[:at], "here")

    def test_no_changed_byte_leads_to_anything_but_a_clear_error(self, tmp_path: Path) -> None:
        save_dcp({"model": {"a": torch.ones(100)}}, checkpoint_id=tmp_path)
        data = (tmp_path / METADATA).read_bytes()
        for at in range(len(data)):
            with suppress(DamagedError):  # a changed name is still a name
                read_metadata(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :], "here")

    def test_groups_of_which_one_is_none_are_no_optimizer(self) -> None:
        for odd in (3, {}, {"lr": 0.1}):
            tree = {"param_groups": [{"params": [0]}, odd], "state": {"0": 1}}
            assert _with_optimizers(tree) == tree
        fits = {"param_groups": [{"params": [0]}, {"params": [1]}], "state": {"0": 1}}
        assert _with_optimizers(fits) == {**fits, "state": {0: 1}}

    def test_one_that_is_something_else_is_refused(self) -> None:
        for value in (None, 3, {"a": 1}, [1], OrderedDict(a=1)):
            with pytest.raises(DamagedError, match="here is not a valid metadata file of"):
                read_metadata(pickle.dumps(value), "here")


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Sneaky(Hostile):
    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').mkdir({str(self.path)!r})",)


class TestHostilePickles:
    @pytest.mark.parametrize(("kind", "named"), [(Hostile, "posix.mkdir"), (Sneaky, "builtins.eval")])
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_nothing_is_executed_and_the_name_is_told(
        self, tmp_path: Path, kind: type[Hostile], named: str, protocol: int
    ) -> None:
        data = pickle.dumps({"state": kind(tmp_path / "made")}, protocol)
        with pytest.raises(DamagedError, match=f"here names '(__builtin__|{named.partition('.')[0]})") as caught:
            read_metadata(data, "here")
        assert named.partition(".")[2] in str(caught.value)
        assert "did not execute it" in str(caught.value)
        assert not (tmp_path / "made").exists()
        pickle.loads(data)
        assert (tmp_path / "made").exists()  # it would have been

    @pytest.mark.parametrize(
        "data",
        [
            b"cos\nsystem\n(S'true'\ntR.",  # the oldest protocol
            b"(S'true'\nios\nsystem\n.",  # INST
            b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.",  # OBJ
            b"\x80\x02\x82\x01.",  # an extension
            b"\x80\x02c__builtin__\ngetattr\n.",
            b"\x80\x02ctorch.distributed.checkpoint.metadata\nos\n.",
            b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
            b"\x80\x02r\xff\xff\xff\xff.",
            b"\x80\x02}]s.",
            b"\x80\x02]" * 1000,
            b"(" * 100_000 + b".",
        ],
    )
    def test_odd_ones_end_in_an_error(self, data: bytes) -> None:
        with pytest.raises(DamagedError, match=r"^here "):
            read_metadata(data, "here")

    def test_a_chunk_is_not_executed_either(self, tmp_path: Path) -> None:
        path = tmp_path / "chunk"
        torch.save(Hostile(tmp_path / "made"), path)
        with pytest.raises(DamagedError, match=r"names 'posix\.mkdir'"):
            find_tensor(StoredFile(LocalStorage(tmp_path), "chunk"), 0, path.stat().st_size, "chunk")
        assert not (tmp_path / "made").exists()


class TestChunks:
    def find(self, path: Path) -> PiecedTensor:
        region = find_tensor(StoredFile(LocalStorage(path.parent), path.name), 0, path.stat().st_size, path.name)
        return PiecedTensor(region.dtype, region.sizes, ())

    @pytest.mark.parametrize("tensor", [nn.Parameter(torch.ones(2, 3)), torch.ones(4)[1:], torch.tensor(1)])
    def test_what_torch_save_makes_of_a_tensor_is_found(self, tmp_path: Path, tensor: torch.Tensor) -> None:
        path = tmp_path / "chunk"
        torch.save(tensor, path)
        region = find_tensor(StoredFile(LocalStorage(tmp_path), "chunk"), 0, path.stat().st_size, "chunk")
        target = torch.zeros(tensor.shape, dtype=tensor.dtype)
        region.read_into((0,) * target.dim(), target)
        assert torch.equal(target, tensor)

    @pytest.mark.parametrize("value", [3, {"a": torch.ones(1)}, torch.ones(2, dtype=torch.complex64).conj()])
    def test_anything_else_is_refused(self, tmp_path: Path, value: Any) -> None:
        torch.save(value, tmp_path / "chunk")
        with pytest.raises(DamagedError, match=r"chunk has no valid tensor of torch\.save at byte 0"):
            self.find(tmp_path / "chunk")

    def test_no_cut_leads_to_anything_but_a_clear_error(self, tmp_path: Path) -> None:
        torch.save(torch.ones(10), tmp_path / "whole")
        data = (tmp_path / "whole").read_bytes()
        for length in range(0, len(data), 7):
            (tmp_path / "chunk").write_bytes(data[:length])
            with pytest.raises(DamagedError, match="chunk has no valid tensor"):
                self.find(tmp_path / "chunk")


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, b"x", "é" * 300], "b": (1, 2, 3, 4), "c": {1, 2}, "d": frozenset((3,))},
        {"long": 1 << 200, "nested": {"deep": [[[()]]]}, "same": [x := [1], x]},
        OrderedDict(a=1, b=2),
    ],
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_read_as_they_are(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    allowed = ("collections.OrderedDict", "builtins.set", "builtins.frozenset", "__builtin__.set", "_codecs.encode")
    if protocol > 3 or isinstance(value, OrderedDict):
        assert read_pickle(data, allowed, "here") == value
    else:  # sets and bytes are calls there: described, not made
        assert read_pickle(data, (*allowed, "__builtin__.frozenset"), "here").keys() == value.keys()
