"""What happens twice: crashes of saves under one name, ranks that are asked to stop, hosts that copy to one mirror."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.formats.native.manifest import BlockHasher, FileRecord, Manifest
from ckpt.ranks import schedule_and_signals
from ckpt.ranks.schedule_and_signals import Preemption
from ckpt.root.catalog import mark_save, read_marker
from ckpt.root.mirror import Copies
from ckpt.save.transaction import merge_reports
from ckpt.storage import MemoryStorage, Storage, open_storage
from ckpt.util.console import utc_now
from tests.helpers.byte_checkpoints import tensor_file
from tests.helpers.places import Place, committed
from tests.helpers.processes import run_ranks


def test_what_two_crashed_saves_of_one_name_left_is_cleaned_up_by_the_third(root: Place) -> None:
    """The second crashed before it could clean up after the first: its mark names what both have left."""
    storage = open_storage(root)
    for number, path in enumerate(("first.safetensors", "second.safetensors")):
        mark_save(storage, "a", [path], [], f"id-{number}")
        storage.write(f"a/{path}", [b"x"])
    mark = read_marker(storage, "a")
    assert mark is not None
    assert set(mark.files) == {"first.safetensors", "second.safetensors"}
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.save_state("a", wait=True)
    assert committed(root) == {"a"}
    assert not {"first.safetensors", "second.safetensors"} & set((root / "a").files())


class _Rank:
    """One of two ranks, with what both have told."""

    world_size = 2

    def __init__(self, rank: int, told: dict[str, Any]) -> None:
        self.rank, self.told = rank, told

    def note(self, key: str, value: str) -> None:
        self.told.setdefault(f"note/{key}", {})[self.rank] = value

    def notes(self, key: str) -> dict[int, str]:
        return dict(self.told.get(f"note/{key}", {}))

    def publish(self, key: str, value: str) -> None:
        self.told[key] = value

    def published(self, key: str) -> str | None:
        found: str | None = self.told.get(key)
        return found

    def first_wins(self, key: str, value: str) -> str:
        settled: str = self.told.setdefault(f"settled/{key}", value)
        return settled


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_a_rank_has_passed_is_no_step_to_stop_at(ahead: int) -> None:
    """Ranks that nothing brings together: one is far ahead when both are told to stop."""
    told: dict[str, Any] = {}
    ranks = [Preemption(_Rank(rank, told)) for rank in range(2)]  # type: ignore[arg-type]
    steps, stopped = [10, 10], dict[int, int]()
    steps[ahead] = 100
    for one in ranks:
        one.ask()
    for _ in range(5000):
        for rank, one in enumerate(ranks):
            if rank not in stopped:
                steps[rank] += 1
                if one.due(steps[rank]):
                    stopped[rank] = steps[rank]
        if len(stopped) == 2:
            break
    assert len(stopped) == 2
    assert stopped[0] == stopped[1]


def test_a_common_step_is_found_in_every_round_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_and_signals, "_POLL", 0.0)
    told: dict[str, Any] = {}
    ranks = [schedule_and_signals.CommonStep(_Rank(rank, told), "save") for rank in range(2)]  # type: ignore[arg-type]
    draw, steps, found = random.Random(1), [0, 0], ([], [])  # type: tuple[random.Random, list[int], tuple[list[int], ...]]
    for _ in range(20_000):
        rounds = [len(each) for each in found]
        if min(rounds) == 20:
            break
        if rounds[0] == rounds[1] and not any(one.asked for one in ranks):
            ranks[draw.randrange(2)].asked = True
        rank = steps.index(min(steps)) if abs(steps[0] - steps[1]) > 2 else draw.randrange(2)
        steps[rank] += 1
        if ranks[rank].due(steps[rank]):
            found[rank].append(steps[rank])
    assert len(found[0]) == 20
    assert found[0] == found[1]


def test_as_far_ahead_as_was_needed_once_is_proposed_at_once_in_the_next_round() -> None:
    told: dict[str, Any] = {}
    main, ahead = (schedule_and_signals.CommonStep(_Rank(rank, told), "save") for rank in range(2))  # type: ignore[arg-type]
    step, found = 0, []
    for _ in range(2):
        main.asked = ahead.asked = True
        is_due = False
        while not is_due:
            step += 1
            is_due = main.due(step)
            ahead.due(step + 3)
        found.append(step)
    assert found == [8, 13]


def _agree_twice(rank: int, folder: str) -> None:
    """Two managers after each other, each with two rounds of all that its ranks agree on; then each is told to stop."""
    schedule_and_signals._POLL = 0.0
    for number in range(2):
        model, options = nn.Linear(2, 2), ckpt.RankOptions(timeout=60)
        keep = ckpt.Keep(last=1, best=1, metric="loss")
        with suppress(SystemExit), ckpt.StateManager(
            f"{folder}/{number}", model=model, ranks=options, keep=keep, memory=1,
            saving=ckpt.SaveOptions(on_nan="skip"),
        ) as manager:  # fmt: skip
            manager.resume()
            for step in range(1, 100):
                dist.barrier()
                model.bias.data.fill_(float("nan") if step in (3, 5) and rank == 1 else step)
                manager.step(metrics={"loss": 100 - step if rank == 0 else 0})
                if step in (3, 4, 5, 6):  # one rank alone has what is not finite
                    assert (manager.save_state(wait=True) is None) == (step in (3, 5))
                if step == 8 and rank == number:
                    signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        taken = manager.session.memory.statistics.taken if manager.session.memory else 0
        Path(folder, f"{number}-{rank}").write_text(f"{step} {taken >= 2}")


@pytest.mark.slow
def test_all_that_ranks_agree_on_is_agreed_on_again(tmp_path: Path) -> None:
    assert run_ranks(2, _agree_twice, str(tmp_path)) == [0, 0]
    for number in range(2):
        ends = {Path(tmp_path, f"{number}-{rank}").read_text() for rank in range(2)}
        assert len(ends) == 1
        step, memory_was_used = ends.pop().split()
        assert 8 <= int(step) < 30
        assert memory_was_used == "True"
        assert [found.step for found in ckpt.list_checkpoints(tmp_path / str(number))] == [int(step)]


def stored(storage: Storage, *names: str) -> tuple[FileRecord, ...]:
    records = []
    for name in names:
        hasher, data = BlockHasher(), tensor_file(name.encode())
        hasher.update(memoryview(data))
        storage.write(f"a/{name}", [data])
        records.append(FileRecord(name=name, path=name, size=hasher.size, blocks=hasher.digests))
    return tuple(records)


def test_a_copy_is_committed_only_when_all_hosts_have_sent_their_files(anywhere: str) -> None:
    name = anywhere.removeprefix("memory://")
    hosts, far = [MemoryStorage(f"{name}-{host}") for host in range(2)], MemoryStorage(f"{name}-far")
    common = "state.json"
    files = [stored(storage, common, f"model/{host:05d}.safetensors") for host, storage in enumerate(hosts)]
    manifest = Manifest(
        name="a", id="id", sequence=1, created=utc_now(), run="run", files=(files[0][0], files[0][1], files[1][1])
    )
    copies = [Copies(near, far, has_all_files=False, is_leader=host == 0) for host, near in enumerate(hosts)]
    for host, one in enumerate(copies):
        one.open_target([])
        assert ckpt.list_checkpoints(far) == [] or not ckpt.list_checkpoints(far)[0].committed
        one.copy(manifest)
        assert [found.committed for found in ckpt.list_checkpoints(far)] == [host == 1]
    assert ckpt.verify(f"memory://{name}-far") == {"a": []}
    for one in copies:
        one.close()


def test_a_file_that_two_ranks_wrote_with_other_bytes_is_refused_before_the_commit() -> None:
    """State is compared before anything is written; what the disk got is compared once more."""

    def report(*blocks: str) -> list[dict[str, Any]]:
        record = {"name": "model.safetensors", "path": "model.safetensors", "size": 3, "blocks": list(blocks)}
        return [{"file": record, "receipt": None}]

    (once,) = merge_reports([report("aa"), report("aa")])
    assert once.file.blocks == ("aa",)
    with pytest.raises(ckpt.RanksError, match=r"model\.safetensors on rank 1"):
        merge_reports([report("aa"), report("bb")])
