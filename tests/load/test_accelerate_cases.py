"""Folders that Accelerate wrote, case by case: which file is which part, which is the newest, where loaders were."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_of
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.layout import Box
from ckpt.load import accelerate as reading
from ckpt.load.accelerate import (
    NO_GENERATORS,
    AccelerateState,
    ForeignPart,
    foreign_manifest,
    foreign_names,
    foreign_positions,
    kind_of,
    open_foreign,
    split_name,
)
from ckpt.ranks.consensus import SingleProcess
from ckpt.root.folder import ROOT_ITSELF, Folder
from ckpt.state.parts import Notes
from ckpt.storage import MemoryStorage


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def random_states(**more: Any) -> dict[str, Any]:
    return {"random_state": random.Random(1).getstate(), "torch_manual_seed": torch.get_rng_state(), **more}


def folder_of(name: str, files: dict[str, Any]) -> MemoryStorage:
    storage = MemoryStorage(f"accelerate-{random.random()}")
    for path, value in files.items():
        storage.write(f"{name}/{path}" if name else path, [value if isinstance(value, bytes) else pickled(value)])
    return storage


WEIGHTS = safetensors_of({"w": torch.arange(6.0).view(2, 3)})


def state_of(name: str = "checkpoint_4", live: tuple[str, ...] = (), **files: Any) -> AccelerateState:
    given = {"model.safetensors": WEIGHTS, "random_states_0.pkl": random_states(step=7)}
    storage = folder_of(name, given | {path.replace("__", "."): value for path, value in files.items()})
    return AccelerateState(Folder.of_checkpoint(storage, name), live)


class TestTheState:
    def test_a_ranks_own_state_counts_the_saves_and_the_steps(self) -> None:
        for name, saves in (("checkpoint_4", 5), ("checkpoint_0", 1), ("last", 0)):
            state = state_of(name).rank_state(0)
            assert state["source"] == {"step": 7, "sync_gradients": True, "saves": saves, "loaders": {}}
            assert (state["generators"], state["loaders"]) == ({}, {})
            assert state["rng"].keys() == {"python", "torch"}
            assert "lacking" not in state
        assert state_of(random_states_0__pkl=random_states()).rank_state(0)["source"]["step"] == 0
        bare = state_of(random_states_0__pkl={"step": 3}).rank_state(0)
        assert (bare["lacking"], bare["source"]["step"], "rng" in bare) == ({"rng": NO_GENERATORS}, 3, False)
        with pytest.raises(DamagedError, match=r"is not the state of random generators \(ValueError"):
            state_of(random_states_0__pkl=random_states(numpy_random_seed=(1, 2))).rank_state(0)

    def test_parts_have_the_keys_of_the_manager_in_their_order(self) -> None:
        def keyed(kind: str, count: int, *live: str) -> list[str]:
            return list(reading._keyed({kind: dict.fromkeys(range(count))}, list(live)))

        assert keyed("model", 1) == ["model"]
        assert keyed("model", 2) == ["model.0", "model.1"]
        assert keyed("model", 2, "optimizer.x", "model.a", "model.b") == ["model.a", "model.b"]
        assert keyed("model", 2, "model.a") == ["model.a", "model.1"]
        assert keyed("dataloader", 1) == ["dataloader.0"]
        assert keyed("custom", 1) == ["custom.0"]
        assert keyed("custom", 2, "mine", "model", "yours") == ["mine", "yours"]
        for key, kind in (
            ("model", "model"),
            ("optimizer.b", "optimizer"),
            ("mine", "custom"),
            ("modelling", "custom"),
        ):
            assert kind_of(key) == kind

    def test_an_optimizers_parameters_are_named_with_its_models_prefix_if_there_are_several(self) -> None:
        def optimizer(*names: Any) -> dict[str, Any]:
            return {"state": dict.fromkeys(names, 1), "param_groups": [{"params": list(names)}]}

        parts = {"model": {}, "optimizer": optimizer("w"), "scheduler": {}}
        reading._name_parameters(parts)
        assert parts["optimizer"] == optimizer("w")
        parts = {"model.a": {}, "model.b": {}} | {f"optimizer.{n}": optimizer("w", n) for n in range(3)}
        parts["optimizer.3"] = {"other": 1}
        reading._name_parameters(parts)
        assert [next(iter(parts[f"optimizer.{n}"]["state"])) for n in range(3)] == ["a.w", "b.w", "w"]
        assert parts["optimizer.3"] == {"other": 1}
        with pytest.raises(DamagedError, match=r"is not the state of an optimizer \(TypeError"):
            state_of(optimizer__bin={"state": {}, "param_groups": 3})

    def test_a_tensor_or_a_box_of_it_is_read_from_a_file_or_from_memory(self) -> None:
        whole, box = torch.arange(6.0).view(2, 3), Box((1, 1), (1, 2))
        parts = {"file": state_of().parts["model"], "memory": ForeignPart({}, {"model.w": whole})}
        for where, part in parts.items():
            (name,) = part.tensors
            assert part.about(name) == (torch.float32, (2, 3)), where
            assert torch.equal(part.read(name), whole)
            assert torch.equal(part.read(name, box), whole[1:, 1:])

    def test_values_that_no_file_can_hold_are_problems(self) -> None:
        problems: list[str] = []
        reading.encoded_part("custom", {"x": object()}, problems)
        assert len(problems) == 1


class TestNames:
    @pytest.mark.parametrize(
        ("name", "split"),
        [
            ("checkpoint_12", ("checkpoint_", 12)), ("epoch-3-final", ("epoch-", 3)), ("step_1_2", ("step_1_", 2)),
            ("last", ("last", None)), ("", ("", None)), ("7", ("", 7)),
        ],
    )  # fmt: skip
    def test_the_last_number_of_a_name(self, name: str, split: tuple[str, int | None]) -> None:
        assert split_name(name) == split

    def test_the_highest_number_is_the_newest_and_the_root_itself_comes_before_all(self) -> None:
        def names(*folders: str) -> list[str]:
            storage = MemoryStorage(f"accelerate-names-{random.random()}")
            for folder in folders:
                storage.write(f"{folder}random_states_0.pkl", [b"x"])
            storage.write("notes/readme.txt", [b"x"])
            return foreign_names(storage)

        assert names() == []
        assert names("a_9/", "a_10/", "a_0/", "a_1/") == ["a_10", "a_9", "a_1", "a_0"]
        assert names("best/") == ["best"]
        assert names("a_9/", "") == [ROOT_ITSELF]
        with pytest.raises(ConfigError, match=r"a_1, b_2.*load_state\('b_2'\)"):
            names("b_2/", "a_1/")

    def test_what_stands_for_the_manifest(self) -> None:
        files = {f"random_states_{rank}.pkl": random_states(step=rank) for rank in range(2)}
        storage = folder_of("a_1", {"model.safetensors": WEIGHTS, **files})
        manifest = foreign_manifest(storage, "a_1")
        assert (manifest.name, manifest.id, manifest.sequence) == ("a_1", "accelerate:a_1", 0)
        assert (manifest.files, manifest.world_size, manifest.origin) == ((), 2, "accelerate")
        assert reading.foreign_folder(manifest) == f"{storage.url}/a_1"
        reader = open_foreign(manifest, 5, ["model.mine"])
        assert reader.parts.keys() == {"model.mine"}
        assert reader.state["source"]["step"] == 0  # a rank that was not there has the main one's state
        assert open_foreign(manifest, 1, []).state["source"]["step"] == 1
        assert (reader.has_tensors("model.mine"), reader.wanted, reader.own) == (True, ([], []), {})
        read = reader.ask("model.mine")
        reader.read_new()
        assert torch.equal(read()["w"], torch.arange(6.0).view(2, 3))
        reader.verify_live()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


class StatefulLoader:
    """A loader of a stream that keeps its own state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def __len__(self) -> int:
        return 4


class TestPositions:
    @pytest.mark.parametrize(
        ("state", "found"),
        [
            ({"_num_yielded": 3}, (3, False)),
            ({"_num_yielded": 3, "_iterator_finished": True}, (3, True)),
            ({"_num_yielded": 3, "_iterator_finished": 1}, (3, False)),
            ({"_num_yielded": -1}, (None, False)),
            ({"_snapshot": {"_snapshot_step": 2}, "_steps_since_snapshot": 5}, (7, False)),
            ({"_snapshot": {"_snapshot_step": 2}}, (None, False)),
            ({"_snapshot": 2, "_steps_since_snapshot": 5}, (None, False)),
            ({}, (None, False)),
        ],
    )
    def test_how_many_batches_were_done(self, state: Any, found: tuple[int | None, bool]) -> None:
        assert reading._progress(state, "x") == found
        with pytest.raises(DamagedError, match="is not the state of a loader"):
            reading._progress([state], "x")

    def reader(self, states: dict[str, Any], world_size: int = 1) -> Any:
        """A reader of a folder that has these states of loaders."""
        return SimpleNamespace(
            manifest=SimpleNamespace(name="a_1", origin="accelerate", world_size=world_size),
            parts=states,
            ask=lambda key: lambda: states[key],
            read_new=lambda: None,
        )

    def positions(self, loader: Any, state: Any = None, world_size: int = 1) -> tuple[Any, Notes]:
        notes = Notes()
        notes.skipped["dataloader.0"] = "in the checkpoint, but not managed here"
        states = {} if state is None else {"dataloader.0": state}
        found = foreign_positions(self.reader(states, world_size), {"dataloader.0": loader}, SingleProcess(), notes)
        assert not notes.skipped
        assert found.keys() <= {"dataloader.0"}
        return found.get("dataloader.0"), notes

    def test_a_loader_goes_on_where_it_was_or_its_epoch_begins_again_with_the_reason(self) -> None:
        data = TensorDataset(torch.arange(8))
        loader = DataLoader(data, batch_size=2)
        state = {"_num_yielded": 3}
        found, notes = self.positions(loader, state)
        assert found == {"batches": 3, "world_size": 1, "state": state}
        assert notes.approximated == {}
        assert self.positions(loader, {"_num_yielded": 4})[0]["batches"] == 4
        for nothing in ({"_num_yielded": 0}, {"_num_yielded": 4, "_iterator_finished": True}):
            found, notes = self.positions(loader, nothing)
            assert (found, notes.approximated) == (None, {})
        for where, given, ranks, why, skipped in (
            (loader, None, 1, "does not say where every loader was", "those that were done"),
            (loader, {}, 1, "does not say where every loader was", "those that were done"),
            (loader, state, 2, "2 ranks saved it, and 1 load it", "3"),
            (loader, {"_num_yielded": 5}, 1, "5 batches were done, and the loader has 4", "5"),
            (DataLoader(Stream()), state, 1, "the loader keeps no state of its own here", "3"),
        ):
            found, notes = self.positions(where, given, ranks)
            assert found is None
            assert why in notes.approximated["dataloader.0"]
            assert notes.approximated["dataloader.0"].endswith(f"skip_first_batches(loader, {skipped})")

    def test_an_order_that_is_drawn_again_is_named(self) -> None:
        class Seeded(RandomSampler):
            initial_seed = 3

        data = TensorDataset(torch.arange(8))
        seeded: Any = DataLoader(data, batch_size=2, sampler=Seeded(data))
        seeded.iteration = 6
        for loader, state, remark in (
            (DataLoader(data, batch_size=2), {}, None),
            (DataLoader(data, batch_size=2, shuffle=True), {}, "3 batches are skipped, in an order that RandomSampler"),
            (seeded, {}, "3 batches are skipped in the order of epoch 6"),
            (StatefulLoader(), {}, None),
            (StatefulLoader(), {"fetcher_state": {}, "dataset_state": None}, "3 batches of a stream without a state"),
        ):
            found, notes = self.positions(loader, {"_num_yielded": 3, **state})
            assert found["batches"] == 3
            said = notes.approximated.get("dataloader.0")
            assert said is None if remark is None else str(said).startswith(remark)

    def test_which_samplers_keep_the_order(self) -> None:
        ours = type("Shard", (), {"__module__": "accelerate.data_loader"})()
        seeded = type("Seedable", (), {"__module__": "accelerate.data_loader", "initial_seed": 1})()
        plain = SequentialSampler(range(3))
        for sampler, keeps in (
            (plain, True), (BatchSampler(plain, 2, drop_last=False), True), (ours, True), (seeded, False),
            (RandomSampler(range(3)), False), (type("Own", (SequentialSampler,), {})(range(3)), False),
        ):  # fmt: skip
            assert reading._keeps_order(sampler) == keeps
