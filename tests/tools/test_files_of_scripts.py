"""What scripts save in their own ways is taken over, or named: nothing takes the place of something else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.formats.foreign.torch_write import Shard, ShardedEntry, first_error_raised, write_folder
from tests.helpers.namespaces import with_tmpfs
from tests.helpers.stateful import Stateful
from tests.helpers.training import exact

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST, SECOND = {"w": torch.zeros(2)}, {"w": torch.ones(3)}


def converted(path: Path, saved: Any, to: str = "torch") -> tuple[ckpt.Converted, Any]:
    """What `convert` said of a file of torch.save, by way of a checkpoint of ours, and what `torch.load` reads."""
    torch.save(saved, path / "saved.pt")
    said = ckpt.convert(path / "saved.pt", path / "root")
    ckpt.convert(path / "root/saved", path / "out.pt", to=to)
    return said, torch.load(path / "out.pt", weights_only=True)


@pytest.mark.parametrize("other", ["net", "state_dict", "model_state_dict"])
def test_two_models_of_a_file_are_two_parts_whatever_they_are_called(tmp_path: Path, other: str) -> None:
    said, out = converted(tmp_path, {other: FIRST, "model": SECOND})
    assert said.parts == (other, "model")
    assert exact(out["model"]) == exact(SECOND)
    assert exact(out[other]) == exact(FIRST)


def test_tensors_by_number_are_no_model(tmp_path: Path) -> None:
    said, _ = converted(tmp_path, {"model": FIRST, "prototypes": {0: torch.ones(2), 1: torch.ones(2)}})
    assert said.parts == ("model",)
    assert said.skipped.keys() == {"prototypes"}


@pytest.mark.parametrize("scaler", [{}, {"scaler": {"scale": 1024.0, "_growth_tracker": 3}}], ids=["none", "scaler"])
def test_a_lightning_file_has_a_scaler_if_there_was_one(tmp_path: Path, scaler: dict[str, Any]) -> None:
    _, out = converted(tmp_path, {"model": FIRST, **scaler}, to="lightning")
    assert out.get("MixedPrecision", "none") == scaler.get("scaler", "none")


def test_two_optimizers_of_a_file_are_two_parts(tmp_path: Path) -> None:
    plain = {"state": {}, "param_groups": [{"lr": 1, "params": [0]}]}
    _, out = converted(tmp_path, {"model": FIRST, "optim": {**plain, "param_groups": []}, "optimizer": plain})
    assert out["optimizer"] == plain
    assert out["optim"]["param_groups"] == []


def test_of_two_counts_of_steps_one_is_taken_and_the_other_is_named(tmp_path: Path) -> None:
    said, out = converted(tmp_path, {"model": FIRST, "global_step": 500, "step": 3, "iteration": 500})
    assert out["step"] == 500
    assert list(said.skipped) == ["step"]
    assert "global_step is taken" in said.skipped["step"]


@pytest.mark.parametrize("name", ["a b/c", "../../x", "x" * 300, "", "manifest", "rng", "deepspeed.x", "ä"])
def test_a_part_that_no_file_can_be_named_after_gets_another_name_which_is_told(tmp_path: Path, name: str) -> None:
    said, out = converted(tmp_path, {"model": FIRST, name: SECOND})
    (new,) = set(said.parts) - {"model"}
    assert repr(name) in said.approximated[new]
    assert exact(out[new]) == exact(SECOND)
    with ckpt.StateManager(tmp_path / "root", model=nn.Linear(1, 1)) as manager:  # the root can be used
        manager.register(**{new: nn.Linear(1, 1)})


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_the_parts_of_several_that_ckpt_wrote_come_back_under_their_names(tmp_path: Path, to: str) -> None:
    plain = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    state = {"model.0": FIRST, "model.1": SECOND, "optimizer.0": plain, "optimizer.1": plain}
    state |= {"scheduler.0": {"last_epoch": 3}, "scheduler.1": {"last_epoch": 4}, "custom.0": FIRST}
    torch.save(state, tmp_path / "saved.pt")
    ckpt.convert(tmp_path / "saved.pt", tmp_path / "there", to=to)
    said = ckpt.convert(tmp_path / "there", tmp_path / "back.pt", to="torch")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {*said.parts} == state.keys()
    assert exact({key: back[key] for key in state}) == exact(state)


def test_a_model_beside_the_other_parts_is_the_model_and_a_count_in_a_tensor_is_not(tmp_path: Path) -> None:
    flat = {"layers.0.weight": torch.ones(2), "norm": torch.ones(3)}
    state = {**flat, "lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(4)}}  # as torchtitan saves
    save(state, checkpoint_id=tmp_path / "saved")
    said = ckpt.convert(tmp_path / "saved", tmp_path / "out.pt", to="torch")
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert exact(out["model"]) == exact(flat)
    assert {"model", "scheduler", "train_state"} == {*said.parts}
    ckpt.merge(tmp_path / "saved", tmp_path / "model.safetensors")
    assert exact(load_file(tmp_path / "model.safetensors")) == exact(flat)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of which one layer got no gradients, and its optimizer."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    (model[0](torch.ones(1, 2)).sum() * model[2](torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("target", ["torch", "lightning", "ckpt"])
def test_an_optimizer_by_numbers_is_loaded_from_dcp_with_its_state(tmp_path: Path, target: str) -> None:
    model, optimizer = trained()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved")
    ckpt.convert(tmp_path / "saved", tmp_path / "out", to=target)
    other, fresh = trained()
    if target == "ckpt":
        with ckpt.StateManager(tmp_path / "out", model=other, optimizer=fresh) as manager:
            manager.load_state("saved")
    else:
        found = torch.load(tmp_path / "out", weights_only=True)
        fresh.load_state_dict(found["optimizer"] if target == "torch" else found["optimizer_states"][0])
    assert exact(fresh.state_dict()) == exact(optimizer.state_dict())


def test_an_optimizer_without_state_arrives_by_way_of_dcp(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.25)
    torch.save({"model": FIRST, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    ckpt.convert(tmp_path / "saved.pt", tmp_path / "dcp", to="dcp")
    ckpt.convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"] == optimizer.state_dict()


def save_with(root: Path, state: Any) -> Path:
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.register(kept=Stateful(state))
        manager.resume()
        manager.save_state("one")
    return root / "one"


def test_dcp_gets_the_tensors_of_a_tuple_and_what_it_cannot_keep_is_named(tmp_path: Path) -> None:
    source = save_with(tmp_path / "root", {"pair": (1, torch.ones(2)), "best": {3: 0.5}, "none": {}})
    said = ckpt.convert(source, tmp_path / "dcp", to="dcp")
    assert said.skipped.keys() == {"keys of kept.best"}
    found = {"kept": {"pair": (0, torch.zeros(2)), "best": {"3": 0.0}, "none": {}}}
    load(found, checkpoint_id=tmp_path / "dcp")
    assert exact(found["kept"]) == exact({"pair": (1, torch.ones(2)), "best": {"3": 0.5}, "none": {}})
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "out.pt")  # which asks for what the folder says that it has
    assert torch.load(tmp_path / "out.pt")["kept"]["none"] == {}


def test_names_that_dcp_would_mix_up_are_one_clear_error(tmp_path: Path) -> None:
    source = save_with(tmp_path / "root", {"a.b": 1, "a": {"b": 2}})
    with pytest.raises(ckpt.ConfigError, match=r"can't hold this state.*kept\.a\.b"):
        ckpt.convert(source, tmp_path / "dcp", to="dcp")
    assert not (tmp_path / "dcp").exists()


def test_a_lightning_file_of_the_end_of_an_epoch_continues_with_the_next(tmp_path: Path) -> None:
    import lightning
    import numpy as np
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint |= {"scores": np.arange(4), "best": 0.0}

    quiet = dict.fromkeys(("enable_progress_bar", "logger", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[ModelCheckpoint(tmp_path, filename="last")], **quiet
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    said = ckpt.convert(tmp_path / "last.ckpt", tmp_path / "out.pt", to="torch")
    assert {"scores", "best"} <= said.skipped.keys()
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (out["epoch"], out["step"]) == (2, 4)  # Lightning continues with its third epoch, whose number is 2


@pytest.mark.parametrize("to", ["torch", "dcp", "ckpt"])
def test_nothing_is_converted_into_a_checkpoint_which_would_be_removed_with_it(tmp_path: Path, to: str) -> None:
    torch.save({"model": FIRST}, tmp_path / "saved.pt")
    ckpt.convert(tmp_path / "saved.pt", tmp_path / "root")
    inside = tmp_path / "root/saved" if to == "ckpt" else tmp_path / "root/saved/out"
    with pytest.raises(ckpt.ConfigError, match="is inside the checkpoint"):
        ckpt.convert(tmp_path / "saved.pt", inside, to=to)


@pytest.mark.parametrize("beside", [True, False])
def test_a_link_to_a_file_is_followed(tmp_path: Path, beside: bool) -> None:
    target = tmp_path / "epoch=3.ckpt" if beside else tmp_path / "elsewhere/epoch=3.ckpt"
    target.parent.mkdir(exist_ok=True)
    torch.save({"model": SECOND}, target)
    link = tmp_path / "last.ckpt"
    link.symlink_to(target)
    ckpt.convert(link, tmp_path / "out.pt", to="torch")
    assert exact(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == exact(SECOND)


def test_a_file_of_torch_save_needs_no_ending_to_be_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict()}, tmp_path / "latest")
    fresh = nn.Linear(2, 2)
    ckpt.load_model(tmp_path / "latest", fresh)
    assert exact(fresh.state_dict()) == exact(model.state_dict())


def test_the_error_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    torch.save({"model": FIRST}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"model": FIRST}, tmp_path / "cut off.pt")
    os.truncate(tmp_path / "cut off.pt", 500)
    (tmp_path / "empty.pt").touch()
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    for name, said in {
        "legacy": "before PyTorch 1.6",
        "cut off": "was cut off",
        "empty": "is empty",
        "tensor": "holds a tensor",
    }.items():
        with pytest.raises(ckpt.CkptError, match=said):
            ckpt.convert(tmp_path / f"{name}.pt", tmp_path / "out.pt", to="torch")


def test_a_file_whose_name_no_checkpoint_can_have_asks_for_one(tmp_path: Path) -> None:
    torch.save({"model": FIRST}, tmp_path / "my run.pt")
    with pytest.raises(ckpt.ConfigError, match="--name"):
        ckpt.convert(tmp_path / "my run.pt", tmp_path / "root")
    assert ckpt.convert(tmp_path / "my run.pt", tmp_path / "root", name="mine").url.endswith("/mine")


def test_an_error_of_torch_itself_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="of torch"), first_error_raised():
        raise RuntimeError("of torch")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ckpt.DamagedError, OSError])
def test_what_stops_torch_in_the_middle_of_a_folder_is_the_error(tmp_path: Path, error: type[BaseException]) -> None:
    def read() -> torch.Tensor:
        raise error("in the middle")

    entry = ShardedEntry(torch.float32, (2,), (Shard((0,), (2,), read),))
    with pytest.raises(error, match="in the middle"):
        write_folder(str(tmp_path / "out"), {"w": entry}, {}, lambda count: None)


@pytest.mark.slow
def test_a_full_disk_is_one_line_whatever_is_written(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(1 << 20)}}, tmp_path / "saved.pt")
    small = tmp_path / "small"
    small.mkdir()
    command = "import sys; from ckpt.cli.main import main; main(sys.argv[1:])"
    convert = ("-c", command, "convert", str(tmp_path / "saved.pt"), str(small / "out"), "--to", "dcp")
    with with_tmpfs(small, 1 << 20, *convert, cwd=tmp_path) as done:
        assert done.wait() == 1
    said = done.errors.read_text()
    assert said.splitlines()[-1].endswith("No space left on device.")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_full_device_for_the_output_of_a_command_is_no_fault_of_ckpt(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ckpt.cli.main import main; main()", "ls", str(tmp_path)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "no space is left" in done.stderr
