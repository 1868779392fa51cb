"""Small jobs with Accelerate and DeepSpeed, for tests that interrupt and resume them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader

from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import Numbers, reseed
from tests.helpers.training import exact

WORDS, WIDTH = 7, 5

Config = dict[str, Any]
os.environ["DS_ACCELERATOR"] = "cpu"  # before it is asked for
_HALF = "fp16" if get_accelerator().is_fp16_supported() else "bf16"  # not every processor has the former
_SCALED: dict[str, Config] = {"fp16": {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 1}, "bf16": {}}
CASES: dict[str, Config] = {
    "no ZeRO": {"zero_optimization": {"stage": 0}},
    "no ZeRO, bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "ZeRO 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "ZeRO 1, bf16, gradients in fp32": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    f"ZeRO 2, {_HALF}, accumulating": {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 2,
        _HALF: {"enabled": True, **_SCALED[_HALF]},
    },
    "ZeRO 3, bf16, with a schedule of its own": {
        "zero_optimization": {"stage": 3, "sub_group_size": 30},
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.005, "warmup_max_lr": 0.02}},
    },
}


class Net(nn.Module):
    """With tied weights, a frozen one, one of a single number, dropout, and a buffer that every batch changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        inner = self.hidden(self.words(words) * self.frozen * noise.to(self.words.weight.dtype)[:, None])
        guesses = self.head(inner).float() * self.scale.float() * (1 + 0.001 * self.seen.float())
        return nn.functional.cross_entropy(guesses, (words + 1) % WORDS)


def build() -> Net:
    state = torch.get_rng_state()
    torch.manual_seed(7)  # the same weights on every rank and in every run
    net = Net()
    torch.set_rng_state(state)
    return net


def new_accelerator(rank: int, world_size: int, config: Config) -> Accelerator:
    """An accelerator with DeepSpeed on the CPU, as a process finds it that has just been started."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({"DS_ACCELERATOR": "cpu", **{name: str(number) for name, number in ranks.items()}})
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    zero = {"stage3_param_persistence_threshold": 10, **config["zero_optimization"]}  # some are whole everywhere
    plugin = DeepSpeedPlugin(hf_ds_config={**settings, **config, "zero_optimization": zero})
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])


def prepared(accelerator: Accelerator, config: Config) -> tuple[Any, Any, Any, Any]:
    """A loader, an engine, its optimizer, with two groups, and a scheduler: one of torch's, or DeepSpeed's own."""
    from accelerate.utils import DummyScheduler

    net = build()
    free = [one for one in net.parameters() if one.dim() == 1 and one.requires_grad]
    others = [one for one in net.parameters() if one.dim() != 1 and one.requires_grad]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = DummyScheduler(optimizer) if "scheduler" in config else torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    found: tuple[Any, Any, Any, Any] = accelerator.prepare(loader, net, optimizer, scheduler)
    return found


@dataclass(frozen=True)
class Loop:
    """A training with an engine in a root, with a plain `for` over its loader."""

    root: str
    case: str
    rank: int
    epochs: int = 2

    def run(self, run: int = 0, save: int | None = None, *, back: bool = False) -> tuple[list[Any], str]:
        """Train to the end: what was seen, with all state at the end, and the weights that were saved after a batch.

        With `back`, what was saved is loaded again after one more batch that is trained.
        """
        reseed(self.rank, run)
        config = CASES[self.case]
        accelerator = new_accelerator(self.rank, 2, config)
        loader, *parts = prepared(accelerator, config)
        with attach(accelerator, self.root) as manager:
            restored = manager.resume()
            assert not (restored and (restored.approximated or restored.skipped)), restored
            seen: list[Any] = []
            saved = ""
            for epoch in range(restored.epoch if restored else 0, self.epochs):
                for batch in loader:
                    loss = train_on(batch, accelerator, *parts)
                    assert manager.progress.step == parts[0].global_steps - parts[0].skipped_steps
                    rate = float(parts[1].param_groups[0]["lr"])
                    seen.append([epoch, batch[0].tolist(), loss.hex(), rate.hex(), manager.progress.step])
                    if len(seen) == save:
                        accelerator.save_state("here")  # which is written while training goes on
                        manager.save_model(f"{self.root}-model")
                        saved = exact(weights(parts[0]))
                    elif back and save and len(seen) == save + 1:
                        accelerator.load_state("here")
                        seen.pop()
                        back = False
            seen.append(everything(parts[0]))
        return seen, saved


def train_on(batch: Any, accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any) -> float:
    with accelerator.accumulate(model):
        loss = model(batch[0] % WORDS, batch[1])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return float(loss.item())


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The whole model, on every rank."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: one.detach().clone() for name, one in engine.module.state_dict().items()}


def everything(engine: Any) -> str:
    """Every bit of an engine's state on this rank."""
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return exact([weights(engine), counters, _optimizer_state(engine), vars(scaler) if scaler else None])


def _optimizer_state(engine: Any) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 3:  # gathered, without padding, which is whatever was in memory
        trained = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
        moments = {
            name: [safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")]
            for name, one in trained.items()
        }
        return {"masters": {name: safe_get_full_fp32_param(one) for name, one in trained.items()}, "moments": moments}
    state = engine.optimizer.state_dict()
    return {name: one for name, one in state.items() if name not in ("loss_scaler", "param_slice_mappings")}
