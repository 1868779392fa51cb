"""What Accelerate saved is taken over, and what ckpt saved is handed over, bit for bit. It is the real Accelerate."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.cli.main import main
from ckpt.root.signing import new_key
from ckpt.storage import LocalStorage
from tests.helpers.accelerate_folders import (
    Seen,
    build,
    load_ours,
    load_theirs,
    recorded,
    save_ours,
    save_theirs,
    train,
)
from tests.helpers.processes import DEADLINE, run_alone, run_ranks, start_alone
from tests.helpers.training import exact

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_accelerator_is_left() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


CASES = {  # ranks, a scaler, safetensors
    "one": (1, False, True),
    "one-scaler-bin": (1, True, False),
    "two-scaler": (2, True, True),
    "two-bin": (2, False, False),
}


class Case:
    """A folder that Accelerate saved, and what it was saved by."""

    def __init__(self, name: str, folder: Path) -> None:
        self.ranks, self.scaler, self.safe = CASES[name]
        self.folder = folder
        run_ranks(self.ranks, save_theirs, str(folder), self.scaler, self.safe)
        self.saved = recorded(Path(f"{folder}-saved"), self.ranks)

    def run(self, function: Any, *args: Any, out: Path) -> list[str]:
        run_ranks(self.ranks, function, *args, str(out), self.scaler)
        return recorded(out, self.ranks)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("theirs") / "checkpoint_3")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one process with safetensors, to be copied before it is harmed."""
    return Case("one", tmp_path_factory.mktemp("theirs") / "checkpoint_3").folder


@pytest.fixture
def copy(theirs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(theirs, tmp_path / "checkpoint_3"))


def manager_for(root: Path, **parts: Any) -> ckpt.StateManager:
    run = build(scaler=False, seed=9)
    parts = run.parts() | parts
    manager = ckpt.StateManager(root, **parts)
    manager.register(seen=run.seen)
    return manager


@pytest.mark.slow
class TestBothWays:
    def test_what_accelerate_saved_is_loaded_in_every_bit(self, case: Case, tmp_path: Path) -> None:
        root = str(case.folder.parent)
        assert case.run(load_ours, root, "checkpoint_3", out=tmp_path / "named") == case.saved

    def test_converted_it_loads_the_same_and_is_intact(self, case: Case, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        token = tmp_path / "root" / ".memory"
        token.write_text("0" * 32)  # a run of this root has left snapshots in memory
        converted = ckpt.convert(case.folder, tmp_path / "root")
        assert converted.url == str(tmp_path / "root" / "checkpoint_3")
        assert not token.exists()  # which do not continue from this
        assert ckpt.verify(tmp_path / "root") == {"checkpoint_3": []}
        (found,) = ckpt.list_checkpoints(tmp_path / "root")
        assert found.manifest is not None
        assert (found.manifest.world_size, found.manifest.origin) == (case.ranks, "accelerate")
        assert case.run(load_ours, str(tmp_path / "root"), None, out=tmp_path / "loaded") == case.saved
        ckpt.convert(tmp_path / "root" / "checkpoint_3", tmp_path / "back", to="accelerate")
        assert case.run(load_theirs, str(tmp_path / "back"), 5, out=tmp_path / "returned") == case.saved

    def test_converted_it_can_be_signed_and_before_it_is_refused_where_that_is_required(
        self, copy: Path, tmp_path: Path
    ) -> None:
        key = str(tmp_path / "key.pem")
        required: dict[str, Any] = {"signing": ckpt.Signing(verify_key=new_key(key), required=True)}
        with manager_for(tmp_path, **required) as manager, pytest.raises(ckpt.UntrustedError, match="is not signed"):
            manager.load_state(copy.name)
        ckpt.convert(copy, tmp_path / "root", sign=key)
        with manager_for(tmp_path / "root", **required) as manager:
            assert manager.load_state(strict=False).name == "checkpoint_3"

    @pytest.mark.parametrize(("ranks", "scaler"), [(1, True), (2, False)])
    def test_what_a_manager_saved_loads_in_accelerate(self, ranks: int, scaler: bool, tmp_path: Path) -> None:
        run_ranks(ranks, save_ours, str(tmp_path / "root"), scaler)
        saved = recorded(tmp_path / "root-saved", ranks)
        converted = ckpt.convert(tmp_path / "root" / "x", tmp_path / "out", to="accelerate")
        assert {"model", "optimizer", "scheduler", "seen", "rng"} <= set(converted.parts)
        run_ranks(ranks, load_theirs, str(tmp_path / "out"), 0, str(tmp_path / "loaded"), scaler)
        assert recorded(tmp_path / "loaded", ranks) == saved


class TestTakingOver:
    @pytest.mark.slow
    def test_the_newest_folder_in_the_root_is_resumed_from_and_stays(self, theirs: Path, tmp_path: Path) -> None:
        for number in (2, 10, 9):
            shutil.copytree(theirs, tmp_path / f"checkpoint_{number}")
        (tmp_path / "checkpoint_11").mkdir()
        shutil.copy(theirs / "optimizer.bin", tmp_path / "checkpoint_11")  # killed in the middle
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with manager_for(tmp_path) as manager:
            restored = manager.resume()
            assert restored is not None
            assert restored.name == "checkpoint_10"
            assert "random_states_0.pkl is missing" in restored.passed_over["checkpoint_11"]
            assert "counting begins at 0" in restored.approximated["progress"]
            with pytest.raises(ckpt.ConfigError, match=r"Accelerate wrote .*checkpoint_10, and ckpt does not"):
                manager.save_state("checkpoint_10", wait=True)
            manager.save_state("next", wait=True)
        assert {path: path.read_bytes() for path in before} == before
        with manager_for(tmp_path) as manager:
            assert manager.load_state().name == "next"
            (found,) = ckpt.list_checkpoints(tmp_path)
            assert found.manifest is not None
            assert (found.manifest.parent, found.manifest.origin) == ("accelerate:checkpoint_10", "")

    @pytest.mark.slow
    def test_the_root_itself_may_be_the_folder(self, copy: Path) -> None:
        with manager_for(copy) as manager:
            restored = manager.load_state()
            assert (restored.name, restored.url) == ("checkpoint_3", str(copy))
            manager.progress.epoch = 3  # which Accelerate does not say
            assert list(manager.epochs(5)) == [3, 4]

    @pytest.mark.slow
    def test_what_a_trainer_saved_is_not_taken_for_it(self, theirs: Path, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint-500"
        folder.mkdir()
        for name in ("scaler.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
            shutil.copy(theirs / "optimizer.bin", folder / name)
        with manager_for(tmp_path) as manager:
            assert manager.resume() is None

    @pytest.mark.slow
    def test_where_names_do_not_tell_the_newest_one_has_to_be_named(self, theirs: Path, tmp_path: Path) -> None:
        for name in ("epoch_1", "step_500"):
            shutil.copytree(theirs, tmp_path / name)
        with manager_for(tmp_path) as manager:
            with pytest.raises(
                ckpt.ConfigError, match=r"epoch_1, step_500\), but their names don't show which is the newest"
            ):
                manager.load_state()
            assert manager.load_state("epoch_1").name == "epoch_1"

    @pytest.mark.slow
    def test_another_number_of_models_is_refused_by_name_and_changes_nothing(self, theirs: Path) -> None:
        models = [build(scaler=False, seed=1).model for _ in range(2)]
        before = exact(models[0].state_dict())
        with ckpt.StateManager(theirs, model=models) as manager, pytest.raises(ckpt.MismatchError) as caught:
            manager.load_state()
        assert caught.value.problems == (
            "model.1: missing: the checkpoint has no such part (it has 1 of kind 'model', and there are 2 here)",
        )
        assert exact(models[0].state_dict()) == before

    @pytest.mark.slow
    def test_parameters_in_another_order_than_saved_are_noticed_by_their_shapes(self, theirs: Path) -> None:
        run = build(scaler=False)
        run.optimizer.param_groups.reverse()
        train(run, run.model, steps=1)
        with (
            ckpt.StateManager(theirs, **run.parts()) as manager,
            pytest.raises(ckpt.MismatchError, match="param_groups"),
        ):
            manager.load_state()

    @pytest.mark.slow
    def test_what_fits_is_taken_and_the_rest_is_listed(self, copy: Path) -> None:
        with manager_for(copy, model=nn.ModuleDict({"module": nn.Linear(6, 6)}), optimizer=None) as manager:
            with pytest.raises(ckpt.MismatchError, match=r"embed\.weight: unexpected"):
                manager.load_state()
            restored = manager.load_state(strict=False)
        assert {"model.embed.weight", "model.head.weight", "optimizer"} & restored.skipped.keys() == {
            "model.embed.weight",
            "optimizer",
        }
        assert {"model", "scheduler", "seen"} <= set(restored.restored)

    @pytest.mark.slow
    def test_in_mid_training_it_takes_the_run_back(self, copy: Path) -> None:
        run = build(scaler=False, seed=9)
        with ckpt.StateManager(copy, **run.parts()) as manager:
            manager.resume(strict=False)
            taken = exact([part.state_dict() for part in (run.model, run.optimizer, run.scheduler)])
            train(run, run.model)
            manager.step()
            manager.load_state()
        assert exact([part.state_dict() for part in (run.model, run.optimizer, run.scheduler)]) == taken

    @pytest.mark.slow
    def test_shards_with_an_index_are_one_model(self, copy: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        whole = load_file(copy / "model.safetensors")
        ckpt.convert(copy, tmp_path / "root")
        (copy / "model.safetensors").unlink()
        ckpt.merge(tmp_path / "root" / "checkpoint_3", copy / "model.safetensors", max_shard_size=200)
        assert not (copy / "model.safetensors").exists()
        ckpt.convert(copy, tmp_path / "root", name="again")
        found = load_file(tmp_path / "root" / "again" / "model.safetensors")
        assert exact(found) == exact(whole)
        next(copy.glob("model-00001-*")).unlink()
        with pytest.raises(ckpt.DamagedError, match=r"names files that are missing: model-00001-of-"):
            ckpt.convert(copy, tmp_path / "root", name="third")

    def test_the_state_of_a_loader_that_keeps_it_goes_there_and_back(self, tmp_path: Path) -> None:
        from accelerate import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2))
        next(iter(loader))
        accelerator.save_state(str(tmp_path / "checkpoint_0"))
        assert ckpt.convert(tmp_path / "checkpoint_0", tmp_path / "root").parts == ("dataloader.0", "rng")
        ckpt.convert(tmp_path / "root" / "checkpoint_0", tmp_path / "back", to="accelerate")
        names = (tmp_path / name / "dl_state_dict.bin" for name in ("checkpoint_0", "back"))
        before, after = (torch.load(name, weights_only=True) for name in names)
        assert before["_num_yielded"] == 1
        assert repr(after) == repr(before)


class TestHandingOver:
    def test_what_has_no_place_there_is_named(self, tmp_path: Path) -> None:
        run = build(scaler=False)
        loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
        with ckpt.StateManager(tmp_path / "root", **run.parts(), saving=ckpt.SaveOptions(gradients=True)) as manager:
            manager.register(dice=torch.Generator())
            for _ in manager.batches(loader):
                train(run, run.model, steps=1)
                manager.step()
                manager.save_state("x", wait=True)
                break
        converted = ckpt.convert(tmp_path / "root" / "x", tmp_path / "out", to="accelerate")
        assert converted.skipped.keys() == {"dice", "gradients", "progress"}
        assert "skip_first_batches(loader, 1)" in converted.skipped["progress"]

    def test_a_model_with_state_that_is_no_tensor_is_handed_over_whole(self, tmp_path: Path) -> None:
        model = WithExtra()
        with ckpt.StateManager(tmp_path / "root", model=model) as manager:
            manager.save_state("x", wait=True)
        ckpt.convert(tmp_path / "root" / "x", tmp_path / "out", to="accelerate")
        found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
        assert exact(found) == exact(dict(model.state_dict()))
        other = WithExtra()
        other.extra = 1
        with ckpt.StateManager(tmp_path / "out", model=other) as manager:
            manager.load_state()
        assert other.extra == 7

    @pytest.mark.slow
    def test_a_damaged_checkpoint_is_not_handed_over(self, copy: Path, tmp_path: Path) -> None:
        ckpt.convert(copy, tmp_path / "root")
        for name in ("model.safetensors", "optimizer.safetensors"):
            file = tmp_path / "root" / "checkpoint_3" / name
            data = file.read_bytes()
            file.write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))
            with pytest.raises(ckpt.DamagedError, match=f"{name} was altered"):
                ckpt.convert(tmp_path / "root" / "checkpoint_3", tmp_path / "out", to="accelerate")
            file.write_bytes(data)
        assert not (tmp_path / "out").exists()


class WithExtra(nn.Linear):
    """Keeps a number beside its weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = 7

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


def save_pair(folder: Path) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Two models with an optimizer each, saved by Accelerate."""
    from accelerate import Accelerator

    models, optimizers = pair(3)
    accelerator = Accelerator(cpu=True)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
    accelerator.prepare(*models, *optimizers)
    accelerator.save_state(str(folder))
    return models, optimizers


def pair(seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    models: list[nn.Module] = [nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def states(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> str:
    return exact([*(model.state_dict() for model in models), *(optimizer.state_dict() for optimizer in optimizers)])


class TestSeveral:
    def test_models_and_optimizers_go_by_their_order_whatever_they_are_called(self, tmp_path: Path) -> None:
        saved = save_pair(tmp_path / "checkpoint_0")
        models, optimizers = pair(4)
        with ckpt.StateManager(
            tmp_path,
            model=dict(zip(("generator", "critic"), models, strict=True)),
            optimizer=dict(zip(("generator", "critic"), optimizers, strict=True)),
        ) as manager:
            manager.load_state()
        assert states(models, optimizers) == states(*saved)

    def test_converted_they_are_numbered_and_come_back_so(self, tmp_path: Path) -> None:
        from accelerate import Accelerator

        saved = save_pair(tmp_path / "checkpoint_0")
        converted = ckpt.convert(tmp_path / "checkpoint_0", tmp_path / "root", name="mine")
        assert converted.parts == ("model.0", "model.1", "optimizer.0", "optimizer.1", "rng")
        ckpt.convert(tmp_path / "root" / "mine", tmp_path / "back", to="accelerate")
        models, optimizers = pair(4)
        accelerator = Accelerator(cpu=True)
        accelerator.free_memory()
        accelerator.prepare(*models, *optimizers)
        accelerator.load_state(str(tmp_path / "back"))
        assert states(models, optimizers) == states(*saved)


def save_fsdp(rank: int, folder: str) -> None:
    """What Accelerate saves under FSDP 2 with SHARDED_STATE_DICT; that it needs a GPU for."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    from tests.helpers.sharded import fsdp2, state, step

    model = fsdp2(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 1)
    save_dcp({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    save_dcp({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/optimizer_0")
    states = {"step": 2, "random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    torch.save(states, f"{folder}/random_states_{rank}.pkl")
    Path(f"{folder}-{rank}.txt").write_text(state(model, optimizer))


def save_sharded(rank: int, root: str) -> None:
    """What a manager saves of the same run, in pieces."""
    from tests.helpers.sharded import fsdp2, step

    model = fsdp2(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.save_state("pieces", wait=True)


def load_fsdp(rank: int, root: str, name: str, kind: str) -> None:
    from tests.helpers.sharded import MODELS, state

    model = MODELS[kind](6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.load_state(name)
    assert state(model, optimizer) == Path(root, "saved-0.txt").read_text(), kind


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    (root / "saved").mkdir()
    run_ranks(2, save_fsdp, str(root / "saved"))
    return root


class TestFsdp:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
    def test_the_folders_load_directly_each_rank_its_piece(self, fsdp: Path, kind: str) -> None:
        run_ranks(2, load_fsdp, str(fsdp), "saved", kind)

    @pytest.mark.slow
    def test_they_load_in_one_process_and_converted(self, fsdp: Path) -> None:
        run_alone(load_fsdp, str(fsdp), "saved", "ddp")
        ckpt.convert(fsdp / "saved", fsdp, name="ours")
        run_alone(load_fsdp, str(fsdp), "ours", "ddp")

    @pytest.mark.slow
    def test_a_sharded_checkpoint_of_ours_is_handed_over_whole(self, fsdp: Path, tmp_path: Path) -> None:
        run_ranks(2, save_sharded, str(tmp_path))
        ckpt.convert(tmp_path / "pieces", tmp_path / "whole", to="accelerate")
        shutil.copy(fsdp / "saved-0.txt", tmp_path)
        run_ranks(2, load_fsdp, str(tmp_path), "whole", "ddp")

    def test_gathered_state_goes_by_name_also_of_several_models(self, tmp_path: Path) -> None:
        """What Accelerate saves with FULL_STATE_DICT: parameters have names, each optimizer those of its model."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        saved = save_pair(tmp_path / "checkpoint_0")
        for number, (model, optimizer) in enumerate(zip(*saved, strict=True)):
            end = f"_{number}" if number else ""
            torch.save(model.state_dict(), tmp_path / "checkpoint_0" / f"pytorch_model_fsdp{end}.bin")
            (tmp_path / "checkpoint_0" / f"model{end}.safetensors").unlink()
            named = get_optimizer_state_dict(model, optimizer)
            torch.save(named, tmp_path / "checkpoint_0" / f"optimizer{end}.bin")
        models, optimizers = pair(4)
        with ckpt.StateManager(tmp_path, model=models, optimizer=optimizers) as manager:
            manager.load_state()
        assert states(models, optimizers) == states(*saved)

    @pytest.mark.slow
    def test_a_lost_file_of_a_rank_is_named(self, fsdp: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(fsdp / "saved", tmp_path / "lost"))
        (folder / "optimizer_0" / "__1_0.distcp").unlink()
        with pytest.raises(ckpt.DamagedError, match=r"optimizer_0 is damaged: __1_0\.distcp is missing"):
            ckpt.convert(folder, tmp_path / "root")
        (folder / "optimizer_0" / ".metadata").unlink()
        with pytest.raises(ckpt.DamagedError, match=r"optimizer_0/\.metadata is missing.* the save was interrupted"):
            ckpt.convert(folder, tmp_path / "root")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def with_payload(file: Path, payload: Payload) -> None:
    """Put it where it would be executed by whoever unpickles the file, in the form that such a file has."""
    torch.save({"state": {}, "param_groups": [payload]}, file)


@pytest.mark.slow
class TestBadInput:
    @pytest.mark.parametrize(
        "name", ["optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl", "custom_checkpoint_0.pkl"]
    )
    def test_a_hostile_pickle_is_refused_by_name_and_never_executed(self, copy: Path, name: str) -> None:
        trap = copy.parent / "executed"
        with_payload(copy / name, Payload(trap))
        what = rf"{name} names '(posix|nt)\.system', which such a file does not need\. ckpt did not execute it"
        with pytest.raises(ckpt.DamagedError, match=what):
            ckpt.convert(copy, copy.parent / "root")
        with manager_for(copy) as manager, pytest.raises(ckpt.DamagedError, match=what):
            manager.load_state()
        assert not trap.exists()
        assert ckpt.list_checkpoints(copy.parent / "root") == []

    def test_a_hostile_model_and_a_hostile_sampler_are_not_executed(self, copy: Path) -> None:
        trap = copy.parent / "executed"
        with_payload(copy / "sampler.bin", Payload(trap))
        converted = ckpt.convert(copy, copy.parent / "root")
        assert "sampler.bin" in converted.skipped
        (copy / "model.safetensors").unlink()
        with_payload(copy / "pytorch_model.bin", Payload(trap))
        with pytest.raises(ckpt.DamagedError, match=r"posix\.system"):
            ckpt.convert(copy, copy.parent / "root", name="other")
        assert not trap.exists()

    def test_a_hostile_value_in_an_fsdp_folder_is_refused_too(self, copy: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

        trap = copy.parent / "executed"
        (copy / "optimizer.bin").unlink()
        state = {"state": {}, "param_groups": [{"params": [], "lr": Payload(trap), "step": torch.ones(1)}]}
        save_dcp({"optimizer": state}, checkpoint_id=copy / "optimizer_0")
        with pytest.raises(ckpt.DamagedError, match=r"distcp names 'posix\.system'.* ckpt did not execute it"):
            ckpt.convert(copy, copy.parent / "root")
        assert not trap.exists()

    def test_files_that_are_cut_or_lost_are_named(self, copy: Path) -> None:
        whole = {path.name: path.read_bytes() for path in copy.iterdir()}
        for name, data in whole.items():
            (copy / name).write_bytes(data[: len(data) // 2])
            with pytest.raises(ckpt.DamagedError, match=name):
                ckpt.convert(copy, copy.parent / "root")
            (copy / name).write_bytes(data)
        for kind, first, second in (
            ("model", "model.safetensors", "model_1.safetensors"),
            ("optimizer", "optimizer.bin", "optimizer_1.bin"),
            ("scheduler", "scheduler.bin", "scheduler_1.bin"),
            ("custom", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"),
            ("random_states", "random_states_0.pkl", "random_states_1.pkl"),
        ):
            (copy / first).rename(copy / second)
            with pytest.raises(ckpt.DamagedError, match=f"it has {second}, but {kind} number 0 is missing"):
                ckpt.convert(copy, copy.parent / "root")
            (copy / second).rename(copy / first)
        assert ckpt.list_checkpoints(copy.parent / "root") == []

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("pytorch_model_fsdp_rank0.bin", "holds pieces of one rank"),
            ("pytorch_model/mp_rank_00_model_states.pt", "DeepSpeed wrote it"),
            ("pytorch_model.bin", "has files of two saves: model.safetensors and pytorch_model.bin"),
        ],
    )
    def test_what_cannot_be_read_is_refused_with_the_remedy(self, copy: Path, name: str, what: str) -> None:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"")
        with pytest.raises(ckpt.ConfigError, match=what):
            ckpt.convert(copy, copy.parent / "root")

    def test_a_value_that_is_no_data_is_named_by_its_file(self, copy: Path) -> None:
        torch.save({"thing": Seen()}, copy / "custom_checkpoint_0.pkl")
        with pytest.raises(
            ckpt.DamagedError, match=r"custom_checkpoint_0\.pkl names 'tests\.helpers\.accelerate_folders\.Seen'"
        ):
            ckpt.convert(copy, copy.parent / "root")

    def test_nonsense_is_told_in_one_line(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "x.txt").write_text("x")
        ckpt.convert(copy, tmp_path / "root")
        taken = str(tmp_path / "root" / "checkpoint_3")
        for arguments, message in {
            (str(tmp_path / "nowhere"), "out"): "there is nothing at",
            (str(tmp_path / "empty"), "out"): "can't read the format of",
            (str(copy), str(tmp_path / "root")): "already has a checkpoint 'checkpoint_3'",
            (str(copy), str(tmp_path)): "checkpoint_3, and ckpt does not",
            (
                str(tmp_path / "root" / "checkpoint_3"),
                str(tmp_path / "root"),
            ): "already has a checkpoint 'checkpoint_3'",
            (taken, str(tmp_path / "empty"), "--to", "accelerate"): "already exists",
            (str(tmp_path / "root"), "s3://x/y", "--to", "accelerate"): "ckpt writes accelerate only to a disk",
        }.items():
            done = CliRunner().invoke(main, ["convert", *arguments])
            assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
            assert message in done.output

    def test_the_command_says_what_became_of_it(self, copy: Path, tmp_path: Path) -> None:
        root = str(tmp_path / "root")
        done = CliRunner().invoke(main, ["convert", str(copy), root, "--name", "taken"])
        assert done.exit_code == 0, done.output
        assert done.output.startswith(f"{root}/taken: model, optimizer, scheduler, custom.0, rng\n")
        done = CliRunner().invoke(main, ["convert", f"{root}/taken", str(tmp_path / "back"), "--to", "accelerate"])
        assert done.exit_code == 0, done.output
        assert (tmp_path / "back" / "random_states_0.pkl").exists()


def convert_and_die(rank: int, source: str, destination: str, to: str, at: int) -> None:
    """Convert, and be killed at a write to a file."""
    from ckpt.formats.foreign.torch_write import write_file

    left = [at]

    def counted(write: Any) -> Any:
        def dying(*args: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*args, **options)

        return dying

    LocalStorage.write = counted(LocalStorage.write)  # type: ignore[method-assign]
    vars(import_module("ckpt.tools.convert"))["write_file"] = counted(write_file)
    ckpt.convert(source, destination, to=to)


@pytest.mark.slow
class TestKilled:
    @pytest.mark.parametrize("to", ["ckpt", "accelerate"])
    def test_a_killed_conversion_leaves_nothing_that_looks_finished(self, copy: Path, tmp_path: Path, to: str) -> None:
        source, destination = copy, tmp_path / "out"
        if to == "accelerate":
            ckpt.convert(copy, tmp_path / "root")
            source = tmp_path / "root" / "checkpoint_3"
        for at in (0, 1, 2, 3):
            process = start_alone(str(tmp_path), convert_and_die, str(source), str(destination), to, at)
            process.join(DEADLINE)
            assert process.exitcode == -signal.SIGKILL
            if to == "ckpt":
                assert not any(checkpoint.committed for checkpoint in ckpt.list_checkpoints(destination))
            else:
                assert not destination.exists()
        ckpt.convert(source, destination, to=to)
        if to == "ckpt":
            assert ckpt.verify(destination) == {"checkpoint_3": []}
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".ckpt-tmp", ".saving"))]
