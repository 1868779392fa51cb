"""Ranks of a host write their shards together: one file for each host and part, which everything reads as any other."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import ckpt
from ckpt.errors import StorageError
from ckpt.formats.layout import Box, Layout
from ckpt.formats.native.shard_table import EVERY, ShardSpec, bands, joined_box, shares
from ckpt.formats.tensors import host_bytes, narrowed
from ckpt.root.verify import repair
from ckpt.save import capture, handover, transaction
from ckpt.storage import open_storage
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, plain, state, step, whole
from tests.helpers.training import exact

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

RANKS = 4  # of two hosts, unless it is said otherwise


def as_if_many(hosts_of: int = 2, *, largest: int = handover.LARGEST) -> None:
    """As if these few ranks were many, so many of them on each host."""
    transaction.TOGETHER, transaction.ALONE, handover.LARGEST = 1, 1, largest
    os.environ["LOCAL_WORLD_SIZE"] = str(hosts_of)


def tensor_files(root: str, name: str) -> list[str]:
    found = (entry.key.removeprefix(f"{name}/") for entry in open_storage(root).list(name))
    return sorted(key for key in found if key.endswith(".safetensors") and not key.startswith("gradients"))


def two(key: str) -> list[str]:
    return [f"{key}/00000.safetensors", f"{key}/00002.safetensors"]


def trained(how: str, seed: int = 1, steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    model = MODELS[how](seed)
    # one operator for all parameters: DTensor takes 20 ms for each that a process calls for the first time
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=how in ("fsdp2", "hsdp"))
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def _save(rank: int, root: str, notes: str, how: str, hosts_of: int, wait: bool, options: dict[str, Any]) -> None:
    as_if_many(hosts_of)
    model, optimizer = trained(how)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, **options) as manager:
        manager.resume()
        manager.save_state("saved", wait=wait)
        Path(notes, f"state-{rank}").write_text(state(model, optimizer))
        step(model, optimizer, 2)
        manager.save_state("later", wait=wait)
        Path(notes, f"later-{rank}").write_text(state(model, optimizer))
        manager.load_state("saved")
        assert state(model, optimizer) == Path(notes, f"state-{rank}").read_text()


def _load(rank: int, root: str, notes: str, how: str) -> None:
    """On any number of ranks, sharded in any way."""
    model, optimizer = trained(how, seed=5, steps=1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.load_state("saved")
        assert state(model, optimizer) == Path(notes, "state-0").read_text()
        restored = manager.load_state("later")
        assert state(model, optimizer) == Path(notes, "later-0").read_text()
        if how == "fsdp2" and dist.get_world_size() == RANKS:
            assert not restored.resharded


@pytest.mark.also_on_s3
@pytest.mark.parametrize("wait", [pytest.param(True, marks=LONG), False])
def test_a_checkpoint_has_one_file_for_each_host_and_part_and_loads_on_any_number_of_ranks(
    root: Place, tmp_path: Path, wait: bool
) -> None:
    run_ranks(RANKS, _save, str(root), str(tmp_path), "fsdp2", 2, wait, {})
    for name in ("saved", "later"):
        assert tensor_files(str(root), name) == [*two("model"), *two("optimizer")]
        objects = [entry.key for entry in open_storage(str(root)).list(name) if "gradients" not in entry.key]
        assert len(objects) <= 2 * 2 + 5, objects
    assert ckpt.verify(str(root)) == {"saved": [], "later": []}
    run_ranks(RANKS, _load, str(root), str(tmp_path), "fsdp2")
    run_ranks(3, _load, str(root), str(tmp_path), "fsdp2")
    run_ranks(2, _load, str(root), str(tmp_path), "hsdp")


@pytest.mark.parametrize(
    ("how", "hosts_of", "files"),
    [
        pytest.param("fsdp2", 4, ["model/00000.safetensors", "optimizer/00000.safetensors"], marks=LONG),
        ("hsdp", 2, ["model/00000.safetensors", "optimizer/00000.safetensors"]),
        pytest.param("hsdp", 4, ["model/00000.safetensors", "optimizer/00000.safetensors"], marks=LONG),
        ("fsdp1", 2, [*two("model"), *two("optimizer")]),
        ("tp", 2, [*two("model"), *two("optimizer")]),
        pytest.param("tp", 4, ["model/00000.safetensors", "optimizer/00000.safetensors"], marks=LONG),
        ("fsdp2-tp", 2, [f"{key}/0000{rank}.safetensors" for key in ("model", "optimizer") for rank in range(4)]),
        ("fsdp2-tp", 4, ["model/00000.safetensors", "optimizer/00000.safetensors"]),
    ],
)
def test_shards_that_are_one_box_of_each_tensor_are_in_one_file_and_others_in_files_of_each_rank(
    tmp_path: Path, how: str, hosts_of: int, files: list[str]
) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _save, root, str(tmp_path), how, hosts_of, True, {})
    assert tensor_files(root, "saved") == files
    assert ckpt.verify(root) == {"saved": [], "later": []}
    run_ranks(2, _load, root, str(tmp_path), "fsdp2")


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "copy"),
    [
        ((7, 9), (4,), ("S1",), 0),
        ((7, 9), (2, 2), ("S0", "S1"), 0),
        ((7, 9), (2, 2), ("S1", "S0"), 0),
        ((5, 4, 6), (2, 2), ("S2", "S1"), 0),
        ((5, 4, 6), (2, 2), ("S0/2", "S0"), 0),
        ((6, 9), (2, 2), ("R", "S1"), 1),
        ((9,), (4,), ("S0",), 0),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 100])  # that are put together at once
def test_the_bytes_of_a_joined_box_are_those_of_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: Any,
    copy: int,
    rows: int,
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    spec, ranks = ShardSpec(whole.dtype, shape, Layout(mesh, (0, 1, 2, 3), placements), copy), range(4)
    monkeypatch.setattr(handover, "_AT_ONCE", rows * 2 * math.prod(shape[1:]))
    sources = {rank: Bytes(narrowed(whole, box.ranges).contiguous()) for rank, box in shares(spec, ranks)}
    joined = joined_box(spec, ranks)
    assert joined == Box((0,) * len(shape), shape)
    found = b"".join(
        bytes(piece) for band in bands(spec, ranks) for piece in handover.rows_of(joined, band, sources, 2)
    )
    assert found == bytes(host_bytes(whole))


def test_of_what_every_rank_writes_nothing_is_joined() -> None:
    assert joined_box(ShardSpec(torch.float32, (), Layout((2,), (0, 1), ("R",)), EVERY), range(2)) is None


class Bytes:
    """The shards of a rank, in pieces of three bytes."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.rest = host_bytes(shard)

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            view, self.rest = self.rest[: min(size, 3)], self.rest[min(size, 3) :]
            size -= len(view)
            yield view


def _read_with_torch(rank: int, root: str, notes: str) -> None:
    reader = HuggingFaceStorageReader(f"{root}/saved/model")
    mine = {key: torch.zeros_like(value) for key, value in plain(0).state_dict().items()}
    load(mine, storage_reader=reader)
    theirs = MODELS["fsdp2"](2).state_dict()
    load(theirs, storage_reader=HuggingFaceStorageReader(f"{root}/saved/model"))
    assert exact(whole(theirs)) == exact(mine)
    if rank == 0:
        torch.save(mine, f"{notes}/torch.pt")


def test_torch_merge_diff_the_mirror_and_a_repair_take_such_files_as_any_others(tmp_path: Path) -> None:
    root, mirror = str(tmp_path / "run"), str(tmp_path / "mirror")
    run_ranks(RANKS, _save, root, str(tmp_path), "fsdp2", 2, False, {"mirror": mirror})
    run_ranks(2, _read_with_torch, root, str(tmp_path))
    of_torch = torch.load(tmp_path / "torch.pt", weights_only=True)
    merged = ckpt.merge(f"{root}/saved", tmp_path / "merged.safetensors")
    assert merged
    with safetensors.safe_open(tmp_path / "merged.safetensors", "pt") as opened:
        assert {name: exact(opened.get_tensor(name)) for name in opened.keys()} == {  # noqa: SIM118
            name: exact(tensor) for name, tensor in of_torch.items()
        }
    assert ckpt.verify(mirror) == {"saved": [], "later": []}
    assert tensor_files(mirror, "later") == [*two("model"), *two("optimizer")]
    assert not ckpt.diff(f"{root}/saved", f"{mirror}/saved")
    assert {found.name.partition(".")[0] for found in ckpt.diff(f"{root}/saved", f"{root}/later").differences} >= {
        "model", "optimizer"
    }  # fmt: skip
    damaged = Path(root, "later", "model", "00002.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert ckpt.verify(f"{root}/later")["later"]
    assert [*repair(open_storage(root), "later", [open_storage(mirror)]).written] == ["model/00002.safetensors"]
    assert ckpt.verify(root) == {"saved": [], "later": []}
    run_ranks(2, _load, mirror, str(tmp_path), "fsdp2")
    with safetensors.safe_open(Path(root, "saved", "model", "00002.safetensors"), "pt") as opened:
        rows = {name: opened.get_slice(name).get_shape()[0] for name in opened.keys()}  # noqa: SIM118
    assert rows["0.weight"] == 8  # of 16: those of ranks 2 and 3


def test_a_signed_checkpoint_has_a_sha256_of_every_block_of_such_files(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _save, root, str(tmp_path), "fsdp2", 2, True, {"saving": ckpt.SaveOptions(sha256=True)})
    for file in ckpt.storage.open_storage(root).list("saved"):
        assert file.size
    from ckpt.root.catalog import read_manifest

    files = {file.name: file for file in read_manifest(open_storage(root), "saved").files}
    assert all(files[name].has_sha256 and files[name].head_sha256 for name in tensor_files(root, "saved"))


def _save_small(rank: int, root: str, largest: int, near: bool) -> None:
    as_if_many(4, largest=largest)
    if not near:
        handover._near = lambda: f"host {rank}"
    model, optimizer = trained("fsdp2")
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for _ in range(2):
            manager.save_state("saved", wait=True)


@pytest.mark.parametrize(
    ("largest", "near", "writers"), [(2500, True, [0, 2]), (1000, True, [0, 1, 2, 3]), (1 << 30, False, [0, 1, 2, 3])]
)
def test_so_few_ranks_write_together_that_files_are_not_too_large_and_none_that_are_apart(
    tmp_path: Path, largest: int, near: bool, writers: list[int]
) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _save_small, root, largest, near)
    found = {int(path.split("/")[1][:5]) for path in tensor_files(root, "saved") if path.startswith("optimizer")}
    assert sorted(found) == writers
    assert ckpt.verify(root) == {"saved": []}


def _with_frozen_layer(how: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = MODELS[how](seed)
    weight, bias, *rest = model.parameters()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    return model, torch.optim.AdamW(rest, lr=0.1, fused=True)


def _partly_frozen(rank: int, root: str, notes: str, worth: int, differs: bool) -> None:
    as_if_many()
    capture._WORTH_A_FILE = worth
    model, optimizer = _with_frozen_layer("fsdp2", 1)
    step(model, optimizer, 0)
    if differs and rank == 1:
        [*model.parameters()][-1].requires_grad_(False)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        manager.save_state("saved", wait=True)
        Path(notes, f"state-{rank}").write_text(state(model, optimizer))
        if not differs:
            step(model, optimizer, 1)
        manager.save_state("later", wait=True)
        model.requires_grad_(True)
        manager.save_state("thawed", wait=True)


def _load_partly_frozen(rank: int, root: str, notes: str, how: str) -> None:
    model, optimizer = _with_frozen_layer(how, 3)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.load_state("saved")
        assert state(model, optimizer) == Path(notes, "state-0").read_text()


def frozen(rank: int) -> str:
    return f"model/0000{rank}+frozen.safetensors"


def test_frozen_tensors_are_linked_by_each_rank_and_what_is_trained_is_written_together(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _partly_frozen, root, str(tmp_path), 64, False)
    for name in ("saved", "later"):
        found = tensor_files(root, name)
        assert sorted(found) == sorted([*map(frozen, range(RANKS)), *two("model"), *two("optimizer")])
    for rank in range(RANKS):
        assert Path(root, "saved", frozen(rank)).samefile(Path(root, "later", frozen(rank)))
    assert tensor_files(root, "thawed") == [*two("model"), *two("optimizer")]
    assert ckpt.verify(root) == {"saved": [], "later": [], "thawed": []}
    run_ranks(RANKS, _load_partly_frozen, root, str(tmp_path), "fsdp2")
    run_ranks(2, _load_partly_frozen, root, str(tmp_path), "hsdp")
    run_ranks(2, _read_with_torch, root, str(tmp_path))
    ckpt.merge(f"{root}/saved", tmp_path / "merged.safetensors")
    with safetensors.safe_open(tmp_path / "merged.safetensors", "pt") as opened:
        merged = {name: exact(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    of_torch = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert merged == {name: exact(tensor) for name, tensor in of_torch.items()}


@pytest.mark.parametrize(
    ("worth", "differs", "files"),
    [
        (capture._WORTH_A_FILE, False, two("model")),
        (64, True, sorted([*map(frozen, range(RANKS)), *(f"model/0000{rank}.safetensors" for rank in range(RANKS))])),
    ],
)
def test_few_frozen_bytes_are_written_with_the_rest_and_ranks_that_froze_others_write_for_themselves(
    tmp_path: Path, worth: int, differs: bool, files: list[str]
) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _partly_frozen, root, str(tmp_path), worth, differs)
    assert [path for path in tensor_files(root, "saved") if path.startswith("model")] == files
    assert ckpt.verify(root) == {"saved": [], "later": [], "thawed": []}
    run_ranks(3, _load_partly_frozen, root, str(tmp_path), "fsdp2")


def _frozen_and_unchanged(rank: int, root: str) -> None:
    as_if_many()
    model = MODELS["fsdp2"](0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        manager.save_state("b", wait=True)


def test_a_part_that_has_not_changed_is_right_in_both_checkpoints(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _frozen_and_unchanged, root)
    assert tensor_files(root, "b")[:2] == two("model")
    assert not ckpt.diff(f"{root}/a", f"{root}/b", part="model")
    assert ckpt.verify(root) == {"a": [], "b": []}


def _kill_at_take(at: int) -> None:
    """This process dies as it hands over or takes bytes for the n-th time."""
    count = 0
    send = handover._Link.send

    def deadly(self: Any, view: memoryview) -> None:
        nonlocal count
        count += 1
        if count == at:
            send(self, view[: len(view) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, view)

    handover._Link.send = deadly  # type: ignore[method-assign]


def _kill_at_write(root: str, prefix: str) -> None:
    kind = type(open_storage(root))
    write = kind.write

    def deadly(self: object, key: str, pieces: Any, **options: object) -> object:
        if key.startswith(prefix):
            for number, _ in enumerate(pieces):
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        return write(self, key, pieces, **options)  # type: ignore[arg-type]

    kind.write = deadly  # type: ignore[method-assign, assignment]


def _leave(rank: int, root: str, victim: int) -> None:
    """End at once. Rank 0 ends last, or another rank would take it for the one that died."""
    Path(f"{root}-ended-{rank}").touch()
    others = [Path(f"{root}-ended-{other}") for other in range(RANKS) if other != victim]
    deadline = time.monotonic() + 60
    while rank == 0 and not all(path.exists() for path in others) and time.monotonic() < deadline:
        time.sleep(0.01)
    if rank == 0 and (frozen := Path(f"{root}-frozen")).exists():
        os.kill(int(frozen.read_text()), signal.SIGKILL)
    os._exit(0)


def _die(rank: int, root: str, victim: int, how: str) -> None:
    as_if_many()
    model, optimizer = trained("fsdp2")
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=3.0)) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        if rank == victim:
            if how == "as it sends":
                _kill_at_take(4)
            else:
                _kill_at_write(root, "b/model")
        with pytest.raises(ckpt.RanksError) as caught:
            manager.save_state("b", wait=True)
        if victim != 0:
            assert f"rank {victim} did not answer" in str(caught.value), str(caught.value)
        _leave(rank, root, victim)


@pytest.mark.parametrize(
    ("victim", "how"), [(3, "as it sends"), pytest.param(1, "as it sends", marks=LONG), (2, "as it writes")]
)
def test_a_rank_that_dies_in_the_middle_is_named_and_its_files_are_swept(tmp_path: Path, victim: int, how: str) -> None:
    root = str(tmp_path / "run")
    codes = run_ranks(RANKS, _die, root, victim, how, dies=True)
    assert codes == [-9 if rank == victim else 0 for rank in range(RANKS)]
    assert [found.name for found in ckpt.list_checkpoints(root)] == ["a"]
    run_ranks(2, _resumes, root, "a")
    assert ckpt.verify(root) == {"a": []}
    assert not Path(root, "b").exists()


def _freeze(rank: int, root: str, victim: int, where: str, hosts_of: int = 2) -> None:
    as_if_many(hosts_of)
    handover._TO_MEET = 3600.0  # it is not by this deadline that the others are told
    model, optimizer = trained("fsdp2")
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=3.0)) as manager:
        manager.resume()
        if rank == victim:
            Path(f"{root}-frozen").write_text(str(os.getpid()))
            kind: Any = handover.Handover if where == "before they meet" else handover._Link
            methods = ("_send", "_accepted") if where == "before they meet" else ("send", "receive")
            method = methods[0 if victim % 2 else 1]
            original = getattr(kind, method)

            def frozen(self: Any, *arguments: Any) -> Any:
                os.kill(os.getpid(), signal.SIGSTOP)
                return original(self, *arguments)

            setattr(kind, method, frozen)
            manager.save_state("b", wait=True)
        with pytest.raises(ckpt.RanksError, match=f"rank {victim} (did not answer|of the same host has not answered)"):
            manager.save_state("b", wait=True)
        _leave(rank, root, victim)


@pytest.mark.parametrize("where", ["before they meet", "in the middle"])
@pytest.mark.parametrize("victim", [1, 2, pytest.param(3, marks=LONG)])
def test_a_rank_that_freezes_is_named(tmp_path: Path, victim: int, where: str) -> None:
    root = str(tmp_path / "run")
    codes = run_ranks(RANKS, _freeze, root, victim, where, dies=True)
    assert codes == [-9 if rank == victim else 0 for rank in range(RANKS)]
    assert list(ckpt.list_checkpoints(root)) == []


def test_a_rank_that_freezes_before_it_says_which_one_it_is_is_named(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    codes = run_ranks(RANKS, _freeze, root, 3, "in the middle", 4, dies=True)
    assert codes == [0, 0, 0, -9]
    assert list(ckpt.list_checkpoints(root)) == []


def _resumes(rank: int, root: str, name: str) -> None:
    model, optimizer = trained("fsdp2", seed=7)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        restored = manager.resume()
        assert restored is not None
        assert restored.name == name


def _fail_once(rank: int, root: str, notes: str) -> None:
    as_if_many()
    model, optimizer = trained("fsdp2")
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        if rank == 2:
            kind = type(open_storage(root))
            write = kind.write

            def failing(self: object, key: str, pieces: Any, **options: object) -> object:
                if key.startswith("b/optimizer"):
                    next(iter(pieces))
                    raise StorageError("the disk of this host is broken.")
                return write(self, key, pieces, **options)  # type: ignore[arg-type]

            kind.write = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(ckpt.StorageError, match=r"rank 2: the disk of this host is broken\."):
            manager.save_state("b", wait=True)
        manager.save_state("c", wait=True)
        Path(notes, f"state-{rank}").write_text(state(model, optimizer))


def test_after_a_save_that_failed_each_rank_writes_for_itself(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _fail_once, root, str(tmp_path))
    assert [found.name for found in ckpt.list_checkpoints(root)] == ["c"]
    assert len(tensor_files(root, "c")) == 2 * RANKS
    assert ckpt.verify(root) == {"c": []}


def _load_counted(rank: int, root: str, notes: str, options: ckpt.RankOptions) -> None:
    read, kind = [0], type(open_storage(root))
    original = kind.read_into

    def counted(self: Any, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        if key.endswith(".safetensors") and "gradients" not in key:
            assert again
            read[0] += sum(map(len, buffers))
        original(self, key, start, *buffers, again=again)

    kind.read_into = counted  # type: ignore[method-assign]
    for seed, steps in ((5, 0), (6, 2)):  # fresh objects, and live ones
        model, optimizer = trained("fsdp2", seed, steps)
        with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=options) as manager:
            manager.load_state("saved")
            assert state(model, optimizer) == Path(notes, "state-0").read_text()
        Path(notes, f"read-{steps}-{rank}").write_text(str(read[0]))
        read[0] = 0


@pytest.mark.parametrize("broadcast", [True, False])
def test_the_ranks_of_a_host_read_such_a_file_once_if_they_broadcast_it_or_else_through_the_page_cache(
    tmp_path: Path, broadcast: bool
) -> None:
    root = str(tmp_path / "run")
    run_ranks(RANKS, _save, root, str(tmp_path), "fsdp2", 4, True, {})
    files = [Path(root, "saved", path) for path in tensor_files(root, "saved")]
    size = sum(file.stat().st_size for file in files)
    run_ranks(RANKS, _load_counted, root, str(tmp_path), ckpt.RankOptions(broadcast=broadcast))
    read = sum(int(Path(tmp_path, f"read-0-{rank}").read_text()) for rank in range(RANKS))
    assert size <= read < 1.1 * size if broadcast else 3 * size < read <= RANKS * 1.1 * size
