"""Saves of several ranks, each a thread of this process: who writes what, and what all of them refuse."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import ckpt
from ckpt.formats.layout import Members
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.load.reader import CheckpointReader
from ckpt.ranks.hosts import Hosts
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import BuiltManagers, StoreGroup
from ckpt.root.catalog import find
from ckpt.root.write_link_commit import Attempt
from ckpt.save import transaction
from ckpt.save.capture import StateCapture
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver, SaveReport
from ckpt.save.transaction import SaveRequest, name_straggler
from ckpt.state import rng
from ckpt.state.model import ModelPart
from ckpt.state.parts import ObjectPart, Part, RankObjectPart, Replication
from ckpt.storage import MemoryStorage, Storage


@dataclass
class Counter:
    """A user's object."""

    value: Any
    of_main_rank: bool = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass
class Rank:
    """One rank of the job: its saver, and its objects."""

    saver: Saver
    parts: list[Part]
    own: dict[str, Part] = field(default_factory=dict)
    layout: str = "auto"

    def save(self, name: str = "a", *, amends: bool = False, **options: Any) -> None:
        root = self.saver.root
        state = {"rng": rng.capture(), "generators": {}, "loaders": {}, "values": {"rank": root.ranks.rank}}
        capture = StateCapture(root.ranks, self.layout, root.hosts, self.saver.compared)
        facts = {"progress": {"step": 3}, "metrics": {"loss": 0.5}}
        request = SaveRequest(name, lambda: capture.capture(self.parts, self.own, state), facts, amends=amends)
        self.saver.save(request, **{"wait": True, **options})


def job(size: int, storages: Callable[[int], Storage], hosts: Hosts | None = None, **options: Any) -> list[Rank]:
    store = TimedStore(HashStore(), 20.0)
    groups = [StoreGroup(store.below("group"), rank, size, 20.0, store, BuiltManagers()) for rank in range(size)]
    hosts = hosts or Hosts()
    return [Rank(Saver(RootWriter(storages(group.rank), group, hosts=hosts, **options)), []) for group in groups]


def everywhere(ranks: list[Rank], do: Callable[[Rank], Any]) -> list[str]:
    """Do it on all ranks at the same time. Returns what each has raised; empty where it has not."""
    raised = [""] * len(ranks)

    def run(number: int) -> None:
        try:
            do(ranks[number])
        except Exception as error:
            raised[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.saver.close()


def linear(value: float, size: int = 2) -> nn.Linear:
    made = nn.Linear(size, size)
    nn.init.constant_(made.weight, value)
    nn.init.constant_(made.bias, value)
    return made


def manifest_of(storage: Storage, name: str = "a") -> Manifest:
    found = find(storage, name).manifest
    assert found is not None
    return found


def state_of(storage: Storage, rank: int, key: str, name: str = "a") -> Any:
    """What a rank would load of a part, where as many ranks load it as saved it; None if it has none."""
    reader = CheckpointReader(storage, manifest_of(storage, name), rank)
    reader.per_rank = True
    if not reader.has(key):
        return None
    read = reader.ask(key)
    reader.read_new()
    return read()


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Storage:
    return MemoryStorage(f"threads-{request.node.name}-{id(request)}")


def test_what_all_ranks_have_alike_is_written_once_with_a_document_of_each(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, write = list[bool](), Attempt.write

    def noted(self: Attempt, *args: Any, show: Callable[[], bool]) -> Any:
        shown.append(show())
        return write(self, *args, show=False)

    monkeypatch.setattr(Attempt, "write", noted)
    ranks = job(3, lambda _: shared)
    for number, rank in enumerate(ranks):
        rank.parts = [ModelPart("model", linear(1.0)), ObjectPart("counter", Counter([1, torch.ones(2)]))]
        rank.own = {f"mine-{number:05}": RankObjectPart(f"mine-{number:05}", Counter(number))}
    assert everywhere(ranks, Rank.save) == [""] * 3
    assert [rank.saver.root.held is not None for rank in ranks] == [True, False, False]
    assert sorted(shown) == [False, False, True]  # on the main rank
    close(ranks)
    saved = manifest_of(shared)
    assert (saved.world_size, saved.layout, saved.step, saved.metrics) == (3, "full", 3, {"loss": 0.5})
    assert {file.path for file in saved.files} == {
        "model.safetensors", "counter.safetensors", "state.json", *(f"rank-0000{number}.json" for number in range(3))
    }  # fmt: skip
    assert 0 <= saved.seconds["blocked"] == saved.seconds["total"] > saved.seconds["written"] > 0
    assert all(0 <= value <= saved.seconds["total"] for value in saved.seconds.values())
    for number in range(3):
        reader = CheckpointReader(shared, saved, number)
        assert (reader.state["values"], reader.has(f"mine-{number:05}")) == ({"rank": number}, True)
        assert reader.differs("model") == {}
        assert torch.equal(state_of(shared, number, "model")["weight"], torch.ones(2, 2))
    assert ckpt.verify(shared.url) == {"a": []}


@pytest.mark.parametrize("wait", [True, False])
def test_state_that_differs_is_saved_by_each_rank_that_has_another(
    shared: Storage, caplog: pytest.LogCaptureFixture, wait: bool
) -> None:
    ranks = job(3, lambda _: shared)
    for number, rank in enumerate(ranks):
        model = nn.Sequential(linear(1.0), linear(float(number == 1)))
        rank.parts = [ModelPart("model", model), ObjectPart("counter", Counter(number == 2))]
        rank.parts.append(ObjectPart("mains", Counter(number, of_main_rank=True)))
        if number == 0:
            rank.parts.append(ObjectPart("first", Counter("first")))
        if number == 2:
            rank.parts.append(ObjectPart("last", Counter(torch.full((2,), 7.0))))
    with caplog.at_level(logging.INFO, "ckpt"):
        assert everywhere(ranks, lambda rank: rank.save(wait=wait)) == [""] * 3
        assert everywhere(ranks, lambda rank: rank.saver.wait()) == [""] * 3
        assert everywhere(ranks, lambda rank: rank.save("b")) == [""] * 3
    close(ranks)
    for name in ("a", "b"):
        saved = manifest_of(shared, name)
        own = {file.path for file in saved.files if "-own-" in file.path}
        assert own == {"model-own-00001.safetensors", "last-own-00002.safetensors"}
        for number in range(3):
            model = state_of(shared, number, "model", name)
            assert torch.equal(model["0.weight"], torch.ones(2, 2))
            assert torch.equal(model["1.bias"], torch.full((2,), float(number == 1)))
            assert state_of(shared, number, "counter", name) == {"value": number == 2}
            assert state_of(shared, number, "mains", name) == {"value": 0}
            assert state_of(shared, number, "first", name) == ({"value": "first"} if number == 0 else None)
        assert torch.equal(state_of(shared, 2, "last", name)["value"], torch.full((2,), 7.0))
        reader = CheckpointReader(shared, saved, 0)
        assert reader.differs("model") == {"tensors": {"1.weight": [1], "1.bias": [1]}, "values": []}
        assert reader.differs("counter") == {"tensors": {}, "values": [2]}
        assert reader.differs("first") == {"tensors": {}, "values": [1, 2]}
        assert [CheckpointReader(shared, saved, number).lacks("first") for number in range(3)] == [False] * 3
    (said,) = (record for record in caplog.records if "ranks hold different state" in record.message)
    assert said.levelno == logging.WARNING
    assert "model (1.weight, 1.bias on rank 1)" in said.message
    assert "counter (values on rank 2)" in said.message
    assert "Only a job of 3 ranks can restore that state exactly." in said.message
    assert ckpt.verify(shared.url) == {"a": [], "b": []}


def test_tensors_that_only_some_ranks_have_are_one_model_for_any_ranks(shared: Storage) -> None:
    ranks = job(2, lambda _: shared)
    for number, rank in enumerate(ranks):
        rank.parts = [ModelPart("model", nn.ModuleDict({f"stage{number}": linear(number + 1.0), "all": linear(5.0)}))]
    assert everywhere(ranks, Rank.save) == [""] * 2
    close(ranks)
    values = {"stage0": 1.0, "stage1": 2.0, "all": 5.0}
    for number in range(2):
        found = state_of(shared, number, "model")
        assert {name: float(tensor.mean()) for name, tensor in found.items()} == {
            f"{part}.{name}": value for part, value in values.items() for name in ("weight", "bias")
        }


def test_a_parameter_under_another_name_is_refused_on_all_ranks_and_nothing_is_left(shared: Storage) -> None:
    ranks = job(3, lambda _: shared)
    for number, rank in enumerate(ranks):
        names = ("body", "tail", "head" if number < 2 else "haed")
        rank.parts = [ModelPart("model", nn.ModuleDict({name: linear(1.0) for name in names}))]
    raised = everywhere(ranks, Rank.save)
    assert len(set(raised)) == 1
    assert "parameters of one model have different names on different ranks" in raised[0]
    assert "model: haed.bias, haed.weight on rank 2; head.bias, head.weight on ranks 0, 1" in raised[0]
    close(ranks)
    assert [entry.key for entry in shared.list() if not entry.key.startswith(".")] == []


def test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing(shared: Storage) -> None:
    ranks = job(3, lambda _: shared)
    for number, rank in enumerate(ranks):
        rank.parts = [ObjectPart("counter", Counter(print if number == 1 else 1))]
    raised = everywhere(ranks, Rank.save)
    assert all("rank 1" in error and "counter" in error for error in raised), raised
    for rank in ranks:
        rank.parts = [ObjectPart("counter", Counter(1))]
    assert everywhere(ranks, Rank.save) == [""] * 3
    close(ranks)
    assert ckpt.verify(shared.url) == {"a": []}


class TestHostsWithRootsOfTheirOwn:
    @pytest.fixture
    def roots(self, tmp_path: Path) -> Mapping[int, Storage]:
        storages = {number: ckpt.storage.open_storage(tmp_path / f"host{number}") for number in (0, 1)}
        return {0: storages[0], 1: storages[0], 2: storages[1], 3: storages[1]}

    def ranks(self, roots: Mapping[int, Storage]) -> list[Rank]:
        hosts = Hosts((0, 0, 2, 2), ("one", "one", "two", "two"))
        ranks = job(4, roots.__getitem__, hosts)
        for number, rank in enumerate(ranks):
            rank.parts = [ModelPart("model", linear(1.0))]
            rank.own = {
                f"mine-{number:05}": RankObjectPart(f"mine-{number:05}", Counter(torch.full((2,), float(number))))
            }
        return ranks

    def test_each_has_a_whole_checkpoint_but_for_what_ranks_elsewhere_have_alone(
        self, roots: Mapping[int, Storage]
    ) -> None:
        ranks = self.ranks(roots)
        for name in ("a", "b"):
            assert everywhere(ranks, lambda rank, name=name: rank.save(name)) == [""] * 4  # type: ignore[misc]
        assert [rank.saver.root.held is not None for rank in ranks] == [True, False, True, False]
        close(ranks)
        for name in ("a", "b"):
            saved = manifest_of(roots[0], name)
            assert saved == manifest_of(roots[2], name)
            assert [(host.name, host.ranks) for host in saved.hosts] == [("one", (0, 1)), ("two", (2, 3))]
            common = {"model.safetensors", "state.json", FILE_NAME, COPY_NAME}
            common |= {f"rank-0000{number}.json" for number in range(4)}
            for root, mine in ((roots[0], (0, 1)), (roots[2], (2, 3))):
                files = {entry.key.removeprefix(f"{name}/") for entry in root.list(name)}
                assert files == common | {f"mine-{number:05}.safetensors" for number in mine}
        for root in (roots[0], roots[2]):
            assert ckpt.verify(root.url) == {"a": [], "b": []}

    def test_of_shards_each_host_has_all_that_its_ranks_read(self, roots: Mapping[int, Storage]) -> None:
        ranks = self.ranks(roots)
        for rank in ranks:
            rank.layout = "sharded"
        assert everywhere(ranks, Rank.save) == [""] * 4
        close(ranks)
        for number in range(4):
            assert torch.equal(state_of(roots[number], number, "model")["weight"], torch.ones(2, 2))
        for root in (roots[0], roots[2]):
            assert ckpt.verify(root.url) == {"a": []}

    def test_stages_are_one_model_of_which_each_host_has_what_its_ranks_hold(
        self, roots: Mapping[int, Storage]
    ) -> None:
        ranks = self.ranks(roots)
        for number, rank in enumerate(ranks):
            rank.layout = "sharded"
            rank.parts = [ModelPart("model", nn.ModuleDict({f"stage{number // 2}": linear(number // 2 + 1.0)}))]
        assert everywhere(ranks, Rank.save) == [""] * 4
        close(ranks)
        for number in range(4):
            files = {entry.key for entry in roots[number].list("a")}
            assert any(f"0000{number}" in key and "model" in key for key in files), (number, files)

    def test_copies_must_be_the_same(self, roots: Mapping[int, Storage]) -> None:
        ranks = self.ranks(roots)
        ranks[2].parts = [ModelPart("model", linear(2.0))]
        raised = everywhere(ranks, Rank.save)
        assert len(set(raised)) == 1
        assert raised[0].startswith("RanksError")
        close(ranks)
        for root in (roots[0], roots[2]):
            assert not any(found.committed for found in ckpt.list_checkpoints(root.url))

    def test_where_a_host_cannot_write_the_manifest_its_next_load_does(
        self, roots: Mapping[int, Storage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks, write = self.ranks(roots), roots[2].write

        def fails(key: str, pieces: Any, **options: Any) -> Any:
            if key.endswith(FILE_NAME):
                raise ckpt.StorageError("no room")
            return write(key, pieces, **options)

        with monkeypatch.context() as patch:
            patch.setattr(roots[2], "write", fails)
            assert everywhere(ranks, Rank.save) == [""] * 4
        assert caplog.text.count("a is committed, but ckpt could not write its manifest on this host: no room") == 1
        saved = manifest_of(roots[0])
        assert not find(roots[2], "a").committed
        for rank in ranks:
            rank.saver.root.follow(saved, ())
        assert manifest_of(roots[2]) == saved
        assert everywhere(ranks, lambda rank: rank.save("b")) == [""] * 4
        close(ranks)
        for root in (roots[0], roots[2]):
            assert ckpt.verify(root.url) == {"a": [], "b": []}

    def test_where_nothing_is_to_be_amended_nothing_is_left_on_any(self, roots: Mapping[int, Storage]) -> None:
        ranks = self.ranks(roots)
        for rank in ranks:
            rank.layout = "sharded"
        assert everywhere(ranks, Rank.save) == [""] * 4
        before = manifest_of(roots[0]), [{entry.key for entry in roots[number].list("a")} for number in (0, 2)]
        for _ in range(2):
            assert everywhere(ranks, lambda rank: rank.save(amends=True)) == [""] * 4
            assert before == (
                manifest_of(roots[0]), [{entry.key for entry in roots[number].list("a")} for number in (0, 2)]
            )  # fmt: skip
        ranks[3].own = {"mine-00003": RankObjectPart("mine-00003", Counter(torch.full((2,), 9.0)))}
        assert everywhere(ranks, lambda rank: rank.save(amends=True)) == [""] * 4
        close(ranks)
        assert manifest_of(roots[0]).id == manifest_of(roots[2]).id != before[0].id
        assert torch.equal(state_of(roots[3], 3, "mine-00003")["value"], torch.full((2,), 9.0))
        for root in (roots[0], roots[2]):
            assert ckpt.verify(root.url) == {"a": []}

    def test_one_that_cannot_begin_keeps_all_from_writing(self, roots: Mapping[int, Storage]) -> None:
        ranks = self.ranks(roots)
        other = ckpt.storage.open_storage(roots[2].url)
        with other.lock(".lock"):
            raised = everywhere(ranks, Rank.save)
        assert all("another run writes to" in error for error in raised)
        assert not list(roots[2].list("a"))
        close(ranks)


def test_a_save_that_waits_gives_its_place_only_where_it_waits_on_all_ranks(
    shared: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    class Gated(MemoryStorage):
        """Writes files of `first` when the gate is open."""

        def write(self, key: str, pieces: Any, **options: Any) -> None:
            if key.startswith("first/model"):
                gate.wait(20)
            super().write(key, pieces, **options)

    gate, gated = threading.Event(), Gated(f"gated-{id(shared)}")
    ranks = job(2, lambda _: gated)
    for rank in ranks:
        rank.parts = [ModelPart("model", linear(1.0))]
    with caplog.at_level(logging.INFO, "ckpt"):
        for name in ("first", "second", "third", "fourth"):
            do = {"wait": False, "replace": True}
            assert everywhere(ranks, lambda rank, name=name, do=do: rank.save(name, **do)) == [""] * 2  # type: ignore[misc]
        assert all(rank.saver.busy for rank in ranks)
        busy: list[bool] = []
        everywhere(ranks, lambda rank: busy.append(rank.saver.is_busy_anywhere("fifth")))
        assert busy == [True, True]
        gate.set()
        assert everywhere(ranks, lambda rank: rank.saver.wait()) == [""] * 2
        everywhere(ranks, lambda rank: busy.append(rank.saver.is_busy_anywhere("fifth")))
        assert busy[2:] == [False, False]
    replaced = [record for record in caplog.records if " instead, " in record.message]
    assert [(record.levelname, record.args) for record in replaced] == [
        ("WARNING", ("second", "third")), ("INFO", ("third", "fourth"))
    ]  # fmt: skip
    assert [record.message for record in caplog.records].count(
        "ckpt skips fifth, because it is still writing the previous save"
    ) == 1
    close(ranks)
    assert "ckpt skipped 2 saves" in caplog.text
    assert [found.name for found in ckpt.list_checkpoints(gated.url)] == ["fourth", "first"]


@pytest.mark.parametrize(("most", "writers"), [(1, {0, 1}), (2, {0})])
def test_of_many_ranks_those_that_write_files_write_documents_too_that_are_too_long_for_lines(
    shared: Storage, monkeypatch: pytest.MonkeyPatch, most: int, writers: set[int]
) -> None:
    monkeypatch.setattr(transaction, "ALONE", most)
    monkeypatch.setattr(transaction, "LONGEST_JOINED", 1)
    ranks = job(2, lambda _: shared)
    for number, rank in enumerate(ranks):
        rank.own = {f"mine-{number:05}": RankObjectPart(f"mine-{number:05}", Counter(torch.ones(2)))}
    assert everywhere(ranks, Rank.save) == [""] * 2
    wrote = {rank.saver.root.ranks.rank for rank in ranks for file in rank.saver.root.links.files if "rank-" in file}
    assert wrote == writers
    close(ranks)
    assert ckpt.verify(shared.url) == {"a": []}


class Replica(ModelPart):
    """A model that is said to be equal on all ranks, as DistributedDataParallel keeps it."""

    def replication(self, state: Any, members: Members) -> Replication:
        return Replication(equal=frozenset(state))


class TestShardedLayout:
    def ranks(self, storage: Storage, size: int, models: Callable[[int], nn.Module]) -> list[Rank]:
        ranks = job(size, lambda _: storage)
        for number, rank in enumerate(ranks):
            rank.parts, rank.layout = [ModelPart("model", models(number))], "sharded"
        return ranks

    def test_plain_tensors_are_shared_out_over_the_ranks_each_written_once(self, shared: Storage) -> None:
        ranks = self.ranks(shared, 2, lambda _: nn.Sequential(linear(1.0, 600), linear(2.0, 600)))
        assert everywhere(ranks, Rank.save) == [""] * 2
        close(ranks)
        saved = manifest_of(shared)
        assert saved.layout == "sharded"
        files = {file.path for file in saved.files if file.path.startswith("model")}
        assert files == {"model/00000.safetensors", "model/00001.safetensors"}
        for number in range(2):
            found = state_of(shared, number, "model")
            assert {name: float(tensor.mean()) for name, tensor in found.items()} == {
                "0.weight": 1.0, "0.bias": 1.0, "1.weight": 2.0, "1.bias": 2.0
            }  # fmt: skip

    @pytest.mark.parametrize("other", [0, 1, 2])
    def test_a_rank_that_has_other_values_keeps_them(self, shared: Storage, other: int) -> None:
        ranks = self.ranks(shared, 3, lambda number: nn.Sequential(linear(1.0), linear(float(number == other))))
        assert everywhere(ranks, Rank.save) == [""] * 3
        close(ranks)
        for number in range(3):
            found = state_of(shared, number, "model")
            assert torch.equal(found["0.weight"], torch.ones(2, 2))
            assert torch.equal(found["1.bias"], torch.full((2,), float(number == other)))
            assert torch.equal(found["1.weight"], torch.full((2, 2), float(number == other)))
        assert ckpt.verify(shared.url) == {"a": []}

    def test_tensors_that_only_some_ranks_have_are_one_model(self, shared: Storage) -> None:
        stages = ({"stage0": 1.0, "all": 5.0}, {"stage1": 2.0, "all": 5.0}, {"stage1": 2.0, "all": 6.0})
        ranks = self.ranks(
            shared, 3, lambda number: nn.ModuleDict({name: linear(value) for name, value in stages[number].items()})
        )
        assert everywhere(ranks, Rank.save) == [""] * 3
        close(ranks)
        for number in range(3):
            found = {name: float(tensor.mean()) for name, tensor in state_of(shared, number, "model").items()}
            assert (found.get("stage0.weight"), found["stage1.weight"]) == (None if number == 2 else 1.0, 2.0)
            assert (found["all.bias"], found["all.weight"]) == ((6.0, 6.0) if number == 2 else (5.0, 5.0))

    def test_ranks_that_write_in_different_ways_are_refused(self, shared: Storage) -> None:
        ranks = self.ranks(shared, 2, lambda _: linear(1.0))
        ranks[1].layout = "auto"
        raised = everywhere(ranks, Rank.save)
        assert len(set(raised)) == 1
        assert "model: in pieces on rank 0; whole or not there on rank 1" in raised[0]
        close(ranks)


class TestDrift:
    def test_what_should_be_equal_and_is_not_is_refused_behind_training_and_kept_apart_before_it(
        self, shared: Storage, caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks = job(3, lambda _: shared)
        for number, rank in enumerate(ranks):
            rank.parts = [Replica("model", nn.Sequential(linear(1.0), linear(float(number == 1))))]
        everywhere(ranks, lambda rank: rank.save("a", wait=False))
        raised = everywhere(ranks, lambda rank: rank.saver.wait())
        assert len(set(raised)) == 1
        assert "nothing was saved, because replicas that should be equal have drifted apart" in raised[0]
        assert "model.1.weight: differs between rank 1 and rank 0" in raised[0]
        assert "model.0" not in raised[0]
        assert not any(found.committed for found in ckpt.list_checkpoints(shared.url))
        assert [rank.saver.compared.trusted for rank in ranks] == [False] * 3  # from now on each keeps its own
        for wait in (True, False):
            caplog.clear()
            assert everywhere(ranks, lambda rank, wait=wait: rank.save(f"{wait}", wait=wait)) == [""] * 3  # type: ignore[misc]
            assert everywhere(ranks, lambda rank: rank.saver.wait()) == [""] * 3
            assert ("replicas that should be equal have drifted apart: ranks hold" in caplog.text) == wait  # once
            for number in range(3):
                found = state_of(shared, number, "model", f"{wait}")
                assert torch.equal(found["1.weight"], torch.full((2, 2), float(number == 1)))
        close(ranks)

    def test_where_training_waits_it_is_captured_again_at_once(self, shared: Storage) -> None:
        ranks = job(2, lambda _: shared)
        for number, rank in enumerate(ranks):
            rank.parts = [Replica("model", linear(float(number)))]
        assert everywhere(ranks, Rank.save) == [""] * 2
        close(ranks)
        for number in range(2):
            assert torch.equal(state_of(shared, number, "model")["weight"], torch.full((2, 2), float(number)))

    def test_what_is_equal_is_written_once_and_only_compared(self, shared: Storage) -> None:
        ranks = job(2, lambda _: shared)
        for rank in ranks:
            rank.parts = [Replica("model", linear(1.0))]
        assert everywhere(ranks, lambda rank: rank.save(wait=False)) == [""] * 2
        assert everywhere(ranks, lambda rank: rank.saver.wait()) == [""] * 2
        assert [rank.saver.compared.trusted for rank in ranks] == [True] * 2
        seconds = manifest_of(shared).seconds
        assert 0 <= seconds["blocked"] < seconds["total"]
        assert all(0 <= value <= seconds["total"] for value in seconds.values())
        close(ranks)


def test_tied_tensors_that_differ_are_saved_with_what_they_are_tied_to(shared: Storage) -> None:
    ranks = job(2, lambda _: shared)
    for number, rank in enumerate(ranks):
        model = nn.ModuleDict({"a": linear(float(number)), "b": linear(3.0)})
        model["b"].weight = model["a"].weight
        rank.parts = [ModelPart("model", model)]
    assert everywhere(ranks, Rank.save) == [""] * 2
    close(ranks)
    for number in range(2):
        found = state_of(shared, number, "model")
        assert torch.equal(found["a.weight"], torch.full((2, 2), float(number)))
        assert torch.equal(found["b.weight"], found["a.weight"])
        assert torch.equal(found["b.bias"], torch.full((2,), 3.0))


@pytest.mark.parametrize("wait", [True, False])
def test_frozen_tensors_have_a_file_of_their_own_that_the_next_save_links(tmp_path: Path, wait: bool) -> None:
    storage = ckpt.storage.open_storage(tmp_path)
    ranks = job(2, lambda _: storage)
    frozen, trained = nn.Linear(600, 600).requires_grad_(False), linear(1.0)
    for rank in ranks:
        rank.parts = [Replica("model", nn.Sequential(frozen, trained))]
        rank.saver.reports.callbacks.append(lambda report: linked.append(report.linked))
    linked: list[int] = []
    for name in ("a", "b"):
        assert everywhere(ranks, lambda rank, name=name: rank.save(name, wait=wait)) == [""] * 2  # type: ignore[misc]
        assert everywhere(ranks, lambda rank: rank.saver.wait()) == [""] * 2
    close(ranks)
    size = (tmp_path / "a" / "model+frozen.safetensors").stat().st_size
    assert size > 600 * 600 * 4
    assert os.path.samefile(tmp_path / "a" / "model+frozen.safetensors", tmp_path / "b" / "model+frozen.safetensors")
    assert linked == [0, size]
    assert ckpt.verify(tmp_path) == {"a": [], "b": []}


def test_the_rank_that_takes_longest_to_write_is_named_with_its_time(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, write = list[SaveReport](), Attempt.write

    def slow(self: Attempt, storage: Storage, plans: list[Any], *args: Any, **options: Any) -> Any:
        time.sleep(0.5 if any("mine-00001" in plan.path for plan in plans) else 0)  # a slow disk of rank 1
        return write(self, storage, plans, *args, **options)

    monkeypatch.setattr(Attempt, "write", slow)
    ranks = job(3, lambda _: shared)
    for number, rank in enumerate(ranks):
        rank.parts = [ModelPart("model", linear(1.0))]
        rank.own = {f"mine-{number:05}": RankObjectPart(f"mine-{number:05}", Counter(torch.ones(2)))}
    ranks[0].saver.reports.callbacks.append(reports.append)
    assert everywhere(ranks, Rank.save) == [""] * 3
    close(ranks)
    assert (reports[0].slowest_rank, reports[0].slowest >= 0.5) == (1, True)


def test_only_a_rank_that_takes_far_longer_than_most_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert name_straggler("a", [1.0, 2.0, 1.5], None) == (1, 2.0)
    assert name_straggler("a", [20.0, 25.0, 29.0], None) == (2, 29.0)
    assert not caplog.records
    assert name_straggler("a", [1.0, 30.0, 1.5], (4, 6, 8)) == (6, 30.0)
    assert "a: rank 6 took 30.0 s to write its files, but half of the 3 ranks took at most 1.5 s" in caplog.text
