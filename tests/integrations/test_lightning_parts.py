"""The parts of Lightning's plugin and callbacks, each with its cases, without a fit."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ckpt
from ckpt.errors import ConfigError, DamagedError, UnsupportedError
from ckpt.integrations import lightning
from ckpt.integrations.lightning import CkptGenerators, CkptIO, LoaderPosition, advised
from tests.cli.test_main import flip_a_bit

pytestmark = pytest.mark.slow  # Lightning alone is imported for three seconds


def checkpoint(*, begun: int = 3, last: bool = False, processed: int = 2, states: Any = ({"a": 1},)) -> dict[str, Any]:
    progress = {"is_last_batch": last, "current": {"processed": processed}}
    fit = {
        "state_dict": {"combined_loader": [*states]}, "epoch_progress": {"current": {"started": begun}},
        "epoch_loop.batch_progress": progress,
    }  # fmt: skip
    return {"loops": {"fit_loop": fit}}


def test_a_position_is_in_an_epoch_or_at_the_beginning_of_the_next() -> None:
    assert LoaderPosition.of(checkpoint()) == LoaderPosition(2, False, [{"a": 1}])
    assert LoaderPosition.of(checkpoint(last=True)) == LoaderPosition(3, True, [{"a": 1}])
    assert LoaderPosition.of(checkpoint(processed=0)) == LoaderPosition(3, True, [{"a": 1}])
    ended = checkpoint(last=True, states=[{"_iterator_finished": True, "x": 1}])
    assert LoaderPosition.of(ended) == LoaderPosition(3, True, [{"_iterator_finished": False, "x": 1}])
    without: list[dict[str, Any]] = [{}, {"loops": {}}, checkpoint(begun=0), checkpoint(states=())]
    assert [LoaderPosition.of(one) for one in without] == [None] * 4


def test_a_loaders_samplers_are_each_found_once() -> None:
    plain: Any = DataLoader(torch.arange(4))  # type: ignore[arg-type]
    assert lightning._samplers(plain) == [plain.sampler]
    own, inner = object(), object()
    two = SimpleNamespace(sampler=own, batch_sampler=SimpleNamespace(sampler=inner))
    assert lightning._samplers(two) == [own, inner]
    assert lightning._samplers([1, 2]) == []
    assert not lightning._has_state(plain)
    assert lightning._has_state(SimpleNamespace(state_dict=1, load_state_dict=1))
    assert not lightning._has_state(SimpleNamespace(state_dict=1))


def test_paths_counters_and_devices_are_read_as_lightning_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {
        "/a/b": ("/a", "b"), "/b/": ("/", "b"), "x.ckpt": (str(tmp_path), "x.ckpt"), "s3://u/r/x": ("s3://u/r", "x"),
    }  # fmt: skip
    assert {path: lightning._split_path(path) for path in paths} == paths
    counted = lightning._progress({"epoch": 2, "global_step": 7})
    assert (counted.epoch, counted.step) == (2, 7)
    odd = lightning._progress({"epoch": "x"})
    assert (odd.epoch, odd.step) == (0, 0)
    saved: Any = SimpleNamespace(shape=(2, 3), dtype=torch.float16)
    made = lightning._allocator("meta")(saved)
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.float16, "meta")
    assert lightning._allocator(None)(saved) is None
    assert lightning._allocator({"cuda:0": "cpu"})(saved) is None


def test_what_cannot_be_held_is_said_with_where_it_comes_from() -> None:
    with pytest.raises(UnsupportedError, match="Lightning took this from hparams") as raised, advised():
        raise UnsupportedError("an object", ("x",))
    assert raised.value.problems == ("x",)


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_is_written_loaded_and_removed_when_it_is_time(tmp_path: Path, background: bool) -> None:
    plugin = CkptIO(background=background)
    content = {"state_dict": {"w": torch.ones(2)}, "epoch": 1, "global_step": 5, "odd": {"a": (1, 2)}}
    for name in ("a.ckpt", "b.ckpt"):
        plugin.save_checkpoint(content, tmp_path / name)
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    found = plugin.load_checkpoint(tmp_path / "b.ckpt")
    assert list(found) == list(content)
    assert torch.equal(found["state_dict"]["w"], torch.ones(2))
    assert (found["epoch"], found["odd"]) == (1, {"a": (1, 2)})
    assert [(one.name, one.step) for one in ckpt.list_checkpoints(tmp_path)] == [("b.ckpt", 5)]
    with pytest.raises(ConfigError, match="CkptIO accepts no storage_options"):
        plugin.save_checkpoint(content, tmp_path / "c.ckpt", storage_options={})
    assert CkptIO.newest(tmp_path) == f"{tmp_path}/b.ckpt"
    plugin.save_checkpoint(content, tmp_path / "d.ckpt")
    plugin.teardown()
    assert plugin._savers == {}
    assert CkptIO.newest(tmp_path) == f"{tmp_path}/d.ckpt"
    flip_a_bit(tmp_path / "d.ckpt" / "model.safetensors")
    assert CkptIO.newest(tmp_path) == f"{tmp_path}/b.ckpt"
    with pytest.raises(DamagedError, match=r"d\.ckpt is damaged"):
        CkptIO().load_checkpoint(tmp_path / "d.ckpt")
    assert CkptIO.newest(tmp_path / "none") is None
    named: Any = {1: "a number is no name of a file", "state_dict": {}}
    plugin.save_checkpoint(named, tmp_path / "e.ckpt")
    assert plugin.load_checkpoint(tmp_path / "e.ckpt") == named
    plugin.teardown()


def test_generators_go_back_at_the_start_and_again_in_the_middle_of_an_epoch() -> None:
    generators: Any = CkptGenerators()
    fit, other = (SimpleNamespace(state=SimpleNamespace(fn=what)) for what in ("fit", "test"))
    random.seed(1)
    saved: dict[str, Any] = {}
    generators.on_save_checkpoint(None, None, saved)
    expected = random.random()
    drawn = []
    for trainer, index in ((fit, 0), (fit, 3), (other, 3)):
        random.seed(2)
        generators.on_load_checkpoint(trainer, None, saved)
        generators.on_fit_start(None, None)
        first = random.random() == expected
        generators.on_train_batch_start(None, None, None, index)
        second = random.random() == expected
        generators.on_train_batch_start(None, None, None, index + 1)
        drawn.append((first, second, random.random() == expected))
    assert drawn == [(True, False, False), (True, True, False), (False, False, False)]
    generators.on_load_checkpoint(fit, None, checkpoint())
    assert generators._position == LoaderPosition(2, False, [{"a": 1}])
    generators.on_load_checkpoint(other, None, checkpoint())
    assert generators._position is None
