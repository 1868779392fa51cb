"""Loads case by case: what is compared, what does not fit and why, what the report says, and where a name leads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError, DamagedError, MismatchError, TransientError
from ckpt.formats.layout import Layout
from ckpt.formats.native.documents import rank_document
from ckpt.formats.native.manifest import FileRecord, Host, Manifest
from ckpt.formats.tensors import same_bytes
from ckpt.load import reader as reading
from ckpt.load import restore
from ckpt.load.load_state import ELSEWHERE, Locations, Restored, StateLoader
from ckpt.load.reader import CheckpointReader, check_rank_state
from ckpt.load.restore import Elsewhere, LiveNames, from_main_rank, rewinder
from ckpt.load.select import Candidate, Inspection, MemoryTier, Selection
from ckpt.ranks.consensus import Result, SingleProcess, decide_together
from ckpt.ranks.hosts import Hosts
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import BuiltManagers, StoreGroup
from ckpt.root.catalog import find
from ckpt.root.mirror import MirrorPatience
from ckpt.state import rng
from ckpt.state.model import ModelPart
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.parts import HOOKS, LEFT, WHOLE_PART, GradientsPart, Notes, ObjectPart
from ckpt.storage import LocalStorage, MemoryStorage, open_storage
from tests.helpers.byte_checkpoints import MOMENT
from tests.helpers.places import PassedOn
from tests.helpers.stateful import Stateful


def manifest_of(root: Any, name: str = "a") -> Manifest:
    found = find(open_storage(root), name).manifest
    assert found is not None
    return found


def saved_reader(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> CheckpointReader:
    with ckpt.StateManager(tmp_path) as manager:
        manager.register(x=Stateful(tensors))
        manager.save_state("a", wait=True)
    return CheckpointReader(open_storage(tmp_path), manifest_of(tmp_path), 0)


class Tensors:
    """The tensors of a file, or of several: notes by which name each is asked for."""

    def __init__(self, title: str, *names: str, ties: dict[str, str] | None = None) -> None:
        self.title, self.names, self.ties = title, names, ties or {}
        self.table = SimpleNamespace(tensors=dict.fromkeys(names))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def about(self, name: str) -> Any:
        return f"{self.title}: {name}"

    tensor = about

    def fill(self, name: str, target: Any, box: Any) -> None:
        target.append((self.about(name), box))


def test_a_tensor_is_a_ranks_own_one_of_its_shards_or_that_of_all_ranks() -> None:
    first, second = Tensors("first", "a", ties={"a2": "a"}), Tensors("second", "b")
    common: Any = Tensors("common", ties={"c2": "c", "x": "a", "d": "y"})
    files: list[Any] = [first, second]
    shards: Any = Tensors("shards", "s")
    own: Any = reading.OwnTensors(frozenset({"a", "b", "d", "absent"}), files, shards, lambda: common, {"tied": "s"})
    whole: Any = reading.WholeTensors(files, "a: x")
    for tensors, name, found in (
        (own, "a", "first: a"), (own, "b", "second: b"), (own, "absent", "common: absent"), (own, "s", "shards: s"),
        (own, "tied", "shards: s"), (own, "other", "common: other"), (whole, "a", "first: a"),
        (whole, "b", "second: b"),
    ):  # fmt: skip
        filled: list[Any] = []
        tensors.fill(name, filled, "box")
        assert (tensors.about(name), tensors.tensor(name), filled) == (found, found, [(found, "box")])
    assert own.ties == {"a2": "a", "tied": "s", "c2": "c"}  # what a rank has of its own is tied to nothing of all ranks
    assert whole.ties == {"a2": "a"}
    with pytest.raises(DamagedError, match="no file in a: x has the tensor 'z'"):
        whole.about("z")


def test_the_files_of_what_a_rank_has_of_its_own_are_opened_where_it_has_any() -> None:
    manifest = Manifest(name="a", id="id", sequence=1, created=MOMENT, run="run", files=(), world_size=2)
    table = {"tensors": {"s": ["float32", [4], 0, 0]}, "layouts": [Layout((2,), (0, 1), ("S0",)).to_json()]}
    opened: list[Any] = []

    def files(kind: str) -> Any:
        def of_rank(rank: int) -> list[Any]:
            opened.append((kind, rank))
            return [Tensors(kind)]

        return of_rank

    whole: Any = Tensors("whole")

    for entry, plain, shards in (
        ({}, set(), set()), ({"plain": ["b"]}, {"b"}, set()),
        ({"spread": {**table, "aliases": {"t": "s"}}}, set(), {"s"}),
    ):  # fmt: skip
        opened.clear()
        found = reading.OwnTensors.of(entry, manifest, 1, files("own"), files("pieces"), lambda: whole)
        assert (set(found.plain), set(found.pieces.table.tensors)) == (plain, shards)
        assert opened == ([("own", 1)] if plain else [])
        assert len(found.files) == len(plain)
        assert found.aliases == ({"t": "s"} if shards else {})
    assert str(found.tensor("other")) == "whole: other"


class TestTheReader:
    @pytest.mark.parametrize("slab", [1, 12, 24, 30, 1 << 20])
    def test_two_saved_tensors_are_equal_if_every_bit_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int
    ) -> None:
        monkeypatch.setattr(reading, "_SLAB", slab)
        read = list[int]()

        def noted(one: torch.Tensor, other: torch.Tensor) -> bool:
            read.append(one.nbytes)
            return same_bytes(one, other)

        monkeypatch.setattr(reading, "same_bytes", noted)
        base = torch.arange(21.0).view(7, 3)
        last, first = base.clone(), base.clone()
        last[6, 2] = first[0, 0] = -1
        tensors = {
            "base": base, "same": base.clone(), "last": last, "first": first, "tied": base,
            "flat": base.clone().view(21), "half": base.half(),
            "scalar": torch.tensor(1.0), "one": torch.tensor(1.0), "two": torch.tensor(2.0),
            "empty": torch.empty(0, 3), "void": torch.empty(0, 3),
        }  # fmt: skip
        reader = saved_reader(tmp_path, tensors)
        tree = reader.tree("x")
        for one, other, equal in (
            ("base", "same", True), ("base", "last", False), ("base", "first", False), ("base", "tied", True),
            ("base", "flat", False), ("base", "half", False), ("scalar", "one", True), ("scalar", "two", False),
            ("empty", "void", True), ("same", "last", False),
        ):  # fmt: skip
            assert tree[one].equals(tree[other], tensors[one]) == equal, (one, other)
        assert max(read) <= max(slab, 12)  # a row at least
        monkeypatch.setattr(reader, "_box", lambda place, shape: None)  # this rank holds nothing of them
        assert tree["base"].equals(tree["last"], None)
        assert reader.wanted == ([], [])
        assert reader.ties("x") in ({"tied": "base"}, {"base": "tied"})
        assert reader.ties("none") == {} if reader.has("none") else True

    def test_what_is_asked_for_is_read_into_its_place_or_left(self, tmp_path: Path) -> None:
        tensors = {"a": torch.arange(4.0), "b": torch.arange(3.0), "c": torch.ones(2)}
        reader = saved_reader(tmp_path, tensors)
        places = {"a": torch.zeros(4), "b": torch.zeros(3, requires_grad=True)}
        read = reader.ask("x", lambda saved: places.get(saved.name, LEFT), live=True)
        assert [len(wanted) for wanted in reader.wanted] == [0, 2]
        reader.read_new()
        reader.verify_live()
        assert not places["a"].any()
        reader.read_live()
        assert sum(map(len, reader.wanted)) == 0
        found = read()
        assert found["a"] is places["a"]
        assert torch.equal(places["a"], tensors["a"])
        assert torch.equal(places["b"], tensors["b"])
        assert found["c"] is reader.tree("x")["c"]
        again = reader.ask("x")
        assert [len(wanted) for wanted in reader.wanted] == [3, 0]
        reader.read_new()
        assert all(torch.equal(again()[name], tensor) for name, tensor in tensors.items())
        assert (reader.has("x"), reader.has("y"), reader.lacks("x"), reader.kind("x")) == (
            True,
            False,
            False,
            "Stateful",
        )
        assert (reader.spread("x"), reader.has_tensors("x"), reader.layouts("x")) == (False, True, frozenset())

    def test_a_live_tensor_is_verified_again_only_where_it_is_signed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, calls = saved_reader(tmp_path, {"a": torch.arange(4.0)}), list[str]()
        monkeypatch.setattr(reading, "read", lambda *args, **options: calls.append("read"))
        monkeypatch.setattr(reading, "read_verified", lambda *args, **options: calls.append("verified"))
        reader.read_live()
        reader.read_new()
        signed: Any = SimpleNamespace(name="a", is_authentic=True, world_size=1)
        reader.manifest = signed
        reader.read_live()
        assert calls == ["read", "verified", "verified"]

    def test_progress_is_shown_in_bytes_on_the_main_rank(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, asked = saved_reader(tmp_path, {"a": torch.arange(4.0)}), list[tuple[Any, ...]]()
        monkeypatch.setattr(
            reading, "progress_bar", lambda text, size, *, in_bytes, show: asked.append((text, size, in_bytes, show))
        )
        pieces: Any = [SimpleNamespace(size=4), SimpleNamespace(size=5)]
        for reader.rank in (0, 1):
            reader._bar("loading", pieces)
        assert asked == [("loading a", 9, True, True), ("loading a", 9, True, False)]

    def test_what_is_read_for_other_ranks_comes_first_and_the_last_of_this_rank_alone_after_the_phase(
        self, tmp_path: Path
    ) -> None:
        reader, calls = saved_reader(tmp_path, {"a": torch.arange(4.0)}), list[Any]()

        class Shared:
            def split(self, transfers: list[Any]) -> tuple[list[Any], list[Any]]:
                return [one for one in transfers if one.size < 9], [one for one in transfers if one.size == 9]

            @contextmanager
            def phase(self) -> Iterator[None]:
                calls.append("phase")
                yield
                calls.append("end")

        def how(transfers: list[Any], name: str, advance: Any, *, threads: int | None = None) -> None:
            calls.append(([one.size for one in transfers], name, threads))

        batches: Any = [[SimpleNamespace(size=size) for size in sizes] for sizes in ((1, 9), (2, 9, 3), (4,))]
        for chosen in (batches, batches[1:], batches[2:]):
            reader.broadcasts = None
            reader._read(chosen, how)
            assert calls == [([one.size for one in batch], "a", None) for batch in chosen]
            calls.clear()
            reader.broadcasts = Shared()  # type: ignore[assignment]
            reader._read(chosen, how)
            first, second = [([9], "a", 1), ([1], "a", None)], [([9], "a", 1), ([2, 3], "a", None)]
            read = [*first, *second] if chosen is batches else second if len(chosen) == 2 else []
            assert calls == ["phase", *read, "end", ([4], "a", None)]
            calls.clear()

    def test_what_another_rank_of_the_host_reads_is_verified_by_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader, verified = saved_reader(tmp_path, {"a": torch.arange(4.0)}), list[list[int]]()
        noted: Any = lambda transfers, name, advance: verified.append([one.size for one in transfers])  # noqa: E731
        monkeypatch.setattr(reading, "verify", noted)
        reader._live = [SimpleNamespace(size=size) for size in (1, 2)]
        reader.verify_live()
        reader.broadcasts = SimpleNamespace(reads_here=lambda transfer: transfer.size == 2)  # type: ignore[assignment]
        reader.verify_live()
        assert verified == [[1, 2], [2]]

    def test_a_rank_restores_what_it_had_of_its_own_where_as_many_ranks_load(self, tmp_path: Path) -> None:
        reader = saved_reader(tmp_path, {"a": torch.arange(4.0)})
        reader.parts["y"] = {"class": "Common", "differs": {"values": ["lr"]}}
        reader.own = {"y-own-00000": {"class": "Own"}, "x-own-00000": {"absent": True}, "z": {"class": "Alone"}}
        for per_rank in (False, True):
            reader.per_rank = per_rank
            assert (reader.has("x"), reader.lacks("x"), reader.has("none")) == (not per_rank, per_rank, False)
            assert (reader.has("y"), reader.lacks("y")) == (True, False)
            assert (reader.has("z"), reader.kind("z")) == (True, "Alone")
            assert (reader.kind("y"), reader.differs("y")) == (
                ("Own", {}) if per_rank else ("Common", {"values": ["lr"]})
            )

    def test_a_tensor_that_is_saved_whole_though_others_are_sharded_is_marked(self, tmp_path: Path) -> None:
        reader = saved_reader(tmp_path, {"a": torch.arange(4.0), "b": torch.arange(2.0)})
        reader.parts["x"]["state"] = {"a": {"$unsharded": {"$tensor": "a"}}, "b": {"$tensor": "b"}}
        assert {name: saved.unsharded for name, saved in reader.tree("x").items()} == {"a": True, "b": False}
        read = reader.ask("x")
        reader.read_new()
        assert torch.equal(read()["a"], torch.arange(4.0))

    def test_what_other_ranks_had_of_their_own_is_added_by_its_keys(self, tmp_path: Path) -> None:
        reader = saved_reader(tmp_path, {"a": torch.arange(4.0)})
        asked: list[str] = []

        def document(name: str) -> Any:
            asked.append(name)
            number = len(asked)
            return {"own": {f"{key}-{number}": {"class": "x", "state": number} for key in ("zero", "other")}}

        reader._document = document  # type: ignore[method-assign]
        reader.own = {"mine": {}}
        reader.read_own({"zero-1", "zero-2", "other-3"}, 2)
        assert asked == [rank_document(0), rank_document(1)]
        assert {key: part.get("state") for key, part in reader.own.items()} == {"mine": None, "zero-1": 1, "zero-2": 2}

    def test_which_ranks_files_this_host_has(self, tmp_path: Path) -> None:
        reader = saved_reader(tmp_path, {"a": torch.arange(4.0)})
        names = ("x/00001.safetensors", "x/00001+frozen.safetensors", "x/00002.safetensors")
        records = (FileRecord(name=name, path=name, size=5, blocks=("x",)) for name in names)
        reader._records = {record.name: record for record in records}
        for there, hosts, here in (
            ({}, (), True), ({}, (1,), False), ({names[0]: 5}, (1,), False), ({names[0]: 5, names[1]: 5}, (1,), True),
            ({names[0]: 5, names[1]: 4}, (1,), False),
        ):  # fmt: skip
            reader.manifest = SimpleNamespace(name="a", hosts=hosts)  # type: ignore[assignment]
            reader._sizes = {f"a/{name}": size for name, size in there.items()}
            assert reader._is_here("x", 1) is here, there

    def test_a_document_that_is_not_listed_is_damage(self, tmp_path: Path) -> None:
        reader = saved_reader(tmp_path, {"a": torch.arange(4.0)})
        without = replace(
            reader.manifest, files=tuple(file for file in reader.manifest.files if file.name != "state.json")
        )
        with pytest.raises(DamagedError, match=r"a is damaged: its manifest does not list state\.json"):
            CheckpointReader(open_storage(tmp_path), without, 0)

    def test_a_rank_that_was_not_there_reads_the_main_ranks_state(self, tmp_path: Path) -> None:
        saved_reader(tmp_path, {"a": torch.arange(4.0)})
        new = CheckpointReader(open_storage(tmp_path), manifest_of(tmp_path), 3)
        assert (new.own, new.state["loaders"]) == ({}, {})
        assert new.rank_state(0).keys() == new.state.keys()

    def test_what_a_ranks_state_must_be(self) -> None:
        good: dict[str, Any] = {"rng": rng.capture(), "generators": {}, "loaders": {}}
        without_rng = {key: value for key, value in good.items() if key != "rng"}
        assert check_rank_state({}, "x") == {}
        for state, fine in (
            (good, True),
            ({**good, "loop": {"per_step": 2, "remarks": {"a": "b"}}}, True),
            ({**good, "loop": {"per_step": -1}}, False),
            ({**good, "loaders": {"data": {"batches": 3, "worn": True, "world_size": 1}}}, True),
            ({**good, "loaders": {"data": {"batches": -3}}}, False),
            ({**good, "loaders": {"data": {"world_size": 0}}}, False),
            ({**good, "loaders": []}, False),
            (without_rng, False),
            ({**without_rng, "lacking": {"rng": "no"}}, True),
            ({**good, "lacking": {"rng": 1}}, False),
            ({**good, "rng": 1, "lacking": {"rng": "no"}}, False),
            ({**good, "source": {}}, True),
            ({**good, "source": {"step": 1}}, False),
            ({**good, "source": {"step": 1, "sync_gradients": True, "saves": 0, "loaders": {}}}, True),
            ({**good, "source": {"step": 1, "sync_gradients": 1, "saves": 0, "loaders": {}}}, False),
            *(({**good, "loop": {"steps_per_epoch": number}}, True) for number in (None, 0, -3, (1 << 53) - 1)),
            *(({**good, "loop": {"steps_per_epoch": number}}, False) for number in (1 << 53, -(1 << 53), 1.5, "x")),
            *(({**good, "loop": {"ahead": number}}, number == 0) for number in (0, -1, None)),
            ({**good, "generators": []}, False),
            ({**good, "generators": None}, False),
            *(
                ({**good, "source": {"step": 1, "sync_gradients": True, "saves": 0, "loaders": {"a": counters}}}, fine)
                for counters, fine in (
                    ({"iteration": 0, "seeds": [1, None], "generators": []}, True),
                    ({"iteration": 0, "seeds": ["x"], "generators": []}, False),
                    ({"iteration": 0, "seeds": [], "generators": {}}, False),
                    ({"iteration": 0, "seeds": []}, False),
                )
            ),
            *(
                ({**good, "loaders": {"data": position}}, fine)
                for position, fine in (
                    ({"dataset_size": None, "sampler_size": 0}, True),
                    ({"dataset_size": -1}, False),
                    ({"digest": "x", "indices": ""}, True),
                    ({"digest": 1}, False),
                    ({"rng": {}, "rng_ahead": good["rng"]}, True),
                    ({"rng": {"torch": 1}}, False),
                    ({"generators": [1], "samplers": []}, True),
                    ({"samplers": {}}, False),
                    ({"contents": {"a": "b"}}, True),
                    ({"contents": {"a": 1}}, False),
                    ({"worn": 1}, False),
                    ({"layout": {}}, True),
                    ({"layout": {"replicas": 2, "replica": 0, "batch": None}}, True),
                    ({"layout": {"replicas": 0}}, False),
                    ({"layout": {"piece": -1}}, False),
                    ({"layout": {"more": 1}}, False),
                    ({"layout": []}, False),
                )
            ),
            (
                {
                    **good,
                    "source": {"step": 1, "sync_gradients": True, "saves": 0, "loaders": {"a": {"iteration": -1}}},
                },
                False,
            ),
        ):
            if fine:
                assert check_rank_state(state, "x") == state
            else:
                with pytest.raises(DamagedError, match=r"^x is damaged: "):
                    check_rank_state(state, "x")


def report(**fields: Any) -> Restored:
    known: dict[str, Any] = {
        "name": "a",
        "url": "root/a",
        "run": "run",
        "progress": Progress(step=1234, epoch=2, batch=7),
    }
    return Restored(**{**known, **fields})


class TestTheReport:
    def test_it_says_what_was_restored_from_where_and_what_was_not(self) -> None:
        plain = str(report(restored=("model", "rng")))
        assert plain.splitlines()[0].startswith("resumed from root/a: step 1234, epoch 2, batch 7")
        assert plain.splitlines()[1:] == ["  restored      model, rng"]
        assert str(report()).splitlines()[1] == "  restored      nothing"
        memory = str(report(from_memory=True, root_step=1000, begins_at="batch 8 of data")).splitlines()
        assert memory[0] == "resumed from memory: step 1,234 (root has step 1,000)"
        assert memory[1].startswith("  position      epoch 2, batch 7")
        assert memory[3].startswith("  continues     the next `for` begins at batch 8 of data")
        assert "(root has no checkpoint)" in str(report(from_memory=True))
        full = report(
            resharded={"model": "2 ranks: S0 -> whole"}, approximated={"rng": "seeded"}, skipped={"x": "x is new"},
            passed_over={"b": "b is damaged."},
        )  # fmt: skip
        assert str(full).splitlines()[2:] == [
            "  resharded     model: 2 ranks: S0 -> whole", "  approximated  rng: seeded", "  skipped       x is new",
            "  passed over   b is damaged.",
        ]  # fmt: skip

    def test_what_is_not_as_it_was_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "ckpt"):
            report().report()
            assert [record.levelname for record in caplog.records] == ["INFO"]
            caplog.clear()
            report(skipped={"x": "new"}).report()
        assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
        assert caplog.records[1].message.startswith("not everything is as it was when a was saved:")
        assert "skipped" not in caplog.records[0].message

    def test_who_reads_the_step_or_the_epoch_is_noted(self) -> None:
        noted: list[int] = []
        found = report(on_read=lambda: noted.append(1))
        assert (found.step, found.epoch, noted) == (1234, 2, [1, 1])
        assert str(found)
        assert noted == [1, 1]

    def test_in_a_notebook_it_is_a_table(self) -> None:
        table = report(restored=("model",), skipped={"x": "new"})._repr_html_()
        for text in ("resumed from root/a", "restored", "model", "skipped", "x: new"):
            assert text in table

    def test_a_load_says_what_it_restored(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(2, 2)
        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.register(noise=torch.Generator())
            manager.save_state("a", wait=True)
            manager.save_state("b", wait=True)
            with caplog.at_level(logging.INFO, "ckpt"):
                restored = manager.load_state("a")
                assert "b is newer than a, which you loaded by name" in caplog.text
                caplog.clear()
                assert manager.load_state("b").name == "b"
                assert manager.load_state().name == "b"
                assert "is newer than" not in caplog.text
        assert restored.restored == ("model", "noise", "rng", "progress")
        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.register(noise=torch.Generator(), more=torch.Generator())
            other = manager.load_state("a")
        assert other.restored == ("model", "noise", "rng", "progress")
        assert other.skipped == {"more": "the checkpoint has no such generator"}
        assert (restored.url, restored.from_memory, restored.root_step) == (f"{tmp_path}/a", False, None)


def test_a_loader_that_has_changed_is_named_when_it_is_first_asked_after_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(size)), batch_size=2)

    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(1):
            for _ in manager.batches(loader(8)):
                manager.step()
                break
            manager.save_state("a", wait=True)
            break
    with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1)) as manager:
        for _ in manager.epochs(1):
            assert "has 10 samples now" not in caplog.text
            for _ in manager.batches(loader(10)):
                break
            assert "the resumed run is not exact: loader.0.dataset: has 10 samples now and had 8" in caplog.text
            break


class TestWhereANameLeads:
    def test_into_the_root_however_it_is_spelled_or_to_a_folder_elsewhere(self, tmp_path: Path) -> None:
        root, other = tmp_path / "root", tmp_path / "other"
        for folder in (root, other):
            with ckpt.StateManager(folder, model=nn.Linear(1, 1)) as manager:
                manager.save_state("a", wait=True)
        here = Locations((LocalStorage(root),))
        assert here.resolve(None, SingleProcess()) == (here, None)
        for name in ("a", f"{root}/a", f"{root}/a/", f"{root}/../root/a"):
            assert here.resolve(name, SingleProcess()) == (here, "a")
        found, inside = here.resolve(f"{other}/a", SingleProcess())
        assert (inside, [tier.url for tier in found.tiers]) == ("a", [str(other)])
        with pytest.raises(ConfigError, match="is neither the name of a checkpoint in"):
            here.resolve(f"{other}/none", SingleProcess())
        with pytest.raises(ConfigError, match="is not a valid checkpoint name"):
            here.resolve("..", SingleProcess())

    def test_elsewhere_is_no_tier(self, tmp_path: Path) -> None:
        root, other, followed = tmp_path / "root", tmp_path / "other", list[int]()
        paused: list[int] = []

        @contextmanager
        def pause() -> Iterator[None]:
            paused.append(1)
            yield

        for folder in (root, other):
            with ckpt.StateManager(folder, model=nn.Linear(1, 1)) as manager:
                manager.save_state("a", wait=True)
        with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
            loader = manager.session.loader
            loader.follow = lambda manifest, damaged, tier, passed_over: followed.append(tier)
            loader.pause_staging = pause
            manager.load_state("a")
            manager.load_state(str(other / "a"))
        assert followed == [0, ELSEWHERE]
        assert paused == [1, 1]

    def test_a_load_that_failed_half_way_is_remembered_until_one_succeeds(self, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path, model=nn.Linear(1, 1)) as manager:
            manager.save_state("a", wait=True)
            loader: StateLoader = manager.session.loader
            loader.refuse_half_loaded()
            loader._set_half_loaded("b")
            with pytest.raises(ckpt.StateError, match="a load of b failed halfway"):
                manager.save_state("c")
            manager.load_state("a")
            loader.refuse_half_loaded()


def named(**parts: set[str] | None) -> dict[str, Any]:
    return {
        key: SimpleNamespace(names=lambda names=names: None if names is None else frozenset(names), is_collective=False)
        for key, names in parts.items()
    }


class TestWhatFits:
    def test_what_only_other_ranks_have_is_known_to_each(self) -> None:
        alone = LiveNames.of(named(model={"a"}))
        assert alone.elsewhere(LiveNames.join([alone.said(SingleProcess())]) or {}) == Elsewhere()
        assert LiveNames.join([alone.said(SingleProcess()), None]) is None

        def found(*of_ranks: dict[str, Any]) -> list[Any]:
            store, size = TimedStore(HashStore(), 20.0), len(of_ranks)
            groups = [StoreGroup(store.below("g"), rank, size, 20.0, store, BuiltManagers()) for rank in range(size)]
            answers: list[Any] = [None] * size
            spoke = [False] * size

            def ask(rank: int) -> None:
                names = LiveNames.of(of_ranks[rank])
                said = names.said(groups[rank])
                spoke[rank] = bool(said["names"])
                mine: Result[dict[str, Any] | None] = Result(said)
                joined = decide_together(groups[rank], "load", mine, LiveNames.join)
                answers[rank] = names.elsewhere(joined or {})

            threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sum(spoke) == len({LiveNames.of(names).digest for names in of_ranks})  # each once
            return answers

        same = named(model={"a", "b"}, other=None)
        assert found(same, same) == [Elsewhere(), Elsewhere()]
        first, second, third = found(
            named(model={"a", "b"}), named(model={"b", "c"}, more={"x"}), named(model={"a", "b"})
        )
        assert (first.names["model"], second.names["model"], third.names["model"]) == ({"c"}, {"a"}, {"c"})
        assert (first.parts, second.parts) == ({"more"}, frozenset())
        assert second.names["more"] == frozenset()

    def test_one_error_lists_all_that_does_not_fit_and_nothing_has_changed(self, tmp_path: Path) -> None:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.save_state("a", wait=True)
        other = nn.ModuleDict({"a": nn.Linear(2, 3), "c": nn.Linear(2, 2)})
        before = [parameter.detach().clone() for parameter in other.parameters()]
        with ckpt.StateManager(tmp_path, model=other) as manager:
            manager.register(more=Stateful({}))
            with pytest.raises(MismatchError, match="a does not fit the live objects; nothing was changed:") as raised:
                manager.load_state("a")
            told = str(raised.value)
            for text in (
                "model: a.weight: ",
                "model: b.bias: unexpected",
                "model: c.bias: missing",
                "more: missing: the checkpoint has no such part",
                "use strict=False to restore what fits",
            ):
                assert text in told, text
            assert all(map(torch.equal, before, other.parameters()))
            restored = manager.load_state("a", strict=False)
        assert restored.skipped["more"].startswith("missing")
        assert "model" in restored.restored

    def test_names_that_all_begin_alike_on_one_side_are_pointed_out(self) -> None:
        def told(here: list[str], there: list[str]) -> str:
            keys = {**dict.fromkeys(here, "missing: x"), **dict.fromkeys(there, "unexpected: x")}
            return restore._prefixes({"model": keys})

        assert told(["m.a", "m.b"], ["a", "b"]).startswith("All 2 names of model begin with 'm.' here, and are")
        assert told(["a"], ["m.a"]).startswith("All 1 names of model begin with 'm.' in the checkpoint")
        for here, there in ((["m.a", "b"], ["a", "b2"]), (["m.a"], ["a", "b"]), (["a"], ["b"]), ([], [])):
            assert told(here, there) == ""

    def test_how_many_of_a_kind_there_are_is_said_where_that_differs(self) -> None:
        reader: Any = SimpleNamespace(parts={"model.a": 1, "model.b": 1, "optimizer": 1})
        for live, key, told in (
            (["model.a", "model.b", "model.c"], "model.c", " (it has 2 of kind 'model', and there are 3 here)"),
            (["model.a", "model.c"], "model.c", ""),
            (["scheduler"], "scheduler", ""),
        ):
            assert restore._counts(reader, dict.fromkeys(live), key) == told  # type: ignore[arg-type]

    def test_state_of_the_main_rank_on_all_is_named_with_the_way_out(self) -> None:
        class Reader:
            manifest = SimpleNamespace(world_size=3)

            def __init__(self, **differs: Any) -> None:
                self._differs = differs

            def differs(self, key: str) -> Any:
                return self._differs.get(key, {})

        norm = nn.BatchNorm1d(2)
        parts: dict[str, Any] = {"model": ModelPart("model", norm), "counter": ObjectPart("counter", Stateful({}))}

        def reader(**differs: Any) -> Any:
            return Reader(**differs)

        def found(**differs: Any) -> dict[str, str]:
            return from_main_rank(reader(**differs), parts)

        assert found() == {}
        assert found(model={"tensors": {"weight": [1]}, "values": []}) == {}  # a parameter: it does not fit at all
        told = found(model={"tensors": {"running_mean": [1], "weight": [1]}}, counter={"tensors": {}, "values": [2]})
        assert told.keys() == {"model", "counter"}
        assert "each of the 3 ranks that saved it had its own running_mean; every" in told["model"]
        assert "SyncBatchNorm" in told["model"]
        assert "had its own values; every" in told["counter"]
        assert "per_rank=True" in told["counter"]
        differing = reader(model={"tensors": {"weight": [1], "running_mean": [1]}})
        bound = restore._bound_to_ranks(differing, "model", parts["model"])
        assert bound.keys() == {"weight"}
        assert WHOLE_PART not in bound

    def test_generators_are_restored_or_derived_for_ranks_that_are_new(self) -> None:
        torch.manual_seed(5)
        state, own = rng.capture(), torch.Generator().manual_seed(9)
        kept = rng.capture_one(own)
        expected, drawn = torch.rand(2), torch.rand(2, generator=own)

        def rewound(rank: int, size: int, saved_by: int, rng_state: Any = state) -> tuple[torch.Tensor, Notes]:
            reader: Any = SimpleNamespace(
                manifest=SimpleNamespace(world_size=saved_by), state={"rng": rng_state, "generators": {"own": kept}}
            )
            ranks: Any = SimpleNamespace(world_size=size, rank=rank)
            notes = Notes()
            torch.manual_seed(77)
            rewinder(reader, ranks, {"own": own, "more": torch.Generator()}, notes)()
            assert torch.equal(torch.rand(2, generator=own), drawn)
            assert notes.skipped == {"more": "the checkpoint has no such generator"}
            return torch.rand(2), notes

        found, notes = rewound(0, 2, 2)
        assert torch.equal(found, expected)
        assert notes.approximated == {}
        found, notes = rewound(1, 3, 2)
        assert torch.equal(found, expected)
        assert notes.approximated == {"rng": "saved by 2 ranks, resumed by 3: rank 2 is new and seeded"}
        rng.derive(state, 2)
        derived = torch.rand(2)
        assert torch.equal(rewound(2, 3, 2)[0], derived)
        assert not torch.equal(derived, expected)
        assert rewound(0, 1, 4)[1].approximated["rng"].endswith("resumed by 1: ranks 1, 2, 3 are gone")
        torch.manual_seed(77)
        untouched = torch.rand(2)
        assert torch.equal(rewound(0, 2, 3, None)[0], untouched)
        assert rewound(0, 2, 3, None)[1].approximated == {}

    def test_who_reads_for_others(self) -> None:
        near, far = MemoryStorage("near"), SimpleNamespace(is_local=False)
        cases: tuple[tuple[Any, int, bool | None, bool], ...] = (
            (near, 1, True, False), (far, 1, None, False), (near, 2, None, False), (far, 2, None, True),
            (near, 2, True, True), (far, 2, False, False), (SimpleNamespace(), 2, None, False),
        )  # fmt: skip
        for storage, size, wanted, used in cases:
            request: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=size), broadcast=wanted)
            assert restore._uses_broadcast(storage, request) is used

    def test_buckets_of_hooks_that_are_gone_are_missed_by_nobody_and_all_else_is_named(self) -> None:
        trees = {
            f"{HOOKS}-00000": {"model/0": {"buckets": [[0]]}}, f"{HOOKS}-00001": {"model/0": {"class": "PowerSGD"}},
            "sampler-00000": {"model/0": {"buckets": [[0]]}},
        }  # fmt: skip
        registry = SimpleNamespace(own_parts_to_load=lambda rank, own: {}, hooks=lambda rank: {}, parts={})
        manifest = SimpleNamespace(world_size=1, origin=None, hosts=())
        for key, skipped in ((f"{HOOKS}-00000", []), (f"{HOOKS}-00001", [HOOKS]), ("sampler-00000", ["sampler"])):
            reader: Any = SimpleNamespace(manifest=manifest, own={key: None}, parts=(), tree=trees.get)
            request: Any = SimpleNamespace(ranks=SingleProcess(), registry=registry, strict=True)
            notes = Notes()
            assert restore._own_parts(reader, request, notes) == {}
            assert [name.partition(" (")[0] for name in notes.skipped] == skipped

    def test_what_is_each_ranks_own_is_loaded_kept_divided_anew_or_missed(self) -> None:
        class Own:
            def __init__(self, *, keeps: bool = False, others: tuple[str, ...] = ()) -> None:
                self.for_any_ranks, self.others = keeps, others
                self.told: list[tuple[str, bool]] = []

            def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
                assert isinstance(notes, Notes)
                self.told.append((why, strict))

            def of_other_ranks(self, saved_by: int) -> dict[str, Any]:
                return {f"zero-{rank:05}": self for rank in range(saved_by) if f"zero-{rank:05}" in self.others}

        def kept(saved_by: int, rank: int, size: int, part: Own, **of: Any) -> tuple[list[str], Notes]:
            hooks: dict[str, Any] = of.pop("hooks", {})
            manifest: Any = SimpleNamespace(world_size=saved_by, origin=None, hosts=(), **of)
            own = {f"zero-{rank:05}": part}
            registry = SimpleNamespace(own_parts_to_load=lambda rank, saved: own, hooks=lambda rank: hooks, parts={})
            reader: Any = SimpleNamespace(manifest=manifest, own=dict.fromkeys(own), parts=(), tree={}.get)
            reader.read_own = lambda keys, saved_by: reader.own.update(dict.fromkeys(keys))
            request: Any = SimpleNamespace(
                ranks=SimpleNamespace(world_size=size, rank=rank), registry=registry, strict=True
            )
            notes = Notes()
            return list(restore._own_parts(reader, request, notes)), notes

        why = "saved by a different number of ranks (2, and there are 3 here)"
        part, hooks = Own(), Own()
        assert kept(2, 1, 2, part, hooks={"hooks-00001": hooks}) == (["zero-00001"], Notes())
        assert (part.told, hooks.told) == ([], [("the checkpoint has no state of theirs", True)])
        hooks = Own()
        assert kept(2, 1, 2, part, hooks={"zero-00001": hooks}) == (["zero-00001"], Notes())
        assert hooks.told == []
        assert kept(2, 1, 3, part) == ([], Notes())
        assert part.told == [(why, True)]
        stays = Own(keeps=True)
        found, notes = kept(2, 1, 3, stays)
        assert (found, stays.told) == (["zero-00001"], [])
        assert notes.approximated == {"zero": "saved by 2 ranks, resumed by 3: rank 2 is new and not restored"}
        for new in (2, 3):
            stays = Own(keeps=True)
            assert kept(2, new, 4, stays)[0] == []
            assert len(stays.told) == 1
        divided = Own(others=("zero-00000", "zero-00001"))
        assert kept(2, 0, 3, divided) == (["zero-00000", "zero-00001"], Notes())
        assert divided.told == []

    def test_why_a_checkpoint_has_nothing_of_a_ranks_own(self) -> None:
        base = Manifest(name="a", id="i", sequence=1, created=MOMENT, run="r", files=(), world_size=2)
        two, three = SimpleNamespace(world_size=2), SimpleNamespace(world_size=3)
        why: Any = restore._why_none_of_its_own
        assert why(base, two) is None
        assert why(replace(base, origin="Tool"), two) == "Tool keeps none"
        assert why(base, three) == "saved by a different number of ranks (2, and there are 3 here)"
        assert why(replace(base, hosts=(Host("x", (0, 1)),)), three).endswith("here) with separate roots")

    def test_layouts_in_words(self) -> None:
        one, two = Layout((4,), (0, 1, 2, 3), ("S0",)), Layout((2, 2), (0, 1, 2, 3), ("R", "S1"))
        assert restore._layout_text(frozenset()) == "whole"
        assert restore._layout_text(frozenset({one, two})) == "2x2 ranks: R,S1; 4 ranks: S0"


class TestALoad:
    @pytest.fixture
    def loader(self, tmp_path: Path) -> Iterator[StateLoader]:
        with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
            manager.register(noise=torch.Generator())
            manager.save_state("a", wait=True)
            yield manager.session.loader

    def test_it_looks_where_the_manager_says_and_for_a_name_not_in_memory(self, loader: StateLoader) -> None:
        memory, patience, hosts, seen = MemoryTier(MemoryStorage("m"), Hosts()), MirrorPatience(), Hosts(), list[Any]()
        loader.locations = replace(
            loader.locations, memory=lambda: memory, patience=patience, hosts=hosts, on_listed=seen.append
        )
        trusts: Any = SimpleNamespace(of_named=lambda: "of a name")
        loader.trust = trusts
        restoring: Any = SimpleNamespace(prepare="prepare", opening="opening", check="check", before=lambda: None)
        for name, found_in, trust in ((None, memory, trusts), ("a", None, "of a name")):
            found: Any = loader._selection(name, restoring)
            assert (found.name, found.memory, found.trust, found.foreign) == (name, found_in, trust, True)
            assert (found.prepare, found.opening, found.check) == ("prepare", "opening", "check")
            assert (found.tiers, found.ranks) == (loader.locations.tiers, loader.ranks)
            assert (found.hosts, found.patience, found.on_listed) == (hosts, patience, seen.append)
        loader.locations = replace(loader.locations, memory=None)
        assert loader._selection(None, restoring).memory is None

    def test_the_other_ranks_see_that_it_is_at_work_and_hooks_come_before_the_objects_are_found(
        self, loader: StateLoader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []

        class Ranks(SingleProcess):
            @contextmanager
            def working(self, *, job_wide: bool = False) -> Iterator[None]:
                calls.append("working")
                yield
                calls.append("done")

        loader.ranks = Ranks()
        refresh, registry = loader.live.registry.refresh, loader.live.registry

        def refreshed() -> None:
            calls.append("refresh")
            refresh()

        monkeypatch.setattr(registry, "refresh", refreshed)
        monkeypatch.setattr(loader.live.source, "before_load", lambda folder: calls.append(folder.rpartition("/")[2]))
        restored = loader.load(None, strict=True, verify_before_overwrite=True, before=lambda: calls.append("before"))
        assert restored is not None
        assert calls[:4] == ["working", "before", "refresh", "working"]
        assert calls[-1] == "done"
        assert calls[calls.index("a") + 1] == "refresh"

    def test_what_the_registered_generators_would_not_accept_is_refused_before_anything_is_read(
        self, loader: StateLoader
    ) -> None:
        def check(**generators: Any) -> None:
            reader: Any = SimpleNamespace(manifest=SimpleNamespace(name="a"), state={"generators": generators})
            loader._check_generators(reader)

        check(noise=torch.Generator().get_state(), gone="x")
        check()
        with pytest.raises(DamagedError, match=r"^a is not a valid StateManager checkpoint"):
            check(noise="x")

    def test_a_ranks_own_state_goes_back_and_what_new_ranks_have_of_others_is_noted(self, loader: StateLoader) -> None:
        for values, saved_by, noted in (({"lr": 1}, 1, False), ({"lr": 1}, 2, True), ({}, 1, False), ({}, 2, False)):
            went: list[Any] = []
            registry = SimpleNamespace(generators={}, values=SimpleNamespace(restore=lambda values: [*values, "gone"]))
            live: Any = SimpleNamespace(
                source=SimpleNamespace(go_back=went.append), registry=registry,
                loop=SimpleNamespace(go_back=lambda *given, went=went: went.extend(given)),
            )  # fmt: skip
            reader: Any = SimpleNamespace(
                manifest=SimpleNamespace(name="a", world_size=saved_by, progress={"step": 3}, origin=""),
                state={
                    "rng": rng.capture(), "generators": {}, "loaders": {"data": {}}, "values": values,
                    "source": {"step": 1}, "loop": {"ahead": 2},
                },
            )  # fmt: skip
            loader.live, notes = live, Notes()
            loader._restore_rank_state(reader, notes)
            assert ("values" in notes.approximated) == noted
            assert notes.skipped.keys() == {*values, "gone"}
            source, progress, unclaimed, loop = went
            assert (source, progress.step, loop) == ({"step": 1}, 3, {"ahead": 2})
            assert unclaimed.reported

    def test_its_end_is_told_with_where_it_came_from(
        self, loader: StateLoader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        told: list[Any] = []
        loader.follow = lambda *given: told.append(given)
        loader.load("a", strict=True, verify_before_overwrite=True, then=told.append)
        (manifest, damaged, tier, passed_over), from_memory = told
        assert (manifest.name, damaged, tier, passed_over, from_memory) == ("a", frozenset(), 0, {}, False)

        class Head:
            def advance(self, manifest: Any) -> None:
                told.append(manifest.name)

        warned: list[str] = []
        loader.trust = SimpleNamespace(head=Head(), warn=lambda manifest: warned.append(manifest.name))  # type: ignore[assignment]
        manifest = SimpleNamespace(name="a", run="r", progress={"step": 3}, metrics={}, world_size=1)
        state: dict[str, Any] = {"lacking": {}, "values": {}}
        choice: Any = SimpleNamespace(
            manifest=manifest, url="root/a", passed_over={}, in_memory=False, root_step=None,
            ready=SimpleNamespace(notes=Notes(), reader=SimpleNamespace(state=state)),
        )  # fmt: skip
        loader.ranks = SingleProcess()
        for rank, tier, advances in ((0, 0, 1), (0, 1, 1), (0, -1, 0), (0, ELSEWHERE, 0), (1, 0, 0)):
            told.clear()
            warned.clear()
            loader.ranks.rank = rank
            assert loader._report(choice, ["model"], tier).restored == ("model", "noise", "rng", "progress")
            assert (told, warned) == (["a"] * advances, ["a"] * (rank == 0))
        state |= {"lacking": {"rng": "none"}, "values": {"lr": 1}}
        choice.ready.notes.skipped["noise"] = "none"
        assert loader._report(choice, [], 1).restored == ("values", "progress")
        loader.trust = SimpleNamespace(head=None, warn=lambda manifest: None)  # type: ignore[assignment]
        loader._report(choice, [], 0)

    def test_a_newer_checkpoint_is_pointed_out_to_whoever_loads_an_older_by_its_name(
        self, loader: StateLoader, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "ckpt")
        sequence = manifest_of(loader.locations.tiers[0].url).sequence
        for older, told in ((1, True), (0, False), (-1, False)):
            caplog.clear()
            loader._tell_newer(SimpleNamespace(name="b", sequence=sequence - older))  # type: ignore[arg-type]
            assert ("a is newer than b, which you loaded by name" in caplog.text) == told
        away = PassedOn("memory://nothing-newer")
        away.list = Raises(TransientError("away."))  # type: ignore[assignment, method-assign]
        for storage in (MemoryStorage("nothing-newer"), away):
            caplog.clear()
            loader.locations = Locations((storage,))
            loader._tell_newer(SimpleNamespace(name="b", sequence=0))  # type: ignore[arg-type]
            assert caplog.messages == []


class Raises:
    """Raises an error whenever it is called."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *given: Any) -> None:
        raise self.error


class TestOneRestoration:
    @pytest.fixture
    def manager(self, tmp_path: Path) -> Iterator[ckpt.StateManager]:
        with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
            manager.save_state("a", wait=True)
            yield manager

    def restoring(self, names: list[dict[str, Any]], then: list[dict[str, Any]], **more: Any) -> tuple[Any, list[Any]]:
        """Of a registry whose parts are these when it is refreshed, and those when the objects are found."""
        registry: Any = SimpleNamespace(parts={})
        fitted: list[Any] = []

        def refresh() -> None:
            registry.parts = names.pop(0)

        def find_objects(candidate: Any) -> None:
            registry.parts = then.pop(0)

        class Noted(restore.Restoring):
            def _fitted(self, candidate: Any, everywhere: Any) -> dict[str, Any]:
                fitted.append((candidate.manifest.name, everywhere))
                self._checked = SimpleNamespace(read=lambda *given: fitted.append(given))  # type: ignore[assignment]
                return {"reads": None}

        request: Any = SimpleNamespace(ranks=SingleProcess(), registry=registry)
        return Noted(request, refresh=refresh, find_objects=find_objects, **more), fitted

    def test_it_is_checked_again_if_hooks_have_changed_the_objects_after_all_ranks_told_theirs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[Any] = []

        def together(ranks: Any, call: str, mine: Result[Any], decide: Any) -> Any:
            if "names" not in call:
                return decide_together(ranks, call, mine, decide)
            said.append(mine.get())
            return {"far": []}

        first, second = named(model={"a"}), named(model={"a", "b"})
        manifest = Manifest(name="x", id="i", sequence=1, created=MOMENT, run="r", files=())
        with ExitStack() as held:
            for then, told, again in ((first, {"told": 1}, False), (second, {"told": 1}, True), (first, None, True)):
                restoring, fitted = self.restoring([first], [then])
                assert restoring.opening.mine()["names"] == {"model": ["a"]}
                candidate = Candidate(MemoryStorage("restoring"), manifest, held, told=told)
                answer = restoring.check.mine(candidate)
                assert answer == ({"changed": True} if again else {"reads": None})
                assert fitted == ([] if again else [("x", told)])
                checked = restoring.check.join([answer])
                assert checked == ({"changed": True} if again else {"plan": None})
                del fitted[:]
                monkeypatch.setattr(restore, "decide_together", together)
                assert restoring.prepare(replace(candidate, checked=checked)) is restoring._checked
                assert fitted == [*([("x", {"far": []})] if again else []), ("load_state('x')", None, held)]
                monkeypatch.undo()
            assert [sorted(one["names"]["model"]) for one in said] == [["a", "b"], ["a"]]

    def test_objects_that_cannot_be_found_yet_end_no_load_and_what_comes_before_does(self) -> None:
        restoring, _ = self.restoring([], [])
        assert restoring.opening.mine() is None

        def fails() -> None:
            raise ValueError("before")

        restoring, _ = self.restoring([named(model={"a"})], [], before=fails)
        with pytest.raises(ValueError, match="before"):
            restoring.opening.mine()

    def test_one_rank_whose_objects_changed_lets_all_check_again(self) -> None:
        joint, alone = restore._joint_check, {"reads": None}
        files: Any = {"reads": {"host": "one", "files": {"x": "1"}, "once_per_job": False}}
        assert joint([alone, {"changed": True}]) == {"changed": True}
        assert joint([alone, alone]) == {"plan": None}
        (plan,) = joint([files, files])["plan"]
        assert (plan["ranks"], plan["files"]) == ([0, 1], {"x": 0})

    @pytest.mark.parametrize("verify", [True, False])
    def test_live_objects_are_untouched_until_all_is_verified_unless_they_are_new(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
    ) -> None:
        model, extra = nn.Linear(2, 2), Stateful({"value": torch.arange(3.0), "gone": 1})
        saved = [parameter.detach().clone() for parameter in model.parameters()]

        def is_restored() -> bool:
            return all(map(torch.equal, saved, model.parameters()))

        with ckpt.StateManager(tmp_path, model=model) as manager:
            manager.register(extra=extra)
            manager.save_state("a", wait=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(9)
            extra.state = {"value": torch.zeros(3), "gone": 0}
            noted: list[Any] = []

            def check(reader: CheckpointReader) -> None:
                noted.append(reader)
                reader.state["lacking"] = {"rng": "none"}
                reader.parts |= {"other": {}, "far": {}, "absent": {}}
                reader.own["absent-own-00000"] = {"absent": True}

            monkeypatch.setattr(restore, "from_main_rank", lambda reader, parts: {"model": "the main rank's"})
            request = restore.RestoreRequest(
                ranks=SingleProcess(), registry=manager.session.loader.live.registry, strict=True,
                verify_before_overwrite=verify, check=check,
                on_first_write=lambda name: noted.append((name, is_restored())),
            )  # fmt: skip
            altered = tmp_path / "a" / "model.safetensors"
            good, bad = altered.read_bytes(), bytearray(altered.read_bytes())
            bad[-1] ^= 1
            for data in (bytes(bad), good):
                altered.write_bytes(data)
                noted.clear()
                with ExitStack() as held:
                    candidate = Candidate(open_storage(tmp_path), manifest_of(tmp_path), held)
                    found = restore.Restoration.checked(candidate, request, Elsewhere(parts=frozenset({"far"})))
                    assert noted == [found.reader]
                    assert found.reader.per_rank
                    assert found.notes.approximated == {"rng": "none", "model": "the main rank's"}
                    assert found.notes.skipped == {"other": "in the checkpoint, but not managed here"}
                    if data != good:
                        with pytest.raises(DamagedError):
                            found.read("load", None, held)
                        assert noted[1:] == ([] if verify else [("a", False)])
                        continue
                    found.read("load", None, held)
                    assert (noted[1:], is_restored()) == ([] if verify else [("a", False)], not verify)
                    assert extra.state["gone"] == 0
                    assert sorted(found.finish(lambda: noted.append("then"))) == ["extra", "model"]
                assert (noted[1:], is_restored()) == ([("a", False), "then"], True)
                assert torch.equal(extra.state["value"], torch.arange(3.0))
                assert extra.state["gone"] == 1
            extra.load_state_dict = Raises(ValueError("no"))  # type: ignore[assignment, method-assign]
            with pytest.raises(ckpt.StateError, match="extra could not load its state: ValueError: no"):
                found._set()

    def test_objects_without_memory_get_some_as_soon_as_they_are_asked_for(
        self, manager: ckpt.StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for on_meta, noted in ((True, ["a"]), (False, [])):
            written: list[str] = []
            monkeypatch.setattr(restore, "any_on_meta", lambda parts, on_meta=on_meta: on_meta)
            request = restore.RestoreRequest(
                ranks=SingleProcess(), registry=manager.session.loader.live.registry, strict=True,
                verify_before_overwrite=True, on_first_write=written.append,
            )  # fmt: skip
            with ExitStack() as held:
                candidate = Candidate(open_storage(tmp_path), manifest_of(tmp_path), held)
                restore.Restoration.checked(candidate, request, Elsewhere())
            assert written == noted

    def test_what_a_rank_wants_to_read_is_told_where_ranks_read_for_each_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broadcasts, told = object(), list[Any]()

        @contextmanager
        def planned(*given: Any) -> Iterator[Any]:
            told.append(given)
            yield broadcasts

        checked: Any = SimpleNamespace(reader=SimpleNamespace(wanted=([], [])))
        monkeypatch.setattr(restore.Restoration, "checked", lambda candidate, request, elsewhere: checked)
        monkeypatch.setattr("ckpt.load.broadcast.planned_broadcasts", planned)
        far, near = PassedOn("memory://wanted"), MemoryStorage("wanted")
        far.is_local = False
        ranks = SingleProcess()
        ranks.world_size = 2
        for storage, shared in ((near, False), (far, True)):
            restoring, _ = self.restoring([named(model={"a"})], [])
            restoring.request = restore.RestoreRequest(
                ranks=ranks, registry=restoring.request.registry, strict=True, verify_before_overwrite=True
            )
            restoring.opening.mine()
            with ExitStack() as held:
                candidate = Candidate(storage, SimpleNamespace(), held)  # type: ignore[arg-type]
                answer = restore.Restoring._fitted(restoring, candidate, {})
            assert (answer["reads"] is not None) == shared
            assert restoring._checked is checked
        reader: Any = SimpleNamespace(broadcasts=None, read_new=lambda: None, verify_live=lambda: None)
        restoration = restore.Restoration(reader, restoring.request, {}, Notes(), {})
        monkeypatch.setattr(restore, "run_on_all_ranks", lambda ranks, call, do: do())
        with ExitStack() as held:
            restoration.read("load", None, held)
            assert (reader.broadcasts, told) == (None, [])
            restoration.read("load", ["plan"], held)
            assert (reader.broadcasts, told) == (broadcasts, [(ranks, ["plan"])])

    def test_what_would_not_begin_afresh_is_verified_before_it_is_written(self) -> None:
        registry: Any = SimpleNamespace()
        request = restore.RestoreRequest(
            ranks=SingleProcess(), registry=registry, strict=True, verify_before_overwrite=False
        )
        restoring, manifest = restore.Restoring(request), SimpleNamespace()
        with ExitStack() as held:
            candidate = Candidate(MemoryStorage("afresh"), manifest, held)  # type: ignore[arg-type]
            assert restoring._request_for(candidate) is request
            afresh = restoring._request_for(replace(candidate, or_afresh=True))
        assert afresh == replace(request, verify_before_overwrite=True)

    def test_names_that_a_hook_has_changed_are_told_anew_for_every_candidate(self) -> None:
        parts = named(model={"a"})
        registry: Any = SimpleNamespace(parts=parts)
        request = restore.RestoreRequest(
            ranks=SingleProcess(), registry=registry, strict=True, verify_before_overwrite=True
        )
        restoring = restore.Restoring(request, find_objects=lambda _: parts.update(named(more={"b"})))
        told = restoring.opening.mine()
        with ExitStack() as held:
            candidate = Candidate(MemoryStorage("told"), SimpleNamespace(), held, told=told)  # type: ignore[arg-type]
            assert [restoring.check.mine(candidate) for _ in range(2)] == 2 * [{"changed": True}]

    def test_open_windows_end_where_no_gradients_are_restored_and_new_rates_are_named(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Rates(OptimizerPart):
            def __init__(self) -> None:
                pass

            def adopt_rates(self, about: Any) -> str | None:
                says: str | None = about["says"]
                return says

        layout = frozenset({Layout((2,), (0, 1), ("S0",))})
        model = SimpleNamespace(layouts=lambda members: frozenset())
        parts: dict[str, Any] = {"model": model, "new": model, "gradients": GradientsPart("gradients", {})}
        for key in ("named", "unnamed"):
            parts[key] = Rates()
        reader: Any = SimpleNamespace(
            manifest=SimpleNamespace(name="a"), members=None, has_tensors=lambda key: key in ("model", "new"),
            layouts=lambda key: layout if key == "model" else frozenset(),
            parts={"named": {"about": {"says": "other rates"}}, "unnamed": {"about": {"says": None}}},
        )  # fmt: skip
        for keys, rank, left in (
            (["model", "new", "named", "unnamed"], 0, 1), (["model", "gradients"], 0, 0), (["named"], 1, 1),
        ):  # fmt: skip
            noted: list[str] = []
            ranks = SingleProcess()
            ranks.rank = rank
            request: Any = SimpleNamespace(
                ranks=ranks, verify_before_overwrite=False,
                registry=SimpleNamespace(leave_windows=lambda noted=noted: noted.append("left")),
            )  # fmt: skip
            setters: dict[str, Any] = {key: lambda: None for key in keys}
            found = restore.Restoration(reader, request, parts, Notes(), setters)
            caplog.clear()
            found._set_all(None, partial(noted.append, "then"))
            assert noted == ["left"] * left + ["then"]
            assert found.notes.resharded == ({"model": "2 ranks: S0 -> whole"} if "model" in keys else {})
            told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
            assert told == (["other rates"] if "named" in keys and rank == 0 else [])


def test_what_nobody_has_said() -> None:
    one, other = report(on_read=lambda: None), report(on_read=lambda: None)
    assert one == other
    assert "on_read" not in repr(one)
    assert (one.from_memory, one.root_step) == (False, None)
    with ExitStack() as held:
        assert not Candidate(
            MemoryStorage("none"), Manifest(name="a", id="i", sequence=1, created=MOMENT, run="r", files=()), held
        ).or_afresh
    selection: Selection[None] = Selection(tiers=(), ranks=SingleProcess(), prepare=lambda candidate: None)
    assert (selection.foreign, selection.call) == (False, "load_state()")
    assert replace(selection, name="a").call == "load_state('a')"
    assert not Inspection(SingleProcess(), "load").vanished
    for kind, own in ((Inspection, {"vanished"}), (StateLoader, {"half_loaded"})):
        assert {each.name for each in fields(kind) if not each.init} == own
