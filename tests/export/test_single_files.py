"""One file is a source too: of safetensors, as merge writes them, of torch.save, of Lightning. Nothing is executed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from tests.helpers.training import exact


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_load_model_takes_what_merge_wrote_whole_or_in_shards(tmp_path: Path) -> None:
    model = net()
    with ckpt.StateManager(tmp_path / "run", model=model) as manager:
        manager.save_state("x")
    ckpt.merge(tmp_path / "run" / "x", tmp_path / "whole.safetensors")
    written = ckpt.merge(tmp_path / "run" / "x", tmp_path / "cut.safetensors", max_shard_size=100)
    assert len(written) > 2
    for source in ("whole.safetensors", "cut.safetensors", "cut.safetensors.index.json"):
        other = net(1)
        assert ckpt.load_model(tmp_path / source, other) == {}, source
        assert exact(other.state_dict()) == exact(model.state_dict())
        ckpt.merge(tmp_path / source, tmp_path / f"again-{source}.safetensors")
    with pytest.raises(ckpt.MissingError, match="no part 'optimizer': safetensors files contain only a model"):
        ckpt.merge(tmp_path / "whole.safetensors", tmp_path / "out.safetensors", part="optimizer")


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda state: state,
        lambda state: {"model": state},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"net": state, "args": argparse.Namespace(lr=1)},
        lambda state: {"model_state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {"ema": state, "model": state},
        lambda state: {"anything": state},
    ],
)
def test_a_file_of_torch_save_holds_a_model_under_the_names_that_people_use(wrapped: Any, tmp_path: Path) -> None:
    model, other = net(), net(1)
    torch.save(wrapped(model.state_dict()), tmp_path / "last.pt")
    assert ckpt.load_model(tmp_path / "last.pt", other) == {}
    assert exact(other.state_dict()) == exact(model.state_dict())


def test_parts_of_a_script_keep_their_names_and_what_is_no_part_is_named(tmp_path: Path) -> None:
    first, second = net(), net(1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5, momentum=0.9)
    state = {"netG": first.state_dict(), "netD": second.state_dict(), "optG": optimizer.state_dict()}
    own = {"args": argparse.Namespace(lr=0.5), "best": 0.25, "iteration": 12}
    torch.save({**state, **own}, tmp_path / "gan.pt")
    converted = ckpt.convert(tmp_path / "gan.pt", tmp_path / "run")
    assert converted.parts == ("model.netG", "model.netD", "optimizer")
    assert converted.skipped.keys() == {"args", "best"}
    assert "argparse.Namespace, which is not built" in converted.skipped["args"]
    (found,) = ckpt.list_checkpoints(tmp_path / "run")
    assert found.manifest is not None
    assert (found.name, found.manifest.step) == ("gan", 12)


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_what_a_pickle_would_execute_is_not_and_what_holds_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": net().state_dict(), "hook": Payload()}, "evil.pt")
    torch.save(Payload(), "worse.pt")
    converted = ckpt.convert("evil.pt", "run")
    assert "posix.system, which is not built" in converted.skipped["hook"]
    with pytest.raises(ckpt.ConfigError, match=r"worse\.pt holds a posix\.system object"):
        ckpt.convert("worse.pt", "run")
    torch.save(net(), "module.pt")
    with pytest.raises(ckpt.ConfigError, match=r"holds a torch\.nn\.modules\.container\.Sequential object"):
        ckpt.load_model("module.pt", net())
    assert not Path("executed").exists()


def test_tied_weights_stay_one_and_a_converted_file_is_like_any_of_torch(tmp_path: Path) -> None:
    import zipfile

    model = net()
    model.again = model[0]  # type: ignore[index]
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    ckpt.convert(tmp_path / "tied.pt", tmp_path / "out.pt", to="torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert exact(loaded) == exact(model.state_dict())
    assert loaded["again.weight"].data_ptr() == loaded["0.weight"].data_ptr()
    assert zipfile.ZipFile(tmp_path / "out.pt").testzip() is None  # checksums too


def test_an_output_that_is_there_is_kept_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"model": net().state_dict()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_text("mine")
    with pytest.raises(ckpt.ConfigError, match="already exists, and ckpt does not overwrite it"):
        ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch")
    torch.save({"netG": net().state_dict(), "netD": net().state_dict()}, tmp_path / "two.pt")
    with pytest.raises(ckpt.ConfigError, match=r"has 2 models \(model\.netG, model\.netD\), but .* needs exactly one"):
        ckpt.convert(tmp_path / "two.pt", tmp_path / "c.ckpt", to="lightning")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt", "two.pt"]
    assert (tmp_path / "b.pt").read_text() == "mine"


def test_the_command_has_every_format_that_convert_has() -> None:
    shown = CliRunner().invoke(main, ["convert", "--help"]).output
    assert "[ckpt|hf|dcp|accelerate|megatron|torch|lightning]" in shown
    assert "Examples:" in shown


def test_counters_that_are_not_taken_over_are_not_said_to_be(tmp_path: Path) -> None:
    torch.save({"model": net().state_dict(), "epoch": 2, "batch": 7, "step": torch.tensor(3)}, tmp_path / "a.pt")
    converted = ckpt.convert(tmp_path / "a.pt", tmp_path / "run")
    assert "carried over (epoch), and the data starts over" in converted.approximated["progress"]
    assert converted.skipped["step"].startswith("a tensor")
    assert "progress" in ckpt.convert(tmp_path / "run" / "a", tmp_path / "hf", to="hf").skipped
