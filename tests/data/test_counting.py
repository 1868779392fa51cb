"""What the loop counts after a resume: epochs without a loader, numbers of batches, samples; and who reads ahead."""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import ckpt

SIZE = 20


class Fixture:
    """A model and its optimizer in a run over numbered samples."""

    def __init__(self, root: str, size: int = 2, *, drop_last: bool = False, **options: Any) -> None:
        self.size = size
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(TensorDataset(torch.arange(float(SIZE)).reshape(-1, 1)), size, drop_last=drop_last)
        objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "dataloader": self.loader}
        self.manager = ckpt.StateManager(root, **objects, **options)

    def train(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs / SIZE).pow(2).mean().backward()
        self.optimizer.step()

    @property
    def approximated(self) -> dict[str, str]:
        assert self.manager.restored is not None
        return self.manager.restored.approximated


class TestEpochsWithoutALoader:
    """Full-batch training and LBFGS."""

    @staticmethod
    def _run(root: str, stop: int | None, steps: int = 1, save: str = "step") -> tuple[list[Any], Fixture]:
        seen: list[Any] = []
        run = Fixture(root, save_every=1 if save == "step" else None)
        with run.manager as manager:
            for epoch in manager.epochs(5):
                for number in range(steps):
                    run.train(torch.ones(4, 1))
                    seen.append((epoch, number))
                    if save == "step":
                        manager.step()
                    if len(seen) == stop:
                        if save == "state":
                            manager.save_state()
                        return seen, run
        return seen, run

    @pytest.mark.parametrize("save", ["step", "state"])
    @pytest.mark.parametrize("stop", [1, 2, 4, 5])
    def test_the_epoch_that_was_saved_is_not_repeated(self, anywhere: str, stop: int, save: str) -> None:
        seen, _ = self._run(anywhere, stop, save=save)
        rest, run = self._run(anywhere, None, save=save)
        assert [epoch for epoch, _ in seen + rest] == [0, 1, 2, 3, 4]
        assert not run.approximated or stop == 1

    def test_after_the_resume_the_next_save_is_as_sure(self, anywhere: str) -> None:
        self._run(anywhere, 2)
        self._run(anywhere, 1)
        rest, run = self._run(anywhere, None)
        assert [epoch for epoch, _ in rest] == [3, 4]
        assert run.approximated == {}

    def test_a_first_epoch_that_may_not_be_over_is_named(self, anywhere: str) -> None:
        self._run(anywhere, 1)
        _, run = self._run(anywhere, None)
        assert "counted as finished" in run.approximated["epoch"]

    def test_an_epoch_of_several_steps_begins_anew_and_is_named(self, anywhere: str) -> None:
        self._run(anywhere, 5, steps=3)  # the second of epoch 1
        rest, run = self._run(anywhere, None, steps=3)
        assert rest[0] == (1, 0)
        assert "begins again: 2 of its steps were made" in run.approximated["epoch"]

    def test_one_that_had_made_as_many_steps_as_the_one_before_is_over(self, anywhere: str) -> None:
        self._run(anywhere, 6, steps=3)
        rest, run = self._run(anywhere, None, steps=3)
        assert rest[0] == (2, 0)
        assert "epoch" not in run.approximated


def _numbered(root: str, stop: int | None, numbers: Callable[[Fixture], Iterable[Any]]) -> tuple[list[Any], Fixture]:
    seen: list[Any] = []
    run = Fixture(root)
    with run.manager as manager:
        for _ in manager.epochs(1):
            for number, (inputs,) in numbers(run):
                run.train(inputs)
                manager.step()
                seen.append((number, int(inputs[0])))
                if len(seen) == stop:
                    manager.save_state()
                    break
            else:
                continue
            break
    return seen, run


class TestNumbersOfBatches:
    def test_enumerate_goes_on_counting_after_a_resume(self, anywhere: str) -> None:
        def numbers(run: Fixture) -> Iterable[Any]:
            return run.manager.enumerate(run.loader, start=1)

        seen, _ = _numbered(anywhere, 4, numbers)
        rest, run = _numbered(anywhere, None, numbers)
        assert seen + rest == [(number, 2 * number - 2) for number in range(1, 11)]
        assert run.approximated == {}

    def test_the_length_is_that_of_the_epoch(self, anywhere: str) -> None:
        lengths: list[int] = []

        def numbers(run: Fixture) -> Iterable[Any]:
            batches = run.manager.batches(run.loader)
            lengths.extend([len(run.manager.enumerate(run.loader)), len(batches)])
            first = next(batches)  # it is an iterator as well
            return [(0, first), *enumerate(batches, 1)]

        _numbered(anywhere, 4, numbers)
        run = Fixture(anywhere)
        with run.manager as manager:
            assert len(manager.batches(run.loader)) == 10
        run = Fixture(f"{anywhere}/other")
        for stop in (4, None):
            run = Fixture(f"{anywhere}/other")
            with run.manager as manager:
                left = manager.batches(run.loader)
                lengths.append(len(left))
                for number, (inputs,) in enumerate(left, 1):
                    run.train(inputs)
                    if number == stop:
                        manager.save_state()
                        break
        assert lengths == [10, 10, 10, 10]
        with Fixture(f"{anywhere}/other").manager as manager, pytest.raises(TypeError, match="len"):
            len(manager.batches(iter([1])))

    @pytest.mark.parametrize(
        ("size", "drop_last", "shown"),
        [(2, False, (6, 10, 10)), (4, False, (6, 8, 8)), (3, False, (6, 9, 9)), (3, True, (6, 8, 8))],
    )
    @pytest.mark.parametrize("loop", ["plain", "given", "announced"])
    def test_a_progress_bar_continues_where_the_epoch_was(
        self, anywhere: str, size: int, drop_last: bool, shown: tuple[int, int, int], loop: str
    ) -> None:
        """Also with another batch size: 8 of 20 samples are left. A plain loader knows only its own length."""

        def bar(run: Fixture) -> Any:
            another = DataLoader(run.loader.dataset, run.size, drop_last=drop_last)
            batches = run.manager.batches(another if loop == "announced" else run.loader)
            loader = run.loader if loop == "plain" else batches
            return tqdm(loader, initial=run.manager.progress.batch, file=io.StringIO())

        counts = []
        for stop in (6, None):
            run = Fixture(anywhere, size if stop is None else 2, drop_last=drop_last)
            with run.manager as manager:
                for _ in manager.epochs(1):
                    seen = bar(run)
                    counts.append((seen.n, seen.total))
                    for number, (inputs,) in enumerate(seen, 1):
                        run.train(inputs)
                        manager.step()
                        if number == stop:
                            manager.save_state()
                            break
                    else:
                        continue
                    break
        if loop != "plain" or size == 2:
            assert counts == [(0, 10), shown[:2]]
        assert seen.n == shown[2]

    def test_a_resume_at_the_beginning_of_an_epoch_counts_right(self, anywhere: str) -> None:
        def numbers(run: Fixture) -> Iterable[Any]:
            return enumerate(run.manager.batches(run.loader))

        run = Fixture(anywhere)
        with run.manager as manager:
            manager.resume()
            manager.save_state()
        rest, run = _numbered(anywhere, None, numbers)
        assert rest[0] == (0, 0)
        assert run.approximated == {}


class TestALoopThatIsLeft:
    """By `break`. Each iterator is kept alive here: how long an object lives decides nothing."""

    @staticmethod
    def _left(run: Fixture, batches: Iterable[Any], trained: int) -> Iterator[Any]:
        """Train on the first batches, or look at one."""
        reading = iter(batches)
        for number, (inputs,) in enumerate(reading, 1):
            if trained:
                run.train(inputs)
                run.manager.step()
            if number >= trained:
                break
        return reading

    @pytest.mark.parametrize("announced", [True, False])
    def test_the_next_one_over_its_loader_begins_the_next_epoch(self, anywhere: str, announced: bool) -> None:
        run, kept = Fixture(anywhere), []
        with run.manager as manager:
            manager.resume()
            for epoch in range(3):
                kept.append(self._left(run, manager.batches(run.loader) if announced else run.loader, 2))
                assert (manager.progress.epoch, manager.progress.batch) == (epoch, 2)

    def test_a_look_at_the_first_batch_is_no_training(self, anywhere: str) -> None:
        run = Fixture(anywhere)
        with run.manager as manager:
            manager.resume()
            kept = [self._left(run, run.loader, 0)]
            for number, (inputs,) in enumerate(run.loader, 1):
                run.train(inputs)
                manager.step()
                assert (manager.progress.batch, manager.progress.samples) == (number, 2 * number)
            assert (manager.progress.epoch, manager.progress.samples) == (1, SIZE)
        assert kept

    def test_a_look_at_other_data_is_no_part_of_the_loop(self, anywhere: str) -> None:
        run, others = Fixture(anywhere), [(torch.zeros(2, 1),)] * 5
        with run.manager as manager:
            manager.resume()
            kept = [self._left(run, manager.batches(others), 0)]
            for inputs in run.loader:
                run.train(*inputs)
                manager.step()
                kept.append(self._left(run, manager.batches(others), 0))
            assert (manager.progress.epoch, manager.progress.samples) == (1, SIZE)

    @pytest.mark.parametrize("epochs", [True, False])
    def test_evaluation_after_it_keeps_its_position(self, anywhere: str, epochs: bool) -> None:
        seen = []
        for stop in (True, False):
            run, kept = Fixture(anywhere), []
            with run.manager as manager:
                manager.resume()
                for _ in manager.epochs(1) if epochs else range(1):
                    kept.append(self._left(run, run.loader, 3) if stop else None)
                    evaluated = len(list(manager.batches([(torch.zeros(2, 1),)] * 5)))
                    seen.append(evaluated)
                    if stop:
                        assert manager.progress.batch == 3
                        manager.save_state()
                    else:
                        seen.append(len(list(run.loader)))
        assert seen == [5, 5, 7]

    def test_one_that_hands_out_more_was_not_left(self, anywhere: str) -> None:
        """The same loader once more inside an iteration, with gradients: neither it nor its epochs count."""
        run, seen = Fixture(anywhere), []
        with run.manager as manager:
            manager.resume()
            for number, (inputs,) in enumerate(run.loader, 1):
                run.train(inputs)
                manager.step()
                seen.append(len(list(run.loader)))
                if number == 4:
                    manager.save_state()
            assert seen == [10] * 10
            assert (manager.progress.epoch, manager.progress.samples) == (1, SIZE)
        again = Fixture(anywhere)
        with again.manager as manager:
            assert manager.load_state("step-00000004").approximated == {}
            assert (manager.progress.epoch, len(list(again.loader))) == (0, 6)

    def test_steps_on_other_data_take_the_lead_and_say_so_if_it_goes_on(
        self, anywhere: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Fixture(anywhere)
        other = DataLoader(TensorDataset(torch.zeros(8, 1)), 2)
        with run.manager as manager:
            manager.resume()
            reading = self._left(run, run.loader, 3)
            for number, (inputs,) in enumerate(manager.batches(other), 1):
                run.train(inputs)
                manager.step()
                assert manager.progress.batch == number
            assert "in turn" not in caplog.text
            for (inputs,) in reading:
                run.train(inputs)
                manager.step()
            manager.save_state()
        assert "two loaders feed this loop in turn" in caplog.text

    def test_its_workers_end_with_its_iterator(self, anywhere: str) -> None:
        run, ended = Fixture(anywhere), []

        def read() -> Iterator[Any]:
            try:
                yield from [(torch.zeros(2, 1),)] * 5
            finally:
                ended.append(True)

        class Source:
            def __iter__(self) -> Iterator[Any]:
                return read()

        with run.manager as manager:
            batches = manager.batches(Source())
            self._left(run, batches, 2)
            assert not ended
            batches.close()
            assert ended


class OneAhead:
    """Reads the next batch before it gives this one, as prefetchers for CUDA do."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        ahead = next(batches, None)
        while ahead is not None:
            now, ahead = ahead, next(batches, None)
            yield now

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class Background(OneAhead):
    """Reads in a thread, two batches ahead."""

    def __iter__(self) -> Iterator[Any]:
        ahead: queue.Queue[Any] = queue.Queue(2)
        left = threading.Event()

        def read() -> None:
            for batch in self.batches:
                if left.is_set():
                    return
                ahead.put(batch)
            ahead.put(None)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            while (batch := ahead.get()) is not None:
                while thread.is_alive() and not ahead.full():  # on a busy machine too
                    time.sleep(0.001)
                yield batch
        finally:
            left.set()
            while thread.is_alive():
                try:
                    ahead.get(timeout=0.05)
                except queue.Empty:
                    continue


class TestPrefetchers:
    @staticmethod
    def _run(root: str, stop: int | None, around: Callable[[Fixture], Iterable[Any]]) -> tuple[list[int], Fixture]:
        seen, run = _numbered(root, stop, lambda run: ((0, batch) for batch in around(run)))
        return [first for _, first in seen], run

    @pytest.mark.parametrize("prefetcher", [OneAhead, Background])
    def test_inside_batches_a_prefetcher_loses_nothing(self, anywhere: str, prefetcher: Any) -> None:
        def around(run: Fixture) -> Iterable[Any]:
            return run.manager.batches(prefetcher(run.loader))

        seen, _ = self._run(anywhere, 4, around)
        rest, run = self._run(anywhere, None, around)
        assert seen + rest == list(range(0, SIZE, 2))
        assert run.approximated == {}

    @pytest.mark.parametrize("prefetcher", [OneAhead, Background])
    def test_around_batches_what_it_has_read_is_lost_and_told(
        self, anywhere: str, caplog: pytest.LogCaptureFixture, prefetcher: Any
    ) -> None:
        def around(run: Fixture) -> Iterable[Any]:
            return prefetcher(run.manager.batches(run.loader))  # type: ignore[no-any-return]

        seen, _ = self._run(anywhere, 4, around)
        rest, run = self._run(anywhere, None, around)
        assert len(seen + rest) < SIZE // 2
        told = " ".join(run.approximated.values())
        assert "manager.batches(Prefetcher(loader))" in told
        assert "manager.batches(Prefetcher(loader))" in caplog.text

    def test_around_a_plain_loader_it_is_told_as_well(self, anywhere: str) -> None:
        def around(run: Fixture) -> Iterable[Any]:
            return OneAhead(run.loader)

        self._run(anywhere, 4, around)
        _, run = self._run(anywhere, None, around)
        assert "manager.batches(Prefetcher(loader))" in run.approximated["data"]

    def test_a_whole_epoch_is_enough_to_tell_at_the_save(self, anywhere: str, caplog: pytest.LogCaptureFixture) -> None:
        run = Fixture(anywhere)
        with run.manager as manager:
            for _ in manager.epochs(1):
                for (inputs,) in OneAhead(manager.batches(run.loader)):
                    run.train(inputs)
                    manager.step()
            manager.save_state()
        assert "manager.batches(Prefetcher(loader))" in caplog.text

    def test_reading_all_batches_of_a_step_before_it_loses_none_and_is_not_told(self, anywhere: str) -> None:
        """As torchtitan reads the microbatches of a step."""

        def trained(*, stop: int | None) -> tuple[list[int], Fixture]:
            seen, run = list[int](), Fixture(anywhere)
            with run.manager as manager:
                manager.resume()
                batches = iter(run.loader)
                while window := [batch for _, batch in zip(range(2), batches, strict=False)]:
                    for (inputs,) in window:
                        seen.append(int(inputs[0]))
                    run.train(torch.cat([inputs for (inputs,) in window]))
                    manager.step()
                    if len(seen) == stop:
                        manager.save_state(wait=True)
                        return seen, run
            return seen, run

        first, _ = trained(stop=4)
        second, run = trained(stop=4)
        assert run.approximated == {}
        third, run = trained(stop=None)
        assert run.approximated == {}
        assert first + second + third == list(range(0, SIZE, 2))

    def test_a_batch_that_the_script_finds_unfit_is_no_prefetching(
        self, anywhere: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Fixture(anywhere)
        with run.manager as manager:
            for _ in manager.epochs(2):
                for number, (inputs,) in manager.enumerate(run.loader):
                    if number in (0, 4):
                        continue
                    run.train(inputs)
                    manager.step()
                manager.save_state()
        assert not caplog.records


class TestSamples:
    @pytest.mark.parametrize("where", ["nested", "after", "plain"])
    def test_batches_of_validation_are_no_samples_of_training(self, anywhere: str, where: str) -> None:
        run = Fixture(anywhere)
        validation = DataLoader(TensorDataset(torch.ones(50, 1)), 5)
        with run.manager as manager:
            for epoch in manager.epochs(2):
                for (inputs,) in manager.batches(run.loader):
                    run.train(inputs)
                    manager.step()
                    if where == "nested":
                        assert len(list(manager.batches(validation))) == 10
                if where == "after":
                    assert len(list(manager.batches(validation))) == 10
                if where == "plain":
                    assert len(list(validation)) == 10
                manager.save_state(f"epoch-{epoch}")
                assert manager.progress.samples == (epoch + 1) * SIZE
            manager.wait()
            saved = [found.manifest.progress["samples"] for found in ckpt.list_checkpoints(anywhere) if found.manifest]
        assert sorted(saved) == [SIZE, 2 * SIZE]

    def test_without_an_optimizer_and_a_step_all_that_is_handed_out_counts(self, anywhere: str) -> None:
        with ckpt.StateManager(anywhere, model=nn.Linear(1, 1)) as manager:
            for _ in manager.batches(Fixture(f"{anywhere}/other").loader):
                pass
            assert manager.progress.samples == SIZE


@pytest.mark.parametrize("registered", [True, False])
def test_a_loop_without_a_loader_is_told_where_to_step_and_that_its_data_is_unseen_unless_its_generator_is_registered(
    anywhere: str, caplog: pytest.LogCaptureFixture, registered: bool
) -> None:
    model, generator = nn.Linear(2, 2), torch.Generator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(anywhere, model=model, optimizer=optimizer) as manager:
        if registered:
            manager.register(generator=generator)
        manager.resume()
        for _ in range(2):
            model(torch.randn(3, 2, generator=generator)).sum().backward()
            optimizer.step()
            manager.step()
        manager.save_state()
    assert "call it last in the iteration" in caplog.text.lower()
    assert ("can't see where this loop's batches come from" in caplog.text) is not registered
