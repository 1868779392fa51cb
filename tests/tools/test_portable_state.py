"""The state that every format is converted from and to, and what a conversion leaves out: each rule with its cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.data.progress import Progress
from ckpt.errors import ConfigError
from ckpt.formats.native.tensor_file import dtype_name
from ckpt.root.folder import ROOT_ITSELF, Folder
from ckpt.storage import open_storage
from ckpt.tools import convert as converting
from ckpt.tools import portable_state
from ckpt.tools.convert import (
    _checkpoint_name,
    _not_of_adapters,
    _objects,
    _refuse_inside_checkpoint,
    _require_names,
    _stacked,
    _told,
    left_of_ranks,
    whole_tree,
)
from ckpt.tools.portable_state import (
    PortableState,
    files_left,
    open_state,
    plain_generators,
    position_of,
    with_part_names,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model, an optimizer with moments, a scheduler, and objects of the user's own."""
    root = tmp_path_factory.mktemp("portable") / "run"
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, scheduler=scheduler) as manager:
        manager.register(generator=torch.Generator(), epoch=scheduler)
        manager.progress.step, manager.progress.epoch = 7, 2
        manager.save_state("a", wait=True)
    return root / "a"


@pytest.fixture
def state(saved: Path) -> Iterator[PortableState]:
    with open_state(saved) as found:
        yield found


def test_a_checkpoint_of_ours_has_its_parts_counters_and_ranks(state: PortableState) -> None:
    assert (state.origin, state.name, state.world_size) == ("ckpt", "a", 1)
    assert (state.progress.step, state.progress.epoch) == (7, 2)
    assert state.of_kind("model") == ["model"]
    assert state.the_model() == "model"
    assert state.written == (*state.parts, "rng")
    assert state.size("model") == 4 * (2 * 3 + 3)
    assert state.size("optimizer") == 4 * 2 * (2 * 3 + 3) + 2 * 4
    assert state.has_names("optimizer")
    assert state.has_names("scheduler")
    assert state.numbered("optimizer")["param_groups"][0]["params"] == [0, 1]
    assert state.numbered("optimizer")["state"].keys() == {0, 1}
    assert state.numbered("scheduler") == state.tree("scheduler")
    assert not state.is_authentic
    assert state.about == {}  # of the model; an optimizer's rates are none of it


def test_one_dict_has_all_parts_with_parameters_by_number_or_by_name(state: PortableState) -> None:
    tree, skipped = whole_tree(state)
    assert tree["optimizer"]["param_groups"][0]["params"] == [0, 1]
    named, _ = whole_tree(state, numbered=False)
    assert named["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert tree["step"] == 7
    assert skipped["progress: epoch"] == "2: a part has this name"
    assert "progress: batch" not in skipped
    assert {"rng", "model", "scheduler"} <= tree.keys()
    assert "rng of other ranks" not in skipped
    assert skipped["generator"] == "a generator that was registered: only ckpt keeps it"
    more, told = whole_tree(replace(state, world_size=2))
    assert "rng" in more
    assert told["rng of other ranks"] == "one file has those of the main rank; 2 ranks saved theirs"
    none, told = whole_tree(replace(state, own_state=None, world_size=2))
    assert "rng" not in none
    assert "rng of other ranks" not in told
    loaders = replace(state, parts={**state.parts, "dataloader.0": state.parts["scheduler"]})
    assert whole_tree(loaders)[1]["dataloader.0"] == converting._LOADER


def test_what_ranks_keep_that_no_other_format_has_is_named(state: PortableState) -> None:
    own: dict[str, Any] = {"values": {"v": 1}, "generators": {"g": 1}, "loaders": {"l": 1}}
    left = left_of_ranks(replace(state, own_state=lambda rank: own))
    assert left.keys() == {"v", "g", "loaders"}
    assert "loaders" not in left_of_ranks(replace(state, own_state=lambda rank: {**own, "loaders": {}}))
    assert left_of_ranks(replace(state, own_state=None)) == {}


def test_a_rank_that_kept_nothing_has_a_state_that_says_what_it_lacks(state: PortableState) -> None:
    bare = replace(state, own_state=None, approximated={"rng": "why"})
    assert bare.rank_state(0) == {"generators": {}, "loaders": {}, "source": {}, "lacking": {"rng": "why"}}
    assert bare.generators(0) is None
    assert bare.written == tuple(bare.parts)


def test_a_format_of_one_model_refuses_none_and_several(state: PortableState) -> None:
    model = state.parts["model"]
    for parts, message in (
        ({}, "a has no model, but this format needs exactly one model"),
        ({"model.a": model, "model.b": model}, r"a has 2 models \(model.a, model.b\), but this format needs"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(state, parts=parts).the_model()
    assert replace(state, parts={"model.x": model}).the_model() == "model.x"


def test_a_format_of_named_tensors_refuses_a_model_whose_state_is_a_list(state: PortableState, tmp_path: Path) -> None:
    model = state.parts["model"]
    bare = replace(state, parts={**state.parts, "model": replace(model, values=[1, 2], tensors={})})
    for export in (partial(converting.export_hugging_face, max_shard_size=None), converting.export_megatron):
        with pytest.raises(ConfigError, match="a: the state of model is a list, and this format needs a dict"):
            export(bare, tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_root_stands_for_its_newest_checkpoint(saved: Path, tmp_path: Path) -> None:
    with open_state(saved.parent) as state:
        assert state.name == saved.name
    assert ckpt.convert(saved.parent, tmp_path / "root").url == f"{tmp_path}/root/{saved.name}"


def test_parts_of_a_kind_are_ordered_by_the_number_at_the_end() -> None:
    keys = ("model.2", "model", "model.10", "model.a", "model.1234567890", "model.123456789")
    assert [position_of(key) for key in keys] == [2, 0, 10, 0, 0, 123456789]


def test_generators_are_plain_where_numpy_is_among_them() -> None:
    state = {"key": np.arange(2, dtype=np.uint32), "pos": np.int64(3)}
    plain = plain_generators({"torch": 1, "numpy": {"bit_generator": "x", "state": state}})
    assert plain == {"torch": 1, "numpy": {"bit_generator": "x", "state": {"key": [0, 1], "pos": 3}}}
    assert [type(word) for word in plain["numpy"]["state"]["key"]] == [int, int]
    assert plain_generators({"torch": 1}) == {"torch": 1}
    back = portable_state._generators(plain, "it")
    assert back["numpy"]["state"]["key"].dtype == np.uint32


def test_names_that_no_manager_or_file_can_have_are_changed_and_told(state: PortableState) -> None:
    part = state.parts["model"]
    keys = ["model", "optimizer.a", "custom.1", "my part", "my/part", "x" * 101, "rng", "a.b", "", "model.x y"]
    found = with_part_names(replace(state, parts=dict.fromkeys(keys, part)))
    names = dict(zip(keys, found.parts, strict=True))
    assert {key: names[key] for key in keys[:3]} == {key: key for key in keys[:3]}
    assert (names["my part"], names["my/part"]) == ("my_part", "my_part_1")
    assert names["x" * 101] == "x" * 50
    assert names["model.x y"] == "model.x_y"
    assert len(set(names.values())) == len(keys)
    assert all(portable_state._is_usable(name) for name in names.values())
    assert (
        found.approximated["my_part"]
        == "'my part' in the source, which is not a valid part name: register it as 'my_part'"
    )
    assert found.approximated.keys() == {new for key, new in names.items() if new != key}
    assert not any(map(portable_state._is_usable, ("rng", "rng.a", "", "x" * 101, "my part")))
    assert all(map(portable_state._is_usable, ("model", "model.a", "mine", "x" * 100)))


def test_files_beside_a_model_are_its_configuration_and_not_the_trainers_log(tmp_path: Path) -> None:
    for name in ("config.json", "trainer_state.json", "tokenizer.model", "merges.txt", "model.safetensors", "run.log"):
        (tmp_path / name).write_text(name)
    folder = Folder.of_checkpoint(open_storage(tmp_path), ROOT_ITSELF)
    found = portable_state._beside(folder)
    assert {path: read() for path, read in found.items()} == {
        name: name.encode() for name in ("config.json", "tokenizer.model", "merges.txt")
    }


def test_files_beside_a_model_are_named_unless_they_are_kept() -> None:
    beside = ["tokenizer.json", "config.json", "generation_config.json", "adapter_config.json"]
    assert files_left(beside, {"config": 1}) == {"tokenizer.json": "beside the model: only hf keeps such files"}
    assert list(files_left(beside, {})) == [", ".join(sorted(beside))]
    assert files_left([], {}) == {}


def test_a_state_dict_below_keys_of_its_own_is_found() -> None:
    outermost: Any = portable_state._outermost
    inner = {"model": {"w": 1}, "optimizer": {}}
    assert outermost({"app": inner}) == inner
    assert outermost({"outer": {"app": inner}}) == inner
    cases: list[Any] = [
        {"model": {"w": {}}},
        {"x": 5},
        {"x": {"state": {}, "param_groups": {}}},
        {"x": {"w": 1}},
        inner,
    ]
    assert [outermost(kept) for kept in cases] == cases


def test_a_file_is_named_by_its_stem() -> None:
    names = {"a/model.safetensors": "a/model", "model.safetensors.index.json": "model", "plain": "plain", ".x": ".x"}
    assert {path: portable_state._stem(path) for path in names} == names


def test_what_single_ranks_held_is_named_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [{"model-00000": 1, "gradients-00000": 1}, {"gradients-00001": 1, "extra": 1}, {"late": 1}]

    def reader(storage: Any, manifest: Any, rank: int) -> Any:
        return SimpleNamespace(own=own[rank], parts={"model": {"differs": True}, "optimizer": {}})

    monkeypatch.setattr(portable_state, "CheckpointReader", reader)
    monkeypatch.setattr(portable_state, "own_key", lambda key, rank: f"{key}-{rank:05}")
    manifest: Any = SimpleNamespace(world_size=3)
    found = portable_state._of_single_ranks(reader(None, None, 0), None, manifest)  # type: ignore[arg-type]
    assert found == {
        "model of other ranks": "their state differs: the main rank's is written",
        "gradients": portable_state._OWN_GRADIENTS,
        "extra": portable_state._OWN_PART,
        "late": portable_state._OWN_PART,
    }


class TestConvert:
    def test_options_that_another_format_has_are_refused(self, saved: Path, tmp_path: Path) -> None:
        for options, message in (
            ({"to": "zip"}, "to='zip' is not a format"),
            ({"to": "torch", "name": "x"}, "name= works only with to='ckpt'"),
            ({"to": "torch", "max_shard_size": "1GB"}, "max_shard_size= works only with to='hf'"),
        ):
            with pytest.raises(ConfigError, match=message):
                ckpt.convert(saved, tmp_path / "out", **options)
        assert list(tmp_path.iterdir()) == []
        for to in ("torch", "ckpt"):
            with pytest.raises(ConfigError, match="is inside the checkpoint"):
                ckpt.convert(saved, saved / "inside" / "it", to=to)
        _refuse_inside_checkpoint(str(saved.parent / "beside"))

    def test_a_name_that_is_there_is_refused_and_another_is_taken(self, saved: Path, tmp_path: Path) -> None:
        first = ckpt.convert(saved, tmp_path / "root")
        assert (first.url, first.parts) == (f"{tmp_path}/root/a", ("model", "optimizer", "scheduler", "epoch", "rng"))
        with pytest.raises(ConfigError, match=r"already has a checkpoint 'a'\. Choose another name="):
            ckpt.convert(saved, tmp_path / "root")
        assert ckpt.convert(saved, tmp_path / "root", name="b").url.endswith("/b")
        assert {found.name: (found.step, found.committed) for found in ckpt.list_checkpoints(tmp_path / "root")} == {
            "a": (7, True), "b": (7, True),
        }  # fmt: skip
        assert not ckpt.diff(tmp_path / "root" / "a", tmp_path / "root" / "b")
        assert ckpt.verify(tmp_path / "root") == {"a": [], "b": []}
        named: Any = SimpleNamespace(name="a/b")
        with pytest.raises(
            ConfigError, match=r"the source's name, 'a/b', is not a valid checkpoint name\. Give a valid one"
        ):
            _checkpoint_name(named)

    def test_what_is_left_out_is_not_said_to_be_approximated_too(self, state: PortableState) -> None:
        told = replace(state, approximated={"rng": "a", "data": "b"})
        assert _told(told, {"rng": "c"}) == {"data": "b"}

    def test_of_a_peft_model_the_tensors_that_are_not_written_are_counted(self) -> None:
        about = {"adapters": {"default": {"tensors": {"lora": "m.lora"}}}}
        assert _not_of_adapters("model", about, {"m.lora": 1, "m.base": 2, "m.bias": 3}) == {
            "model: base model": "2 tensors of the model that is adapted: the adapters are written, as PEFT does"
        }
        assert _not_of_adapters("model", about, {"m.lora": 1}) == {}
        assert _not_of_adapters("model", {}, {"m.base": 1}) == {}

    def test_lightning_says_what_it_has_no_place_for(self, state: PortableState, tmp_path: Path) -> None:
        state = replace(state, progress=Progress(step=7, epoch=2, batch=3))
        parts, skipped = converting.export_lightning(state, tmp_path / "x.ckpt", lambda size: None)
        assert parts == ("model", "optimizer", "scheduler")
        assert skipped["epoch"] == converting._LIGHTNING
        assert skipped["rng"] == "Lightning keeps no random generators"
        assert skipped["progress"] == "epoch 2 starts over: 3 batches of it were done"
        document = torch.load(tmp_path / "x.ckpt", weights_only=True)
        assert (document["epoch"], document["global_step"]) == (2, 7)
        assert len(document["optimizer_states"]) == len(document["lr_schedulers"]) == 1
        bare = replace(state, own_state=None, progress=Progress(step=7))
        _, skipped = converting.export_lightning(bare, tmp_path / "y.ckpt", lambda size: None)
        assert not {"rng", "progress"} & skipped.keys()

    def test_a_model_alone_says_that_the_rest_is_left(self, state: PortableState, tmp_path: Path) -> None:
        done: list[int] = []
        parts, skipped = converting.export_hugging_face(state, tmp_path, done.append, max_shard_size=None)
        assert parts == ("model",)
        assert {key for key, why in skipped.items() if why == converting._MODEL_ALONE} == {
            "optimizer", "scheduler", "epoch", "rng", "progress",
        }  # fmt: skip
        assert "config.json" in skipped
        assert sum(done) == sum(path.stat().st_size for path in tmp_path.iterdir())
        bare = replace(state, own_state=None, progress=Progress(), about={"config": {"a": 1}})
        _, skipped = converting.export_hugging_face(bare, tmp_path / "b", done.append, max_shard_size=None)
        assert not {"rng", "progress", "config.json"} & skipped.keys()

    def test_accelerate_knows_one_scaler_and_no_values_of_ranks(self, state: PortableState, tmp_path: Path) -> None:
        part = state.parts["scheduler"]
        two = replace(state, parts={"scaler.0": part, "scaler.1": part})
        with pytest.raises(ConfigError, match="a has 2 scalers, but Accelerate can load only one"):
            converting.export_accelerate(two, tmp_path / "a", lambda size: None)
        (tmp_path / "b").mkdir()
        parts, skipped = converting.export_accelerate(state, tmp_path / "b", lambda size: None)
        assert parts[-1] == "rng"
        assert "continue with epoch 2, and there with accelerator.skip_first_batches(loader, 0)" in skipped["progress"]
        assert skipped["generator"] == "Accelerate keeps only the global generators"
        bare = replace(state, own_state=None, progress=Progress(), approximated={"rng": "why"})
        (tmp_path / "c").mkdir()
        parts, skipped = converting.export_accelerate(bare, tmp_path / "c", lambda size: None)
        assert "rng" not in parts
        assert skipped == {"rng": converting._NO_GENERATORS}


class TestMegatron:
    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return SimpleNamespace(dtype=dtype, shape=shape)

    def test_layers_are_stacked_where_all_are_alike(self) -> None:
        alike = {f"decoder.layers.{layer}.mlp.weight": self.tensor(2, 3) for layer in (1, 0, 2)}
        entries = _stacked({**alike, "head": self.tensor(5)}, "it")
        assert {name: (dtype_name(entry.dtype), entry.shape) for name, entry in entries.items()} == {
            "head": ("float32", (5,)), "decoder.layers.mlp.weight": ("float32", (3, 2, 3)),
        }  # fmt: skip
        shards = entries["decoder.layers.mlp.weight"].shards
        assert [(shard.offsets, shard.sizes) for shard in shards] == [((layer, 0, 0), (1, 2, 3)) for layer in range(3)]
        for odd in (
            {**alike, "decoder.layers.3.mlp.weight": self.tensor(2, 4)},
            {**alike, "decoder.layers.3.mlp.weight": self.tensor(2, 3, dtype=torch.float16)},
            {**alike, "decoder.layers.4.mlp.weight": self.tensor(2, 3)},
            {"decoder.layers.1.mlp.weight": self.tensor(2, 3)},
        ):
            with pytest.raises(ConfigError, match=r"decoder\.layers\.mlp\.weight in it is not the same in every layer"):
                _stacked(odd, "it")

    def test_a_model_needs_its_names_and_what_is_no_tensor_is_left_out(self) -> None:
        _require_names({"decoder.layers.0.mlp.weight": self.tensor(1), "other": self.tensor(1)}, "it")
        with pytest.raises(ConfigError, match="the model of it does not use Megatron-Core's parameter names"):
            _require_names({"layers.0.weight": self.tensor(1)}, "it")
        objects, skipped = _objects({"a.mlp._extra_state": None, "b.mlp._extra_state": 5, "other": None})
        assert len(objects) == 1
        assert list(objects.values()) == [[None]]
        assert skipped == dict.fromkeys(
            ("model.b.mlp._extra_state", "model.other"), "not a tensor, so it is not written"
        )


def test_the_configuration_of_a_model_comes_along_whatever_is_trained_with_it(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        manager.save_state("a", wait=True)
    ckpt.convert(tmp_path / "run" / "a", tmp_path / "copy")
    for source in (tmp_path / "run" / "a", tmp_path / "copy" / "a"):
        out = tmp_path / f"{source.parent.name}-hf"
        found = ckpt.convert(source, out, to="hf")
        assert "config.json" not in found.skipped
        assert GPT2LMHeadModel.from_pretrained(out).config.n_embd == 4
