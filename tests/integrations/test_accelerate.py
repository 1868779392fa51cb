"""Accelerate: what it has prepared is kept, and its own calls and loaders go on exactly."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import KINDS, SAMPLES, Loop, Numbers, build, new_accelerator, reseed, train_on
from tests.helpers.processes import Script, run_ranks
from tests.helpers.training import Counter, exact

EVERY_STOP = os.environ.get("CKPT_STOPS") == "all"


def _prepared(accelerator: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A prepared loader, and a prepared model, optimizer and scheduler."""
    loader, *parts = accelerator.prepare(DataLoader(Numbers(), batch_size=4, shuffle=True, **options), *build())
    return loader, parts


def _interrupted_equals_straight(rank: int, folder: str, world_size: int, stops: dict[str, list[int]]) -> None:
    for kind, moments in stops.items():
        straight = Loop(f"{folder}/{kind}", kind, rank, world_size).run()
        for stop in moments:
            loop = Loop(f"{folder}/{kind}-{stop}", kind, rank, world_size)
            assert loop.run(run=0, stop=stop) + loop.run(run=1) == straight, f"{kind}, stopped after {stop} batches"


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "moments"), [(1, [2, 6, 8]), (2, [3, 4, 1])])
def test_a_plain_loop_over_any_prepared_loader_goes_on_where_it_stopped(
    tmp_path: Path, world_size: int, moments: list[int]
) -> None:
    """In the middle of an epoch, at its last batch, and in the middle of a later one.

    With one rank and with two, each kind is stopped at another of these; with CKPT_STOPS=all, at each of them.
    """
    stops = {kind: moments if EVERY_STOP else [moments[number % 3]] for number, kind in enumerate(KINDS)}
    job = (str(tmp_path), world_size, stops)
    assert run_ranks(world_size, _interrupted_equals_straight, *job) == [0] * world_size


def _interrupted_inside_a_window(rank: int, folder: str, world_size: int) -> None:
    straight = Loop(f"{folder}/straight", "seedable", rank, world_size, accumulate=3).run()
    for stop in (1, 2, 5):
        loop = Loop(f"{folder}/{stop}", "seedable", rank, world_size, accumulate=3)
        assert loop.run(run=0, stop=stop) + loop.run(run=1) == straight, stop


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_accumulation_window_is_resumed_in_its_middle(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(world_size, _interrupted_inside_a_window, str(tmp_path), world_size) == [0] * world_size


def _loaded_inside_the_loop(rank: int, folder: str, world_size: int) -> None:
    for kind in ("sharded", "dispatched", "workers", "a stream", "a stateful stream, dispatched"):
        straight = Loop(f"{folder}/{kind}", kind, rank, world_size).run()
        for back in (1, 2) if EVERY_STOP else (world_size,):
            assert Loop(f"{folder}/{kind}-{back}", kind, rank, world_size).run(back=back) == straight, (kind, back)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_load_inside_a_plain_loop_takes_the_data_back_as_well(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(world_size, _loaded_inside_the_loop, str(tmp_path), world_size) == [0] * world_size


def _with_the_managers_loop(
    root: str, kind: str, run: int, stop: int | None = None, *, plain: bool = False
) -> list[Any]:
    reseed(0, run)
    options, make = KINDS[kind]
    accelerator = new_accelerator(loaders=options)
    loader, *parts = accelerator.prepare(make(), *build())
    seen: list[Any] = []
    with ckpt.StateManager(root, accelerator=accelerator, save_every=2) as manager:
        for epoch in manager.epochs(2):
            for batch in loader if plain else manager.batches(loader):
                seen.append([epoch, *(tensor.tolist() for tensor in batch), train_on(batch, accelerator, *parts)])
                manager.step()
                if manager.progress.step == stop:
                    return seen
    return seen


@pytest.mark.parametrize("kind", ["sharded", "seedable", "dispatched", "a stream", "a stateful stream, dispatched"])
def test_the_managers_own_loop_goes_through_prepared_loaders(tmp_path: Path, kind: str) -> None:
    straight = _with_the_managers_loop(str(tmp_path / "straight"), kind, run=0)
    first = _with_the_managers_loop(str(tmp_path / "run"), kind, run=0, stop=8)
    assert first + _with_the_managers_loop(str(tmp_path / "run"), kind, run=1) == straight


@pytest.mark.slow
def test_a_plain_loop_inside_the_managers_epochs_goes_on_too(tmp_path: Path) -> None:
    straight = _with_the_managers_loop(str(tmp_path / "straight"), "seedable", run=0, plain=True)
    first = _with_the_managers_loop(str(tmp_path / "run"), "seedable", run=0, stop=8, plain=True)
    assert first + _with_the_managers_loop(str(tmp_path / "run"), "seedable", run=1, plain=True) == straight


def test_attached_it_takes_snapshots_into_memory_and_resumes_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))

    def run(stop: int) -> list[Any]:
        reseed(0, 0)
        accelerator = new_accelerator()
        loader, parts = _prepared(accelerator)
        seen: list[Any] = []
        with attach(accelerator, tmp_path / f"root-{stop < 5}", memory=1) as manager:
            restored = manager.resume()
            assert restored is None or (restored.from_memory and restored.step == 2)
            for batch in loader:
                seen.append(train_on(batch, accelerator, *parts))
                manager.step()
                manager.session.memory.wait()  # type: ignore[union-attr]
                if manager.progress.step == stop:
                    raise KeyboardInterrupt
        return seen

    def killed(stop: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(stop)

    killed(3)
    assert list((tmp_path / "memory").iterdir())
    rest = run(0)
    assert list((tmp_path / "memory").iterdir()) == []
    assert run(1000)[2:] == rest


def test_attached_a_save_hook_whose_files_memory_would_lack_turns_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))
    accelerator = new_accelerator()
    loader, parts = _prepared(accelerator)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with attach(accelerator, tmp_path / "root", memory=1) as manager:
        manager.resume()
        for batch in loader:
            train_on(batch, accelerator, *parts)
            manager.step()
    assert list((tmp_path / "memory").iterdir()) == []
    assert caplog.text.count("snapshots in memory are off: the accelerator has save hooks") == 1


def test_attached_a_step_is_one_of_the_optimizer_and_is_saved_once(tmp_path: Path) -> None:
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    loader, parts = _prepared(accelerator)
    with attach(accelerator, tmp_path, save_every=2, saving=ckpt.SaveOptions(background=False)) as manager:
        manager.resume()
        names = []
        for batch in loader:
            train_on(batch, accelerator, *parts)
            manager.step()
            names.append([found.name for found in ckpt.list_checkpoints(tmp_path)])
        assert manager.progress.step == 3
    assert names == [[], [], [], [], *[["step-00000002"]] * 2]
    assert ckpt.list_checkpoints(tmp_path)[0].manifest.sequence == 1  # type: ignore[union-attr]


def _save_then_load(rank: int, root: str) -> None:
    accelerator = new_accelerator(rank=rank, world_size=2)
    _, parts = _prepared(accelerator)
    attach(accelerator, root)
    weight = accelerator.unwrap_model(parts[0])[0].weight
    for step in range(3):
        nn.init.constant_(weight, step)
        torch.manual_seed(1000 * rank + step)
        folder = accelerator.save_state(os.path.join(root, f"step_{step}"))
        assert folder == Path(root, f"step_{step}")
        drawn = torch.rand(3)
        nn.init.constant_(weight, -1.0)
        assert accelerator.load_state(str(folder)) is None
        assert torch.equal(weight, torch.full((8, 1), float(step)))
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.slow
def test_a_save_directly_followed_by_a_load_works_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _save_then_load, str(tmp_path / "run")) == [0, 0]


def test_what_is_prepared_and_registered_later_is_kept_too(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    manager = attach(accelerator, tmp_path)
    loader, parts = _prepared(accelerator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    for batch in loader:
        train_on(batch, accelerator, *parts)
        counter.count += 1
    accelerator.save_state("once")
    weight, moved = parts[0][0].weight, parts[0][0].weight.detach().clone()
    nn.init.zeros_(weight)
    counter.count = loader.iteration = 0
    accelerator.load_state("once")
    assert torch.equal(weight, moved)
    assert (counter.count, loader.iteration) == (6, 1)
    assert manager.restored is not None
    assert manager.restored.restored == ("model", "optimizer", "scheduler", "custom.0", "rng", "progress")
    assert (manager.restored.epoch, manager.restored.step) == (1, 6)
    accelerator.end_training()


def test_without_accelerates_wrappers_others_load_it(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    loader, (model, optimizer, scheduler) = _prepared(accelerator)
    with ckpt.StateManager(tmp_path, accelerator=accelerator) as manager:
        for batch in loader:
            train_on(batch, accelerator, model, optimizer, scheduler)
        manager.save_state("done")
    plain, other, schedule = build()
    with ckpt.StateManager(tmp_path, model=plain, optimizer=other, scheduler=schedule) as manager:
        manager.load_state("done")
    assert torch.equal(plain[3].weight, model[3].weight)  # type: ignore[index]
    assert schedule.state_dict() == scheduler.state_dict()


def test_names_limit_and_folder_of_the_project_are_respected(tmp_path: Path) -> None:
    def build_project() -> Any:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = new_accelerator(project_config=project)
        _prepared(accelerator)
        return accelerator

    accelerator = build_project()
    with attach(accelerator) as manager:
        paths = [accelerator.save_state() for _ in range(3)]
        manager.wait()
        assert paths == [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(3)]
        assert [found.name for found in ckpt.list_checkpoints(tmp_path / "checkpoints")] == [
            "checkpoint_2",
            "checkpoint_1",
        ]
    accelerator = build_project()
    with ckpt.StateManager(accelerator=accelerator) as manager:
        manager.load_state()
        assert manager.save_state() == "checkpoint_3"


def test_without_automatic_naming_total_limit_removes_nothing_as_with_accelerate_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = ProjectConfiguration(str(tmp_path), total_limit=2)
    accelerator = new_accelerator(project_config=project)
    _prepared(accelerator)
    with attach(accelerator):
        for name in ("best", "epoch_0", "epoch_1", "epoch_2"):
            accelerator.save_state(str(tmp_path / name))
    assert {found.name for found in ckpt.list_checkpoints(tmp_path)} == {"best", "epoch_0", "epoch_1", "epoch_2"}
    assert "total_limit=2 has no effect" in caplog.text


def _with_hooks(rank: int, root: str, world_size: int) -> None:
    accelerator = new_accelerator(rank=rank, world_size=world_size)
    _, (model, *_) = _prepared(accelerator)
    calls: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], folder: str) -> None:
        calls.append((models, list(weights[0]), folder))
        if accelerator.is_main_process:  # as diffusers does it
            weights.pop()
            Path(folder, "own.txt").write_text("mine")

    def before_load(models: list[Any], folder: str) -> None:
        calls.append((list(models), folder))
        models.pop()

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    with attach(accelerator, root) as manager:
        folder = str(accelerator.save_state("hooked"))
        accelerator.load_state()
        bare = accelerator.unwrap_model(model)  # which is what Accelerate has on its list
        assert calls == [([bare], list(bare.state_dict()), folder), ([bare], folder)]
        assert manager.restored is not None
        assert manager.restored.restored[:2] == ("optimizer", "scheduler")
    files = {path.name for path in Path(folder).iterdir()}
    assert "own.txt" in files
    assert "model.safetensors" not in files


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_of_the_accelerator_are_called_and_may_take_models_over(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(world_size, _with_hooks, str(tmp_path / "run"), world_size) == [0] * world_size


def test_loops_without_training_leave_no_trace_and_begin_at_their_beginning(tmp_path: Path) -> None:
    def epoch_with_evaluation(accelerator: Any, stop: int | None = None) -> list[int]:
        loader, parts = _prepared(accelerator)
        evaluation = accelerator.prepare(DataLoader(Numbers(), batch_size=4))
        with attach(accelerator, tmp_path) as manager:
            manager.resume()
            sizes = [sum(1 for _ in evaluation)]
            for number, batch in enumerate(loader, 1):
                train_on(batch, accelerator, *parts)
                sizes += [sum(1 for _ in evaluation)]  # inside a step of the training
                if number == stop:
                    for _ in evaluation:
                        break
                    accelerator.save_state()
                    return sizes
            assert (manager.progress.epoch, manager.progress.samples) == (1, SAMPLES)
        return sizes

    assert epoch_with_evaluation(new_accelerator(), stop=2) == [6] * 3
    assert epoch_with_evaluation(new_accelerator()) == [6] * 5


def test_a_script_that_skips_batches_itself_does_not_skip_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = new_accelerator()
    loader, parts = _prepared(accelerator)
    with attach(accelerator, tmp_path):
        for number, batch in enumerate(accelerator.skip_first_batches(loader), 1):  # none
            train_on(batch, accelerator, *parts)
            if number == 2:
                break
        accelerator.save_state("step_2")
    accelerator = new_accelerator()
    loader, parts = _prepared(accelerator)
    with attach(accelerator, tmp_path):
        assert len(list(accelerator.skip_first_batches(loader, 1))) == 5
        accelerator.load_state(str(tmp_path / "step_2"))
        assert accelerator.skip_first_batches(loader, 2) is loader
        assert "batches of this loader are done" not in caplog.text
        assert len(list(loader)) == 4
        accelerator.load_state(str(tmp_path / "step_2"))
        assert accelerator.skip_first_batches(loader, 3) is loader
        assert "skip_first_batches(3): the checkpoint says that 2 batches of this loader are done" in caplog.text
        assert len(list(loader)) == 4


def _saved_by_accelerate(rank: int, folder: str, world_size: int) -> list[Any]:
    """Train two batches, and let Accelerate itself save: what it then has."""
    accelerator = new_accelerator(rank=rank, world_size=world_size, gradient_accumulation_steps=2)
    loader, parts = _prepared(accelerator)
    accelerator.register_for_checkpointing(Counter())
    for _, batch in zip(range(2), loader, strict=False):
        train_on(batch, accelerator, *parts)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    return [exact([part.state_dict() for part in parts]), torch.rand(3).tolist()]


def _taken_over(rank: int, folder: str, world_size: int) -> None:
    at = f"{folder}/theirs/step_2"
    theirs = _saved_by_accelerate(rank, at, world_size)
    os.chdir(f"{folder}/theirs")
    for root, given in ((f"{folder}/theirs", "step_2"), (f"{folder}/ours", at), (f"{folder}/new", "step_2")):
        reseed(rank, 1)
        accelerator = new_accelerator(rank=rank, world_size=world_size, gradient_accumulation_steps=2)
        _, parts = _prepared(accelerator)
        accelerator.register_for_checkpointing(Counter())
        with attach(accelerator, root) as manager:
            accelerator.load_state(given)
            assert [exact([part.state_dict() for part in parts]), torch.rand(3).tolist()] == theirs, (root, given)
            assert manager.restored is not None
            assert manager.restored.url == at
            assert manager.restored.skipped == {}
            assert manager.restored.approximated.keys() == {"progress", "gradients", "dataloader.0"}
            assert "skip_first_batches" in manager.restored.approximated["dataloader.0"]
            assert accelerator.step == 2


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_attached_a_load_takes_over_what_accelerate_itself_saved(tmp_path: Path, world_size: int) -> None:
    """In the root, at a path elsewhere, and in the folder where the script runs."""
    assert run_ranks(world_size, _taken_over, str(tmp_path), world_size) == [0] * world_size


def test_a_folder_of_nobody_is_refused_with_the_remedy(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    _prepared(accelerator)
    (tmp_path / "empty").mkdir()
    with attach(accelerator, tmp_path / "root"):
        for folder in ("empty", "nowhere"):
            with pytest.raises(ckpt.ConfigError, match=f"{folder}.* nor a folder that Accelerate saved.*plain name"):
                accelerator.load_state(str(tmp_path / folder))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", ["seedable", "dispatched", "a stream", "a stateful stream, dispatched"])
def test_after_skipped_batches_the_position_is_kept_as_ever(tmp_path: Path, kind: str) -> None:
    """A script that skips what Accelerate's folder does not tell, and is then interrupted in the same epoch."""

    def rest(root: str, run: int, stop: int | None = None) -> list[Any]:
        reseed(0, run)
        accelerator = new_accelerator(loaders=KINDS[kind][0])
        loader, *parts = accelerator.prepare(KINDS[kind][1](), *build())
        seen: list[Any] = []
        with attach(accelerator, tmp_path / root) as manager:
            if manager.resume() is None:
                loader = accelerator.skip_first_batches(loader, 2)
            for batch in loader:
                seen.append([*(tensor.tolist() for tensor in batch), train_on(batch, accelerator, *parts)])
                if len(seen) == stop:
                    assert manager.progress.batch == 3
                    accelerator.save_state()
                    break
        return seen

    straight = rest("straight", run=0)
    assert len(straight) == 4
    assert rest("stopped", run=0, stop=1) + rest("stopped", run=1) == straight


def _part_of_an_epoch(rank: int, root: str, world_size: int, kind: str, stop: int) -> None:
    options, make = KINDS[kind]
    reseed(0, 0)
    accelerator = new_accelerator(rank=rank, world_size=world_size, loaders=options)
    loader, *parts = accelerator.prepare(make(), *build())
    seen: list[int] = []
    with attach(accelerator, root) as manager:
        manager.resume()
        for batch in loader:
            seen += accelerator.gather(batch[0]).tolist()
            train_on(batch, accelerator, *parts)
            if len(seen) == stop:
                accelerator.save_state()
                break
    if rank == 0:
        with Path(root, "seen.txt").open("a") as file:
            file.writelines(f"{number}\n" for number in seen)


@pytest.mark.slow
def test_with_another_number_of_ranks_an_order_that_cannot_be_the_same_is_named(tmp_path: Path) -> None:
    assert run_ranks(2, _part_of_an_epoch, str(tmp_path), 2, "sharded", 8) == [0, 0]
    accelerator = new_accelerator()
    _prepared(accelerator)
    with attach(accelerator, tmp_path) as manager:
        restored = manager.resume()
    assert restored is not None
    assert "use_seedable_sampler" in restored.approximated["dataloader.0.order"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seedable", "seedable and split"])
def test_with_another_number_of_ranks_every_sample_is_seen_once(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, _part_of_an_epoch, str(tmp_path), 2, kind, 8) == [0, 0]
    assert run_ranks(1, _part_of_an_epoch, str(tmp_path), 1, kind, 0) == [0]
    seen = [int(line) for line in (tmp_path / "seen.txt").read_text().split()]
    assert sorted(seen) == list(range(SAMPLES))


def test_attaching_again_and_ending_leave_the_accelerator_as_it_was(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    loader, _ = _prepared(accelerator)
    attach(accelerator, tmp_path)
    attach(accelerator, tmp_path)
    accelerator.save_state("once")
    accelerator.end_training()
    assert accelerator.save_state.__func__ is Accelerator.save_state
    assert len(list(loader)) == 6
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["once"]


def test_an_accelerator_with_nothing_prepared_is_refused(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    attach(accelerator, tmp_path)
    with pytest.raises(ckpt.StateError, match=r"prepared nothing.*accelerator\.prepare"):
        accelerator.save_state("empty")
    _prepared(accelerator)
    accelerator.save_state("full")
    accelerator.end_training()
    other = new_accelerator()
    attach(other, tmp_path)
    with pytest.raises(ckpt.StateError, match=r"prepared nothing that ckpt could load into.*accelerator\.prepare"):
        other.load_state()


def test_what_left_the_accelerator_is_named(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    _prepared(accelerator)
    attach(accelerator, tmp_path)
    accelerator.save_state("before")
    accelerator.free_memory()
    for _ in range(2):
        with pytest.raises(ckpt.StateError, match=r"model \(a Sequential\), optimizer \(a AdamW\).*free_memory"):
            accelerator.save_state("after")
    _prepared(accelerator)
    attach(accelerator, tmp_path)
    accelerator.load_state()


def test_another_number_of_models_is_named(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    _prepared(accelerator)
    attach(accelerator, tmp_path)
    accelerator.save_state("one")
    accelerator.end_training()
    other = new_accelerator()
    _prepared(other)
    other.prepare(nn.Linear(1, 1))
    attach(other, tmp_path)
    with pytest.raises(ckpt.MismatchError, match=r"model\.1: missing.*it has 1 of kind 'model', and there are 2 here"):
        other.load_state("one")


def in_a_notebook(root: str) -> None:
    """A cell: nothing but the attached lines knows of ckpt."""
    accelerator = Accelerator()
    loader, parts = _prepared(accelerator)
    attach(accelerator, root)
    for batch in loader:
        train_on(batch, accelerator, *parts)
    accelerator.save_state("cell")
    accelerator.load_state("cell")
    accelerator.print(f"{accelerator.num_processes} processes, {loader.iteration} epoch")
    accelerator.end_training()


def _launched_here(rank: int, root: str) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    notebook_launcher(in_a_notebook, (root,), num_processes=1)


@pytest.mark.slow
def test_a_notebook_launches_it_in_its_own_process(tmp_path: Path) -> None:
    assert run_ranks(1, _launched_here, str(tmp_path)) == [0]
    assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["cell"]


@pytest.mark.slow
def test_a_notebook_launches_it_in_two_processes(tmp_path: Path) -> None:
    cell = (
        "import socket\n"
        "from accelerate import notebook_launcher\n"
        "from tests.integrations.test_accelerate import in_a_notebook\n"
        "with socket.socket() as free:\n"  # as late as can be: others take ports too
        "    free.bind(('127.0.0.1', 0))\n"
        "    port = str(free.getsockname()[1])\n"
        f"notebook_launcher(in_a_notebook, ({str(tmp_path / 'root')!r},), num_processes=2, use_port=port)\n"
    )
    environment = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    said = Script("-c", cell, log=tmp_path / "log", environment=environment).run()
    assert "2 processes, 1 epoch" in said
    assert [found.name for found in ckpt.list_checkpoints(tmp_path / "root")] == ["cell"]


def _save_on_the_main_process_only(rank: int, root: str) -> None:
    accelerator = new_accelerator(rank=rank, world_size=2)
    _prepared(accelerator)
    manager = attach(accelerator, root, ranks=ckpt.RankOptions(timeout=1.0))
    if accelerator.is_main_process:
        with pytest.raises(
            ckpt.RanksError, match=r"rank 1 did not answer within 1 s.*is_main_process.*main_process_saves"
        ):
            accelerator.save_state("alone")
        manager.wait()  # nothing was begun
    assert ckpt.list_checkpoints(root) == []
    dist.barrier()


@pytest.mark.slow
def test_a_save_on_the_main_process_only_is_told_so_and_does_not_hang(tmp_path: Path) -> None:
    assert run_ranks(2, _save_on_the_main_process_only, str(tmp_path / "run")) == [0, 0]


def test_what_cannot_be_given_is_refused_with_the_remedy(tmp_path: Path) -> None:
    accelerator = new_accelerator()
    model, *_ = build()
    with pytest.raises(ckpt.ConfigError, match=r"either accelerator= or model:.*register"):
        ckpt.StateManager(tmp_path, accelerator=accelerator, model=model)
    with pytest.raises(ckpt.ConfigError, match=r"needs a root.*project_dir"):
        attach(accelerator)
    _prepared(accelerator)
    attach(accelerator, tmp_path / "root")
    with pytest.raises(ckpt.ConfigError, match=r"elsewhere/x is not directly below .*root.* not a local folder"):
        accelerator.save_state("memory://elsewhere/x")
    engine = SimpleNamespace(distributed_type=DistributedType.MEGATRON_LM)
    with pytest.raises(ckpt.UnsupportedError, match="ckpt can't save under Megatron-LM"):
        ckpt.StateManager(tmp_path, accelerator=engine)
