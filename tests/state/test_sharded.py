"""Sharded state: saved in shards by every rank, loaded with any other sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckpt
from ckpt.storage import ANY, Buffer
from tests.helpers.places import Folder, PassedOn, Place, committed, copy
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, plain, state, step, whole
from tests.helpers.training import exact
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow


def _save_all(rank: int, root: str, notes: str, ways: list[str]) -> None:
    for how in ways:
        _save(rank, f"{root}/{how}", f"{notes}/{how}", how)


def _save(rank: int, root: str, notes: str, how: str, layout: str = "auto") -> None:
    """Save, and leave in `notes` what was saved, and what it became with further training."""
    model = MODELS[how](1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(
        root,
        model=model,
        optimizer=optimizer,
        saving=ckpt.SaveOptions(layout=layout),
        ranks=ckpt.RankOptions(timeout=60),
    ) as manager:
        for number in range(2):
            step(model, optimizer, number)
        manager.save_state("saved")
        saved = state(model, optimizer)
        for number in range(2, 4):
            step(model, optimizer, number)
        later = state(model, optimizer)
    if rank == 0:
        Path(f"{notes}.txt").write_text(saved)
        Path(f"{notes}-later.txt").write_text(later)


def _same_layout(saved: str, how: str) -> bool:
    """Whether four ranks saved it in the way in which it is loaded."""
    kinds = {"fsdp1": "fsdp2", "fsdp1-flat": "fsdp2", "fsdp1-mesh": "fsdp2"}
    by = dist.get_world_size() if dist.is_initialized() else 1
    if saved.endswith("-whole"):
        return how == "ddp"
    return by == 4 and kinds.get(saved, saved) == kinds.get(how, how)


def _go_on(rank: int, root: str, notes: str, ways: list[str]) -> None:
    for how in ways:
        _load(rank, root, notes, [how], how, same=True)


def _load(rank: int, root: str, notes: str, saved: list[str], how: str, same: bool = False) -> None:
    for name in saved:
        model = MODELS[how](2)
        optimizer = torch.optim.AdamW(model.parameters())
        with ckpt.StateManager(
            f"{root}/{name}", model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)
        ) as manager:
            restored = manager.load_state("saved")
        assert {"model", "optimizer"} <= set(restored.restored)
        assert ("model" in restored.resharded) == (restored.resharded != {}) == (not _same_layout(name, how))
        assert state(model, optimizer) == Path(notes, f"{name}.txt").read_text(), f"{name} into {how}"
        if same:
            for number in range(2, 4):
                step(model, optimizer, number)
            assert state(model, optimizer) == Path(notes, f"{name}-later.txt").read_text(), f"{name} goes on"


@dataclass(frozen=True)
class Saved:
    """Checkpoints below a root, each in a folder named after how it was saved, and notes of what is in them."""

    root: Place
    notes: Path

    def save(self, how: str, name: str = "", layout: str = "auto") -> None:
        """Save with four ranks."""
        name = name or how
        assert run_ranks(4, _save, f"{self.root}/{name}", str(self.notes / name), how, layout) == [0] * 4

    def load(self, world_size: int, names: list[str], how: str) -> None:
        """Load each of them."""
        codes = run_ranks(world_size, _load, str(self.root), str(self.notes), names, how)
        assert codes == [0] * world_size


SAVED = ["fsdp2", "hsdp", "tp", "fsdp2-tp", "fsdp1", "fsdp1-flat", "fsdp1-mesh"]


@pytest.fixture(scope="module")
def saved(new_root: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of each way to shard a model, by one job: DTensor looks up every operation anew in a new process."""
    saved = Saved(new_root(), tmp_path_factory.mktemp("notes"))
    assert run_ranks(4, _save_all, str(saved.root), str(saved.notes), SAVED) == [0] * 4
    return saved


@pytest.mark.parametrize("how", cells([*SAVED, "ddp"], often=["fsdp2-tp"]))
def test_what_four_ranks_saved_loads_in_every_other_way_on_four(saved: Saved, how: str) -> None:
    saved.load(4, SAVED, how)


def test_training_goes_on_as_if_uninterrupted(saved: Saved) -> None:
    assert run_ranks(4, _go_on, str(saved.root), str(saved.notes), SAVED) == [0] * 4


@pytest.mark.also_on_s3
def test_what_some_ranks_saved_others_load(root: Place, tmp_path: Path) -> None:
    saved = Saved(root, tmp_path)
    saved.save("fsdp2")
    saved.load(2, ["fsdp2"], "tp")


OTHERS = [
    (1, "ddp"),
    (2, "fsdp2"),
    (2, "ddp"),
    (2, "tp"),
    (2, "fsdp1"),
    (3, "fsdp2"),
    (3, "fsdp1-flat"),
    (8, "fsdp2"),
    (8, "hsdp"),
    (8, "fsdp2-tp"),
]


@pytest.mark.parametrize("how", cells(["fsdp2", "fsdp2-tp", "fsdp1", "fsdp1-flat"], often=["fsdp2-tp", "fsdp1-flat"]))
def test_the_full_layout_is_one_file_that_any_tool_opens(root: Place, tmp_path: Path, how: str) -> None:
    saved, name = Saved(root, tmp_path), f"{how}-whole"
    saved.save(how, name, "full")
    model = safetensors.torch.load((root / name / "saved" / "model.safetensors").read_bytes())
    assert {name: tuple(tensor.shape) for name, tensor in model.items()} == {
        name: tuple(tensor.shape) for name, tensor in plain(0).state_dict().items()
    }
    saved.load(1, [name], "ddp")
    saved.load(2, [name], "fsdp2")


class _FullStorage(PassedOn):
    """A disk that is full when a model comes."""

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        if key.startswith("bad/") and key.endswith("model.safetensors"):
            next(iter(pieces))
            raise ckpt.FullError("no space left")
        super().write(key, pieces, over=over)


def _fail_to_gather(rank: int, root: str) -> None:
    with ckpt.StateManager(
        _FullStorage(root),
        model=MODELS["fsdp2"](1),
        saving=ckpt.SaveOptions(layout="full"),
        ranks=ckpt.RankOptions(timeout=20),
    ) as manager:
        manager.save_state("good")
        with pytest.raises(ckpt.FullError, match="no space left"):
            manager.save_state("bad")
        manager.save_state("better")


def test_a_full_disk_while_gathering_leaves_no_rank_behind(root: Place) -> None:
    assert run_ranks(2, _fail_to_gather, str(root)) == [0, 0]
    assert ckpt.verify(root) == {"better": [], "good": []}


def _read_with_torch_alone(rank: int, root: str, name: str) -> None:
    """Full plain tensors, and a model sharded in another way."""
    mine = {key: torch.zeros_like(value) for key, value in plain(0).state_dict().items()}
    reader = HuggingFaceStorageReader(f"{root}/{name}/saved/model")
    load(mine, storage_reader=reader)
    model = MODELS["fsdp2"](2)
    theirs = model.state_dict()
    load(theirs, storage_reader=HuggingFaceStorageReader(f"{root}/{name}/saved/model"))
    expected = MODELS["ddp"](2)
    optimizer = torch.optim.AdamW(expected.parameters())
    with ckpt.StateManager(f"{root}/{name}", model=expected, optimizer=optimizer) as manager:
        manager.load_state("saved")
    right = exact(whole({key.removeprefix("module."): value for key, value in expected.state_dict().items()}))
    assert exact(mine) == right
    assert exact(whole(theirs)) == right


@pytest.mark.parametrize("name", cells(["fsdp2", "hsdp", "fsdp2-tp", "fsdp1-flat"], often=["hsdp", "fsdp1-flat"]))
def test_torch_alone_reads_a_sharded_checkpoint(saved: Saved, tmp_path: Path, name: str) -> None:
    copy(saved.root / name, Folder(tmp_path) / name)
    assert run_ranks(2, _read_with_torch_alone, str(tmp_path), name) == [0, 0]
    files = list((tmp_path / name).rglob("*.safetensors"))
    assert files
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.keys()


def _disagree(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    rows = 4 if rank == 0 else 6
    shape = torch.Size((rows, 2))
    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1))
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(tensor)
    with (
        ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager,
        pytest.raises(ckpt.RanksError, match=r"weight: float32\[4, 2\] on rank 0; float32\[6, 2\] on rank 1"),
    ):
        manager.save_state("bad", wait=True)


def test_ranks_that_disagree_on_a_shape_are_told_which(root: Place) -> None:
    assert run_ranks(2, _disagree, str(root)) == [0, 0]
    assert not committed(root)


def test_a_missing_ranks_file_is_named_and_nothing_is_loaded(saved: Saved, root: Place) -> None:
    copy(saved.root / "fsdp2" / "saved", root / "fsdp2")
    (root / "fsdp2" / "model" / "00002.safetensors").unlink()
    model = plain(5)
    before = exact(model.state_dict())
    with (
        ckpt.StateManager(root, model=model) as manager,
        pytest.raises(ckpt.DamagedError, match=r"model/00002\.safetensors is missing"),
    ):
        manager.load_state("fsdp2")
    assert exact(model.state_dict()) == before


def _mixed(rank: int, root: str) -> None:
    """A sharded model and one that every rank has, in one manager."""
    models = {"big": MODELS["fsdp2"](1), "small": MODELS["ddp"](1)}
    with ckpt.StateManager(root, model=models, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("mixed")
        before = exact([whole(model.state_dict()) for model in models.values()])
        for model in models.values():
            for parameter in model.parameters():
                torch.nn.init.zeros_(parameter)
        manager.load_state("mixed")
    assert exact([whole(model.state_dict()) for model in models.values()]) == before


def _save_two(rank: int, root: str) -> None:
    model = MODELS["fsdp1"](1)
    with ckpt.StateManager(root, model=model, optimizer=torch.optim.AdamW(model.parameters())) as manager:
        for name in "ab":
            manager.save_state(name)


def _resume_from_a(rank: int, root: str) -> None:
    far = PassedOn(root)
    far.is_local = False  # as on an object store: rank 0 lists the files for all
    model = MODELS["fsdp1"](2)
    with ckpt.StateManager(
        far, model=model, optimizer=torch.optim.AdamW(model.parameters()), ranks=ckpt.RankOptions(timeout=20)
    ) as manager:
        restored = manager.resume()
    assert restored is not None
    assert (restored.name, list(restored.passed_over)) == ("a", ["b"])
    assert exact(whole(model.state_dict())) == exact(whole(MODELS["fsdp1"](1).state_dict()))


@pytest.mark.timeout(120)
def test_under_fsdp1_no_rank_waits_for_one_that_finds_the_checkpoint_damaged(tmp_path: Path) -> None:
    """PyTorch's calls are collective there: the other ranks would wait in them."""
    assert run_ranks(2, _save_two, str(tmp_path)) == [0, 0]
    next((tmp_path / "b" / "model").glob("00001*")).unlink()
    assert run_ranks(2, _resume_from_a, str(tmp_path)) == [0, 0]


def test_a_sharded_and_a_replicated_model_in_one_manager(root: Place) -> None:
    assert run_ranks(2, _mixed, str(root)) == [0, 0]
    files = {name for name in (root / "mixed").files() if name.startswith("model")}
    assert files == {"model.small.safetensors", "model.big/00000.safetensors", "model.big/00001.safetensors"}


def _save_replicated_in_pieces(rank: int, root: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)])
    with ckpt.StateManager(
        root, model=model, saving=ckpt.SaveOptions(layout="sharded"), ranks=ckpt.RankOptions(timeout=30)
    ) as manager:
        manager.save_state("pieces")
        before = exact(model.state_dict())
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        manager.load_state("pieces")
    assert exact(model.state_dict()) == before


def test_what_every_rank_has_is_written_once_and_shared_out_by_size(root: Place) -> None:
    assert run_ranks(2, _save_replicated_in_pieces, str(root)) == [0, 0]
    sizes = list((root / "pieces" / "model").files().values())
    assert len(sizes) == 2
    assert abs(sizes[0] - sizes[1]) < 8192
    assert sum(sizes) < 4 * 201 * 200 * 4 + 2 * 8192


@pytest.mark.parametrize(
    ("world_size", "how"), cells(OTHERS, often=[(1, "ddp"), (2, "tp"), (3, "fsdp1-flat"), (8, "hsdp")])
)
def test_what_four_ranks_saved_loads_on_another_number(saved: Saved, world_size: int, how: str) -> None:
    saved.load(world_size, SAVED, how)
