"""What a session asks the memory tier and tells it, case by case: what was damaged, what a crash cost, what is left."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.data.progress import Progress
from ckpt.errors import StorageError
from ckpt.load.load_state import Restored
from ckpt.load.select import STRAY
from ckpt.memory import session_tier
from ckpt.memory.place import TOKEN, write_token
from ckpt.memory.session_tier import build_tier, find_snapshots, has_save_hooks, memory_facts, note_load
from ckpt.memory.statistics import Statistics
from ckpt.ranks.consensus import SingleProcess
from ckpt.ranks.hosts import Hosts
from ckpt.root.catalog import History
from ckpt.save import cadence
from ckpt.storage import MemoryStorage, Storage


class Tier:
    """What a load tells the tier."""

    def __init__(self, crashed_at: int | None = None, rank: int = 0) -> None:
        self.ranks: Any = SingleProcess()
        self.ranks.rank = rank
        self.crashed_at = crashed_at
        self.statistics = Statistics()
        self.told: list[list[str] | None] = []

    def loaded(self, damaged: list[str] | None) -> None:
        self.told.append(damaged)


def restored(step: int, *, from_memory: bool, passed_over: dict[str, str] | None = None) -> Restored:
    progress = Progress(step=step)
    return Restored(
        name="a",
        url="u",
        run="r",
        progress=progress,
        passed_over=passed_over or {},
        from_memory=from_memory,
        root_step=2,
    )


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(session_tier, "say", found.append)
    return found


def test_without_a_load_from_memory_its_snapshots_are_not_used(said: list[str]) -> None:
    for loaded in (None, restored(3, from_memory=False, passed_over={"m in memory": "it is damaged."})):
        tier: Any = Tier(9)
        note_load(tier, loaded)
        assert tier.told == [None]
        assert tier.statistics.crash == {}
        assert said == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_from_memory_says_what_the_crash_cost_and_which_snapshots_were_damaged(
    said: list[str], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    tier: Any = Tier(1009, rank)
    note_load(tier, restored(1003, from_memory=True, passed_over={"m in memory": "it is damaged.", "b": "it is too."}))
    assert tier.told == [["m"]]
    assert tier.statistics.crash == {"crashed_at": 1009, "resumed_at": 1003, "root_step": 2}
    assert said == ["a crash at step 1,009 cost 6 steps instead of 1,007"][: 1 - rank]
    lost = "ckpt could not use m in memory. Training had reached step 1,009; it continues from step 1,003 and loses 6"
    assert (lost in caplog.text) == (rank == 0)
    assert memory_facts(tier)["memory"]["crashed_at"] == 1009
    assert memory_facts(tier) == {}


@pytest.mark.parametrize(
    ("passed_over", "crashed_at", "line"),
    [
        ({}, 9, None),
        ({"b": "it is damaged."}, 9, None),
        ({"m in memory": STRAY}, 9, None),
        ({"m in memory": "x", "n in memory": STRAY, "o in memory": "y"}, None, "step ?; it continues from step 4."),
        ({"m in memory": "x"}, 4, "step 4; it continues from step 4."),
        ({"m in memory": "x"}, 3, "step 3; it continues from step 4."),
        ({"m in memory": "x"}, 5, "step 5; it continues from step 4 and loses 1 steps."),
    ],
)  # fmt: skip
def test_snapshots_that_could_not_be_used_are_named_with_what_that_costs(
    passed_over: dict[str, str], crashed_at: int | None, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    note_load(Tier(crashed_at), restored(4, from_memory=False, passed_over=passed_over))  # type: ignore[arg-type]
    used = ", ".join(name for name, why in passed_over.items() if why in ("x", "y"))
    told = [f"ckpt could not use {used}. Training had reached {line}"] if line else []
    assert [record.getMessage() for record in caplog.records] == told


def test_the_tier_is_found_by_all_ranks_or_not_at_all() -> None:
    storage, hosts = MemoryStorage("found"), Hosts()
    for found in (storage, None):
        tier: Any = SimpleNamespace(find=lambda found=found: found, hosts=hosts)
        tiers = find_snapshots(tier)
        assert (
            (tiers is None) if found is None else (tiers is not None and (tiers.storage, tiers.hosts) == (found, hosts))
        )


def test_a_run_without_a_tier_leaves_the_snapshots_of_earlier_ones(caplog: pytest.LogCaptureFixture) -> None:
    for every in (None, 0):
        for rank in (0, 1):
            root, calls = MemoryStorage(f"left-{every}-{rank}"), list[Any]()
            lock = SimpleNamespace(
                call_when_taken=lambda call, if_there="", calls=calls: calls.append((call, if_there))
            )
            saver: Any = SimpleNamespace(
                root=SimpleNamespace(ranks=SimpleNamespace(rank=rank), lock=lock, storage=root, hosts=Hosts())
            )
            assert build_tier(saver, every, replicas=0) is None
            assert [there for _, there in calls] == [TOKEN] * (rank == 0)
            for call, _ in calls:
                call()
                assert "ended without close()" not in caplog.text
                write_token(root)
                call()
                assert "an earlier run of memory://left-" in caplog.text
                assert root.version(TOKEN) is None
                caplog.clear()


def test_a_tier_that_is_gone_is_told_nothing() -> None:
    class Held:
        told = 0

        def root_is_held(self) -> None:
            self.told += 1

    held = Held()
    reference: Any = weakref.ref(held)
    session_tier._tell_held(reference)
    assert held.told == 1
    del held
    session_tier._tell_held(reference)


def test_hooks_of_the_users_own_and_the_number_of_a_save() -> None:
    assert not has_save_hooks(object())
    assert not has_save_hooks(SimpleNamespace(accelerator=None))
    assert not has_save_hooks(SimpleNamespace(accelerator=SimpleNamespace(_save_model_state_pre_hook={})))
    assert has_save_hooks(SimpleNamespace(accelerator=SimpleNamespace(_save_model_state_pre_hook={1: print})))
    assert session_tier.without_this_save({"saves": 3, "x": 1}) == {"saves": 2, "x": 1}
    assert session_tier.without_this_save({"x": 1}) == {"x": 1}


def test_where_the_history_cannot_be_read_snapshots_are_taken_by_the_given_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(storage: Storage) -> Any:
        raise StorageError("it is away")

    monkeypatch.setattr(History, "of", unreadable)
    root: Any = SimpleNamespace(storage=MemoryStorage("history"))
    found = session_tier._cadence_of(root, 0.5)
    found.begin()
    assert (found.interval, found.failures.rate) == (cadence.SHORTEST_IN_MEMORY, 0.5)
    assert "does not know how often earlier processes of this run failed: it is away" in caplog.text
