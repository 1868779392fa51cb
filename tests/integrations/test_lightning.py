"""Lightning's Trainer and Fabric with `CkptIO`, in real processes: killed, resumed, and compared."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import tempfile
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.integrations.lightning import CkptGenerators, CkptIO
from tests.helpers.places import intact
from tests.helpers.processes import run_here, run_ranks, seed_everything
from tests.helpers.training import exact
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow  # Lightning alone is imported for three seconds

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
STEPS = 48
KILLED_AT = 28  # in the fifth epoch of two ranks, which has six steps; it was saved after the 25th


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """A curve through random points, with dropout and a schedule. Records every loss, and may be killed or fail."""

    def __init__(self, record: str = "", killed_at: int = -1, fails_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.curve = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        if self.global_step == self.hparams.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.global_step == self.hparams.fails_at:
            raise ArithmeticError
        loss = nn.functional.mse_loss(self.curve(batch[0]), batch[1])
        if self.hparams.record:
            with open(self.hparams.record, "a") as file:
                file.write(f"{self.global_step} {float(loss).hex()}\n")
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("error", nn.functional.mse_loss(self.curve(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Sharded(Regression):
    """Sharded by FSDP 2, or, where the strategy is for FSDP 1, by that."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDP1):
            options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
            for index in (0, 2):
                self.curve[index] = FullyShardedDataParallel(self.curve[index], **options)
        else:
            for module in (self.curve[0], self.curve[2], self):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])


class FSDP1(FSDPStrategy):  # type: ignore[misc]
    """Lightning refuses its FSDPStrategy where there is no GPU, but not a subclass of it."""


def strategy(name: str) -> Any:
    if name == "FSDP 2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return FSDP1() if name == "FSDP 1" else name


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(48, 4, generator=generator), torch.randn(48, 1, generator=generator))


def loader() -> DataLoader[Any]:
    return DataLoader(points(), batch_size=4, shuffle=True)


def positioned_loader(world_size: int) -> Any:
    """A loader that saves its position. On several ranks, `shuffle` there has no order that can be drawn again."""
    if world_size == 1:
        return StatefulDataLoader(points(), batch_size=4, shuffle=True)
    return StatefulDataLoader(points(), batch_size=4, sampler=DistributedSampler(points()))


def launched(rank: int, world_size: int, parallel: str = "ddp") -> dict[str, Any]:
    """The options of a trainer with `CkptIO` in a rank of several, or alone."""
    if world_size == 1:
        return {"plugins": [CkptIO()]}
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({key: str(value) for key, value in ranks.items()})
    return {"devices": world_size, "strategy": strategy(parallel), "plugins": [CkptIO(), TorchElasticEnvironment()]}


def fit(
    rank: int, folder: str, kind: str, world_size: int, killed_at: int, parallel: str = "ddp", fails_at: int = -1
) -> None:
    """Train from the newest intact checkpoint on, or afresh, until the end or the kill."""
    together = launched(rank, world_size, parallel)
    model = (Regression if parallel == "ddp" else Sharded)(str(Path(folder, f"losses-{rank}")), killed_at, fails_at)
    every = {"in the middle": 5, "at the last batch of an epoch": 12 // world_size}.get(kind)
    often = {"every_n_train_steps": every} if every else {}
    callbacks = [ModelCheckpoint(Path(folder, "checkpoints"), save_top_k=2, monitor="step", mode="max", **often)]
    run = lightning.Trainer(max_epochs=4 * world_size, callbacks=[*callbacks, CkptGenerators()], **together, **QUIET)
    data = positioned_loader(world_size) if often or kind.endswith("a position") else loader()
    validation = DataLoader(points(), batch_size=16) if kind == "after validation" else None
    run.fit(model, data, validation, ckpt_path=CkptIO.newest(Path(folder, "checkpoints")))
    Path(folder, f"weights-{rank}").write_text(exact(model.state_dict()))
    Path(folder, f"optimizer-{rank}").write_text(exact([optimizer.state_dict() for optimizer in run.optimizers]))


def fit_and_be_killed(rank: int, straight: str, killed: str, kind: str, world_size: int) -> None:
    """Both in the same process: to import Lightning takes longer than to train with it."""
    fit(rank, straight, kind, world_size, -1)
    seed_everything(rank)
    fit(rank, killed, kind, world_size, KILLED_AT)


def assert_equal(straight: Path, other: Path, world_size: int) -> None:
    for rank in range(world_size):
        assert last_of_each_step(other, rank) == last_of_each_step(straight, rank)
        assert len(last_of_each_step(straight, rank)) == STEPS
        for kind in ("weights", "optimizer"):
            assert (other / f"{kind}-{rank}").read_text() == (straight / f"{kind}-{rank}").read_text()
    assert intact(other / "checkpoints")


def last_of_each_step(folder: Path, rank: int) -> dict[str, str]:
    return dict(line.split() for line in (folder / f"losses-{rank}").read_text().splitlines())


def fit_in_an_unknown_order(rank: int, folder: str) -> None:
    together = launched(rank, 2)
    records: list[logging.LogRecord] = []
    handler: Any = logging.Handler()
    handler.emit = records.append
    logging.getLogger("ckpt").addHandler(handler)
    orders: list[dict[str, Any]] = [{"shuffle": True}, {"sampler": DistributedSampler(points())}]
    for order in orders:
        run = lightning.Trainer(max_steps=1, callbacks=[CkptGenerators()], **together, **QUIET, default_root_dir=folder)
        run.fit(Regression(), StatefulDataLoader(points(), batch_size=4, **order))
    said = [record.getMessage() for record in records if "the data in a different order" in record.getMessage()]
    assert len(said) == (1 if rank == 0 else 0)
    assert all("divides a sampler's samples among the ranks" in line for line in said)


def test_an_order_that_cannot_be_drawn_again_on_several_ranks_is_named(tmp_path: Path) -> None:
    assert run_ranks(2, fit_in_an_unknown_order, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("at the end of an epoch", 1),
        ("after validation", 1),
        ("in the middle", 1),
        ("at the last batch of an epoch", 1),
        ("at the end of an epoch, with a position", 1),
        ("at the end of an epoch", 2),
        ("in the middle", 2),
    ],
)
def test_a_fit_that_was_killed_and_resumes_equals_one_that_was_not(tmp_path: Path, kind: str, world_size: int) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    both = (str(straight), str(killed), kind, world_size)
    assert run_ranks(world_size, fit_and_be_killed, *both, dies=True) == [-signal.SIGKILL] * world_size
    assert CkptIO.newest(killed / "checkpoints") is not None
    again = (fit, str(killed), kind, world_size, -1)
    assert (run_ranks(world_size, *again) if world_size > 1 else [run_here(*again)]) == [0] * world_size
    assert_equal(straight, killed, world_size)


Sharding = dict[str, str]  # by what, and where it is saved


def fit_in_shards_and_end_early(rank: int, folder: str, sharding: Sharding) -> None:
    """With each strategy: once to the end, and once until an error, or, with FSDP 2, a kill."""
    for parallel, kind in sharding.items():
        fit(rank, f"{folder}/{parallel}/straight", kind, 2, -1, parallel)
        seed_everything(rank)
        if parallel == "FSDP 2":
            fit(rank, f"{folder}/{parallel}/again", kind, 2, KILLED_AT, parallel)
        with pytest.raises(ArithmeticError):
            fit(rank, f"{folder}/{parallel}/again", kind, 2, -1, parallel, KILLED_AT)
        seed_everything(rank)


def resume_in_shards(rank: int, folder: str, sharding: Sharding) -> None:
    for parallel, kind in sharding.items():
        seed_everything(rank)
        fit(rank, f"{folder}/{parallel}/again", kind, 2, -1, parallel)
        saved = CkptIO.newest(f"{folder}/{parallel}/straight/checkpoints")
        model, evaluation = Sharded(), DataLoader(points(), batch_size=16)
        lightning.Trainer(callbacks=[CkptGenerators()], **launched(rank, 2, parallel), **QUIET).validate(
            model, evaluation, ckpt_path=saved, verbose=False
        )
        state = model.state_dict().items()
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state}
        Path(folder, parallel, f"validated-{rank}").write_text(exact(whole))
    for callback, path, error in (
        (ModelCheckpoint(folder, save_weights_only=True, every_n_train_steps=1), None, "`ckpt merge`"),
        (ModelCheckpoint(folder), f"{folder}/whole.ckpt", r"saved under a strategy that does not shard.*load_model\("),
    ):
        run = lightning.Trainer(
            max_steps=1, callbacks=[callback, CkptGenerators()], **launched(rank, 2, "FSDP 2"), **QUIET
        )
        with pytest.raises(ckpt.CkptError, match=error):
            run.fit(Sharded(), positioned_loader(2), ckpt_path=path)


@pytest.mark.parametrize(
    "sharding",
    cells(
        [
            {"FSDP 1": "at the end of an epoch", "FSDP 2": "in the middle"},
            {"FSDP 1": "in the middle", "FSDP 2": "at the end of an epoch"},
        ],
        often=[{"FSDP 1": "at the end of an epoch", "FSDP 2": "in the middle"}],
    ),
)
def test_fits_under_fsdp_that_failed_or_were_killed_and_resume_equal_those_that_did_not(
    tmp_path: Path, sharding: Sharding
) -> None:
    for parallel in sharding:
        (tmp_path / parallel / "straight").mkdir(parents=True)
        (tmp_path / parallel / "again").mkdir()
    plugin = CkptIO()
    plugin.save_checkpoint(ODD, tmp_path / "whole.ckpt")
    plugin.teardown()
    assert run_ranks(2, fit_in_shards_and_end_early, str(tmp_path), sharding, dies=True) == [-signal.SIGKILL] * 2
    assert run_ranks(2, resume_in_shards, str(tmp_path), sharding) == [0, 0]
    for parallel in sharding:
        assert_equal(tmp_path / parallel / "straight", tmp_path / parallel / "again", 2)
        saved, model = str(CkptIO.newest(tmp_path / parallel / "again" / "checkpoints")), Regression()
        assert len([*Path(saved, "model").iterdir()]) == 2  # each rank has written its own shards
        ckpt.load_model(saved, model)
        for rank in range(2):
            assert exact(model.state_dict()) == (tmp_path / parallel / f"validated-{rank}").read_text()
    with pytest.raises(
        ckpt.MismatchError, match=r"was saved under FSDPStrategy or ModelParallelStrategy.*load_model\("
    ):
        plugin.load_checkpoint(saved)


def test_what_is_let_go_goes_when_its_successor_is_committed(tmp_path: Path) -> None:
    run = lightning.Trainer(
        max_epochs=3,
        plugins=[CkptIO()],
        callbacks=[ModelCheckpoint(tmp_path, filename="{epoch}", save_last=True)],
        **QUIET,
    )
    run.fit(Regression(), loader())
    assert {item.name for item in ckpt.list_checkpoints(tmp_path)} == {"epoch=2.ckpt", "last.ckpt"}
    assert ckpt.verify(tmp_path) == {"epoch=2.ckpt": [], "last.ckpt": []}
    (newest, _) = ckpt.list_checkpoints(tmp_path)
    assert newest.step == 36
    other = Regression()
    other.load_state_dict(CkptIO().load_checkpoint(tmp_path / "last.ckpt")["state_dict"])
    assert exact(other.state_dict()) == exact(run.lightning_module.state_dict())


def test_a_save_under_way_has_its_folder_and_is_waited_for_by_others_in_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plugin, large = CkptIO(), {"state_dict": {"weight": torch.ones(1 << 24)}}
    for name in ("a.ckpt", "b.ckpt"):
        plugin.save_checkpoint(large, tmp_path / name)
        assert (tmp_path / name).is_dir()
        if name == "a.ckpt":
            assert CkptIO().load_checkpoint(tmp_path / name)["state_dict"]["weight"].all()
        else:
            assert CkptIO.newest(tmp_path) == f"{tmp_path}/{name}"
    plugin.save_checkpoint(ODD, f"memory://{tmp_path.name}/a.ckpt")
    plugin.teardown()
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"a.ckpt", "b.ckpt"}


def test_a_link_to_the_last_checkpoint_is_removed_and_replaced_without_that_checkpoint(tmp_path: Path) -> None:
    plugin = CkptIO()
    for name in ("a.ckpt", "b.ckpt"):
        plugin.save_checkpoint(ODD, tmp_path / name)
        (tmp_path / f"last-{name}").symlink_to(name)
    plugin.remove_checkpoint(tmp_path / "last-a.ckpt")
    plugin.save_checkpoint({"epoch": 4}, tmp_path / "last-b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "last-b.ckpt") == {"epoch": 4}
    plugin.teardown()
    assert ckpt.verify(tmp_path) == {"a.ckpt": [], "b.ckpt": [], "last-b.ckpt": []}
    assert exact(plugin.load_checkpoint(tmp_path / "b.ckpt")) == exact(ODD)
    plugin.teardown()
    assert not (tmp_path / "last-a.ckpt").is_symlink()


def test_a_fit_in_processes_that_lightning_launches_hands_its_weights_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # Lightning leaves a folder there
    options: Any = {"strategy": "ddp_fork", "devices": 2, "plugins": [CkptIO()], "default_root_dir": tmp_path, **QUIET}
    model = Regression()
    before = exact(model.state_dict())
    run = lightning.Trainer(max_steps=2, callbacks=[ModelCheckpoint(tmp_path, filename="{step}")], **options)
    run.fit(model, loader())
    saved = CkptIO().load_checkpoint(tmp_path / "step=2.ckpt")["state_dict"]
    assert exact(model.state_dict()) == exact(dict(saved)) != before


ODD: dict[Any, Any] = {
    "state_dict": OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.ones(2, dtype=torch.bfloat16)),
    "epoch": 3,
    "loops": {0: (1, 2), "nested": [{"a": None, "b": float("inf")}]},
    "scalar": torch.tensor(4),
    "callbacks": {"ModelCheckpoint{'monitor': 'x'}": {"best": torch.tensor(0.5), "paths": {"a/b.ckpt": {1, 2}}}},
    "version": "2.6",
}


@pytest.mark.parametrize("more", [{}, {"Outer.<locals>.Data": {"a": torch.ones(2)}}, {7: 8}, {"model": {"x": 1}}])
def test_a_checkpoint_comes_back_with_its_types_and_in_its_order(tmp_path: Path, more: dict[Any, Any]) -> None:
    plugin = CkptIO()
    plugin.save_checkpoint({**ODD, **more}, tmp_path / "a.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt")
    plugin.teardown()
    assert exact(loaded) == exact({**ODD, **more})
    assert list(loaded) == [*ODD, *more]
    assert type(loaded["state_dict"]) is OrderedDict
    assert type(loaded["loops"][0]) is tuple
    assert loaded["callbacks"]["ModelCheckpoint{'monitor': 'x'}"]["paths"]["a/b.ckpt"] == {1, 2}


class Colour(Enum):
    RED = 1


def test_what_cannot_be_held_is_named_before_anything_is_written(tmp_path: Path) -> None:
    plugin = CkptIO()
    bad = {"epoch": 1, "hyper_parameters": {"colour": Colour.RED}, "callbacks": {"mine": {"call": print}}}
    with pytest.raises(ckpt.UnsupportedError, match=r"(?s)hyper_parameters.*colour.*Colour.*callbacks.*mine.*hparams"):
        plugin.save_checkpoint(bad, tmp_path / "a.ckpt")
    plugin.teardown()
    assert not (tmp_path / "a.ckpt").exists()


def test_a_copy_of_a_trainer_has_no_saves_under_way(tmp_path: Path) -> None:
    plugin = CkptIO(background=False)
    plugin.save_checkpoint(ODD, tmp_path / "a.ckpt")
    run = lightning.Trainer(plugins=[plugin], callbacks=[CkptGenerators()], **QUIET, default_root_dir=tmp_path)
    copied = copy.deepcopy(run)
    plugin.teardown()
    pickle.dumps(run)
    copied.strategy.checkpoint_io.save_checkpoint(ODD, tmp_path / "b.ckpt")
    copied.strategy.checkpoint_io.teardown()
    assert ckpt.verify(tmp_path) == {"a.ckpt": [], "b.ckpt": []}


def test_a_state_is_taken_when_the_call_is_made(tmp_path: Path) -> None:
    plugin = CkptIO()
    weight = torch.zeros(1 << 20)
    plugin.save_checkpoint({"state_dict": {"weight": weight}}, tmp_path / "a.ckpt")
    weight.fill_(1)
    loaded = plugin.load_checkpoint(tmp_path / "a.ckpt", map_location="cpu")
    plugin.teardown()
    assert not loaded["state_dict"]["weight"].any()


def test_the_newest_is_one_that_is_intact(tmp_path: Path) -> None:
    for name in ("random_states_0.pkl", "optimizer.bin"):  # of Accelerate, which is no checkpoint of Lightning
        (tmp_path / "checkpoint_0").mkdir(exist_ok=True)
        (tmp_path / "checkpoint_0" / name).touch()
    assert CkptIO.newest(tmp_path) is None
    plugin = CkptIO(background=False)
    for name in ("a.ckpt", "b.ckpt"):
        plugin.save_checkpoint(ODD, tmp_path / name)
    assert CkptIO.newest(tmp_path) == f"{tmp_path}/b.ckpt"
    for name in ("b.ckpt", "a.ckpt"):
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        if name == "b.ckpt":
            assert CkptIO.newest(tmp_path) == f"{tmp_path}/a.ckpt"
    with pytest.raises(ckpt.DamagedError, match=r"no checkpoint in .* is intact"):
        CkptIO.newest(tmp_path)
    with pytest.raises(ckpt.DamagedError, match=r"a\.ckpt"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ckpt.MissingError, match=r"There are: b\.ckpt, a\.ckpt"):
        plugin.load_checkpoint(tmp_path / "c.ckpt")
    plugin.teardown()


def test_fabric_saves_and_loads_its_objects(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", plugins=[CkptIO()])

    def objects(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 1)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        return {"model": model, "optimizer": optimizer, "step": 10 * seed}

    trained, fresh = objects(1), objects(2)
    fabric.backward(trained["model"](torch.ones(2, 4)).sum())
    trained["optimizer"].step()
    fabric.save(tmp_path / "one.ckpt", trained)
    fabric.load(tmp_path / "one.ckpt", fresh)
    fabric.strategy.teardown()
    for key in ("model", "optimizer"):
        assert exact(fresh[key].state_dict()) == exact(trained[key].state_dict())
    assert fresh["step"] == 10
    assert ckpt.verify(tmp_path) == {"one.ckpt": []}
