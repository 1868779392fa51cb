"""What training does not change is written once, and linked from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import ANY, Buffer
from tests.helpers.places import Folder, PassedOn, Place
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

FROZEN = "model+frozen.safetensors"


def adapted(seed: int) -> Any:
    """A frozen base of a megabyte and more, and a small part that is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(900, 900), nn.Linear(900, 8), nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 1800).reshape(2, 900)).pow(2).sum().backward()
    optimizer.step()


class Noting(PassedOn):
    """Knows what was written to it, and what was linked."""

    def __init__(self, root: Place | str) -> None:
        super().__init__(root)
        self.written: list[str] = []
        self.linked: list[str] = []

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, pieces, over=over)
        self.written.append(key)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.linked.append(target)


def run(root: Place | Noting, names: list[str], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = adapted(1)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with ckpt.StateManager(root, model=model, optimizer=optimizer, **options) as manager:
        for name in names:
            train(model, optimizer)
            manager.save_state(name)
    return model, optimizer


def loads_equal(root: Place, name: str, model: nn.Module) -> bool:
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state(name, strict=False)
    return exact(other.state_dict()) == exact(model.state_dict())


@pytest.mark.also_on_s3
def test_frozen_weights_are_written_once(root: Place) -> None:
    storage = Noting(root)
    model, _ = run(storage, ["a", "b", "c"])
    assert storage.linked == [f"b/{FROZEN}", f"c/{FROZEN}"]
    assert {f"{name}/model.safetensors" for name in "abc"} | {f"a/{FROZEN}"} <= set(storage.written)
    assert ckpt.verify(root) == {"c": [], "b": [], "a": []}
    assert loads_equal(root, "c", model)


@pytest.mark.not_on_s3("the server copies what is linked: there are no hard links")
def test_frozen_weights_are_one_file_in_all_checkpoints(tmp_path: Path) -> None:
    run(Folder(tmp_path) / "all", ["a", "b", "c"])
    assert len({(tmp_path / "all" / name / FROZEN).stat().st_ino for name in "abc"}) == 1
    run(Folder(tmp_path) / "last", ["a", "b", "c"], keep=ckpt.Keep(last=1))
    assert (tmp_path / "last" / "c" / FROZEN).stat().st_nlink == 1


@pytest.mark.also_on_s3
def test_every_checkpoint_stays_whole_when_the_others_are_removed(root: Place) -> None:
    model, _ = run(root, ["a", "b", "c"], keep=ckpt.Keep(last=1))
    assert ckpt.verify(root) == {"c": []}
    assert loads_equal(root, "c", model)


def test_a_frozen_weight_that_was_changed_after_all_is_written_anew(root: Place) -> None:
    model = adapted(1)
    storage = Noting(root)
    with ckpt.StateManager(storage, model=model) as manager:
        manager.save_state("a")
        model[0].weight.data[3, 5] += 1  # unseen by autograd
        manager.save_state("b")
    assert storage.linked == []
    assert loads_equal(root, "b", model)


def test_a_resumed_run_links_to_what_it_has_loaded(root: Place) -> None:
    run(root, ["a"])
    model, storage = adapted(2), Noting(root)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    with ckpt.StateManager(storage, model=model, optimizer=optimizer) as manager:
        manager.resume()
        train(model, optimizer)
        manager.save_state("b")
    assert storage.linked == [f"b/{FROZEN}"]


def test_a_file_that_somebody_has_removed_is_written_anew(root: Place) -> None:
    model = adapted(1)
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=True)
        (root / "a" / FROZEN).unlink()
        manager.save_state("b")
    assert ckpt.verify(root / "b") == {"b": []}


def test_a_checkpoint_that_replaces_another_of_its_name_links_too(root: Place) -> None:
    model, _ = run(root, ["a", "a", "a"])
    assert len([name for name in (root / "a").files() if name.startswith("model+frozen")]) == 1
    assert ckpt.verify(root) == {"a": []}
    assert loads_equal(root, "a", model)


def test_a_model_that_is_frozen_as_a_whole_keeps_its_plain_name(root: Place) -> None:
    teacher, storage = nn.Linear(900, 900).requires_grad_(False), Noting(root)
    with ckpt.StateManager(storage, model={"teacher": teacher}) as manager:
        manager.save_state("a")
        manager.save_state("b")
    assert storage.linked == ["b/model.teacher.safetensors"]


def test_what_is_frozen_and_small_stays_with_the_rest(root: Place) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a")
    assert [name for name in (root / "a").files() if name.startswith("model")] == ["model.safetensors"]


def test_both_files_merge_to_one(root: Place, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = run(root, ["a"])
    ckpt.merge(root / "a", tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact(dict(model.state_dict()))


def save_spread(rank: int, root: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted(1)
    fully_shard(model[0])
    fully_shard(model)
    storage = Noting(root)
    with ckpt.StateManager(storage, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("a")
        for parameter in model[1].parameters():
            nn.init.ones_(parameter)
        manager.save_state("b")
    assert storage.linked == [f"b/model/{rank:05d}+frozen.safetensors"]
    assert f"b/model/{rank:05d}.safetensors" in storage.written


@pytest.mark.slow
def test_every_rank_links_its_own_frozen_pieces(root: Place) -> None:
    assert run_ranks(2, save_spread, str(root)) == [0, 0]
    other = adapted(2)
    with ckpt.StateManager(root, model=other) as manager:
        manager.load_state("b")
    reference = adapted(1)
    assert torch.equal(other[0].weight, reference[0].weight)
    assert torch.equal(other[1].weight, torch.ones(8, 900))


CHUNK = 4096  # rows of 256 bytes: a megabyte, and the rewards


class Replay:
    """A ring of rows that is saved in chunks of a tensor and a NumPy array."""

    def __init__(self, chunks: int) -> None:
        self.rows, self.rewards, self.seen = torch.zeros(chunks * CHUNK, 64), np.zeros(chunks * CHUNK), 0

    def add(self, count: int) -> None:
        numbers = np.arange(self.seen, self.seen + count)
        self.rows[numbers % len(self.rows)] = torch.from_numpy(numbers).float()[:, None]
        self.rewards[numbers % len(self.rows)] = numbers
        self.seen += count

    def state_dict(self) -> dict[str, Any]:
        starts = range(0, min(self.seen, len(self.rows)), CHUNK)
        places = [slice(start, min(start + CHUNK, self.seen)) for start in starts]
        return {"seen": self.seen, "chunks": [{"x": self.rows[at], "reward": self.rewards[at]} for at in places]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        for number, chunk in enumerate(state["chunks"]):
            at = slice(number * CHUNK, number * CHUNK + len(chunk["x"]))
            self.rows[at], self.rewards[at] = chunk["x"], chunk["reward"]

    def equals(self, other: Replay) -> bool:
        same = torch.equal(self.rows, other.rows) and bool((self.rewards == other.rewards).all())
        return same and self.seen == other.seen


def replaying(root: Place | Noting | str, replay: Any, **options: Any) -> ckpt.StateManager:
    manager = ckpt.StateManager(root, ranks=ckpt.RankOptions(timeout=60))
    manager.register(replay=replay, **{"chunked": True, **options})
    return manager


def written_and_linked(storage: Noting, name: str) -> tuple[set[str], set[str]]:
    """The files of tensors that a save has written, and those that it has linked."""

    def of_save(paths: list[str]) -> set[str]:
        return {path.removeprefix(f"{name}/") for path in paths if path.startswith(f"{name}/replay")}

    return of_save(storage.written), of_save(storage.linked)


def chunks(*numbers: int, part: str = "replay") -> set[str]:
    return {f"{part}+chunks.{number}.safetensors" for number in numbers}


REST = "replay.safetensors"  # with the last chunk, as long as it is small


@pytest.mark.also_on_s3
def test_the_full_chunks_of_a_replay_buffer_that_grows_are_written_once(root: Place) -> None:
    replay, storage = Replay(4), Noting(root)
    with replaying(storage, replay) as manager:
        for name, count in (("a", CHUNK + 10), ("b", 10), ("c", CHUNK)):
            replay.add(count)
            manager.save_state(name)
    assert written_and_linked(storage, "a") == ({*chunks(0), REST}, set())
    assert written_and_linked(storage, "b") == ({REST}, chunks(0))
    assert written_and_linked(storage, "c") == ({*chunks(1), REST}, chunks(0))
    resumed, storage = Replay(4), Noting(root)
    with replaying(storage, resumed) as manager:
        manager.resume()
        assert resumed.equals(replay)
        resumed.add(1)
        manager.save_state("d")
    assert written_and_linked(storage, "d") == ({REST}, chunks(0, 1))
    assert ckpt.verify(root) == {name: [] for name in "dcba"}


def test_of_a_ring_only_the_chunks_with_new_rows_are_written_again(root: Place) -> None:
    replay, storage = Replay(4), Noting(root)
    with replaying(storage, replay, per_rank=True) as manager:
        for name, count in (("a", 4 * CHUNK), ("b", CHUNK // 2), ("c", CHUNK)):
            replay.add(count)
            manager.save_state(name)
    part = "replay-00000"
    assert written_and_linked(storage, "b") == (chunks(0, part=part), chunks(1, 2, 3, part=part))
    assert written_and_linked(storage, "c") == (chunks(0, 1, part=part), chunks(2, 3, part=part))
    for name, halves in (("a", 8), ("c", 11)):
        expected, loaded = Replay(4), Replay(4)
        for _ in range(halves):  # of rows that are added at once, no two may have one place
            expected.add(CHUNK // 2)
        with replaying(root, loaded, per_rank=True) as manager:
            manager.load_state(name)
        assert loaded.equals(expected)


def test_a_buffer_loads_whether_it_was_saved_in_chunks_or_not(root: Place) -> None:
    replay = Replay(2)
    replay.add(2 * CHUNK)
    for name, chunked in (("whole", False), ("chunks", True), ("chunks", True)):  # the third replaces the second
        with replaying(root, replay, chunked=chunked) as manager:
            manager.resume()
            manager.save_state(name)
        loaded = Replay(2)
        with replaying(root, loaded, chunked=not chunked) as manager:
            manager.load_state(name)
        assert loaded.equals(replay)
    assert ckpt.verify(root) == {"chunks": [], "whole": []}
    assert not ckpt.diff(root / "whole", root / "chunks")


class Lists:
    """Any state with lists in it."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


LARGE, SMALL = torch.ones(1 << 18), torch.ones(8)
UNSUITABLE = {"it's": [LARGE.clone()], "a/b": [LARGE.clone()], "c" * 101: [LARGE.clone()]}  # for names of files


@pytest.mark.parametrize(
    ("state", "files"),
    [
        ([LARGE, SMALL], {"replay+0.safetensors", REST}),
        ({"few": [SMALL] * 3, "alone": LARGE}, {REST}),
        ({"in": {"x": ({"y": (SMALL, [LARGE])}, SMALL)}}, {"replay+in.x.0.safetensors", REST}),
        ({"optimizer": {0: {"exp_avg": LARGE}}}, {"replay+optimizer.0.safetensors"}),
        (UNSUITABLE, {REST}),
    ],
)
def test_an_item_of_a_list_has_a_file_if_it_takes_a_megabyte_and_can_name_one(
    root: Place, state: Any, files: set[str]
) -> None:
    storage = Noting(root)
    with replaying(storage, Lists(state)) as manager:
        manager.save_state("a")
    assert written_and_linked(storage, "a") == (files, set())
    with replaying(root, loaded := Lists()) as manager:
        manager.load_state("a")
    assert repr(loaded.state) == repr(state)


def test_what_has_no_lists_cannot_be_saved_in_chunks(root: Place) -> None:
    for value in (nn.Linear(2, 2), torch.Generator(), 3):
        with pytest.raises(ckpt.ConfigError, match=f"chunked=True is for .* a {type(value).__name__} is not"):
            replaying(root, value)
    with pytest.raises(ckpt.ConfigError, match=r"chunked=.* must be True or False"):
        replaying(root, Lists(), chunked=Lists())


def save_and_load_a_ring(rank: int, root: str, per_rank: bool) -> None:
    replay, storage = Replay(2), Noting(root)
    with replaying(storage, replay, per_rank=per_rank) as manager:
        for name, count in (("a", 2 * CHUNK), ("b", 10)):
            replay.add(count)
            replay.rows[5] = rank  # in the first chunk
            manager.save_state(name)
    part = f"replay-{rank:05d}" if per_rank else "replay"
    if per_rank or rank == 0:
        assert written_and_linked(storage, "b") == (chunks(0, part=part), chunks(1, part=part))
    with replaying(root, loaded := Replay(2), per_rank=per_rank) as manager:
        manager.load_state("b")
    assert loaded.equals(replay)


@pytest.mark.slow
@pytest.mark.parametrize("per_rank", [True, False])
def test_every_rank_writes_the_chunks_that_have_changed_of_its_own_buffer(root: Place, per_rank: bool) -> None:
    assert run_ranks(2, save_and_load_a_ring, str(root), per_rank) == [0, 0]


def _save_two_rows(rank: int, root: str, is_frozen: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(600_000, 2, bias=False).requires_grad_(not is_frozen)
    fully_shard(model)
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("a")


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_rank_that_has_nothing_of_a_sharded_model_writes_no_file(tmp_path: Path, is_frozen: bool) -> None:
    run_ranks(3, _save_two_rows, str(tmp_path / "run"), is_frozen)
    found = sorted(path.name for path in Path(tmp_path, "run", "a", "model").iterdir())
    assert found == ["00000.safetensors", "00001.safetensors"]
