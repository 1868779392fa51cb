"""Training whose whole state is a function of the step, so that whatever is loaded can be checked against itself."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ckpt import Restored, StateManager
from ckpt.save import transaction
from ckpt.storage.local import files
from tests.helpers.training import Counter

HOST = "fsdp, as if many"  # ranks of a host write together, but for the model, which has frozen weights
SPREADS = ("one", "ddp", "fsdp")
_FAR = 1000.0


class _Net(nn.Module):
    """Parameters of several shapes, a frozen one, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.frozen = nn.Linear(32, 24, bias=False)
        self.second = nn.Linear(16, 8)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("epochs", torch.zeros(3, dtype=torch.int64))
        for number, parameter in enumerate(self.parameters()):  # no two elements of a tensor are equal
            pattern = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            parameter.data.copy_(pattern + _FAR * number)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    inside = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return inside.detach()


class Training:
    """A model, an optimizer, a scheduler, a counter and a generator that all say the same step."""

    def __init__(self, spread: str = "one", *, large: bool = False, rank: int = 0) -> None:
        if large:
            files.BLOCK = 64 << 10  # several blocks to a file
        self.rank = rank
        self.net = _Net(256 if large else 24)
        self.base = nn.Linear(512, 512, bias=False).requires_grad_(False)  # large enough for a file that is linked
        nn.init.constant_(self.base.weight, 7.0)
        self.model = self._spread(spread)
        self.trained = [one for one in self.model.parameters() if one.requires_grad]
        self.start = {name: _local(one).clone() for name, one in self.net.named_parameters()}
        self.optimizer = torch.optim.SGD(self.trained, lr=1.0, momentum=0.0)
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        self.counter = Counter()
        self.epochs = Counter()  # ended after a step was saved, so that its checkpoint is amended

    def _spread(self, spread: str) -> nn.Module:
        if spread == "ddp":
            return nn.parallel.DistributedDataParallel(self.net)
        if spread == HOST:
            transaction.TOGETHER = transaction.ALONE = 1
            os.environ["LOCAL_WORLD_SIZE"] = "2"
        if spread in ("fsdp", HOST):
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net.first)
            fully_shard(self.net)
        return self.net

    def manager(self, root: str, **options: Any) -> StateManager:
        manager = StateManager(
            root,
            model={"net": self.model, "base": self.base},
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            **options,
        )
        manager.register(counter=self.counter, epochs=self.epochs)
        return manager

    def advance(self) -> int:
        """One step: everything grows by one. Returns the step."""
        for parameter in self.trained:
            parameter.grad = -torch.ones_like(parameter)
        self.optimizer.step()
        for parameter in self.trained:
            self.optimizer.state[parameter]["seen"] = parameter.detach().clone()
        self.scheduler.step()
        self.counter.count += 1
        self.net.get_buffer("steps").add_(1)
        torch.manual_seed(self._seed(self.counter.count))
        return self.counter.count

    def end_epoch(self) -> None:
        """What follows the last step of an epoch, and the save of that step: the model and a counter change."""
        self.epochs.count += 1
        self.net.get_buffer("epochs").add_(1)

    def _seed(self, step: int) -> int:
        return step * 16 + self.rank

    def disagreements(self, restored: Restored, *, generators: bool = True) -> list[str]:
        """Whatever does not say the step that was restored."""
        step = restored.step
        says = {"counter": self.counter.count, "scheduler": self.scheduler.last_epoch}
        wrong = [f"{what} says step {found}, not {step}" for what, found in says.items() if found != step]
        if not torch.equal(self.net.get_buffer("steps"), torch.full((3,), step)):
            wrong.append(f"the buffer is {self.net.get_buffer('steps').tolist()}, not {step}")
        ends = self.net.get_buffer("epochs").tolist()
        if ends != 3 * [self.epochs.count]:
            wrong.append(f"the model has seen {ends} epochs end, and the counter {self.epochs.count}")
        if not torch.equal(self.base.weight, torch.full((512, 512), 7.0)):
            wrong.append("the frozen model is another")
        for name, parameter in self.net.named_parameters():
            wrong += self._compare(name, parameter, step)
        if generators and step:
            expected = torch.Generator().manual_seed(self._seed(step)).get_state()
            if not torch.equal(torch.get_rng_state(), expected):
                wrong.append(f"the generator is not that of step {step}")
        return wrong

    def _compare(self, name: str, parameter: torch.Tensor, step: int) -> list[str]:
        grows = step if parameter.requires_grad else 0
        expected = self.start[name] + grows
        pairs = {name: _local(parameter)}
        if parameter.requires_grad and step:
            seen = self.optimizer.state[parameter].get("seen")
            pairs[f"{name} in the optimizer"] = _local(seen) if seen is not None else torch.empty(0)
        return [f"{what} is not that of step {step}" for what, one in pairs.items() if not torch.equal(one, expected)]
