"""Models as people train them, sharded over ranks: GPT-2 with its tied head, LoRA over a frozen base, frozen layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import ckpt
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from tests.helpers.places import Place
from tests.helpers.processes import run_alone, run_ranks
from tests.helpers.sharded import plain, step, whole
from tests.helpers.training import exact

pytestmark = pytest.mark.slow

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"


def gpt2(seed: int) -> Any:
    """A small one, with its head tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    # 101 rows make uneven pieces; dropout stays on, so that training draws random numbers
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def lora(seed: int) -> Any:
    """Adapters on every attention, over a base that is frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(seed), config)


def frozen(seed: int) -> Any:
    """GPT-2 of which only the last block and the norm after it are trained."""
    model = gpt2(seed).requires_grad_(False)
    model.transformer.h[-1].requires_grad_(True)
    model.transformer.ln_f.requires_grad_(True)
    return model


MODELS = {"gpt2": gpt2, "lora": lora, "frozen": frozen}


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "GPT2Block"]


def fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in [*blocks(model), model]:
        fully_shard(module)
    return model


def _fsdp1(model: Any, policy: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)


def fsdp1(model: Any) -> Any:
    """Block by block, then the rest."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return _fsdp1(model, ModuleWrapPolicy({type(blocks(model)[0])}))


def fsdp1_of_peft(model: Any) -> Any:
    """As PEFT advises: every adapter on its own, so that what is frozen and what is trained are never in one unit."""
    from peft.utils import other

    policy: Any = other.fsdp_auto_wrap_policy
    return _fsdp1(model, policy(model))


WAYS: dict[str, Callable[[Any], Any]] = {
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "fsdp1-peft": fsdp1_of_peft,
    "plain": lambda model: model,
}


def build(what: str, how: str, over: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model, and an optimizer over all of its parameters or over the trained ones."""
    model = WAYS[how](MODELS[what](seed))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad or over == "all"]
    return model, torch.optim.AdamW(parameters, lr=0.01)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps with other data on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model.train()
    for number in steps:
        tokens = (torch.arange(16).reshape(2, 8) * (number + 2) + 7 * rank) % 101
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of every tensor, whole, and of every option, by name. PyTorch gives them out, ckpt has no part in it."""
    given = _of_fsdp1(model, optimizer) if hasattr(model, "_fsdp_wrapped_module") else _live(model, optimizer)
    return {name: sha256(exact(value).encode()).hexdigest() for name, value in given}


def _live(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    names: dict[Any, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, name)
    state = {names[parameter]: values for parameter, values in optimizer.state.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return _named(model.state_dict(), state, groups)


def _of_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    given: Any = get_optimizer_state_dict(model, optimizer)
    return _named(get_model_state_dict(model), given["state"], given["param_groups"])


def _named(model: dict[str, Any], state: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name in sorted(model):  # in one order on every rank: to make a tensor whole takes all of them
        yield f"model {name}", whole(model[name])
    for name in sorted(state):
        yield from ((f"optimizer {name} {key}", whole(state[name][key])) for key in sorted(state[name]))
    for index, group in enumerate(groups):
        yield f"group {index}", {**group, "params": sorted(group["params"])}


def note(path: str, found: dict[str, str], rank: int) -> None:
    if rank == 0:
        Path(path).write_text(json.dumps(found))


def noted(path: str | Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(Path(path).read_text())
    return found


def save(rank: int, root: str, notes: str, what: str, how: str, over: str) -> None:
    """Two steps, a checkpoint, two steps more; with notes of all state, and the weights as PyTorch gathers them."""
    model, optimizer = build(what, how, over, seed=1)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)) as manager:
        train(model, optimizer, range(2))
        manager.save_state("x")
        note(f"{notes}/saved.json", everything(model, optimizer), rank)
        weights = whole(get_model_state_dict(model))
        if rank == 0:
            save_file({name: tensor.clone() for name, tensor in weights.items()}, f"{notes}/weights.safetensors")
        train(model, optimizer, range(2, 4))
    note(f"{notes}/later.json", everything(model, optimizer), rank)


def load(rank: int, root: str, notes: str, what: str, how: str, over: str, same: bool) -> None:
    """Into fresh objects: all is as it was. Spread in the same way, training goes on as it did."""
    model, optimizer = build(what, how, over, seed=2)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=60)) as manager:
        restored = manager.load_state("x")
    assert not restored.skipped
    assert everything(model, optimizer) == noted(f"{notes}/saved.json")
    if how in ("fsdp2", "plain"):
        names = [name for name, _ in model.named_parameters()]
        assert not [name for name in names if name.endswith(HEAD)]  # tied: it goes by the name of the embedding
    if same:
        assert not restored.resharded
        train(model, optimizer, range(2, 4))
        assert everything(model, optimizer) == noted(f"{notes}/later.json")


@dataclass(frozen=True)
class Saved:
    """A root with the checkpoint `x`, and a folder with notes of what is in it."""

    root: Place
    notes: Path

    @property
    def where(self) -> tuple[str, str]:
        return str(self.root), str(self.notes)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.notes / "weights.safetensors")


SaveByTwo = Callable[[str, str, str], Saved]


@pytest.fixture(scope="session")
def saved_by_two(new_root: Callable[[], Place], tmp_path_factory: pytest.TempPathFactory) -> SaveByTwo:
    """Saves a kind of model, sharded in a way, with an optimizer over some of it."""

    def save_by_two(what: str, how: str, over: str) -> Saved:
        saved = Saved(new_root(), tmp_path_factory.mktemp("notes"))
        assert run_ranks(2, save, *saved.where, what, how, over) == [0, 0]
        return saved

    return save_by_two


def states(saved: Saved) -> set[str]:
    """The names of parameters that have optimizer state."""
    return {name.split()[1] for name in noted(saved.notes / "saved.json") if name.startswith("optimizer ")}


def merged(saved: Saved, folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    (written,) = ckpt.merge(saved.root / "x", folder / f"{part}.safetensors", part=part)
    return load_file(written)


def same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return exact(dict(first)) == exact(dict(other))


class TestTiedGPT2:
    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, saved_by_two: SaveByTwo) -> Saved:
        return saved_by_two("gpt2", "fsdp2", "all")

    def test_two_ranks_go_on_as_if_uninterrupted_and_it_stays_tied(self, saved: Saved) -> None:
        assert run_ranks(2, load, *saved.where, "gpt2", "fsdp2", "all", True) == [0, 0]

    def test_one_process_loads_it_into_a_plain_model_that_stays_tied(self, saved: Saved) -> None:
        assert run_alone(load_plain_and_tied, *saved.where) == 0

    def test_the_tied_weight_is_in_the_files_once(self, saved: Saved) -> None:
        stored = []
        for path in sorted(name for name in (saved.root / "x").files() if name.endswith(".safetensors")):
            names = safetensors.torch.load((saved.root / "x" / path).read_bytes())
            stored += [(*path.split("/"), name) for name in names]
        assert [row for row in stored if row[2] in (EMBEDDING, HEAD)] == [
            ("model", "00000.safetensors", EMBEDDING),
            ("model", "00001.safetensors", EMBEDDING),
        ]
        assert not [row for row in stored if row[0] == "optimizer" and HEAD in row[2]]

    def test_merged_it_is_one_file_with_the_tied_weight_once(self, saved: Saved, tmp_path: Path) -> None:
        weights = saved.weights()
        assert exact(weights.pop(HEAD)) == exact(weights[EMBEDDING])
        assert same(merged(saved, tmp_path), weights)
        header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
        data = sum(tensor.nbytes for tensor in weights.values())
        assert (tmp_path / "model.safetensors").stat().st_size == header + data

    def test_transformers_loads_what_was_merged_and_gives_the_same_logits(self, saved: Saved, tmp_path: Path) -> None:
        merged(saved, tmp_path)
        assert run_alone(compare_logits, str(saved.notes), str(tmp_path)) == 0

    def test_under_fsdp1_it_goes_on_and_merges_to_the_tied_weight_once(
        self, saved_by_two: SaveByTwo, tmp_path: Path
    ) -> None:
        saved = saved_by_two("gpt2", "fsdp1", "all")
        assert run_ranks(2, load, *saved.where, "gpt2", "fsdp1", "all", True) == [0, 0]
        assert merged(saved, tmp_path).keys() == saved.weights().keys() - {HEAD}


def load_plain_and_tied(rank: int, root: str, notes: str) -> None:
    model, optimizer = build("gpt2", "plain", "all", seed=2)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        restored = manager.load_state("x")
    assert restored.resharded == {"model": "2 ranks: S0 -> whole", "optimizer": "2 ranks: S0 -> whole"}
    assert everything(model, optimizer) == noted(f"{notes}/saved.json")
    assert model.lm_head.weight is model.transformer.wte.weight
    train(model, optimizer, range(2, 3))  # a step moves both, or they are two
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def compare_logits(rank: int, notes: str, out: str) -> None:
    from transformers import GPT2LMHeadModel

    gathered = gpt2(2).eval()
    gathered.load_state_dict(load_file(f"{notes}/weights.safetensors"))
    gathered.config.save_pretrained(out)
    loaded, told = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, gathered(tokens).logits)


class Tied(nn.Module):
    """Five rows over four ranks: the last one has none of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.body(self.embed(tokens)))
        return logits


def round_trip_tied(rank: int, root: str) -> None:
    model, other = fsdp2(Tied(1)), fsdp2(Tied(2))
    with ckpt.StateManager(root, model=model, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("x")
    with ckpt.StateManager(root, model=other, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.load_state("x")
    assert exact(whole(other.state_dict())) == exact(whole(model.state_dict()))
    assert other.lm_head.weight is other.embed.weight


def test_a_tied_weight_of_which_a_rank_has_nothing_is_still_tied(root: Place) -> None:
    assert run_ranks(4, round_trip_tied, str(root)) == [0] * 4
    pieces = root / "x" / "model"
    assert pieces.files()
    for name in pieces.files():
        assert not {"embed.weight", "lm_head.weight"} <= safetensors.torch.load((pieces / name).read_bytes()).keys()


@pytest.mark.parametrize("how", ["fsdp2", "fsdp1-peft"], scope="class")
class TestLora:
    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, saved_by_two: SaveByTwo, how: str) -> Saved:
        return saved_by_two("lora", how, "trained")

    def test_two_ranks_go_on_as_if_uninterrupted(self, saved: Saved, how: str) -> None:
        assert run_ranks(2, load, *saved.where, "lora", how, "trained", True) == [0, 0]

    def test_one_process_loads_the_base_and_the_adapters(self, saved: Saved, how: str) -> None:
        assert run_alone(load, *saved.where, "lora", "plain", "trained", False) == 0

    def test_the_other_way_of_spreading_loads_them_too(self, saved: Saved, how: str) -> None:
        other = "fsdp1-peft" if how == "fsdp2" else "fsdp2"
        assert run_ranks(2, load, *saved.where, "lora", other, "trained", False) == [0, 0]

    def test_no_weight_is_lost_and_only_adapters_have_optimizer_state(
        self, saved: Saved, how: str, tmp_path: Path
    ) -> None:
        weights = saved.weights()
        adapters = {name for name in weights if "lora_" in name}
        assert len(adapters) == 4
        head = {name for name in weights if name.endswith(HEAD)}
        assert same(merged(saved, tmp_path), {name: tensor for name, tensor in weights.items() if name not in head})
        assert states(saved) == adapters
        assert merged(saved, tmp_path, "optimizer").keys() == {
            f"state.{name}.{key}" for name in adapters for key in ("exp_avg", "exp_avg_sq", "step")
        }


@pytest.mark.parametrize("over", ["trained", "all"], scope="class")
class TestFrozenLayers:
    """The optimizer has only the parameters that are trained, or all of them."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, saved_by_two: SaveByTwo, over: str) -> Saved:
        return saved_by_two("frozen", "fsdp2", over)

    def test_two_ranks_go_on_as_if_uninterrupted(self, saved: Saved, over: str) -> None:
        assert run_ranks(2, load, *saved.where, "frozen", "fsdp2", over, True) == [0, 0]

    def test_one_process_loads_them(self, saved: Saved, over: str) -> None:
        assert run_alone(load, *saved.where, "frozen", "plain", over, False) == 0

    def test_only_what_is_trained_has_optimizer_state(self, saved: Saved, over: str) -> None:
        trained = ("transformer.h.1.", "transformer.ln_f.")
        weights = saved.weights()
        assert states(saved) == {name for name in weights if name.startswith(trained)}


def all_came_back(restored: ckpt.Restored) -> None:
    assert not restored.skipped
    assert not restored.resharded


def train_alike(first: tuple[Any, torch.optim.Optimizer], other: tuple[Any, torch.optim.Optimizer]) -> None:
    """Two models with their optimizers are the same, and stay so while they are trained."""
    for number in range(2, 4):
        assert everything(*other) == everything(*first)
        step(*first, number)
        step(*other, number)
    assert everything(*other) == everything(*first)


def round_trip_on_one_side(rank: int, root: str, trained: int) -> None:
    """One flat tensor in two halves, and all that is trained of it lies in one of them: the other rank has no state."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        bare = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 64), nn.Linear(64, 6), nn.Linear(6, 6)).requires_grad_(False)
        bare[trained].requires_grad_(True)
        model = _fsdp1(bare, None)
        runs.append(
            (
                model,
                torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1),
            )
        )
    (model, optimizer), (other, other_optimizer) = runs
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        for number in range(2):
            step(model, optimizer, number)
        assert bool(optimizer.state) == (rank == (0 if trained == 0 else 1))
        manager.save_state("x")
    with ckpt.StateManager(root, model=other, optimizer=other_optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        all_came_back(manager.load_state("x"))
    train_alike((model, optimizer), (other, other_optimizer))


@pytest.mark.parametrize("trained", [0, 3])
def test_under_fsdp1_what_only_one_rank_trains_is_saved_and_loaded(root: Place, trained: int) -> None:
    assert run_ranks(2, round_trip_on_one_side, str(root), trained) == [0, 0]


class Partly(nn.Module):
    """A model with a layer that no loss reaches."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = plain(seed)
        self.unused = nn.Linear(3, 7)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(inputs)
        return output


def round_trip_without_state(rank: int, root: str) -> None:
    """Parameters without state, a group without parameters, and a part without either."""
    runs = []
    for seed in (1, 2):
        model = fsdp2(Partly(seed))
        optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [], "lr": 0.5}], lr=0.1 * seed)
        runs.append((model, optimizer, {"net": model, "loss": nn.MSELoss()}))
    (model, optimizer, parts), (other, other_optimizer, other_parts) = runs
    with ckpt.StateManager(root, model=parts, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        for number in range(2):
            step(model, optimizer, number)
        assert model.unused.weight not in optimizer.state
        manager.save_state("x")
    with ckpt.StateManager(
        root, model=other_parts, optimizer=other_optimizer, ranks=ckpt.RankOptions(timeout=30)
    ) as manager:
        all_came_back(manager.load_state("x"))
    train_alike((model, optimizer), (other, other_optimizer))


def test_parameters_without_a_gradient_and_parts_without_parameters(root: Place) -> None:
    assert run_ranks(2, round_trip_without_state, str(root)) == [0, 0]


def two_steps(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(2):
        step(model, optimizer, number)
    return optimizer


def save_plain(rank: int, root: str) -> None:
    model = fsdp2(plain(1))
    with ckpt.StateManager(
        root, model=model, optimizer=two_steps(model), ranks=ckpt.RankOptions(timeout=30)
    ) as manager:
        manager.save_state("x")


def refuse(rank: int, root: str, model: nn.Module, told: list[str]) -> str:
    """Try to load what does not fit: all of it is named, and not a bit is changed. Returns the error's text."""
    optimizer = two_steps(model)
    before = everything(model, optimizer), exact(torch.get_rng_state())
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        with pytest.raises(ckpt.MismatchError) as caught:
            manager.load_state("x")
        assert manager.restored is None
    assert (everything(model, optimizer), exact(torch.get_rng_state())) == before
    text = str(caught.value)
    assert [line for line in told if line not in text] == []
    return text


def load_into_another(rank: int, root: str) -> None:
    """The last layer is wider, and there is one more."""
    model = fsdp2(nn.Sequential(*list(plain(5))[:-1], nn.Linear(10, 4), nn.Linear(4, 2)))
    told = [
        "model: 4.bias: shape [3] in the checkpoint, [4] here",
        "model: 4.weight: shape [3, 10] in the checkpoint, [4, 10] here",
        "model: 5.bias: missing in the checkpoint",
        "model: 5.weight: missing in the checkpoint",
        "optimizer: param_groups[0].5.bias: missing in the checkpoint",
        "optimizer: param_groups[0].5.weight: missing in the checkpoint",
        "optimizer: state.4.bias: ",
        "optimizer: state.4.weight: ",
    ]
    text = refuse(rank, root, model, told)
    assert text.count("\n  ") == len(told)
    assert "rank" not in text  # the same everywhere, so it is told once


def load_into_another_on_one_rank(rank: int, root: str) -> None:
    model = fsdp2(plain(5))
    if rank == 1:
        model.register_buffer("only_here", torch.ones(2))
    text = refuse(rank, root, model, ["model: only_here: missing in the checkpoint"])
    assert rank == 1 or text.startswith("rank 1: ")


class TestBadInput:
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, new_root: Callable[[], Place]) -> Place:
        root = new_root()
        assert run_ranks(2, save_plain, str(root)) == [0, 0]
        return root

    def test_all_that_does_not_fit_is_named_on_every_rank_and_nothing_is_changed(self, root: Place) -> None:
        assert run_ranks(2, load_into_another, str(root)) == [0, 0]

    def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(self, root: Place) -> None:
        assert run_ranks(2, load_into_another_on_one_rank, str(root)) == [0, 0]


def on_two_of_four(rank: int, seed: int) -> nn.Module | None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh("cpu", [0, 1])
    if rank >= 2:
        return None
    model = plain(seed)
    fully_shard(model, mesh=mesh)
    return model


def save_on_two_of_four(rank: int, root: str) -> None:
    with ckpt.StateManager(root, model=on_two_of_four(rank, 1), ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("x", wait=True)


def load_on_two_of_four(rank: int, root: str) -> None:
    saved, loaded = on_two_of_four(rank, 1), on_two_of_four(rank, 2)
    with ckpt.StateManager(root, model=loaded, ranks=ckpt.RankOptions(timeout=30)) as manager:
        restored = manager.load_state("x")
    if saved is not None and loaded is not None:
        assert (restored.approximated, restored.skipped) == ({}, {}), restored
        for mine, other in zip(saved.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(local_tensor(mine), local_tensor(other))


def test_a_model_that_only_some_ranks_have_comes_back_to_them(new_root: Callable[[], Place]) -> None:
    root = new_root()
    assert run_ranks(4, save_on_two_of_four, str(root)) == [0] * 4
    assert run_ranks(4, load_on_two_of_four, str(root)) == [0] * 4


def save_with_another_layout_on_rank_1(rank: int, root: str) -> None:
    model = fsdp2(plain(1))
    with (
        ckpt.StateManager(
            root,
            model=model,
            saving=ckpt.SaveOptions(layout="full" if rank == 1 else "auto"),
            ranks=ckpt.RankOptions(timeout=30),
        ) as manager,
        pytest.raises(ckpt.RanksError, match=r"model: in pieces on rank 0; whole on rank 1"),
    ):
        manager.save_state("x", wait=True)


def test_ranks_that_were_given_different_layouts_are_named_and_nobody_hangs(root: Place) -> None:
    assert run_ranks(2, save_with_another_layout_on_rank_1, str(root)) == [0, 0]


def round_trip_on_part_of_the_ranks(rank: int, root: str) -> None:
    """Tensors on a mesh of two of four ranks. The others hold nothing of them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    saved, loaded = plain(1), plain(2)
    for model in (saved, loaded):
        layer: Any = model[0]
        weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
        layer.register_parameter("weight", nn.Parameter(weight))
    with ckpt.StateManager(root, model=saved, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("x")
    with ckpt.StateManager(root, model=loaded, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.load_state("x")
    for mine, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        here, there = (local_tensor(p) if is_sharded(p) else p for p in (mine, other))
        assert torch.equal(here, there)


def test_tensors_on_a_mesh_of_some_of_the_ranks_come_back(root: Place) -> None:
    assert run_ranks(4, round_trip_on_part_of_the_ranks, str(root)) == [0] * 4


def load_an_optimizer_of_fewer_parameters(rank: int, root: str) -> None:
    """What the optimizer of fewer parameters would drop is named, under FSDP 1 too."""
    model = _fsdp1(plain(1), None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    with ckpt.StateManager(root, model=model, optimizer=optimizer, ranks=ckpt.RankOptions(timeout=30)) as manager:
        manager.save_state("x")
    fewer = torch.optim.AdamW([parameter for name, parameter in model.named_parameters() if "4." in name])
    with (
        ckpt.StateManager(root, model=model, optimizer=fewer, ranks=ckpt.RankOptions(timeout=30)) as manager,
        pytest.raises(ckpt.MismatchError, match=r"param_groups\[0\]\.0\.weight: unexpected"),
    ):
        manager.load_state("x")


def test_under_fsdp1_an_optimizer_of_fewer_parameters_drops_nothing_in_silence(root: Place) -> None:
    assert run_ranks(2, load_an_optimizer_of_fewer_parameters, str(root)) == [0, 0]
