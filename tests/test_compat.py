"""Private names of other libraries, each taken away in turn: saves and loads work, and what cannot be done is named."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ckpt
from ckpt.compat import accelerate as of_accelerate
from ckpt.compat import datasets, deepspeed, huggingface_hub, lightning, s3fs, torch_ddp, transformers
from ckpt.compat import torch as of_torch
from ckpt.compat.private import Private
from ckpt.errors import UnsupportedError
from ckpt.formats.layout import Box, Layout
from ckpt.state.deepspeed import refuse_bare
from tests.helpers.renamed import renamed
from tests.weight import declared_names

NAMES = declared_names()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[Private], bool]]:
    """Whether it was said that a name is missing, with the consequence."""
    logging.getLogger("ckpt").addHandler(caplog.handler)
    yield lambda private: any(private.path in text and private.without in text for text in caplog.messages)
    logging.getLogger("ckpt").removeHandler(caplog.handler)


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0).reshape(4, 2))


def train(root: Path, model: nn.Module) -> ckpt.Restored | None:
    """Two steps of a run that continues, saved."""
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(Numbers(), batch_size=2)
    when = ckpt.Every(exception=True)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, dataloader=loader, save_every=when) as manager:
        restored = manager.resume()
        for _ in manager.epochs(1):
            for batch in manager.batches(loader):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.step()
        manager.save_state(wait=True)
    return restored


@pytest.mark.parametrize("path", NAMES)
def test_a_name_says_what_it_is_for_since_when_and_what_happens_without_it(path: str) -> None:
    private = NAMES[path]
    assert private.name.startswith("_") or "._" in private.owner
    assert private.use
    assert private.since.replace(".", "").isdigit()
    assert private.without.endswith(".")


@pytest.mark.parametrize("path", [path for path in NAMES if path.startswith("torch.")])
def test_a_run_is_saved_and_resumed_without_it(path: str, tmp_path: Path) -> None:
    with renamed(NAMES[path]):
        assert train(tmp_path, nn.Linear(2, 2)) is None
        model = nn.Linear(2, 2)
        assert train(tmp_path, model) is not None
    assert not any(ckpt.verify(tmp_path).values())


def test_what_every_run_uses_is_named(tmp_path: Path, said: Callable[[Private], bool]) -> None:
    with renamed(of_torch.VERSION):
        train(tmp_path, nn.Linear(2, 2))
    assert said(of_torch.VERSION)


def test_the_end_of_a_stream_is_told_of_if_its_name_is_there(said: Callable[[Private], bool]) -> None:
    assert not of_torch.has_ended(iter(DataLoader(Numbers())))
    assert not said(of_torch.FETCHER)
    with renamed(of_torch.FETCHER):
        assert not of_torch.has_ended(iter(DataLoader(Numbers())))
    assert said(of_torch.FETCHER)


def test_the_jobs_store_is_found_by_its_address(said: Callable[[Private], bool], monkeypatch: Any) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    server.set("key", "value")
    with renamed(of_torch.DEFAULT_STORE):
        assert of_torch.default_store().get("key") == b"value"
        monkeypatch.delenv("MASTER_PORT")
        assert of_torch.default_store() is None
    assert said(of_torch.DEFAULT_STORE)


@pytest.mark.parametrize("private", [of_torch.SHARD_BOX, of_torch.STRIDED], ids=lambda one: one.name)
def test_only_strided_shards_need_the_algebra_of_torch(private: Private, said: Callable[[Private], bool]) -> None:
    with renamed(private):
        assert Layout((2, 2), (0, 1, 2, 3), ("S0", "S0")).box((5, 3), 2) == Box((3, 0), (1, 3))
        with pytest.raises(UnsupportedError, match="strided shards"):
            Layout((2, 2), (4, 5, 6, 7), ("S0/97", "S0")).box((8, 3), 5)
    assert said(private)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3,), (2, 3)])
@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (1, 2), (0, 3)])
def test_plain_shards_are_those_of_torch(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    compute = of_torch.SHARD_BOX.imported()
    from torch.distributed.tensor import Replicate, Shard

    kinds = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1)}
    ranks = tuple(range(torch.Size(mesh).numel()))
    for first in kinds:
        placed = (first, "S0")[: len(mesh)]
        layout = Layout(mesh, ranks, placed)
        for rank in ranks:
            at = list(divmod(rank, mesh[1])) if len(mesh) > 1 else [rank]
            sizes, offsets = compute(shape, mesh, at, [kinds[text] for text in placed])
            assert layout.box(shape, rank) == Box(tuple(offsets), tuple(sizes))


def test_a_mesh_counts_as_one_of_all_ranks_and_ddp_names_what_it_lacks(said: Callable[[Private], bool]) -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with renamed(of_torch.ROOT_MESH):
            assert of_torch.root_ranks(object()) == (0,)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert torch_ddp.obstacle(ddp) is None
        for private in (one for path, one in NAMES.items() if one in vars(torch_ddp).values() and one.path == path):
            with renamed(private):
                assert torch_ddp.hooks_of(ddp) == []
                assert (torch_ddp.obstacle(ddp) is None) is (private is torch_ddp.HOOKS)
    finally:
        torch.distributed.destroy_process_group()
    assert said(of_torch.ROOT_MESH)
    assert said(torch_ddp.HOOKS)


def test_gradients_that_fsdp2_has_not_sharded_are_seen_or_their_absence_is_named(
    said: Callable[[Private], bool],
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model: Any = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.set_requires_gradient_sync(False)
        assert not of_torch.has_unsharded_gradients(model)
        model(torch.ones(1, 2)).sum().backward()
        assert of_torch.has_unsharded_gradients(model)
        assert not said(of_torch.FSDP2_GROUP)
        with renamed(of_torch.FSDP2_GROUP):
            assert not of_torch.has_unsharded_gradients(model)
        assert said(of_torch.FSDP2_GROUP)
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def accelerator() -> Iterator[Any]:
    from accelerate import Accelerator

    own = Accelerator()
    model, loader = nn.Linear(2, 2), DataLoader(TensorDataset(torch.ones(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    own.prepare(model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    yield own
    own.free_memory()


@pytest.mark.parametrize("private", [of_accelerate.SAVE_HOOKS, of_accelerate.LOAD_HOOKS], ids=lambda one: one.name)
def test_hooks_that_an_accelerator_does_not_show_are_named(
    private: Private, accelerator: Any, tmp_path: Path, said: Callable[[Private], bool]
) -> None:
    with renamed(private), ckpt.StateManager(tmp_path, accelerator=accelerator) as manager:
        assert manager.resume() is None
        manager.save_state("a", wait=True)
        manager.load_state("a")
    assert said(private)


@pytest.mark.parametrize("name", ["_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"])
def test_an_accelerator_whose_objects_cannot_be_seen_is_refused_before_a_checkpoint_lacks_them(
    name: str, accelerator: Any, tmp_path: Path
) -> None:
    with (
        renamed(NAMES[f"accelerate.Accelerator.{name}"]),
        pytest.raises(UnsupportedError, match=rf"has no Accelerator\.{name}_of_another_release.*of accelerator="),
    ):
        ckpt.StateManager(tmp_path, accelerator=accelerator)


@pytest.mark.parametrize("private", [datasets.STREAM, datasets.FORMAT], ids=lambda one: one.name)
def test_a_stream_of_unknown_parts_is_replayed(private: Private, said: Callable[[Private], bool]) -> None:
    from datasets import Dataset

    stream = Dataset.from_dict({"a": [1, 2]}).to_iterable_dataset()
    assert not datasets.loses_samples(stream)
    with renamed(private):
        assert datasets.loses_samples(stream)
    assert said(private)


def test_lightning_does_without(said: Callable[[Private], bool]) -> None:
    trainer = importlib.import_module("lightning.pytorch").Trainer(logger=False, enable_checkpointing=False)
    with renamed(lightning.FETCHER):
        lightning.begin_data(trainer)
    assert said(lightning.FETCHER)


def test_deepspeed_does_without(said: Callable[[Private], bool]) -> None:
    engine = SimpleNamespace(
        micro_steps=3, gradient_accumulation_steps=lambda: 2, _is_gradient_accumulation_boundary=True
    )
    assert not deepspeed.in_window(engine)
    with renamed(deepspeed.BOUNDARY):
        assert deepspeed.in_window(engine)
    assert said(deepspeed.BOUNDARY)


def test_a_deepspeed_that_marks_no_master_weights_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: Callable[[Private], bool]
) -> None:
    utilities = importlib.import_module("deepspeed.utils")
    refuse_bare("model", nn.Linear(2, 2))
    assert not caplog.messages
    monkeypatch.delattr(utilities, "get_full_hp_param")
    refuse_bare("model", nn.Linear(2, 2))
    assert any("would load no master weights" in text for text in caplog.messages)


@pytest.mark.parametrize("path", [path for path in NAMES if path.startswith("huggingface_hub.")])
def test_the_hub_does_without(path: str, said: Callable[[Private], bool]) -> None:
    from huggingface_hub import CommitOperationAdd

    addition = CommitOperationAdd("x", b"x")
    with renamed(NAMES[path]):
        huggingface_hub.mark_uploaded(addition)
        assert not huggingface_hub.is_ignored(addition)
    assert said(NAMES[path])


def test_s3_is_refused_rather_than_followed_to_another_host(said: Callable[[Private], bool]) -> None:
    from ckpt.storage.clouds.s3 import session_class

    assert session_class()
    with renamed(s3fs.SESSION), pytest.raises(UnsupportedError, match="redirect"):
        session_class()
    assert said(s3fs.SESSION)


def test_a_trainer_does_without_what_it_only_logs_and_is_refused_without_a_method(
    tmp_path: Path, said: Callable[[Private], bool]
) -> None:
    from transformers import Trainer, TrainingArguments

    from ckpt.integrations.transformers import CkptCallback

    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    trainer = Trainer(model=nn.Linear(2, 2), args=arguments)
    with renamed(transformers.LAST_LOGGED), renamed(transformers.TOTAL_LOSS):
        assert not transformers.continue_log(trainer, 3, 0.5)
        assert transformers.last_logged(trainer) == trainer.state.global_step
    assert said(transformers.LAST_LOGGED)
    methods = [one for one in vars(transformers).values() if isinstance(one, Private) and "refuses" in one.without]
    assert len(methods) == 5
    for private in methods:
        with renamed(private), pytest.raises(ckpt.ConfigError, match=private.name):
            CkptCallback(tmp_path / "run").attach(trainer)
