"""An actor and a critic that learn from a replay buffer: many points on a plane learn to walk to their goals.

    python examples/rl.py

What training with environments has to keep beside its models is a replay buffer, and the environments with their random
generator. Each has `state_dict` and `load_state_dict`, and is registered. The buffer is saved with `chunked=True`: a
chunk that is full is written once, and later checkpoints link it, as they link the frozen reference model.
"""

from __future__ import annotations

import argparse
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ckpt

STEPS, POINTS, BATCH, HIDDEN = 40, 256, 64, 512
CAPACITY, CHUNK = 50_000, 25_000  # transitions: a chunk of them takes more than a megabyte
STATE, ACTION = 4, 2
WIDTHS = (STATE, ACTION, 1, STATE)  # of a transition: state, action, reward, next state


class Points:
    """All environments at once: where each point is, and where its goal is. An action is a velocity."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        self.state = self.dice.uniform(-1, 1, (POINTS, STATE))
        self.age = self.dice.integers(50, size=POINTS)

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        """Transitions, a row for each point. Points that have arrived, or have walked for long, begin anew."""
        before = self.state.copy()
        self.state[:, :2] += 0.1 * actions.numpy()
        distance = np.linalg.norm(self.state[:, :2] - self.state[:, 2:], axis=1)
        transitions = np.concatenate([before, actions.numpy(), -distance[:, None], self.state], axis=1)
        self.age += 1
        over = (distance < 0.05) | (self.age == 50)
        self.state[over] = self.dice.uniform(-1, 1, (over.sum(), STATE))
        self.age[over] = 0
        return torch.from_numpy(transitions).float()

    def observe(self) -> torch.Tensor:
        return torch.from_numpy(self.state).float()

    def state_dict(self) -> dict[str, Any]:
        return {"dice": self.dice.bit_generator.state, "state": self.state, "age": self.age}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.dice.bit_generator.state = saved["dice"]
        self.state, self.age = saved["state"], saved["age"]


class Replay:
    """The last transitions. When it is full, new ones replace the oldest."""

    def __init__(self) -> None:
        self.rows = torch.empty(CAPACITY, sum(WIDTHS))
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, CAPACITY)

    def add(self, rows: torch.Tensor) -> None:
        self.rows[torch.arange(self.added, self.added + len(rows)) % CAPACITY] = rows
        self.added += len(rows)

    def sample(self) -> tuple[torch.Tensor, ...]:
        return self.rows[torch.randint(len(self), (BATCH,))].split(WIDTHS, dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added, "chunks": self.rows[: len(self)].split(CHUNK)}  # views: nothing is copied here

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.added = saved["added"]
        for place, rows in zip(self.rows[: len(self)].split(CHUNK), saved["chunks"], strict=True):
            place.copy_(rows)


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    hidden = (nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(HIDDEN, outputs), *last)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="runs/rl", help="where the checkpoints are kept")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--losses", type=Path, metavar="FILE", help="append a line for every step: losses, transitions")
    options = parser.parse_args()

    torch.manual_seed(1)
    actor, critic = network(STATE, ACTION, nn.Tanh()), network(STATE + ACTION, 1)
    reference = deepcopy(actor).requires_grad_(False)  # what the actor may not leave too fast
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    points, replay = Points(seed=1), Replay()

    with ckpt.StateManager(
        options.root,
        model={"actor": actor, "critic": critic, "reference": reference},
        optimizer={"actor": actor_optimizer, "critic": critic_optimizer},
        save_every=50,
        keep=ckpt.Keep(last=3),
    ) as manager:
        manager.register(points=points)
        manager.register(replay=replay, chunked=True)
        losses = options.losses.open("a") if options.losses else None
        for epoch in manager.epochs(options.epochs):
            for _ in manager.batches(range(STEPS)):
                with torch.no_grad():
                    actions = actor(points.observe())
                transitions = points.step((actions + 0.3 * torch.randn_like(actions)).clamp(-1, 1))
                replay.add(transitions)

                states, actions, rewards, after = replay.sample()
                chosen = actor(states)
                actor_loss = -critic(torch.cat([states, chosen], dim=1)).mean()
                update(actor_optimizer, actor_loss + 0.01 * (chosen - reference(states)).square().mean())
                # The critic comes last, because the actor's loss leaves gradients in it. A save keeps unused ones.
                with torch.no_grad():
                    worth = rewards + 0.9 * critic(torch.cat([after, actor(after)], dim=1))
                critic_loss = (critic(torch.cat([states, actions], dim=1)) - worth).square().mean()
                update(critic_optimizer, critic_loss)

                if losses:  # before the save: whatever step a checkpoint holds, its losses have been noted
                    noted = (value.item().hex() for value in (critic_loss, actor_loss, transitions.sum()))
                    print(manager.progress.step + 1, *noted, file=losses, flush=True)
                manager.step()
            print(f"epoch {epoch + 1}: on average {-transitions[:, STATE + ACTION].mean():.3f} from the goal")


if __name__ == "__main__":
    main()
