"""Loops that say nothing of batches and epochs to the manager: a plain `for` over a DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from tests.helpers.accelerated import build, new_accelerator, reseed, train_on
from tests.helpers.second_process import slow_where
from tests.helpers.training import exact

SIZE = 22


class Numbers(Dataset[Any]):
    """Samples that say who they are, with noise from the global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.rand(1) + random.random()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Numbers()[index] for index in range(SIZE))


class Transformed(DataLoader[Any]):
    """A loader of the user's own, which goes through torch's."""

    def __iter__(self) -> Any:
        for inputs, noise in super().__iter__():
            yield inputs * 2, noise


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "with workers": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2, multiprocessing_context="fork"),
    "with a generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "stateful": lambda: StatefulDataLoader(Numbers(), 4, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a class of one's own": lambda: Transformed(Numbers(), 4, shuffle=True),
}


class Training:
    """A model and its optimizer in a run, and what was seen: samples, noise and weights."""

    def __init__(
        self,
        root: str,
        run: int = 0,
        make: Callable[[], Any] = LOADERS["shuffled"],
        given: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(run)
        random.seed(run)
        self.loader = make()
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        if run == 0:  # another run has other weights, until it has resumed
            torch.manual_seed(5)
        self.seen: list[Any] = []
        self.manager = ckpt.StateManager(
            root,
            model=self.model,
            optimizer=self.optimizer,
            dataloader=self.loader if given else None,
            **options,
        )

    def on(self, batch: Any) -> None:
        inputs, noise = batch
        loss = (self.model(inputs / SIZE) + noise).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.append([inputs.flatten().tolist(), noise.flatten().tolist(), exact(self.model.state_dict())])
        self.manager.step()

    @torch.no_grad()
    def evaluate(self, loader: Any) -> int:
        return sum(len(batch[0]) for batch in loader)

    def evaluate_carelessly(self, loader: Any) -> int:
        """With gradients, and in training mode."""
        return sum(len(self.model(inputs)) for inputs, _ in loader)


Run = Callable[[Training, int | None], None]


def _compare(root: str, run: Run, *stops: int, **options: Any) -> list[Training]:
    """An uninterrupted run against one that stops after so many batches each time, with a save: those that resumed."""
    straight = Training(f"{root}/straight", **options)
    with straight.manager:
        run(straight, None)
    seen, resumed = [], []
    for number, stop in enumerate([*stops, None]):
        training = Training(f"{root}/stopped", number, **options)
        with training.manager:
            run(training, stop)
        seen += training.seen
        resumed += [training] if number else []
    assert [step[0] for step in seen] == [step[0] for step in straight.seen]
    assert seen == straight.seen
    return resumed


def _approximated(training: Training) -> dict[str, str]:
    assert training.manager.restored is not None
    return training.manager.restored.approximated


@pytest.mark.parametrize("kind", slow_where("workers", LOADERS))
@pytest.mark.parametrize("given", [False, True], ids=["not given", "given"])
def test_a_plain_loop_over_a_loader_goes_on_in_the_middle_of_the_epoch(anywhere: str, kind: str, given: bool) -> None:
    def run(training: Training, stop: int | None) -> None:
        restored = training.manager.resume()
        for _ in range(restored.epoch if restored else 0, 3):
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return

    resumed = _compare(anywhere, run, 3, 5, make=LOADERS[kind], given=given)
    assert [_approximated(training) for training in resumed] == [{}, {}]
    assert resumed[-1].manager.progress.epoch == 3
    assert resumed[-1].manager.progress.samples == 3 * SIZE


def test_a_plain_loop_inside_the_managers_epochs_goes_on_too(anywhere: str) -> None:
    def run(training: Training, stop: int | None) -> None:
        for _ in training.manager.epochs(3):
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return

    assert [_approximated(training) for training in _compare(anywhere, run, 3, 5)] == [{}, {}]


def test_evaluation_before_beside_and_inside_a_plain_loop_begins_at_its_beginning(anywhere: str) -> None:
    sizes: list[int] = []

    def run(training: Training, stop: int | None) -> None:
        validation = DataLoader(TensorDataset(torch.ones(7, 1), torch.ones(7, 1)), 4)
        restored = training.manager.resume()
        sizes.extend([training.evaluate(validation), training.evaluate_carelessly(validation)])
        sizes.append(training.evaluate(training.loader) - SIZE + 7)  # of what is trained on, before it is
        for epoch in range(restored.epoch if restored else 0, 2):
            next(iter(training.loader))  # a look at one batch
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) % 2:
                    sizes.append(training.evaluate_carelessly(validation))
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return
            sizes.append(training.evaluate(validation))
            assert training.manager.progress.epoch == epoch + 1

    # the look at a batch draws from the generators, so the order differs; but every sample is seen once in an epoch
    training = Training(f"{anywhere}/stopped")
    with training.manager:
        run(training, 3)
    resumed = Training(f"{anywhere}/stopped", 1)
    with resumed.manager:
        run(resumed, None)
    samples = [number for step in (*training.seen, *resumed.seen) for number in step[0]]
    assert sorted(samples[:SIZE]) == sorted(samples[SIZE:]) == list(range(SIZE))
    assert set(sizes) == {7}
    assert resumed.manager.progress.samples == 2 * SIZE


def test_evaluation_of_the_training_loader_with_gradients_is_told_and_does_not_take_the_position(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(training: Training, stop: int | None) -> None:
        training.manager.resume()
        if stop is None and training.manager.progress.step:
            assert training.evaluate_carelessly(training.loader) != SIZE
        for batch in training.loader:
            training.on(batch)
            if len(training.seen) == stop:
                training.manager.save_state()
                return

    _compare(anywhere, run, 3)
    assert "torch.no_grad()" in caplog.text


def test_a_loop_that_counts_its_epochs_from_0_again_is_told_so(anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(training: Training, stop: int | None) -> None:
        training.manager.resume()
        for epoch in range(2):  # noqa: B007
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return

    first, second = Training(anywhere), Training(anywhere, 1)
    with first.manager:
        run(first, 8)
    with second.manager:
        run(second, None)
        text = _approximated(second)["epoch"]
    assert "in epoch 1" in text
    assert "counts its epochs from 0" in text
    assert "manager.epochs(n)" in text
    assert text in caplog.text


def test_a_script_that_computes_its_first_epoch_itself_is_left_alone(anywhere: str) -> None:
    def run(training: Training, stop: int | None) -> None:
        training.manager.resume()
        first = training.manager.session.loop.progress.step // len(training.loader)  # from the step, as many scripts do
        for epoch in range(first + 1, 3):  # noqa: B007  # and counts from 1
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return

    assert [_approximated(training) for training in _compare(anywhere, run, 8)] == [{}]


def test_a_loop_over_what_nobody_follows_is_told_at_the_save_and_after_the_resume(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [Numbers()[index] for index in range(6)]
    for number in range(2):
        training = Training(anywhere, number)
        with training.manager as manager:
            restored = manager.resume()
            for batch in batches[:4]:
                training.on(batch)
            manager.save_state()
        assert caplog.text.count("manager.batches(loader)") == 1  # a resume says it, and the save after it not again
        caplog.clear()
    assert restored is not None
    assert "begins anew" in restored.approximated["data"]
    assert "data" in str(restored)


def test_without_following_a_script_finds_its_place_itself_and_is_not_told(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    for number in range(2):
        training = Training(anywhere, number, make=lambda: DataLoader(Numbers(), 4), follow=False)
        with training.manager as manager:
            restored = manager.resume()
            for place, batch in enumerate(training.loader):
                if place < (restored.step if restored else 0):
                    continue
                training.on(batch)
                if len(training.seen) == 2:
                    manager.save_state()
                    break
        seen += [step[0] for step in training.seen]
    assert [batch[0] for batch in seen] == [0, 4, 8, 12]
    assert restored is not None
    assert restored.approximated == {}
    assert not caplog.records


@pytest.mark.parametrize("stop", [1, 3, 5, 7, 9, 10])
def test_a_script_that_skips_by_hand_loses_no_batch(anywhere: str, caplog: pytest.LogCaptureFixture, stop: int) -> None:
    def run(training: Training, stop: int | None) -> None:
        restored = training.manager.resume()
        for place, batch in enumerate(training.loader):
            if restored and place < restored.step:
                continue
            training.on(batch)
            if len(training.seen) == stop:
                training.manager.save_state()
                return

    make = lambda: DataLoader(Numbers(), 2, shuffle=True)  # noqa: E731
    resumed = _compare(anywhere, run, stop, make=make)
    assert [_approximated(training) for training in resumed] == [{}]
    assert f"skips the first {stop} batches by hand" in caplog.text


def test_fewer_batches_than_the_checkpoint_says_skipped_by_hand_are_told(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        training = Training(anywhere, number)
        with training.manager as manager:
            restored = manager.resume()
            for place, batch in enumerate(training.loader):
                if restored and place < 2:
                    continue
                training.on(batch)
                if len(training.seen) == 3:
                    manager.save_state()
                    break
    assert "2 batches were handed out after the resume" in _approximated(training)["data"]
    assert "2 batches were handed out after the resume" in caplog.text


def test_a_loader_that_the_checkpoint_was_not_in_takes_no_position_and_is_told(anywhere: str) -> None:
    first = Training(anywhere)
    with first.manager as manager:
        manager.resume()
        for batch in first.loader:
            first.on(batch)
            if len(first.seen) == 3:
                manager.save_state()
                break
    second = Training(anywhere, 1, make=lambda: DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), 4))
    with second.manager as manager:
        manager.resume()
        for batch in second.loader:
            second.on(batch)
    assert len(second.seen) == 2
    assert "DataLoader of Numbers (22)" in _approximated(second)["data"]


def test_loaders_that_are_trained_on_in_turn_are_told_that_epochs_cannot_be_counted(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(anywhere)
    other = DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), 4)
    with training.manager as manager:
        manager.resume()
        for epoch in range(2):
            for loader in (training.loader, other):
                for batch in loader:
                    training.on(batch)
            manager.save_state(f"epoch-{epoch}")
    assert "manager.epochs(n)" in caplog.text
    resumed = Training(anywhere, 1)
    with resumed.manager as manager:
        assert "manager.epochs(n)" in manager.load_state().approximated["epoch"]


def test_a_warm_up_before_the_managers_epochs_is_none_of_them(anywhere: str) -> None:
    training = Training(anywhere)
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
        assert list(manager.epochs(2)) == [0, 1]


def test_of_two_managers_the_last_one_follows_and_the_other_says_that_it_does_not(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Training(f"{anywhere}/first"), Training(f"{anywhere}/second")
    with first.manager, second.manager:
        first.manager.resume()
        second.manager.resume()
        for batch in first.loader:
            first.on(batch)
            second.on(batch)
        second.manager.save_state()
        assert not caplog.records
        first.manager.save_state()
        assert "manager.batches(loader)" in caplog.text
    assert (first.manager.progress.epoch, second.manager.progress.epoch) == (0, 1)


@pytest.mark.parametrize("stop", [4, 8])
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"use_seedable_sampler": True}])
def test_a_plain_manager_follows_what_accelerate_has_prepared(
    anywhere: str, options: dict[str, Any], stop: int
) -> None:
    def train(root: str, run: int, stop: int | None) -> tuple[list[Any], dict[str, str]]:
        reseed(0, 0)  # seedable samplers take their seed when they are prepared
        accelerator = new_accelerator(loaders=options)
        model, optimizer, scheduler, loader = accelerator.prepare(*build(), DataLoader(Numbers(), 4, shuffle=True))
        reseed(0, run)
        seen: list[Any] = []
        with ckpt.StateManager(root, model=model, optimizer=optimizer, scheduler=scheduler) as manager:
            restored = manager.resume()
            for epoch in range(restored.epoch if restored else 0, 2):
                for batch in loader:
                    loss = train_on(batch, accelerator, model, optimizer, scheduler)
                    seen.append([epoch, *(tensor.tolist() for tensor in batch), loss.hex()])
                    manager.step()
                    if len(seen) == stop:
                        manager.save_state()
                        break
                else:
                    continue
                break
        return seen, restored.approximated if restored else {}

    straight, _ = train(f"{anywhere}/straight", 0, None)
    seen, _ = train(f"{anywhere}/stopped", 0, stop)
    rest, approximated = train(f"{anywhere}/stopped", 1, None)
    assert seen + rest == straight
    assert approximated == {}
