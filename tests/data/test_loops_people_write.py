"""Loops as people write them, straight and interrupted after every step, with the lines around `step()` in any order.

Each is exact: the same batches, losses, learning rates and weights as without an interruption; or ckpt names what is
not. An interruption is what a kill is to a loop: everything is dropped in the middle of an iteration, and built anew.
"""

from __future__ import annotations

import copy
import gc
import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ckpt

SIZE, BATCH, EPOCHS = 14, 3, 2
LAST = EPOCHS * 5  # steps of most loops


class KilledError(BaseException):
    """Ends a run at once, wherever it is."""


class Numbers(Dataset[Any]):
    """Samples that say who they are, with noise from all global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.rand(1) + random.random() + float(np.random.rand())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers()[index] for index in range(SIZE))


@dataclass
class Pair:
    """A batch of a class of the user's own."""

    numbers: Any
    noise: Any


def as_user_dict(samples: list[Any]) -> Any:
    return UserDict(zip(("numbers", "noise"), map(torch.stack, zip(*samples, strict=True)), strict=True))


def as_numpy(samples: list[Any]) -> Any:
    return [np.stack([part.numpy() for part in parts]) for parts in zip(*samples, strict=True)]


def as_pair(samples: list[Any]) -> Any:
    return Pair(*map(torch.stack, zip(*samples, strict=True)))


@dataclass
class Run:
    """One process of a run: its objects, and what it has seen. It is killed within the iteration of step `kill`."""

    root: Path
    kill: int | None = None
    number: int = 0
    given: str = "train"  # the loaders that the manager is given
    every: int = 1
    seen: dict[int, Any] = field(default_factory=dict)
    drawn: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.number)
        random.seed(self.number)
        np.random.seed(self.number)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = StepLR(self.optimizer, 2, 0.7)
        self.plateau = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.loader: Any = DataLoader(Numbers(), BATCH, shuffle=True)
        self.other: Any = DataLoader(Numbers(), BATCH, shuffle=True)
        loaders = {"train": self.loader, "both": {"a": self.loader, "b": self.other}, "none": None}
        self.manager = ckpt.StateManager(
            self.root,
            model=self.model,
            optimizer=self.optimizer,
            scheduler={"steps": self.scheduler, "plateau": self.plateau},
            dataloader=loaders[self.given],
            save_every=self.every,
            saving=ckpt.SaveOptions(background=False),
        )
        self.manager.register(ema=self.ema)

    def train(self, batch: Any) -> None:
        """Forward, backward and the optimizer's step."""
        if isinstance(batch, UserDict):
            numbers, noise = batch["numbers"], batch["noise"]
        elif isinstance(batch, Pair):
            numbers, noise = batch.numbers, batch.noise
        else:
            numbers, noise = map(torch.as_tensor, batch)
        self.optimizer.zero_grad()
        loss = (self.model(numbers.float() / SIZE) + noise.float()).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.drawn.append([numbers.flatten().tolist(), loss.item(), self.optimizer.param_groups[0]["lr"]])

    def step(self) -> None:
        self.manager.step()
        step = self.manager.session.loop.progress.step
        self.seen[step], self.drawn = self.drawn, []

    def rest(self) -> None:
        """The end of an iteration, after which a kill comes."""
        if self.manager.session.loop.progress.step == self.kill:
            raise KilledError

    def update_ema(self) -> None:
        for mine, theirs in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    @torch.no_grad()
    def validate(self) -> float:
        """Draws random numbers, as dropout and augmentations do."""
        return float(torch.stack([self.model(numbers + torch.rand(1)).mean() for numbers, _ in self.other]).mean())

    def plateau_every_other_step(self) -> None:
        if self.manager.every(2):
            self.plateau.step(self.validate())

    def resume(self) -> int:
        """The epoch to begin with."""
        restored = self.manager.resume()
        return restored.epoch if restored else 0

    def weights(self) -> list[Any]:
        models = [*self.model.parameters(), *self.ema.parameters()]
        return [parameter.tolist() for parameter in models]


Loop = Callable[[Run], None]
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {}


def loop(name: str, **options: Any) -> Callable[[Loop], Loop]:
    def add(function: Loop) -> Loop:
        LOOPS[name] = (function, options)
        return function

    return add


def _in_epochs(*lines: str) -> Loop:
    """A loop with these lines after the optimizer's step, in this order."""

    def run(run: Run) -> None:
        for _ in run.manager.epochs(EPOCHS):
            for batch in run.manager.batches(run.loader):
                run.train(batch)
                for line in lines:
                    act: dict[str, Callable[[], object]] = {
                        "step": run.step,
                        "scheduler": run.scheduler.step,
                        "ema": run.update_ema,
                        "validate": run.validate,
                        "plateau": run.plateau_every_other_step,
                    }
                    act[line]()
                run.rest()

    return run


for order in (
    ("step", "scheduler", "ema", "validate"),
    ("scheduler", "step", "validate", "ema"),
    ("ema", "validate", "step", "scheduler"),
    ("validate", "ema", "scheduler", "step"),
    ("step", "plateau", "scheduler"),
):
    LOOPS[f"in the order {', '.join(order)}"] = (_in_epochs(*order), {})


@loop("a plain for over the loader")
def _plain(run: Run) -> None:
    for _ in range(run.resume(), EPOCHS):
        for batch in run.loader:
            run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()
        run.plateau.step(run.validate())


@loop("the scheduler and validation at the end of the epoch", every=5)
def _end_of_epoch(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for batch in run.loader:
            run.train(batch)
            run.step()
            run.rest()
        run.plateau.step(run.validate())
        run.update_ema()


@loop("gradient accumulation, with the leftovers after the loop")
def _accumulation(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for number, (numbers, noise) in run.manager.enumerate(run.loader):
            (run.model(numbers / SIZE) + noise).pow(2).mean().backward()
            run.drawn.append(numbers.flatten().tolist())
            if number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.step()
                run.scheduler.step()
                run.rest()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.step()
        run.update_ema()
        run.rest()


@loop("a window of batches read before each step")
def _window(run: Run) -> None:
    for _ in range(run.resume(), EPOCHS):
        batches = iter(run.loader)
        while window := list(itertools.islice(batches, 2)):
            for batch in window:
                run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()


@loop("while True with next()")
def _next(run: Run) -> None:
    run.resume()
    batches = iter(run.loader)
    while run.manager.progress.step < LAST:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(run.loader)
            batch = next(batches)
        run.train(batch)
        run.step()
        run.update_ema()
        run.rest()


@loop("an endless generator around the loader")
def _endless(run: Run) -> None:
    def forever() -> Iterator[Any]:
        while True:
            yield from run.loader

    run.resume()
    for batch in forever():
        run.train(batch)
        run.step()
        run.scheduler.step()
        run.rest()
        if run.manager.progress.step >= LAST:
            break


@loop("two loaders in zip", given="none")
def _zip(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for first, second in zip(run.manager.batches(run.loader), run.manager.batches(run.other), strict=False):
            run.train(first)
            run.train(second)
            run.step()
            run.scheduler.step()
            run.rest()


@loop("two given loaders in zip, without the manager's epochs", given="both")
def _given_zip(run: Run) -> None:
    for _ in range(run.resume(), EPOCHS):
        for first, second in zip(run.loader, run.other, strict=False):
            run.train(first)
            run.train(second)
            run.step()
            run.update_ema()
            run.rest()


@loop("two loaders one after the other", given="both")
def _after(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for loader in (run.loader, run.other):
            for batch in loader:
                run.train(batch)
                run.step()
                run.scheduler.step()
                run.rest()


@loop("break after four batches of every epoch")
def _break(run: Run) -> None:
    for _ in run.manager.epochs(4):
        for number, batch in run.manager.enumerate(run.loader):
            run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()
            if number == 3:
                break
        run.update_ema()


@loop("break after four batches, without the manager's epochs")
def _plain_break(run: Run) -> None:
    for _ in range(run.resume(), 4):
        for number, batch in run.manager.enumerate(run.loader):
            run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()
            if number == 3:
                break


@loop("several steps on each batch", every=3)
def _several_steps(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for batch in run.loader:
            for _ in range(2):
                run.train(batch)
                run.step()
            run.scheduler.step()
            run.rest()


@loop("one step with all the data in each epoch", given="none")
def _full_batch(run: Run) -> None:
    numbers = torch.arange(float(SIZE)).reshape(-1, 1)
    for _ in run.manager.epochs(6):
        run.train((numbers, torch.ones(SIZE, 1)))
        run.step()
        run.scheduler.step()
        run.plateau.step(run.validate())
        run.rest()


@loop("a count instead of a loader", given="none")
def _range(run: Run) -> None:
    for _ in run.manager.batches(range(LAST)):
        run.train((torch.rand(3, 1), torch.rand(3, 1)))
        run.step()
        run.scheduler.step()
        run.rest()


@loop("a stream without a state", given="none")
def _stream(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for batch in run.manager.batches(DataLoader(Stream(), BATCH)):
            run.train(batch)
            run.step()
            run.update_ema()
            run.rest()


@loop("a transform in map", given="none")
def _map(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for batch in map(list, run.manager.batches(run.loader)):
            run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()


@loop("validation on the training loader, inside the iteration")
def _validate_inside(run: Run) -> None:
    for _ in run.manager.epochs(EPOCHS):
        for batch in run.loader:
            run.train(batch)
            run.step()
            if run.manager.every(3):
                with torch.no_grad():
                    run.plateau.step(sum(run.model(numbers).sum().item() for numbers, _ in run.loader))
            run.rest()


@loop("a skipping loader of Accelerate's function, announced", given="none")
def _skipping(run: Run) -> None:
    restored = run.manager.resume()
    first = restored.epoch if restored else 0
    for epoch in range(first, EPOCHS):
        done = restored.progress.batch if restored and epoch == first else 0
        for batch in run.manager.batches(skip_first_batches(run.loader, done) if done else run.loader):
            run.train(batch)
            run.step()
            run.scheduler.step()
            run.rest()


for kind, collate in {"UserDict": as_user_dict, "NumPy": as_numpy, "a dataclass": as_pair}.items():

    def _of_kind(run: Run, collate: Any = collate) -> None:
        run.loader.collate_fn = collate
        for _ in range(run.resume(), EPOCHS):
            for batch in run.loader:
                run.train(batch)
                run.step()
                run.scheduler.step()
                run.rest()

    LOOPS[f"batches that are {kind}"] = (_of_kind, {})


def _finish(function: Loop, run: Run) -> None:
    """Run the loop; a kill drops everything but what is committed."""
    try:
        with run.manager:
            function(run)
    except KilledError:
        pass


def _straight(function: Loop, root: Path, **options: Any) -> Run:
    run = Run(root, **options)
    _finish(function, run)
    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if number % 3 else []) for number, name in enumerate(LOOPS)]
)
def test_a_killed_loop_trains_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    function, options = LOOPS[name]
    straight = _straight(function, tmp_path / "straight", **options)
    last = max(straight.seen)
    seen: dict[int, Any] = {}
    kills = sorted({2, 5, 6, last})  # in the first epoch, around its end, and in the second
    for number, kill in enumerate((*kills, None)):
        root = tmp_path / "killed"
        run = Run(root, kill, number=number if list(root.glob("*/manifest.json")) else 0, **options)
        _finish(function, run)
        seen |= run.seen
        assert run.manager.restored is None or run.manager.restored.approximated == {}
    assert seen == straight.seen
    assert run.weights() == straight.weights()


class TestWhatIsNamed:
    """Loops that no resume can continue exactly: each is told so, with the line to write."""

    @staticmethod
    def _resumed(function: Loop, root: Path, kill: int, **options: Any) -> str:
        for number, end in enumerate((kill, None)):
            run = Run(root, end, number, **options)
            _finish(function, run)
        assert run.manager.restored is not None
        return " ".join(run.manager.restored.approximated.values())

    def test_cycle_repeats_its_first_pass_from_memory(self, tmp_path: Path) -> None:
        def function(run: Run) -> None:
            run.resume()
            for batch in itertools.cycle(run.loader):
                run.train(batch)
                run.step()
                run.rest()
                if run.manager.progress.step >= LAST:
                    break

        for kill in (3, 8):
            assert "itertools.cycle" in self._resumed(function, tmp_path / str(kill), kill)

    def test_a_loader_that_was_not_given(self, tmp_path: Path) -> None:
        def function(run: Run) -> None:
            for _ in range(run.resume(), EPOCHS):
                for batch in run.loader:
                    run.train(batch)
                    run.step()
                    run.rest()

        assert "StateManager(dataloader=loader)" in self._resumed(function, tmp_path, 3, given="none")

    def test_a_batch_that_is_fetched_ahead(self, tmp_path: Path) -> None:
        """As nanoGPT does: from the global generator, before the step is over."""

        def fetch() -> Any:
            return torch.rand(3, 1), torch.rand(3, 1)

        def function(run: Run) -> None:
            run.resume()
            batch = fetch()
            while run.manager.progress.step < LAST:
                run.train(batch)
                batch = fetch()
                run.step()
                run.rest()

        told = self._resumed(function, tmp_path, 3, given="none")
        assert "call it last in the iteration" in told
        assert "manager.batches(...)" in told

    def test_epochs_that_are_counted_from_0_again(self, tmp_path: Path) -> None:
        def function(run: Run) -> None:
            for _ in range(EPOCHS):
                for batch in run.manager.batches(run.loader):
                    run.train(batch)
                    run.step()
                    run.rest()

        assert "manager.epochs(n)" in self._resumed(function, tmp_path, 7)

    def test_a_prefetcher_around_the_loader(self, tmp_path: Path) -> None:
        def ahead(batches: Any) -> Iterator[Any]:
            iterator = iter(batches)
            following = next(iterator, None)
            while following is not None:
                now, following = following, next(iterator, None)
                yield now

        def function(run: Run) -> None:
            for _ in run.manager.epochs(EPOCHS):
                for batch in ahead(run.loader):
                    run.train(batch)
                    run.step()
                    run.rest()

        assert "manager.batches(Prefetcher(loader))" in self._resumed(function, tmp_path, 3)

    def test_one_loader_inside_another(self, tmp_path: Path) -> None:
        def function(run: Run) -> None:
            for _ in run.manager.epochs(EPOCHS):
                for _ in run.manager.batches(run.loader):
                    for batch in run.manager.batches(run.other):
                        run.train(batch)
                        run.step()
                        run.rest()

        assert "in turn, or one inside the other" in self._resumed(function, tmp_path, 8, given="none")

    @pytest.mark.parametrize("wrapped", [zip, enumerate, itertools.cycle, itertools.chain])
    def test_an_iterator_that_has_begun_is_refused_with_the_line_to_write(self, tmp_path: Path, wrapped: Any) -> None:
        run = Run(tmp_path)
        with run.manager as manager, pytest.raises(ckpt.ConfigError, match=r"manager\.(batches|enumerate)\("):
            manager.batches(wrapped(run.loader))


class TestTheBoundary:
    """A save is taken where the iteration ends, under the name of its step."""

    def test_it_is_not_taken_inside_step(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        with run.manager as manager:
            for number, batch in enumerate(manager.batches(run.loader), 1):
                run.train(batch)
                manager.step(metrics={"loss": float(number)})
                names = sorted(found.name for found in ckpt.list_checkpoints(tmp_path) if found.committed)
                assert names == [f"step-{step:08d}" for step in range(1, number)]
        manifests = [found.manifest for found in ckpt.list_checkpoints(tmp_path) if found.manifest]
        assert sorted((manifest.step, manifest.metrics["loss"]) for manifest in manifests) == [
            (n, n) for n in range(1, 6)
        ]

    def test_the_last_one_before_break_is_taken_when_the_manager_ends(self, tmp_path: Path) -> None:
        run = Run(tmp_path, every=2)
        with run.manager as manager:
            for batch in manager.batches(run.loader):
                run.train(batch)
                manager.step()
                if manager.progress.step == 2:
                    break
            run.update_ema()
            assert not list(tmp_path.glob("step-*"))
        again = Run(tmp_path, number=1)
        with again.manager as manager:
            restored = manager.load_state()
        assert (restored.step, restored.progress.batch) == (2, 2)
        assert again.weights() == run.weights()

    def test_an_exception_in_the_iteration_says_that_its_save_was_not_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run(tmp_path, 2)
        _finish(_plain, run)
        assert [found.name for found in ckpt.list_checkpoints(tmp_path)] == ["step-00000001"]
        assert "step 2 was due to be saved at the end of its iteration" in caplog.text


def test_a_manager_that_is_dropped_after_break_says_that_its_last_save_is_not_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ckpt.StateManager(tmp_path, model=nn.Linear(2, 2), save_every=1)
    for _ in manager.batches([1, 2, 3]):
        manager.step()
        break
    del manager
    gc.collect()
    assert [text for text in caplog.messages if "dropped the manager before that. Write `with" in text]
    assert ckpt.list_checkpoints(tmp_path) == []
