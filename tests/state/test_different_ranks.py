"""Ranks that hold different plain state: each has its own bytes back, and other ranks are not given rank 0's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.formats.native.shard_table import ShardedTensors, ShardTable
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.formats.tensors import Shard
from ckpt.load.reader import OwnTensors
from ckpt.save.capture import ReplicaTensors
from tests.helpers.places import Place
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.training import exact
from tests.helpers.variations import cells

BuiltManagers = tuple[dict[str, Any], Callable[[], None]]  # what a manager is given, and a step of training


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        model(torch.rand(3, width) + dist.get_rank()).pow(2).mean().backward()
        optimizer.step()

    return step


def _pipeline(seed: int) -> BuiltManagers:
    """A stage for each rank: names, shapes and all are other ones."""
    torch.manual_seed(seed)
    rank = dist.get_rank()
    stage = nn.Module()
    stage.add_module(f"layer{rank}", nn.Linear(3 + rank, 4 + rank))
    optimizer = torch.optim.AdamW(stage.parameters())
    step = _stepper(getattr(stage, f"layer{rank}"), optimizer, 3 + rank)
    return {"model": stage, "optimizer": optimizer}, step


def _experts(seed: int) -> BuiltManagers:
    """Names and shapes are the same on every rank, bytes are not: but for what both ranks have frozen alike."""
    torch.manual_seed(seed)
    shared = nn.Linear(4, 4)
    torch.manual_seed(seed + 10 * (1 + dist.get_rank()))
    model = nn.Sequential(shared.requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model[1:].parameters())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _experts_beside_ddp(seed: int) -> BuiltManagers:
    torch.manual_seed(seed + 10 * (1 + dist.get_rank()))
    model = nn.ModuleDict({"dense": DistributedDataParallel(nn.Linear(4, 4)), "expert": nn.Linear(4, 2)})
    model.register_buffer("empty", torch.empty(0))
    optimizer = torch.optim.AdamW(model.parameters())
    chained = nn.Sequential(model["dense"], model["expert"])
    return {"model": model, "optimizer": optimizer}, _stepper(chained, optimizer, 4)


def _ignored_parameters(seed: int) -> BuiltManagers:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed + 10 * (1 + dist.get_rank()))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, ignored_params=set(model[1].parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _batch_norm_under_fsdp(seed: int) -> BuiltManagers:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _batch_norm_under_fsdp1(seed: int) -> BuiltManagers:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(seed)
    bare = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = FullyShardedDataParallel(bare, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _buffers_of_their_own_under_ddp(seed: int) -> BuiltManagers:
    torch.manual_seed(seed)
    bare = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = DistributedDataParallel(bare, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _fsdp_on_stages(seed: int, *, same_names: bool) -> BuiltManagers:
    """FSDP 2 on `mesh["dp"]` of a ("pp", "dp") mesh: another stage on each row of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(seed + 10 * stage)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    holder = nn.Module()
    holder.add_module("stage" if same_names else f"stage{stage}", model)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(holder.parameters())
    return {"model": holder, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _stages_with_other_names(seed: int) -> BuiltManagers:
    return _fsdp_on_stages(seed, same_names=False)


def _stages_with_the_same_names(seed: int) -> BuiltManagers:
    return _fsdp_on_stages(seed, same_names=True)


def _other_learning_rates(seed: int) -> BuiltManagers:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    optimizer.param_groups[0]["tag"] = seed * (1 + dist.get_rank())
    return {"model": model, "optimizer": optimizer}, _stepper(model, optimizer, 4)


def _a_part_on_one_rank_only(seed: int) -> BuiltManagers:
    torch.manual_seed(seed + dist.get_rank())
    models = {"all": DistributedDataParallel(nn.Linear(4, 2))}
    if dist.get_rank() == 1:
        models["critic"] = nn.Linear(2, 2)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW([parameter for model in models.values() for parameter in model.parameters()])
    return {"model": models, "optimizer": optimizer}, _stepper(models["all"], optimizer, 4)


CASES = {
    "pipeline": (2, _pipeline),
    "experts": (2, _experts),
    "experts beside DDP": (2, _experts_beside_ddp),
    "ignored_params": (2, _ignored_parameters),
    "BatchNorm under FSDP 2": (2, _batch_norm_under_fsdp),
    "BatchNorm under FSDP 1": (2, _batch_norm_under_fsdp1),
    "broadcast_buffers=False": (2, _buffers_of_their_own_under_ddp),
    "FSDP 2 on stages, other names": (4, _stages_with_other_names),
    "FSDP 2 on stages, same names": (4, _stages_with_the_same_names),
    "other learning rates": (2, _other_learning_rates),
    "a part on one rank only": (2, _a_part_on_one_rank_only),
}


def _mine(objects: dict[str, Any]) -> str:
    """What this rank holds, byte for byte."""
    models = objects["model"] if isinstance(objects["model"], dict) else {"": objects["model"]}
    tensors = {
        f"{key}.{name}": local_tensor(tensor) if is_sharded(tensor) else tensor
        for key, model in models.items()
        for name, tensor in model.state_dict().items()
    }
    state = objects["optimizer"].state_dict()
    moments = {
        str(index): {key: local_tensor(tensor) if is_sharded(tensor) else tensor for key, tensor in values.items()}
        for index, values in state["state"].items()
    }
    return exact([tensors, moments, state["param_groups"]])


def _save(rank: int, root: str, case: str, background: bool, layout: str) -> None:
    objects, step = CASES[case][1](1)
    with ckpt.StateManager(
        root, **objects, saving=ckpt.SaveOptions(layout=layout), ranks=ckpt.RankOptions(timeout=60)
    ) as manager:
        manager.save_state("before")  # what differs later may be the same now
        for number in range(2):
            step()
            manager.save_state(f"step-{number}", wait=not background)
            Path(f"{root}-{rank}").write_text(_mine(objects))
        step()


def _load(rank: int, root: str, case: str, layout: str) -> None:
    objects, step = CASES[case][1](2)
    step()
    with ckpt.StateManager(
        root, **objects, saving=ckpt.SaveOptions(layout=layout), ranks=ckpt.RankOptions(timeout=60)
    ) as manager:
        restored = manager.load_state("step-1")
        assert not restored.skipped, restored.skipped
        assert restored.approximated.keys() <= {"data"}, restored.approximated  # these steps read no loader
        assert layout == "full" or not restored.resharded, restored.resharded
        assert _mine(objects) == Path(f"{root}-{rank}").read_text()
        manager.save_state("again", wait=True)
        assert ckpt.verify(root)["again"] == []


def _save_and_load(rank: int, root: str, case: str, background: bool, layout: str) -> None:
    """In one job, for all is built anew in between: FSDP takes longer to begin than to save."""
    _save(rank, root, case, background, layout)
    _load(rank, root, case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_its_own_bytes_back(root: Place, case: str) -> None:
    ranks = CASES[case][0]
    assert run_ranks(ranks, _save_and_load, str(root), case, True, "auto") == [0] * ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cells(["experts", "ignored_params", "FSDP 2 on stages, other names"], often=["ignored_params"])
)
def test_it_has_where_training_waits_for_the_save(root: Place, case: str) -> None:
    ranks = CASES[case][0]
    assert run_ranks(ranks, _save_and_load, str(root), case, False, "auto") == [0] * ranks


LAYOUTS = [
    ("pipeline", "sharded"),
    ("experts", "sharded"),
    ("ignored_params", "full"),
    ("BatchNorm under FSDP 1", "full"),
    ("FSDP 2 on stages, other names", "full"),
    ("FSDP 2 on stages, same names", "full"),
    ("FSDP 2 on stages, same names", "sharded"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), cells(LAYOUTS, often=LAYOUTS[::3]))
def test_it_has_in_the_other_layouts(root: Place, case: str, layout: str) -> None:
    ranks = CASES[case][0]
    assert run_ranks(ranks, _save_and_load, str(root), case, True, layout) == [0] * ranks


def _load_alone(rank: int, root: str) -> None:
    """One process where there were two."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model[1:].parameters())
    before = exact(model.state_dict())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        with pytest.raises(
            ckpt.MismatchError, match=r"model: 1\.weight: each of the 2 ranks that saved it had its own"
        ):
            manager.load_state("step-1")
        assert exact(model.state_dict()) == before
        restored = manager.load_state("step-1", strict=False)
    assert restored.skipped.keys() >= {"model.1.weight", "model.2.bias", "optimizer.state.1.weight"}
    assert "model.0.weight" not in restored.skipped  # what all ranks had alike is there for any number of them


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_and_not_given_the_first_ranks_experts(root: Place) -> None:
    assert run_ranks(2, _save, str(root), "experts", True, "auto") == [0, 0]
    assert run_alone(_load_alone, str(root)) == 0


STATISTICS: dict[str, Callable[[int], BuiltManagers]] = {
    "fsdp": _batch_norm_under_fsdp,
    "ddp": _buffers_of_their_own_under_ddp,
}


def _statistics(objects: dict[str, Any]) -> str:
    buffers = objects["model"].named_buffers()
    return exact({name.removeprefix("module."): buffer for name, buffer in buffers})


def _save_statistics(rank: int, folder: str) -> None:
    for case, build in STATISTICS.items():
        objects, step = build(1)
        ranks = ckpt.RankOptions(timeout=60)
        with ckpt.StateManager(f"{folder}/{case}", **objects, ranks=ranks) as manager:
            step()
            manager.save_state("a", wait=True)
        Path(folder, f"{case}-{rank}").write_text(_statistics(objects))


def _load_statistics(rank: int, folder: str, saved_by: int) -> None:
    for case, build in STATISTICS.items():
        if dist.is_initialized():
            objects, _ = build(2)
        else:
            objects = {"model": nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))}
        ranks = ckpt.RankOptions(timeout=60)
        with ckpt.StateManager(f"{folder}/{case}", **objects, ranks=ranks) as manager:
            restored = manager.load_state("a", strict=False)
        named = restored.approximated["model"]
        assert named in str(restored)
        assert _statistics(objects) == Path(folder, f"{case}-0").read_text()
        assert named == (
            f"each of the {saved_by} ranks that saved it had its own 1.running_mean; every rank has the "
            f"main rank's now. Resume with {saved_by} ranks to keep them apart, or have one for all (SyncBatchNorm, "
            "DistributedDataParallel with broadcast_buffers=True)"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "now"), cells([(2, 4), (4, 2), (2, 1)], often=[(4, 2)]))
def test_running_statistics_at_another_number_of_ranks_are_the_main_ranks_and_named_with_the_way_out(
    tmp_path: Path, saved_by: int, now: int
) -> None:
    assert run_ranks(saved_by, _save_statistics, str(tmp_path)) == [0] * saved_by
    texts = {Path(tmp_path, f"ddp-{rank}").read_text() for rank in range(saved_by)}
    assert len(texts) == saved_by, "every rank has its own, or this test could not tell whose are loaded"
    assert run_ranks(now, _load_statistics, str(tmp_path), saved_by) == [0] * now


def _equal_by_hand(rank: int, root: str) -> None:
    """Data parallelism without a wrapper: the same on all ranks, and written once."""
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)) as manager:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        manager.save_state("a")


@pytest.mark.slow
def test_ranks_that_hold_the_same_write_it_once(root: Place) -> None:
    assert run_ranks(2, _equal_by_hand, str(root)) == [0, 0]
    names = {name for name in (root / "a").files() if name.endswith("safetensors")}
    assert names == {"model.safetensors", "optimizer.safetensors"}
    assert "differs" not in (root / "a" / "state.json").read_bytes().decode()


def _ddp_that_drifted(rank: int, root: str, wait: bool) -> None:
    torch.manual_seed(1)
    bare = nn.Linear(4, 2)
    model = DistributedDataParallel(bare)
    with torch.no_grad():
        bare.weight += rank  # after the wrapper has made them equal
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=60)) as manager:
        if not wait:
            manager.save_state("a")
            with pytest.raises(ckpt.RanksError, match=r"model\.weight: differs between rank 1 and rank 0"):
                manager.wait()
            assert not ckpt.list_checkpoints(root)
        mine = exact(bare.state_dict())
        manager.save_state("b", wait=wait)  # what is known to differ is kept from now on
        manager.wait()
        nn.init.zeros_(bare.weight)
        manager.load_state("b")
        assert exact(bare.state_dict()) == mine


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_weights_that_differ_under_ddp_are_kept_or_refused_by_name_before_anything_is_written(
    root: Place, wait: bool
) -> None:
    assert run_ranks(2, _ddp_that_drifted, str(root), wait) == [0, 0]


def _with_a_renamed_parameter(rank: int, root: str, kind: str) -> None:
    torch.manual_seed(1)
    name = "projection" if rank == 1 else "head"
    bare = nn.Sequential(
        OrderedDict([("first", nn.Linear(4, 4)), ("second", nn.Linear(4, 4)), (name, nn.Linear(4, 4))])
    )
    model: Any = DistributedDataParallel(bare) if kind == "ddp" else bare
    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "joined":
        model, optimizer = ckpt.Joined([model]), ckpt.Joined([optimizer])  # type: ignore[assignment]
    ranks = ckpt.RankOptions(timeout=60)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ranks) as manager:
        if kind == "joined":
            manager.save_state("a", wait=True)
            return
        renamed = r"model: projection\.bias, projection\.weight on rank 1; head\.bias, head\.weight on rank 0"
        with pytest.raises(ckpt.RanksError, match=renamed):
            manager.save_state("a", wait=True)
        assert not ckpt.list_checkpoints(root)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "by hand", "joined"])
def test_a_parameter_that_was_renamed_on_one_rank_is_refused_by_name_unless_the_parts_are_announced(
    root: Place, kind: str
) -> None:
    assert run_ranks(2, _with_a_renamed_parameter, str(root), kind) == [0, 0]


def _trained_replicas(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A replicated model after a step, and a function that lets the second replica drift, as local SGD does."""
    torch.manual_seed(1)
    bare = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(bare)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
        fully_shard(bare, mesh=mesh)
        model = bare
    optimizer = torch.optim.AdamW(model.parameters())
    _stepper(model, optimizer, 4)()

    def drift() -> None:
        optimizer.zero_grad()
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                model(torch.rand(3, 4) + dist.get_rank()).pow(2).mean().backward()
        else:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(dist.get_rank() // (dist.get_world_size() // 2)))
        optimizer.step()

    return model, optimizer, drift


def _replicas_that_drift_later(rank: int, root: str, kind: str, wait: bool) -> None:
    model, optimizer, drift = _trained_replicas(kind)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with ckpt.StateManager(root, **objects, ranks=ckpt.RankOptions(timeout=60)) as manager:
        manager.save_state("a", wait=True)
        manager.save_state("b", wait=True)
        drift()
        if not wait:
            manager.save_state("c")
            with pytest.raises(ckpt.RanksError, match=r"model\.0\.weight: differs between rank") as refused:
                manager.wait()
            assert "optimizer.state.0.weight.exp_avg: differs between rank" in str(refused.value)
            assert {found.name for found in ckpt.list_checkpoints(root)} == {"a", "b"}
        mine = _mine(objects)
        for name in ("d", "e"):  # what is known to differ is kept from now on
            manager.save_state(name, wait=wait)
        manager.wait()
        drift()
        manager.load_state("e")
        assert _mine(objects) == mine
    Path(f"{root}-{rank}").write_text(mine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "wait"),
    cells(
        [(2, "ddp", True), (2, "ddp", False), (4, "hsdp", True), (2, "hsdp", False)],
        often=[(2, "ddp", False), (4, "hsdp", True)],
    ),
)
def test_replicas_that_drift_after_the_first_save_are_kept_or_refused_by_name(
    root: Place, ranks: int, kind: str, wait: bool
) -> None:
    assert run_ranks(ranks, _replicas_that_drift_later, str(root), kind, wait) == [0] * ranks
    found = {Path(f"{root}-{rank}").read_text() for rank in range(ranks)}
    assert len(found) == ranks, "or this could not tell one rank's from another's"


def _one_bit_on_one_rank(rank: int, root: str) -> None:
    torch.manual_seed(1)
    bare = nn.Linear(512, 64)
    with ckpt.StateManager(root, model=DistributedDataParallel(bare), ranks=ckpt.RankOptions(timeout=60)) as manager:
        manager.save_state("first", wait=True)
        if rank == 1:
            bare.weight.data.view(torch.int32)[40, 3] ^= 1
        mine = exact(bare.state_dict())
        manager.save_state("unattended", wait=False)
        with pytest.raises(ckpt.RanksError, match=r"model\.weight.*rank 1"):
            manager.wait()
        manager.save_state("second", wait=True)
        nn.init.zeros_(bare.weight)
        manager.load_state()
        assert exact(bare.state_dict()) == mine


@pytest.mark.slow
def test_a_bit_that_flips_on_one_replica_is_named_at_the_next_save(root: Place) -> None:
    assert run_ranks(2, _one_bit_on_one_rank, str(root)) == [0, 0]


def test_a_tensor_of_its_own_is_written_with_the_views_of_it_and_nothing_else() -> None:
    weight = torch.arange(6.0)
    tensors = {"weight": weight, "tied": weight[:2], "bias": torch.zeros(2)}
    replicas = ReplicaTensors.of("model", 1, {name: Shard.whole(tensor) for name, tensor in tensors.items()})
    assert replicas.names({"weight"}) == ["weight", "tied"]
    assert replicas.names({"bias"}) == ["bias"]


def test_a_tensor_of_several_names_is_read_under_the_one_that_is_stored() -> None:
    """Of a rank whose other tensors are its own."""

    class Stored:
        ties: Mapping[str, str] = {}

        def about(self, name: str) -> Any:
            return torch.float32, (len(name),)

    pieces = ShardedTensors(ShardTable({}), lambda owner: [], 0)
    stored: Any = Stored()
    tensors = OwnTensors(frozenset({"own"}), [], pieces, lambda: stored, {"tied": "weight"})
    assert [tensors.about(name)[1] for name in ("own", "weight", "tied")] == [(3,), (6,), (6,)]


class _Counter:
    def __init__(self, number: int) -> None:
        self.seen, self.history = number, torch.full((3,), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.history = state["seen"], state["history"]


def _with_counter(rank: int, root: str, load: bool) -> None:
    model = nn.Linear(2, 2)
    counter = _Counter(-1 if load else 10 + rank)
    several = dist.is_initialized()
    with ckpt.StateManager(
        root, model=DistributedDataParallel(model) if several else model, ranks=ckpt.RankOptions(timeout=60)
    ) as manager:
        manager.register(counter=counter)
        if not load:
            manager.save_state("a")
            return
        restored = manager.load_state("a")
    assert counter.seen == 10 + rank
    assert torch.equal(counter.history, torch.full((3,), 10.0 + rank))
    assert ("counter" in restored.approximated) is not several


@pytest.mark.slow
def test_objects_whose_state_differs_come_back_to_each_rank_and_are_named_for_other_ranks(root: Place) -> None:
    assert run_ranks(2, _with_counter, str(root), False) == [0, 0]
    assert run_ranks(2, _with_counter, str(root), True) == [0, 0]
    assert run_alone(_with_counter, str(root), True) == 0


@pytest.mark.slow
def test_merging_a_pipeline_has_the_layers_of_all_stages(root: Place, tmp_path: Path) -> None:
    assert run_ranks(2, _save, str(root), "pipeline", True, "auto") == [0, 0]
    ckpt.merge(f"{root}/step-1", tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "layer0.weight": [4, 3],
        "layer0.bias": [4],
        "layer1.weight": [5, 4],
        "layer1.bias": [5],
    }


@pytest.mark.slow
def test_merging_experts_says_that_they_are_the_first_ranks(
    root: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_ranks(2, _save, str(root), "experts", True, "auto") == [0, 0]
    with caplog.at_level("WARNING", "ckpt"):
        ckpt.merge(f"{root}/step-1", tmp_path / "all.safetensors")
    assert "1.weight" in caplog.text
    assert "0.weight" not in caplog.text
    assert "rank 0" in caplog.text


@pytest.mark.slow
def test_merging_stages_says_which_running_statistics_are_the_first_ranks(
    root: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_ranks(4, _save, str(root), "FSDP 2 on stages, other names", True, "auto") == [0, 0, 0, 0]
    with caplog.at_level("WARNING", "ckpt"):
        ckpt.merge(f"{root}/step-1", tmp_path / "all.safetensors")
    assert "stage0.1.running_mean" in caplog.text
    assert "stage1.1.running_mean" in caplog.text
    assert "stage0.0.weight" not in caplog.text
    assert {"stage0.0.weight", "stage1.0.weight"} <= load_file(tmp_path / "all.safetensors").keys()
