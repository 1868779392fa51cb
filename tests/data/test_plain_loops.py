"""A plain `for` over a loader that the manager was given: it is followed, and nothing else is."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
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
        given: bool = True,
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
def test_a_plain_loop_over_a_loader_goes_on_in_the_middle_of_the_epoch(anywhere: str, kind: str) -> None:
    def run(training: Training, stop: int | None) -> None:
        restored = training.manager.resume()
        for _ in range(restored.epoch if restored else 0, 3):
            for batch in training.loader:
                training.on(batch)
                if len(training.seen) == stop:
                    training.manager.save_state()
                    return

    resumed = _compare(anywhere, run, 3, 5, make=LOADERS[kind])
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
    assert "has not asked ckpt for the epoch" in text
    assert "manager.epochs(n)" in text
    assert text in caplog.text


def test_a_loop_over_a_loader_that_was_not_given_is_told_at_the_save_and_after_the_resume(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        training = Training(anywhere, number, given=False)
        with training.manager as manager:
            restored = manager.resume()
            for batch in training.loader:
                training.on(batch)
            manager.save_state()
        assert (
            caplog.text.count("StateManager(dataloader=loader)") == 1
        )  # a resume says it, and the save after it not again
        caplog.clear()
    assert restored is not None
    assert "StateManager(dataloader=loader)" in restored.approximated["data"]
    assert "data" in str(restored)


def test_a_warm_up_before_the_managers_epochs_is_none_of_them(anywhere: str) -> None:
    training = Training(anywhere)
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
        assert list(manager.epochs(2)) == [0, 1]


def test_a_warm_up_before_a_resume_is_none_of_the_managers_epochs_either(anywhere: str) -> None:
    training = Training(anywhere)
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
        manager.save_state()
    with Training(anywhere, run=1).manager as manager:
        manager.resume()
        assert list(manager.epochs(2)) == [0, 1]


def test_the_epoch_that_a_script_sets_for_its_sampler_is_left_as_it_is(anywhere: str) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 1, 0))

    straight: Any = make()
    training = Training(anywhere, make=make)
    for loader in (straight, training.loader):
        loader.sampler.set_epoch(7)
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
    assert [inputs for inputs, *_ in training.seen] == [inputs.flatten().tolist() for inputs, _ in straight]


def test_samples_count_where_they_are_trained_on_after_their_pass_has_ended(anywhere: str) -> None:
    training = Training(anywhere)
    with training.manager as manager:
        manager.resume()
        for batch in list(training.loader):
            training.on(batch)
        assert manager.progress.samples == SIZE


def test_many_steps_on_a_batch_each_are_not_taken_for_many_on_one(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(anywhere, make=lambda: DataLoader(TensorDataset(*[torch.ones(70, 1)] * 2), 1), save_every=70)
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
    assert "steps were made on one batch" not in caplog.text


def test_a_step_that_reads_two_loaders_is_one_batch(anywhere: str) -> None:
    training, other = Training(anywhere), LOADERS["shuffled"]()
    with training.manager as manager:
        manager.resume()
        for batch, _ in zip(manager.batches(training.loader), manager.batches(other), strict=True):
            training.on(batch)
            assert manager.progress.batch == len(training.seen)


def test_what_another_thread_reads_of_the_loader_is_not_the_trainings(
    anywhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    training, read = Training(anywhere), list[int]()
    with training.manager as manager:
        manager.resume()
        for batch in training.loader:
            training.on(batch)
            other = threading.Thread(target=lambda: read.append(len(list(training.loader))))
            other.start()
            other.join()
        assert manager.progress.samples == SIZE
        manager.save_state()
    assert read == [6] * 6
    assert "reads batches ahead" not in caplog.text


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
        with ckpt.StateManager(
            root, model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader
        ) as manager:
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


def test_a_script_that_skips_by_hand_what_its_loader_has_skipped_is_told_what_it_loses(anywhere: str) -> None:
    for number in range(2):
        training = Training(anywhere, number, make=lambda: DataLoader(Numbers(), 2, shuffle=True))
        with training.manager as manager:
            restored = manager.resume()
            for place, batch in enumerate(training.loader):
                if restored and place < restored.step:
                    continue
                training.on(batch)
                if len(training.seen) == 3 and not number:
                    manager.save_state()
                    break
    assert "after the resume, 3 batches were read before" in _approximated(training)["data"]


def test_training_that_goes_on_with_other_data_does_not_use_the_position_later_and_is_told(anywhere: str) -> None:
    first = Training(anywhere)
    with first.manager as manager:
        manager.resume()
        for batch in first.loader:
            first.on(batch)
            if len(first.seen) == 3:
                manager.save_state()
                break
    second = Training(anywhere, 1)
    with second.manager as manager:
        manager.resume()
        for batch in DataLoader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), 4):
            second.on(batch)
        for batch in second.loader:
            second.on(batch)
    assert len(second.seen) == 2 + 6
    assert "in the middle of dataloader" in _approximated(second)["data"]


def test_of_two_managers_with_one_loader_the_last_one_follows(anywhere: str) -> None:
    first = Training(f"{anywhere}/first")
    second = Training(f"{anywhere}/second", make=lambda: first.loader)
    with first.manager, second.manager:
        first.manager.resume()
        second.manager.resume()
        for batch in first.loader:
            second.on(batch)
    assert (first.manager.progress.batch, second.manager.progress.samples) == (0, SIZE)


@pytest.mark.parametrize("end", ["closed", "collected"])
def test_a_manager_that_ends_leaves_the_loader_to_the_one_that_came_later(anywhere: str, end: str) -> None:
    first = Training(f"{anywhere}/first")
    loader = first.loader
    second = Training(f"{anywhere}/second", make=lambda: loader)
    with second.manager:
        second.manager.resume()
        if end == "closed":
            first.manager.close()
        del first
        gc.collect()
        for batch in loader:
            second.on(batch)
    assert second.manager.progress.samples == SIZE
    assert type(loader) is DataLoader


class TestTheObject:
    """What is followed is one object: its class, and all other loaders, are left alone."""

    def test_the_class_of_the_loader_is_not_touched_and_the_object_gets_it_back(self, anywhere: str) -> None:
        methods = dict(vars(DataLoader))
        training = Training(anywhere)
        other = DataLoader(Numbers(), 4)
        assert type(training.loader) is not DataLoader
        assert isinstance(training.loader, DataLoader)
        assert type(training.loader).__name__ == "DataLoader"
        assert type(other) is DataLoader
        assert dict(vars(DataLoader)) == methods
        training.manager.close()
        assert type(training.loader) is DataLoader

    def test_without_close_it_gets_its_class_back_when_the_manager_is_collected(self, anywhere: str) -> None:
        training = Training(anywhere)
        loader = training.loader
        del training
        gc.collect()
        assert type(loader) is DataLoader

    def test_a_copy_of_it_is_a_loader_like_any_other(self, anywhere: str) -> None:
        training = Training(anywhere, make=lambda: DataLoader(Numbers(), 4))
        with training.manager:
            assert type(copy.copy(training.loader)) is DataLoader
            assert len(list(copy.copy(training.loader))) == 6

    def test_a_list_is_followed_by_batches_alone(self, anywhere: str) -> None:
        batches = list(DataLoader(Numbers(), 4))
        training = Training(anywhere, make=lambda: batches)
        with training.manager as manager:
            for batch in manager.batches(batches):
                training.on(batch)
            assert manager.progress.samples == SIZE
        assert type(batches) is list

    def test_the_callers_variables_are_left_alone(self, anywhere: str) -> None:
        training = Training(anywhere)
        epoch = 7
        configuration = locals()
        with training.manager as manager:
            manager.resume()
            for batch in training.loader:
                training.on(batch)
        assert configuration["epoch"] == epoch == 7
